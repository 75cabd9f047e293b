"""An engine's host process (`python -m miles_hpc.rollout.sglang FD PARENT`), a child of a rollout rank (`engine.EngineHost`).

SGLang kills its whole process tree when its scheduler dies, so it lives apart from the MPI rank. This process never imports
mpi4py, ignores the signals that Slurm sends to every process of a step, dies with the rank, and streams finished answers back.

Messages in:  ("generate", [(id, Request), ...]) | ("call", id, name, fields) | ("abort",)
Messages out: ("ready", facts) | ("output", id, Output) | ("answer", id, value) | ("error", id or None, text)
"""

import asyncio
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import traceback
from importlib.metadata import entry_points
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from miles_hpc import device
from miles_hpc.rollout import plugin, shim
from miles_hpc.rollout.arguments import EngineArguments, server_arguments
from miles_hpc.rollout.request import Output, Request, sampling_seed
from miles_hpc.rollout.routing import Recorder

MODELS = ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""SGLang's modules of the supported architectures, and those they build on."""
IDLE_SECONDS = 30.0
"""How long the cache flush may wait for the scheduler to notice that nothing is running."""
REGIONS = ("weights", "kv_cache", "cuda_graph")
"""Device memory that SGLang can give back, by its own names."""
ASLEEP: set[str] = set()
"""Regions that are given back; SGLang's scheduler dies of a wake-up that no sleep went before."""

# Before sglang, and at module level: SGLang's spawned children import this module again before anything else.
shim.install()


def main() -> None:
    """Start the engine, say so, serve until told to stop or until the rank is gone."""
    _die_with_parent(int(sys.argv[2]))
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # inherited by SGLang's children
    connection = Connection(int(sys.argv[1]))
    os.register_at_fork(after_in_child=connection.close)  # else the rank would not see this process's end
    arguments = connection.recv()
    try:
        engine = _start(arguments)
    except BaseException:
        connection.send(("error", None, traceback.format_exc()[-4000:]))
        os._exit(3)
    connection.send(("ready", {"pid": os.getpid(), "children": engine.get_all_child_pids()}))
    engine.loop.run_until_complete(Host(engine, arguments, connection).serve())
    engine.shutdown()
    os._exit(0)


def _die_with_parent(parent: int) -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # the rank ended before the call
        os._exit(0)


def _start(arguments: EngineArguments) -> Any:
    gc.disable()  # until all is imported: a tenth of the time of the imports
    import torch

    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if "miles_hpc.rollout.plugin:register" not in {point.value for point in entry_points(group="sglang.srt.plugins")}:
        raise RuntimeError("the SGLang plugin of miles_hpc has no entry point here: install the package with pip")
    if exact := arguments.numerics == "exact":
        device.without_workspace()
    os.environ[plugin.NUMERICS] = arguments.numerics
    os.environ[plugin.TRACE] = arguments.trace
    os.environ["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = str(int(arguments.colocated))  # else a sleeping engine keeps its graphs
    os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = plugin.EXACT_MODELS if exact else ""
    # In exact numerics none of SGLang's own classes is left to fall back to.
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(_other_models(() if exact else MODELS))
    from sglang.srt.entrypoints.engine import Engine

    class TokenEngine(Engine):
        """Without the detokenizer process: token ids go straight to this process (`skip_tokenizer_init`)."""

        @classmethod
        def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[list[Any], list[str]]:
            return [], []

        @classmethod
        def _launch_scheduler_processes(cls, *given: Any, **named: Any) -> Any:
            gc.freeze()  # modules are there to stay
            gc.enable()
            if not cuda:  # a scheduler that is forked has them already, one that is spawned imports for 10 s; CUDA needs that
                multiprocessing.set_start_method("fork", force=True)
            return super()._launch_scheduler_processes(*given, **named)

    return TokenEngine(**server_arguments(arguments, torch.cuda.device_count() if cuda else 0))


def _other_models(wanted: tuple[str, ...]) -> list[str]:
    """SGLang's model modules except some: the scheduler would import all of them, for seconds and with warnings."""
    spec = find_spec("sglang")
    if not spec or not spec.submodule_search_locations:
        raise RuntimeError("sglang is not installed: make install")
    models = Path(spec.submodule_search_locations[0], "srt", "models")
    return sorted(file.stem for file in models.glob("*.py") if file.stem not in wanted)


class Host:
    """Serves one connection on the engine's event loop."""

    def __init__(self, engine: Any, arguments: EngineArguments, connection: Connection) -> None:
        self.manager = engine.tokenizer_manager
        self.manager.signal_handler_class = _steady(self.manager.signal_handler_class)
        self.arguments, self.connection = arguments, connection
        self.recorder = Recorder(engine.tokenizer_manager.model_config.hf_config) if arguments.record_routing else None
        self.tasks: set[asyncio.Task[None]] = set()
        self.aborting = False
        """What is under way is to end where it is."""

    async def serve(self) -> None:
        """Until the other end says "exit" or closes."""
        while (message := await asyncio.to_thread(self._receive))[0] != "exit":
            if message[0] == "generate":
                self.aborting = False
                for key, request in message[1]:
                    self._spawn(key, self._generate(key, request))
            elif message[0] == "call":
                self._spawn(message[1], self._call(*message[1:]))
            elif message[0] == "abort":
                self.aborting = True
                self.manager.abort_request(abort_all=True)

    def _receive(self) -> tuple[Any, ...]:
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return ("exit",)

    def _spawn(self, key: int, work: Any) -> None:
        task = asyncio.ensure_future(self._guard(key, work))
        self.tasks.add(task)  # the loop keeps weak references only
        task.add_done_callback(self.tasks.discard)

    async def _guard(self, key: int, work: Any) -> None:
        try:
            message = await work
        except Exception:
            message = ("error", key, traceback.format_exc()[-4000:])
        self.connection.send(message)

    async def _generate(self, key: int, request: Request) -> tuple[Any, ...]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        recorder = None if request.greedy else self.recorder
        begun = request.begun
        generate = GenerateReqInput(
            input_ids=[*request.tokens, *begun.tokens],
            sampling_params=self._parameters(request),
            return_logprob=True,
            return_routed_experts=recorder is not None,
            rid=request.name if self.arguments.trace else None,
        )
        answer = await anext(self.manager.generate_request(generate, None))
        meta = answer["meta_info"]
        reason = meta["finish_reason"]["type"]
        ended = reason in ("stop", "length")
        if not ended and not self.aborting:
            return ("error", key, f"generation ended by {meta['finish_reason']}")
        log_probs = [*begun.log_probs, *(entry[0] for entry in meta.get("output_token_logprobs", ()))]
        tokens = [*begun.tokens, *answer["output_ids"]][: len(log_probs)]
        # Of an answer that is interrupted at its last token, SGLang does not say that it is the last.
        stopped = reason == "stop" or (not ended and bool(tokens) and tokens[-1] in self.arguments.stop_tokens)
        whole = ended or stopped or len(tokens) == request.max_new_tokens
        routing = recorder(meta["routed_experts"], len(request.tokens) + len(tokens)) if recorder and whole else None
        return ("output", key, Output(tokens, log_probs, stopped, routing=routing, whole=whole))

    def _parameters(self, request: Request) -> dict[str, Any]:
        return {
            "max_new_tokens": request.max_new_tokens - len(request.begun.tokens),
            "temperature": 0.0 if request.greedy else self.arguments.temperature,
            "stop_token_ids": self.arguments.stop_tokens,
            "sampling_seed": sampling_seed(self.arguments.seed, request.prompt_id, request.sample_index),
        }

    async def _call(self, key: int, name: str, fields: dict[str, Any]) -> tuple[Any, ...]:
        ok, message, value = await CALLS[name](self.manager, fields)
        return ("answer", key, value) if ok else ("error", key, message)


def _steady(handlers: type) -> type:
    """SGLang would install a handler that ends the engine at TERM; the rank decides when it ends."""
    return type("Steady", (handlers,), {"sigterm_handler": lambda *ignored: None})


async def _init_group(manager: Any, fields: dict[str, Any]) -> tuple[bool, str, Any]:
    from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput

    return (*await manager.init_weights_update_group(InitWeightsUpdateGroupReqInput(**fields), None), None)


async def _destroy_group(manager: Any, fields: dict[str, Any]) -> tuple[bool, str, Any]:
    from sglang.srt.managers.io_struct import DestroyWeightsUpdateGroupReqInput

    return (*await manager.destroy_weights_update_group(DestroyWeightsUpdateGroupReqInput(**fields), None), None)


async def _update(manager: Any, fields: dict[str, Any]) -> tuple[bool, str, Any]:
    """Load buckets that are broadcast, see `loading.py`."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

    what = {"names": fields["buckets"], "dtypes": [], "shapes": [], "load_format": "flattened_bucket", "flush_cache": False}
    request = UpdateWeightsFromDistributedReqInput(**what, group_name=fields["group_name"])
    return (*await manager.update_weights_from_distributed(request, None), None)


async def _take(manager: Any, fields: dict[str, Any]) -> tuple[bool, str, Any]:
    """Load buckets that lie in another process's memory, one pickle per engine worker (`handover.py`)."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    request = UpdateWeightsFromTensorReqInput(**fields, load_format="flattened_bucket", flush_cache=False)
    return (*await manager.update_weights_from_tensor(request, None), None)


async def _sleep(manager: Any, fields: dict[str, Any]) -> tuple[bool, str, Any]:
    """Give all of the engine's device memory back but its context; the weights are lost."""
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

    ok, message = await _forget(manager)  # with something running the next call would fail an assertion
    if ok:
        await manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=[*REGIONS]), None)
        ASLEEP.update(REGIONS)
    return ok, message, None


async def _wake(manager: Any, fields: dict[str, Any]) -> tuple[bool, str, Any]:
    """Take memory again at the same addresses, where the engine sleeps."""
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

    if regions := [region for region in fields["regions"] if region in ASLEEP]:
        await manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=regions), None)
        ASLEEP.difference_update(regions)
    return True, "", None


async def _update_from_disk(manager: Any, fields: dict[str, Any]) -> tuple[bool, str, Any]:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    ok, message, _ = await manager.update_weights_from_disk(UpdateWeightFromDiskReqInput(**fields), None)
    return ok, message, None


async def _checksum(manager: Any, fields: dict[str, Any]) -> tuple[bool, str, Any]:
    """Value: per engine rank, digest by the engine's own tensor name (`qkv_proj`, `gate_up_proj` are fused).

    Keys and values that were computed with other weights are forgotten. Both at once: emptying the cache would first wait for
    all broadcasts that are on their way, while the digests' own work can be done in that time.
    """
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    check = manager.check_weights(CheckWeightsReqInput(action="checksum"), None)
    (ok, message, ranks, _), (idle, why) = await asyncio.gather(check, _forget(manager))
    return ok and idle, message if idle else why, [dict(rank["checksums"]) for rank in ranks or []]


async def _forget(manager: Any) -> tuple[bool, str]:
    """Empty the cache of keys and values; waits until nothing is running."""
    answer = await manager.flush_cache(timeout_s=IDLE_SECONDS)
    return answer.success, f"flush_cache: {answer}"


async def _alive(manager: Any, fields: dict[str, Any]) -> tuple[bool, str, Any]:
    """Answered by the scheduler between two batches."""
    await manager.get_internal_state()
    return True, "", None


CALLS = {
    "alive": _alive,
    "init_weights_update_group": _init_group,
    "destroy_weights_update_group": _destroy_group,
    "update_weights_from_distributed": _update,
    "update_weights_from_tensor": _take,
    "update_weights_from_disk": _update_from_disk,
    "sleep": _sleep,
    "wake": _wake,
    "checksum": _checksum,
}


if __name__ == "__main__":
    main()
