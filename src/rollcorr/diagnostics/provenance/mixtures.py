"""Rows with other sampling settings than the rest: each group is judged on its own rows, so that nothing dilutes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.provenance.pair_rows import ROW_TOKENS, PairRows, extent
from rollcorr.diagnostics.provenance.pairs import CERTAIN, FEW, LIKELY, UNCERTAIN, logit
from rollcorr.diagnostics.provenance.patterns import EXPONENT, find_temperature, find_truncation
from rollcorr.diagnostics.provenance.provenance_findings import SURE

MOST = 0.8
"""Share of the rows from which on a group is the whole log."""
MIXTURE_EXPONENT = 0.1
"""Smallest |β − 1| that is called a temperature of some rows only: they were picked because they look like one."""


@dataclass
class Groups:
    """What groups of rows show, and the rest.

    Attributes:
        pairs: the rows that are left to be judged.
        findings: of the groups.
        certain: true on the rows of the groups whose finding is certain, (N,); None without such a group.
    """

    pairs: PairRows
    findings: list[Finding] = field(default_factory=list)
    certain: Tensor | None = None


def find_groups(pairs: PairRows) -> Groups:
    """Find rows that were sampled at another temperature than the rest, or over a truncated vocabulary."""
    groups = Groups(pairs)
    _truncated_rows(groups)
    _tempered_rows(groups)
    return groups


def _truncated_rows(groups: Groups) -> None:
    """Rows with tokens that one side finds certain while the other sees a choice."""
    pairs = groups.pairs
    valid = pairs.valid
    by_side = []
    for base, other in ((pairs.train, pairs.rollout), (pairs.rollout, pairs.train)):
        certain = valid & (other > CERTAIN) & (base < UNCERTAIN)
        by_side.append(pairs.count(certain))
    rollouts, trainers = by_side
    long_rows = pairs.count(valid) >= ROW_TOKENS
    for count, others in ((rollouts, trainers), (trainers, rollouts)):
        rows = long_rows & (count >= 1) & (count >= 0.01 * pairs.count(valid)) & (others == 0)
        whole = float(rows.sum()) >= MOST * float(long_rows.sum())
        if whole or float(count[rows].sum()) < 8:
            continue
        _take(groups, rows, partial(find_truncation, vocabulary=pairs.vocabulary))


def _tempered_rows(groups: Groups) -> None:
    """Rows whose likely tokens are nearly all likelier on one side."""
    pairs = groups.pairs
    valid = pairs.valid
    x, y = logit(pairs.train), logit(pairs.rollout)
    middle = (x + y) / 2
    likely = valid & (middle > LIKELY[0]) & (middle < LIKELY[1])
    count = pairs.count(likely)
    up = pairs.count(likely & (y > x))
    enough = count >= ROW_TOKENS
    if int(enough.sum()) < 4:
        return
    z = (2 * up - count) / count.clamp(min=1).sqrt()
    size = pairs.mean(((y - x) / middle).clamp(-1, 1), likely).abs()
    for side in (1, -1):
        hot = enough & (side * z >= 2.6) & (side * (2 * up / count.clamp(min=1) - 1) >= 0.6) & (size >= 0.04)
        share, rows = float(hot.sum()) / float(enough.sum()), int(hot.sum())
        if share >= MOST or rows < 2 or rows < 2 + 0.02 * float(enough.sum()):
            continue
        _take(groups, hot, _strong_temperature)


def _strong_temperature(train: Tensor, rollout: Tensor) -> list[Finding]:
    """A temperature that is not within what picking rows can produce; both crowds must show it."""
    found = find_temperature(train, rollout)
    if not found:
        return []
    unlikely = found[0].evidence.get("unlikely_tokens", 0.0)
    least = MIXTURE_EXPONENT if unlikely >= FEW else 2 * MIXTURE_EXPONENT + EXPONENT
    return found if abs(found[0].evidence["temperature_ratio"] - 1) >= least else []


def _take(groups: Groups, rows: Tensor, find: Callable[[Tensor, Tensor], list[Finding]]) -> None:
    """Judge some rows; what is found there is theirs, and they are left out of the rest."""
    pairs = groups.pairs
    tokens = pairs.of_rows(rows) & pairs.valid
    if int(tokens.sum()) < 16:
        return
    found = find(pairs.train[tokens], pairs.rollout[tokens])
    if found:
        groups.findings += [replace(finding, **extent(pairs, rows, tokens)) for finding in found]
        groups.pairs = pairs.without(pairs.of_rows(rows))
        if any(finding.severity != "note" and (finding.confidence or 0.0) >= SURE for finding in found):
            whole = pairs.of_rows(rows)
            groups.certain = whole if groups.certain is None else groups.certain | whole
