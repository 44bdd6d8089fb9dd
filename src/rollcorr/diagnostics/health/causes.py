"""Which finding is behind which: causes first, and their consequences under them.

One fault shows in many numbers. A wrong temperature moves the KL, the weights and the rejected share, and a reader who
is told of all four fixes the threshold. So what only measures the mismatch follows from whatever explains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollcorr.config.finding import Finding

OF_THE_MISMATCH = frozenset(
    {
        "above_null",
        "band_narrower_than_mismatch",
        "changed_at_step",
        "deceptive_effective_sample_size",
        "growth_by_timestep",
        "step_divergence",
        "frozen_sampler",
        "gap_at_start",
        "growing_mismatch",
        "horizon",
        "length_dependence",
        "low_weights",
        "pinned_at_threshold",
        "saturation",
        "stale_by_lag",
        "sustained_rejection",
        "token_share_rose",
    }
)
"""Codes of rules that measure the mismatch, its size or its course."""
WITHOUT_A_MISMATCH = frozenset({"nonfinite_count", "zero_probability_count"})
"""Ranges that are broken for reasons of their own."""
OF_A_FEW = frozenset(
    {"contradicted_zeros", "placeholder", "sentinel", "zeros", "kept", "kept_length", "kept_offsets", "kept_twice"}
)
"""Codes of log-probs that were filled in, and of kept sets that cannot be used: they explain no other mismatch."""
NO_CAUSE = frozenset(
    {"out_of_range", "identical_policies", "skipped_updates", "unexplained", "excess", "matched", "processed"}
)
"""Codes that name no cause."""
COURSE = ("frozen_sampler", "stale_by_lag", "changed_at_step", "growing_mismatch", "above_null", "step_divergence")
"""Codes that explain the size of the mismatch where no other finding does, the strongest first."""


@dataclass(frozen=True)
class Folded:
    """A finding and what follows from it."""

    finding: Finding
    consequences: tuple[Folded, ...] = ()


def with_causes(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings, each consequence with its cause in `follows_from`; causes first, consequences under theirs.

    A cause that is known already stays. Warnings come before notes.
    """
    cause = _main_cause(findings)
    found = [_attributed(finding, cause) for finding in findings]
    return tuple(finding for root in folded(found) for finding in _flat(root))


def folded(findings: Sequence[Finding]) -> tuple[Folded, ...]:
    """The causes with their consequences, as deep as they go: warnings before notes, else in their order.

    A consequence whose cause is not among the findings stands for itself, and so do those of a circle.
    """
    ordered = sorted(findings, key=lambda finding: finding.severity == "note")
    below: dict[int, list[Finding]] = {}
    roots = []
    for finding in ordered:
        cause = next((one for one in ordered if one.code == finding.follows_from), None)

        # A warning is not hidden under a note.
        hidden = cause is not None and cause.severity == "note" and finding.severity != "note"
        if cause is None or cause is finding or hidden or _leads_to(finding, cause, ordered):
            roots.append(finding)
        else:
            below.setdefault(id(cause), []).append(finding)

    def fold(finding: Finding) -> Folded:
        return Folded(finding, tuple(fold(consequence) for consequence in below.get(id(finding), ())))

    return tuple(fold(root) for root in roots)


def _leads_to(finding: Finding, cause: Finding, findings: Sequence[Finding]) -> bool:
    """Whether the causes of a cause come back to the finding: then neither explains the other."""
    seen, code = {finding.code}, cause.follows_from
    while code is not None:
        if code in seen:
            return True
        seen.add(code)
        code = next((one.follows_from for one in findings if one.code == code), None)
    return False


def _flat(one: Folded) -> list[Finding]:
    return [one.finding, *(finding for below in one.consequences for finding in _flat(below))]


def _main_cause(findings: Sequence[Finding]) -> str | None:
    """The code of the finding that explains the mismatch: a named cause, else its course, else nothing."""
    warned = [finding for finding in findings if finding.severity != "note" and finding.follows_from is None]
    named = [
        finding
        for finding in warned
        if finding.code not in OF_THE_MISMATCH | NO_CAUSE | OF_A_FEW and finding.metric not in WITHOUT_A_MISMATCH
    ]
    wide = [finding for finding in named if finding.row_share is None or finding.row_share >= 0.5]
    if wide:
        return wide[0].code

    # Where the other rows are ordinary, these few make all of the mismatch.
    few = [finding for finding in warned if finding.row_share is not None and finding.code not in NO_CAUSE]
    if few and any(finding.code == "ordinary_noise" for finding in findings):
        return few[0].code
    return next((code for code in COURSE if any(finding.code == code for finding in warned)), None)


def _attributed(finding: Finding, cause: str | None) -> Finding:
    """A finding with its cause, where it has none yet."""
    measures = finding.code in OF_THE_MISMATCH or (
        finding.code == "out_of_range" and finding.metric not in WITHOUT_A_MISMATCH
    )
    if cause is None or not measures or finding.follows_from is not None or finding.code == cause:
        return finding
    return replace(finding, follows_from=cause)
