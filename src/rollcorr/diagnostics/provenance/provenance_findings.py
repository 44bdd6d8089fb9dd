"""What an estimate of provenance answers: findings with evidence and confidence, and what it could not tell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from rollcorr.config.finding import Finding, HasFindings
from rollcorr.diagnostics.faults import fault

SURE = 0.99
"""Confidence of a finding of some rows from which the others are judged without them."""


@dataclass(frozen=True, kw_only=True)
class Provenance(HasFindings):
    """What a pair of log-probs implies; docs/guides/sampling.md lists what it cannot tell.

    Attributes:
        findings: what was found, most serious first. A warning asks for a fix; "matched" and "processed" are notes.
        tokens: valid tokens that were compared.
        misreported: true on tokens whose values a finding about data covers, packed, (N,); None where
            they were not looked for.
        of_settings: true on the rows that certainly show sampling settings of their own, packed, (N,); None
            where no rows do, or all together.
        zeros_left: tokens at exactly 0 on one side, which the other side contradicts, that are left once these values
            are undone: a row that is shifted back has its values at their own tokens, and none where the shift filled
            one in. None where there are no such tokens to begin with.
    """

    findings: tuple[Finding, ...]
    tokens: int
    misreported: Tensor | None = field(default=None, repr=False, compare=False)
    of_settings: Tensor | None = field(default=None, repr=False, compare=False)
    zeros_left: int | None = None

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the findings."""
        return tuple(finding.code for finding in self.findings)

    @property
    def temperature_ratio(self) -> float:
        """The rollout's temperature over the trainer's; 1.0 if nothing speaks for another.

        It is rough, and the more the two sides differ by noise or weights, the nearer it is to 1.
        """
        found = self.finding("tempered")
        return 1.0 if found is None else found.evidence["temperature_ratio"]

    def finding(self, code: str) -> Finding | None:
        """The finding with that code, or None."""
        return next((finding for finding in self.findings if finding.code == code), None)


def provenance_finding(
    code: str, reason: str, confidence: float | None, evidence: Mapping[str, float] | None = None, *, fix: str = ""
) -> Finding:
    """Return a finding about provenance; its fix is that of its row unless another one is given."""
    row, evidence = fault(code), evidence or {}
    return replace(
        row.finding,
        value=evidence.get(row.number),
        reason=reason,
        fix=fix or row.fix,
        confidence=confidence,
        evidence=evidence,
    )


def confidence_of(z: float) -> float:
    """z² / (1 + z²): see `Finding.confidence`."""
    return z * z / (1 + z * z) if math.isfinite(z) else 1.0
