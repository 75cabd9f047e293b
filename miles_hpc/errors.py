"""Every error this project raises on purpose, as one tree.

    MilesError
    ├── UserError
    │   ├── ConfigError
    │   ├── DataError
    │   ├── ModelError
    │   ├── ResumeError
    │   └── EdgeError
    ├── SiteError
    ├── Stopped
    └── Fault
        ├── WorldError
        ├── EngineDied
        ├── EngineError
        ├── SampleError
        ├── SyncError
        ├── CheckpointError
        ├── NumericsError
        ├── DeadlineExceeded
        ├── OutOfMemory
        └── Diverged

A message says what happened; `where` names rank, node, file or key; `next_step` is the command or edit that helps.
"""


class MilesError(Exception):
    """Base of all errors raised on purpose.

    Args:
        what: one sentence.
        where: rank, node, file or key concerned.
        next_step: what to type or change next; by default the `remedy` of its kind.
    """

    kind = "bug"
    exit_code = 1
    remedy = ""

    def __init__(self, what: str, *, where: str = "", next_step: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.next_step = what, where, next_step or self.remedy

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.next_step:
            lines.append(f"  next:  {self.next_step}")
        return "\n".join(lines)

    def __reduce__(self):
        return (_rebuild, (type(self), self.what, self.where, self.next_step))


def _rebuild(cls: type[MilesError], what: str, where: str, next_step: str) -> MilesError:
    return cls(what, where=where, next_step=next_step)


class UserError(MilesError):
    """The input is wrong; exit code 2, no traceback, never retried."""

    kind = "user_error"
    exit_code = 2


class ConfigError(UserError):
    """A key, a value, or numbers that do not fit together."""

    remedy = "correct the key there"


class DataError(UserError):
    """A prompt file, a column, a prompt."""

    remedy = "correct the data there, or name others with data.prompts and data.eval"


class ModelError(UserError):
    """A checkpoint folder, an architecture, a checkpoint of another model."""

    remedy = "repair the model folder, or name another with model.path"


class ResumeError(UserError):
    """A run whose checkpoints are all damaged."""


class EdgeError(UserError):
    """A user's function: not importable, wrong signature, wrong return value."""

    remedy = "correct the function there"


class SiteError(MilesError):
    """What the machine offers: no Slurm, too few nodes, a daemon that did not start; exit code 3."""

    kind = "user_error"
    exit_code = 3

    @classmethod
    def of(cls, error: OSError) -> "SiteError":
        """What the file system refused."""
        hint = "look at the space and the permissions there: df -h, ls -ld"
        return cls(f"{error.strerror or error}", where=str(error.filename or ""), next_step=hint)


class Stopped(MilesError):
    """A signal asked this rank to end; no error, the run goes on in another attempt."""

    kind = "preempted"


class Fault(MilesError):
    """Something broke while running; exit code 1, the batch side may retry."""


class WorldError(Fault):
    """The MPI world is not the one the launcher asked for."""

    kind = "user_error"


class EngineDied(Fault):
    """The engine's host process ended."""

    kind = "rank_died"


class EngineError(Fault):
    """The engine refused a request."""


class SampleError(Fault):
    """A shard that is missing, damaged or of a wrong weight version."""


class SyncError(Fault):
    """Weights that did not arrive as they were sent."""


class CheckpointError(Fault):
    """A checkpoint that cannot be written or read."""


class NumericsError(Fault):
    """Trainer and engine do not compute the same (run.numerics = "exact")."""


class DeadlineExceeded(Fault):
    """Something that could hang did not finish in time."""

    kind = "hang"


class OutOfMemory(Fault):
    """No smaller micro-batch helps, or not in this attempt."""

    kind = "out_of_memory"


class Diverged(Fault):
    """The loss or a gradient is not finite."""

    kind = "diverged"
