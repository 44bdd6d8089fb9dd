"""The table of faults: each code of a finding once, with its kind, evidence, part, tests, words and experiment.

Every check takes its findings from here (`fault`), and `resolver` reads from the same rows which finding explains
which. A code without a row raises. CONTRIBUTING.md shows how to add a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.refuting_tests import (
    Case,
    Refutation,
    RefutingTest,
    cache_named_first,
    in_excess_at_start,
    present_from_start,
    resets_with_sync,
)

Kind = Literal["data", "settings", "weights", "noise", "symptom", "course", "no finding"]
Evidence = Literal["record", "pairs", "null", "routing", "steps", "metrics"]
Part = Literal["log", "rows", "positions", "filled", "nothing"]

CAUSES: frozenset[Kind] = frozenset({"data", "settings", "weights", "noise"})
"""Kinds that name a cause. A symptom measures the mismatch, and a course tells when or by how much it changed."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One row of the table.

    Attributes:
        code: of its findings.
        kind: the kind of fault.
        needs: evidence that shows it: the log's own record, pairs of log-probs, a null, the routing, a series of steps,
            or the metrics of one batch.
        part: what it concerns and a resolver removes: the log, the rows that it counts, positions of the responses,
            values that were filled in, or nothing of the mismatch.
        score: how direct its evidence is. A cause explains what has a lower score.
        refuted_by: tests, each of which may refute it.
        explained_by: codes that explain it before any cause does; the first one that is present.
        apart: metrics whose findings stand for themselves.
        title: the problem.
        reason: its meaning.
        fix: the change to make.
        confirm: the experiment that confirms it or rules it out.
        number: the name of the number that shows it, for a pair of log-probs.
        limit: what that number should be.
    """

    code: str
    kind: Kind
    needs: Evidence
    part: Part = "log"
    score: float = 0.0
    refuted_by: tuple[RefutingTest, ...] = ()
    explained_by: tuple[str, ...] = ()
    apart: frozenset[str] = frozenset()
    title: str = ""
    reason: str = ""
    fix: str = ""
    confirm: str = ""
    number: str = ""
    limit: str = ""

    @property
    def finding(self) -> Finding:
        """A finding in the words of the row, to be completed with `dataclasses.replace`."""
        metric = f"log/{self.number}" if self.number else None
        nothing_wrong = self.kind == "no finding" and not self.fix
        return Finding(
            code=self.code,
            title=self.title,
            limit=self.limit,
            reason=self.reason,
            fix=self.fix,
            confirm=self.confirm,
            metric=metric,
            severity="note" if nothing_wrong else "warning",
        )


_SYNC = (
    "check the weight sync: every parameter (output head, tied and renamed ones, adapters), its version at the time of "
    "sampling, a quantization of the sampler, and settings of the model such as RoPE"
)
_CHECKSUM = (
    "compare a checksum of one parameter on both sides after a sync, or sync by hand: k3 falls back to its start"
)
_NULL_OR_IDS = "a null (`rollcorr null`) or response_ids in the log"
_NOT_COMPARABLE = "these log-probs are not comparable: "
_FILLED = ("placeholder", "foreign_tokens")

_ROWS = (
    # Values that are not the log-probs of their tokens.
    Fault(
        code="shifted",
        kind="data",
        needs="pairs",
        part="rows",
        score=3,
        number="lag",
        limit="0",
        title=f"{_NOT_COMPARABLE}shifted",
        fix="log-prob t must be that of token t given the tokens before it; cut off the first or the last one",
        confirm="score one row by hand: the first log-prob belongs to the first response token",
    ),
    Fault(
        code="other_request",
        kind="data",
        needs="pairs",
        part="rows",
        score=3,
        number="correlation",
        limit="near 1",
        title=f"{_NOT_COMPARABLE}some rows have those of another request",
        fix="join the engine's answers to their prompts by request id, not by their order of arrival",
        confirm="score one of the rows again with the engine, alone",
    ),
    Fault(
        code="wrong_unit",
        kind="data",
        needs="pairs",
        part="rows",
        score=3,
        number="residual",
        limit="no unit but nats",
        title=f"{_NOT_COMPARABLE}one side is not in nats",
        fix="store natural log-probs: multiply by ln 2 or ln 10, change the sign, or take the log",
        confirm="exponentiate one value and compare it with the engine's probability of that token",
    ),
    Fault(
        code="foreign_tokens",
        kind="data",
        needs="pairs",
        part="rows",
        score=3,
        number="longest_run",
        limit="0",
        title="the mask covers tokens that the policy did not sample",
        fix="set response_mask to false on tokens of tools, templates and padding",
        confirm="decode these tokens and compare them with the engine's answer",
    ),
    Fault(
        code="placeholder",
        kind="data",
        needs="pairs",
        part="filled",
        score=3,
        title="placeholders in place of the rollout's log-probs",
        fix="store NaN for a missing log-prob; have the engine return log-probs of the tokens that it samples",
        confirm="look at these values in the engine's answer, before anything fills in missing ones",
    ),
    Fault(
        code="zeros",
        kind="data",
        needs="record",
        part="filled",
        score=3,
        explained_by=(*_FILLED, "truncated"),
        title="most log-probs of a sequence are exactly 0",
    ),
    Fault(
        code="sentinel",
        kind="data",
        needs="record",
        part="filled",
        score=3,
        explained_by=_FILLED,
        title="log-probs of −9999",
        reason="a sampler wrote −9999 in place of a log-prob; it is read as missing",
        fix="store missing log-probs as NaN (null in JSONL); find out why the sampler returned none",
    ),
    Fault(
        code="contradicted_zeros",
        kind="data",
        needs="metrics",
        part="filled",
        score=3,
        explained_by=(*_FILLED, "truncated", "zeros"),
        title="log-probs look filled in with zeros",
        reason="one policy claims probability exactly 1 for tokens that the other gives less than 1/e",
        fix="store missing log-probs as NaN (null in JSONL), never as 0.0; find out why the engine returned none",
    ),
    Fault(code="positive", kind="data", needs="record", part="rows", score=3, title="log-probs above 0"),
    Fault(code="kept", kind="data", needs="record", part="nothing", score=3),
    Fault(code="kept_length", kind="data", needs="record", part="nothing", score=3),
    Fault(code="kept_offsets", kind="data", needs="record", part="nothing", score=3),
    Fault(code="kept_twice", kind="data", needs="record", part="nothing", score=3),
    Fault(
        code="identical_policies",
        kind="data",
        needs="metrics",
        part="nothing",
        title="degenerate: both policies agree to the last bit",
        fix="in bypass mode measure the current policy against the rollout (log_prob, not old_log_prob); else check "
        "that the trainer recomputes its log-probs, and that the sampler's are its own. If one program does both, no "
        "correction is needed",
    ),
    Fault(
        code="skipped_updates",
        kind="data",
        needs="metrics",
        part="nothing",
        title="updates were skipped",
        reason="the loss or a gradient was not finite, or everything was rejected; the weights were left as they were",
        fix="lower the learning rate, clip gradients, and look at nonfinite_count, rejected shares and the "
        "largest weights then",
    ),
    # Settings of sampling, of prompts and of schedules.
    Fault(
        code="tempered",
        kind="settings",
        needs="pairs",
        score=3,
        refuted_by=(present_from_start, resets_with_sync),
        number="temperature_ratio",
        limit="1",
        title=f"{_NOT_COMPARABLE}tempered",
        fix="divide the trainer's logits by the sampling temperature, and have the engine return processed log-probs",
        confirm="compare the temperature in the engine's request with the one that the trainer divides by",
    ),
    Fault(
        code="truncated",
        kind="settings",
        needs="pairs",
        score=3,
        refuted_by=(present_from_start, resets_with_sync),
        number="kept_mass",
        limit="1",
        title=f"{_NOT_COMPARABLE}truncated",
        fix="replay the engine's kept sets on the trainer (support 'replayed'), subtract the log of the kept mass, or "
        "sample with top_p=1, top_k=-1, min_p=0",
        confirm="sample a few prompts with top_p=1, top_k=-1, min_p=0: the certain tokens must vanish",
    ),
    Fault(
        code="raw",
        kind="settings",
        needs="pairs",
        score=3,
        refuted_by=(present_from_start, resets_with_sync),
        number="mean_ratio",
        limit="1",
        title=f"{_NOT_COMPARABLE}raw",
        fix="have the engine return log-probs after its transforms (vLLM: logprobs_mode=processed_logprobs)",
        confirm="look up logprobs_mode of the engine, or give the trainer's logits and the token ids",
    ),
    Fault(
        code="recorded_settings",
        kind="settings",
        needs="record",
        score=3,
        title=f"{_NOT_COMPARABLE}the recorded settings say so",
    ),
    Fault(
        code="template",
        kind="settings",
        needs="pairs",
        part="positions",
        score=3,
        refuted_by=(cache_named_first, present_from_start, resets_with_sync),
        number="times_expected",
        limit="near 1",
        title="the two sides saw other prompts",
        fix="give both sides the same prompt ids: the same template, one BOS, and left padding that is masked",
        confirm="compare the ids that the engine was fed with `prompt_ids`; if they agree, sample without a prefix "
        "cache",
    ),
    Fault(
        code="turn_drift",
        kind="settings",
        needs="pairs",
        part="positions",
        score=3,
        number="times_expected",
        limit="near 1",
        title="the two sides differ more after a turn",
        fix="score the ids that the engine sampled and saw, in one sequence, without tokenizing text anew",
        confirm="compare the ids of one row on both sides across the turn, and score it without a prefix cache",
    ),
    Fault(
        code="schedule_differs",
        kind="settings",
        needs="metrics",
        score=3,
        title="the densities are not those of the steps that were sampled",
        fix="compare the schedules (`rollcorr check-schedule`), score with the σ and σ_next of the step that was "
        "sampled, and convert a CPS sampler's log-prob (`density_from_cps`)",
        confirm="the schedules of both sides, entry by entry",
    ),
    # Weights, and noise that no setting explains.
    Fault(
        code="moe_routing_differs",
        kind="weights",
        needs="routing",
        score=2,
        title="the two sides route tokens to other experts, and these carry the mismatch",
        fix="replay the sampler's routing on the trainer (router replay), or compute router logits in float32 on both "
        "sides",
        confirm="score some of these rows with the sampler's experts forced on the trainer: the excess vanishes",
    ),
    Fault(
        code="frozen_sampler",
        kind="weights",
        needs="steps",
        score=2,
        refuted_by=(in_excess_at_start,),
        title="the mismatch has grown since the first steps: the sampler seems not to be synchronized",
        reason="it grows with every update, as where the sampler keeps the weights of the start",
        fix="check that the weight sync runs, reaches the process that samples, and covers every parameter",
        confirm=_CHECKSUM,
    ),
    Fault(
        code="stale_by_lag",
        kind="weights",
        needs="steps",
        score=2,
        title="the mismatch has grown with the age of the weights, now {age} updates",
        reason="the recorded age of the weights that sampled has grown with it, and at one age it does not grow",
        fix="sync the weights more often, limit the age of the training data, or correct with the recorded log-probs",
        confirm="limit the age to one version: the mismatch falls to that of the null",
    ),
    Fault(
        code="weights_differ",
        kind="weights",
        needs="null",
        score=1,
        title="the weights of the sampler and of the trainer differ",
        fix=_SYNC,
        confirm="score a few of these rows with the sampler's own weights: the excess vanishes",
    ),
    Fault(
        code="stale_prefix_cache",
        kind="weights",
        needs="null",
        part="positions",
        score=1,
        title="the mismatch fades along the response: a stale prefix cache",
        fix="clear the engine's prefix cache at every weight update",
        confirm="sample with the prefix cache off: the excess vanishes",
    ),
    Fault(
        code="stochastic_trainer",
        kind="noise",
        needs="null",
        score=1,
        refuted_by=(present_from_start, resets_with_sync),
        title="one side draws anew in each forward pass (dropout, or another random layer)",
        fix="put the trainer in evaluation mode while it scores (`model.eval()`), and set dropout to 0",
        confirm="score the same rows twice: the two answers differ",
    ),
    # When and by how much the mismatch changed.
    Fault(
        code="changed_at_step",
        kind="course",
        needs="steps",
        score=0.5,
        title="the mismatch rose at step {onset} to {factor} times its start, and stayed",
        reason="a rise within one step is a change of the setup, not of the policy",
        fix="look for a change at that step: a sync that failed or stopped, a restarted engine, another setting, a "
        "checkpoint that one side did not load",
        confirm=_CHECKSUM,
    ),
    Fault(
        code="growing_mismatch",
        kind="course",
        needs="steps",
        score=0.4,
        refuted_by=(in_excess_at_start,),
        title="the mismatch has been growing since step {onset}",
        reason="it grows with the steps, as where a sync has stopped, or where the engine gets worse with its age",
        fix="check the weight sync from that step on; then restart the engine, and look at the learning rate",
        confirm="sync by hand, and restart the engine: the one that brings k3 back to its start tells the cause",
    ),
    Fault(
        code="above_null",
        kind="course",
        needs="null",
        score=0.3,
        reason="two policies with the same weights differ by less on this engine",
        fix=_SYNC,
        confirm="score a few of these rows with the sampler's own weights: the excess vanishes",
    ),
    Fault(
        code="step_divergence",
        kind="course",
        needs="metrics",
        score=0.2,
        reason="a step sampled by one policy has a likelihood ratio of about exp(−KL) under the other; averages over "
        "the dimensions hide it",
    ),
    # What only measures the mismatch.
    Fault(code="token_share_rose", kind="symptom", needs="steps"),
    Fault(
        code="out_of_range",
        kind="symptom",
        needs="metrics",
        apart=frozenset({"nonfinite_count", "zero_probability_count"}),
    ),
    Fault(
        code="recovered",
        kind="symptom",
        needs="metrics",
        apart=frozenset({"nonfinite_count", "zero_probability_count"}),
    ),
    Fault(code="horizon", kind="symptom", needs="metrics", title="responses are too long for sequence weights"),
    Fault(
        code="deceptive_effective_sample_size",
        kind="symptom",
        needs="metrics",
        explained_by=("saturation",),
        title="the effective sample size only looks healthy",
        reason="most weights are clamped to the same safety bound: they are equal because all are extreme",
        fix="do not trust sequence weights here; compare the sampling settings (temperature, top-p, top-k), shorten "
        "responses, or use token weights",
    ),
    Fault(
        code="saturation",
        kind="symptom",
        needs="metrics",
        title="weights saturate at the safety bound",
        reason="log weights beyond it are cut there: their size is lost, and chi-squared understates the mismatch",
        fix="move from sequence to token or geometric level, or reject these sequences (seq_mean_k3, veto)",
    ),
    Fault(code="sustained_rejection", kind="symptom", needs="metrics"),
    Fault(
        code="gap_at_start",
        kind="symptom",
        needs="metrics",
        title="a large gap between the policies from the start",
        reason="before training has moved the policy, both sides should agree: this is a fault in the setup",
    ),
    Fault(
        code="pinned_at_threshold",
        kind="symptom",
        needs="metrics",
        title="the largest weight is pinned at the threshold",
        reason="truncation acts from the start, so the gap between rollout and trainer is larger than it should be",
    ),
    Fault(
        code="band_narrower_than_mismatch",
        kind="symptom",
        needs="metrics",
        title="the rejection band is narrower than the mismatch",
        reason="the mean per-token gap of a typical sequence already lies outside the band, so most are rejected",
        fix="widen the band to a few times the measured gap, or use seq_mean_k3, which grows with its square",
    ),
    Fault(
        code="length_dependence",
        kind="symptom",
        needs="metrics",
        title="the bound on products depends on length here",
        reason="at the mean length the product of ratios is already past the bound: longer responses are "
        "down-weighted or rejected for being long",
        fix="use a criterion per token mean (seq_mean_k1, seq_mean_k3) or token weights",
    ),
    Fault(
        code="low_weights",
        kind="symptom",
        needs="metrics",
        title="most sequences would count for almost nothing",
        fix="stay with or move to token weights; shorten responses; lower the KL",
    ),
    Fault(
        code="one_sided_gradients",
        kind="symptom",
        needs="metrics",
        reason="the mismatch moves the ratios of all steps to one side before any update, so the clip removes one sign",
    ),
    Fault(
        code="growth_by_timestep",
        kind="symptom",
        needs="metrics",
        reason="the trainer has moved away from the rollouts' weights, and the copy does not follow",
        fix="send the engine the trainer's weights after every update, and check that all of them arrive",
    ),
    # Nothing wrong, or nothing known.
    Fault(
        code="matched",
        kind="no finding",
        needs="pairs",
        title="the sampling settings agree; the weights are not judged",
        confirm=_NULL_OR_IDS,
    ),
    Fault(
        code="processed",
        kind="no finding",
        needs="pairs",
        title="the rollout's log-probs are those of the distribution that was sampled",
    ),
    Fault(
        code="unexplained",
        kind="no finding",
        needs="pairs",
        title="the two sides differ, without the pattern of a setting",
        fix="look for other weights, another prompt template, or a policy that has moved on",
        confirm=_NULL_OR_IDS,
    ),
    Fault(
        code="storage",
        kind="noise",
        needs="pairs",
        part="nothing",
        title="log-probs are stored in 16 bits",
        fix="keep log-probs in float32 from the log-softmax on",
        confirm="look for the cast to bfloat16 or float16 between the log-softmax and the file",
    ),
    Fault(
        code="ordinary_noise",
        kind="no finding",
        needs="null",
        title="the mismatch is the ordinary noise of this engine",
    ),
    Fault(
        code="mixed_settings",
        kind="no finding",
        needs="record",
        title="the rows were not all sampled alike",
        fix="check the rows of each setting by themselves; a fault of some of them is diluted here",
    ),
)

FAULTS: Mapping[str, Fault] = {row.code: row for row in _ROWS}
"""Code → its row."""


def fault(code: str) -> Fault:
    """Return the row of a code.

    Raises:
        LookupError: the code is not declared.
    """
    row = FAULTS.get(code)
    if row is None:
        raise LookupError(f"the code {code!r} is not declared; add a row to rollcorr/diagnostics/faults.py")
    return row


def refutation(code: str, case: Case) -> Refutation | None:
    """Return why a test of the code's row refutes it; None if none does."""
    return next((refuted for test in fault(code).refuted_by if (refuted := test(case)) is not None), None)


def is_cause(finding: Finding) -> bool:
    """Return whether a finding names a cause that is not ruled out."""
    return finding.severity != "note" and fault(finding.code).kind in CAUSES


def measures(finding: Finding) -> bool:
    """Return whether a finding measures the mismatch, its size or its course."""
    row = fault(finding.code)
    return row.kind in ("symptom", "course") and finding.metric not in row.apart


def is_rise(finding: Finding) -> bool:
    """Return whether a finding is a lasting rise of the mismatch over the steps."""
    row = fault(finding.code)
    return row.needs == "steps" and row.kind != "symptom"
