"""The documentation says what the code does: keys, commands, links and example files."""

import json
import re
import shlex
from pathlib import Path

import pytest

from miles_hpc import config
from miles_hpc.launchers import cli

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def reference() -> str:
    """The table of all keys, from the models and their docstrings."""
    lines = []
    for name, section in sections():
        lines += [f"## `[{name}]`", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for key, field in section.model_fields.items():
            if not field.description:
                continue
            kind = re.sub(r"typing\.|<class '|'>", "", str(field.annotation).replace("|", "or"))
            kind = "edge" if "StringConstraints" in kind else kind.replace("Literal", "one of ")
            default = "**required**" if field.is_required() else f"`{json.dumps(field.default, default=lambda section: {})}`"
            lines.append(f"| `{key}` | {kind} | {default} | {field.description} |")
        lines.append("")
    return "\n".join(lines)


def sections():
    for name, field in config.Config.model_fields.items():
        model = next(m for m in (field.annotation, *getattr(field.annotation, "__args__", ())) if hasattr(m, "model_fields"))
        yield name, model
        if name == "slurm":
            yield "slurm.train` and `slurm.rollout", config.Component


def test_the_page_of_all_keys_is_current():
    page = (ROOT / "docs/configuration.md").read_text()
    assert reference().strip() in page, "write it anew: python tests/test_documentation.py"


def commands() -> list[str]:
    found = set()
    for page in PAGES:
        for text in re.findall(r"`(miles-submit [^`]+)`|^\s*(miles-submit .+)$", page.read_text(), re.M):
            command = re.split(r"#|  ", text[0] or text[1])[0].strip()
            names = re.search(r" (\w+(?:\|\w+)+)", command)
            alternatives = names[1].split("|") if names else [""]
            found |= {command.replace(names[1], name) if names else command for name in alternatives}
    return sorted(found)


@pytest.mark.parametrize("command", commands())
def test_every_command_exists(command):
    words = shlex.split(command)[1:]
    words = [*words, "--help"] if len(words) == 1 else words
    try:
        cli._parser().parse_args(words)
    except SystemExit as stop:
        assert stop.code == 0, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_test_that_is_named_exists():
    named = [pair for page in PAGES for pair in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text())]
    assert named and [name for file, name in named if f"def {name}(" not in (ROOT / file).read_text()] == []


@pytest.mark.parametrize("file", sorted((ROOT / "docs/examples").glob("*.toml")), ids=lambda file: file.name)
def test_examples_are_short_and_valid(file):
    lines = [line for line in file.read_text().splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) < 25
    config.load(file)


if __name__ == "__main__":
    page = ROOT / "docs/configuration.md"
    head = page.read_text().split("\n## ")[0] if page.exists() else "# Configuration\n"
    page.write_text(f"{head.strip()}\n\n{reference()}")
