"""What a stretch of a rollout log shows, as sums that merge: the work of `rollcorr check`, a batch at a time.

Everything in a `Tally` merges exactly, so shards may be read by any process in any order. Merged in the order of the
log, they give the same numbers to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.checks import in_one_line
from rollcorr.config.finding import Finding, merge_findings
from rollcorr.config.sampling_spec import JSON_MINUS_INFINITY, SamplingSpec, compare
from rollcorr.core.mergeable_statistics import Statistics, merge_statistics
from rollcorr.correction.result import Correction
from rollcorr.correction.rollout_correction import correct
from rollcorr.diagnostics.log_check.denoising import DENOISING_COLUMNS, denoising_statistics
from rollcorr.diagnostics.null.mismatch_profile import CAP, MismatchProfile
from rollcorr.diagnostics.null.origin import Origin
from rollcorr.diagnostics.null.token_share import STEP_IDS, TokenSums
from rollcorr.diagnostics.null.version_cells import VersionCells
from rollcorr.diagnostics.provenance.pair_sample import PairSample
from rollcorr.rollout_log import RolloutBatch, RolloutLogError, Shard, read_shard, validate_batch
from rollcorr.rollout_log.schema import ragged

FIRST_STEPS = 5
"""Steps at the start of a log that serve as its null when no other is given."""
CONTRADICTION = -1.0
"""Where one side is exactly 0.0 (probability 1) and the other below this, in nats, one of them was not computed."""
COLUMNS = (
    "step",
    "response_mask",
    "rollout_log_prob",
    "old_log_prob",
    "log_prob",
    "prompt_ids",
    "response_ids",
    "policy_versions",
    "reward",
    "sampling",
    "engine",
    "engine_version",
    "model",
)
"""The columns of the log that are read."""
KEPT_COLUMNS = ("kept_ids", "kept_offsets")
"""Those that are read besides where the log has kept sets."""


@dataclass(frozen=True, eq=False)
class Part:
    """What was seen of one step.

    Attributes:
        statistics: the correction's.
        zeros: valid tokens with a log-prob of exactly 0.
        contradicted: those of them that the other side contradicts (`CONTRADICTION`).
        rewards: sequences with a reward.
        reward: their sum.
        ids: d by token id, for few ids; empty where no ids are recorded.
        one_sided: valid tokens with a log-prob of exactly 0 on one side alone.
    """

    statistics: Statistics
    zeros: int
    contradicted: int
    rewards: int
    reward: float
    ids: TokenSums
    one_sided: int = 0


@dataclass(frozen=True, eq=False)
class Tally:
    """What was seen so far.

    Attributes:
        parts: step → what was seen of it, in the order of appearance; None where no step is recorded.
        findings: those of the log's validation, one for each code and column.
        sample: sequences for the estimate of provenance.
        claims: reason → finding, where the recorded settings say that the log-probs are not those of what was sampled.
        rows: rows read.
        interrupted: reading stopped before the end.
        unreadable: what could not be read, a sentence for each shard.
        profile: the mismatch of all rows.
        first: step → the mismatch of its rows, for the lowest `FIRST_STEPS` steps; or, where the measurement names the
            steps of the null, one entry for all of them.
        origin: the engines, models and settings that are recorded.
        versions: the mismatch by step and version of the weights, where both are recorded.
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
    origin: Origin = field(default_factory=Origin)
    versions: VersionCells = field(default_factory=VersionCells)

    def merge(self, later: Tally) -> Tally:
        """What both show together; `later` comes after in the log."""
        parts = dict(self.parts)
        for step, part in later.parts.items():
            parts[step] = merge_parts([parts[step], part]) if step in parts else part
        first = dict(self.first)
        for step, profile in later.first.items():
            first[step] = first[step].merge(profile) if step in first else profile
        return Tally(
            parts=parts,
            findings=merge_findings((*self.findings, *later.findings)),
            sample=self.sample.merge(later.sample),
            claims={**self.claims, **later.claims},
            rows=self.rows + later.rows,
            interrupted=self.interrupted or later.interrupted,
            unreadable=(*self.unreadable, *later.unreadable),
            profile=self.profile.merge(later.profile),
            # A step that is among the lowest of all was among the lowest of every part, so nothing of it is lost.
            first={step: first[step] for step in sorted(first)[:FIRST_STEPS]},
            origin=self.origin.merge(later.origin),
            versions=self.versions.merge(later.versions),
        )


def merge_parts(parts: Iterable[Part]) -> Part:
    """What the parts show together."""
    parts = list(parts)
    return Part(
        merge_statistics(part.statistics for part in parts),
        zeros=sum(part.zeros for part in parts),
        contradicted=sum(part.contradicted for part in parts),
        rewards=sum(part.rewards for part in parts),
        reward=sum(part.reward for part in parts),
        ids=reduce(TokenSums.merge, (part.ids for part in parts)),
        one_sided=sum(part.one_sided for part in parts),
    )


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """How a shard is measured: the same for all of them, wherever they are read.

    Attributes:
        config: what is measured.
        train_column: where π is.
        batch_size: most rows in memory at once.
        kept: whether the log has kept sets, to be checked.
        null_steps: first and last step of those that serve as the null; None for the lowest ones.
        keep_going: a shard that cannot be read to its end counts as far as it was read.
        denoising: whether its tokens are denoising steps.
        timesteps: their timestep values, to break the mismatch down by.
        with_exact_kl: whether the log records what the exact KL needs.
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

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the log that are read."""
        return COLUMNS + KEPT_COLUMNS * self.kept + DENOISING_COLUMNS * self.denoising

    def of_shard(self, shard: Shard, on_rows: Callable[[int], None]) -> Tally:
        """The tally of a shard, or of its beginning after a KeyboardInterrupt, also one that `on_rows` raises.

        `on_rows` is called before the first batch with 0, then after each one with its rows.

        Raises:
            RolloutLogError: the shard cannot be read, and that is not to be passed over.
        """
        tally = Tally()
        try:
            on_rows(0)
            for batch in read_shard(shard, columns=self.columns, batch_size=self.batch_size):
                first = shard.before + batch.first_row - shard.first_row
                tally = tally.merge(self.of_batch(batch, first=first, stride=tally.sample.stride))
                on_rows(len(batch))
        except KeyboardInterrupt:
            tally = replace(tally, interrupted=True)
        except RolloutLogError as error:
            if not self.keep_going:
                raise
            tally = replace(tally, unreadable=(in_one_line(error),))
        return tally

    def of_batch(self, batch: RolloutBatch, *, first: int, stride: int = 1) -> Tally:
        """The tally of a batch, whose first row is row `first` of the log; `stride` is that of the sample so far."""
        rollout, train = batch.packed("rollout_log_prob"), batch.packed(self.train_column)
        mask = batch.packed("response_mask")
        if self.denoising:
            parts = dict(self._parts(batch, train, rollout, mask, None, MismatchProfile()))
            findings = merge_findings(validate_batch(batch))
            return Tally(parts=parts, findings=findings, rows=len(batch), origin=Origin.of(batch))

        ids = _ids(batch)
        sample = PairSample.of(
            train,
            rollout,
            mask,
            batch.lengths,
            first=first,
            stride=stride,
            response_ids=ids,
            steps=batch.values("step") if batch.has("step") else None,
        )

        # An engine's −9999 stands for minus infinity: it is missing, as NaN is. The sample keeps it, as a placeholder.
        rollout, train = (x.masked_fill_(x == JSON_MINUS_INFINITY, torch.nan) for x in (rollout, train))
        profile = _profile(batch, train, rollout, mask, ids, first=first)
        return Tally(
            parts=dict(self._parts(batch, train, rollout, mask, ids, profile)),
            findings=merge_findings(validate_batch(batch)),
            sample=sample,
            claims=_claims(batch),
            rows=len(batch),
            profile=profile,
            first=self._first_steps(batch, profile, train, rollout, mask, ids, first=first),
            origin=Origin.of(batch),
            versions=_versions(batch, train, rollout, mask),
        )

    def _first_steps(
        self,
        batch: RolloutBatch,
        profile: MismatchProfile,
        train: Tensor,
        rollout: Tensor,
        mask: Tensor,
        ids: Tensor | None,
        *,
        first: int,
    ) -> dict[int, MismatchProfile]:
        """The profiles of the steps that may serve as the null; `profile` is that of the whole batch."""
        if not batch.has("step"):
            return {}
        steps = batch.values("step")
        if self.null_steps is None:
            wanted = {step: steps == step for step in steps.unique().tolist()[:FIRST_STEPS]}
        else:
            lowest, highest = self.null_steps
            wanted = {lowest: (steps >= lowest) & (steps <= highest)}

        # Mostly a batch is of one step, and its profile is there already.
        found = {}
        for step, rows in wanted.items():
            if bool(rows.all()):
                found[step] = profile.folded()
            elif bool(rows.any()):
                found[step] = _profile(batch, train, rollout, mask, ids, first=first, rows=rows).folded()
        return found

    def _parts(
        self,
        batch: RolloutBatch,
        train: Tensor,
        rollout: Tensor,
        mask: Tensor,
        ids: Tensor | None,
        profile: MismatchProfile,
    ) -> Iterator[tuple[int | None, Part]]:
        """What was seen of each step; `profile` is that of the whole batch."""
        rewards = batch.values("reward") if batch.has("reward") else rollout.new_full((len(batch),), torch.nan)
        for step, rows in _by_step(batch):
            if self.denoising:
                statistics = merge_statistics(self._denoising(batch, rows, train, rollout))
                yield step, Part(statistics, 0, 0, *_rewards(rewards[rows]), ids=TokenSums.empty(STEP_IDS))
                continue

            # The rows of a step need not lie together, so they are packed anew; mostly a batch is of one step.
            own, lengths, sums = (train, rollout, mask), batch.lengths[rows], profile.ids
            if not bool(rows.all()):
                tokens = rows.repeat_interleave(batch.lengths)
                own = (train[tokens], rollout[tokens], mask[tokens])
                valid = tokens & mask
                sums = _id_sums(train[valid], rollout[valid], None if ids is None else ids[valid])
            cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            correction = correct(*own, self.config, cu_seqlens=cu_seqlens)
            valid = own[2]
            yield step, _part(correction, own[0][valid], own[1][valid], rewards[rows], sums.folded(STEP_IDS))

    def _denoising(self, batch: RolloutBatch, rows: Tensor, train: Tensor, rollout: Tensor) -> Iterator[Statistics]:
        return denoising_statistics(
            batch, rows, train, rollout, self.config, self.timesteps, with_exact_kl=self.with_exact_kl
        )


def _rewards(rewards: Tensor) -> tuple[int, float]:
    """Sequences with a reward, and their sum."""
    return int((~rewards.isnan()).sum()), float(rewards.nansum())


def _part(correction: Correction, train: Tensor, rollout: Tensor, rewards: Tensor, ids: TokenSums) -> Part:
    """What one stretch of rows shows; `train` and `rollout` hold the valid tokens only."""
    if correction.statistics is None:
        raise ValueError("a configuration that corrects nothing has nothing to measure; use the preset 'disabled'")
    contradicted = ((rollout == 0) & (train < CONTRADICTION)) | ((train == 0) & (rollout < CONTRADICTION))
    zeros = int(((rollout == 0) | (train == 0)).sum())
    one_sided = int(((rollout == 0) != (train == 0)).sum())
    return Part(
        correction.statistics,
        zeros,
        int(contradicted.sum()),
        *_rewards(rewards),
        ids=ids,
        one_sided=one_sided,
    )


def _id_sums(train: Tensor, rollout: Tensor, ids: Tensor | None) -> TokenSums:
    """d by token id, of the rows of one step among others."""
    if ids is None:
        return TokenSums.empty(STEP_IDS)
    log_ratio = train.double() - rollout
    known = log_ratio.isfinite()
    return TokenSums.of(ids[known].numpy(), log_ratio[known].numpy(), limit=STEP_IDS)


def _versions(batch: RolloutBatch, train: Tensor, rollout: Tensor, mask: Tensor) -> VersionCells:
    """k3 by step and version of a batch; empty unless every row records both, and its spans tile its tokens."""
    if not (batch.has("policy_versions") and batch.has("step")):
        return VersionCells()
    spans, sizes, _ = ragged(batch.records.column("policy_versions"))
    length, version = (spans.field(name).to_numpy(zero_copy_only=False) for name in ("length", "version"))
    row = np.repeat(np.arange(len(batch)), sizes)
    if (np.bincount(row, length, len(batch)) != batch.lengths.numpy()).any():
        return VersionCells()

    log_ratio = (train.double() - rollout).clamp(-CAP, CAP)
    valid = mask & log_ratio.isfinite()
    log_ratio = log_ratio.masked_fill(~valid, 0.0)
    span = np.repeat(np.arange(len(row)), length)
    k3 = np.bincount(span, (log_ratio.expm1() - log_ratio).numpy(), len(row))
    tokens = np.bincount(span, valid.numpy(), len(row))
    steps = batch.values("step").numpy()[row]
    return VersionCells.of(steps, version.astype(np.int64), k3.astype(np.float64), tokens.astype(np.float64))


def _profile(
    batch: RolloutBatch,
    train: Tensor,
    rollout: Tensor,
    mask: Tensor,
    ids: Tensor | None,
    *,
    first: int,
    rows: Tensor | None = None,
) -> MismatchProfile:
    """The profile of a batch, or of some of its rows; `first` is the position of its first row in the log."""
    lengths = batch.lengths
    if rows is not None:
        tokens = rows.repeat_interleave(lengths)
        train, rollout, mask = train[tokens], rollout[tokens], mask[tokens]
        ids, lengths = None if ids is None else ids[tokens], lengths[rows]
    prompts = ragged(batch.records.column("prompt_ids"))[1] if batch.has("prompt_ids") else None
    if prompts is not None and rows is not None:
        prompts = prompts[rows.numpy()]
    position = np.arange(first, first + len(batch))
    return MismatchProfile.of(
        train.numpy(),
        rollout.numpy(),
        mask.numpy(),
        lengths.numpy(),
        ids=None if ids is None else ids.numpy(),
        prompts=prompts,
        index=position if rows is None else position[rows.numpy()],
    )


def _by_step(batch: RolloutBatch) -> Iterator[tuple[int | None, Tensor]]:
    """Each step of a batch, None when none is recorded, with a mask of its rows."""
    if not batch.has("step"):
        yield None, torch.ones(len(batch), dtype=torch.bool, device="cpu")
        return
    steps = batch.values("step")
    for step in steps.unique().tolist():
        yield step, steps == step


def _ids(batch: RolloutBatch) -> Tensor | None:
    """The response ids, packed, where every row of the batch records them."""
    if not batch.has("response_ids") or batch.records.column("response_ids").null_count:
        return None
    return batch.packed("response_ids")


def _claims(batch: RolloutBatch) -> dict[str, Finding]:
    """Reason → finding, where the recorded settings say that the log-probs are not those of what was sampled."""
    if not batch.has("sampling"):
        return {}
    engines = batch.objects("engine") if batch.has("engine") else [None] * len(batch)
    settings = dict.fromkeys(  # each once, in the order of the rows
        (*((name, value) for name, value in row.items() if value is not None), ("engine", engine))
        for row, engine in zip(batch.objects("sampling"), engines, strict=True)
        if row
    )
    claims = {}
    for row in settings:
        try:
            spec = SamplingSpec(**dict(row))
        except (TypeError, ValueError):  # settings of another framework, outside these limits
            continue
        with_itself = compare(spec, spec)
        if with_itself.verdict == "different":
            claims[with_itself.reason] = Finding(
                code="recorded_settings",
                metric="log/sampling",
                title="these log-probs are not comparable: the recorded settings say so",
                value=1.0,
                limit="0",
                reason=with_itself.reason,
                fix=with_itself.fix,
            )
    return claims
