"""What a training rank lets through of what is said in it."""

import logging
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from miles_hpc.train import build


@pytest.fixture
def quiet() -> Any:
    levels = {name: logging.getLogger(name).level for name in build.CHATTY}
    with warnings.catch_warnings():
        warnings.resetwarnings()
        build._quiet(SimpleNamespace(hosts=["a", "b"]))  # type: ignore[arg-type]
        yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.parametrize(
    ("module", "heard"),
    [("own_hook", True), ("torchmetrics.text", True), ("megatronic", True)]
    + [(name, False) for name in ("megatron.core.optimizer", "torch", "torch.distributed", "transformers.models")],
)
def test_libraries_are_quiet_and_users_are_not(quiet: None, caplog: pytest.LogCaptureFixture, module: str, heard: bool) -> None:
    logging.getLogger(module).warning("look here")
    logging.getLogger(module).error("broken")
    assert caplog.messages == ["look here"] * heard + ["broken"]
    with warnings.catch_warnings(record=True) as seen:
        warnings.warn_explicit("old", UserWarning, "file.py", 1, module=module)
    assert len(seen) == heard


def test_users_may_say_what_they_like(quiet: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "own_hook"):
        logging.getLogger("own_hook").info("step 3")
    assert caplog.messages == ["step 3"]
