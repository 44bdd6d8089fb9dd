"""The three gaps of a training step: sampler → trainer, trainer → itself, and the drift of the updates.

Before the first update of a batch the trainer's weights are those that scored `old_log_prob`. So the first micro-batch
of the loss shows the second gap alone: whatever differs there is another computation, not another policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.faults import fault
from rollcorr.diagnostics.health.evidence import Evidence
from rollcorr.diagnostics.numbers import format_number

FIRST = "actor/first/"
"""Prefix of the metrics of the first loss of a step, which no update came before."""
SAME_PASS, SAME_CLIPPED = 1e-3, 0.01
"""|policy KL| in nats, and share of clipped tokens, up to which two passes with the same weights may differ."""
LARGE = 0.01
"""|policy KL|, nats, above which the difference is more than another kernel, precision or micro-batch makes."""
CLIPPED = ("clip_fraction_high", "clip_fraction_low", "clip_fraction_dual")


class Gap(NamedTuple):
    """One gap of a step.

    Attributes:
        name: between which two.
        kl: nats per token.
        clipped: share of the tokens that the loss clips; None where nothing is clipped.
    """

    name: str
    kl: float
    clipped: float | None


def step_gaps(values: Mapping[str, float]) -> tuple[Gap, ...]:
    """Return the gaps of a step that its metrics (by bare name) show; empty without one of the trainer with itself."""
    if not {f"{FIRST}policy_kl", "actor/policy_kl", "k3_kl"} <= values.keys():
        return ()
    return (
        Gap("sampler → trainer", values["k3_kl"], None),
        Gap("trainer → itself, before the first update", values[f"{FIRST}policy_kl"], _clipped(values, FIRST)),
        Gap("drift of the updates, mean of the step", values["actor/policy_kl"], _clipped(values, "actor/")),
    )


def loss_pass_differs(evidence: Evidence) -> Finding | None:
    """The trainer differs from itself before the first update."""
    gaps = step_gaps(evidence.current)
    if not gaps or (abs(gaps[1].kl) <= SAME_PASS and (gaps[1].clipped or 0.0) <= SAME_CLIPPED):
        return None

    # The pass that agrees with the sampler is the right one.
    sampler, own, _ = gaps
    side = "the pass of old_log_prob" if sampler.kl > abs(own.kl) / 3 else "the loss pass"
    made_by = "dropout, or another temperature" if abs(own.kl) > LARGE else "its kernel, precision or micro-batch size"
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


def _clipped(values: Mapping[str, float], prefix: str) -> float:
    return sum(values.get(prefix + name, 0.0) for name in CLIPPED)
