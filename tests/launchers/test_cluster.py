import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from miles_hpc.errors import SiteError
from miles_hpc.launchers import cluster, packages
from miles_hpc.launchers.cluster import Cluster, Settings
from miles_hpc.launchers.daemon import Daemon, end, runs_from


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch) -> Cluster:
    """A cluster whose packages are taken for unpacked."""
    monkeypatch.setattr(packages, "libraries", lambda prefix: prefix / "usr/lib/x86_64-linux-gnu")
    return Cluster(tmp_path)


def test_slurm_conf_names_every_node_and_binds_to_loopback(prefix):
    text = prefix._slurm_conf(Settings(train_nodes=1, rollout_nodes=2, gpus=4), range(17000, 17005))
    assert "NodeName=t0 NodeHostname=localhost NodeAddr=127.0.0.1 Port=17002 CPUs=8 RealMemory=8000 Gres=gpu:4" in text
    assert "PartitionName=rollout Nodes=r0,r1" in text
    assert "NoCtldInAddrAny,NoInAddrAny" in text
    assert f"AuthInfo=socket={prefix.home}/run/munge.sock,cred_expire=5" in text


def test_auth_none_only_on_request(prefix):
    assert "AuthType=auth/munge" in prefix._slurm_conf(Settings(), range(17000, 17006))
    assert "AuthType=auth/none" in prefix._slurm_conf(Settings(auth="none"), range(17000, 17006))


def test_real_devices_are_dealt_out_to_the_nodes(prefix):
    settings = Settings(train_nodes=1, rollout_nodes=1, gpus=2, gpu_devices=tuple(f"/dev/nvidia{i}" for i in range(4)))
    assert prefix._gres_conf(settings).splitlines()[1:] == [
        "NodeName=t0 Name=gpu File=/dev/nvidia0",
        "NodeName=t0 Name=gpu File=/dev/nvidia1",
        "NodeName=r0 Name=gpu File=/dev/nvidia2",
        "NodeName=r0 Name=gpu File=/dev/nvidia3",
    ]


def test_ports_in_use_are_passed_over(monkeypatch):
    monkeypatch.setattr(cluster, "LAST_PORT", 65000)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(cluster, "FIRST_PORT", port - 2)
        found = cluster._free_ports(4)
        assert port not in found and len(found) == 4


def test_clusters_start_one_after_the_other(tmp_path, monkeypatch):
    """Else both find the same ports free."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with cluster._alone():
        (file,) = tmp_path.iterdir()
        with file.open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_daemon_that_says_no_shows_the_end_of_its_log(tmp_path):
    log = tmp_path / "x.log"
    log.write_text("all was well\nerror: no such plugin\n")
    daemon = Daemon("slurmd-t0", ("sh", "-c", "echo cannot >&2; exit 1"), tmp_path / "x.pid", log, tmp_path)
    with pytest.raises(SiteError, match=r"slurmd-t0 did not start(.|\n)*cannot(.|\n)*no such plugin"):
        daemon.start(dict(os.environ))


def test_a_strangers_process_under_our_pid_is_left_alone(tmp_path):
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (tmp_path / "x.pid").write_text(str(stranger.pid))
    daemon = Daemon("slurmd-t0", ("true",), tmp_path / "x.pid", tmp_path / "x.log", tmp_path / "prefix")
    assert daemon.pid is None
    daemon.stop()
    assert stranger.poll() is None
    assert runs_from(stranger.pid, Path(sys.executable).resolve().parent)
    end(stranger.pid, Path(sys.executable).resolve().parent, grace_seconds=60)
    assert stranger.wait() == -15


def test_no_debian_points_to_local(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SiteError, match="apt-get not found") as raised:
        packages.fetch(tmp_path)
    assert "--local" in raised.value.next_step


def test_unusable_package_lists_are_replaced_by_private_ones(tmp_path, monkeypatch):
    calls = []

    def apt(folder, arguments):
        calls.append(arguments)
        return subprocess.CompletedProcess(arguments, 0 if "-o" in arguments else 100, "", "E: Unable to locate package")

    monkeypatch.setattr(packages, "_apt", apt)
    packages._download(tmp_path, tmp_path, ["slurmd"])
    assert [call[-1] for call in calls] == ["slurmd", "update", "slurmd"]
    assert f"Dir::State::lists={tmp_path}/apt/lists" in calls[1]


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="no Debian")
def test_a_package_that_cannot_be_unpacked_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "_download", lambda home, folder, names: (folder / "x.deb").write_text("cut off"))
    with pytest.raises(SiteError, match=r"dpkg-deb failed: .*x\.deb") as raised:
        packages._unpack(tmp_path, ["x"])
    assert str(tmp_path / "prefix") in raised.value.where and "--local" in raised.value.next_step


def test_no_packages_to_be_had_points_to_local(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 100, "", "E: Unable to locate package slurmd")
    monkeypatch.setattr(packages, "_apt", lambda folder, arguments: failed)
    with pytest.raises(SiteError, match="Unable to locate package slurmd") as raised:
        packages._download(tmp_path, tmp_path, ["slurmd"])
    assert "--local" in raised.value.next_step
