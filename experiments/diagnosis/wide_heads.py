"""A small model as vLLM takes it: the same function, with wider attention heads."""

from __future__ import annotations

from functools import reduce

import torch
from torch import nn


def with_wide_heads(model: nn.Module, head_dim: int) -> nn.Module:
    """The same function as a new model whose heads are padded with zeros to `head_dim`, if they are smaller.

    Rotary embedding turns the pair (i, i + head_dim / 2) by position · θ^(−2 i / head_dim). A pair i of the narrow head
    therefore goes to i · factor, where the wide head has the same angle. Attention divides by √head_dim, so the queries
    are multiplied by √factor. All other dimensions are 0 and add nothing.
    """
    narrow_dim = model.config.head_dim
    factor = max(1, head_dim // narrow_dim)
    config = type(model.config)(**{**model.config.to_dict(), "head_dim": narrow_dim * factor})
    wide_model = type(model)(config).eval().requires_grad_(False)

    pairs = torch.arange(narrow_dim // 2, device="cpu") * factor
    places = torch.cat([pairs, pairs + narrow_dim * factor // 2])
    for name, target in wide_model.state_dict().items():
        # By attributes, so that an adapter is merged.
        weight = reduce(getattr, name.split("."), model).detach()
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            scale = factor**0.5 if "q_proj" in name else 1.0
            heads = weight.unflatten(0, (-1, narrow_dim))
            wide = heads.new_zeros(heads.shape[0], narrow_dim * factor, heads.shape[2])
            wide[:, places] = scale * heads
            weight = wide.flatten(0, 1)
        elif name.endswith("o_proj.weight"):
            heads = weight.unflatten(1, (-1, narrow_dim))
            wide = heads.new_zeros(heads.shape[0], heads.shape[1], narrow_dim * factor)
            wide[:, :, places] = heads
            weight = wide.flatten(1, 2)
        target.copy_(weight)
    return wide_model
