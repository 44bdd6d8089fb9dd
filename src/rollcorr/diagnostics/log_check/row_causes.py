"""What follows from some rows: findings that a log no longer has once these rows are left out.

A fault of some rows makes numbers of the whole log wrong, and their course: a shift that begins at a step looks like
weights that changed there. So the rules judge the other rows of the spread sample by themselves. What they do not find
there follows from the cause of the rows; a rise that they do find there is that of the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.finding import Finding
from rollcorr.config.sampling_spec import JSON_MINUS_INFINITY
from rollcorr.correction.rollout_correction import correct
from rollcorr.diagnostics.health.causes import OF_THE_MISMATCH, WITHOUT_A_MISMATCH
from rollcorr.diagnostics.health.health_check import health
from rollcorr.diagnostics.health.noise import Noise
from rollcorr.diagnostics.health.trend import FACTOR
from rollcorr.diagnostics.log_check.tally import FIRST_STEPS, Part, merge_parts, part_of
from rollcorr.diagnostics.null.other_rows import OtherRows, certain_cause, profile_of
from rollcorr.diagnostics.null.token_ratios import TokenRatios
from rollcorr.diagnostics.null.token_share import STEP_IDS, TokenSums
from rollcorr.diagnostics.provenance.pair_sample import SampleRow
from rollcorr.diagnostics.provenance.provenance_findings import Code, Provenance

RISES = frozenset({"frozen_sampler", "stale_by_lag", "changed_at_step", "growing_mismatch"})
"""Codes of a lasting rise of the mismatch."""
FILLED: tuple[Code, ...] = ("placeholder", "foreign_tokens")
"""Codes of values that were filled in: they explain zeros before any other cause does."""
_RANGES = frozenset({"out_of_range", "recovered"})


@dataclass(frozen=True, kw_only=True)
class RestVerdict:
    """What the rules find in the other rows.

    Attributes:
        cause: the finding of the rows that are left out.
        others: the other rows.
        findings: the rules' findings on them.
    """

    cause: Finding
    others: OtherRows
    findings: tuple[Finding, ...]

    @property
    def rises(self) -> tuple[Finding, ...]:
        """The lasting rises that the other rows show by themselves."""
        return tuple(
            replace(finding, title=f"in the other rows {finding.title}", follows_from=None)
            for finding in self.findings
            if finding.code in RISES and finding.severity != "note"
        )

    def attribute(self, findings: Iterable[Finding]) -> tuple[Finding, ...]:
        """Findings about all rows: what the other rows do not show follows from the cause, or was known to follow."""
        return tuple(
            replace(finding, follows_from=self.cause.code)
            if finding.follows_from is None and _measures(finding) and not self._shows(finding)
            else finding
            for finding in findings
        )

    def _shows(self, finding: Finding) -> bool:
        """Whether the other rows show it too. A rise that they do show has a finding of its own in `rises`."""
        if finding.code in RISES:
            return finding.first_step is None or (not self.rises and self._rises_since(finding.first_step))
        return any(
            (rest.code, rest.metric) == (finding.code, finding.metric)
            and (rest.severity != "note" or finding.severity == "note")
            for rest in self.findings
        )

    def _rises_since(self, onset: int) -> bool:
        """Whether k3 of the other rows has risen since a step by more than a metric may rise.

        Few rows show no course to a rule, so what lies before the step and after it is also compared.
        """
        steps = sorted({row.step for row in self.others.rows.values() if row.step is not None})
        before = [step for step in steps if step < onset] or steps[:FIRST_STEPS]
        early, late = (
            profile_of({index: row for index, row in self.others.rows.items() if (row.step in before) == early}).k3
            for early in (True, False)
        )
        return bool(late > FACTOR * early)


def attribute_zeros(findings: Iterable[Finding], provenance: Provenance) -> tuple[Finding, ...]:
    """Zeros that one side contradicts follow from values that are not those of their tokens, if nothing else has any.

    A row that is shifted, with a pad in place of the value that is missing, has a zero at its end; and where a token is
    certain, its zero stands at the wrong one.
    """
    cause = certain_cause(provenance)
    if cause is None or provenance.zeros_left != 0:
        return tuple(findings)
    filled = next((finding for code in FILLED if (finding := provenance.finding(code)) is not None), cause)
    return tuple(
        replace(finding, follows_from=filled.code) if finding.code == "contradicted_zeros" else finding
        for finding in findings
    )


def _measures(finding: Finding) -> bool:
    """Whether a finding measures the mismatch, its size or its course."""
    if finding.code in _RANGES:
        return finding.metric not in WITHOUT_A_MISMATCH
    return finding.code in OF_THE_MISMATCH


def judge_rest(
    cause: Finding,
    others: OtherRows,
    config: RolloutCorrectionConfig,
    *,
    metrics_of: Callable[[Part], Mapping[str, float]],
    ages: Mapping[int, Mapping[str, float]],
    noise: Noise | None,
) -> RestVerdict | None:
    """Judge the rows that a cause of some rows leaves.

    Args:
        cause: the certain finding of some rows.
        others: the other rows of the spread sample.
        config: what is measured.
        metrics_of: the metrics of a part, as the whole log's are made.
        ages: step → the metric of the recorded age of its weights, where that is known.
        noise: of a token.

    Returns:
        The verdict; None where too few rows are left.
    """
    others = others.alike()
    if not others.judgeable:
        return None
    if config.nonfinite == "raise":
        config = replace(config, nonfinite="reject_token")
    parts = _parts(others.rows, config)
    steps = sorted(step for step in parts if step is not None)
    series = [{"step": step, **metrics_of(parts[step]), **ages.get(step, {})} for step in steps]
    whole = metrics_of(merge_parts(parts.values()))
    verdict = health(whole, config, series=series if len(steps) > 1 else (), null=noise, judged_against="")
    return RestVerdict(cause=cause, others=others, findings=verdict.findings)


def _parts(rows: Mapping[int, SampleRow], config: RolloutCorrectionConfig) -> dict[int | None, Part]:
    """What some rows show, step by step."""
    of_step: dict[int | None, list[SampleRow]] = {}
    for row in rows.values():
        of_step.setdefault(row.step, []).append(row)
    return {step: _part(own, config) for step, own in of_step.items()}


def _part(rows: Sequence[SampleRow], config: RolloutCorrectionConfig) -> Part:
    """What the rows of one step show; a sentinel is missing, as in the tally of the log."""
    mask = torch.cat([row.mask.bool() for row in rows])
    sides = (torch.cat([row.train for row in rows]), torch.cat([row.rollout for row in rows]))
    train, rollout = (side.masked_fill(side == JSON_MINUS_INFINITY, torch.nan) for side in sides)
    lengths = torch.tensor([len(row.train) for row in rows], device="cpu")
    correction = correct(train, rollout, mask, config, cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))

    sums, ids = TokenSums.empty(STEP_IDS), [row.response_ids for row in rows]
    known = [row_ids for row_ids in ids if row_ids is not None]
    if len(known) == len(rows):
        ratios = TokenRatios.of(train.numpy(), rollout.numpy(), mask.numpy(), lengths.numpy())
        sums = TokenSums.of(*ratios.ids_and_d(torch.cat(known).numpy().astype(np.int64)), limit=STEP_IDS)
    no_rewards = torch.full((len(rows),), torch.nan, device="cpu")
    return part_of(correction, train, rollout, mask, no_rewards, sums)
