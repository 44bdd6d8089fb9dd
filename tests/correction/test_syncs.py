"""The step path never waits for the device: meta tensors have no values, so every read raises."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch

from rollcorr import correct
from rollcorr.config import InertOptionWarning, LossConfig, RolloutCorrectionConfig
from rollcorr.config.loss_options import LOSS_AGG_MODES
from rollcorr.core.mergeable_statistics import merge_statistics
from rollcorr.core.metric_registry import CRITERIA
from rollcorr.correction.denominators import count_denominators
from rollcorr.correction.losses import PolicyLogProbs, policy_loss
from rollcorr.correction.training_step import TrainingStep

REJECTION = {"rollout_rs": ",".join(CRITERIA), "rollout_rs_threshold": 2.0, "rollout_token_veto_threshold": 1e-4}
MODES = {
    "decoupled": {"rollout_is": "token", "rollout_is_batch_normalize": True, "normalizer": "weights"},
    "decoupled, sequences": {"rollout_is": "sequence", "nonfinite": "reject_sequence"},
    "bypass": {"bypass_mode": True},
    "bypass, REINFORCE": {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "geometric"},
}


def config(mode: str) -> RolloutCorrectionConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InertOptionWarning)
        return RolloutCorrectionConfig(**MODES[mode], **REJECTION)


def meta(packed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    shape = (12,) if packed else (3, 4)
    with torch.device("meta"):
        return torch.zeros(shape), torch.ones(shape, dtype=torch.bool), torch.arange(4) if packed else None


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("detail", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_correction_and_its_denominators_read_nothing(mode, packed, detail):
    log_prob, mask, cu_seqlens = meta(packed)
    correction = correct(log_prob, log_prob, mask, config(mode), cu_seqlens=cu_seqlens, detail=detail)
    for normalizer in ("kept", "original", "weights"):
        assert correction.denominators(normalizer).tokens.is_meta
    assert merge_statistics([correction.statistics] * 2).pack().is_meta
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        correction.metrics()  # so a read would have been noticed


@pytest.mark.covering(2)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("aggregation", LOSS_AGG_MODES)
@pytest.mark.parametrize("mode", MODES)
def test_losses_and_their_gradients_read_nothing(mode, aggregation, packed):
    """Run an optimizer step up to the gradient: two micro-batches, KL, entropy, and the rescaling of bypass mode."""
    settings = config(mode)
    loss = LossConfig(
        loss_agg_mode=aggregation,
        loss_scale_factor=8.0 if aggregation.endswith("norm") else None,
        kl_coef=0.1,
        entropy_coef=0.01,
    )
    log_prob, mask, cu_seqlens = meta(packed)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros((), device="meta"))])
    parameter = model[0]
    original = count_denominators(mask, cu_seqlens=cu_seqlens)
    correction, denominators = None, original
    if not settings.bypass_mode:
        correction = correct(log_prob, log_prob + 1, mask, settings, cu_seqlens=cu_seqlens)
        denominators = correction.denominators()
    bypass = None
    if settings.bypass_mode:
        bypass = TrainingStep(model, settings, loss=loss)
    with bypass or nullcontext():
        for _ in range(2):
            current = log_prob + parameter
            policies = PolicyLogProbs(
                log_prob=current,
                old_log_prob=None if bypass else log_prob,
                rollout_log_prob=log_prob + 1,
                ref_log_prob=log_prob,
            )
            if bypass:
                output = bypass.policy_loss(policies, log_prob, mask, entropy=-current, cu_seqlens=cu_seqlens)
                bypass.backward(output)
                continue
            output = policy_loss(
                policies,
                log_prob,
                mask,
                config=settings,
                loss=loss,
                correction=correction,
                denominators=denominators,
                original_denominators=original,
                entropy=-current,
                cu_seqlens=cu_seqlens,
            )
            output.loss.backward()
        if bypass:
            bypass.finish()
    assert parameter.grad.is_meta
    assert output.statistics.pack().is_meta
