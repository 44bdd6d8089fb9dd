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

import numpy as np

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.fault_row import Case
from rollcorr.diagnostics.faults import refutation
from rollcorr.diagnostics.health.evidence import Evidence
from rollcorr.diagnostics.null.excess import MIN_ROWS, Excess, cause
from rollcorr.diagnostics.null.excess_place import Place, places
from rollcorr.diagnostics.null.excess_tokens import STARTED, ExcessTokens, Floats, Ints
from rollcorr.diagnostics.null.fading import MAY_HEAL, fading_causes, fading_of, healing, other_context
from rollcorr.diagnostics.null.null_file import FEW_TOKENS, MismatchNull
from rollcorr.diagnostics.null.token_ratios import CAP
from rollcorr.diagnostics.null.token_share import TokenShare
from rollcorr.diagnostics.numbers import format_number
from rollcorr.diagnostics.provenance.pair_sample import PairSample

FADES, SURELY_FADES = 2.2, 1.5
"""Excess of the beginning over that of the rest from which it is said to fade; and less 1.5 standard errors."""
REPEATED_FADES, REPEATED_SURELY = 8.0, 6.0
"""The same where the responses repeat few tokens."""
WEIGHTS_FADE, WEIGHTS_CONTEXT = 4.0, 0.38
"""Fading below which weights may be the cause, and the share that a token and the one before it must then explain: of
logs that fade so little, it was 0.42 or more for other weights, and 0.33 or less for other prompts and stale caches."""
STOCHASTIC = 0.08
"""Share that a token and the one before it explain, below which nothing does; two fixed policies have 0.1 and more."""
LARGE_EXCESS = 3.0
"""k3 over the null's from which the shares are those of the excess, not of the noise."""
SPARED, HIT = 5.0, 20.0
"""k3 of a row over the null's: below the first it was spared, above the second it was hit."""

FEWEST_EQUAL = 200
"""Tokens after an equal prompt and response that tell whether d is a function of these."""
MIXED = (0.1, 0.9)
"""Share of Var(d) that an equal prompt and response explain where rows differ by something else."""
VARIES = 0.4
"""The same share and two errors, below which one side draws anew: up to 0.22 under dropout, and from 0.69 where both
sides are functions and the weights move."""
SURELY_EQUAL = 2000
"""Such tokens from which d is known to be a fixed function, whatever else it looks like."""
LOST, EFFECTIVE = 0.96, 0.1
"""Mean of π / μ below which mass is missing on one side; other weights and dropout keep it. And the effective share of
the tokens below which so few hold the mean that the mass may lie in ids that were hardly sampled."""
SEEN = 0.06
"""Share of Var(d) among tokens of one id that "seen before" explains under a penalty; up to 0.035 otherwise."""
SEEN_AS_LIKELY = 0.03
"""The same share among tokens of one id that are as likely: from 0.037 under a penalty, up to 0.006 where other weights
or another context miss what was not seen yet."""
OF_TOKENS = 0.3
"""The same, as a part of what a token and the one before it explain."""
ROW_TOKENS = 8
"""Tokens of a row that is judged alone."""
AT_NULL = (0.15, 0.9)
"""Share of the rows that are as in the null where some rows differ."""
STARTED_MIXED = 0.75
"""Share of Var(d) and its error that an equal prompt and response explain under weights that start to differ."""
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


@dataclass(frozen=True, eq=False, kw_only=True)
class _Excess:
    """An excess over a null, with what the tests look at.

    Attributes:
        tokens: of the spread sample.
        times: its size, in words.
        evidence: its numbers.
        repeats: the responses repeat few tokens.
        case: the series of steps, which refutes causes.
        found: places that carry most of it, the densest first.
    """

    tokens: ExcessTokens
    times: str
    evidence: Mapping[str, float]
    repeats: bool
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
    def function(self) -> bool:
        """Whether d is certainly a fixed function of prompt and response from the first step on."""
        sure = self.same.tokens >= SURELY_EQUAL and self.same.share >= MIXED[1]
        return sure and self.known and self.tokens.first_step >= STARTED

    @property
    def fixed(self) -> bool:
        """Whether it is such a function in most rows."""
        return self.function and self.spared <= MOST_ROWS

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

    @cached_property
    def by_row(self) -> tuple[Ints, Floats]:
        """The rows with enough tokens, and k3 over the null's of each; without steps before the mismatch started."""
        tokens = self.tokens.since_start
        of, row, count = np.unique(tokens.places["rows"], return_inverse=True, return_counts=True)
        row = row.reshape(-1)
        ratio = np.bincount(row, tokens.k3) / np.maximum(np.bincount(row, tokens.noise), 1e-12)
        return of[count >= ROW_TOKENS], ratio[count >= ROW_TOKENS]

    @property
    def spared(self) -> float:
        """Share of the rows that are as in the null."""
        ratio = self.by_row[1]
        return float((ratio < SPARED).mean()) if len(ratio) else 0.0

    @property
    def known(self) -> bool:
        """Whether the shares of Var(d) are those of the excess, not of the noise, and of enough tokens."""
        return self.context.tokens >= FEW_TOKENS and self.evidence["ratio"] >= LARGE_EXCESS

    @property
    def mass_lost(self) -> bool:
        """Whether the mean of π / μ is surely below 1."""
        mass, z = self.mass
        return mass < LOST and z < -4

    @property
    def no_policy(self) -> bool:
        """Whether one side is no policy over the sampled tokens: mass is missing."""
        weight = np.exp(np.clip(self.tokens.d, -CAP, CAP))
        effective = float(weight.sum() ** 2 / np.square(weight).sum()) / len(weight)
        return self.mass_lost and effective >= EFFECTIVE

    def named(self, code: str, reason: str, *, confidence: float, place: Place | None = None) -> Finding:
        """Return a cause of this excess."""
        where = {} if place is None else place.where
        shown = "" if place is None else f"; {place}"
        return replace(
            cause(code, f"{self.times}{reason}{shown}", dict(self.evidence), confidence=confidence), where=where
        )


def name_causes(
    null: MismatchNull,
    excess: Excess,
    sample: PairSample,
    *,
    leave_out: tuple[int, int] | None = None,
    course: Evidence | None = None,
) -> list[Finding]:
    """Return the causes of an excess that no test refutes, most likely first, each with its confidence as a name.

    Args:
        null: what the log was compared with.
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
    case, found = Case(None, course, by_null=True), places(tokens)
    seen = _Excess(tokens=tokens, times=times, evidence=evidence, repeats=excess.repeats, case=case, found=found)
    if math.isfinite(seen.tokens.first_step):
        evidence["ratio_of_first_step"] = seen.tokens.first_step
    for test in _TESTS:
        # Without the likelier one of two causes, the other one is not what is left.
        named = test(seen)
        stand = [finding for finding in named if refutation(finding.code, case) is None]
        if named and stand[:1] == named[:1]:
            return stand
    return _unknown(seen)


def _last_token(seen: _Excess) -> list[Finding]:
    """The last token of the rows carries the excess."""
    place = next((p for p in seen.found if p.axis == "from_end" and p.values.max() == 0 and p.whole), None)
    return [] if place is None else [seen.named("last_token_differs", "", confidence=0.95, place=place)]


def _prompt_length(seen: _Excess) -> list[Finding]:
    """Prompts of some lengths alone: the longest were cut, or all but the longest have padding that is not masked."""
    place = next((p for p in seen.found if p.axis == "prompt_length" and p.whole), None)
    if place is None:
        return []
    of_place = replace(seen, tokens=seen.tokens.chosen(place.tokens))
    if not len(of_place.by_row[1]) or of_place.spared > AT_NULL[0]:
        return []
    reason = ", at some lengths of the prompt alone: long prompts are cut, or padding of short ones is not masked"
    return [seen.named("template", reason, confidence=0.95, place=place)]


def _padding(seen: _Excess) -> list[Finding]:
    """The longest prompts alone are spared: they have no padding."""
    if "prompt_length" not in seen.tokens.places:
        return []
    rows, ratio = seen.by_row
    of, first = np.unique(seen.tokens.places["rows"], return_index=True)
    length = seen.tokens.places["prompt_length"][first[np.isin(of, rows)]]
    spared, hit = ratio < SPARED, ratio > HIT
    count = int(spared.sum())
    if not count or hit.mean() < 0.5 or spared.mean() > 0.3 or length[spared].min() <= length[hit].max():
        return []
    reason = (
        f", but not in the {count} row{'s' * (count > 1)} with the longest prompts: padding in front of "
        "shorter prompts is not masked"
    )
    found = seen.named("template", reason, confidence=0.95)
    return [replace(found, evidence={**found.evidence, "rows_spared": float(count)})]


def _penalty(seen: _Excess) -> list[Finding]:
    """Among tokens of one id, those that were seen before differ from those that were not, and as likely."""
    explained = seen.tokens.of_seen()
    as_likely = seen.tokens.of_seen(as_likely=True)
    if explained < max(SEEN, OF_TOKENS * seen.context.share) or as_likely < SEEN_AS_LIKELY:
        return []
    reason = f", and whether an id was seen before explains {explained:.0%} of Var(d) among tokens of one id"
    return [replace(seen.named("penalty_on_one_side", reason, confidence=0.95), row_share=1.0)]


def _row_split(seen: _Excess) -> Ints | None:
    """The rows that are hit, if the others are as in the null and few lie between; None otherwise."""
    of, ratio = seen.by_row
    if len(ratio) < MIN_ROWS:
        return None
    spared = seen.spared
    varies = MIXED[0] < seen.same.share < MIXED[1] if seen.repeated else float((ratio < HIT).mean()) < spared + BETWEEN
    return of[ratio >= SPARED] if varies and AT_NULL[0] <= spared <= AT_NULL[1] else None


def _some_rows(seen: _Excess) -> list[Finding]:
    """Rows that are hit beside rows that are as in the null."""
    rows = _row_split(seen)
    elsewhere = any(p.whole and p.axis in ("step", "turn", "positions") for p in seen.found)
    if rows is None or elsewhere:
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


def _started_later(seen: _Excess) -> list[Finding]:
    """Nothing before the first update, and an excess after it: only weights can start to differ in every row."""
    mixed = seen.repeated and seen.same.share + seen.same.error < STARTED_MIXED
    later = seen.tokens.since_start
    if not seen.tokens.first_step < STARTED or mixed or later.ratio < LARGE_EXCESS or len(later) == len(seen.tokens):
        return []
    ratio = format_number(seen.tokens.first_step)
    reason = f", and {ratio} times that before the first update: the sampler started with the trainer's weights"
    return [seen.named("weights_differ", reason, confidence=0.95)]


def _other_prompt(seen: _Excess) -> list[Finding]:
    """A fixed function from the first step on that a displaced context makes, or that heals: then it may spare rows."""
    if not seen.function:
        return []
    reason = other_context(seen.tokens, seen.context)
    return [seen.named("template", reason, confidence=0.9)] if reason else []


def _fading(seen: _Excess) -> list[Finding]:
    """An excess that fades along the response. Where few tokens are repeated any fault fades, and some fade more."""
    fading = fading_of(seen.tokens)
    fades, surely = (REPEATED_FADES, REPEATED_SURELY) if seen.repeats else (FADES, SURELY_FADES)
    of_weights = seen.known and fading.ratio < WEIGHTS_FADE and seen.context.share >= WEIGHTS_CONTEXT
    if of_weights or not (fading.ratio >= fades and math.log(fading.ratio) - 1.5 * fading.error >= math.log(surely)):
        return []
    return fading_causes(seen.times, fading, dict(seen.evidence), repeats=seen.repeats)


def _stochastic(seen: _Excess) -> list[Finding]:
    """Nothing explains d: not the token, not the one before it, and not an equal prompt with an equal response."""
    share = seen.same if seen.repeated else seen.context
    if not seen.repeated and not seen.known:
        return []
    sure = share.share + 2 * share.error < VARIES or share.share < MIXED[0]
    explains = not sure if seen.repeated else share.share + share.error >= STOCHASTIC
    if explains or seen.mass_lost or seen.spared > AT_NULL[0]:
        return []
    of = "an equal prompt with an equal response" if seen.repeated else "the token nor the one before it"
    reason = f", at every position, and not even {of} explains it ({max(share.share, 0.0):.0%} of the variance)"
    return [seen.named("stochastic_trainer", reason, confidence=0.95 if seen.repeated else 0.9)]


def _weights(seen: _Excess) -> list[Finding]:
    """A function of the last tokens, at every position, on both sides of 0."""
    known = seen.known
    grows = refutation("stochastic_trainer", seen.case) is not None
    mixed = seen.repeated and seen.same.share < MIXED[1]
    one_sided = abs(float((seen.tokens.d > 0).mean()) - 0.5) > ONE_SIDED
    placed = any(p.axis in ("ids", "probability") and p.of_noise < CONCENTRATED for p in seen.found)
    spared = bool((seen.by_row[1] > HIT).any()) and seen.spared > MOST_ROWS
    no_function = known and seen.context.share - seen.context.error < OF_CONTEXT
    looks_otherwise = seen.repeats or mixed or one_sided or placed or spared or no_function
    heals = seen.fixed and healing(seen.tokens) < MAY_HEAL
    if not grows and (seen.no_policy or heals or (looks_otherwise and not seen.fixed)):
        return []
    id_share = seen.evidence.get("token_id_share")
    reason = ""
    if id_share is not None:
        of_null = f"the null's: {max(seen.evidence['null_token_id_share'], 0.0):.0%}"
        reason = f", and the token id explains {max(id_share, 0.0):.0%} of the variance ({of_null})"
    confidence = 0.95 if known else 0.8
    if seen.repeats:
        reason += "; the responses repeat few tokens, so the cause shows less clearly"
        confidence = 0.5
    return [seen.named("weights_differ", reason, confidence=confidence)]


def _noise(seen: _Excess) -> list[Finding]:
    """Small, at every position, in every row and from the first step on, and no function of the last tokens."""
    everywhere = all(place.of_noise > 0.5 for place in seen.found) and _row_split(seen) is None
    everywhere = everywhere and len(seen.tokens.since_start) == len(seen.tokens) and seen.spared <= MOST_ROWS
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
    _started_later,
    _fading,
    _stochastic,
    _other_prompt,
    _weights,
    _noise,
)
"""Tests of an excess, the most direct first."""
