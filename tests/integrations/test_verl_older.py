"""The functions of October and November 2025: golden numbers, the veto by hand, and where the defaults differ."""

import math
from types import SimpleNamespace

import pytest
import torch
from implementations import per_implementation
from verl_goldens import arrays, assert_metrics, by_name, numbers

from rollcorr.integrations.verl import TensorBatch
from rollcorr.integrations.verl import v2025_10 as verl_2025_10
from rollcorr.integrations.verl import v2025_11 as verl_2025_11

CASES = by_name("legacy_cases")
OCTOBER = [name for name in CASES if name.startswith("v20251028")]
NOVEMBER = [name for name in CASES if name.startswith("v20251107")]


def function_of(name):
    """Return the function of a golden call, from the October or the November interface."""
    if name in OCTOBER:
        return verl_2025_10.compute_rollout_importance_weights
    return verl_2025_11.compute_rollout_correction_and_rejection_mask


def run(name, **extra):
    """The function of that golden call, and its result: weights or None, mask, metrics without prefix."""
    data = arrays("legacy_inputs.npz")
    function = function_of(name)
    inputs = (data["old_log_prob"], data["rollout_log_prob"], data["response_mask"].float())
    weights, mask, metrics = function(*inputs, **CASES[name]["kwargs"], **extra)
    weights = None if weights is None else weights.batch["rollout_is_weights"]
    return weights, mask, {key.split("/", 1)[1]: value for key, value in metrics.items()}


@pytest.mark.parametrize("name", CASES)
def test_older_calls_equal_the_golden_ones(name):
    case, outputs = CASES[name], arrays("legacy_outputs.npz")
    weights, mask, metrics = run(name, verl_parity=True)
    # The golden calls ran in float32: a difference of squares needs an absolute tolerance of 5e-7.
    assert_metrics(metrics, numbers(case["metrics"]), rtol=2e-5, atol=5e-7)
    assert mask.equal(outputs[case["mask_key"]].float())
    if case["weights_key"] is None:
        assert weights is None
    else:
        torch.testing.assert_close(weights, outputs[case["weights_key"]], rtol=1e-5, atol=1e-9)


@per_implementation
@pytest.mark.parametrize("name", CASES)
def test_without_parity_weights_masks_and_metric_names_are_the_same(name):
    """The older bands were on the ratio itself, so they need no inversion."""
    case, outputs = CASES[name], arrays("legacy_outputs.npz")
    weights, mask, metrics = run(name)
    assert mask.equal(outputs[case["mask_key"]].float())
    assert set(case["metrics"]) <= set(metrics)
    if case["weights_key"] is not None:
        torch.testing.assert_close(weights, outputs[case["weights_key"]], rtol=1e-5, atol=1e-9)


@per_implementation
@pytest.mark.parametrize("name", CASES)
def test_without_parity_empty_rows_count_in_no_metric(name):
    data = arrays("legacy_inputs.npz")
    kept = (data["response_mask"] != 0).any(-1)
    assert not kept.all()  # the golden batch has empty rows
    function = function_of(name)
    inputs = [data[key].float() for key in ("old_log_prob", "rollout_log_prob", "response_mask")]
    *_, whole = function(*inputs, **CASES[name]["kwargs"])
    *_, without = function(*(tensor[kept] for tensor in inputs), **CASES[name]["kwargs"])
    assert_metrics(whole, without, rtol=1e-9)


def log_ratio(*rows):
    """A train log-prob with these ratios to a rollout log-prob of 0, and the mask where one is given."""
    width = max(map(len, rows))
    ratios = torch.tensor([[*row, *[math.nan] * (width - len(row))] for row in rows], dtype=torch.float64)
    mask = ~ratios.isnan()
    return ratios.log().masked_fill(~mask, 0.0), torch.zeros_like(ratios), mask.long()


@pytest.mark.parametrize("verl_parity", [False, True])
def test_the_veto_of_october_by_hand(verl_parity):
    """Ratios 1.0 and 5e-4 in the first of two rows; τ = 1e-3 rejects the row, and leaves its weights unchanged."""
    train, rollout, mask = log_ratio([1.0, 5e-4], [1.0, 2e-3, 1.0])
    weights, kept, metrics = verl_2025_10.compute_rollout_importance_weights(
        train, rollout, mask, rollout_is_threshold=2.0, rollout_is_veto_threshold=1e-3, verl_parity=verl_parity
    )
    assert kept.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert kept.dtype == torch.int64
    assert weights.batch["rollout_is_weights"][0].tolist() == pytest.approx([1.0, 5e-4, 0.0])
    assert metrics["mismatch/rollout_is_veto_fraction"] == 0.5
    assert metrics["mismatch/rollout_is_catastrophic_token_fraction"] == pytest.approx(1 / 5)


@pytest.mark.parametrize("verl_parity", [False, True])
def test_the_veto_of_november_works_beside_rejection_and_on_the_exact_bound_keeps(verl_parity):
    """Row 0 falls to the veto, row 1 to the band [0.5, 2], row 2 has a ratio of τ exactly, which is not below it."""
    train, rollout, mask = log_ratio([1.0, 2**-11], [3.0, 1.0], [2**-10, 2**10])
    _, kept, metrics = verl_2025_11.compute_rollout_correction_and_rejection_mask(
        train,
        rollout,
        mask,
        rollout_rs="sequence",
        rollout_rs_threshold=2.0,
        rollout_token_veto_threshold=2**-10,
        verl_parity=verl_parity,
    )
    assert kept.tolist() == [[0, 0], [0, 0], [1, 1]]
    assert metrics["rollout_corr/rollout_is_veto_fraction"] == pytest.approx(1 / 3)
    assert metrics["rollout_corr/rollout_is_catastrophic_token_fraction"] == pytest.approx(1 / 6)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 3)


def test_a_null_threshold_of_october_switches_everything_off():
    train, rollout, mask = log_ratio([1.0, 9.0])
    weights, kept, metrics = verl_2025_10.compute_rollout_importance_weights(train, rollout, mask)
    assert weights is None
    assert kept is mask
    assert metrics == {}


@per_implementation
def test_october_keeps_its_guides_extremes_before_truncation_and_its_perplexity_ratio():
    """Token ratios 4 and 1, threshold 2: the maximum is 4 though the weight is 2; exp(mean G) with G = log 4 / 2."""
    train, rollout, mask = log_ratio([4.0, 1.0], [1.0, 1.0])
    weights, _, metrics = verl_2025_10.compute_rollout_importance_weights(
        train, rollout, mask, rollout_is_threshold=2.0
    )
    assert weights.batch["rollout_is_weights"].max() == 2.0
    assert metrics["mismatch/rollout_is_max"] == pytest.approx(4.0)
    assert metrics["mismatch/mismatch_ppl_ratio"] == pytest.approx(math.exp(-math.log(4) / 2 / 2))
    assert metrics["mismatch/rollout_is_ratio_fraction_high"] == 0.25


@per_implementation
def test_october_perplexity_differences_follow_guide():
    """Mean log-ratios of 3, −2.5 and −0.06 nats: log PPL of the rollout minus the trainer's is their mean."""
    train = torch.tensor([[-1.0, -1.0], [-4.0, -4.0], [-1.0, -1.06]])
    rollout = torch.tensor([[-4.0, -4.0], [-1.5, -1.5], [-1.0, -0.94]])
    _, _, metrics = verl_2025_10.compute_rollout_importance_weights(
        train, rollout, torch.ones(3, 2), rollout_is_threshold=2.0
    )
    assert metrics["mismatch/mismatch_log_ppl_diff"] == pytest.approx((3 - 2.5 - 0.06) / 3, abs=1e-5)
    assert metrics["mismatch/mismatch_log_ppl_diff_max"] == pytest.approx(3.0)
    assert metrics["mismatch/mismatch_log_ppl_diff_min"] == pytest.approx(-2.5)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
@per_implementation
def test_october_sequence_maximum_is_not_bounded(level):
    """Four tokens of 9 nats: a ratio of e^36 = 4.3e15 per sequence, and e^9 per token."""
    train, rollout = torch.full((2, 4), -1.0), torch.full((2, 4), -10.0)
    data = train, rollout, torch.ones(2, 4)
    _, _, metrics = verl_2025_10.compute_rollout_importance_weights(*data, level, rollout_is_threshold=2.0)
    expected = math.exp(36 if level == "sequence" else 9)
    assert metrics["mismatch/rollout_is_max"] == pytest.approx(expected, rel=1e-5)
    given = verl_2025_10.compute_is_metrics(
        torch.full((2, 4), 2.0), torch.full((2, 1), 36.0), torch.ones(2, 4), "sequence", 2.0, 0.5
    )
    assert given["rollout_is_max"] == pytest.approx(math.exp(36), rel=1e-5)


@per_implementation
def test_october_mask_mode_rejects_and_truncates_nothing():
    train, rollout, mask = log_ratio([4.0, 1.0], [0.7, 0.3])
    weights, kept, metrics = verl_2025_10.compute_rollout_importance_weights(
        train,
        rollout,
        mask,
        rollout_is_mode="mask",
        rollout_is_threshold=2.0,
        rollout_is_threshold_lower=0.6,
    )
    assert kept.tolist() == [[0, 1], [1, 0]]
    assert weights.batch["rollout_is_weights"].flatten().tolist() == pytest.approx([4.0, 1.0, 0.7, 0.3])
    assert metrics["mismatch/rollout_is_masked_fraction"] == 0.5
    assert metrics["mismatch/rollout_is_seq_masked_fraction"] == 1.0


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("verl_parity", [False, True])
def test_octobers_metrics_of_given_weights_are_those_it_reports(level, verl_parity):
    train, rollout, mask = log_ratio([4.0, 1.0], [0.7, 0.3])
    *_, metrics = verl_2025_10.compute_rollout_importance_weights(
        train, rollout, mask, rollout_is_level=level, rollout_is_threshold=8.0, verl_parity=verl_parity
    )
    d = train if level == "token" else train.sum(-1, keepdim=True)
    weights = d.exp().expand(2, 2)
    actual = verl_2025_10.compute_is_metrics(weights, d, mask, level, 8.0, 1 / 8, verl_parity=verl_parity)
    expected = {name: metrics[f"mismatch/{name}"] for name in actual}
    assert_metrics(actual, expected, rtol=1e-6)
    assert len(actual) == 16


@pytest.mark.parametrize("verl_parity", [False, True])
def test_novembers_single_functions_agree_with_the_joint_one(verl_parity):
    train, rollout, mask = log_ratio([4.0, 1.0], [0.7, 0.3], [1.5, 0.9])
    options = {"rollout_rs": "geometric", "rollout_rs_threshold": 1.5, "rollout_rs_threshold_lower": 0.6}
    joint, kept, metrics = verl_2025_11.compute_rollout_correction_and_rejection_mask(
        train, rollout, mask, rollout_is="sequence", **options, verl_parity=verl_parity
    )
    weights, weight_metrics = verl_2025_11.compute_rollout_correction_weights(
        train - rollout, mask, "sequence", verl_parity=verl_parity
    )
    alone, mask_metrics = verl_2025_11.compute_rollout_rejection_mask(
        train - rollout, mask, **options, verl_parity=verl_parity
    )
    torch.testing.assert_close(weights, joint.batch["rollout_is_weights"])
    assert alone.equal(kept)
    for name, value in (weight_metrics | mask_metrics).items():
        assert value == pytest.approx(metrics[f"rollout_corr/{name}"]), name
    d = (train - rollout).sum(-1, keepdim=True)
    raw = d.exp().expand(3, 2)
    given = verl_2025_11.compute_is_metrics(raw, d, mask, "sequence", 2.0, verl_parity=verl_parity)
    assert given["rollout_is_ratio_fraction_high"] == metrics["rollout_corr/rollout_is_ratio_fraction_high"]


@per_implementation
def test_novembers_pure_loss_by_hand_has_no_gradient_through_its_weights():
    """−w log π A with w = min(π/μ, 2): π/μ = 4 and 1, log π = log 4 and 0, A = 1 and 3, summed over one sequence."""
    log_prob, rollout, mask = log_ratio([4.0, 1.0])
    log_prob.requires_grad_()
    advantages = torch.tensor([[1.0, 3.0]], dtype=torch.float64)
    loss, clipped, kl, dual = verl_2025_11.compute_policy_loss_with_rollout_correction(
        rollout, log_prob, advantages, mask, rollout_is="token", loss_scale_factor=0.5
    )
    loss.backward()
    assert loss.item() == pytest.approx(-0.5 * 2 * math.log(4))
    assert log_prob.grad.flatten().tolist() == pytest.approx([-0.5 * 2 * 1, -0.5 * 1 * 3])
    assert kl.item() == pytest.approx(-math.log(4) / 2)
    assert (clipped, dual) == (0, 0)


@per_implementation
def test_novembers_pure_loss_counts_only_what_is_kept_and_reads_its_options_from_the_actor():
    log_prob, rollout, mask = log_ratio([4.0, 1.0], [1.0, 1.1])
    options = verl_2025_11.RolloutCorrectionConfig(
        rollout_is=None,
        rollout_rs="sequence",
        rollout_rs_threshold=2.0,
        bypass_old_logprob_for_rollout=True,
        use_pure_rollout_correction=True,
    )
    actor = SimpleNamespace(policy_loss={})
    batch = TensorBatch({"rollout_log_probs": rollout})
    assert not verl_2025_11.maybe_apply_rollout_correction(batch, options, actor.policy_loss)
    assert batch.batch["old_log_probs"] is rollout
    loss, *_ = verl_2025_11.compute_policy_loss_rollout_correction_wrapper(
        rollout, log_prob, torch.ones_like(log_prob), mask, config=actor
    )
    assert actor.policy_loss["loss_mode"] == "rollout_correction"
    assert loss.item() == pytest.approx(-math.log(1.1) / 2)


def test_november_asks_for_old_log_probs_without_bypass():
    assert verl_2025_11.maybe_apply_rollout_correction(TensorBatch(), None)
    assert verl_2025_11.maybe_apply_rollout_correction(TensorBatch(), {"rollout_is": "token"})


@per_implementation
def test_novembers_batch_function_replaces_the_mask_and_adds_weights():
    train, rollout, mask = log_ratio([4.0, 1.0], [1.0, 1.1])
    batch = TensorBatch({"old_log_probs": train, "rollout_log_probs": rollout, "response_mask": mask})
    batch, metrics = verl_2025_11.compute_rollout_correction_and_add_to_batch(
        batch, verl_2025_11.RolloutCorrectionConfig.seq_mis(2.0)
    )
    assert batch.batch["response_mask"].tolist() == [[0, 0], [1, 1]]
    assert batch.batch["rollout_is_weights"].flatten().tolist() == pytest.approx([2.0, 2.0, 1.1, 1.1])
    assert metrics["rollout_corr/rollout_rs_max"] == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_is", {"rollout_is": "token"}),
        ("seq_is_rs", {"rollout_is": "sequence", "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 2.0}),
        ("seq_mis", {"rollout_is": "sequence", "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0_2.0"}),
        ("geo_rs", {"rollout_is": None, "rollout_rs": "seq_mean_k1", "rollout_token_veto_threshold": 1e-4}),
        ("ppo_is_bypass", {"rollout_is": "token", "bypass_mode": True, "apply_is": False}),
        ("pure_is", {"rollout_is": "sequence", "bypass_mode": True, "loss_type": "reinforce"}),
        ("disabled", {"rollout_is": None, "rollout_rs": None}),
    ],
)
def test_novembers_presets_convert(name, expected):
    config = getattr(verl_2025_11.RolloutCorrectionConfig, name)().to_config()
    assert {field: getattr(config, field) for field in expected} == expected


@pytest.mark.parametrize("module", [verl_2025_10, verl_2025_11])
def test_everything_that_the_older_modules_name_exists(module):
    assert all(callable(getattr(module, name)) for name in module.__all__)
