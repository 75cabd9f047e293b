"""Every Triton kernel beside its reference, in Triton's interpreter: python interpreted.py prints {kernel: largest difference}.

A process of its own: Triton decides when it is imported whether it interprets.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable

import torch
from torch import Tensor

from miles_hpc.kernels import activation, dispatch, fused, heads, logprob, moe, norm, race, rope
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
    vectors = (own, heat, log_sum, -(p * p.log()).sum(-1), random(TOKENS), random(TOKENS, seed=1), torch.float32)
    return [*pairs, (fused.softmax_backward(logits, *vectors), logprob._backward(logits, *vectors))]


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


GROUPS = (rows, gradients, attention_heads, log_probs, experts, sampling)
KERNELS: dict[str, Callable[[], Pairs]] = {f.__name__: f for f in GROUPS}


def difference(pairs: Pairs) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


if __name__ == "__main__":
    print(json.dumps({name: difference(kernel()) for name, kernel in KERNELS.items()}))
