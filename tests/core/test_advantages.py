"""Advantages by hand, against plain loops, and blind to rejected rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcorr.core.advantages import (
    dr_grpo_advantages,
    gae_advantages,
    grpo_advantages,
    rloo_advantages,
    terminal_rewards,
)

NAN, INF = math.nan, math.inf
every_group_estimator = pytest.mark.parametrize("estimate", [grpo_advantages, dr_grpo_advantages, rloo_advantages])
rows = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 1.0, -2.5, 7.0]), st.sampled_from([-3, 0, 8, 2**40]), st.booleans()),
    min_size=1,
    max_size=12,
)


def by_loop(estimate, rewards, groups, keep):
    """The textbook formulas, one row at a time."""
    out = []
    for reward, group, kept in zip(rewards, groups, keep, strict=True):
        mates = [r for r, g, k in zip(rewards, groups, keep, strict=True) if g == group and k]
        n = len(mates)
        if not kept or n == 1:
            out.append(0.0)
            continue
        mean = math.fsum(mates) / n
        if estimate is rloo_advantages:
            out.append(reward - (math.fsum(mates) - reward) / (n - 1))
        elif estimate is dr_grpo_advantages:
            out.append(reward - mean)
        else:
            deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in mates) / (n - 1))
            out.append((reward - mean) / (deviation + 1e-6))
    return torch.tensor(out, dtype=torch.float64)


def test_group_estimators_by_hand():
    rewards, groups = torch.tensor([1.0, 10.0, 2.0, 3.0, 30.0]), torch.tensor([7, -1, 7, 7, -1])
    torch.testing.assert_close(dr_grpo_advantages(rewards, groups), torch.tensor([-1.0, -10.0, 0.0, 1.0, 10.0]))
    torch.testing.assert_close(rloo_advantages(rewards, groups), torch.tensor([-1.5, -20.0, 0.0, 1.5, 20.0]))
    half = math.sqrt(0.5)
    expected = torch.tensor([-1.0, -half, 0.0, 1.0, half])
    torch.testing.assert_close(grpo_advantages(rewards, groups, epsilon=1e-12), expected)


@every_group_estimator
@settings(deadline=None, max_examples=40)
@given(rows=rows)
def test_group_estimators_equal_a_plain_loop(estimate, rows):
    rewards, groups, keep = zip(*rows, strict=True)
    actual = estimate(torch.tensor(rewards).double(), torch.tensor(groups), keep=torch.tensor(keep))
    torch.testing.assert_close(actual, by_loop(estimate, rewards, groups, keep), rtol=1e-9, atol=1e-8)


@every_group_estimator
@pytest.mark.parametrize("reward", [NAN, INF, -1e30, 5.0])
def test_a_rejected_rows_reward_changes_nothing(estimate, reward):
    groups, keep = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([True, False, True, True, True])
    clean = torch.tensor([1.0, 0.0, 3.0, 2.0, 5.0])
    dirty = clean.clone()
    dirty[1] = reward
    torch.testing.assert_close(estimate(dirty, groups, keep=keep), estimate(clean, groups, keep=keep), rtol=0, atol=0)
    assert estimate(dirty, groups, keep=keep)[1] == 0
    assert not torch.equal(estimate(clean, groups), estimate(clean, groups, keep=keep))


@every_group_estimator
def test_leaving_a_row_out_equals_not_having_it(estimate):
    rewards, groups = torch.tensor([1.0, 9.0, 3.0, 4.0]), torch.tensor([5, 5, 5, 5])
    keep = torch.tensor([1, 0, 1, 1])
    without = estimate(rewards[[0, 2, 3]], groups[:3])
    torch.testing.assert_close(estimate(rewards, groups, keep=keep)[[0, 2, 3]], without)


@every_group_estimator
def test_single_rows_equal_rewards_and_rejected_groups_get_zero(estimate):
    rewards = torch.tensor([0.1, 0.1, 0.1, 4.0, 1.0, 2.0])
    groups = torch.tensor([0, 0, 0, 1, 2, 2])
    keep = torch.tensor([True, True, True, True, False, False])
    assert (estimate(rewards, groups, keep=keep).abs() < 1e-9).all()
    assert estimate(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@every_group_estimator
def test_order_and_naming_of_groups_do_not_matter(estimate):
    rewards, groups = torch.randn(9, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 3
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    expected = estimate(rewards, groups)
    torch.testing.assert_close(estimate(rewards[order], groups[order]), expected[order])
    torch.testing.assert_close(estimate(rewards, torch.tensor([100, -7, 3])[groups]), expected)


@every_group_estimator
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_results_are_float32_or_wider_without_gradient(estimate, dtype):
    rewards = torch.tensor([0, 1, 1], dtype=dtype)
    if dtype.is_floating_point:
        rewards.requires_grad_()
    advantages = estimate(rewards, torch.zeros(3, dtype=torch.int32))
    assert advantages.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not advantages.requires_grad


@every_group_estimator
def test_bad_input_to_group_estimators_raises(estimate):
    ids = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"rewards \(3,\) and group_ids \(2,\) differ"):
        estimate(torch.zeros(3), ids[:2])
    with pytest.raises(ValueError, match=r"rewards \(3,\) and keep \(3, 1\) differ"):
        estimate(torch.zeros(3), ids, keep=torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"one per sequence, \(B,\); got \(3, 1\)"):
        estimate(torch.zeros(3, 1), ids)
    with pytest.raises(ValueError, match=r"integers, got torch\.float32"):
        estimate(torch.zeros(3), torch.zeros(3))


@pytest.mark.parametrize("epsilon", [0.0, -1.0, NAN])
def test_epsilon_must_be_positive(epsilon):
    with pytest.raises(ValueError, match="epsilon must be > 0"):
        grpo_advantages(torch.zeros(1), torch.zeros(1, dtype=torch.int64), epsilon=epsilon)


def test_terminal_rewards_by_hand_skip_empty_responses():
    """A zero-length response must not write to index −1, a different token (padded) or row (packed)."""
    rewards = torch.tensor([1.0, 2.0, 3.0, 4.0])
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    expected = torch.tensor([[0.0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 3], [0, 0, 0, 0]])
    torch.testing.assert_close(terminal_rewards(rewards, mask), expected)
    packed = terminal_rewards(rewards, torch.tensor([1, 1, 0, 1, 1]), cu_seqlens=torch.tensor([0, 0, 3, 3, 5]))
    torch.testing.assert_close(packed, torch.tensor([0.0, 2, 0, 0, 4]))
    with pytest.raises(ValueError, match=r"rewards \(4, 1\) must be one per sequence, \(4,\)"):
        terminal_rewards(rewards[:, None], mask)


def test_gae_by_hand():
    """Rewards 0, 0, 1 at γ = 0.5, λ = 0.5, V = 1: δ = −0.5, −0.5, 0; A = δ_t + 0.25 A_{t+1}."""
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.ones(1, 3)
    advantages, returns = gae_advantages(rewards, values, torch.ones(1, 3), gamma=0.5, lam=0.5)
    torch.testing.assert_close(advantages, torch.tensor([[-0.625, -0.5, 0.0]]))
    torch.testing.assert_close(returns, advantages + 1)


def gae_by_loop(rewards, values, mask, gamma, lam):
    advantages = torch.zeros_like(rewards)
    for row in range(rewards.shape[0]):
        following, next_value = 0.0, 0.0
        for t in reversed(range(rewards.shape[1])):
            if mask[row, t]:
                delta = rewards[row, t] + gamma * next_value - values[row, t]
                following, next_value = delta + gamma * lam * following, values[row, t]
                advantages[row, t] = following
    return advantages


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_gae_equals_a_plain_loop_padded_and_packed(lengths, gamma, lam, seed):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, len(lengths), 9, generator=generator, dtype=torch.float64)
    inside = torch.arange(9) < torch.tensor(lengths)[:, None]
    mask = inside & (torch.rand(len(lengths), 9, generator=generator) < 0.7)
    expected = gae_by_loop(rewards, values, mask, gamma, lam)
    dirty = [x.masked_fill(~mask, NAN) for x in (rewards, values)]
    advantages, returns = gae_advantages(*dirty, mask, gamma=gamma, lam=lam)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(returns, (expected + values).masked_fill(~mask, 0), rtol=1e-12, atol=1e-12)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    flat = [x[inside] for x in (*dirty, mask)]
    packed, _ = gae_advantages(*flat, gamma=gamma, lam=lam, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(packed, expected[inside], rtol=1e-12, atol=1e-12)


def test_monte_carlo_gae_without_a_critic_is_the_reward_to_go():
    mask = torch.tensor([[1, 0, 1, 1]])
    rewards = terminal_rewards(torch.tensor([2.0]), mask)
    advantages, _ = gae_advantages(rewards, torch.zeros(1, 4), mask)
    torch.testing.assert_close(advantages, torch.tensor([[2.0, 0.0, 2.0, 2.0]]))


def test_gae_leaves_rejected_rows_out():
    rewards, values, mask = torch.ones(2, 3), torch.zeros(2, 3), torch.ones(2, 3)
    rewards[1] = NAN
    advantages, returns = gae_advantages(rewards, values, mask, keep=torch.tensor([True, False]))
    torch.testing.assert_close(advantages, torch.tensor([[3.0, 2.0, 1.0], [0.0, 0.0, 0.0]]))
    assert (returns[1] == 0).all()


def test_bad_input_to_gae_raises():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"rewards \(2, 3\) and values \(2, 1\) differ"):
        gae_advantages(x, x[:, :1], x)
    with pytest.raises(ValueError, match=r"keep \(2, 1\) must be one per sequence, \(2,\)"):
        gae_advantages(x, x, x, keep=torch.ones(2, 1))
    for option in ({"gamma": 1.1}, {"lam": -0.1}, {"gamma": NAN}):
        with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
            gae_advantages(x, x, x, **option)


def test_no_advantage_reads_tensor_values():
    with torch.device("meta"):
        rewards, groups, mask = torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.ones(3, 4)
        for estimate in (grpo_advantages, dr_grpo_advantages, rloo_advantages):
            assert estimate(rewards, groups, keep=torch.ones(3)).shape == (3,)
        tokens = terminal_rewards(rewards, mask)
        assert gae_advantages(tokens, mask, mask, keep=rewards)[0].shape == (3, 4)
        packed, cu_seqlens = torch.zeros(12), torch.arange(4)
        assert terminal_rewards(rewards, packed, cu_seqlens=cu_seqlens).shape == (12,)
        assert gae_advantages(packed, packed, packed, cu_seqlens=cu_seqlens)[1].shape == (12,)
