"""Dispatch of the correction: the requested implementation, or by default the fastest that supports the batch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast, get_args

import torch
from torch import Tensor

from rollcorr.config import Implementation, RolloutCorrectionConfig
from rollcorr.config.checks import warn_once
from rollcorr.config.conversion import resolve
from rollcorr.core.boundary import check_cu_seqlens, check_mask_values, in_host_memory, in_transform, truth
from rollcorr.kernels.correction import triton
from rollcorr.kernels.correction.call import Batch, CorrectionOutput, Out, copied_to
from rollcorr.kernels.correction.cpu.kernel import cpu_correction, why_not
from rollcorr.kernels.correction.cpu.library import library, status
from rollcorr.kernels.correction.reference import reference_correction
from rollcorr.kernels.correction.rows import MissingRowError, known_rows
from rollcorr.kernels.correction.torch.blocks import torch_correction
from rollcorr.kernels.correction.torch.table import Reduction
from rollcorr.kernels.correction.triton import self_check

_IMPLEMENTATION_NAMES = get_args(Implementation)

VARIABLE = "ROLLCORR_IMPL"
"""Environment variable: what "auto" means, wherever that implementation takes the batch."""


def correction_kernel(
    train_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor,
    config: RolloutCorrectionConfig,
    *,
    cu_seqlens: Tensor | None = None,
    reduce: Reduction | None = None,
    out: Out | None = None,
    impl: Implementation = "auto",
) -> CorrectionOutput:
    """Compute weights before normalization, loss mask, keep flags and statistics of one batch.

    Args:
        train_log_prob: log π, nats. (B, T), or (N,) when packed; any floating dtype.
        rollout_log_prob: log μ, nats. Same shape.
        mask: non-zero on response tokens. Same shape; any dtype.
        config: configuration of the correction.
        cu_seqlens: (B + 1,) token offsets; required when packed.
        reduce: optional callback when this call has a part of each sequence. It merges in the other parts before any
            decision. Only "torch" supports it; the other implementations need complete sequences.
        out: optional buffers for the weights and the loss mask, already checked by `check_out`. New ones by default.
        impl: "auto" selects the configuration's implementation. If that is "auto" too: the one in the environment
            variable ROLLCORR_IMPL if it supports this batch, else the fastest verified one that does.

    Raises:
        ValueError: `impl` is unknown, does not support this batch, or lacks a statistic of the configuration; or a
            criterion is for denoising steps only.
        ImportError: `impl="cpu"`, and the library was not built; `impl="triton"`, and Triton or a GPU is missing.
    """
    if impl not in _IMPLEMENTATION_NAMES:
        raise ValueError(f"impl must be one of {', '.join(map(repr, _IMPLEMENTATION_NAMES))}, got {impl!r}")
    impl = config.impl if impl == "auto" else impl
    if impl in ("reference", "cpu", "triton") and reduce is not None:
        raise ValueError(f"impl={impl!r} needs whole sequences: gather them first, or use impl='auto'")

    # Reject criteria for denoising steps before any implementation runs. A traced graph checks them when it is built.
    if not torch.compiler.is_compiling():
        known_rows(config)

    batch = Batch(train_log_prob, rollout_log_prob, mask, cu_seqlens)
    chosen_here = impl == "auto" and reduce is None
    if chosen_here:
        # Transforms and traces cannot track writes into buffers, and only the reference has none.
        functional = in_transform() or torch.jit.is_tracing()  # type: ignore[attr-defined]
        impl = "reference" if functional else _choose(batch, config)
    if impl == "cpu":
        return cpu_correction(batch, config, out=out, checked=chosen_here)
    if cu_seqlens is not None and in_host_memory(cu_seqlens):
        check_cu_seqlens(cu_seqlens, mask.numel())
    if impl == "triton":
        check_mask_values(mask, "response_mask")
        return triton.triton_correction(batch, config, out=out)

    if impl != "reference" and in_transform():
        raise ValueError(
            f"impl={impl!r} cannot take this batch: it is inside a transform of torch.func, where it has no memory; "
            "use impl='reference', and no context_group"
        )
    if mask.dtype != torch.bool:
        batch = batch._replace(mask=truth(mask, "response_mask"))
    if impl != "reference":
        try:
            return torch_correction(batch, config, reduce=reduce, out=out)
        except MissingRowError:
            # The reference may have the row. An explicit `impl="torch"` or a partial sequence must raise instead.
            if not chosen_here:
                raise
    return copied_to(out, reference_correction(batch, config))


def warm(
    config: RolloutCorrectionConfig | Mapping[str, Any] | str,
    device: torch.device | str,
    *,
    shape: tuple[int, int] = (1024, 8192),
    packed: bool = False,
    dtype: torch.dtype = torch.float32,
    mask_dtype: torch.dtype = torch.bool,
) -> str:
    """Prepare a correction on a device: run it on a batch of this kind, and wait for the result.

    On a GPU this compares the Triton kernels with torch, unless a verdict is cached, and compiles them for this
    configuration, layout and dtype. Triton caches compiled kernels, so the next process starts with them.

    Args:
        config: the run's configuration, a preset's name, or a dictionary.
        device: the run's device.
        shape: (B, T): sequences, and tokens per sequence. It decides how sequences are shared among programs, and
            whether rows are aligned.
        packed: whether the run packs its sequences.
        dtype: dtype of the log-probs.
        mask_dtype: dtype of the response mask.

    Returns:
        The implementation that "auto" selects for such a batch: "triton", "cpu", "torch" or "reference".

    Raises:
        ValueError: the configuration has no correction, or it names an implementation that does not support such a
            batch.
        ImportError: the configuration names an implementation that is not installed.

    Example:
        >>> warm("decoupled_token_is", "cpu", shape=(2, 8)) in ("cpu", "torch")
        True
    """
    settings = resolve(config)
    if settings is None:
        raise ValueError(f"config={config!r} means no correction at all, so there is nothing to make ready")
    if settings.rollout_is_horizon == "auto":
        settings = settings.with_options(rollout_is_horizon=0.5)
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
    return _choose(Batch(log_prob, log_prob, mask, cu_seqlens), settings) if settings.impl == "auto" else settings.impl


def implementations() -> dict[str, tuple[bool, str]]:
    """Return every implementation of the correction: whether it can be used here, and where or why not."""
    level, no_library = status()
    lacks = library().abilities.note if level else ""
    no_triton = triton.status()
    return {
        "reference": (True, "every device: the specification"),
        "torch": (True, "every device: eager torch in blocks"),
        "cpu": (
            level is not None and not lacks,
            lacks or no_library or f"CPU, float32 and bfloat16: compiled C, {level}",
        ),
        "triton": (no_triton is None, no_triton or f"CUDA and ROCm: three launches; {_describe_triton()}"),
    }


def _describe_triton() -> str:
    """Describe whether "auto" selects the Triton kernels on the first GPU, as known without running them."""
    if not torch.cuda.is_available():
        return "interpreted, on request"
    verdict = self_check.known_verdict(torch.device("cuda", torch.cuda.current_device()))
    if verdict is None:
        return "not yet compared with torch on this machine, which the first call or rollcorr.warm does"
    if verdict.agrees:
        return "'auto' takes them, because they agree with torch on this machine"
    return f"'auto' takes torch instead, because of a difference on this machine: {verdict.reason}"


def _choose(batch: Batch, config: RolloutCorrectionConfig) -> Implementation:
    """Return the implementation in the environment variable if it supports the batch, else the fastest."""
    named = "auto" if torch.compiler.is_compiling() else os.environ.get(VARIABLE, "auto")
    if named == "auto":
        return _fastest_implementation(batch, config)
    if named not in _IMPLEMENTATION_NAMES:
        raise ValueError(
            f"the environment variable {VARIABLE} must be one of {', '.join(_IMPLEMENTATION_NAMES)}, got {named!r}"
        )

    # A process may correct log files on the CPU and steps on a GPU, and no name fits both. So a batch that the named
    # implementation cannot take runs elsewhere, with a warning.
    refusals = {"cpu": why_not, "triton": triton.why_not}
    reason = refusals[named](batch, config) if named in refusals else None
    if reason is None:
        return cast("Implementation", named)
    chosen = _fastest_implementation(batch, config)
    message = f"{VARIABLE}={named} cannot take this batch: {reason}; impl={chosen!r} takes it"
    warn_once(message, stacklevel=7)  # the line that calls `correct`
    return chosen


def _fastest_implementation(batch: Batch, config: RolloutCorrectionConfig) -> Implementation:
    if batch.mask.device.type == "cuda":
        # Nobody has timed the scan of level "horizon" on a GPU.
        takes = config.rollout_is != "horizon" and triton.why_not(batch, config) is None
        return "triton" if takes and self_check.is_verified(batch.mask.device) else "torch"
    return "cpu" if why_not(batch, config) is None else "torch"
