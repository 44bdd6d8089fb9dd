"""verl's configuration object: raw fields, stored unchanged and validated on use."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from rollcorr.config import CRITERIA, PRESETS, InertOptionWarning, Threshold
from rollcorr.config import RolloutCorrectionConfig as CheckedConfig
from rollcorr.config.checks import unknown_name
from rollcorr.config.correction_options import SAFETY_BOUND
from rollcorr.config.generations import KEYS
from rollcorr.config.presets import VERL, preset_constructor, preset_fields
from rollcorr.config.schemas import instead
from rollcorr.core.metric_registry import PREFIX
from rollcorr.correction.rollout_correction import correct
from rollcorr.integrations.verl import parity

if TYPE_CHECKING:
    from typing_extensions import Self

Corrected = tuple[Tensor | None, Tensor, dict[str, float]]
"""Weights or None, the loss mask in the dtype of the response mask, and prefixed metrics."""

# Options that a correction reads only if it computes weights.
WEIGHT_OPTIONS = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_batch_normalize",
    "rollout_is_floor",
    "rollout_is_horizon",
    "rollout_is_horizon_per_turn",
    "apply_is",
    "safety_bound",
    "batch_normalize_over",
)

SUPPORTED_ROLLOUT_RS_OPTIONS: set[str] = set(CRITERIA)


@dataclasses.dataclass(frozen=True)
class RawConfig(Mapping[str, Any]):
    """A dataclass that reads as a mapping of its fields, for call sites such as `config.get("rollout_is", None)`.

    Its last two fields, `verl_parity` and `impl`, select the implementation; all earlier fields are correction options.
    """

    _elsewhere: ClassVar[Mapping[str, str]]

    def corrected(self, train: Tensor, rollout: Tensor, response_mask: Tensor, *, in_loss: bool = False) -> Corrected:
        """Correct a batch; the public functions are wrappers of this method.

        Args:
            train: log π, nats, (B, T).
            rollout: log μ, nats, (B, T).
            response_mask: non-zero on tokens that the policy sampled, (B, T). Returned unchanged, bit for bit, if
                the configuration only measures.
            in_loss: the mask is for a loss that reads `rollout`, so tokens without a log-prob are always removed.
        """
        raise NotImplementedError

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 (the fields have several types)
        return vars(self)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))

    @classmethod
    def read(cls, config: Mapping[str, Any], *, verl_parity: bool = False) -> Self:
        """Return the fields of any mapping with verl's keys: this class, verl's own, a dictionary or an OmegaConf node.

        A missing `rollout_is` disables weights, as at verl's call sites.

        Args:
            config: the mapping.
            verl_parity: True computes verl's numbers, overriding the mapping.

        Raises:
            ValueError: this generation lacks a key; the message names its place, or suggests the nearest key.
        """
        # A mapping of this class is complete; in any other, a missing level means no weights.
        missing = {} if isinstance(config, cls) else {"rollout_is": None}
        options = missing | {key: config[key] for key in config if key != "_target_"}  # Hydra's key is no option
        known = [field.name for field in dataclasses.fields(cls)]
        for key in options:
            if key not in known:
                problem, hint = f"rollout_correction has no key {key!r}", cls._elsewhere.get(key)
                if not hint:
                    raise ValueError(unknown_name(problem, key, known))
                raise ValueError(f"{problem}. {hint}{'' if key in KEYS['newest'] else instead(config)}")
        return cls(**{**options, "verl_parity": verl_parity or options.get("verl_parity", False)})


@dataclasses.dataclass(frozen=True)
class RolloutCorrectionConfig(RawConfig):
    """The fields of verl's class of this name plus this library's own; `to_config()` validates and converts them.

    Attributes:
        rollout_is: level of the importance weights; None disables them.
        rollout_is_threshold: ceiling, or band "lo_hi" (IcePop). None disables weights, as in verl.
        rollout_is_batch_normalize: divide the weights by their batch mean.
        rollout_rs: rejection criteria, one text with commas, or a list.
        rollout_rs_threshold: one threshold for all, or one for each with commas.
        bypass_mode: use the rollout log-probs as old log-probs.
        loss_type: "ppo_clip" or "reinforce"; bypass mode only.
        rollout_token_veto_threshold: reject a sequence with a token of ratio below this. Not in verl 0.9.1, like all
            that follow.
        apply_is: False measures the weights without returning them.
        nonfinite: action on a NaN or infinite log-prob: "reject_token", "reject_sequence", "neutral" or "raise".
        safety_bound: clamp log weights to ± this value, nats.
        batch_normalize_over: compute the batch mean over all "valid" units, or over the "kept" ones.
        rollout_is_floor: optional; the smallest weight.
        rollout_is_horizon: λ of level "horizon", or "auto".
        rollout_is_horizon_per_turn: end its sums at holes in the response mask.
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
    rollout_is_horizon: float | Literal["auto"] | None = None
    rollout_is_horizon_per_turn: bool = False
    verl_parity: bool = False
    impl: str = "auto"

    # Keys that verl's class does not have, and their right place.
    _elsewhere = dict.fromkeys(
        KEYS["2025-10"] + KEYS["2025-11"],
        "It is an option of 2025, which rollcorr.integrations.verl.v2025_11 and .v2025_10 take",
    ) | {
        "normalizer": (
            "The actor of verl divides its loss by token counts of its own: what is kept in a decoupled correction, "
            "all tokens in bypass mode. Leave it out, or take rollcorr.policy_loss in the place of verl's loss"
        )
    }

    def corrected(self, train: Tensor, rollout: Tensor, response_mask: Tensor, *, in_loss: bool = False) -> Corrected:
        """Correct by `rollcorr.correct`, or with verl 0.9.1's own numbers."""
        config = self.to_correction()
        if self.verl_parity:
            weights, mask, found = parity.correct(train, rollout, response_mask, config)
            weights, metrics = weights if config.apply_is else None, parity.to_floats(found, prefix=PREFIX)
        else:
            # verl normalizes over the default process group if initialized; everything else is local to the batch.
            over_all = config.rollout_is_batch_normalize and torch.distributed.is_available()
            group = torch.distributed.group.WORLD if over_all else None
            correction = correct(train, rollout, response_mask, config, group=group, densities=True)
            weights, metrics = correction.loss_weights, correction.metrics()

            # As in verl, metrics of rejection exist only with a criterion; verl-omni's tests check this.
            if not config.criteria and config.rollout_token_veto_threshold is None:
                metrics = {key: value for key, value in metrics.items() if not key.startswith(f"{PREFIX}rollout_rs_")}
            mask = correction.loss_mask.to(response_mask.dtype)
        return weights, response_mask if config.only_measures and not in_loss else mask, metrics

    def to_config(self) -> CheckedConfig:
        """Return this library's validated configuration: the same correction, operating mode and loss.

        Raises:
            TypeError: a value's type is invalid.
            ValueError: a value is outside its limits.
        """
        options = {**self, "rollout_is": _effective_level(self)}
        del options["verl_parity"]
        if self.rollout_is_threshold is None:
            del options["rollout_is_threshold"]  # in this library None means weights without a ceiling
        return CheckedConfig(**options)

    def to_correction(self) -> CheckedConfig:
        """Return only weighting and rejection: the options of `to_config` that a correction reads and uses.

        Raises:
            TypeError: a value's type is invalid.
            ValueError: a value is outside its limits.
        """
        # Drop unused thresholds, so that they are not reported as inert in every step.
        unread = {"bypass_mode", "loss_type", "verl_parity"}
        if _effective_level(self) is None:
            unread.update(WEIGHT_OPTIONS)
        if self.rollout_rs is None:
            unread.update(("rollout_rs", "rollout_rs_threshold"))
        return CheckedConfig(**{name: value for name, value in self.items() if name not in unread})


def _build_preset(owner: type, name: str, **given: object) -> Any:  # noqa: ANN401 (owner)
    """Return the preset with some thresholds replaced; verl passes the two ends of an IcePop band separately."""
    if name in BAND_PRESETS:
        lower, upper = str(PRESETS[name].values["rollout_is_threshold"]).split("_")
        given = {"threshold": f"{given.get('threshold_lower', lower)}_{given.get('threshold', upper)}"}
    return owner(**{"rollout_is": None, **preset_fields(name, given)})


# The constructors of verl 0.9.1; docs/reference/presets.md lists their values.
BAND_PRESETS = ("decoupled_token_icepop", "bypass_pg_token_icepop")
for _name, _preset in PRESETS.items():
    if _preset.source == VERL:
        _ends = ("threshold_lower",) if _name in BAND_PRESETS else ()
        setattr(RolloutCorrectionConfig, _name, preset_constructor(_name, _build_preset, (*_preset.parameters, *_ends)))


def _effective_level(config: RolloutCorrectionConfig) -> str | None:
    """Return `rollout_is`, or None if verl computes no weights although a level is set.

    Raises:
        TypeError: the threshold is a bool. verl's own tests match this message.
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
