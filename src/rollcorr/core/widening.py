"""Half-precision tensors are computed with in float32; wider ones keep their precision."""

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """The tensor in float32, or in float64 if that is what it is.

    Args:
        x: any shape and float dtype. A tensor that is wide enough is returned as it is.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))
