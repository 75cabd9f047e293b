"""A picture of a run: reward per step with the held-out evaluations, and where the time went.

`python -m miles_hpc.launchers.plot RUN` writes `RUN/report.png` and prints its path.
"""

import sys
from pathlib import Path

from miles_hpc.errors import MilesError, UserError
from miles_hpc.launchers import history
from miles_hpc.launchers.history import History
from miles_hpc.metrics import PHASES
from miles_hpc.paths import RunPaths

FILE = "report.png"


def plot(folder: Path) -> Path:
    """Draw the run in `folder`; returns the PNG's path.

    Raises:
        UserError: matplotlib is not installed, or no step is complete.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UserError(
            "matplotlib is not installed", where=sys.executable, next_step="make install, or pip install matplotlib"
        ) from None
    past = history.read(RunPaths(folder))
    if not past.steps:
        raise UserError(
            "no step is complete, so there is nothing to draw", where=str(folder), next_step="miles-submit status RUN"
        )
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    top, bottom = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    _rewards(top, past)
    _phases(bottom, past)
    top.set_title(folder.resolve().name)
    file = folder / FILE
    figure.savefig(file, dpi=120)
    return file


def _rewards(axes, past: History) -> None:
    rewards = {step: e["metrics"]["reward/mean"] for step, e in past.steps.items() if "reward/mean" in e["metrics"]}
    axes.plot(list(rewards), list(rewards.values()), marker=".", label="mean reward, training prompts")
    if past.evals:
        # Weights v are those before step v.
        versions, values = list(past.evals), [e["accuracy"] for e in past.evals.values()]
        axes.plot(versions, values, "o--", color="tab:red", label="held-out prompts, greedy")
    axes.set_ylabel("reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")


def _phases(axes, past: History) -> None:
    steps = list(past.steps)
    floor = [0.0] * len(steps)
    for phase in PHASES:
        seconds = [e["phase_seconds"].get(phase, 0.0) for e in past.steps.values()]
        axes.bar(steps, seconds, bottom=floor, width=0.9, label=phase)
        floor = [a + b for a, b in zip(floor, seconds, strict=True)]
    axes.set_xlabel("step")
    axes.set_ylabel("seconds per step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def main(arguments: list[str]) -> int:
    """`RUN`."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(plot(Path(arguments[0])))
    except MilesError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
