"""verl's configuration object of November 2025: raw fields that are checked on use."""

from __future__ import annotations

import dataclasses
from typing import Any

from rollcorr.config import Level, convert
from rollcorr.config import RolloutCorrectionConfig as CheckedConfig
from rollcorr.config.generations import KEYS
from rollcorr.integrations.verl.config import RawConfig

BAND_LEVELS: dict[str, Level] = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric"}
"""The level of a rejection band, by the scope of the criterion that it becomes."""


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
    impl: str = "auto"

    def _checked(self, options: dict[str, Any]) -> CheckedConfig:
        impl = options.pop("impl")
        config = convert(options, schema="2025-11").config
        assert config is not None  # only October 2025 could switch everything off
        return config.with_options(impl=impl)

    @classmethod
    def _hint(cls, key: str) -> str:
        if key in KEYS["newest"]:
            return " It is newer than November 2025: rollcorr.integrations.verl takes the newest options"
        return ""

    @classmethod
    def token_is(cls, threshold: float = 2.0) -> RolloutCorrectionConfig:
        """Token weights min(ρ_t, threshold)."""
        return cls(rollout_is="token", rollout_is_threshold=threshold)

    @classmethod
    def token_tis(cls, threshold: float = 2.0) -> RolloutCorrectionConfig:
        """The same as `token_is`."""
        return cls.token_is(threshold)

    @classmethod
    def seq_is(cls, threshold: float = 2.0) -> RolloutCorrectionConfig:
        """Sequence weights min(Π_t ρ_t, threshold)."""
        return cls(rollout_is="sequence", rollout_is_threshold=threshold)

    @classmethod
    def seq_is_rs(
        cls, is_threshold: float = 2.0, rs_threshold: float = 2.0, rs_threshold_lower: float | None = None
    ) -> RolloutCorrectionConfig:
        """Sequence weights, and only sequences with Π_t ρ_t inside the band.

        Args:
            is_threshold: ceiling of the weights.
            rs_threshold: upper end of the band.
            rs_threshold_lower: its lower end; None is 1 / upper.
        """
        return cls(
            rollout_is="sequence",
            rollout_is_threshold=is_threshold,
            rollout_rs="sequence",
            rollout_rs_threshold=rs_threshold,
            rollout_rs_threshold_lower=rs_threshold_lower,
        )

    @classmethod
    def seq_mis(cls, threshold: float = 2.0) -> RolloutCorrectionConfig:
        """`seq_is_rs` with one threshold and the lower side open."""
        return cls.seq_is_rs(threshold, threshold, 0)

    @classmethod
    def geo_rs(
        cls, rs_threshold: float = 1.001, rs_threshold_lower: float | None = None, veto_threshold: float = 1e-4
    ) -> RolloutCorrectionConfig:
        """No weights; only sequences with (Π_t ρ_t)^(1/T) inside the band, and the veto.

        Args:
            rs_threshold: upper end of the band.
            rs_threshold_lower: its lower end; None is 1 / upper.
            veto_threshold: reject a sequence with a token of ratio below this; None for no veto.
        """
        return cls(
            rollout_is=None,
            rollout_rs="geometric",
            rollout_rs_threshold=rs_threshold,
            rollout_rs_threshold_lower=rs_threshold_lower,
            rollout_token_veto_threshold=veto_threshold,
        )

    @classmethod
    def geo_mis(
        cls, rs_threshold: float = 1.001, rs_threshold_lower: float = 0.999, veto_threshold: float = 1e-4
    ) -> RolloutCorrectionConfig:
        """`geo_rs` with its lower end given.

        Args:
            rs_threshold: upper end of the band.
            rs_threshold_lower: its lower end; None is 1 / upper.
            veto_threshold: reject a sequence with a token of ratio below this; None for no veto.
        """
        return cls.geo_rs(rs_threshold, rs_threshold_lower, veto_threshold)

    @classmethod
    def ppo_is_bypass(cls, threshold: float = 2.0) -> RolloutCorrectionConfig:
        """PPO clipped against the rollout policy; token weights are metrics."""
        return cls(rollout_is="token", rollout_is_threshold=threshold, bypass_old_logprob_for_rollout=True)

    @classmethod
    def pure_is(cls, threshold: float = 2.0) -> RolloutCorrectionConfig:
        """REINFORCE with sequence weights against the rollout policy."""
        return cls(
            rollout_is="sequence",
            rollout_is_threshold=threshold,
            bypass_old_logprob_for_rollout=True,
            use_pure_rollout_correction=True,
        )

    @classmethod
    def disabled(cls) -> RolloutCorrectionConfig:
        """Metrics only."""
        return cls(rollout_is=None)
