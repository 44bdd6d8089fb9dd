"""Conversions: sequences of any length, rows of prompt and response, context-parallel slices.

**Sequences of any length**: as a list, packed in one tensor, in one long row, or padded. Shapes depend on the number of
tokens of each sequence. Reading it from a device tensor synchronizes; the docstring of each such function notes it.

**Rows of prompt and response**: each position scores the token after it. A model reads a row of L tokens and scores
L − 1 of them: column t of its log-probs, (B, L − 1), belongs to token t + 1. With a prompt of P tokens, response token
j is at position P + j of the row, and its log-prob in column P + j − 1.

**Context-parallel slices**: with R ranks a row of L tokens (prompt and response) is cut into 2R chunks of ⌈L / 2R⌉
tokens. Rank r has the chunks r and 2R − 1 − r, so that causal attention costs every rank the same (zig-zag). A rank
scores the token *after* each of its positions: the rank of position P + j − 1 scores response token j. Pass a rank's
slices to `correct` in packed form with `context_group=`: log-probs unchanged, masks cut to them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from rollcorr.core.boundary import (
    NO_LIMIT,
    bounded_offsets,
    check_count,
    check_cu_seqlens,
    check_integers,
    check_shape,
    check_tensors,
    in_host_memory,
    truth,
    usable_ids,
)
from rollcorr.core.layout import offsets_of, sequence_ids


class Packed(NamedTuple):
    """Packed sequences.

    Attributes:
        tensors: (N,) each, in the order in which they were given.
        cu_seqlens: first token of each sequence, then N: (B + 1,) int64.
    """

    tensors: tuple[Tensor, ...]
    cu_seqlens: Tensor


def cu_seqlens_of_lengths(lengths: Sequence[int], *, device: torch.device | str = "cpu") -> Tensor:
    """Compute offsets (0, l_1, l_1 + l_2, …): (B + 1,) int64.

    Args:
        lengths: tokens of each sequence, ≥ 0.
        device: device of the offsets.

    Raises:
        ValueError: a length is below 0.
    """
    if any(length < 0 for length in lengths):
        raise ValueError(f"lengths must be at least 0, got {min(lengths)}")
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int64, device=device)


def pack_lists(*lists: Sequence[Tensor]) -> Packed:
    """Pack lists that contain a 1-D tensor per sequence. Never synchronizes. `unpack_list` is the inverse.

    Args:
        lists: log-probs, masks, …: B tensors each, of the same lengths in each list. B is at least 1.

    Raises:
        TypeError: an entry is not a tensor.
        ValueError: there is no list or no sequence, a tensor is not 1-D, or two lists differ in a length.

    Example:
        >>> pack_lists([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
        Packed(tensors=(tensor([1., 2., 3.]),), cu_seqlens=tensor([0, 2, 3]))
    """
    if not lists or not lists[0]:
        raise ValueError("there is no sequence to pack: give at least one list with at least one tensor")
    for number, tensors in enumerate(lists):
        if len(tensors) != len(lists[0]):
            raise ValueError(f"list {number} has {len(tensors)} sequences and list 0 has {len(lists[0])}")
        for i, tensor in enumerate(tensors):
            check_tensors(**{f"sequence {i} of list 0": lists[0][i], f"sequence {i} of list {number}": tensor})
            if tensor.dim() != 1 or tensor.shape != lists[0][i].shape:
                raise ValueError(
                    f"sequence {i} of list {number} is {tuple(tensor.shape)}, and that of list 0 "
                    f"{tuple(lists[0][i].shape)}: both must be 1-D and of one length"
                )
    device = lists[0][0].device
    offsets = cu_seqlens_of_lengths([tensor.shape[0] for tensor in lists[0]], device=device)
    return Packed(tuple(torch.cat(list(tensors)) for tensors in lists), offsets)


def unpack_list(packed: Tensor, cu_seqlens: Tensor | Sequence[int]) -> list[Tensor]:
    """Return a view of each packed sequence: the inverse of `pack_lists`. Reads the offsets, so it waits for a device.

    Args:
        packed: packed sequences, (N, …).
        cu_seqlens: (B + 1,) token offsets, as a tensor or a list.

    Raises:
        ValueError: the offsets do not start at 0, decrease, or do not end at N.
    """
    offsets = torch.as_tensor(cu_seqlens, dtype=torch.int64, device="cpu")
    check_cu_seqlens(offsets, packed.shape[0])
    return [packed[start:end] for start, end in pairwise(offsets.tolist())]


def from_row(
    *rows: Tensor, cu_seqlens: Tensor | Sequence[int] | None = None, position_ids: Tensor | None = None
) -> Packed:
    """Convert (1, T) with offsets or position ids to (T,) with offsets. `to_row` is the inverse.

    Args:
        rows: log-probs, masks, …: (1, T) each; a dimension of features may follow.
        cu_seqlens: (B + 1,) token offsets, as a tensor or a list.
        position_ids: (1, T) or (T,), position of each token in its sequence, instead of `cu_seqlens`; reading them
            waits on a device.

    Raises:
        ValueError: a row is not (1, T, …), rows differ in T, not exactly one of the other two is given, or offsets in
            host memory do not describe the tokens.
    """
    if (cu_seqlens is None) == (position_ids is None):
        raise ValueError("give cu_seqlens or position_ids, one of them: a row alone does not say where sequences end")
    for row in rows:
        if row.dim() < 2 or row.shape[:2] != (1, rows[0].shape[1]):
            raise ValueError(f"expected one row (1, {rows[0].shape[-1]}), got {tuple(row.shape)}")
    if position_ids is not None:
        offsets = cu_seqlens_of_positions(position_ids)
    else:
        offsets = torch.as_tensor(cu_seqlens, dtype=torch.int64, device=rows[0].device)
        if in_host_memory(offsets):
            check_cu_seqlens(offsets, rows[0].shape[1])
    return Packed(tuple(row.squeeze(0) for row in rows), offsets)


def to_row(packed: Tensor) -> Tensor:
    """Return (N, …) as (1, N, …): a view."""
    return packed.unsqueeze(0)


def cu_seqlens_of_positions(position_ids: Tensor) -> Tensor:
    """Compute sequence offsets from position ids: a sequence begins where a position is not its predecessor plus 1.

    Positions usually begin at 0, but need not. Padding that repeats a position becomes sequences of one token, which
    have no token in the response mask and change no number. The number of sequences depends on values, so this waits
    on a device.

    Args:
        position_ids: (N,) or (1, N) integers.

    Returns:
        (B + 1,) int64.

    Raises:
        ValueError: the positions are not integers, or their shape differs.
    """
    check_integers(position_ids=position_ids)
    positions = position_ids.reshape(-1) if position_ids.dim() == 2 and position_ids.shape[0] == 1 else position_ids
    if positions.dim() != 1:
        raise ValueError(f"position_ids must be (N,) or (1, N), got {tuple(position_ids.shape)}")
    first = torch.ones_like(positions, dtype=torch.bool)
    first[1:] = positions[1:] != positions[:-1] + 1
    starts = first.nonzero().flatten()
    return torch.cat([starts, starts.new_full((1,), positions.shape[0])])


def positions_of_cu_seqlens(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Compute the position of each token in its sequence, from 0: (N,) int64. Never synchronizes.

    Args:
        cu_seqlens: (B + 1,) token offsets.
        tokens: N.

    Raises:
        ValueError: offsets in host memory do not start at 0, decrease, or do not end at N.
    """
    offsets = bounded_offsets(cu_seqlens, tokens)
    place = torch.arange(tokens, device=offsets.device)
    return place - offsets[sequence_ids(place, cu_seqlens=offsets)]


def pack_padded(*padded: Tensor, inside: Tensor) -> Packed:
    """Pack (B, T) without padding. Waits on a device. `pad_packed` is the inverse.

    Args:
        padded: log-probs, masks, …: (B, T) each.
        inside: (B, T), not 0 on tokens of a sequence; a response mask has holes, unlike an attention mask.

    Raises:
        ValueError: a shape differs from `inside`, or `inside` contains a negative or non-finite value, in host memory.
    """
    for i, tensor in enumerate(padded):
        check_shape(f"tensor {i}", tensor, inside.shape, "as inside")
    kept = truth(inside, "inside")
    return Packed(tuple(tensor[kept] for tensor in padded), offsets_of(kept.sum(-1)))


def pad_packed(packed: Tensor, inside: Tensor, *, fill: float = 0.0) -> Tensor:
    """Convert (N,) to (B, T), with `fill` outside: the inverse of `pack_padded`.

    Args:
        packed: packed sequences, (N,).
        inside: (B, T) with N entries that are not 0.
        fill: value of all other entries; defaults to 0.

    Raises:
        ValueError: as in `pack_padded`; or the number of such entries is not N, in host memory.
    """
    kept = truth(inside)
    check_count(packed, kept, "mask")
    return packed.new_full(inside.shape, fill).masked_scatter(kept, packed)


def responses_of_rows(shifted: Tensor, prompt_lengths: Tensor | int, width: int, *, fill: float = 0.0) -> Tensor:
    """Return the response columns of (B, L − 1) as (B, T). `rows_of_responses` is the inverse. Never synchronizes.

    Args:
        shifted: log-probs or other values that are one column before their token, (B, L − 1).
        prompt_lengths: P ≥ 1, the position of the first response token in its row: (B,) integers; or one for all rows,
            as in left-padded batches. On a device, values below 1 are read as 1.
        width: T, the longest response.
        fill: value after the end of a row; defaults to 0.

    Raises:
        ValueError: a prompt is empty, so the first response token has no score; or shapes differ.
    """
    column = _response_columns(shifted, prompt_lengths, width)
    inside = column < shifted.shape[1]
    if not shifted.shape[1]:
        return shifted.new_full(column.shape, fill)
    found = shifted.gather(1, column.clamp(max=shifted.shape[1] - 1))
    return found.masked_fill(~inside, fill)


def rows_of_responses(responses: Tensor, prompt_lengths: Tensor | int, length: int, *, fill: float = 0.0) -> Tensor:
    """Convert (B, T) to (B, L − 1): each response in the columns that score it. Never synchronizes.

    Args:
        responses: log-probs, weights, masks, …, (B, T).
        prompt_lengths: as in `responses_of_rows`.
        length: L, tokens of a row; tokens beyond it are dropped.
        fill: value in the columns of the prompt, and after the response; defaults to 0.

    Raises:
        ValueError: as in `responses_of_rows`.
    """
    column = _response_columns(responses, prompt_lengths, responses.shape[1])

    # An extra column collects the tokens after the end of the row, and is dropped.
    rows = responses.new_full((responses.shape[0], length), fill)
    return rows.scatter(1, column.clamp(max=length - 1), responses)[:, : length - 1]


def _response_columns(like: Tensor, prompt_lengths: Tensor | int, width: int) -> Tensor:
    """Return the column of each response token: (B, T) int64."""
    if like.dim() != 2:
        raise ValueError(f"expected rows (B, …), got {tuple(like.shape)}")
    if not isinstance(prompt_lengths, Tensor):
        length = operator.index(prompt_lengths)
        if length < 1:
            raise ValueError(f"prompt_lengths must be at least 1, got {length}: nothing scores the first token")
        lengths = torch.full((like.shape[0],), length, device=like.device)
    else:
        check_shape("prompt_lengths", prompt_lengths, like.shape[:1], "one for each row")

        # Start at 1, because no position scores the first token of a row.
        lengths = usable_ids("prompt_lengths", prompt_lengths, (1, NO_LIMIT)).to(like.device)
    first = lengths.unsqueeze(1) - 1
    return first + torch.arange(width, device=like.device)


def response_tokens_of_rank(
    total_length: int, response_length: int, ranks: int, rank: int, *, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the indices of the response tokens that a rank scores, ascending: (n,) int64.

    Args:
        total_length: L, tokens of prompt and response.
        response_length: tokens of the response, below L.
        ranks: R, of the context group.
        rank: this one's number in the group.
        device: device of the indices.

    Raises:
        ValueError: the response is as long as the row or longer, so no position scores its first token; or the rank
            does not exist.
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
        # The last token of a row scores no token, and tokens before the end of the prompt score the prompt.
        first = max(part * chunk, prompt_length - 1)
        last = min((part + 1) * chunk, total_length - 1)
        numbers.append(torch.arange(first, max(first, last), device=device) - (prompt_length - 1))
    return torch.cat(numbers)


def local_lists(
    *lists: Sequence[Tensor], total_lengths: Sequence[int], ranks: int, rank: int
) -> tuple[list[Tensor], ...]:
    """Return a rank's slices of full responses, as lists: for `pack_lists`, together with its log-probs.

    `whole_tokens` is the inverse, for one response.

    Args:
        lists: masks, advantages, …: a 1-D tensor for each response.
        total_lengths: tokens of prompt and response, for each.
        ranks: R, of the context group.
        rank: this one's number in the group.

    Raises:
        ValueError: as in `response_tokens_of_rank`, or two lists differ in the number of responses.
    """

    def held(whole: Tensor, total: int) -> Tensor:
        return whole[response_tokens_of_rank(total, whole.shape[0], ranks, rank, device=whole.device)]

    return tuple([held(*pair) for pair in zip(tensors, total_lengths, strict=True)] for tensors in lists)


def whole_tokens(parts: Sequence[Tensor], total_length: int, response_length: int) -> Tensor:
    """Return the full response, (T,), from the slices of all ranks.

    Args:
        parts: of every rank, in rank order, (n_r, …).
        total_length: L, tokens of prompt and response.
        response_length: T.

    Raises:
        ValueError: a part's number of tokens differs from its rank's.
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
