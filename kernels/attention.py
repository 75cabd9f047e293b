"""Causal attention whose result for a token depends on its own sequence up to it only.

Keys are taken in blocks of BLOCK from position 0, in ascending order, with a running maximum (arXiv 2205.14135). A block that
a row does not see changes nothing in it: the maximum stays, exp(-inf) is 0, and adding 0 is exact. So prefill, chunked
prefill, decode and training agree bit for bit, with whatever other sequences they run.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from miles_hpc.kernels.tiles import BLOCK, Tiles

ONES = 8
"""Columns added to the values: the first is 1 and sums the weights in the same matrix product."""
LOWEST = -1e30


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One sequence: [t, heads, d], [t, groups, d] twice -> [t, heads, d]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)


class Grid(NamedTuple):
    """The sequences of a pack as a padded grid [b, longest], for the backward."""

    rows: Tensor
    """[b * longest] int64, token of each cell; padding repeats token 0."""
    cells: Tensor
    """[t] int64, grid cell of each token."""
    longest: int


def varlen(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, grid: Grid, scale: float) -> Tensor:
    """Attention over packed whole sequences, with gradient.

    Args:
        q: [t, heads, d].
        k: [t, groups, d].
        v: [t, groups, d].
        tiles: of all tokens; slots are tokens of the pack.
        grid: of the same pack.
        scale: of the scores.

    Returns:
        [t, heads, d].
    """
    return _Varlen.apply(q, k, v, tiles, grid, scale)


def paged(q: Tensor, keys: Tensor, values: Tensor, tiles: Tiles, scale: float) -> Tensor:
    """Attention of new tokens over a pool of keys and values, without gradient.

    Args:
        q: [t, heads, d].
        keys: [slots, groups, d].
        values: [slots, groups, d].
        tiles: of the new tokens; slots are those of the pool.
        scale: of the scores.

    Returns:
        [t, heads, d].
    """
    return _forward(q, keys, values, tiles, scale)[0]


def _forward(q: Tensor, keys: Tensor, values: Tensor, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
    """[t, heads, d] in the type of q, and log of the sum of exponentials [t, heads] float32."""
    d, groups = q.shape[-1], keys.shape[1]
    tile = _to_tiles(q.float() * scale, tiles, groups)
    peak = tile.new_full((*tile.shape[:3], 1), LOWEST)
    total = tile.new_zeros(*tile.shape[:3], d + ONES)
    for block, chosen in enumerate(tiles.select):
        whole = len(chosen) == len(tile)
        before = (tile, peak, total) if whole else (tile[chosen], peak[chosen], total[chosen])
        after = _block(*before, keys, values, tiles, block, chosen)
        if whole:
            peak, total = after
        else:
            peak[chosen], total[chosen] = after
    weight = total[..., d : d + 1]
    out = _from_tiles(total[..., :d] / weight, tiles)
    return out.to(q.dtype), _from_tiles(peak + weight.log(), tiles)[..., 0]


def _block(
    tile: Tensor, peak: Tensor, total: Tensor, keys: Tensor, values: Tensor, tiles: Tiles, block: int, chosen: Tensor
) -> tuple[Tensor, Tensor]:
    """Running maximum and weighted sum after one more block of keys; n chosen tiles, [n, groups, rows, ...] each."""
    n, groups, rows, d = tile.shape
    slots = tiles.slots[chosen, block]
    at = torch.arange(block * BLOCK, (block + 1) * BLOCK, device=slots.device)
    k = keys[slots].float().transpose(1, 2).reshape(-1, BLOCK, d)
    # Slots past the end hold anything, also NaN, and 0 * NaN is not 0.
    v = values[slots].float().masked_fill((at > tiles.last[chosen, None])[..., None, None], 0.0)
    v = torch.cat([v, v.new_ones(n, BLOCK, groups, 1), v.new_zeros(n, BLOCK, groups, ONES - 1)], -1)
    scores = torch.bmm(tile.reshape(-1, rows, d), k.transpose(1, 2)).view(n, groups, rows, BLOCK)
    scores = scores.masked_fill((at > tiles.positions[chosen][..., None])[:, None], float("-inf"))
    new = torch.maximum(peak, scores.amax(-1, keepdim=True))
    p = torch.exp(scores - new).view(-1, rows, BLOCK)
    added = torch.bmm(p, v.transpose(1, 2).reshape(-1, BLOCK, d + ONES)).view(n, groups, rows, d + ONES)
    return new, total * torch.exp(peak - new) + added


def _to_tiles(q: Tensor, tiles: Tiles, groups: int) -> Tensor:
    """[t, heads, d] -> [n, groups, rows, d]."""
    n, per = tiles.tokens.shape
    tile = q[tiles.tokens].view(n, per, groups, tiles.group, -1).transpose(1, 2).reshape(n, groups, per * tiles.group, -1)
    return F.pad(tile, (0, 0, 0, tiles.rows - tile.shape[2]))


def _from_tiles(tile: Tensor, tiles: Tiles) -> Tensor:
    """[n, groups, rows, d] -> [t, heads, d]."""
    n, groups, _, d = tile.shape
    tile = tile[:, :, : tiles.per * tiles.group].reshape(n, groups, tiles.per, tiles.group, d)
    return tile.transpose(1, 2).reshape(n * tiles.per, groups * tiles.group, d)[tiles.cells]


class _Varlen(torch.autograd.Function):
    """In tiles, on a CPU."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, grid: Grid, scale: float) -> Tensor:
        out, log_sum = _forward(q, k, v, tiles, scale)
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.grid, ctx.scale = grid, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, out, log_sum = ctx.saved_tensors
        delta = (dout.float() * out.float()).sum(-1, keepdim=True)
        grads = _backward(q, k, v, dout, log_sum[..., None], delta, ctx.grid, ctx.scale)
        return *(g.to(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)), None, None, None


def _backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, log_sum: Tensor, delta: Tensor, grid: Grid, scale: float
) -> list[Tensor]:
    """Gradients of q, k, v (arXiv 2205.14135, algorithm 4), on the padded grid; every sum is a matrix product.

    log_sum and delta: [t, heads, 1] float32.
    """
    group = q.shape[1] // k.shape[1]
    q, dout, log_sum, delta = (_stacked(x, grid, group) for x in (q, dout, log_sum, delta))
    k, v = (_stacked(x, grid, 1) for x in (k, v))
    s = torch.matmul(q, k.transpose(-1, -2)) * scale
    p = torch.exp(s - log_sum).masked_fill(_hidden(grid, group), 0.0)
    ds = p * (torch.matmul(dout, v.transpose(-1, -2)) - delta) * scale
    dq, dk, dv = torch.matmul(ds, k), torch.matmul(ds.transpose(-1, -2), q), torch.matmul(p.transpose(-1, -2), dout)
    return [_unstacked(dq, grid, group), _unstacked(dk, grid, 1), _unstacked(dv, grid, 1)]


def _hidden(grid: Grid, group: int) -> Tensor:
    """[b, 1, group * longest, longest] bool: padding, or a key after the query."""
    b, longest = len(grid.rows) // grid.longest, grid.longest
    real = torch.zeros(b * longest, dtype=torch.bool, device=grid.rows.device)
    real[grid.cells] = True
    after = torch.ones(longest, longest, dtype=torch.bool, device=real.device).triu(1)
    return (after | ~real.view(b, longest, 1)).repeat(1, group, 1)[:, None]


def _stacked(x: Tensor, grid: Grid, group: int) -> Tensor:
    """[t, groups * group, d] -> float32 [b, groups, group * longest, d]."""
    cells = x.float()[grid.rows].view(-1, grid.longest, x.shape[1] // group, group, x.shape[2])
    return cells.permute(0, 2, 3, 1, 4).reshape(len(cells), x.shape[1] // group, group * grid.longest, x.shape[2])


def _unstacked(x: Tensor, grid: Grid, group: int) -> Tensor:
    """[b, groups, group * longest, d] -> [t, groups * group, d]."""
    b, groups, _, d = x.shape
    cells = x.view(b, groups, group, grid.longest, d).permute(0, 3, 1, 2, 4)
    return cells.reshape(b * grid.longest, groups * group, d)[grid.cells]
