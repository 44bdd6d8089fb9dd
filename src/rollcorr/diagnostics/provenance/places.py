"""Find differences by position in the row: at the beginning, after a turn, or in spans that the policy did not sample.

The size of a difference |log π − log μ| is compared with equally surprising tokens elsewhere in the log: unlikely
tokens differ more under any noise, and they are more frequent at the beginning of a response.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.numbers import format_number
from rollcorr.diagnostics.provenance.pair_rows import PairRows, extent, runs
from rollcorr.diagnostics.provenance.pairs import mean_and_z
from rollcorr.diagnostics.provenance.provenance_findings import confidence_of, provenance_finding

SURPRISE_EDGES = (0.003, 0.03, 0.1, 0.3, 1.0, 2.0, 4.0, 8.0)
"""Bin edges of the surprise −(log π + log μ) / 2, nats, in which differences are compared."""
EARLY, SETTLED = 4, 16
"""Number of first tokens of a response, and the token from which on the effect of a different prompt is small."""
LARGEST = 3.0
"""Nats at which a difference is capped, so that no single token dominates."""
IMPOSSIBLE = -20.0
"""Log-prob, nats, below which a token was not sampled: of V tokens, those below p have a total mass of at most V p."""
FADED = 48
"""Token of a response from which on even a slow effect of a different prompt has mostly faded."""
LEAST = 0.2
"""Smallest mean difference of the first tokens, nats: a prefix cache with stale weights causes smaller ones."""
MOST_TURNS = 16
"""Number of turns in which an onset is searched."""
TIMES = 3.0
"""Smallest ratio of differences to the expected differences of equally surprising tokens elsewhere."""


def find_impossible(pairs: PairRows) -> tuple[list[Finding], PairRows]:
    """Find runs of tokens with a near-zero probability under the trainer: tool, template or padding tokens in the mask.

    Tokens below p have a total probability of at most V p, so runs of three at V p ≤ 1e-3 are practically impossible.

    Returns:
        At most one finding, and the pairs without these tokens.
    """
    limit = IMPOSSIBLE if pairs.vocabulary is None else min(-math.log(pairs.vocabulary) - 7, -12.0)
    valid = pairs.valid
    if not bool((pairs.train[valid] < limit).any()):
        return [], pairs
    unlikely = valid & (pairs.train < limit)
    length, _ = runs(unlikely, pairs.keep, pairs.row)
    tokens = length >= 3
    count, total = int(tokens.sum()), int(valid.sum())

    # If most tokens, or many outside of runs, are impossible, the trainer is a different model: no evidence.
    if count < 4 or count > 0.5 * total:
        return [], pairs
    rest = valid & ~tokens
    if float((pairs.train[rest] < limit).double().mean()) > 0.1 * count / total:
        return [], pairs
    sampled = float(pairs.train[rest].mean())
    mean = float(pairs.train[tokens].mean())
    evidence = {"longest_run": float(length.max()), "mean_log_prob": mean, "mean_log_prob_of_others": sampled}
    reason = (
        f"{count} tokens in runs of up to {int(length.max())} have a log-prob of {format_number(mean)} on average, the "
        f"others {format_number(sampled)}: the policy did not sample them"
    )
    finding = provenance_finding("foreign_tokens", reason, confidence_of(math.sqrt(count)), evidence)
    return [replace(finding, **extent(pairs, pairs.count(tokens) > 0, tokens))], pairs.without(tokens)


def find_early(pairs: PairRows) -> tuple[list[Finding], PairRows]:
    """Find differences that are large at the beginning of responses and fade: one side had a different prompt.

    Returns:
        At most one finding, and the pairs without the tokens at the beginning of the responses.
    """
    found, rest = _find_first_tokens(pairs)
    return (found, rest) if found else _find_slow_fading(pairs)


def _find_slow_fading(pairs: PairRows) -> tuple[list[Finding], PairRows]:
    """Find differences that fade over tens of tokens in every row: a missing BOS, or a different prompt."""
    valid = pairs.valid
    place = _ordinal(pairs, valid)
    long_rows = pairs.count(valid) >= FADED + SETTLED
    late = valid & (place >= FADED)
    if int(long_rows.sum()) < 6 or int(late.sum()) < 200:
        return [], pairs
    size = (pairs.train - pairs.rollout).abs().clamp(max=LARGEST)
    expected = _expected(pairs, size, late)
    first = valid & (place < SETTLED) & pairs.of_rows(long_rows)
    middle = valid & (place >= SETTLED) & (place < FADED) & pairs.of_rows(long_rows)
    heat, later = _ratio_to_expected(size, expected, first), _ratio_to_expected(size, expected, middle)
    if float(size[first].mean()) < LEAST or heat < 2.5 or heat < 1.3 * later:
        return [], pairs
    excess, z = mean_and_z(pairs.mean(size - expected, first)[long_rows])
    if z < 4:
        return [], pairs
    shown = long_rows & (pairs.mean(size, first) >= 1.5 * pairs.mean(expected, first))
    evidence = {"times_expected": heat, "times_expected_later": later, "excess": excess, "z": z}
    reason = (
        f"the first {SETTLED} tokens differ {format_number(heat)} times as much as equally surprising tokens from "
        f"token {FADED} on, those between {format_number(later)} times: the two sides saw other prompts"
    )
    finding = provenance_finding("template", reason, confidence_of(z), evidence)
    return [replace(finding, **extent(pairs, shown, first | middle))], pairs.without(first | middle)


def _find_first_tokens(pairs: PairRows) -> tuple[list[Finding], PairRows]:
    """Find rows whose first tokens differ too much, if later windows do so in far fewer rows."""
    valid = pairs.valid
    lengths = pairs.count(valid)
    place = _ordinal(pairs, valid)
    settled = valid & (place >= SETTLED)
    long_rows = lengths >= SETTLED + 2 * EARLY
    if int(long_rows.sum()) < 6 or int(settled.sum()) < 100:
        return [], pairs
    size = (pairs.train - pairs.rollout).abs().clamp(max=LARGEST)
    expected = _expected(pairs, size, settled)
    early = valid & (place < EARLY) & pairs.of_rows(long_rows)
    later = valid & (place >= 2 * EARLY) & (place < SETTLED) & pairs.of_rows(long_rows)

    # A row is hot if its first tokens differ far more than expected. Later windows give the rate of hot rows by chance.
    hot = _hot_rows(pairs, size, expected, early) & long_rows
    control = sum(
        float((_hot_rows(pairs, size, expected, valid & (place >= at) & (place < at + EARLY)) & long_rows).sum())
        for at in (SETTLED, SETTLED + EARLY)
    )
    rows = float(long_rows.sum())
    share, chance = float(hot.sum()) / rows, control / (2 * rows)
    if int(hot.sum()) < 4 or share < TIMES * chance + 0.01:
        return [], pairs
    z = (share - chance) / math.sqrt(max(chance, 1 / rows) * (1 - min(chance, 0.99)) * 1.5 / rows)

    # In the hot rows, measure how much larger the first tokens' differences are than expected, and if they fade.
    heat = _ratio_to_expected(size, expected, early & pairs.of_rows(hot))
    faded = _ratio_to_expected(size, expected, later & pairs.of_rows(hot))
    pooled, pooled_z = mean_and_z((pairs.total((size - expected) * early) / EARLY)[long_rows])
    small = float(size[early & pairs.of_rows(hot)].mean()) < 2.5 * LEAST
    if small or z < 4 or heat < 4 or heat < 1.8 * faded or pooled <= 0 or pooled_z < 2:
        return [], pairs
    tokens = valid & (place < SETTLED) & pairs.of_rows(hot)
    evidence = {
        "times_expected": heat,
        "times_expected_later": faded,
        "hot_row_share": share,
        "hot_row_share_elsewhere": chance,
        "z": z,
    }
    reason = (
        f"the first {EARLY} tokens differ {format_number(heat)} times as much as equally surprising tokens later on, "
        f"tokens {2 * EARLY} to {SETTLED} {format_number(faded)} times: the two sides saw other prompts"
    )
    finding = provenance_finding("template", reason, confidence_of(min(z, pooled_z)), evidence)
    found = replace(finding, **extent(pairs, hot, tokens))
    return [found], pairs.without(valid & (place < SETTLED))


def find_turn_drift(pairs: PairRows) -> tuple[list[Finding], PairRows]:
    """Find the turn from which on differences are larger: later turns have different contexts on the two sides.

    Returns:
        At most one finding, and the pairs without the tokens from that turn on in the rows that show it.
    """
    before_gap = pairs.moved(-1, pairs.keep.double()).nan_to_num(0.0) > 0
    starts = pairs.keep & ~before_gap & (pairs.position > 0)
    first_kept = pairs.keep & (_ordinal(pairs, pairs.keep) == 0)
    starts &= ~first_kept
    if not starts.any():
        return [], pairs
    turn = _running(pairs, starts)
    drifts = [_drift_from(pairs, turn, onset) for onset in range(1, min(int(turn.max()), MOST_TURNS) + 1)]
    found = max(filter(None, drifts), key=lambda drift: drift[0].evidence["jump_at_the_turn"], default=None)
    return ([], pairs) if found is None else ([found[0]], pairs.without(found[1]))


def _drift_from(pairs: PairRows, turn: Tensor, onset: int) -> tuple[Finding, Tensor] | None:
    """Test if differences jump after a gap in the mask.

    Args:
        pairs: the pairs to test.
        turn: index of each token's turn in its row, (N,) int.
        onset: first turn after the gap.

    Returns:
        The finding and its tokens, (N,) bool; `None` without a jump.
    """
    valid = pairs.valid
    later_rows = pairs.count(valid & (turn >= onset)) >= 4
    early_rows = pairs.count(valid & (turn < onset)) >= 4
    rows = later_rows & early_rows
    if int(rows.sum()) < 4:
        return None

    size = (pairs.train - pairs.rollout).abs().clamp(max=LARGEST)
    first = valid & (turn < onset)
    expected = _expected(pairs, size, first)
    later = valid & (turn >= onset) & pairs.of_rows(rows)

    excess = pairs.mean(size - expected, later)[rows]
    base = pairs.mean(size - expected, first)[rows]
    mean, z = mean_and_z(excess - base)
    hot = rows & (pairs.mean(size, later) >= TIMES * pairs.mean(expected, later)) & (pairs.mean(size, later) > 0.02)
    chance = rows & (pairs.mean(size, first) >= TIMES * pairs.mean(expected, first)) & (pairs.mean(size, first) > 0.02)
    if int(hot.sum()) < 3 or int(hot.sum()) < 3 * int(chance.sum()) + 2 or mean <= 0 or z < 2:
        return None

    # Require the jump at the gap itself: differences that grow steadily along the row have a different cause.
    place, left = _ordinal(pairs, valid), pairs.count(first).long()[pairs.row] - _running(pairs, first)
    near_before = first & (left < 16) & (place >= EARLY) & pairs.of_rows(rows)
    near_after = later & (turn == onset) & (_ordinal(pairs, later) < 16)
    in_hot = pairs.of_rows(hot)
    times = _ratio_to_expected(size, expected, later & in_hot)
    jump = _ratio_to_expected(size, expected, near_after & in_hot) / max(
        _ratio_to_expected(size, expected, near_before & in_hot), 1e-9
    )
    if times < TIMES or jump < 2:
        return None
    evidence = {"times_expected": times, "jump_at_the_turn": jump, "turn": float(onset + 1), "excess": mean, "z": z}
    reason = (
        f"from turn {onset + 1} on the two sides differ {format_number(times)} times as much as equally surprising "
        f"tokens before it: the later turns do not have the same context"
    )
    tokens = later & in_hot
    finding = provenance_finding("turn_drift", reason, confidence_of(z * math.sqrt(2)), evidence)
    where = {"turn": [[onset + 1, int(turn.max()) + 1]]}
    return replace(finding, where=where, **extent(pairs, hot, tokens)), tokens


def _expected(pairs: PairRows, size: Tensor, reference: Tensor) -> Tensor:
    """Compute the mean difference of equally surprising reference tokens, (N,) nats, at least 1e-4."""
    surprise = -(pairs.train + pairs.rollout).nan_to_num(0.0) / 2
    edges = torch.tensor(SURPRISE_EDGES, dtype=torch.float64, device="cpu")
    bin_of = torch.bucketize(surprise, edges)
    bins = len(SURPRISE_EDGES) + 1
    total, count = (torch.zeros(bins, dtype=torch.float64, device="cpu") for _ in range(2))
    total.index_add_(0, bin_of[reference], size[reference])
    count.index_add_(0, bin_of[reference], torch.ones_like(size[reference]))

    # Shrink bins with few reference tokens toward the log's mean.
    overall = total.sum() / count.sum().clamp(min=1)
    mean = (total + 8 * overall) / (count + 8)
    return mean[bin_of].clamp(min=1e-4)


def _hot_rows(pairs: PairRows, size: Tensor, expected: Tensor, tokens: Tensor) -> Tensor:
    """Return the rows whose mean difference here is at least 4 times the expected one and 0.1 nats, (rows,) bool."""
    seen, due = pairs.mean(size, tokens), pairs.mean(expected, tokens)
    return (pairs.count(tokens) > 0) & (seen >= 4 * due) & (seen >= 0.1)


def _ratio_to_expected(size: Tensor, expected: Tensor, tokens: Tensor) -> float:
    return float(size[tokens].sum() / expected[tokens].sum().clamp(min=1e-9)) if tokens.any() else 0.0


def _ordinal(pairs: PairRows, tokens: Tensor) -> Tensor:
    """Count these tokens before each token in its row, (N,) int."""
    return _running(pairs, tokens) - tokens.long()


def _running(pairs: PairRows, tokens: Tensor) -> Tensor:
    """Count these tokens up to and including each token in its row, (N,) int."""
    running = tokens.long().cumsum(0)
    count = pairs.count(tokens).long()
    before = torch.cat([count.new_zeros(1), count.cumsum(0)[:-1]])
    return running - before[pairs.row]
