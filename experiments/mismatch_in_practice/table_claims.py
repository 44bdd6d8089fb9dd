"""Judges that read the trainings of table policies at T × KL ≥ 20 (experiments/laboratory/table_training.csv)."""

from __future__ import annotations

from itertools import combinations

from claims_verdicts import (
    CANNOT,
    FAILS,
    NOT_SEEN,
    PARTLY,
    REPEATS,
    UNDECIDED,
    Evidence,
    Verdict,
    by_cases,
    misses_rare,
)
from intervals import LEVEL, Interval, holm, interval
from measured_rows import Rows, select
from trained_page import gap_text

NAMES = {"none": "no correction", "token_tis": "Token-TIS", "seq_tis": "Seq-TIS"}
NEEDED = 20.0
"""T × KL of the document's runs, nats."""
SEQUENCES = 256
"""Sequences of a batch."""


def finals(evidence: Evidence, column: str, correction: str, name: str = "final") -> list[float]:
    """Return a number of each training, seed by seed."""
    rows = select(evidence.table_training, column=column, correction=correction)
    return [row[name] for row in sorted(rows, key=lambda row: row["seed"])]


def leads(evidence: Evidence, column: str) -> dict[tuple[str, str], tuple[Interval, int]]:
    """Return each difference of two corrections in final reward, and its sign where Holm's p is below 0.05, else 0."""
    pairs = list(combinations(NAMES, 2))
    gaps = {
        (b, a): interval([y - x for x, y in zip(finals(evidence, column, a), finals(evidence, column, b), strict=True)])
        for a, b in pairs
    }
    corrected = holm({pair: gap.p for pair, gap in gaps.items()})
    return {
        pair: (gap, (gap.mean > 0) - (gap.mean < 0) if corrected[pair] < LEVEL else 0) for pair, gap in gaps.items()
    }


def distance(rows: Rows) -> str:
    """Return the T × KL of trainings."""
    values = [row["t_times_kl"] for row in rows]
    return f"T × KL is {min(values):.0f} to {max(values):.0f}"


def cold_order(evidence: Evidence) -> Verdict | None:
    """Token-TIS and no correction end alike at temperature 0.4, and Seq-TIS below both."""
    rows = select(evidence.table_training, column="cold")
    if not rows:
        return None
    found = leads(evidence, "cold")
    shown = "; ".join(f"{NAMES[a]} minus {NAMES[b]} {gap_text(gap)}" for (a, b), (gap, _) in found.items())
    seen = f"Table policies at temperature 0.4, {distance(rows)}, mean reward at the end: {shown}."
    signs = {pair: sign for pair, (_, sign) in found.items()}
    below = signs["seq_tis", "token_tis"] == signs["seq_tis", "none"] == -1
    if below and signs["token_tis", "none"] == 0:
        return Verdict(REPEATS, seen)
    if below:
        return Verdict(PARTLY, seen, "Seq-TIS is the worst; the other two do not end alike")
    return Verdict(FAILS if 1 in (signs["seq_tis", "token_tis"], signs["seq_tis", "none"]) else UNDECIDED, seen)


def worst_far_away(evidence: Evidence) -> Verdict | None:
    """Seq-TIS against the other two at temperature 1."""
    rows = select(evidence.table_training, column="warm")
    if not rows:
        return None
    found = leads(evidence, "warm")
    both = {other: found["seq_tis", other] for other in ("token_tis", "none")}
    shown = "; ".join(f"Seq-TIS minus {NAMES[other]} {gap_text(gap)}" for other, (gap, _) in both.items())
    seen = f"Table policies, {distance(rows)}, mean reward at the end: {shown}."
    signs = {sign for _, sign in both.values()}
    if signs == {-1}:
        return Verdict(REPEATS, seen)
    return Verdict(FAILS if 1 in signs else UNDECIDED, seen)


def cold_degrades_no_more(evidence: Evidence) -> Verdict | None:
    """The loss of reward without correction, at temperature 0.4 and at 1.0; a gain is no degradation."""
    gains = {}
    for column in ("warm", "cold"):
        ends, starts = finals(evidence, column, "none"), finals(evidence, column, "none", "start")
        if not ends:
            return None
        gains[column] = interval([end - start for end, start in zip(ends, starts, strict=True)])
    shown = f"{gap_text(gains['warm'])} at temperature 1.0, {gap_text(gains['cold'])} at 0.4"
    seen = f"Table policies without correction, gain in mean reward over a training: {shown}."
    if all(gain.mean > gain.half for gain in gains.values()):
        return Verdict(NOT_SEEN, seen, "training degrades at neither temperature")
    warm, cold = gains["warm"], gains["cold"]
    return Verdict(REPEATS if cold.mean + cold.half >= warm.mean - warm.half else FAILS, seen)


def chi2_exceeds(evidence: Evidence) -> Verdict | None:
    """Steps of Seq-TIS whose χ²_seq is above 10³, by column."""
    rows = select(evidence.table_training, column="warm", correction="seq_tis")
    if not rows:
        return None
    share, largest = (f([row[name] for row in rows]) for f, name in ((_mean, "chi2_above_1000"), (max, "chi2_largest")))
    seen = (
        f"Table policies, {distance(rows)}: the χ²_seq of {SEQUENCES} sequences is above 1,000 in {share:.1%} of the "
        f"steps; the largest is {largest:,.0f}."
    )
    verdict = by_cases(round(share * 1000), 1000, seen)
    if verdict.word == FAILS:
        return Verdict(CANNOT, seen, misses_rare(SEQUENCES))
    return verdict._replace(why=f"in {share:.0%} of the steps") if verdict.why else verdict


def cut_fails(evidence: Evidence) -> Verdict | None:
    """The gain in mean reward of the three corrections, where only the sampler cuts."""
    rows = select(evidence.table_training, column="cut")
    if not rows:
        return None
    gains = {
        name: interval(
            [b - a for a, b in zip(finals(evidence, "cut", name, "start"), finals(evidence, "cut", name), strict=True)]
        )
        for name in NAMES
    }
    shown = "; ".join(f"{NAMES[name]} {gap_text(gain)}" for name, gain in gains.items())
    seen = f"Table policies under cut sampling, {distance(rows)}, gain in mean reward: {shown}."
    failed = [name for name, gain in gains.items() if gain.mean < gain.half]
    if len(failed) == len(gains):
        return Verdict(REPEATS, seen)
    if failed:
        return Verdict(PARTLY, seen, f"only {' and '.join(NAMES[name] for name in failed)} gains nothing")
    return Verdict(FAILS, seen)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
