"""Healthy ranges: when a metric's value should worry its reader, why, and what to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HealthyRange:
    """What a healthy run shows.

    Attributes:
        ideal: the ideal, in words, e.g. "1" or "< 0.5".
        ideal_low: lower guide line, or the ideal itself; None when there is none.
        ideal_high: upper guide line; None when there is none.
        warn_below: a value below this is a finding; None never warns.
        warn_above: a value above this is a finding; None never warns.
        absolute: the bounds apply to |value|.
        reason: what a value outside means.
        fix: what to change.
    """

    ideal: str
    reason: str
    fix: str
    ideal_low: float | None = None
    ideal_high: float | None = None
    warn_below: float | None = None
    warn_above: float | None = None
    absolute: bool = False

    def breached(self, value: float) -> float | None:
        """The limit that a value is beyond, strictly, or None."""
        size = abs(value) if self.absolute else value
        if self.warn_below is not None and size < self.warn_below:
            return self.warn_below
        if self.warn_above is not None and size > self.warn_above:
            return self.warn_above
        return None


_CLOSER = (
    "bring the two policies closer: same temperature and sampling settings, higher rollout precision, fresher weights"
)
_MASKED = HealthyRange(
    ideal="< 0.1",
    ideal_high=0.1,
    warn_above=0.3,
    reason="much of the batch is thrown away, so the gradient is noisy and skewed toward what survives",
    fix="widen the band, or find out why so much lies outside it; bands around 1 on products depend on length",
)

RANGES: dict[str, HealthyRange] = {
    "rollout_is_mean": HealthyRange(
        ideal="1",
        ideal_low=1.0,
        ideal_high=1.0,
        warn_below=0.5,
        warn_above=2.0,
        reason="under the rollout policy the weights average 1; a mean far from it says that the log-probs are "
        "not comparable, or that truncation or underflow removed the mass",
        fix="check that both sides score the same tokens at the same temperature with the same sampling settings; "
        "then look at the saturation and truncation shares",
    ),
    "rollout_is_std": HealthyRange(
        ideal="< 0.5",
        ideal_high=0.5,
        warn_above=1.0,
        reason="weights of high variance let a few samples decide the gradient",
        fix="lower the threshold, move from sequence to token level, or reject the outliers",
    ),
    "rollout_is_eff_sample_size": HealthyRange(
        ideal="> 0.5",
        ideal_low=0.5,
        warn_below=0.3,
        reason="fewer than a third of the samples carry the update",
        fix="lower the threshold, move from sequence to token level, or shorten responses; " + _CLOSER,
    ),
    "rollout_is_veto_fraction": HealthyRange(
        ideal="< 0.05",
        ideal_high=0.05,
        warn_above=0.1,
        reason="many sequences hold a token that the trainer gives almost no probability",
        fix="check the log-probs first (shift by one, wrong temperature, top-p); then lower the veto threshold "
        "(1e-4 to 1e-6)",
    ),
    "rollout_is_catastrophic_token_fraction": HealthyRange(
        ideal="0",
        ideal_high=0.0,
        warn_above=0.01,
        reason="impossible tokens are not rare: the two sides do not compute the same distribution",
        fix="check alignment, temperature and truncation of the log-probs",
    ),
    "rollout_is_ratio_fraction_high": HealthyRange(
        ideal="< 0.1",
        ideal_high=0.1,
        warn_above=0.1,
        reason="truncation acts on many units, so its bias is large",
        fix="raise the threshold, or " + _CLOSER,
    ),
    "rollout_is_ratio_fraction_low": HealthyRange(
        ideal="< 0.1",
        ideal_high=0.1,
        warn_above=0.1,
        reason="many units count for almost nothing",
        fix=_CLOSER,
    ),
    "rollout_is_seq_max_deviation": HealthyRange(
        ideal="< 1",
        ideal_high=1.0,
        warn_above=1.0,
        reason="at least one sequence is weighted far from 1",
        fix="inspect the worst sequences; reject outliers with a geometric or k3 criterion",
    ),
    "rollout_rs_masked_fraction": _MASKED,
    "kl": HealthyRange(
        ideal="0",
        ideal_low=0.0,
        ideal_high=0.0,
        warn_above=0.1,
        absolute=True,
        reason="the policies differ by more than precision explains",
        fix="look for a cause before correcting: temperature, top-p/top-k, stale weights, a shift by one token",
    ),
    "chi2_token": HealthyRange(
        ideal="0",
        ideal_low=0.0,
        ideal_high=0.0,
        warn_above=1.0,
        reason="the variance of the token weights is above 1: importance sampling needs many more samples",
        fix="truncate lower or reject; " + _CLOSER,
    ),
    "ppl_ratio": HealthyRange(
        ideal="1",
        ideal_low=1.0,
        ideal_high=1.0,
        reason="above 1, the trainer is less sure of the sampled tokens than the sampler was",
        fix=_CLOSER,
    ),
    "t_times_kl": HealthyRange(
        ideal="well below 20",
        warn_above=20.0,
        reason="at mean length × KL ≥ the safety bound most sequence weights are clamped and correct nothing",
        fix="use token-level weights or geometric rejection, shorten responses, or lower the KL at its source",
    ),
    "capped_fraction": HealthyRange(
        ideal="0",
        ideal_high=0.0,
        warn_above=0.0,
        reason="log-ratios beyond 20 nats mean that the two sides did not score the same tokens (k3, chi2 are capped)",
        fix="check alignment, padding and the processing of the log-probs",
    ),
    "nonfinite_count": HealthyRange(
        ideal="0",
        ideal_high=0.0,
        warn_above=0.0,
        reason="log-probs are missing or not finite on response tokens",
        fix="find out why the engine returns none for them; `nonfinite=` decides what the correction does with them",
    ),
    "zero_probability_count": HealthyRange(
        ideal="0",
        ideal_high=0.0,
        warn_above=0.0,
        reason="the trainer gives sampled tokens probability zero, as recomputed top-p or top-k masks do",
        fix="score with the full softmax, or replay the sampler's own keep mask",
    ),
}

CRITERION_RANGES: dict[str, HealthyRange] = {"masked_fraction": _MASKED}
