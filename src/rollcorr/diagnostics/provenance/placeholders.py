"""Find constants and missing values in place of log-probs: placeholders, or tokens that the policy did not sample."""

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
"""Share of the log's tokens without a log-prob above which a finding reports them."""
MORE_OFTEN = 3.0
"""Smallest ratio of a constant's count to the 90 % quantile of the other values' counts."""
BY_CHANCE = 0.01
"""Expected number of values that repeat this often by chance, above which a repeated value is not a constant."""
CROWDED = 3.0
"""Density of the values around a chance repetition, over the average density."""
AROUND = 0.05
"""Half-width in nats of the interval around a repeated value; a chance repetition has many values in it."""
FLOAT32_CELL = 5e-7
"""Nats between neighboring float32 log-probs, computed as logit minus log-sum-exp with both a few nats large."""
AS_LIKELY = 0.3
"""Largest relative difference of two mean log-probs for which the policy sampled both sets of tokens."""
FEWEST_FORCED = 16
"""Fewest rows with an exact 0 at the same position for it to count as a forced token."""

_TRAINER_TITLE = "placeholders in place of the trainer's log-probs"
_TRAINER_FIX = "store NaN for what is missing; have the trainer score every token that the mask counts"
_TRAINER_CONFIRM = "score one row again with the trainer, and look at these tokens before anything fills them in"


def find_placeholders(pairs: PairRows) -> RepairedPairs:
    """Find constants and missing values in place of log-probs on either side; long runs are tokens that nobody sampled.

    Returns:
        The pairs with NaN in these places, and the findings.
    """
    findings = []
    for side, values, other in (("rollout", pairs.rollout, pairs.train), ("trainer", pairs.train, pairs.rollout)):
        there = pairs.keep & is_known(other)
        filled = _constants(pairs, values, other, there & is_recorded(values))
        missing = there & ~is_recorded(values)
        if not _enough_missing(pairs, missing):
            missing = torch.zeros_like(missing)
        holes = filled | missing
        if not holes.any():
            continue
        findings += _holes_found(pairs, side, holes, missing, values, other)
        blank = values.masked_fill(holes, torch.nan)
        pairs = replace(pairs, rollout=blank) if side == "rollout" else replace(pairs, train=blank)
    return RepairedPairs(pairs, findings)


def _constants(pairs: PairRows, values: Tensor, other: Tensor, there: Tensor) -> Tensor:
    """Return the tokens whose value repeats independently of the other side, (N,) bool."""
    filled = torch.zeros_like(there)
    if not there.any():
        return filled

    # A row with a single distinct value while the other side's values differ. Each row may have a different constant.
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

    # A value that repeats over many tokens. For a real log-prob the other side has about the same value.
    distinct, of_token, counts = values[there].unique(return_inverse=True, return_counts=True)
    times = torch.zeros(len(values), dtype=torch.long, device="cpu")
    times[there] = counts[of_token]
    for index in counts.argsort(descending=True)[:6].tolist():
        constant, tokens = float(distinct[index]), int(counts[index])
        if tokens < 3:
            break
        here = there & (values == constant)
        # Equal contexts have equal values on both sides, even if the two sides differ.
        if constant != round(constant) and len(other[here].unique()) < max(3, tokens // 2):
            continue
        if _by_chance(tokens, constant, values[there], counts) or _repeats_with_its_context(
            pairs, here, there, values, times
        ):
            continue
        doubted = _contradicted(other, constant, floor=index == 0, ceiling=index == len(distinct) - 1) & there
        expected = float(doubted.double().sum()) / int(there.sum())
        surprised = int((doubted & here).sum())
        error = math.sqrt(max(expected * (1 - expected), 1e-9) / tokens)
        share = surprised / tokens
        if surprised < 2 or share < max(0.7 * expected - error, 0.02):
            continue

        # In a shifted row, or a different request's, the other side contradicts every value: later tests report these.
        rest = there & (values != constant)
        noise = float(((values - other).abs() > 1)[rest].double().mean()) if rest.any() else 0.0
        if share < 3 * noise and noise < 0.5:
            continue
        aligned = (pairs.correlation(values, rest, other) >= 0.4) | (pairs.count(rest) < ROW_TOKENS)
        here &= pairs.of_rows(aligned)

        # Rows in which the other side agrees are correct: in many logs a certain token is exactly 0.
        here &= pairs.of_rows(pairs.count(here & ((other - constant).abs() > 1e-3)) > 0)
        if int((doubted & here).sum()) >= 2:
            filled |= here
    return filled


def _by_chance(tokens: int, constant: float, values: Tensor, counts: Tensor) -> bool:
    """Return whether rounding among this number of values explains the count of a repeated value.

    Rounded values lie in cells with Poisson counts of mean λ, estimated from the ratio of values that occur twice to
    values that occur once, λ/2. So about n λ^(k−1)/k! values occur k times. Integers never count as chance: users
    write integers as placeholders.

    Args:
        tokens: count k of the repeated value.
        constant: the repeated value, nats.
        values: all values of the side, (n,) nats.
        counts: count of each distinct value, (distinct,) int.
    """
    around = int(((values - constant).abs() < AROUND).sum()) - tokens
    if constant == round(constant) or around < 10 * tokens:
        return False
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    cell = CROWDED * max(2 * twice / max(once, 1), len(values) * FLOAT32_CELL)
    logarithm = math.log(len(values)) + (tokens - 1) * math.log(cell) - math.lgamma(tokens + 1)
    return logarithm > math.log(BY_CHANCE)


def _repeats_with_its_context(pairs: PairRows, here: Tensor, there: Tensor, values: Tensor, times: Tensor) -> bool:
    """Return whether repeated contexts explain the count of a value, compared with other values at these positions.

    A policy assigns the same log-prob to the same token in the same context. Responses over few distinct tokens repeat
    contexts, and if the other side was updated in between, its value differs each time.
    """
    places = torch.zeros(int(pairs.position.max()) + 1, dtype=torch.bool, device="cpu")
    places[pairs.position[here]] = True
    beside = there & ~here & places[pairs.position] & (values < UNCERTAIN)
    ordered = times[beside].sort().values
    usual = int(ordered[int(0.9 * len(ordered))]) if len(ordered) else 1
    return int(here.sum()) < MORE_OFTEN * usual


def _contradicted(other: Tensor, constant: float, *, floor: bool, ceiling: bool) -> Tensor:
    """Return where the other side contradicts this constant in any unit, (N,) bool."""
    if floor and constant < 0:
        return other > constant + 0.5
    if ceiling and -0.01 < constant < 0:
        return torch.zeros_like(other, dtype=torch.bool)
    near = 1.0 if constant > -0.5 else 0.5
    doubted = (other - constant).abs() > near
    if constant > 0:
        doubted &= ((other + constant).abs() > near) & ((other - math.log(constant)).abs() > near)
    return doubted


def _enough_missing(pairs: PairRows, missing: Tensor) -> bool:
    """Return whether enough values are missing to report: in the log, or in at least half of a row."""
    count, of_row = int(missing.sum()), pairs.count(missing)
    whole = (of_row >= 0.5 * pairs.count(pairs.keep)) & (of_row >= ROW_TOKENS)
    return bool(whole.any()) or count >= max(3, MISSING_SHARE * int(pairs.keep.sum()))


def _holes_found(
    pairs: PairRows, side: str, holes: Tensor, missing: Tensor, values: Tensor, other: Tensor
) -> list[Finding]:
    """Return the findings of a side's holes: foreign tokens for runs inside rows with values, else placeholders."""
    # Scattered holes of a row form about (number of holes) × (share of tokens with values) runs; spans form fewer.
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
        findings.append(_foreign_finding(pairs, forced, reason, {"longest_run": 1.0}))
        holes = holes & ~forced
    if foreign.any():
        longest = int(length[foreign].max())
        words = _describe_values(values, foreign, missing)
        reason = (
            f"the {side} has {words} in runs of up to {longest} tokens, inside rows that have log-probs elsewhere: "
            f"tokens that the policy did not sample"
        )
        findings.append(_foreign_finding(pairs, foreign, reason, {"longest_run": float(longest)}))
    rest = holes & ~foreign
    if rest.any():
        rows = pairs.count(rest) > 0
        count, total = int(rest.sum()), max(int(pairs.keep.sum()), 1)
        words = _describe_values(values, rest, missing)
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
            finding = replace(finding, title=_TRAINER_TITLE, fix=_TRAINER_FIX, confirm=_TRAINER_CONFIRM)
        findings.append(replace(finding, **extent(pairs, rows, rest)))
    return findings


def _list_too_short(pairs: PairRows, foreign: Tensor, holes: Tensor, other: Tensor) -> bool:
    """Return whether the runs of holes are row ends of sampled tokens: the engine returned fewer values than tokens.

    Tokens of a tool or of padding are clearly more or less surprising to the trainer than the policy's samples.
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


def _describe_values(values: Tensor, tokens: Tensor, missing: Tensor) -> str:
    """Return a phrase that describes the values at these tokens."""
    constants = values[tokens & ~missing].unique().tolist()
    words = [f"exactly {format_number(constant)}" for constant in constants]
    if len(constants) > 3:
        words = ["one constant for a whole row"]
    written = values[tokens & missing]
    if len(written):
        sentinel = bool((written == JSON_MINUS_INFINITY).any())
        words.append(f"missing (written as {format_number(JSON_MINUS_INFINITY)})" if sentinel else "missing")
    return " or ".join(words)


def _foreign_finding(pairs: PairRows, tokens: Tensor, reason: str, evidence: dict[str, float]) -> Finding:
    finding = provenance_finding("foreign_tokens", reason, confidence_of(math.sqrt(int(tokens.sum()))), evidence)
    return replace(finding, **extent(pairs, pairs.count(tokens) > 0, tokens))
