"""Contexts cut into segments: what each query sees, counted out against plain attention."""

import numpy as np
import pytest
import torch
from torch import Tensor

from miles_hpc.kernels import segments
from miles_hpc.kernels.attention import reference

torch.set_num_threads(1)
LENGTHS = np.array([5, 16, 17, 33, 70, 1, 32])
STARTS = [0 * LENGTHS, np.array([2, 15, 16, 20, 16, 0, 31]), np.array([4, 0, 15, 32, 69, 0, 3])]
SCALE = 0.3


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT", 16)


def parts(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """[n, heads, d] of n queries that are the last ones of the keys, or see all; log-sums [n, heads]."""
    s = torch.einsum("qhd,khd->qhk", q, k) * SCALE
    hidden = torch.arange(len(k)) > torch.arange(len(q))[:, None, None] + len(k) - len(q)
    s = s.masked_fill(hidden & causal, float("-inf"))
    return torch.einsum("qhk,khd->qhd", s.softmax(-1), v), s.logsumexp(-1)


@pytest.mark.parametrize("rows", [64, 1 << 16])
@pytest.mark.parametrize("starts", STARTS, ids=["whole", "middles", "ends"])
def test_a_plan_computes_attention(starts, rows, monkeypatch):
    monkeypatch.setattr(segments, "ROWS", rows)
    random = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(300, 2, 8, generator=random) for _ in range(2))
    place, ends = torch.randperm(300, generator=random), np.cumsum(LENGTHS)
    slots = [place[end - n : end] for end, n in zip(ends, LENGTHS, strict=True)]
    table = torch.nn.utils.rnn.pad_sequence(slots, batch_first=True).int()
    whole = [torch.randn(int(n), 2, 8, generator=random) for n in LENGTHS]
    q = torch.cat([x[s:] for x, s in zip(whole, starts, strict=True)])
    plan = segments.plan(starts, LENGTHS - starts, table)
    seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in q]
    for some in plan.rounds:
        values_of, sums = _call(q[some.rows], keys, values, some.call, causal=False)
        for query, first, step, number in zip(*(x.tolist() for x in some.parts), strict=True):
            seen[query] = [(values_of[i], sums[i]) for i in range(first, first + number * step, step)]
    own = _call(q, keys, values, plan.own, causal=True)
    for before, last in zip(seen, zip(*own, strict=True), strict=True):
        before.append(last)
    out = [segments.combined(*map(torch.stack, zip(*each, strict=True)))[0] for each in seen]
    wanted = [reference(x, keys[i], values[i], SCALE)[s:] for x, i, s in zip(whole, slots, starts, strict=True)]
    torch.testing.assert_close(torch.stack(out), torch.cat(wanted), rtol=1e-5, atol=1e-5)
    calls = [plan.own, *(some.call for some in plan.rounds)]
    assert all(call.longest == max(call.bounds.diff()) for call in calls) and (rows == 64 or len(calls) == 2)


def _call(q: Tensor, keys: Tensor, values: Tensor, call: segments.Call, causal: bool) -> tuple[Tensor, Tensor]:
    bounds = call.bounds.tolist()
    each = zip(bounds, bounds[1:], call.table.long(), call.keys.tolist(), strict=False)
    found = [parts(q[a:b], keys[slots[:n]], values[slots[:n]], causal) for a, b, slots, n in each]
    return torch.cat([out for out, _ in found]), torch.cat([total for _, total in found])


def test_what_fits_into_a_segment_is_not_cut():
    plan = segments.plan(np.array([0, 3]), np.array([16, 13]), torch.zeros(2, 16, dtype=torch.int32))
    assert not plan.rounds and plan.own.bounds.tolist() == [0, 16, 29] and plan.own.keys.tolist() == [16, 16]
