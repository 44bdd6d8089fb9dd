"""Modes and denominators: how the choice between three policies changes a gradient."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import per_implementation

from rollcorr.config import InertOptionWarning, LossConfig, RolloutCorrectionConfig, checks
from rollcorr.core.aggregation import Denominators
from rollcorr.core.mergeable_statistics import merge_statistics
from rollcorr.correction import correct
from rollcorr.correction.denominators import aggregate, count_denominators, loss_denominators
from rollcorr.correction.losses import PolicyLogProbs, loss_metrics, policy_loss

NAN, INF = math.nan, math.inf
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
BYPASS = ["ppo_clip", "reinforce"]
every_mode = pytest.mark.parametrize("mode", MODES)
every_normalizer = pytest.mark.parametrize("normalizer", ["kept", "original", "weights"])


def loss_config(mode=None, **kwargs):
    return LossConfig(
        loss_agg_mode=mode, loss_scale_factor=8.0 if mode == "seq-mean-token-sum-norm" else None, **kwargs
    )


def rejecting(loss_type=None, **kwargs):
    """Token weights and a token band, decoupled or in bypass mode: both act on about half of the random batches."""
    values = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.7", **kwargs}
    if loss_type != "ppo_clip":
        values["rollout_is"] = "token"
    elif values.get("normalizer") == "weights":
        values["normalizer"] = "kept"  # the same, and said so by a warning
    return RolloutCorrectionConfig(bypass_mode=loss_type is not None, loss_type=loss_type or "ppo_clip", **values)


def random_batch(seed, batch=6, width=5):
    """Three distinct policies, a fourth for reference, advantages, entropy and a mask with holes; float64."""
    generator = torch.Generator().manual_seed(seed)
    base, *noise, advantages, entropy = torch.randn(6, batch, width, generator=generator, dtype=torch.float64)
    old, rollout, ref = (base - 2 + 0.3 * x for x in noise)
    mask = torch.rand(batch, width, generator=generator) < 0.7
    policies = PolicyLogProbs(log_prob=base - 2, old_log_prob=old, rollout_log_prob=rollout, ref_log_prob=ref)
    return policies, advantages, mask, entropy.abs()


def bypass_only(policies):
    return dataclasses.replace(policies, old_log_prob=None)


def without_rollout(policies):
    """For plain PPO, which has no use for it and warns of it."""
    return dataclasses.replace(policies, rollout_log_prob=None)


def with_gradient(policies):
    leaf = policies.log_prob.detach().clone().requires_grad_()
    return leaf, dataclasses.replace(policies, log_prob=leaf)


def take(rows, policies, *tensors):
    parts = {f.name: getattr(policies, f.name) for f in dataclasses.fields(policies)}
    return PolicyLogProbs(**{k: None if v is None else v[rows] for k, v in parts.items()}), *(x[rows] for x in tensors)


def take_correction(correction, rows):
    weights = None if correction.weights is None else correction.weights[rows]
    return dataclasses.replace(correction, weights=weights, loss_mask=correction.loss_mask[rows])


# ── which policy plays which part ────────────────────────────────────────────────────────────────────────────────────


@per_implementation
def test_each_mode_puts_three_distinct_policies_in_their_places():
    """One token, π_θ = e^−1, π_old = e^−1.1, μ = e^−1.25, A = 2: by hand, no clip binds."""
    tensors = {"log_prob": -1.0, "old_log_prob": -1.1, "rollout_log_prob": -1.25}
    policies = PolicyLogProbs(**{name: torch.tensor([[x]], dtype=torch.float64) for name, x in tensors.items()})
    one, advantages, wide = torch.ones(1, 1), torch.full((1, 1), 2.0), LossConfig(clip_ratio_high=0.5)

    config = RolloutCorrectionConfig.decoupled_token_is()
    correction = correct(policies.old_log_prob, policies.rollout_log_prob, one, config)
    decoupled = policy_loss(policies, advantages, one, config=config, loss=wide, correction=correction)
    assert decoupled.loss.item() == pytest.approx(-math.exp(0.15) * math.exp(0.1) * 2, rel=1e-6)

    two = bypass_only(policies)
    ppo = policy_loss(
        two, advantages, one, config=RolloutCorrectionConfig.bypass_ppo_clip(), loss=wide, whole_step=True
    )
    assert ppo.loss.item() == pytest.approx(-math.exp(0.25) * 2, rel=1e-6)

    reinforce = policy_loss(two, advantages, one, config="bypass_pg_is", loss=wide, whole_step=True)
    assert reinforce.loss.item() == pytest.approx(-math.exp(0.25) * -1.0 * 2, rel=1e-6)

    plain = policy_loss(without_rollout(policies), advantages, one, config=None, loss=wide)
    assert plain.loss.item() == pytest.approx(-math.exp(0.1) * 2, rel=1e-6)


def test_the_kl_penalty_takes_the_log_probs_over_the_whole_vocabulary():
    """One token that a truncation made certain: log π = 0 for the ratio, log 0.5 against a reference of log 0.25."""
    leaf = torch.tensor([[math.log(0.5)]], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1)
    reference = zero + math.log(0.25)
    policies = PolicyLogProbs(log_prob=zero, old_log_prob=zero.clone(), ref_log_prob=reference, full_log_prob=leaf)
    output = policy_loss(policies, one, one, config=None, loss=LossConfig(kl_coef=3.0, kl_estimator="k1"))
    assert output.regularization.item() == pytest.approx(3 * math.log(2))
    output.loss.backward()
    assert leaf.grad.item() == pytest.approx(3.0)
    with pytest.raises(ValueError, match="full_log_prob"):
        PolicyLogProbs(log_prob=zero, full_log_prob=torch.zeros(1, 2))


@per_implementation
def test_bypass_ppo_clip_never_applies_the_behavior_ratio_twice():
    policies, advantages, mask, _ = random_batch(0)
    plain = policy_loss(bypass_only(policies), advantages, mask, config="bypass_ppo_clip", whole_step=True)
    with pytest.warns(InertOptionWarning, match="rollout_is='sequence' does not weight the loss in bypass mode"):
        config = RolloutCorrectionConfig(bypass_mode=True, rollout_is="sequence")
    measured = policy_loss(bypass_only(policies), advantages, mask, config=config, whole_step=True)
    assert measured.loss == plain.loss
    assert measured.correction.metrics()["rollout_corr/rollout_is_mean"] != 1.0


@per_implementation
def test_bypass_corrections_are_against_the_current_policy():
    """old == rollout would make every bypass metric 0; the correction here compares π_θ with μ."""
    policies, advantages, mask, _ = random_batch(1)
    output = policy_loss(bypass_only(policies), advantages, mask, config="bypass_ppo_clip", whole_step=True)
    expected = (policies.rollout_log_prob - policies.log_prob)[mask].mean().item()
    assert output.correction.metrics()["rollout_corr/kl"] == pytest.approx(expected)
    assert loss_metrics(output.statistics)["actor/policy_kl"] == pytest.approx(expected)


@per_implementation
def test_reinforce_weights_carry_no_gradient():
    policies, advantages, mask, _ = random_batch(2)
    leaf, policies = with_gradient(bypass_only(policies))
    config = RolloutCorrectionConfig.bypass_pg_is()
    policy_loss(
        policies, advantages, mask, config=config, loss=loss_config("token-sum"), whole_step=True
    ).loss.backward()
    weights = correct(leaf, policies.rollout_log_prob, mask, config).weights.double()
    torch.testing.assert_close(leaf.grad, -(weights * advantages).masked_fill(~mask, 0.0))


@per_implementation
def test_reinforce_without_weights_still_rejects():
    policies, advantages, mask, _ = random_batch(3)
    leaf, policies = with_gradient(bypass_only(policies))
    config = RolloutCorrectionConfig.bypass_pg_geo_rs("0.9_1.1")
    output = policy_loss(policies, advantages, mask, config=config, loss=loss_config("token-sum"), whole_step=True)
    output.loss.backward()
    assert 0 < output.loss_mask.sum() < mask.sum()
    torch.testing.assert_close(leaf.grad, -advantages.masked_fill(~output.loss_mask, 0.0))


@per_implementation
@pytest.mark.parametrize("nonfinite", ["reject_token", "reject_sequence", "neutral"])
@pytest.mark.parametrize("loss_type", [None, *BYPASS])
def test_a_missing_rollout_log_prob_never_reaches_the_loss(nonfinite, loss_type):
    policies, advantages, mask, _ = random_batch(4)
    mask[0, :2] = True
    rollout = policies.rollout_log_prob.clone()
    rollout[0, 0], rollout[0, 1] = NAN, -INF
    leaf, policies = with_gradient(dataclasses.replace(policies, rollout_log_prob=rollout))
    config, correction = rejecting(loss_type, nonfinite=nonfinite), None
    if loss_type is None:
        correction = correct(policies.old_log_prob, rollout, mask, config)
    else:
        policies = bypass_only(policies)
    output = policy_loss(policies, advantages, mask, config=config, correction=correction, whole_step=True)
    output.loss.backward()
    assert output.loss.isfinite()
    assert leaf.grad.isfinite().all()
    if loss_type is not None:  # decoupled, a clip of π_θ / π_old may bind as well
        assert (leaf.grad[0, :2] != 0).all() == (nonfinite == "neutral")
    assert output.loss_mask[0, :2].all() == (nonfinite == "neutral")


@pytest.mark.parametrize("missing", [NAN, INF])
@pytest.mark.parametrize("loss_type", [None, *BYPASS])
@pytest.mark.parametrize("policy", ["old_log_prob", "log_prob"])
def test_neutral_keeps_what_is_missing_out_of_the_ratio(missing, loss_type, policy):
    """A missing π_old or μ: r = 1 and w = 1, so −A ∇log π_θ. A missing π_θ: 0. The other tokens do not change."""
    policies, advantages, mask, _ = random_batch(4)
    mask[0, :3] = True
    if loss_type is not None:
        policies = dataclasses.replace(bypass_only(policies))
        policy = policy.replace("old_log_prob", "rollout_log_prob")

    def run(value):
        values = getattr(policies, policy).clone()
        values[0, :2] = value
        leaf, batch = with_gradient(dataclasses.replace(policies, **{policy: values}))
        config = RolloutCorrectionConfig(
            rollout_is=None if loss_type == "ppo_clip" else "token",
            nonfinite="neutral",
            bypass_mode=loss_type is not None,
            loss_type=loss_type or "ppo_clip",
        )
        correction = None
        if loss_type is None:
            correction = correct(batch.old_log_prob, batch.rollout_log_prob, mask, config)
        output = policy_loss(
            batch,
            advantages,
            mask,
            config=config,
            loss=loss_config("token-sum"),
            correction=correction,
            whole_step=True,
        )
        output.loss.backward()
        return output, leaf.grad

    output, gradient = run(missing)
    assert output.loss.isfinite()
    expected = torch.zeros(2, dtype=torch.float64) if policy == "log_prob" else -advantages[0, :2]
    torch.testing.assert_close(gradient[0, :2], expected)
    _, without = run(-1.0)
    assert torch.equal(gradient[0, 2:], without[0, 2:])
    assert torch.equal(gradient[1:], without[1:])


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@per_implementation
def test_bypass_mode_refuses_what_would_apply_a_ratio_twice_or_be_ignored():
    policies, advantages, mask, _ = random_batch(5)
    config = RolloutCorrectionConfig.bypass_pg_is()
    with pytest.raises(ValueError, match="another tensor than rollout_log_prob"):
        policy_loss(policies, advantages, mask, config=config)
    correction = correct(policies.old_log_prob, policies.rollout_log_prob, mask, config)
    with pytest.raises(ValueError, match="this ratio twice"):
        policy_loss(bypass_only(policies), advantages, mask, config=config, correction=correction)
    with pytest.raises(ValueError, match="bypass mode needs rollout_log_prob"):
        policy_loss(PolicyLogProbs(log_prob=policies.log_prob), advantages, mask, config=config)
    same = dataclasses.replace(policies, old_log_prob=policies.rollout_log_prob)
    assert policy_loss(same, advantages, mask, config=config, whole_step=True).loss.isfinite()


@per_implementation
def test_decoupled_mode_refuses_a_correction_that_is_missing_or_another():
    policies, advantages, mask, _ = random_batch(6)
    config = RolloutCorrectionConfig.decoupled_token_is()
    with pytest.raises(ValueError, match="no correction was given"):
        policy_loss(policies, advantages, mask, config=config)
    other = correct(policies.old_log_prob, policies.rollout_log_prob, mask, "decoupled_seq_is")
    with pytest.raises(ValueError, match="correction was computed with"):
        policy_loss(policies, advantages, mask, config=config, correction=other)
    with pytest.raises(ValueError, match="decoupled mode needs old_log_prob"):
        policy_loss(bypass_only(policies), advantages, mask, config=None)
    same = dataclasses.replace(policies, old_log_prob=policies.rollout_log_prob)
    with pytest.raises(ValueError, match=r"one tensor.*set bypass_mode=True"):
        policy_loss(same, advantages, mask, config=None)


@per_implementation
def test_batch_normalisation_over_micro_batches_in_bypass_mode_is_refused():
    policies, advantages, mask, _ = random_batch(7)
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_batch_normalize=True, bypass_mode=True, loss_type="reinforce"
    )
    assert policy_loss(bypass_only(policies), advantages, mask, config=config, whole_step=True).loss.isfinite()
    whole = count_denominators(mask)
    with pytest.raises(ValueError, match="normalizer='weights' instead"):
        policy_loss(bypass_only(policies), advantages, mask, config=config, denominators=whole)


def test_shapes_coefficients_and_modes_are_checked():
    policies, advantages, mask, entropy = random_batch(8)
    policies = without_rollout(policies)
    with pytest.raises(ValueError, match=r"log_prob \(6, 5\) and old_log_prob \(6, 1\) differ"):
        PolicyLogProbs(log_prob=policies.log_prob, old_log_prob=policies.log_prob[:, :1])
    with pytest.raises(ValueError, match=r"log_prob \(6, 5\) and response_mask \(6, 1\) differ"):
        policy_loss(policies, advantages, mask[:, :1], config=None)
    with pytest.raises(ValueError, match=r"advantages \(6, 1\) do not fit"):
        policy_loss(policies, advantages[:, :1], mask, config=None)
    with pytest.raises(ValueError, match=r"log_prob \(6, 5\) and entropy \(6, 1\) differ"):
        policy_loss(policies, advantages, mask, config=None, entropy=entropy[:, :1])
    no_reference = dataclasses.replace(policies, ref_log_prob=None)
    with pytest.raises(ValueError, match=r"kl_coef=0.1 needs ref_log_prob"):
        policy_loss(no_reference, advantages, mask, config=None, loss=LossConfig(kl_coef=0.1))
    with pytest.raises(ValueError, match=r"entropy_coef=0.1 needs entropy"):
        policy_loss(policies, advantages, mask, config=None, loss=LossConfig(entropy_coef=0.1))
    with pytest.raises(ValueError, match="set loss_scale_factor"):
        policy_loss(policies, advantages, mask, config=None, loss=LossConfig(loss_agg_mode="seq-mean-token-sum-norm"))
    with pytest.raises(ValueError, match="unknown loss_agg_mode 'mean'"):
        aggregate(advantages, mask, "mean")


# ── denominators ─────────────────────────────────────────────────────────────────────────────────────────────────────


@per_implementation
def test_loss_denominators_by_hand_and_as_the_correction_says():
    policies, advantages, mask, _ = random_batch(9)
    for normalizer in ("kept", "original", "weights"):
        config = rejecting(normalizer=normalizer)
        correction = correct(policies.old_log_prob, policies.rollout_log_prob, mask, config)
        output = policy_loss(policies, advantages, mask, config=config, correction=correction)
        kept, weights = correction.loss_mask, correction.weights.double()
        expected = {
            "kept": (kept.sum(), kept.any(1).sum()),
            "original": (mask.sum(), mask.any(1).sum()),
            "weights": (
                weights[kept].sum(),
                sum(w[k].mean() for w, k in zip(weights, kept, strict=True) if k.any()),
            ),
        }[normalizer]
        for counts in (output.counts, correction.denominators()):
            assert float(counts.tokens) == pytest.approx(float(expected[0]), rel=1e-6)
            assert float(counts.sequences) == pytest.approx(float(expected[1]), rel=1e-6)


def test_the_three_normalizers_by_hand():
    """Two rows, losses −A: kept [1, 2 | 3], rejected one token of each row; weights [½, 1 | 2]."""
    per_token = torch.tensor([[0.5 * 1.0, 1.0 * 2.0, 9.0], [2.0 * 3.0, 9.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    kept = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    weights = torch.tensor([[0.5, 1.0, 7.0], [2.0, 7.0, 0.0]])
    lengths = torch.tensor([3, 2])
    sums, total = (2.5, 6.0), 8.5
    expected = {
        ("kept", "token-mean"): total / 3,
        ("original", "token-mean"): total / 5,
        ("weights", "token-mean"): total / 3.5,
        ("kept", "seq-mean-token-sum"): total / 2,
        ("weights", "seq-mean-token-sum"): total / (0.75 + 2.0),
        ("kept", "seq-mean-token-mean"): (sums[0] / 2 + sums[1] / 1) / 2,
        ("original", "seq-mean-token-mean"): (sums[0] / 3 + sums[1] / 2) / 2,
        ("weights", "seq-mean-token-mean"): (sums[0] / 2 + sums[1] / 1) / (0.75 + 2.0),
    }
    for (normalizer, mode), value in expected.items():
        counts = loss_denominators(normalizer, kept, mask, weights)
        row_lengths = lengths if normalizer == "original" else None
        assert aggregate(per_token, kept, mode, counts, lengths=row_lengths).item() == pytest.approx(value)


@per_implementation
def test_the_original_normalizer_divides_each_row_by_its_original_length():
    """One of three tokens and one of two are rejected: rows sum to 2 and 1, over lengths 3 and 2, over two rows."""
    rollout = torch.tensor([[-1.0, -1.0, -9.0], [-1.0, -9.0, NAN]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    policies = PolicyLogProbs(log_prob=torch.full((2, 3), -1.0), rollout_log_prob=rollout)
    expected = {"original": -(2 / 3 + 1 / 2) / 2, "kept": -1.0}
    for normalizer, value in expected.items():
        config = rejecting("ppo_clip", normalizer=normalizer)
        loss = loss_config("seq-mean-token-mean")
        output = policy_loss(policies, torch.ones(2), mask, config=config, loss=loss, whole_step=True)
        assert output.loss.item() == pytest.approx(value)


@every_mode
@every_normalizer
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**16), cuts=st.lists(st.integers(0, 6), min_size=1, max_size=3))
def test_any_split_of_a_decoupled_batch_gives_the_gradient_of_the_whole(mode, normalizer, seed, cuts):
    policies, advantages, mask, entropy = random_batch(seed)
    config, loss = rejecting(normalizer=normalizer), loss_config(mode, kl_coef=0.3, entropy_coef=0.2)
    correction = correct(policies.old_log_prob, policies.rollout_log_prob, mask, config)
    leaf, policies = with_gradient(policies)
    arguments = {"config": config, "loss": loss}
    whole = policy_loss(policies, advantages, mask, correction=correction, entropy=entropy, **arguments)
    (gradient,) = torch.autograd.grad(whole.loss, leaf)

    total, parts = 0.0, []
    for start, end in itertools.pairwise([0, *sorted(cuts), 6]):
        rows = slice(start, end)
        part, part_advantages, part_mask, part_entropy = take(rows, policies, advantages, mask, entropy)
        output = policy_loss(
            part,
            part_advantages,
            part_mask,
            correction=take_correction(correction, rows),
            entropy=part_entropy,
            denominators=correction.denominators(),
            original_denominators=count_denominators(mask),
            **arguments,
        )
        total, parts = total + output.loss, [*parts, output.statistics]
    torch.testing.assert_close(total, whole.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(total, leaf)[0], gradient, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole.counts.tokens, correction.denominators().tokens)
    torch.testing.assert_close(whole.counts.sequences, correction.denominators().sequences)
    merged = merge_statistics(parts)
    torch.testing.assert_close(merged.rows["moments"], whole.statistics.rows["moments"], rtol=1e-12, atol=1e-12)


@every_mode
@pytest.mark.parametrize("loss_type", [None, *BYPASS])
@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 2**16), lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_packed_equals_padded_and_padding_or_order_changes_nothing(mode, loss_type, seed, lengths):
    policies, advantages, mask, entropy = random_batch(seed, batch=len(lengths))
    inside = torch.arange(5) < torch.tensor(lengths)[:, None]
    mask = mask & inside
    config, loss = rejecting(loss_type), loss_config(mode, kl_coef=0.3, entropy_coef=0.2)
    policies = bypass_only(policies) if loss_type else policies

    def run(policies, advantages, mask, entropy, **layout):
        correction = None
        if loss_type is None:
            correction = correct(policies.old_log_prob, policies.rollout_log_prob, mask, config, **layout)
        arguments = {"config": config, "loss": loss, "correction": correction, "entropy": entropy, "whole_step": True}
        return policy_loss(policies, advantages, mask, **arguments, **layout).loss

    expected = run(policies, advantages, mask, entropy)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    packed = run(*take(inside, policies, advantages, mask, entropy), cu_seqlens=cu_seqlens)
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed))
    permuted = run(*take(order, policies, advantages, mask, entropy))
    dirty = [
        torch.nn.functional.pad(x, (1, 2), value=0 if x.dtype == torch.bool else NAN)
        for x in (policies.log_prob, policies.rollout_log_prob, policies.ref_log_prob, advantages, mask, entropy)
    ]
    old = None if loss_type else torch.nn.functional.pad(policies.old_log_prob, (1, 2), value=INF)
    wide = PolicyLogProbs(log_prob=dirty[0], old_log_prob=old, rollout_log_prob=dirty[1], ref_log_prob=dirty[2])
    for other in (packed, permuted, run(wide, *dirty[3:])):
        torch.testing.assert_close(other, expected, rtol=1e-6, atol=1e-9)


# ── empty averages, and the other terms ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.covering(2)
@per_implementation
@every_mode
@every_normalizer
@pytest.mark.parametrize("loss_type", [None, *BYPASS])
@pytest.mark.parametrize("emptiness", ["rejected", "masked", "no rows"])
def test_nothing_to_average_gives_zero_loss_and_zero_gradient(mode, normalizer, loss_type, emptiness):
    batch = 0 if emptiness == "no rows" else 3
    log_prob = torch.full((batch, 4), -1.0, requires_grad=True)
    far = torch.full((batch, 4), -5.0)
    mask = torch.zeros(batch, 4) if emptiness == "masked" else torch.ones(batch, 4)
    config, correction = rejecting(loss_type, normalizer=normalizer), None
    policies = PolicyLogProbs(log_prob=log_prob, rollout_log_prob=far)
    if loss_type is None:
        policies = dataclasses.replace(policies, old_log_prob=log_prob.detach())
        correction = correct(log_prob, far, mask, config)
    output = policy_loss(
        policies,
        torch.ones(batch, 4),
        mask,
        config=config,
        loss=loss_config(mode),
        correction=correction,
        whole_step=True,
    )
    output.loss.backward()
    assert output.loss.item() == 0
    assert (log_prob.grad == 0).all()
    assert not output.loss_mask.any()


@per_implementation
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_and_entropy_cover_rejected_tokens_and_are_divided_by_all(estimator):
    policies, advantages, mask, entropy = random_batch(11)
    leaf, policies = with_gradient(bypass_only(policies))
    loss = loss_config("token-mean", kl_coef=0.5, kl_estimator=estimator, entropy_coef=0.25)
    output = policy_loss(
        policies, advantages, mask, config=rejecting("reinforce"), loss=loss, entropy=entropy, whole_step=True
    )
    difference = policies.ref_log_prob - leaf.detach()
    kl = {
        "k1": -difference,
        "k2": difference.square() / 2,
        "k3": difference.exp() - 1 - difference,
    }[estimator][mask].mean()
    assert output.loss_mask.sum() < mask.sum()
    assert output.regularization.item() == pytest.approx((0.5 * kl - 0.25 * entropy[mask].mean()).item())
    assert output.loss.item() == pytest.approx((output.policy_gradient + output.regularization).item())
    metrics = loss_metrics(output.statistics)
    assert metrics["actor/kl_ref"] == pytest.approx(kl.item())
    assert metrics["actor/entropy"] == pytest.approx(entropy[mask].mean().item())


def test_kl_and_entropy_leave_out_tokens_on_which_they_are_not_finite():
    policies, advantages, mask, entropy = random_batch(15)
    mask[0, :2] = True
    policies.ref_log_prob[0, 0], entropy[0, 1] = -INF, NAN
    policies, loss = without_rollout(policies), LossConfig(kl_coef=1.0, entropy_coef=1.0)
    output = policy_loss(policies, advantages, mask, config=None, loss=loss, entropy=entropy)
    moments = output.statistics.read().moments
    assert moments["kl_ref"].count == moments["entropy"].count == mask.sum() - 1
    difference = moments["kl_ref"].mean - moments["entropy"].mean
    expected = difference * moments["entropy"].count / mask.sum().item()
    assert output.regularization.item() == pytest.approx(expected)


def test_reference_and_entropy_without_coefficients_are_metrics_only():
    policies, advantages, mask, entropy = random_batch(12)
    output = policy_loss(without_rollout(policies), advantages, mask, config=None, entropy=entropy)
    assert output.regularization is None
    assert {"actor/kl_ref", "actor/entropy"} <= loss_metrics(output.statistics).keys()


@per_implementation
def test_kl_beside_kept_denominators_asks_for_the_original_ones():
    policies, advantages, mask, _ = random_batch(13)
    config = rejecting()
    correction = correct(policies.old_log_prob, policies.rollout_log_prob, mask, config)
    arguments = {"config": config, "correction": correction, "denominators": Denominators(9.0, 4.0)}
    assert policy_loss(policies, advantages, mask, **arguments).loss.isfinite()
    with pytest.raises(ValueError, match="pass original_denominators too"):
        policy_loss(policies, advantages, mask, loss=LossConfig(kl_coef=0.1), **arguments)


@per_implementation
def test_apply_is_false_measures_and_leaves_the_loss_unweighted():
    policies, advantages, mask, _ = random_batch(14)
    config = RolloutCorrectionConfig(rollout_is="token", apply_is=False)
    correction = correct(policies.old_log_prob, policies.rollout_log_prob, mask, config)
    weighted = policy_loss(policies, advantages, mask, config=config, correction=correction)
    assert weighted.loss == policy_loss(without_rollout(policies), advantages, mask, config=None).loss


# ── no correction ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rollout_log_probs_without_correction_are_remarked_once():
    policies, advantages, mask, _ = random_batch(16)
    checks.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="no correction: this is plain PPO.*pass correction=correct") as warned:
        policy_loss(policies, advantages, mask)
    assert [warning.filename for warning in warned] == [__file__]
    policy_loss(policies, advantages, mask)  # silent: warnings are errors here


@pytest.mark.parametrize("config", [None, "disabled", "measure"])
def test_plain_ppo_and_measuring_configurations_stay_silent(config):
    """Warnings are errors here. The user chose a configuration without correction by name."""
    policies, advantages, mask, _ = random_batch(17)
    checks.warn_once.cache_clear()
    policy_loss(without_rollout(policies), advantages, mask, config=config)
    if config is not None:
        policy_loss(policies, advantages, mask, config=config)
        correction = correct(policies.old_log_prob, policies.rollout_log_prob, mask, config)
        policy_loss(policies, advantages, mask, correction=correction)
