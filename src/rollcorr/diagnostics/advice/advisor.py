"""Advice on a log: a preset with thresholds and the reasons for it, or "do not correct; repair X first".

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
from rollcorr.diagnostics.advice.calibration import Calibration, calibrate
from rollcorr.diagnostics.advice.situations import (
    FEW_TIMES,
    SEQUENCE_WEIGHTS_UNTIL,
    SITUATIONS,
    Measured,
    Situation,
)
from rollcorr.diagnostics.faults import is_cause
from rollcorr.diagnostics.health.evidence import bare_metrics
from rollcorr.diagnostics.health.health_check import DRAWS_NOT_JUDGED, FEWEST_SEQUENCES, FEWEST_TOKENS
from rollcorr.diagnostics.log_check.check import CheckResult
from rollcorr.diagnostics.null.null_file import MismatchNull
from rollcorr.diagnostics.numbers import format_number
from rollcorr.run_directory.stored_run import BadInputError

Decision = Literal["correct", "repair", "not judged"]

EXIT_CODES: Mapping[Decision, int] = {"correct": 0, "repair": 1, "not judged": 3}
KNOWN_DRIFT = frozenset({"stale_by_lag"})
"""Causes that a correction is made for: weights whose recorded age explains the mismatch."""
OF_A_FAULT = frozenset({"zero_probability_count", "nonfinite_count"})
"""Metrics whose broken range is a fault of the log-probs."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to do.

    Attributes:
        decision: correct with a preset, repair something first, or nothing that could be judged.
        preset: its name; None unless the decision is to correct.
        situation: the size of the mismatch, as docs/guides/choosing.md calls it; empty where it was not judged.
        thresholds: field of the configuration → value, where it differs from the preset's.
        reasons: sentences, the most important first.
        repairs: what to repair, with its fix: the causes, the most likely first.
        caveats: what the advice does not know.
    """

    decision: Decision
    preset: str | None = None
    situation: str = ""
    thresholds: Mapping[str, float | str] = field(default_factory=dict)
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


def advise(result: CheckResult, *, rate: float = 0.05, null: MismatchNull | None = None) -> Advice:
    """What to do about the mismatch of a log.

    Args:
        result: what `check_logs` found.
        rate: the share of healthy sequences that a rejection may cost, where a null calibrates it.
        null: for the thresholds; None takes the one that the log was checked with, if it has enough rows.

    Returns:
        The advice. A named cause other than weights of a recorded age means that nothing is corrected, and so do
        weights that were not judged.
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

    repairs = _faults(result)
    if repairs:
        return _repair_first(repairs)

    # A fault that nobody looked for would be hidden, and the run would learn from it.
    known_drift = any(cause.code in KNOWN_DRIFT for cause in result.causes)
    # Unknown sampling settings are a caveat: most dumps do not record them.
    open_questions = result.health.verdict == "not judged" and set(result.health.not_judged) != {DRAWS_NOT_JUDGED}
    if not known_drift and (open_questions or not result.health.judged_against):
        return Advice(decision="not judged", reasons=result.health.not_judged)

    measured = _measured(metrics)
    situation = next(one for one in SITUATIONS if one.holds(measured))
    fits = measured.t_times_kl < SEQUENCE_WEIGHTS_UNTIL
    preset = situation.short if fits else situation.long
    length = round(metrics["token_count"] / metrics["sequence_count"])
    calibration: Calibration | None = None
    unknown: tuple[str, ...] = ()
    if RolloutCorrectionConfig.preset(preset).rollout_rs is not None:
        calibration, unknown = _calibration(null or result.null, rate, length)
    thresholds, why = _thresholds(preset, measured, length, calibration)
    return Advice(
        decision="correct",
        preset=preset,
        situation=situation.name,
        thresholds=thresholds,
        reasons=(*_reasons(situation, measured, length, fits=fits), *why),
        caveats=(*result.health.not_judged, *unknown),
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


def _measured(metrics: Mapping[str, float]) -> Measured:
    return Measured(
        k3=metrics.get("k3_kl", 0.0),
        kl=abs(metrics.get("kl", 0.0)),
        chi2_token=metrics.get("chi2_token", 0.0),
        ess=metrics.get("rollout_is_eff_sample_size", 1.0),
        t_times_kl=abs(metrics.get("t_times_kl", 0.0)),
    )


def _calibration(null: MismatchNull | None, rate: float, length: int) -> tuple[Calibration | None, tuple[str, ...]]:
    """Thresholds at the length of the log, and what is unknown without them."""
    if null is None:
        return None, ("without a null the thresholds are rules of thumb; `rollcorr null` measures one",)
    try:
        calibration = calibrate(null, rate=rate, lengths=[length])
    except BadInputError as error:
        return None, (f"the thresholds are rules of thumb: {error}",)
    return calibration, calibration.remarks


def _reasons(situation: Situation, measured: Measured, length: int, *, fits: bool) -> tuple[str, ...]:
    """Why this preset."""
    reasons = [
        f"the mismatch is {situation.name} ({situation.signs}): k3 {format_number(measured.k3)}, |KL| "
        f"{format_number(measured.kl)} nats per token, χ² {format_number(measured.chi2_token)}, effective sample size "
        f"{measured.ess:.3f}"
    ]
    product = f"T × KL is {format_number(measured.t_times_kl)} nats at a mean length of {length:,}"
    if fits:
        reasons.append(f"{product}, below {SEQUENCE_WEIGHTS_UNTIL:g}: sequence weights would still have samples")
    else:
        reasons.append(f"{product}, {SEQUENCE_WEIGHTS_UNTIL:g} or more: few samples would carry sequence weights")
    if situation.name == "negligible":
        reasons.append("a correction would change nothing but add variance, so measure and watch")
    if situation.name == "severe":
        reasons.append("outliers leave the loss first; fresher data or a repair does more than any weight")
    return tuple(reasons)


def _thresholds(
    preset: str, measured: Measured, length: int, calibration: Calibration | None
) -> tuple[dict[str, float | str], tuple[str, ...]]:
    """The rejection threshold of the preset, from the null and the log; weights keep the preset's ceiling."""
    criterion = RolloutCorrectionConfig.preset(preset).rollout_rs
    if criterion == "seq_mean_k3":
        few = FEW_TIMES * measured.k3
        if calibration is None:
            return {"rollout_rs_threshold": _short(few)}, (
                f"the threshold of seq_mean_k3 is {FEW_TIMES:g} times the k3 of this log",
            )
        noise = calibration.limit("seq_mean_k3", length).upper
        if noise is not None and noise.value > few:
            return {"rollout_rs_threshold": _short(noise.value)}, (
                f"the threshold of seq_mean_k3 rejects {calibration.rate:.0%} of the sequences of {calibration.null} "
                "at this length",
            )
        return {"rollout_rs_threshold": _short(few)}, (
            f"the threshold of seq_mean_k3 is {FEW_TIMES:g} times the k3 of this log: that of {calibration.null}, "
            f"{'unknown' if noise is None else format_number(noise.value)}, would reject the known drift as well",
        )
    if criterion == "seq_sum_k1" and calibration is not None:
        wider = calibration.limit("seq_sum_k1", length)
        if wider.lower is not None and wider.upper is not None and (wider.lower.value < 0.5 or wider.upper.value > 2):
            band = f"{_short(min(wider.lower.value, 0.5))}_{_short(max(wider.upper.value, 2.0))}"
            return {"rollout_rs_threshold": band}, (
                f"the band of seq_sum_k1 is wide enough for the noise of {calibration.null} at this length",
            )
    return {}, ()


def _short(value: float) -> float:
    """A threshold at three digits."""
    return float(f"{value:.3g}")
