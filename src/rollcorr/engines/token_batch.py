"""A batch of prompts and responses as tensors: prompts are padded on the left, responses on the right.

Symbols (docs/notation.md): B sequences, P padded prompt length, T padded response length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Prompts and responses, padded separately so that every response begins in the same column.

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

    def unpadded(self) -> tuple[list[list[int]], list[list[int]]]:
        """Prompts and responses as lists of ids, without padding. Waits for the device."""
        prompts = zip(self.prompt_ids, self.prompt_mask, strict=True)
        responses = zip(self.response_ids, self.response_mask, strict=True)
        return [ids[mask].tolist() for ids, mask in prompts], [ids[mask].tolist() for ids, mask in responses]


def check_prompts(prompts: Sequence[Sequence[int]], *, vocabulary_size: int | None = None) -> None:
    """Check that every prompt has tokens, and that all of them are in the vocabulary.

    Args:
        prompts: token ids.
        vocabulary_size: ids run from 0 to below it; None leaves them unchecked.

    Raises:
        ValueError: there is no prompt, one is empty (a causal model predicts nothing from nothing), or an id is outside
            the vocabulary.
    """
    empty = [row for row, prompt in enumerate(prompts) if not prompt]
    if not prompts or empty:
        raise ValueError(f"every prompt needs at least one token; {len(prompts)} prompts, empty ones at {empty}")
    if vocabulary_size is None:
        return

    # Some engines read an unknown id as their own unknown token, without an error.
    for row, prompt in enumerate(prompts):
        outside = [token for token in prompt if not 0 <= token < vocabulary_size]
        if outside:
            raise ValueError(
                f"prompt {row} has token id {outside[0]}, outside the vocabulary 0 … {vocabulary_size - 1}"
            )


def pad_prompts(prompts: Sequence[Sequence[int]], *, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Pad prompts on the left.

    Returns:
        ids (B, P) int64 and mask (B, P) bool.

    Raises:
        ValueError: there is no prompt, or one is empty.
    """
    check_prompts(prompts)
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts], device="cpu")
    lengths = torch.tensor([len(prompt) for prompt in prompts], device="cpu")
    return ids, torch.arange(width, device="cpu") >= width - lengths[:, None]
