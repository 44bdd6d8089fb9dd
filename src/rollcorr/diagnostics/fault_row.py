"""A row of the table of faults: the declaration of one code, with the tests that refute a cause.

A setting, a template or a random layer acts with constant size from the first step. A sampler that misses weight
updates starts correct. So the course of the mismatch over the steps refutes causes that single tokens cannot
distinguish.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, Literal, NamedTuple

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.health.evidence import Evidence
from rollcorr.diagnostics.health.trend import AGE, FEWEST_STEPS, TREND_FACTOR
from rollcorr.diagnostics.numbers import format_number

GROWS = 30.0
"""Growth of the mismatch over its start that no constant cause produces. A constant temperature reaches 6, because its
effect grows as the policy sharpens. A stopped sync reached 5,000 to 6,000 in fifteen steps."""
SAME_STEP = 3
"""Maximum number of steps between the onset of a rise and the first step of a cause that explains it."""
FALLS = 10.0
"""Ratio of k3 at the highest recorded age to k3 at the lowest age that no constant cause produces."""
FEWEST_AT_AGE = 2
"""Minimum number of steps at each of these two ages."""
STARTS_IN_EXCESS = 10.0
"""Ratio of k3 to the null's k3 at the first step that no missed sync produces; up to 1.2 was measured before one."""

VIOLATIONS, LITTLE_NOISE = 0.1, 0.05
"""Share of tokens on the opposite side of a temperature's exponent, and the noise in nats up to which it is
informative. The share is at most 0.01 with this noise, and at least 0.17 with different weights. Noise of 0.2 nats
reaches 0.25."""


class Refutation(NamedTuple):
    """Result of a test that refutes a cause.

    Attributes:
        reason: evidence, as a sentence.
        instead: code that explains the finding instead; empty if the cause is ruled out.
    """

    reason: str
    instead: str = ""


class Case(NamedTuple):
    """A cause with the evidence to test it against.

    Attributes:
        finding: the cause, if it is a finding already.
        evidence: series of steps, if there is one.
        from_null: findings of the comparison with a null, in order.
        by_null: True if the cause is one of `from_null`.
    """

    finding: Finding | None
    evidence: Evidence | None
    from_null: Sequence[Finding] = ()
    by_null: bool = False


RefutingTest = Callable[[Case], Refutation | None]


def present_from_start(case: Case) -> Refutation | None:
    """Refute a constant cause if the mismatch has grown `GROWS` times since its start.

    A cause whose rows begin at the step of a sudden rise is not refuted: the rows are evidence for it.
    """
    if case.evidence is None or case.evidence.rise is None:
        return None
    _, change = case.evidence.rise
    if change.is_over or change.factor < GROWS:
        return None

    # After a sudden rise, stale weights keep diverging; a changed setting stays constant.
    first = None if case.finding is None else case.finding.first_step
    since = [k3 for step, k3 in case.evidence.series("k3_kl") if step >= change.onset]
    grows_on = bool(since) and median(since[-FEWEST_STEPS:]) >= TREND_FACTOR * median(since[:FEWEST_STEPS])
    if change.shape == "step" and not grows_on and first is not None and abs(first - change.onset) <= SAME_STEP:
        return None
    return Refutation(
        f"it acts from the first step on, and the mismatch was {format_number(change.baseline)} then and has grown "
        f"{format_number(change.factor)} times since step {change.onset}"
    )


def resets_with_sync(case: Case) -> Refutation | None:
    """Refute a constant cause if the mismatch drops whenever the recorded age of the weights drops."""
    history = [] if case.evidence is None else case.evidence.history
    of_steps = [(round(step[AGE]), step["k3_kl"]) for _, step in history if AGE in step and "k3_kl" in step]
    if sum(later < earlier for (earlier, _), (later, _) in pairwise(of_steps)) < FEWEST_AT_AGE:
        return None
    low, high = min(age for age, _ in of_steps), max(age for age, _ in of_steps)
    fresh, old = ([k3 for age, k3 in of_steps if age == end] for end in (low, high))
    if min(len(fresh), len(old)) < FEWEST_AT_AGE or median(old) < FALLS * median(fresh):
        return None
    return Refutation(
        f"it is the same at every step, and the mismatch falls from {format_number(median(old))} to "
        f"{format_number(median(fresh))} with each sync"
    )


def not_one_exponent(case: Case) -> Refutation | None:
    """Refute a temperature if more tokens contradict its exponent than the measured noise explains."""
    noise = None if case.evidence is None else case.evidence.noise
    wrong = 0.0 if case.finding is None else case.finding.evidence.get("violations", 0.0)
    if noise is None or noise.sigma > LITTLE_NOISE or wrong <= VIOLATIONS:
        return None
    return Refutation(f"{wrong:.0%} of the tokens contradict it, with noise of {format_number(noise.sigma)} nats")


def in_excess_at_start(case: Case) -> Refutation | None:
    """Refute a missed sync if the mismatch exceeded the null before the first update."""
    evidence = case.evidence
    named = next((finding for finding in case.from_null if finding.severity != "note"), None)
    if named is not None and named.evidence.get("ratio_of_first_step", 0.0) >= STARTS_IN_EXCESS:
        return Refutation("the mismatch was in excess before any update that a sampler could miss", named.code)
    if (
        evidence is None
        or evidence.noise is None
        or not (evidence.noise.is_null and evidence.starts_in_excess)
        or not (evidence.differs_from_start or evidence.is_fresh_on_record)
    ):
        return None
    return Refutation("the mismatch was in excess before any update that a sampler could miss", "above_null")


def cache_named_first(case: Case) -> Refutation | None:
    """Refute a different prompt, suggested by pairs, if a null shows that a stale prefix cache is more likely."""
    first = next((finding.code for finding in case.from_null if finding.severity != "note"), None)
    if case.by_null or first != "stale_prefix_cache":
        return None
    return Refutation("the null tells a stale prefix cache from another prompt", "stale_prefix_cache")


Kind = Literal["data", "settings", "weights", "noise", "symptom", "course", "no finding"]
Needs = Literal["record", "pairs", "null", "routing", "steps", "metrics"]
Part = Literal["log", "rows", "positions", "filled", "nothing"]

CAUSES: frozenset[Kind] = frozenset({"data", "settings", "weights", "noise"})
"""Kinds that name a cause. A symptom measures the mismatch; a course describes when or by how much it changed."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One row of the table.

    Attributes:
        code: code of its findings.
        kind: kind of fault.
        needs: required evidence: the log's own record, pairs of log-probs, a null, the routing, a series of steps, or
            the metrics of one batch.
        part: part of the data that the fault concerns and the resolver removes: the log, the rows that it counts,
            positions of the responses, filled-in values, or no part of the mismatch.
        score: directness of its evidence. A cause explains findings with a lower score.
        refuted_by: tests, each of which can refute the cause.
        explained_by: codes that explain it before any cause does; the first one present is used.
        apart: metrics whose findings are not attributed to a cause.
        title: the problem.
        reason: its meaning.
        fix: the recommended change.
        confirm: experiment that confirms the cause or rules it out.
        number: name of the number that shows it, for a pair of log-probs.
        limit: healthy value of that number.
    """

    code: str
    kind: Kind
    needs: Needs
    part: Part = "log"
    score: float = 0.0
    refuted_by: tuple[RefutingTest, ...] = ()
    explained_by: tuple[str, ...] = ()
    apart: frozenset[str] = frozenset()
    title: str = ""
    reason: str = ""
    fix: str = ""
    confirm: str = ""
    number: str = ""
    limit: str = ""

    @property
    def finding(self) -> Finding:
        """Return a finding with the text of the row; complete it with `dataclasses.replace`."""
        metric = f"log/{self.number}" if self.number else None
        nothing_wrong = self.kind == "no finding" and not self.fix
        return Finding(
            code=self.code,
            title=self.title,
            limit=self.limit,
            reason=self.reason,
            fix=self.fix,
            confirm=self.confirm,
            metric=metric,
            severity="note" if nothing_wrong else "warning",
        )

    def broken(
        self,
        evidence: Evidence,
        metric: str,
        breaks: Callable[[float], bool],
        /,
        *,
        value: float | None = None,
        **words: Any,  # noqa: ANN401
    ) -> Finding | None:
        """Return the finding of a rule about a metric, if the rule is violated now.

        Args:
            evidence: current metrics, and the history that dates the violation.
            metric: metric that the rule is about.
            breaks: returns whether a value violates the rule; False for NaN.
            value: value to judge; by default the metric's current value.
            words: additional fields of the finding.

        Returns:
            The finding; None if the rule is met.
        """
        judged = evidence.get(metric) if value is None else value
        if not breaks(judged):
            return None
        return replace(self.finding, metric=metric, value=judged, **words, **evidence.when(metric, breaks))

    def above(self, evidence: Evidence, metric: str, bound: float, /, **words: Any) -> Finding | None:  # noqa: ANN401
        """Return the finding of an upper limit on the metric, if exceeded; Args are as in `broken`."""
        return self.broken(evidence, metric, lambda value: value > bound, **words)
