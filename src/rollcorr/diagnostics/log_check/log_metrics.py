"""What a log shows: its metrics over all rows and of each step, and the findings and remarks of its own record."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rollcorr.config import Finding
from rollcorr.core.metric_registry import finalize
from rollcorr.diagnostics.faults import FAULTS, fault
from rollcorr.diagnostics.health.evidence import bare_metrics
from rollcorr.diagnostics.health.trend import AGE
from rollcorr.diagnostics.log_check.log_tally import LogTally
from rollcorr.diagnostics.log_check.tally import Part, Tally, merge_parts
from rollcorr.diagnostics.null.mismatch_profile import MismatchProfile
from rollcorr.diagnostics.null.null_file import FEW_TOKENS
from rollcorr.diagnostics.null.origin import Origin
from rollcorr.diagnostics.null.token_share import TokenSums
from rollcorr.diagnostics.null.version_cells import lag_metrics, lag_rows
from rollcorr.diagnostics.provenance.provenance_findings import Provenance


@dataclass(frozen=True)
class LogMetrics:
    """The metrics of a log.

    Attributes:
        whole: over all rows, prefixed.
        steps: of each step, with "step", the reward and the age of the weights; empty where no step is recorded.
        ages: step → the mean age of the weights behind its tokens, by metric.
    """

    whole: Mapping[str, float]
    steps: tuple[Mapping[str, float], ...]
    ages: Mapping[int, Mapping[str, float]]

    @property
    def series(self) -> tuple[Mapping[str, float], ...]:
        """The steps; one entry without any."""
        return self.steps or ({"step": 0, **self.whole},)

    @property
    def history(self) -> tuple[Mapping[str, float], ...]:
        """The steps that rules over time read: one step has none."""
        return self.steps if len(self.steps) > 1 else ()


def log_metrics(tally: Tally) -> LogMetrics:
    """The metrics of a tally."""
    measured = metrics_of_parts(tally.parts, tally.profile, _ages(tally))
    lags = tally.versions.by_lag()
    if not lags:
        return measured
    steps = tuple({**step, **lag_metrics(lag_rows({0: lags.get(int(step["step"]), {})}))} for step in measured.steps)
    return replace(measured, whole={**measured.whole, **lag_metrics(lag_rows(lags))}, steps=steps)


def metrics_of_parts(
    parts: Mapping[int | None, Part], profile: MismatchProfile, ages: Mapping[int, Mapping[str, float]]
) -> LogMetrics:
    """The metrics of some rows, from their parts by step, their profile, and the ages of the steps."""
    whole = _metrics(merge_parts(parts.values()))
    whole.pop("log/token_id_share", None)  # of folded ids, as that of a step: limits are of exact ids
    whole |= _id_share(profile.ids)
    steps = sorted(step for step in parts if step is not None)
    return LogMetrics(
        whole, tuple({"step": step, **_metrics(parts[step]), **ages.get(step, {})} for step in steps), ages
    )


def _metrics(part: Part) -> dict[str, float]:
    """The metrics of a part: the registry's, the reward, and what was counted in the raw log-probs."""
    metrics = finalize(part.statistics.read())
    tokens = bare_metrics(metrics).get("token_count", 0.0)
    if part.rewards:
        metrics["reward/mean"] = part.reward / part.rewards
    metrics["log/zero_fraction"] = part.zeros / tokens if tokens else 0.0
    metrics["log/contradicted_zero_count"] = float(part.contradicted)
    metrics["log/positive_count"] = float(part.positive)
    return metrics | _id_share(part.ids)


def _id_share(ids: TokenSums) -> dict[str, float]:
    """The share of the token id; empty where there are no ids, or too few to tell."""
    share = ids.share()
    return {"log/token_id_share": share.share} if share.tokens >= FEW_TOKENS and not ids.repeats else {}


def _ages(tally: Tally) -> dict[int, dict[str, float]]:
    """Step → the mean age in versions of the weights behind its tokens; 0 for fresh ones."""
    return {step: {AGE: age} for step, _, age in tally.versions.by_step()}


def log_remarks(read: LogTally, *, diffusion: bool) -> Iterator[str]:
    """What the reader should know about the input, a line each."""
    yield f"π is the column {read.measurement.train_column}, μ is rollout_log_prob"
    if read.measurement.denoising:
        yield "log-probs are of denoising steps; weights and bounds are of the joint likelihood ratio, over all D"
    for finding in read.tally.findings:
        if finding.code not in FAULTS:
            yield _remark(finding, diffusion)
    if read.tally.interrupted:
        yield f"interrupted: this covers {read.tally.rows} of {read.total} rows only"
    yield from (f"left out: {problem}" for problem in read.unreadable)


def log_findings(tally: Tally, provenance: Provenance, *, diffusion: bool, kept: bool) -> list[Finding]:
    """Return what the log's validation, its recorded settings and the log-probs themselves add to the verdict.

    Codes of the validation without a row in the table of faults are about the file, and become remarks.
    """
    found = [_judged(finding, tally.rows) for finding in tally.findings if finding.code in FAULTS]

    # Densities may exceed 1 or be 0, and follow no rule of token probabilities.
    if diffusion:
        row = fault("sentinel")
        return [
            replace(finding, reason=row.reason, fix=row.fix, limit="0 pictures", tokens=None)
            for finding in found
            if finding.code == "sentinel"
        ]
    found += tally.claims.values()
    return found + [_implied(finding, kept=kept) for finding in provenance.warnings if fault(finding.code).number]


def partial_sentence(read: LogTally) -> tuple[str, ...]:
    """The sentence that a verdict on part of a log needs."""
    if not read.unreadable:
        return ()
    some = "1 file" if len(read.unreadable) == 1 else f"{len(read.unreadable)} files"
    return (f"this is the verdict on part of the log: {some} could not be read to the end",)


def mixed_settings(origin: Origin) -> list[Finding]:
    """Several settings, engines or models in one log: what holds for all rows together may not hold for each."""
    mixed = {}
    settings = [json.loads(text) for text in origin.sampling]
    for name in dict.fromkeys(name for one in settings for name in one):
        values = dict.fromkeys(str(one.get(name, "not recorded")) for one in settings)
        if len(values) > 1:
            mixed[name.replace("_", " ")] = tuple(values)
    for name in ("engine", "engine_version", "model"):
        if len(getattr(origin, name)) > 1:
            mixed[name.replace("_", " ")] = getattr(origin, name)
    if not mixed:
        return []
    return [
        replace(
            fault("mixed_settings").finding,
            metric="log/sampling",
            reason="; ".join(f"{name}: {', '.join(values)}" for name, values in mixed.items()),
            severity="note",
        )
    ]


def _remark(finding: Finding, diffusion: bool) -> str:
    """A finding of the log's validation in a line; of denoising steps without what it says of tokens."""
    if not diffusion:
        return str(finding)
    rows = finding.rows or 0
    return f"{finding.title}" + (f", in {rows:,} picture{'s' * (rows != 1)}" if rows else "")


def _judged(finding: Finding, rows: int) -> Finding:
    """A finding of the log's validation, as one that makes the verdict."""
    # Logits in place of log-probs explain a mismatch of all rows; one value above 0 explains its own row.
    share = (finding.rows or 0) / rows if fault(finding.code).part == "rows" else finding.row_share
    return replace(
        finding,
        row_share=share,
        metric=f"log/{finding.column}",
        value=float(finding.rows or 0),
        limit="0 sequences",
        severity="warning",
    )


def _implied(finding: Finding, *, kept: bool) -> Finding:
    """A finding of provenance, with what this log has for its fix."""
    if kept and finding.code == "truncated":
        return replace(finding, fix=f"{finding.fix}; this log has the sets, in kept_ids and kept_offsets")
    return finding
