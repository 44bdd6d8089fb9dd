"""What to weight, what to reject, and in which mode: `RolloutCorrectionConfig`.

Frozen, keyword-only, checked at construction: a wrong type is a TypeError, a wrong value a ValueError, and an option
that can have no effect beside the others warns (`InertOptionWarning`). Texts are parsed here, once, into typed
criteria and bounds. Nothing here imports torch.

ρ = exp(log π − log μ) is the ratio train / rollout; docs/notation.md has the symbols.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

from rollcorr.config.checks import InertOptionWarning, check_bool, check_choice, check_number
from rollcorr.config.presets import preset_fields, with_named_presets
from rollcorr.config.thresholds import (
    Criterion,
    Threshold,
    canonical_rejection,
    parse_is_threshold,
    parse_rejection,
    threshold_texts,
)

if TYPE_CHECKING:
    from typing_extensions import Self

Level = Literal["token", "sequence", "geometric"]
IsMode = Literal["truncate", "icepop", "none"]
LossType = Literal["ppo_clip", "reinforce"]
NonfinitePolicy = Literal["reject_token", "reject_sequence", "neutral", "raise"]
Normalizer = Literal["kept", "original", "weights"]

# exp(88.7) is the largest power of e that float32 holds.
LARGEST_SAFETY_BOUND = 88.0


@with_named_presets
@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig:
    """What to weight, what to reject, and in which operating mode; the defaults measure.

    The one thing that the defaults take out of the loss mask are tokens without a usable log-prob (`nonfinite`).

    Attributes:
        rollout_is: level of the importance weights: "token" ρ_t, "sequence" Π_t ρ_t, "geometric" (Π_t ρ_t)^(1/T); None
            computes none.
        rollout_is_threshold: a ceiling C truncates: min(w, C); a band "lo_hi" zeroes weights outside it (IcePop); None
            bounds by `safety_bound` alone.
        rollout_is_batch_normalize: divide the weights by their mean over the batch (after truncation).
        rollout_rs: rejection criteria, one text with commas or a list: scope_kind with scope token, seq_sum, seq_mean
            or seq_max and kind k1, k2 or k3 (no seq_max_k1); for diffusion also step_kl. All must hold. Kept as one
            text.
        rollout_rs_threshold: one threshold for all criteria, or one for each, with commas.
        bypass_mode: take μ itself as π_old and skip the old log-probs.
        loss_type: "ppo_clip", or (bypass only) "reinforce".
        rollout_token_veto_threshold: reject a sequence with any token of ρ_t strictly below this; None for no veto.
        apply_is: False measures the weights and leaves the loss unweighted.
        nonfinite: what NaN and ±inf log-probs on a valid token do: reject the token, reject its sequence, count as
            ratio 1, or raise (which waits for the device).
        safety_bound: log weights are clamped to ± this many nats before exp. At most 88, where float32 ends.
        normalizer: denominators of the loss count what is "kept", all "original" tokens, or the applied "weights".
        batch_normalize_over: the batch mean is over all "valid" units or over the "kept" ones.

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
    safety_bound: float = 20.0
    normalizer: Normalizer = "kept"
    batch_normalize_over: Literal["valid", "kept"] = "valid"

    def __post_init__(self) -> None:
        check_choice("rollout_is", self.rollout_is, ("token", "sequence", "geometric"), optional=True)
        check_choice("loss_type", self.loss_type, ("ppo_clip", "reinforce"))
        check_choice("nonfinite", self.nonfinite, ("reject_token", "reject_sequence", "neutral", "raise"))
        check_choice("normalizer", self.normalizer, ("kept", "original", "weights"))
        check_choice("batch_normalize_over", self.batch_normalize_over, ("valid", "kept"))
        for option in ("rollout_is_batch_normalize", "bypass_mode", "apply_is"):
            check_bool(option, getattr(self, option))
        self._set(
            "safety_bound", check_number("safety_bound", self.safety_bound, above=0, at_most=LARGEST_SAFETY_BOUND)
        )
        if self.rollout_token_veto_threshold is not None:
            veto = check_number("rollout_token_veto_threshold", self.rollout_token_veto_threshold, above=0)
            self._set("rollout_token_veto_threshold", veto)
        self._parse_thresholds()
        if self.loss_type == "reinforce" and not self.bypass_mode:
            raise ValueError(
                "loss_type='reinforce' needs bypass_mode=True: without bypass the loss is PPO with π_old; "
                "set bypass_mode=True, or loss_type='ppo_clip'"
            )
        for option, reason in self._inert_options():
            # Frames: here, the generated __init__, its caller.
            warnings.warn(f"{option}={getattr(self, option)!r} {reason}", InertOptionWarning, stacklevel=3)

    @classmethod
    def preset(cls, name: str, **arguments: Threshold | None) -> Self:
        """The preset of that name, with some of its thresholds replaced.

        Each preset is a constructor of its own name too: `preset("decoupled_token_is", threshold=5.0)` is
        `decoupled_token_is(threshold=5.0)`. docs/presets.md lists them all.

        Raises:
            TypeError: an argument that this preset does not take.
            ValueError: no preset has this name; the nearest is suggested.

        Example:
            >>> RolloutCorrectionConfig.preset("decoupled_token_is", threshold=5.0).rollout_is_threshold
            5.0
        """
        return cls(**preset_fields(name, arguments)) if arguments else _resolved_preset(cls, name)

    @cached_property
    def criteria(self) -> tuple[Criterion, ...]:
        """The rejection criteria, typed, in the order written; empty without `rollout_rs`."""
        return () if self.rollout_rs is None else parse_rejection(self.rollout_rs, self.rollout_rs_threshold)

    @property
    def is_lower(self) -> float | None:
        """Lower end of the IcePop band on weights; None in the other modes."""
        return self._is_band[0]

    @property
    def is_upper(self) -> float | None:
        """Ceiling on weights (truncate), or upper end of the band (icepop); None in mode "none"."""
        return self._is_band[1]

    @property
    def is_mode(self) -> IsMode:
        """How weights are bounded: "truncate" by a ceiling, "icepop" by a band, "none" by the safety bound alone."""
        lower, upper = self._is_band
        return "none" if upper is None else "truncate" if lower is None else "icepop"

    @property
    def weights_reach_loss(self) -> bool:
        """True iff weights multiply the loss; in bypass ppo_clip they would count the behaviour ratio twice."""
        return self.rollout_is is not None and self.apply_is and not (self.bypass_mode and self.loss_type == "ppo_clip")

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values; `RolloutCorrectionConfig(**config.to_dict())` equals the original."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @cached_property
    def _is_band(self) -> tuple[float | None, float | None]:
        return parse_is_threshold(self.rollout_is_threshold)

    def _set(self, option: str, value: object) -> None:
        object.__setattr__(self, option, value)

    def _parse_thresholds(self) -> None:
        """Parse and normalise the threshold fields: numbers become floats, criteria one text without repeats."""
        _, upper = self._is_band
        if upper is not None and not isinstance(self.rollout_is_threshold, str):
            self._set("rollout_is_threshold", upper)
        threshold = self.rollout_rs_threshold
        if threshold is not None:
            texts = threshold_texts(threshold)
            threshold = threshold if isinstance(threshold, str) else float(texts[0])
        if self.rollout_rs is not None:
            names, threshold = canonical_rejection(self.rollout_rs, threshold)
            self._set("rollout_rs", names)
        self._set("rollout_rs_threshold", threshold)
        _ = self.criteria

    def _inert_options(self) -> list[tuple[str, str]]:
        """Each option that is set but can have no effect beside the others, with the reason and the fix."""
        inert: list[tuple[str, str]] = []
        without_is = "has no effect without rollout_is; set rollout_is, or leave this out"
        if self.rollout_is is None:
            if self.rollout_is_threshold != 2.0:
                inert.append(("rollout_is_threshold", without_is))
            if not self.apply_is:
                inert.append(("apply_is", without_is))
        elif self.apply_is and not self.weights_reach_loss:
            inert.append(
                (
                    "rollout_is",
                    "does not weight the loss in bypass mode with loss_type='ppo_clip', whose ratio holds the "
                    "correction already: weights are metrics only. Write apply_is=False, or loss_type='reinforce'",
                )
            )
        if not self.weights_reach_loss:
            unweighted = "has no effect on the loss, because no weights are applied to it; leave it out"
            if self.rollout_is_batch_normalize:
                inert.append(("rollout_is_batch_normalize", unweighted))
            if self.normalizer == "weights":
                inert.append(("normalizer", "is the same as 'kept', because no weights are applied to the loss"))
        if self.batch_normalize_over != "valid" and not self.rollout_is_batch_normalize:
            inert.append(("batch_normalize_over", "has no effect without rollout_is_batch_normalize"))
        if self.is_upper is not None and math.log(self.is_upper) > self.safety_bound:
            inert.append(
                ("rollout_is_threshold", f"is never reached: safety_bound={self.safety_bound:g} ends weights below")
            )
        if self.rollout_rs is None and self.rollout_rs_threshold is not None:
            inert.append(
                ("rollout_rs_threshold", "has no effect without rollout_rs; set rollout_rs, or leave this out")
            )
        for criterion in self.criteria:
            if criterion.lower is None and criterion.upper is None:
                inert.append(
                    ("rollout_rs_threshold", f"leaves both sides of {criterion.name} open: it rejects nothing")
                )
        return inert


@lru_cache(maxsize=256)
def _resolved_preset(cls: Any, name: str) -> Any:  # noqa: ANN401 (a class, and an instance of it)
    """A preset without arguments: the call in a training loop that names one pays for its checks once."""
    return cls(**preset_fields(name, {}))
