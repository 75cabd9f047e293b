"""What a rank's log says of an event."""

import pytest

from miles_hpc import logline

STEP = {"event": "step", "step": 39, "metrics": {"reward/mean": 0.5, "groups/refused": 3.0}, "phase_seconds": {"train": 1.25}}


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (STEP, "step 39: 40/40 steps done  reward 0.500  refused 3  train 1.2 s"),
        ({"event": "sync", "version": 3, "given_up": 0, "seconds": 0.5}, ""),
        (
            {"event": "sync", "version": 3, "given_up": 2, "seconds": 61.0},
            "weights 3 sent again: rounds given up 2, 61.0 s in all",
        ),
        (
            {"event": "engine_restart", "rank": 5, "version": 3, "phase": "rollout", "error": "gone", "seconds": 12.3},
            "the engine of rollout rank 5 was started again in 12 s: gone",
        ),
        ({"event": "micro_batch_tokens", "tokens": 64}, ""),  # every rank that has lowered it says so itself
    ],
)
def test_an_event_in_words(event, text):
    assert logline.of_event(event, steps=40) == text


def test_a_line_has_its_time(capsys):
    logline.say("engine ready")
    date, time, text = capsys.readouterr().out.split(maxsplit=2)
    assert (len(date.split("-")), len(time.split(":")), text) == (3, 3, "engine ready\n")
