import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.train.advantage import group_advantages

REWARDS = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=64)


def test_the_formula_of_grpo():
    rewards = np.array([1, 0, 0, 1, 0.5, 0.25], np.float32)
    expected = [(r - rewards[:3].mean()) / (rewards[:3].std(ddof=1) + 1e-6) for r in rewards[:3]]
    np.testing.assert_allclose(group_advantages(rewards, 3)[:3], expected, rtol=1e-6)


def test_the_formula_of_dr_grpo():
    np.testing.assert_allclose(group_advantages(np.array([1, 0, 0, 0], np.float32), 2, "group_mean"), [0.5, -0.5, 0, 0])


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 9), st.sampled_from(["group_std", "group_mean"]))
def test_equal_rewards_give_exactly_zero(reward, size, kind):
    assert (group_advantages(np.full(2 * size, reward, np.float32), size, kind) == 0).all()


@given(REWARDS, st.sampled_from(["group_std", "group_mean"]))
def test_finite_centred_and_ordered_as_the_rewards(rewards, kind):
    rewards = np.array(rewards, np.float32)
    advantages = group_advantages(rewards, len(rewards), kind)
    assert advantages.dtype == np.float32 and np.isfinite(advantages).all()
    assert abs(advantages.mean()) < 1e-4
    order = np.argsort(rewards, kind="stable")
    assert (np.diff(advantages[order]) >= 0).all()


@given(REWARDS)
def test_groups_do_not_touch_each_other(rewards):
    rewards = np.array(rewards, np.float32)
    together = group_advantages(np.concatenate([rewards, rewards[::-1] * 2]), len(rewards))
    np.testing.assert_array_equal(together[: len(rewards)], group_advantages(rewards, len(rewards)))


@pytest.mark.parametrize(("size", "kind"), [(3, "group_std"), (2, "mean"), (0, "group_std")])
def test_what_does_not_fit_is_refused(size, kind):
    with pytest.raises(ValueError):
        group_advantages(np.zeros(4, np.float32), size, kind)
