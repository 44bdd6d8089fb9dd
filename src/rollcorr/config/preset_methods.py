"""The presets as classmethods: names that editors complete and type checkers see; values come from the table.

Each method passes its arguments to `preset`, which reads `rollcorr.config.presets.PRESETS`. A test compares every signature
with the table, so the two cannot drift apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollcorr.config.checks import nearest
from rollcorr.config.presets import BAND_LOWER, PRESETS
from rollcorr.config.thresholds import Threshold, join_band

if TYPE_CHECKING:
    from typing_extensions import Self


class PresetMethods:
    """Named constructors of `RolloutCorrectionConfig`; docs/presets.md lists them with their values."""

    @classmethod
    def preset(cls, name: str, **arguments: Threshold | None) -> Self:
        """The preset of that name, with some of its thresholds replaced.

        Raises:
            TypeError: an argument that this preset does not take.
            ValueError: no preset has this name; the nearest is suggested.

        Example:
            >>> RolloutCorrectionConfig.preset("decoupled_token_is", threshold=5.0).rollout_is_threshold
            5.0
        """
        if name not in PRESETS:
            raise ValueError(f"no preset is named {name!r}; known are {', '.join(PRESETS)}.{nearest(name, PRESETS)}")
        preset = PRESETS[name]
        fields: dict[str, Any] = dict(preset.values)
        for argument, value in arguments.items():
            if argument not in preset.parameters:
                taken = ", ".join(preset.parameters) or "no argument"
                raise TypeError(f"preset {name!r} takes {taken}; got {argument}.{nearest(argument, preset.parameters)}")
            fields.update(dict.fromkeys(preset.parameters[argument], value))
        lower = fields.pop(BAND_LOWER, None)
        if lower is not None:
            fields["rollout_rs_threshold"] = join_band(lower, fields["rollout_rs_threshold"])
        return cls(**fields)

    # Decoupled PPO: weights and mask from π_old / μ, then the clipped loss from π_θ / π_old.

    @classmethod
    def decoupled_token_is(cls, threshold: Threshold = 2.0) -> Self:
        """Weight min(ρ_t, threshold) in decoupled PPO (Token-TIS)."""
        return cls.preset("decoupled_token_is", threshold=threshold)

    @classmethod
    def decoupled_seq_is(cls, threshold: Threshold = 2.0) -> Self:
        """Weight min(Π_t ρ_t, threshold) in decoupled PPO (Seq-TIS)."""
        return cls.preset("decoupled_seq_is", threshold=threshold)

    @classmethod
    def decoupled_token_icepop(cls, threshold: Threshold = "0.5_5.0") -> Self:
        """Weight ρ_t inside the band, 0 outside, in decoupled PPO (IcePop)."""
        return cls.preset("decoupled_token_icepop", threshold=threshold)

    @classmethod
    def decoupled_seq_is_rs(cls, is_threshold: Threshold = 2.0, rs_threshold: Threshold = "0.5_2.0") -> Self:
        """Seq-TIS, and only sequences with Π_t ρ_t inside the band are kept (Seq-MIS)."""
        return cls.preset("decoupled_seq_is_rs", is_threshold=is_threshold, rs_threshold=rs_threshold)

    @classmethod
    def decoupled_geo_rs(cls, rs_threshold: Threshold = "0.999_1.001") -> Self:
        """Keep a sequence iff (Π_t ρ_t)^(1/T) lies inside the band; no weights (Geo-RS)."""
        return cls.preset("decoupled_geo_rs", rs_threshold=rs_threshold)

    @classmethod
    def decoupled_geo_rs_seq_tis(cls, is_threshold: Threshold = 2.0, rs_threshold: Threshold = "0.999_1.001") -> Self:
        """Geo-RS with sequence weights."""
        return cls.preset("decoupled_geo_rs_seq_tis", is_threshold=is_threshold, rs_threshold=rs_threshold)

    @classmethod
    def decoupled_geo_rs_token_tis(cls, is_threshold: Threshold = 2.0, rs_threshold: Threshold = "0.999_1.001") -> Self:
        """Geo-RS with token weights."""
        return cls.preset("decoupled_geo_rs_token_tis", is_threshold=is_threshold, rs_threshold=rs_threshold)

    @classmethod
    def decoupled_k3_rs(cls, rs_threshold: Threshold = 0.01) -> Self:
        """Keep a sequence iff its mean k3 divergence is at most rs_threshold nats; no weights (K3-RS)."""
        return cls.preset("decoupled_k3_rs", rs_threshold=rs_threshold)

    @classmethod
    def decoupled_k3_rs_seq_tis(cls, is_threshold: Threshold = 2.0, rs_threshold: Threshold = 0.01) -> Self:
        """K3-RS with sequence weights."""
        return cls.preset("decoupled_k3_rs_seq_tis", is_threshold=is_threshold, rs_threshold=rs_threshold)

    @classmethod
    def decoupled_k3_rs_token_tis(cls, is_threshold: Threshold = 2.0, rs_threshold: Threshold = 0.01) -> Self:
        """K3-RS with token weights."""
        return cls.preset("decoupled_k3_rs_token_tis", is_threshold=is_threshold, rs_threshold=rs_threshold)

    # Bypass, PPO: π_old is μ, the ratio π_θ / μ is clipped, and weights would count it twice.

    @classmethod
    def bypass_ppo_clip(cls) -> Self:
        """PPO clipped against the rollout policy: r = π_θ / μ."""
        return cls.preset("bypass_ppo_clip")

    @classmethod
    def bypass_ppo_clip_geo_rs(cls, rs_threshold: Threshold = "0.999_1.001") -> Self:
        """PPO clipped against the rollout policy, with Geo-RS."""
        return cls.preset("bypass_ppo_clip_geo_rs", rs_threshold=rs_threshold)

    @classmethod
    def bypass_ppo_clip_k3_rs(cls, rs_threshold: Threshold = 0.01) -> Self:
        """PPO clipped against the rollout policy, with K3-RS."""
        return cls.preset("bypass_ppo_clip_k3_rs", rs_threshold=rs_threshold)

    # Bypass, REINFORCE: −sg(w) log π_θ A with w from π_θ / μ.

    @classmethod
    def bypass_pg_is(cls, threshold: Threshold = 2.0) -> Self:
        """REINFORCE with w = min(Π_t ρ_t, threshold)."""
        return cls.preset("bypass_pg_is", threshold=threshold)

    @classmethod
    def bypass_pg_token_icepop(cls, threshold: Threshold = "0.5_5.0") -> Self:
        """REINFORCE with w_t = ρ_t inside the band, 0 outside (IcePop)."""
        return cls.preset("bypass_pg_token_icepop", threshold=threshold)

    @classmethod
    def bypass_pg_geo_rs(cls, rs_threshold: Threshold = "0.999_1.001") -> Self:
        """REINFORCE without weights; Geo-RS alone."""
        return cls.preset("bypass_pg_geo_rs", rs_threshold=rs_threshold)

    @classmethod
    def bypass_pg_geo_rs_seq_tis(cls, is_threshold: Threshold = 2.0, rs_threshold: Threshold = "0.999_1.001") -> Self:
        """REINFORCE with sequence weights and Geo-RS."""
        return cls.preset("bypass_pg_geo_rs_seq_tis", is_threshold=is_threshold, rs_threshold=rs_threshold)

    @classmethod
    def bypass_pg_geo_rs_token_tis(cls, is_threshold: Threshold = 2.0, rs_threshold: Threshold = "0.999_1.001") -> Self:
        """REINFORCE with token weights and Geo-RS."""
        return cls.preset("bypass_pg_geo_rs_token_tis", is_threshold=is_threshold, rs_threshold=rs_threshold)

    @classmethod
    def disabled(cls) -> Self:
        """Metrics only: nothing is weighted, nothing is rejected."""
        return cls.preset("disabled")

    # Names of November 2025.

    @classmethod
    def token_is(cls, threshold: Threshold = 2.0) -> Self:
        """Older name of `decoupled_token_is`."""
        return cls.preset("token_is", threshold=threshold)

    @classmethod
    def token_tis(cls, threshold: Threshold = 2.0) -> Self:
        """The same as `token_is`."""
        return cls.preset("token_tis", threshold=threshold)

    @classmethod
    def seq_is(cls, threshold: Threshold = 2.0) -> Self:
        """Older name of `decoupled_seq_is`."""
        return cls.preset("seq_is", threshold=threshold)

    @classmethod
    def seq_is_rs(
        cls,
        is_threshold: Threshold = 2.0,
        rs_threshold: Threshold = 2.0,
        rs_threshold_lower: float | None = None,
    ) -> Self:
        """Seq-MIS with the band [rs_threshold_lower, rs_threshold]; lower None = reciprocal, 0 = open."""
        return cls.preset(
            "seq_is_rs", is_threshold=is_threshold, rs_threshold=rs_threshold, rs_threshold_lower=rs_threshold_lower
        )

    @classmethod
    def seq_mis(cls, threshold: Threshold = 2.0, lower: float | None = None) -> Self:
        """`seq_is_rs(threshold, threshold, lower)`; verl's own seq_mis is lower=0."""
        return cls.preset("seq_mis", threshold=threshold, lower=lower)

    @classmethod
    def geo_rs(
        cls,
        rs_threshold: Threshold = 1.001,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = 1e-4,
    ) -> Self:
        """Geo-RS with the band [1/1.001, 1.001] and a per-token veto."""
        return cls.preset(
            "geo_rs", rs_threshold=rs_threshold, rs_threshold_lower=rs_threshold_lower, veto_threshold=veto_threshold
        )

    @classmethod
    def geo_mis(
        cls,
        rs_threshold: Threshold = 1.001,
        rs_threshold_lower: float | None = 0.999,
        veto_threshold: float | None = 1e-4,
    ) -> Self:
        """Geo-RS with the band [0.999, 1.001] and a per-token veto."""
        return cls.preset(
            "geo_mis", rs_threshold=rs_threshold, rs_threshold_lower=rs_threshold_lower, veto_threshold=veto_threshold
        )

    @classmethod
    def ppo_is_bypass(cls, threshold: Threshold = 2.0) -> Self:
        """PPO clipped against the rollout policy; token weights are metrics only."""
        return cls.preset("ppo_is_bypass", threshold=threshold)

    @classmethod
    def pure_is(cls, threshold: Threshold = 2.0) -> Self:
        """Older name of `bypass_pg_is`."""
        return cls.preset("pure_is", threshold=threshold)

    @classmethod
    def bypass_pg_rs(cls, rs_threshold: Threshold = "0.999_1.001") -> Self:
        """Older name of `bypass_pg_geo_rs`."""
        return cls.preset("bypass_pg_rs", rs_threshold=rs_threshold)
