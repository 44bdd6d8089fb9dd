"""Read a training configuration: defaults, a YAML file over them, dotted overrides over both.

    rollcorr train run.yaml algorithm.rollout_correction=decoupled_token_is optim.lr=1e-4

Names are checked before values, so the error for an unknown name suggests the nearest one.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from rollcorr.config.checks import unknown_name
from rollcorr.config.conversion import OPTION_NAMES, expand_dotted, is_option
from rollcorr.config.layers import merge_layers, parse_override, read_options, under_algorithm
from rollcorr.config.secrets import redact, redact_text
from rollcorr.run_directory.directory import RunDirectory
from rollcorr.train.run_config import RunConfig
from rollcorr.train.verl_paths import check_paths, translated

CORRECTION_KEY = "algorithm.rollout_correction"
ENGINE_OPTIONS_KEY = "rollout.engine_options"
FREE_FORM = (CORRECTION_KEY, "model.config", ENGINE_OPTIONS_KEY)
# Arguments of `vllm.LLM` that are numbers, switches or names of a fixed list. Any other one may name code.
PLAIN_ENGINE_ARGS = (
    "async_scheduling|block_size|calculate_kv_scales|cpu_offload_gb|disable_cascade_attn|disable_custom_all_reduce"
    "|disable_log_stats|disable_sliding_window|enable_chunked_prefill|enable_expert_parallel|enable_prefix_caching"
    "|enforce_eager|gpu_memory_utilization|kv_cache_dtype|kv_cache_memory_bytes|max_model_len|max_num_batched_tokens"
    "|max_num_seqs|max_seq_len_to_capture|num_gpu_blocks_override|pipeline_parallel_size|quantization"
    "|return_sampling_mask|seed|swap_space|tensor_parallel_size"
)
# Options that import a module or start a program, or that may.
RUNS_CODE = re.compile(
    r"reward\.function|model\.family|task\.(problems|reward)"
    rf"|rollout\.engine_options\.(python|env\..+|engine_args\.(?!({PLAIN_ENGINE_ARGS})\Z).+)",
    re.DOTALL,
)


Config = TypeVar("Config", bound=RunConfig)


def read_config(path: str | os.PathLike[str] | None, overrides: Sequence[str], config_class: type[Config]) -> Config:
    """Return a configuration: default, then the YAML file, then each `dotted.name=value`; the later one wins.

    A correction is read in every form of verl, and so are the paths of `verl_paths`. A block of correction options
    after a preset's name changes that preset; options of an older form replace it.

    Args:
        path: the file; optional. Without it, the options keep their default.
        overrides: changes.
        config_class: the recipe's configuration.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a name is unknown (the nearest one is suggested), a value is invalid, two paths of the file set an
            option differently, or an override has no `=`.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    known = dict(_known_names(config_class))
    written = [list(option_values(under_algorithm(layer))) for layer in _read_layers(path, overrides)]
    check_paths(name for options in written for name, _ in options)
    layers = []
    for options in written:
        own = (translated(name, value, known) for name, value in options)
        layers.append(expand_dotted((name, value) for name, value in own if name))
        _check_names(layers[-1], known)

    # Options of 2025-10 lie in `algorithm` itself, which shows their generation, so `resolve` needs their place too.
    given = merge_layers(layers)
    algorithm = given.get("algorithm", {})
    flat = {key: algorithm.pop(key) for key in list(algorithm) if is_option(key)}
    if flat:
        section = {key: value for key, value in algorithm.items() if key == "rollout_correction"}
        algorithm["rollout_correction"] = {"algorithm": flat | section}

    # OmegaConf checks types and builds the dataclasses. It would fill in references in the options of an engine.
    engine_options = given.get("rollout", {}).pop("engine_options", {})
    try:
        config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(config_class), given))
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        raise ValueError(where + str(error).splitlines()[0]) from error
    if engine_options:
        config.rollout.engine_options.update(engine_options)
    return cast("Config", config)


def recipe_of(path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> str | None:
    """Return the `recipe` option of a file and its overrides, or None if neither sets it.

    Raises:
        FileNotFoundError, ValueError: as in `read_config`.
    """
    named = [layer["recipe"] for layer in _read_layers(path, overrides) if "recipe" in layer]
    return str(named[-1]) if named else None


def check_stored_config(path: Path, config: RunConfig, *, names_run_dir: bool) -> None:
    """Check RUN/config.yaml when it is given as the configuration: it must resume in its own directory.

    Args:
        path: the file that was read.
        config: the configuration, with the overrides.
        names_run_dir: an override sets `run_dir`, so this starts a new run.

    Raises:
        ValueError: `run_dir` in the file is not the file's own directory.
    """
    directory = RunDirectory(path.parent)
    is_stored = path.name == directory.config.name and directory.history.is_file()
    if is_stored and not names_run_dir and Path(config.run_dir).resolve() != path.parent.resolve():
        raise ValueError(
            f"{path} names run_dir {config.run_dir!r}, which is not its own directory: add run_dir={path.parent} to go "
            "on there, or start it in the directory where the run was started"
        )


def check_trusted(config: RunConfig, overrides: Sequence[str], path: str = "") -> None:
    """Check that a configuration runs no code except code named on the command line.

    Args:
        config: the configuration, with the overrides.
        overrides: the changes that were typed on the command line.
        path: the configuration file, as the error names it.

    Raises:
        ValueError: an option that runs code, or may run it, comes from the file, or names a file in the run directory.
            Both may be a stranger's.
    """
    typed = {name for text in overrides for name, _ in _all_values(parse_override(text), "")}
    for name, value in _all_values(dataclasses.asdict(config), ""):
        if not RUNS_CODE.fullmatch(name) or value in (None, False):
            continue
        file = Path(str(value).rpartition(":")[0] or str(value))
        reason = "" if name in typed else f"comes from {path}: write {name.partition('[')[0]}=… in the command, or"
        if file.resolve().is_relative_to(Path(config.run_dir).resolve()):
            reason = f"lies in the run directory {config.run_dir}:"
        if reason:
            raise ValueError(f"{name}={redact_text(repr(value))} may run code and {reason} read it and add --trust")


def _read_layers(path: str | os.PathLike[str] | None, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Return the options of the file, then of each override, each checked. Merged, later layers take precedence."""
    layers = [] if path is None else [_read_yaml(Path(path))]
    for text in overrides:
        layer = parse_override(text)
        try:
            _check_values(layer)
        except ValueError as error:
            raise ValueError(f"override {_format_value(text)}: {error}") from error
        layers.append(layer)
    return layers


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"configuration {str(path)!r} does not exist")
    try:
        values = read_options(path)
        if values is None:
            return {}
        if not isinstance(values, dict):
            raise ValueError(f"expected a block of options, got {type(values).__name__}")
        values = expand_dotted(values)
        _check_values(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return values


def _check_values(layer: Mapping[str, Any]) -> None:
    """Check that every value is present, finite and not an interpolation."""
    for name, value in _all_values(layer, ""):
        if isinstance(value, str):
            if value == "???":
                raise ValueError(f"{name} is ???, which means that it is still to be given; give it: {name}=VALUE")
            if "${" in value and not name.startswith(f"{ENGINE_OPTIONS_KEY}."):
                raise ValueError(
                    f"{name} is {_format_value(value)}, but nothing is filled in for ${{…}} here; write the value "
                    "itself"
                )
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value}")
        elif isinstance(value, int) and value.bit_length() > 63:
            raise ValueError(f"{name} must be below 2^63, got an integer of {value.bit_length()} bits")
        elif value is not None and not isinstance(value, int | float):
            raise ValueError(f"{name} must be text, a number, true, false, null, a list or a block, got {value!r}")


def _all_values(value: object, name: str) -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values of a layer, also within lists and free-form blocks."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _all_values(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _all_values(item, f"{name}[{index}]")
    else:
        yield name, value


def _check_names(layer: Mapping[str, Any], known: Mapping[str, type | None]) -> None:
    flat = {f"algorithm.{name}": repr(f"{CORRECTION_KEY}.{name}") for name in OPTION_NAMES}
    for name, value in option_values(layer):
        if name in flat:
            continue
        if name not in known:
            section = name.rpartition(".")[0]
            siblings = [other for other in known if other.rpartition(".")[0] == (section if section in known else "")]
            written = {other: repr(other) for other in known} | flat
            raise ValueError(unknown_name(f"unknown option {_format_value(name)}", name, siblings, written))
        if (known[name] is not None or name == ENGINE_OPTIONS_KEY) and not isinstance(value, Mapping):
            raise ValueError(f"{name} is a block of options, got {_format_value(value)}; set {name}.<option> instead")


def option_values(layer: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield options by dotted name; a block that its owner defines, such as `model.config`, is one."""
    for key, value in layer.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and name not in FREE_FORM:
            yield from option_values(value, f"{name}.")
        else:
            yield name, value


def _known_names(cls: type, prefix: str = "") -> Iterator[tuple[str, type | None]]:
    """Yield the dotted names of all options, each with its dataclass when it is a block."""
    hints = get_type_hints(cls)
    for option in dataclasses.fields(cls):
        block = hints[option.name] if dataclasses.is_dataclass(hints[option.name]) else None
        yield f"{prefix}{option.name}", block
        if block is not None:
            yield from _known_names(block, f"{prefix}{option.name}.")


def _format_value(value: Any) -> str:  # noqa: ANN401 (any plain value)
    """Return a short form of a value for errors. Secrets are removed before it is shortened."""
    return reprlib.repr(redact_text(value) if isinstance(value, str) else redact(value))
