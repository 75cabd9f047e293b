"""The digest of tensors: equal for equal bytes, different for any change."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.digest import CHUNK_WORDS, GOLDEN, MODULUS, digest, digests


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


def test_many_at_once():
    tensors = [torch.randn(3, 4), torch.zeros(0), torch.arange(5, dtype=torch.int16), torch.arange(7, dtype=torch.int32)[1:]]
    assert digests(tensors) == [digest(tensor) for tensor in tensors] == [plain(tensor) for tensor in tensors]
