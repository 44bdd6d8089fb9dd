"""The specification: all logits at once, then the functions of `rollcorr.core.logprobs`, differentiated by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from rollcorr.core.logprobs import kept_entropy, kept_log_mass, kept_log_prob, token_entropy, token_log_prob
from rollcorr.kernels.linear_logprob.problem import Context, LinearLogProb, Problem, column


def reference_log_prob(problem: Problem) -> LinearLogProb:
    """Implement `rollcorr.kernels.linear_logprob.linear_log_prob`, (N,), from (N, V) logits in float32 or wider."""
    weight = problem.weight
    if problem.accumulate_into is not None:
        weight = _AccumulateGradient.apply(weight, problem.accumulate_into)
    logits = problem.hidden.to(problem.wide) @ weight.to(problem.wide).t()
    if problem.bias is not None:
        logits = logits + problem.bias
    logits = logits / column(problem.temperature)
    ids, kept = problem.token_ids, problem.kept
    mask = torch.ones_like(ids, dtype=torch.bool) if problem.mask is None else problem.mask
    mass = None
    if kept is None:
        log_prob, outside = token_log_prob(logits, ids), torch.zeros_like(mask)
        entropy = None if problem.entropy is False else token_entropy(logits)
    else:
        log_prob, outside = kept_log_prob(logits, ids, kept)
        entropy = None if problem.entropy is False else kept_entropy(logits, ids, kept)
        mass = None if problem.log_kept_mass is False else kept_log_mass(logits, ids, kept).detach()
    return LinearLogProb(
        log_prob.where(mask, 0.0),
        outside & mask,
        None if entropy is None else entropy.where(mask & problem.entropy, torch.nan),
        None if mass is None else mass.where(mask & problem.log_kept_mass, torch.nan),
    )


class _AccumulateGradient(torch.autograd.Function):
    """A tensor whose gradient is added to `total` instead of being returned."""

    @staticmethod
    def forward(ctx: Context, tensor: Tensor, total: Tensor) -> Tensor:
        ctx.total = total
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[None, None]:
        ctx.total.add_(gradient)
        return None, None
