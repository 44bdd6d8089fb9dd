"""The rows behind an alarm: references to the first rows of a step, and the first cause that they show.

Nothing is copied before an alarm begins. Then at most 256 rows go to the host, and the writer thread analyzes them as
`rollcorr check` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from rollcorr.config.finding import Finding
from rollcorr.monitor.rollout_sample import CollectedRollouts, HostRows, RolloutSample, rollout_batch

if TYPE_CHECKING:
    from rollcorr.diagnostics import MismatchNull

# Largest number of rows of a step to analyze, and of tokens (with padding) of one micro-batch; one row at least.
MOST_ROWS, MOST_TOKENS = 256, 1 << 17


class BatchAtHand:
    """The first rows of the current step. Tensors that were changed in place in the meantime are left out."""

    def __init__(self) -> None:
        self._held: list[tuple[Tensor, Tensor | None, dict[str, object], list[int], int]] = []
        self._room = MOST_ROWS

    def hold(self, mask: Tensor, columns: Mapping[str, object], cu_seqlens: Tensor | None) -> None:
        """Keep references to a micro-batch, without the graph of its gradients.

        Args:
            mask: non-zero on sampled tokens, (B, T), or (N,) when packed.
            columns: columns of the rollout log.
            cu_seqlens: (B + 1,), only when packed.
        """
        rows = mask.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if self._room <= 0 or rows == 0:
            return
        held = {name: value.detach() if isinstance(value, Tensor) else value for name, value in columns.items()}
        most = min(rows, self._room, max(1, MOST_TOKENS * rows // max(mask.numel(), 1)))
        self._held.append((mask, cu_seqlens, held, _change_counts(mask, held), most))
        self._room -= most

    def on_host(self, step: int) -> tuple[list[HostRows], int]:
        """Copy the rows to the host, and return them with their size in bytes."""
        collected = CollectedRollouts(RolloutSample(), 0, writes=True)
        for mask, offsets, columns, versions, most in self._held:
            if _change_counts(mask, columns) == versions:
                part = collected.sampled(
                    step, mask, columns, cu_seqlens=offsets, position_ids=None, context_group=None, most=most
                )
                collected.keep(*part)
        return collected.on_host(step)


def first_cause(rows: Sequence[HostRows], null: MismatchNull | None) -> Finding | None:
    """Return the first cause that `rollcorr check` finds in some rows; None if it names none.

    Args:
        rows: micro-batches on the host.
        null: what to compare with, if it is of the same sampling settings; optional.
    """
    from rollcorr.diagnostics.log_check.check import check_batches  # it needs Arrow
    from rollcorr.diagnostics.null.null_file import NullMismatchError

    batches = [rollout_batch(part) for part in rows]
    try:
        result = check_batches(batches, null=null)
    except NullMismatchError:
        result = check_batches(batches)
    return next(iter(result.causes), None)


def _change_counts(mask: Tensor, columns: Mapping[str, object]) -> list[int]:
    """Return how often each tensor was changed in place. Inference tensors do not count it."""
    tensors = (mask, *(value for value in columns.values() if isinstance(value, Tensor)))
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
