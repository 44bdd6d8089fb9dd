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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.faults import fault, refutation
from rollcorr.diagnostics.health.evidence import Evidence
from rollcorr.diagnostics.null.excess import MIN_ROWS, Excess, k3_by_surprise
from rollcorr.diagnostics.null.excess_place import Place, places
from rollcorr.diagnostics.null.excess_tokens import ExcessTokens, Floats, Ints
from rollcorr.diagnostics.null.mismatch_profile import MismatchProfile, surprise_bins
from rollcorr.diagnostics.null.null_file import FEW_TOKENS, MismatchNull
from rollcorr.diagnostics.null.token_ratios import CAP, k3_of
from rollcorr.diagnostics.null.token_share import TokenShare
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
SPARED, HIT, STARTED = 5.0, 20.0, 2.0
"""k3 of a row over the null's: below the first it was spared, above the second it was hit. Of a step, from the third on
the mismatch has started."""


FEWEST_EQUAL = 200
"""Tokens after an equal prompt and response that tell whether d is a function of these."""
MIXED = (0.1, 0.9)
"""Share of Var(d) that an equal prompt and response explain where rows differ by something else."""
LOST = 0.96
"""Mean of π / μ below which mass is missing on one side; other weights and dropout keep it."""
SEEN = 0.06
"""Share of Var(d) among tokens of one id that "seen before" explains under a penalty; up to 0.035 otherwise."""
ROW_TOKENS = 8
"""Tokens of a row that is judged alone."""
AT_NULL = (0.15, 0.9)
"""Share of the rows that are as in the null where some rows differ."""
BETWEEN = 0.15
"""Share of the rows that may lie between the null and those that are hit."""
ONE_SIDED = 0.25
"""Distance from a half of the share of tokens that are higher on one side, which other weights do not reach."""
CONCENTRATED = 0.45
"""Share of the noise of ids or probabilities that carry an excess which is not that of all weights."""
MOST_ROWS = 0.5
"""Share of the rows that weights which differ do not spare."""
OF_CONTEXT = 0.1
"""Share that a token and the one before it explain, from which weights that differ are named."""
EDGE = 0.5
"""k3 of the later half of a place over that of all of it, below which it fades."""
SMALL = 0.03
"""k3 in nats per token up to which precision of a cache or of kernels is likely."""


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


@dataclass(frozen=True, eq=False, kw_only=True)
class _Excess:
    """An excess over a null, with what the tests look at.

    Attributes:
        tokens: of the spread sample.
        times: its size, in words.
        evidence: its numbers.
        null: what the log was compared with.
        profile: the log.
        sample: its whole rows.
        repeats: the responses repeat few tokens.
        leave_out: first and last step of the null's rows.
        case: the series of steps, which refutes causes.
        found: places that carry most of it, the densest first.
    """

    tokens: ExcessTokens
    times: str
    evidence: Mapping[str, float]
    null: MismatchNull
    profile: MismatchProfile
    sample: PairSample
    repeats: bool
    leave_out: tuple[int, int] | None
    case: Case
    found: Sequence[Place] = ()

    @cached_property
    def same(self) -> TokenShare:
        """How much of Var(d) the prompt and the response up to a token explain: all of it, unless something varies."""
        return self.tokens.share("prefix")

    @cached_property
    def context(self) -> TokenShare:
        """How much of Var(d) a token and the one before it explain."""
        return self.tokens.share("pair")

    @property
    def repeated(self) -> bool:
        """Whether enough tokens follow an equal prompt and an equal response."""
        return self.same.tokens >= FEWEST_EQUAL

    @cached_property
    def mass(self) -> tuple[float, float]:
        """Mean of π / μ, which is 1 for two policies over the same tokens, and its distance from 1 in errors."""
        ratio = np.exp(np.clip(self.tokens.d, -CAP, CAP)) - 1
        _, row = np.unique(self.tokens.places["rows"], return_inverse=True)
        sums, count = np.bincount(row.reshape(-1), ratio), np.bincount(row.reshape(-1))
        mean = float(ratio.mean())
        error = float(np.sqrt(np.square(sums - mean * count).sum())) / len(ratio)
        return 1 + mean, mean / error if error > 0 else 0.0

    @property
    def no_policy(self) -> bool:
        """Whether one side is no policy over the sampled tokens: mass is missing."""
        mass, z = self.mass
        return mass < LOST and z < -4

    def named(self, code: str, reason: str, *, confidence: float, place: Place | None = None) -> Finding:
        """Return a cause of this excess."""
        where = {} if place is None else place.where
        shown = "" if place is None else f"; {place}"
        return replace(
            cause(code, f"{self.times}{reason}{shown}", dict(self.evidence), confidence=confidence), where=where
        )

    def judged_again(self, tokens: ExcessTokens) -> _Excess:
        """Return the same with other tokens, and their places."""
        return replace(self, tokens=tokens, found=places(tokens))


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
    evidence = {"k3": excess.k3, "expected_k3": excess.expected, "ratio": excess.ratio, "z": excess.z}
    if excess.share.tokens:
        evidence |= {"token_id_share": excess.share.share, "null_token_id_share": excess.null_share.share}
    times = f"k3 is {format_number(excess.ratio)} times what {null.name} predicts at these probabilities"
    tokens = ExcessTokens.of(sample, null.profile, leave_out=leave_out)
    if tokens is None:
        return [cause("weights_differ", times, evidence, confidence=0.5)]
    seen = _Excess(
        tokens=tokens,
        times=times,
        evidence=evidence,
        null=null,
        profile=profile,
        sample=sample,
        repeats=excess.repeats,
        leave_out=leave_out,
        case=Case(None, course, by_null=True),
    ).judged_again(tokens)
    return next(found for test in _TESTS if (found := test(seen)))


def _last_token(seen: _Excess) -> list[Finding]:
    """The last token of the rows carries the excess."""
    place = next((p for p in seen.found if p.axis == "from_end" and p.values.max() == 0 and p.whole), None)
    return [] if place is None else [seen.named("last_token_differs", "", confidence=0.95, place=place)]


def _prompt_length(seen: _Excess) -> list[Finding]:
    """Prompts of some lengths alone: the longest were cut, or all but the longest have padding that is not masked."""
    place = next((p for p in seen.found if p.axis == "prompt_length" and p.whole), None)
    if place is None or refutation("template", seen.case) is not None:
        return []
    _, ratio = _by_row(seen.tokens.chosen(place.tokens))
    if not len(ratio) or float((ratio < SPARED).mean()) > AT_NULL[0]:
        return []
    reason = ", at some lengths of the prompt alone: long prompts are cut, or padding of short ones is not masked"
    return [seen.named("template", reason, confidence=0.95, place=place)]


def _padding(seen: _Excess) -> list[Finding]:
    """The longest prompts alone are spared: they have no padding."""
    spared = _spared_by_length(seen.profile, seen.evidence["expected_k3"])
    if not spared or refutation("template", seen.case) is not None:
        return []
    reason = (
        f", but not in the {spared} row{'s' * (spared > 1)} with the longest prompts: padding in front of "
        "shorter prompts is not masked"
    )
    found = seen.named("template", reason, confidence=0.95)
    return [replace(found, evidence={**found.evidence, "rows_spared": float(spared)})]


def _penalty(seen: _Excess) -> list[Finding]:
    """Among tokens of one id, those that were seen before differ from those that were not."""
    explained = seen.tokens.of_seen()
    if explained < SEEN or refutation("penalty_on_one_side", seen.case) is not None:
        return []
    reason = f", and whether an id was seen before explains {explained:.0%} of Var(d) among tokens of one id"
    return [replace(seen.named("penalty_on_one_side", reason, confidence=0.95), row_share=1.0)]


def _since_start(tokens: ExcessTokens) -> ExcessTokens:
    """The tokens from the first step on that is above the null: a sampler may start with the right weights."""
    if "step" not in tokens.places:
        return tokens
    _, step = np.unique(tokens.places["step"], return_inverse=True)
    step = step.reshape(-1)
    is_hit = np.bincount(step, tokens.k3) >= STARTED * np.maximum(np.bincount(step, tokens.noise), 1e-12)
    return tokens.chosen(step >= is_hit.argmax())


def _by_row(tokens: ExcessTokens) -> tuple[Ints, Floats]:
    """The rows with enough tokens, and k3 over the null's of each; without the steps before the mismatch started."""
    tokens = _since_start(tokens)
    of, row, count = np.unique(tokens.places["rows"], return_inverse=True, return_counts=True)
    row = row.reshape(-1)
    ratio = np.bincount(row, tokens.k3) / np.maximum(np.bincount(row, tokens.noise), 1e-12)
    return of[count >= ROW_TOKENS], ratio[count >= ROW_TOKENS]


def _row_split(seen: _Excess) -> Ints | None:
    """The rows that are hit, if the others are as in the null and few lie between; None otherwise."""
    of, ratio = _by_row(seen.tokens)
    if len(ratio) < MIN_ROWS:
        return None
    spared = float((ratio < SPARED).mean())
    varies = MIXED[0] < seen.same.share < MIXED[1] if seen.repeated else float((ratio < HIT).mean()) < spared + BETWEEN
    return of[ratio >= SPARED] if varies and AT_NULL[0] <= spared <= AT_NULL[1] else None


def _some_rows(seen: _Excess) -> list[Finding]:
    """Rows that are hit beside rows that are as in the null."""
    rows = _row_split(seen)
    elsewhere = any(p.whole and p.axis in ("step", "turn", "positions") for p in seen.found)
    if rows is None or elsewhere or refutation("some_rows_differ", seen.case) is not None:
        return []
    count = len(np.unique(seen.tokens.places["rows"]))
    reason = f", in {len(rows)} of {count} rows of the sample; most others are as in the null"
    found = seen.named("some_rows_differ", reason, confidence=0.9)
    return [replace(found, rows=len(rows), where={"rows": rows.tolist()})]


def _sharp_place(seen: _Excess) -> list[Finding]:
    """All of the excess lies in one place, and what is there has no name."""
    place = next((p for p in seen.found if p.whole and p.axis not in ("rows", "step", "probability")), None)
    if place is None or seen.repeats or any(_fades(seen.tokens, p) for p in seen.found if p.whole):
        return []
    return [seen.named("unknown", "", confidence=0.9, place=place)]


def _fades(tokens: ExcessTokens, place: Place) -> bool:
    """Whether a place at the beginning has little of the excess in its later half: it has no edge."""
    where = tokens.places.get(place.axis)
    if place.axis not in ("positions", "context_length") or where is None or len(place.values) < 4:
        return False
    later = tokens.chosen(place.tokens & (where >= np.median(place.values)))
    return bool(place.values[0] == where.min()) and later.ratio < EDGE * tokens.chosen(place.tokens).ratio


def _fading(seen: _Excess) -> list[Finding]:
    """An excess that fades along the response. Where few tokens are repeated any fault fades, and some fade more."""
    fading = fading_of(seen.profile, seen.sample, seen.null.profile, leave_out=seen.leave_out)
    fades, surely = (REPEATED_FADES, REPEATED_SURELY) if seen.repeats else (FADES, SURELY_FADES)
    of_weights = _known(seen) and fading.ratio < WEIGHTS_FADE and seen.context.share >= WEIGHTS_CONTEXT
    if of_weights or not (fading.ratio >= fades and math.log(fading.ratio) - 1.5 * fading.error >= math.log(surely)):
        return []
    found = _fading_causes(seen.times, fading, dict(seen.evidence), repeats=seen.repeats)

    # Without another prompt as the likelier one, a stale cache is not what is left: weights fade a little too.
    if refutation("template", seen.case) is None:
        return found
    return [] if found[0].code == "template" else found[:1]


def _stochastic(seen: _Excess) -> list[Finding]:
    """Nothing explains d: not the token, not the one before it, and not an equal prompt with an equal response."""
    share = seen.same if seen.repeated else seen.context
    if not seen.repeated and not _known(seen):
        return []
    explains = share.share >= MIXED[0] if seen.repeated else share.share + share.error >= STOCHASTIC
    if explains or refutation("stochastic_trainer", seen.case) is not None:
        return []
    if seen.no_policy or float((_by_row(seen.tokens)[1] < SPARED).mean()) > AT_NULL[0]:
        return []
    of = "an equal prompt with an equal response" if seen.repeated else "the token nor the one before it"
    reason = f", at every position, and not even {of} explains it ({max(share.share, 0.0):.0%} of the variance)"
    return [seen.named("stochastic_trainer", reason, confidence=0.95 if seen.repeated else 0.9)]


def _weights(seen: _Excess) -> list[Finding]:
    """A function of the last tokens, at every position, on both sides of 0."""
    known = _known(seen)
    grows = refutation("stochastic_trainer", seen.case) is not None
    mixed = seen.repeated and seen.same.share < MIXED[1]
    one_sided = abs(float((seen.tokens.d > 0).mean()) - 0.5) > ONE_SIDED
    placed = any(p.axis in ("ids", "probability") and p.of_noise < CONCENTRATED for p in seen.found)
    of_rows = _by_row(seen.tokens)[1]
    spared = bool((of_rows > HIT).any()) and float((of_rows < SPARED).mean()) > MOST_ROWS
    no_function = known and seen.context.share < OF_CONTEXT
    if not (seen.repeats or grows) and (seen.no_policy or mixed or one_sided or placed or spared or no_function):
        return []
    id_share = seen.evidence.get("token_id_share")
    reason = ""
    if id_share is not None:
        of_null = f"the null's: {max(seen.evidence['null_token_id_share'], 0.0):.0%}"
        reason = f", and the token id explains {max(id_share, 0.0):.0%} of the variance ({of_null})"
    confidence = 0.95 if known else 0.8
    if seen.repeats:
        few = f"{seen.profile.ids.effective:.2g}"
        reason += f"; the responses repeat {few} tokens, so the cause shows less clearly"
        confidence = 0.5
    return [seen.named("weights_differ", reason, confidence=confidence)]


def _noise(seen: _Excess) -> list[Finding]:
    """Small, at every position, in every row and from the first step on, and no function of the last tokens."""
    everywhere = all(place.of_noise > 0.5 for place in seen.found) and _row_split(seen) is None
    everywhere = everywhere and len(_since_start(seen.tokens)) == len(seen.tokens)
    if not everywhere or seen.no_policy or seen.tokens.k3.mean() >= SMALL or seen.context.share >= OF_CONTEXT:
        return []
    reason = f", everywhere, and the last two tokens explain {max(seen.context.share, 0.0):.0%} of the variance"
    return [seen.named("noise_without_pattern", reason, confidence=0.6)]


def _unknown(seen: _Excess) -> list[Finding]:
    """No cause fits: where it is."""
    place = next(iter(seen.found), None)
    everywhere = "" if place is not None else "; everywhere: no rows, positions, ids or lengths carry most of it"
    return [seen.named("unknown", everywhere, confidence=0.9, place=place)]


_TESTS = (
    _last_token,
    _penalty,
    _padding,
    _prompt_length,
    _some_rows,
    _sharp_place,
    _fading,
    _stochastic,
    _weights,
    _noise,
    _unknown,
)
"""Tests of an excess, the most direct first; the last one always answers."""


def _known(seen: _Excess) -> bool:
    """Whether the shares of Var(d) are those of the excess, not of the noise, and of enough tokens."""
    return seen.context.tokens >= FEW_TOKENS and seen.evidence["ratio"] >= LARGE_EXCESS


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


def _spared_by_length(profile: MismatchProfile, expected: float) -> int:
    """Rows that were spared, if they are those with the longest prompts of all and most others were hit; else 0."""
    table = profile.rows
    prompt, tokens = table.column("prompt"), table.column("tokens")
    if not len(table) or prompt.min() < 0 or expected <= 0:
        return 0
    ratio = table.column("sum_k3") / tokens / expected
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
