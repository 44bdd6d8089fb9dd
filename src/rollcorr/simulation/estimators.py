"""Estimators for the studies: every preset, weight and criterion, by name, without duplicate configurations."""

from __future__ import annotations

from collections.abc import Mapping

from rollcorr.config import CRITERIA, PRESETS, RolloutCorrectionConfig, Threshold

NONE = "none"
"""Plain PPO on the rollouts: no weights, no rejection."""

_WEIGHT_ESTIMATORS: Mapping[str, tuple[str, Threshold | None]] = {
    "token_untruncated": ("token", None),
    "sequence_untruncated": ("sequence", None),
    "sequence_icepop": ("sequence", "0.5_5.0"),
    "geometric_truncated": ("geometric", 2.0),
    "geometric_untruncated": ("geometric", None),
    "sequence_truncated_4": ("sequence", 4.0),
}

# (scope, bound on a ratio?) → thresholds, from strict (rejects all) to open (rejects no unit), at T × KL = 1.
_THRESHOLDS: Mapping[tuple[str, bool], tuple[float, ...]] = {
    ("token", True): (1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0),
    ("token", False): (1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 1.0),
    ("seq_sum", True): (1.2, 1.5, 2.0, 4.0, 10.0, 30.0, 100.0),
    ("seq_sum", False): (0.1, 0.3, 0.6, 1.0, 1.5, 3.0, 10.0),
    ("seq_mean", True): (1.002, 1.005, 1.01, 1.015, 1.02, 1.03, 1.1),
    ("seq_mean", False): (1e-3, 3e-3, 0.005, 0.008, 0.01, 0.03, 0.1),
    ("seq_max", False): (0.01, 0.03, 0.1, 0.2, 0.5, 1.0, 4.0),
}

Estimators = dict[str, RolloutCorrectionConfig | None]


def every_estimator() -> Estimators:
    """Return each preset, then weights and criteria that no preset has, each configuration once.

    Horizons are left out: `experiments/laboratory/reward_shapes.md` compares them.
    """
    named: Estimators = {
        NONE: None,
        **{name: RolloutCorrectionConfig.preset(name) for name in PRESETS if "_horizon_" not in name},
        **{
            name: RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold=threshold)  # type: ignore[arg-type]
            for name, (level, threshold) in _WEIGHT_ESTIMATORS.items()
        },
        **{
            name: RolloutCorrectionConfig(rollout_rs=name, rollout_rs_threshold=threshold)
            for name, (_, _, threshold) in CRITERIA.items()
        },
    }
    first_name = {config: name for name, config in reversed(named.items())}
    return {name: config for name, config in named.items() if first_name[config] == name}


def threshold_sweep() -> dict[str, Estimators]:
    """Return family → the same configuration at each threshold, from strict to open."""
    return {
        **{
            f"{level} ceiling": {
                f"{ceiling:g}": RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold=ceiling)  # type: ignore[arg-type]
                for ceiling in (1.02, 1.1, 1.5, 2.0, 4.0, 10.0, 100.0)
            }
            for level in ("token", "sequence", "geometric")
        },
        **{
            f"{level} icepop": {
                f"{band:g}": RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold=f"{1 / band:.6f}_{band}")  # type: ignore[arg-type]
                for band in (1.1, 1.5, 2.0, 4.0, 10.0, 30.0)
            }
            for level in ("token", "sequence")
        },
        # Thresholds depend on the scope, and on whether the bound is on a ratio (k1) or in nats.
        **{
            name: {
                f"{threshold:g}": RolloutCorrectionConfig(rollout_rs=name, rollout_rs_threshold=threshold)
                for threshold in _THRESHOLDS[scope, divergence == "k1"]
            }
            for name, (scope, divergence, _) in CRITERIA.items()
        },
        "veto": {
            f"{threshold:g}": RolloutCorrectionConfig(rollout_token_veto_threshold=threshold)
            for threshold in (0.9, 0.7, 0.5, 0.3, 0.1, 0.01)
        },
    }
