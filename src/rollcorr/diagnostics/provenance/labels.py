"""What an estimate of provenance says: labels with evidence, confidence and remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Name = Literal["matched", "tempered", "truncated", "raw", "processed", "shifted", "placeholder", "unexplained"]


@dataclass(frozen=True, kw_only=True)
class Label:
    """One thing that the log-probs show.

    Attributes:
        name: "matched", "tempered", "truncated", "raw", "processed", "shifted", "placeholder" or "unexplained".
        says: the label in words, with its numbers.
        confidence: z² / (1 + z²) with z the evidence in standard errors: by Cantelli's inequality, chance alone does
            this with at most the rest of 1. Tokens count as independent; causes not thought of do not count.
        evidence: the numbers behind it.
        remedy: what to change; empty when nothing is wrong.
    """

    name: Name
    says: str
    confidence: float
    evidence: Mapping[str, float] = field(default_factory=dict)
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What a pair of log-probs implies.

    Attributes:
        labels: what was found, gravest first.
        tokens: valid tokens that were compared.
        temperature_ratio: rollout's temperature over the trainer's, best fit; 1.0 when nothing speaks for another.
        kept_mass: mean mass that a truncation kept, under the trainer's policy; 1.0 when none was found.
        lag: tokens by which the rollout's log-probs come late: −1, 0 or 1.
        unknown: what these inputs cannot tell.
    """

    labels: tuple[Label, ...]
    tokens: int
    temperature_ratio: float
    kept_mass: float
    lag: int
    unknown: tuple[str, ...]

    @property
    def names(self) -> tuple[Name, ...]:
        """The names of the labels."""
        return tuple(label.name for label in self.labels)

    @property
    def wrong(self) -> tuple[Label, ...]:
        """The labels that say that the two log-probs are of different things."""
        return tuple(label for label in self.labels if label.remedy)

    def label(self, name: Name) -> Label | None:
        """The label of that name, or None."""
        return next((label for label in self.labels if label.name == name), None)


def tempered_label(says: str, z: float, evidence: Mapping[str, float]) -> Label:
    """The two sides are at different temperatures."""
    remedy = "divide the trainer's logits by the sampling temperature, and have the engine return processed log-probs"
    return Label(name="tempered", says=says, confidence=confidence_of(z), evidence=evidence, remedy=remedy)


def raw_label(says: str, z: float, evidence: Mapping[str, float]) -> Label:
    """The rollout's log-probs are not those of what was sampled."""
    remedy = "have the engine return log-probs after its transforms (vLLM: logprobs_mode=processed_logprobs)"
    return Label(name="raw", says=says, confidence=confidence_of(z), evidence=evidence, remedy=remedy)


def processed_label(says: str, confidence: float, evidence: Mapping[str, float]) -> Label:
    """The rollout's log-probs are those of what was sampled."""
    return Label(name="processed", says=says, confidence=confidence, evidence=evidence)


def confidence_of(z: float) -> float:
    """z² / (1 + z²): see `Label.confidence`."""
    return z * z / (1 + z * z) if math.isfinite(z) else 1.0
