"""What a correction and its loss multiply each token's score with, taken from the package's own functions.

The gradient of the policy loss in log π(y_t) is −κ_t A / denominator, whatever weights, clips and masks did. So one
backward pass of `rollcorr.policy_loss` with the denominator 1 gives κ_t A of every token of every row, and nothing here
repeats a formula of the package.

π_θ = π_old: the first update on a batch. Decoupled PPO then has r = 1, and a decoupled preset and the bypass REINFORCE
preset with the same weights give the same gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollcorr.config import LossConfig, RolloutCorrectionConfig
from rollcorr.core.aggregation import Denominators
from rollcorr.correction import PolicyLogProbs, correct, policy_loss
from rollcorr.correction.losses import PolicyLossOutput
from rollcorr.simulation.sequence_rows import SequenceRows

# The Σ_t of the policy-gradient theorem, averaged over sequences: one scale for all estimators.
SUM_OVER_TOKENS = LossConfig(loss_agg_mode="seq-mean-token-sum")


class LossCoefficients(NamedTuple):
    """κ_t A and the tokens in the loss.

    Attributes:
        coefficients: κ_t A_i, (n, T) float64: what multiplies ∇log π(y_t) before the division.
        loss_mask: tokens in the loss, (n, T) bool.
    """

    coefficients: Tensor
    loss_mask: Tensor


def loss_coefficients(rows: SequenceRows, config: RolloutCorrectionConfig | None) -> LossCoefficients:
    """Run `correct` and `policy_loss` on the rows, and read κ_t A from the gradient.

    Args:
        rows: any rows. Their probabilities are not used.
        config: a correction; None: plain PPO, which knows nothing of μ.
    """
    log_prob = rows.train_log_prob.clone().requires_grad_()
    output = _first_loss(rows, config, log_prob, Denominators(1.0, 1.0))
    (gradient,) = torch.autograd.grad(output.policy_gradient, log_prob)
    return LossCoefficients(-gradient, output.loss_mask)


def batch_gradient(rows: SequenceRows, config: RolloutCorrectionConfig | None) -> Tensor:
    """The whole gradient of one batch, with the package's own denominators: what a trainer would step along. (S, V).

    The way that `loss_coefficients` saves: the tests hold the two against each other, and normalizers whose
    denominators are sums of weights can be measured in no other way.

    Args:
        rows: the batch.
        config: the estimator; None corrects nothing.
    """
    logits = rows.pair.trainer.logits.clone().requires_grad_()
    log_prob = logits.log_softmax(-1)[rows.states, rows.tokens]
    output = _first_loss(rows, config, log_prob, None)
    (gradient,) = torch.autograd.grad(output.policy_gradient, logits)
    return -gradient


def _first_loss(
    rows: SequenceRows, config: RolloutCorrectionConfig | None, log_prob: Tensor, denominators: Denominators | None
) -> PolicyLossOutput:
    """Compute the loss of the first update, by the call that the configuration's mode needs."""
    bypass_mode = config is not None and config.bypass_mode
    correction = None
    if config is not None and not bypass_mode:
        correction = correct(rows.train_log_prob, rows.rollout_log_prob, rows.mask, config)
    return policy_loss(
        PolicyLogProbs(
            log_prob=log_prob,
            old_log_prob=None if bypass_mode else rows.train_log_prob,
            rollout_log_prob=rows.rollout_log_prob if bypass_mode else None,
        ),
        rows.advantages,
        rows.mask,
        config=config,
        loss=SUM_OVER_TOKENS,
        correction=correction,
        denominators=denominators,
        whole_step=denominators is None,
    )
