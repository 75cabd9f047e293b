"""A real engine: keyed sampling, log-probs, weights, faults. One engine serves the module; the last tests restart it."""

import itertools
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from miles_hpc import data, device
from miles_hpc.buckets import buckets
from miles_hpc.config import Config, dump
from miles_hpc.errors import DeadlineExceeded, EngineDied, EngineError, Stopped
from miles_hpc.group import open_store
from miles_hpc.handover import handle
from miles_hpc.paths import RunPaths
from miles_hpc.rollout import drafts
from miles_hpc.rollout.engine import EngineHost
from miles_hpc.rollout.generate import Generator
from miles_hpc.rollout.request import Output, Request
from miles_hpc.rollout.reward import Reward
from miles_hpc.samples import store
from miles_hpc.samples.schema import Samples

pytestmark = pytest.mark.engine
NEW = 32


def requests(count: int) -> list[Request]:
    rng = random.Random(0)
    return [Request(rng.choices(range(3, 150), k=rng.randint(2, 24)), 100 + i // 4, i % 4, NEW) for i in range(count)]


@pytest.fixture(scope="module")
def batch(engine: EngineHost) -> list[Output]:
    """64 answers generated together."""
    return answers(engine, requests(64))


def answers(engine: EngineHost, wanted: list[Request]) -> list[Output]:
    outputs = dict(engine.generate(wanted))
    return [outputs[i] for i in range(len(wanted))]


def scheduler(engine: EngineHost) -> psutil.Process:
    return next(p for p in psutil.Process(engine.pid).children(recursive=True) if "scheduler" in p.name())


def tokens(outputs: list[Output]) -> list[list[int]]:
    return [output.tokens for output in outputs]


def test_a_sample_is_the_same_alone(engine: EngineHost, batch: list[Output]) -> None:
    for i in (0, 17, 63):
        assert answers(engine, [requests(64)[i]])[0].tokens == batch[i].tokens


def test_a_sample_is_the_same_in_another_order(engine: EngineHost, batch: list[Output]) -> None:
    order = random.Random(1).sample(range(64), 64)
    wanted = requests(64)
    assert tokens(answers(engine, [wanted[i] for i in order])) == [batch[i].tokens for i in order]


def test_a_sample_is_the_same_in_a_larger_batch_with_a_cold_cache(engine: EngineHost, batch: list[Output]) -> None:
    engine.call("checksum")
    others = [Request([9, 8, 7], 900 + i, 0, NEW) for i in range(100)]
    assert tokens(answers(engine, others + requests(64)))[100:] == tokens(batch)


def test_samples_of_a_group_differ(batch: list[Output]) -> None:
    assert len({tuple(output.tokens) for output in batch}) == 64


def test_greedy_ignores_the_key(engine: EngineHost, batch: list[Output]) -> None:
    prompt = requests(1)[0].tokens
    greedy = answers(engine, [Request(prompt, i, i, NEW, greedy=True) for i in range(4)] + requests(8))
    assert all(output.tokens == greedy[0].tokens for output in greedy[:4])
    assert tokens(greedy[4:]) == tokens(batch[:8])  # in one batch with greedy requests


def test_answers_end_at_the_stop_token_or_the_limit(batch: list[Output]) -> None:
    assert {output.stopped for output in batch} == {True, False}
    for output in batch:
        assert output.stopped == (output.tokens[-1] == 1) and 1 not in output.tokens[:-1]
        assert output.stopped or len(output.tokens) == NEW
        assert len(output.log_probs) == len(output.tokens)


def test_log_probs_are_those_of_transformers(
    engine: EngineHost, batch: list[Output], model_folder: Path, config: Config
) -> None:
    import torch

    device.define_torchvision_operators()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    greedy = Request(requests(1)[0].tokens, 0, 0, NEW, greedy=True)
    pairs = [*zip(requests(16), batch[:16], strict=True), (greedy, answers(engine, [greedy])[0])]
    for request, output in pairs:
        temperature = 1.0 if request.greedy else config.rollout.temperature
        with torch.no_grad():
            logits = model(torch.tensor([request.tokens + output.tokens])).logits[0, len(request.tokens) - 1 : -1]
        log_probs = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(output.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.log_probs), log_probs, atol=2e-5, rtol=0)


def test_groups_and_evaluation(engine: EngineHost, model_folder: Path, config: Config) -> None:
    tokenizer = data.tokenizer_of(model_folder)
    train, held_out = data.load(config, "train", tokenizer), data.load(config, "eval", tokenizer)
    generator = Generator(config, engine, train, Reward.of(config), held_out)
    ids = train.ids_of_step(0, 8)
    samples = Samples.concat(list(generator.groups(0, ids, version=0))).sorted()
    assert samples.prompt_ids.tolist() == sorted(ids.repeat(4).tolist())
    again = Samples.concat(list(generator.groups(0, ids[::-1], version=0))).sorted()
    assert (again.tokens == samples.tokens).all()
    assert generator.evaluate(0, 8).prompts == 32
    assert generator.timing.generated_tokens > 0 and generator.timing.generate_seconds > 0


def test_leaving_a_generation_early_leaves_the_engine_usable(engine: EngineHost, batch: list[Output]) -> None:
    stream: Iterator[tuple[int, Output]] = engine.generate(requests(64))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert tokens(answers(engine, requests(8))) == tokens(batch[:8])


def test_what_is_interrupted_goes_on_as_if_it_had_not_been(
    engine: EngineHost, model_folder: Path, config: Config, tmp_path: Path
) -> None:
    """Left twice, with some answers whole and others begun, through files as at a resume."""
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_new_tokens": 2 * NEW})})
    train, paths = data.load(config, "train", data.tokenizer_of(model_folder)), RunPaths(tmp_path)
    paths.samples.mkdir()
    ids = train.ids_of_step(0, 8)
    undisturbed = Samples.concat(list(Generator(config, engine, train, Reward.of(config)).groups(0, ids, 0))).sorted()
    for attempt in (1, 2):
        generator = Generator(config, engine, train, Reward.of(config))
        kept = drafts.on_disk(paths, 0)
        engine.poll_hook = leave_with(1 + sum(draft.output.whole for draft in kept.values()), generator)
        with pytest.raises(Stopped):
            list(generator.groups(0, ids, attempt, drafts=kept))
        store.write(paths, 0, 0, attempt, drafts.pack(generator.interrupted()), drafts=True)
    engine.poll_hook = lambda: None
    kept = drafts.on_disk(paths, 0)
    assert {draft.output.whole for draft in kept.values()} == {True, False}
    assert max(len(draft.output.tokens) for draft in kept.values() if not draft.output.whole) > 1
    samples = Samples.concat(list(generator.groups(0, ids, 3, drafts=kept))).sorted()
    assert (samples.tokens == undisturbed.tokens).all() and (samples.status == undisturbed.status).all()
    np.testing.assert_allclose(samples.rollout_log_probs, undisturbed.rollout_log_probs, atol=2e-5)
    assert set(samples.weight_versions) == {-1, 1, 2, 3}


def leave_with(answers: int, generator: Generator) -> Callable[[], None]:
    """A hook that leaves a generation once, with so many answers of groups that are not finished."""
    left: list[bool] = []

    def poll() -> None:
        if not left and sum(len(group.answers) for group in generator._left) >= answers:
            left.append(True)
            raise Stopped("asked to end by a signal")

    return poll


def test_a_refused_request_is_an_error_and_leaves_the_engine_usable(engine: EngineHost, batch: list[Output]) -> None:
    with pytest.raises(EngineError, match=r"longer than the model's context length"):
        answers(engine, [Request([5] * 200, 0, 0, NEW)])
    assert tokens(answers(engine, requests(8))) == tokens(batch[:8])


def test_a_call_that_the_engine_answers_with_false(engine: EngineHost, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="update_weights_from_disk"):
        engine.call("update_weights_from_disk", model_path=str(tmp_path))


def test_weights_over_a_process_group(engine: EngineHost, batch: list[Output], model_folder: Path) -> None:
    """Weights x 0 change the answers, the right ones bring them back; the engine's digests are of what was sent."""
    from safetensors.torch import load_file

    weights = load_file(model_folder / "model.safetensors")
    before = engine.call("checksum")[0]
    group = Sender(engine)
    group.send({name: tensor * 0 for name, tensor in weights.items()})
    assert engine.call("checksum")[0] != before
    assert tokens(answers(engine, requests(8))) != tokens(batch[:8])
    group.send(weights)
    assert engine.call("checksum")[0] == before
    assert tokens(answers(engine, requests(8))) == tokens(batch[:8])
    engine.call("destroy_weights_update_group", group_name="weights")


class Sender:
    """The trainer's end of a weight group, in this process."""

    def __init__(self, engine: EngineHost) -> None:
        import torch.distributed as dist

        self.engine, self.group, opened = engine, None, open_store("127.0.0.1")

        def join() -> None:
            from datetime import timedelta

            from torch.distributed.distributed_c10d import _new_process_group_helper, _world

            wait = timedelta(seconds=60)
            store = dist.PrefixStore("weights", opened)
            self.group, _ = _new_process_group_helper(
                2, 0, [], dist.Backend("gloo"), store, group_name="weights", backend_options=None, timeout=wait
            )
            _world.pg_group_ranks[self.group] = {0: 0, 1: 1}

        thread = threading.Thread(target=join)
        thread.start()
        address = {"master_address": "127.0.0.1", "master_port": opened.port, "rank_offset": 1, "world_size": 2}
        engine.call("init_weights_update_group", group_name="weights", backend="gloo", **address)
        thread.join()

    def send(self, weights: dict) -> None:
        import torch.distributed as dist

        several = buckets(weights.items(), {"cpu": 1})
        tensors = iter(weights.values())
        flats = [bucket.flat(itertools.islice(tensors, len(bucket.names))) for bucket in several]
        thread = threading.Thread(target=lambda: [dist.broadcast(flat, src=0, group=self.group) for flat in flats])
        thread.start()
        self.engine.call("update_weights_from_distributed", buckets=[b.text for b in several], group_name="weights")
        thread.join()


def test_signals_of_a_slurm_step_do_not_reach_the_engine(engine: EngineHost, batch: list[Output]) -> None:
    processes = [psutil.Process(engine.pid), *psutil.Process(engine.pid).children(recursive=True)]
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        for process in processes:
            if "resource_tracker" not in " ".join(process.cmdline()):
                process.send_signal(number)
    assert tokens(answers(engine, requests(8))) == tokens(batch[:8])


def test_the_engine_sees_nothing_of_mpi_or_slurm(engine: EngineHost) -> None:
    for process in [psutil.Process(engine.pid), scheduler(engine)]:
        assert not [name for name in process.environ() if name.startswith(("PMI", "SLURM", "MPI", "HYDI"))]
        assert "mpi4py" not in " ".join(mapping.path for mapping in process.memory_maps())


def test_every_wait_polls_and_has_a_deadline(engine: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen, poll = scheduler(engine), engine._connection.poll
    calls: list[int] = []
    asked: list[float] = []
    monkeypatch.setattr(engine._connection, "poll", lambda seconds: asked.append(seconds) or poll(seconds))
    engine.poll_hook = lambda: calls.append(1)
    frozen.suspend()
    try:
        with pytest.raises(DeadlineExceeded, match="did not answer within 1 s: checksum"):
            engine.call("checksum", timeout=1.0)
    finally:
        frozen.resume()
        engine.poll_hook = lambda: None
    assert len(calls) >= len(asked) >= 2 and max(asked) <= 0.2  # seconds, however long a busy machine makes them
    assert engine.call("checksum")  # the late answer to the first call is not taken for this one


def test_a_poll_hook_may_end_a_wait(engine: EngineHost, batch: list[Output]) -> None:
    def leave() -> None:
        raise InterruptedError

    engine.poll_hook = leave
    with pytest.raises(InterruptedError):
        answers(engine, requests(64))
    engine.poll_hook = lambda: None
    assert tokens(answers(engine, requests(8))) == tokens(batch[:8])


def test_an_engine_sleeps_wakes_and_takes_shared_weights(engine: EngineHost, batch: list[Output], model_folder: Path) -> None:
    """SGLang's scheduler dies of a wake-up too many."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    before = engine.call("checksum")
    named = list(load_file(model_folder / "model.safetensors").items())
    name, changed = named[0][0], [(name, tensor + 1) for name, tensor in named]
    for tensors in (changed, named):
        engine.call("sleep")
        engine.call("sleep")
        for regions in (["weights"], ["kv_cache", "cuda_graph"], ["weights"]):
            engine.call("wake", regions=regions)
        (bucket,) = buckets(tensors)
        flat = bucket.flat(tensor for _, tensor in tensors)
        engine.call("update_weights_from_tensor", serialized_named_tensors=[handle(bucket, flat)])
        assert (engine.call("checksum")[0][name] == before[0][name]) == (tensors is named)
    assert engine.call("checksum") == before
    assert tokens(answers(engine, requests(64))) == tokens(batch)


@pytest.mark.long
def test_a_dead_engine_is_an_error_and_its_successor_samples_the_same(engine: EngineHost, batch: list[Output]) -> None:
    """SGLang kills its process tree some seconds after its scheduler's death; this process survives and starts another."""
    old = psutil.Process(engine.pid).children(recursive=True)
    stream = engine.generate([Request([5] * 10, i, 0, 80) for i in range(64)])
    kills = iter([scheduler(engine).kill])
    engine.poll_hook = lambda: next(kills, lambda: None)()
    with pytest.raises(EngineDied, match="during generate") as caught:
        list(stream)
    assert "last lines of its log" in str(caught.value) and str(engine.log) in caught.value.where
    with pytest.raises(EngineDied):
        engine.call("checksum")
    assert not psutil.wait_procs(old, timeout=60)[1]
    engine.start()
    engine.wait_ready()
    assert tokens(answers(engine, requests(64))) == tokens(batch)


def test_shutdown_leaves_nothing_and_may_be_repeated(engine: EngineHost) -> None:
    processes = [psutil.Process(engine.pid), *psutil.Process(engine.pid).children(recursive=True)]
    engine.shutdown()
    engine.shutdown()
    assert not psutil.wait_procs(processes, timeout=60)[1] and engine.pid is None


PARENT = """
import sys, time
from pathlib import Path
from miles_hpc import config
from miles_hpc.rollout.engine import EngineHost
host = EngineHost(config.read(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3]))
host.start()
print(host.pid, flush=True)
time.sleep(600)
"""


def test_the_host_dies_with_its_parent(config: Config, model_folder: Path, tmp_path: Path) -> None:
    """Even while it is still importing."""
    (tmp_path / "config.toml").write_text(dump(config))
    arguments = [str(tmp_path / "config.toml"), str(model_folder), str(tmp_path / "engine.log")]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *arguments], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    host = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    assert not psutil.wait_procs([host], timeout=60)[1]


def test_a_model_that_cannot_be_loaded(config: Config, model_folder: Path, tmp_path: Path) -> None:
    """The reason reaches the caller."""
    broken = shutil.copytree(model_folder, tmp_path / "broken")
    (broken / "config.json").write_text('{"model_type": "nonsense"}')
    host = EngineHost(config, broken, log=tmp_path / "engine.log")
    host.start()
    with pytest.raises(EngineError, match="nonsense"):
        host.wait_ready()
    assert host.pid is None
