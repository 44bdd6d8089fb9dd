"""Launches of the Triton kernels, and the autograd function of kept sets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollcorr.core.layout import add_at, sequence_ids
from rollcorr.kernels.gpu_launch import Launch
from rollcorr.kernels.linear_logprob.dense import Epilogue, Running, Upstream
from rollcorr.kernels.linear_logprob.kept import Membership
from rollcorr.kernels.linear_logprob.problem import Context, LogSums, Problem
from rollcorr.kernels.linear_logprob.products import HeadGradient
from rollcorr.kernels.linear_logprob.triton import dense_kernel, kept_kernel


class TritonEpilogue(Epilogue):
    """One launch for a chunk of logits, forward and back."""

    def absorb(
        self, logits: Tensor, local_ids: Tensor, temperature: float | Tensor, measured: Tensor | None, running: Running
    ) -> None:
        """A program takes a row."""
        absorb_launch(logits, local_ids, temperature, measured, running).run()

    def to_gradient(
        self, logits: Tensor, local_ids: Tensor, temperature: float | Tensor, upstream: Upstream, dtype: torch.dtype
    ) -> Tensor:
        """A program takes a block of a row."""
        gradient = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
        to_gradient_launch(logits, gradient, local_ids, temperature, upstream).run()
        return gradient


def absorb_launch(
    logits: Tensor, local_ids: Tensor, temperature: float | Tensor, measured: Tensor | None, running: Running
) -> Launch:
    """Reads shapes only, so it also serves to compile without a GPU."""
    slots = local_ids
    if running.weighted is not None:
        slots = torch.arange(len(logits), device=logits.device)
        if measured is not None:
            slots = torch.full_like(slots, -1).index_copy(0, measured, slots[: measured.numel()])
    arguments = {
        "logits": logits,
        "local_ids": local_ids,
        "temperature": _each(temperature, len(logits), logits),
        "slots": slots,
        "largest": running.largest,
        "total": running.total,
        "target": running.target,
        "weighted": running.total if running.weighted is None else running.weighted,
        "columns": logits.shape[1],
    }
    return Launch(dense_kernel.absorb, (len(logits),), arguments, {"MEASURE": running.weighted is not None})


def to_gradient_launch(
    logits: Tensor, gradient: Tensor, local_ids: Tensor, temperature: float | Tensor, upstream: Upstream
) -> Launch:
    """Reads shapes only, so it also serves to compile without a GPU."""
    entropy = of_entropy = upstream.of_sum
    if upstream.entropies is not None:
        rows, some, of_some = upstream.entropies
        entropy, of_entropy = some, of_some
        if rows is not None:
            entropy, of_entropy = (torch.zeros_like(upstream.of_sum).index_copy(0, rows, x) for x in (some, of_some))
    N, columns = logits.shape
    arguments = {
        "logits": logits,
        "gradient": gradient,
        "local_ids": local_ids,
        "temperature": _each(temperature, len(logits), logits),
        "log_total": upstream.log_total,
        "of_sum": upstream.of_sum,
        "of_target": upstream.of_target,
        "entropy": entropy,
        "of_entropy": of_entropy,
        "columns": columns,
    }
    grid = N, -(-columns // dense_kernel.BLOCK.value)
    return Launch(dense_kernel.to_gradient, grid, arguments, {"MEASURED": upstream.entropies is not None})


def triton_kept_sums(problem: Problem, member: Membership) -> LogSums:
    """As `rollcorr.kernels.linear_logprob.kept.kept_sums`, without a wait: tokens that do not work end at once."""
    largest, log_sum, target, entropy = _KeptSets.apply(problem.hidden, problem.weight, problem.bias, problem, member)
    return LogSums(largest, log_sum, target, None if problem.entropy is False else entropy)


@dataclass(frozen=True, eq=False)
class Places:
    """What the launches share: the ragged list of ids as given, and a place for each entry and one more a token.

    Attributes:
        arguments: of the ids, by name.
        rows: the head's row of each place, −1 for none. (M + N,) int64.
        z: its logit. (M + N,)
    """

    arguments: dict[str, Any]
    rows: Tensor
    z: Tensor


def make_places(problem: Problem, member: Membership) -> Places:
    """Buffers and the arguments that all launches take."""
    assert problem.kept is not None
    kept, N = problem.kept, problem.token_ids.numel()
    size = kept.ids.numel() + N
    z = torch.empty(size, dtype=problem.wide, device=kept.ids.device)
    arguments = {
        "ids": kept.ids.contiguous(),
        "offsets": kept.offsets.contiguous(),
        "token_ids": problem.token_ids,
        "temperature": _each(problem.temperature, N, z),
        "outside": member.outside.view(torch.uint8),
        "working": member.working.view(torch.uint8),
        "first_id": problem.first_id,
        "d": problem.hidden.shape[1],
    }
    return Places(arguments, torch.empty(size, dtype=torch.int64, device=z.device), z)


def sum_sets_launch(
    places: Places, hidden: Tensor, weight: Tensor, bias: Tensor | None, sums: tuple[Tensor, ...]
) -> Launch:
    """Reads shapes only."""
    named = dict(zip(("largest", "log_sum", "target", "entropy"), sums, strict=True))
    own = {"hidden": hidden, "weight": weight, "bias": weight if bias is None else bias, "V": len(weight)}
    arguments = places.arguments | own | named | {"rows": places.rows, "z": places.z}
    return Launch(kept_kernel.sum_sets, (len(hidden),), arguments, {"BIASED": bias is not None})


def weigh_sets_launch(places: Places, weight: Tensor, upstream: dict[str, Tensor], of_hidden: Tensor) -> Launch:
    """Reads shapes only."""
    arguments = places.arguments | upstream | {"weight": weight, "rows": places.rows, "z": places.z}
    N, d = of_hidden.shape
    return Launch(
        kept_kernel.weigh_sets, (N, -(-d // kept_kernel.WIDTH.value)), arguments | {"of_hidden": of_hidden}, {}
    )


def add_rows_launch(rows: Tensor, tokens: Tensor, changes: Tensor, hidden: Tensor, gradient: Tensor) -> Launch:
    """Reads shapes only. All by place, sorted by row."""
    d = hidden.shape[1]
    arguments = {"sorted_rows": rows, "tokens": tokens, "changes": changes, "hidden": hidden, "gradient": gradient}
    sizes = {"places": rows.numel(), "d": d}
    return Launch(kept_kernel.add_rows, (rows.numel(), -(-d // kept_kernel.WIDTH.value)), arguments | sizes, {})


class _KeptSets(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: Problem, member: Membership
    ) -> tuple[Tensor, ...]:
        hidden, weight = hidden.contiguous(), weight.contiguous()
        places = make_places(problem, member)
        sums = tuple(places.z.new_empty(len(hidden)) for _ in range(4))
        sum_sets_launch(places, hidden, weight, bias, sums).run()
        largest, log_sum, _, entropy = sums

        # Only saved tensors hold the operands, so that backward frees them.
        ctx.places, ctx.problem = places, replace(problem, hidden=hidden.new_empty(0))
        ctx.save_for_backward(hidden, weight, bias, largest + log_sum, entropy)
        ctx.mark_non_differentiable(largest)
        ctx.set_materialize_grads(False)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, log_total, entropy = ctx.saved_tensors
        places: Places = ctx.places
        names = ("of_sum", "of_target", "of_entropy")
        upstream = {
            name: torch.zeros_like(log_total) if x is None else x.contiguous()
            for name, x in zip(names, grads[1:], strict=True)
        }
        changes, of_hidden = torch.zeros_like(places.z), torch.empty_like(hidden)
        upstream |= {"log_total": log_total, "entropy": entropy, "changes": changes}
        weigh_sets_launch(places, weight, upstream, of_hidden).run()
        of_weight = HeadGradient(ctx, weight, accumulate_into=ctx.problem.accumulate_into, sparse=True)
        if of_weight.total is not None:
            rows = places.rows.masked_fill(changes == 0, -1)
            order = rows.argsort(stable=True)
            tokens = _tokens_of(ctx.problem)[order]
            add_rows_launch(rows[order], tokens, changes[order], hidden, of_weight.total).run()
        of_bias = None
        if bias is not None and ctx.needs_input_grad[2]:  # places without an entry add 0 to row 0
            of_bias = torch.zeros_like(bias, dtype=changes.dtype)
            of_bias = add_at(of_bias, places.rows.clamp(min=0), changes).to(bias.dtype)
        return of_hidden if ctx.needs_input_grad[0] else None, of_weight.result(), of_bias, None, None


def _tokens_of(problem: Problem) -> Tensor:
    """The token of each place."""
    assert problem.kept is not None
    offsets = problem.kept.offsets + torch.arange(problem.kept.offsets.numel(), device=problem.kept.offsets.device)
    size = torch.empty(problem.kept.ids.numel() + len(problem.kept), device=offsets.device)
    return sequence_ids(size, cu_seqlens=offsets)


def _each(temperature: float | Tensor, count: int, like: Tensor) -> Tensor:
    """A temperature for each row, in the type of the logits."""
    if isinstance(temperature, Tensor):
        return temperature.to(like.dtype).contiguous()
    return like.new_full((count,), temperature)
