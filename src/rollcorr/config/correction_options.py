"""What to weight, what to reject, and in which mode: `RolloutCorrectionConfig`.

It is frozen, keyword-only and checked at construction: a wrong type is a TypeError, a wrong value a ValueError, and an
option that can have no effect beside the others warns (`InertOptionWarning`). Texts are parsed here, once, into typed
criteria and bounds. Nothing here imports torch.

ρ = exp(log π − log μ) is the ratio train / rollout; docs/reference/notation.md has the symbols.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from rollcorr.config.checks import (
    check_bool,
    check_choice,
    check_number,
    names_unknown_options,
    warn_inert,
)
from rollcorr.config.criteria import (
    Criterion,
    Threshold,
    canonical_rejection,
    is_weight_band,
    parse_is_threshold,
    parse_rejection,
    threshold_texts,
)
from rollcorr.config.option_types import NamedPresets
from rollcorr.config.presets import preset_fields, with_named_presets

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from rollcorr.config.option_types import ConfigOptions

Level = Literal["token", "sequence", "geometric"]
IsMode = Literal["truncate", "icepop", "none"]
LossType = Literal["ppo_clip", "reinforce"]
NonfinitePolicy = Literal["reject_token", "reject_sequence", "neutral", "raise"]
Normalizer = Literal["kept", "original", "weights"]
NormalizedUnits = Literal["valid", "kept"]
Implementation = Literal["auto", "reference", "torch", "cpu", "triton"]

_CHOICES = {
    "rollout_is": Level,
    "loss_type": LossType,
    "nonfinite": NonfinitePolicy,
    "normalizer": Normalizer,
    "batch_normalize_over": NormalizedUnits,
    "impl": Implementation,
}

SAFETY_BOUND = 20.0
"""Nats: the largest |log ratio| that enters an exponential, in weights, divergences and losses."""

# exp(88.7) is the largest power of e that float32 holds.
LARGEST_SAFETY_BOUND = 88.0

KERNEL_SAFETY_BOUND = 40.0
"""Nats: up to here the compiled kernels take it, since they sum squares of weights in float32."""


@with_named_presets
@names_unknown_options
@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig(NamedPresets):
    """What to weight, what to reject, and in which operating mode. The defaults only measure.

    The defaults take nothing out of the loss mask but tokens without a usable log-prob (`nonfinite`).

    Attributes:
        rollout_is: level of the importance weights: "token" ρ_t, "sequence" Π_t ρ_t, "geometric" (Π_t ρ_t)^(1/T). None
            computes no weights.
        rollout_is_threshold: a ceiling C truncates: min(w, C). A band "lo_hi" zeroes weights outside it (IcePop), and
            "0_hi" or "lo_inf" leaves a side open. None bounds the weights by `safety_bound` alone.
        rollout_is_batch_normalize: divide the weights by their mean over the batch (after truncation).
        rollout_rs: rejection criteria, in one text with commas or in a list. Each is scope_kind with scope token,
            seq_sum, seq_mean or seq_max and kind k1, k2 or k3 (there is no seq_max_k1); for diffusion also step_kl.
            All must hold. The field keeps them as one text.
        rollout_rs_threshold: one threshold for all criteria, or one for each, with commas.
        bypass_mode: use μ itself as π_old, and skip the old log-probs.
        loss_type: "ppo_clip", or (bypass only) "reinforce".
        rollout_token_veto_threshold: reject a sequence with any token of ρ_t strictly below this; None for no veto.
        apply_is: False measures the weights and leaves the loss unweighted.
        nonfinite: what a NaN or ±inf log-prob on a valid token does: reject the token, reject its sequence, count as
            ratio 1, or raise an error (which waits for the device).
        safety_bound: log weights are clamped to ± this many nats before exp. At most 88, where float32 ends.
        normalizer: the loss is divided by what is "kept", by all "original" tokens, or by the applied "weights".
        batch_normalize_over: the batch mean is that of all "valid" units, or of the "kept" ones.
        rollout_is_floor: the smallest weight: max(w, floor), beside a ceiling or alone. A ratio of exactly 0 keeps the
            weight 0. None leaves small weights as they are.
        impl: which kernel computes this: "auto" takes the fastest that is proven on the device. It does not say what is
            computed, so configurations that differ in it alone are equal.

    Raises:
        TypeError: a value is of the wrong type (a bool is no number, a list no threshold).
        ValueError: a value is outside its limits, a threshold is malformed, or "reinforce" is asked for without bypass.

    Example:
        >>> config = RolloutCorrectionConfig(rollout_rs="token_k1,seq_mean_k3", rollout_rs_threshold="0.5_2.0,0.01")
        >>> config.criteria[0]
        Criterion(scope='token', kind='k1', lower=0.5, upper=2.0)
    """

    rollout_is: Level | None = None
    rollout_is_threshold: Threshold | None = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | Sequence[str] | None = None
    rollout_rs_threshold: Threshold | None = None
    bypass_mode: bool = False
    loss_type: LossType = "ppo_clip"
    rollout_token_veto_threshold: float | None = None
    apply_is: bool = True
    nonfinite: NonfinitePolicy = "reject_token"
    safety_bound: float = SAFETY_BOUND
    normalizer: Normalizer = "kept"
    batch_normalize_over: NormalizedUnits = "valid"
    rollout_is_floor: float | None = None
    impl: Implementation = field(default="auto", compare=False)

    def __post_init__(self) -> None:
        # First each field by itself: choices, switches, numbers. Only `rollout_is` may be None.
        for option, choices in _CHOICES.items():
            check_choice(option, getattr(self, option), get_args(choices), optional=option == "rollout_is")
        for option in ("rollout_is_batch_normalize", "bypass_mode", "apply_is"):
            check_bool(option, getattr(self, option))

        self._set(
            "safety_bound", check_number("safety_bound", self.safety_bound, above=0, at_most=LARGEST_SAFETY_BOUND)
        )
        for option in ("rollout_token_veto_threshold", "rollout_is_floor"):
            if getattr(self, option) is not None:
                self._set(option, check_number(option, getattr(self, option), above=0))

        # Thresholds come as numbers or texts, and those of rejection belong to the criteria in `rollout_rs`.
        self._parse_thresholds()

        # Then the fields beside each other: one combination is an error, others leave an option without effect.
        if self.loss_type == "reinforce" and not self.bypass_mode:
            raise ValueError(
                "loss_type='reinforce' needs bypass_mode=True: without bypass the loss is PPO with π_old; "
                "set bypass_mode=True, or loss_type='ppo_clip'"
            )
        self._check_floor()

        # What follows from the fields is known from here on: torch.compile cannot trace a value that is kept when it is
        # first asked for.
        for derived in ("criteria", "is_lower", "is_upper", "is_mode", "weights_reach_loss"):
            getattr(self, derived)
        warn_inert(self, self._inert_options())

    @classmethod
    def preset(cls, name: str, **arguments: Threshold | None) -> Self:
        """The preset of that name, with some of its thresholds replaced.

        Each preset is a constructor of its own name too: `preset("decoupled_token_is", threshold=5.0)` is
        `decoupled_token_is(threshold=5.0)`. docs/reference/presets.md lists them all.

        Raises:
            TypeError: an argument that this preset does not take.
            ValueError: no preset has this name; the nearest is suggested.

        Example:
            >>> RolloutCorrectionConfig.preset("decoupled_token_is", threshold=5.0).rollout_is_threshold
            5.0
        """
        # A name alone always means the same configuration, so it is made and checked once.
        if arguments:
            return cls(**preset_fields(name, arguments))
        return cast("Self", _resolved_preset(cast("Any", cls), name))

    def with_options(self, **options: Unpack[ConfigOptions]) -> Self:
        """The same with some fields replaced: `dataclasses.replace`, kept for the next call with the same ones.

        Raises:
            TypeError: there is no such field; the nearest is suggested. Or a value is of the wrong type.
            ValueError: as at construction.

        Example:
            >>> RolloutCorrectionConfig(rollout_is="token").with_options(rollout_is_threshold=3.0).is_upper
            3.0
        """
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        # Equal configurations may differ in `impl`, and what is kept for one must not be given to the other.
        replaced: Self = _replaced(self, self.impl, tuple(sorted(fields.items())))
        return replaced

    @cached_property
    def criteria(self) -> tuple[Criterion, ...]:
        """The rejection criteria, typed, in the order written; empty without `rollout_rs`."""
        return () if self.rollout_rs is None else parse_rejection(self.rollout_rs, self.rollout_rs_threshold)

    @cached_property
    def is_lower(self) -> float | None:
        """Lower end of the IcePop band on weights; None where it is open, and in the other modes."""
        return parse_is_threshold(self.rollout_is_threshold)[0]

    @cached_property
    def is_upper(self) -> float | None:
        """Ceiling on weights (truncate), or upper end of the band (icepop); None where there is none."""
        return parse_is_threshold(self.rollout_is_threshold)[1]

    @cached_property
    def is_mode(self) -> IsMode:
        """How weights are bounded: "truncate" by ceiling or floor, "icepop" by a band, "none" by the safety bound."""
        if is_weight_band(self.rollout_is_threshold):
            return "icepop"
        return "none" if self.is_upper is None and self.rollout_is_floor is None else "truncate"

    @cached_property
    def weights_reach_loss(self) -> bool:
        """True iff weights multiply the loss. In bypass ppo_clip they would count the behavior ratio twice."""
        ratio_is_the_weight = self.bypass_mode and self.loss_type == "ppo_clip"
        return self.rollout_is is not None and self.apply_is and not ratio_is_the_weight

    @cached_property
    def only_measures(self) -> bool:
        """True iff it has neither weights nor rejection: an adapter then keeps the trainer's mask, counts and loss.

        `nonfinite="reject_token"`, the default, then only keeps missing log-probs out of the metrics.
        """
        rejects = bool(self.criteria) or self.rollout_token_veto_threshold is not None
        rejects = rejects or self.nonfinite == "reject_sequence"
        return not (self.bypass_mode or self.weights_reach_loss or rejects)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values; `RolloutCorrectionConfig(**config.to_dict())` equals the original."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _set(self, option: str, value: object) -> None:
        """Write the checked form of a field during construction, past the frozen dataclass."""
        object.__setattr__(self, option, value)

    def _parse_thresholds(self) -> None:
        """Parse the threshold fields, and write them in one form: numbers as floats, criteria without repeats."""
        if self.is_upper is not None and not isinstance(self.rollout_is_threshold, str):
            self._set("rollout_is_threshold", self.is_upper)

        threshold = self.rollout_rs_threshold
        if threshold is not None and not isinstance(threshold, str):
            threshold = float(threshold_texts(threshold)[0])
        if self.rollout_rs is not None:
            names, threshold = canonical_rejection(self.rollout_rs, threshold)
            self._set("rollout_rs", names)
        self._set("rollout_rs_threshold", threshold)

    def _check_floor(self) -> None:
        """A floor raises small weights: beside a band, which zeroes them, or above the ceiling it makes no sense."""
        floor, ceiling = self.rollout_is_floor, self.is_upper
        if floor is None:
            return
        if self.is_mode == "icepop":
            raise ValueError(
                f"rollout_is_floor={floor!r} and the band rollout_is_threshold={self.rollout_is_threshold!r} exclude "
                "each other: a band gives small weights 0, a floor raises them; leave one of them out"
            )
        if ceiling is not None and floor > ceiling:
            raise ValueError(
                f"rollout_is_floor={floor!r} exceeds the ceiling rollout_is_threshold={ceiling!r}; swap them"
            )

    def _inert_options(self) -> list[tuple[str, str]]:
        """Each option that is set but can have no effect beside the others, with the reason and the fix."""
        computed, applied = self.rollout_is is not None, self.weights_reach_loss
        without_is = "has no effect without rollout_is; set rollout_is, or leave this out"
        cases = [
            # Weights: are any computed, and do they reach the loss?
            (not computed and self.rollout_is_threshold != 2.0, "rollout_is_threshold", without_is),
            (not computed and self.rollout_is_floor is not None, "rollout_is_floor", without_is),
            (not computed and not self.apply_is, "apply_is", without_is),
            (
                computed and self.apply_is and not applied,
                "rollout_is",
                "does not weight the loss in bypass mode with loss_type='ppo_clip', whose ratio holds the "
                "correction already: weights are metrics only. Write apply_is=False, or loss_type='reinforce'",
            ),
            (
                not applied and self.rollout_is_batch_normalize,
                "rollout_is_batch_normalize",
                "has no effect on the loss, because no weights are applied to it; leave it out",
            ),
            (
                not applied and self.normalizer == "weights",
                "normalizer",
                "is the same as 'kept', because no weights are applied to the loss",
            ),
            (
                self.batch_normalize_over != "valid" and not self.rollout_is_batch_normalize,
                "batch_normalize_over",
                "has no effect without rollout_is_batch_normalize",
            ),
            (
                self.is_upper is not None and math.log(self.is_upper) > self.safety_bound,
                "rollout_is_threshold",
                f"is never reached: safety_bound={self.safety_bound:g} ends weights below",
            ),
            (
                self.rollout_is_floor is not None and math.log(self.rollout_is_floor) < -self.safety_bound,
                "rollout_is_floor",
                f"is never reached: safety_bound={self.safety_bound:g} ends weights above",
            ),
            # Rejection: are there criteria, and can each of them reject anything?
            (
                self.rollout_rs is None and self.rollout_rs_threshold is not None,
                "rollout_rs_threshold",
                "has no effect without rollout_rs; set rollout_rs, or leave this out",
            ),
            *(
                (
                    criterion.lower is None and criterion.upper is None,
                    "rollout_rs_threshold",
                    f"leaves both sides of {criterion.name} open: it rejects nothing",
                )
                for criterion in self.criteria
            ),
        ]
        return [(option, reason) for inert, option, reason in cases if inert]


@lru_cache(maxsize=256)
def _resolved_preset(cls: Any, name: str) -> Any:  # noqa: ANN401 (a class, and an instance of it)
    """A preset without arguments: the call in a training loop that names one pays for its checks once."""
    return cls(**preset_fields(name, {}))


@lru_cache(maxsize=256)
def _replaced(config: Any, impl: str, options: tuple[tuple[str, Any], ...]) -> Any:  # noqa: ANN401 (a configuration)
    """A configuration with some fields replaced: the call in a training loop that names some pays once."""
    return dataclasses.replace(config, **({"impl": impl} | dict(options)))
