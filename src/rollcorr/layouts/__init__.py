"""Convert tensor layouts: lists, one long row, rows of prompt and response, context-parallel slices.

`correct` and the losses take (B, T), or (N,) with `cu_seqlens`. Trainers keep the same numbers in other shapes. Each
function here converts between two shapes, and has an inverse:

    lists of 1-D tensors        pack_lists                     unpack_list
    (1, T) with offsets         from_row                       to_row
    position ids                cu_seqlens_of_positions        positions_of_cu_seqlens
    (B, T)                      pack_padded                    pad_packed
    (B, L − 1) shifted by one   responses_of_rows              rows_of_responses
    a rank's zig-zag slice      local_lists                    whole_tokens
"""

from rollcorr.layouts.conversions import (
    Packed,
    cu_seqlens_of_lengths,
    cu_seqlens_of_positions,
    from_row,
    local_lists,
    pack_lists,
    pack_padded,
    pad_packed,
    positions_of_cu_seqlens,
    responses_of_rows,
    rows_of_responses,
    to_row,
    unpack_list,
    whole_tokens,
)

__all__ = [
    "Packed",
    "cu_seqlens_of_lengths",
    "cu_seqlens_of_positions",
    "from_row",
    "local_lists",
    "pack_lists",
    "pack_padded",
    "pad_packed",
    "positions_of_cu_seqlens",
    "responses_of_rows",
    "rows_of_responses",
    "to_row",
    "unpack_list",
    "whole_tokens",
]
