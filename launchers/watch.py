"""`--watch`: one live line until the run ends, then its report. Ctrl-C leaves the job running."""

import shlex
import sys
import time
from pathlib import Path

from miles_hpc import config as configuration
from miles_hpc.launchers import evidence, verdict
from miles_hpc.launchers.progress import progress_of
from miles_hpc.launchers.state import Follower, RunState
from miles_hpc.paths import RunPaths

POLL_SECONDS = 0.5


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
    """Show progress until the end: a live line on a terminal, a line per step elsewhere."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    steps = configuration.read(RunPaths(folder).config).run.steps
    console = Console()
    follower, shown = Follower(folder), ""
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            now = follower.look()
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
                return now
            time.sleep(POLL_SECONDS)


def _doing(folder: Path, now: RunState) -> str:
    """State of the job and what the first rank of each role is doing."""
    beats = evidence.heartbeats(folder, now.attempt)
    firsts = {beat.role: beat for beat in reversed(beats)}
    doing = ", ".join(f"{role}: {firsts[role].phase}" for role in ("train", "rollout") if role in firsts)
    return f"[{now.word}{f'; {doing}' if doing else ''}]"
