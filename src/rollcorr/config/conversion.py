"""Read a correction in any of the three schemas, from a bare mapping or a full verl configuration.

`convert` finds the options, detects their schema, and reports the new form of each. `resolve` is the short form for
callers that only need a configuration. The field-by-field rules are in `rollcorr.config.generations`.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from rollcorr.config.checks import check_bool, check_choice, unknown_name
from rollcorr.config.correction_options import RolloutCorrectionConfig
from rollcorr.config.generations import (
    CONVERTERS,
    DEFAULTS,
    KEYS,
    LATE_2025_11,
    SCHEMAS,
    Draft,
    FieldReport,
    Schema,
)
from rollcorr.config.sampling_spec import SamplingSpec
from rollcorr.config.schemas import SECTION, find_schema, nested, overrides, owners

__all__ = ["Conversion", "FieldReport", "Schema", "convert", "converted_document", "resolve"]

ROLLOUT = "actor_rollout_ref.rollout"

OPTION_NAMES = tuple(dict.fromkeys(key for schema in SCHEMAS for key in KEYS[schema]))
"""The correction's options of all schemas."""
_SAMPLING_KEYS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
LOGPROBS_MODES = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
"""vLLM's names of the kinds of log-probs, and ours."""


@dataclass(frozen=True)
class Conversion:
    """Converted configuration with a report on each old option.

    Attributes:
        config: the configuration; None disables the correction (no weights, no rejection, no metrics).
        schema: the schema that was read.
        report: the new form of each old field, with the reason.
        sampling: sampling settings of the rollout section; optional, only set if there is such a section.
        notes: cases in which the same values produce different numbers than before.
    """

    config: RolloutCorrectionConfig | None
    schema: Schema
    report: tuple[FieldReport, ...]
    sampling: SamplingSpec | None = None
    notes: tuple[str, ...] = ()


def convert(raw: Mapping[str, Any], *, schema: Schema | None = None) -> Conversion:
    """Convert options of any schema to a `RolloutCorrectionConfig`.

    Args:
        raw: the options themselves, an `algorithm` section, or a full verl configuration (plain or OmegaConf
            mappings), with the options (or a preset's name) in `algorithm.rollout_correction`, or flat in `algorithm`.
            A key may be dotted: `{"algorithm.rollout_correction.rollout_is": "token"}`.
        schema: the schema to read; optional, detected by default. A bool `rollout_is`, or `rollout_is_` with level,
            mode, veto_threshold or threshold_lower, means 2025-10. `bypass_old_logprob_for_rollout`,
            `use_pure_rollout_correction`, `rollout_rs_threshold_lower`, or a `rollout_rs` of token, sequence or
            geometric, means 2025-11. That form accepts verl 0.7's `bypass_mode`, `loss_type` and
            `rollout_is_batch_normalize` too.

    Returns:
        The configuration with its schema, report, sampling settings and notes.

    Raises:
        TypeError: a section is not a mapping, or a value has an invalid type.
        ValueError: an unknown key (the message suggests the nearest), a mixture of schemas, a value outside its limits,
            or a correction with `calculate_log_probs: false`.
    """
    check_choice("schema", schema, SCHEMAS, optional=True)
    options, flat, rollout = _locate_options(raw)
    config: RolloutCorrectionConfig | None = None
    draft = Draft({})
    if options is None:
        draft.notes.append(f"There is no {SECTION} section: no correction.")
    elif isinstance(options, str):
        config = RolloutCorrectionConfig.preset(options)
        draft.report.append(FieldReport(SECTION, options, f"preset {options}", "a text names a preset"))
    else:
        options.pop("_target_", None)  # Hydra's
        _check_keys(options, schema)
        schema = schema or find_schema(options, flat=flat)
        config, draft = CONVERTERS[schema](options)

    sampling = None if rollout is None else _read_rollout(rollout, config, draft)
    return Conversion(config, schema or "newest", tuple(draft.report), sampling, tuple(draft.notes))


def resolve(config: RolloutCorrectionConfig | str | Mapping[str, Any] | None) -> RolloutCorrectionConfig | None:
    """Return a configuration from a configuration, a preset's name, or options of any schema.

    Returns:
        The configuration; None if `config` is None or its options disable the correction.

    Raises:
        TypeError: `config` has any other type.
        ValueError: as `convert`, or no preset has this name.
    """
    if config is None or isinstance(config, RolloutCorrectionConfig):
        return config
    if isinstance(config, str):
        return RolloutCorrectionConfig.preset(config)
    if isinstance(config, Mapping):
        return convert(config).config
    raise TypeError(
        "expected a RolloutCorrectionConfig, a preset's name, or a mapping of options; "
        f"got {config!r} of type {type(config).__name__}"
    )


def converted_document(raw: Mapping[str, Any], conversion: Conversion) -> dict[str, Any]:
    """Return the document with `algorithm.rollout_correction` in place of the old options.

    The section always contains the seven public options. It contains a further option only if its value is not the
    default.

    Args:
        raw: the document that was converted.
        conversion: the result of `convert` for it.
    """
    raw = expand_dotted(raw)
    section = None
    if conversion.config is not None:
        values = conversion.config.to_dict()
        section = {key: value for key, value in values.items() if key in KEYS["newest"][:7] or value != DEFAULTS[key]}
    if "algorithm" in raw or "actor_rollout_ref" in raw:
        algorithm = {key: value for key, value in (raw.get("algorithm") or {}).items() if not is_option(key)}
        return {**raw, "algorithm": {**algorithm, SECTION: section}}
    if SECTION in raw:
        return {**raw, SECTION: section}
    return {"algorithm": {SECTION: section}}


def expand_dotted(document: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a document, or its items, with each dotted key, such as `algorithm.rollout_is`, as nested blocks.

    Raises:
        ValueError: an option is written twice, or beside a preset; the message contains overrides to type.
    """
    return reduce(
        join_blocks, itertools.starmap(nested, document.items() if isinstance(document, Mapping) else document), {}
    )


def join_blocks(first: Any, second: Any, *, path: str = "", later_wins: bool = False) -> Any:  # noqa: ANN401 (any value)
    """Return two blocks of options as one.

    Args:
        first: a block.
        second: the other block.
        path: their name, with a dot behind it; empty for whole documents.
        later_wins: the second block's values replace the first's; otherwise, two values of an option raise.
    """
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        both = {
            key: join_blocks(first[key], value, path=f"{path}{key}.", later_wins=later_wins)
            for key, value in second.items()
            if key in first
        }
        return {**first, **second, **both}
    if not later_wins and first != second:
        name = path.removesuffix(".")
        value, options = sorted((first, second), key=lambda part: isinstance(part, Mapping))
        raise ValueError(
            f"{name!r} is written twice: keep one, or write both as overrides: "
            f"{overrides({name: value})} {overrides({name: options})}"
        )
    return second


def _locate_options(raw: Mapping[str, Any]) -> tuple[dict[str, Any] | str | None, bool, Mapping[str, Any] | None]:
    """Return the options, whether they are flat in `algorithm`, and the rollout section."""
    raw = expand_dotted(_require_mapping("the configuration", raw))

    # A full file, an `algorithm` section, or only the options.
    rollout = None
    algorithm: Mapping[str, Any] = raw
    if "algorithm" in raw or "actor_rollout_ref" in raw:
        misplaced = [key for key in raw if is_option(key) or key == SECTION]
        if misplaced:
            raise ValueError(f"{misplaced[0]!r} stands beside 'algorithm'; move it to algorithm.{SECTION}")
        algorithm = _subsection(raw, "algorithm")
        rollout = _subsection(_subsection(raw, "actor_rollout_ref"), "rollout") or None
    elif SECTION not in raw:
        return dict(raw), False, None

    # The first schema put its options flat into `algorithm`; later schemas have their own section.
    _check_spelling("algorithm", algorithm, (*OPTION_NAMES, SECTION))
    flat = {key: value for key, value in algorithm.items() if is_option(key)}
    options = algorithm.get(SECTION)
    if options is None:
        return (flat or None), True, rollout
    if flat:
        raise ValueError(
            f"algorithm holds both {SECTION} and the flat options {', '.join(flat)}: a mixture; delete one of the two, "
            f"or write algorithm.{SECTION}=null before the overrides that replace the file's correction"
        )
    if not isinstance(options, str):
        options = dict(_require_mapping(f"algorithm.{SECTION}", options))
    return options, False, rollout


def _check_keys(options: Mapping[str, Any], schema: Schema | None) -> None:
    """Check that the given schema contains every key; without a schema, that any schema contains it."""
    known = OPTION_NAMES if schema is None else KEYS[schema]
    if schema == "2025-11":
        known += LATE_2025_11
    for key in options:
        if key in known:
            continue
        if key in OPTION_NAMES:
            raise ValueError(f"option {key!r} belongs to {' and '.join(owners(key))}, not to {schema}")
        raise ValueError(unknown_name(f"unknown option {key!r}", key, known))


def _read_rollout(rollout: Mapping[str, Any], config: RolloutCorrectionConfig | None, draft: Draft) -> SamplingSpec:
    """Return the sampling settings of `actor_rollout_ref.rollout`; check that log-probs are recorded."""
    _check_spelling(ROLLOUT, rollout, ("calculate_log_probs", "logprobs_mode", *_SAMPLING_KEYS))
    recorded = rollout.get("calculate_log_probs")
    if recorded is not None:
        check_bool(f"{ROLLOUT}.calculate_log_probs", recorded)
    if config is not None and recorded is False:
        raise ValueError(
            f"{ROLLOUT}.calculate_log_probs is false, but a correction needs the rollout's log-probs: write "
            f"{ROLLOUT}.calculate_log_probs=true"
        )
    if config is not None and recorded is None:
        draft.notes.append(
            f"{ROLLOUT}.calculate_log_probs is not set; verl's default is false and a correction needs true."
        )

    settings = {key: rollout[key] for key in _SAMPLING_KEYS if rollout.get(key) is not None}
    if settings.get("top_k") == 0:  # transformers disables top_k with 0
        settings["top_k"] = -1
    old = dict(rollout)
    name = rollout.get("name")
    if isinstance(name, str) and name != "???":  # OmegaConf's marker for a missing value
        settings["engine"] = name

    # `engine_kwargs.vllm` overrides the rollout section's own mode.
    engine_kwargs = _subsection(_subsection(rollout, "engine_kwargs"), "vllm")
    mode = engine_kwargs.get("logprobs_mode", rollout.get("logprobs_mode"))
    if mode is not None:
        check_choice(f"{ROLLOUT}.logprobs_mode (logits are no log-probs)", mode, LOGPROBS_MODES)
        settings["logprobs"], old["logprobs_mode"] = LOGPROBS_MODES[mode], mode

    try:
        sampling = SamplingSpec(**settings)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{ROLLOUT}: {error}") from error
    for new, value in settings.items():
        key = {"engine": "name", "logprobs": "logprobs_mode"}.get(new, new)
        draft.report.append(
            FieldReport(f"{ROLLOUT}.{key}", old[key], f"sampling.{new}: {value}", "the sampling settings")
        )
    if mode is None and (sampling.temperature, sampling.top_p, sampling.top_k) != (1.0, 1.0, -1):
        draft.notes.append(
            f"{ROLLOUT} does not set logprobs_mode; read as raw (vLLM's default; verl 0.9.1 passes "
            "processed_logprobs). With temperature, top_p or top_k in use the two differ: set it."
        )
    return sampling


def is_option(key: object) -> bool:
    """Return whether a key is an option of a correction, or looks like a misspelled one."""
    return key in OPTION_NAMES or (
        isinstance(key, str) and key.startswith(("rollout_is", "rollout_rs", "rollout_token"))
    )


def _subsection(section: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a nested mapping; empty if it is missing or null."""
    return _require_mapping(key, {} if section.get(key) is None else section[key])


def _require_mapping(name: str, value: Any) -> Mapping[str, Any]:  # noqa: ANN401 (any plain value)
    """Return the value; raise `TypeError` if it is not a mapping."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping of options; got {value!r} of type {type(value).__name__}")
    return value


def _check_spelling(name: str, section: Mapping[str, Any], known: Sequence[str]) -> None:
    """Check that no key of a section is a misspelled option; unrelated keys are allowed."""
    for key in section:
        if key not in known and difflib.get_close_matches(str(key), known, cutoff=0.88):
            raise ValueError(unknown_name(f"unknown key {key!r} in {name}", key, known))
