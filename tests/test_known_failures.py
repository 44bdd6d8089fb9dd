"""One test for each failure seen in other implementations, numbered as in docs/contributing/known_failures.md.

Each that asks for a correction runs once per implementation (tests/implementations.py), which its id names. Losses and
advantages have more of theirs in tests/core and tests/test_policy_loss.py.
"""

from __future__ import annotations

import functools
import math
import warnings

import pytest
import torch
from context_slices import Slice, reduced
from implementations import IMPLEMENTATIONS, last_digits, per_implementation, widest_dtype

import rollcorr
from rollcorr import merge_statistics
from rollcorr.config import InertOptionWarning, LossConfig, RolloutCorrectionConfig
from rollcorr.core.advantages import grpo_advantages, terminal_rewards
from rollcorr.core.detail_rows import RELATIVE_ERROR
from rollcorr.core.diffusion import gaussian_log_prob, sde_step, sde_step_mean
from rollcorr.core.metric_registry import finalize
from rollcorr.correction.losses import PolicyLogProbs, policy_loss
from rollcorr.diffusion import apply_rollout_correction_to_diffusion_batch, check_diffusion_batch, check_schedule
from rollcorr.kernels.correction.dispatch import correction_kernel

NAN, INF = math.nan, math.inf
correct = functools.partial(rollcorr.correct, densities=True)  # log-ratios by hand, with log-probs of 0
TOKEN_IS = RolloutCorrectionConfig(rollout_is="token")

every_kernel = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


def pair(*log_ratios: float, rollout: float = -30.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (train, rollout, mask) of one sequence with these log-ratios, exact next to `rollout`.

    In float64, or in float32 with log-probs of 0 if the implementation under test rejects float64.
    """
    dtype = widest_dtype()
    d = torch.tensor([log_ratios], dtype=dtype)
    mu = torch.full_like(d, rollout if dtype == torch.float64 else 0.0)
    return mu + d, mu, torch.ones_like(d, dtype=torch.bool)


def batch_of(*, B: int, T: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(train, rollout, mask), float32: sequences of uneven length, holes and mismatch, the last one empty."""
    generator = torch.Generator().manual_seed(2)
    rollout = -2 * torch.rand(B, T, generator=generator)
    scale = torch.logspace(0, -4, B).unsqueeze(-1)
    train = rollout + scale * torch.randn(B, T, generator=generator)
    lengths = torch.linspace(T, 0, B).long().unsqueeze(-1)
    return train, rollout, (torch.arange(T) < lengths) & (torch.rand(B, T, generator=generator) < 0.9)


def bare(correction) -> dict[str, float]:
    return correction.metrics(prefix="")


@per_implementation
def test_01_ratio_bounds_act_on_the_ratio():
    ratios = [0.59, 0.61, 1.39, 1.41, 1.5, 1 / 1.4]
    config = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.6_1.4")
    kept = correct(*pair(*map(math.log, ratios)), config).loss_mask[0].tolist()
    assert kept == [False, True, True, False, False, True]


@per_implementation
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 200.0, -200.0])
def test_02_masked_values_change_nothing_forward_or_backward(garbage):
    train, rollout, mask = pair(0.1, 0.0, -0.2)
    mask[0, 1] = False
    spoiled = train.masked_fill(~mask, garbage), rollout.masked_fill(~mask, -garbage)
    for config in (TOKEN_IS, "decoupled_seq_is_rs", "decoupled_k3_rs_token_tis", "decoupled_geo_rs_seq_tis"):
        clean, dirty = correct(train, rollout, mask, config), correct(*spoiled, mask, config)
        assert torch.equal(clean.loss_mask, dirty.loss_mask)
        assert bare(clean) == bare(dirty)
        assert clean.weights is None or torch.equal(clean.weights, dirty.weights)
    gradients = []
    for current in (train, spoiled[0]):
        leaf = current.clone().requires_grad_()
        policies = PolicyLogProbs(log_prob=leaf, old_log_prob=train, rollout_log_prob=rollout)
        policy_loss(
            policies, torch.ones(1, 3), mask, config=TOKEN_IS, correction=correct(*spoiled, mask, TOKEN_IS)
        ).loss.backward()
        gradients.append(leaf.grad)
    assert gradients[0].isfinite().all()
    assert torch.equal(*gradients)


@per_implementation
def test_03_no_gradient_flows_through_the_weight():
    train, rollout, mask = pair(0.3, -0.4)
    leaf = train.clone().requires_grad_()
    correction = correct(leaf, rollout, mask, TOKEN_IS)
    (leaf * correction.weights).sum().backward()
    torch.testing.assert_close(leaf.grad, correction.weights.to(leaf.dtype))


@per_implementation
def test_04_shares_beyond_the_threshold_are_counted_before_truncation():
    metrics = bare(correct(*pair(math.log(3.0), math.log(0.4), 0.0, 0.0), TOKEN_IS))
    assert metrics["rollout_is_ratio_fraction_high"] == 0.25
    assert metrics["rollout_is_ratio_fraction_low"] == 0.25
    assert metrics["rollout_is_max"] == 2.0
    assert metrics["rollout_is_raw_max"] == pytest.approx(3.0)


@per_implementation
def test_05_effective_sample_size_of_zero_weights_is_zero():
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold="0.9_1.1")
    metrics = bare(correct(*pair(5.0, -5.0), config))
    assert metrics["rollout_is_eff_sample_size"] == 0.0
    assert metrics["rollout_is_oob_ratio"] == 1.0


@per_implementation
def test_06_a_wholly_rejected_batch_gives_loss_and_gradient_zero():
    train, rollout, mask = pair(1.0, 1.0)
    correction = correct(train, rollout, mask, "decoupled_geo_rs")
    assert not correction.loss_mask.any()
    assert correction.sequence_kept.tolist() == [False]
    leaf = train.clone().requires_grad_()
    output = policy_loss(
        PolicyLogProbs(log_prob=leaf, old_log_prob=train, rollout_log_prob=rollout),
        torch.ones(1, 2),
        mask,
        config="decoupled_geo_rs",
        correction=correction,
    )
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@per_implementation
@pytest.mark.slow
def test_07_more_than_2_to_the_24_elements_have_counts_and_quantiles():
    """torch.quantile raises beyond 2²⁴ elements, and a float32 count stops there. Here are three more."""
    N = (1 << 24) + 3
    rollout = torch.zeros(1).expand(N).clone()
    rollout[N // 2 :] = -0.5
    rollout[-1] = -3.0
    cu_seqlens = torch.tensor([0, N // 2, N])
    zeros, mask = torch.zeros(1).expand(N), torch.ones(1, dtype=torch.bool).expand(N)
    metrics = bare(correct(zeros, rollout, mask, "disabled", cu_seqlens=cu_seqlens, detail=True))
    assert metrics["token_count"] == N
    assert metrics["log_ratio_abs_p50"] == pytest.approx(0.5, rel=RELATIVE_ERROR)
    assert metrics["log_ratio_max"] == 3.0
    assert metrics["log_ratio_mean"] == pytest.approx((0.5 * (N - N // 2 - 1) + 3.0) / N, rel=1e-12)


def test_08_a_rejected_row_does_not_move_the_group_baseline():
    keep, groups = torch.tensor([True, True, False, True]), torch.zeros(4, dtype=torch.long)
    rewards = torch.tensor([1.0, 0.0, 0.5, 1.0])
    changed = rewards.where(keep, torch.tensor(100.0))
    assert torch.equal(
        grpo_advantages(rewards, groups, keep=keep)[keep], grpo_advantages(changed, groups, keep=keep)[keep]
    )


def test_09_a_zero_length_response_gets_no_reward_at_index_minus_one():
    mask = torch.tensor([[True, True, False], [False, False, False]])
    placed = terminal_rewards(torch.tensor([2.0, 5.0]), mask)
    assert placed.tolist() == [[0.0, 2.0, 0.0], [0.0, 0.0, 0.0]]


@per_implementation
@pytest.mark.parametrize("config", ["decoupled_token_is", "decoupled_seq_is_rs", "decoupled_k3_rs_seq_tis"])
def test_10_empty_rows_change_no_metric(config):
    train, rollout, mask = pair(0.2, -0.1, 0.4)
    alone = bare(correct(train, rollout, mask, config))
    padded = [torch.cat([x, torch.zeros(5, 3, dtype=x.dtype)]) for x in (train, rollout, mask)]
    assert bare(correct(*padded, config)) == pytest.approx(alone, rel=1e-12)


@per_implementation
@pytest.mark.parametrize("seed", range(5))
def test_11_values_under_the_mask_never_reach_a_numerator(seed):
    generator = torch.Generator().manual_seed(seed)
    train, rollout = torch.randn(2, 4, 9, generator=generator).sub(3).unbind()
    mask = torch.rand(4, 9, generator=generator) < 0.6
    noise = torch.randn(4, 9, generator=generator) * 50
    noisy = torch.where(mask, train, noise), torch.where(mask, rollout, -noise)
    assert bare(correct(*noisy, mask, "token_is")) == bare(correct(train, rollout, mask, "token_is"))


@per_implementation
@pytest.mark.parametrize("shift", [-34.2, -20.0, 0.0, 15.0, 40.0])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_12_effective_sample_size_is_at_most_one(level, shift):
    config = RolloutCorrectionConfig(rollout_is=level)
    metrics = bare(correct(*pair(shift, shift, shift), config))
    assert 0.0 <= metrics["rollout_is_eff_sample_size"] <= 1.0
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx(1.0)


@pytest.mark.parametrize("shards", range(1, 9))
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_13_no_metric_depends_on_the_number_of_shards(impl, shards):
    """Sequences of uneven length, dealt to 1–8 ranks; the seventh and eighth get no row."""
    whole, parts = batch_of(B=6, T=300 if impl != "triton" else 60), []
    for part in zip(*(x.tensor_split(shards) for x in whole), strict=True):
        parts.append(correct(*part, "decoupled_k3_rs_seq_tis", impl=impl).statistics)
    merged = finalize(merge_statistics(parts).read(), prefix="")
    expected = bare(correct(*whole, "decoupled_k3_rs_seq_tis", impl=impl))
    assert 0 < expected["rollout_rs_masked_fraction"] < 1
    assert merged == pytest.approx(expected, rel=last_digits(impl), abs=last_digits(impl))


@pytest.mark.covering(2)
@pytest.mark.parametrize("impl", ["torch"])
@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("split", ["zig-zag", "contiguous"])
def test_14_cut_sequences_are_decided_and_measured_as_whole_ones(impl, split, packed, ranks):
    """Only 'torch' merges slices: the other implementations need complete sequences and raise.

    As in ring attention: 2 k chunks, of which rank r has chunks r and 2 k − 1 − r; or k chunks."""
    whole = batch_of(B=6, T=300)
    config = RolloutCorrectionConfig.decoupled_k3_rs_seq_tis()
    chunks = 2 * ranks if split == "zig-zag" else ranks
    chunk = torch.arange(300) * chunks // 300
    owner = torch.minimum(chunk, chunks - 1 - chunk) if split == "zig-zag" else chunk
    expected = correction_kernel(*whole, config, impl="reference")
    for other in IMPLEMENTATIONS:
        if other != impl:
            with pytest.raises(ValueError, match=f"impl='{other}' needs whole sequences"):
                correction_kernel(*whole, config, reduce=lambda *_: None, impl=other)
    slices = []
    for rank in range(ranks):
        columns = (owner == rank).nonzero().flatten()
        held = [x[:, columns] for x in whole]
        cu_seqlens = torch.arange(7) * len(columns) if packed else None
        slices.append(Slice(*(x.flatten() if packed else x for x in held), cu_seqlens))
    metrics = finalize(expected.statistics.read())
    assert 0 < metrics["rollout_corr/rollout_rs_masked_fraction"] < 1
    for rank, output in enumerate(reduced(slices, config)):
        own = expected.loss_mask[:, owner == rank]
        assert torch.equal(output.loss_mask, own.flatten() if packed else own)
        weights = expected.weights[:, owner == rank]
        torch.testing.assert_close(output.weights, weights.flatten() if packed else weights, rtol=1e-6, atol=0)
        assert finalize(output.statistics.read()) == pytest.approx(metrics, rel=1e-6, abs=1e-9)


@per_implementation
def test_15_a_sequence_ratio_is_the_exponential_of_a_sum():
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=None)
    correction = correct(*pair(math.log(2.0), math.log(1.5)), config)
    torch.testing.assert_close(correction.weights, torch.full((1, 2), 3.0))


def test_16_shapes_that_would_broadcast_raise():
    train, rollout, mask = torch.zeros(3, 4), torch.zeros(3, 1), torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"\(3, 4\) and rollout_log_prob \(3, 1\) differ"):
        correct(train, rollout, mask, TOKEN_IS)
    with pytest.raises(ValueError, match=r"\(3, 4\) and response_mask \(3,\) differ"):
        correct(train, train, torch.ones(3), TOKEN_IS)


@per_implementation
def test_17_a_sequence_criterion_decides_for_the_sequence():
    config = RolloutCorrectionConfig(rollout_rs="seq_mean_k1", rollout_rs_threshold="0.9_1.1")
    correction = correct(*pair(1.0, -1.0, 0.0), config)
    assert correction.loss_mask.all()


@per_implementation
def test_18_three_distinct_policies_stay_distinct():
    """w = π_old / μ and r = π_θ / π_old: with other pairs the loss differs."""
    mu, old, theta = (torch.full((1, 1), math.log(p)) for p in (0.2, 0.3, 0.33))
    mask = torch.ones(1, 1)
    correction = correct(old, mu, mask, TOKEN_IS)
    policies = PolicyLogProbs(log_prob=theta, old_log_prob=old, rollout_log_prob=mu)
    output = policy_loss(policies, torch.ones(1, 1), mask, config=TOKEN_IS, correction=correction)
    assert output.loss.item() == pytest.approx(-(0.3 / 0.2) * (0.33 / 0.3), rel=1e-6)


@per_implementation
def test_19_kl_is_that_of_the_rollout_from_the_training_policy():
    """Exact on an enumerable pair: 1,000 tokens in the proportions of μ."""
    mu, pi = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    tokens = torch.repeat_interleave(torch.arange(3), torch.tensor([500, 300, 200]))
    train, rollout = (x.log()[tokens][None].to(widest_dtype()) for x in (pi, mu))
    metrics = bare(correct(train, rollout, torch.ones(1, 1000), "disabled"))
    kl = (mu * (mu / pi).log()).sum().item()
    assert kl > 0.1
    assert metrics["kl"] == pytest.approx(kl)
    assert metrics["k3_kl"] == pytest.approx(kl)
    assert metrics["chi2_token"] == pytest.approx((pi.square() / mu).sum().item() - 1)


@per_implementation
def test_20_alternating_differences_show_in_the_absolute_metrics():
    metrics = bare(correct(*pair(0.5, -0.5, 0.5, -0.5), "disabled"))
    assert metrics["kl"] == 0.0
    assert metrics["log_ratio_abs_mean"] == 0.5
    assert metrics["log_ratio_std"] == 0.5
    assert metrics["k3_kl"] > 0.1


@per_implementation
def test_22_the_behavior_ratio_is_applied_once_in_bypass():
    theta, mu, mask = torch.full((1, 1), math.log(0.3)), torch.full((1, 1), math.log(0.27)), torch.ones(1, 1)
    with pytest.warns(InertOptionWarning, match="rollout_is"):
        config = RolloutCorrectionConfig(rollout_is="token", bypass_mode=True)
    policies = PolicyLogProbs(log_prob=theta, rollout_log_prob=mu)
    output = policy_loss(policies, torch.ones(1, 1), mask, config=config, whole_step=True)
    assert output.loss.item() == pytest.approx(-0.3 / 0.27, rel=1e-6)


def test_24_an_option_that_cannot_act_says_so():
    with pytest.warns(InertOptionWarning, match="rollout_is='token'"):
        RolloutCorrectionConfig(rollout_is="token", bypass_mode=True, loss_type="ppo_clip")
    with pytest.warns(InertOptionWarning, match="rollout_rs_threshold"):
        RolloutCorrectionConfig(rollout_rs_threshold=2.0)


@per_implementation
def test_25_bfloat16_log_probs_are_subtracted_in_more():
    train, rollout = torch.tensor([[-0.0703125]]).bfloat16(), torch.tensor([[-5.03125]]).bfloat16()
    assert bare(correct(train, rollout, torch.ones(1, 1), "disabled"))["kl"] == -4.9609375


@per_implementation
def test_26_clamps_do_not_reach_the_reported_kl():
    metrics = bare(correct(*pair(-50.0, -50.0, rollout=-1.0), "decoupled_seq_is"))
    assert metrics["kl"] == 50.0
    assert metrics["log_ratio_min"] == -50.0
    assert metrics["rollout_is_log_min"] == -100.0


@per_implementation
def test_27_saturation_is_a_metric():
    metrics = bare(correct(*pair(-15.0, -15.0), "decoupled_seq_is"))
    assert metrics["saturated_low_fraction"] == 1.0
    assert metrics["rollout_is_eff_sample_size"] == 1.0
    assert metrics["chi2_seq_capped_fraction"] == 1.0
    assert bare(correct(*pair(30.0, 0.0), TOKEN_IS))["saturated_high_fraction"] == 0.5


@per_implementation
def test_28_weights_are_monotone_to_a_log_ratio_of_one_thousand():
    d = torch.linspace(-1000, 1000, 2001, dtype=widest_dtype())[None]
    for threshold in (2.0, None):
        config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=threshold)
        weights = correct(d, torch.zeros_like(d), torch.ones_like(d), config).weights
        assert (weights.diff() >= 0).all()
        assert weights.isfinite().all()


@per_implementation
def test_29_every_documented_bound_holds():
    """The safety bound, the ceiling and the IcePop band, each at its documented place."""
    d = torch.tensor([[-25.0, -20.0, 0.0, 20.0, 25.0]], dtype=widest_dtype())
    zeros, mask = torch.zeros_like(d), torch.ones_like(d)
    none = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=None)
    expected = torch.tensor([[-20.0, -20.0, 0.0, 20.0, 20.0]]).exp()
    torch.testing.assert_close(correct(d, zeros, mask, none).weights, expected)
    short = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=None, safety_bound=3.0)
    torch.testing.assert_close(correct(d, zeros, mask, short).weights.log()[0, 0], torch.tensor(-3.0))
    assert correct(d, zeros, mask, TOKEN_IS).weights.max() == 2.0


@per_implementation
def test_30_missing_is_not_zero():
    """A NaN placeholder is counted; a zero placeholder reads as probability 1 and shows as a density share."""
    train, rollout = torch.full((1, 4), -10.8), torch.tensor([[-10.8, NAN, -10.8, NAN]])
    correction = correct(train, rollout, torch.ones(1, 4), TOKEN_IS)
    assert bare(correction)["nonfinite_count"] == 2.0
    assert correction.weights.tolist() == [[1.0, 0.0, 1.0, 0.0]]


@per_implementation
@pytest.mark.parametrize(
    ("policy", "weights", "kept"),
    [
        ("reject_token", [1.0, 0.0, 1.0], [True, False, True]),
        ("reject_sequence", [1.0, 0.0, 1.0], [False, False, False]),
        ("neutral", [1.0, 1.0, 1.0], [True, True, True]),
    ],
)
def test_31_one_policy_for_missing_log_probs_on_every_path(policy, weights, kept):
    for missing in ((NAN, -1.0), (-1.0, NAN), (-1.0, -INF), (-1.0, INF), (INF, -1.0)):
        train, rollout = torch.tensor([[-1.0, missing[0], -1.0]]), torch.tensor([[-1.0, missing[1], -1.0]])
        correction = correct(
            train, rollout, torch.ones(1, 3), RolloutCorrectionConfig(rollout_is="token", nonfinite=policy)
        )
        assert correction.weights.tolist() == [weights]
        assert correction.loss_mask.tolist() == [kept]
        assert bare(correction)["nonfinite_count"] == 1.0
        assert bare(correction)["kl"] == 0.0
    with pytest.raises(ValueError, match="1 of 3 response tokens"):
        correct(train, rollout, torch.ones(1, 3), RolloutCorrectionConfig(nonfinite="raise"))


@per_implementation
def test_32_tool_and_observation_tokens_do_not_count():
    """Holes in the mask do not change the metrics of the sampled tokens."""
    train, rollout, _ = pair(0.1, 9.0, -0.1, 9.0, 0.2)
    mask = torch.tensor([[1, 0, 1, 0, 1]])
    sampled = [x[:, ::2] for x in (train, rollout, mask)]
    for config in ("decoupled_token_is", "decoupled_seq_is_rs"):
        alone = bare(correct(*sampled, config))
        assert bare(correct(train, rollout, mask, config)) == pytest.approx(alone, rel=last_digits())


@per_implementation
@pytest.mark.parametrize(("threshold", "kept"), [("0_2.0", [True, True, False]), ("0.5_inf", [False, True, True])])
def test_35_one_sided_bounds_work(threshold, kept):
    config = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold=threshold)
    assert correct(*pair(-2.0, 0.0, 2.0), config).loss_mask.tolist() == [kept]


@per_implementation
def test_36_micro_batches_merge_to_the_whole():
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(12, 7, generator=generator)
    train = rollout + torch.randn(12, 7, generator=generator)
    mask = torch.rand(12, 7, generator=generator) < 0.8
    whole = correct(train, rollout, mask, "decoupled_seq_is_rs").metrics()
    for size in (1, 3, 5):
        batches = zip(train.split(size), rollout.split(size), mask.split(size), strict=True)
        merged = merge_statistics(correct(*batch, "decoupled_seq_is_rs").statistics for batch in batches)
        assert finalize(merged.read()) == pytest.approx(whole, rel=last_digits(), abs=last_digits() / 10)


@per_implementation
def test_37_the_order_of_criteria_does_not_matter():
    generator = torch.Generator().manual_seed(1)
    rollout = -torch.rand(20, 6, generator=generator)
    train = rollout + torch.randn(20, 6, generator=generator) * 0.5
    one = RolloutCorrectionConfig(
        rollout_rs="token_k1,seq_mean_k1,seq_max_k2", rollout_rs_threshold="0.5_2.0,0.8_1.2,0.4"
    )
    other = RolloutCorrectionConfig(
        rollout_rs="seq_max_k2,seq_mean_k1,token_k1", rollout_rs_threshold="0.4,0.8_1.2,0.5_2.0"
    )
    first, second = (correct(train, rollout, torch.ones(20, 6), config) for config in (one, other))
    assert 0 < first.loss_mask.sum() < 120
    assert torch.equal(first.loss_mask, second.loss_mask)
    assert first.metrics() == second.metrics()


def test_39_a_schedule_off_by_one_step_is_found():
    """One model and step, scored one schedule entry later: the log-ratio compares different distributions."""
    sigmas = (1.0, 0.9, 0.75, 0.5, 0.25, 0.0)
    velocity, sample, noise = torch.randn(3, 2, 96, generator=torch.Generator().manual_seed(0)).unbind(0)
    at = {"sigma_max": 0.9, "noise_level": 0.7}
    step = sde_step(velocity, sample, sigma=sigmas[1], sigma_next=sigmas[2], **at, noise=noise)
    later = sde_step_mean(velocity, sample, sigma=sigmas[2], sigma_next=sigmas[3], **at)
    off = gaussian_log_prob(step.prev_sample, *later, reduction="sum") - step.log_prob(reduction="sum")
    assert (off.abs() > 1).all()
    with pytest.raises(ValueError, match=r"first at entry 0: 1 and 0.9 .*off by one"):
        check_schedule(sigmas[:-1], sigmas[1:])
    batch = {"rollout_log_probs": torch.zeros(1, 2), "timesteps": torch.tensor([[900.0, 750.0]])}
    check_diffusion_batch(batch, schedule=(1000.0, 900.0, 750.0))
    with pytest.raises(ValueError, match="timestep 900 of sample 0, step 0, is not in the trainer's schedule"):
        check_diffusion_batch(batch, schedule=(950.0, 750.0, 500.0))


@per_implementation
def test_40_steps_are_grouped_by_timestep_value_and_not_by_column():
    """Windows start at random, so column 0 has different timesteps per sample; only t = 500 is off here."""
    timesteps = torch.tensor([[900.0, 500.0], [500.0, 100.0], [900.0, 500.0]])
    rollout = torch.full((3, 2), -1.0)
    batch = {"rollout_log_probs": rollout, "old_log_probs": rollout + 0.25 * (timesteps == 500), "timesteps": timesteps}
    _, metrics = apply_rollout_correction_to_diffusion_batch(batch, {"rollout_is": "token"})
    by_value = {name.split("abs_diff/t_")[1]: x for name, x in metrics.items() if "abs_diff/t_" in name}
    assert by_value == {"900": 0.0, "500": 0.25, "100": 0.0}


@per_implementation
def test_41_k3_is_positive_for_a_tiny_mismatch():
    d = torch.full((4, 64), 1e-5)
    d[:, ::2] *= -1
    metrics = bare(correct(d - 1.0, torch.full_like(d, -1.0), torch.ones_like(d), "disabled"))
    size = (d - 1.0 + 1.0).double().square().mean().item() / 2
    assert metrics["k3_kl"] == pytest.approx(size, rel=1e-4)
    steps = {"rollout_log_probs": torch.zeros(1, 1), "old_log_probs": torch.full((1, 1), 1e-4)}
    _, pooled = apply_rollout_correction_to_diffusion_batch(steps, "disabled")
    assert pooled["rollout_corr/k3_kl"] == pytest.approx(5.0e-9, rel=1e-3)


@per_implementation
def test_42_a_small_spread_around_one_is_not_zero():
    """E[w²] − E[w]² in float32 is 0 here."""
    d = torch.full((4, 64), 1e-4, dtype=widest_dtype())
    d[:, ::2] *= -1
    metrics = bare(correct(d, torch.zeros_like(d), torch.ones_like(d), TOKEN_IS))
    assert metrics["rollout_is_std"] == pytest.approx(1e-4, rel=1e-6)
    assert metrics["log_ratio_std"] == pytest.approx(1e-4, rel=1e-6)


@per_implementation
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32, torch.bfloat16, torch.float64])
def test_43_results_do_not_depend_on_the_mask_dtype(dtype):
    train, rollout = (torch.randn(3, 5, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (0, 1))
    mask = torch.arange(5) < torch.tensor([5, 2, 0])[:, None]
    expected, actual = (correct(train, rollout, m, "decoupled_seq_is_rs") for m in (mask, mask.to(dtype)))
    assert torch.equal(expected.weights, actual.weights)
    assert torch.equal(expected.loss_mask, actual.loss_mask)
    assert expected.metrics() == actual.metrics()


@per_implementation
def test_44_nothing_is_clamped_before_a_sequence_sum():
    config = RolloutCorrectionConfig(
        rollout_is="sequence", rollout_is_threshold=None, rollout_rs="seq_sum_k1", rollout_rs_threshold="0_10"
    )
    metrics = bare(correct(*pair(50.0, -25.0, -24.0, rollout=-60.0), config))
    assert metrics["rollout_is_log_max"] == 1.0
    assert metrics["rollout_rs_seq_sum_k1_mean"] == -1.0


@per_implementation
def test_45_product_and_geometric_mean_have_two_names():
    product, mean = (
        correct(
            *pair(math.log(2.0), math.log(8.0)), RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold=None)
        )
        for level in ("sequence", "geometric")
    )
    torch.testing.assert_close(product.weights, torch.full((1, 2), 16.0))
    torch.testing.assert_close(mean.weights, torch.full((1, 2), 4.0))


@every_kernel
def test_46_tiny_weights_keep_their_spread(impl):
    """Half of the weights are e⁻¹⁹, half e⁻²⁰; their distances from 1 are equal."""
    d = torch.tensor([-19.0, -20.0]).repeat(3, 350)
    metrics = bare(correct(d, torch.zeros_like(d), torch.ones_like(d), TOKEN_IS, impl=impl))
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx((1 + math.e) ** 2 / (2 + 2 * math.e**2), rel=1e-6)
    assert metrics["rollout_is_std"] == pytest.approx((math.exp(-19) - math.exp(-20)) / 2, rel=1e-6)


@every_kernel
def test_47_a_huge_log_prob_changes_only_its_own_policys_perplexity(impl):
    train, rollout = torch.full((2, 1, 4), -1.0)
    train[0, 0] = -3.4e38
    metrics = bare(correct(train, rollout, torch.ones_like(train), "disabled", impl=impl))
    assert metrics["rollout_ppl"] == pytest.approx(math.e, rel=1e-6)
    assert metrics["rollout_log_ppl"] == 1.0


@every_kernel
def test_48_the_out_of_band_ratio_counts_tokens(impl):
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold="0.5_2.0")
    train = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    correction = correct(train, torch.zeros_like(train), mask, config, impl=impl)
    assert (correction.weights == 0).tolist() == [[True, True, True], [False, True, True]]
    assert bare(correction)["rollout_is_oob_ratio"] == 0.75


@every_kernel
def test_49_the_safety_bound_comes_before_icepops_band(impl):
    with pytest.warns(InertOptionWarning, match="is never reached"):
        config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold="0.5_2.0", safety_bound=0.25)
    correction = correct(torch.tensor([[3.0, 0.0, -3.0]]), torch.zeros(1, 3), torch.ones(1, 3), config, impl=impl)
    torch.testing.assert_close(correction.weights, torch.tensor([[0.25, 0.0, -0.25]]).exp())
    metrics = bare(correction)
    assert metrics["rollout_is_oob_ratio"] == 0.0
    assert metrics["rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)


def test_50_neutral_reaches_the_loss():
    config = RolloutCorrectionConfig(rollout_is="token", nonfinite="neutral")
    log_prob = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    old, rollout, mask = torch.tensor([[NAN, -2.0]]), torch.tensor([[-1.5, -2.0]]), torch.ones(1, 2)
    output = policy_loss(
        PolicyLogProbs(log_prob=log_prob, old_log_prob=old),
        torch.ones(1, 2),
        mask,
        config=config,
        correction=correct(old, rollout, mask, config),
    )
    output.loss.backward()
    assert output.loss.item() == -1.0
    assert log_prob.grad.tolist() == [[-0.5, -0.5]]


def test_inert_options_are_the_only_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RolloutCorrectionConfig(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold=2.0)
        LossConfig()
