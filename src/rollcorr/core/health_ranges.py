"""Healthy ranges of metrics: the limits, the meaning of a value beyond them, and the fix."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HealthyRange:
    """Range of a metric in a healthy run.

    Attributes:
        ideal: the ideal, in words, e.g. "1" or "< 0.5".
        ideal_low: lower guide line, or the ideal itself; optional.
        ideal_high: upper guide line; optional.
        warn_below: a value below this is a finding; None disables it.
        warn_above: a value above this is a finding; None disables it.
        absolute: the bounds apply to |value|.
        reason: the meaning of a value outside.
        fix: the recommended change.
    """

    ideal: str
    ideal_low: float | None
    ideal_high: float | None
    warn_below: float | None
    warn_above: float | None
    absolute: bool
    reason: str
    fix: str

    def breached(self, value: float) -> float | None:
        """Return the limit that a value is beyond at six digits, or None: a weight truncated at 2 may be 2.0000002."""
        size = float(f"{abs(value) if self.absolute else value:.6g}")
        if self.warn_below is not None and size < self.warn_below:
            return self.warn_below
        if self.warn_above is not None and size > self.warn_above:
            return self.warn_above
        return None


_CLOSER_POLICIES_ADVICE = (
    "bring the two policies closer: same temperature and sampling settings, higher rollout precision, fresher weights"
)

# metric: the ideal in words, the guide lines below and above it, and the limits below and above which to warn
_METRIC_LIMITS: dict[str, tuple[str, float | None, float | None, float | None, float | None]] = {
    "rollout_is_mean": ("1", 1.0, 1.0, 0.5, 2.0),
    "rollout_is_std": ("< 0.5", None, 0.5, None, 1.0),
    "rollout_is_eff_sample_size": ("> 0.5", 0.5, None, 0.3, None),
    "rollout_is_veto_fraction": ("< 0.05", None, 0.05, None, 0.1),
    "rollout_is_catastrophic_token_fraction": ("0", None, 0.0, None, 0.01),
    "rollout_is_ratio_fraction_high": ("< 0.1", None, 0.1, None, 0.1),
    "rollout_is_ratio_fraction_low": ("< 0.1", None, 0.1, None, 0.1),
    "rollout_is_seq_max_deviation": ("< 1", None, 1.0, None, 1.0),
    "rollout_rs_masked_fraction": ("< 0.1", None, 0.1, None, 0.3),
    "kl": ("0", 0.0, 0.0, None, 0.1),
    "chi2_token": ("0", 0.0, 0.0, None, 1.0),
    "ppl_ratio": ("1", 1.0, 1.0, None, None),
    "t_times_kl": ("well below 20", None, None, None, 20.0),
    "capped_fraction": ("0", None, 0.0, None, 0.0),
    "nonfinite_count": ("0", None, 0.0, None, 0.0),
    "zero_probability_count": ("0", None, 0.0, None, 0.0),
}

# metric: meaning of a value beyond its limit, and the recommended fix
_METRIC_ADVICE = {
    "rollout_is_mean": (
        "under the rollout policy, weights average 1; if their mean is far from 1, the log-probs are not comparable, "
        "or truncation or underflow removed weight",
        "check that both sides score the same tokens at the same temperature with the same sampling settings; "
        "then look at the shares of clamped and truncated weights",
    ),
    "rollout_is_std": (
        "weights of high variance let a few samples decide the gradient",
        "lower the threshold, use token weights instead of sequence weights, or reject the outliers",
    ),
    "rollout_is_eff_sample_size": (
        "fewer than a third of the samples determine the update",
        "lower the threshold, use token weights instead of sequence weights, or shorten responses; "
        + _CLOSER_POLICIES_ADVICE,
    ),
    "rollout_is_veto_fraction": (
        "many sequences contain a token that is almost impossible under the trainer's policy",
        "check the log-probs first (shift by one, wrong temperature, top-p); then lower the veto threshold "
        "(1e-4 to 1e-6)",
    ),
    "rollout_is_catastrophic_token_fraction": (
        "almost impossible tokens are not rare, so the two sides do not compute the same distribution",
        "check alignment, temperature and truncation of the log-probs",
    ),
    "rollout_is_ratio_fraction_high": (
        "truncation changes many weights, so its bias is large",
        "raise the threshold, or " + _CLOSER_POLICIES_ADVICE,
    ),
    "rollout_is_ratio_fraction_low": (
        "many weights are below the lower limit, so their units count little",
        _CLOSER_POLICIES_ADVICE,
    ),
    "rollout_is_seq_max_deviation": (
        "at least one sequence is weighted far from 1",
        "inspect the worst sequences; reject outliers with a geometric or k3 criterion",
    ),
    "rollout_rs_masked_fraction": (
        "much of the batch is rejected, so the gradient is noisy and biased toward the kept part",
        "widen the band, or find out why so much lies outside it; a band on products rejects more of longer responses",
    ),
    "kl": (
        "the policies differ by more than precision explains",
        "look for a cause before correcting: temperature, top-p/top-k, stale weights, a shift by one token",
    ),
    "chi2_token": (
        "the variance of the token weights is above 1: importance sampling needs many more samples",
        "find the cause first: log rollouts, run `rollcorr check`; " + _CLOSER_POLICIES_ADVICE,
    ),
    "ppl_ratio": (
        "above 1, sampled tokens are less likely under the trainer than under the sampler",
        _CLOSER_POLICIES_ADVICE,
    ),
    "t_times_kl": (
        "if mean length × KL reaches the safety bound, most sequence weights are clamped and correct nothing",
        "use weights per token, shorten responses, or lower the KL at its source",
    ),
    "capped_fraction": (
        "log-ratios beyond 20 nats mean that the two sides scored different tokens or contexts (k3, chi2 clamp them)",
        "check alignment, padding and the processing of the log-probs",
    ),
    "nonfinite_count": (
        "log-probs are missing or not finite on response tokens",
        "find out why the engine does not return them; `nonfinite=` sets how the correction treats these tokens",
    ),
    "zero_probability_count": (
        "the trainer gives sampled tokens probability zero, as recomputed top-p or top-k masks do",
        "score with the full softmax, or replay the sampler's kept sets",
    ),
}

# The limits of the KL apply on both sides of 0.
RANGES: dict[str, HealthyRange] = {
    metric: HealthyRange(*limits, metric == "kl", *_METRIC_ADVICE[metric]) for metric, limits in _METRIC_LIMITS.items()
}

CRITERION_RANGES: dict[str, HealthyRange] = {"masked_fraction": RANGES["rollout_rs_masked_fraction"]}
