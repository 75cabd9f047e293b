"""Finding the final answer in a text, shared by the rewards."""

import re

BOXED = "\\boxed{"


def final_answer(text: str, marker: str = "") -> str:
    r"""What follows the last `marker`; without one the content of the last `\boxed{...}`, else the whole text, stripped."""
    if marker:
        return text.rpartition(marker)[2].strip() if marker in text else ""
    return boxed(text) if BOXED in text else text.strip()


def boxed(text: str) -> str:
    r"""Content of the last `\boxed{...}` with balanced braces; empty if there is none or it is not closed."""
    start = text.rfind(BOXED) + len(BOXED)
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[start:place].strip()
    return ""


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and repeated spaces, as SQuAD's evaluation script does (arXiv 1606.05250)."""
    plain = re.sub(r"[^\w\s]|_", "", text.lower())
    return " ".join(word for word in plain.split() if word not in ("a", "an", "the"))
