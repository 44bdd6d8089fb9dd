"""Presets as one table of plain data: the fields of each, its arguments and its source.

Only the table is written by hand. It defines `RolloutCorrectionConfig.preset(name, **arguments)`, the constructors of
the same names (`with_named_presets`), the verl adapter's constructors and the page docs/reference/presets.md. A field
that is not in `values` keeps the configuration's default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rollcorr.config.checks import unknown_name
from rollcorr.config.criteria import join_band

START_WITH = (
    "Start with `measure`: it applies no weights, and rejects at most tokens without a log-prob. A framework's own "
    "correction stays active. After a few dozen steps, the metrics show whether a correction is needed, and which one "
    "(docs/guides/choosing.md)."
)
"""Introduction to the list of presets."""

VERL = "verl 0.9.1"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One named configuration.

    Attributes:
        description: its effect, in one line.
        values: field → value. Unlisted fields keep their defaults. `rollout_rs_threshold_lower` is not a field: with
            `rollout_rs_threshold` it makes a band. There None means the reciprocal, and 0 an open side.
        parameters: argument → the fields it sets.
        source: the release that brought the name.
    """

    description: str
    values: Mapping[str, object]
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    source: str = VERL


VERL_2025_11 = "verl, November 2025"
VERL_2025_12 = "verl, December 2025"
OWN = "this library"
SHORT = "papers and other trainers"

# Not a field of the configuration: the lower end of the band whose upper end is `rollout_rs_threshold`.
BAND_LOWER = "rollout_rs_threshold_lower"

_IS_ARGUMENTS = {"threshold": ("rollout_is_threshold",)}
_HORIZON_ARGUMENTS = {**_IS_ARGUMENTS, "horizon": ("rollout_is_horizon",)}
_RS_ARGUMENTS = {"rs_threshold": ("rollout_rs_threshold",)}
_IS_RS_ARGUMENTS = {"is_threshold": ("rollout_is_threshold",), **_RS_ARGUMENTS}

_TOKEN_IS = {"rollout_is": "token", "rollout_is_threshold": 2.0}
_SEQ_IS = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
_TOKEN_ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_HORIZON_IS = {"rollout_is": "horizon", "rollout_is_threshold": 4.0, "rollout_is_horizon": 0.9}
_GEO_RS = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3_RS = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_BYPASS_PPO = {"bypass_mode": True, "loss_type": "ppo_clip"}
_BYPASS_PG = {"bypass_mode": True, "loss_type": "reinforce"}

_OLDER_GEO_RS = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.001, "rollout_token_veto_threshold": 1e-4}
_OLDER_GEO_RS_ARGUMENTS = {
    **_RS_ARGUMENTS,
    "rs_threshold_lower": (BAND_LOWER,),
    "veto_threshold": ("rollout_token_veto_threshold",),
}

# description, values, parameters
_Row = tuple[str, Mapping[str, object], Mapping[str, tuple[str, ...]]]

_NEWEST: dict[str, _Row] = {
    "decoupled_token_is": (
        "Decoupled PPO; each token weighted by its own ratio, truncated (Token-TIS).",
        _TOKEN_IS,
        _IS_ARGUMENTS,
    ),
    "decoupled_seq_is": (
        "Decoupled PPO; each sequence weighted by its product of ratios, truncated (Seq-TIS).",
        _SEQ_IS,
        _IS_ARGUMENTS,
    ),
    "decoupled_token_icepop": (
        "Decoupled PPO; token weights inside a band, zero outside it (IcePop).",
        _TOKEN_ICEPOP,
        _IS_ARGUMENTS,
    ),
    "decoupled_seq_is_rs": (
        "Decoupled PPO; Seq-TIS, and sequences whose product of ratios is outside a band are rejected (Seq-MIS).",
        {**_SEQ_IS, "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
        _IS_RS_ARGUMENTS,
    ),
    "decoupled_geo_rs": (
        "Decoupled PPO; no weights, sequences rejected by the geometric mean of their ratios (Geo-RS).",
        _GEO_RS,
        _RS_ARGUMENTS,
    ),
    "decoupled_geo_rs_seq_tis": (
        "Decoupled PPO; truncated sequence weights, and Geo-RS.",
        _SEQ_IS | _GEO_RS,
        _IS_RS_ARGUMENTS,
    ),
    "decoupled_geo_rs_token_tis": (
        "Decoupled PPO; truncated token weights, and Geo-RS.",
        _TOKEN_IS | _GEO_RS,
        _IS_RS_ARGUMENTS,
    ),
    "decoupled_k3_rs": (
        "Decoupled PPO; no weights, sequences rejected by their mean k3 (K3-RS).",
        _K3_RS,
        _RS_ARGUMENTS,
    ),
    "decoupled_k3_rs_seq_tis": (
        "Decoupled PPO; truncated sequence weights, and K3-RS.",
        _SEQ_IS | _K3_RS,
        _IS_RS_ARGUMENTS,
    ),
    "decoupled_k3_rs_token_tis": (
        "Decoupled PPO; truncated token weights, and K3-RS.",
        _TOKEN_IS | _K3_RS,
        _IS_RS_ARGUMENTS,
    ),
    "bypass_ppo_clip": (
        "PPO whose ratio is π_θ/μ; no old log-probs, no weights, no rejection.",
        _BYPASS_PPO,
        {},
    ),
    "bypass_ppo_clip_geo_rs": (
        "PPO whose ratio is π_θ/μ, with Geo-RS.",
        _GEO_RS | _BYPASS_PPO,
        _RS_ARGUMENTS,
    ),
    "bypass_ppo_clip_k3_rs": (
        "PPO whose ratio is π_θ/μ, with K3-RS.",
        _K3_RS | _BYPASS_PPO,
        _RS_ARGUMENTS,
    ),
    "bypass_pg_is": (
        "REINFORCE with truncated sequence weights π_θ/μ; no clipping.",
        _SEQ_IS | _BYPASS_PG,
        _IS_ARGUMENTS,
    ),
    "bypass_pg_token_icepop": (
        "REINFORCE with token weights π_θ/μ inside a band, zero outside it (IcePop).",
        _TOKEN_ICEPOP | _BYPASS_PG,
        _IS_ARGUMENTS,
    ),
    "bypass_pg_geo_rs": (
        "REINFORCE without weights; only Geo-RS.",
        _GEO_RS | _BYPASS_PG,
        _RS_ARGUMENTS,
    ),
    "bypass_pg_geo_rs_seq_tis": (
        "REINFORCE with truncated sequence weights, and Geo-RS.",
        _SEQ_IS | _GEO_RS | _BYPASS_PG,
        _IS_RS_ARGUMENTS,
    ),
    "bypass_pg_geo_rs_token_tis": (
        "REINFORCE with truncated token weights, and Geo-RS.",
        _TOKEN_IS | _GEO_RS | _BYPASS_PG,
        _IS_RS_ARGUMENTS,
    ),
    "disabled": (
        "Metrics of the mismatch only; no weights, no rejection by a criterion.",
        {},
        {},
    ),
}

_PRESETS_BY_SCHEMA: dict[str, dict[str, _Row]] = {
    VERL: _NEWEST,
    OWN: {
        "measure": (
            "Metrics of the mismatch and of token weights, which are not applied; the default of `correct`.",
            {**_TOKEN_IS, "apply_is": False},
            _IS_ARGUMENTS,
        ),
        "decoupled_horizon_is": (
            "Decoupled PPO; each token weighted by the ratios of nearby tokens, truncated (experimental).",
            _HORIZON_IS,
            _HORIZON_ARGUMENTS,
        ),
        "bypass_pg_horizon_is": (
            "REINFORCE; each token weighted by the ratios π_θ/μ of nearby tokens, truncated (experimental).",
            _HORIZON_IS | _BYPASS_PG,
            _HORIZON_ARGUMENTS,
        ),
    },
    SHORT: {
        "tis": (
            "Short name of `decoupled_token_is`.",
            _TOKEN_IS,
            _IS_ARGUMENTS,
        ),
        "seq_tis": (
            "Short name of `decoupled_seq_is`.",
            _SEQ_IS,
            _IS_ARGUMENTS,
        ),
        "mis": (
            "Short name of `decoupled_seq_is_rs`: sequences outside the band leave the loss.",
            {**_SEQ_IS, "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
            _IS_RS_ARGUMENTS,
        ),
        "icepop": (
            "Short name of `decoupled_token_icepop`.",
            _TOKEN_ICEPOP,
            _IS_ARGUMENTS,
        ),
    },
    VERL_2025_11: {
        "token_is": (
            "Older name of `decoupled_token_is`.",
            _TOKEN_IS,
            _IS_ARGUMENTS,
        ),
        "token_tis": (
            "Older name of `decoupled_token_is`, as is `token_is`.",
            _TOKEN_IS,
            _IS_ARGUMENTS,
        ),
        "seq_is": (
            "Older name of `decoupled_seq_is`.",
            _SEQ_IS,
            _IS_ARGUMENTS,
        ),
        "seq_is_rs": (
            "Seq-TIS with rejection on the product of ratios; the band is given by its two ends.",
            {**_SEQ_IS, "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 2.0},
            {**_IS_RS_ARGUMENTS, "rs_threshold_lower": (BAND_LOWER,)},
        ),
        "seq_mis": (
            "`seq_is_rs` with one threshold for weights and rejection; lower=0 keeps all small ratios.",
            {**_SEQ_IS, "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 2.0},
            {"threshold": ("rollout_is_threshold", "rollout_rs_threshold"), "lower": (BAND_LOWER,)},
        ),
        "geo_rs": (
            "Geo-RS with the band [1/1.001, 1.001] and the per-token veto.",
            _OLDER_GEO_RS,
            _OLDER_GEO_RS_ARGUMENTS,
        ),
        "geo_mis": (
            "Geo-RS with the band [0.999, 1.001] and the per-token veto.",
            {**_OLDER_GEO_RS, BAND_LOWER: 0.999},
            _OLDER_GEO_RS_ARGUMENTS,
        ),
        # Applying the weights would count the behavior ratio twice. An explicit False avoids the warning.
        "ppo_is_bypass": (
            "PPO whose ratio is π_θ/μ; token weights are measured but not applied.",
            {**_TOKEN_IS, **_BYPASS_PPO, "apply_is": False},
            _IS_ARGUMENTS,
        ),
        "pure_is": (
            "Older name of `bypass_pg_is`.",
            _SEQ_IS | _BYPASS_PG,
            _IS_ARGUMENTS,
        ),
    },
    VERL_2025_12: {
        "bypass_pg_rs": (
            "Older name of `bypass_pg_geo_rs`.",
            _GEO_RS | _BYPASS_PG,
            _RS_ARGUMENTS,
        ),
    },
}

PRESETS = {
    name: Preset(description=description, values=values, parameters=parameters, source=source)
    for source, rows in _PRESETS_BY_SCHEMA.items()
    for name, (description, values, parameters) in rows.items()
}

Config = TypeVar("Config")


def preset_fields(name: str, arguments: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields that a preset sets, with some of its thresholds replaced.

    Raises:
        TypeError: this preset does not accept an argument.
        ValueError: no preset has this name; the message suggests the nearest.
    """
    if name not in PRESETS:
        raise ValueError(unknown_name(f"no preset is named {name!r}", name, PRESETS))
    preset = PRESETS[name]
    _check_arguments(name, arguments, preset.parameters)
    fields: dict[str, Any] = dict(preset.values)
    for argument, value in arguments.items():
        fields.update(dict.fromkeys(preset.parameters[argument], value))

    # The older names set the two ends of a band separately; the configuration expects one string.
    lower = fields.pop(BAND_LOWER, None)
    if lower is not None:
        fields["rollout_rs_threshold"] = join_band(lower, fields["rollout_rs_threshold"])
    return fields


def _check_arguments(name: str, given: Iterable[str], taken: Collection[str]) -> None:
    for argument in given:
        if argument not in taken:
            raise TypeError(unknown_name(f"preset {name!r} has no argument {argument!r}", argument, taken))


def preset_constructor(
    name: str, construct: Callable[..., Any], parameters: Iterable[str] | None = None
) -> classmethod[Any, ..., Any]:
    """Return a constructor for the preset of that name: `Config.decoupled_token_is(threshold=5.0)`.

    Args:
        name: the preset.
        construct: callback that builds a configuration of the class from the preset's name and the given arguments.
        parameters: parameters of the constructor, in order; defaults to the table's.
    """
    preset = PRESETS[name]
    taken = list(preset.parameters if parameters is None else parameters)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    # An argument's default is the value of the first field that it sets.
    defaults = {argument: preset.values.get(fields[0]) for argument, fields in preset.parameters.items()}
    signature = inspect.Signature(
        [
            inspect.Parameter("cls", kind),
            *(inspect.Parameter(argument, kind, default=defaults.get(argument)) for argument in taken),
        ]
    )

    def constructor(owner: type, *positional: object, **named: object) -> Any:  # noqa: ANN401 (the owner)
        _check_arguments(name, named, taken)
        given = signature.bind(owner, *positional, **named).arguments
        return construct(given.pop("cls"), name, **given)

    # `help` and editors show the arguments with their defaults.
    constructor.__name__, constructor.__doc__ = name, preset.description
    constructor.__signature__ = signature  # type: ignore[attr-defined]
    return classmethod(constructor)


def with_named_presets(cls: type[Config]) -> type[Config]:
    """Add one constructor per row of the table to a configuration class with `preset(name, **arguments)`."""
    for name in PRESETS:
        setattr(cls, name, preset_constructor(name, lambda owner, preset, **given: owner.preset(preset, **given)))
    return cls
