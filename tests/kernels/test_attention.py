"""Attention in tiles: against scaled-dot-product attention, and the same bits in training, prefill, chunks and decode."""

import pytest
import torch
from torch import Tensor

from miles_hpc.kernels.attention import Grid, paged, reference, varlen
from miles_hpc.kernels.tiles import Tiles, tiles

torch.set_num_threads(1)
HEAD, SCALE = 16, 0.25
LENGTHS = (1, 2, 64, 65, 130, 7)
HEADS = [(4, 2), (3, 3), (12, 1)]


def sequences(heads: int, groups: int) -> list[tuple[Tensor, ...]]:
    """q, k, v of each sequence."""
    random = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(n, h, HEAD, generator=random) for h in (heads, groups, groups)) for n in LENGTHS]


def packed(parts: list[tuple[Tensor, ...]]) -> tuple[list[Tensor], Tiles, Grid]:
    lengths = [len(q) for q, _, _ in parts]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([torch.arange(n) for n in lengths])
    q, k, v = (torch.cat([p[i] for p in parts]) for i in range(3))
    table = (starts[:-1, None] + torch.arange(max(lengths))).clamp(max=len(q) - 1)
    cells = torch.cat([torch.arange(n) + i * max(lengths) for i, n in enumerate(lengths)])
    rows = torch.zeros(len(lengths) * max(lengths), dtype=torch.long)
    rows[cells] = torch.arange(len(q))
    return [q, k, v], tiles(lengths, positions, table, q.shape[1] // k.shape[1]), Grid(rows, cells, max(lengths))


def pack_attention(parts: list[tuple[Tensor, ...]]) -> list[Tensor]:
    arrays, cut, grid = packed(parts)
    return list(varlen(*arrays, cut, grid, SCALE).split([len(q) for q, _, _ in parts]))


@pytest.mark.parametrize("heads", HEADS)
def test_values_and_gradients_are_the_references(heads):
    arrays, cut, grid = packed(sequences(*heads))
    leaves = [x.clone().requires_grad_() for x in arrays]
    out = varlen(*leaves, cut, grid, SCALE)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    ours = [out.detach(), *torch.autograd.grad(out, leaves, upstream)]
    exact = [x.double().requires_grad_() for x in arrays]
    wanted = torch.cat([reference(*part, SCALE) for part in zip(*(x.split(LENGTHS) for x in exact), strict=True)])
    theirs = [wanted.detach(), *torch.autograd.grad(wanted, exact, upstream.double())]
    for got, value in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.double(), value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", HEADS)
def test_a_sequence_does_not_depend_on_its_company(heads):
    parts = sequences(*heads)
    together = pack_attention(parts)
    for part, out in zip(parts, together, strict=True):
        assert torch.equal(pack_attention([part])[0], out)
    assert all(torch.equal(a, b) for a, b in zip(pack_attention(parts[::-1])[::-1], together, strict=True))


@pytest.mark.parametrize("heads", HEADS)
def test_decode_and_chunks_from_a_pool_give_the_bits_of_the_pack(heads):
    parts = sequences(*heads)
    wanted = pack_attention(parts)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(3))
    keys, values = (torch.full((400, heads[1], HEAD), float("nan")) for _ in range(2))
    table = torch.zeros(len(parts), max(LENGTHS), dtype=torch.int32)
    used = 0
    for row, (_, k, v) in zip(table, parts, strict=True):
        slots = order[used : used + len(k)]
        row[: len(k)], keys[slots], values[slots] = slots.int(), k, v
        used += len(k)
    for chunk in (1, 5, 64):
        for start in range(0, max(LENGTHS), chunk):
            live = [i for i, n in enumerate(LENGTHS) if n > start]
            ends = [min(LENGTHS[i], start + chunk) for i in live]
            q = torch.cat([parts[i][0][start:end] for i, end in zip(live, ends, strict=True)])
            at = torch.cat([torch.arange(start, end) for end in ends])
            cut = tiles([end - start for end in ends], at, table[live], heads[0] // heads[1])
            out = paged(q, keys, values, cut, SCALE)
            assert torch.equal(out, torch.cat([wanted[i][start:end] for i, end in zip(live, ends, strict=True)])), chunk
