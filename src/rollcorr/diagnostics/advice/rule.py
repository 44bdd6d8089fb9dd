"""Choose a candidate for a log by a provisional rule, with limits from trained policies.

1. If the ESS of sequence weights is near 1, weights have no visible mismatch to correct: correct nothing.
2. Reject a candidate that keeps few tokens: policies trained on few tokens fell behind.
3. Choose sequence weights if their ESS and mean are at least as high as in successful training. The mean is needed
   because weights that all equal the safety bound have an ESS of 1 and no gradient.
4. Else choose token weights: trained policies ended ahead of no correction.

The rule ignores the ESS of token weights: one update of staleness leaves it at 0.989, and the run without correction
fails. It also ignores T × KL, because a few sequences dominate the KL. `experiments/bench/advice_evidence.py` computes
the limits from the committed cells, and a test compares them with its table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rollcorr.diagnostics.advice.candidates import CANDIDATES, WHOLE_HISTORY, CandidateRow
from rollcorr.diagnostics.numbers import format_number

NEGLIGIBLE_ESS = 0.999
"""ESS of sequence weights at or above which no correction is needed, measured on clean samplers."""
LOWEST_ESS = 0.07
"""Lowest ESS of sequence weights, on the log of a sampler for which they ended ahead of token weights in training."""
LOWEST_MEAN = 0.18
"""Lowest mean of the same weights."""
FEWEST_KEPT = 0.38
"""Share of tokens: corrections that kept this share or less ended behind sequence weights in training."""
PROVISIONAL = (
    "the rule is provisional: it rests on one small policy, stale 4-bit samplers and clean ones "
    "(experiments/bench/advice_evidence.csv)"
)


class Choice(NamedTuple):
    """The recommended candidate.

    Attributes:
        name: key of `CANDIDATES`.
        reasons: sentences, most important first.
        caveats: limits of the rule.
    """

    name: str
    reasons: tuple[str, ...]
    caveats: tuple[str, ...]


def choose(rows: Sequence[CandidateRow]) -> Choice:
    """Return the candidate that the rule recommends for a log.

    Args:
        rows: every candidate, measured on the log (`CheckResult.candidates`).

    Returns:
        The choice with its reasons.
    """
    by_name = {row.name: row for row in rows}
    whole = by_name[WHOLE_HISTORY]
    ess, mean = whole.sequence_ess, whole.mean_weight
    sentence = (
        f"sequence weights truncated at 4 have an ESS of {format_number(ess)} and a mean of {format_number(mean)}"
    )
    few = tuple(
        f"{row.name} ({CANDIDATES[row.name].preset}) keeps {row.kept:.1%} of the tokens: rejected, "
        f"{FEWEST_KEPT:.0%} or fewer were too few in training"
        for row in rows
        if row.kept <= FEWEST_KEPT
    )
    if ess >= NEGLIGIBLE_ESS and mean >= LOWEST_MEAN:
        return Choice("none", (f"{sentence}: nothing to correct, so measure and watch", *few), ())

    limits = f"{LOWEST_ESS:g} and {LOWEST_MEAN:g}"
    if ess >= LOWEST_ESS and mean >= LOWEST_MEAN:
        reason = f"{sentence}; down to {limits} they ended ahead of token weights in training"
        return Choice(WHOLE_HISTORY, (reason, *few), (PROVISIONAL,))
    reason = (
        f"{sentence}; below {limits} no policy was trained with them, and token weights ended ahead of no correction"
    )
    return Choice("Token-TIS 2", (reason, *few), (PROVISIONAL,))
