"""SGLang's attention backend in exact numerics. Imported by `plugin.register` only, inside SGLang's processes."""

from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from miles_hpc.errors import NumericsError
from miles_hpc.kernels.attention import paged
from miles_hpc.kernels.tiles import Tiles, tiles
from miles_hpc.rollout.models.exact_causal import ExactModel


def check_model(model: Any) -> None:
    """SGLang falls back to its own classes without an error when ours cannot be imported.

    Raises:
        NumericsError: the engine loaded another class than ours.
    """
    if not isinstance(model, ExactModel):
        what = f"the engine loaded {type(model).__qualname__} in place of the exact model"
        raise NumericsError(what, next_step='make install, or set run.numerics = "native"')


def flash(runner: Any) -> AttentionBackend:
    """The backend on a GPU.

    Raises:
        NumericsError: see `check_model`.
    """
    from miles_hpc.rollout.flash import FlashAttention, capture_both

    check_model(runner.model)
    capture_both()
    return FlashAttention(runner)


class ExactAttention(AttentionBackend):
    """On a CPU: writes keys and values into SGLang's pool and reads them back in blocks, in prefill, chunks and decode alike.

    Raises:
        NumericsError: see `check_model`.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        check_model(runner.model)
        self.device = runner.device
        self.table, self.pool = runner.req_to_token_pool.req_to_token, runner.token_to_kv_pool
        config = runner.model.config
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.tiles: Tiles | None = None

    def init_forward_metadata(self, batch: Any) -> None:
        """Cut the tokens of this forward into tiles, once for all layers."""
        decode = batch.forward_mode.is_decode_or_idle()
        lengths = [1] * batch.batch_size if decode else batch.extend_seq_lens.tolist()
        table = self.table[batch.req_pool_indices]
        self.tiles = tiles(lengths, batch.positions, table, self.group) if lengths else None

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True, **unused: Any
    ) -> Tensor:
        """[t, heads * head_dim] -> the same."""
        if save_kv_cache:
            self.pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
        keys, values = self.pool.get_key_buffer(layer.layer_id), self.pool.get_value_buffer(layer.layer_id)
        heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return paged(heads, keys, values, self.tiles, layer.scaling).flatten(1) if self.tiles else q

    forward_extend = forward_decode = forward_mixed = _forward

    def support_triton(self) -> bool:
        """SGLang asks: its Triton kernels are not used."""
        return False
