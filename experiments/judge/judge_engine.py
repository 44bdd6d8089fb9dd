"""The sampler of the judge's loops: a copy of the trainer's model in other numerics, and decoding with a cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from judge_tasks import EOS, PAD
from torch import Tensor, nn


class Rollout(NamedTuple):
    """Responses of a batch, each (B, T): ids, log-probs as reported, and where a token was sampled."""

    ids: Tensor
    log_prob: Tensor
    mask: Tensor


def engine_copy(model: nn.Module, numerics: str) -> nn.Module:
    """Return a copy of `model` for sampling.

    Args:
        model: the trainer's model, float32.
        numerics: "bf16", "fp16"; "bf16_fp32_head": the head in float32; "int8", "int6", "int4": rounded weights.
    """
    engine = copy.deepcopy(model).eval().requires_grad_(False)
    if numerics in ("int8", "int6", "int4"):
        levels = {"int8": 127, "int6": 31, "int4": 7}[numerics]
        for weight in engine.parameters():
            if weight.dim() == 2:
                scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / levels
                weight.copy_((weight / scale).round() * scale)
        return engine
    if numerics == "bf16_fp32_head":
        # The head may share its weight with the embedding, which stays in bfloat16.
        head = copy.deepcopy(engine.lm_head)
        engine = engine.bfloat16()
        engine.lm_head = head.float()
        engine.lm_head.register_forward_pre_hook(lambda _module, inputs: (inputs[0].float(),))
        return engine
    return engine.to({"bf16": torch.bfloat16, "fp16": torch.float16}[numerics])


def within_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Return the logits of the most likely ids that hold `top_p`, −inf elsewhere: (…, V)."""
    ordered, order = logits.softmax(-1).sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    left_out = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= top_p)
    return logits.masked_fill(left_out, -torch.inf)


@torch.no_grad()
def sample(
    model: nn.Module,
    prompts: Tensor,
    *,
    width: int,
    generator: torch.Generator,
    temperature: float = 1.0,
    eos: int = EOS,
    drawn_from: Callable[[Tensor, Tensor], Tensor] | None = None,
    reported: Callable[[Tensor, Tensor], Tensor] | None = None,
    after_step: Callable[[Any], None] | None = None,
) -> Rollout:
    """Sample responses to prompts of one length, with a key-value cache.

    Args:
        model: the sampler.
        prompts: (B, P) ids.
        width: the longest response.
        generator: draws the tokens.
        temperature: divides the logits.
        eos: ends a response.
        drawn_from: from the logits at the temperature (B, V) and all ids so far (B, P + t), the logits to draw from;
            defaults to no change.
        reported: the same for the log-probs that are logged; defaults to those that are drawn from.
        after_step: called with the cache after each token.
    """
    ids, log_probs, alive, masks = [], [], torch.ones(len(prompts), dtype=torch.bool), []
    cache, new, seen = None, prompts, prompts
    for _ in range(width):
        output = model(input_ids=new, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        if after_step is not None:
            after_step(cache)

        # The processors of a real engine stand between the logits and the draw.
        plain = output.logits[:, -1].float() / temperature
        changed = plain if drawn_from is None else drawn_from(plain, seen)
        new = torch.multinomial(changed.softmax(-1), 1, generator=generator)
        logged = (changed if reported is None else reported(plain, seen)).log_softmax(-1)

        new = new.where(alive[:, None], PAD)
        ids.append(new)
        log_probs.append(logged.gather(1, new).where(alive[:, None], 0.0))
        masks.append(alive[:, None])
        seen = torch.cat([seen, new], dim=1)
        alive = alive & (new[:, 0] != eos)
        if not alive.any():
            break
    return Rollout(torch.cat(ids, 1), torch.cat(log_probs, 1), torch.cat(masks, 1))


def trainer_log_prob(model: nn.Module, prompts: Tensor, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return log π of each response token (B, T) in one pass over prompt and response, at the temperature."""
    logits = model(input_ids=torch.cat([prompts, ids], dim=1)).logits[:, prompts.shape[1] - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
