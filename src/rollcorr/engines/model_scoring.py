"""Token log-probs of a causal language model over prompts padded on the left and responses padded on the right.

Symbols (docs/notation.md): B sequences, P padded prompt length, T padded response length.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Prompts and responses, padded apart so that every response begins in the same column.

    Attributes:
        prompt_ids: (B, P) int64, padded on the left.
        prompt_mask: (B, P) bool, true on prompt tokens.
        response_ids: (B, T) int64, padded on the right.
        response_mask: (B, T) bool, true on sampled tokens; the sampled end-of-sequence token is one of them.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor

    def __len__(self) -> int:
        return self.prompt_ids.shape[0]

    def select(self, rows: Tensor) -> TokenBatch:
        """The given rows, padded as they were."""
        return TokenBatch(*(getattr(self, field.name)[rows] for field in fields(TokenBatch)))

    def to(self, device: torch.device | str) -> TokenBatch:
        """The same batch on another device."""
        return TokenBatch(*(getattr(self, field.name).to(device) for field in fields(TokenBatch)))


class ResponseScores(NamedTuple):
    """Log-probs of the response tokens and entropies of the distributions they were drawn from, nats, (B, T)."""

    log_prob: Tensor
    entropy: Tensor


def pad_prompts(prompts: list[list[int]], *, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Pad prompts on the left.

    Returns:
        ids (B, P) int64 and mask (B, P) bool.

    Raises:
        ValueError: there is no prompt, or one is empty (a causal model predicts nothing from nothing).
    """
    empty = [row for row, prompt in enumerate(prompts) if not prompt]
    if not prompts or empty:
        raise ValueError(f"every prompt needs at least one token; {len(prompts)} prompts, empty ones at {empty}")
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_token_id] * (width - len(prompt)) + prompt for prompt in prompts], device="cpu")
    lengths = torch.tensor([len(prompt) for prompt in prompts], device="cpu")
    return ids, torch.arange(width, device="cpu") >= width - lengths[:, None]


def score_responses(
    model: nn.Module, tokens: TokenBatch, *, temperature: float = 1.0, entropy_gradient: bool = False
) -> ResponseScores:
    """log softmax(logits / temperature)[y_t] for every response token y_t, in float32.

    Args:
        model: a causal language model with the `transformers` calling convention. Its dtype is left alone; the
            softmax is taken in float32.
        tokens: prompts and responses. How wide they are padded changes nothing at valid tokens.
        temperature: the sampling temperature, > 0.
        entropy_gradient: keep the graph of the entropies too; only an entropy bonus needs it.

    Returns:
        Log-probs and entropies in nats, (B, T) float32. Positions outside `response_mask` hold garbage.
    """
    log_probs = (response_logits(model, tokens).float() / temperature).log_softmax(-1)
    log_prob = log_probs.gather(-1, tokens.response_ids[..., None]).squeeze(-1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return ResponseScores(log_prob, entropy)


def response_logits(model: nn.Module, tokens: TokenBatch) -> Tensor:
    """The logits that each response token was drawn from, (B, T, V), in the model's dtype. Other arguments as above."""
    width = tokens.response_ids.shape[1]
    attention_mask = torch.cat([tokens.prompt_mask, tokens.response_mask], dim=1).long()
    logits: Tensor = model(
        input_ids=torch.cat([tokens.prompt_ids, tokens.response_ids], dim=1),
        attention_mask=attention_mask,
        position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
        logits_to_keep=width + 1,
    ).logits[:, :-1]
    return logits
