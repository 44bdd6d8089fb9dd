"""Log-probs of response tokens under a causal language model, from its logits.

Symbols (docs/notation.md): B sequences, T padded response length, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from rollcorr.engines.token_batch import TokenBatch


class ResponseScores(NamedTuple):
    """Log-probs of the response tokens and entropies of the distributions they were drawn from, nats, (B, T)."""

    log_prob: Tensor
    entropy: Tensor


def score_responses(
    model: nn.Module, tokens: TokenBatch, *, temperature: float = 1.0, entropy_gradient: bool = False
) -> ResponseScores:
    """log softmax(logits / temperature)[y_t] for every response token y_t, in float32.

    Args:
        model: a causal language model with the `transformers` calling convention. Its dtype does not change; the
            softmax is computed in float32.
        tokens: prompts and responses. The width of the padding changes nothing at valid tokens.
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
    """The logits that each response token was drawn from, (B, T, V), in the model's dtype.

    Args:
        model: as in `score_responses`.
        tokens: as in `score_responses`.
    """
    width = tokens.response_ids.shape[1]
    attention_mask = torch.cat([tokens.prompt_mask, tokens.response_mask], dim=1).long()

    # The logits at a token predict the next one, so the response's begin at the last prompt token.
    logits: Tensor = model(
        input_ids=torch.cat([tokens.prompt_ids, tokens.response_ids], dim=1),
        attention_mask=attention_mask,
        position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
        logits_to_keep=width + 1,
    ).logits[:, :-1]
    return logits
