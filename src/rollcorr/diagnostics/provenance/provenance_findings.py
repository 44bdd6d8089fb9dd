"""What an estimate of provenance answers: findings with evidence and confidence, and what it could not tell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rollcorr.config.finding import Finding, HasFindings

Code = Literal["matched", "tempered", "truncated", "raw", "processed", "shifted", "placeholder", "unexplained"]

NOT_COMPARABLE: Mapping[str, tuple[str, str]] = {
    "tempered": ("temperature_ratio", "1"),
    "truncated": ("kept_mass", "1"),
    "raw": ("mean_ratio", "1"),
    "shifted": ("lag", "0"),
}
"""Codes that forbid the subtraction of the two log-probs: the number that shows each, and what it should be."""

_TITLES: Mapping[Code, str] = {
    "matched": "the two sides match",
    "processed": "the rollout's log-probs are those of what was sampled",
    "placeholder": "placeholders in place of the rollout's log-probs",
    "unexplained": "the two sides differ, without the pattern of a setting",
}
_FIXES: Mapping[Code, str] = {
    "tempered": "divide the trainer's logits by the sampling temperature, and have the engine return processed "
    "log-probs",
    "truncated": "replay the engine's kept sets on the trainer (support 'replayed'), subtract the log of the kept "
    "mass, or sample with top_p=1, top_k=-1, min_p=0",
    "raw": "have the engine return log-probs after its transforms (vLLM: logprobs_mode=processed_logprobs)",
    "shifted": "log-prob t must be that of token t given the tokens before it; cut off the first or the last one",
    "placeholder": "store NaN for what is missing; have the engine return log-probs of the tokens that it samples",
    "unexplained": "look for other weights, another prompt template, or a policy that has moved on",
}


@dataclass(frozen=True, kw_only=True)
class Provenance(HasFindings):
    """What a pair of log-probs implies.

    Attributes:
        findings: what was found, most serious first. A warning asks for a fix; "matched" and "processed" are notes.
        tokens: valid tokens that were compared.
        temperature_ratio: rollout's temperature over the trainer's, best fit; 1.0 when nothing speaks for another.
        kept_mass: mean mass that a truncation kept, under the trainer's policy; 1.0 when none was found.
        lag: tokens by which the rollout's log-probs come late: −1, 0 or 1.
        unknown: what these inputs cannot tell.
    """

    findings: tuple[Finding, ...]
    tokens: int
    temperature_ratio: float
    kept_mass: float
    lag: int
    unknown: tuple[str, ...]

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the findings."""
        return tuple(finding.code for finding in self.findings)

    def finding(self, code: Code) -> Finding | None:
        """The finding with that code, or None."""
        return next((finding for finding in self.findings if finding.code == code), None)


def provenance_finding(
    code: Code, reason: str, confidence: float, evidence: Mapping[str, float] | None = None, *, fix: str = ""
) -> Finding:
    """A finding about provenance; its fix is that of its code unless another one is given."""
    evidence = evidence or {}
    number, limit = NOT_COMPARABLE.get(code, ("", ""))
    fix = fix or _FIXES.get(code, "")
    return Finding(
        code=code,
        title=_TITLES.get(code, f"these log-probs are not comparable: {code}"),
        value=evidence.get(number),
        limit=limit,
        metric=f"log/{number}" if number else None,
        reason=reason,
        fix=fix,
        severity="warning" if fix else "note",
        confidence=confidence,
        evidence=evidence,
    )


def confidence_of(z: float) -> float:
    """z² / (1 + z²): see `Finding.confidence`."""
    return z * z / (1 + z * z) if math.isfinite(z) else 1.0
