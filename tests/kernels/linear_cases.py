"""Random hidden states, heads, tokens and ragged kept sets, and the results and gradients of an implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollcorr.core.sampling import KeptSets
from rollcorr.kernels.linear_logprob import linear_log_prob
from rollcorr.kernels.linear_logprob.problem import LinearLogProb


@dataclass
class Case:
    """N tokens, hidden size d, V entries; sets of 0 to 6 ids, some of which lack the sampled one."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    token_ids: Tensor
    kept: KeptSets
    temperatures: Tensor
    mask: Tensor
    upstream: Tensor


def make_case(seed: int = 0, *, N: int = 9, d: int = 5, V: int = 23, dtype: torch.dtype = torch.float64) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    ids = torch.randint(V, (N,), generator=generator)
    sets = []
    for token in ids.tolist():
        kept = torch.randperm(V, generator=generator)[: int(torch.randint(7, (), generator=generator))].tolist()
        insert = torch.rand((), generator=generator) < 0.7 and token not in kept
        sets.append([*kept, token] if insert else kept)
    return Case(
        hidden=normal(N, d),
        weight=normal(V, d),
        bias=normal(V),
        token_ids=ids,
        kept=KeptSets.of(sets),
        temperatures=torch.rand(N, generator=generator) + 0.5,
        mask=torch.rand(N, generator=generator) < 0.7,
        upstream=normal(N).where(torch.rand(N, generator=generator) < 0.6, 0.0),
    )


def run(case: Case, **options: Any) -> tuple[LinearLogProb, list[Tensor | None]]:
    """Results, and gradients in hidden states, weight and bias of Σ g (log p + 0.3 H), H where measured."""
    biased = options.pop("biased", True)
    inputs = [x.clone().requires_grad_() for x in (case.hidden, case.weight, case.bias)]
    hidden, weight, bias = inputs
    result = linear_log_prob(hidden, weight, case.token_ids, bias=bias if biased else None, **options)
    loss = (result.log_prob * case.upstream).sum()
    if result.entropy is not None:
        loss = loss + 0.3 * (result.entropy.nan_to_num() * case.upstream).sum()
    loss.backward()
    return result, [x.grad for x in inputs]


def assert_same(actual: Any, expected: Any, **tolerances: float) -> None:
    """Results and gradients of two runs agree."""
    for one, other in zip((*actual[0], *actual[1]), (*expected[0], *expected[1]), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, equal_nan=True, **tolerances)
