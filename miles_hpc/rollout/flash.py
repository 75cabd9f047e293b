"""SGLang's attention backend in exact numerics on a GPU. Imported by `attention.flash` only, inside SGLang's processes."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner
from torch import Tensor

from miles_hpc.kernels import flash, merge, segments

WHOLE, IN_SEGMENTS = "whole", "in segments"


class Step(NamedTuple):
    """One decoding step of a batch."""

    entries: segments.Entries
    schedule: Tensor
    """What FlashAttention computes of the entries, once for all layers."""


class FlashAttention(FlashAttentionBackend):
    """FlashAttention 3 that never splits the keys of a query by itself.

    What sees more than one segment is computed in segments (`kernels/segments.py`), and so are heads that FlashAttention would
    compute in other tiles in decoding than in training. All else stays SGLang's. So there are two CUDA graphs of a batch size:
    one in segments, and SGLang's own for sequences that need none (see `capture_both`).
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.num_splits = 1
        self.most = -(-self.max_context_len // segments.SEGMENT)
        self.always = not flash.one_tile(self.head_dim)
        self.capturing = ""
        """Label of the graph that is captured."""
        self.steps: dict[int, Step] = {}
        """Of each batch size with a graph in segments, at addresses that stay."""
        self.step: Step | None = None
        self.plan: segments.Plan | None = None

    def labels(self) -> list[str]:
        """Of the graphs of a batch size."""
        return [IN_SEGMENTS] if self.always else [IN_SEGMENTS, WHOLE] if self.most > 1 else [WHOLE]

    def label(self, batch: Any) -> str:
        """Of the graph that decodes this batch."""
        return IN_SEGMENTS if self.always or int(batch.seq_lens_cpu.max()) > segments.SEGMENT else WHOLE

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Called by SGLang before the first graph: room for the segments of its largest batch."""
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        if IN_SEGMENTS in self.labels():
            self.room = self._room(max_bs)

    def init_forward_metadata(self, batch: Any) -> None:
        """Without a graph."""
        self.plan = self.step = None
        if not batch.forward_mode.is_decode_or_idle():
            self.plan = self._cut(batch)
        elif batch.batch_size and self.label(batch) == IN_SEGMENTS:
            self.step = self._fill(self._room(batch.batch_size), batch)
        if not self.step and not self.plan:
            super().init_forward_metadata(batch)

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        """Before a graph is captured or replayed; it keeps the addresses, and what lies there is new for each step."""
        self.step, size = None, batch.batch_size
        if (self.capturing if in_capture else self.label(batch)) == WHOLE:
            return super().init_forward_metadata_out_graph(batch, in_capture)
        step = self._fill(self.room.part(size), batch)
        if in_capture:
            self.step = self.steps[size] = step
        else:
            self.steps[size].schedule.copy_(step.schedule)

    def _room(self, queries: int) -> segments.Entries:
        return segments.Entries.room(queries, self.most, self.device)

    def _fill(self, entries: segments.Entries, batch: Any) -> Step:
        size = len(entries.first)
        merge.fill(entries, batch.seq_lens[:size], batch.req_pool_indices[:size], self.req_to_token)
        return Step(entries, flash.schedule(entries, self.num_attention_heads, self.num_kv_heads, self.head_dim))

    def _cut(self, batch: Any) -> segments.Plan | None:
        """None if SGLang's own call does it."""
        starts, lengths = np.array(batch.extend_prefix_lens_cpu), np.array(batch.extend_seq_lens_cpu)
        longest = int((starts + lengths).max())
        if longest <= segments.SEGMENT and not self.always:
            return None
        return segments.plan(starts, lengths, self.req_to_token[batch.req_pool_indices, :longest])

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Tensor:
        """[t, heads * head_dim] -> the same."""
        if not self.plan:
            return super().forward_extend(q, k, v, layer, batch, save_kv_cache, **more)
        keys, values = self._pool(k, v, layer, batch, save_kv_cache)
        return flash.paged(q.view(-1, layer.tp_q_head_num, layer.head_dim), keys, values, self.plan, layer.scaling).flatten(1)

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Tensor:
        """[t, heads * head_dim] -> the same."""
        if not self.step:
            return super().forward_decode(q, k, v, layer, batch, save_kv_cache, **more)
        keys, values = self._pool(k, v, layer, batch, save_kv_cache)
        heads = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        return flash.decode(heads, keys, values, *self.step, layer.scaling).flatten(1)

    def _pool(self, k: Tensor, v: Tensor, layer: Any, batch: Any, save: bool) -> tuple[Tensor, Tensor]:
        """All keys and all values of the layer, with the new ones among them."""
        if save:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
        return self.token_to_kv_pool.get_kv_buffer(layer.layer_id)


@cache
def capture_both() -> None:
    """Have SGLang capture and replay all graphs of `FlashAttention.labels`: it has two of a batch size only with LoRA."""
    capture = DecodeCudaGraphRunner.capture_one_shape

    def each(self: Any, size: int, forward: Any, stream_idx: int | None = None, variant_label: str | None = None) -> None:
        for label in self.attn_backend.labels():
            self.attn_backend.capturing = label
            capture(self, size, forward, stream_idx, label)

    DecodeCudaGraphRunner.capture_one_shape = each
    DecodeCudaGraphRunner._resolve_lora_variant = lambda self, batch: self.attn_backend.label(batch)
