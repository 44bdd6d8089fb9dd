"""verl's configuration object of November 2025: raw fields that are checked on use."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from rollcorr.config import PRESETS, Implementation, convert
from rollcorr.config import RolloutCorrectionConfig as CheckedConfig
from rollcorr.config.generations import KEYS
from rollcorr.config.presets import BAND_LOWER, VERL_2025_11, NamedPreset
from rollcorr.core.metric_registry import PREFIX
from rollcorr.correction.rollout_correction import correct
from rollcorr.integrations.verl.config import Corrected, RawConfig
from rollcorr.integrations.verl.older import LEVELS, measured_ratio, ratio_band, reference_correction


@dataclasses.dataclass(frozen=True)
class RolloutCorrectionConfig(RawConfig):
    """The options of November 2025, kept as they are given and checked on use.

    `rollcorr.config.convert` reports what each of them became.

    Attributes:
        rollout_is: level of the weights, "token" or "sequence"; None for none.
        rollout_is_threshold: their ceiling; None computes no weights.
        rollout_rs: level of the rejection band, "token", "sequence" or "geometric"; None for none.
        rollout_rs_threshold: upper end of the band.
        rollout_rs_threshold_lower: lower end; None is 1 / upper, 0 leaves it open.
        rollout_token_veto_threshold: reject a sequence with a token of ratio below this.
        bypass_old_logprob_for_rollout: take the rollout log-probs as old log-probs.
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
        """The checked configuration of this library: the same correction, operating mode and loss.

        Raises:
            TypeError: a value of the wrong type.
            ValueError: a value outside its limits.
        """
        config = convert({name: self[name] for name in KEYS["2025-11"]}, schema="2025-11").config
        assert config is not None  # only October 2025 could switch everything off
        return config.with_options(impl=self.impl)

    def corrected(self, train: Tensor, rollout: Tensor, response_mask: Tensor, *, in_loss: bool = False) -> Corrected:
        """Correct by `rollcorr.correct`, or with that release's own numbers; the metrics have that release's names."""
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

            # That release also reported the ratio that the band judges. Weights without a ceiling measure it.
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


def _construct(owner: type, name: str, **given: object) -> Any:  # noqa: ANN401 (owner)
    """The preset with some thresholds replaced, in the options of that release."""
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
        setattr(RolloutCorrectionConfig, _name, NamedPreset(_name, _construct, _arguments))
