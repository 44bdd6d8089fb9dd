"""What a stretch of a rollout log shows, as sums that merge: the work of `rollcorr check`, a batch at a time.

Everything in a `Tally` merges exactly, so shards may be read by any process in any order. Merged in the order of the
log, they give the same numbers to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.finding import Finding, merge_findings
from rollcorr.config.sampling_spec import JSON_MINUS_INFINITY, SamplingSpec, compare
from rollcorr.core.mergeable_statistics import Statistics, merge_statistics
from rollcorr.correction.result import Correction
from rollcorr.correction.rollout_correction import correct
from rollcorr.diagnostics.provenance.pair_sample import PairSample
from rollcorr.rollout_log import RolloutBatch, Shard, read_shard, validate_batch

CONTRADICTION = -1.0
"""Where one side is exactly 0.0 (probability 1) and the other below this, in nats, one of them was not computed."""
COLUMNS = ("step", "response_mask", "rollout_log_prob", "old_log_prob", "log_prob", "reward", "sampling", "engine")
"""The columns of the log that are read."""
KEPT_COLUMNS = ("response_ids", "kept_ids", "kept_offsets")
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
    """

    statistics: Statistics
    zeros: int
    contradicted: int
    rewards: int
    reward: float


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
    """

    parts: Mapping[int | None, Part] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    sample: PairSample = field(default_factory=PairSample)
    claims: Mapping[str, Finding] = field(default_factory=dict)
    rows: int = 0
    interrupted: bool = False

    def merge(self, later: Tally) -> Tally:
        """What both show together; `later` comes after in the log."""
        parts = dict(self.parts)
        for step, part in later.parts.items():
            parts[step] = merge_parts([parts[step], part]) if step in parts else part
        return Tally(
            parts=parts,
            findings=merge_findings((*self.findings, *later.findings)),
            sample=self.sample.merge(later.sample),
            claims={**self.claims, **later.claims},
            rows=self.rows + later.rows,
            interrupted=self.interrupted or later.interrupted,
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
    )


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """How a shard is measured: the same for all of them, wherever they are read.

    Attributes:
        config: what is measured.
        train_column: where π is.
        batch_size: most rows in memory at once.
        kept: whether the log has kept sets, to be checked.
    """

    config: RolloutCorrectionConfig
    train_column: str
    batch_size: int
    kept: bool = False

    def of_shard(self, shard: Shard, on_rows: Callable[[int], None]) -> Tally:
        """The tally of a shard, or of its beginning after a KeyboardInterrupt, also one that `on_rows` raises.

        `on_rows` is called before the first batch with 0, then after each one with its rows.

        Raises:
            RolloutLogError: the shard cannot be read.
        """
        tally = Tally()
        try:
            on_rows(0)
            columns = COLUMNS + KEPT_COLUMNS if self.kept else COLUMNS
            for batch in read_shard(shard, columns=columns, batch_size=self.batch_size):
                first = shard.before + batch.first_row - shard.first_row
                tally = tally.merge(self.of_batch(batch, first=first, stride=tally.sample.stride))
                on_rows(len(batch))
        except KeyboardInterrupt:
            tally = replace(tally, interrupted=True)
        return tally

    def of_batch(self, batch: RolloutBatch, *, first: int, stride: int = 1) -> Tally:
        """The tally of a batch, whose first row is row `first` of the log; `stride` is that of the sample so far."""
        rollout, train = batch.packed("rollout_log_prob"), batch.packed(self.train_column)
        mask = batch.packed("response_mask")
        sample = PairSample.of(
            train,
            rollout,
            mask,
            batch.lengths,
            first=first,
            stride=stride,
            response_ids=_ids(batch),
            steps=batch.values("step") if batch.has("step") else None,
        )

        # An engine's −9999 stands for minus infinity: it is missing, as NaN is. The sample keeps it, as a placeholder.
        rollout, train = (x.masked_fill_(x == JSON_MINUS_INFINITY, torch.nan) for x in (rollout, train))
        return Tally(
            parts=dict(self._parts(batch, train, rollout, mask)),
            findings=merge_findings(validate_batch(batch)),
            sample=sample,
            claims=_claims(batch),
            rows=len(batch),
        )

    def _parts(
        self, batch: RolloutBatch, train: Tensor, rollout: Tensor, mask: Tensor
    ) -> Iterator[tuple[int | None, Part]]:
        rewards = batch.values("reward") if batch.has("reward") else rollout.new_full((len(batch),), torch.nan)
        for step, rows in _by_step(batch):
            # The rows of a step need not lie together, so they are packed anew.
            tokens, lengths = rows.repeat_interleave(batch.lengths), batch.lengths[rows]
            cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            correction = correct(train[tokens], rollout[tokens], mask[tokens], self.config, cu_seqlens=cu_seqlens)

            valid = tokens & mask
            yield step, _part(correction, train[valid], rollout[valid], rewards[rows])


def _part(correction: Correction, train: Tensor, rollout: Tensor, rewards: Tensor) -> Part:
    """What one stretch of rows shows; `train` and `rollout` hold the valid tokens only."""
    if correction.statistics is None:
        raise ValueError("a configuration that corrects nothing has nothing to measure; use the preset 'disabled'")
    contradicted = ((rollout == 0) & (train < CONTRADICTION)) | ((train == 0) & (rollout < CONTRADICTION))
    return Part(
        correction.statistics,
        zeros=int(((rollout == 0) | (train == 0)).sum()),
        contradicted=int(contradicted.sum()),
        rewards=int((~rewards.isnan()).sum()),
        reward=float(rewards.nansum()),
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
