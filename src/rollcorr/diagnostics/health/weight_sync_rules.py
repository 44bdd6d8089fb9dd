"""Rules that test if the engine samples with the trainer's weights: a mismatch above a null's, or a growing mismatch.

The three gaps of a training step are sampler → trainer, trainer → itself, and the drift of the updates. Before the
first update of a batch the trainer's weights are the same as for `old_log_prob`. So the first micro-batch of the loss
measures only the second gap: a difference there comes from the computation, not from the policy.

Each rule is a function that returns a finding or `None`. The table `RULES` of `rollcorr.diagnostics.health.rules`
contains them. docs/guides/health.md lists the limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.faults import fault
from rollcorr.diagnostics.health.evidence import ABOVE_NULL, Evidence
from rollcorr.diagnostics.health.trend import FACTOR, Change
from rollcorr.diagnostics.numbers import format_number

NEGLIGIBLE = {"k3_kl": 1e-4, "log_ratio_std": 1.4e-2}
"""Values below which a rise over several steps is only a note: docs/guides/choosing.md calls this size negligible, and
a correct bf16 sampler reaches 6e-5, because rounding grows with the logits as the policy sharpens."""
NEGLIGIBLE_STEP = {"k3_kl": 1e-5, "log_ratio_std": 4.5e-3}
"""The same limits for a rise within a step, which no sharpening policy causes: smaller rises are rounding."""
NOTHING_TO_DO = "nothing to do while k3 is that small"
_FROM_EXCESS_WORDS = (
    "the mismatch has grown since the first step, where it was in excess already",
    "what both sides differ by from the first step on shows more as the policy sharpens; a sampler that keeps its "
    "weights does not differ there",
    "find what differs at the first step; look at the weight sync if the mismatch still grows then",
    "with that fixed, k3 is the null's at the first step, and stays there",
)
"""Texts for a rise from a first step in excess: there was no update before it that the sampler could have missed."""
_NEGLIGIBLE_WORDS = (
    "the mismatch has grown since step {onset}, by no more than rounding explains",
    "rounding grows with the logits of a young policy as it sharpens, and explains all of it",
    NOTHING_TO_DO,
    "",
)
"""Texts for a rise that is still negligible: a note on rounding must not ask for a repair."""
FIRST = "actor/first/"
"""Prefix of the metrics of a step's first loss, computed before any update."""
SAME_PASS, SAME_CLIPPED = 1e-3, 0.01
"""Largest |policy KL|, nats, and largest share of clipped tokens between two passes with the same weights."""
LARGE = 0.01
"""|policy KL|, nats, above which a different kernel, precision or micro-batch size does not explain the difference."""
CLIPPED = ("clip_fraction_high", "clip_fraction_low", "clip_fraction_dual")


def token_share_rose(evidence: Evidence) -> Finding | None:
    """Return a finding if the token id explains more of the mismatch than at the start, which rounding cannot cause."""
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
        confidence=change.confidence,
        evidence=change.numbers,
    )


def above_null(evidence: Evidence) -> Finding | None:
    """Return a finding if k3, nats, is at least `ABOVE_NULL` times the null's k3."""
    value, noise = evidence.get("k3_kl"), evidence.noise
    limit = ABOVE_NULL * evidence.null_k3
    if noise is None or not noise.is_null or not value >= limit:
        return None
    expected = noise.mean_k3
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

    # Before the first update both sides have the same weights, unless they loaded different checkpoints.
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
    """Return a finding if the mismatch rose and stayed; onset, shape and the weights' recorded age decide its code."""
    if evidence.rise is None:
        return None
    name, change = evidence.rise
    row = fault(_rise_code(change, evidence))
    title, cause, fix, confirm = row.title, row.reason, row.fix, row.confirm

    # The logits of a policy grow as it sharpens, and with them the rounding of a correct sampler.
    floor = NEGLIGIBLE_STEP if row.code == "changed_at_step" else NEGLIGIBLE
    negligible = change.ended is None and change.value < floor.get(name, 0.0)
    if negligible:
        title, cause, fix, confirm = _NEGLIGIBLE_WORDS
    elif row.code == "growing_mismatch" and evidence.differs_from_start:
        title, cause, fix, confirm = _FROM_EXCESS_WORDS

    # A frozen sampler often reports the version that it should have, so do not rely on the recorded age.
    if row.code == "frozen_sampler" and evidence.starts_in_excess and evidence.is_fresh_on_record:
        cause += "; the recorded age of its weights is 0 throughout, and that may be wrong"
    until = "" if change.ended is None else f"; it was back at its start from step {change.ended} on"
    factor = format_number(change.factor)
    most, start = FACTOR * change.baseline, f"{format_number(change.baseline)}, the median of the first steps"
    above = (step for step, value in evidence.series(name) if step >= change.onset and value > most)
    return replace(
        row.finding,
        metric=name,
        title=title.format(onset=change.onset, factor=factor, age=format_number(change.age or 0.0)),
        value=change.value,
        limit=f"at most {format_number(most)}, {FACTOR:g} times its start ({start})",
        reason=f"it rose from step {change.onset} on, first passed the limit at step {next(above, change.found)}, and "
        f"reached {factor} times its start (a median of 3 steps) in {change.lasted} steps{until}; {cause}",
        fix=fix,
        confirm=confirm,
        severity="note" if change.is_over or negligible else "warning",
        first_step=change.onset,
        steps=change.lasted,
        confidence=change.confidence,
        evidence=change.numbers,
    )


def _rise_code(change: Change, evidence: Evidence) -> str:
    if change.from_start and change.age is not None:
        return "stale_by_lag"
    if change.from_start:
        return "growing_mismatch" if evidence.differs_from_start else "frozen_sampler"
    return "changed_at_step" if change.shape == "step" else "growing_mismatch"


class Gap(NamedTuple):
    """A gap between two policies of a training step.

    Attributes:
        name: the two policies, as "sampler → trainer".
        kl: KL in nats per token.
        clipped: share of the tokens that the loss clips; `None` for a gap that the loss does not clip.
    """

    name: str
    kl: float
    clipped: float | None


def step_gaps(values: Mapping[str, float]) -> tuple[Gap, ...]:
    """Return the three gaps of a step from its metrics, by bare name; empty if a KL is missing."""
    # Ask for each name: the size of `values` is costly, if they are medians that a Monitor computes on demand.
    if not all(name in values for name in (f"{FIRST}policy_kl", "actor/policy_kl", "k3_kl")):
        return ()
    first, drift = (sum(values.get(prefix + name, 0.0) for name in CLIPPED) for prefix in (FIRST, "actor/"))
    return (
        Gap("sampler → trainer", values["k3_kl"], None),
        Gap("trainer → itself, before the first update", values[f"{FIRST}policy_kl"], first),
        Gap("drift of the updates, mean of the step", values["actor/policy_kl"], drift),
    )


def loss_pass_differs(evidence: Evidence) -> Finding | None:
    """Return a finding if the trainer's loss pass differs from its `old_log_prob` before the first update."""
    gaps = step_gaps(evidence.current)
    if not gaps:
        return None
    sampler, own, _ = gaps

    # The pass that agrees with the sampler is correct, so the finding names the other pass.
    side = "the pass of old_log_prob" if sampler.kl > abs(own.kl) / 3 else "the loss pass"
    made_by = "dropout, or another temperature" if abs(own.kl) > LARGE else "its kernel, precision or micro-batch size"
    if abs(own.kl) <= SAME_PASS and (own.clipped or 0.0) <= SAME_CLIPPED:
        return None
    return replace(
        fault("loss_pass_differs").finding,
        metric=f"{FIRST}policy_kl",
        value=own.kl,
        limit=f"−{SAME_PASS:g} to {SAME_PASS:g}",
        reason=(
            f"{side} differs by {made_by}: the loss clips {own.clipped or 0.0:.1%} of the tokens before any update; "
            f"sampler and trainer differ by {format_number(sampler.kl)} nats"
        ),
    )
