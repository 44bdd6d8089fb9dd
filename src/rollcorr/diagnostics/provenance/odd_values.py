"""Find values that are not the sampled ids' log-probs: clamped, rounded, other ids', or a 16-bit log-softmax's."""

from __future__ import annotations

from dataclasses import replace

import torch

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.numbers import format_number
from rollcorr.diagnostics.provenance.pair_rows import PairRows, extent
from rollcorr.diagnostics.provenance.pairs import mean_and_z
from rollcorr.diagnostics.provenance.patterns import Z
from rollcorr.diagnostics.provenance.provenance_findings import provenance_finding
from rollcorr.diagnostics.provenance.storage import is_16_bit

FEWEST = 8
"""Fewest tokens with the same value for it to count as a limit."""
BEYOND = 0.9
"""Smallest share of these tokens whose log-prob on the other side is beyond the limit."""
ZEROS = 0.01
"""Smallest share of tokens at exactly 0 for a log-softmax in 16 bits; measured: 2.5 to 12 %."""
NEAR_ZERO = (-0.1, -1e-4)
"""Range of the other side's log-probs, nats, that a 16-bit log-softmax rounds to 0."""
ON_GRID, GRID_STEPS = 0.98, (1.0, 0.1, 0.01)
"""Smallest share of the values on a decimal grid, and the steps of the grids in nats."""
DIFFERS = 0.3
"""Nats above which two log-probs are of different ids if the policies nearly agree."""
OTHERS, TOO_MUCH, CONTRADICT = 0.05, 0.02, 0.008
"""Smallest share of tokens that can show different ids; largest excess over 1 of a sum of two probabilities; and the
share of these tokens above that excess: measured at most 0.0045 under other ids, at least 0.016 under other weights."""

Found = tuple[list[Finding], PairRows]


def find_clamped(pairs: PairRows) -> Found:
    """Find log-probs that were clamped from below.

    Clamped log-probs repeat the side's smallest value on tokens with a lower log-prob on the other side.

    Returns:
        At most one finding, and the pairs without the clamped tokens.
    """
    valid = pairs.valid
    for side, own, other in (("rollout", pairs.rollout, pairs.train), ("trainer", pairs.train, pairs.rollout)):
        if not valid.any():
            break
        floor = own[valid].min()
        tokens = valid & (own == floor)

        # Repeated responses repeat the log-probs of both sides, so require distinct values on the other side.
        few = len(other[tokens].unique()) < max(FEWEST, int(tokens.sum()) // 2)
        if floor == 0 or few or float((other[tokens] < floor).double().mean()) < BEYOND:
            continue
        share = float(tokens.sum() / valid.sum())
        reason = (
            f"{share:.1%} of the {side}'s log-probs are exactly {format_number(float(floor))}, none is below, and the "
            "other side goes beyond"
        )
        finding = provenance_finding("clamped_values", reason, 1.0, {"clamped_share": share, "floor": float(floor)})
        finding = replace(finding, **extent(pairs, pairs.count(tokens) > 0, tokens))
        return [finding], pairs.without(tokens)
    return [], pairs


def find_rounded(pairs: PairRows) -> Found:
    """Find log-probs that were rounded to decimals, if rounding explains at least half of Var(d).

    Returns:
        At most one finding, and the pairs without any token of the log if there is one.
    """
    valid = pairs.valid
    difference = (pairs.train - pairs.rollout)[valid]
    for side, own in (("rollout", pairs.rollout[valid]), ("trainer", pairs.train[valid])):
        if len(own) < FEWEST or len(own.unique()) < FEWEST:
            continue
        for step in GRID_STEPS:
            on_grid = ((own / step).round() * step - own).abs() < 1e-6
            explained = step**2 / 12 / max(float(difference.square().mean()), 1e-30)
            if float(on_grid.double().mean()) < ON_GRID or explained < 0.5:
                continue
            explained = min(explained, 1.0)
            reason = f"the {side}'s log-probs are multiples of {step:g}: rounding makes {explained:.0%} of Var(d)"
            finding = provenance_finding("storage", reason, 1.0, {"explained_share": explained})
            every = replace(finding, title="log-probs are rounded", **extent(pairs, pairs.judged, valid))
            return [every], pairs.without(valid)
    return [], pairs


def find_log_softmax(pairs: PairRows) -> Found:
    """Find a log-softmax in 16 bits: likely tokens have exactly 0, which rounding a float32 log-prob cannot cause.

    Returns:
        At most one finding, and the pairs without any token of the log if there is one.
    """
    valid = pairs.valid
    for side, own, other in (("rollout", pairs.rollout, pairs.train), ("trainer", pairs.train, pairs.rollout)):
        tokens = valid & (own == 0) & (other > NEAR_ZERO[0]) & (other < NEAR_ZERO[1])
        share = float(tokens.sum()) / max(float(valid.sum()), 1.0)

        # A truncation also causes such zeros, but loses mass.
        if share < ZEROS or not is_16_bit(own[valid]) or mean_and_z(1 - (other - own)[valid].exp())[1] > Z:
            continue
        reason = f"{share:.1%} of the {side}'s log-probs are exactly 0 where the other side is sure of less"
        finding = provenance_finding("bf16_log_softmax", reason, 1.0, {"zero_share": share})
        return [replace(finding, **extent(pairs, pairs.judged, valid))], pairs.without(valid)
    return [], pairs


def find_other_ids(pairs: PairRows) -> Found:
    """Find log-probs of ids that differ from the sampled ones, by the sum of the two sides' probabilities.

    Two different ids of the same distribution have p + q ≤ 1. Two policies that score the same likely id exceed 1. The
    last token of each row is excluded: it has a separate fault.

    Returns:
        At most one finding, and the pairs without any token of the log if there is one.
    """
    valid = pairs.valid
    p, q = pairs.train.exp(), pairs.rollout.exp()
    inner = valid & (pairs.moved(1, pairs.keep.double()).nan_to_num(0.0) > 0)
    telling = inner & ((pairs.train - pairs.rollout).abs() > DIFFERS) & (torch.maximum(p, q) > 0.5)
    count = int(telling.sum())
    if count < max(16, OTHERS * float(inner.sum())):
        return [], pairs
    both = telling & (p + q > 1 + TOO_MUCH)
    share = float(both.sum()) / count
    if share > CONTRADICT:
        return [], pairs
    reason = (
        f"of {count} tokens that one side finds likely and that differ, {share:.1%} have probabilities that sum to "
        "over 1: the two sides score other ids of one distribution"
    )
    finding = provenance_finding("other_ids", reason, 0.95, {"sum_above_1": share, "telling_tokens": float(count)})
    return [replace(finding, **extent(pairs, pairs.judged, telling))], pairs.without(valid)


def find_odd_values(pairs: PairRows) -> Found:
    """Run these tests in sequence; return their findings, and the pairs without the tokens of the findings."""
    found: list[Finding] = []
    for find in (find_clamped, find_rounded, find_log_softmax, find_other_ids):
        more, pairs = find(pairs)
        found += more
    return found, pairs
