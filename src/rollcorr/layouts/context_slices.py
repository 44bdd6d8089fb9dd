"""Context-parallel slices: which response tokens a rank scores, where the masks are whole.

With R ranks a row of L tokens (prompt and response) is cut into 2R chunks of ⌈L / 2R⌉ tokens. Rank r holds the chunks
r and 2R − 1 − r, so that causal attention costs every rank the same (zig-zag). A rank scores the tokens *after* those
that it holds: response token j, at place P + j, is scored where place P + j − 1 is.

Give what a rank holds to `correct` as packed slices with `context_group=`: log-probs as they are, masks cut to them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def response_tokens_of_rank(
    total_length: int, response_length: int, ranks: int, rank: int, *, device: torch.device | str = "cpu"
) -> Tensor:
    """The numbers of the response tokens that a rank scores, rising: (n,) int64.

    Args:
        total_length: L, tokens of prompt and response.
        response_length: tokens of the response, below L.
        ranks: R, of the context group.
        rank: this one's number in the group.
        device: where the numbers are.

    Raises:
        ValueError: the response is longer than the row, or as long: nothing would score its first token; or there is
            no such rank.
    """
    if not 0 <= response_length < total_length:
        raise ValueError(
            f"response_length must be from 0 to total_length - 1 = {total_length - 1}, got {response_length}"
        )
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be from 0 to {ranks - 1}, got {rank}")
    prompt_length = total_length - response_length
    chunk = -(-total_length // (2 * ranks))

    numbers = []
    for part in (rank, 2 * ranks - 1 - rank):
        # The last token of a row scores nothing, and those before the end of the prompt score the prompt.
        first = max(part * chunk, prompt_length - 1)
        last = min((part + 1) * chunk, total_length - 1)
        numbers.append(torch.arange(first, max(first, last), device=device) - (prompt_length - 1))
    return torch.cat(numbers)


def local_lists(
    *lists: Sequence[Tensor], total_lengths: Sequence[int], ranks: int, rank: int
) -> tuple[list[Tensor], ...]:
    """Lists of whole responses → lists of what a rank holds of them: for `pack_lists`, beside its log-probs.

    `whole_tokens` is the inverse, for one response.

    Args:
        lists: masks, advantages, …: a 1-D tensor for each response.
        total_lengths: tokens of prompt and response, for each.
        ranks: R, of the context group.
        rank: this one's number in the group.

    Raises:
        ValueError: as in `response_tokens_of_rank`, or a list has another number of responses.
    """

    def held(whole: Tensor, total: int) -> Tensor:
        return whole[response_tokens_of_rank(total, whole.shape[0], ranks, rank, device=whole.device)]

    return tuple([held(*pair) for pair in zip(tensors, total_lengths, strict=True)] for tensors in lists)


def whole_tokens(parts: Sequence[Tensor], total_length: int, response_length: int) -> Tensor:
    """What each rank holds of a response → the whole response, (T,).

    Args:
        parts: of every rank, in rank order, (n_r, …).
        total_length: L, tokens of prompt and response.
        response_length: T.

    Raises:
        ValueError: a part has another number of tokens than its rank holds.
    """
    whole = parts[0].new_zeros(response_length, *parts[0].shape[1:])
    for rank, part in enumerate(parts):
        numbers = response_tokens_of_rank(total_length, response_length, len(parts), rank, device=part.device)
        if numbers.shape[0] != part.shape[0]:
            raise ValueError(
                f"rank {rank} holds {numbers.shape[0]} of the {response_length} tokens, got {part.shape[0]}"
            )
        whole[numbers] = part
    return whole
