"""Compile the Triton kernels of log-probs without logits for an absent GPU and print their resources.

Run by test_triton_linear_compile.py in a process of its own, like triton_compilation.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import torch
from triton.backends.compiler import GPUTarget
from triton_compilation import compiled, usage

from rollcorr.core.sampling import KeptSets
from rollcorr.kernels.linear_logprob.dense import Running, Upstream
from rollcorr.kernels.linear_logprob.kept import membership
from rollcorr.kernels.linear_logprob.problem import Problem
from rollcorr.kernels.linear_logprob.triton import launches as passes

N, D, V, K, CHUNK = 8192, 4096, 151_936, 20, 8192


def launches(dtype: torch.dtype, *, entropy: bool, biased: bool) -> Iterator[passes.Launch]:
    """All launches for a batch on the meta device."""
    logits, gradient = torch.empty(N, CHUNK), torch.empty(N, CHUNK, dtype=dtype)
    ids, each, some = torch.empty(N, dtype=torch.int64), torch.empty(N), torch.empty(N // 8, dtype=torch.int64)
    running = Running(each, each, each, each[: N // 8] if entropy else None)
    yield passes.absorb_launch(logits, ids, 0.7, some if entropy else None, running)
    upstream = Upstream(each, each, each, (some, each[: N // 8], each[: N // 8]) if entropy else None)
    yield passes.to_gradient_launch(logits, gradient, ids, 0.7, upstream)
    hidden, weight = torch.empty(N, D, dtype=dtype), torch.empty(V, D, dtype=dtype)
    kept = KeptSets(torch.empty(N * K, dtype=torch.int32), torch.empty(N + 1, dtype=torch.int64))
    problem = Problem(hidden, weight, ids, None, 0.7, None, kept, entropy, False, None, None, 0, None)
    places = passes.make_places(problem, membership(kept, ids, None))
    bias = torch.empty(V, dtype=dtype) if biased else None
    yield passes.sum_sets_launch(places, hidden, weight, bias, (each,) * 4)
    names = ("of_sum", "of_target", "of_entropy", "log_total", "entropy", "changes")
    yield passes.weigh_sets_launch(places, weight, dict.fromkeys(names, each), hidden)
    yield passes.add_rows_launch(places.rows, places.rows, places.z, hidden, weight)


def main(target: str) -> None:
    """Compile every case for a target: "cuda:90" or "hip:gfx942"."""
    backend, arch = target.split(":")
    gpu = GPUTarget(backend, int(arch) if backend == "cuda" else arch, 32 if backend == "cuda" else 64)
    for dtype in (torch.float32, torch.bfloat16):
        for everything in (False, True):
            with torch.device("meta"):
                made = list(launches(dtype, entropy=everything, biased=everything))
            for one in made:
                line = {"kernel": one.kernel.fn.__name__, "dtype": str(dtype), "everything": everything}
                sys.stdout.write(json.dumps(line | usage(compiled(one, gpu))) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
