"""Compute log-probs of response tokens without the model's logits: pass its hidden states to `linear_log_prob`.

The model runs unchanged except that its output head is skipped. Its "logits" are then its hidden states, times any
factor that it applies to its logits (`logits_scaling`, `logit_scale` and the like).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rollcorr.core.sampling import KeptSets
from rollcorr.engines.base import TokenBatch
from rollcorr.engines.response_scoring import make_probe, response_logits
from rollcorr.kernels.linear_logprob.linear_dispatch import Implementation, linear_log_prob
from rollcorr.kernels.linear_logprob.problem import LinearLogProb

# Fields of model configurations for a nonlinear function of the logits.
SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "logit_softcap")

# Cache of `needs_logits`.
_known_to_need_logits: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def score_responses_fused(
    model: nn.Module,
    tokens: TokenBatch,
    *,
    temperature: float | Tensor = 1.0,
    kept: KeptSets | None = None,
    entropy: bool | Tensor = False,
    log_kept_mass: bool | Tensor = False,
    accumulate_into: Tensor | None = None,
    compact: bool | None = None,
    impl: Implementation = "auto",
) -> LinearLogProb:
    """Compute `score_responses` without (B, T, V) logits; or, with kept sets, over K ∪ {a} only.

    Args:
        model: a causal language model of `transformers` whose head is a plain `nn.Linear`. Its forward pass runs
            without the head, so a head that a wrapper shards must be gathered in memory first.
        tokens: prompts and responses. Tokens outside the response mask are dropped before the head.
        temperature: the sampling temperature, > 0, or one for each token, (B, T).
        kept: one set for each of B · T positions: `KeptSets.padded(tokens.response_mask)` of packed ones; optional.
        entropy: see `linear_log_prob`. (B, T) if a tensor.
        log_kept_mass: see `linear_log_prob`.
        accumulate_into: receives the gradient of the head's weight; see `linear_log_prob`.
        compact: see `linear_log_prob`.
        impl: see `linear_log_prob`.

    Returns:
        (B, T), nats, float32; log-probs are 0 outside the response mask.

    Raises:
        TypeError: the model has no output head, or one that is not a plain `nn.Linear`.
        ValueError: the model changes its logits other than by one factor; use `score_responses`.
    """
    hidden, head = _hidden_states(model, tokens)
    return linear_log_prob(
        hidden,
        head.weight,
        tokens.response_ids,
        bias=head.bias,
        temperature=temperature,
        mask=tokens.response_mask,
        kept=kept,
        entropy=entropy,
        log_kept_mass=log_kept_mass,
        accumulate_into=accumulate_into,
        compact=compact,
        impl=impl,
    )


def needs_logits(model: nn.Module) -> bool:
    """Return whether `score_responses_fused` rejects a model; one forward pass over a probe decides, once per model."""
    if model not in _known_to_need_logits:
        _known_to_need_logits[model] = True
        with torch.no_grad(), suppress(TypeError, ValueError):  # such as a cap on the logits, or an adapter in the head
            _hidden_states(model, make_probe(model))
            _known_to_need_logits[model] = False
    return _known_to_need_logits[model]


def _hidden_states(model: Any, tokens: TokenBatch) -> tuple[Tensor, nn.Linear]:  # noqa: ANN401 (transformers is lazy)
    """Return the input of the output head, times any factor on the logits, (B, T, d), and that head.

    Raises:
        TypeError, ValueError: as `score_responses_fused`.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if type(head) is not nn.Linear:
        raise TypeError(
            f"the output head of {type(model).__name__} is {type(head).__name__}, and an nn.Linear is needed: merge an "
            "adapter into it, or use score_responses"
        )
    for name in SOFT_CAPS:
        if (cap := getattr(model.config.get_text_config(), name, None)) is not None:
            raise ValueError(f"{type(model).__name__} bends its logits ({name}={cap}): use score_responses")

    # With an identity for its head the model's "logits" are the hidden states before it. The identity records its
    # input and the input's version counter, which counts in-place writes.
    seen: list[tuple[Tensor, int]] = []
    identity = nn.Identity()
    identity.register_forward_hook(lambda _, inputs, __: seen.append((inputs[0], inputs[0]._version)))
    model.set_output_embeddings(identity)
    try:
        hidden = response_logits(model, tokens)
    finally:
        model.set_output_embeddings(head)
    _check_head_input(hidden, seen, head)
    return hidden, head


def _check_head_input(hidden: Tensor, seen: list[tuple[Tensor, int]], head: nn.Linear) -> None:
    """Raise a ValueError unless the model returned its head's input, or a multiple of it.

    This waits for the device only if the model modifies its logits.
    """
    if len(seen) != 1:
        reason = f"its head ran {len(seen)} times"
    elif seen[0][0]._version != seen[0][1]:
        reason = "they are written to in place"
    elif hidden.untyped_storage().data_ptr() == seen[0][0].untyped_storage().data_ptr():
        return
    else:
        # One factor for all logits is allowed; it is measured here, in float64.
        after, before = hidden.detach().double(), seen[0][0].detach()[:, : hidden.shape[1]].double()
        factor = (after * before).sum() / before.square().sum()
        tolerance = 8 * torch.finfo(hidden.dtype).eps
        if head.bias is None and torch.allclose(after, factor * before, rtol=tolerance, atol=0):
            return
        reason = "they are not a multiple of the head's output, or the head has a bias as well"
    raise ValueError(f"the model changes its logits in a way that is not known here ({reason}): use score_responses")
