"""The full vocabulary in chunks: two matrix products forward and back again, with one chunk of logits in memory.

Forward, each chunk's logits z = h Wᵀ + b are added to a running maximum and sum. Backward recomputes them, overwrites
them with the gradient G, and adds G W and Gᵀ h to the results. Tokens whose gradient is zero are dropped first, so
backward time depends only on the tokens that count. If their number must not be read, their G is 0 instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollcorr.kernels.linear_logprob.problem import (
    CHUNK_ENTRIES,
    SMALLEST_CHUNK,
    Context,
    LogSums,
    Problem,
    at_rows,
    column,
    placed,
    rows_where,
)
from rollcorr.kernels.linear_logprob.products import (
    HeadGradient,
    add_product,
    float32_products,
    multiply,
    operand_type,
)

UNDERFLOW = -1e4
"""exp of this is 0 in every floating type."""


@dataclass
class Running:
    """Sums over the chunks so far, (N,): max z, Σ exp(z − max), z_a, and Σ exp(z − max) (z − max) of `measured`."""

    largest: Tensor
    total: Tensor
    target: Tensor
    weighted: Tensor | None


@dataclass(frozen=True)
class Upstream:
    """Inputs of backward for each active token, (n,).

    Attributes:
        log_total: log Σ exp(z), so that p = exp(z − log_total).
        of_sum: gradient of log Σ exp(z) over the temperature.
        of_target: gradient of z_a over the temperature.
        entropies: optional; positions of tokens whose entropy has a gradient (`None` for all active ones), their
            entropies, and the gradients over the temperature. `None` if no token has one.
    """

    log_total: Tensor
    of_sum: Tensor
    of_target: Tensor
    entropies: tuple[Tensor | None, Tensor, Tensor] | None


class Epilogue:
    """The steps on a chunk of (n, C) logits before the next chunk overwrites it: a few passes of eager torch."""

    def absorb(
        self, logits: Tensor, local_ids: Tensor, temperature: float | Tensor, measured: Tensor | None, running: Running
    ) -> None:
        """Add logits, not yet divided by the temperature, to the running sums. May overwrite the logits."""
        _divide_by_temperature(logits, temperature)
        inside, place = _locate_ids(local_ids, logits.shape[-1])
        running.target = torch.where(inside, logits.gather(1, place).squeeze(-1), running.target)
        largest = torch.maximum(running.largest, logits.amax(-1))

        # Subtract the maximum before exp; subtract 0 where all logits are −∞, because −∞ − (−∞) is NaN.
        anchor = largest.masked_fill(largest == -torch.inf, 0.0)
        shift = (running.largest - anchor).clamp(min=UNDERFLOW)
        scale = shift.exp()
        powers = logits.sub_(anchor.unsqueeze(-1)).exp_()
        if running.weighted is not None:
            rows = slice(None) if measured is None else measured
            running.weighted = scale[rows] * (running.weighted + running.total[rows] * shift[rows])
        running.total = scale * running.total + powers.sum(-1)
        running.largest = largest

        # torch.special.entr is −e log e, and 0 at 0.
        if running.weighted is not None:
            chosen = powers if measured is None else powers[measured]
            running.weighted -= torch.special.entr(chosen, out=chosen).sum(-1)

    def to_gradient(
        self, logits: Tensor, local_ids: Tensor, temperature: float | Tensor, upstream: Upstream, dtype: torch.dtype
    ) -> Tensor:
        """Compute the gradient of the loss in these logits, in the given type; in place if it is theirs."""
        _divide_by_temperature(logits, temperature)
        powers = logits.sub_(upstream.log_total.unsqueeze(-1)).exp_()
        if upstream.entropies is None:
            powers.mul_(upstream.of_sum.unsqueeze(-1))
        else:
            rows, entropy, of_entropy = upstream.entropies
            p = powers if rows is None else powers[rows]  # dH/dz = −p (log p + H)
            change = (torch.special.entr(p) - p * entropy.unsqueeze(-1)) * of_entropy.unsqueeze(-1)
            powers.mul_(upstream.of_sum.unsqueeze(-1))
            powers = powers.add_(change) if rows is None else powers.index_add_(0, rows, change)
        inside, place = _locate_ids(local_ids, logits.shape[-1])
        return powers.scatter_add_(1, place, upstream.of_target.where(inside, 0.0).unsqueeze(-1)).to(dtype)


def dense_sums(problem: Problem, epilogue: Epilogue, *, measured: Tensor | None = None, entropy: bool) -> LogSums:
    """Compute sums over all V entries z_j = (h · W_j + b_j) / τ, differentiable in hidden states, weight and bias.

    Args:
        problem: the arguments; `mask` and `kept` are ignored. Ids outside of the rows have target 0. A compact problem
            drops tokens without a gradient in backward, which waits for the device.
        epilogue: computes the steps between the products.
        measured: optional; (n,) int64 positions of the tokens whose entropy is needed, only for a compact problem. The
            default is all tokens.
        entropy: whether any entropy is needed.
    """
    return LogSums(
        *_DenseLogProb.apply(problem.hidden, problem.weight, problem.bias, problem, epilogue, measured, entropy)
    )


class _DenseLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        problem: Problem,
        epilogue: Epilogue,
        measured: Tensor | None,
        entropy: bool,
    ) -> tuple[Any, ...]:
        N, rows = len(hidden), len(hidden if measured is None else measured)
        running = Running(
            largest=hidden.new_full((N,), -torch.inf, dtype=problem.wide),
            total=hidden.new_zeros(N, dtype=problem.wide),
            target=hidden.new_zeros(N, dtype=problem.wide),
            weighted=hidden.new_zeros(rows, dtype=problem.wide) if entropy else None,
        )
        local_ids = problem.token_ids - problem.first_id
        with float32_products(problem.precision, hidden.device):
            for first, _, logits, _ in _logit_chunks(hidden, weight, bias, problem):
                epilogue.absorb(logits, local_ids - first, problem.temperature, measured, running)

        log_sum = running.total.log()
        entropies = None
        if running.weighted is not None:
            entropies = at_rows(log_sum, measured) - running.weighted / at_rows(running.total, measured)

        # Only saved tensors reference the operands, so that backward frees them.
        ctx.problem, ctx.epilogue, ctx.measured = replace(problem, hidden=hidden.new_empty(0)), epilogue, measured
        ctx.save_for_backward(hidden, weight, bias, running.largest + log_sum, entropies)
        ctx.mark_non_differentiable(running.largest)
        ctx.set_materialize_grads(False)
        return running.largest, log_sum, running.target, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, log_total, entropy = ctx.saved_tensors
        problem: Problem = replace(ctx.problem, hidden=hidden)
        gradient = HeadGradient(ctx, weight, accumulate_into=problem.accumulate_into, sparse=False)
        # of_x is the gradient of the loss with respect to x.
        of_sum, of_target = (torch.zeros_like(log_total) if x is None else x for x in grads[1:3])
        of_entropy = grads[3]
        active = (of_sum != 0) | (of_target != 0)
        if of_entropy is not None:
            entropy, of_entropy = (placed(x, ctx.measured, len(hidden), 0.0) for x in (entropy, of_entropy))
            active = active | (of_entropy != 0)

        # Drop tokens without a gradient. Where reading their number would wait for the device, neutralize them instead:
        # log_total = ∞ makes every p of such a token 0.
        if problem.compact:
            rows = rows_where(active)
            problem = problem.at(rows)
        else:
            rows = None
            problem, log_total = problem.harmless(active), log_total.masked_fill(~active, torch.inf)
        entropies = None
        if of_entropy is not None:
            entropy = entropy.masked_fill(of_entropy == 0, 0.0)
            entropy, of_entropy = at_rows(entropy, rows), at_rows(of_entropy, rows) / problem.temperature
            # These index into `rows`.
            entropy_rows = rows_where(of_entropy != 0) if problem.compact else None
            entropies = entropy_rows, at_rows(entropy, entropy_rows), at_rows(of_entropy, entropy_rows)
        upstream = Upstream(
            log_total=at_rows(log_total, rows),
            of_sum=at_rows(of_sum, rows) / problem.temperature,
            of_target=at_rows(of_target, rows) / problem.temperature,
            entropies=entropies,
        )

        of_states = torch.zeros_like(problem.hidden, dtype=log_total.dtype) if ctx.needs_input_grad[0] else None
        of_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        local_ids = problem.token_ids - problem.first_id
        with float32_products(problem.precision, hidden.device):
            for first, operand, logits, head in _logit_chunks(problem.hidden, weight, bias, problem):
                G = ctx.epilogue.to_gradient(logits, local_ids - first, problem.temperature, upstream, operand.dtype)
                if of_states is not None:
                    add_product(of_states, G, head)
                gradient.add_slice(first, first + len(head), G.t(), operand)
                if of_bias is not None:
                    of_bias[first : first + len(head)] = G.sum(0, dtype=log_total.dtype)
        if of_states is not None and rows is not None:
            of_states = torch.zeros_like(hidden).index_copy_(0, rows, of_states.to(hidden.dtype))
        return of_states, gradient.result(), of_bias, None, None, None, None


def _logit_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: Problem
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Yield for each chunk: its first row, hidden states and rows as operands, and logits in a reused buffer."""
    dtype = operand_type(hidden, weight, problem.wide, problem.precision)
    N, V = hidden.shape[0], weight.shape[0]
    max_entries = CHUNK_ENTRIES.get(hidden.device.type, CHUNK_ENTRIES["cuda"])
    size = max(1, min(V, problem.chunk or max(SMALLEST_CHUNK, max_entries // max(N, 1))))
    buffer = hidden.new_empty(N * size, dtype=problem.wide)
    operand = hidden.to(dtype)
    for first in range(0, V, size):
        head = weight[first : first + size].to(dtype)
        logits = multiply(operand, head.t(), buffer[: N * len(head)].view(N, len(head)))
        if bias is not None:
            logits.add_(bias[first : first + size])
        yield first, operand, logits, head


def _divide_by_temperature(logits: Tensor, temperature: float | Tensor) -> None:
    if isinstance(temperature, Tensor) or temperature != 1.0:
        logits.div_(column(temperature))


def _locate_ids(local_ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return whether each token's id is in a chunk, (n,), and its index in the chunk (clamped), (n, 1)."""
    return (local_ids >= 0) & (local_ids < size), local_ids.clamp(0, size - 1).unsqueeze(-1)
