"""Which cause an excess over a null has: weights, a stale prefix cache, another prompt, padding, a stochastic trainer.

All of them make k3 larger. They differ in where it is larger.

- *Weights that differ* show at every position, and as a function of the context: the token id explains a part of the
  variance, and the token with the one before it explains more.
- *A stochastic trainer* (dropout) shows at every position too, and nothing explains it.
- *A prompt that differs* shows most at the first tokens and fades as the response takes over. So does *a stale prefix
  cache*, but weaker, and not more for shorter prompts: a missing or an extra token weighs most in a short one. Weights
  fade a little too, as the context grows, but they stay a function of the last tokens, which a prompt is not.
- *Padding that is not masked* spares the longest prompts, which have none.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.faults import fault, refutation
from rollcorr.diagnostics.health.evidence import Evidence
from rollcorr.diagnostics.null.excess import Excess, k3_by_surprise
from rollcorr.diagnostics.null.mismatch_profile import MismatchProfile, surprise_bins
from rollcorr.diagnostics.null.null_file import FEW_TOKENS, MismatchNull
from rollcorr.diagnostics.null.sampled_rows import context_share
from rollcorr.diagnostics.null.token_ratios import k3_of
from rollcorr.diagnostics.numbers import format_number
from rollcorr.diagnostics.provenance.pair_sample import PairSample
from rollcorr.diagnostics.refuting_tests import Case

EARLY, SETTLED = 8, 32
"""Tokens of a response that count as its beginning, and the position from which it has settled."""
FADES, SURELY_FADES = 2.2, 1.5
"""Excess of the beginning over that of the rest from which it is said to fade; and less 1.5 standard errors."""
OTHER_PROMPT, OTHER_PROMPT_ALONE = 0.4, 0.06
"""k3 of the beginning, nats per token, above which the prompts differ; the second where their lengths are not known."""
FALLS = -0.5
"""Power of the prompt's length by which the excess at the beginning goes, below which the prompt itself differs: a
token more or less weighs about 1/length or less, so the power is −1 or lower, and that of a stale cache is about 0."""
WEIGHTS_FADE, WEIGHTS_CONTEXT = 4.0, 0.38
"""Fading below which weights may be the cause, and the share that a token and the one before it must then explain: of
logs that fade so little, it was 0.42 or more for other weights, and 0.33 or less for other prompts and stale caches."""
REPEATED_FADES, REPEATED_SURELY, REPEATED_FALLS = 8.0, 6.0, -0.3
"""`FADES`, `SURELY_FADES` and `FALLS` where the responses repeat few tokens."""
CACHE_FADES = 9.0
"""Fading below which it is no stale cache: the response's own keys are right and soon outweigh those of the prompt,
while a prompt that lacks its BOS keeps differing. It decides where the prompts' lengths leave it open."""
SURELY_ABOVE = 2.0
"""Standard errors above `FALLS` from which the power says that the prompt itself is the same."""
ALIKE = 0.2
"""Standard deviation of the logarithm of the prompts' lengths below which nothing depends on them."""
STOCHASTIC = 0.08
"""Share that a token and the one before it explain, below which nothing does; two fixed policies have 0.1 and more."""
LARGE_EXCESS = 3.0
"""k3 over the null's from which the shares are those of the excess, not of the noise."""
SPARED, HIT = 5.0, 20.0
"""k3 of a row over the null's: below the first it was spared, above the second it was hit."""


class Fading(NamedTuple):
    """How the mismatch goes along a response.

    Attributes:
        ratio: k3 of the beginning over k3 after it has settled, each against the null; NaN with few rows.
        error: standard error of its log, rows being independent.
        early: k3 of the beginning, nats per token.
        power: of the prompt's length that k3 of the beginning goes by; NaN where the lengths are not known or alike.
        power_error: its standard error.
    """

    ratio: float
    error: float
    early: float
    power: float = math.nan
    power_error: float = math.nan


def name_causes(
    profile: MismatchProfile,
    null: MismatchNull,
    excess: Excess,
    sample: PairSample,
    *,
    leave_out: tuple[int, int] | None = None,
    course: Evidence | None = None,
) -> list[Finding]:
    """Return the causes of an excess that no test refutes, most likely first, each with its confidence as a name.

    Args:
        profile: the log.
        null: what it was compared with.
        excess: the comparison.
        sample: whole rows of the log.
        leave_out: first and last step whose rows in the sample are the null's.
        course: the series of steps, which refutes causes that cannot have made it.
    """
    case = Case(None, course, by_null=True)
    evidence = {"k3": excess.k3, "expected_k3": excess.expected, "ratio": excess.ratio, "z": excess.z}
    if excess.share.tokens:
        evidence |= {"token_id_share": excess.share.share, "null_token_id_share": excess.null_share.share}
    times = f"k3 is {format_number(excess.ratio)} times what {null.name} predicts at these probabilities"

    # The longest prompts have no padding: nothing else spares them alone.
    other_prompt = refutation("template", case) is None
    spared = _spared_by_length(profile, excess)
    if spared and other_prompt:
        reason = (
            f"{times}, but not in the {spared} row{'s' * (spared > 1)} with the longest prompts: padding in front of "
            "shorter prompts is not masked"
        )
        return [cause("template", reason, {**evidence, "rows_spared": float(spared)}, confidence=0.95)]

    # Where few tokens are repeated, the first ones alone leave a choice: any fault fades, and some fade more.
    fading = fading_of(profile, sample, null.profile, leave_out=leave_out)
    fades, surely = (REPEATED_FADES, REPEATED_SURELY) if excess.repeats else (FADES, SURELY_FADES)
    context = context_share(sample, leave_out=leave_out)
    known = context.tokens >= FEW_TOKENS and excess.ratio >= LARGE_EXCESS
    of_weights = known and fading.ratio < WEIGHTS_FADE and context.share >= WEIGHTS_CONTEXT
    if fading.ratio >= fades and math.log(fading.ratio) - 1.5 * fading.error >= math.log(surely) and not of_weights:
        found = _fading_causes(times, fading, evidence, repeats=excess.repeats)

        # Without another prompt as the likelier one, a stale cache is not what is left: weights fade a little too.
        if other_prompt or found[0].code != "template":
            return [finding for finding in found if other_prompt or finding.code != "template"]

    if known:
        evidence |= {"context_share": context.share, "context_share_error": context.error}
    if known and context.share < STOCHASTIC and refutation("stochastic_trainer", case) is None:
        reason = (
            f"{times}, at every position, and neither the token nor the one before it explains it "
            f"({max(context.share, 0.0):.0%} of the variance)"
        )
        sure = context.share + context.error < STOCHASTIC
        stochastic = cause("stochastic_trainer", reason, evidence, confidence=0.9 if sure else 0.6)
        return [stochastic, *([] if sure else [cause("weights_differ", times, evidence, confidence=0.4)])]

    reason = times
    if excess.share.tokens:
        of_null = f"the null's: {max(excess.null_share.share, 0.0):.0%}"
        reason += f", and the token id explains {max(excess.share.share, 0.0):.0%} of the variance ({of_null})"
    confidence = 0.95 if known else 0.8
    if excess.repeats:
        reason += f"; the responses repeat {profile.ids.effective:.2g} tokens, so the cause shows less clearly"
        confidence = 0.5
    return [cause("weights_differ", reason, evidence, confidence=confidence)]


def _fading_causes(times: str, fading: Fading, evidence: dict[str, float], *, repeats: bool = False) -> list[Finding]:
    """An excess that fades: another prompt where it is large, or larger for short prompts; else a stale cache.

    Where the responses repeat few tokens, the size says nothing: all of it lies at the beginning.
    """
    evidence = {**evidence, "fading": fading.ratio, "early_k3": fading.early}
    if math.isfinite(fading.power):
        evidence["power_of_prompt_length"] = fading.power
    shown = f"{times}, and {format_number(fading.ratio)} times as much at the first {EARLY} tokens as after {SETTLED}"
    large = OTHER_PROMPT if math.isfinite(fading.power) else OTHER_PROMPT_ALONE
    same_prompt = fading.power - SURELY_ABOVE * fading.power_error > FALLS
    slowly = fading.ratio < CACHE_FADES and not same_prompt
    prompt = fading.early >= large or fading.power <= FALLS or slowly
    if repeats and math.isfinite(fading.power):
        prompt = fading.power <= REPEATED_FALLS
    first, second = ("template", "stale_prefix_cache") if prompt else ("stale_prefix_cache", "template")
    return [
        cause(first, shown, evidence, confidence=0.9 if fading.early >= large and not repeats else 0.7),
        cause(second, f"{shown}; less likely", evidence, confidence=0.3),
    ]


def fading_of(
    profile: MismatchProfile, sample: PairSample, null: MismatchProfile, *, leave_out: tuple[int, int] | None = None
) -> Fading:
    """k3 at the beginning of the responses against k3 later, each over what the null has at these probabilities."""
    expected = k3_by_surprise(null)
    sums, index = [], []
    for number, row in sample.rows.items():
        if leave_out is not None and row.step is not None and leave_out[0] <= row.step <= leave_out[1]:
            continue
        log_ratio = (row.train.double() - row.rollout).numpy()
        known = row.mask.numpy() & np.isfinite(log_ratio)
        if int(known[SETTLED:].sum()) < EARLY:
            continue
        k3 = np.where(known, k3_of(log_ratio), 0.0)
        noise = np.where(known, expected[surprise_bins(-row.rollout.numpy())], 0.0)
        parts = slice(0, EARLY), slice(SETTLED, None)
        sums.append([*(float(x[part].sum()) for x in (k3, noise) for part in parts), float(known[:EARLY].sum())])
        index.append(number)
    if len(sums) < 8:
        return Fading(math.nan, math.nan, math.nan)

    table = np.array(sums)
    total = table.sum(0)
    if min(total[:4]) <= 0:
        return Fading(math.nan, math.nan, math.nan)

    # A jackknife over rows: each is left out in turn.
    without = total - table
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(without[:, 0] / without[:, 2]) - np.log(without[:, 1] / without[:, 3])
    error = float(np.sqrt((len(sums) - 1) * np.var(logs)))
    ratio = float((total[0] / total[2]) / (total[1] / total[3]))
    power, power_error = _power_of_length(profile, np.array(index), table[:, 0] + table[:, 2])
    return Fading(ratio, error if math.isfinite(error) else math.inf, float(total[0] / total[4]), power, power_error)


def _spared_by_length(profile: MismatchProfile, excess: Excess) -> int:
    """Rows that were spared, if they are those with the longest prompts of all and most others were hit; else 0."""
    table = profile.rows
    prompt, tokens = table.column("prompt"), table.column("tokens")
    if not len(table) or prompt.min() < 0 or excess.expected <= 0:
        return 0
    ratio = table.column("sum_k3") / tokens / excess.expected
    spared, hit = (ratio < SPARED) & (tokens >= 16), ratio > HIT
    if not spared.any() or hit.mean() < 0.5 or spared.mean() > 0.3:
        return 0
    return int(spared.sum()) if prompt[spared].min() > prompt[hit].max() else 0


def _power_of_length(
    profile: MismatchProfile, index: NDArray[np.int64], early: NDArray[np.float64]
) -> tuple[float, float]:
    """The power b of early ~ length^b over rows and its standard error: least squares of the logarithms.

    Both are NaN where it is not known.

    Args:
        profile: has the lengths of the prompts.
        index: positions of the rows in the log, (r,).
        early: k3 of their first tokens with what the null expects there, so that no row is below the noise, (r,).
    """
    lengths = dict(zip(profile.rows.index.tolist(), profile.rows.column("prompt").tolist(), strict=True))
    length = np.array([lengths.get(number, -1.0) for number in index.tolist()])
    known = (length > 0) & (early > 0)
    rows = int(known.sum())
    if rows < 8:
        return math.nan, math.nan

    x, y = np.log(length[known]), np.log(early[known])
    x, y = x - x.mean(), y - y.mean()
    spread = float(np.square(x).sum())
    if spread <= rows * ALIKE**2:
        return math.nan, math.nan
    power = float(x @ y) / spread
    return power, math.sqrt(float(np.square(y - power * x).sum()) / (rows - 2) / spread)


def cause(code: str, reason: str, evidence: dict[str, float], *, confidence: float) -> Finding:
    """Return a finding of an excess over a null."""
    limit = f"about {format_number(evidence['expected_k3'])}, the null's" if "expected_k3" in evidence else ""
    return replace(
        fault(code).finding,
        metric="k3_kl",
        value=evidence.get("k3"),
        limit=limit,
        reason=reason,
        confidence=confidence,
        evidence=evidence,
    )
