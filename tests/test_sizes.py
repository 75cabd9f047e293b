"""A function fits on a screen, a file is read in one sitting."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FUNCTION_LINES, FILE_LINES = 60, 400
FOLDERS = ("miles_hpc", "launchers", "kernels", "slurm", "tests")
FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_sizes(file):
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= FILE_LINES
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    too_long = {f.name: f.end_lineno - f.lineno + 1 for f in functions if f.end_lineno - f.lineno + 1 > FUNCTION_LINES}
    assert not too_long
