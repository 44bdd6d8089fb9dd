"""Result of `correct`: weights, a loss mask and statistics, with the context that a loss needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from rollcorr.config import Normalizer, RolloutCorrectionConfig
from rollcorr.core import metric_registry as registry
from rollcorr.core.aggregation import Denominators
from rollcorr.core.boundary import check_integers
from rollcorr.core.detail_rows import Worst, worst_of
from rollcorr.core.mergeable_statistics import Statistics
from rollcorr.core.weights import normalization_factor
from rollcorr.correction.correction_checks import Fingerprint
from rollcorr.correction.denominators import loss_denominators
from rollcorr.correction.overview import html_text, short_text, summary_text
from rollcorr.correction.process_groups import members

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False, repr=False)
class Correction:
    """Weights and loss mask of a batch of rollouts, with statistics of the mismatch between the two policies.

    It contains its context: the configuration, the mask, the groups, and the denominators of the loss. So do its parts:
    `correction[rows]` and `correction.split(n)` are micro-batches of one optimizer step, and
    `correction.mini_batch(rows)` is a separate optimizer step.

    Attributes:
        weights: importance weights, float32, in the inputs' shape, without gradient; 0 outside the response mask, or
            the `fill` of `correct`. `None` without importance sampling.
        loss_mask: the tokens that stay in the loss, bool, in the inputs' shape.
        sequence_kept: (B,) bool: the sequence still has a token in the loss, or never had one. For group baselines.
        statistics: mergeable rows on the device, over all ranks of the groups. A part has the statistics of the full
            batch, so do not merge the statistics of parts. `None` without a correction.
        config: the configuration; `None` without a correction.
        response_mask: the `response_mask` argument of `correct`, by which a loss detects a correction of other tokens;
            optional.
        cu_seqlens: (B + 1,) token offsets; `None` when padded.
        group: the data-parallel ranks of the statistics; `None` or "local" for this process.
        context_group: the ranks with other tokens of the same sequences; `None` if sequences are not split.
        ranks: sizes of the two groups. The groups themselves are dropped when a correction is pickled.
        batch_shape: the shape of the full batch, of which this may be a part; optional.
        counts: the denominators of the optimizer step's loss. `None` after `dataclasses.replace`.
        fingerprint: sums of both policies, by which a loss detects different rows. `None` if `counts` is `None`.
    """

    weights: Tensor | None
    loss_mask: Tensor
    sequence_kept: Tensor
    statistics: Statistics | None
    config: RolloutCorrectionConfig | None
    response_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    group: ProcessGroup | Literal["local"] | None = None
    context_group: ProcessGroup | None = None
    ranks: tuple[int, int] = (1, 1)
    batch_shape: tuple[int, ...] | None = None

    # `dataclasses.replace` drops these. So a correction changed by hand lacks its context, and a loss detects that.
    counts: StepCounts | None = field(default=None, init=False)
    fingerprint: Fingerprint | None = field(default=None, init=False)

    @property
    def loss_weights(self) -> Tensor | None:
        """Return the weights of the loss, or `None` if they are only measured (see `weights_reach_loss`)."""
        return self.weights if self.config is not None and self.config.weights_reach_loss else None

    def metrics(self, *, prefix: str = registry.PREFIX) -> dict[str, float]:
        """Return every metric of the registry that the configuration collects, in one device-to-host transfer.

        An empty batch reports 0 for its counts, and 0 for every metric that cannot be measured.
        """
        return {} if self.statistics is None else registry.finalize(self.statistics.read(), prefix=prefix)

    def worst(self) -> Worst:
        """Return the tokens and sequences with the largest |log ratio|, in one device-to-host transfer.

        Raises:
            ValueError: `correct` was called without `detail`.
        """
        tops = {} if self.statistics is None else self.statistics.read().tops
        if not tops:
            raise ValueError("no worst tokens were collected; ask for them: correct(..., detail=True)")
        return worst_of(tops)

    def denominators(self, normalizer: Normalizer | None = None) -> Denominators:
        """Return the denominators of the loss, over all ranks of the groups: of the full batch, or of its mini-batch.

        They equal `rollcorr.correction.loss_denominators`, but are read from the statistics. A part of a correction
        has the denominators of its optimizer step.

        Args:
            normalizer: "kept" counts the tokens in the loss, "original" the tokens in the response mask, and "weights"
                sums the applied weights of the kept tokens. Without weights in the loss, each counts as 1. Defaults to
                the configuration's normalizer.

        Raises:
            ValueError: a correction without statistics was changed by hand, so it has no counts.
        """
        normalizer = normalizer or ("kept" if self.config is None else self.config.normalizer)
        own: Denominators | None = self.counts and getattr(self.counts, normalizer)
        if own is not None:
            return own
        if self.statistics is None:
            raise ValueError("this correction has no statistics to count from: use loss_denominators")

        row = self.statistics.sum
        if normalizer == "original":
            return Denominators(row("tokens"), row("sequences"))
        if normalizer == "kept" or self.loss_weights is None:
            return Denominators(row("tokens_kept"), row("sequences_kept"))

        # The statistics contain weights before batch normalization, and the loss applies normalized weights.
        normalized = self.config is not None and self.config.rollout_is_batch_normalize
        factor = mean_weight(self.statistics) if normalized else 1.0
        return Denominators(row("kept_weight") / factor, row("kept_sequence_weight") / factor)

    @property
    def sequences(self) -> int:
        """Return B. There is no `len`, because a correction of a rank without sequences would be falsy."""
        return self.sequence_kept.shape[0]

    def __getitem__(self, rows: slice | Tensor | Sequence[int]) -> Correction:
        """Return the part with some of the sequences: a micro-batch of the same optimizer step.

        A padded correction does not synchronize, unless `rows` is a bool tensor on a device. A packed one reads
        `cu_seqlens`, which synchronizes if they are on a device.

        Args:
            rows: a slice; indices of the sequences, as a 1-D integer tensor or a list; or a (B,) bool tensor.

        Raises:
            TypeError: `rows` has a different type, for instance a single integer, or also indexes columns.
            ValueError: an index tensor is not 1-D, or a bool one is not (B,).
        """
        index = _sequence_index(rows, self.sequences, self.loss_mask.device)
        cu_seqlens, tokens = self.cu_seqlens, index
        if cu_seqlens is not None:
            tokens, cu_seqlens = packed_tokens(index, cu_seqlens)
        part = dataclasses.replace(
            self,
            weights=None if self.weights is None else self.weights[tokens],
            loss_mask=self.loss_mask[tokens],
            sequence_kept=self.sequence_kept[index],
            response_mask=None if self.response_mask is None else self.response_mask[tokens],
            cu_seqlens=cu_seqlens,
        )
        return with_context(
            part, self.counts, self.fingerprint and self.fingerprint._replace(sums=self.fingerprint.sums[:, index])
        )

    def split(self, sequences: int) -> tuple[Correction, ...]:
        """Return micro-batches of `sequences` rows each, the last one possibly smaller, as `tensor.split` does.

        Raises:
            ValueError: `sequences` is below 1.
        """
        if sequences < 1:
            raise ValueError(f"split takes the number of sequences in a part, at least 1; got {sequences}")
        return tuple(self[start : start + sequences] for start in range(0, max(self.sequences, 1), sequences))

    def mini_batch(self, rows: slice | Tensor | Sequence[int]) -> Correction:
        """Return the part with some of the sequences as a separate optimizer step, with its own denominators.

        For PPO with several optimizer steps on one batch: `correction.mini_batch(rows).split(n)` are the micro-batches
        of one step. With groups this is a collective, so every rank must call it, also without rows.

        Args:
            rows: as in `correction[rows]`: a slice, or indices of sequences, (R,).

        Raises:
            TypeError, ValueError: as in `correction[rows]`; or the response mask or the groups are missing.
        """
        part = self[rows]
        if part.response_mask is None:
            raise ValueError(
                "a mini-batch counts the response mask, and this correction has none: correct the batch again"
            )
        lost = part.group is None and part.ranks[0] > 1, part.context_group is None and part.ranks[1] > 1
        if any(lost):
            raise ValueError(
                f"this correction is of {part.ranks[0]} x {part.ranks[1]} ranks, and their groups did not travel with "
                "it: call mini_batch where correct was called"
            )
        count = partial(
            loss_denominators,
            loss_mask=part.loss_mask,
            response_mask=part.response_mask,
            weights=part.loss_weights,
            cu_seqlens=part.cu_seqlens,
            group=members(part.group),
            context_group=part.context_group,
        )
        counts = StepCounts(kept=count("kept"), original=count("original"), weights=count("weights"))
        return with_context(part, counts, part.fingerprint)

    def to(self, device: torch.device | str) -> Correction:
        """Return the correction on a device, with its groups, configuration and denominators."""
        if self.loss_mask.device == torch.device(device):
            return self

        # One transfer moves all statistics.
        statistics = self.statistics
        if statistics is not None:
            statistics = statistics.unpack(statistics.pack().to(device))
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        copy = dataclasses.replace(self, **moved, statistics=statistics)
        counts = self.counts and StepCounts(*(own and _move_denominators(own, device) for own in self.counts))
        fingerprint = self.fingerprint and self.fingerprint._replace(sums=self.fingerprint.sums.to(device))
        return with_context(copy, counts, fingerprint)

    def summary(self) -> str:
        """Return the key metrics, each with its healthy range, and a verdict, in one device-to-host transfer.

        The verdict is "within limits", "unhealthy" (one is beyond its limit) or "not judged" (no metric was measured).
        It covers one batch; `rollcorr.health` also judges a run, and suggests fixes.
        """
        return summary_text(self)

    def __repr__(self) -> str:
        """Return two lines: a description and the key metrics, which are omitted on a device to avoid a sync."""
        return short_text(self)

    def _repr_html_(self) -> str:
        """Return the same for a notebook, with the verdict in color."""
        return html_text(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the process groups, which belong to this process."""
        return self.__dict__ | {"group": None, "context_group": None}


class StepCounts(NamedTuple):
    """Denominators of an optimizer step; `None` where its statistics contain them."""

    kept: Denominators | None = None
    original: Denominators | None = None
    weights: Denominators | None = None


def _move_denominators(own: Denominators, device: torch.device | str) -> Denominators:
    return Denominators(*(torch.as_tensor(amount, device=device) for amount in (own.tokens, own.sequences)))


def with_context(correction: Correction, counts: StepCounts | None, fingerprint: Fingerprint | None) -> Correction:
    """Return the correction with its step's denominators and its policies' fingerprint set."""
    object.__setattr__(correction, "counts", counts)
    object.__setattr__(correction, "fingerprint", fingerprint)
    return correction


def mean_weight(statistics: Statistics) -> Tensor:
    """Compute the mean of the weights, the divisor of batch normalization."""
    return normalization_factor(statistics.sum("norm_weight"), statistics.sum("norm_units"))


def _sequence_index(rows: object, sequences: int, device: torch.device) -> slice | Tensor:
    """Return an index of sequences: a slice, or a 1-D tensor on the device."""
    if isinstance(rows, slice):
        return rows
    if isinstance(rows, list | tuple | range) and all(type(row) is int for row in rows):
        return torch.tensor(list(rows), dtype=torch.int64, device=device)
    if not isinstance(rows, Tensor):
        raise TypeError(f"index a correction's sequences with a slice, a list of integers or a tensor; got {rows!r}")
    if rows.dim() != 1 or (rows.dtype == torch.bool and rows.shape[0] != sequences):
        raise ValueError(
            f"rows {tuple(rows.shape)} must be 1-D, and ({sequences},) if bool: one entry for each sequence"
        )
    if rows.dtype == torch.bool:
        return rows.to(device)

    # torch would interpret a uint8 index as a mask.
    check_integers(rows=rows)
    return rows.to(device, torch.int64)


def packed_tokens(index: slice | Tensor, cu_seqlens: Tensor) -> tuple[slice | Tensor, Tensor]:
    """Return the token index of some packed sequences, and their new offsets. Waits on a device.

    Args:
        index: a slice, or a 1-D integer or bool tensor.
        cu_seqlens: (B + 1,) token offsets.
    """
    starts, lengths = cu_seqlens[:-1].long()[index], cu_seqlens.long().diff()[index]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])

    # Contiguous sequences are a view; any other selection is gathered.
    if isinstance(index, slice) and index.step in (None, 1):
        first = int(starts[0]) if len(starts) else 0
        return slice(first, first + int(offsets[-1])), offsets
    tokens = torch.arange(int(offsets[-1]), device=offsets.device)
    return tokens + (starts - offsets[:-1]).repeat_interleave(lengths), offsets
