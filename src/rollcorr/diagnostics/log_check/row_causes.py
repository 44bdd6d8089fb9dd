"""What follows from some rows: findings that a log no longer has once these rows are left out.

A fault of some rows makes numbers of the whole log wrong, and their course: a shift that begins at a step looks like
weights that changed there. So the rules judge the other rows of the spread sample by themselves. What they do not find
there follows from the cause of the rows; a rise that they do find there is that of the other rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.finding import Finding
from rollcorr.config.sampling_spec import JSON_MINUS_INFINITY
from rollcorr.diagnostics.faults import fault, is_rise, measures
from rollcorr.diagnostics.health.evidence import Evidence
from rollcorr.diagnostics.health.health_check import evidence_of, measured_findings
from rollcorr.diagnostics.health.noise import Noise
from rollcorr.diagnostics.health.trend import FACTOR
from rollcorr.diagnostics.log_check.log_metrics import metrics_of_parts
from rollcorr.diagnostics.log_check.tally import FIRST_STEPS, Part, part_of
from rollcorr.diagnostics.null.null_file import MismatchNull
from rollcorr.diagnostics.null.other_rows import OtherRows, profile_of
from rollcorr.diagnostics.null.run_null import noise_of
from rollcorr.diagnostics.null.token_ratios import TokenRatios
from rollcorr.diagnostics.provenance.pair_sample import SampleRow
from rollcorr.diagnostics.provenance.provenance_findings import Provenance


@dataclass(frozen=True, kw_only=True)
class RestVerdict:
    """What the rules find in the other rows.

    Attributes:
        zeros_from: the code of the finding that zeros follow from which one side contradicts; None without any.
        others: the other rows.
        evidence: their metrics over the steps; None where they are too few to be judged.
    """

    zeros_from: str | None
    others: OtherRows
    evidence: Evidence | None

    @cached_property
    def findings(self) -> tuple[Finding, ...] | None:
        """The rules' findings on the other rows; None where they are too few to be judged."""
        return None if self.evidence is None else measured_findings(self.evidence)

    @property
    def ordinary(self) -> bool:
        """Whether the rules find nothing wrong with the mismatch of the other rows."""
        return self.findings is not None and not any(
            finding.severity != "note" and measures(finding) for finding in self.findings
        )

    def attribute(self, findings: Iterable[Finding], *, with_rises: bool = False) -> tuple[Finding, ...]:
        """Findings about all rows: what the other rows do not show follows from the cause, unless it has another one.

        Args:
            findings: about all rows.
            with_rises: if there is a lasting rise, those that the other rows show come first, each in place of that of
                all rows.
        """
        found = [self._attributed(finding) for finding in findings]
        rises = self._rises() if with_rises and any(map(is_rise, found)) else ()
        codes = {finding.code for finding in rises}
        return (*rises, *(finding for finding in found if finding.code not in codes))

    def _rises(self) -> tuple[Finding, ...]:
        """The lasting rises that the other rows show by themselves."""
        return tuple(
            replace(finding, title=f"in the other rows {finding.title}", follows_from=None)
            for finding in self.findings or ()
            if is_rise(finding) and finding.severity != "note"
        )

    def _attributed(self, finding: Finding) -> Finding:
        if finding.code == "contradicted_zeros":
            return replace(finding, follows_from=self.zeros_from)
        measured = measures(finding) or is_rise(finding)
        if self.findings is None or not measured or self._shows(finding, self.findings):
            return finding
        return replace(finding, follows_from=self.others.cause.code)

    def _shows(self, finding: Finding, of_others: Sequence[Finding]) -> bool:
        """Whether the other rows show it too. A rise that they do show has a finding of its own."""
        if is_rise(finding):
            return finding.first_step is None or (not self._rises() and self._rises_since(finding.first_step))
        return any(
            (rest.code, rest.metric) == (finding.code, finding.metric)
            and (rest.severity != "note" or finding.severity == "note")
            for rest in of_others
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


def _zeros_from(provenance: Provenance, cause: Finding) -> str | None:
    """Code of the finding that zeros follow from which one side contradicts, where no other ones are left.

    A row that is shifted, with a pad in place of the value that is missing, has a zero at its end; and where a token is
    certain, its zero stands at the wrong one.
    """
    if provenance.zeros_left != 0:
        return None
    of_rows = cause.code if fault(cause.code).kind == "data" else None
    filled = fault("sentinel").explained_by
    return next((code for code in filled if provenance.finding(code) is not None), of_rows)


def noise_of_log(null: MismatchNull | None, others: OtherRows | None) -> Noise | None:
    """The noise of a token by the null of a log, which is not known to be right; else that of its other rows.

    None without both: what a log shows is noise only where its values are the log-probs of their tokens.
    """
    if null is not None:
        return noise_of(null, is_null=False)
    if others is None or not others.judgeable:
        return None
    sigma = others.alike().profile.std
    return Noise(sigma=sigma, source="as observed in the other rows; the noise itself was not judged")


def judge_rest(
    others: OtherRows,
    provenance: Provenance,
    config: RolloutCorrectionConfig,
    *,
    ages: Mapping[int, Mapping[str, float]],
) -> RestVerdict:
    """Judge the rows that a cause of some rows leaves.

    Args:
        others: the other rows of the spread sample.
        provenance: the estimate of that sample.
        config: what is measured.
        ages: step → the metric of the recorded age of its weights, where that is known.
    """
    others = others.alike()
    evidence = None
    if others.judgeable:
        # A check counts what is missing and goes on.
        config = replace(config, nonfinite="reject_token") if config.nonfinite == "raise" else config
        measured = metrics_of_parts(_parts(others.rows, config), others.profile, ages)
        evidence = evidence_of(measured.whole, config, series=measured.history)
    zeros_from = _zeros_from(provenance, others.cause)
    return RestVerdict(zeros_from=zeros_from, others=others, evidence=evidence)


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
    ids = [row.response_ids for row in rows]
    known = [row_ids for row_ids in ids if row_ids is not None]
    ratios = TokenRatios.of(
        train.numpy(),
        rollout.numpy(),
        mask.numpy(),
        np.array([len(row.train) for row in rows]),
        ids=torch.cat(known).numpy().astype(np.int64) if len(known) == len(rows) else None,
    )
    no_rewards = torch.full((len(rows),), torch.nan, device="cpu")
    return part_of(ratios, train, rollout, mask, no_rewards, config)
