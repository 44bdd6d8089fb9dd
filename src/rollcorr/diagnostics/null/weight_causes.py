"""Cause of an excess over a null: weights, a stale prefix cache, a different prompt, padding, a stochastic trainer.

Each cause increases k3. They differ in the tokens where k3 is larger.

- *Weights that differ* act at every position, and as a function of the context: the token id explains a part of the
  variance, and the bigram, the token with its predecessor, explains more.
- *A stochastic trainer* (dropout) acts at every position too, and no token or bigram explains it.
- *A prompt that differs* acts most on the first tokens and fades along the response. So does *a stale prefix cache*,
  but weaker, and independent of the prompt's length: a missing or an extra token weighs most in a short prompt. The
  effect of weights fades a little as the context grows, but remains a function of the last tokens, unlike a prompt.
- *Unmasked padding* spares the longest prompts, which have no padding.
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
from rollcorr.diagnostics.null.fading import MAY_HEAL, fading_causes, fading_of, healing_ratio, other_context
from rollcorr.diagnostics.null.null_file import FEW_TOKENS, MismatchNull
from rollcorr.diagnostics.null.token_ratios import CAP
from rollcorr.diagnostics.null.token_share import TokenShare
from rollcorr.diagnostics.numbers import format_number
from rollcorr.diagnostics.provenance.pair_sample import PairSample

FADES, SURELY_FADES = 2.2, 1.5
"""Excess of the beginning over the later excess from which it fades; and the same less 1.5 standard errors."""
REPEATED_FADES, REPEATED_SURELY = 8.0, 6.0
"""The same limits for responses that repeat few tokens."""
WEIGHTS_FADE, WEIGHTS_CONTEXT = 4.0, 0.38
"""Fading below which weights may be the cause, and the share that bigrams must then explain. At such fading, logs had
0.42 or more for other weights, and 0.33 or less for other prompts and stale caches."""
STOCHASTIC = 0.08
"""Share explained by bigrams below which d is random; two deterministic policies have 0.1 or more."""
LARGE_EXCESS = 3.0
"""Ratio of k3 to the null's from which the shares describe the excess instead of the noise."""
SPARED, HIT = 5.0, 20.0
"""Ratio of a row's k3 to the null's: a row is spared below the first number, and hit above the second."""

FEWEST_EQUAL, EQUAL, SURELY_EQUAL = 200, 500, 2000
"""Fewest tokens after an equal prompt and response to test whether d is a function of both; number of such tokens from
which d is known to be one; and the number for which this outweighs the other tests of weights."""
MIXED, STARTED_MIXED = (0.1, 0.9), 0.75
"""Range of the share of Var(d) that an equal prompt and response explain if a different property splits the rows; and
the smallest share, plus its error, if weights start to differ."""
VARIES = 0.4
"""The same share and two errors, below which one side is random: up to 0.22 with dropout, and 0.69 or more if both
sides are functions and the weights move."""
LOST, EFFECTIVE = 0.96, 0.1
"""Mean of π / μ below which one side lacks probability mass; other weights and dropout keep it. And the effective share
of the tokens below which few tokens dominate the mean, so that the mass may lie in ids that were hardly sampled."""
SEEN, SEEN_AS_LIKELY, OF_TOKENS = 0.06, 0.03, 0.3
"""Share of Var(d) among tokens of one id that "seen before" explains under a penalty; up to 0.035 otherwise. The same
share among tokens of one id that are as likely: from 0.037 under a penalty, up to 0.006 where other weights or another
context miss what was not seen yet. And the first share relative to the one explained by bigrams."""
ROW_TOKENS = 8
"""Fewest tokens of a row for a separate judgment."""
AT_NULL, BETWEEN = (0.15, 0.9), 0.15
"""Range of the share of rows that match the null if only some rows differ; and the largest share of rows between the
null and the rows that are hit."""
ONE_SIDED, OF_BIGRAMS = 0.25, 0.62
"""Distance from 0.5 of the share of tokens with d > 0, which other weights reach only where bigrams explain most: 0.88
of Var(d) in a loop of such weights, and 0.43 in a one-sided log without them."""
CONCENTRATED = 0.45
"""Share of the noise of ids or probabilities below which their excess is not an excess of all weights."""
MOST_ROWS = 0.5
"""Largest share of the rows that different weights spare."""
OF_CONTEXT = 0.1
"""Smallest share explained by bigrams or trigrams, beyond its error, to name different weights."""
EDGE = 0.5
"""Ratio of k3 in the later half of a place to k3 in all of it, below which the place fades."""
SMALL = 0.03
"""Largest k3, nats per token, at which the precision of a cache or of kernels is a likely cause."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _Excess:
    """Excess over a null with the statistics that the tests read.

    Attributes:
        tokens: tokens of the row sample.
        times: size of the excess, in words.
        evidence: numbers of the excess.
        repeats: True if the responses repeat few tokens.
        case: series of steps, which refutes causes.
        found: places that carry most of the excess, as sorted by `places`; default empty.
    """

    tokens: ExcessTokens
    times: str
    evidence: Mapping[str, float]
    repeats: bool
    case: Case
    found: Sequence[Place] = ()

    @cached_property
    def same(self) -> TokenShare:
        """Compute the share of Var(d) explained by an equal prompt and response: 1 if d is a function of both."""
        return self.tokens.share("prefix")

    @cached_property
    def context(self) -> TokenShare:
        """Compute the share of Var(d) explained by bigrams."""
        return self.tokens.share("pair")

    @property
    def is_function(self) -> bool:
        """Return whether d is surely a fixed function of prompt and response from the first step on."""
        sure = self.same.tokens >= EQUAL and self.same.share >= MIXED[1]
        return sure and self.known and self.tokens.first_step >= STARTED

    @property
    def fixed(self) -> bool:
        """Return whether it is such a function in most rows, by many tokens."""
        return self.is_function and self.same.tokens >= SURELY_EQUAL and self.spared <= MOST_ROWS

    @property
    def repeated(self) -> bool:
        """Return whether enough tokens follow an equal prompt and an equal response."""
        return self.same.tokens >= FEWEST_EQUAL

    @cached_property
    def mass(self) -> tuple[float, float]:
        """Compute the mean of π / μ, which is 1 for two policies over the same tokens, and its standard error."""
        ratio = np.exp(np.clip(self.tokens.d, -CAP, CAP)) - 1
        _, row = np.unique(self.tokens.places["rows"], return_inverse=True)
        sums, count = np.bincount(row.reshape(-1), ratio), np.bincount(row.reshape(-1))
        mean = float(ratio.mean())
        error = float(np.sqrt(np.square(sums - mean * count).sum())) / len(ratio)
        return 1 + mean, error

    @cached_property
    def by_row(self) -> tuple[Ints, Floats]:
        """Return the rows with enough tokens, and their k3 over the null's, since the mismatch started."""
        tokens = self.tokens.since_start
        of, row, count = np.unique(tokens.places["rows"], return_inverse=True, return_counts=True)
        row = row.reshape(-1)
        ratio = np.bincount(row, tokens.k3) / np.maximum(np.bincount(row, tokens.noise), 1e-12)
        return of[count >= ROW_TOKENS], ratio[count >= ROW_TOKENS]

    @property
    def spared(self) -> float:
        """Return the share of the rows that match the null."""
        ratio = self.by_row[1]
        return float((ratio < SPARED).mean()) if len(ratio) else 0.0

    @property
    def known(self) -> bool:
        """Return whether the excess has enough tokens, and a size at which shares of Var(d) describe it."""
        return self.context.tokens >= FEW_TOKENS and self.evidence["ratio"] >= LARGE_EXCESS

    @property
    def mass_lost(self) -> bool:
        """Return whether the mean of π / μ is surely below 1."""
        mass, error = self.mass
        return mass + 2 * error < LOST and mass + 4 * error < 1

    @property
    def no_policy(self) -> bool:
        """Return whether one side is not normalized over the sampled tokens: probability mass is missing."""
        weight = np.exp(np.clip(self.tokens.d, -CAP, CAP))
        effective = float(weight.sum() ** 2 / np.square(weight).sum()) / len(weight)
        return self.mass_lost and effective >= EFFECTIVE

    def named(self, code: str, reason: str, *, confidence: float, place: Place | None = None) -> Finding:
        """Return the finding of a cause of this excess."""
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
        null: null that the log was compared with.
        excess: result of the comparison.
        sample: complete rows of the log.
        leave_out: first and last step whose rows in the sample form the null; defaults to no steps.
        course: metrics over the steps, which refute causes that cannot produce them; defaults to no metrics.
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
    return _named(seen) or _in_parts(seen) or _unknown(seen)


def _named(seen: _Excess) -> list[Finding]:
    """Return the causes of the first test that names one; empty if none does."""
    for test in _TESTS:
        # If the likelier of two causes is refuted, the other one does not follow: run the next test.
        named = test(seen)
        stand = [finding for finding in named if refutation(finding.code, seen.case) is None]
        if named and stand[:1] == named[:1]:
            return stand
    return []


def _in_parts(seen: _Excess) -> list[Finding]:
    """Name the last token if it carries most of the excess, remove it, and judge the other tokens again.

    Returns:
        The causes of both parts; empty unless both are named.
    """
    for place in seen.found:
        own = _last_token(replace(seen, found=[replace(place, rest=1.0)]))
        rest = seen.tokens.chosen(~place.tokens)
        if not own or rest.ratio < LARGE_EXCESS:
            continue
        evidence = {**seen.evidence, "ratio": rest.ratio, "k3": float(rest.k3.mean())}
        times = f"without {place}, k3 is {format_number(rest.ratio)} times the null's"
        others = _named(replace(seen, tokens=rest, times=times, evidence=evidence, found=places(rest)))
        return [*own, *others] if others else []
    return []


def _last_token(seen: _Excess) -> list[Finding]:
    """Test whether the last token of the rows carries the excess."""
    place = next((p for p in seen.found if p.axis == "from_end" and p.values.max() == 0 and p.whole), None)
    return [] if place is None else [seen.named("last_token_differs", "", confidence=0.95, place=place)]


def _prompt_length(seen: _Excess) -> list[Finding]:
    """Test whether some prompt lengths carry it: long prompts were cut, or short ones have unmasked padding."""
    place = next((p for p in seen.found if p.axis == "prompt_length" and p.whole), None)
    if place is None:
        return []
    of_place = replace(seen, tokens=seen.tokens.chosen(place.tokens))
    if not len(of_place.by_row[1]) or of_place.spared > AT_NULL[0]:
        return []
    reason = ", at some lengths of the prompt alone: long prompts are cut, or padding of short ones is not masked"
    return [seen.named("template", reason, confidence=0.95, place=place)]


def _padding(seen: _Excess) -> list[Finding]:
    """Test whether only the longest prompts are spared, because they have no padding."""
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
    """Test whether tokens that were seen before differ from unseen, equally likely tokens of the same id."""
    explained = seen.tokens.of_seen()
    as_likely = seen.tokens.of_seen(as_likely=True)
    if explained < max(SEEN, OF_TOKENS * seen.context.share) or as_likely < SEEN_AS_LIKELY:
        return []
    reason = f", and whether an id was seen before explains {explained:.0%} of Var(d) among tokens of one id"
    return [replace(seen.named("penalty_on_one_side", reason, confidence=0.95), row_share=1.0)]


def _hit_rows(seen: _Excess) -> Ints | None:
    """Return the rows that are hit, if all remaining rows match the null and few lie between; None otherwise."""
    of, ratio = seen.by_row
    if len(ratio) < MIN_ROWS:
        return None
    spared = seen.spared
    varies = MIXED[0] < seen.same.share < MIXED[1] if seen.repeated else float((ratio < HIT).mean()) < spared + BETWEEN
    return of[ratio >= SPARED] if varies and AT_NULL[0] <= spared <= AT_NULL[1] else None


def _some_rows(seen: _Excess) -> list[Finding]:
    """Test whether some rows are hit while most rows match the null."""
    rows = _hit_rows(seen)
    elsewhere = any(p.whole and p.axis in ("step", "turn", "positions") for p in seen.found)
    if rows is None or elsewhere:
        return []
    count = len(np.unique(seen.tokens.places["rows"]))
    reason = f", in {len(rows)} of {count} rows of the sample; most others are as in the null"
    found = seen.named("some_rows_differ", reason, confidence=0.9)
    return [replace(found, rows=len(rows), where={"rows": rows.tolist()})]


def _sharp_place(seen: _Excess) -> list[Finding]:
    """Test whether one place carries all of a large excess, without a known cause."""
    place = next((p for p in seen.found if p.whole and p.axis not in ("rows", "step", "probability")), None)
    if place is None or seen.repeats or seen.tokens.chosen(place.tokens).ratio < LARGE_EXCESS:
        return []
    fades = any(_fades(seen.tokens, p) for p in seen.found if p.whole)
    return [] if fades else [seen.named("unknown", "", confidence=0.9, place=place)]


def _fades(tokens: ExcessTokens, place: Place) -> bool:
    """Return whether a place at the beginning has little of the excess in its later half, and thus no edge."""
    where = tokens.places.get(place.axis)
    if place.axis not in ("positions", "context_length") or where is None or len(place.values) < 4:
        return False
    later = tokens.chosen(place.tokens & (where >= np.median(place.values)))
    return bool(place.values[0] == where.min()) and later.ratio < EDGE * tokens.chosen(place.tokens).ratio


def _started_later(seen: _Excess) -> list[Finding]:
    """Test whether the excess starts after the first update: only weights can start to differ in every row."""
    mixed = seen.repeated and seen.same.share + seen.same.error < STARTED_MIXED
    later = seen.tokens.since_start
    if not seen.tokens.first_step < STARTED or mixed or later.ratio < LARGE_EXCESS or len(later) == len(seen.tokens):
        return []
    ratio = format_number(seen.tokens.first_step)
    reason = f", and {ratio} times that before the first update: the sampler started with the trainer's weights"
    return [seen.named("weights_differ", reason, confidence=0.95)]


def _other_prompt(seen: _Excess) -> list[Finding]:
    """Test for a fixed function from the first step on that a displaced context makes, or that heals in training.

    A log that heals may spare rows.
    """
    if not seen.is_function:
        return []
    reason = other_context(seen.tokens, seen.context)
    return [seen.named("template", reason, confidence=0.9)] if reason else []


def _fading(seen: _Excess) -> list[Finding]:
    """Test whether the excess fades along the response; if few tokens are repeated, every fault fades a little."""
    fading = fading_of(seen.tokens)
    fades, surely = (REPEATED_FADES, REPEATED_SURELY) if seen.repeats else (FADES, SURELY_FADES)
    of_weights = seen.known and fading.ratio < WEIGHTS_FADE and seen.context.share >= WEIGHTS_CONTEXT
    if of_weights or not (fading.ratio >= fades and math.log(fading.ratio) - 1.5 * fading.error >= math.log(surely)):
        return []
    return fading_causes(seen.times, fading, dict(seen.evidence), repeats=seen.repeats)


def _stochastic(seen: _Excess) -> list[Finding]:
    """Test whether d is random: unexplained by the bigram, or by an equal prompt with an equal response."""
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


def _test_model_weights(seen: _Excess) -> list[Finding]:
    """Test whether d is a function of the last tokens, at every position and on both sides of 0."""
    mixed = seen.repeated and seen.same.share < MIXED[1]
    one_sided = abs(float((seen.tokens.d > 0).mean()) - 0.5) > ONE_SIDED and seen.context.share < OF_BIGRAMS
    placed = any(p.axis in ("ids", "probability") and p.of_noise < CONCENTRATED for p in seen.found)
    spared = bool((seen.by_row[1] > HIT).any()) and seen.spared > MOST_ROWS

    # An equal prompt and response explains itself, and counts once.
    prefix = seen.tokens.places.get("prefix", np.arange(len(seen.tokens)))
    once = seen.tokens.chosen(np.isin(np.arange(len(prefix)), np.unique(prefix, return_index=True)[1]))
    explained = max(share.share - share.error for share in (seen.context, once.share("context")))
    no_function = seen.known and explained < OF_CONTEXT
    looks_otherwise = seen.repeats or mixed or one_sided or placed or spared or no_function
    refuted = healing_ratio(seen.tokens) < MAY_HEAL if seen.fixed else looks_otherwise
    if refutation("stochastic_trainer", seen.case) is None and (seen.no_policy or refuted):
        return []
    id_share = seen.evidence.get("token_id_share")
    reason = ""
    if id_share is not None:
        of_null = f"the null's: {max(seen.evidence['null_token_id_share'], 0.0):.0%}"
        reason = f", and the token id explains {max(id_share, 0.0):.0%} of the variance ({of_null})"
    confidence = 0.95 if seen.known else 0.8
    if seen.repeats:
        reason += "; the responses repeat few tokens, so the cause shows less clearly"
        confidence = 0.5
    return [seen.named("weights_differ", reason, confidence=confidence)]


def _noise(seen: _Excess) -> list[Finding]:
    """Test for a small excess at every position, in every row and from the first step on, that no bigram explains."""
    everywhere = all(place.of_noise > 0.5 for place in seen.found) and _hit_rows(seen) is None
    everywhere = everywhere and len(seen.tokens.since_start) == len(seen.tokens) and seen.spared <= MOST_ROWS
    if not everywhere or seen.no_policy or seen.tokens.k3.mean() >= SMALL or seen.context.share >= OF_CONTEXT:
        return []
    reason = f", everywhere, and the last two tokens explain {max(seen.context.share, 0.0):.0%} of the variance"
    return [seen.named("noise_without_pattern", reason, confidence=0.6)]


def _unknown(seen: _Excess) -> list[Finding]:
    """Return the finding of an unknown cause, with the place of the excess."""
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
    _test_model_weights,
    _noise,
)
"""Tests of an excess, most direct first."""
