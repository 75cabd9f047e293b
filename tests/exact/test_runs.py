"""Exact numerics through the real loop: no log-prob differs between trainer and sampler, and runs repeat bit for bit."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from runs import STEPS, digest, logs, metrics, run, start, wait

from miles_hpc.launchers import cli, state
from miles_hpc.paths import RunPaths
from miles_hpc.rollout import drafts

pytestmark = pytest.mark.engine
TOKENS = 4096

# Runs in the processes of ranks and engines. In its third step the first engine in the middle of most of its answers stops. Its
# host wakes it when it asks for the message after the one to end what is under way: that one has been handed on by then.
CUSTOMIZE = """
import os, pathlib, signal, sys
if "miles_hpc.main" in sys.orig_argv:
    from miles_hpc.rollout.flight import Flight
    Flight.interrupt.__defaults__ = (300.0,)  # a busy machine may take longer than Slurm would wait
if "miles_hpc.rollout.sglang" in sys.orig_argv:
    from multiprocessing.connection import Connection
    from miles_hpc.rollout import noise
    choose, first, note = noise.choose, {}, pathlib.Path(__file__).with_name("stopped")
    def choose_and_stop(log_probs, keys, positions, greedy):
        begun = [at - first.setdefault(key, at) for key, at in zip(keys.tolist(), positions.tolist())]
        if len(first) > 64 and sum(3 <= tokens <= 8 for tokens in begun) > 4 and not note.exists():
            claim = note.with_suffix(f".{os.getpid()}")
            claim.write_text(f"{os.getppid()} {os.getpid()}")
            try:
                os.link(claim, note)
                os.kill(os.getpid(), signal.SIGSTOP)
            except FileExistsError:
                pass  # the other engine was faster
        return choose(log_probs, keys, positions, greedy)
    noise.choose = choose_and_stop
    receive, last = Connection.recv, []
    def wake_and_receive(self):
        if last == [("abort",)] and note.exists():
            host, scheduler = map(int, note.read_text().split())
            if host == os.getpid():
                os.kill(scheduler, signal.SIGCONT)
        last[:] = [receive(self)]
        return last[0]
    Connection.recv = wake_and_receive
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("exact")


@pytest.fixture(scope="module")
def moe(folder) -> RunPaths:
    """Two engines, interrupted in the middle of a generation; with routing replay and an importance correction."""
    two = ("slurm.rollout.ranks_per_node=2", "train.correction=icepop", "rollout.unfinished=continue")
    (folder / "sitecustomize.py").write_text(CUSTOMIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
        paths = start(folder / "moe", *two, "train.routing_replay=true")
    interrupt(paths, folder / "stopped")
    kept = drafts.on_disk(paths, json.loads(paths.verdict(1).read_text())["step"]).values()
    assert any(draft.output.tokens for draft in kept if not draft.output.whole), logs(paths)
    assert cli.main(["resume", str(paths.folder), "--local"]) == 0
    wait(paths)
    return paths


@pytest.fixture(scope="module")
def dense(folder):
    return run(folder / "dense", "model.source=miles_hpc.examples.arithmetic:dense_model")


@pytest.mark.parametrize("name", ["moe", "dense"])
def test_trainer_and_sampler_agree_bit_for_bit(name, request):
    paths = request.getfixturevalue(name)
    steps = metrics(paths)
    assert len(steps) == STEPS, logs(paths)
    assert all(step["train/logp_abs_diff_max"] == 0.0 for step in steps)
    assert all(step["train/kl"] == 0.0 for step in steps)
    for figure in ("rollout_kl_k1", "rollout_kl_k3", "ratio_outside", "routing_mismatch"):
        assert all(step.get(f"train/{figure}", 0.0) == 0.0 for step in steps), figure
    assert ("train/routing_mismatch" in steps[0]) == (name == "moe")
    assert all(step["train/grad_norm"] > 0 for step in steps)
    assert sum(step["response/length_mean"] * 64 for step in steps) >= TOKENS


def interrupt(paths: RunPaths, stopped: Path) -> None:
    """TERM in the middle of a generation, in which an engine stands still until it is told to end it."""
    while not stopped.exists():
        assert not state.state_of(paths.folder).ended, logs(paths)
        time.sleep(0.1)
    os.kill(json.loads(paths.heartbeat(0).read_text())["pid"], signal.SIGTERM)
    wait(paths)
    assert json.loads(paths.verdict(1).read_text())["kind"] == "preempted", logs(paths)


def test_two_interrupted_engines_and_one_in_turns_give_the_same_weights(moe, folder):
    """Nothing depends on timing, on batches, on which engine answers, whether it does so in one go, nor on an importance
    correction. In turns the optimizer's state leaves and returns, weights are shared in place of broadcast."""
    again = run(folder / "turns", "run.placement=colocate", "train.offload=true")
    assert [step["train/logp_abs_diff_max"] for step in metrics(again)] == [0.0] * STEPS, logs(again)
    assert digest(again) == digest(moe)
