"""A decoder in plain torch with the calling convention of transformers: learned positions, GELU, a key-value cache."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional

Cache = list[tuple[Tensor, Tensor]]


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a layer norm, with dropout 0.1 in training mode."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the block's output (B, T, width), and the keys and values so far."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.before_attention(x)).chunk(3, -1)
        )
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)

        # The T newest positions see everything up to themselves.
        new, total = query.shape[2], key.shape[2]
        visible = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.before_mlp(x))), (key, value)


class SmallDecoder(nn.Module):
    """A GPT of a few layers."""

    def __init__(self, *, vocabulary: int, width: int, layers: int, heads: int, positions: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(
        self, input_ids: Tensor, past_key_values: Cache | None = None, use_cache: bool = False
    ) -> SimpleNamespace:
        """Return `logits` (B, T, V) and `past_key_values`, as models of transformers do."""
        begun = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        x = self.tokens(input_ids) + self.positions(torch.arange(begun, begun + input_ids.shape[1]))
        cache: Cache = []
        for number, block in enumerate(self.blocks):
            x, pair = block(x, None if past_key_values is None else past_key_values[number])
            cache.append(pair)
        return SimpleNamespace(logits=self.head(self.norm(x)), past_key_values=cache if use_cache else None)
