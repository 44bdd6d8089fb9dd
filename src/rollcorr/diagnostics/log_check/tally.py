"""Compute mergeable sums over parts of a rollout log, one batch at a time, for `rollcorr check`.

All fields of a `Tally` merge exactly, so any process may read any shard in any order. Merging in log order returns
bit-identical numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.checks import in_one_line
from rollcorr.config.finding import Finding, merge_findings
from rollcorr.config.sampling_spec import JSON_MINUS_INFINITY, SamplingSpec, compare
from rollcorr.core.mergeable_statistics import Statistics, merge_statistics
from rollcorr.correction.rollout_correction import correct
from rollcorr.diagnostics.advice.candidates import CandidateTotals
from rollcorr.diagnostics.faults import fault
from rollcorr.diagnostics.log_check.denoising import DENOISING_COLUMNS, denoising_statistics, exact_kl
from rollcorr.diagnostics.log_check.draws import DrawSums, draw_sums
from rollcorr.diagnostics.log_check.log_totals import PresetTotals, WorstTokens
from rollcorr.diagnostics.null import MismatchProfile, Origin
from rollcorr.diagnostics.null.picture_rows import PictureRows
from rollcorr.diagnostics.null.routing import RoutingSums
from rollcorr.diagnostics.null.token_ratios import TokenRatios, slice_sums, turn_begins
from rollcorr.diagnostics.null.token_share import FIRST_IDS, STEP_IDS, TokenSums
from rollcorr.diagnostics.null.version_cells import MOST_TURNS, StepCells, VersionCells
from rollcorr.diagnostics.provenance.pair_rows import CONTRADICTION
from rollcorr.diagnostics.provenance.pair_sample import PairSample
from rollcorr.rollout_log import RolloutBatch, RolloutLogError, Shard, read_shard
from rollcorr.rollout_log.schema import ragged
from rollcorr.rollout_log.validate import validate_batch

Counts = NDArray[np.int64]
Key = TypeVar("Key")
Sums = TypeVar("Sums")

FIRST_STEPS = 5
"""Number of steps at the start of a log that serve as its default null."""
COLUMNS = (
    "step",
    "response_mask",
    "rollout_log_prob",
    "old_log_prob",
    "log_prob",
    "prompt_ids",
    "response_ids",
    "policy_versions",
    "routing_difference",
    "reward",
    "sampling",
    "rollout_entropy",
    "engine",
    "engine_version",
    "model",
)
"""Columns of the log to read."""
KEPT_COLUMNS = ("kept_ids", "kept_offsets")
"""Additional columns to read if the log contains kept sets."""


@dataclass(frozen=True, eq=False)
class Part:
    """Sums over the rows of one step.

    Attributes:
        statistics: sums of the correction.
        zeros: number of valid tokens with a log-prob of exactly 0.
        contradicted: number of these zeros that the other side contradicts (`CONTRADICTION`).
        positive: number of valid tokens with a log-prob above 0.
        rewards: number of sequences with a reward.
        reward: sum of these rewards.
        ids: sums of d by folded token id; empty without recorded ids.
    """

    statistics: Statistics
    zeros: int
    contradicted: int
    positive: int
    rewards: int
    reward: float
    ids: TokenSums


@dataclass(frozen=True, eq=False)
class Tally:
    """Sums over part of a log.

    Attributes:
        parts: step → sums over its rows, in order of appearance; key None if no step is recorded.
        findings: validation findings, one for each code and column.
        sample: sequences for the estimate of provenance.
        claims: reason → finding, for recorded settings whose log-probs differ from the sampled distribution.
        rows: number of rows read.
        interrupted: True if reading stopped before the end.
        unreadable: one sentence for each unreadable shard.
        profile: mismatch of all rows.
        first: step → mismatch of its rows, for the lowest `FIRST_STEPS` steps; a single entry for all null steps if the
            measurement names them.
        first_samples: the same steps → sample of their sequences, to judge them separately.
        origin: recorded engines, models and settings.
        versions: mismatch by step and version of the weights, if both are recorded.
        turns: mismatch by step and turn.
        draws: step → sums for the z-test of −log μ against the entropy of μ, if recorded.
        routing: mismatch by difference in expert routing, if recorded.
        presets: effect of each preset, if requested.
        candidates: effect of each correction that `advise` chooses from, if requested.
        worst: tokens with the largest k3.
        pictures: denoising steps, if the log contains pictures.
    """

    parts: Mapping[int | None, Part] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    sample: PairSample = field(default_factory=PairSample)
    claims: Mapping[str, Finding] = field(default_factory=dict)
    rows: int = 0
    interrupted: bool = False
    unreadable: tuple[str, ...] = ()
    profile: MismatchProfile = field(default_factory=MismatchProfile)
    first: Mapping[int, MismatchProfile] = field(default_factory=dict)
    first_samples: Mapping[int, PairSample] = field(default_factory=dict)
    origin: Origin = field(default_factory=Origin)
    versions: VersionCells = field(default_factory=VersionCells)
    turns: StepCells = field(default_factory=StepCells)
    draws: Mapping[int | None, DrawSums] = field(default_factory=dict)
    routing: RoutingSums = field(default_factory=RoutingSums)
    presets: PresetTotals = field(default_factory=PresetTotals)
    candidates: CandidateTotals = field(default_factory=CandidateTotals)
    worst: WorstTokens = field(default_factory=WorstTokens)
    pictures: PictureRows = field(default_factory=PictureRows)

    def merge(self, later: Tally) -> Tally:
        """Return the sums over both parts of the log; `later` comes after."""
        first = merge_by_key(self.first, later.first, MismatchProfile.merge)
        samples = merge_by_key(self.first_samples, later.first_samples, PairSample.merge)
        return Tally(
            parts=merge_by_key(self.parts, later.parts, lambda own, other: merge_parts([own, other])),
            findings=merge_findings((*self.findings, *later.findings)),
            sample=self.sample.merge(later.sample),
            claims={**self.claims, **later.claims},
            rows=self.rows + later.rows,
            interrupted=self.interrupted or later.interrupted,
            unreadable=(*self.unreadable, *later.unreadable),
            profile=self.profile.merge(later.profile),
            # The lowest steps of all are among the lowest of every part, so their sums are complete.
            first={step: first[step] for step in sorted(first)[:FIRST_STEPS]},
            first_samples={step: samples[step] for step in sorted(samples)[:FIRST_STEPS]},
            origin=self.origin.merge(later.origin),
            versions=self.versions.merge(later.versions),
            turns=self.turns.merge(later.turns),
            draws=merge_by_key(self.draws, later.draws, DrawSums.merge),
            routing=self.routing.merge(later.routing),
            presets=self.presets.merge(later.presets),
            candidates=self.candidates.merge(later.candidates),
            worst=self.worst.merge(later.worst),
            pictures=self.pictures.merge(later.pictures),
        )


def merge_by_key(
    own: Mapping[Key, Sums], later: Mapping[Key, Sums], merge: Callable[[Sums, Sums], Sums]
) -> dict[Key, Sums]:
    """Return the union of both mappings; values of common keys are merged."""
    return {**own, **{key: merge(own[key], sums) if key in own else sums for key, sums in later.items()}}


def merge_parts(parts: Iterable[Part]) -> Part:
    """Compute the sums over several parts."""
    parts = list(parts)
    return Part(
        merge_statistics(part.statistics for part in parts),
        zeros=sum(part.zeros for part in parts),
        contradicted=sum(part.contradicted for part in parts),
        positive=sum(part.positive for part in parts),
        rewards=sum(part.rewards for part in parts),
        reward=sum(part.reward for part in parts),
        ids=reduce(TokenSums.merge, (part.ids for part in parts)),
    )


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Settings of a pass over a log, equal for all shards and reader processes.

    Attributes:
        config: configuration to measure.
        train_column: column that contains log π.
        batch_size: maximum number of rows in memory.
        kept: True to validate the log's kept sets.
        null_steps: first and last step that serve as the null; default: the lowest steps.
        keep_going: count an unreadable shard up to its first error.
        denoising: True if the tokens are denoising steps.
        timesteps: timesteps of the breakdown.
        with_exact_kl: True if the log contains the columns of the exact KL.
        what_if: also measure every preset.
        candidates: also measure the corrections that `advise` chooses from.
    """

    config: RolloutCorrectionConfig
    train_column: str
    batch_size: int
    kept: bool = False
    null_steps: tuple[int, int] | None = None
    keep_going: bool = False
    denoising: bool = False
    timesteps: tuple[float, ...] = ()
    with_exact_kl: bool = False
    what_if: bool = False
    candidates: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns of the log to read."""
        own = KEPT_COLUMNS * self.kept + DENOISING_COLUMNS * self.denoising
        return COLUMNS + own + ("advantages",) * (self.what_if or self.candidates)

    def of_shard(self, shard: Shard, on_rows: Callable[[int], None] = lambda rows: None) -> Tally:
        """Compute the tally of a shard; after a KeyboardInterrupt, of the rows read so far.

        `on_rows` is called with 0 before the first batch, then with the rows of each batch. It may raise the interrupt.
        It does nothing by default.

        Raises:
            RolloutLogError: the shard cannot be read, without `keep_going`.
        """
        tally = Tally()
        try:
            on_rows(0)
            for batch in read_shard(shard, columns=self.columns, batch_size=self.batch_size):
                first = shard.before + batch.first_row - shard.first_row
                beyond = max(tally.first) if len(tally.first) == FIRST_STEPS else None
                tally = tally.merge(self.of_batch(batch, first=first, stride=tally.sample.stride, beyond=beyond))
                on_rows(len(batch))
        except KeyboardInterrupt:
            tally = replace(tally, interrupted=True)
        except RolloutLogError as error:
            if not self.keep_going:
                raise
            tally = replace(tally, unreadable=(in_one_line(error),))
        by_step = {step: profile.counted() for step, profile in tally.first.items()}
        return replace(tally, profile=tally.profile.counted(), first=by_step)

    def of_batch(self, batch: RolloutBatch, *, first: int, stride: int = 1, beyond: int | None = None) -> Tally:
        """Compute the tally of a batch.

        Args:
            batch: consecutive rows of the log.
            first: row of the log at which the batch starts.
            stride: current stride of the sample.
            beyond: steps after this one are known to be outside the lowest `FIRST_STEPS`.

        Returns:
            The tally; for denoising steps, without samples and profiles of tokens.
        """
        rollout, train = batch.packed("rollout_log_prob"), batch.packed(self.train_column)
        mask = batch.packed("response_mask")
        if self.denoising:
            rollout, train = (without_sentinels(x) for x in (rollout, train))
            parts = dict(self._parts(batch, train, rollout, mask, None))
            findings = merge_findings(validate_batch(batch))
            kl = exact_kl(batch) if self.with_exact_kl else None
            pictures = PictureRows.of(batch, rollout, train, kl, first=first)
            return Tally(parts=parts, findings=findings, rows=len(batch), origin=Origin.of(batch), pictures=pictures)

        # Ids that only some rows record cannot describe the log.
        recorded = batch.has("response_ids") and not batch.records.column("response_ids").null_count
        ids = batch.packed("response_ids") if recorded else None
        steps = batch.values("step") if batch.has("step") else None
        wanted = {} if steps is None else self._wanted_first(steps, beyond)
        prompts, spans = _prompts(batch), version_spans(batch)
        versions = None if spans is None else torch.from_numpy(np.repeat(spans[1], spans[2]))

        def sampled(stride: int = 1, wanted: Tensor | None = None) -> PairSample:
            return PairSample.of(
                train,
                rollout,
                mask,
                batch.lengths,
                response_ids=ids,
                steps=steps,
                prompts=prompts,
                first=first,
                stride=stride,
                wanted=wanted,
                versions=versions,
            )

        sample = sampled(stride)
        first_samples = {step: sampled(wanted=rows) for step, rows in wanted.items()}

        # An engine's −9999 means minus infinity: treat it as missing, like NaN. The sample keeps it as a placeholder.
        rollout, train = (without_sentinels(x) for x in (rollout, train))
        ratios = TokenRatios.of(
            *(x.numpy() for x in (train, rollout, mask, batch.lengths)),
            index=np.arange(first, first + len(batch)),
            ids=None if ids is None else ids.numpy(),
            prompts=None if prompts is None else np.array([len(prompt) for prompt in prompts]),
        )
        profile = MismatchProfile.of_ratios(ratios)
        routing, candidates = RoutingSums(), CandidateTotals()
        if batch.has("routing_difference"):
            routing = RoutingSums.of(ratios, batch.packed("routing_difference").numpy())
        if self.candidates:
            candidates = CandidateTotals.of(batch, train, rollout, mask, ids=ids, prompts=prompts, first=first)
        return Tally(
            parts=dict(self._parts(batch, train, rollout, mask, ratios)),
            findings=merge_findings(validate_batch(batch)),
            sample=sample,
            claims=_check_recorded_settings(batch),
            rows=len(batch),
            profile=profile,
            # Usually a batch contains one step: reuse its profile.
            first={
                step: (profile if rows.all() else MismatchProfile.of_ratios(ratios.of_rows(rows.numpy()))).folded(
                    FIRST_IDS
                )
                for step, rows in wanted.items()
            },
            first_samples=first_samples,
            origin=Origin.of(batch),
            versions=_versions(spans, ratios),
            turns=_sum_k3_by_turn(batch, ratios),
            draws=draw_sums(batch, ratios) if batch.has("rollout_entropy") else {},
            routing=routing,
            presets=PresetTotals.of(batch, train, rollout, mask, ratios) if self.what_if else PresetTotals(),
            candidates=candidates,
            worst=WorstTokens.of(ratios),
        )

    def of_batches(self, batches: Iterable[RolloutBatch]) -> Tally:
        """Compute the tally of consecutive batches in memory."""
        tally = Tally()
        for batch in batches:
            tally = tally.merge(self.of_batch(batch, first=tally.rows, stride=tally.sample.stride))
        return tally

    def _wanted_first(self, steps: Tensor, beyond: int | None) -> dict[int, Tensor]:
        """Return the batch's steps that may serve as the null, with their rows, (B,) bool; keys as in `Tally.first`."""
        if self.null_steps is not None:
            lowest, highest = self.null_steps
            rows = (steps >= lowest) & (steps <= highest)
            return {lowest: rows} if bool(rows.any()) else {}
        lowest_steps = steps.unique().tolist()[:FIRST_STEPS]
        return {step: steps == step for step in lowest_steps if beyond is None or step <= beyond}

    def _parts(
        self,
        batch: RolloutBatch,
        train: Tensor,
        rollout: Tensor,
        mask: Tensor,
        ratios: TokenRatios | None,
    ) -> Iterator[tuple[int | None, Part]]:
        """Yield the sums of each step; without `ratios` the tokens are denoising steps."""
        rewards = batch.values("reward") if batch.has("reward") else rollout.new_full((len(batch),), torch.nan)
        of_steps: list[tuple[int | None, Tensor]] = [(None, torch.ones(len(batch), dtype=torch.bool, device="cpu"))]
        if batch.has("step"):
            steps = batch.values("step")
            of_steps = [(step, steps == step) for step in steps.unique().tolist()]
        for step, rows in of_steps:
            if ratios is None:
                of_shapes = denoising_statistics(
                    batch, rows, train, rollout, self.config, self.timesteps, with_exact_kl=self.with_exact_kl
                )
                statistics = merge_statistics(of_shapes)
                yield step, Part(statistics, 0, 0, 0, *_rewards(rewards[rows]), ids=TokenSums.empty(STEP_IDS))
                continue

            # Repack the rows of a step, which may be scattered; usually a batch contains one step and needs no copy.
            own, of_step = (train, rollout, mask), ratios
            if not bool(rows.all()):
                tokens = rows.repeat_interleave(batch.lengths)
                own = (train[tokens], rollout[tokens], mask[tokens])
                of_step = ratios.of_rows(rows.numpy())
            yield step, part_of(of_step, *own, rewards[rows], self.config)


def _rewards(rewards: Tensor) -> tuple[int, float]:
    """Return the number of sequences with a reward, and the sum of rewards."""
    return int((~rewards.isnan()).sum()), float(rewards.nansum())


def part_of(
    ratios: TokenRatios,
    train: Tensor,
    rollout: Tensor,
    mask: Tensor,
    rewards: Tensor,
    config: RolloutCorrectionConfig,
) -> Part:
    """Compute the sums of some rows under a configuration; `ratios` contains the ratios of their packed log-probs.

    Raises:
        ValueError: the configuration computes no statistics.
    """
    lengths = torch.from_numpy(ratios.lengths)
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    statistics = correct(train, rollout, mask, config, cu_seqlens=cu_seqlens, densities=True).statistics
    if statistics is None:
        raise ValueError("a configuration that corrects nothing has nothing to measure; use the preset 'disabled'")
    zero = ((rollout == 0) | (train == 0)) & mask
    zeros = int(zero.sum())
    contradicted = int(((rollout + train)[zero] < CONTRADICTION).sum()) if zeros else 0
    positive = int((((rollout > 0) | (train > 0)) & mask).sum())
    ids = TokenSums.of_ratios(ratios, limit=STEP_IDS)
    return Part(statistics, zeros, contradicted, positive, *_rewards(rewards), ids=ids)


def without_sentinels(log_prob: Tensor) -> Tensor:
    """Replace −9999 with NaN in place, and return the log-probs."""
    sentinels = log_prob == JSON_MINUS_INFINITY
    return log_prob.masked_fill_(sentinels, torch.nan) if bool(sentinels.any()) else log_prob


def _sum_k3_by_turn(batch: RolloutBatch, ratios: TokenRatios) -> StepCells:
    """Compute k3 by step and turn; without steps, the step is 0."""
    step = batch.values("step").numpy() if batch.has("step") else np.zeros(len(batch), dtype=np.int64)
    begin = np.flatnonzero(turn_begins(ratios.mask, ratios.lengths))
    row = np.searchsorted(ratios.lengths.cumsum(), begin, side="right")
    turn = np.minimum(np.arange(1, len(begin) + 1) - np.searchsorted(row, row), MOST_TURNS)
    k3, tokens = (np.add.reduceat(x, begin, dtype=np.float64) for x in (ratios.k3, ratios.valid))
    return StepCells.of(step[row], turn, k3, tokens)


def _versions(spans: tuple[Counts, Counts, Counts] | None, ratios: TokenRatios) -> VersionCells:
    """Compute k3 by step and version; empty without spans."""
    if spans is None:
        return VersionCells()
    step, version, length = spans
    return VersionCells.of(step, version, slice_sums(ratios.k3, length), slice_sums(ratios.valid, length))


def version_spans(batch: RolloutBatch) -> tuple[Counts, Counts, Counts] | None:
    """Return the step, the version of the weights and the number of tokens of each span, (spans,) each.

    Returns None unless every row records both and its spans cover its tokens.
    """
    if not (batch.has("policy_versions") and batch.has("step")):
        return None
    spans, sizes, _ = ragged(batch.records.column("policy_versions"))
    columns = (spans.field(name).to_numpy(zero_copy_only=False) for name in ("version", "length"))
    version, length = (column.astype(np.int64) for column in columns)
    row = np.repeat(np.arange(len(batch)), sizes)
    tiled = (length >= 0).all() and (np.bincount(row, length, len(batch)) == batch.lengths.numpy()).all()
    return (batch.values("step").numpy()[row], version, length) if tiled else None


def _prompts(batch: RolloutBatch) -> Sequence[Tensor] | None:
    """Return the token ids of each prompt, if recorded."""
    if not batch.has("prompt_ids"):
        return None
    ids, lengths, _ = ragged(batch.records.column("prompt_ids"))
    return torch.from_numpy(ids.to_numpy(zero_copy_only=False).astype(np.int64)).split(lengths.tolist())


def _check_recorded_settings(batch: RolloutBatch) -> dict[str, Finding]:
    """Return reason → finding, for recorded settings whose log-probs differ from the sampled distribution."""
    if not batch.has("sampling"):
        return {}
    engines = batch.objects("engine") if batch.has("engine") else [None] * len(batch)
    settings = dict.fromkeys(  # distinct, in row order
        (*((name, value) for name, value in row.items() if value is not None), ("engine", engine))
        for row, engine in zip(batch.objects("sampling"), engines, strict=True)
        if row
    )
    claims = {}
    for row in settings:
        try:
            spec = SamplingSpec(**dict(row))
        except (TypeError, ValueError):  # unknown settings of a different framework
            continue
        with_itself = compare(spec, spec)
        if with_itself.verdict == "different":
            claims[with_itself.reason] = replace(
                fault("recorded_settings").finding,
                metric="log/sampling",
                value=1.0,
                limit="0",
                reason=with_itself.reason,
                fix=with_itself.fix,
            )
    return claims
