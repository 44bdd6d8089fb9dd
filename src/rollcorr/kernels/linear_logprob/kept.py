"""Recorded kept sets: only the kept rows of the head are read, and only these rows get a gradient.

The sets of all tokens are one ragged list of entries (token, id). Logits are the ragged dot products h_t · W_id, which
torch computes as the gradient of an embedding bag in its sample weights; the gradient in the hidden states is the bag.
The gradient in the head is a second bag, over the entries sorted by id: each kept row is computed and written once.

The number of active tokens and the rows in use depend on the data. If they must not be read, every token has a place
for each of its ids and one more for the sampled id, and places without an entry have the logit −∞.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from rollcorr.core.layout import offsets_of, ragged_sum, sequence_ids
from rollcorr.core.logprobs import minus_p_log_p
from rollcorr.core.sampling import KeptSets
from rollcorr.kernels.linear_logprob.problem import (
    CHUNK_ENTRIES,
    Context,
    LogSums,
    Problem,
    at_rows,
    placed,
    rows_where,
    wide_type,
)
from rollcorr.kernels.linear_logprob.products import HeadGradient

ROWS_AT_ONCE = 512
"""Rows of the head's gradient that are made before they are added to it, on a CPU: 2 MB at d = 1,024."""


class Membership(NamedTuple):
    """Properties of the sampled tokens that depend only on ids and mask, (N,) bool.

    Attributes:
        outside: the sampled token was not in its set.
        working: the token is active: its set, with the sampled token, contains at least two ids, and the mask is true.
            The log-prob of every inactive token is 0.
    """

    outside: Tensor
    working: Tensor


def membership(kept: KeptSets, token_ids: Tensor, mask: Tensor | None) -> Membership:
    """Return which sampled tokens are outside of their sets, and which tokens are active. Reads no value."""
    rows = sequence_ids(kept.ids, cu_seqlens=kept.offsets)
    is_sampled = (kept.ids == token_ids[rows]).to(torch.int32)
    outside = torch.zeros_like(token_ids, dtype=torch.int32).index_add(0, rows, is_sampled) == 0
    if mask is not None:
        outside = outside & mask
    working = kept.offsets.diff() + outside >= 2
    return Membership(outside, working if mask is None else working & mask)


def kept_sums(problem: Problem, member: Membership, products: RaggedProducts) -> LogSums:
    """Compute sums over K ∪ {a}, or over this rank's slice of it, (N,); 0 for inactive tokens.

    A compact problem drops inactive tokens. Their number depends on the data, so this waits for the device. Otherwise
    an inactive token has the single logit 0.
    """
    tokens, rows = len(member.working), None
    if problem.compact:
        rows = rows_where(member.working)
        problem, member = problem.at(rows), Membership(*(at_rows(x, rows) for x in member))
    else:
        problem = problem.harmless(member.working)

    entries, exists, stands_alone = _collect_entries(problem, member)
    z: Tensor = _RaggedDot.apply(problem.hidden, problem.weight, entries, problem.accumulate_into, products)
    if problem.bias is not None:
        z = z + problem.bias[entries.ids].to(z.dtype)
    z = z / at_rows(problem.temperature, entries.hidden_rows)
    if not problem.compact:
        z = z.where(exists, -torch.inf).masked_fill(stands_alone, 0.0)

    # Sums of each token's logits; −∞ marks a place without an entry.
    rows_of, offsets = entries.hidden_rows, entries.offsets
    largest = z.new_full((len(member.working),), -torch.inf).scatter_reduce(0, rows_of, z.detach(), "amax")
    anchor = largest.masked_fill(largest == -torch.inf, 0.0)
    log_sum = ragged_sum((z - anchor[rows_of]).exp(), offsets).log()
    entropy = None
    if problem.entropy is not False:
        log_p = (z - (anchor + log_sum)[rows_of]).masked_fill(z == -torch.inf, -torch.inf)
        entropy = ragged_sum(minus_p_log_p(log_p), offsets)
    sums = LogSums(largest, log_sum, ragged_sum(z.where(entries.is_sampled, 0.0), offsets), entropy)
    return LogSums._make(x if x is None else placed(x, rows, tokens, 0.0) for x in sums)


@dataclass(frozen=True, eq=False)
class Entries:
    """Ragged (token, id) pairs, ordered by token.

    Attributes:
        ids: row of the head's weight of each entry, (m,) int64.
        hidden_rows: token of each entry, as a row of the hidden states, (m,) int64.
        offsets: index of each token's first entry, then the number of entries, (n + 1,) int64.
        is_sampled: whether the entry is the sampled token, (m,) bool.
        compact: whether to widen only the rows in use of a half-precision head; which rows these are depends on the
            data.
    """

    ids: Tensor
    hidden_rows: Tensor
    offsets: Tensor
    is_sampled: Tensor
    compact: bool


class RaggedProducts:
    """Products of hidden states h and head rows W over entries e with token t(e) and id id(e): embedding bags."""

    def dots(self, hidden: Tensor, weight: Tensor, entries: Entries) -> Tensor:
        """Compute h_{t(e)} · W_{id(e)} of each entry, (m,), float32 or wider."""
        wide = wide_type(hidden, weight)
        z = hidden.new_zeros(entries.ids.shape, dtype=wide)
        for columns, table, ids in _slice_wide_head(weight, entries, wide):
            states = hidden[:, columns].to(wide).contiguous()
            z += torch.ops.aten._embedding_bag_per_sample_weights_backward(
                states, table, ids, entries.offsets[:-1], entries.hidden_rows, 0
            )
        return z

    def of_hidden(self, weight: Tensor, entries: Entries, gradient: Tensor) -> Tensor:
        """Compute Σ_e g_e W_{id(e)} of each token, (n, d), from the gradient g of the entries' logits."""
        tables = _slice_wide_head(weight, entries, gradient.dtype)
        parts = [_sum_bags(table, ids, entries.offsets, gradient) for _, table, ids in tables]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def add_to_head(self, total: Tensor, hidden: Tensor, entries: Entries, gradient: Tensor) -> None:
        """Add Σ_{e: id(e) = v} g_e h_{t(e)} to row v of the head's gradient, for each id v that occurs."""
        # Sorted by id, the entries of one head row are adjacent: a bag whose sum is that row's gradient.
        order, hidden = entries.ids.argsort(stable=True), hidden.to(gradient.dtype)
        sorted_ids, hidden_rows, gradient = entries.ids[order], entries.hidden_rows[order], gradient[order]
        if not entries.compact:
            # To avoid a sync, every row of the head has a bag; most are empty.
            starts = torch.searchsorted(sorted_ids, torch.arange(len(total) + 1, device=sorted_ids.device))
            for columns in _column_slices(len(total), hidden):
                total[:, columns].add_(_sum_bags(hidden[:, columns].contiguous(), hidden_rows, starts, gradient))
            return

        # Cutting entries into blocks reads the offsets on the host. A GPU would have to wait, so it computes all rows
        # at once.
        ids, bag_sizes = sorted_ids.unique_consecutive(return_counts=True)
        offsets = offsets_of(bag_sizes)
        if not ids.is_cpu:
            total.index_add_(0, ids, _sum_bags(hidden, hidden_rows, offsets, gradient).to(total.dtype))
            return

        # On the CPU the new rows are computed and added one block at a time, so that they stay in the cache. A block
        # ends where the next one begins; the last offset is the end of the last block.
        cuts = offsets[ROWS_AT_ONCE:-1:ROWS_AT_ONCE]
        blocks = zip(
            ids.split(ROWS_AT_ONCE),
            bag_sizes.split(ROWS_AT_ONCE),
            hidden_rows.tensor_split(cuts),
            gradient.tensor_split(cuts),
            strict=True,
        )
        for block_ids, block_sizes, block_rows, block_gradient in blocks:
            rows = _sum_bags(hidden, block_rows, offsets_of(block_sizes), block_gradient)
            total.index_add_(0, block_ids, rows.to(total.dtype))


class _RaggedDot(torch.autograd.Function):
    """The logits of entries, before the bias, differentiable in hidden states and weight."""

    @staticmethod
    def forward(
        ctx: Context,
        hidden: Tensor,
        weight: Tensor,
        entries: Entries,
        accumulate_into: Tensor | None,
        products: RaggedProducts,
    ) -> Tensor:
        ctx.entries, ctx.accumulate_into, ctx.products = entries, accumulate_into, products
        ctx.save_for_backward(hidden, weight)
        return products.dots(hidden, weight, entries)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        of_hidden = None
        if ctx.needs_input_grad[0]:
            of_hidden = ctx.products.of_hidden(weight, ctx.entries, gradient).to(hidden.dtype)
        of_weight = HeadGradient(ctx, weight, accumulate_into=ctx.accumulate_into, sparse=True)
        if of_weight.total is not None:
            ctx.products.add_to_head(of_weight.total, hidden, ctx.entries, gradient)
        return of_hidden, of_weight.result(), None, None, None


def _sum_bags(table: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    """Compute Σ_e w_e table[id(e)] of each bag."""
    return embedding_bag(ids, table, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True)


def _slice_wide_head(weight: Tensor, entries: Entries, wide: torch.dtype) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield the head in a wide type, in slices of its columns, with the index of each entry's row.

    A wide head is returned unchanged. If rows may be read, the rows in use are copied; else a few columns of all rows.
    """
    if weight.dtype == wide:
        yield slice(None), weight.detach(), entries.ids
    elif entries.compact:
        unique, index = entries.ids.unique(return_inverse=True)
        yield slice(None), weight.detach()[unique].to(wide), index
    else:
        for columns in _column_slices(len(weight), weight):
            yield columns, weight.detach()[:, columns].to(wide), entries.ids


def _column_slices(rows: int, like: Tensor) -> Iterator[slice]:
    """Yield slices of the columns of `like`, such that `rows` rows of a slice fit the limit of one chunk."""
    width = max(1, CHUNK_ENTRIES.get(like.device.type, CHUNK_ENTRIES["cuda"]) // max(1, rows))
    for start in range(0, like.shape[1], width):
        yield slice(start, start + width)


def _collect_entries(problem: Problem, member: Membership) -> tuple[Entries, Tensor, Tensor]:
    """Return the entries in places, whether each place has an entry, and the spare places of inactive tokens.

    A token has a place for each id of its set and a spare one for its sampled id. A place without an entry has the id
    0, or is dropped if the problem is compact.
    """
    assert problem.kept is not None
    kept, sampled, tokens = problem.kept, problem.token_ids, problem.token_ids.numel()
    offsets = kept.offsets + torch.arange(tokens + 1, device=kept.offsets.device)
    place = torch.arange(kept.ids.numel() + tokens, device=kept.offsets.device)
    rows = sequence_ids(place, cu_seqlens=offsets)

    # The spare place of token t is its last one; before it there are t spare places of earlier tokens.
    is_spare = place == offsets[1:][rows] - 1
    kept_ids = torch.cat([kept.ids, kept.ids.new_zeros(1)]).long()
    ids = torch.where(is_spare, sampled[rows], kept_ids[(place - rows).clamp(0, kept.ids.numel())])
    working = member.working[rows]
    exists = working & (~is_spare | member.outside[rows])
    is_sampled = exists & (ids == sampled[rows])

    if problem.group is not None:
        ids = ids - problem.first_id
        in_shard = (ids >= 0) & (ids < problem.weight.shape[0])
        exists, is_sampled = exists & in_shard, is_sampled & in_shard
    if problem.compact:
        ids, rows, is_sampled = ids[exists], rows[exists], is_sampled[exists]
        offsets = offsets_of(torch.bincount(rows, minlength=tokens))
    else:
        ids = ids.where(exists, 0)
    return Entries(ids, rows, offsets, is_sampled, problem.compact), exists, is_spare & ~working
