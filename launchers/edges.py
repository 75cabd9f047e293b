"""`miles-submit edges`: where functions of a user's own attach, with key, signature, default and meaning."""

import inspect
import textwrap

from miles_hpc.protocols import EDGES, Edge

WIDTH = 110


def text() -> str:
    """The whole table."""
    head = "An edge is a function named in the TOML file as module:function, from an installed package or a file beside it."
    return "\n\n".join([textwrap.fill(head, WIDTH), *(_row(key, edge) for key, edge in EDGES.items())])


def _row(key: str, edge: Edge) -> str:
    meaning = " ".join((inspect.getdoc(edge.protocol) or "").split())
    lines = [key, f"  {edge.signature}", f"  default: {edge.default}"]
    if edge.foreign:
        lines.append(f"  of Miles and slime: ({', '.join(edge.foreign)})")
    return "\n".join([*lines, textwrap.indent(textwrap.fill(meaning, WIDTH - 2), "  ")])
