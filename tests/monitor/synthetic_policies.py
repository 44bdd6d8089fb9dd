"""Two policies over 100 tokens: softmax heads over random contexts, of which the sampler rounds its logits to bf16."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROWS, LENGTH, WIDTH, VOCABULARY = 48, 40, 16, 100


class Sampled(NamedTuple):
    """Rows of a step: log π, log μ and the token ids, (ROWS, LENGTH) each."""

    train: Tensor
    rollout: Tensor
    ids: Tensor

    @property
    def mask(self) -> Tensor:
        return torch.ones_like(self.ids, dtype=torch.bool)


def head(seed: int = 0, size: float = 0.8) -> Tensor:
    """Return an output head, (WIDTH, VOCABULARY)."""
    return size * torch.randn(WIDTH, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def sample(seed: int, train: Tensor, rollout: Tensor | None = None, *, temperature: float = 1.0, rows: int = ROWS):
    """Sample from a rollout head, by default the trainer's, and score with the trainer's head."""
    generator = torch.Generator().manual_seed(seed)
    context = torch.randn(rows, LENGTH, WIDTH, generator=generator)
    logits = context @ (train if rollout is None else rollout) / temperature
    log_mu = logits.bfloat16().float().log_softmax(-1)
    uniform = torch.rand(log_mu.shape, generator=generator).clamp(1e-9)
    ids = (log_mu - (-uniform.log()).log()).argmax(-1, keepdim=True)
    log_pi = (context @ train).log_softmax(-1)
    return Sampled(log_pi.gather(-1, ids)[..., 0], log_mu.gather(-1, ids)[..., 0], ids[..., 0])


def shifted(rows: Sampled) -> Sampled:
    return rows._replace(rollout=rows.rollout.roll(1, 1))


def zeros_at_end(rows: Sampled) -> Sampled:
    rollout = rows.rollout.clone()
    rollout[:, -8:] = 0.0
    return rows._replace(rollout=rollout)
