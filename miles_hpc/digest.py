"""A 64-bit digest of a tensor's bytes, the same on CPU and CUDA, cheap enough for every weight sync.

Modular sum of 32-bit words, each times an odd number that depends on its position: any single changed word, a swap or a shift
changes it. It guards against transport and mapping errors, not against an adversary.
"""

from functools import cache

import torch

CHUNK_WORDS = 1 << 20
CHUNKS = {"cpu": 1, "cuda": 16}
"""Computed at a time: what stays in a CPU's cache, or keeps a GPU busy in 128 MiB."""
MODULUS = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd (Knuth, TAOCP vol. 3, 6.4)


def digest(tensor: torch.Tensor) -> str:
    """Digest of the bytes of `tensor` in row-major order, as 16 hexadecimal digits."""
    total = tensor.numel()
    for value in _sums(_words(tensor)):
        total = (total * GOLDEN + value) % MODULUS
    return f"{total:016x}"


def _sums(words: torch.Tensor) -> list[int]:
    """Of each chunk; a GPU is asked once, since an answer takes longer than a chunk."""
    factors = _factors(words.device)
    whole = len(words) - len(words) % CHUNK_WORDS
    blocks = [words[:whole].view(-1, CHUNK_WORDS), words[whole:].view(1, -1)]
    parts = [part for block in blocks for part in block.split(CHUNKS[words.device.type]) if part.numel()]
    sums = [(part * factors[: part.shape[1]]).sum(1) for part in parts]  # int32 times int64 is int64
    return torch.cat(sums).tolist() if sums else []


@cache
def _factors(device: torch.device) -> torch.Tensor:
    """[CHUNK_WORDS] odd int64 numbers."""
    position = torch.arange(1, CHUNK_WORDS + 1, dtype=torch.int64, device=device)
    return (position * (GOLDEN - MODULUS)) | 1


def _words(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if short := -len(data) % 4:
        data = torch.cat([data, data.new_zeros(short)])
    return data.view(torch.int32)
