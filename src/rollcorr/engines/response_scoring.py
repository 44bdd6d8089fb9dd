"""Compute log-probs of response tokens under a causal language model, from its logits.

The probe is a fixed batch. Engine and policy both score it after a weight update, to verify the update.

Symbols (docs/reference/notation.md): B sequences, T padded response length, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rollcorr.engines.base import TokenBatch

PROBE_SHAPE = (4, 16)


class ResponseScores(NamedTuple):
    """Log-probs of the response tokens and entropies of the distributions they were drawn from, nats, (B, T)."""

    log_prob: Tensor
    entropy: Tensor


def score_responses(
    model: Callable[..., Any], tokens: TokenBatch, *, temperature: float = 1.0, entropy_gradient: bool = False
) -> ResponseScores:
    """Compute log softmax(logits / temperature)[y_t] for every response token y_t, in float32.

    Args:
        model: a causal language model with the `transformers` calling convention. Its dtype does not change; the
            softmax is computed in float32.
        tokens: prompts and responses. The width of the padding does not affect valid tokens.
        temperature: the sampling temperature, > 0.
        entropy_gradient: keep the graph of the entropies as well; only an entropy bonus needs it.

    Returns:
        Log-probs and entropies in nats, (B, T) float32. Positions outside `response_mask` contain garbage.
    """
    log_probs = (response_logits(model, tokens).float() / temperature).log_softmax(-1)
    log_prob = log_probs.gather(-1, tokens.response_ids[..., None]).squeeze(-1)

    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return ResponseScores(log_prob, entropy)


def response_logits(model: Callable[..., Any], tokens: TokenBatch) -> Tensor:
    """Return the logits that each response token was drawn from, (B, T, V), in the model's dtype.

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


def make_probe(model: nn.Module) -> TokenBatch:
    """Return a fixed batch of arbitrary tokens that reaches every parameter of the model, on its device."""
    parameter = next(model.parameters())
    # Half of each row is prompt, half is response.
    ids = torch.randint(vocabulary_size(model), PROBE_SHAPE, generator=torch.Generator().manual_seed(0), device="cpu")
    prompt, response = ids.to(parameter.device).chunk(2, dim=1)

    mask = torch.ones_like(prompt, dtype=torch.bool)
    return TokenBatch(prompt, mask, response, mask)


@torch.no_grad()
def score_probe(
    model: nn.Module,
    probe: TokenBatch,
    *,
    dtype: torch.dtype,
    temperature: float = 1.0,
    rounding: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute log-probs of the probe's responses under `model` with parameters rounded to `dtype`, (B, T) float32.

    The policy computes in the engine's precision, so a stale parameter differs by more than rounding. `rounding` is
    the engine's further rounding of each parameter.

    Args:
        model: the trainer's policy.
        probe: prompts with responses, on any device.
        dtype: the engine's dtype.
        temperature: divisor of the logits.
        rounding: function of a parameter; optional. Defaults to no further rounding.
    """
    here = probe.to(next(model.parameters()).device)
    rounded = {name: weight.to(dtype) for name, weight in model.named_parameters()}
    if rounding is not None:
        rounded = {name: rounding(weight) for name, weight in rounded.items()}
    scores = score_responses(
        lambda **inputs: functional_call(model, rounded, kwargs=inputs), here, temperature=temperature
    )
    return scores.log_prob.to(probe.response_ids.device)


def vocabulary_size(model: Any) -> int:  # noqa: ANN401 (a transformers model)
    """Return the number of token ids of the model: rows of its input embeddings, vocabulary padding included."""
    return int(model.get_input_embeddings().weight.shape[0])


def copied_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of a policy that calls no code of the original.

    Args:
        model: stays unchanged.
        memo: the memo of `copy.deepcopy`: replacements by `id`, for parts that must not be copied; optional.
    """
    twin = copy.deepcopy(model, memo)

    # Trainers may replace a module's `forward` by a function, as TRL's fused head does. The copy would still call the
    # original module. Hooks of accelerate are copied correctly, and know where the weights are.
    for module in twin.modules():
        if not hasattr(module, "_hf_hook"):
            vars(module).pop("forward", None)
    return twin
