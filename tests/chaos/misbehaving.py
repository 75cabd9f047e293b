"""The reward of the run under test: it fails on the prompts that `plan.json` beside it names, and notes when.

A prompt that fails does so in every attempt, and in the undisturbed run too, so that both drop the same groups.
"""

import json
import time
from pathlib import Path

HERE = Path(__file__).parent
PLAN: dict[str, str] = json.loads((HERE / "plan.json").read_text())


def reward(prompt, answer, label, metadata):
    """The length modulo 3: any policy, however young, gets different rewards for it."""
    if prompt in PLAN:
        with (HERE / "misbehaved.jsonl").open("a") as file:
            file.write(json.dumps({"event": "misbehaved", "what": PLAN[prompt], "time": time.time()}) + "\n")
        return FAULTS[PLAN[prompt]](answer)
    return float(len(answer) % 3)


def _raise(answer):
    raise ValueError("on purpose")


def _exhaust(answer):
    return float(len(bytearray(1 << 60)))  # a MemoryError of the interpreter's own


def _sleep(answer):
    time.sleep(3)
    return float(len(answer) % 3)


FAULTS = {"raise": _raise, "nan": lambda answer: float("nan"), "memory": _exhaust, "sleep": _sleep}
