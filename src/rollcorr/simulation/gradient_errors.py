"""Compute the errors of a gradient estimator: bias, variance, MSE and ESS against the exact gradient.

The estimator of a batch of B sequences is Σ_i f_i / K: f_i = Σ_t κ_it A_i ∇log π(y_it) with κ from the package's loss,
and K the number of sequences with a token in the loss (normalizer "kept") or B ("original"). Sequences are
independent, so with p = P(kept), q₀ = (1 − p)^B, m = E[f | kept] and Σ = tr Cov[f | kept]

    mean        (1 − q₀) m
    variance    Σ E[1{K > 0} / K] + q₀ (1 − q₀) |m|²        K ~ Binomial(B, p)
    bias        |mean − ∇J|
    MSE         bias² + variance

for every batch size B from one set of sums. Over exact rows these values are exact. Over sampled rows they are
estimates: the noise of m is subtracted from bias², and a jackknife over groups estimates the standard errors.

κ is read from the package's own functions: the gradient of the policy loss in log π(y_t) is −κ_t A / denominator,
for any weights, clips and masks. So one backward pass of `rollcorr.policy_loss` with the denominator 1 computes κ_t A
of every token of every row. π_θ = π_old, the first update on a batch: decoupled PPO then has r = 1, and a decoupled
preset and the bypass REINFORCE preset with the same weights have the same gradient.

Variance and MSE are sums over the S · V entries of the gradient. Divided by |∇J|² they are relative: an estimator that
always returns 0 has a relative MSE of 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollcorr.config import LossConfig, RolloutCorrectionConfig
from rollcorr.core.aggregation import Denominators
from rollcorr.correction import PolicyLogProbs, correct, policy_loss
from rollcorr.correction.losses import PolicyLossOutput
from rollcorr.simulation.sequence_rows import SequenceRows

# Σ_t as in the policy-gradient theorem, averaged over sequences: one scale for all estimators.
SUM_OVER_TOKENS = LossConfig(loss_agg_mode="seq-mean-token-sum")

GROUPS = 20
"""Sampled rows are divided into this many groups for the jackknife."""
CHUNK = 2_000_000
"""Rows are measured in parts of about this many tokens, or entries of gradients, so that memory stays small."""


class LossCoefficients(NamedTuple):
    """Coefficients κ_t A and the mask of the tokens in the loss.

    Attributes:
        coefficients: κ_t A_i, (n, T) float64: the factor of ∇log π(y_t) before the division.
        loss_mask: tokens in the loss, (n, T) bool.
    """

    coefficients: Tensor
    loss_mask: Tensor


def loss_coefficients(rows: SequenceRows, config: RolloutCorrectionConfig | None) -> LossCoefficients:
    """Run `correct` and `policy_loss` on the rows, and read κ_t A from the gradient.

    Args:
        rows: any rows; their sequence probabilities are unused.
        config: a correction; None means plain PPO, which does not use μ.
    """
    log_prob = rows.train_log_prob.clone().requires_grad_()
    output = _first_loss(rows, config, log_prob, Denominators(1.0, 1.0))
    (gradient,) = torch.autograd.grad(output.policy_gradient, log_prob)
    return LossCoefficients(-gradient, output.loss_mask)


def batch_gradient(rows: SequenceRows, config: RolloutCorrectionConfig | None) -> Tensor:
    """Compute the full gradient of one batch, (S, V), with the package's own denominators, as in a trainer's step.

    It is slower than `loss_coefficients`; the tests compare the two. It is the only way to measure normalizers whose
    denominators are sums of weights.

    Args:
        rows: the batch.
        config: the estimator; None means no correction.
    """
    logits = rows.pair.trainer.logits.clone().requires_grad_()
    log_prob = logits.log_softmax(-1)[rows.states, rows.tokens]
    output = _first_loss(rows, config, log_prob, None)
    (gradient,) = torch.autograd.grad(output.policy_gradient, logits)
    return -gradient


def _first_loss(
    rows: SequenceRows, config: RolloutCorrectionConfig | None, log_prob: Tensor, denominators: Denominators | None
) -> PolicyLossOutput:
    """Compute the first update's loss in the configuration's mode (bypass, decoupled or none)."""
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


class Estimate(NamedTuple):
    """A value and its standard error; the error is 0 for an exact value."""

    value: float
    error: float


@dataclass(frozen=True)
class GradientError:
    """Errors of one estimator at one batch size. Each value is an `Estimate`.

    Attributes:
        batch_size: B, sequences.
        bias: |E[ĝ] − ∇J| / |∇J|.
        deviation: √(tr Cov ĝ) / |∇J|.
        mse: E|ĝ − ∇J|² / |∇J|².
        direction: √(1 − (E[ĝ] · ∇J)² / (|∇J|² E|ĝ|²)), in [0, 1]: √MSE with the best step size. It ranks
            estimators independently of their scale: 0 is ∇J times a constant, 1 is noise or a zero gradient.
        ess: (E κ)² / E κ² over the valid tokens, κ = 0 if rejected or clipped; 1 if all weights are equal.
        kept: share of valid tokens in the loss.
        kept_sequences: share of sequences with a token in the loss.
        exact: True if computed without sampling.
    """

    batch_size: int
    bias: Estimate
    deviation: Estimate
    mse: Estimate
    direction: Estimate
    ess: Estimate
    kept: Estimate
    kept_sequences: Estimate
    exact: bool


@dataclass(frozen=True, eq=False)
class GradientSums:
    """Sums of f over rows, sufficient for every value in `GradientError`. Each tensor has one row per group.

    Attributes:
        weight: Σ p, (G,).
        kept_weight: Σ p over rows with a token in the loss, (G,).
        first: Σ p f, (G, S · V).
        second: Σ p f², entry by entry, (G, S · V).
        token_second: Σ p Σ_t |κ_t A ∇log π_t|², (G,): variance term of random token rejection.
        factors: Σ p Σ_t κ and Σ p Σ_t κ², (G, 2), over the tokens with A ≠ 0.
        tokens: Σ p of tokens with A ≠ 0, of valid tokens, and of tokens in the loss, (G, 3).
        rows: number of sampled rows; None for exact rows.
        by_original: True if the estimator divides by B.
    """

    weight: Tensor
    kept_weight: Tensor
    first: Tensor
    second: Tensor
    token_second: Tensor
    factors: Tensor
    tokens: Tensor
    rows: int | None
    by_original: bool

    def without(self, group: int) -> GradientSums:
        """Return the sums of all other groups, for the jackknife."""
        others = torch.arange(len(self.weight), device=self.weight.device) != group
        kept = {name: getattr(self, name)[others] for name in _SUM_NAMES}
        rows = None if self.rows is None else self.rows - self.rows // len(self.weight)
        return replace(self, **kept, rows=rows)


_SUM_NAMES = ("weight", "kept_weight", "first", "second", "token_second", "factors", "tokens")


def gradient_sums(rows: SequenceRows, estimator: RolloutCorrectionConfig | LossCoefficients | None) -> GradientSums:
    """Compute the sums of an estimator, with one evaluation per row.

    Args:
        rows: sampled or exact rows, unsplit (their probabilities sum to 1).
        estimator: a configuration; None for no correction; or `LossCoefficients` of these rows, for a custom formula:
            with weights w (n, T), `LossCoefficients(w * rows.advantages[:, None], rows.mask)`. Tokens outside its mask
            are rejected. A row's values must not depend on other rows.

    Returns:
        The sums, from which `gradient_error` computes the errors at any batch size.

    Raises:
        ValueError: one row's gradient depends on other rows (batch normalization, the normalizer "weights"). Such an
            estimator is not a mean over rows: measure batches, with `batch_gradient`. Or the coefficients and the rows
            differ in shape, or a coefficient is not finite.
    """
    config = estimator if isinstance(estimator, RolloutCorrectionConfig) else None
    own = _check_coefficients(rows, estimator) if isinstance(estimator, LossCoefficients) else None
    if config is not None and (config.normalizer == "weights" or config.rollout_is_batch_normalize):
        raise ValueError(
            f"normalizer={config.normalizer!r} with rollout_is_batch_normalize={config.rollout_is_batch_normalize} "
            "divides by weights of the whole batch; measure whole batches, with batch_gradient"
        )
    groups = 1 if rows.exact else min(GROUPS, len(rows))
    step = max(1, CHUNK // max(rows.tokens.shape[1], rows.pair.trainer.logits.numel()))
    sums: dict[str, Tensor] = {}
    for start in range(0, len(rows), step):
        chunk = slice(start, start + step)
        part = rows.pick(chunk)
        used = loss_coefficients(part, config) if own is None else LossCoefficients(*(one[chunk] for one in own))
        group = torch.arange(start, start + len(part), device=rows.tokens.device) * groups // len(rows)
        for name, amount in _row_contributions(part, used).items():
            scaled = amount * part.probability.view(-1, *[1] * (amount.dim() - 1))
            total = sums.setdefault(name, scaled.new_zeros(groups, *scaled.shape[1:]))
            total.index_add_(0, group, scaled)
    by_original = config is not None and config.normalizer == "original"
    return GradientSums(**sums, rows=None if rows.exact else len(rows), by_original=by_original)


def gradient_error(sums: GradientSums, truth: Tensor, batch_size: int) -> GradientError:
    """Compute the errors of one estimator at one batch size.

    Args:
        sums: the result of `gradient_sums`.
        truth: the exact gradient, (S, V).
        batch_size: B, at least 1.

    Returns:
        The errors, each with its standard error.
    """
    value = _error_estimates(sums, truth, batch_size)
    if sums.rows is None:
        errors = dict.fromkeys(value, 0.0)
    else:
        # Delete-one-group jackknife: valid for any function of the sums.
        groups = len(sums.weight)
        left_out = [_error_estimates(sums.without(group), truth, batch_size) for group in range(groups)]
        errors = {name: math.sqrt(groups - 1) * float(np.std([one[name] for one in left_out])) for name in value}

    # Noise can make the square negative. It then counts as 0, where a first-order error would vanish. So the error of
    # the bias is its change when the square grows by one standard error.
    square, spread = value.pop("squared_bias"), errors.pop("squared_bias")
    errors["bias"] = math.sqrt(max(square, 0.0) + spread) - value["bias"]
    estimates = {name: Estimate(value[name], errors[name]) for name in value}
    return GradientError(batch_size=batch_size, exact=sums.rows is None, **estimates)


def random_rejection(
    filtered: GradientSums, unfiltered: GradientSums, rows: SequenceRows, *, unit: str
) -> GradientSums:
    """Compute the sums of an estimator that rejects the same share of units as a filter, but at random.

    With the same weights, units are kept with probability r, independent of the data; r is the filter's kept share. The
    sums are exact, without draws: E[f] = r f, and independent tokens add r (1 − r) Σ_t |κ_t A ∇log π_t|² to E|f|².

    Args:
        filtered: sums of the filter.
        unfiltered: sums of the same configuration without its criteria and veto.
        rows: the rows of both measurements.
        unit: "sequence" or "token": the unit that the filter rejects.

    Returns:
        The sums of the random rejection, with the matched share of units in the loss.
    """
    if unit == "sequence":
        kept = filtered.kept_weight.sum() / filtered.weight.sum()
        kept_weight, second = kept * unfiltered.kept_weight, kept * unfiltered.second
    else:
        kept = filtered.tokens[:, 2].sum() / filtered.tokens[:, 1].sum()
        kept_weight = unfiltered.weight * float(rows.probability @ (1 - (1 - kept) ** rows.mask.sum(-1)))

        # `second` has one value per entry, but only the total added variance is known: spread it evenly. Every error
        # depends only on the total.
        spread = (kept * (1 - kept) * unfiltered.token_second)[:, None] / unfiltered.second.shape[1]
        second = kept.square() * unfiltered.second + spread

    # Valid tokens stay valid when they are rejected.
    tokens = torch.cat([unfiltered.tokens[:, :2], kept * unfiltered.tokens[:, 2:]], 1)
    return replace(
        unfiltered,
        kept_weight=kept_weight,
        first=kept * unfiltered.first,
        second=second,
        factors=kept * unfiltered.factors,
        tokens=tokens,
    )


def without_rejection(config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
    """Return the configuration with the same weights and loss, but without criteria and veto."""
    return replace(config, rollout_rs=None, rollout_rs_threshold=None, rollout_token_veto_threshold=None)


def rejected_unit(config: RolloutCorrectionConfig) -> str | None:
    """Return "token" if any criterion is per token, "sequence" for all other criteria or a veto, otherwise None."""
    if any(criterion.scope == "token" for criterion in config.criteria):
        return "token"
    return "sequence" if config.criteria or config.rollout_token_veto_threshold is not None else None


def inverse_kept(batch_size: int, kept: float) -> float:
    """Compute E[1{K > 0} / K] for K ~ Binomial(B, p), p > 0."""
    if kept >= 1:
        return 1 / batch_size
    count = torch.arange(1, batch_size + 1, dtype=torch.float64, device="cpu")
    law = torch.distributions.Binomial(batch_size, torch.tensor(kept, dtype=torch.float64, device="cpu"))
    return float((law.log_prob(count).exp() / count).sum())


def _check_coefficients(rows: SequenceRows, own: LossCoefficients) -> LossCoefficients:
    """Check coefficients against the rows, and set them to 0 for tokens that are not in the loss.

    Raises:
        ValueError: the shapes differ, or the coefficient of a token in the loss is not finite.
    """
    if {one.shape for one in own} != {rows.mask.shape}:
        shapes = " and ".join(str(tuple(one.shape)) for one in own)
        raise ValueError(f"coefficients and loss_mask must be (n, T) = {tuple(rows.mask.shape)}; got {shapes}")
    loss_mask = own.loss_mask.bool() & rows.mask
    coefficients = own.coefficients.masked_fill(~loss_mask, 0.0)
    infinite = int((~coefficients.isfinite()).sum())
    if infinite:
        raise ValueError(f"{infinite} coefficients of tokens in the loss are NaN or infinite")
    return LossCoefficients(coefficients, loss_mask)


def _row_contributions(rows: SequenceRows, used: LossCoefficients) -> dict[str, Tensor]:
    """Compute each row's contribution to each sum."""
    coefficients, loss_mask = used
    gradient = rows.score_sums(coefficients).flatten(1)

    # κ is the loss's factor of A. It cannot be recovered if A is 0.
    advantages = rows.advantages
    readable = rows.mask & (advantages.abs() > 1e-12)[:, None]
    divisor = torch.where(advantages.abs() > 1e-12, advantages, 1.0)
    kappa = (coefficients / divisor[:, None]).masked_fill(~readable, 0.0)

    counted = [readable.sum(-1), rows.mask.sum(-1), loss_mask.sum(-1)]
    return {
        "weight": torch.ones_like(rows.rewards),
        "kept_weight": loss_mask.any(-1).double(),
        "first": gradient,
        "second": gradient.square(),
        "token_second": (coefficients.square() * rows.score_squares()).sum(-1),
        "factors": torch.stack([kappa.sum(-1), kappa.square().sum(-1)], 1),
        "tokens": torch.stack(counted, 1).double(),
    }


def _error_estimates(sums: GradientSums, truth: Tensor, batch_size: int) -> dict[str, float]:
    weight, kept_weight = float(sums.weight.sum()), float(sums.kept_weight.sum())
    first, second = sums.first.sum(0), float(sums.second.sum())
    truth = truth.flatten()
    scale = float(truth.square().sum())

    # A fixed denominator is the special case in which every row is kept.
    divisor = weight if sums.by_original else kept_weight
    p = 1.0 if sums.by_original else kept_weight / weight
    if divisor == 0:
        mean, spread, noise = torch.zeros_like(truth), 0.0, 0.0
        none_kept, inverse = 1.0, 0.0
    else:
        mean = first / divisor
        spread = max(second / divisor - float(mean.square().sum()), 0.0)
        noise = 0.0 if sums.rows is None else spread / (sums.rows * p)
        none_kept, inverse = (1 - p) ** batch_size, inverse_kept(batch_size, p)

    expected = (1 - none_kept) * mean
    squared_bias = float((expected - truth).square().sum()) - noise
    variance = spread * inverse + none_kept * (1 - none_kept) * float(mean.square().sum())

    # E|ĝ|², without the noise that a sampled mean adds to its own square.
    mean_square = max(float(expected.square().sum()) - noise, 0.0) + variance
    aligned = float(expected @ truth) ** 2 / (scale * mean_square) if mean_square else 0.0

    factor, factor_square = sums.factors.sum(0).tolist()
    readable, valid, in_loss = sums.tokens.sum(0).tolist()
    return {
        "squared_bias": squared_bias / scale,
        "bias": math.sqrt(max(squared_bias, 0.0) / scale),
        "deviation": math.sqrt(variance / scale),
        "mse": (max(squared_bias, 0.0) + variance) / scale,
        "direction": math.sqrt(max(1 - aligned, 0.0)),
        "ess": factor**2 / (readable * factor_square) if factor_square else 0.0,
        "kept": in_loss / valid,
        "kept_sequences": kept_weight / weight,
    }
