"""Schema of the rollout log: one table with names, types, units and meanings of its columns, and its version.

One row is one sequence. Token columns contain one value per response token. A row with `dimensions` is one picture: its
tokens are the denoising steps that were sampled with noise, and its log-probs are averages over the D dimensions.

Every column may be null or absent ("not recorded"); `validate_rollout_log` checks the columns that a purpose needs. A
minor version adds columns. A major version changes the meaning of a column, and readers reject a newer one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from rollcorr.config.checks import unknown_name
from rollcorr.rollout_log.arrow import pa, pc
from rollcorr.rollout_log.errors import log_error

SCHEMA_VERSION = "1.3"
VERSION_KEY = "rollcorr.schema_version"
UNITS_KEY = "rollcorr.units"

SPANS = "list<struct<start: int32, length: int32, version: int64>>"
SAMPLING = (
    "struct<temperature: float64, top_p: float64, top_k: int32, min_p: float64, repetition_penalty: float64, "
    "presence_penalty: float64, frequency_penalty: float64, min_new_tokens: int32, logprobs: string, "
    "logit_bias: string>"
)


@dataclass(frozen=True)
class Column:
    """Column of the log.

    Attributes:
        name: the field's name in the library.
        type: Arrow type.
        unit: unit of a value, or "–" for identifiers and flags.
        per: one value per "sequence", one per response "token", or a "list" with its own length.
        meaning: one line; it includes the meaning of null if that differs from "not recorded".
    """

    name: str
    type: str
    unit: str
    per: Literal["sequence", "token", "list"]
    meaning: str


_COLUMNS = (
    Column("step", "int64", "optimizer steps", "sequence", "training step that the rollout belongs to"),
    Column("sequence_id", "string", "–", "sequence", "id of the sequence; integers are stored as decimal text"),
    Column("group_id", "string", "–", "sequence", "id of the group: its sequences answer the same prompt (GRPO)"),
    Column("prompt_ids", "list<int32>", "token id", "list", "ids of the prompt, without padding"),
    Column("response_ids", "list<int32>", "token id", "token", "ids of the response, without padding"),
    Column("response_mask", "list<bool>", "–", "token", "true if the policy sampled the token; null means all tokens"),
    Column("rollout_log_prob", "list<float32>", "nats", "token", "log μ, under the policy that sampled"),
    Column("old_log_prob", "list<float32>", "nats", "token", "log π_old, under the trainer's policy before the update"),
    Column("log_prob", "list<float32>", "nats", "token", "log π_θ, under the trainer's policy during the update"),
    Column("reward", "float32", "reward", "sequence", "reward of the whole sequence"),
    Column("token_rewards", "list<float32>", "reward", "token", "reward of each token"),
    Column("advantages", "list<float32>", "reward, or normalized", "token", "advantage of each token"),
    Column(
        "routing_difference",
        "list<float32>",
        "share of layers",
        "token",
        "MoE: layers whose set of routed experts differs between sampler and trainer, 0 to 1",
    ),
    Column(
        "policy_versions",
        SPANS,
        "weight version",
        "list",
        "version of the weights that sampled each span of tokens; the spans cover the row",
    ),
    Column("sampling", SAMPLING, "–", "sequence", "sampling settings, as in `SamplingSpec`"),
    Column("kept_ids", "list<int32>", "token id", "list", "kept sets: for each token, the ids that could be sampled"),
    Column(
        "kept_offsets",
        "list<int64>",
        "entries",
        "list",
        "offsets o: the kept set of token t is `kept_ids[o[t]:o[t+1]]`; number of tokens + 1 entries",
    ),
    Column("engine", "string", "–", "sequence", "name of the engine that sampled"),
    Column("engine_version", "string", "–", "sequence", "version of this engine"),
    Column("model", "string", "–", "sequence", "name of the model that sampled"),
    Column("prompt", "string", "–", "sequence", "text of the prompt, if there are no token ids, as for pictures"),
    Column(
        "dimensions",
        "int64",
        "–",
        "sequence",
        "number D of latent dimensions; the tokens of this row are denoising steps",
    ),
    Column("timestep", "list<float32>", "scheduler's", "token", "timestep value of each denoising step"),
    Column("sigma", "list<float32>", "noise level", "token", "σ before the step"),
    Column("sigma_next", "list<float32>", "noise level", "token", "σ after the step"),
    Column("step_std", "list<float32>", "latent", "token", "standard deviation s of the step under both policies"),
    Column(
        "exact_kl",
        "list<float32>",
        "nats",
        "token",
        "‖m_old − m_rollout‖² / 2s² over all D dimensions; m: mean of the step",
    ),
    Column(
        "predictions",
        "string",
        "JPEG, base64",
        "sequence",
        "image of decoded predictions x̂₀, one column per step: the sampler's above, the trainer's below",
    ),
    Column("mean_distance", "list<float32>", "latent²", "token", "‖m_old − m_rollout‖², in place of exact_kl"),
    Column("rollout_entropy", "list<float32>", "nats", "token", "entropy of the distribution of rollout_log_prob"),
)
COLUMNS: Mapping[str, Column] = {column.name: column for column in _COLUMNS}
OWN_PREFIX = "x_"
"""Prefix of the user's own columns: a number, a flag or a text for each sequence. The library keeps them."""
NO_NUMBER = "true or false in place of a number"
TOKEN_COLUMNS = tuple(column.name for column in _COLUMNS if column.per == "token")


@cache
def arrow_type(column: str) -> pa.DataType:
    """Return the Arrow type of a column of the log."""
    primitive = {
        "bool": pa.bool_(),
        "int32": pa.int32(),
        "int64": pa.int64(),
        "float32": pa.float32(),
        "float64": pa.float64(),
        "string": pa.string(),
    }

    types = primitive | {f"list<{name}>": pa.list_(type_) for name, type_ in primitive.items()}
    types[SPANS] = pa.list_(pa.struct([("start", pa.int32()), ("length", pa.int32()), ("version", pa.int64())]))

    # SAMPLING is the type itself: "struct<name: type, …>".
    fields = (field.split(": ") for field in SAMPLING.removeprefix("struct<").removesuffix(">").split(", "))
    types[SAMPLING] = pa.struct([(name, primitive[type_]) for name, type_ in fields])
    return types[COLUMNS[column].type]


def arrow_schema() -> pa.Schema:
    """Return the schema of all columns, with the schema version and the units as file metadata."""
    units = json.dumps({name: column.unit for name, column in COLUMNS.items()}, ensure_ascii=False)
    return pa.schema(
        [(name, arrow_type(name)) for name in COLUMNS], metadata={VERSION_KEY: SCHEMA_VERSION, UNITS_KEY: units}
    )


def own_columns(names: Iterable[str]) -> list[str]:
    """Return the user's own columns among these names, sorted."""
    return sorted({name for name in names if name.startswith(OWN_PREFIX)})


def is_own_type(type_: pa.DataType) -> bool:
    """Return whether a user's own column may have this Arrow type: numbers, flags or texts."""
    kinds = ("integer", "floating", "boolean", "string", "large_string", "null")
    return any(getattr(pa.types, f"is_{kind}")(type_) for kind in kinds)


def own_fields(schema: pa.Schema) -> list[str]:
    """Return the user's own columns of a file or batch: their name and their type must both fit."""
    return [name for name in own_columns(schema.names) if is_own_type(schema.field(name).type)]


def check_columns(names: Iterable[str]) -> None:
    """Check that each name is a column of the log, or one of the user's own.

    Raises:
        ValueError: a name is unknown; the message contains it and the nearest known name.
    """
    for name in names:
        if name not in COLUMNS and not name.startswith(OWN_PREFIX):
            raise ValueError(
                unknown_name(f"{name!r} is not a column of the rollout log", name, [*COLUMNS, "your own, x_…"])
            )


def check_column_names(names: Mapping[str, str]) -> None:
    """Check a mapping from columns of the log to fields of a file.

    Raises:
        ValueError: an unknown column, or one field for two columns.
    """
    check_columns(names)
    fields = list(names.values())
    for column, field in names.items():
        if fields.count(field) > 1:
            raise ValueError(
                f"columns: {field[:40]} is given to {column} and to another column; one field is one column"
            )


def with_mask(columns: Iterable[str]) -> list[str]:
    """Add `response_mask` to names that contain a token column.

    Raises:
        ValueError: an unknown column.
    """
    names = [columns] if isinstance(columns, str) else list(columns)
    check_columns(names)
    return [*names, "response_mask"] if set(names) & set(TOKEN_COLUMNS) else names


def check_version(version: object, *, file: str, row: int | None = None) -> None:
    """Check that this release can read a schema version. A foreign file has version `None`, which passes.

    Raises:
        RolloutLogError: a newer major version, or an invalid version.
    """
    if version is None:
        return
    text = version.decode(errors="replace") if isinstance(version, bytes) else str(version)
    major = text.split(".")[0]
    if not major.isdecimal():
        raise log_error("version", f"schema version {text!r} is not 'major.minor'", file=file, row=row)
    if int(major) > int(SCHEMA_VERSION.split(".")[0]):
        raise log_error(
            "version",
            f"schema version {text} is newer than {SCHEMA_VERSION}, the newest that this release reads",
            fix="upgrade rollcorr, or write the log with the older release",
            file=file,
            row=row,
        )


def conform(records: pa.RecordBatch, *, file: str | None = None, first_row: int = 0) -> pa.RecordBatch:
    """Convert the columns of a foreign file to the types of the schema, and drop columns that the schema lacks.

    The user's own columns (`x_…`) stay unchanged. float64 and float16 become float32; large or fixed-size lists become
    lists; integers become text (identifier columns) or booleans (mask columns); null in a list of floats becomes NaN.

    Raises:
        RolloutLogError: a column cannot be converted, or has null inside a list of integers, flags or spans.
    """
    names = [name for name in COLUMNS if name in records.schema.names]
    arrays = {name: _conform_column(records.column(name), name, file=file, first_row=first_row) for name in names}
    arrays |= {name: records.column(name) for name in own_fields(records.schema)}
    return pa.RecordBatch.from_pydict(arrays)


def _conform_column(array: pa.Array, column: str, *, file: str | None, first_row: int) -> pa.Array:
    target = arrow_type(column)
    try:
        array = _cast_array(array, target)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        title = f"{array.type} cannot be read as {target}: {error}"
        rows = [array.slice(row, 1) for row in range(len(array))]
        row = first_row + first_failure(rows, lambda one: one.null_count or _cast_array(one, target))
        raise log_error("type", title, file=file, row=row, column=column) from error

    if column == "step" and len(array) and (pc.min(array).as_py() or 0) < 0:
        row = int(pc.index(pc.less(array, 0), True).as_py())
        raise log_error(
            "type", f"step is {array[row]}, and the first one is 0 or 1", file=file, row=first_row + row, column=column
        )

    # Only lists of floats may miss single values, as NaN. Spans are lists of structures without missing fields.
    if pa.types.is_list(target):
        values = array.flatten()
        nested = [values, *(values.flatten() if pa.types.is_struct(values.type) else [])]
        if any(part.null_count for part in nested):
            missing = np.logical_or.reduce([pc.is_null(part).to_numpy(zero_copy_only=False) for part in nested])
            _, lengths, _ = ragged(array)
            row = first_row + int(np.repeat(np.arange(len(lengths)), lengths)[missing.argmax()])
            raise log_error(
                "null",
                "null inside the list",
                fix="only log-probs, rewards and advantages may miss single values",
                file=file,
                row=row,
                column=column,
            )
    return array


def ragged(array: pa.Array) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """Split a list column.

    Returns:
        (values of all rows, length of each row, whether the row is recorded); a null row has length 0.
    """
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return array.flatten(), lengths, array.is_valid().to_numpy(zero_copy_only=False)


def list_array(values: pa.Array, lengths: np.ndarray, *, valid: np.ndarray | None = None) -> pa.Array:
    """Build a list column from the values of all rows and the length of each; rows that are not `valid` become null.

    Raises:
        ValueError: the batch is too large for 32-bit offsets.
    """
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"{offsets[-1]} values in one batch, the limit is 2^31 - 1; write the batch in parts")
    mask = None if valid is None or valid.all() else pa.array(~valid)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values, mask=mask)


def _cast_array(array: pa.Array, target: pa.DataType) -> pa.Array:
    if pa.types.is_list(target) and not pa.types.is_null(array.type):
        if not hasattr(array, "flatten"):
            raise pa.ArrowInvalid("it is not a list")
        values, lengths, valid = ragged(array)
        return list_array(_fill_null_with_nan(_cast_array(values, target.value_type)), lengths, valid=valid)

    # Fields that a foreign structure lacks become null; fields that the schema lacks are dropped.
    if pa.types.is_struct(target) and pa.types.is_struct(array.type):
        fields = {field.name: part for field, part in zip(array.type, array.flatten(), strict=True)}
        parts = [_cast_array(fields.get(field.name, pa.nulls(len(array))), field.type) for field in target]
        return pa.StructArray.from_arrays(parts, fields=list(target), mask=array.is_null())

    # Older versions of Arrow cannot cast float16.
    if pa.types.is_float16(array.type):
        missing = array.is_null().to_numpy(zero_copy_only=False)
        array = pa.array(array.to_numpy(zero_copy_only=False).astype(np.float32), mask=missing)
    if pa.types.is_boolean(array.type) and pa.types.is_floating(target):
        raise pa.ArrowInvalid(NO_NUMBER)
    return array if array.type == target else array.cast(target)


def first_failure(values: Sequence[Any], convert: Callable[[Any], object]) -> int:
    """Return the index of the first value that Arrow cannot convert, or 0 if each single value can be converted."""
    for row, value in enumerate(values):
        try:
            convert(value)
        except (pa.ArrowException, TypeError, OverflowError, UnicodeEncodeError):
            return row
    return 0


def _fill_null_with_nan(values: pa.Array) -> pa.Array:
    return values.fill_null(np.nan) if pa.types.is_floating(values.type) else values
