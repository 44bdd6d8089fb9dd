"""stories260K, a small pretrained Llama (tests/data/README.md), and the same function with wider heads."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

STORIES = Path(__file__).parent / "data" / "stories260K"
WIDE_HEADS = Path(__file__).parents[1] / "experiments" / "diagnosis" / "wide_heads.py"


class StoriesTokenizer:
    """A tokenizer stub for policies; the tests pass prompts as token ids."""

    eos_token_id, pad_token_id = 2, 0


def load_stories() -> LlamaForCausalLM:
    """The model in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(STORIES, local_files_only=True).float().eval()


def load_stories_with_wide_heads(head_dim: int = 32) -> LlamaForCausalLM:
    """Return the model with its heads of size 8 padded with zeros: vLLM on the CPU needs at least 32."""
    spec = importlib.util.spec_from_file_location("wide_heads", WIDE_HEADS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.with_wide_heads(load_stories(), head_dim).requires_grad_(True)
