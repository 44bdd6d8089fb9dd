"""verl's configuration object: raw fields, kept as they are given and checked on use."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rollcorr.config import CRITERIA, InertOptionWarning, Threshold
from rollcorr.config import RolloutCorrectionConfig as CheckedConfig
from rollcorr.config.checks import unknown_name
from rollcorr.config.correction_options import SAFETY_BOUND
from rollcorr.config.generations import KEYS
from rollcorr.config.presets import PRESETS, VERL, NamedPreset

if TYPE_CHECKING:
    from typing_extensions import Self

Config = TypeVar("Config")

# What a correction reads only where it computes weights.
WEIGHT_OPTIONS = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_batch_normalize",
    "rollout_is_floor",
    "apply_is",
    "safety_bound",
    "batch_normalize_over",
)

# Options of this library that say how the loss is divided, which is verl's own doing.
NOT_IN_VERL = {
    "normalizer": (
        " The actor of verl divides its loss by token counts of its own: what is kept in a decoupled correction, all "
        "tokens in bypass mode. Leave it out, or take rollcorr.policy_loss in the place of verl's loss"
    ),
}

SUPPORTED_ROLLOUT_RS_OPTIONS: set[str] = set(CRITERIA)


class RawConfig(Mapping[str, Any]):
    """A dataclass that reads as a mapping of its fields, for call sites such as `config.get("rollout_is", None)`.

    Its last two fields, `verl_parity` and `impl`, say how it is computed; the others are options of a correction.
    """

    def to_config(self) -> CheckedConfig:
        """The checked configuration of this library: the same correction, operating mode and loss.

        Raises:
            TypeError: a value of the wrong type.
            ValueError: a value outside its limits.
        """
        return self._checked({name: self[name] for name in self if name != "verl_parity"})

    def _checked(self, options: dict[str, Any]) -> CheckedConfig:
        raise NotImplementedError

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 (the fields have several types)
        if key not in self._fields():
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields())

    def __len__(self) -> int:
        return len(self._fields())

    @classmethod
    def read(cls, config: Mapping[str, Any], *, verl_parity: bool = False) -> Self:
        """The fields of any mapping with verl's keys: this class, verl's own, a dictionary or an OmegaConf node.

        A missing `rollout_is` means None, as at verl's call sites.

        Args:
            config: the mapping.
            verl_parity: True asks for verl's numbers, whatever the mapping says.

        Raises:
            ValueError: a key that this generation does not have; says where it belongs, or suggests the nearest.
        """
        # A mapping of this class is complete; in any other, a missing level is no level.
        missing = {} if isinstance(config, cls) else {"rollout_is": None}
        options = missing | {key: config[key] for key in config if key != "_target_"}  # Hydra's key is no option
        for key in options:
            if key not in cls._fields():
                problem, hint = f"rollout_correction has no key {key!r}", cls._hint(key)
                raise ValueError(f"{problem}.{hint}" if hint else unknown_name(problem, key, cls._fields()))
        return cls(**{**options, "verl_parity": verl_parity or options.get("verl_parity", False)})

    @classmethod
    def _hint(cls, key: str) -> str:
        """Return where a key of another generation belongs, or why it cannot act; empty for an unknown key."""
        raise NotImplementedError

    @classmethod
    def _fields(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]


def with_verl_presets(cls: type[Config]) -> type[Config]:
    """Give verl's configuration the constructors of verl 0.9.1; docs/reference/presets.md lists their values."""
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


@with_verl_presets
@dataclasses.dataclass(frozen=True)
class RolloutCorrectionConfig(RawConfig):
    """What verl's class of this name holds and what this library adds, with `to_config()` to check and convert it.

    Attributes:
        rollout_is: level of the importance weights; None for none.
        rollout_is_threshold: ceiling, or band "lo_hi" (IcePop). None computes no weights, as in verl.
        rollout_is_batch_normalize: divide the weights by their batch mean.
        rollout_rs: rejection criteria, one text with commas, or a list.
        rollout_rs_threshold: one threshold for all, or one for each with commas.
        bypass_mode: take the rollout log-probs as old log-probs.
        loss_type: "ppo_clip" or "reinforce"; bypass mode only.
        rollout_token_veto_threshold: reject a sequence with a token of ratio below this. Not in verl 0.9.1, like all
            that follow.
        apply_is: False measures the weights and returns none.
        nonfinite: what a NaN or infinite log-prob does: "reject_token", "reject_sequence", "neutral" or "raise".
        safety_bound: log weights are clamped to ± this many nats.
        batch_normalize_over: the batch mean is that of all "valid" units, or of the "kept" ones.
        rollout_is_floor: the smallest weight; None for none.
        verl_parity: compute verl 0.9.1's numbers where they differ from this library's.
        impl: which kernel computes the correction, as in `rollcorr.correct`.
    """

    rollout_is: str | None = "sequence"
    rollout_is_threshold: Threshold | None = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | Sequence[str] | None = None
    rollout_rs_threshold: Threshold | None = None
    bypass_mode: bool = False
    loss_type: str = "ppo_clip"
    rollout_token_veto_threshold: float | None = None
    apply_is: bool = True
    nonfinite: str = "reject_token"
    safety_bound: float = SAFETY_BOUND
    batch_normalize_over: str = "valid"
    rollout_is_floor: float | None = None
    verl_parity: bool = False
    impl: str = "auto"

    def _checked(self, options: dict[str, Any]) -> CheckedConfig:
        options["rollout_is"] = _level(self)
        if self.rollout_is_threshold is None:
            del options["rollout_is_threshold"]  # here, None would mean weights without a ceiling
        return CheckedConfig(**options)

    def to_correction(self) -> CheckedConfig:
        """What to weight and reject alone: the parts of `to_config` that a correction reads, and only those in use.

        Raises:
            TypeError: a value of the wrong type.
            ValueError: a value outside its limits.
        """
        # Thresholds that nothing uses are left out, so that they are not reported as inert in every step.
        names = ["rollout_token_veto_threshold", "nonfinite", "impl"]
        if _level(self) is not None:
            names += WEIGHT_OPTIONS
        if self.rollout_rs is not None:
            names += ["rollout_rs", "rollout_rs_threshold"]
        options = {name: self[name] for name in names}
        return CheckedConfig(**options)

    @classmethod
    def _hint(cls, key: str) -> str:
        if key in NOT_IN_VERL:
            return NOT_IN_VERL[key]
        if key in KEYS["2025-10"] or key in KEYS["2025-11"]:
            return (
                " It is an option of 2025: `rollcorr convert-config` rewrites it, and "
                "rollcorr.integrations.verl.v2025_11 and .v2025_10 take the older ones"
            )
        return ""


def _level(config: RolloutCorrectionConfig) -> str | None:
    """`rollout_is`, or None where verl computes no weights although a level is set.

    Raises:
        TypeError: the threshold is a bool. The words are those that verl's own tests look for.
    """
    if isinstance(config.rollout_is_threshold, bool):
        raise TypeError(
            f"rollout_is_threshold must be a number or a text such as '0.5_5.0', not a boolean; got "
            f"{config.rollout_is_threshold}"
        )
    if config.rollout_is is not None and config.rollout_is_threshold is None:
        warnings.warn(
            f"rollout_is={config.rollout_is!r} has no effect with rollout_is_threshold=None: verl computes no weights "
            "then. Set a threshold, or rollout_is=None",
            InertOptionWarning,
            stacklevel=4,
        )
        return None
    return config.rollout_is
