"""Judgments on whether the engine samples with the trainer's weights: a mismatch above a null's, or one that has grown.

Each is a named function from evidence to a finding or None, and stands in the table `RULES` of
`rollcorr.diagnostics.health.rules`. docs/guides/health.md lists the limits.
"""

from __future__ import annotations

from dataclasses import replace

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.faults import fault
from rollcorr.diagnostics.health.evidence import ABOVE_NULL, Evidence
from rollcorr.diagnostics.health.trend import FACTOR, Change
from rollcorr.diagnostics.numbers import format_number

NEGLIGIBLE = {"k3_kl": 1e-4, "log_ratio_std": 1.4e-2}
"""Below these a rise over many steps is only noted: docs/guides/choosing.md calls that size negligible, and in bf16 a
right sampler reaches 6e-5, because rounding grows with the logits as the policy sharpens."""
NEGLIGIBLE_STEP = {"k3_kl": 1e-5, "log_ratio_std": 4.5e-3}
"""The same of a rise within one step, which no policy makes: below these it is rounding at most."""
NOTHING_TO_DO = "nothing to do while k3 is that small"
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


def token_share_rose(evidence: Evidence) -> Finding | None:
    """The token id explains more of the mismatch than at the start: rounding does not become systematic by itself."""
    name = "log/token_id_share"
    change = evidence.changes.get(name)
    if change is None:
        return None
    negligible = evidence.get("k3_kl") < NEGLIGIBLE_STEP["k3_kl"]
    return Finding(
        code="token_share_rose",
        metric=name,
        title=f"the token id explains more of the difference since step {change.onset}",
        value=change.value,
        limit=f"about {format_number(change.baseline)}, as before (within a step, with ids modulo 1,024)",
        reason="rounding differs from token to token by chance; where the token itself decides, the weights differ",
        fix=NOTHING_TO_DO if negligible else fault("changed_at_step").fix,
        severity="note" if change.is_over or negligible else "warning",
        first_step=change.onset,
        steps=change.lasted,
        confidence=change.z**2 / (1 + change.z**2),
        evidence=_rise_evidence(change),
    )


def above_null(evidence: Evidence) -> Finding | None:
    """k3 is several times that of a null."""
    value, noise = evidence.get("k3_kl"), evidence.noise
    if noise is None or not noise.is_null:
        return None
    expected = noise.sigma**2 / 2 if noise.k3 is None else noise.k3
    limit = ABOVE_NULL * evidence.null_k3
    if not value >= limit:
        return None
    times, start = format_number(value / evidence.null_k3), evidence.start_k3
    finding = replace(
        fault("above_null").finding,
        metric="k3_kl",
        title=f"the mismatch is {times} times that of {noise.source}",
        value=value,
        limit=f"below {ABOVE_NULL:g} times {format_number(expected)}",
        evidence={"k3": value, "expected_k3": expected, "ratio": value / evidence.null_k3},
        **evidence.when("k3_kl", lambda value: value >= limit),
    )
    from_start = evidence.starts_in_excess and (evidence.differs_from_start or evidence.is_fresh_on_record)
    if evidence.first is None or not from_start:
        return finding

    # Before the first update both sides have the same weights, unless they loaded others.
    return replace(
        finding,
        title=f"the two sides differ from the first step on: the mismatch is {times} times that of {noise.source}",
        reason=f"it was {format_number(start / evidence.null_k3)} times that at step {evidence.first[0]}, before any "
        "update that a sampler could miss",
        fix="compare what each side was set up with: the temperature and the other sampling settings, whether the "
        "engine's log-probs are of the processed logits, the tokens and their positions, the checkpoint that it loaded "
        "and its precision",
        confirm="log rollouts and give them to `rollcorr check` with this null: the tokens tell these apart",
        evidence={**finding.evidence, "k3_at_first_step": start},
        first_step=evidence.first[0],
    )


def lasting_rise(evidence: Evidence) -> Finding | None:
    """The mismatch rose and stayed: its onset, its shape and the recorded age of the weights give the code."""
    name = evidence.risen
    if name is None:
        return None
    change = evidence.changes[name]
    row = fault(_rise_code(change, evidence))
    title, cause, fix, confirm = row.title, row.reason, row.fix, row.confirm

    # The logits of a policy grow as it sharpens, and the rounding of a right sampler with them.
    floor = NEGLIGIBLE_STEP if row.code == "changed_at_step" else NEGLIGIBLE
    negligible = change.ended is None and change.value < floor.get(name, 0.0)
    if negligible:
        title, cause, fix, confirm = _NEGLIGIBLE_WORDS
    elif row.code == "growing_mismatch" and evidence.differs_from_start:
        title, cause, fix, confirm = _FROM_EXCESS_WORDS

    # A frozen sampler often reports the version that it should have.
    if row.code == "frozen_sampler" and evidence.starts_in_excess and evidence.is_fresh_on_record:
        cause += "; the recorded age of its weights is 0 throughout, and that may be wrong"
    until = "" if change.ended is None else f"; it was back at its start from step {change.ended} on"
    factor = format_number(change.factor)
    return replace(
        row.finding,
        metric=name,
        title=title.format(onset=change.onset, factor=factor, age=format_number(change.age or 0.0)),
        value=change.value,
        limit=f"at most {FACTOR:g} times {format_number(change.baseline)}, its start",
        reason=f"it reached {factor} times its start in {change.lasted} steps{until}; {cause}",
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
        return "growing_mismatch" if evidence.differs_from_start else "frozen_sampler"
    return "changed_at_step" if change.shape == "step" else "growing_mismatch"


def _rise_evidence(change: Change) -> dict[str, float]:
    return {
        "baseline": change.baseline,
        "factor": change.factor,
        "onset": float(change.onset),
        "found_at_step": float(change.found),
    }
