"""Convert a trainer's tensors, lists and settings to the columns of the log."""

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
    conform,
    first_failure,
    is_own_type,
    list_array,
)

IDENTITY = ("engine", "engine_version", "policy_version")


def inside_padding(response_mask: Tensor, lengths: Tensor | None) -> tuple[Tensor, np.ndarray]:
    """Compute the entries of a padded batch that belong to the response.

    Returns:
        (B, T) bool, True on tokens of the response, and the (B,) count of each row.

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
    """Compute the length of each row of a packed batch: (B,) int64.

    Raises:
        ValueError: the mask is not (N,) or contains labels, or `cu_seqlens` decreases or does not run from 0 to N.
    """
    if response_mask.dim() != 1:
        raise ValueError(f"with cu_seqlens, response_mask must be (N,), got {tuple(response_mask.shape)}")
    check_cu_seqlens(cu_seqlens, len(response_mask))
    truth(response_mask, "response_mask")
    return cu_seqlens.cpu().to(torch.int64).diff().numpy()


def _kept_columns(kept: KeptSets | None, mask: Tensor, sizes: np.ndarray) -> dict[str, list[Tensor]]:
    """Compute `kept_ids` and `kept_offsets`, one of each per row.

    Args:
        kept: the kept sets of the sampled tokens, row after row; optional.
        mask: (N,) over the tokens of all responses, true on sampled ones; masked tokens have empty sets.
        sizes: tokens of each response, summing to N.

    Returns:
        Column name → values; an empty dictionary without `kept`.

    Raises:
        ValueError: the number of sets differs from the number of sampled tokens.
    """
    if kept is None:
        return {}
    sampled = int(mask.sum())
    if len(kept) != sampled:
        raise ValueError(
            f"kept sets are of {len(kept)} tokens, response_mask has {sampled}; give one per sampled token"
        )

    # The sets cover the sampled tokens. In the log every token has a set; it is empty for masked tokens.
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
    """Build the columns of one batch from the arguments of `RolloutBatch.from_padded` or `from_packed`.

    Args:
        response_mask: (B, T), or (N,) when packed.
        columns: the remaining columns, by name.
        sizes: tokens of each response: (B,).
        inside: the tokens of a padded batch, (B, T) bool; defaults to all.
        kept: the kept sets of the sampled tokens; optional.
        prompt_mask: the tokens of `prompt_ids` that are not padding; optional.

    Raises:
        ValueError: an unknown column, or shapes that differ.
    """
    given: dict[str, Any] = {name: value for name, value in columns.items() if value is not None}
    check_columns(given)
    given["response_mask"] = response_mask != 0
    for name in (name for name in TOKEN_COLUMNS if name in given):
        tokens = torch.as_tensor(given[name], device="cpu").detach().cpu()
        if tokens.shape != response_mask.shape:
            raise ValueError(f"{name} {tuple(tokens.shape)} and response_mask {tuple(response_mask.shape)} differ")
        given[name] = tokens if inside is None else tokens[inside]
    given |= _kept_columns(kept, given["response_mask"], sizes)
    given = _add_spec_columns(given, len(sizes))
    arrays = {name: _array(name, value, sizes, prompt_mask) for name, value in given.items()}
    return conform(pa.RecordBatch.from_pydict(arrays))


def records_of_rows(
    rows: Sequence[Mapping[str, Any]],
    *,
    columns: Collection[str] = (),
    file: str | None = None,
    first_row: int = 0,
) -> pa.RecordBatch:
    """Build the columns of one batch from one mapping per row. `columns` defaults to all columns in any row.

    Raises:
        RolloutLogError: a value does not fit its column.
    """
    found = columns or set().union(*rows) or COLUMNS
    arrays = {
        name: _checked_array(name, [row.get(name) for row in rows], file=file, first_row=first_row) for name in found
    }
    return conform(pa.RecordBatch.from_pydict(arrays), file=file, first_row=first_row)


def _array(name: str, value: object, sizes: np.ndarray, prompt_mask: Tensor | None) -> pa.Array:
    if name in TOKEN_COLUMNS:
        return list_array(pa.array(_numpy(value)), sizes)
    if name == "prompt_ids" and isinstance(value, Tensor):
        if prompt_mask is None or prompt_mask.shape != value.shape:
            shape = None if prompt_mask is None else tuple(prompt_mask.shape)
            raise ValueError(f"prompt_ids {tuple(value.shape)} needs a prompt_mask of its shape, got {shape}")
        value = [ids[inside] for ids, inside in zip(value, prompt_mask != 0, strict=True)]

    rows = _list_per_row(name, value, len(sizes))
    if name == "policy_versions":
        rows = [_row_spans(row, size) for row, size in zip(rows, sizes.tolist(), strict=True)]
    return _checked_array(name, [_numpy(row) if isinstance(row, Tensor) else row for row in rows])


def _list_per_row(name: str, value: object, count: int) -> list[Any]:
    if isinstance(value, (Tensor, np.ndarray)):
        value = value.tolist()
    rows = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(rows) != count:
        raise ValueError(f"{name} has {len(rows)} rows, response_mask has {count}")
    return rows


def _checked_array(name: str, values: list[Any], *, file: str | None = None, first_row: int = 0) -> pa.Array:
    own = name not in COLUMNS
    kind = "one number, flag or text for each sequence, all of one type" if own else COLUMNS[name].type
    if kind == "string":
        values = [value if value is None else str(value) for value in values]
    # Arrow would convert true to 1.0. Compare the types in C, because a log has millions of values.
    if "float" in kind:
        for row, value in enumerate(values):
            if bool in set(map(type, value if isinstance(value, list) else [value])):
                raise log_error("type", NO_NUMBER, file=file, row=first_row + row, column=name)
    # Arrow would truncate 1.5 to the integer 1, and reject 1 as true: find such types here, and cast with a check.
    target = None if own or "int" in kind or "bool" in kind else arrow_type(name)
    try:
        array = pa.array(values, target)
    except (pa.ArrowException, TypeError, OverflowError, UnicodeEncodeError) as error:
        row = 0 if own else first_failure(values, lambda value: pa.array([value], arrow_type(name)))
        problem = in_one_line(error)
        raise log_error("type", problem, fix=f"expected {kind}", file=file, row=first_row + row, column=name) from error
    if own and not is_own_type(array.type):
        raise log_error("type", f"it holds {array.type}", fix=f"expected {kind}", file=file, row=first_row, column=name)
    return array


def _row_spans(row: object, size: int) -> list[dict[str, int]] | None:
    """Convert one version, one per token, or (start, length, version) triples to the version spans of a row."""
    if row is None:
        return None
    if isinstance(row, (int, np.integer)):
        return [{"start": 0, "length": size, "version": int(row)}] if size else []
    if not isinstance(row, (list, tuple)):
        raise ValueError(f"policy_versions takes versions or lists of (start, length, version), got {row!r}")

    # Convert each run of equal versions to one span.
    names = ("start", "length", "version")
    if row and all(isinstance(version, int) for version in row):
        starts = [i for i in range(size) if i == 0 or row[i] != row[i - 1]]
        return [dict(zip(names, (i, j - i, row[i]), strict=True)) for i, j in pairwise([*starts, size])]
    return [dict(span) if isinstance(span, Mapping) else dict(zip(names, span, strict=True)) for span in row]


def _add_spec_columns(columns: Mapping[str, object], rows: int) -> dict[str, object]:
    """Turn sampling specs into dictionaries, which fill engine, engine_version and policy_versions if not given."""
    filled = dict(columns)
    if "sampling" in columns:
        specs = [_spec_fields(spec) for spec in _list_per_row("sampling", columns["sampling"], rows)]
        for name in IDENTITY:
            column = "policy_versions" if name == "policy_version" else name
            found = [None if spec is None else spec.pop(name, None) for spec in specs]
            if column not in columns and any(value is not None for value in found):
                filled[column] = found
        filled["sampling"] = specs
    return filled


def _spec_fields(spec: object) -> dict[str, Any] | None:
    """Return the fields of a sampling spec that the log records, and the identity of the engine."""
    if spec is None:
        return None
    if isinstance(spec, Mapping):
        values = dict(spec)
    elif dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        values = dataclasses.asdict(spec)
    else:
        raise ValueError(f"sampling takes a SamplingSpec or a mapping, got {spec!r}")

    # The trainer's logits processing is no setting of the rollout.
    support = values.pop("support", "engine")
    if support != "engine":
        raise ValueError(f"sampling describes the rollout, whose support is the engine's; got support={support!r}")
    unknown = sorted(values.keys() - {field.name for field in arrow_type("sampling")} - set(IDENTITY))
    if unknown:
        raise ValueError(f"sampling has no field {unknown[0]!r}; the log keeps {COLUMNS['sampling'].type}")
    return values


def _numpy(values: object) -> np.ndarray:
    tensor = torch.as_tensor(values, device="cpu").detach().cpu()
    return (tensor.to(torch.float32) if tensor.is_floating_point() else tensor).numpy()


def routing_difference(rollout_experts: Tensor, train_experts: Tensor) -> Tensor:
    """Compute the share of layers whose expert sets differ: mean over layers of [K_rollout ≠ K_train], per token.

    Args:
        rollout_experts: ids of the sampler's experts, (…, L, K) integers: K in each of L layers, in any order. A
            negative id means that the token's experts were not recorded.
        train_experts: ids of the trainer's experts, same shape.

    Returns:
        (…,) float32, 0 to 1; NaN where experts were not recorded.

    Raises:
        ValueError: the shapes differ, or are not (…, L, K).

    Example:
        >>> routing_difference(torch.tensor([[3, 1], [0, 2]]), torch.tensor([[1, 3], [0, 4]]))
        tensor(0.5000)
    """
    if rollout_experts.shape != train_experts.shape or rollout_experts.dim() < 2:
        shapes = f"{tuple(rollout_experts.shape)} and {tuple(train_experts.shape)}"
        raise ValueError(f"experts of the two sides have the shapes {shapes}; give (…, L, K) for both")
    one, two = (experts.sort(dim=-1).values for experts in (rollout_experts, train_experts))
    share = (one != two).any(-1).float().mean(-1)
    unknown = ((one < 0) | (two < 0)).any(-1).any(-1)
    return share.masked_fill(unknown, torch.nan)
