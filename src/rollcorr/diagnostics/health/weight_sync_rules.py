"""Judgments on whether the engine samples with the trainer's weights: a mismatch above a null's, or one that has grown.

Each is a named function from evidence to a finding or None, and stands in the table `RULES` of
`rollcorr.diagnostics.health.rules`. docs/guides/health.md lists the limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.health.evidence import Evidence
from rollcorr.diagnostics.health.noise import Noise
from rollcorr.diagnostics.health.trend import AGE, FACTOR, Change
from rollcorr.diagnostics.numbers import format_number

ABOVE_NULL = 3.0
"""k3 over that of a null, above which the weights are not the same."""

FIRST_STEP = 1
"""Largest number of a step that no update came before: trainers count from 0 or from 1."""
SAME_ORDER = 0.1
"""Share of today's k3 that the first step must have had, for the same cause to make both."""
LEAST_K3 = 1e-9
"""k3 in nats that float32 rounding of the log-probs alone may cause."""

RISES = ("k3_kl", "log_ratio_std")
"""The metrics of which a lasting rise is one of the mismatch; the first one that rose is shown."""
NEGLIGIBLE = {"k3_kl": 1e-4, "log_ratio_std": 1.4e-2}
"""Below these a rise over many steps is only noted: docs/guides/choosing.md calls that size negligible, and in bf16 a
right sampler reaches 6e-5, because rounding grows with the logits as the policy sharpens."""
NEGLIGIBLE_STEP = {"k3_kl": 1e-5, "log_ratio_std": 4.5e-3}
"""The same of a rise within one step, which no policy makes: below these it is rounding at most."""
NOTHING_TO_DO = "nothing to do while k3 is that small"
_RISE_WORDS = {
    "frozen_sampler": (
        "the mismatch has grown since the first steps: the sampler seems not to be synchronized",
        "it grows with every update, as where the sampler keeps the weights of the start",
        "check that the weight sync runs, reaches the process that samples, and covers every parameter",
        "compare a checksum of one parameter on both sides after a sync, or sync by hand: k3 falls back to its start",
    ),
    "stale_by_lag": (
        "the mismatch has grown with the age of the weights, now {age} updates",
        "the recorded age of the weights that sampled has grown with it, and at one age it does not grow",
        "sync the weights more often, limit the age of what is trained on, or correct with the recorded log-probs",
        "limit the age to one version: the mismatch falls to that of the null",
    ),
    "changed_at_step": (
        "the mismatch rose at step {onset} to {factor} times its start, and stayed",
        "a rise within one step is a change of the setup, not of the policy",
        "look at what happened at that step: a sync that failed or stopped, a restarted engine, another setting, a "
        "checkpoint that one side did not load",
        "compare a checksum of one parameter on both sides after a sync, or sync by hand: k3 falls back to its start",
    ),
    "growing_mismatch": (
        "the mismatch has been growing since step {onset}",
        "it grows with the steps, as where a sync has stopped, or where the engine gets worse with its age",
        "check the weight sync from that step on; then restart the engine, and look at the learning rate",
        "sync by hand, and restart the engine: which of the two brings k3 back to its start tells the cause",
    ),
}
"""Code of a rise → its title, reason, fix, and what would confirm it."""
_FROM_EXCESS_WORDS = (
    "the mismatch has grown since the first step, where it was in excess already",
    "what both sides differ by from the first step on shows more as the policy sharpens; a sampler that keeps its "
    "weights does not differ there",
    "find what differs at the first step; look at the weight sync if the mismatch still grows then",
    "with that fixed, k3 is the null's at the first step, and stays there",
)
"""A rise from a first step that was in excess already: no update had come before, so none was missed."""
_NEGLIGIBLE_WORDS = (
    "the mismatch has grown since step {onset}, by no more than rounding explains",
    "rounding grows with the logits of a young policy as it sharpens, and explains all of it",
    NOTHING_TO_DO,
    "",
)
"""The same of a rise that is still negligible: a note on rounding must not ask for a repair."""


def frozen_sampler(evidence: Evidence) -> Finding | None:
    """The mismatch grows from the first steps on, as where the sampler keeps its first weights."""
    finding = _rise(evidence, "frozen_sampler", lambda change: _rise_code(change, evidence) == "frozen_sampler")
    if finding is None or not (_starts_in_excess(evidence) and _is_fresh_on_record(evidence)):
        return finding

    # What a frozen sampler reports as its version is often the one that it should have.
    reason = f"{finding.reason}; the recorded age of its weights is 0 throughout, and that may be wrong"
    return replace(finding, reason=reason, follows_from="above_null" if _is_judged_by_null(evidence) else None)


def stale_by_lag(evidence: Evidence) -> Finding | None:
    """The mismatch grew from the first steps on, and so did the recorded age of the weights."""
    return _rise(evidence, "stale_by_lag", lambda change: _rise_code(change, evidence) == "stale_by_lag")


def changed_at_step(evidence: Evidence) -> Finding | None:
    """The mismatch rose within a step, and stayed."""
    return _rise(evidence, "changed_at_step", lambda change: not change.from_start and change.shape == "step")


def growing_mismatch(evidence: Evidence) -> Finding | None:
    """The mismatch has grown since some step of the run."""
    finding = _rise(evidence, "growing_mismatch", lambda change: _rise_code(change, evidence) == "growing_mismatch")
    if finding is None or not _differs_from_start(evidence):
        return finding
    return replace(finding, follows_from="above_null" if _is_judged_by_null(evidence) else None)


def token_share_rose(evidence: Evidence) -> Finding | None:
    """The token id explains more of the mismatch than at the start: rounding does not become systematic by itself."""
    name = "log/token_id_share"
    change = evidence.changes.get(name)
    if change is None:
        return None
    beside = next((metric for metric in RISES if metric in evidence.changes), None)
    negligible = evidence.get("k3_kl") < NEGLIGIBLE_STEP["k3_kl"]
    return Finding(
        code="token_share_rose",
        metric=name,
        title=f"the token id explains more of the difference since step {change.onset}",
        value=change.value,
        limit=f"about {format_number(change.baseline)}, as before (within a step, with ids modulo 1,024)",
        reason="rounding differs from token to token by chance; where the token itself decides, the weights differ",
        fix=NOTHING_TO_DO if negligible else _RISE_WORDS["changed_at_step"][2],
        severity="note" if change.is_over or negligible else "warning",
        first_step=change.onset,
        steps=change.lasted,
        confidence=change.z**2 / (1 + change.z**2),
        evidence=_rise_evidence(change),
        follows_from=None if beside is None else _rise_code(evidence.changes[beside], evidence),
    )


def above_null(evidence: Evidence) -> Finding | None:
    """k3 is several times that of a null."""
    value, noise = evidence.get("k3_kl"), evidence.noise
    if noise is None or not noise.is_null:
        return None
    expected = noise.sigma**2 / 2 if noise.k3 is None else noise.k3
    limit = ABOVE_NULL * _null_k3(noise)
    if not value >= limit:
        return None
    times, start = format_number(value / _null_k3(noise)), _start_k3(evidence)
    finding = Finding(
        code="above_null",
        metric="k3_kl",
        title=f"the mismatch is {times} times that of {noise.source}",
        value=value,
        limit=f"below {ABOVE_NULL:g} times {format_number(expected)}",
        reason="two policies with the same weights differ by less on this engine",
        fix="check the weight sync: every parameter (output head, tied and renamed ones, adapters), its version at the "
        "time of sampling, and a quantization of the sampler",
        confirm="score a few of these rows with the sampler's own weights: the excess vanishes",
        evidence={"k3": value, "expected_k3": expected, "ratio": value / _null_k3(noise)},
        **evidence.when("k3_kl", lambda value: value >= limit),
    )
    from_start = _starts_in_excess(evidence) and (_differs_from_start(evidence) or _is_fresh_on_record(evidence))
    if evidence.first is None or not from_start:
        return finding

    # Before the first update both sides have the same weights, unless they loaded others.
    return replace(
        finding,
        title=f"the two sides differ from the first step on: the mismatch is {times} times that of {noise.source}",
        reason=f"it was {format_number(start / _null_k3(noise))} times that at step {evidence.first[0]}, before any "
        "update that a sampler could miss",
        fix="compare what each side was set up with: the temperature and the other sampling settings, whether the "
        "engine's log-probs are of the processed logits, the tokens and their positions, the checkpoint that it loaded "
        "and its precision",
        confirm="log rollouts and give them to `rollcorr check` with this null: the tokens tell these apart",
        evidence={**finding.evidence, "k3_at_first_step": start},
        first_step=evidence.first[0],
    )


def _rise(evidence: Evidence, code: str, applies: Callable[[Change], bool]) -> Finding | None:
    """The finding of a lasting rise: of k3, else of the spread of the log-ratio."""
    name = next((metric for metric in RISES if metric in evidence.changes), None)
    if name is None or not applies(evidence.changes[name]):
        return None
    change = evidence.changes[name]

    # The logits of a policy grow as it sharpens, and the rounding of a right sampler with them.
    floor = NEGLIGIBLE_STEP if change.shape == "step" and not change.from_start else NEGLIGIBLE
    negligible = change.ended is None and change.value < floor[name]
    title, cause, fix, confirm = _RISE_WORDS[code]
    if negligible:
        title, cause, fix, confirm = _NEGLIGIBLE_WORDS
    elif code == "growing_mismatch" and _differs_from_start(evidence):
        title, cause, fix, confirm = _FROM_EXCESS_WORDS
    until = ""
    if change.ended is not None:
        until = f"; it was back at its start from step {change.ended} on"
    return Finding(
        code=code,
        metric=name,
        title=title.format(
            onset=change.onset, factor=format_number(change.factor), age=format_number(change.age or 0.0)
        ),
        value=change.value,
        limit=f"at most {FACTOR:g} times {format_number(change.baseline)}, its start",
        reason=f"it reached {format_number(change.factor)} times its start in {change.lasted} steps{until}; {cause}",
        fix=fix,
        confirm=confirm,
        severity="note" if change.is_over or negligible else "warning",
        first_step=change.onset,
        steps=change.lasted,
        confidence=change.z**2 / (1 + change.z**2),
        evidence=_rise_evidence(change),
    )


def _rise_code(change: Change, evidence: Evidence) -> str:
    if change.from_start and change.age is not None:
        return "stale_by_lag"
    if change.from_start:
        return "growing_mismatch" if _differs_from_start(evidence) else "frozen_sampler"
    return "changed_at_step" if change.shape == "step" else "growing_mismatch"


def _null_k3(noise: Noise) -> float:
    """k3 of a null, nats; at least what rounding makes."""
    return max(noise.sigma**2 / 2 if noise.k3 is None else noise.k3, LEAST_K3)


def _is_judged_by_null(evidence: Evidence) -> bool:
    """Whether `above_null` speaks: elsewhere the caller compares with the null."""
    return evidence.noise is not None and evidence.noise.is_null


def _start_k3(evidence: Evidence) -> float:
    """k3 of the step that no update came before, nats; NaN where that step is not recorded."""
    if evidence.first is None or evidence.first[0] > FIRST_STEP:
        return math.nan
    return evidence.first[1].get("k3_kl", math.nan)


def _starts_in_excess(evidence: Evidence) -> bool:
    """Whether k3 was several times the null's before the first update: no weight sync can have failed by then."""
    return evidence.noise is not None and _start_k3(evidence) >= ABOVE_NULL * _null_k3(evidence.noise)


def _differs_from_start(evidence: Evidence) -> bool:
    """Whether what made that excess makes that of now as well: it is of the same order."""
    return _starts_in_excess(evidence) and _start_k3(evidence) >= SAME_ORDER * evidence.get("k3_kl")


def _is_fresh_on_record(evidence: Evidence) -> bool:
    """Whether an age of the weights is recorded, and is 0 at every step."""
    ages = [age for _, age in evidence.series(AGE)]
    return bool(ages) and not any(ages)


def _rise_evidence(change: Change) -> dict[str, float]:
    return {
        "baseline": change.baseline,
        "factor": change.factor,
        "onset": float(change.onset),
        "found_at_step": float(change.found),
    }
