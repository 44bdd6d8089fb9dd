"""verl_parity=True against verl 0.9.1: the golden calls and losses, and the definition of parity by hand."""

from types import SimpleNamespace

import pytest
import torch
from verl_goldens import arrays, assert_metrics, by_name, golden, numbers

from rollcorr.integrations import verl

CASES = by_name("cases")
LOSSES = by_name("loss_cases")


def inputs(case, *, float64=False):
    """The arguments of one call as they were, or all three in float64 as for `metrics_fp64`."""
    data = arrays(case["file"])
    dtype, mask_dtype = (torch.float64 if float64 else getattr(torch, case[key]) for key in ("dtype", "mask_dtype"))
    return data["old_log_prob"].to(dtype), data["rollout_log_prob"].to(dtype), data["response_mask"].to(mask_dtype)


@pytest.mark.parametrize("name", CASES)
def test_metrics_of_float64_inputs_equal_the_golden_ones(name):
    case = CASES[name]
    *_, metrics = verl.compute_rollout_correction_and_rejection_mask(
        *inputs(case, float64=True), **case["kwargs"], verl_parity=True
    )
    actual = {key.removeprefix("rollout_corr/"): value for key, value in metrics.items()}
    assert_metrics(actual, numbers(case["metrics_fp64"]), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_weights_masks_and_their_dtypes_equal_the_golden_ones(name):
    case, data = CASES[name], arrays(CASES[name]["file"])
    weights, mask, _ = verl.compute_rollout_correction_and_rejection_mask(
        *inputs(case), **case["kwargs"], verl_parity=True
    )
    assert mask.dtype == getattr(torch, case["mask_out_dtype"])
    differing = int(((mask != 0) != (data["modified_mask"] != 0)).sum())
    assert differing == case.get("mask_fp64_differs", 0)
    if case["weights_dtype"] is None:
        assert weights is None
        return
    weights = weights.batch["rollout_is_weights"]
    assert weights.dtype == getattr(torch, case["weights_dtype"])
    expected = data.get("weights_fp64", data["weights"]).to(torch.float64)
    valid = data["response_mask"] != 0  # the reference leaves NaN at padding in two cases
    low_precision = weights.dtype not in (torch.float32, torch.float64)
    torch.testing.assert_close(
        weights.double()[valid], expected[valid], rtol=1e-2 if low_precision else 1e-4, atol=1e-9, equal_nan=True
    )
    assert (weights[~valid] == 0).all()


def actor(case, correction=None):
    return SimpleNamespace(
        clip_ratio=0.2,
        clip_ratio_low=case["clip_low"],
        clip_ratio_high=case["clip_high"],
        get={"clip_ratio_c": case["clip_c"]}.get,
        global_batch_info=case["global_batch_info"],
        policy_loss={"rollout_correction": correction},
    )


def reciprocal(threshold):
    """Convert verl's k1 band into ours: verl's "0.9_1.12" contains 1/ρ."""
    lower, upper = map(float, threshold.split("_"))
    return f"{1 / upper}_{1 / lower}"


@pytest.mark.parametrize("verl_parity", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_their_gradients_and_metrics_equal_the_golden_ones(name, verl_parity):
    """Also without parity, once the k1 bands are turned round."""
    case, data = LOSSES[name], arrays("loss_inputs.npz")
    log_prob = data["log_prob"].clone().requires_grad_()
    arguments = (data["rollout_log_prob"], log_prob, data["advantages"], data["response_mask"], case["loss_agg_mode"])
    if case["kind"] == "bypass_mode":
        correction = dict(case["config"])
        if correction["rollout_rs"] and not verl_parity:
            correction["rollout_rs_threshold"] = reciprocal(correction["rollout_rs_threshold"])
        loss, metrics = verl.compute_policy_loss_bypass_mode(
            *arguments, actor(case, correction), verl_parity=verl_parity
        )
    else:
        weights = arrays("loss_weights.npz")["rollout_is_weights"] if case["weights"] else None
        loss, metrics = verl.compute_policy_loss_vanilla(*arguments, actor(case), weights, verl_parity=verl_parity)
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], rel=1e-5, abs=1e-7)
    assert_metrics(metrics, case["metrics"], rtol=1e-5, atol=1e-7, keys="at least")
    torch.testing.assert_close(log_prob.grad, arrays("loss_grads.npz")[case["grad_key"]], rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("name", [name for name in golden()["presets"] if name != "<default>"])
def test_presets_hold_the_values_of_verl(name):
    config = getattr(verl.RolloutCorrectionConfig, name)()
    assert {field: config[field] for field in golden()["presets"][name]} == golden()["presets"][name]


def test_the_default_configuration_is_that_of_verl():
    expected = golden()["presets"]["<default>"]
    assert {field: verl.RolloutCorrectionConfig()[field] for field in expected} == expected
