"""Find groups of rows with their own sampling settings, and judge each group separately so no other row dilutes it."""

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
"""Share of the rows above which a group counts as the full log, and is not split off."""
MIXTURE_EXPONENT = 0.1
"""Smallest |β − 1| reported as a temperature of a subset of rows: selecting the rows already biases β away from 1."""


@dataclass
class Groups:
    """Findings of groups of rows, and the rows outside these groups.

    Attributes:
        pairs: the rows not yet judged.
        findings: the groups' findings; empty by default.
        certain: true on tokens of rows whose group has a certain finding, (N,) bool; defaults to `None`: no such group.
    """

    pairs: PairRows
    findings: list[Finding] = field(default_factory=list)
    certain: Tensor | None = None


def find_groups(pairs: PairRows) -> Groups:
    """Find rows sampled at a different temperature than most rows, or over a truncated vocabulary.

    Returns:
        The findings of these rows, and the pairs without them.
    """
    groups = Groups(pairs)
    _truncated_rows(groups)
    _tempered_rows(groups)
    return groups


def _truncated_rows(groups: Groups) -> None:
    """Judge rows with tokens of probability 1 on one side and clearly below 1 on the other."""
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
        _judge_rows(groups, rows, partial(find_truncation, vocabulary=pairs.vocabulary))


def _tempered_rows(groups: Groups) -> None:
    """Judge rows whose likely tokens nearly all have a higher log-prob on the same side."""
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
        _judge_rows(groups, hot, _strong_temperature)


def _strong_temperature(train: Tensor, rollout: Tensor) -> list[Finding]:
    """Return a temperature finding if |β − 1| exceeds the bias that selecting rows can cause.

    The limit is higher with fewer than `FEW` unlikely tokens: then only the likely tokens bound β.
    """
    found = find_temperature(train, rollout)
    if not found:
        return []
    unlikely = found[0].evidence.get("unlikely_tokens", 0.0)
    least = MIXTURE_EXPONENT if unlikely >= FEW else 2 * MIXTURE_EXPONENT + EXPONENT
    return found if abs(found[0].evidence["temperature_ratio"] - 1) >= least else []


def _judge_rows(groups: Groups, rows: Tensor, find: Callable[[Tensor, Tensor], list[Finding]]) -> None:
    """Judge a subset of rows, record its findings in `groups`, and remove the subset from the pairs."""
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
