"""The whole vocabulary, a chunk at a time: two matrix products forward and back again, and one chunk of logits live.

Forward, each chunk's logits z = h Wᵀ + b are folded into a running maximum and sum. Backward makes them anew, turns
them in place into the gradient G and adds G W and Gᵀ h to the results. Tokens whose gradient is zero are dropped before
that, so backward time is that of the tokens that count; or, where their number must not be read, they get a G of 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollcorr.kernels.linear_logprob.problem import (
    Context,
    LogSums,
    at_rows,
    chunk_size,
    column,
    harmless,
    wide_type,
)
from rollcorr.kernels.linear_logprob.products import (
    HeadGradient,
    Precision,
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
    """What backward knows of each active token, (n,).

    Attributes:
        log_total: log Σ exp(z), so that p = exp(z − log_total).
        of_sum: gradient of log Σ exp(z) over the temperature.
        of_target: gradient of z_a over the temperature.
        entropies: positions of tokens whose entropy has a gradient (None for all active ones), their entropies, and
            the gradients over the temperature; None for no token.
    """

    log_total: Tensor
    of_sum: Tensor
    of_target: Tensor
    entropies: tuple[Tensor | None, Tensor, Tensor] | None


class Epilogue(Protocol):
    """What is done with a chunk of (n, C) logits before the next one overwrites it."""

    def absorb(
        self, logits: Tensor, local_ids: Tensor, temperature: float | Tensor, measured: Tensor | None, running: Running
    ) -> None:
        """Fold logits, not yet divided by the temperature, into the running sums. They may be overwritten."""

    def to_gradient(
        self, logits: Tensor, local_ids: Tensor, temperature: float | Tensor, upstream: Upstream, dtype: torch.dtype
    ) -> Tensor:
        """The gradient of the loss in these logits, in the given type; in their place if that is theirs."""


class TorchEpilogue:
    """A few passes in eager torch over a chunk that is in the cache."""

    def absorb(
        self, logits: Tensor, local_ids: Tensor, temperature: float | Tensor, measured: Tensor | None, running: Running
    ) -> None:
        """See `Epilogue`."""
        _divide(logits, temperature)
        inside, place = _inside(local_ids, logits.shape[-1])
        running.target = torch.where(inside, logits.gather(1, place).squeeze(-1), running.target)
        largest = torch.maximum(running.largest, logits.amax(-1))
        anchor = largest.masked_fill(largest == -torch.inf, 0.0)
        shift = (running.largest - anchor).clamp(min=UNDERFLOW)
        scale = shift.exp()
        powers = logits.sub_(anchor.unsqueeze(-1)).exp_()
        if running.weighted is not None:
            some = slice(None) if measured is None else measured
            running.weighted = scale[some] * (running.weighted + running.total[some] * shift[some])
        running.total = scale * running.total + powers.sum(-1)
        running.largest = largest
        if running.weighted is not None:  # entr e = −e log e, which is 0 at 0
            chosen = powers if measured is None else powers[measured]
            running.weighted -= torch.special.entr(chosen, out=chosen).sum(-1)

    def to_gradient(
        self, logits: Tensor, local_ids: Tensor, temperature: float | Tensor, upstream: Upstream, dtype: torch.dtype
    ) -> Tensor:
        """See `Epilogue`."""
        _divide(logits, temperature)
        powers = logits.sub_(upstream.log_total.unsqueeze(-1)).exp_()
        if upstream.entropies is None:
            powers.mul_(upstream.of_sum.unsqueeze(-1))
        else:
            rows, entropy, of_entropy = upstream.entropies
            p = powers if rows is None else powers[rows]  # dH/dz = −p (log p + H)
            change = (torch.special.entr(p) - p * entropy.unsqueeze(-1)) * of_entropy.unsqueeze(-1)
            powers.mul_(upstream.of_sum.unsqueeze(-1))
            powers = powers.add_(change) if rows is None else powers.index_add_(0, rows, change)
        inside, place = _inside(local_ids, logits.shape[-1])
        return powers.scatter_add_(1, place, upstream.of_target.where(inside, 0.0).unsqueeze(-1)).to(dtype)


def dense_sums(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    bias: Tensor | None,
    temperature: float | Tensor,
    measured: Tensor | None,
    entropy: bool,
    accumulate_into: Tensor | None,
    first_id: int,
    chunk: int | None,
    epilogue: Epilogue,
    precision: Precision = "float32",
    compact: bool = True,
) -> LogSums:
    """Sums over all V entries z_j = (h · W_j + b_j) / τ, differentiable in hidden states, weight and bias.

    Args:
        hidden: (N, d).
        weight: (V, d).
        token_ids: (N,); those that lie outside `first_id` … `first_id` + V − 1 have target 0.
        bias: (V,) or None.
        temperature: τ, a number or (N,).
        measured: (n,) int64 positions of the tokens whose entropy is wanted; None for all.
        entropy: whether any entropy is wanted.
        accumulate_into: see `HeadGradient`.
        first_id: the id of the first row.
        chunk: entries whose logits are live at once; None chooses.
        epilogue: does the work between the products.
        precision: of the products, where operands are float32.
        compact: whether backward drops tokens without a gradient, which waits for the device. Without it `measured`
            is None.
    """
    settings = Settings(
        temperature, token_ids - first_id, measured, entropy, accumulate_into, chunk, epilogue, precision, compact
    )
    return LogSums(*_Dense.apply(hidden, weight, bias, settings))


@dataclass(frozen=True)
class Settings:
    """What of `dense_sums` has no gradient; `local_ids` count from the first row."""

    temperature: float | Tensor
    local_ids: Tensor
    measured: Tensor | None
    entropy: bool
    accumulate_into: Tensor | None
    chunk: int | None
    epilogue: Epilogue
    precision: Precision
    compact: bool


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings
    ) -> tuple[Any, ...]:
        wide = wide_type(hidden, weight)
        N = hidden.shape[0]
        rows = N if settings.measured is None else settings.measured.numel()
        running = Running(
            largest=hidden.new_full((N,), -torch.inf, dtype=wide),
            total=hidden.new_zeros(N, dtype=wide),
            target=hidden.new_zeros(N, dtype=wide),
            weighted=hidden.new_zeros(rows, dtype=wide) if settings.entropy else None,
        )
        with float32_products(settings.precision, hidden.device):
            for first, _, logits, _ in _chunks(hidden, weight, bias, settings):
                local = settings.local_ids - first
                settings.epilogue.absorb(logits, local, settings.temperature, settings.measured, running)
        log_sum = running.total.log()
        entropy = None
        if running.weighted is not None:
            some = slice(None) if settings.measured is None else settings.measured
            entropy = log_sum[some] - running.weighted / running.total[some]
        ctx.settings = settings
        ctx.save_for_backward(hidden, weight, bias, running.largest + log_sum, entropy)
        ctx.mark_non_differentiable(running.largest)
        ctx.set_materialize_grads(False)
        return running.largest, log_sum, running.target, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, log_total, entropy = ctx.saved_tensors
        settings: Settings = ctx.settings
        gradient = HeadGradient(ctx, weight, accumulate_into=settings.accumulate_into, sparse=False)
        of_sum, of_target = (torch.zeros_like(log_total) if x is None else x for x in grads[1:3])
        gradients = of_sum, of_target, grads[3]
        if settings.compact:
            active, upstream = _active(settings, log_total, entropy, *gradients)
            temperature, states = at_rows(settings.temperature, active), hidden if active is None else hidden[active]
        else:
            active, (states, temperature, upstream) = None, _every(hidden, settings, log_total, entropy, *gradients)
        local_ids = settings.local_ids if active is None else settings.local_ids[active]
        some = replace(settings, temperature=temperature, local_ids=local_ids)
        of_states = torch.zeros_like(states, dtype=log_total.dtype) if ctx.needs_input_grad[0] else None
        of_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        with float32_products(settings.precision, hidden.device):
            for first, operand, logits, head in _chunks(states, weight, bias, some):
                G = settings.epilogue.to_gradient(
                    logits, some.local_ids - first, some.temperature, upstream, operand.dtype
                )
                if of_states is not None:
                    add_product(of_states, G, head)
                gradient.add_slice(first, first + len(head), G.t(), operand)
                if of_bias is not None:
                    of_bias[first : first + len(head)] = G.sum(0, dtype=log_total.dtype)
        if of_states is not None and active is not None:
            of_states = torch.zeros_like(hidden).index_copy_(0, active, of_states.to(hidden.dtype))
        return of_states, gradient.result(), of_bias, None


def _chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """For each chunk: its first row, the hidden states and the rows as operands, and logits in a buffer used again."""
    wide = wide_type(hidden, weight)
    dtype = operand_type(hidden, weight, wide, settings.precision)
    N, V = hidden.shape[0], weight.shape[0]
    size = chunk_size(N, V, hidden.device, settings.chunk)
    buffer = hidden.new_empty(N * size, dtype=wide)
    operand = hidden.to(dtype)
    for first in range(0, V, size):
        head = weight[first : first + size].to(dtype)
        logits = multiply(operand, head.t(), buffer[: N * len(head)].view(N, len(head)))
        if bias is not None:
            logits.add_(bias[first : first + size])
        yield first, operand, logits, head


def _active(
    settings: Settings,
    log_total: Tensor,
    entropy: Tensor | None,
    of_sum: Tensor,
    of_target: Tensor,
    of_entropy: Tensor | None,
) -> tuple[Tensor | None, Upstream]:
    """Positions of the tokens that have a gradient, None for all, and what is upstream of them.

    How many there are is data: this waits for the device.
    """
    every = torch.arange(log_total.numel(), device=log_total.device)
    measured = every if settings.measured is None else settings.measured
    wanted = (of_sum != 0) | (of_target != 0)
    if of_entropy is not None:
        wanted = wanted.index_fill(0, measured[of_entropy != 0], True)
    active = torch.where(wanted)[0]
    whole = active.numel() == wanted.numel()

    def chosen(x: Tensor) -> Tensor:
        return x if whole else x[active]

    temperature, entropies = settings.temperature, None
    if of_entropy is not None and entropy is not None:
        some = of_entropy != 0
        at = measured[some]
        entropies = (wanted.cumsum(0) - 1)[at], entropy[some], of_entropy[some] / at_rows(temperature, at)
    upstream = Upstream(
        log_total=chosen(log_total),
        of_sum=chosen(of_sum / temperature),
        of_target=chosen(of_target / temperature),
        entropies=entropies,
    )
    return None if whole else active, upstream


def _every(
    hidden: Tensor,
    settings: Settings,
    log_total: Tensor,
    entropy: Tensor | None,
    of_sum: Tensor,
    of_target: Tensor,
    of_entropy: Tensor | None,
) -> tuple[Tensor, float | Tensor, Upstream]:
    """Hidden states, temperatures and what is upstream of all tokens, those without a gradient made harmless.

    Nothing is read, so nothing waits. A total of ∞ makes every p of such a token 0, whatever its logits are.
    """
    active = (of_sum != 0) | (of_target != 0)
    if of_entropy is not None:
        active = active | (of_entropy != 0)
    states, temperature = harmless(hidden, settings.temperature, active)

    entropies = None
    if of_entropy is not None and entropy is not None:
        entropies = None, entropy.masked_fill(of_entropy == 0, 0.0), of_entropy / temperature
    upstream = Upstream(
        log_total=log_total.masked_fill(~active, torch.inf),
        of_sum=of_sum / temperature,
        of_target=of_target / temperature,
        entropies=entropies,
    )
    return states, temperature, upstream


def _divide(logits: Tensor, temperature: float | Tensor) -> None:
    if isinstance(temperature, Tensor) or temperature != 1.0:
        logits.div_(column(temperature))


def _inside(local_ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Which tokens' ids are in a chunk, (n,), and a place in it for each, (n, 1)."""
    return (local_ids >= 0) & (local_ids < size), local_ids.clamp(0, size - 1).unsqueeze(-1)
