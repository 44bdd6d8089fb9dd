"""verl's functions for weights, rejection and metrics, with their names, arguments and return values.

They run `rollcorr.correct`; `verl_parity=True` computes verl 0.9.1's own numbers instead (`parity`).
docs/coming_from/verl.md lists the differences. Log-probs and masks are (B, T); every ratio is train / rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig as CheckedConfig
from rollcorr.config.criteria import Threshold
from rollcorr.core.layout import check_layout, sequence_mean
from rollcorr.core.mergeable_statistics import Statistics, extremes_of, moments_of
from rollcorr.core.metric_registry import PREFIX, finalize
from rollcorr.core.weights import ratio_above, ratio_below
from rollcorr.correction.rollout_correction import correct
from rollcorr.integrations.verl import parity
from rollcorr.integrations.verl.batch import Batch, weight_batch
from rollcorr.integrations.verl.config import RolloutCorrectionConfig

Settings = TypeVar("Settings")

Corrected = tuple[Tensor | None, Tensor, dict[str, float]]
"""Weights or None, the loss mask in the dtype of the response mask, and prefixed metrics."""

CorrectWith = Callable[[Tensor, Tensor, Tensor, Settings], Corrected]
"""`corrected` of any generation: log π, log μ, the response mask, and that generation's options."""

WEIGHT_METRICS = ("rollout_is_", "saturated_")
REJECTION_METRICS = ("rollout_rs_",)


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: Threshold | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | Sequence[str] | None = None,
    rollout_rs_threshold: Threshold | None = None,
    *,
    verl_parity: bool = False,
) -> tuple[Batch | None, Tensor, dict[str, float]]:
    """Weights w(π/μ), the mask of what stays in the loss, and every metric.

    Args:
        old_log_prob: log π of the sampled tokens, nats.
        rollout_log_prob: log μ, nats.
        response_mask: non-zero on tokens that the policy sampled.
        rollout_is: "token", "sequence" or "geometric"; None for no weights.
        rollout_is_threshold: ceiling, or band "lo_hi"; None computes no weights, as in verl.
        rollout_is_batch_normalize: divide the weights by their mean, taken over the default process group where that is
            initialized.
        rollout_rs: rejection criteria; None for none.
        rollout_rs_threshold: their thresholds; k1 bounds are on the ratio.
        verl_parity: compute verl 0.9.1's numbers.

    Returns:
        `.batch["rollout_is_weights"]` (B, T) without gradient, or None; the mask in the dtype of `response_mask`;
        metrics under "rollout_corr/".

    Raises:
        TypeError: an option of the wrong type.
        ValueError: an option outside its limits, shapes that differ, or, with `verl_parity`, a batch without a token.
    """
    weighting = rollout_is, rollout_is_threshold, rollout_is_batch_normalize
    config = RolloutCorrectionConfig(*weighting, rollout_rs, rollout_rs_threshold, verl_parity=verl_parity)
    weights, mask, metrics = corrected(old_log_prob, rollout_log_prob, response_mask, config)
    return None if weights is None else weight_batch(weights), mask, metrics


def corrected(
    train: Tensor, rollout: Tensor, response_mask: Tensor, config: RolloutCorrectionConfig, *, in_loss: bool = False
) -> Corrected:
    """Correct, as the public functions do that wrap this.

    Args:
        train: log π, nats, (B, T).
        rollout: log μ, nats, (B, T).
        response_mask: non-zero on tokens that the policy sampled, (B, T). It is returned as it is, bit for bit, where
            the configuration only measures.
        config: verl's options.
        in_loss: the mask is for a loss that reads `rollout`, so a missing log-prob leaves it in any case.
    """
    checked = config.to_correction()
    if config.verl_parity:
        weights, mask, found = parity.correct(train, rollout, response_mask, checked)
        weights, metrics = weights if checked.apply_is else None, parity.to_floats(found, prefix=PREFIX)
    else:
        correction = correct(train, rollout, response_mask, checked, group=_group(checked), densities=True)
        weights, metrics = correction.loss_weights, correction.metrics()
        mask = correction.loss_mask.to(response_mask.dtype)
    return weights, response_mask if checked.only_measures and not in_loss else mask, metrics


def weights_alone(
    log_ratio: Tensor, response_mask: Tensor, settings: Settings, correct_with: CorrectWith[Settings]
) -> tuple[Tensor, dict[str, float]]:
    """The weights of a log-ratio and their metrics without prefix, by one generation's `corrected`."""
    weights, _, metrics = correct_with(log_ratio, torch.zeros_like(log_ratio), response_mask, settings)
    assert weights is not None
    return weights, family(metrics, WEIGHT_METRICS)


def mask_alone(
    log_ratio: Tensor, response_mask: Tensor, settings: Settings, correct_with: CorrectWith[Settings]
) -> tuple[Tensor, dict[str, float]]:
    """The loss mask of a log-ratio and its metrics without prefix, by one generation's `corrected`."""
    _, mask, metrics = correct_with(log_ratio, torch.zeros_like(log_ratio), response_mask, settings)
    return mask, family(metrics, REJECTION_METRICS)


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: Threshold = 2.0,
    rollout_is_batch_normalize: bool = False,
    *,
    verl_parity: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Weights alone: exp of the level's log-ratio, truncated or (with a band) zeroed outside.

    Args:
        log_ratio: log π − log μ, nats.
        response_mask: non-zero on valid tokens.
        rollout_is: "token", "sequence" or "geometric".
        rollout_is_threshold: ceiling, or band "lo_hi".
        rollout_is_batch_normalize: divide the weights by their mean.
        verl_parity: compute verl 0.9.1's numbers.

    Returns:
        (B, T) weights, 0 at padding, without gradient; metrics without prefix.

    Raises:
        TypeError: an option of the wrong type; a threshold of None is one.
        ValueError: an option outside its limits, or shapes that differ.
    """
    if rollout_is_threshold is None:
        raise TypeError("rollout_is_threshold must be a number or a text such as '0.5_5.0'; got None")
    if rollout_is is None:
        raise TypeError("rollout_is must be 'token', 'sequence' or 'geometric'; got None")
    config = RolloutCorrectionConfig(
        rollout_is, rollout_is_threshold, rollout_is_batch_normalize, verl_parity=verl_parity
    )
    return weights_alone(log_ratio, response_mask, config, corrected)


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str | Sequence[str] = "token_k1",
    rollout_rs_threshold: Threshold | None = None,
    *,
    verl_parity: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """The mask alone: response tokens that every criterion keeps.

    Args:
        log_ratio: log π − log μ, nats.
        response_mask: non-zero on valid tokens.
        rollout_rs: criteria, one text with commas or a list.
        rollout_rs_threshold: one threshold for all, or one for each; k1 bounds are on the ratio.
        verl_parity: compute verl 0.9.1's numbers.

    Returns:
        The mask in the dtype of `response_mask`; metrics without prefix.

    Raises:
        TypeError: an option of the wrong type.
        ValueError: an option outside its limits, no threshold, or shapes that differ.
    """
    if rollout_rs is None:
        raise ValueError("rollout_rs must name at least one criterion; got None")
    config = RolloutCorrectionConfig(
        rollout_is=None, rollout_rs=rollout_rs, rollout_rs_threshold=rollout_rs_threshold, verl_parity=verl_parity
    )
    return mask_alone(log_ratio, response_mask, config, corrected)


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor, *, verl_parity: bool = False
) -> dict[str, float]:
    """How far apart π and μ are, without a prefix; π's perplexity alone when μ is None.

    Args:
        old_log_prob: log π of the sampled tokens, nats, (B, T).
        rollout_log_prob: log μ, nats, (B, T), or None.
        response_mask: non-zero on tokens that the policy sampled, (B, T).
        verl_parity: compute verl 0.9.1's numbers.

    Raises:
        ValueError: shapes differ, or, with `verl_parity`, a batch without a token.
    """
    if verl_parity:
        return parity.to_floats(parity.policy_gap(*parity.prepared(old_log_prob, rollout_log_prob, response_mask)))

    # Without μ, π is compared with itself, and only what π alone has is reported.
    rollout = old_log_prob if rollout_log_prob is None else rollout_log_prob
    metrics = correct(old_log_prob, rollout, response_mask, CheckedConfig(), densities=True).metrics(prefix="")
    if rollout_log_prob is None:
        return {name: metrics[name] for name in ("training_ppl", "training_log_ppl")}
    return {name: value for name, value in metrics.items() if not name.startswith(REJECTION_METRICS)}


def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, *, verl_parity: bool = False
) -> dict[str, float]:
    """`compute_offpolicy_metrics` of the current policy, under "rollout_corr/".

    Args:
        log_prob: log π_θ of the sampled tokens, nats, (B, T).
        rollout_log_prob: log μ, nats, (B, T).
        response_mask: non-zero on tokens that the policy sampled, (B, T).
        verl_parity: compute verl 0.9.1's numbers.

    Raises:
        ValueError: shapes differ, or, with `verl_parity`, a batch without a token.
    """
    metrics = compute_offpolicy_metrics(log_prob, rollout_log_prob, response_mask, verl_parity=verl_parity)
    return {f"{PREFIX}{name}": value for name, value in metrics.items()}


def compute_is_metrics(
    rollout_is_weights: Tensor,
    raw_rollout_is_weights: Tensor,
    log_ratio_for_metrics: Tensor,
    response_mask: Tensor,
    rollout_is: str,
    rollout_is_threshold: float,
    rollout_is_threshold_lower: float | None = None,
    *,
    verl_parity: bool = False,
) -> dict[str, float]:
    """Statistics of weights that were computed elsewhere, without a prefix.

    Args:
        rollout_is_weights: the weights in use, (B, T).
        raw_rollout_is_weights: the same before truncation, (B, T).
        log_ratio_for_metrics: the log weight before any clamp: (B, T) at token level, else (B, 1).
        response_mask: non-zero on valid tokens, (B, T).
        rollout_is: their level.
        rollout_is_threshold: C: weights above it count as high.
        rollout_is_threshold_lower: weights below it count as low; None for 1/C.
        verl_parity: compute verl 0.9.1's numbers.

    Raises:
        ValueError: shapes that differ, or, with `verl_parity`, a batch without a token.
    """
    upper = rollout_is_threshold
    lower = 1 / upper if rollout_is_threshold_lower is None else rollout_is_threshold_lower
    check_layout(weights=rollout_is_weights, raw_weights=raw_rollout_is_weights, response_mask=response_mask)
    weights = rollout_is_weights, raw_rollout_is_weights, log_ratio_for_metrics
    if verl_parity:
        band = parity.Band(level=rollout_is, lower=lower, upper=upper, clip_low=0.0)
        return parity.to_floats(parity.metrics_of_given_weights(*weights, response_mask, band))
    statistics = _weight_statistics(*weights, response_mask != 0, rollout_is, (lower, upper))
    return finalize(statistics.read(), prefix="")


def _weight_statistics(
    weights: Tensor, raw: Tensor, log_weight: Tensor, mask: Tensor, level: str, band: tuple[float, float]
) -> Statistics:
    """The registry's rows of given weights."""
    low, high = band

    # What the bounds judge: each token, or each row that holds one.
    nonempty = mask.any(-1)
    unit = mask if level == "token" else nonempty.unsqueeze(-1)

    mean_weight = sequence_mean(weights.double(), mask)
    log_mean_raw = sequence_mean(raw.double(), mask).log()
    sums = {
        "units": unit.sum(),
        "is_high": (unit & ratio_above(log_weight, high)).sum(),
        "is_low": (unit & ratio_below(log_weight, low)).sum(),
        "sequences_counted": nonempty.sum(),
        "is_seq_high": (nonempty & ratio_above(log_mean_raw, high)).sum(),
        "is_seq_low": (nonempty & ratio_below(log_mean_raw, low)).sum(),
    }
    measured = {"weight": (weights, mask), "weight_raw": (raw, mask), "sequence_weight": (mean_weight, nonempty)}
    moments = {name: moments_of(values, where) for name, (values, where) in measured.items()}
    extremes = {name: extremes_of(values, where) for name, (values, where) in measured.items()}

    # ESS and the spread are over the level's unit; the range of a sequence's weight is that of its log.
    moments["unit_weight"] = moments["weight" if level == "token" else "sequence_weight"]
    if level != "token":
        extremes["log_weight"] = extremes_of(log_weight, unit)
    return Statistics.of(sums=sums, moments=moments, extremes=extremes)


def family(metrics: dict[str, float], prefixes: tuple[str, ...]) -> dict[str, float]:
    """The metrics of one family, without "rollout_corr/"."""
    bare = {name.removeprefix(PREFIX): value for name, value in metrics.items()}
    return {name: value for name, value in bare.items() if name.startswith(prefixes)}


def _group(config: CheckedConfig) -> torch.distributed.ProcessGroup | None:
    """verl normalizes over the default process group; everything else is local to the caller's batch."""
    distributed = torch.distributed
    if config.rollout_is_batch_normalize and distributed.is_available() and distributed.is_initialized():
        return distributed.group.WORLD
    return None
