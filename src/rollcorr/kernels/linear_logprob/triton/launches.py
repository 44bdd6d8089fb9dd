"""Launches of the Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from rollcorr.kernels.gpu_launch import Launch
from rollcorr.kernels.linear_logprob.dense import Epilogue, Running, Upstream
from rollcorr.kernels.linear_logprob.kept import Entries, RaggedProducts
from rollcorr.kernels.linear_logprob.problem import placed, wide_type
from rollcorr.kernels.linear_logprob.triton import dense_kernel, kept_kernel


class TritonEpilogue(Epilogue):
    """Triton epilogue: one launch for a chunk of logits, forward and back."""

    def absorb(
        self, logits: Tensor, local_ids: Tensor, temperature: float | Tensor, measured: Tensor | None, running: Running
    ) -> None:
        """Launch one program per row."""
        slots = local_ids
        if running.weighted is not None:
            slots = torch.arange(len(logits), device=logits.device)
            if measured is not None:
                slots = torch.full_like(slots, -1).index_copy(0, measured, slots[: measured.numel()])
        arguments = {
            "logits": logits,
            "local_ids": local_ids,
            "temperature": _temperature_per_row(temperature, logits),
            "slots": slots,
            "largest": running.largest,
            "total": running.total,
            "target": running.target,
            "weighted": running.total if running.weighted is None else running.weighted,
            "columns": logits.shape[1],
        }
        Launch(dense_kernel.absorb, (len(logits),), arguments, {"MEASURE": running.weighted is not None}).run()

    def to_gradient(
        self, logits: Tensor, local_ids: Tensor, temperature: float | Tensor, upstream: Upstream, dtype: torch.dtype
    ) -> Tensor:
        """Launch one program per block of a row."""
        gradient = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
        entropy = of_entropy = upstream.of_sum  # unread unless MEASURED
        if upstream.entropies is not None:
            rows, *values = upstream.entropies
            entropy, of_entropy = (placed(x, rows, len(logits), 0.0) for x in values)
        arguments = {
            "logits": logits,
            "gradient": gradient,
            "local_ids": local_ids,
            "temperature": _temperature_per_row(temperature, logits),
            "log_total": upstream.log_total,
            "of_sum": upstream.of_sum,
            "of_target": upstream.of_target,
            "entropy": entropy,
            "of_entropy": of_entropy,
            "columns": logits.shape[1],
        }
        grid = len(logits), -(-logits.shape[1] // dense_kernel.BLOCK.value)
        Launch(dense_kernel.to_gradient, grid, arguments, {"MEASURED": upstream.entropies is not None}).run()
        return gradient


class TritonProducts(RaggedProducts):
    """Triton products: one launch for each product."""

    def dots(self, hidden: Tensor, weight: Tensor, entries: Entries) -> Tensor:
        """Launch one program per block of entries."""
        z = hidden.new_empty(entries.ids.shape, dtype=wide_type(hidden, weight))
        arguments = {
            "hidden": hidden.contiguous(),
            "weight": weight.contiguous(),
            "ids": entries.ids,
            "tokens": entries.hidden_rows,
            "z": z,
            "entries": z.numel(),
            "d": hidden.shape[1],
        }
        Launch(kept_kernel.dots, (-(-z.numel() // kept_kernel.ENTRIES.value),), arguments, {}).run()
        return z

    def of_hidden(self, weight: Tensor, entries: Entries, gradient: Tensor) -> Tensor:
        """Launch one program per token and block of columns."""
        tokens, d = entries.offsets.numel() - 1, weight.shape[1]
        bags = gradient.new_empty(tokens, d)
        arguments = {
            "weight": weight.contiguous(),
            "ids": entries.ids,
            "offsets": entries.offsets,
            "changes": gradient.contiguous(),
            "bags": bags,
            "d": d,
        }
        Launch(kept_kernel.add_up, (tokens, -(-d // kept_kernel.WIDTH.value)), arguments, {}).run()
        return bags

    def add_to_head(self, total: Tensor, hidden: Tensor, entries: Entries, gradient: Tensor) -> None:
        """Launch one program per entry and block of columns; it returns at once unless the entry is its row's first."""
        rows = entries.ids.masked_fill(gradient == 0, -1)
        order = rows.argsort(stable=True)
        arguments = {
            "sorted_rows": rows[order],
            "tokens": entries.hidden_rows[order],
            "changes": gradient[order],
            "hidden": hidden.contiguous(),
            "gradient": total,
            "places": rows.numel(),
            "d": hidden.shape[1],
        }
        Launch(
            kept_kernel.add_rows, (rows.numel(), -(-hidden.shape[1] // kept_kernel.WIDTH.value)), arguments, {}
        ).run()


def _temperature_per_row(temperature: float | Tensor, logits: Tensor) -> Tensor:
    """Return a temperature for each row, in the logits' type."""
    if isinstance(temperature, Tensor):
        return temperature.to(logits.dtype).contiguous()
    return logits.new_full((len(logits),), temperature)
