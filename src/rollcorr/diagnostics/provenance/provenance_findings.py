"""What an estimate of provenance answers: findings with evidence and confidence, and what it could not tell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from rollcorr.config.finding import Finding, HasFindings

Code = Literal[
    "matched",
    "tempered",
    "truncated",
    "raw",
    "processed",
    "shifted",
    "other_request",
    "placeholder",
    "wrong_unit",
    "foreign_tokens",
    "template",
    "turn_drift",
    "storage",
    "unexplained",
]

NOT_COMPARABLE: Mapping[str, tuple[str, str]] = {
    "tempered": ("temperature_ratio", "1"),
    "truncated": ("kept_mass", "1"),
    "raw": ("mean_ratio", "1"),
    "shifted": ("lag", "0"),
    "other_request": ("correlation", "near 1"),
    "wrong_unit": ("residual", "no unit but nats"),
    "foreign_tokens": ("longest_run", "0"),
    "template": ("times_expected", "near 1"),
    "turn_drift": ("times_expected", "near 1"),
}
"""Codes that forbid the subtraction of the two log-probs: the number that shows each, and what it should be."""

_TITLES: Mapping[Code, str] = {
    "matched": "the sampling settings agree; the weights are not judged",
    "processed": "the rollout's log-probs are those of what was sampled",
    "placeholder": "placeholders in place of the rollout's log-probs",
    "other_request": "these log-probs are not comparable: some rows have those of another request",
    "wrong_unit": "these log-probs are not comparable: one side is not in nats",
    "foreign_tokens": "the mask covers tokens that the policy did not sample",
    "template": "the two sides differ most at the beginning of the responses",
    "turn_drift": "the two sides differ more after a turn",
    "storage": "log-probs are stored in 16 bits",
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
    "other_request": "join the engine's answers to their prompts by request id, not by their order of arrival",
    "wrong_unit": "store natural log-probs: multiply by ln 2 or ln 10, change the sign, or take the log",
    "foreign_tokens": "set response_mask to false on tokens of tools, templates and padding",
    "template": "give both sides the same prompt ids: the same template, one BOS, and left padding that is masked",
    "turn_drift": "score the ids that the engine sampled and saw, in one sequence, without tokenizing text anew",
    "storage": "keep log-probs in float32 from the log-softmax on",
    "unexplained": "look for other weights, another prompt template, or a policy that has moved on",
}
_CONFIRM: Mapping[Code, str] = {
    "tempered": "compare the temperature in the engine's request with the one that the trainer divides by",
    "truncated": "sample a few prompts with top_p=1, top_k=-1, min_p=0: the certain tokens must vanish",
    "raw": "look up logprobs_mode of the engine, or give the trainer's logits and the token ids",
    "shifted": "score one row by hand: the first log-prob belongs to the first response token",
    "other_request": "score one of the rows again with the engine, alone",
    "placeholder": "look at these values in the engine's answer, before anything fills in what is missing",
    "wrong_unit": "exponentiate one value and compare it with the engine's probability of that token",
    "foreign_tokens": "decode these tokens and compare them with what the engine returned",
    "template": "compare the prompt ids of one row on both sides; if they agree, sample without a prefix cache",
    "turn_drift": "compare the ids of one row on both sides across the turn, and score it without a prefix cache",
    "storage": "look for the cast to bfloat16 or float16 between the log-softmax and the file",
    "matched": "a null (`rollcorr null`) or response_ids in the log",
    "unexplained": "a null (`rollcorr null`) or response_ids in the log",
}
SURE = 0.99
"""Confidence of a finding of some rows from which the others are judged without them."""
OF_SETTINGS = frozenset({"tempered", "truncated", "raw"})
"""Codes of sampling settings that the two sides do not share. Rows that show them are known row by row."""
OF_ROWS = frozenset({"shifted", "other_request", "wrong_unit", "placeholder", "foreign_tokens"})
"""Codes of values that are not the log-probs of their tokens. They are known token by token: the others are judged
without them."""
NAMES_NO_CAUSE = frozenset({"matched", "unexplained", "processed"})
"""Codes that say what was looked for and not found."""


@dataclass(frozen=True, kw_only=True)
class Provenance(HasFindings):
    """What a pair of log-probs implies.

    Attributes:
        findings: what was found, most serious first. A warning asks for a fix; "matched" and "processed" are notes.
        tokens: valid tokens that were compared.
        temperature_ratio: rollout's temperature over the trainer's; 1.0 when nothing speaks for another. Without logits
            it is rough, and the more the two sides differ by noise or weights, the nearer it is to 1.
        kept_mass: mean mass that a truncation kept, under the trainer's policy; 1.0 when none was found.
        lag: tokens by which the rollout's log-probs come late, from −4 to 4, in most of the rows that are shifted.
        unknown: what these inputs cannot tell.
        misreported: true on tokens whose values a finding of some rows (`OF_ROWS`) covers, packed, (N,); None where
            they were not looked for.
        of_settings: true on the rows that show settings of their own (`OF_SETTINGS`) with certainty, packed, (N,); None
            where no rows do, or all together.
        zeros_left: tokens at exactly 0 on one side, which the other side contradicts, that are left once these values
            are undone: a row that is shifted back has its values at their own tokens, and none where the shift filled
            one in. None where there are no such tokens to begin with.
    """

    findings: tuple[Finding, ...]
    tokens: int
    temperature_ratio: float
    kept_mass: float
    lag: int
    unknown: tuple[str, ...]
    misreported: Tensor | None = field(default=None, repr=False, compare=False)
    of_settings: Tensor | None = field(default=None, repr=False, compare=False)
    zeros_left: int | None = None

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the findings."""
        return tuple(finding.code for finding in self.findings)

    def finding(self, code: Code) -> Finding | None:
        """The finding with that code, or None."""
        return next((finding for finding in self.findings if finding.code == code), None)


def provenance_finding(
    code: Code, reason: str, confidence: float | None, evidence: Mapping[str, float] | None = None, *, fix: str = ""
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
        confirm=_CONFIRM.get(code, ""),
    )


def confidence_of(z: float) -> float:
    """z² / (1 + z²): see `Finding.confidence`."""
    return z * z / (1 + z * z) if math.isfinite(z) else 1.0
