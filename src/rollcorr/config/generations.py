"""Convert the three generations of rollout-correction options, field by field.

    2025-10   rollout_is (bool), rollout_is_threshold (null = off), _threshold_lower, _level, _mode, _veto_threshold
    2025-11   bypass_old_logprob_for_rollout, use_pure_rollout_correction, rollout_rs ∈ token / sequence / geometric
    newest    the fields of `RolloutCorrectionConfig`

Each converter expects one flat mapping with keys of its generation. `rollcorr.config.conversion` finds that mapping and
detects the generation; docs/coming_from/migration.md shows examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rollcorr.config.checks import check_bool, check_choice, check_number
from rollcorr.config.correction_options import RolloutCorrectionConfig
from rollcorr.config.criteria import join_band

Schema = Literal["2025-10", "2025-11", "newest"]
SCHEMAS: tuple[Schema, ...] = ("2025-10", "2025-11", "newest")

OLDER_CRITERIA = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}

# The options of the older generations, with their defaults.
_OCTOBER_DEFAULTS: dict[str, Any] = {
    "rollout_is_threshold": None,
    "rollout_is": False,
    "rollout_is_threshold_lower": None,
    "rollout_is_level": "token",
    "rollout_is_mode": "truncate",
    "rollout_is_veto_threshold": None,
}
_NOVEMBER_DEFAULTS: dict[str, Any] = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "rollout_rs_threshold_lower": None,
    "rollout_token_veto_threshold": None,
    "bypass_old_logprob_for_rollout": False,
    "use_pure_rollout_correction": False,
}

DEFAULTS = RolloutCorrectionConfig().to_dict()

KEYS: dict[Schema, tuple[str, ...]] = {
    "2025-10": tuple(_OCTOBER_DEFAULTS),
    "2025-11": tuple(_NOVEMBER_DEFAULTS),
    "newest": tuple(DEFAULTS),
}

# Newer names that verl 0.7 mixed with the rejection options of 2025-11; accepted if that schema is set explicitly.
LATE_2025_11 = ("bypass_mode", "loss_type", "rollout_is_batch_normalize")
# Switches of 2025-11, and the newer names that replaced them.
RENAMED = {"bypass_old_logprob_for_rollout": "bypass_mode", "use_pure_rollout_correction": "loss_type"}


@dataclass(frozen=True)
class FieldReport:
    """Report on the conversion of one old field. It records a change, not a problem, so it is not a `Finding`.

    Attributes:
        field: name of the old field.
        value: its value.
        became: the new fields and values, in YAML.
        reason: why it changed.
    """

    field: str
    value: object
    became: str
    reason: str


class Draft:
    """Draft of the new fields, with a report line for every old field and a note wherever numbers will differ.

    Args:
        old: the options that were given.
        defaults: all options of their generation. Their thresholds are read as numbers.
    """

    def __init__(self, old: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.old = old
        values = {**(defaults or {}), **old}
        self.values: dict[str, Any] = values | {
            name: number_or_null(name, values[name]) for name in defaults or () if "threshold" in name
        }
        self.fields: dict[str, Any] = {}
        self.report: list[FieldReport] = []
        self.notes: list[str] = []

    def put(self, name: str, new: Mapping[str, Any], reason: str) -> None:
        """Set new fields from an old one; also report an old default that is no longer the default."""
        self.fields.update(new)
        became = ", ".join(f"{key}: {shown(new_value)}" for key, new_value in new.items())
        if name not in self.old:
            if all(new_value == DEFAULTS[key] for key, new_value in new.items()):
                return
            reason = f"not set, its default counts: {reason}"
        self.report.append(FieldReport(name, self.values[name], became, reason))

    def drop(self, name: str, reason: str) -> None:
        """Drop an old field; report it unless it is null."""
        if self.old.get(name) is not None:
            self.report.append(FieldReport(name, self.old[name], "(nothing)", reason))

    def put_band(self, upper_name: str, lower_name: str, reason: str) -> None:
        """Set one band from two old fields: a null lower end defaults to the reciprocal, 0 leaves that side open."""
        upper, lower = self.values[upper_name], self.values[lower_name]
        if lower is None:
            self.put(upper_name, {"rollout_rs_threshold": upper}, f"{reason}; the lower end is its reciprocal")
            return
        band = {"rollout_rs_threshold": join_band(lower, upper)}
        self.put(upper_name, band, reason)
        self.put(lower_name, band, "lower end of the band" + ("; 0 leaves that side open" if lower == 0 else ""))

    def put_veto(self, name: str, reason: str) -> None:
        """Set the veto; its meaning is the same in every generation."""
        if self.values[name] is not None:
            self.put(name, {"rollout_token_veto_threshold": self.values[name]}, reason)


def shown(value: object) -> str:
    """Format a plain value as YAML: None → null, True → true."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def from_2025_10(old: Mapping[str, Any]) -> tuple[RolloutCorrectionConfig | None, Draft]:
    """Convert the options of October 2025: one threshold, a level, and a mode for weights and rejection.

    A null `rollout_is_threshold` disables the correction (returns None); it does not mean metrics only.

    Raises:
        TypeError, ValueError: a value is not valid in this generation.
    """
    draft = Draft(old, _OCTOBER_DEFAULTS)
    apply_is, level, mode = (draft.values[name] for name in ("rollout_is", "rollout_is_level", "rollout_is_mode"))
    check_bool("rollout_is", apply_is)
    check_choice("rollout_is_level", level, OLDER_CRITERIA)
    check_choice("rollout_is_mode", mode, ("truncate", "mask"))

    threshold = draft.values["rollout_is_threshold"]
    if threshold is None:
        why = "rollout_is_threshold is null, which switches everything off: no weights, no rejection, no metrics"
        draft.report.extend(FieldReport(name, value, "no correction", why) for name, value in old.items())
        if "rollout_is_threshold" not in old:
            draft.notes.append("rollout_is_threshold is missing; its default was null, which switches everything off.")
        return None, draft

    draft.put("rollout_is_level", {"rollout_is": level}, "the level of the weights moved into rollout_is")
    why = "weights reach the loss" if apply_is else "weights are measured and stay out of the loss"
    draft.put("rollout_is", {"apply_is": apply_is}, why)
    if mode == "truncate":
        why = "truncate mode: weights are cut at this ceiling, nothing is rejected for it"
        draft.put("rollout_is_threshold", {"rollout_is_threshold": threshold}, why)
        draft.drop("rollout_is_threshold_lower", "truncate mode has no lower bound; it only moved a metric")
    else:
        # Reject by a k1 band at the level; weights only keep the safety bound.
        new = {"rollout_is_threshold": None, "rollout_rs": OLDER_CRITERIA[level]}
        draft.put("rollout_is_mode", new, f"mask mode rejects on the {level} ratio and does not truncate weights")
        draft.put_band("rollout_is_threshold", "rollout_is_threshold_lower", "upper end of the rejection band")

    draft.put_veto("rollout_is_veto_threshold", "the veto has its own name; same meaning")
    draft.notes.append("Metrics: the prefix mismatch/ is now rollout_corr/; docs/reference/metrics.md has the names.")
    return RolloutCorrectionConfig(**draft.fields), draft


def from_2025_11(old: Mapping[str, Any]) -> tuple[RolloutCorrectionConfig, Draft]:
    """Convert the options of November 2025: separate weights and rejection, two switches for the operating mode.

    The mode may also be written with the newest names (`LATE_2025_11`), as verl 0.7 did.

    Raises:
        TypeError, ValueError: a value is not valid in this generation, or the pure loss is set without bypass.
    """
    draft = Draft(old, _NOVEMBER_DEFAULTS)
    level, threshold, rs = (draft.values[name] for name in ("rollout_is", "rollout_is_threshold", "rollout_rs"))
    if "rollout_is" not in old:
        draft.notes.append("rollout_is is missing: read as null, as in verl's YAML (its Python class said 'sequence').")

    # Weights.
    computed = None if threshold is None else level
    reason = "unchanged" if computed == level else "without rollout_is_threshold this generation computed no weights"
    draft.put("rollout_is", {"rollout_is": computed}, reason)
    if computed is not None:
        draft.put("rollout_is_threshold", {"rollout_is_threshold": threshold}, "unchanged: the ceiling on weights")
    elif rs is None or old.get("rollout_rs_threshold") is not None:
        draft.drop("rollout_is_threshold", "there are no weights to bound without rollout_is")

    # Rejection, veto and operating mode.
    if rs is None:
        for name in ("rollout_rs_threshold", "rollout_rs_threshold_lower"):
            draft.drop(name, "it had no effect without rollout_rs")
    else:
        _convert_november_rejection(draft, rs)
    draft.put_veto("rollout_token_veto_threshold", "unchanged")
    for name in LATE_2025_11:
        if name in old:
            draft.put(name, {name: old[name]}, "unchanged")
    _november_mode(draft)
    return RolloutCorrectionConfig(**draft.fields), draft


def _convert_november_rejection(draft: Draft, rs: str) -> None:
    """Set a k1 band from `rollout_rs` and its thresholds: the upper end defaults to the weights', the lower to 1/upper.

    Raises:
        TypeError, ValueError: `rollout_rs` is unknown, or both thresholds are null.
    """
    check_choice("rollout_rs", rs, OLDER_CRITERIA, optional=True)
    draft.put("rollout_rs", {"rollout_rs": OLDER_CRITERIA[rs]}, f"a band on the {rs} ratio is now a k1 criterion")
    upper, reason = "rollout_rs_threshold", "upper end of the band"
    if draft.values[upper] is None:
        upper, reason = "rollout_is_threshold", f"{upper} is null, so this is the upper end of the band too"
    if draft.values[upper] is None:
        raise ValueError(
            f"rollout_rs: {rs} needs rollout_rs_threshold, or rollout_is_threshold to take its place; both are null"
        )
    draft.put_band(upper, "rollout_rs_threshold_lower", reason)


def _november_mode(draft: Draft) -> None:
    """Set bypass_mode and loss_type from the two switches of 2025-11.

    Raises:
        TypeError, ValueError: a switch is not a bool, is set under its old and new name, or one needs the other.
    """
    old = draft.old
    for name, newer in RENAMED.items():
        check_bool(name, draft.values[name])
        if name in old and newer in old:
            raise ValueError(f"{name} and {newer} say the same thing; keep one of them")

    bypass, pure = (draft.values[name] for name in RENAMED)
    if pure and not (bypass or old.get("bypass_mode")):
        raise ValueError(
            "use_pure_rollout_correction: true needs bypass_old_logprob_for_rollout: true (its loss has no π_old)"
        )
    if "bypass_mode" not in old:
        draft.put("bypass_old_logprob_for_rollout", {"bypass_mode": bypass}, "renamed")
    if "loss_type" not in old:
        reason = "the pure loss is REINFORCE: −sg(w) log π_θ A" if pure else "the PPO loss"
        draft.put("use_pure_rollout_correction", {"loss_type": "reinforce" if pure else "ppo_clip"}, reason)

    # In bypass mode the PPO ratio is π_θ / μ, so an additional weight would correct twice.
    if not draft.fields["bypass_mode"] or draft.fields["loss_type"] == "reinforce":
        return
    weighted = draft.fields["rollout_is"] is not None
    if weighted:
        reason = "the bypass PPO ratio holds the correction already; weights are metrics only"
        draft.put("rollout_is", {"apply_is": False}, reason)
    if bypass and (weighted or "rollout_rs" in draft.fields):
        draft.notes.append(
            "In bypass mode this generation compared the rollout with itself: weights were 1 and nothing was rejected. "
            "Here π_θ is compared with the rollout policy, and rejection acts."
        )


def from_newest(old: Mapping[str, Any]) -> tuple[RolloutCorrectionConfig, Draft]:
    """Read the newest options; notes list the values from which verl 0.9.1 computes different numbers.

    Raises:
        TypeError, ValueError: as `RolloutCorrectionConfig`.
    """
    # YAML 1.1 parsers read 1e-4 as a string.
    texts = [name for name in ("rollout_token_veto_threshold", "safety_bound") if isinstance(old.get(name), str)]
    draft = Draft({**old, **{name: number_or_null(name, old[name]) for name in texts}})
    for name, value in draft.old.items():
        draft.put(name, {name: value}, "unchanged")
    config = RolloutCorrectionConfig(**draft.fields)
    if config.rollout_is is not None and config.is_mode == "none":
        draft.notes.append(
            "rollout_is_threshold is null: verl 0.9.1 then computes no weights; here safety_bound alone bounds them."
        )
    draft.notes.extend(_orientation_notes(config))
    if config.bypass_mode and config.criteria:
        draft.notes.append(
            "verl's bypass losses divide by all tokens, rejected ones too; here by the kept ones. "
            "normalizer: original gives verl's scale."
        )
    return config, draft


def _orientation_notes(config: RolloutCorrectionConfig) -> list[str]:
    """Return a note per k1 band that verl 0.9.1 reads differently: it bounds 1/ρ, and so keeps ρ in [1/hi, 1/lo]."""
    notes = []
    for criterion in config.criteria:
        lower, upper = criterion.lower, criterion.upper
        if criterion.kind != "k1" or (lower is not None and upper is not None and abs(lower * upper - 1) < 1e-5):
            continue
        theirs = f"{'0' if upper is None else f'{1 / upper:.6g}'}_{'inf' if lower is None else f'{1 / lower:.6g}'}"
        notes.append(
            f"{criterion.name}: verl 0.9.1 bounds 1/ρ, so its band on ρ is {theirs}; here the written one is. "
            f"Write {theirs} for verl's behavior."
        )
    return notes


def number_or_null(name: str, value: object) -> float | None:
    """Return a number or null; accept the string of a number, since YAML 1.1 reads 1e-4 as a string."""
    if isinstance(value, str):
        try:
            # Python reads "0.5_2" as 0.52, but it is a band: fail, because a number is expected here.
            value = float(value.replace("_", " to "))
        except ValueError:
            raise ValueError(f"{name} must be a number or null; got {value!r}") from None
    return None if value is None else check_number(name, value)


CONVERTERS: dict[Schema, Callable[[Mapping[str, Any]], tuple[RolloutCorrectionConfig | None, Draft]]] = {
    "2025-10": from_2025_10,
    "2025-11": from_2025_11,
    "newest": from_newest,
}
