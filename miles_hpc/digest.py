"""A 64-bit digest of a tensor's bytes, the same on CPU and CUDA, cheap enough for every weight sync.

Modular sum of 32-bit words, each times an odd number that depends on its position: any single changed word, a swap or a shift
changes it. It guards against transport and mapping errors, not against an adversary. That of tensors joined follows from two
sums of each of them, so they need not be joined, and a GPU is asked once about many.
"""

from collections.abc import Sequence
from functools import cache

import torch

CHUNK_WORDS = 1 << 20
"""Computed at a time: what stays in a CPU's cache."""
MODULUS = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd (Knuth, TAOCP vol. 3, 6.4)


def combined(size: int, plain: int, placed: int) -> str:
    """16 hexadecimal digits, from bytes, sum of words and sum of words times positions, the sums modulo 2^64.

    The word at position i counts 1 + 2 * GOLDEN * i times.
    """
    return f"{(size * GOLDEN + plain + 2 * GOLDEN * placed) % MODULUS:016x}"


def digest(tensor: torch.Tensor) -> str:
    """Digest of the bytes of `tensor` in row-major order, as 16 hexadecimal digits."""
    return digests([tensor])[0]


def digests(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Of each tensor."""
    return [combined(t.nbytes, *pair) for t, pair in zip(tensors, sums(tensors).tolist(), strict=True)]


def sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """[n, 2] int64, `plain` and `placed` of each tensor modulo 2^64, on their device; a GPU is not waited for."""
    words = [_words(tensor) for tensor in tensors]
    if words and words[0].is_cuda:
        from miles_hpc.kernels import sums as kernel

        return kernel.sums(words)
    return torch.tensor([_sums(w) for w in words], dtype=torch.int64).view(-1, 2)


def _sums(words: torch.Tensor) -> tuple[int, int]:
    plain = placed = 0
    for number, chunk in enumerate(words.split(CHUNK_WORDS)):
        part = int(chunk.sum())
        plain += part
        placed += int((chunk * _positions()[: len(chunk)]).sum()) + number * CHUNK_WORDS * part
    return _signed(plain), _signed(placed)


@cache
def _positions() -> torch.Tensor:
    return torch.arange(CHUNK_WORDS)


def _signed(number: int) -> int:
    """What an int64 holds of it."""
    return (number + MODULUS // 2) % MODULUS - MODULUS // 2


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """[any] int32."""
    if tensor.dtype == torch.int32 and tensor.dim() == 1 and tensor.is_contiguous():
        return tensor
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if short := -len(data) % 4:
        data = torch.cat([data, data.new_zeros(short)])
    if data.data_ptr() % 4:
        data = data.clone()
    return data.view(torch.int32)
