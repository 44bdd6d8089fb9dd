"""Advice on a log: a measured correction and the reasons for it, or "do not correct; repair X first".

A correction repairs a drift that everybody knows of: rounding, weights that are a few updates old. It does not repair a
fault; it hides it, and the run learns from what the fault leaves over. So the causes come first.
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
"""Causes that a correction is made for: weights whose recorded age explains the mismatch."""
OF_A_FAULT = frozenset({"zero_probability_count", "nonfinite_count"})
"""Metrics whose broken range is a fault of the log-probs."""

FEW_ROWS = 0.01
"""Share of the rows. A fault in so few does not make the mismatch of a log whose sampler differs on purpose."""

IF_INTENDED = "if the sampler's weights are old or rounded on purpose, repeat with --intended"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to do.

    Attributes:
        decision: correct with a preset, repair something first, or nothing that could be judged.
        preset: its name; None unless the decision is to correct.
        candidate: its name among the candidates; empty unless the decision is to correct.
        thresholds: field of the configuration → value, where it differs from the preset's.
        candidates: what each candidate does to the log; empty unless the decision is to correct.
        reasons: sentences, the most important first.
        repairs: what to repair, with its fix: the causes, the most likely first.
        caveats: what the advice does not know.
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
        """The exit code of `rollcorr advise`."""
        return EXIT_CODES[self.decision]

    def to_json(self) -> str:
        """The advice as one JSON object."""
        document = {**asdict(self), "yaml": self.yaml}
        return json.dumps(document, ensure_ascii=False, indent=2)

    @property
    def config(self) -> RolloutCorrectionConfig | None:
        """The configuration; None unless the decision is to correct."""
        if self.preset is None:
            return None
        return RolloutCorrectionConfig.preset(self.preset).with_options(**cast(ConfigOptions, self.thresholds))

    @property
    def yaml(self) -> str:
        """The configuration as YAML to paste; empty unless the decision is to correct."""
        if self.preset is None:
            return ""
        fields = preset_fields(self.preset, {}) | dict(self.thresholds)
        return dump_yaml({"algorithm": {"rollout_correction": fields}})


def advise(result: CheckResult, *, intended: bool = False) -> Advice:
    """What to do about the mismatch of a log.

    Args:
        result: what `check_logs(…, candidates=True)` found.
        intended: the user knows that the sampler has other weights, for example old or rounded ones: advise although
            nothing shows that they are the right ones.

    Returns:
        The advice. A named cause other than weights of a recorded age means that nothing is corrected; so do weights
        that were not judged, unless `intended`.

    Raises:
        ValueError: there is something to choose, and the candidates were not measured.
    """
    metrics = bare_metrics(result.metrics)
    short = _too_little(metrics)
    if short:
        return Advice(decision="not judged", reasons=(short,))
    if result.profile.tokens == 0:  # denoising steps have no profile of tokens
        return Advice(
            decision="not judged",
            reasons=(
                "the log is of denoising steps, and the advice is about tokens; "
                "docs/guides/flow_grpo.md has the settings",
            ),
        )

    # Rows of a policy that falls apart look unrelated, or strange in another way, long before most of them do.
    faults = _faults(result)
    repairs = tuple(one for one in faults if not (intended and one.row_share and one.row_share <= FEW_ROWS))
    if repairs:
        return _repair_first(repairs)
    aside = tuple(f"{one.title}: {one.row_share:.2%} of the rows, so look at them, but correct" for one in faults)

    # A fault that nobody looked for would be hidden, and the run would learn from it.
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
    """The sentence for a log that is too small to advise on; empty where it is not."""
    for name, fewest in (("sequence_count", FEWEST_SEQUENCES), ("token_count", FEWEST_TOKENS)):
        seen = metrics.get(name, 0.0)
        if seen < fewest:
            return f"too little data: {seen:,.0f} {name.removesuffix('_count')}s, and {fewest} are needed"
    return ""


def _faults(result: CheckResult) -> tuple[Finding, ...]:
    """What must be repaired before anything is corrected, the most likely cause first."""
    causes = [finding for finding in result.causes if is_cause(finding) and finding.code not in KNOWN_DRIFT]
    named = {finding.code for finding in causes}
    others = [
        finding
        for finding in result.health.findings
        if finding.code not in named and (finding.severity == "error" or _shows_fault(finding))
    ]
    return (*causes, *others)


def _shows_fault(finding: Finding) -> bool:
    return finding.severity == "warning" and (
        finding.metric in OF_A_FAULT or finding.code in ("contradicted_zeros", "placeholder", "recorded_settings")
    )


def _repair_first(repairs: tuple[Finding, ...]) -> Advice:
    first = repairs[0]
    sentence = f"do not correct; repair this first: {first.title}"
    why = "a correction would hide the fault and reject or weight by it; no threshold tells a fault from a drift"
    return Advice(decision="repair", reasons=(sentence, why), repairs=repairs)
