import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train_parts import samples

from miles_hpc.train.packing import Demonstrations, pack
from miles_hpc.train.schedule import balanced, micro_batches, mini_batches, rank_micro_batches

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=60).map(np.array)
CPU = torch.device("cpu")


@given(st.integers(0, 100), st.integers(1, 8), st.integers(0, 9), st.integers(0, 9))
def test_mini_batches_are_a_partition_of_equal_parts(n, count, seed, step):
    parts = mini_batches(np.arange(n), count, seed, step)
    assert sorted(np.concatenate(parts)) == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for a, b in zip(parts, mini_batches(np.arange(n), count, seed, step), strict=True):
        np.testing.assert_array_equal(a, b)


def test_mini_batches_mix_prompts_and_change_with_the_step():
    first, second = (mini_batches(np.arange(64), 4, 0, step) for step in (0, 1))
    assert not np.array_equal(first[0], second[0])
    assert len(set(first[0] // 8)) > 2


@given(LENGTHS, st.integers(1, 8))
def test_ranks_get_every_sample_once_and_similar_work(lengths, ranks):
    shares = balanced(np.arange(len(lengths)), lengths, ranks)
    assert sorted(np.concatenate(shares)) == list(range(len(lengths)))
    load = [lengths[s].sum() for s in shares]
    assert max(load) - min(load) <= lengths.max()


@given(LENGTHS, st.integers(1, 200))
def test_micro_batches_keep_the_limit(lengths, limit):
    batches = micro_batches(np.arange(len(lengths)), lengths, limit)
    assert sorted(np.concatenate(batches)) == list(range(len(lengths)))
    assert all(len(b) and (lengths[b].sum() <= limit or len(b) == 1) for b in batches)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 200))
def test_every_rank_makes_the_same_number_of_forwards(lengths, ranks, limit):
    shares = balanced(np.arange(len(lengths)), lengths, ranks)
    batches = [rank_micro_batches(shares, lengths, limit, rank) for rank in range(ranks)]
    assert len({len(b) for b in batches}) == 1
    for share, own in zip(shares, batches, strict=True):
        np.testing.assert_array_equal(np.sort(np.concatenate([np.zeros(0, int), *own])), share)


@pytest.mark.parametrize("multiple", [1, 2, 8])
def test_a_pack_keeps_every_answer_token_and_its_place(multiple):
    s = samples()
    p = pack(s, np.array([5, 0, 9]), multiple, CPU)
    assert p.tokens.shape[1] % multiple == 0
    np.testing.assert_array_equal(p.targets, s.tokens[p.flat])
    np.testing.assert_array_equal(p.tokens[0, p.before + 1], p.targets)
    assert s.loss_mask[p.flat].all() and len(p.flat) == s.answer_lengths[[5, 0, 9]].sum()
    np.testing.assert_array_equal(np.searchsorted(s.offsets, p.flat, "right") - 1, p.sample)


def test_the_grid_holds_every_token_once():
    p = pack(samples(), np.array([3, 1, 2]), 4, CPU)
    tokens = torch.arange(p.tokens.shape[1])
    assert torch.equal(tokens[p.rows][p.cells], tokens)
    grid = p.rows.view(-1, p.longest)
    for row, start, end in zip(grid, p.bounds[:-1], p.bounds[1:], strict=True):
        assert row[: end - start].tolist() == list(range(start, end))


def test_an_empty_pack_has_tokens_but_no_answers():
    p = pack(samples(), np.zeros(0, np.int64), 2, CPU)
    assert p.tokens.shape == (1, 2) and len(p.targets) == len(p.flat) == 0


def test_a_first_token_is_never_predicted():
    p = pack(Demonstrations.of([[7, 8, 9]], [[1, 1, 1]]), np.array([0]), 1, CPU)
    assert p.targets.tolist() == [8, 9]
