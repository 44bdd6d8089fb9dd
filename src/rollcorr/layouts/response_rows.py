"""Rows of prompt and response: what is scored at a position is the token after it.

A model reads a row of L tokens and scores L − 1 of them: column t of its log-probs, (B, L − 1), is that of token t + 1.
With a prompt of P tokens, response token j is at place P + j of the row, and its log-prob in column P + j − 1.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from rollcorr.core.boundary import check_shape
from rollcorr.core.integer_checks import NO_LIMIT, usable_ids


def responses_of_rows(shifted: Tensor, prompt_lengths: Tensor | int, width: int, *, fill: float = 0.0) -> Tensor:
    """(B, L − 1) → (B, T): the columns of the response. `rows_of_responses` is the inverse. Waits for nothing.

    Args:
        shifted: log-probs or anything else that stands one column before its token, (B, L − 1).
        prompt_lengths: P ≥ 1, the place of the first response token in its row: (B,) integers; or one for all rows, as
            where prompts are padded on the left. On a device, values below 1 are read as 1.
        width: T, the longest response.
        fill: what stands behind the end of a row.

    Raises:
        ValueError: a prompt is empty, so the first response token has no score; or shapes differ.
    """
    column = _columns(shifted, prompt_lengths, width)
    inside = column < shifted.shape[1]
    if not shifted.shape[1]:
        return shifted.new_full(column.shape, fill)
    found = shifted.gather(1, column.clamp(max=shifted.shape[1] - 1))
    return found.masked_fill(~inside, fill)


def rows_of_responses(responses: Tensor, prompt_lengths: Tensor | int, length: int, *, fill: float = 0.0) -> Tensor:
    """(B, T) → (B, L − 1): each response in the columns that score it. Waits for nothing.

    Args:
        responses: log-probs, weights, masks, …, (B, T).
        prompt_lengths: as in `responses_of_rows`.
        length: L, tokens of a row; what does not fit is left out.
        fill: what stands in the columns of the prompt, and behind the response.

    Raises:
        ValueError: as in `responses_of_rows`.
    """
    column = _columns(responses, prompt_lengths, responses.shape[1])

    # One column more takes what is behind the end of the row, and is cut off.
    rows = responses.new_full((responses.shape[0], length), fill)
    return rows.scatter(1, column.clamp(max=length - 1), responses)[:, : length - 1]


def _columns(like: Tensor, prompt_lengths: Tensor | int, width: int) -> Tensor:
    """The column of each response token: (B, T) int64."""
    if like.dim() != 2:
        raise ValueError(f"expected rows (B, …), got {tuple(like.shape)}")
    if not isinstance(prompt_lengths, Tensor):
        length = operator.index(prompt_lengths)
        if length < 1:
            raise ValueError(f"prompt_lengths must be at least 1, got {length}: nothing scores the first token")
        lengths = torch.full((like.shape[0],), length, device=like.device)
    else:
        check_shape("prompt_lengths", prompt_lengths, like.shape[:1], "one for each row")

        # From 1, because nothing scores the first token of a row.
        lengths = usable_ids("prompt_lengths", prompt_lengths, (1, NO_LIMIT)).to(like.device)
    first = lengths.unsqueeze(1) - 1
    return first + torch.arange(width, device=like.device)
