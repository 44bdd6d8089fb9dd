"""What following `rollcorr advise` costs: the advised correction of each log against the best of its sampler.

    regret = (best − advised) / (best − start), in final held-out accuracy, as means over seeds

*Advised* is the cell that was trained with the configuration that `rollcorr advise --intended` prints for the first
rollouts of its sampler and seed (first_rollouts.csv). *Best* is the correction with the highest mean over seeds. Chosen
on the seeds that it is judged by, it looks better than it is, also among equal corrections. So a second figure chooses
it on the other seeds (leave one out), which has no such bias. A third figure advises by limits of the rule that follow
from the logs and cells of the other samplers (unseen). Where `advise` prints no configuration, because it names a fault
to repair first, training goes on without correction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

from advice_evidence import limits, read_evidence
from first_rollouts import SEEDS, candidates_of, decision_of
from intervals import LEVEL, holm, interval
from trained_page import COLUMN_TITLES, CORRECTION_TITLES, gap_text, mean, select, start, table

from rollcorr.diagnostics.advice import rule
from rollcorr.diagnostics.advice.candidates import CandidateRow
from rollcorr.diagnostics.advice.rule import Choice, choose

CORRECTION_OF = {
    "none": "none",
    "Token-TIS 2": "token_tis",
    "Token-TIS 20": "token_tis_20",
    "horizon 0.9": "horizon",
    "Seq-TIS 4": "seq_tis",
    "Seq-MIS": "seq_mis",
    "geometric band": "geo_rs",
    "geometric + token": "geo_rs_token_tis",
}
"""Candidate of `advise` → correction of the bench with the same configuration; "k3 + token" is not trained."""

Row = dict[str, Any]


class Regime(NamedTuple):
    """A sampler whose seeds are all trained: final accuracy by correction and seed, the start, and the choices."""

    finals: Mapping[str, Sequence[float]]
    starts: Sequence[float]
    choices: Sequence[Choice]
    unseen: Sequence[Choice]
    """Choices by limits that follow from the other samplers."""

    def ends(self, choices: Sequence[Choice]) -> list[float]:
        """Return the final accuracy of each seed's chosen correction."""
        return [self.finals[CORRECTION_OF[choice.name]][seed] for seed, choice in enumerate(choices)]

    @property
    def best(self) -> str:
        """Return the correction with the highest mean over seeds."""
        return max(self.finals, key=lambda name: mean(self.finals[name]))

    def best_of_others(self, seed: int) -> str:
        """Return the correction with the highest mean over all other seeds."""
        return max(self.finals, key=lambda name: sum(self.finals[name]) - self.finals[name][seed])


def regimes(found: Sequence[Row], first: Sequence[Row]) -> dict[str, Regime]:
    """Return each sampler of which all seeds are measured and trained, with every correction that has all seeds.

    A sampler is left out if an advised correction is not trained with all seeds, or if fewer than two are.
    """
    result, evidence = {}, read_evidence()
    for column in COLUMN_TITLES:
        of_correction = {
            name: sorted(select(found, column, name), key=lambda cell: cell["seed"]) for name in CORRECTION_TITLES
        }
        whole = {name: cells for name, cells in of_correction.items() if len(cells) == len(SEEDS)}
        candidates = [candidates_of(first, column, seed) for seed in SEEDS]
        if len(whole) < 2 or not all(candidates):
            continue
        choices = choices_of(first, column, candidates)
        with mock.patch.multiple(rule, **limits([row for row in evidence if row["sampler"] != column])):
            unseen = choices_of(first, column, candidates)
        if any(CORRECTION_OF.get(choice.name) not in whole for choice in [*choices, *unseen]):
            continue
        finals = {name: [cell["held_out"][-1]["accuracy"] for cell in cells] for name, cells in whole.items()}
        result[column] = Regime(finals, [start(cell) for cell in next(iter(whole.values()))], choices, unseen)
    return result


def choices_of(first: Sequence[Row], column: str, candidates: Sequence[Sequence[CandidateRow]]) -> list[Choice]:
    """Return the choice for each seed of a sampler."""
    return [
        choose(rows) if decision_of(first, column, seed)[0] == "correct" else not_corrected(first, column, seed)
        for seed, rows in enumerate(candidates)
    ]


def not_corrected(first: Sequence[Row], column: str, seed: int) -> Choice:
    """Return the choice of a log that `advise` refuses to correct, with its sentence."""
    return Choice("none", (decision_of(first, column, seed)[1],), ())


def regret_rows(found: Mapping[str, Regime]) -> list[Row]:
    """Return a row for each sampler: advised and best accuracy, regret, and the paired difference with Holm's p."""
    rows = []
    for column, regime in found.items():
        best = regime.finals[regime.best]
        other = [regime.finals[regime.best_of_others(seed)][seed] for seed in SEEDS]
        advised, unseen = regime.ends(regime.choices), regime.ends(regime.unseen)
        room = mean(best) - mean(regime.starts)
        rows.append(
            {
                "sampler": COLUMN_TITLES[column],
                "seeds": len(best),
                "best": CORRECTION_TITLES[regime.best],
                "start": interval(regime.starts),
                "best_final": interval(best),
                "advised_final": interval(advised),
                "difference": interval([a - b for a, b in zip(advised, best, strict=True)]),
                "regret": (mean(best) - mean(advised)) / room,
                "regret_leave_one_out": (mean(other) - mean(advised)) / room,
                "regret_unseen": (mean(best) - mean(unseen)) / room,
            }
        )

    # An advice that is always the best has no difference to test: its p value is 1.
    corrected = holm({row["sampler"]: row["difference"].p for row in rows})
    return [{**row, "p": corrected[row["sampler"]]} for row in rows]


def choice_rows(found: Mapping[str, Regime]) -> list[Row]:
    """Return a row for each log whose choice is not the best of its sampler, with the reason that `advise` prints."""
    return [
        {
            "sampler": COLUMN_TITLES[column],
            "seed": seed,
            "advised": CORRECTION_TITLES[CORRECTION_OF[choice.name]],
            "best": CORRECTION_TITLES[regime.best],
            "difference": regime.ends(regime.choices)[seed] - regime.finals[regime.best][seed],
            "reason": choice.reasons[0],
        }
        for column, regime in found.items()
        for seed, choice in enumerate(regime.choices)
        if CORRECTION_OF[choice.name] != regime.best
    ]


def regret_text(rows: Sequence[Row], choices: Sequence[Row]) -> str:
    """Return the tables of the page."""
    if not rows:
        return "No sampler has all seeds yet."
    header = ("sampler", "best", "best ends at", "advised ends at", "advised − best", "p, corrected", "regret")
    lines = [
        (
            row["sampler"],
            row["best"],
            row["best_final"],
            row["advised_final"],
            gap_text(row["difference"]).partition(" (")[0],
            f"{row['p']:.2g}",
            f"{row['regret']:.1%}",
            f"{row['regret_leave_one_out']:.1%}",
            f"{row['regret_unseen']:.1%}",
        )
        for row in rows
    ]
    worse = [row["sampler"] for row in rows if row["difference"].mean < 0 and row["p"] < LEVEL]
    verdict = f"Significantly worse than the best: {', '.join(worse) or 'none'}."
    listed = [
        (row["sampler"], row["seed"], row["advised"], row["best"], f"{row['difference']:+.3f}", row["reason"])
        for row in choices
    ]
    parts = [table((*header, "regret, leave one out", "regret, unseen"), lines), verdict]
    if listed:
        parts += [
            "Logs whose advice is not the best correction of their sampler:",
            table(("sampler", "seed", "advised", "best", "final, advised − best", "reason"), listed),
        ]
    return "\n\n".join(parts)
