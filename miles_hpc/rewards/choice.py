"""Multiple choice."""

import re
from collections.abc import Mapping
from typing import Any

from miles_hpc.rewards.answers import BOXED, boxed

# A small letter before a word is an article: "the answer is a number".
_SAID = re.compile(r"(?i:answer|choice|option)\s*(?i:is|:)?\s*[\(\[\*]*([A-Z]\b|[a-z]\b(?!\s+\w))")
_ALONE = re.compile(r"\b([A-Z])\b")


def letter(prompt: str, answer: str, label: Any, metadata: Mapping[str, Any]) -> float:
    r"""1.0 if the chosen letter is the label (a letter, or an index from 0), else 0.0.

    The choice is the letter in the last `\boxed{}`, else after the last "answer is" or "answer:", else the last single letter.
    """
    wanted = chr(ord("A") + label) if isinstance(label, int) else str(label).strip().upper()
    return float(chosen(answer) == wanted)


def chosen(answer: str) -> str:
    """The letter an answer settles on; empty if there is none."""
    text = boxed(answer) if BOXED in answer else answer
    found = [said.upper() for said in _SAID.findall(text)] or _ALONE.findall(text)
    return found[-1] if found else ""
