"""Compute verl 0.9.1's own numbers for `verl_parity=True`, from that release's definitions.

Only for verifying a switch; docs/coming_from/verl.md explains why each of these differs from docs/reference/metrics.md:

- every row of the batch is a sequence; without a valid token, its means and sums are 0;
- the weight and the statistic of a sequence are averaged over its tokens, so long sequences count more;
- a standard deviation is computed from clipped values (over tokens) or with n − 1 (over sequences);
- k1 criteria keep ρ in [1/upper, 1/lower], and a token's log-ratio is clamped before a sequence is summed;
- sums are divided by count + 1e-8, in the mask's dtype: float32 loses the 1e-8, float64 keeps it.

`mask` is float32 or float64 here, 1 on valid tokens. Arithmetic is in the inputs' dtype, float32 at least; masked
values are never read. No function here runs on a step path.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollcorr.config import Criterion, RolloutCorrectionConfig
from rollcorr.config.correction_options import SAFETY_BOUND
from rollcorr.config.criteria import check_token_criteria
from rollcorr.core.layout import check_layout, sequence_max, sequence_sum

EPSILON = 1e-8

# Options that are fixed in verl: log weights are clamped to ±20, normalization is over all units, and NaN is never
# checked, which corresponds to the default of `nonfinite`.
OF_VERL = {"nonfinite": "reject_token", "safety_bound": SAFETY_BOUND, "batch_normalize_over": "valid"}

Metrics = dict[str, Tensor]


def correct(
    train: Tensor, rollout: Tensor, response_mask: Tensor, config: RolloutCorrectionConfig
) -> tuple[Tensor | None, Tensor, Metrics]:
    """Return weights in verl's dtype, or None; the mask in its own dtype; metrics.

    Raises:
        ValueError: shapes differ, the batch has no token, a criterion is on denoising steps, or verl does not have an
            option.
    """
    check_token_criteria(config.criteria)
    wide_train, wide_rollout, mask = prepared(train, rollout, response_mask)
    log_ratio = wide_train - wide_rollout
    weights, kept = None, mask != 0
    metrics: Metrics = {}

    # Reject options that verl 0.9.1 does not have: no reference number exists.
    one_sided = config.is_mode == "icepop" and None in (config.is_lower, config.is_upper)
    own = one_sided or config.rollout_is_floor is not None or config.rollout_is == "horizon"
    if config.rollout_is is not None and own:
        raise ValueError(
            "verl has neither a floor of weights nor a band with an open side nor level 'horizon', so there are no "
            "numbers of verl to reproduce: leave out rollout_is_floor, close the band, choose another level, or leave "
            "out verl_parity"
        )
    for name, of_verl in OF_VERL.items():
        if getattr(config, name) != of_verl:
            raise ValueError(
                f"verl has no {name}, so there are no numbers of verl to reproduce with {getattr(config, name)!r}: "
                f"leave out {name}, or leave out verl_parity"
            )
    if config.rollout_is is not None and config.is_upper is not None:
        weights, metrics = importance_weights(
            log_ratio, mask, config.rollout_is, config.is_lower, config.is_upper, config.rollout_is_batch_normalize
        )
        weights = weights.detach().to(torch.promote_types(train.dtype, response_mask.dtype))

    # Rejection does not change the weights, and weights do not change the mask.
    if config.criteria:
        kept, rejection_metrics = rejection(log_ratio, mask, config.criteria)
        metrics |= rejection_metrics
    if config.rollout_token_veto_threshold is not None:
        spared, veto_metrics = veto(log_ratio, mask, config.rollout_token_veto_threshold)
        kept = kept & spared
        metrics |= veto_metrics

    metrics |= policy_gap(wide_train, wide_rollout, mask)
    return weights, kept.to(response_mask.dtype), metrics


def prepared(train: Tensor, rollout: Tensor | None, response_mask: Tensor) -> tuple[Tensor, Any, Tensor]:
    """Return detached log-probs, and the mask as 0 and 1, in float32 at least.

    Raises:
        ValueError: shapes differ, or the batch has no token.
    """
    check_layout(train_log_prob=train, rollout_log_prob=train if rollout is None else rollout, mask=response_mask)
    check_tokens(response_mask)
    dtype = torch.promote_types(train.dtype, torch.float32)
    return (
        train.detach().to(dtype),
        None if rollout is None else rollout.detach().to(dtype),
        widened_mask(response_mask),
    )


def widened_mask(response_mask: Tensor) -> Tensor:
    """Return the mask as 0 and 1, in float64 for a float64 mask, else in float32."""
    return (response_mask != 0).to(torch.float64 if response_mask.dtype == torch.float64 else torch.float32)


def check_tokens(mask: Tensor) -> None:
    """Check that the batch has a valid token, as verl does.

    Raises:
        ValueError: no entry of the mask is set.
    """
    if not mask.any():
        raise ValueError("verl_parity needs at least one valid token, as verl does; leave it out for a neutral result")


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Compute Σ_V values / (|V| + 1e-8). `values` may be (B, 1): each sequence then counts once per token."""
    return values.expand(mask.shape).masked_fill(mask == 0, 0).sum() / (mask.sum() + EPSILON)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Compute Σ_t values / (c_i + 1e-8) per row: (B,), 0 for an empty row."""
    return sequence_sum(values, mask != 0) / (mask.sum(-1) + EPSILON)


def clipped_deviation(values: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """Compute sqrt(mean(x²) − mean(x)²) over tokens of x = clip(values, low, high); 0 for a single token."""
    clipped = values.clamp(low, high)
    variance = token_mean(clipped.square(), mask) - token_mean(clipped, mask).square()
    return torch.where(mask.sum() > 1, variance.clamp(min=0).sqrt(), 0.0)


def policy_gap(train: Tensor, rollout: Tensor | None, mask: Tensor) -> Metrics:
    """Compute perplexities, KL estimates and χ² between the two policies; only π's perplexity without μ."""
    train_mean = sequence_mean(train, mask)
    metrics = {"training_ppl": (-train_mean).exp().mean(), "training_log_ppl": -train_mean.mean()}
    if rollout is None:
        return metrics

    log_ratio = train - rollout
    rollout_mean = sequence_mean(rollout, mask)
    gap = rollout_mean - train_mean
    summed = sequence_sum(log_ratio, mask != 0).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    return metrics | {
        "kl": token_mean(-log_ratio, mask),
        "k3_kl": token_mean(log_ratio.exp() - log_ratio - 1, mask),
        "rollout_ppl": (-rollout_mean).exp().mean(),
        "rollout_log_ppl": -rollout_mean.mean(),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": gap.abs().mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": gap.exp().mean(),
        "chi2_token": token_mean((2 * log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)).exp(), mask) - 1,
        "chi2_seq": (2 * summed).exp().mean() - 1,
    }


def level_ratio(log_ratio: Tensor, mask: Tensor, level: str) -> tuple[Tensor, Tensor]:
    """Return ℓ: d per token (B, T), S_i or G_i per sequence (B, 1); and exp(clamp(ℓ, ±20)), 0 at padding: (B, T)."""
    if level == "token":
        log_weight = log_ratio.masked_fill(mask == 0, 0)
    else:
        per_sequence = sequence_sum(log_ratio, mask != 0) if level == "sequence" else sequence_mean(log_ratio, mask)
        log_weight = per_sequence.unsqueeze(-1)
    bounded = log_weight.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()
    return log_weight, bounded.expand(mask.shape).masked_fill(mask == 0, 0)


@dataclass(frozen=True, kw_only=True)
class Band:
    """The bounds of weights and of their statistics.

    Attributes:
        level: "token", "sequence" or "geometric".
        lower: ratios below it count as low.
        upper: ratios above it count as high.
        clip_low: lower end of the clip before std and ESS; the upper end is `upper`.
        shares_of_tokens: the high and low shares of a sequence level count tokens, not sequences.
    """

    level: str
    lower: float
    upper: float
    clip_low: float
    shares_of_tokens: bool = False


def weight_metrics(applied: Tensor, raw: Tensor, log_weight: Tensor, mask: Tensor, band: Band) -> Metrics:
    """Compute statistics of the applied weights, and the shares of raw weights outside the bounds.

    Args:
        applied: (B, T), 0 at padding.
        raw: the weights before truncation, (B, T).
        log_weight: ℓ, (B, T) per token or (B, 1) per sequence.
        mask: (B, T).
        band: bounds.
    """
    # verl compares tokens by their bounded ratio, and sequences by their unclamped log weight.
    if band.level == "token":
        metrics = {
            "max": applied.masked_fill(mask == 0, -torch.inf).max(),
            "min": applied.masked_fill(mask == 0, torch.inf).min(),
            "ratio_fraction_high": token_mean((raw > band.upper).double(), mask),
            "ratio_fraction_low": token_mean((raw < band.lower).double(), mask),
        }
    else:
        high, low = log_weight > _log_of_bound(band.upper), log_weight < _log_of_bound(band.lower)
        metrics = {
            "max": log_weight.max().clamp(max=SAFETY_BOUND).exp(),
            "min": log_weight.min().exp(),
            "ratio_fraction_high": token_mean(high.double(), mask) if band.shares_of_tokens else high.double().mean(),
            "ratio_fraction_low": token_mean(low.double(), mask) if band.shares_of_tokens else low.double().mean(),
        }

    # std and ESS are computed from clipped values: verl excludes outliers from them.
    clipped = applied.clamp(band.clip_low, band.upper)
    spread = token_mean((clipped / (token_mean(clipped, mask) + EPSILON)).square(), mask)
    per_sequence, raw_per_sequence = sequence_mean(applied, mask), sequence_mean(raw, mask)
    return metrics | {
        "mean": token_mean(applied, mask),
        "std": clipped_deviation(applied, mask, low=band.clip_low, high=band.upper),
        "eff_sample_size": torch.where(spread == 0, 0.0, 1 / spread),
        "seq_mean": per_sequence.mean(),
        "seq_std": per_sequence.std(correction=min(1, len(per_sequence) - 1)),  # 0 for a single one
        "seq_max": per_sequence.max(),
        "seq_min": per_sequence.min(),
        "seq_max_deviation": (per_sequence - 1).abs().max(),
        "seq_fraction_high": (raw_per_sequence > band.upper).double().mean(),
        "seq_fraction_low": (raw_per_sequence < band.lower).double().mean(),
    }


def metrics_of_given_weights(
    applied: Tensor, raw: Tensor, log_weight: Tensor, response_mask: Tensor, band: Band
) -> dict[str, float]:
    """Return `weight_metrics` of given weights, on the host, under "rollout_is_".

    Raises:
        ValueError: the batch has no token.
    """
    check_tokens(response_mask)
    return to_floats(weight_metrics(applied, raw, log_weight, widened_mask(response_mask), band), prefix="rollout_is_")


def importance_weights(
    log_ratio: Tensor, mask: Tensor, level: str, lower: float | None, upper: float, normalize: bool
) -> tuple[Tensor, Metrics]:
    """Compute truncated (or, with a lower bound, IcePop) weights and their metrics; (B, T), 0 at padding.

    `normalize` divides by the mean over tokens, or over the rows that contain one. If the default process group is
    initialized, the mean is computed over that group.
    """
    log_weight, raw = level_ratio(log_ratio, mask, level)

    # One bound is a ceiling; two are a band, outside which weights are 0.
    outside = (raw > upper) if lower is None else (raw < lower) | (raw > upper)
    weights = raw.clamp(max=upper) if lower is None else raw.masked_fill(outside, 0)

    band = Band(level=level, lower=1 / upper if lower is None else lower, upper=upper, clip_low=0.0)
    metrics = prefixed("rollout_is_", weight_metrics(weights, raw, log_weight, mask, band))
    if lower is not None:
        metrics["rollout_is_oob_ratio"] = token_mean(outside.double(), mask)

    if normalize:
        factor = _batch_mean(weights, mask, level)
        metrics["rollout_is_batch_norm_factor"] = factor
        weights = weights / factor
    return weights, metrics


def _batch_mean(weights: Tensor, mask: Tensor, level: str) -> Tensor:
    """Return the mean weight over the default process group; 1 if it is not above 1e-8."""
    unit, counted = (weights, mask != 0) if level == "token" else (sequence_mean(weights, mask), mask.any(-1))
    totals = torch.stack([unit.masked_fill(~counted, 0).sum(), counted.sum().to(unit.dtype)])
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(totals)
    mean = totals[0] / totals[1].clamp(min=1)
    return torch.where(mean > EPSILON, mean, 1.0)


def rejection(log_ratio: Tensor, mask: Tensor, criteria: tuple[Criterion, ...]) -> tuple[Tensor, Metrics]:
    """Return the mask after every criterion, and each criterion's metrics."""
    metrics: Metrics = {}
    valid = mask != 0
    kept = torch.ones_like(valid)

    # Every criterion reads the base mask, so their order has no effect.
    for criterion in criteria:
        statistic = _statistic(log_ratio, mask, criterion)
        lower, upper = _statistic_bounds(criterion)
        keep = (statistic >= lower) & (statistic <= upper)
        metrics |= prefixed(f"rollout_rs_{criterion.name}_", _criterion_metrics(criterion, statistic, keep, mask))
        kept = kept & keep

    metrics["rollout_rs_masked_fraction"] = token_mean((~kept).double(), mask)
    metrics["rollout_rs_seq_masked_fraction"] = (~kept & valid).any(-1).double().mean()
    return valid & kept, metrics


def veto(log_ratio: Tensor, mask: Tensor, threshold: float | None) -> tuple[Tensor, Metrics]:
    """Return (B, 1), false for a row with a token of ratio below the threshold; and shares of such rows and tokens."""
    catastrophic = (mask != 0) & (log_ratio < _log_of_bound(threshold or 0.0))
    vetoed = catastrophic.any(-1, keepdim=True)
    return ~vetoed, {
        "rollout_is_veto_fraction": vetoed.double().mean(),
        "rollout_is_catastrophic_token_fraction": token_mean(catastrophic.double(), mask),
    }


def _statistic(log_ratio: Tensor, mask: Tensor, criterion: Criterion) -> Tensor:
    """Compute the criterion's statistic: (B, T) per token, (B, 1) per sequence; each token is clamped first."""
    d = log_ratio.masked_fill(mask == 0, 0).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    # k1 is −d here, verl's sign.
    divergence = {"k1": -d, "k2": d.square() / 2, "k3": d.exp() - 1 - d}[criterion.kind]
    if criterion.scope == "token":
        return divergence
    if criterion.scope == "seq_max":
        largest = sequence_max(divergence, mask != 0)
        return largest.masked_fill(largest == -torch.inf, 0).unsqueeze(-1)
    if criterion.scope == "seq_sum":
        return sequence_sum(divergence, mask != 0).unsqueeze(-1)
    return sequence_mean(divergence, mask).unsqueeze(-1)


def _statistic_bounds(criterion: Criterion) -> tuple[float, float]:
    """Return the statistic's bounds: k1, here −log ρ, lies between the logs of the ratio bounds as given."""
    upper = math.inf if criterion.upper is None else criterion.upper
    if criterion.kind != "k1":
        return -math.inf, upper
    return _log_of_bound(criterion.lower or 0.0), _log_of_bound(upper)


def _log_of_bound(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


def _criterion_metrics(criterion: Criterion, statistic: Tensor, keep: Tensor, mask: Tensor) -> Metrics:
    """Compute one criterion's metrics; k2 and k3 have no lower bound."""
    lower, upper = _statistic_bounds(criterion)
    valid = mask != 0
    nonempty = valid.any(-1)
    by_token, two_sided = criterion.scope == "token", criterion.kind == "k1"

    # Exclude rows without a token from the sequence statistics of a criterion.
    per_sequence = (sequence_mean(statistic, mask) if by_token else statistic.squeeze(-1))[nonempty]
    unit = statistic[valid] if by_token else per_sequence

    metrics = {
        "mean": token_mean(statistic, mask),
        "max": unit.max(),
        "min": unit.min(),
        "fraction_high": (unit > upper).double().mean(),
        "fraction_low": (unit < lower).double().mean(),
        "std": clipped_deviation(statistic, mask, low=lower if two_sided else 0.0, high=upper),
        "seq_mean": per_sequence.mean(),
        "seq_std": per_sequence.std(correction=min(1, len(per_sequence) - 1)),  # 0 for a single one
        "seq_max": per_sequence.max(),
        "seq_min": per_sequence.min(),
        "seq_max_deviation": per_sequence.abs().max(),
        "seq_fraction_high": (per_sequence > upper).double().mean(),
        "masked_fraction": token_mean((~keep).double(), mask),
        "seq_masked_fraction": (~keep & valid).any(-1)[nonempty].double().mean(),
    }
    if two_sided:
        metrics["seq_fraction_low"] = (per_sequence < lower).double().mean()
    return metrics


def prefixed(prefix: str, metrics: Metrics) -> Metrics:
    """Return the metrics with a prefix before each name."""
    return {f"{prefix}{name}": value for name, value in metrics.items()}


def to_floats(metrics: Metrics, *, prefix: str = "") -> dict[str, float]:
    """Return all metrics as floats, in one transfer to the host."""
    values = torch.stack([value.detach().to(torch.float64).reshape(()) for value in metrics.values()]).tolist()
    return {f"{prefix}{name}": value for name, value in zip(metrics, values, strict=True)}
