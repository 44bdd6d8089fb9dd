"""Matrix products with results in float32 or wider, and where the gradient of the head's weight goes."""

from __future__ import annotations

import torch
from torch import Tensor


def operand_type(hidden: Tensor, weight: Tensor, wide: torch.dtype) -> torch.dtype:
    """The type that operands of the products go in.

    Half-precision operands keep theirs where the device multiplies them into float32. Elsewhere they are widened, a
    chunk at a time: the product of two bfloat16 numbers is exact in float32, while a logit of 32 rounded to bfloat16
    is off by up to 0.06.
    """
    if hidden.dtype != weight.dtype or hidden.dtype == wide or hidden.device.type != "cuda":
        return wide
    has_wide_products = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)
    return hidden.dtype if has_wide_products else wide


def multiply(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """out = left right, of (n, k) and (k, m), accumulated and returned in out's type."""
    if left.dtype == out.dtype:
        return torch.mm(left, right, out=out)
    return torch.mm(left, right, out_dtype=out.dtype, out=out)


def add_product(total: Tensor, left: Tensor, right: Tensor, *, fresh: bool = False) -> None:
    """total += left right, accumulated in float32 or wider and rounded once; with `fresh`, total held nothing."""
    if left.dtype == total.dtype and total.dtype.itemsize >= 4:
        torch.addmm(total, left, right, beta=0 if fresh else 1, out=total)
        return
    product = multiply(left, right, left.new_empty(total.shape, dtype=torch.promote_types(left.dtype, torch.float32)))
    total.copy_(product) if fresh else total.add_(product)


class HeadGradient:
    """The gradient of the head's weight: unwanted, a tensor of its own, or added to one that exists.

    Args:
        weight: (V, d).
        wanted: whether autograd asks for it.
        accumulate_into: what to add to; then autograd gets none.
        sparse: only some rows will be given, so that a tensor of its own must start from zeros.
    """

    def __init__(self, weight: Tensor, *, wanted: bool, accumulate_into: Tensor | None, sparse: bool) -> None:
        self.fresh = accumulate_into is None
        self.total = accumulate_into
        if wanted and accumulate_into is None:
            self.total = torch.zeros_like(weight) if sparse else torch.empty_like(weight)

    def add_slice(self, first: int, stop: int, left: Tensor, right: Tensor) -> None:
        """Rows first … stop − 1 get left right. Each row is given once."""
        if self.total is not None:
            add_product(self.total[first:stop], left, right, fresh=self.fresh)

    def add_rows(self, ids: Tensor, rows: Tensor) -> None:
        """Rows `ids`, no two equal, get `rows`."""
        if self.total is not None:
            self.total.index_add_(0, ids, rows.to(self.total.dtype))

    def result(self) -> Tensor | None:
        """What autograd gets."""
        return self.total if self.fresh else None
