"""The digest of tensors: equal for equal bytes, different for any change."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.digest import CHUNK_WORDS, GOLDEN, MODULUS, Sums, digest, digests, sums


def plain(tensor: torch.Tensor) -> str:
    """The same formula in Python's integers."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(data + b"\0" * (-len(data) % 4), np.int32).tolist()
    total = len(data) * GOLDEN + sum(w * (1 + 2 * GOLDEN * i) for i, w in enumerate(words))
    return f"{total % MODULUS:016x}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(1,), (3,), (5, 7), (2, 3, 4)])
def test_formula(dtype, shape):
    tensor = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
    assert digest(tensor) == plain(tensor)


def test_more_than_a_chunk():
    tensor = torch.randn(CHUNK_WORDS + 3)
    changed = tensor.clone()
    changed[-1] += 1
    assert digest(tensor) == plain(tensor) != digest(changed)


def test_layout_does_not_count_but_order_does():
    tensor = torch.randn(4, 6)
    assert digest(tensor.t().contiguous().t()) == digest(tensor)
    assert digest(tensor.t()) != digest(tensor)
    assert digest(tensor.requires_grad_()) == digest(tensor.detach())


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=50), st.data())
def test_a_changed_word_and_a_swap_change_it(words, data):
    tensor = torch.tensor(words, dtype=torch.int32)
    i, j = data.draw(st.integers(0, len(words) - 1)), data.draw(st.integers(0, len(words) - 1))
    changed = tensor.clone()
    changed[i] ^= 1 << data.draw(st.integers(0, 30))
    assert digest(changed) != digest(tensor)
    swapped = tensor.clone()
    swapped[i], swapped[j] = tensor[j], tensor[i]
    assert (digest(swapped) == digest(tensor)) == (words[i] == words[j])


def test_trailing_zeros_and_empty():
    assert digest(torch.zeros(2)) != digest(torch.zeros(3))
    assert digest(torch.zeros(0)) == f"{0:016x}"


@given(st.lists(st.integers(0, 9), max_size=5), st.integers(0, 2**32))
def test_that_of_joined_tensors_follows_from_their_sums(sizes, seed):
    g = torch.Generator().manual_seed(seed)
    parts = [torch.randint(-(2**31), 2**31, (size,), generator=g).int() for size in sizes]
    of_each = [Sums(part.nbytes, *pair) for part, pair in zip(parts, sums(parts).tolist(), strict=True)]
    assert sum(of_each, Sums(0, 0, 0)).digest == digest(torch.cat([*parts, torch.zeros(0).int()]))
    assert digests(parts) == [digest(part) for part in parts]


def test_bytes_that_are_no_whole_words_are_the_last_ones():
    half = Sums(2, 1, 0)
    assert (Sums(4, 1, 0) + half).size == 6
    with pytest.raises(ValueError, match="2 bytes are no whole words"):
        half + half
