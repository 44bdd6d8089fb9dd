"""stories260K, a small pretrained Llama (tests/data/README.md), and the same function with wider heads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

STORIES = Path(__file__).parent / "data" / "stories260K"


class StoriesTokenizer:
    """What a policy asks of its tokenizer; the tests make prompts of token ids."""

    eos_token_id, pad_token_id = 2, 0


def load_stories() -> LlamaForCausalLM:
    """The model in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(STORIES, local_files_only=True).float().eval()


def load_stories_with_wide_heads(head_dim: int = 32) -> LlamaForCausalLM:
    """The model with its heads of 8 padded with zeros: vLLM's attention on the CPU takes heads of 32 or more.

    Rotary embedding turns the pair (i, i + head_dim / 2) by position · θ^(−2 i / head_dim). A pair i of the narrow head
    therefore goes to i · factor, where the wide head has the same angle. Attention divides by √head_dim, so the queries
    are multiplied by √factor. All other dimensions are 0 and add nothing.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    narrow = load_stories()
    factor = head_dim // narrow.config.head_dim
    pairs = torch.arange(narrow.config.head_dim // 2) * factor
    places = torch.cat([pairs, pairs + head_dim // 2])

    state = narrow.state_dict()
    for name, weight in state.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            scale = factor**0.5 if "q_proj" in name else 1.0
            heads = weight.unflatten(0, (-1, narrow.config.head_dim))
            wide = heads.new_zeros(heads.shape[0], head_dim, heads.shape[2])
            wide[:, places] = scale * heads
            state[name] = wide.flatten(0, 1)
        if name.endswith("o_proj.weight"):
            heads = weight.unflatten(1, (-1, narrow.config.head_dim))
            wide = heads.new_zeros(heads.shape[0], heads.shape[1], head_dim)
            wide[:, :, places] = heads
            state[name] = wide.flatten(1, 2)

    model = LlamaForCausalLM(LlamaConfig(**{**narrow.config.to_dict(), "head_dim": head_dim})).eval()
    model.load_state_dict(state)
    return model
