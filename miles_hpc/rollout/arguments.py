"""How an engine is set up: the one place where CPU and GPU differ."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_hpc.config import Config
from miles_hpc.errors import ModelError


@dataclass(frozen=True)
class EngineArguments:
    """What the host process needs to start its engine; picklable, no torch."""

    model_folder: str
    context_length: int
    dtype: str
    kv_cache_tokens: int
    max_running_requests: int
    tensor_parallel: int
    seed: int
    temperature: float
    stop_tokens: list[int]
    numerics: str = "native"
    colocated: bool = False
    number: int = 0
    """Among the engines of the run; decides on its GPUs."""
    record_routing: bool = False
    trace: str = ""
    """Folder that takes every forward's results, for `compare-numerics`."""

    @classmethod
    def of(cls, config: Config, model_folder: Path, number: int = 0) -> "EngineArguments":
        """For an engine of a run. Raises: ModelError if the folder does not say which token ends an answer."""
        return cls(
            model_folder=str(model_folder),
            context_length=config.model.context_length,
            dtype=config.model.dtype,
            kv_cache_tokens=config.rollout.kv_cache_tokens,
            max_running_requests=config.rollout.max_running_requests,
            tensor_parallel=config.rollout.tensor_parallel,
            seed=config.run.seed,
            temperature=config.rollout.temperature,
            stop_tokens=stop_tokens(model_folder),
            numerics=config.run.numerics,
            colocated=config.colocated,
            number=number,
            record_routing=config.train.routing_replay,
        )


def stop_tokens(model_folder: Path) -> list[int]:
    """Token ids that end an answer, as generation_config.json (else config.json) of the checkpoint lists them.

    Raises:
        ModelError: neither file names one, or something else than a number or numbers.
    """
    for name in ("generation_config.json", "config.json"):
        file = model_folder / name
        try:
            ids = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.exists() else None
        except (OSError, ValueError, RecursionError, AttributeError) as error:
            raise ModelError(f"cannot be read: {type(error).__name__}: {error}", where=str(file)) from None
        if ids is not None and ids != []:
            found = ids if isinstance(ids, list) else [ids]
            if not all(isinstance(token, int) for token in found):
                raise ModelError(f"eos_token_id = {ids!r}, a whole number or a list of them is needed", where=str(file))
            return found
    raise ModelError("no eos_token_id in generation_config.json or config.json", where=str(model_folder))


def server_arguments(a: EngineArguments, gpus: int) -> dict[str, Any]:
    """Arguments of `sglang.Engine` (0.5.16); `gpus`: those that this process sees."""
    common = {
        "model_path": a.model_folder,
        "skip_tokenizer_init": True,
        "sampling_backend": "pytorch",
        "dtype": a.dtype,
        "tp_size": a.tensor_parallel,
        "context_length": a.context_length,
        "max_total_tokens": a.kv_cache_tokens,
        "max_running_requests": a.max_running_requests,
        "random_seed": a.seed,
        "enable_return_routed_experts": a.record_routing,
        "disable_cuda_graph": bool(a.trace),  # a graph runs no hooks
        "log_level": "warning",
    }
    return common | (_gpu(a, gpus) if gpus else _cpu())


def _cpu() -> dict[str, Any]:
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "disable_overlap_schedule": True,
        "mem_fraction_static": 0.8,  # of the whole machine: others may take memory meanwhile; max_total_tokens is the bound
        "sleep_on_idle": True,
    }


def _gpu(a: EngineArguments, gpus: int) -> dict[str, Any]:
    return {
        "device": "cuda",
        # engines of a node take its GPUs in turn, as training ranks do: colocated, both are on the same
        "base_gpu_id": a.number * a.tensor_parallel % gpus,
        "attention_backend": "fa3",
        # colocated, of what the trainer leaves; max_total_tokens is the bound
        "mem_fraction_static": 0.9 if a.colocated else 0.6,
        "enable_memory_saver": a.colocated,
        "cuda_graph_max_bs_decode": a.max_running_requests,
        "disable_prefill_cuda_graph": True,  # capturing them takes longer than they save in a run
    }


def environment(inherited: dict[str, str]) -> dict[str, str]:
    """The host's environment: no trace of MPI or of the Slurm step, one compute thread, our plugin switched on.

    A process that sees PMI variables and loads an MPI library would join the world a second time.
    """
    foreign = ("PMI_", "PMI2_", "PMIX_", "MPI_", "MPICH_", "HYDI_", "HYDRA_", "OMPI_", "SLURM_")
    kept = {key: value for key, value in inherited.items() if not key.startswith(foreign)}
    # more than one OpenMP thread made small models 2-18 times slower on shared cores
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "MILES_HPC_ENGINE": "1"}
