"""Explain a metric: unit, sample, formula with its symbols, healthy range, and the fix outside this range."""

from __future__ import annotations

import re

from rollcorr.config.checks import did_you_mean
from rollcorr.core.metric_names import OLDER_NAMES
from rollcorr.core.metric_registry import CRITERIA, METRICS, PREFIX, Metric, metric
from rollcorr.diagnostics.numbers import LABELS

SYMBOLS: dict[str, str] = {
    "π": "the trainer's policy: π_old when decoupled, π_θ in bypass mode",
    "μ": "the policy that sampled",
    "d": "log π − log μ of a token, in nats",
    "d̂": "d, cut at ±20 nats",
    "ρ": "exp(d), the ratio of a token",
    "S_i": "the sum of d over sequence i",
    "Ŝ_i": "S_i, cut at ±20 nats",
    "G_i": "the mean of d over sequence i",
    "V": "the valid tokens",
    "R": "the sequences with a valid token",
    "tm": "mean over V",
    "sm": "mean over R",
    "w": "the importance weight",
    "ℓ": "the log of the weight before its threshold",
    "ℓ̂": "ℓ, cut at ± safety_bound",
    "C": "the upper threshold of the weights",
    "lo": "the lower threshold of the weights",
    "J": "the joint log-ratio of a denoising step",
}
"""Symbol → meaning, for metric formulas; from docs/reference/notation.md."""

_STEPS = (
    "below {} negligible, below {} small, below {} moderate, beyond that severe or a fault (docs/guides/choosing.md)"
)
_MEASURED = (
    "measured with equal weights, the trainer in float32, a Llama of 260,000 parameters, temperature 1 "
    "(docs/guides/remove_the_mismatch_first.md): a sampler in {}"
)

SCALES: dict[str, str] = {
    "k3_kl": _STEPS.format("1e-4", "0.01", "0.1")
    + "; "
    + _MEASURED.format("float32 2e-12, float16 1e-5, bfloat16 6e-4, int8 2e-3")
    + ". Large vocabularies and deep models round more: your own null tells (`rollcorr null`), and 3 times its k3 is a "
    "finding",
    "kl": _STEPS.format("1e-4", "0.01", "0.1")
    + ", in size: of few tokens it may be negative, as its noise is log_ratio_std / √tokens; k3_kl is steadier",
    "log_ratio_std": "k3 is about half its square; "
    + _MEASURED.format("float32 2e-6, float16 0.004, bfloat16 0.04, int8 0.07"),
}
"""Metric → values that count as small, moderate and large, with the source of the numbers."""

SYNONYMS: dict[str, tuple[str, ...]] = {
    "kl": ("k1", "k1_kl", "mismatch_kl"),
    "k3_kl": ("k3", "approx_kl", "mismatch_k3_kl"),
    "chi2_token": ("chi2", "chi_square"),
    "nonfinite_count": ("nan_count", "inf_count"),
    "log_ratio_abs_mean": ("logp_diff", "logprob_diff", "sampling_logp_difference"),
    "rollout_is_mean": ("mean_weight", "weight_mean", "is_weight_mean", "importance_sampling_ratio"),
    "rollout_is_raw_mean": ("mean_ratio", "ratio_mean"),
    "rollout_is_raw_max": ("max_ratio", "ratio_max"),
    "rollout_is_ratio_fraction_high": ("clip_frac", "clipfrac", "clip_fraction", "pg_clipfrac", "truncated_fraction"),
    "rollout_is_eff_sample_size": ("ess", "eff_sample_size", "effective_sample_size", "kish_ess"),
    "rollout_is_veto_fraction": ("veto_frac", "veto_fraction"),
    "rollout_rs_masked_fraction": ("masked_frac", "masked_fraction", "rejected_fraction", "reject_rate"),
}
"""Metric → its names in other libraries."""
NOTES = {
    "rollout_is_ratio_fraction_high": "the share of tokens at PPO's own clip is another one, actor/clip_fraction_high "
    "and _low of a loss (docs/reference/metrics.md)",
}
"""Metric → different quantities with the same name in other libraries."""

# A word; a combining circumflex over its last letter is a separate character, and part of the word.
_SYMBOL = re.compile(r"(?:seq|token)_\w+|[^\W\d_]+\u0302?(?:_i\b)?")


def explain_metric(name: str) -> dict[str, str]:
    """Return the registry's explanation of a metric, as text by heading.

    Args:
        name: bare or prefixed name, as in a log, or a name from a different library, such as "ess".

    Returns:
        Heading → text, without empty entries.

    Raises:
        ValueError: there is no such metric; the message contains the nearest name.
    """
    bare = name.removeprefix("actor/").removeprefix(PREFIX).removeprefix("mismatch/").lower().replace("-", "_")
    own_name = {synonym: own for own, synonyms in SYNONYMS.items() for synonym in synonyms}

    # Explain a name of 2025 by its change and the current metric.
    older = next((old for old in (f"mismatch/{bare}", PREFIX + bare) if old in OLDER_NAMES), "")
    lines = {}
    if older and (name.startswith("mismatch/") or bare not in METRICS):
        lines = {"older name": name, "change": OLDER_NAMES[older].change or "none"}
        own_name[bare] = OLDER_NAMES[older].newest
    try:
        found = metric(own_name.get(bare, bare))
    except KeyError:
        raise ValueError(
            f"{did_you_mean(bare, [*METRICS, *own_name])}no metric of a correction is called {name[:80]!r}; "
            "`rollcorr explain` without a name lists them; docs/reference/metrics.md has those of a trainer, such as "
            "engine/staleness, too"
        ) from None
    return lines | _lines(found)


def _lines(found: Metric) -> dict[str, str]:
    over = {"tokens": "V, the valid tokens", "sequences": "R, the sequences with a valid token"}
    over |= {"unit": "tokens or sequences, whichever the level of the weights counts", "batch": "the whole batch"}
    known = SYMBOLS | dict.fromkeys(CRITERIA, "the statistic of that criterion")
    used = dict.fromkeys(symbol for symbol in _SYMBOL.findall(found.formula) if symbol in known)
    lines = {
        "metric": PREFIX + found.name,
        "meaning": LABELS.get(found.name, ""),
        "also called": ", ".join(SYNONYMS.get(found.name, ())),
        "note": NOTES.get(found.name, ""),
        "unit": found.unit,
        "over": over.get(found.sample, found.sample),
        "formula": found.formula,
        "where": "; ".join(f"{symbol}: {known[symbol]}" for symbol in used),
        "scale": SCALES.get(found.name, ""),
    }

    # Some healthy ranges are only guides, without warning limits.
    healthy = found.healthy
    if healthy is not None:
        size = f"|{found.name}|" if healthy.absolute else "the value"
        limits = [f"below {healthy.warn_below:g}"] if healthy.warn_below is not None else []
        limits += [f"above {healthy.warn_above:g}"] if healthy.warn_above is not None else []
        finding = f"{size} {' or '.join(limits)}" if limits else ""
        lines |= {"healthy": healthy.ideal, "a finding": finding, "outside": healthy.reason, "fix": healthy.fix}
    return {heading: text for heading, text in (lines | {"source": found.source}).items() if text}
