"""Every Triton kernel beside its reference, in Triton's interpreter: python interpreted.py prints {kernel: largest difference}.

A process of its own: Triton decides when it is imported whether it interprets.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable

import torch
from torch import Tensor

from miles_hpc import digest
from miles_hpc.kernels import activation, dispatch, fused, heads, logprob, merge, moe, norm, race, rope, segments, sums
from miles_hpc.rollout import noise

TOKENS = 5
Pairs = list[tuple[Tensor, Tensor]]


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def rows() -> Pairs:
    x, added, weight = random(TOKENS, 24), random(TOKENS, 24, seed=1), random(24, seed=2)
    sums, normed = fused.add_rms_norm(x, added, weight, 1e-6)
    pairs = [(sums, x + added), (normed, norm.reference(x + added, weight, 1e-6))]
    pairs.append((fused.rms_norm(x, weight, 1e-6)[0], norm.reference(x, weight, 1e-6)))
    pairs.append((fused.swiglu(x, sums[:, :1].contiguous()), activation.reference(x) * sums[:, :1]))
    return [*pairs, (fused.row_sum(random(3, 5000)), random(3, 5000).sum(-1, keepdim=True))]


def gradients() -> Pairs:
    """Of the kernels with a backward of their own; 70 rows are several slabs."""
    x, weight, dout = random(70, 24), random(24, seed=1), random(70, 24, seed=2)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    norm.rms_norm(*leaves, 1e-6).backward(dout)
    scales = fused.rms_norm(x, weight, 1e-6)[1]
    pairs = list(zip(fused.rms_norm_backward(x, weight, scales, dout), [leaf.grad for leaf in leaves], strict=True))
    for factor in (None, random(70, 1, seed=3)):
        gate_up = random(70, 48, seed=4)
        parts = (f(gate_up, dout, factor) for f in (fused.swiglu_backward, activation.backward))
        pairs += list(zip(*parts, strict=True))
    return pairs


def attention_heads() -> Pairs:
    qkv, weights, angles = random(TOKENS, 7, 16), random(2, 16, seed=1), random(2, TOKENS, 1, 16, seed=2)
    pairs = []
    for norms in (weights, None):
        got, wanted = fused.heads(qkv, norms, *angles, 2, 1e-6), heads.reference(qkv, norms, *angles, 2, 1e-6)
        pairs += list(zip(got, wanted, strict=True))
    return [*pairs, (fused.rotate(qkv, *angles), rope.rotate(qkv, *angles))]


def log_probs() -> Pairs:
    logits, heat = random(TOKENS, 9000) * 5, torch.tensor([0.7])
    pairs = list(zip(fused.softmax_sums(logits, heat), logprob._sums(logits, heat), strict=True))
    own, log_sum = torch.tensor([3, 8999, -4, 0, 9000]), (logits / heat).logsumexp(-1)
    p = (logits / heat).softmax(-1)
    rows = logprob.Rows(own, heat, log_sum, -(p * p.log()).sum(-1), random(TOKENS), random(TOKENS, seed=1))
    return [*pairs, (fused.softmax_backward(logits, rows, torch.float32), logprob._backward(logits, rows, torch.float32))]


def digests() -> Pairs:
    g = torch.Generator().manual_seed(0)
    words = [torch.randint(-(2**31), 2**31, (n,), generator=g).int() for n in (1, 0, 5, sums.BLOCK, sums.BLOCK + 1, 20000)]
    return [(sums.sums(words) - digest.sums(words), torch.zeros(len(words), 2))]  # integers of 2^60: nothing is rounded


def experts() -> Pairs:
    logits = random(TOKENS, 6)
    logits[0] = torch.tensor([0.0, 3.0, 1.0, 1.0, 2.0, 1.0])
    pairs = []
    for renormalise in (True, False):
        pairs += list(zip(dispatch.route(logits, 3, renormalise), moe.route(logits, 3, renormalise), strict=True))
    ids = torch.randint(0, 6, (700, 2), generator=torch.Generator().manual_seed(0))
    places, ends = dispatch.places(ids.flatten(), 6)
    order = torch.argsort(ids.flatten(), stable=True)
    pairs += [(places[order], torch.arange(1400)), (ends, torch.bincount(ids.flatten(), minlength=6).cumsum(0))]
    x = random(700, 20)
    spread = dispatch.spread(x, places)
    return [*pairs, (spread[places], x.repeat_interleave(2, 0)), (dispatch.combine(spread, places, 2), 2 * x)]


def sampling() -> Pairs:
    log_probs = torch.log_softmax(random(40, 5000), -1)
    keys, positions, greedy = torch.arange(40) * 1_000_003 + (1 << 62), torch.arange(40), torch.arange(40) % 4 == 0
    got, wanted = (f(log_probs, keys, positions, greedy) for f in (race.race, noise.choose))
    return [(got, wanted)]


def attention_in_segments() -> Pairs:
    """Parts of three queries, of which one has more than are loaded at once: as decoded, and around the last part."""
    numbers, heads = [1, 2, merge.AHEAD + 2], 2
    values, sums = random(sum(numbers), heads, 16), random(heads, sum(numbers), seed=1) * 3
    wanted = [segments.combined(v, s) for v, s in zip(values.split(numbers), sums.t().split(numbers), strict=True)]
    number = torch.tensor(numbers, dtype=torch.int32)
    first = (number.cumsum(0) - number).int()
    pairs = [(merge.combine(values, sums, first, number), torch.stack([out for out, _ in wanted]))]
    last = (first + number - 1).long()
    out, own = values[last], sums[:, last].contiguous()
    rows = torch.arange(3, dtype=torch.int32)
    merge.add(values, sums, segments.Parts(rows, first, torch.ones_like(rows), number - 1), out, own)
    return [*pairs, (out, pairs[0][0]), (own, torch.stack([total for _, total in wanted], 1))]


def entries() -> Pairs:
    """Of decoded sequences, twice in the same memory, against what is said of them; 20 keys are a segment."""
    segments.SEGMENT = 20
    slots, room = torch.randint(0, 999, (5, 64), dtype=torch.int32), segments.Entries.room(4, 3, torch.device("cpu"))
    pairs = []
    for lengths in ([60, 1, 21, 40], [20, 5, 19]):
        some, requests = room.part(len(lengths)), torch.arange(len(lengths)) + 1
        merge.fill(some, torch.tensor(lengths), requests, slots)
        some = segments.Entries(*(x.clone() for x in some))
        cut = [(i, at, min(20, n - at)) for i, n in enumerate(lengths) for at in range(0, n, 20)]
        used = len(cut)
        pairs.append((some.number, torch.tensor([-(-n // 20) for n in lengths])))
        pairs.append((some.first, some.number.cumsum(0) - some.number))
        pairs.append((some.bounds, torch.arange(len(some.bounds)).clamp(max=used)))
        pairs.append((some.keys, torch.tensor([held for *_, held in cut] + [0] * (len(some.keys) - used))))
        pairs += [(some.table[e, :held], slots[i + 1, at : at + held]) for e, (i, at, held) in enumerate(cut)]
        x = random(len(lengths), 2, 8)
        pairs.append((merge.spread(x, some.first, some.number, len(some.keys))[:used], x[[i for i, *_ in cut]]))
    return pairs


GROUPS = (rows, gradients, attention_heads, log_probs, digests, experts, sampling, attention_in_segments, entries)
KERNELS: dict[str, Callable[[], Pairs]] = {f.__name__: f for f in GROUPS}


def difference(pairs: Pairs) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


if __name__ == "__main__":
    print(json.dumps({name: difference(kernel()) for name, kernel in KERNELS.items()}))
