"""submitit's Slurm executor for a run: it writes and submits the batch script and gives the job handle.

submitit 1.5.4 has no heterogeneous jobs, so the text is ours. Ranks do not run its pickles: `submit_run` sends a script, not a
function.
"""

import contextlib
import io

from submitit.core.utils import CommandFunction, FailedJobError
from submitit.slurm.slurm import SlurmExecutor

from miles_hpc.errors import SiteError
from miles_hpc.launchers import script
from miles_hpc.launchers.job import HetJob
from miles_hpc.launchers.spec import JobSpec
from miles_hpc.paths import RunPaths


class HetExecutor(SlurmExecutor):
    """Submits one JobSpec."""

    job_class = HetJob

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec.folder, python=spec.python)
        self.spec = spec

    @classmethod
    def name(cls) -> str:
        """By which submitit finds its plugins."""
        return "slurm"

    def submit_run(self) -> HetJob:
        """Write `job.sbatch` and submit it.

        Raises:
            SiteError: sbatch says no.
        """
        paths = RunPaths(self.spec.folder)
        if self.spec.single is not None:
            paths.rank_map.write_text(script.rank_map(self.spec), encoding="utf-8")
        paths.script.write_text(self._make_submission_file_text("", ""), encoding="utf-8")
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # CommandFunction also prints what it raises
                said = CommandFunction(self._make_submission_command(paths.script), verbose=False)()
        except FailedJobError as error:
            # not the script's file: a first submission that fails leaves nothing behind
            where = (
                "[slurm], [slurm.train] and [slurm.rollout] of the configuration: account, qos, constraint, extra, time_minutes"
            )
            hint = "miles-submit plan FILE shows the script"
            raise SiteError(f"sbatch refused the job: {error}", where=where, next_step=hint) from None
        return self.job_class(self.folder, self._get_job_id_from_submission_command(said))

    def _num_tasks(self) -> int:
        return self.spec.world_size

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return script.text(self.spec)
