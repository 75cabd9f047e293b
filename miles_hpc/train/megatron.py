"""The policy: a megatron-core model made from a Hugging Face checkpoint, and the groups of ranks it is split over.

Everything that touches megatron-core's `GPTModel` (deprecated upstream in favour of `HybridModel`) is behind this file.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from miles_hpc import device
from miles_hpc.kernels import logprob
from miles_hpc.train import architecture
from miles_hpc.train.packing import Pack


def join(
    rank: int, size: int, rendezvous: str | dist.Store, tensor_parallel: int, expert_parallel: int, timeout: float = 600.0
) -> None:
    """Make `torch.distributed` and megatron's groups; collective over all training ranks.

    Args:
        rank: rank within training.
        size: training ranks.
        rendezvous: a store that all training ranks share, or `tcp://host:port` or `file://path`.
        tensor_parallel: ranks that share each layer.
        expert_parallel: ranks that share the experts of a layer.
        timeout: seconds that a collective may take.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    device.install()
    meeting = {"init_method": rendezvous} if isinstance(rendezvous, str) else {"store": rendezvous}
    dist.init_process_group(device.backend(), rank=rank, world_size=size, timeout=timedelta(seconds=timeout), **meeting)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    device.install_dispatcher()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel, expert_model_parallel_size=expert_parallel, expert_tensor_parallel_size=1
    )
    model_parallel_cuda_manual_seed(1)


def leave() -> None:
    """Undo `join`."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


class Groups:
    """megatron's groups of ranks, as far as they are used here."""

    def __init__(self) -> None:
        from megatron.core import parallel_state

        self.tensor = parallel_state.get_tensor_model_parallel_group()
        self.data = parallel_state.get_data_parallel_group()
        self.expert = parallel_state.get_expert_model_parallel_group()

    @property
    def writes_samples(self) -> bool:
        """One rank per data-parallel replica records the samples that its tensor-parallel ranks train together."""
        return self.tensor.rank() == 0


class Policy:
    """Log-probabilities of packed sequences.

    Args:
        config: transformers configuration.
        dtype: of weights and activations.
        groups: of ranks.
        length: longest sequence, in tokens.
        exact: computed by `kernels`, as the engine does.
        replay: tokens go to the experts that the engine chose, where a pack says which.

    Raises:
        NumericsError: exact numerics are not to be had on this machine.
    """

    def __init__(
        self, config: Any, dtype: torch.dtype, groups: Groups, length: int, exact: bool = False, replay: bool = False
    ) -> None:
        from miles_hpc.kernels.rope import Rotary
        from miles_hpc.train.replay import Replays

        self.config, self.groups, self.exact = config, groups, exact
        self.core_config = architecture.transformer_config(config, dtype, groups.tensor.size(), groups.expert.size(), exact)
        self.module: Any = build(config, self.core_config, length, exact)
        self.rotary = Rotary(config, length, device.device())
        self.wrapped = self.module
        self.load = ExpertLoad(self.module)
        self.replays = Replays(self.module, groups.tensor) if replay else None

    def wrap(self) -> Any:
        """Put megatron's data-parallel wrapper around the model; gradients are summed over ranks in float32."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.wrapped = DistributedDataParallel(self.core_config, options, self.module)
        return self.wrapped

    def log_probs(self, pack: Pack, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Log-probability of each answer token and entropy of the distribution it was drawn from.

        Args:
            pack: micro-batch.
            temperature: logits are divided by it, as the sampler does.

        Returns:
            [answer tokens] float32 with gradient where enabled, [answer tokens] float32 in nats.
        """
        if self.replays:
            self.replays.load(pack)
        head, first = self._own_vocabulary()
        hidden, heat = self._hidden(pack)[pack.before], head.new_tensor([temperature], dtype=torch.float32)
        return logprob.log_probs_and_entropy(hidden, head, pack.targets, heat, first, self.groups.tensor)

    def logits(self, pack: Pack) -> Tensor:
        """[t, own vocabulary] of a whole pack, for comparison with other implementations."""
        return self._hidden(pack) @ self._own_vocabulary()[0].t()

    def _hidden(self, pack: Pack) -> Tensor:
        """What the output layer would see: [t, hidden], with sequence parallelism gathered from the tensor-parallel ranks."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        packed = self._packed(pack)
        hidden = self.wrapped(pack.tokens, None, None, packed_seq_params=packed, output_processor=_unchanged)
        return gather_from_sequence_parallel_region(hidden) if self.core_config.sequence_parallel else hidden

    def _own_vocabulary(self) -> tuple[Tensor, int]:
        """Weight of the output layer without the rows that fill the vocabulary up to a multiple of the ranks; first own id."""
        module = self.module
        tied = module.share_embeddings_and_output_weights
        weight = module.shared_embedding_or_output_weight() if tied else module.output_layer.weight
        first = len(weight) * self.groups.tensor.rank()
        own = max(0, min(len(weight), self.config.vocab_size - first))
        return weight if own == len(weight) else weight[:own], first

    def _packed(self, pack: Pack) -> Any:
        from miles_hpc.train.attention import Packed

        cos, sin = self.rotary.of(pack.positions)
        return Packed(
            qkv_format="thd",
            cu_seqlens_q=pack.bounds,
            cu_seqlens_kv=pack.bounds,
            max_seqlen_q=pack.longest,
            max_seqlen_kv=pack.longest,
            rows=pack.rows,
            cells=pack.cells,
            cos=cos,
            sin=sin,
            **(self._cut(pack) if self.exact else {}),
        )

    def _cut(self, pack: Pack) -> dict[str, Any]:
        """On a CPU tiles of queries; on a GPU FlashAttention makes them itself, and long sequences are cut into segments."""
        from miles_hpc.train.exact import segments_of, tiles_of

        if pack.tokens.is_cuda:
            return {"plan": segments_of(pack)}
        return {"tiles": tiles_of(pack, self.config.num_attention_heads // self.config.num_key_value_heads)}


def _unchanged(hidden_states: Tensor, **unused: Any) -> Tensor:
    """megatron's output processor in place of the product with the output layer: [t, 1, hidden] -> [t, hidden]."""
    return hidden_states[:, 0]


def build(config: Any, core_config: Any, length: int, exact: bool = False) -> torch.nn.Module:
    """A `GPTModel` without weights, with this project's norm and attention; rotary positions are applied in the attention."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    tensor_parallel = core_config.tensor_model_parallel_size
    with _quiet():
        module = GPTModel(
            core_config,
            layer_spec(core_config, exact),
            vocab_size=-(-config.vocab_size // tensor_parallel) * tensor_parallel,
            max_sequence_length=length,
            position_embedding_type="none",
            share_embeddings_and_output_weights=config.tie_word_embeddings,
        )
    module = module.to(device.device())
    for layer in module.decoder.layers:
        layer.register_forward_hook(_let_go, always_call=True)
    if exact:
        from miles_hpc.train.exact import check_linear, exchange_linear

        check_linear(exchange_linear(module), core_config)
    return module


def _let_go(layer: Any, *unused: Any) -> None:
    """A layer whose MLP ran out of memory would hold its input, and with it what all layers before had saved for the backward.

    megatron-core 0.19.2 (`transformer_layer.py`) takes it back only where a forward ends well.
    """
    layer.mlp_norm_manager = None


def layer_spec(core_config: Any, exact: bool = False) -> Any:
    """megatron's local layers, with norms, core attention, MLP and experts exchanged."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.moe.moe_layer import MoESubmodules

    from miles_hpc.train.attention import CoreAttention
    from miles_hpc.train.experts import Experts
    from miles_hpc.train.mlp import SwiGLU
    from miles_hpc.train.norm import RMSNorm

    block = get_gpt_decoder_block_spec(core_config, use_transformer_engine=False, normalization="RMSNorm")
    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        attention.core_attention = CoreAttention
        if core_config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        mlp = parts.mlp.keywords["submodules"]  # the builder is a partial
        if isinstance(mlp, MoESubmodules):
            mlp.experts = partial(Experts, **mlp.experts.keywords)
        else:
            parts.mlp = partial(SwiGLU.as_mlp_submodule, **parts.mlp.keywords)
    if not exact:
        return block
    from miles_hpc.train.exact import exchange

    return exchange(block)


@contextmanager
def _quiet() -> Iterator[None]:
    """The notice that GPTModel is deprecated is known; it would come once per rank and start."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


class ExpertLoad:
    """Tokens that each expert received, counted in all forwards since `clear`."""

    def __init__(self, module: torch.nn.Module) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        self.routers = [m for m in module.modules() if isinstance(m, TopKRouter)]
        self.counts: list[Tensor] = []
        for i, router in enumerate(self.routers):
            router.register_forward_hook(lambda m, inputs, outputs, i=i: self._add(i, outputs[1]))
        self.clear()

    def clear(self) -> None:
        """Count from 0 again."""
        self.counts = [torch.zeros(r.config.num_moe_experts, device=device.device()) for r in self.routers]

    def _add(self, layer: int, routing_map: Tensor) -> None:
        self.counts[layer] += routing_map.sum(0)

    def max_over_mean(self) -> float | None:
        """Largest load over mean load, of the worst layer; collective. None without experts."""
        if not self.counts:
            return None
        counts = torch.stack(self.counts)
        dist.all_reduce(counts)
        return float((counts.amax(1) / counts.mean(1).clamp(min=1e-9)).max())
