"""`--watch`: one live line until the run ends, then its report. Ctrl-C leaves the job running."""

import shlex
import sys
import time
from pathlib import Path

from miles_hpc import config as configuration
from miles_hpc.launchers import evidence, submission, verdict
from miles_hpc.launchers.progress import progress_of
from miles_hpc.launchers.state import Follower, RunState
from miles_hpc.paths import RunPaths

POLL_SECONDS = 0.5
SAY_AGAIN_SECONDS = 600.0
"""Between two lines that Slurm is still away."""


def watch(folder: Path, name: str) -> int:
    """Follow a run to its end; its exit code (0 done, 2 the user's error, 1 anything else)."""
    try:
        now = _follow(folder)
    except KeyboardInterrupt:
        name = shlex.quote(name)
        print(f"\nthe run goes on; look at it with: miles-submit status {name}    end it with: miles-submit cancel {name}")
        return 0
    if now.word == "done":
        from miles_hpc.launchers import report

        return report.report(folder, False) or now.exit_code
    said = verdict.sentence(now.verdict) if now.verdict else f"the job ended: {now.word}"
    print(f"miles-submit: {said}", file=sys.stderr)
    if not now.verdict:
        place = shlex.quote(name)
        print(f"  next:  miles-submit logs {place} --role job    (is the disk full? df -h {place})", file=sys.stderr)
    if now.verdict and now.verdict.where:
        print(f"  where: {now.verdict.where}", file=sys.stderr)
    if now.verdict and now.verdict.next:
        print(f"  next:  {now.verdict.next}", file=sys.stderr)
    return now.exit_code


def _follow(folder: Path) -> RunState:
    """Show progress until the end: a live line on a terminal, a line per step elsewhere. Submits again what has to go on."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    steps = configuration.read(RunPaths(folder).config).run.steps
    console = Console()
    follower, silence, shown = Follower(folder), Silence(folder), ""
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            now = follower.look()
            silence.look(now)
            progress = progress_of(folder, steps)
            line, doing = progress.line(), _doing(folder, now)
            if console.is_terminal:
                live.update(Text(f"{line}  {doing}", overflow="ellipsis", no_wrap=True), refresh=True)
                line = shown
            elif not progress.done:  # the long way to the first step: what the ranks are at
                line = f"{line}  {doing}"
            if line != shown:
                print(line, flush=True)
                shown = line
            if now.ended:
                if not submission.go_on(folder):
                    return now
                follower = Follower(folder)
                print("the job could not go back to the queue by itself; submitted again", file=sys.stderr)
            time.sleep(POLL_SECONDS)


class Silence:
    """Says it when Slurm stops answering, every ten minutes as long as it does not, and when it answers again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.since, self.due = folder, 0.0, 0.0

    def look(self, now: RunState) -> None:
        """Print to stderr what has changed."""
        if now.slurm.state != "NO_ANSWER":
            if self.since:
                print("Slurm answers again", file=sys.stderr)
            self.since = self.due = 0.0
            return
        self.since = self.since or time.time()
        if time.time() >= self.due:
            self.due = time.time() + SAY_AGAIN_SECONDS
            print(f"Slurm has not answered for {time.time() - self.since:.0f} s{self._ranks(now)}; waiting", file=sys.stderr)

    def _ranks(self, now: RunState) -> str:
        """How the ranks are, which need no controller."""
        beats = evidence.heartbeats(self.folder, now.attempt)
        newest = max((beat.time for beat in beats), default=0.0)
        return f"; the ranks last wrote {time.time() - newest:.0f} s ago" if newest else ""


def _doing(folder: Path, now: RunState) -> str:
    """State of the job and what the first rank of each role is doing."""
    beats = evidence.heartbeats(folder, now.attempt)
    firsts = {beat.role: beat for beat in reversed(beats)}
    doing = ", ".join(f"{role}: {firsts[role].phase}" for role in ("train", "rollout") if role in firsts)
    return f"[{now.word}{f'; {doing}' if doing else ''}]"
