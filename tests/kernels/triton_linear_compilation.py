"""Compile the Triton kernels of log-probs without logits for an absent GPU and print their resources.

Run by test_triton_linear_compile.py in a process of its own, like triton_compilation.py.
"""

from __future__ import annotations

import json
import sys
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton_compilation import compiled, usage

from rollcorr.core.sampling import KeptSets
from rollcorr.kernels.gpu_launch import Launch
from rollcorr.kernels.linear_logprob import dense, linear_log_prob

N, D, V, K, CHUNK = 8192, 4096, 151_936, 20, 8192


def launches(dtype: torch.dtype, *, entropy: bool, biased: bool) -> list[Launch]:
    """The first launch of each kernel for a batch on the meta device."""
    made: dict[str, Launch] = {}
    with (
        torch.device("meta"),
        mock.patch.object(Launch, "run", lambda one: made.setdefault(one.kernel.fn.__name__, one)),
        mock.patch.object(dense, "operand_type", lambda hidden, *_: hidden.dtype),
        mock.patch("rollcorr.kernels.linear_logprob.triton.interpreted", return_value=True),
        mock.patch("rollcorr.kernels.linear_logprob.triton.status", return_value=None),
    ):
        hidden = torch.empty(N, D, dtype=dtype, requires_grad=True)
        weight = torch.empty(V, D, dtype=dtype, requires_grad=True)
        bias = torch.empty(V, dtype=dtype) if biased else None
        ids, each = torch.empty(N, dtype=torch.int64), torch.empty(N)
        for kept in (None, KeptSets(torch.empty(N * K, dtype=torch.int32), torch.empty(N + 1, dtype=torch.int64))):
            result = linear_log_prob(
                hidden, weight, ids, bias=bias, kept=kept, temperature=each, entropy=entropy, chunk=CHUNK, impl="triton"
            )
            outputs = [x for x in (result.log_prob, result.entropy) if x is not None]
            torch.autograd.backward(outputs, [each] * len(outputs))
    return list(made.values())


def main(target: str) -> None:
    """Compile every case for a target: "cuda:90" or "hip:gfx942"."""
    backend, arch = target.split(":")
    gpu = GPUTarget(backend, int(arch) if backend == "cuda" else arch, 32 if backend == "cuda" else 64)
    for dtype in (torch.float32, torch.bfloat16):
        for everything in (False, True):
            for one in launches(dtype, entropy=everything, biased=everything):
                line = {"kernel": one.kernel.fn.__name__, "dtype": str(dtype), "everything": everything}
                sys.stdout.write(json.dumps(line | usage(compiled(one, gpu))) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
