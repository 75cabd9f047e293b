"""Where a thread is: its innermost line in this project or in a user's function, and whom it waits for there."""

import sys
import sysconfig
from pathlib import Path
from types import FrameType

PACKAGE = Path(__file__).parent
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
ASKING = (f"{PACKAGE}/heartbeat.py", f"{PACKAGE}/position.py")
"""A thread that writes its own heartbeat is where it was before."""

RANKS, ENGINE, REWARD = "ranks", "engine", "reward"
WAITS = {
    ("world.py", ""): RANKS,
    ("rollout/engine.py", ""): ENGINE,
    ("rollout/flight.py", ""): ENGINE,
    ("rollout/conversation.py", ""): ENGINE,
    ("rollout/generate.py", "_wait"): REWARD,
}
"""By file and function ("": any) of this project: who is waited for. Engines and rewards have deadlines of their own there."""


def position_of(thread: int | None) -> tuple[str, str]:
    """`file:line function`, and `ranks`, `engine`, `reward`, or nothing for a thread that works; both empty if it has ended."""
    frame = sys._current_frames().get(thread or 0)
    while frame:
        if frame.f_code.co_filename.endswith("torch/distributed/distributed_c10d.py"):
            return _name(_own(frame)), RANKS
        if _is_own(frame):
            return _name(frame), _waits_for(frame)
        frame = frame.f_back
    return "", ""


def _own(frame: FrameType | None) -> FrameType | None:
    while frame and not _is_own(frame):
        frame = frame.f_back
    return frame


def _is_own(frame: FrameType) -> bool:
    """True outside of Python and of installed packages other than this one."""
    name = frame.f_code.co_filename
    return (name.startswith(f"{PACKAGE}/") or not name.startswith((*LIBRARIES, "<"))) and name not in ASKING


def _waits_for(frame: FrameType) -> str:
    code = frame.f_code
    if not code.co_filename.startswith(f"{PACKAGE}/"):
        return ""
    file = code.co_filename.removeprefix(f"{PACKAGE}/")
    return WAITS.get((file, code.co_name)) or WAITS.get((file, ""), "")


def _name(frame: FrameType | None) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}" if frame else ""
