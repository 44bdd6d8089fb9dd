"""The result of an estimate of provenance: findings with evidence and confidence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from rollcorr.config.finding import Finding, HasFindings
from rollcorr.diagnostics.faults import fault

SURE = 0.99
"""Confidence above which a group's rows count as certain to have their own sampling settings."""


@dataclass(frozen=True, kw_only=True)
class Provenance(HasFindings):
    """Sampling settings and data faults that a pair of log-probs implies; docs/guides/sampling.md lists its limits.

    Attributes:
        findings: errors and warnings in the order of detection, then notes. A warning asks for a fix; "matched" and
            "processed" are notes.
        tokens: number of valid tokens that were compared.
        misreported: true on tokens whose values a finding about data covers, packed, (N,) bool; defaults to `None`: not
            computed.
        of_settings: true on tokens of rows that certainly have their own sampling settings, packed, (N,) bool;
            defaults to `None`: no such rows, or all rows share the settings.
        zeros_left: number of tokens at exactly 0 on one side that the other side contradicts, counted after
            misreported values were undone; undoing a shift returns each value to its token. Defaults to `None`: the
            log contains no such token.
    """

    findings: tuple[Finding, ...]
    tokens: int
    misreported: Tensor | None = field(default=None, repr=False, compare=False)
    of_settings: Tensor | None = field(default=None, repr=False, compare=False)
    zeros_left: int | None = None

    @property
    def codes(self) -> tuple[str, ...]:
        """Return the codes of the findings, in their order."""
        return tuple(finding.code for finding in self.findings)

    @property
    def temperature_ratio(self) -> float:
        """Return the rollout's temperature over the trainer's; 1.0 without a "tempered" finding.

        This is a rough estimate: noise and different weights bias it toward 1.
        """
        found = self.finding("tempered")
        return 1.0 if found is None else found.evidence["temperature_ratio"]

    def finding(self, code: str) -> Finding | None:
        """Return the first finding with this code, or `None`."""
        return next((finding for finding in self.findings if finding.code == code), None)


def provenance_finding(
    code: str, reason: str, confidence: float | None, evidence: Mapping[str, float] | None = None, *, fix: str = ""
) -> Finding:
    """Return a finding about provenance.

    Args:
        code: code of the finding's row in the table of faults.
        reason: the evidence in words.
        confidence: 0 to 1, or `None` if it is not computed.
        evidence: name → number; defaults to no evidence.
        fix: replaces the row's fix; defaults to the row's fix.
    """
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
    """Return the confidence z² / (1 + z²), 0 to 1, of a deviation of z standard errors; see `Finding.confidence`."""
    return z * z / (1 + z * z) if math.isfinite(z) else 1.0
