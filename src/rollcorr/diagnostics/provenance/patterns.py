"""Detect sampling settings by the patterns that they cause in two log-probs of the same tokens.

`train` and `rollout` are (n,) float64 log-probs of the valid tokens, nats. d is the log-ratio log π − log μ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.numbers import format_number
from rollcorr.diagnostics.provenance.pairs import (
    FEW,
    Crowds,
    Slope,
    certain_share,
    crowds,
    logit,
    mean_and_z,
    slope,
)
from rollcorr.diagnostics.provenance.provenance_findings import confidence_of, provenance_finding
from rollcorr.diagnostics.provenance.storage import is_16_bit

MIN_TOKENS = 16
"""Fewest valid tokens that are judged."""
ONE_SIDED = 0.75
"""Smallest share of likely tokens with a higher log-prob on the same side for a temperature."""
STEEPENS = 1.015
"""Largest growth of the ratio of logits from likely to very likely tokens. Under a temperature the ratio falls to the
exponent (growth of 1.005 at most in measurements); under a cap of the logits it grows, by 1.05 in a measured log."""
EXPONENT = 0.05
"""Smallest |β − 1| reported as a temperature: a mismatch without a temperature can reach smaller values."""
CERTAIN_SHARE = 0.01
"""Share of tokens with probability 1 on one side only, above which that side was truncated."""
LEFT_OVER = 0.5
"""Largest share of Var(d) not explained by the slope of a temperature: 0.006 to 0.4 if the engine's noise is up to 0.15
nats, and mostly 0.67 to 1 if the weights are stale."""
TOGETHER = 0.8
"""Smallest squared correlation of the two sides under a temperature; measured: 0.93 and above."""
MASS_LOST = 0.01
"""Smallest lost mass, 1 − mean ratio, reported as a truncation when no token has probability 1."""
HIGHER = 0.58
"""Smallest share of tokens higher on the truncated side if only lost mass indicates it; 1/2 without a truncation."""
LARGE = 0.3
"""Standard deviation of the log-ratio, nats, above which a pair without a pattern is not reported as matched."""
VISIBLE = 2.0
"""Standard errors by which the mean ratio must lie below the raw log-probs' mean ratio to report "processed"."""
RARE, BEYOND_BOUND = 0.3, 0.1
"""Mass V p below which a token counts as rare, and the mean by which its lost mass may exceed V p."""
Z = 4.0
"""Standard errors between a mean and its expected value that count as significant."""


def find_temperature(train: Tensor, rollout: Tensor, *, truncated: bool = False) -> list[Finding]:
    """Find a temperature difference, and test if the tokens were drawn from the rollout's log-probs.

    Args:
        train: log π of the valid tokens, (n,) nats.
        rollout: log μ, (n,) nats.
        truncated: `find_truncation` reported one side. Then only unlikely tokens can show a temperature, and lost mass
            moves the mean ratio, so the sampler is not judged. Defaults to False.

    Returns:
        An empty list; or "tempered", followed by "raw" or "processed" if the mean ratio decides between them.
    """
    # The sharper side has the lower temperature and is higher on likely tokens. `crowds` expects it second.
    seen = crowds(train, rollout)
    rollout_is_sharper = seen.share_up >= 0.5
    if not rollout_is_sharper:
        seen = crowds(rollout, train)

    # Without likely tokens there are no two crowds to compare: use the slope of one side against the other instead.
    if seen.likely < FEW and not truncated:
        line = slope(train, rollout)
        if abs(line.exponent - 1) >= EXPONENT and line.z >= Z and _is_a_power(train, rollout, line):
            ratio = 1 / line.exponent
            reason = f"the rollout's temperature is about {ratio:.2g} times the trainer's, or further off"
            return _judge_temperature(train, rollout, ratio, line.z, reason, {"slope": line.exponent})
    # A sign test: by chance the share is 1/2, with a standard error of 1 / (2 √likely).
    z = (2 * seen.share_up - 1) * seen.likely**0.5

    # A truncation raises likely tokens as well, so an additional temperature needs unlikely tokens that fell.
    unlikely_fell = seen.unlikely >= FEW and seen.unlikely_p80 >= 1 + EXPONENT
    if not seen.likely or not _is_temperature(seen) or z < Z or (truncated and not unlikely_fell):
        return []

    # The sharper side is the other one to the power β > 1, so its temperature is 1/β of the other's.
    exponent = seen.unlikely_p80 if truncated else seen.exponent
    ratio = 1 / exponent if rollout_is_sharper else exponent
    evidence = {
        "share_one_sided": seen.share_up,
        "violations": seen.violations,
        "likely_tokens": float(seen.likely),
        "unlikely_tokens": float(seen.unlikely),
    }

    # A single crowd only bounds β: unlikely tokens from below, likely ones from above.
    rough = "about"
    if truncated or seen.unlikely < FEW:
        rough = "at most" if truncated == rollout_is_sharper else "at least"
    reason = f"the rollout's temperature is {rough} {ratio:.2g} times the trainer's"

    # The first finding is the temperature itself, the second the sampler.
    findings = _judge_temperature(train, rollout, ratio, z, reason, evidence)
    return findings[:1] if truncated else findings


def _judge_temperature(
    train: Tensor, rollout: Tensor, ratio: float, z: float, reason: str, shown: Mapping[str, float]
) -> list[Finding]:
    """Return the temperature's finding; test by the mean ratio E[π/μ] which side's distribution the tokens follow.

    `value` has two digits of the temperature ratio: noise biases the estimate of β toward 1.

    Returns:
        "tempered", followed by "raw" or "processed" if the mean ratio decides between them.
    """
    excess, honest_z = mean_and_z((train - rollout).exp() - 1)
    evidence = {"temperature_ratio": ratio, **shown, "mean_ratio": 1 + excess, "mean_ratio_z": honest_z}
    tempered = provenance_finding("tempered", reason, confidence_of(z), evidence)
    findings = [replace(tempered, value=float(f"{ratio:.2g}"))]

    # E_μ[ρ] = 1 for any trainer, if μ sampled.
    if excess > 0 and honest_z >= Z - 1:
        reason = f"the mean ratio is {format_number(1 + excess)}: the tokens follow the trainer's distribution instead"
        findings.append(provenance_finding("raw", reason, confidence_of(honest_z), evidence))
        return findings

    # For raw log-probs the mean ratio is 1 plus about Var(d); with few tokens that cannot be distinguished from 1.
    error = excess / honest_z if honest_z else 0.0
    visible = float((train - rollout).var()) - excess > VISIBLE * error
    if visible and honest_z < VISIBLE and (honest_z > -Z or excess > -MASS_LOST):
        reason = "the mean ratio is 1: the tokens follow the log-probs reported"
        findings.append(provenance_finding("processed", reason, confidence_of(Z)))
    return findings


def _is_a_power(train: Tensor, rollout: Tensor, line: Slope) -> bool:
    """Return whether a power μ ∝ π^β explains the difference of two sides that find every token unlikely.

    A temperature makes d a function of the policy: its residual is small, from the variation of Σ p^β between contexts.
    Other weights move each context separately, and regression to the mean sets the slope.
    """
    left = float((rollout - line.exponent * train).var()) / max(float((rollout - train).var()), 1e-30)
    return left <= LEFT_OVER and line.low >= TOGETHER * line.high


def find_truncation(train: Tensor, rollout: Tensor, *, vocabulary: int | None = None) -> list[Finding]:
    """Find a softmax over a truncated vocabulary on one side: tokens of probability 1 on that side only, or lost mass.

    Args:
        train: log π of the valid tokens, (n,) nats.
        rollout: log μ, (n,) nats.
        vocabulary: number of tokens in the vocabulary; defaults to `None`: not known.

    Returns:
        At most one finding. If both sides appear truncated, these contradict each other, and the list is empty.
    """
    findings = []
    for side, base, other in (("rollout", train, rollout), ("trainer", rollout, train)):
        # A low temperature also moves likely tokens to probability 1.
        seen = crowds(base, other)
        exponent = seen.exponent if _is_temperature(seen) else 1.0
        certain = certain_share(base, other, exponent=exponent)
        lost, z = mean_and_z(1 - (base - other).exp())
        choice = logit(base).abs() < 7
        higher = float((other > base)[choice].double().mean()) if choice.any() else 0.0

        # Lost mass indicates a truncation only if no few tokens dominate the mean ratio and no temperature explains it.
        no_heavy_token = float((base - other).max()) < 1.5
        lost_enough = lost >= MASS_LOST and z >= Z + 2 and higher >= HIGHER
        by_mass = lost_enough and no_heavy_token and not _is_temperature(seen)

        # A log-softmax in 16 bits also rounds likely tokens to probability 1, but loses no mass.
        by_certainty = certain >= CERTAIN_SHARE and (lost_enough or not is_16_bit(other))
        if not (by_certainty or by_mass) or (vocabulary is not None and _drops_likelier(base, other, vocabulary)):
            continue

        mass = 1 - lost
        fix = ""
        if side == "trainer":
            fix = "score over the whole vocabulary on the trainer, as the rollout's log-probs are"
        evidence = {"certain_share": certain, "kept_mass": mass, "mass_z": z, "share_one_sided": higher}
        reason = (
            f"the {side}'s log-probs are over a truncated vocabulary: kept mass {format_number(mass)} on average, "
            f"{certain:.1%} of tokens left without a choice"
        )
        confidence = confidence_of(max(z, certain / math.sqrt(max(certain, 1e-9) / len(base))))
        findings.append(provenance_finding("truncated", reason, confidence, evidence, fix=fix))
    return [] if len(findings) == 2 else findings


def _drops_likelier(base: Tensor, other: Tensor, vocabulary: int) -> bool:
    """Return whether rare tokens lose over V p of mass: a truncation drops only tokens less likely than a kept one."""
    bound = vocabulary * base.exp()
    beyond, z = mean_and_z((1 - (base - other).exp() - bound)[bound < RARE])
    return int((bound < RARE).sum()) >= FEW and beyond > BEYOND_BOUND and z >= Z


def no_pattern(train: Tensor, rollout: Tensor) -> Finding:
    """Return the note of a pair without a pattern: "matched" up to a log-ratio std of `LARGE` nats, else "unexplained".

    Args:
        train: log π of the valid tokens, (n,) nats.
        rollout: log μ, (n,) nats.
    """
    difference = train - rollout
    evidence = {"std": float(difference.std()), "abs_mean": float(difference.abs().mean())}
    deviation = format_number(evidence["std"])
    if evidence["abs_mean"] == 0:
        reason = "the two sides are the same numbers: one may be a copy of the other, and then nothing was compared"
        return provenance_finding("matched", reason, None, evidence)
    code = "matched" if evidence["std"] <= LARGE else "unexplained"
    reason = (
        f"no pattern of a setting in a log-ratio of standard deviation {deviation} nats; cannot tell ordinary noise "
        f"from other weights, because the pairs alone do not show it: a null or token ids tell"
    )
    return provenance_finding(code, reason, None, evidence)


def _is_temperature(seen: Crowds) -> bool:
    """Return whether likely tokens rose by a common exponent while unlikely ones fell: a truncation raises both."""
    fell = seen.unlikely < FEW or seen.unlikely_p80 >= 1 + EXPONENT / 2
    one_exponent = seen.violations <= 0.35 and seen.steepening <= STEEPENS
    return one_exponent and seen.share_up >= ONE_SIDED and seen.exponent >= 1 + EXPONENT and fell
