"""A private Slurm of virtual nodes on this machine: `miles-submit cluster up|down|status|env`.

Real slurmctld and slurmds, as an ordinary user, everything below one folder (`.cluster`), loopback only. For laptops,
tests and a single GPU server; where a Slurm exists that one is used and this file is not.
"""

import contextlib
import fcntl
import itertools
import json
import os
import pwd
import re
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from string import Template

import miles_hpc.slurm
from miles_hpc.errors import SiteError
from miles_hpc.launchers import packages
from miles_hpc.launchers.daemon import Daemon, end, processes_from

FIRST_PORT, LAST_PORT = 16800, 32000  # below Linux's range of ephemeral ports
# A unix socket's path holds 107 bytes and slurmstepd puts one at <home>/spool/<node>/<node>_<job>.<step>.
LONGEST_HOME = 70
DEVICES = Template("""\
#!/bin/bash
case $$SLURMD_NODENAME in
$numbers
    *) exit ;;
esac
for i in $${CUDA_VISIBLE_DEVICES//,/ }; do seen+=,$${own[i]}; done
echo "export CUDA_VISIBLE_DEVICES=$${seen:1}"
""")
READY_SECONDS = 120.0
DEAD_SECONDS = 5.0
"""How long a daemon may be without a process before it has not started; it needs a moment to write down its own."""
FOLDERS = ("etc", "run", "log", "state", "spool", "tmp")


@dataclass(frozen=True)
class Settings:
    """What a cluster is made of."""

    train_nodes: int = 2
    rollout_nodes: int = 2
    cpus: int = 8
    """Cores that each node declares; may be more than the machine has."""
    memory_mb: int = 8000
    gpus: int = 0
    """GPUs per node."""
    gpu_devices: tuple[str, ...] = ()
    """Device files dealt out to the nodes in turn; empty: links to /dev/null, which Slurm counts like GPUs."""
    auth: str = "munge"
    """`munge` with a key of its own, or `none` (any local user may act as anyone towards this cluster)."""

    @property
    def nodes(self) -> list[str]:
        """Names of the virtual nodes."""
        return [f"t{i}" for i in range(self.train_nodes)] + [f"r{i}" for i in range(self.rollout_nodes)]


class Cluster:
    """The cluster below one folder, running or not."""

    def __init__(self, home: Path) -> None:
        self.home = home.resolve()
        self.prefix = self.home / "prefix"

    @property
    def running(self) -> bool:
        """Its controller runs."""
        return self._daemon("slurmctld").pid is not None

    @property
    def settings(self) -> Settings | None:
        """Settings of the last `up`, None before the first."""
        file = self.home / "etc/settings.json"
        if not file.exists():
            return None
        values = json.loads(file.read_text())
        values["gpu_devices"] = tuple(values["gpu_devices"])
        return Settings(**values)

    def exports(self) -> dict[str, str]:
        """Environment variables that make a process use this cluster."""
        programs = f"{self.prefix}/usr/bin:{self.prefix}/usr/sbin"
        path = os.environ.get("PATH", os.defpath)
        return {
            "SLURM_CONF": f"{self.home}/etc/slurm.conf",
            "PATH": path if path.startswith(programs) else f"{programs}:{path}",
        }

    def up(self, settings: Settings) -> bool:
        """Start what does not run; False where all of it already does.

        Raises:
            SiteError: no packages, or a daemon that does not start (with the tail of its log).
        """
        pids = [daemon.pid for daemon in self._daemons(self.settings or settings)]
        if all(pids):
            return False
        if any(pids):  # half of it died: new ports and a new configuration must not meet old daemons
            self.down()
        self._check()
        packages.fetch(self.home)
        with _alone(), contextlib.ExitStack() as undo:
            undo.callback(self.down)
            self._configure(settings)
            for daemon in self._daemons(settings):
                daemon.start(self._environment())
            self._wait_ready(settings)
            undo.pop_all()
        return True

    def down(self, purge: bool = False) -> bool:
        """Cancel the jobs, stop the daemons, leave no process; False where nothing ran. `purge` also removes state and logs."""
        ran = bool(processes_from(self.prefix))
        if self.running:
            self._cancel_all()
        for daemon in self._daemons(self.settings or Settings()):
            daemon.stop()
        for pid in processes_from(self.prefix):  # step daemons whose slurmd is gone
            end(pid, self.prefix, grace_seconds=2)
        if purge:
            for name in FOLDERS:
                subprocess.run(["rm", "-rf", self.home / name], check=True)
        return ran

    def say(self, *command: str, timeout: float = 10.0) -> str:
        """Output of one of Slurm's programs, empty where it does not answer."""
        try:
            result = subprocess.run(command, env=self._environment(), capture_output=True, text=True, timeout=timeout)
        except (subprocess.TimeoutExpired, FileNotFoundError):
            return ""
        return result.stdout

    def status(self) -> str:
        """Daemons with their memory, nodes and jobs."""
        daemons = [d for d in self._daemons(self.settings or Settings()) if d.pid]
        if not daemons:
            return f"no cluster runs in {self.home}\n"
        lines = [f"{d.name:12} pid {d.pid:<8} {d.memory_mb:6.1f} MB" for d in daemons]
        return "\n".join([*lines, "", self.say("sinfo", "-N", "-o", "%N %P %T %c %m %G"), self.say("squeue")])

    def _environment(self) -> dict[str, str]:
        # slurmstepd inherits the daemon's environment: an older MPI or Slurm session must not leak into jobs
        outside = {k: v for k, v in os.environ.items() if not re.match(r"(SLURM|SBATCH|SRUN|PMI|MPI|LD_LIBRARY_PATH)", k)}
        return {**outside, **self.exports()}

    def _check(self) -> None:
        allowed = re.fullmatch(r"[A-Za-z0-9/._+-]+", str(self.home))
        if not allowed or len(str(self.home)) > LONGEST_HOME:
            raise SiteError(
                f"Slurm takes no spaces in its paths and at most {LONGEST_HOME} characters here",
                where=str(self.home),
                next_step="miles-submit cluster up --home FOLDER with a shorter, plain path",
            )

    def _configure(self, settings: Settings) -> None:
        for name in (*FOLDERS, *(f"{kind}/{node}" for kind in ("spool", "tmp") for node in settings.nodes)):
            (self.home / name).mkdir(parents=True, exist_ok=True)
        for name in FOLDERS:
            (self.home / name).chmod(0o755)
        etc = self.home / "etc"
        (etc / "slurm.conf").write_text(self._slurm_conf(settings, _free_ports(len(settings.nodes) + 2)))
        (etc / "gres.conf").write_text(self._gres_conf(settings))
        (etc / "devices.sh").write_text(self._devices(settings))
        (etc / "devices.sh").chmod(0o755)
        # Without it slurmd ends at once where only cgroup v2 is mounted and no systemd runs.
        (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\n")
        (etc / "settings.json").write_text(json.dumps(asdict(settings)))
        key = etc / "munge.key"
        if settings.auth == "munge" and not key.exists():
            key.touch(mode=0o600)
            key.write_bytes(secrets.token_bytes(1024))

    def _slurm_conf(self, settings: Settings, ports: range) -> str:
        gres = f" Gres=gpu:{settings.gpus}" if settings.gpus else ""
        nodes = [
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} "
            f"CPUs={settings.cpus} RealMemory={settings.memory_mb}{gres}"
            for node, port in zip(settings.nodes, ports[2:], strict=True)
        ]
        template = Template((Path(miles_hpc.slurm.__file__).parent / "slurm.conf.in").read_text())
        return template.substitute(
            home=self.home,
            user=_user(),
            auth=settings.auth,
            auth_info=f"socket={self.home}/run/munge.sock," if settings.auth == "munge" else "",
            plugins=packages.libraries(self.prefix) / "slurm-wlm",
            first_job_id=self._first_job_id(),
            controller_port=ports[0],
            node_port=ports[1],
            nodes="\n".join(nodes),
            all_nodes=",".join(settings.nodes),
            train_nodes=",".join(n for n in settings.nodes if n.startswith("t")),
            rollout_nodes=",".join(n for n in settings.nodes if n.startswith("r")),
        )

    def _first_job_id(self) -> str:
        """Drawn once for each new state folder."""
        file = self.home / "state/first_job_id"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(str(1000 * (1 + secrets.randbelow(9999))))
        return file.read_text()

    def _gres_conf(self, settings: Settings) -> str:
        lines = ["AutoDetect=off"]
        for i in range(settings.gpus if not settings.gpu_devices else 0):
            link = self.home / f"run/gpu{i}"
            link.unlink(missing_ok=True)
            link.symlink_to("/dev/null")  # Slurm wants a device file and takes its last digits as the index
        lines += [f"NodeName={node} Name=gpu File={file}" for node, files in self._dealt(settings).items() for file in files]
        return "\n".join(lines) + "\n"

    def _dealt(self, settings: Settings) -> dict[str, list[str]]:
        """Device files of each node."""
        files = itertools.cycle(settings.gpu_devices or [f"{self.home}/run/gpu{i}" for i in range(settings.gpus)])
        return {node: list(itertools.islice(files, settings.gpus)) for node in settings.nodes}

    def _devices(self, settings: Settings) -> str:
        """Slurm's TaskProlog. It counts the GPUs of every node from 0, as on a machine of its own; here they are neighbours."""
        dealt = self._dealt(settings).items() if settings.gpu_devices else ()
        numbers = [
            f"    {node}) own=({' '.join(re.findall(r'[0-9]+$', file)[0] for file in files)}) ;;" for node, files in dealt
        ]
        return DEVICES.substitute(numbers="\n".join(numbers))

    def _daemons(self, settings: Settings) -> list[Daemon]:
        names = ["munged"] if settings.auth == "munge" else []
        return [self._daemon(name) for name in [*names, "slurmctld", *(f"slurmd-{node}" for node in settings.nodes)]]

    def _daemon(self, name: str) -> Daemon:
        program, _, node = name.partition("-")
        sbin, run, log = self.prefix / "usr/sbin", self.home / "run", self.home / "log"
        # the compiled-in place of slurmstepd does not exist here
        arguments = {"slurmd": ["-N", node, "-d", f"{sbin}/slurmstepd"], "munged": self._munge_arguments()}.get(program, [])
        return Daemon(name, (f"{sbin}/{program}", *arguments), run / f"{name}.pid", log / f"{name}.log", self.prefix)

    def _munge_arguments(self) -> list[str]:
        # --force: munged mistrusts folders that others may write, such as a home below /tmp
        run = self.home / "run"
        files = {
            "key-file": self.home / "etc/munge.key",
            "socket": run / "munge.sock",
            "pid-file": run / "munged.pid",
            "log-file": self.home / "log/munged.log",
            "seed-file": self.home / "state/munge.seed",
        }
        return ["--force", "--num-threads=2", *(f"--{key}={file}" for key, file in files.items())]

    def _wait_ready(self, settings: Settings) -> None:
        daemons, alive = self._daemons(settings), time.monotonic()
        deadline = alive + READY_SECONDS
        while True:
            ready = self.say("sinfo", "--noheader", "--Node", "--states=idle,mix,alloc", "--format=%N", timeout=3)
            if len(set(ready.split())) == len(settings.nodes):
                return
            now = time.monotonic()
            alive = now if all(daemon.pid for daemon in daemons) else alive
            if now > min(deadline, alive + DEAD_SECONDS):
                raise next((d for d in daemons if not d.pid), daemons[-1]).failure()
            time.sleep(0.05)

    def _cancel_all(self) -> None:
        self.say("scancel", "--quiet", f"--user={_user()}")
        deadline = time.monotonic() + 20
        while self.say("squeue", "--noheader") and time.monotonic() < deadline:
            time.sleep(0.05)


def _user() -> str:
    """Name of the user, not what LOGNAME says; the number where there is no name, as in some containers."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """No other cluster of this user starts meanwhile: it would find the same ports free until the daemons have them."""
    with (Path(tempfile.gettempdir()) / f"miles-cluster-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _free_ports(count: int) -> range:
    """The first free run of ports on the loopback address.

    Raises:
        SiteError: none is free.
    """
    for first in range(FIRST_PORT, LAST_PORT - count, 40 * (1 + count // 40)):
        if all(_is_free(port) for port in range(first, first + count)):
            return range(first, first + count)
    hint = "end clusters that nobody needs: miles-submit cluster down --home FOLDER"
    raise SiteError(f"no {count} free ports between {FIRST_PORT} and {LAST_PORT}", where=socket.gethostname(), next_step=hint)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def differing(now: Settings, wanted: Settings) -> list[str]:
    """Settings of a running cluster that are not the wanted ones, as text."""
    pairs = ((f.name, getattr(now, f.name), getattr(wanted, f.name)) for f in fields(Settings))
    return [f"{name} is {a}, not {b}" for name, a, b in pairs if a != b]
