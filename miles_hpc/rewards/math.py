"""Mathematical equality by math-verify: `1/2`, `0.5` and `\\frac{1}{2}` are the same."""

from collections.abc import Mapping
from typing import Any


def score(prompt: str, answer: str, label: Any, metadata: Mapping[str, Any]) -> float:
    r"""1.0 if the answer's last expression equals the label, else 0.0.

    The expression is looked for in `\boxed{}`, in `$...$`, and as a plain number. math-verify's own time-outs use a
    signal, which only the main thread may have; rewards run in threads, so they are off: `rollout.timeout_seconds` is it.
    """
    from math_verify import parse, verify

    text = str(label)
    gold = parse(text if "$" in text or "\\boxed" in text else f"${text}$", parsing_timeout=None)
    found = parse(answer, parsing_timeout=None)
    return float(bool(gold) and bool(found) and verify(gold, found, timeout_seconds=None))
