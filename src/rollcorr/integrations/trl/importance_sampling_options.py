"""TRL's `vllm_importance_sampling_*` options as a configuration of this library.

    mode                  rollout_is    rollout_is_threshold     rollout_is_floor
    token_truncate        token         clip_max                 clip_min
    token_mask            token         "clip_min_clip_max"      –
    sequence_truncate     sequence      clip_max                 clip_min
    sequence_mask         sequence      "clip_min_clip_max"      –

A side that is None in TRL is open here. TRL reads a missing log-prob as a ratio of 1, so `nonfinite` is "neutral".
"""

from __future__ import annotations

from typing import Any

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.correction_options import KERNEL_SAFETY_BOUND
from rollcorr.config.criteria import Threshold

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def config_from_trl(args: Any) -> RolloutCorrectionConfig:  # noqa: ANN401 (a GRPOConfig, or an object like it)
    """What TRL's options ask for: weights at one level, truncated or zeroed outside a band, and no rejection.

    Args:
        args: has `vllm_importance_sampling_correction`, `_mode`, `_clip_max` and `_clip_min`, or the older `_cap`, as
            TRL's `GRPOConfig` does. TRL's `RLOOConfig` has none of them.

    Returns:
        The configuration. Where TRL corrects nothing, it measures only: the preset `measure`.

    Raises:
        ValueError: the mode is unknown, or a bound makes no sense.

    Example:
        >>> from types import SimpleNamespace
        >>> args = SimpleNamespace(
        ...     vllm_importance_sampling_correction=True,
        ...     vllm_importance_sampling_mode="sequence_mask",
        ...     vllm_importance_sampling_clip_max=3.0,
        ...     vllm_importance_sampling_clip_min=None,
        ... )
        >>> config = config_from_trl(args)
        >>> config.rollout_is, config.rollout_is_threshold
        ('sequence', '0_3.0')
    """
    if not getattr(args, "vllm_importance_sampling_correction", False):
        return RolloutCorrectionConfig.preset("measure").with_options(nonfinite="neutral")

    mode = args.vllm_importance_sampling_mode
    if mode not in MODES:
        raise ValueError(f"vllm_importance_sampling_mode must be one of {', '.join(MODES)}; got {mode!r}")
    level, constraint = mode.split("_")

    # TRL copies the older name into the newer one; an object that has only the older one means the same.
    upper = getattr(args, "vllm_importance_sampling_clip_max", None)
    cap = getattr(args, "vllm_importance_sampling_cap", None)
    upper = upper if cap is None else cap

    # No ratio is below 0, so such a bound is an open side.
    lower = getattr(args, "vllm_importance_sampling_clip_min", None)
    lower = None if lower is None or lower <= 0 else lower

    threshold: Threshold | None = upper
    if constraint == "mask" and (lower is not None or upper is not None):
        threshold = f"{'0' if lower is None else lower}_{'inf' if upper is None else upper}"
    # TRL has no such bound. The largest one that the compiled kernels take is far beyond any weight that is of use.
    return RolloutCorrectionConfig(
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_is_floor=lower if constraint == "truncate" else None,
        nonfinite="neutral",
        safety_bound=KERNEL_SAFETY_BOUND,
    )
