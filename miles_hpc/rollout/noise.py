"""Sampling with counter-based noise: the token is a function of (logits, key, position) and of nothing else.

The noise is an integer hash, the same on a CPU and on a GPU; there is no generator state.
"""

import torch

_MAX63 = (1 << 63) - 1
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer on int64 values, products modulo 2**64 (Steele, Lea, Flood 2014)."""
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; torch's `>>` keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniforms(keys: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """Uniform numbers in (0, 1], float32 [rows, size], one splitmix64 stream per (key, position).

    Args:
        keys: int64 [rows].
        positions: integer [rows], position of the sampled token's predecessor in its sequence.
        size: numbers per row.
    """
    rows = mix(keys + (positions.long() + 1) * _GOLDEN)
    columns = torch.arange(1, size + 1, device=keys.device) * _GOLDEN
    bits = mix(rows[:, None] + columns[None, :])
    return ((bits & _MAX63) | 1).float() * 2.0**-63


def choose(log_probs: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, greedy: torch.Tensor) -> torch.Tensor:
    """One token per row, int64 [rows]: drawn from exp(log_probs), or the most likely one where `greedy`.

    An exponential race: argmin of E_i / p_i with E_i = -log(1 - u_i) has distribution p (the Gumbel-max trick in the form
    that keeps float32 exact where it matters, at small E).

    Args:
        log_probs: float32 [rows, vocabulary].
        keys: int64 [rows].
        positions: integer [rows].
        greedy: bool [rows].
    """
    if log_probs.is_cuda:
        from miles_hpc.kernels.race import race

        return race(log_probs, keys, positions, greedy)
    waits = uniforms(keys, positions, log_probs.shape[-1]).neg_().log1p_().neg_().log_()
    return torch.where(greedy, log_probs.argmax(-1), (log_probs - waits).argmax(-1))
