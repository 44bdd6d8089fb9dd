"""The correction on the GPU in Triton: three launches, one read of the tokens, and no wait for the device.

`read_tokens` reads the batch once and writes a row of sums for each sequence, or for each share of a long one.
`decide_sequences` weighs and rejects sequences and reduces their rows. `finish` merges the results into the batch's
statistics, and applies the decisions to tokens. No sum depends on timing: the kernels use no atomics, so equal inputs
give equal bits.

`decide_sequences` is a second copy of the decisions in `torch.decide`, for speed. On the table that `read_tokens`
writes, torch needs 104 launches with one criterion and 274 with all (counted on fake CUDA: tests/kernels/
test_decision_copies.py). At 2.5 to 5 µs each that is 0.3 to 1.4 ms for any batch; they move 2 to 60 MB, at most 14 µs
of an H200's memory bandwidth. All three kernels are expected to need less than 0.1 ms for 8 M tokens. The copy could be
deleted if torch's decisions added less than a tenth to that: three launches.

Importing this package does not import Triton.
"""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache

import torch

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.correction_options import KERNEL_SAFETY_BOUND
from rollcorr.core.boundary import FLOATING, why_no_address
from rollcorr.kernels.correction.call import Batch, CorrectionOutput, Out
from rollcorr.kernels.correction.torch.blocks import torch_correction
from rollcorr.kernels.correction.triton.plan import abilities

OLDEST_TRITON = (3, 4)
"""Kernels take tuples and plain dataclasses."""


def why_not(batch: Batch, config: RolloutCorrectionConfig) -> str | None:
    """Return why the Triton kernels do not support this batch; `None` if they do."""
    named = batch.named
    if (hidden := why_no_address(**named)) is not None:
        return hidden
    for name, tensor in named.items():
        if tensor.device.type != "cuda" and not interpreted():
            return f"{name} is on {tensor.device}, and they run on CUDA and ROCm devices"
        if name != "response_mask" and tensor.dtype not in FLOATING:
            return f"{name} is {tensor.dtype}, and they read bfloat16, float16, float32 and float64"
    # At level "horizon" they compute log weights in float64, and torch all that follows.
    if config.rollout_is == "horizon":
        return status()
    if config.safety_bound > KERNEL_SAFETY_BOUND:
        return f"safety_bound is {config.safety_bound:g}, and they hold weights up to e^{KERNEL_SAFETY_BOUND:g}"

    # The kernels do not support every bound on weights.
    weighs = config.rollout_is is not None
    if weighs and config.rollout_is_floor is not None:
        return f"rollout_is_floor is {config.rollout_is_floor:g}, and they raise no weights"
    if weighs and config.is_mode == "icepop" and config.is_upper is None:
        return f"rollout_is_threshold is {config.rollout_is_threshold!r}, and they need an upper end of the band"
    return abilities().why_not(config) or status()


@lru_cache(maxsize=1)
def status() -> str | None:
    """Return why the kernels cannot be used at all; `None` if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; it comes with torch for CUDA and ROCm: pip install 'rollcorr[triton]'"
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST_TRITON:
        return f"Triton {triton.__version__} is older than {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]}; update torch"
    if not torch.cuda.is_available() and not interpreted():
        return "torch finds no CUDA or ROCm device"
    return None


def triton_correction(
    batch: Batch, config: RolloutCorrectionConfig, *, out: Out | None = None, splits: int | None = None
) -> CorrectionOutput:
    """Implement `rollcorr.kernels.correction.dispatch.correction_kernel` in Triton; the mask may contain numbers.

    Weights are float32 functions of float32 log-ratios; sums are float32 over at most 128 tokens, and float64 beyond.
    Log-ratios beyond ±1e16 are clamped to that. At level "horizon" one launch computes log weights in float64, and
    torch computes the rest from them. With `TRITON_INTERPRET=1` in the environment tensors may be on the CPU.

    Args:
        batch: the batch to correct; the mask may have any dtype.
        config: configuration of the correction.
        out: optional buffers for the weights and the loss mask.
        splits: optional; number of programs per sequence: a power of two, at most 64. The default depends on the shape.

    Raises:
        ImportError: Triton, or a device for it, is missing.
        ValueError: `why_not` rejects the batch.
    """
    if (missing := status()) is not None:
        raise ImportError(f"impl='triton' cannot run here: {missing}; or use impl='auto' or 'torch'")
    reason = why_not(batch, config)
    if reason is not None:
        raise ValueError(f"impl='triton' cannot take this batch: {reason}; use impl='auto' or 'torch'")
    if batch.mask.numel() == 0:
        return torch_correction(batch._replace(mask=batch.mask != 0), config, out=out)
    if config.rollout_is == "horizon":
        from rollcorr.kernels.correction.triton.horizon_pass import horizon_log_weights

        log_weights = horizon_log_weights(batch, config.horizon_decay, per_turn=config.rollout_is_horizon_per_turn)
        return torch_correction(batch._replace(mask=batch.mask != 0), config, out=out, log_weights=log_weights)
    from rollcorr.kernels.correction.triton.launch import launch_correction

    return launch_correction(batch, config, out=out, splits=splits)


def interpreted() -> bool:
    """Return whether the environment enables Triton's interpreter, which runs kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
