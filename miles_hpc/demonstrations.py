"""What the supervised phase before the first rollout imitates (`warm_start.data`)."""

from pathlib import Path
from typing import Any

from miles_hpc import edges
from miles_hpc.config import Config
from miles_hpc.errors import ModelError

KEY = "warm_start.data"


def load(config: Config, count: int) -> list[tuple[str, str]]:
    """`count` pairs of prompt and answer, as the edge gives them.

    Raises:
        EdgeError: not importable, raised, or returned something else.
    """
    assert config.warm_start
    function = edges.load(config.warm_start.data, config.run.edges_folder, key=KEY, arguments=("seed", "count"))
    rows = edges.call(function, config.run.seed, count, key=KEY)
    if not isinstance(rows, list) or len(rows) != count or not all(map(_is_pair, rows)):
        raise edges.wrong(KEY, function, f"a list of `count` = {count} pairs of texts (prompt, answer)", rows)
    return rows


def check_end(tokenizer: Any, folder: Path) -> None:
    """Every answer ends with the end-of-sequence token.

    Raises:
        ModelError: the tokenizer has none.
    """
    if tokenizer.eos_token_id is None:
        raise ModelError(
            "the tokenizer has no end-of-sequence token, which warm_start teaches",
            where=str(folder / "tokenizer_config.json"),
            next_step="set eos_token there, or leave warm_start out",
        )


def _is_pair(row: Any) -> bool:
    return isinstance(row, tuple | list) and len(row) == 2 and all(isinstance(text, str) for text in row)
