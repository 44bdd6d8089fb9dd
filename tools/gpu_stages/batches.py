"""Batches that the stages share: made on the device, the same for equal seeds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LENGTH = 8192
STANDARD = {"rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}


class Batch(NamedTuple):
    """Log-probs of well-matched policies.

    Attributes:
        train, rollout, mask: (B, T), or (N,) when packed.
        cu_seqlens: when packed.
        padded: the same tokens padded, for peers that take nothing else.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor
    cu_seqlens: Tensor | None
    padded: tuple[Tensor, Tensor, Tensor]

    @property
    def tokens(self) -> int:
        """Places, whether a token is in them or not."""
        return self.train.numel()


def make_batch(tokens: int, layout: str, device: str) -> Batch:
    """`tokens` places in rows of up to 8,192: "dense", "padded" (9/16 of them hold a token), or the latter "packed"."""
    length = min(LENGTH, tokens)
    shape = tokens // length, length
    generator = torch.Generator(device=device).manual_seed(0)
    rollout = -2 * torch.rand(shape, generator=generator, device=device)
    train = rollout + 0.02 * torch.randn(shape, generator=generator, device=device)
    lengths = torch.randint(length // 8, length + 1, (shape[0],), generator=generator, device=device)
    if layout == "dense":
        lengths = torch.full_like(lengths, length)
    mask = torch.arange(length, device=device) < lengths[:, None]
    padded = train, rollout, mask
    if layout != "packed":
        return Batch(*padded, None, padded)
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    packed = train[mask], rollout[mask], torch.ones(int(lengths.sum()), dtype=torch.bool, device=device)
    return Batch(*packed, cu_seqlens, padded)
