"""Log-probs from hidden states on the GPU: torch's matrix products, with Triton kernels between them.

Over the vocabulary one launch adds a chunk of logits to each token's sums, and one turns the chunk into the gradient.
Over kept sets one launch computes the logits, one the hidden states' gradient, one the head's. No step waits for the
device, and no atomic is used, so equal inputs give equal bits.

Importing this package does not import Triton.
"""

from __future__ import annotations

import torch

from rollcorr.kernels.correction.triton import interpreted, status
from rollcorr.kernels.linear_logprob.compose import composed_log_prob
from rollcorr.kernels.linear_logprob.problem import LinearLogProb, Problem


def triton_log_prob(problem: Problem) -> LinearLogProb:
    """Implement `rollcorr.kernels.linear_logprob.linear_log_prob`, (N,); also on the CPU with `TRITON_INTERPRET=1`.

    Raises:
        ImportError: Triton, or a device for it, is missing.
        ValueError: the kernels do not support the tensors.
    """
    if (missing := status()) is not None:
        raise ImportError(f"impl='triton' cannot run here: {missing}; or use impl='auto' or 'torch'")
    hidden, into, reason = problem.hidden, problem.accumulate_into, None
    if torch.compiler.is_compiling():
        reason = "torch.compile is tracing"
    elif hidden.device.type != "cuda" and not interpreted():  # all operands are on one device
        reason = f"hidden is on {hidden.device}, and they run on CUDA and ROCm devices"
    elif into is not None and not into.is_contiguous():
        reason = "accumulate_into is not contiguous"
    if reason is not None:
        raise ValueError(f"impl='triton' cannot take these tensors: {reason}; use impl='auto' or 'torch'")
    from rollcorr.kernels.linear_logprob.triton.launches import TritonEpilogue, TritonProducts

    return composed_log_prob(problem, TritonEpilogue(), TritonProducts())
