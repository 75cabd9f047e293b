"""The private cluster itself, real daemons."""

import subprocess

import pytest

from miles_hpc.errors import SiteError
from miles_hpc.launchers import cli
from miles_hpc.launchers.cluster import Cluster, Settings, differing
from miles_hpc.launchers.daemon import processes_from

pytestmark = pytest.mark.slurm


def say(cluster: Cluster, *command: str) -> str:
    return cluster.say(*command, timeout=120)


def test_all_nodes_become_idle_and_listen_on_loopback_only(slurm, until):
    """A node that an earlier test has set down takes a while."""
    wanted = {"t0 idle", "t1 idle", "r0 idle", "r1 idle", ""}
    until(lambda: set(say(slurm, "sinfo", "-hN", "-o", "%N %t").split("\n")) == wanted)
    listening = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True)
    if listening.returncode == 0:
        ports = {
            line.split("Port=")[1].split()[0]
            for line in (slurm.home / "etc/slurm.conf").read_text().split("\n")
            if "Port=1" in line
        }
        ours = [line.split()[3] for line in listening.stdout.splitlines() if line.split()[3].rpartition(":")[2] in ports]
        assert ours and all(address.startswith("127.0.0.1:") for address in ours)


def test_munge_authenticates_with_a_key_of_its_own(slurm):
    assert "auth/munge" in say(slurm, "scontrol", "show", "config")
    assert (slurm.home / "etc/munge.key").stat().st_mode & 0o777 == 0o600


def test_a_second_up_changes_nothing_and_says_so(slurm, capsys):
    before = [daemon.pid for daemon in slurm._daemons(Settings(gpus=2))]
    assert cli.main(["cluster", "up", "--home", str(slurm.home)]) == 0
    assert "already up" in capsys.readouterr().out
    assert [daemon.pid for daemon in slurm._daemons(Settings(gpus=2))] == before
    assert differing(Settings(gpus=2), Settings()) == ["gpus is 2, not 0"]


def test_gpus_are_counted_out_to_jobs(slurm):
    seen = say(slurm, "srun", "-p", "train", "-N1", "-n2", "--gpus-per-task=1", "printenv", "CUDA_VISIBLE_DEVICES")
    assert sorted(seen.split()) == ["0", "1"]


@pytest.fixture
def other(slurm, tmp_path_factory) -> Cluster:
    """A second cluster beside the first, not started."""
    home = tmp_path_factory.mktemp("c")
    subprocess.run(["cp", "-a", slurm.prefix, home / "prefix"], check=True)
    return Cluster(home)


def test_a_second_cluster_takes_other_ports_and_leaves_nothing(slurm, other):
    devices = [other.home / f"nvidia{i}" for i in range(2)]
    for device in devices:
        device.symlink_to("/dev/null")
    assert other.up(Settings(train_nodes=1, rollout_nodes=1, gpus=1, gpu_devices=tuple(map(str, devices)), auth="none"))
    assert sorted(say(other, "srun", "-N2", "-p", "all", "printenv", "SLURMD_NODENAME").split()) == ["r0", "t0"]
    seen = say(other, "srun", "-N2", "-p", "all", "--gpus-per-node=1", "printenv", "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES")
    assert sorted(seen.split()) == ["0", "1", "r0", "t0"]  # neighbours on one machine do not share a device
    assert len(say(slurm, "sinfo", "-hN", "-p", "all").splitlines()) == 4
    assert other.down()
    assert processes_from(other.prefix) == []
    assert not other.down()


def test_up_mends_a_cluster_that_has_lost_a_daemon(other):
    settings = Settings(train_nodes=1, rollout_nodes=1)
    other.up(settings)
    other._daemon("slurmd-t0").stop()
    assert other.up(settings)
    assert say(other, "sinfo", "-hN", "-p", "all", "-o", "%N %t").split("\n") == ["r0 idle", "t0 idle", ""]
    assert not other.up(settings)
    other.down()


def test_who_interrupts_up_leaves_nothing(other, monkeypatch):
    def interrupted(self: Cluster, settings: Settings) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Cluster, "_wait_ready", interrupted)
    with pytest.raises(KeyboardInterrupt):
        other.up(Settings(train_nodes=1, rollout_nodes=1))
    assert processes_from(other.prefix) == []


def test_a_daemon_that_does_not_start_shows_its_log_and_nothing_stays(other, monkeypatch):
    write = Cluster._slurm_conf
    monkeypatch.setattr(Cluster, "_slurm_conf", lambda self, s, p: write(self, s, p).replace("cons_tres", "nonsense"))
    with pytest.raises(SiteError, match=r"did not start(.|\n)*select/nonsense"):
        other.up(Settings(train_nodes=1, rollout_nodes=1))
    assert processes_from(other.prefix) == []
