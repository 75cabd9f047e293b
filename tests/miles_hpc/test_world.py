"""What a rank knows of the world without MPI."""

import socket
from typing import Any

import pytest

from miles_hpc.errors import WorldError
from miles_hpc.world import World


def world(*hosts: str) -> World:
    return World(None, None, "train", 0, (0,), (1,), hosts, lambda: None)


def test_a_host_name_that_others_cannot_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Debian, where /etc/hosts gives it 127.0.1.1: engines on other nodes would wait for a group that never forms."""
    answers: list[Any] = ["10.1.2.3", "127.0.1.1", OSError("unknown host")]

    def lookup(name: str) -> str:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(socket, "gethostbyname", lookup)
    assert world("node7", "node8").address == "10.1.2.3"
    for said in (r"node7 stands for 127\.0\.1\.1", r"node7 stands for no address \(unknown host\)"):
        with pytest.raises(WorldError, match=said) as caught:
            _ = world("node7", "node8").address
        assert "/etc/hosts" in caught.value.next_step
    assert world("node7", "node7").address == "127.0.0.1"
