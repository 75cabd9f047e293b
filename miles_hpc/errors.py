"""Every error this project raises on purpose, as one tree.

    MilesError
    ├── UserError            the input is wrong; exit code 2, no traceback, never retried
    │   ├── ConfigError      a key, a value, or numbers that do not fit together
    │   ├── DataError        a prompt file, a column, a prompt
    │   ├── ModelError       a checkpoint folder, an architecture, a checkpoint of another model
    │   ├── ResumeError      a run whose checkpoints are all damaged
    │   └── EdgeError        a user's function: not importable, wrong signature, wrong return value
    ├── SiteError            what the machine offers: no Slurm, too few nodes, a daemon that did not start; exit code 3
    ├── Stopped              a signal asked this rank to end; no error, the run goes on in another attempt
    └── Fault                something broke while running; exit code 1, the batch side may retry
        ├── WorldError       the MPI world is not the one the launcher asked for
        ├── EngineDied       the engine's host process ended
        ├── EngineError      the engine refused a request
        ├── SampleError      a shard that is missing, damaged or of a wrong weight version
        ├── SyncError        weights that did not arrive as they were sent
        ├── CheckpointError  a checkpoint that cannot be written or read
        ├── NumericsError    trainer and engine do not compute the same (run.numerics = "exact")
        ├── DeadlineExceeded something that could hang did not finish in time
        ├── OutOfMemory      no smaller micro-batch helps, or not in this attempt
        └── Diverged         the loss or a gradient is not finite

A message says what happened; `where` names rank, node, file or key; `next_step` is the command or edit that helps.
"""


class MilesError(Exception):
    """Base of all errors raised on purpose.

    Args:
        what: one sentence.
        where: rank, node, file or key concerned.
        next_step: what to type or change next.
    """

    kind = "bug"
    exit_code = 1

    def __init__(self, what: str, *, where: str = "", next_step: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.next_step = what, where, next_step

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
    kind = "user_error"
    exit_code = 2


class ConfigError(UserError):
    pass


class DataError(UserError):
    pass


class ModelError(UserError):
    pass


class ResumeError(UserError):
    pass


class EdgeError(UserError):
    pass


class SiteError(MilesError):
    kind = "user_error"
    exit_code = 3


class Stopped(MilesError):
    kind = "preempted"


class Fault(MilesError):
    kind = "bug"


class WorldError(Fault):
    kind = "user_error"


class EngineDied(Fault):
    kind = "rank_died"


class EngineError(Fault):
    pass


class SampleError(Fault):
    pass


class SyncError(Fault):
    pass


class CheckpointError(Fault):
    pass


class NumericsError(Fault):
    pass


class DeadlineExceeded(Fault):
    kind = "hang"


class OutOfMemory(Fault):
    kind = "out_of_memory"


class Diverged(Fault):
    kind = "diverged"
