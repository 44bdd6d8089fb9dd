"""Advise on a log: recommend a measured correction with reasons, or "do not correct; repair X first".

A correction compensates a known drift: rounding, or weights that are a few updates old. It only hides a fault, and the
run learns from the remaining error. So causes come first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, cast

from rollcorr.config import ConfigOptions, Finding, RolloutCorrectionConfig
from rollcorr.config.documents import dump_yaml
from rollcorr.config.presets import preset_fields
from rollcorr.diagnostics.advice.candidates import CANDIDATES, CandidateRow
from rollcorr.diagnostics.advice.rule import choose
from rollcorr.diagnostics.faults import is_cause
from rollcorr.diagnostics.health.evidence import bare_metrics
from rollcorr.diagnostics.health.health_check import DRAWS_NOT_JUDGED, FEWEST_SEQUENCES, FEWEST_TOKENS
from rollcorr.diagnostics.log_check.check import CheckResult

Decision = Literal["correct", "repair", "not judged"]

EXIT_CODES: Mapping[Decision, int] = {"correct": 0, "repair": 1, "not judged": 3}
KNOWN_DRIFT = frozenset({"stale_by_lag"})
"""Causes that a correction is designed for: weights whose recorded age explains the mismatch."""
DECLARED = "weights_differ"
"""Cause that the user declares with `intended`."""
OF_A_FAULT = frozenset(
    {"zero_probability_count", "nonfinite_count", "contradicted_zeros", "placeholder", "recorded_settings"}
)
"""Metrics whose violated range means faulty log-probs, and codes of such findings."""

FEW_ROWS = 0.01
"""Share of rows. With `intended`, a fault in at most this share does not block a correction."""

IF_INTENDED = "if the sampler's weights are old or rounded on purpose, repeat with --intended"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Recommendation for a log.

    Attributes:
        decision: "correct" with a preset, "repair" a fault first, or "not judged".
        preset: name of the preset; None unless the decision is to correct.
        candidate: name of the chosen candidate; empty unless the decision is to correct.
        thresholds: configuration field → value that differs from the preset's default.
        candidates: effect of each candidate on the log; empty unless the decision is to correct.
        reasons: sentences, most important first.
        repairs: causes to repair, each with its fix, most likely first.
        caveats: limits of the advice.
    """

    decision: Decision
    preset: str | None = None
    candidate: str = ""
    thresholds: Mapping[str, float | str] = field(default_factory=dict)
    candidates: tuple[CandidateRow, ...] = ()
    reasons: tuple[str, ...]
    repairs: tuple[Finding, ...] = ()
    caveats: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """Return the exit code of `rollcorr advise`."""
        return EXIT_CODES[self.decision]

    def to_json(self) -> str:
        """Return the advice as a JSON object."""
        return json.dumps({**asdict(self), "yaml": self.yaml}, ensure_ascii=False, indent=2)

    @property
    def config(self) -> RolloutCorrectionConfig | None:
        """Return the recommended configuration; None unless the decision is to correct."""
        if self.preset is None:
            return None
        return RolloutCorrectionConfig.preset(self.preset).with_options(**cast(ConfigOptions, self.thresholds))

    @property
    def yaml(self) -> str:
        """Return the configuration as YAML to paste; empty unless the decision is to correct."""
        if self.preset is None:
            return ""
        return dump_yaml({"algorithm": {"rollout_correction": preset_fields(self.preset, {}) | dict(self.thresholds)}})


def advise(result: CheckResult, *, intended: bool = False) -> Advice:
    """Recommend how to handle the mismatch of a log.

    Args:
        result: result of `check_logs(…, candidates=True)`.
        intended: True if the sampler's weights differ on purpose, for example stale or quantized ones: advise although
            no null confirms the weights, or one shows that they differ. Default: False.

    Returns:
        The advice. It contains no correction if the check found a cause other than weights of a recorded age. Without
        `intended`, the weights must also have been judged.

    Raises:
        ValueError: a correction can be chosen, but the candidates were not measured.
    """
    metrics = bare_metrics(result.metrics)
    short = _too_little(metrics)
    if short:
        return Advice(decision="not judged", reasons=(short,))
    if result.profile.tokens == 0:  # denoising steps have no token profile
        return Advice(
            decision="not judged",
            reasons=(
                "the log is of denoising steps, and the advice is about tokens; "
                "docs/guides/flow_grpo.md has the settings",
            ),
        )

    # In a collapsing policy a few rows look faulty long before most do, so do not let them block a correction.
    expected = KNOWN_DRIFT | ({DECLARED} if intended else set())
    faults = _faults(result, expected)
    repairs = tuple(one for one in faults if not (intended and one.row_share and one.row_share <= FEW_ROWS))
    if repairs:
        return _repair_first(repairs)
    aside = tuple(f"{one.title}: {one.row_share:.2%} of the rows, so look at them, but correct" for one in faults)

    # Without a judgment, a correction could hide an undetected fault, and the run would learn from it.
    known_drift = intended or any(cause.code in KNOWN_DRIFT for cause in result.causes)
    # Unknown sampling settings are a caveat: most dumps do not record them.
    open_questions = result.health.verdict == "not judged" and set(result.health.not_judged) != {DRAWS_NOT_JUDGED}
    if not known_drift and (open_questions or not result.health.judged_against):
        return Advice(decision="not judged", reasons=(*result.health.not_judged, IF_INTENDED))

    if not result.candidates:
        raise ValueError("no candidate was measured on this log; give check_logs(…, candidates=True)")
    choice = choose(result.candidates)
    candidate = CANDIDATES[choice.name]
    return Advice(
        decision="correct",
        preset=candidate.preset,
        candidate=choice.name,
        thresholds=candidate.options,
        candidates=result.candidates,
        reasons=choice.reasons,
        caveats=(*aside, *result.health.not_judged, *choice.caveats),
    )


def _too_little(metrics: Mapping[str, float]) -> str:
    """Return a sentence if the log is too small for advice, else an empty string."""
    for name, fewest in (("sequence_count", FEWEST_SEQUENCES), ("token_count", FEWEST_TOKENS)):
        seen = metrics.get(name, 0.0)
        if seen < fewest:
            return f"too little data: {seen:,.0f} {name.removesuffix('_count')}s, and {fewest} are needed"
    return ""


def _faults(result: CheckResult, expected: frozenset[str]) -> tuple[Finding, ...]:
    """Return the findings that must be repaired before any correction, most likely cause first."""
    found = (one for one in result.causes if is_cause(one) or one.code == "unknown")
    causes = [finding for finding in found if finding.code not in expected]
    named = expected.union(finding.code for finding in causes)
    others = [
        finding
        for finding in result.health.findings
        if finding.code not in named
        and (
            finding.severity == "error"
            or (finding.severity == "warning" and {finding.metric, finding.code} & OF_A_FAULT)
        )
    ]
    return (*causes, *others)


def _repair_first(repairs: tuple[Finding, ...]) -> Advice:
    sentence = f"do not correct; repair this first: {repairs[0].title}"
    why = "a correction would hide the fault and reject or weight by it; no threshold tells a fault from a drift"
    return Advice(decision="repair", reasons=(sentence, why), repairs=repairs)
