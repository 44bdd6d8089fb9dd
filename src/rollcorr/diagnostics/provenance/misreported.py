"""Repair values that are not these tokens' log-probs: placeholders, other units, shifted rows, rows of other requests.

Each function finds one cause, reports the rows and tokens that show it, and repairs or removes them, so that later
tests compare log-probs of the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from rollcorr.diagnostics.provenance.pair_rows import (
    ROW_TOKENS,
    PairRows,
    RepairedPairs,
    doubt,
    extent,
    is_known,
    is_recorded,
)
from rollcorr.diagnostics.provenance.placeholders import find_placeholders
from rollcorr.diagnostics.provenance.provenance_findings import confidence_of, provenance_finding

LAGS = (-1, 1, -2, 2, -3, 3, -4, 4)
"""Tokens by which a row may be shifted."""
MIN_PAIRS = 16
"""Fewest pairs, over all rows together, that are judged."""
SAME = 0.7
"""Correlation of the two sides' `doubt` above which a row counts as aligned without further tests."""
LATE = 0.9
"""The same limit for a row that may be shifted from some token on: its aligned start raises the correlation."""
TELLING, FEW_TELLING = 0.1, 4
"""`doubt` on either side above which a token distinguishes lags, and the fewest such tokens in a shifted tail."""
SIMILAR = 0.5
"""Difference of two doubts, as a share of the larger one, below which both may be the same token's."""
SHIFT_Z = 5.0
"""Standard errors by which a row's correlation at a lag must exceed the one at lag 0."""
MATE_TOKENS, MATE_ROWS = 64, 256
"""Number of first tokens used to search for a row's true request, and the most rows to search for."""
FEW_MATES = 0.1
"""Share of the unrelated rows below which the matches found in other rows may be chance."""
OWN_FIT = 3.0
"""Standard errors by which rows must match their own trainer's side to rule out another request."""
UNITS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "log base 2": lambda values: values * math.log(2),
    "log base 10": lambda values: values * math.log(10),
    "the negative of the log-prob": torch.neg,
    "the probability itself": lambda values: torch.where(values > 0, values, torch.nan).log(),
}
"""Name of each unit that is detected → its conversion to nats."""


def undo_misreported(pairs: PairRows) -> RepairedPairs:
    """Find and undo each cause in sequence, each in the pairs that the previous one repaired.

    Returns:
        The repaired pairs, and the findings of all causes.
    """
    placeholders = find_placeholders(pairs)
    units = find_units(placeholders.pairs)
    shifts = find_shifts(units.pairs)
    others = find_other_requests(shifts.pairs)
    findings = [*placeholders.findings, *units.findings, *shifts.findings, *others.findings]
    return RepairedPairs(others.pairs, findings)


def find_units(pairs: PairRows) -> RepairedPairs:
    """Find log-probs in other units on one side: an exact factor, a sign or an exponential over all tokens of a row.

    Returns:
        The pairs with these rows converted to nats, and a finding per side and unit.
    """
    both = pairs.keep & is_recorded(pairs.train) & is_recorded(pairs.rollout)
    count = pairs.count(both)

    def apart(one: Tensor, other: Tensor) -> Tensor:
        return pairs.total((one - other).abs().nan_to_num(5.0).clamp(max=5).masked_fill(~both, 0.0))

    # Test only rows that disagree, and accept only a unit that removes most of the disagreement.
    off = apart(pairs.rollout, pairs.train)
    doubtful = pairs.count(both & (torch.maximum(pairs.train.abs(), pairs.rollout.abs()) > 0.3))
    suspicious = (off > 0.02 * count) & (count >= ROW_TOKENS) & (doubtful >= 5)
    small = not suspicious.any() and float(off.sum()) <= 0.02 * float(count.sum())
    if int(count.sum()) < MIN_PAIRS or small:
        return RepairedPairs(pairs)
    sides = (("rollout", pairs.rollout, pairs.train), ("trainer", pairs.train, pairs.rollout))
    turned = [(side, unit, in_nats(own), own, other) for side, own, other in sides for unit, in_nats in UNITS.items()]
    best, which = torch.stack([apart(fixed, other) for _, _, fixed, _, other in turned]).min(0)

    findings, repaired = [], pairs
    for index, (side, unit, fixed, own, other) in enumerate(turned):
        rows = suspicious & (which == index) & (best < 0.3 * off)
        tokens = pairs.of_rows(rows) & both
        enough = int(tokens.sum()) >= MIN_PAIRS and pairs.enough(rows)
        if not (enough and _one_factor(pairs, fixed, own, other, rows, tokens)):
            continue
        evidence = {"residual": float(best[rows].sum() / off[rows].sum())}
        reason = f"the {side}'s values are {unit}, not natural log-probs: that explains all but "
        reason += f"{evidence['residual']:.0%} of the difference"
        finding = provenance_finding("wrong_unit", reason, confidence_of(math.sqrt(int(tokens.sum()))), evidence)
        findings.append(replace(finding, **extent(pairs, rows, tokens)))
        if side == "rollout":
            repaired = replace(repaired, rollout=torch.where(tokens, fixed, repaired.rollout))
        else:
            repaired = replace(repaired, train=torch.where(tokens, fixed, repaired.train))
    return RepairedPairs(repaired, findings)


def _one_factor(pairs: PairRows, fixed: Tensor, own: Tensor, other: Tensor, rows: Tensor, tokens: Tensor) -> bool:
    """Return whether the converted values match the other side on uncertain tokens, which no temperature explains."""
    telling = tokens & (other < -0.3)
    if int(telling.sum()) < 3:
        return False

    # A truncation moves an uncertain policy's log-probs by a constant, so a factor must explain clearly more.
    left = (fixed - other)[tokens].nan_to_num(5.0).abs().clamp(max=5)
    moved = (own - other)[tokens]
    close = float(left.mean()) <= 0.5 * float((moved - moved.median()).abs().clamp(max=5).mean())
    off = ((fixed / other).nan_to_num(0.0) - 1).abs()
    close &= float(off[telling].median()) < 0.12 and float((off[telling] < 0.2).double().mean()) >= 0.7

    # Among all rows and units, some fit a few tokens by noise.
    return close and pairs.beyond_chance(rows, telling, off < 0.2, causes=2 * len(UNITS))


def find_shifts(pairs: PairRows) -> RepairedPairs:
    """Find rows whose two sides correlate at a lag other than 0, from their start or from some later token on.

    Returns:
        The pairs with the rollout's values moved back to their tokens, and at most one finding.
    """
    of_rows = _row_shifts(pairs)
    late_lag, tail = _late_lags(pairs, of_rows)
    late = late_lag != 0
    lag_of = torch.where(late, late_lag, of_rows)
    pooled = _find_pooled_shift(pairs) if not lag_of.any() else 0
    if pooled:
        lag_of = torch.full_like(lag_of, pooled)
    for lag in LAGS:
        if not (pairs.enough(lag_of == lag) and _fits_at(pairs, lag, lag_of == lag, tail | ~pairs.of_rows(late))):
            lag_of = lag_of.masked_fill(lag_of == lag, 0)
    lags, counts = lag_of[lag_of != 0].unique(return_counts=True)
    if not len(lags):
        return RepairedPairs(pairs)

    shifted = lag_of != 0
    inside = pairs.of_rows(shifted) & (tail | ~pairs.of_rows(late))
    rollout, words = pairs.rollout, []
    for lag, count in zip(lags.tolist(), counts.tolist(), strict=True):
        rollout = torch.where(inside & pairs.of_rows(lag_of == lag), pairs.moved(lag, pairs.rollout), rollout)
        words.append(f"{'late' if lag > 0 else 'early'} by {_tokens(abs(lag))} in {count} rows")
    tokens = inside & pairs.valid
    main = int(lags[counts.argmax()])
    before, after = (_mean_correlation(pairs, values, shifted, inside) for values in (pairs.rollout, rollout))
    evidence = {"lag": float(main), "correlation_at_0": before, f"correlation_at_{main}": after}
    z = (math.atanh(min(after, 0.9999)) - math.atanh(before)) * math.sqrt(int(tokens.sum()))
    if pooled or (len(words) == 1 and bool(shifted[pairs.judged].all())):
        reason = f"the rollout's log-probs are {'late' if main > 0 else 'early'} by {_tokens(abs(main))}"
    else:
        reason = f"the rollout's log-probs are {', '.join(words)}"
    fix = ""
    if (late & shifted).any():
        reason += f", {int((late & shifted).sum())} of them from some later token on: a text that was tokenized again, "
        reason += "or a token that one side left out"
        fix = "store the ids and the log-probs that the engine returned for one request; do not tokenize its text again"
    finding = provenance_finding("shifted", reason, confidence_of(z), evidence, fix=fix)
    here = extent(pairs, shifted & pairs.judged, tokens)
    return RepairedPairs(replace(pairs, rollout=rollout), [replace(finding, **here)])


def _fits_at(pairs: PairRows, lag: int, rows: Tensor, tokens: Tensor) -> bool:
    """Return whether these rows' surprising tokens match at this lag more often than noise explains.

    Args:
        pairs: the pairs before any shift is undone.
        lag: tokens by which the rollout's values are late.
        rows: the rows to test, (rows,) bool.
        tokens: the tokens to test, (N,) bool.
    """
    moved = pairs.moved(lag, pairs.rollout)
    train, rollout = doubt(pairs.train), doubt(moved)
    larger = torch.maximum(train, rollout)
    telling = tokens & pairs.keep & is_known(pairs.train) & is_known(moved) & (larger > TELLING)
    return pairs.beyond_chance(rows, telling, (train - rollout).abs() < SIMILAR * larger, causes=len(LAGS))


def _late_lags(pairs: PairRows, of_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Find rows that are shifted only from some token on.

    Args:
        pairs: the pairs to test.
        of_rows: lag of each row that is shifted from its start, (rows,) int, else 0. Such a row also needs an aligned
            start to count as shifted late.

    Returns:
        The lag of each late-shifted row, (rows,) int, 0 for other rows; and the tokens from the shift on, (N,) bool.
    """
    valid = pairs.valid
    at_zero = pairs.correlation(pairs.rollout, valid)
    lag_of = torch.zeros(pairs.rows, dtype=torch.long, device="cpu")
    inside = torch.zeros_like(valid)
    open_rows = (at_zero < LATE) & (pairs.count(valid) >= 3 * ROW_TOKENS)
    if not open_rows.any():
        return lag_of, inside

    own = (doubt(pairs.train) - doubt(pairs.rollout)).abs()
    best = torch.zeros_like(at_zero)
    for lag in LAGS:
        moved = pairs.moved(lag, pairs.rollout)
        both = valid & is_known(moved) & pairs.of_rows(open_rows)
        gain = (own - (doubt(pairs.train) - doubt(moved)).abs()).masked_fill(~both, 0.0)

        # The shift begins at the token whose tail has the largest total gain.
        running = gain.cumsum(0)
        total = pairs.total(gain)
        before = torch.cat([total.new_zeros(1), total.cumsum(0)[:-1]])
        tail = total[pairs.row] - (running - gain - before[pairs.row])
        most = torch.zeros_like(at_zero).scatter_reduce_(0, pairs.row, tail.masked_fill(~both, 0.0), "amax")
        first = torch.full_like(most, torch.inf).scatter_reduce_(
            0, pairs.row, pairs.position.double().masked_fill(~both | (tail < most[pairs.row]), torch.inf), "amin"
        )
        late = pairs.keep & (pairs.position >= first[pairs.row])
        here = late & both

        # A late shift leaves an aligned start. Without a start that is long enough to show it, require a larger z: the
        # tail may fit by chance.
        start = valid & ~late & pairs.of_rows(open_rows)
        as_it_is = (pairs.correlation(pairs.rollout, start) >= SAME) & (pairs.count(start) >= ROW_TOKENS)

        at_lag, stays = pairs.correlation(moved, here), pairs.correlation(pairs.rollout, here)
        z = _shift_z(pairs, here, at_lag, stays)
        sure = ((z >= SHIFT_Z) & as_it_is) | ((z >= 2 * SHIFT_Z) & (of_rows == 0))

        # Two adjacent surprising tokens suffice for a high correlation, and the tail was selected for its gain.
        telling = here & ((doubt(pairs.train) > TELLING) | (doubt(moved) > TELLING))
        sure &= pairs.count(telling) >= FEW_TELLING
        better = open_rows & sure & (pairs.count(here) >= ROW_TOKENS) & (most > best)
        best = torch.where(better, most, best)
        lag_of = lag_of.masked_fill(better, lag)
        inside = torch.where(pairs.of_rows(better), late, inside)
    return lag_of, inside


def _shift_z(pairs: PairRows, tokens: Tensor, at_lag: Tensor, as_it_is: Tensor) -> Tensor:
    """Compute the standard errors between two correlations of each row, by Fisher's transform.

    Args:
        pairs: the pairs.
        tokens: the tokens that the correlations cover, (N,) bool.
        at_lag: correlation at the lag, (rows,).
        as_it_is: correlation at lag 0, (rows,).

    Returns:
        (rows,) float64; 0 if the correlation at the lag is below 0.75 or gains less than 0.3.
    """
    gain = at_lag.clamp(max=0.9999).atanh() - as_it_is.clamp(min=-0.9999, max=0.9999).atanh()
    z = gain * (pairs.count(tokens) - 3).clamp(min=0).sqrt()
    return z.masked_fill((at_lag < 0.75) | (at_lag - as_it_is < 0.3), 0.0)


def _tokens(count: int) -> str:
    return "one token" if count == 1 else f"{count} tokens"


def _mean_correlation(pairs: PairRows, rollout: Tensor, rows: Tensor, inside: Tensor) -> float:
    """Compute the mean correlation of these rows, (rows,) bool, over the tokens `inside`, (N,) bool."""
    correlation = pairs.correlation(rollout, inside & pairs.keep & is_known(pairs.train) & is_known(rollout))
    return float(correlation[rows].mean())


def _row_shifts(pairs: PairRows) -> Tensor:
    """Return the lag at which each row's sides correlate best, (rows,) int; 0 unless a lag is significantly better."""
    valid = pairs.valid
    at_zero = pairs.correlation(pairs.rollout, valid)
    lag_of = torch.zeros(pairs.rows, dtype=torch.long, device="cpu")
    open_rows = (at_zero < SAME) & (pairs.count(valid) >= ROW_TOKENS)
    if not open_rows.any():
        return lag_of

    # Move only rows with a low correlation, so that a healthy log costs no time.
    some = _select_rows(pairs, open_rows)
    best = at_zero.clone()
    for lag in LAGS:
        moved = some.moved(lag, some.rollout)
        tokens = some.keep & is_known(some.train) & is_known(moved)
        at_lag = some.correlation(moved, tokens)
        sure = _shift_z(some, tokens, at_lag, at_zero) >= SHIFT_Z
        better = open_rows & sure & (at_lag > best)
        best = torch.where(better, at_lag, best)
        lag_of = lag_of.masked_fill(better, lag)
    return lag_of


def _select_rows(pairs: PairRows, rows: Tensor) -> PairRows:
    """Select the tokens of these rows, (rows,) bool; the rows keep their indices."""
    tokens = pairs.of_rows(rows)
    return PairRows(
        train=pairs.train[tokens],
        rollout=pairs.rollout[tokens],
        keep=pairs.keep[tokens],
        row=pairs.row[tokens],
        position=pairs.position[tokens],
        rows=pairs.rows,
    )


def _find_pooled_shift(pairs: PairRows) -> int:
    """Return the lag of all rows pooled, for logs of short rows; 0 without a clear lag."""
    by_lag = {0: _pooled_correlation(pairs, pairs.rollout)}
    if by_lag[0] >= SAME:
        return 0
    by_lag |= {lag: _pooled_correlation(pairs, pairs.moved(lag, pairs.rollout)) for lag in LAGS}
    lag = max(by_lag, key=lambda k: by_lag[k])
    return lag if by_lag[lag] >= 0.6 and by_lag[lag] - by_lag[0] >= 0.3 else 0


def _pooled_correlation(pairs: PairRows, rollout: Tensor) -> float:
    tokens = pairs.keep & is_known(pairs.train) & is_known(rollout)
    if int(tokens.sum()) < MIN_PAIRS:
        return 0.0
    whole = replace(pairs, row=torch.zeros_like(pairs.row), rows=1)
    return float(whole.correlation(rollout, tokens)[0])


def find_other_requests(pairs: PairRows) -> RepairedPairs:
    """Find rows whose two sides are unrelated although each looks like log-probs of the policy.

    Returns:
        The pairs without these rows, and at most one finding.
    """
    valid = pairs.valid
    count = pairs.count(valid)
    distance = (pairs.train - pairs.rollout).masked_fill(~valid, 0.0)
    together = pairs.correlation(pairs.rollout, valid)

    # The sides of an unrelated row are as far apart as after shuffling its values.
    suspicious = (together < 0.4) & (count >= 12)
    if not suspicious.any():
        return RepairedPairs(pairs)
    apart = pairs.mean(distance.abs().clamp(max=3), valid)
    chance = _shuffled_distance(_select_rows(pairs, suspicious))
    unrelated = suspicious & (apart >= 0.6 * chance) & (apart >= 0.15)
    if not unrelated.any() or not pairs.enough(unrelated):
        return RepairedPairs(pairs)

    # With a different policy's log-probs the trainer's are lower; with a different request's both are equally high.
    tokens = pairs.of_rows(unrelated) & valid
    one_sided = abs(float(distance[tokens].clamp(-3, 3).mean())) / float(distance[tokens].abs().clamp(max=3).mean())
    fits = _correlate_rows(pairs, unrelated)
    mates = _matching_rows(fits)
    if len(mates) < FEW_MATES * len(fits.wanted) and _score_own_match(fits) > OWN_FIT:
        return RepairedPairs(pairs)
    others = (count >= 12) & ~unrelated
    others_agree = bool(others.any()) and float(together[others].median()) >= SAME
    enough = int(tokens.sum()) >= 32
    limit = 3.0 / math.sqrt(int(tokens.sum()))
    correlated = float((together * count)[unrelated].sum() / count[unrelated].sum())
    if not mates and (one_sided > 0.35 or not enough or correlated > 0.15 + limit or not (others_agree or enough)):
        return RepairedPairs(pairs)

    evidence = {
        "correlation": correlated,
        "correlation_of_others": float(together[others].median()) if others.any() else math.nan,
        "rows_found_elsewhere": float(len(mates)),
    }
    evidence = {name: number for name, number in evidence.items() if math.isfinite(number)}
    reason = "the two sides of these rows have nothing to do with each other: log-probs of another request"
    if mates:
        row, mate = next(iter(mates.items()))
        reason += f"; row {row} of the sample has those of row {mate}"
        reason += f", and {len(mates) - 1} more were found elsewhere" if len(mates) > 1 else ""
    finding = provenance_finding("other_request", reason, confidence_of(math.sqrt(int(tokens.sum()))), evidence)
    found = replace(finding, **extent(pairs, unrelated, tokens))
    return RepairedPairs(pairs.without(pairs.of_rows(unrelated)), [found])


def _shuffled_distance(pairs: PairRows) -> Tensor:
    """Compute each row's mean |train − rollout| after moving the rollout's values far along the row.

    Differences are capped at 3 nats.

    Returns:
        (rows,) float64, nats.
    """
    valid = pairs.valid
    index = valid.nonzero().squeeze(-1)
    row, count = pairs.row[index], pairs.count(valid).long()
    first = torch.cat([count.new_zeros(1), count.cumsum(0)[:-1]])[row]
    place = torch.arange(len(index), device="cpu") - first
    total = torch.zeros(pairs.rows, dtype=torch.float64, device="cpu")
    parts = (0.29, 0.5, 0.71)
    for part in parts:
        other = index[first + (place + (part * count[row]).long()) % count[row].clamp(min=1)]
        total.index_add_(0, row, (pairs.train[index] - pairs.rollout[other]).abs().clamp(max=3))
    return total / (len(parts) * count.clamp(min=1))


class _Fits(NamedTuple):
    """Correlation of some rows' rollout side with the trainer's side of every row.

    Attributes:
        wanted: indices of these rows, (w,) int.
        correlation: Pearson's correlation of `doubt` over the tokens that both rows have, (w, rows); 0 with fewer than
            12 tokens, and for rows of other steps.
        tokens: number of these tokens, (w, rows).
    """

    wanted: Tensor
    correlation: Tensor
    tokens: Tensor


def _correlate_rows(pairs: PairRows, unrelated: Tensor) -> _Fits:
    """Correlate the rollout's side of each unrelated row with the trainer's side of every row, by the first tokens."""
    wanted = unrelated.nonzero().squeeze(-1)[:MATE_ROWS]
    valid = pairs.valid & (pairs.position < MATE_TOKENS)
    train, rollout, mask = (torch.zeros(pairs.rows, MATE_TOKENS, dtype=torch.float64, device="cpu") for _ in range(3))
    here = pairs.row[valid], pairs.position[valid]
    train[here], rollout[here] = doubt(pairs.train[valid]), doubt(pairs.rollout[valid])
    mask[here] = 1.0

    # Pearson's correlation over the tokens that both rows have; matrix products compute its sums.
    x, m = rollout[wanted], mask[wanted]
    n = (m @ mask.T).clamp(min=1)
    mean_x, mean_y = (x @ mask.T) / n, (m @ train.T) / n
    covariance = (x @ train.T) / n - mean_x * mean_y
    variance = (x.square() @ mask.T / n - mean_x.square()) * (m @ train.square().T / n - mean_y.square())
    correlation = covariance / variance.clamp(min=1e-16).sqrt()

    # In another step, a row of the same tokens has the log-probs of other weights, such as those of a stale sampler.
    step = torch.zeros(pairs.rows, device="cpu") if pairs.step is None else pairs.step
    correlation[(n < 12) | (variance < 1e-16) | (step[wanted].unsqueeze(-1) != step)] = 0.0
    return _Fits(wanted, correlation, n)


def _matching_rows(fits: _Fits) -> dict[int, int]:
    """Return row → the row whose trainer's log-probs its rollout side matches, for rows with a significant match."""
    wanted, correlation = fits.wanted, fits.correlation
    z = correlation.clamp(max=0.999).atanh() * (fits.tokens - 3).clamp(min=0).sqrt()
    z[torch.arange(len(wanted), device="cpu"), wanted] = 0.0
    best = z.max(-1)
    sure = (best.values >= 7) & (correlation.gather(-1, best.indices.unsqueeze(-1)).squeeze(-1) >= 0.85)
    return {int(wanted[i]): int(best.indices[i]) for i in sure.nonzero().squeeze(-1).tolist()}


def _score_own_match(fits: _Fits) -> float:
    """Compute the standard errors by which these rows match their own trainer's side better than other rows' sides.

    With a different request's log-probs the rank of the own side among all rows is uniform, with mean ½ and variance
    1/12. A different policy's log-probs of the same tokens still correlate with them. The test is conservative: the
    rows were selected for a low correlation, which lowers the rank.
    """
    known = fits.correlation != 0
    own = fits.correlation.gather(-1, fits.wanted.unsqueeze(-1))
    others = known.scatter(-1, fits.wanted.unsqueeze(-1), False)
    compared = others.sum(-1)
    ranked = (compared > 0) & (own.squeeze(-1) != 0)
    if not ranked.any():
        return 0.0
    rank = ((fits.correlation < own) & others).sum(-1)[ranked] / compared[ranked]
    return (float(rank.double().mean()) - 0.5) * math.sqrt(12 * int(ranked.sum()))
