"""Select the rows of the rollout log, and collect them until their step ends.

The rule depends only on the step and the row, so that every rank and every repetition keeps the same rows:

    row r of step s is kept   ⇔   s is a multiple of `every`, and u(seed, s, key of r) < share
    u(seed, s, key)           =   the first 8 bytes of BLAKE2b("seed/s/key"), as a fraction of 2^64

The key is the row's `group_id`, so that the responses to one prompt stay together. It defaults to the `sequence_id`, or
without both ids to "rank/number of the row in the step".
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rollcorr.correction.process_groups import gather_slices
from rollcorr.correction.result import packed_tokens
from rollcorr.monitor.run_writer import ROWS, WriteTask
from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter
from rollcorr.rollout_log.schema import TOKEN_COLUMNS, check_columns

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class RolloutSample:
    """The sampling rate of the rollout log; this module's docstring and docs/guides/monitor.md contain the rule.

    Attributes:
        every: a step is logged if its number is a multiple of this, at least 1.
        share: the share of the rows, or of the groups, of a logged step, above 0 and at most 1.
        seed: seed of the selection; a different seed keeps different rows.
    """

    every: int = 1
    share: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {self.share}; rollouts=None writes no log")

    def takes_row(self, step: int, key: object) -> bool:
        """Return whether a row of a logged step is kept.

        Args:
            step: number of the step.
            key: identifier of the row, or of its group if groups are kept together.
        """
        digest = hashlib.blake2b(f"{self.seed}/{step}/{key}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.share * 2**64


# Row numbers in the step, and the rows' mask, offsets and columns.
SampledRows = tuple[list[int], Tensor, Tensor | None, dict[str, object]]

# Mask, offsets if packed, and columns of a micro-batch, on the host.
HostRows = tuple[Tensor, "Tensor | None", Mapping[str, Any]]


class CollectedRollouts:
    """The sampled rows of a step. They stay on their device until the log is written.

    Args:
        sample: the sampling rule.
        rank: data-parallel rank, for the keys of rows without an id.
        writes: whether this rank writes: only the first rank of a context group does.
    """

    def __init__(self, sample: RolloutSample, rank: int, *, writes: bool) -> None:
        self._sample = sample
        self._rank = rank
        self._writes = writes
        self._batches: list[SampledRows] = []
        self.seen = 0

    def sampled(
        self,
        step: int,
        response_mask: Tensor,
        columns: Mapping[str, object],
        *,
        cu_seqlens: Tensor | None,
        position_ids: Tensor | None,
        context_group: ProcessGroup | None,
        most: int | None = None,
    ) -> tuple[int, SampledRows | None]:
        """Return the number of sequences in a micro-batch, and copies of the rows to log, for `keep`; `most` at most.

        Raises:
            ValueError: the number of rows of a column differs, or the log has no such column.
        """
        check_columns(columns)
        sequences = response_mask.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        keys = self._selection_keys(columns, sequences, self.seen) if step % self._sample.every == 0 else ()
        rows = [row for row, key in enumerate(keys) if self._sample.takes_row(step, key)][:most]
        if not rows:
            return sequences, None

        index = torch.tensor(rows, dtype=torch.int64, device=response_mask.device)
        tokens, offsets = (index, None) if cu_seqlens is None else packed_tokens(index, cu_seqlens)
        given = dict(columns) | ({} if position_ids is None else {"position_ids": position_ids})
        kept = {
            name: _select_rows(name, value, rows, tokens, sequences, response_mask)
            for name, value in given.items()
            if value is not None
        }
        mask = _copy_tokens(response_mask, tokens)
        if context_group is not None and context_group.size() > 1:
            mask, offsets, kept = _join_context_slices(mask, offsets, kept, context_group)
        kept.pop("position_ids", None)
        return sequences, ([self.seen + row for row in rows], mask, offsets, kept)

    def keep(self, sequences: int, rows: SampledRows | None) -> None:
        """Add the rows that `sampled` returned."""
        self.seen += sequences
        if self._writes and rows is not None:
            self._batches.append(rows)

    def checked_rewards(self, reward: object | None) -> Tensor | None:
        """Return a copy of a step's rewards on the host, or `None` for a scalar, which is not a column of the log.

        Args:
            reward: one for each sequence of this rank, in the order of the calls; optional. Without it there is no
                reward column.

        Raises:
            ValueError: there are more or fewer rewards than sequences.
        """
        if reward is None or isinstance(reward, (int, float)) or getattr(reward, "ndim", 1) == 0:
            return None
        rewards = torch.as_tensor(reward, device="cpu").detach().cpu().clone()
        if rewards.shape != (self.seen,):
            raise ValueError(
                f"reward is {tuple(rewards.shape)}, and this step had {self.seen} sequences: give one for each, in "
                "the order of the calls of correct"
            )
        return rewards

    def task(self, path: Path, step: int, rewards: Tensor | None) -> WriteTask | None:
        """Copy the rows of the step to the host, and return the task that writes them; `None` without rows.

        Args:
            path: the file; an existing file is replaced.
            step: number of the step.
            rewards: the result of `checked_rewards`.
        """
        if not self._batches:
            return None
        batches, size = self.on_host(step, rewards)
        return WriteTask(ROWS, step, partial(write_rows, path, batches), size)

    def on_host(self, step: int, rewards: Tensor | None = None) -> tuple[list[HostRows], int]:
        """Copy the rows of the step to the host, and return them with their size in bytes."""
        batches: list[HostRows] = []
        size = 0
        for rows, mask, offsets, columns in self._batches:
            reward_column = {} if rewards is None else {"reward": rewards[rows]}
            named = {**reward_column, "step": step, **columns}
            on_host = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in named.items()}
            batches.append((mask.cpu(), None if offsets is None else offsets.cpu(), on_host))
            size += mask.nbytes + sum(value.nbytes for value in on_host.values() if isinstance(value, Tensor))
        return batches, size

    def _selection_keys(self, columns: Mapping[str, object], sequences: int, first: int) -> Sequence[object]:
        for name in ("group_id", "sequence_id"):
            ids = columns.get(name)
            if ids is not None:
                listed = ids.tolist() if isinstance(ids, (Tensor, np.ndarray)) else list(ids)  # type: ignore[call-overload]
                if len(listed) != sequences:
                    raise ValueError(f"{name} has {len(listed)} rows, response_mask has {sequences}")
                return listed
        return [f"{self._rank}/{first + row}" for row in range(sequences)]


def write_rows(path: Path, batches: Sequence[HostRows]) -> None:
    """Write a rollout log.

    Args:
        path: the file.
        batches: mask, offsets if packed, and columns of each micro-batch, on the host.

    Raises:
        OSError: the disk is full or not writable; the partial file is removed.
    """
    with RolloutLogWriter(path, overwrite=True) as log:
        for rows in batches:
            log.write(rollout_batch(rows))


def rollout_batch(rows: HostRows) -> RolloutBatch:
    """Return rows on the host as a batch of a rollout log."""
    mask, offsets, columns = rows
    if offsets is None:
        return RolloutBatch.from_padded(mask, **columns)
    return RolloutBatch.from_packed(mask, cu_seqlens=offsets, **columns)


def _select_rows(
    name: str, value: object, rows: list[int], tokens: slice | Tensor, sequences: int, mask: Tensor
) -> object:
    """Return the kept rows of a column; a value for all rows is returned unchanged."""
    if name in TOKEN_COLUMNS or name == "position_ids":
        tensor = torch.as_tensor(value, device=mask.device)
        if tensor.shape == mask.shape:
            return _copy_tokens(tensor, tokens)
        if name == "advantages" and mask.dim() == 2 and tensor.shape in {(sequences,), (sequences, 1)}:
            # TRL has one advantage for each sequence.
            return _copy_tokens(tensor.reshape(-1, 1).expand(mask.shape), tokens)
        raise ValueError(f"{name} {tuple(tensor.shape)} and response_mask {tuple(mask.shape)} differ")
    if isinstance(value, (Tensor, np.ndarray, list, tuple)):
        if len(value) != sequences:
            raise ValueError(f"{name} has {len(value)} rows, response_mask has {sequences}")
        if isinstance(value, Tensor):
            return value.detach()[torch.tensor(rows, dtype=torch.int64, device=value.device)]
        return [value[row] for row in rows]
    return value


def _copy_tokens(tensor: Tensor, tokens: slice | Tensor) -> Tensor:
    part = tensor.detach()[tokens]
    return part.clone() if isinstance(tokens, slice) else part


def _join_context_slices(
    mask: Tensor, offsets: Tensor | None, columns: dict[str, object], group: ProcessGroup
) -> tuple[Tensor, Tensor | None, dict[str, object]]:
    """Join the slices of a context group, in the order of `position_ids`, or of the ranks. Synchronizes."""
    names = [name for name in columns if name in TOKEN_COLUMNS or name == "position_ids"]
    tensors = [columns[name] for name in names]
    assert all(isinstance(tensor, Tensor) for tensor in tensors)
    whole = gather_slices(mask, *tensors, cu_seqlens=offsets, group=group)  # type: ignore[arg-type]
    joined = dict(zip(["response_mask", *names], whole.tensors, strict=True))

    if "position_ids" in joined:
        # Sort by sequence, then by position, because slices may be zig-zag.
        sequence = torch.bucketize(
            torch.arange(len(joined["response_mask"]), device=mask.device), whole.cu_seqlens[1:], right=True
        )
        by_position = joined["position_ids"].argsort(stable=True)
        order = by_position[sequence[by_position].argsort(stable=True)]
        joined = {name: tensor[order] for name, tensor in joined.items()}

    # Padded rows all have the same number of tokens, and their padding is last again: restore their shape.
    if offsets is None:
        joined = {name: tensor.reshape(len(mask), -1) for name, tensor in joined.items()}
    whole_mask = joined.pop("response_mask")
    return whole_mask, None if offsets is None else whole.cu_seqlens, {**columns, **joined}
