"""verl's named configurations, read from `rollcorr.config.presets` and kept raw: arguments are stored as they are given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from rollcorr.config.presets import PRESETS


class NamedPreset:
    """A class attribute that constructs the preset of its own name: `Config.decoupled_token_is(threshold=5.0)`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self.__doc__ = PRESETS[name].description

    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        return partial(_construct, owner, self._name)


def _construct(owner: type, name: str, *positional: object, **arguments: object) -> Any:  # noqa: ANN401 (owner)
    """The preset with some thresholds replaced, positionally in the order of the table or by name.

    Raises:
        TypeError: an argument that this preset does not take.
    """
    preset = PRESETS[name]
    parameters = dict(preset.parameters)
    values: dict[str, Any] = {"rollout_is": None, **preset.values}
    if name.endswith("_icepop"):  # verl gives the two ends of the band apart
        parameters["threshold_lower"] = ()
    if len(positional) > len(parameters):
        raise TypeError(f"{name} takes {len(parameters)} arguments; got {len(positional)}")
    given = dict(zip(parameters, positional, strict=False))
    for argument in arguments:
        if argument not in parameters or argument in given:
            raise TypeError(f"{name} takes {', '.join(parameters) or 'no argument'}; got {argument}, or got it twice")
    given |= arguments
    if name.endswith("_icepop"):
        lower, upper = str(values["rollout_is_threshold"]).split("_")
        given = {"threshold": f"{given.get('threshold_lower', lower)}_{given.get('threshold', upper)}"}
    for argument, value in given.items():
        values |= dict.fromkeys(parameters[argument], value)
    return owner(**values)


class VerlPresets:
    """The constructors of verl 0.9.1; docs/presets.md lists their values."""

    decoupled_token_is: ClassVar = NamedPreset()
    decoupled_seq_is: ClassVar = NamedPreset()
    decoupled_token_icepop: ClassVar = NamedPreset()
    decoupled_seq_is_rs: ClassVar = NamedPreset()
    decoupled_geo_rs: ClassVar = NamedPreset()
    decoupled_geo_rs_seq_tis: ClassVar = NamedPreset()
    decoupled_geo_rs_token_tis: ClassVar = NamedPreset()
    decoupled_k3_rs: ClassVar = NamedPreset()
    decoupled_k3_rs_seq_tis: ClassVar = NamedPreset()
    decoupled_k3_rs_token_tis: ClassVar = NamedPreset()
    bypass_ppo_clip: ClassVar = NamedPreset()
    bypass_ppo_clip_geo_rs: ClassVar = NamedPreset()
    bypass_ppo_clip_k3_rs: ClassVar = NamedPreset()
    bypass_pg_is: ClassVar = NamedPreset()
    bypass_pg_token_icepop: ClassVar = NamedPreset()
    bypass_pg_geo_rs: ClassVar = NamedPreset()
    bypass_pg_geo_rs_seq_tis: ClassVar = NamedPreset()
    bypass_pg_geo_rs_token_tis: ClassVar = NamedPreset()
    disabled: ClassVar = NamedPreset()
