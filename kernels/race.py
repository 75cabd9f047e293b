"""The sampler's exponential race as one Triton kernel; beside `rollout.noise`, whose numbers it draws. CUDA only."""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _race(log_probs, keys, positions, greedy, scores, tokens, n, CHUNK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * CHUNK + tl.arange(0, CHUNK)
    score = tl.load(log_probs + row * n + at, mask=at < n, other=float("-inf"))
    if tl.load(greedy + row) == 0:
        golden = 0x9E3779B97F4A7C15
        start = _mix(tl.load(keys + row).to(tl.uint64) + (tl.load(positions + row) + 1).to(tl.uint64) * golden)
        bits = _mix(start + (at + 1).to(tl.uint64) * golden)
        u = ((bits & 0x7FFFFFFFFFFFFFFF) | 1).to(tl.int64).to(tl.float32) * 1.0842021724855044e-19
        rest = 1.0 - u
        # -log(1 - u) without losing small u (the correction of `rest` for its rounding, as in log1p)
        wait = tl.where(rest == 1.0, u, -tl.log(rest) * (u / (1.0 - rest)))
        score -= tl.log(wait)
    best = tl.minimum(tl.argmax(score, 0, tie_break_left=True), n - 1 - block * CHUNK)  # NaN may choose a masked one
    tl.store(scores + row * tl.num_programs(1) + block, tl.max(score, 0))
    tl.store(tokens + row * tl.num_programs(1) + block, block * CHUNK + best)


def race(log_probs: Tensor, keys: Tensor, positions: Tensor, greedy: Tensor) -> Tensor:
    """See `noise.choose`."""
    log_probs, (rows, n) = log_probs.contiguous(), log_probs.shape
    blocks = triton.cdiv(n, CHUNK)
    scores, tokens = log_probs.new_empty(rows, blocks), keys.new_empty(rows, blocks)
    if rows:
        arguments = (log_probs, keys.contiguous(), positions.contiguous(), greedy.to(torch.int8), scores, tokens, n)
        _race[(rows, blocks)](*arguments, CHUNK=CHUNK, num_warps=8)
    return tokens.gather(1, scores.argmax(-1, keepdim=True))[:, 0]
