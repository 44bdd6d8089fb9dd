"""Fifty losses with gradients from verl 0.9.1 (tests/golden), in every mode and aggregation."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rollcorr.config import LossConfig, RolloutCorrectionConfig
from rollcorr.core.aggregation import Denominators
from rollcorr.correction import correct
from rollcorr.correction.losses import PolicyLogProbs, loss_metrics, policy_loss

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = json.loads((GOLDEN / "golden.json").read_text(encoding="utf-8"))["loss_cases"]


def golden_inputs():
    arrays = {name: torch.from_numpy(array) for name, array in np.load(GOLDEN / "loss_inputs.npz").items()}
    arrays["weights"] = torch.from_numpy(np.load(GOLDEN / "loss_weights.npz")["rollout_is_weights"])
    return arrays


def golden_config(case):
    """Return the case's configuration: k1 bands inverted, options without effect in a mode dropped."""
    values = dict(case["config"])
    if values["rollout_rs"] and "k1" in values["rollout_rs"]:
        low, high = (float(x) for x in values["rollout_rs_threshold"].split("_"))
        values["rollout_rs_threshold"] = f"{1 / high!r}_{1 / low!r}"
    if values["loss_type"] == "ppo_clip" and values["rollout_is"]:
        values["apply_is"] = False
    return RolloutCorrectionConfig(**values)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_losses_and_gradients_agree(case):
    """Numbers of verl 0.9.1 (tests/golden/golden.json has their provenance).

    Denominators: without `global_batch_info` the reference counts the mask after rejection:
    normalizer="kept", our default. With it, the reference is given counts from before rejection, 120 tokens and 12
    sequences for two ranks, the empty row among them: the same rows divided by those numbers (the dilution of
    normalizer="original", whose own count has no empty rows), then times dp_size, because ranks average gradients
    there. seq-mean-token-mean divides rows by their kept length in both. Local seq-mean-token-sum-norm divides by the
    padded width, 24; here that constant is written out.
    """
    inputs, batch_info = golden_inputs(), case["global_batch_info"]
    mode, width = case["loss_agg_mode"], inputs["log_prob"].shape[1]
    scale = batch_info.get("loss_scale_factor", width) if mode == "seq-mean-token-sum-norm" else None
    loss = LossConfig(
        clip_ratio_low=case["clip_low"],
        clip_ratio_high=case["clip_high"],
        clip_ratio_c=case["clip_c"],
        loss_agg_mode=mode,
        loss_scale_factor=scale,
    )
    denominators = None
    if batch_info:
        denominators = Denominators(batch_info["batch_num_tokens"], batch_info["global_batch_size"])
    log_prob, rollout, mask = inputs["log_prob"].requires_grad_(), inputs["rollout_log_prob"], inputs["response_mask"]
    policies, config, correction = PolicyLogProbs(log_prob=log_prob, old_log_prob=rollout), None, None
    if case["kind"] == "bypass_mode":
        policies, config = PolicyLogProbs(log_prob=log_prob, rollout_log_prob=rollout), golden_config(case)
    elif case["weights"]:
        config = RolloutCorrectionConfig.decoupled_token_is()
        correction = dataclasses.replace(correct(rollout, rollout, mask, config), weights=inputs["weights"])
    output = policy_loss(
        policies,
        inputs["advantages"],
        mask,
        config=config,
        loss=loss,
        correction=correction,
        denominators=denominators,
        whole_step=denominators is None,
    )
    total = output.loss * batch_info.get("dp_size", 1)
    total.backward()

    assert total.item() == pytest.approx(case["loss"], rel=1e-5, abs=1e-7)
    gradient = torch.from_numpy(np.load(GOLDEN / "loss_grads.npz")[case["grad_key"]])
    torch.testing.assert_close(log_prob.grad, gradient, rtol=1e-4, atol=1e-7)
    metrics = loss_metrics(output.statistics)
    assert metrics["actor/policy_kl"] == pytest.approx(case["metrics"]["actor/ppo_kl"], rel=1e-4, abs=1e-7)
    if "actor/pg_clipfrac" in case["metrics"]:
        clipped = metrics["actor/clip_fraction_high"] + metrics["actor/clip_fraction_low"]
        assert clipped == pytest.approx(case["metrics"]["actor/pg_clipfrac"], abs=1e-6)
        assert metrics["actor/clip_fraction_dual"] == case["metrics"]["actor/pg_clipfrac_lower"]


def test_there_are_fifty_golden_losses():
    assert len(CASES) == 50
