"""The two older generations of verl: the options of November 2025, and both releases' statistics of a level's ratio.

`measured_ratio` reads the statistics before truncation from `rollcorr.correct`; `reference_correction` computes verl's
own numbers, for parity.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rollcorr.config import PRESETS, Implementation, convert
from rollcorr.config import RolloutCorrectionConfig as CheckedConfig
from rollcorr.config.correction_options import SAFETY_BOUND
from rollcorr.config.generations import KEYS, OLDER_CRITERIA
from rollcorr.config.presets import BAND_LOWER, VERL_2025_11, preset_constructor
from rollcorr.core.metric_registry import PREFIX
from rollcorr.correction.rollout_correction import correct
from rollcorr.integrations.verl import parity
from rollcorr.integrations.verl.config import Corrected, RawConfig

LEVELS: dict[object, Any] = {criterion: level for level, criterion in OLDER_CRITERIA.items()}
"""The level of a rejection band, by the criterion that it becomes."""

SUMMARY = (
    *("mean", "std", "min", "max", "ratio_fraction_high", "ratio_fraction_low", "eff_sample_size"),
    *("seq_mean", "seq_std", "seq_min", "seq_max", "seq_max_deviation", "seq_fraction_high", "seq_fraction_low"),
)


def measured_ratio(metrics: Mapping[str, float], *, log_bound: float = SAFETY_BOUND) -> dict[str, float]:
    """Return the registry's weight statistics under their bare names, min and max before truncation.

    Args:
        metrics: of a correction with weights, without a prefix.
        log_bound: cap on the log of the maximum at sequence levels, nats.

    Returns:
        "mean", …, "seq_fraction_low". At sequence levels min and max come from the unclamped log weight.
    """
    found = {name: metrics[f"rollout_is_{name}"] for name in SUMMARY if f"rollout_is_{name}" in metrics}
    found |= {"min": metrics["rollout_is_raw_min"], "max": metrics["rollout_is_raw_max"]}

    # A sequence's weight overflows long before its log does.
    if "rollout_is_log_max" in metrics and metrics["sequence_count"]:
        found["min"] = math.exp(metrics["rollout_is_log_min"])
        found["max"] = math.exp(min(metrics["rollout_is_log_max"], log_bound))
    return found


def ratio_band(level: str, lower: float, upper: float, *, shares_of_tokens: bool = False) -> parity.Band:
    """Return the older releases' band of a ratio; std and ESS are computed from values clipped to both of its ends."""
    return parity.Band(level=level, lower=lower, upper=upper, clip_low=lower, shares_of_tokens=shares_of_tokens)


def reference_correction(
    train: Tensor,
    rollout: Tensor,
    response_mask: Tensor,
    config: CheckedConfig,
    *,
    weighting: parity.Band | None,
    rejection_prefix: str,
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """Compute an older release's own numbers.

    Args:
        train: log π, (B, T), nats.
        rollout: log μ.
        response_mask: non-zero on tokens that the policy sampled.
        config: its ceiling truncates weights, its criteria are bands of the ratio, and its veto rejects.
        weighting: optional; level and bounds of the weights. None disables weights.
        rejection_prefix: prefix of the names of a band's metrics.

    Returns:
        Weights or None; the mask in its own dtype; metrics without "rollout_corr/".

    Raises:
        ValueError: shapes differ, or the batch has no token.
    """
    wide_train, wide_rollout, mask = parity.prepared(train, rollout, response_mask)
    log_ratio = wide_train - wide_rollout
    weights, kept = None, mask != 0
    metrics: parity.Metrics = {}

    for criterion in config.criteria:
        band = ratio_band(LEVELS[criterion.name], criterion.lower or 0.0, criterion.upper or math.inf)
        _, outside, own = _reference_ratio(log_ratio, mask, band)
        kept = kept & ~outside

        # A row without a token counts as a sequence.
        touched = (outside & (mask != 0)).any(-1) if band.level == "token" else outside
        own["masked_fraction"] = parity.token_mean(outside.double(), mask)
        own["seq_masked_fraction"] = touched.double().mean()
        metrics |= parity.prefixed(rejection_prefix, own)

    if weighting is not None:
        raw, _, own = _reference_ratio(log_ratio, mask, weighting)
        bounded = raw if config.is_upper is None else raw.clamp(max=config.is_upper)
        weights = bounded.to(torch.promote_types(train.dtype, response_mask.dtype))
        metrics |= parity.prefixed("rollout_is_", own)

    spared, veto_metrics = parity.veto(log_ratio, mask, config.rollout_token_veto_threshold)
    kept = kept & spared
    metrics |= veto_metrics | parity.policy_gap(wide_train, wide_rollout, mask)
    return weights, kept.to(response_mask.dtype), parity.to_floats(metrics)


def _reference_ratio(log_ratio: Tensor, mask: Tensor, band: parity.Band) -> tuple[Tensor, Tensor, parity.Metrics]:
    """Return the bounded ratio (B, T), a mask of its violations, (B, T) or (B, 1), and verl's statistics of it."""
    log_weight, raw = parity.level_ratio(log_ratio, mask, band.level)
    unit = log_weight.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()
    outside = (unit < band.lower) | (unit > band.upper)
    return raw, outside, parity.weight_metrics(raw, raw, log_weight, mask, band)


@dataclasses.dataclass(frozen=True)
class RolloutCorrectionConfig(RawConfig):
    """The options of November 2025, stored unchanged and validated on use.

    `rollcorr.config.convert` reports the new form of each option.

    Attributes:
        rollout_is: optional; level of the weights, "token" or "sequence".
        rollout_is_threshold: their ceiling; None disables weights.
        rollout_rs: optional; level of the rejection band, "token", "sequence" or "geometric".
        rollout_rs_threshold: upper end of the band.
        rollout_rs_threshold_lower: lower end; defaults to 1 / upper. 0 leaves it open.
        rollout_token_veto_threshold: reject a sequence with a token of ratio below this.
        bypass_old_logprob_for_rollout: use the rollout log-probs as old log-probs.
        use_pure_rollout_correction: REINFORCE with weights in place of PPO; needs the bypass.
        verl_parity: compute that release's numbers.
        impl: which kernel computes the correction, as in `rollcorr.correct`.
    """

    rollout_is: str | None = "sequence"
    rollout_is_threshold: float | None = 2.0
    rollout_rs: str | None = None
    rollout_rs_threshold: float | None = None
    rollout_rs_threshold_lower: float | None = None
    rollout_token_veto_threshold: float | None = None
    bypass_old_logprob_for_rollout: bool = False
    use_pure_rollout_correction: bool = False
    verl_parity: bool = False
    impl: Implementation = "auto"

    _elsewhere = dict.fromkeys(
        KEYS["newest"], "It is newer than November 2025: rollcorr.integrations.verl takes the newest options"
    )

    def to_config(self) -> CheckedConfig:
        """Return this library's validated configuration: the same correction, operating mode and loss.

        Raises:
            TypeError: a value's type is invalid.
            ValueError: a value is outside its limits.
        """
        config = convert({name: self[name] for name in KEYS["2025-11"]}, schema="2025-11").config
        assert config is not None  # only the options of October 2025 can disable everything
        return config.with_options(impl=self.impl)

    def corrected(self, train: Tensor, rollout: Tensor, response_mask: Tensor, *, in_loss: bool = False) -> Corrected:
        """Correct with `rollcorr.correct`, or with that release's own numbers; metrics have that release's names."""
        config, data = self.to_config(), (train, rollout, response_mask)
        if self.verl_parity:
            band, upper = None, config.is_upper
            if config.rollout_is is not None and upper is not None:
                band = ratio_band(config.rollout_is, 1 / upper, upper)
            weights, mask, metrics = reference_correction(*data, config, weighting=band, rejection_prefix="rollout_rs_")
        else:
            correction = correct(*data, config, densities=True)
            weights, mask = correction.weights, correction.loss_mask.to(response_mask.dtype)
            metrics = {"rollout_is_veto_fraction": 0.0, "rollout_is_catastrophic_token_fraction": 0.0}
            metrics |= correction.metrics(prefix="")

            # That release also reported the ratio that the band checks. Weights without a ceiling measure it.
            for criterion in config.criteria:
                ratio = CheckedConfig(
                    rollout_is=LEVELS[criterion.name],
                    rollout_is_threshold=None,
                    rollout_rs=config.rollout_rs,
                    rollout_rs_threshold=config.rollout_rs_threshold,
                )
                measured = measured_ratio(correct(*data, ratio, densities=True).metrics(prefix=""))
                metrics |= {f"rollout_rs_{name}": value for name, value in measured.items()}

        mask = response_mask if config.only_measures and not in_loss else mask
        return weights, mask, {f"{PREFIX}{name}": value for name, value in metrics.items()}


def _build_preset(owner: type, name: str, **given: object) -> Any:  # noqa: ANN401 (owner)
    """Return the preset with some thresholds replaced, in the options of that release."""
    values = dict(PRESETS[name].values)
    for argument, value in given.items():
        values |= dict.fromkeys(PRESETS[name].parameters[argument], value)
    return owner(
        rollout_is=values.get("rollout_is"),
        rollout_is_threshold=values.get("rollout_is_threshold", 2.0),
        rollout_rs=LEVELS.get(values.get("rollout_rs")),
        rollout_rs_threshold=values.get("rollout_rs_threshold"),
        rollout_rs_threshold_lower=values.get(BAND_LOWER, 0 if name == "seq_mis" else None),
        rollout_token_veto_threshold=values.get("rollout_token_veto_threshold"),
        bypass_old_logprob_for_rollout=values.get("bypass_mode", False),
        use_pure_rollout_correction=values.get("loss_type") == "reinforce",
    )


# The constructors of that release. In its `seq_mis` the lower side of the band is always open.
for _name, _preset in PRESETS.items():
    if _preset.source == VERL_2025_11 or _name == "disabled":
        _arguments = [argument for argument in _preset.parameters if argument != "lower"]
        setattr(RolloutCorrectionConfig, _name, preset_constructor(_name, _build_preset, _arguments))
