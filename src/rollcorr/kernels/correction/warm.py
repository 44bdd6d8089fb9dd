"""Compile ahead of time: what the first step of a run would otherwise wait for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rollcorr.config import RolloutCorrectionConfig, resolve
from rollcorr.kernels.correction.call import Batch
from rollcorr.kernels.correction.dispatch import chosen_implementation, correction_kernel


def warm(
    config: RolloutCorrectionConfig | Mapping[str, Any] | str,
    device: torch.device | str,
    *,
    shape: tuple[int, int] = (1024, 8192),
    packed: bool = False,
    dtype: torch.dtype = torch.float32,
    mask_dtype: torch.dtype = torch.bool,
) -> str:
    """Make a correction ready on a device, by one run on a batch of this kind, and wait until it has run.

    On a GPU this compares the Triton kernels with torch, unless it is known that they agree, and compiles them for this
    configuration, layout and dtype. Triton keeps what it compiled, so the next process starts with it.

    Args:
        config: the configuration that the run will use, a preset's name, or a dictionary.
        device: where the run computes.
        shape: (B, T): sequences, and tokens of each. It says how sequences are shared among programs, and whether rows
            are aligned.
        packed: whether the run packs its sequences.
        dtype: of the log-probs.
        mask_dtype: of the response mask.

    Returns:
        The implementation that a call of this kind takes: "triton", "cpu", "torch" or "reference".

    Raises:
        ValueError: there is no correction in the configuration, or it names an implementation that does not take such a
            batch.
        ImportError: it names an implementation that is not here.

    Example:
        >>> warm("decoupled_token_is", "cpu", shape=(2, 8)) in ("cpu", "torch")
        True
    """
    settings = resolve(config)
    if settings is None:
        raise ValueError(f"config={config!r} means no correction at all, so there is nothing to make ready")
    device = torch.empty(0, device=device).device  # "cuda" becomes the current GPU
    sequences, T = shape
    size = (sequences * T,) if packed else shape
    log_prob = torch.zeros(size, dtype=dtype, device=device)
    mask = torch.ones(size, dtype=mask_dtype, device=device)
    cu_seqlens = torch.arange(0, sequences * T + 1, T, device=device) if packed else None

    with torch.no_grad():
        correction_kernel(log_prob, log_prob, mask, settings, cu_seqlens=cu_seqlens)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return chosen_implementation(Batch(log_prob, log_prob, mask, cu_seqlens), settings)
