"""From what a trainer holds (tensors, lists, settings) to the columns of the log."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollcorr.config.checks import in_one_line
from rollcorr.core.boundary import check_cu_seqlens, truth
from rollcorr.core.sampling import KeptSets
from rollcorr.rollout_log.arrow import pa
from rollcorr.rollout_log.errors import log_error
from rollcorr.rollout_log.schema import (
    COLUMNS,
    NO_NUMBER,
    TOKEN_COLUMNS,
    arrow_type,
    check_columns,
    conform_column,
    is_own_type,
    list_array,
    own_columns,
)

IDENTITY = ("engine", "engine_version", "policy_version")


def inside_padding(response_mask: Tensor, lengths: Tensor | None) -> tuple[Tensor, np.ndarray]:
    """Which entries of a padded batch are tokens of the response, (B, T) bool, and the (B,) count of each row.

    Raises:
        ValueError: the mask is not (B, T), or `lengths` is out of range or cuts off a sampled token.
    """
    if response_mask.dim() != 2:
        raise ValueError(f"response_mask must be (B, T), got {tuple(response_mask.shape)}; packed: from_packed()")
    mask = truth(response_mask, "response_mask").cpu()
    position = torch.arange(mask.shape[1], device="cpu")
    ends = (mask * (position + 1)).amax(1) if mask.shape[1] else mask.new_zeros(mask.shape[0], dtype=torch.int64)
    if lengths is None:
        return position < ends[:, None], ends.numpy()

    lengths = torch.as_tensor(lengths, device="cpu").cpu().to(torch.int64)
    if lengths.shape != ends.shape:
        raise ValueError(f"lengths must be ({len(ends)},) for {len(ends)} rows, got {tuple(lengths.shape)}")
    bad = (lengths < ends) | (lengths > mask.shape[1])
    if bad.any():
        row = int(bad.int().argmax())
        limits = f"{int(ends[row])} (last sampled token) to {mask.shape[1]} (T)"
        raise ValueError(f"lengths[{row}] is {int(lengths[row])}, outside {limits}")
    return position < lengths[:, None], lengths.numpy()


def packed_sizes(response_mask: Tensor, cu_seqlens: Tensor) -> np.ndarray:
    """Length of each row of a packed batch: (B,) int64.

    Raises:
        ValueError: the mask is not (N,) or contains labels, or `cu_seqlens` does not run from 0 to N without a fall.
    """
    if response_mask.dim() != 1:
        raise ValueError(f"with cu_seqlens, response_mask must be (N,), got {tuple(response_mask.shape)}")
    check_cu_seqlens(cu_seqlens, len(response_mask))
    truth(response_mask, "response_mask")
    return cu_seqlens.cpu().to(torch.int64).diff().numpy()


def _same_shape(name: str, values: object, response_mask: Tensor) -> Tensor:
    """A token column as a CPU tensor.

    Raises:
        ValueError: its shape is not that of the mask.
    """
    tensor = torch.as_tensor(values, device="cpu").detach().cpu()
    if tensor.shape != response_mask.shape:
        raise ValueError(f"{name} {tuple(tensor.shape)} and response_mask {tuple(response_mask.shape)} differ")
    return tensor


def _kept_columns(kept: KeptSets | None, mask: Tensor, sizes: np.ndarray) -> dict[str, list[Tensor]]:
    """`kept_ids` and `kept_offsets`, one of each per row; nothing without sets.

    Args:
        kept: the keep-sampling-mask of the sampled tokens, row after row.
        mask: (N,) over the tokens of all responses, true on sampled ones; the others keep nothing.
        sizes: tokens of each response, summing to N.

    Raises:
        ValueError: there are more or fewer sets than sampled tokens.
    """
    if kept is None:
        return {}
    sampled = int(mask.sum())
    if len(kept) != sampled:
        raise ValueError(
            f"kept sets are of {len(kept)} tokens, response_mask has {sampled}; give one per sampled token"
        )

    # The sets cover the sampled tokens. In the log every token has one; those of the others are empty.
    whole = kept.to("cpu").padded(mask.cpu())
    ends = np.cumsum(sizes)
    offsets = [whole.offsets[first : last + 1] for first, last in zip(ends - sizes, ends, strict=True)]
    return {
        "kept_ids": [whole.ids[row[0] : row[-1]] for row in offsets],
        "kept_offsets": [row - row[0] for row in offsets],
    }


def records(
    response_mask: Tensor,
    columns: Mapping[str, object],
    sizes: np.ndarray,
    *,
    inside: Tensor | None = None,
    kept: KeptSets | None = None,
    prompt_mask: Tensor | None = None,
) -> pa.RecordBatch:
    """Build the columns of one batch from those of `RolloutBatch.from_padded` or `from_packed`.

    Args:
        response_mask: (B, T), or (N,) when packed.
        columns: the others, by name.
        sizes: tokens of each response: (B,).
        inside: the tokens of a padded batch, (B, T) bool. Defaults to all.
        kept: the kept sets of the sampled tokens.
        prompt_mask: the tokens of `prompt_ids` that are not padding.

    Raises:
        ValueError: an unknown column, or shapes that differ.
    """
    columns = {name: value for name, value in columns.items() if value is not None}
    check_columns(columns)
    columns["response_mask"] = response_mask
    packed: dict[str, Tensor] = {}
    for name in (name for name in TOKEN_COLUMNS if name in columns):
        tokens = _same_shape(name, columns[name], response_mask)
        packed[name] = tokens if inside is None else tokens[inside]
    columns |= packed
    columns |= _kept_columns(kept, packed["response_mask"] != 0, sizes)
    columns = _with_identity(columns, len(sizes))
    arrays = {}
    for name in (name for name in COLUMNS if name in columns):
        array = _array(name, columns[name], sizes, prompt_mask)
        arrays[name] = conform_column(array, name)
    for name in own_columns(columns):
        arrays[name] = _own_array(name, _one_per_row(name, columns[name], len(sizes)))
    return pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))


def records_of_rows(
    rows: Sequence[Mapping[str, Any]],
    *,
    columns: Collection[str] = (),
    file: str | None = None,
    first_row: int = 0,
) -> pa.RecordBatch:
    """The columns of one batch from one mapping per row; `columns`, or else those that any row names.

    Raises:
        RolloutLogError: a value that does not fit its column.
    """
    found = columns or set().union(*rows) or COLUMNS
    arrays = {}
    for name in (name for name in COLUMNS if name in found):
        array = _objects_array(name, [row.get(name) for row in rows], file=file, first_row=first_row)
        arrays[name] = conform_column(array, name, file=file, first_row=first_row)
    for name in own_columns(found):
        arrays[name] = _own_array(name, [row.get(name) for row in rows], file=file, first_row=first_row)
    return pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))


def _array(name: str, value: object, sizes: np.ndarray, prompt_mask: Tensor | None) -> pa.Array:
    if COLUMNS[name].per == "token":
        return list_array(pa.array(_numpy(value != 0 if name == "response_mask" else value)), sizes)
    if name == "prompt_ids" and isinstance(value, Tensor):
        if prompt_mask is None or prompt_mask.shape != value.shape:
            shape = None if prompt_mask is None else tuple(prompt_mask.shape)
            raise ValueError(f"prompt_ids {tuple(value.shape)} needs a prompt_mask of its shape, got {shape}")
        inside = prompt_mask != 0
        return list_array(pa.array(_numpy(value[inside])), inside.sum(1).cpu().numpy())

    rows = _one_per_row(name, value, len(sizes))
    if name == "policy_versions":
        rows = [_row_spans(row, size) for row, size in zip(rows, sizes.tolist(), strict=True)]
    elif name == "sampling":
        rows = [_settings(row) for row in rows]
    elif COLUMNS[name].per == "list":
        return _list_of_rows(rows)
    return _objects_array(name, rows)


def _one_per_row(name: str, value: object, count: int) -> list[Any]:
    if isinstance(value, (Tensor, np.ndarray)):
        value = value.tolist()
    rows = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(rows) != count:
        raise ValueError(f"{name} has {len(rows)} rows, response_mask has {count}")
    return rows


def _list_of_rows(rows: list[Any]) -> pa.Array:
    valid = np.array([row is not None for row in rows], dtype=bool)
    parts = [_numpy([] if row is None else row) for row in rows]
    values = np.concatenate([np.zeros(0, np.int64), *parts])
    return list_array(pa.array(values), np.array([len(part) for part in parts], dtype=np.int64), valid=valid)


def _objects_array(name: str, values: list[Any], *, file: str | None = None, first_row: int = 0) -> pa.Array:
    if COLUMNS[name].type == "string":
        values = [value if value is None else str(value) for value in values]
    # Arrow would take true for 1.0. Types are compared in C, because a log has millions of values.
    if "float" in COLUMNS[name].type:
        for row, value in enumerate(values):
            if bool in set(map(type, value if isinstance(value, list) else [value])):
                raise log_error("type", NO_NUMBER, file=file, row=first_row + row, column=name)
    # Arrow would cut 1.5 to the integer 1, and not take 1 for true: such types are found here, and cast with a check.
    found_here = "int" in COLUMNS[name].type or "bool" in COLUMNS[name].type
    try:
        return pa.array(values, None if found_here else arrow_type(name))
    except (pa.ArrowException, TypeError, OverflowError, UnicodeEncodeError) as error:
        row = next((row for row, value in enumerate(values) if not _fits(name, value)), 0)
        fix = f"expected {COLUMNS[name].type}"
        raise log_error("type", in_one_line(error), fix=fix, file=file, row=first_row + row, column=name) from error


def _own_array(name: str, values: list[Any], *, file: str | None = None, first_row: int = 0) -> pa.Array:
    """A column of the user's own: numbers, flags or texts; null where there is none."""
    try:
        array = pa.array(values)
        problem = None if is_own_type(array.type) else f"it holds {array.type}"
    except (pa.ArrowException, TypeError, OverflowError, UnicodeEncodeError) as error:
        problem = str(error)
    if problem is not None:
        fix = "a column of your own holds one number, flag or text for each sequence, all of one type"
        raise log_error("type", problem, fix=fix, file=file, row=first_row, column=name)
    return array


def _fits(name: str, value: object) -> bool:
    try:
        pa.array([value], arrow_type(name))
    except (pa.ArrowException, TypeError, OverflowError, UnicodeEncodeError):
        return False
    return True


def _row_spans(row: object, size: int) -> list[dict[str, int]] | None:
    """Version spans of one row from its one version, from one per token, or from (start, length, version) triples."""
    if row is None:
        return None
    if isinstance(row, (int, np.integer)):
        return [{"start": 0, "length": size, "version": int(row)}] if size else []
    if not isinstance(row, (list, tuple)):
        raise ValueError(f"policy_versions takes versions or lists of (start, length, version), got {row!r}")

    # One version per token becomes one span for each run of equal versions.
    names = ("start", "length", "version")
    if row and all(isinstance(version, int) for version in row):
        starts = [i for i in range(size) if i == 0 or row[i] != row[i - 1]]
        return [dict(zip(names, (i, j - i, row[i]), strict=True)) for i, j in pairwise([*starts, size])]
    return [dict(span) if isinstance(span, Mapping) else dict(zip(names, span, strict=True)) for span in row]


def _settings(spec: object) -> dict[str, Any] | None:
    """Sampling settings as a dictionary with the fields of the schema and nothing else."""
    if spec is None:
        return None
    if isinstance(spec, Mapping):
        values = dict(spec)
    elif dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        values = dataclasses.asdict(spec)
    else:
        raise ValueError(f"sampling takes a SamplingSpec or a mapping, got {spec!r}")

    # What a trainer does with its own logits is no setting of the rollout.
    support = values.pop("support", "engine")
    if support != "engine":
        raise ValueError(f"sampling describes the rollout, whose support is the engine's; got support={support!r}")
    values = {name: value for name, value in values.items() if name not in IDENTITY}
    unknown = sorted(values.keys() - {field.name for field in arrow_type("sampling")})
    if unknown:
        raise ValueError(f"sampling has no field {unknown[0]!r}; the log keeps {COLUMNS['sampling'].type}")
    return values


def _with_identity(columns: Mapping[str, object], rows: int) -> dict[str, object]:
    """Fill engine, engine_version and policy_versions from the sampling spec where they are not given."""
    spec = columns.get("sampling")
    specs = list(spec) if isinstance(spec, (list, tuple)) else [spec] * rows
    filled = dict(columns)
    for name in IDENTITY:
        column = "policy_versions" if name == "policy_version" else name
        found = [s.get(name) if isinstance(s, Mapping) else getattr(s, name, None) for s in specs]
        if column not in filled and any(value is not None for value in found):
            filled[column] = found
    return filled


def _numpy(values: object) -> np.ndarray:
    tensor = torch.as_tensor(values, device="cpu").detach().cpu()
    return (tensor.to(torch.float32) if tensor.is_floating_point() else tensor).numpy()
