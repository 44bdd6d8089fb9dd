"""verl's named configurations, made from the table of presets and kept raw: arguments are stored as they are given."""

from __future__ import annotations

from typing import Any, TypeVar

from rollcorr.config.presets import PRESETS, VERL, NamedPreset

Config = TypeVar("Config")


def with_verl_presets(cls: type[Config]) -> type[Config]:
    """Give verl's configuration the constructors of verl 0.9.1; docs/presets.md lists their values."""
    for name, preset in PRESETS.items():
        if preset.source == VERL:
            setattr(cls, name, NamedPreset(name, _construct, _parameters(name)))
    return cls


def _parameters(name: str) -> tuple[str, ...]:
    """The arguments of verl's constructor; it takes the two ends of an IcePop band apart."""
    ends = ("threshold_lower",) if name.endswith("_icepop") else ()
    return (*PRESETS[name].parameters, *ends)


def _construct(owner: type, name: str, **given: object) -> Any:  # noqa: ANN401 (owner)
    """The preset with some thresholds replaced, by their raw values."""
    preset = PRESETS[name]
    values: dict[str, Any] = {"rollout_is": None, **preset.values}

    # This library writes the band as one text.
    if name.endswith("_icepop"):
        lower, upper = str(values["rollout_is_threshold"]).split("_")
        given = {"threshold": f"{given.get('threshold_lower', lower)}_{given.get('threshold', upper)}"}

    for argument, value in given.items():
        values |= dict.fromkeys(preset.parameters[argument], value)
    return owner(**values)
