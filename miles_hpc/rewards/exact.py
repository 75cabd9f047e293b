"""Comparison with a label by words: exact match and F1."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from miles_hpc.rewards.answers import final_answer, normalised


def match(prompt: str, answer: str, label: Any, metadata: Mapping[str, Any], marker: str = "") -> float:
    """1.0 if the final answer equals the label (or one of a list of labels) after normalising, else 0.0."""
    return float(normalised(final_answer(answer, marker)) in {normalised(text) for text in _labels(label)})


def f1(prompt: str, answer: str, label: Any, metadata: Mapping[str, Any], marker: str = "") -> float:
    """F1 of the words of the final answer against the label, the best of several labels (SQuAD, arXiv 1606.05250)."""
    return max(_f1(normalised(final_answer(answer, marker)), normalised(text)) for text in _labels(label))


def _labels(label: Any) -> list[str]:
    return [str(text) for text in (label if isinstance(label, list) else [label])] or [""]


def _f1(found: str, wanted: str) -> float:
    ours, theirs = Counter(found.split()), Counter(wanted.split())
    common = sum((ours & theirs).values())
    return 2 * common / (ours.total() + theirs.total()) if common else float(found == wanted)
