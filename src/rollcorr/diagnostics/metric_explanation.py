"""One metric in words: unit, sample, formula with its symbols, healthy range, and what to do outside it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rollcorr.config.checks import nearest
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
"""Symbols of docs/reference/notation.md that formulas of metrics use."""

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
"""Metric → how large is large, with the source of the numbers."""

# A word; a circumflex over its last letter is a character of its own, and belongs to it.
_SYMBOL = re.compile(r"(?:seq|token)_\w+|[^\W\d_]+\u0302?(?:_i\b)?")


def explain_metric(name: str) -> dict[str, str]:
    """What the registry says of a metric, as words by heading.

    Args:
        name: bare or prefixed, as it stands in a log.

    Raises:
        ValueError: there is no such metric; the nearest is named.
    """
    bare = name.removeprefix("actor/").removeprefix(PREFIX)
    try:
        found = metric(bare)
    except KeyError:
        hint = nearest(bare, METRICS)
        raise ValueError(
            f"no metric of a correction is called {name[:80]!r}.{hint} `rollcorr explain` without a name lists them; "
            "docs/reference/metrics.md has those of a trainer, such as engine/staleness, too"
        ) from None
    return dict(_lines(found))


def _lines(found: Metric) -> Iterator[tuple[str, str]]:
    yield "metric", PREFIX + found.name
    if found.name in LABELS:
        yield "meaning", LABELS[found.name]
    over = {"tokens": "V, the valid tokens", "sequences": "R, the sequences with a valid token"}
    over |= {"unit": "tokens or sequences, whichever the level of the weights counts", "batch": "the whole batch"}
    yield "unit", found.unit
    yield "over", over.get(found.sample, found.sample)
    yield "formula", found.formula

    known = SYMBOLS | dict.fromkeys(CRITERIA, "the statistic of that criterion")
    used = dict.fromkeys(symbol for symbol in _SYMBOL.findall(found.formula) if symbol in known)
    if used:
        yield "where", "; ".join(f"{symbol}: {known[symbol]}" for symbol in used)

    if found.name in SCALES:
        yield "scale", SCALES[found.name]

    # A range may only have guide lines, and no limit that warns.
    healthy = found.healthy
    if healthy is not None:
        size = f"|{found.name}|" if healthy.absolute else "the value"
        limits = [f"below {healthy.warn_below:g}"] if healthy.warn_below is not None else []
        limits += [f"above {healthy.warn_above:g}"] if healthy.warn_above is not None else []
        yield "healthy", healthy.ideal
        if limits:
            yield "a finding", f"{size} {' or '.join(limits)}"
        yield "outside", healthy.reason
        yield "fix", healthy.fix
    yield "source", found.source
