"""The handle of a submitted run: submitit's job, made to see a heterogeneous job as one and to work without accounting."""

import re
import shlex
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

from miles_hpc.errors import Fault
from miles_hpc.launchers import verdict
from miles_hpc.launchers.controller import parse_job
from miles_hpc.launchers.verdict import Verdict
from miles_hpc.paths import RunPaths


class HetInfoWatcher(SlurmInfoWatcher):
    """States from scontrol: sacct needs a database and lists components as `5+0`, `5+1`, under which nobody finds job 5."""

    def _make_command(self) -> list[str] | None:
        wanted = sorted(self._registered - self._finished)
        loop = 'for id; do echo "id $id"; scontrol -o show job "$id" 2>/dev/null; done; true'
        return ["bash", "-c", loop, "watcher", *wanted] if wanted else None

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        """Output of the command -> what submitit knows of each job, by its id."""
        text = string if isinstance(string, str) else string.decode()
        found = {}
        _, *blocks = re.split(r"^id (\S+)$", text, flags=re.MULTILINE)
        for job_id, lines in zip(blocks[::2], blocks[1::2], strict=True):
            state = parse_job(lines)
            found[job_id] = {"JobID": job_id, "State": state.state, "NodeList": ",".join(state.nodes), "Reason": state.reason}
        return found


class HetJob(SlurmJob[Verdict]):
    """One run in Slurm. Its result is the verdict of its newest attempt; ranks write no pickles."""

    watcher = HetInfoWatcher(delay_s=10)

    def __init__(self, folder: Path | str, job_id: str, tasks: Any = (0,)) -> None:
        super().__init__(folder, job_id, tasks=(0,))  # one handle for the whole world, not one per rank

    def done(self, force_check: bool = False) -> bool:
        """True once Slurm has ended the job; a requeue is not an end."""
        return self.watcher.is_done(self.job_id, mode="force" if force_check else "standard")

    def results(self) -> list[Verdict]:
        """Wait for the end; the verdict.

        Raises:
            Fault: the job ended before its first attempt had begun.
        """
        self.wait()
        if (found := verdict.newest(RunPaths(self.paths.folder))) is None:
            folder, what = self.paths.folder, f"job {self.job_id} ended ({self.state}) without a verdict"
            raise Fault(what, where=str(folder), next_step=f"miles-submit logs {shlex.quote(str(folder))} --role job")
        return [found]
