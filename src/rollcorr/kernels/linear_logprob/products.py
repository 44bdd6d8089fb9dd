"""Matrix products with results in float32 or wider, and the accumulation of the head's weight gradient."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from rollcorr.kernels.linear_logprob.problem import Context

Precision = Literal["float32", "tf32"]


def operand_type(hidden: Tensor, weight: Tensor, wide: torch.dtype, precision: Precision = "float32") -> torch.dtype:
    """Return the dtype of the operands of the products.

    Half-precision operands keep their dtype if the device multiplies them into float32. Otherwise each chunk is
    widened: the product of two bfloat16 numbers is exact in float32, while a logit between 32 and 64 rounded to
    bfloat16 is off by up to 0.125.

    Args:
        hidden: (N, H).
        weight: (V, H).
        wide: dtype of the sums.
        precision: of float32 products on a GPU; "float32" warns once if widened products are slow there, "tf32" never.
    """
    if hidden.device.type != "cuda" or wide == torch.float64:
        return wide
    if hidden.dtype == weight.dtype and (hidden.dtype == wide or _has_wide_products()):
        return hidden.dtype
    if precision == "float32":
        _warn_of_slow_products(hidden.dtype, weight.dtype, _has_wide_products())
    return wide


@contextmanager
def float32_products(precision: Precision, device: torch.device) -> Iterator[None]:
    """Context manager: a GPU uses all bits of float32 operands, or with "tf32" their first 11 significant bits."""
    if device.type != "cuda":
        yield
        return
    before = "highest"
    with suppress(RuntimeError):  # torch raises if the newer switches disagree
        before = torch.get_float32_matmul_precision()

    # Switches of single backends exist from torch 2.9 on; the older switch also sets them.
    owners: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    switches = [(owner, owner.fp32_precision) for owner in owners if hasattr(owner, "fp32_precision")]
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for owner, value in switches:
            owner.fp32_precision = value


def _has_wide_products() -> bool:
    """Return whether torch multiplies half-precision matrices into float32."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)


@lru_cache(maxsize=16)
def _warn_of_slow_products(hidden: torch.dtype, weight: torch.dtype, wide_products: bool) -> None:
    """Warn once for each pair of types."""
    reason = f"torch {torch.__version__} lacks products of half precision into float32, new in 2.8"
    fix = "update torch"
    if wide_products or hidden != weight:
        reason, fix = "the two differ", "give both in bfloat16"
    states, head = (str(dtype).removeprefix("torch.") for dtype in (hidden, weight))
    warnings.warn(
        f"linear_log_prob multiplies {states} hidden states and a {head} head in float32, because {reason}: about 14 × "
        f"the time of bfloat16 by an H200's rates. To avoid it, {fix}; or set precision='tf32', which takes about 2 × "
        "and rounds float32 operands to 11 significant bits",
        stacklevel=2,
    )


def multiply(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Compute `out` = `left` `right`, of (n, k) and (k, m), accumulated and returned in the dtype of `out`."""
    if left.dtype == out.dtype:
        return torch.mm(left, right, out=out)
    return torch.mm(left, right, out_dtype=out.dtype, out=out)


def add_product(total: Tensor, left: Tensor, right: Tensor, *, fresh: bool = False) -> None:
    """Add `left` `right` to `total`, accumulated in float32 or wider and rounded once; `fresh` overwrites it."""
    if left.dtype == total.dtype and total.dtype.itemsize >= 4:
        torch.addmm(total, left, right, beta=0 if fresh else 1, out=total)
        return
    product = multiply(left, right, left.new_empty(total.shape, dtype=torch.promote_types(left.dtype, torch.float32)))
    total.copy_(product) if fresh else total.add_(product)


def asked_for_gradient(weight: Tensor) -> Tensor:
    """Return the weight as a graph node, so that `HeadGradient` can see whether backward reaches it.

    A frozen weight gets a node too: its gradient is still added to `accumulate_into`.
    """
    trained = weight if weight.requires_grad else weight.detach().requires_grad_()
    return trained.view_as(trained)


class HeadGradient:
    """The gradient of the head's weight: not needed, a new tensor, or added to an existing one.

    Args:
        ctx: context of the running backward; the weight is the second input of its function.
        weight: (V, d).
        accumulate_into: optional buffer to add to; autograd then gets no gradient, and the weight comes from
            `asked_for_gradient`.
        sparse: only some rows will be added, so a new tensor must start from zeros.
    """

    def __init__(self, ctx: Context, weight: Tensor, *, accumulate_into: Tensor | None, sparse: bool) -> None:
        self.fresh = accumulate_into is None
        self.total = None
        if accumulate_into is not None:
            # `torch.autograd.grad(loss, hidden)` runs this backward, and `needs_input_grad` does not show the inputs.
            node = ctx.next_functions[1][0]
            self.total = accumulate_into if torch._C._will_engine_execute_node(node) else None
        elif ctx.needs_input_grad[1]:
            self.total = torch.zeros_like(weight) if sparse else torch.empty_like(weight)

    def add_slice(self, first: int, stop: int, left: Tensor, right: Tensor) -> None:
        """Add `left` `right` to the rows first … stop − 1. Call it once for each row."""
        if self.total is not None:
            add_product(self.total[first:stop], left, right, fresh=self.fresh)

    def result(self) -> Tensor | None:
        """Return the gradient for autograd."""
        return self.total if self.fresh else None
