"""The patterns that sampling settings leave in two log-probs of the same tokens, each with its finding.

`train` and `rollout` are (n,) float64 log-probs of the valid tokens.
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
"""Fewer valid tokens are not judged."""
ONE_SIDED = 0.75
"""Share of likely tokens that must be higher on one side before a temperature is believed."""
STEEPENS = 1.015
"""Most that the ratio of logits grows from likely to very likely tokens. Under a temperature it falls to the exponent
(1.005 at most was seen); under a cap of the logits it grows, in the judge's log by 1.05."""
EXPONENT = 0.05
"""Smallest |β − 1| that is called a temperature: an honest mismatch can look like less."""
CERTAIN_SHARE = 0.01
"""Share of tokens with probability 1 on one side only, above which it was truncated."""
LEFT_OVER = 0.5
"""Share of Var(d) that a slope may leave and still be a temperature's: 0.006 to 0.4 where the engine's noise is up to
0.15 nats, and mostly 0.67 to 1 where the weights are old."""
TOGETHER = 0.8
"""Squared correlation of the two sides that a temperature keeps: 0.93 and more."""
MASS_LOST = 0.01
"""Smallest 1 − mean ratio that is called a truncation when no token is certain."""
HIGHER = 0.58
"""Share of tokens that must be higher on the truncated side if mass alone speaks for it: an honest pair has a half."""
LARGE = 0.3
"""Standard deviation of the log-ratio, nats, above which a pair without a pattern is not called matched."""
VISIBLE = 2.0
"""Standard errors by which the mean ratio must be below that of raw log-probs before they are called processed."""
RARE, BEYOND_BOUND = 0.3, 0.1
"""Mass V p up to which a token is rare, and the mean by which the lost mass may exceed it."""
Z = 4.0
"""Standard errors that a mean must be away from what it should be."""


def find_temperature(train: Tensor, rollout: Tensor, *, truncated: bool = False) -> list[Finding]:
    """Find another temperature on one side, and then whether the tokens follow the rollout's log-probs.

    Args:
        train: log π of the valid tokens.
        rollout: log μ.
        truncated: one side was found to be truncated. Then only unlikely tokens can show a temperature, and lost mass
            moves the mean ratio, so that nothing is said about the sampler.

    Returns:
        No finding, "tempered" alone, or "tempered" and one of "raw" and "processed".
    """
    # The sharper side, of the lower temperature, is higher on likely tokens. `crowds` wants it second.
    seen = crowds(train, rollout)
    rollout_is_sharper = seen.share_up >= 0.5
    if not rollout_is_sharper:
        seen = crowds(rollout, train)

    # Where hardly any token is likely there are no crowds to compare; what is left is the slope of one side against
    # the other.
    if seen.likely < FEW and not truncated:
        line = slope(train, rollout)
        if abs(line.exponent - 1) >= EXPONENT and line.z >= Z and _is_a_power(train, rollout, line):
            ratio = 1 / line.exponent
            reason = f"the rollout's temperature is about {ratio:.2g} times the trainer's, or further off"
            return _tempered(train, rollout, ratio, line.z, reason, {"slope": line.exponent})
    # A sign test: by chance the share is 1/2, with a standard error of 1 / (2 √likely).
    z = (2 * seen.share_up - 1) * seen.likely**0.5

    # A truncation lifts likely tokens as well; only unlikely ones that fell speak for a temperature beside it.
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

    # One crowd alone bounds β from one side: unlikely tokens from below, likely ones from above.
    rough = "about"
    if truncated or seen.unlikely < FEW:
        rough = "at most" if truncated == rollout_is_sharper else "at least"
    reason = f"the rollout's temperature is {rough} {ratio:.2g} times the trainer's"

    # The first finding is the temperature itself, the second the sampler.
    findings = _tempered(train, rollout, ratio, z, reason, evidence)
    return findings[:1] if truncated else findings


def _tempered(
    train: Tensor, rollout: Tensor, ratio: float, z: float, reason: str, shown: Mapping[str, float]
) -> list[Finding]:
    """The finding of a temperature, and what the mean ratio says about which side the tokens follow.

    Two digits of the ratio are shown: noise moves where the crowds meet, towards 1.
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

    # Of raw log-probs it is 1 plus about the variance of the log-ratio; few tokens do not tell that from 1.
    error = excess / honest_z if honest_z else 0.0
    visible = float((train - rollout).var()) - excess > VISIBLE * error
    if visible and honest_z < VISIBLE and (honest_z > -Z or excess > -MASS_LOST):
        reason = "the mean ratio is 1: the tokens follow the log-probs reported"
        findings.append(provenance_finding("processed", reason, confidence_of(Z)))
    return findings


def _is_a_power(train: Tensor, rollout: Tensor, line: Slope) -> bool:
    """Whether a power explains the difference of two sides that find every token unlikely.

    A temperature makes d a function of the policy, so little is left: what Σ p^β differs by between contexts. Other
    weights move each context by itself, and their slope is that of a regression to the mean.
    """
    left = float((rollout - line.exponent * train).var()) / max(float((rollout - train).var()), 1e-30)
    return left <= LEFT_OVER and line.low >= TOGETHER * line.high


def find_truncation(train: Tensor, rollout: Tensor, *, vocabulary: int | None = None) -> list[Finding]:
    """A softmax over fewer tokens on one side: certainty where the other side sees a choice, or mass that is lost.

    Both sides at once contradict each other, so then neither is claimed.

    Args:
        train: log π of the valid tokens.
        rollout: log μ.
        vocabulary: its size; None where not known.
    """
    findings = []
    for side, base, other in (("rollout", train, rollout), ("trainer", rollout, train)):
        # A low temperature makes likely tokens certain by itself.
        seen = crowds(base, other)
        exponent = seen.exponent if _is_temperature(seen) else 1.0
        certain = certain_share(base, other, exponent=exponent)
        lost, z = mean_and_z(1 - (base - other).exp())
        choice = logit(base).abs() < 7
        higher = float((other > base)[choice].double().mean()) if choice.any() else 0.0

        # Lost mass alone speaks for a truncation only where no few tokens decide the mean ratio, and no temperature
        # explains it.
        no_heavy_token = float((base - other).max()) < 1.5
        lost_enough = lost >= MASS_LOST and z >= Z + 2 and higher >= HIGHER
        by_mass = lost_enough and no_heavy_token and not _is_temperature(seen)

        # A log-softmax in 16 bits rounds likely tokens to certainty too, but loses no mass.
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
    """Whether more mass is lost beside rare tokens than the V p that a truncation drops: it drops no likelier token."""
    bound = vocabulary * base.exp()
    beyond, z = mean_and_z((1 - (base - other).exp() - bound)[bound < RARE])
    return int((bound < RARE).sum()) >= FEW and beyond > BEYOND_BOUND and z >= Z


def no_pattern(train: Tensor, rollout: Tensor) -> Finding:
    """What to say of a pair that shows none of the patterns."""
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
    """Whether likely tokens rose by one exponent while unlikely ones fell: a truncation lifts both."""
    fell = seen.unlikely < FEW or seen.unlikely_p80 >= 1 + EXPONENT / 2
    one_exponent = seen.violations <= 0.35 and seen.steepening <= STEEPENS
    return one_exponent and seen.share_up >= ONE_SIDED and seen.exponent >= 1 + EXPONENT and fell
