"""The end of a rank that cannot say why it ends."""

import pytest

from miles_hpc import main as rank
from miles_hpc import signals, verdicts


def test_a_rank_ends_the_world_even_where_no_verdict_can_be_written(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(signals, "install", lambda: None)
    monkeypatch.setattr(rank, "_end", ended.append)
    monkeypatch.setattr(verdicts, "write", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        rank.main(["--role", "train", "--run", str(tmp_path), "--attempt", "1", "--world-size", "2"])
    assert ended == [[]]
