"""Judges that read the cells of the trained study. What a column and a correction are is written in trained.md."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from claims_verdicts import (
    CANNOT,
    FAILS,
    PARTLY,
    REPEATS,
    UNDECIDED,
    Evidence,
    Judge,
    Verdict,
    by_cases,
    by_direction,
    misses_rare,
    said,
)
from intervals import LEVEL, Interval, holm, interval
from trained_page import (
    COLUMN_TITLES,
    CORRECTION_TITLES,
    at_the_end,
    finite,
    gain,
    gap,
    gap_text,
    mean,
    overall,
    select,
)

MISMATCHED = "stale_quantized"
WHOLE = (MISMATCHED, "stale")
"""Columns with a mismatch that sample the whole distribution at temperature 1; the clean one has nothing to correct."""

CUT = "truncated"
SIZE = "Answers have 271 tokens here, and 10,000 there."
NEEDED = 2.0
"""T × KL, nats, from which sequence weights differ enough to fail."""


SEEDS = 8
"""Pairs of trainings from which on their difference decides a claim."""


class Lead(NamedTuple):
    """The difference of two corrections in final held-out accuracy, its sign where that is decided, and else why not.

    The sign is that of the mean if all `SEEDS` pairs are trained and p < 0.05, Holm-corrected over all pairs of
    corrections that are trained on this sampler; else 0.
    """

    difference: Interval
    sign: int
    why: str

    def __str__(self) -> str:
        return gap_text(self.difference)


def _lead(evidence: Evidence, column: str, correction: str, other: str) -> Lead | None:
    found = {name: select(evidence.cells, column, name) for name in CORRECTION_TITLES}
    difference = gap(found[correction], found[other])
    if difference is None:
        return None
    if difference.n < SEEDS:
        return Lead(difference, 0, f"{difference.n} of {SEEDS} pairs of seeds are trained")

    # Each pair of corrections is one test: a claim and its reverse share it.
    whole = {name: cells for name, cells in found.items() if len(cells) >= SEEDS}
    tests = {frozenset(pair): gap(*(whole[name] for name in pair)) for pair in itertools.combinations(whole, 2)}
    corrected = holm({test: value.p for test, value in tests.items() if value is not None and value.n >= SEEDS})
    p = corrected[frozenset((correction, other))]
    sign = _sign(difference) if p < LEVEL else 0
    return Lead(difference, sign, "" if sign else f"p = {p:.2f} after Holm's correction over {len(corrected)} tests")


def _sign(value: Interval) -> int:
    """Return 1 if the 95 % t interval is above 0, −1 if it is below, else 0; 0 for a single seed."""
    return (value.mean > value.half) - (value.mean < -value.half)


def token_outperforms(evidence: Evidence) -> Verdict | None:
    """Token-TIS against no correction."""
    leads = {column: _lead(evidence, column, "token_tis", "none") for column in WHOLE}
    found = {COLUMN_TITLES[column]: lead for column, lead in leads.items() if lead}
    if len(found) < len(leads):
        return None
    shown = "; ".join(f"{title} {lead}" for title, lead in found.items())
    seen = f"Final held-out accuracy of Token-TIS minus that of no correction: {shown}."
    ahead = [title for title, lead in found.items() if lead.sign == 1]
    signs = [lead.sign for lead in found.values()]
    if ahead and len(ahead) < len(signs) and -1 not in signs:
        return Verdict(PARTLY, seen, f"where the sampler is {' and '.join(ahead)}; elsewhere {_why(found.values())}")
    return by_direction(min(signs), seen, why=_why(found.values()))


def _why(leads: Iterable[Lead]) -> str:
    """Return why differences are not decided."""
    return "; ".join(dict.fromkeys(lead.why for lead in leads if lead.why))


def back_at(cell: dict[str, Any]) -> float:
    """The step at which held-out accuracy is back at its start after it fell; 0 if it never fell, ∞ if never back."""
    start, fell = cell["held_out"][0]["accuracy"], False
    for point in cell["held_out"][1:]:
        if fell and point["accuracy"] >= start:
            return float(point["step"])
        fell = fell or point["accuracy"] < start
    return math.inf if fell else 0.0


def token_recovers(evidence: Evidence) -> Verdict | None:
    """When held-out accuracy is back at its start, seed by seed; then the difference at the end."""
    none = {cell["seed"]: back_at(cell) for cell in select(evidence.cells, MISMATCHED, "none")}
    token = {cell["seed"]: back_at(cell) for cell in select(evidence.cells, MISMATCHED, "token_tis")}
    seeds = sorted(none.keys() & token.keys())
    lead = _lead(evidence, MISMATCHED, "token_tis", "none")
    if not seeds or lead is None:
        return None
    shown = "; ".join(
        f"seed {seed}: {_back(token[seed])} with Token-TIS, {_back(none[seed])} without" for seed in seeds
    )
    seen = (
        "We looked for the step at which held-out accuracy is back at its start, stale and quantized; "
        f"{shown}. At the end they differ by {lead}."
    )
    if len(seeds) < SEEDS:
        return Verdict(UNDECIDED, seen, lead.why)
    sooner = sum(token[seed] < none[seed] for seed in seeds)
    comparable = lead.sign == 0
    if sooner == len(seeds) and comparable:
        return Verdict(REPEATS, seen)
    if not sooner and not comparable:
        return said(False, seen)
    ends = "the two end comparable" if comparable else "the two do not end comparable"
    return Verdict(PARTLY, seen, f"Token-TIS is back sooner in {sooner} of {len(seeds)} seeds; {ends}")


def _back(step: float) -> str:
    if step == 0:
        return "it never fell"
    return "never" if math.isinf(step) else f"step {step:.0f}"


def sequence_is_worst(evidence: Evidence) -> Verdict | None:
    """Seq-TIS against the other two, where the sampler differs."""
    leads = {other: _lead(evidence, MISMATCHED, "seq_tis", other) for other in ("token_tis", "none")}
    found = {CORRECTION_TITLES[other]: lead for other, lead in leads.items() if lead}
    if len(found) < len(leads):
        return None
    shown = "; ".join(f"Seq-TIS minus {title} {lead}" for title, lead in found.items())
    distance = overall(select(evidence.cells, MISMATCHED, "seq_tis"), "t_times_kl")
    assert distance is not None
    seen = (
        f"Stale and quantized, which is no setting of the document: final held-out accuracy, {shown}. "
        f"T × KL is {distance.mean:.1f}. {SIZE}"
    )
    signs = {lead.sign for lead in found.values()}
    sign = -1 if 1 in signs else int(signs == {-1})
    return _too_near(evidence, seen, MISMATCHED) or by_direction(sign, seen, why=_why(found.values()))


def sequence_may_win(evidence: Evidence) -> Verdict | None:
    """The document's own limit: shorter tasks may favor Seq-TIS."""
    lead = _lead(evidence, MISMATCHED, "seq_tis", "token_tis")
    if lead is None:
        return None
    seen = f"Seq-TIS minus Token-TIS, stale and quantized: {lead}. {SIZE}"
    return by_direction(lead.sign, seen, why=lead.why)


def metric(
    correction: str, name: str, sentence: str, *, above: float | None = None, below: float | None = None
) -> Judge:
    """Whether a metric of the stale and quantized column, averaged over a training, is on one side of a level."""

    def judge(evidence: Evidence) -> Verdict | None:
        value = overall(select(evidence.cells, MISMATCHED, correction), name)
        if value is None:
            return None
        seen = f"Stale and quantized, mean over steps: {sentence} {value} ({_seeds(value)})."
        if above is not None:
            return _beyond(value, above, 1, seen)
        assert below is not None
        return _beyond(value, below, -1, seen)

    return judge


def _beyond(value: Interval, level: float, side: int, seen: str) -> Verdict:
    """Judge whether a t interval is on one side of a level: 1 above it, −1 below it."""
    why = "one seed has no interval" if value.n < 2 else f"its t interval contains {level}"
    return by_direction(side * _sign(value._replace(mean=value.mean - level)), seen, why=why)


def _seeds(value: Interval) -> str:
    return f"{value.n} seed{'' if value.n == 1 else 's'}"


def low_weights(evidence: Evidence) -> Verdict | None:
    """More than half of the weights are low."""
    return metric("seq_tis", "low_weight", "the share of low weights is", above=0.5)(evidence)


def chi2_exceeds(evidence: Evidence) -> Verdict | None:
    """How many steps have a χ²_seq above 10³, and the largest."""
    cells = select(evidence.cells, MISMATCHED, "seq_tis")
    values = [value for cell in cells for value in finite(cell["metrics"]["chi2_seq"])]
    if not values:
        return None
    above = sum(value > 1e3 for value in values)
    seen = (
        f"Stale and quantized: the χ²_seq is above 1,000 in {above} of {len(values)} steps; the largest is "
        f"{max(values):,.0f}. {SIZE}"
    )
    verdict = by_cases(above, len(values), seen)
    if verdict.word == FAILS:
        return Verdict(CANNOT, seen, misses_rare(min(cell["responses"] // cell["steps"] for cell in cells)))
    return verdict._replace(why=f"in {above} of {len(values)} steps") if verdict.why else verdict


def clamping(evidence: Evidence) -> Verdict | None:
    """Steps with a weight at the clamp under Seq-TIS."""
    cells = select(evidence.cells, MISMATCHED, "seq_tis")
    values = [value for cell in cells for value in finite(cell["metrics"]["saturated_low"])]
    if not values:
        return None
    by_seed = [finite(cell["metrics"]["saturated_low"]) for cell in cells]
    counts = [sum(value > 0 for value in own) for own in by_seed]
    share = interval([mean(own) for own in by_seed])
    responses = min(cell["responses"] // cell["steps"] for cell in cells)
    seen = (
        f"Stale and quantized: {sum(counts)} of {len(values)} steps have at least one of {responses} weights at the "
        f"lower clamp, {min(counts)} to {max(counts)} of {len(by_seed[0])} by seed. Over all steps {share.mean:.1%} ± "
        f"{share.half:.1%} of the weights are there ({_seeds(share)})."
    )
    verdict = by_cases(sum(counts), len(values), seen)
    why = f"in {sum(counts)} of {len(values)} steps, with {share.mean:.1%} of the weights"
    return verdict._replace(why=why) if verdict.why else verdict


def _too_near(evidence: Evidence, seen: str, column: str = CUT) -> Verdict | None:
    """Return the verdict of a sampler that differs too little for a correction to fail; None if it differs enough."""
    distance = overall(select(evidence.cells, column, "seq_tis"), "t_times_kl")
    if distance is None or distance.mean >= NEEDED:
        return None
    cause = "the cut removes too little from this policy" if column == CUT else "this sampler differs too little"
    return Verdict(CANNOT, seen, f"{cause}: T × KL is {distance.mean:.2g}, and it was 20 and more there")


def all_fail(evidence: Evidence) -> Verdict | None:
    """The three corrections under cut sampling: reward at the end, and gain in held-out accuracy."""
    shown, signs = [], []
    for correction in ("none", "token_tis", "seq_tis"):
        cells = select(evidence.cells, CUT, correction)
        gained, reward = gain(cells), at_the_end(cells, "reward")
        if gained is None or reward is None:
            return None
        shown.append(f"{CORRECTION_TITLES[correction]} {reward} and {gap_text(gained)}")
        signs.append(_sign(gained))
    seen = f"Cut sampling, training reward over the last steps, and gain in held-out accuracy: {'; '.join(shown)}."
    if 0 in signs:
        return _too_near(evidence, seen) or Verdict(UNDECIDED, seen, "the t interval of a gain contains 0")
    return _too_near(evidence, seen) or by_cases(signs.count(-1), len(signs), seen)


def cut_is_low(evidence: Evidence) -> Verdict | None:
    """Low weights under cut sampling."""
    return _cut_metric(evidence, "low_weight", "the share of low weights is", 0.9)


def deceptive_ess(evidence: Evidence) -> Verdict | None:
    """An ESS near 1 counts only where the clamp makes it; weights that are near 1 have it too."""
    cells = select(evidence.cells, CUT, "seq_tis")
    ess, clamped = (overall(cells, name) for name in ("ess", "saturated_low"))
    if ess is None or clamped is None:
        return None
    seen = f"Cut sampling, Seq-TIS: the ESS is {ess}, and {clamped.mean:.1%} of the weights are at the lower clamp."
    return _too_near(evidence, seen) or said(ess.mean > 0.9 and clamped.mean > 0.5, seen)


def _cut_metric(evidence: Evidence, name: str, sentence: str, above: float) -> Verdict | None:
    value = overall(select(evidence.cells, CUT, "seq_tis"), name)
    if value is None:
        return None
    seen = f"Cut sampling, Seq-TIS, mean over steps: {sentence} {value} ({_seeds(value)})."
    return _too_near(evidence, seen) or _beyond(value, above, 1, seen)


def kl_of_cut(evidence: Evidence) -> Verdict | None:
    """The KL of cut sampling against that of the clean column."""
    cut, clean = (overall(select(evidence.cells, column, "none"), "kl") for column in (CUT, "clean"))
    if cut is None or clean is None:
        return None
    seen = f"The mean of −log ρ is {cut.mean:.2g} with cut sampling, and {clean.mean:.1g} in the clean column."
    return Verdict(CANNOT, seen, "the clean column compares float32 with float32, so that any KL is far above it")


def kl_rises(evidence: Evidence) -> Verdict | None:
    """The KL under cut sampling, its first and its last steps, training by training."""
    cells = [cell for cell in evidence.cells if cell["column"] == CUT and cell["correction"] != "replay"]
    changes = [mean(finite(cell["metrics"]["kl"][-10:])) - mean(finite(cell["metrics"]["kl"][:5])) for cell in cells]
    if len(changes) < 2:
        return None
    first = mean([mean(finite(cell["metrics"]["kl"][:5])) for cell in cells])
    change = interval(changes)
    last = first + change.mean
    rising = sum(value > 0 for value in changes)
    seen = (
        f"Cut sampling: the mean of −log ρ goes from {first:.2g} in the first 5 steps to {last:.2g} in the last 10; it "
        f"rises in {rising} of {len(changes)} trainings (mean change {change.mean:+.2g} ± {change.half:.1g})."
    )
    return by_direction(_sign(change), seen, why="the t interval of the change contains 0")


def replay_shares_support(evidence: Evidence) -> Verdict | None:
    """The mismatch that replayed kept sets leave."""
    replayed, none = (overall(select(evidence.cells, CUT, name), "k3") for name in ("replay", "none"))
    if replayed is None or none is None:
        return None
    seen = f"Cut sampling: the k3 is {none.mean:.2g} without replay and {replayed.mean:.2g} with it."
    return said(replayed.mean < 0.1 * none.mean, seen)


def replay_helps(evidence: Evidence) -> Verdict | None:
    """Replayed kept sets against no correction, under cut sampling."""
    lead = _lead(evidence, CUT, "replay", "none")
    gained = gain(select(evidence.cells, CUT, "none"))
    if lead is None or gained is None:
        return None
    seen = (
        f"Cut sampling: final held-out accuracy with replayed kept sets minus that without is {lead}. "
        f"Without them training changes the accuracy by {gap_text(gained)}."
    )
    return by_direction(lead.sign, seen, why=lead.why)


def mask_variance(evidence: Evidence) -> Verdict | None:
    """ESS and rejections of Seq-MIS."""
    cells = select(evidence.cells, MISMATCHED, "seq_mis")
    ess, rejected = (overall(cells, name) for name in ("ess", "rejected"))
    lead = _lead(evidence, MISMATCHED, "seq_mis", "token_tis")
    if ess is None or rejected is None:
        return None
    seen = f"Stale and quantized: the ESS of Seq-MIS is {ess}, and {rejected.mean:.0%} of the tokens are rejected."
    if lead is not None:
        seen += f" Its final held-out accuracy minus that of Token-TIS is {lead}."
    return _beyond(ess, 0.5, -1, seen)


def geometric(evidence: Evidence) -> Verdict | None:
    """Geo-RS in the steps whose mean ratio is as large as the document's."""
    cells = select(evidence.cells, MISMATCHED, "geo_rs_token_tis")
    steps = [
        (math.exp(abs(kl)), rejected)
        for cell in cells
        for kl, rejected in zip(cell["metrics"]["kl"], cell["metrics"]["rejected"], strict=True)
        if kl is not None and rejected is not None
    ]
    if not steps:
        return None
    high = [rejected for ratio, rejected in steps if ratio >= 1.01]
    seen = (
        "Stale and quantized, Geo-RS with 0.999 to 1.001 and Token-TIS: the mean ratio exp(KL) is 1.01 or more in "
        f"{len(high)} of {len(steps)} steps"
    )
    if not high:
        return Verdict(CANNOT, f"{seen}.", "no step has so large a mean ratio")
    seen += f"; {mean(high):.0%} of the tokens are rejected in those."
    if mean(high) >= 0.95:
        return Verdict(REPEATS, seen)
    return Verdict(PARTLY, seen, "most are rejected, but not every one") if mean(high) > 0.5 else said(False, seen)


def token_is_robust(evidence: Evidence) -> Verdict | None:
    """Token-TIS against whatever else was tried, in the columns that sample the whole distribution."""
    others = [name for name in CORRECTION_TITLES if name != "token_tis"]
    pairs = [(column, name) for column in WHOLE for name in others]
    found = {pair: lead for pair in pairs if (lead := _lead(evidence, *pair, "token_tis"))}
    if any((column, name) not in found for column in WHOLE for name in ("none", "seq_tis")):
        return None
    shown = [f"{COLUMN_TITLES[column]}, {CORRECTION_TITLES[name]} {lead}" for (column, name), lead in found.items()]
    ahead, behind = (
        [CORRECTION_TITLES[name] for (_, name), lead in found.items() if lead.sign == sign] for sign in (1, -1)
    )
    seen = f"Final held-out accuracy minus that of Token-TIS: {'; '.join(shown)}."
    if ahead:
        return by_direction(-1, f"{seen} Ahead of it: {_names(ahead)}.")
    if not behind or len(behind) == len(shown):
        return by_direction(int(bool(behind)), seen, why=_why(found.values()))
    return Verdict(PARTLY, seen, f"nothing is ahead of it; behind it is only {_names(behind)}")


def _names(titles: list[str]) -> str:
    return " and ".join(dict.fromkeys(titles))
