"""Constants and gaps in place of log-probs: filled in, or tokens that the policy did not sample."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from rollcorr.config.finding import Finding
from rollcorr.config.sampling_spec import JSON_MINUS_INFINITY
from rollcorr.diagnostics.numbers import format_number
from rollcorr.diagnostics.provenance.pair_rows import (
    ROW_TOKENS,
    PairRows,
    RepairedPairs,
    extent,
    is_known,
    is_recorded,
    runs,
)
from rollcorr.diagnostics.provenance.pairs import UNCERTAIN
from rollcorr.diagnostics.provenance.provenance_findings import confidence_of, provenance_finding

MISSING_SHARE = 0.01
"""Share of tokens without a log-prob, in the log or in a row, above which they are named."""
MORE_OFTEN = 3.0
"""How many times as often as nine in ten of the other values a value must stand to be a constant."""
BY_CHANCE = 0.01
"""Values expected to stand so often in a log by chance, from which a repeated value is no constant."""
CROWDED = 3.0
"""How many times as densely as on average the values may lie where one repeats by chance."""
AROUND = 0.05
"""Nats around a repeated value in which others must lie: chance repeats a value where there are many."""
FLOAT32_CELL = 5e-7
"""Nats between neighboring float32 log-probs: of a difference of logits and their log-sum-exp, a few nats large."""
AS_LIKELY = 0.3
"""Relative difference of the mean log-prob up to which tokens are as likely as the others: the policy sampled them."""
FEWEST_FORCED = 16
"""Rows whose certain token stands at one place, from which it was forced."""

_OF_THE_TRAINER = "placeholders in place of the trainer's log-probs"
_FIX_OF_THE_TRAINER = "store NaN for what is missing; have the trainer score every token that the mask counts"
_CONFIRM_OF_THE_TRAINER = "score one row again with the trainer, and look at these tokens before anything fills them in"


def find_placeholders(pairs: PairRows) -> RepairedPairs:
    """Constants and gaps in place of log-probs, on either side; in long runs they mark tokens that nobody sampled."""
    findings = []
    for side, values, other in (("rollout", pairs.rollout, pairs.train), ("trainer", pairs.train, pairs.rollout)):
        there = pairs.keep & is_known(other)
        filled = _constants(pairs, values, other, there & is_recorded(values))
        missing = there & ~is_recorded(values)
        if not _matters(pairs, missing):
            missing = torch.zeros_like(missing)
        holes = filled | missing
        if not holes.any():
            continue
        findings += _holes_found(pairs, side, holes, missing, values, other)
        blank = values.masked_fill(holes, torch.nan)
        pairs = replace(pairs, rollout=blank) if side == "rollout" else replace(pairs, train=blank)
    return RepairedPairs(pairs, findings)


def _constants(pairs: PairRows, values: Tensor, other: Tensor, there: Tensor) -> Tensor:
    """Where a value repeats whatever the other side thinks."""
    filled = torch.zeros_like(there)
    if not there.any():
        return filled

    # A row with one single value, while the other side's values differ: also when each row has a value of its own.
    known = values.masked_fill(~there, 0.0)
    count, mean = pairs.count(there), pairs.mean(known, there)
    off_mean = pairs.total(((known - mean[pairs.row]).abs() > 1e-9) & there)
    other_mean = pairs.mean(other.clamp(min=-10), there)
    scatter = pairs.mean((other.clamp(min=-10) - other_mean[pairs.row]).abs(), there)
    constant_rows = (off_mean == 0) & (count >= ROW_TOKENS) & (scatter > 0.05)
    filled |= pairs.of_rows(constant_rows) & there
    there = there & ~filled
    if not there.any():
        return filled

    # A value that many tokens have. Of a truthful value the other side says about the same.
    distinct, of_token, counts = values[there].unique(return_inverse=True, return_counts=True)
    times = torch.zeros(len(values), dtype=torch.long, device="cpu")
    times[there] = counts[of_token]
    for index in counts.argsort(descending=True)[:6].tolist():
        constant, tokens = float(distinct[index]), int(counts[index])
        if tokens < 3:
            break
        here = there & (values == constant)
        # Equal contexts have equal values on both sides, however far apart these are.
        if constant != round(constant) and len(other[here].unique()) < max(3, tokens // 2):
            continue
        if _by_chance(tokens, constant, values[there], counts) or _repeats_with_its_context(
            pairs, here, there, values, times
        ):
            continue
        doubted = _doubted(other, constant, floor=index == 0, ceiling=index == len(distinct) - 1) & there
        expected = float(doubted.double().sum()) / int(there.sum())
        surprised = int((doubted & here).sum())
        error = math.sqrt(max(expected * (1 - expected), 1e-9) / tokens)
        share = surprised / tokens
        if surprised < 2 or share < max(0.7 * expected - error, 0.02):
            continue

        # In a row that is shifted, or another request's, every value is doubted: that is for other causes to say.
        rest = there & (values != constant)
        noise = float(((values - other).abs() > 1)[rest].double().mean()) if rest.any() else 0.0
        if share < 3 * noise and noise < 0.5:
            continue
        aligned = (pairs.correlation(values, rest, other) >= 0.4) | (pairs.count(rest) < ROW_TOKENS)
        here &= pairs.of_rows(aligned)

        # Rows where the other side says just the same have it by right: a certain token is exactly 0 in many logs.
        here &= pairs.of_rows(pairs.count(here & ((other - constant).abs() > 1e-3)) > 0)
        if int((doubted & here).sum()) >= 2:
            filled |= here
    return filled


def _by_chance(tokens: int, constant: float, values: Tensor, counts: Tensor) -> bool:
    """Whether a value stands as often as rounding makes some value stand in so many.

    Stored values lie in cells, and a cell gets a Poisson count. Its mean λ shows in how many values stand twice, for
    one that stands once: λ/2. So about n λ^(k−1)/k! values stand k times. Whole numbers are what people write.

    Args:
        tokens: how often the value stands, k.
        constant: the value.
        values: all of them, (n,).
        counts: how often each distinct one stands.
    """
    around = int(((values - constant).abs() < AROUND).sum()) - tokens
    if constant == round(constant) or around < 10 * tokens:
        return False
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    cell = CROWDED * max(2 * twice / max(once, 1), len(values) * FLOAT32_CELL)
    logarithm = math.log(len(values)) + (tokens - 1) * math.log(cell) - math.lgamma(tokens + 1)
    return logarithm > math.log(BY_CHANCE)


def _repeats_with_its_context(pairs: PairRows, here: Tensor, there: Tensor, values: Tensor, times: Tensor) -> bool:
    """Whether a value is no more frequent than repeated contexts make the other values at these places.

    A policy gives the same value to the same token after the same tokens. Responses over a few tokens repeat such
    contexts, and where the other side has been updated in between, it says another value each time.
    """
    places = torch.zeros(int(pairs.position.max()) + 1, dtype=torch.bool, device="cpu")
    places[pairs.position[here]] = True
    beside = there & ~here & places[pairs.position] & (values < UNCERTAIN)
    ordered = times[beside].sort().values
    usual = int(ordered[int(0.9 * len(ordered))]) if len(ordered) else 1
    return int(here.sum()) < MORE_OFTEN * usual


def _doubted(other: Tensor, constant: float, *, floor: bool, ceiling: bool) -> Tensor:
    """Where the other side says something else than this constant, in whatever unit it may be."""
    if floor and constant < 0:
        return other > constant + 0.5
    if ceiling and -0.01 < constant < 0:
        return torch.zeros_like(other, dtype=torch.bool)
    near = 1.0 if constant > -0.5 else 0.5
    doubted = (other - constant).abs() > near
    if constant > 0:
        doubted &= ((other + constant).abs() > near) & ((other - math.log(constant)).abs() > near)
    return doubted


def _matters(pairs: PairRows, missing: Tensor) -> bool:
    """Whether so many values are missing that it is worth naming: in the log, or in a whole row."""
    count, of_row = int(missing.sum()), pairs.count(missing)
    whole = (of_row >= 0.5 * pairs.count(pairs.keep)) & (of_row >= ROW_TOKENS)
    return bool(whole.any()) or count >= max(3, MISSING_SHARE * int(pairs.keep.sum()))


def _holes_found(
    pairs: PairRows, side: str, holes: Tensor, missing: Tensor, values: Tensor, other: Tensor
) -> list[Finding]:
    """Holes in runs inside rows that have values are tokens of another origin; the others are placeholders."""
    # Holes of a row that are scattered lie in about as many runs as there are holes times the share of other tokens.
    of_row, kept = pairs.count(holes), pairs.count(pairs.keep).clamp(min=1)
    density = of_row / kept
    length, _ = runs(holes, pairs.keep, pairs.row)
    runs_of_row = pairs.total((1.0 / length.clamp(min=1)) * holes)
    spans = (of_row >= 4) & (density <= 0.9) & (runs_of_row <= of_row * (1 - density) / 2.5)

    findings = []
    foreign = pairs.of_rows(spans) & holes
    if int(foreign.sum()) < 0.3 * int(holes.sum()):
        foreign = torch.zeros_like(holes)
    elif int(foreign.sum()) >= 0.8 * int(holes.sum()):
        foreign = holes
    if _list_too_short(pairs, foreign, holes, other):
        foreign = torch.zeros_like(holes)
    forced = holes & (values == 0)
    if not foreign.any() and int(forced.sum()) >= FEWEST_FORCED and len(pairs.position[forced].unique()) == 1:
        at = int(pairs.position[forced][0])
        reason = f"the {side} has exactly 0 for token {at} of {int(forced.sum())} rows: a token that was forced"
        findings.append(_foreign(pairs, forced, reason, {"longest_run": 1.0}))
        holes = holes & ~forced
    if foreign.any():
        longest = int(length[foreign].max())
        words = _what(values, foreign, missing)
        reason = (
            f"the {side} has {words} in runs of up to {longest} tokens, inside rows that have log-probs elsewhere: "
            f"tokens that the policy did not sample"
        )
        findings.append(_foreign(pairs, foreign, reason, {"longest_run": float(longest)}))
    rest = holes & ~foreign
    if rest.any():
        rows = pairs.count(rest) > 0
        count, total = int(rest.sum()), max(int(pairs.keep.sum()), 1)
        words = _what(values, rest, missing)
        evidence = {
            "zero_share": int((rest & (values == 0)).sum()) / total,
            "placeholder_share": count / total,
            "missing_share": int((rest & missing).sum()) / total,
        }
        origin = "filled in, or greedy" if side == "rollout" else "filled in"
        reason = f"{count} of {total} {side} log-probs are {words}, whatever the other side says: {origin}"
        if bool(missing[rest].all()):
            reason = f"{count} of {total} {side} log-probs are {words}"
        finding = provenance_finding("placeholder", reason, confidence_of(math.sqrt(count)), evidence)
        if side == "trainer":
            finding = replace(finding, title=_OF_THE_TRAINER, fix=_FIX_OF_THE_TRAINER, confirm=_CONFIRM_OF_THE_TRAINER)
        findings.append(replace(finding, **extent(pairs, rows, rest)))
    return findings


def _list_too_short(pairs: PairRows, foreign: Tensor, holes: Tensor, other: Tensor) -> bool:
    """Whether runs of holes are the ends of rows of sampled tokens: the engine's list had fewer values than tokens.

    What a tool or the padding put there is more surprising to the trainer, or less, than what the policy sampled.
    """
    rest = pairs.keep & is_known(other) & ~holes
    if not foreign.any() or not rest.any():
        return False
    last = pairs.keep & ~(pairs.moved(1, pairs.keep.double()).nan_to_num(0.0) > 0)
    ends_in_hole = pairs.count(last & holes) > 0
    with_runs = pairs.count(foreign) > 0
    at_end = float((ends_in_hole & with_runs).sum()) / float(with_runs.sum())
    expected, seen = float(other[rest].mean()), float(other[foreign].mean())
    return at_end >= 0.8 and abs(seen - expected) <= AS_LIKELY * abs(expected)


def _what(values: Tensor, tokens: Tensor, missing: Tensor) -> str:
    """What stands in these places, in words."""
    constants = values[tokens & ~missing].unique().tolist()
    words = [f"exactly {format_number(constant)}" for constant in constants]
    if len(constants) > 3:
        words = ["one constant for a whole row"]
    written = values[tokens & missing]
    if len(written):
        sentinel = bool((written == JSON_MINUS_INFINITY).any())
        words.append(f"missing (written as {format_number(JSON_MINUS_INFINITY)})" if sentinel else "missing")
    return " or ".join(words)


def _foreign(pairs: PairRows, tokens: Tensor, reason: str, evidence: dict[str, float]) -> Finding:
    finding = provenance_finding("foreign_tokens", reason, confidence_of(math.sqrt(int(tokens.sum()))), evidence)
    return replace(finding, **extent(pairs, pairs.count(tokens) > 0, tokens))
