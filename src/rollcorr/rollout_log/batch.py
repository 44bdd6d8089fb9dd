"""`RolloutBatch`: some rows of a rollout log as columns, and as padded or packed tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollcorr.core.sampling import KeptSets
from rollcorr.rollout_log import build
from rollcorr.rollout_log.arrow import pa, pc
from rollcorr.rollout_log.errors import RolloutLogError, log_error
from rollcorr.rollout_log.schema import COLUMNS, TOKEN_COLUMNS, arrow_type, check_columns, conform, ragged

LENGTH_FIX = "give every token column one value per response token, masked ones included"


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """Rows of a rollout log as columns, constructed by `from_padded`, `from_packed`, `from_rows`, or a reader.

    Attributes:
        records: the recorded columns, with the types of the schema.
        file: path that the rows were read from, for error messages; optional.
        first_row: position of the first row in that file, from 0; defaults to 0.
    """

    records: pa.RecordBatch
    file: str | None = None
    first_row: int = 0

    @classmethod
    def from_padded(
        cls,
        response_mask: Tensor,
        *,
        lengths: Tensor | None = None,
        prompt_mask: Tensor | None = None,
        kept: KeptSets | None = None,
        **columns: object,
    ) -> RolloutBatch:
        """Build a batch from a trainer's padded tensors: remove right padding, keep gaps in the mask.

        Args:
            response_mask: (B, T), non-zero on tokens that the policy sampled.
            lengths: (B,) tokens of each response, masked ones included. By default, each response ends at its last
                sampled token. Give it if a response ends in masked tokens (a tool's output, a fully masked row).
            prompt_mask: (B, P), non-zero on the tokens of `prompt_ids` that are not padding.
            kept: the keep-sampling-mask of the sampled tokens, row after row; the source of `kept_ids` and
                `kept_offsets`.
            **columns: any column of the schema; a column that is None is omitted. Token columns: (B, T). One value per
                sequence: (B,), or one value for all rows. `prompt_ids`: (B, P) with `prompt_mask`, or B sequences of
                ids. `kept_ids`, `kept_offsets`: B sequences. `policy_versions`: one version, one per sequence, (B, T),
                or B lists of (start, length, version). `sampling`: a `SamplingSpec` or mapping, or B of them; the
                engine, engine_version and policy_version of a spec fill those columns unless they are given.

        Raises:
            ValueError: an unknown column, shapes that differ, or `lengths` that cut off a sampled token.

        Example:
            >>> mask = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0]])
            >>> batch = RolloutBatch.from_padded(mask, rollout_log_prob=torch.full((2, 4), -0.5), step=3)
            >>> batch.lengths
            tensor([3, 2])
        """
        inside, sizes = build.inside_padding(response_mask, lengths)
        # After the padding is removed, a padded batch is packed.
        return cls(build.records(response_mask, columns, sizes, inside=inside, kept=kept, prompt_mask=prompt_mask))

    @classmethod
    def from_packed(
        cls,
        response_mask: Tensor,
        *,
        cu_seqlens: Tensor,
        prompt_mask: Tensor | None = None,
        kept: KeptSets | None = None,
        **columns: object,
    ) -> RolloutBatch:
        """Build a batch from packed tensors.

        Args:
            response_mask: non-zero on sampled tokens, (N,).
            cu_seqlens: (B + 1,) token offsets.
            prompt_mask: as in `from_padded`.
            kept: the kept sets of the sampled tokens, as in `from_padded`.
            **columns: columns of the schema: (N,) for token columns, otherwise one value per sequence.

        Raises:
            ValueError: an unknown column, or shapes that differ.
        """
        sizes = build.packed_sizes(response_mask, cu_seqlens)
        return cls(build.records(response_mask, columns, sizes, kept=kept, prompt_mask=prompt_mask))

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Any]]) -> RolloutBatch:
        """Build a batch from one mapping per row, with plain lists as in the JSONL form.

        Raises:
            ValueError: an unknown column.
            RolloutLogError: a value does not fit its column; the error contains the row and the column.
        """
        check_columns(name for row in rows for name in row)
        return cls(build.records_of_rows(rows))

    @classmethod
    def from_arrow(cls, table: pa.Table | pa.RecordBatch) -> RolloutBatch:
        """Build a batch from an Arrow table: cast known columns to the schema, drop unknown columns.

        Raises:
            RolloutLogError: a column that cannot be cast.
        """
        if isinstance(table, pa.Table):
            table = pa.RecordBatch.from_arrays(
                [pa.concat_arrays(c.chunks) if c.num_chunks else pa.nulls(0, c.type) for c in table.columns],
                names=table.schema.names,
            )
        return cls(conform(table))

    def __len__(self) -> int:
        return self.records.num_rows

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the batch's columns, in schema order; a column may be null in every row."""
        return tuple(self.records.schema.names)

    def has(self, column: str) -> bool:
        """Return whether any row records the column.

        Raises:
            ValueError: the schema has no such column.
        """
        check_columns([column])
        return column in self.columns and self.records.column(column).null_count < len(self)

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each response, masked ones included: (B,) int64, from the first token column a row records.

        Raises:
            RolloutLogError: the batch has no token column.
        """
        sizes = [pc.list_value_length(self.records.column(name)) for name in TOKEN_COLUMNS if name in self.columns]
        if not sizes:
            raise self._error("missing", f"no token column, only {', '.join(self.columns)}", "read one of them too")
        return torch.from_numpy(pc.coalesce(*sizes, 0).to_numpy(zero_copy_only=False).astype(np.int64))

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """First token of each response in the packed layout, then N: (B + 1,) int64."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    def response_mask(self) -> Tensor:
        """True on tokens that the policy sampled: (B, T) bool, False at padding. Packed: `packed("response_mask")`."""
        return self.padded("response_mask")

    def packed(self, column: str) -> Tensor:
        """Return a token column in the packed layout of `cu_seqlens`.

        Every row must record `response_ids`.

        Returns:
            (N,). Rows that do not record the column contain NaN, or True in `response_mask`.

        Raises:
            ValueError: the column is no token column.
            RolloutLogError: no row records it, or its length in a row differs from the response.
        """
        if COLUMNS.get(column) is None or COLUMNS[column].per != "token":
            raise ValueError(f"{column!r} is not one of the token columns {', '.join(TOKEN_COLUMNS)}; see ragged()")
        lengths = self.lengths.numpy()
        if column == "response_mask" and not self.has(column):
            return torch.ones(int(lengths.sum()), dtype=torch.bool, device="cpu")

        # No id can represent a missing token, so every row must record `response_ids`.
        values, _, recorded = self._ragged_column(column)
        self.check_lengths(column, whole=column == "response_ids")
        if not recorded.all():
            whole = np.full(int(lengths.sum()), True if column == "response_mask" else np.nan, dtype=values.dtype)
            whole[np.repeat(recorded, lengths)] = values
            values = whole
        return torch.from_numpy(values)

    def padded(self, column: str, *, length: int | None = None, fill: float = 0) -> Tensor:
        """Return a token column, or `prompt_ids`, in the padded layout.

        Args:
            column: a token column, or `prompt_ids`.
            length: T; defaults to the length of the longest row in the batch.
            fill: the value at padding; defaults to 0.

        Returns:
            (B, T), right-padded with `fill`.

        Raises:
            ValueError: `length` is shorter than a row, or the column is neither a token column nor `prompt_ids`.
            RolloutLogError: as `packed`; for `prompt_ids`, as `ragged`.
        """
        # Prompts have their own lengths; every other column has the lengths of the responses.
        packed, lengths = self.ragged(column) if column == "prompt_ids" else (self.packed(column), self.lengths)

        longest = int(lengths.max()) if len(self) else 0
        length = longest if length is None else length
        if length < longest:
            raise ValueError(f"length {length} is shorter than the longest row, {longest} tokens")

        # In row order, the entries that are not padding are the packed values.
        inside = torch.arange(length, device="cpu") < lengths[:, None]
        return packed.new_full(inside.shape, fill).masked_scatter_(inside, packed)

    def ragged(self, column: str) -> tuple[Tensor, Tensor]:
        """Return a list column of numbers in ragged form.

        Returns:
            (values of all rows, (B,) length of each row); a null row has length 0.

        Raises:
            ValueError: the column is not a list of numbers.
            RolloutLogError: no row records it.
        """
        check_columns([column])
        if not COLUMNS[column].type.startswith("list<") or column == "policy_versions":
            raise ValueError(f"{column!r} is {COLUMNS[column].type}, not a list of numbers; see values(), objects()")
        values, sizes, _ = self._ragged_column(column)
        return torch.from_numpy(values), torch.from_numpy(sizes)

    def kept_sets(self) -> KeptSets:
        """Return the keep-sampling-mask of all tokens, in the order of `packed`, for the trainer to replay.

        Raises:
            RolloutLogError: a row does not record one set per token.
        """
        ids, id_counts = self.ragged("kept_ids")
        offsets, sizes = self.ragged("kept_offsets")
        wrong = sizes != self.lengths + 1
        if wrong.any():
            row = int(wrong.int().argmax())
            raise self._error(
                "kept_length",
                f"{int(sizes[row])} offsets for a response of {int(self.lengths[row])} tokens",
                "give every row one entry more than it has tokens",
                row=row,
                column="kept_offsets",
            )

        # The offsets of each row start at 0. The joined offsets contain a single 0, at the beginning.
        before = torch.repeat_interleave(id_counts.cumsum(0) - id_counts, sizes)
        inner = torch.ones(len(offsets), dtype=torch.bool, device="cpu")
        inner[sizes.cumsum(0) - sizes] = False
        return KeptSets(ids, torch.cat([offsets.new_zeros(1), (offsets + before)[inner]]))

    def check_lengths(self, *columns: str, whole: bool = False) -> None:
        """Check that token columns have one value per token in each row that records them.

        Args:
            *columns: token columns; defaults to all.
            whole: count rows that do not record a column as rows of length 0; defaults to False.

        Raises:
            RolloutLogError: a length differs; the error contains the first such row and column.
        """
        for column in columns or TOKEN_COLUMNS:
            if self.has(column):
                wrong, title = self.wrong_lengths(column, whole=whole)
                if wrong.any():
                    raise self._error("length", title, LENGTH_FIX, row=int(wrong.argmax()), column=column)

    def wrong_lengths(self, column: str, *, whole: bool = False) -> tuple[np.ndarray, str]:
        """Find the rows where the length of a token column differs from the response.

        Args:
            column: a column of the batch.
            whole: count rows that do not record it as rows of length 0; defaults to False.

        Returns:
            (B,) bool, True on these rows, and an error text for the first of them.
        """
        _, sizes, recorded = ragged(self.records.column(column))
        wrong = (recorded | whole) & (sizes != self.lengths.numpy())
        row = int(wrong.argmax())
        return wrong, f"{sizes[row]} values for a response of {int(self.lengths[row])} tokens"

    def values(self, column: str) -> Tensor:
        """Return a column with one number per sequence: `reward`, `step` or `dimensions`.

        Returns:
            (B,). A missing reward is NaN.

        Raises:
            ValueError: the column is a different one.
            RolloutLogError: no row records it, or an integer is missing.
        """
        if column not in ("reward", "step", "dimensions"):
            raise ValueError(f"{column!r} is not one number per sequence (reward, step, dimensions); see objects()")
        array = self._require_column(column)
        if column != "reward" and array.null_count:
            row = int(array.is_null().to_numpy(zero_copy_only=False).argmax())
            raise self._error("missing", "not recorded", "use objects() to read None", row=row, column=column)
        return torch.from_numpy(
            np.array(array.to_numpy(zero_copy_only=False), dtype=np.float32 if column == "reward" else np.int64)
        )

    def objects(self, column: str) -> list[Any]:
        """Return a column (text, sampling settings, version spans) as Python objects, `None` if not recorded."""
        return self._require_column(column).to_pylist()

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one dictionary per row, as in the JSONL form."""
        return self.records.to_pylist()

    def _require_column(self, column: str) -> pa.Array:
        """Return a column that at least one row records; an empty batch may lack it."""
        if len(self) and not self.has(column):
            found = ", ".join(name for name in self.columns if self.has(name))
            raise self._error("missing", "not recorded", f"recorded are {found or 'no columns'}", column=column)
        return self.records.column(column) if column in self.columns else pa.nulls(0, arrow_type(column))

    def _ragged_column(self, column: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        values, sizes, recorded = ragged(self._require_column(column))
        return np.array(values.to_numpy(zero_copy_only=False)), sizes, recorded

    def _error(
        self, code: str, title: str, fix: str, *, row: int | None = None, column: str | None = None
    ) -> RolloutLogError:
        place = None if row is None else self.first_row + row
        return log_error(code, title, fix=fix, file=self.file, row=place, column=column)
