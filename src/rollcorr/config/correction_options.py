"""Options for weights, rejection and operating mode: `RolloutCorrectionConfig`.

It is frozen, keyword-only and checked at construction. An invalid type raises `TypeError`, an invalid value raises
`ValueError`, and an option without effect warns (`InertOptionWarning`). Strings are parsed once, at construction, into
typed criteria and bounds. This module does not import torch.

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

Level = Literal["token", "sequence", "geometric", "horizon"]
IsMode = Literal["truncate", "icepop", "none"]
LossType = Literal["ppo_clip", "reinforce"]
NonfinitePolicy = Literal["reject_token", "reject_sequence", "neutral", "raise"]
Normalizer = Literal["kept", "original", "weights"]
NormalizedUnits = Literal["valid", "kept"]
Implementation = Literal["auto", "reference", "torch", "cpu", "triton"]

_OPTION_TYPES = {
    "rollout_is": Level,
    "loss_type": LossType,
    "nonfinite": NonfinitePolicy,
    "normalizer": Normalizer,
    "batch_normalize_over": NormalizedUnits,
    "impl": Implementation,
}

SAFETY_BOUND = 20.0
"""Nats: the largest |log ratio| that enters an exponential, in weights, divergences and losses."""

# exp(88.7) is the largest power of e that fits into float32.
LARGEST_SAFETY_BOUND = 88.0

KERNEL_SAFETY_BOUND = 40.0
"""Nats: limit of the compiled kernels, which sum squares of weights in float32."""


@with_named_presets
@names_unknown_options
@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig(NamedPresets):
    """Configuration of weights, rejection and operating mode. The defaults only measure.

    By default, only tokens without a usable log-prob leave the loss mask (`nonfinite`).

    Attributes:
        rollout_is: level of the importance weights: "token" ρ_t, "sequence" Π_t ρ_t, "geometric" (Π_t ρ_t)^(1/T),
            "horizon" Π_s ρ_s^(λ^|t−s|) (experimental). Optional; no weights are computed by default.
        rollout_is_threshold: a ceiling C truncates weights to min(w, C). A band "lo_hi" sets weights outside it to 0
            (IcePop); "0_hi" and "lo_inf" have one open side. If None, only `safety_bound` limits the weights.
        rollout_is_batch_normalize: divide the weights by their mean over the batch (after truncation).
        rollout_rs: rejection criteria, as one comma-separated string or a list. The name of a criterion is scope_kind,
            with scope token, seq_sum, seq_mean or seq_max and kind k1, k2 or k3 (except seq_max_k1); diffusion also
            has step_kl. A token is kept if it and its sequence meet all criteria. The field stores one string.
        rollout_rs_threshold: one threshold for all criteria, or a comma-separated list with one for each.
        bypass_mode: use μ as π_old; old log-probs are then not needed.
        loss_type: "ppo_clip", or (bypass only) "reinforce".
        rollout_token_veto_threshold: reject sequences that contain a token with ρ_t below this; off by default.
        apply_is: whether weights multiply the loss; if False, they are only measured.
        nonfinite: action for a valid token with a missing log-prob (NaN or ±inf, except log π = −inf, whose ratio is
            0): "reject_token", "reject_sequence", "neutral" (ratio 1), or "raise" an error, which waits for the device.
        safety_bound: log weights are clamped to ± this value, in nats, before exp. At most 88, the limit of float32.
        normalizer: denominator of the loss: the "kept" or all "original" tokens or sequences, as `loss_agg_mode` counts
            them, or the sum of the applied "weights".
        batch_normalize_over: weights that `rollout_is_batch_normalize` averages: all "valid" ones, or only "kept" ones.
        rollout_is_floor: the smallest weight: max(w, floor), with or without a ceiling. A ratio of exactly 0 keeps the
            weight 0. Optional; no floor by default.
        rollout_is_horizon: λ of "horizon", 0 to 1: 0 gives token weights, 1 sequence weights; 1/(1 − λ) is the horizon
            in tokens. "auto" chooses λ for each batch, from the batch's size and mismatch.
        rollout_is_horizon_per_turn: end the products of "horizon" at each gap in the response mask, so that only ratios
            of the same turn count.
        impl: kernel to use. "auto" selects the fastest one that passed its tests on the device. Configurations that
            differ only in this field are equal.

    Raises:
        TypeError: a value has an invalid type (a bool is not a number, a list is not a threshold).
        ValueError: a value is outside its limits, a threshold is malformed, or "reinforce" is set without bypass.

    Example:
        >>> config = RolloutCorrectionConfig(rollout_rs="token_k1,seq_mean_k3", rollout_rs_threshold="0.5_2.0,0.01")
        >>> config.criteria[0]
        Criterion(scope='token', kind='k1', lower=0.5, upper=2.0)
    """

    _unknown_hint = ". For options of 2025, write rollcorr.config.convert(dict(…)).config"

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
    rollout_is_horizon: float | Literal["auto"] | None = None
    rollout_is_horizon_per_turn: bool = False
    impl: Implementation = field(default="auto", compare=False)

    def __post_init__(self) -> None:
        # First check each field: choices, switches, numbers. Of the choices, only `rollout_is` may be `None`.
        for option, choices in _OPTION_TYPES.items():
            check_choice(option, getattr(self, option), get_args(choices), optional=option == "rollout_is")
        for option in ("rollout_is_batch_normalize", "rollout_is_horizon_per_turn", "bypass_mode", "apply_is"):
            check_bool(option, getattr(self, option))

        self._set_frozen(
            "safety_bound", check_number("safety_bound", self.safety_bound, above=0, at_most=LARGEST_SAFETY_BOUND)
        )
        for option in ("rollout_token_veto_threshold", "rollout_is_floor"):
            if getattr(self, option) is not None:
                self._set_frozen(option, check_number(option, getattr(self, option), above=0))

        # Thresholds are numbers or strings; rejection thresholds belong to the criteria in `rollout_rs`.
        self._parse_thresholds()

        # Then check combinations: some are errors; others leave an option without effect, and cause a warning.
        if self.loss_type == "reinforce" and not self.bypass_mode:
            raise ValueError(
                "loss_type='reinforce' needs bypass_mode=True: without bypass the loss is PPO with π_old; "
                "set bypass_mode=True, or loss_type='ppo_clip'"
            )
        self._check_floor()
        self._check_horizon()

        # Compute derived values now: torch.compile cannot trace a property that is cached on first use.
        for derived in ("criteria", "is_lower", "is_upper", "is_mode", "weights_reach_loss", "weighs_tokens"):
            getattr(self, derived)
        warn_inert(self, self._inert_options())

    @classmethod
    def preset(cls, name: str, **arguments: Threshold | None) -> Self:
        """Return the preset of that name, with some of its thresholds replaced.

        Each preset is also a constructor of the same name: `preset("decoupled_token_is", threshold=5.0)` is
        `decoupled_token_is(threshold=5.0)`. docs/reference/presets.md lists them all.

        Raises:
            TypeError: this preset does not accept an argument.
            ValueError: no preset has this name; the message suggests the nearest.

        Example:
            >>> RolloutCorrectionConfig.preset("decoupled_token_is", threshold=5.0).rollout_is_threshold
            5.0
        """
        # A name without arguments is always the same configuration, so cache it.
        if arguments:
            return cls(**preset_fields(name, arguments))
        return cast("Self", _cached_preset(cast("Any", cls), name))

    def with_options(self, **options: Unpack[ConfigOptions]) -> Self:
        """Return a copy with some fields replaced: `dataclasses.replace`, cached for calls with the same options.

        Raises:
            TypeError: there is no such field (the message suggests the nearest), or a value has an invalid type.
            ValueError: as at construction.

        Example:
            >>> RolloutCorrectionConfig(rollout_is="token").with_options(rollout_is_threshold=3.0).is_upper
            3.0
        """
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        # Equal configurations may differ in `impl`, so the cache key includes it.
        return cast("Self", _cached_replace(self, self.impl, tuple(sorted(fields.items()))))

    @cached_property
    def criteria(self) -> tuple[Criterion, ...]:
        """The rejection criteria, typed, in the order written; empty without `rollout_rs`."""
        return () if self.rollout_rs is None else parse_rejection(self.rollout_rs, self.rollout_rs_threshold)

    @cached_property
    def is_lower(self) -> float | None:
        """Lower end of the IcePop band on weights; None if it is open, and in the other modes."""
        return parse_is_threshold(self.rollout_is_threshold)[0]

    @cached_property
    def is_upper(self) -> float | None:
        """Ceiling on weights (truncate), or upper end of the band (icepop); None if unbounded."""
        return parse_is_threshold(self.rollout_is_threshold)[1]

    @cached_property
    def is_mode(self) -> IsMode:
        """Bound on weights: "truncate" is a ceiling or floor, "icepop" a band, "none" only the safety bound."""
        if is_weight_band(self.rollout_is_threshold):
            return "icepop"
        return "none" if self.is_upper is None and self.rollout_is_floor is None else "truncate"

    @cached_property
    def weights_reach_loss(self) -> bool:
        """True iff weights multiply the loss. In bypass ppo_clip they would count the behavior ratio twice."""
        is_applied = self.rollout_is is not None and self.apply_is
        return is_applied and not (self.bypass_mode and self.loss_type == "ppo_clip")

    @cached_property
    def weighs_tokens(self) -> bool:
        """True iff each token has a weight of its own: at levels "token" and "horizon"."""
        return self.rollout_is in ("token", "horizon")

    @property
    def horizon_decay(self) -> float:
        """The number λ of level "horizon"; 0 without one.

        Raises:
            ValueError: λ is "auto", which only `correct` replaces by a number.
        """
        if self.rollout_is_horizon == "auto":
            raise ValueError(
                "rollout_is_horizon='auto' has no value before a batch is read; call correct, or set a number"
            )
        return self.rollout_is_horizon or 0.0

    @cached_property
    def only_measures(self) -> bool:
        """True iff it has neither weights nor rejection: an adapter then keeps the trainer's mask, counts and loss.

        With the default `nonfinite="reject_token"`, missing log-probs then only leave the metrics.
        """
        rejects = self.criteria or self.rollout_token_veto_threshold or self.nonfinite == "reject_sequence"
        return not (self.bypass_mode or self.weights_reach_loss or rejects)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values; `RolloutCorrectionConfig(**config.to_dict())` equals the original."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    # During construction, a frozen dataclass sets a field to its checked form.
    _set_frozen = object.__setattr__

    def _parse_thresholds(self) -> None:
        """Parse and normalize the threshold fields: numbers become floats, criteria lose duplicates."""
        if self.is_upper is not None and not isinstance(self.rollout_is_threshold, str):
            self._set_frozen("rollout_is_threshold", self.is_upper)

        threshold = self.rollout_rs_threshold
        if threshold is not None and not isinstance(threshold, str):
            threshold = float(threshold_texts(threshold)[0])
        if self.rollout_rs is not None:
            names, threshold = canonical_rejection(self.rollout_rs, threshold)
            self._set_frozen("rollout_rs", names)
        self._set_frozen("rollout_rs_threshold", threshold)

    def _check_floor(self) -> None:
        """Check the floor: it contradicts a band, which zeroes small weights, and must not exceed the ceiling."""
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

    def _check_horizon(self) -> None:
        """Check λ: level "horizon" needs it, and no other level reads it (`_inert_options`)."""
        decay = self.rollout_is_horizon
        if decay is not None and decay != "auto":
            self._set_frozen("rollout_is_horizon", check_number("rollout_is_horizon", decay, at_least=0, at_most=1))
        elif decay is None and self.rollout_is == "horizon":
            raise ValueError(
                "rollout_is='horizon' needs rollout_is_horizon, got None; set a number from 0 (token weights) to 1 "
                "(sequence weights), such as 0.5, or 'auto'"
            )

    def _inert_options(self) -> list[tuple[str, str]]:
        """Return each option that is set but has no effect in this combination, with the reason and the fix."""
        computed, applied = self.rollout_is is not None, self.weights_reach_loss
        without_is = "has no effect without rollout_is; set rollout_is, or leave this out"
        cases = [
            # Weights: are any computed, and do they reach the loss?
            (not computed and self.rollout_is_threshold != 2.0, "rollout_is_threshold", without_is),
            (not computed and self.rollout_is_floor is not None, "rollout_is_floor", without_is),
            (not computed and not self.apply_is, "apply_is", without_is),
            *(
                (
                    self.rollout_is != "horizon" and value is not None and value is not False,
                    option,
                    "has no effect without rollout_is='horizon'; set that, or leave this out",
                )
                for option, value in (
                    ("rollout_is_horizon", self.rollout_is_horizon),
                    ("rollout_is_horizon_per_turn", self.rollout_is_horizon_per_turn),
                )
            ),
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
def _cached_preset(cls: Any, name: str) -> Any:  # noqa: ANN401 (a class, and an instance of it)
    """Return a preset without arguments; the cache skips repeated checks in a training loop."""
    return cls(**preset_fields(name, {}))


@lru_cache(maxsize=256)
def _cached_replace(config: Any, impl: str, options: tuple[tuple[str, Any], ...]) -> Any:  # noqa: ANN401 (a configuration)
    """Return a configuration with some fields replaced; the cache skips repeated checks in a training loop."""
    return dataclasses.replace(config, **({"impl": impl} | dict(options)))
