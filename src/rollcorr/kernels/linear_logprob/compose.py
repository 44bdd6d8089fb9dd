"""From sums to log-probs: the steps that every implementation shares.

With a vocabulary-parallel head each rank of a group has a slice of the rows, and all ranks have the same tokens.
Forward sends three or four numbers per token in one all-gather. Backward sends the hidden states' gradient in one
all-reduce. The head's gradient stays on the rank of its rows. Parts are merged in rank order: all ranks get the same
bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollcorr.core.boundary import NO_LIMIT, in_host_memory
from rollcorr.kernels.linear_logprob.dense import Epilogue, dense_sums
from rollcorr.kernels.linear_logprob.kept import Membership, RaggedProducts, kept_sums, membership
from rollcorr.kernels.linear_logprob.problem import (
    Context,
    LinearLogProb,
    LogSums,
    Problem,
    at_rows,
    placed,
    rows_where,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def composed_log_prob(problem: Problem, epilogue: Epilogue, products: RaggedProducts) -> LinearLogProb:
    """Compute log-probs and the requested extras, (N,), from an implementation of chunks and one of kept rows."""
    if problem.group is not None:
        problem = replace(problem, hidden=_SumGradientOverRanks.apply(problem.hidden, problem.group))
    if problem.mask is not None and not problem.compact:
        problem = problem.harmless(problem.mask)
    if problem.kept is None:
        return _score_full_vocabulary(problem, epilogue)

    member = membership(problem.kept, problem.token_ids, problem.mask)
    sums = merged_sums(kept_sums(problem, member, products), None, problem.group)
    log_prob = torch.where(member.working, sums.log_prob, 0.0)
    entropy = None
    if sums.entropy is not None:
        entropy = torch.where(member.working, sums.entropy, 0.0)
        entropy = _nan_unless(entropy, problem.entropy, problem.mask)
    log_kept_mass = None if problem.log_kept_mass is False else _log_kept_mass(problem, epilogue, member, sums)
    return LinearLogProb(log_prob, member.outside, entropy, log_kept_mass)


def _score_full_vocabulary(problem: Problem, epilogue: Epilogue) -> LinearLogProb:
    """Compute log-probs over the vocabulary. Compact: drop tokens that do not count before any computation.

    Otherwise every token is computed: the host reads no value, so it never waits.
    """
    mask, N = problem.mask, problem.token_ids.numel()
    rows = rows_where(mask) if problem.compact and mask is not None else None
    part = problem.at(rows)
    entropy_rows = rows_where(part.entropy) if problem.compact and isinstance(part.entropy, Tensor) else None
    sums = dense_sums(part, epilogue, measured=entropy_rows, entropy=problem.entropy is not False)
    sums = merged_sums(sums, entropy_rows, problem.group)

    # Dropped tokens get log-prob 0 and entropy NaN, like computed tokens that do not count.
    log_prob, entropy = placed(sums.log_prob, rows, N, 0.0), sums.entropy
    if mask is not None:
        log_prob = log_prob.where(mask, 0.0)
    if entropy is not None:
        entropy = placed(entropy, entropy_rows, part.token_ids.numel(), torch.nan)
        entropy = _nan_unless(placed(entropy, rows, N, torch.nan), problem.entropy, mask)
    return LinearLogProb(log_prob, torch.zeros_like(problem.token_ids, dtype=torch.bool), entropy, None)


def _nan_unless(values: Tensor, *wanted: Tensor | bool | None) -> Tensor:
    """Return the values where every choice of tokens is true, and NaN elsewhere; `None` and True choose all tokens."""
    for choice in wanted:
        values = values.where(choice, torch.nan) if isinstance(choice, Tensor) else values
    return values


@torch.no_grad()
def _log_kept_mass(problem: Problem, epilogue: Epilogue, member: Membership, sums: LogSums) -> Tensor:
    """Compute log Σ_{j ∈ K ∪ {a}} p_j where requested: one pass over the head, for only those tokens if compact."""
    rows = None
    if problem.compact:
        wanted = torch.ones_like(member.working) & problem.log_kept_mass
        rows = rows_where(wanted if problem.mask is None else wanted & problem.mask)
    part = replace(problem, kept=None).at(rows)
    whole = merged_sums(dense_sums(part, epilogue, entropy=False), None, problem.group)

    largest, log_sum, working = (at_rows(x, rows) for x in (sums.largest, sums.log_sum, member.working))
    mass = (largest - whole.largest) + (log_sum - whole.log_sum)
    mass = torch.where(working, mass, whole.log_prob)  # a set of one id contains only the sampled token
    return _nan_unless(placed(mass, rows, len(member.working), torch.nan), problem.log_kept_mass, problem.mask)


def id_ranges(weight: Tensor, token_ids: Tensor, first_id: int, group: ProcessGroup | None) -> list[tuple[int, int]]:
    """Return the first id of each rank's rows and the one after the last, in rank order: one all-gather in host memory.

    On a device this reads no id and returns an unlimited range: there an id outside of all slices leads to no row.
    """
    if group is None:
        return [(0, len(weight))]
    if not in_host_memory(token_ids):
        return [(0, NO_LIMIT)]
    own = torch.tensor([first_id, first_id + len(weight)], device="cpu")
    parts = [torch.empty_like(own) for _ in range(group.size())]
    torch.distributed.all_gather(parts, own, group=group)
    return [(int(first), int(stop)) for first, stop in parts]


def merged_sums(own: LogSums, measured: Tensor | None, group: ProcessGroup | None) -> LogSums:
    """Merge the sums over the entries of all ranks, differentiable in this rank's sums.

    The upstream gradient must be equal on every rank, as it is when each rank computes the same loss from these sums.

    Args:
        own: the sums of this rank.
        measured: optional; positions of the tokens with an entropy. The default is all tokens.
        group: optional; the ranks. By default the sums are returned unchanged.
    """
    if group is None:
        return own
    parts = [own if rank == group.rank() else part for rank, part in enumerate(_gather_sums(own, group))]
    of_ranks = torch.stack([part.largest for part in parts])
    largest = of_ranks.amax(0)
    anchor = largest.masked_fill(largest == -torch.inf, 0.0)

    # log Σ exp(z − anchor) over each rank's entries, −inf for a rank without entries.
    log_sums = torch.stack([part.log_sum for part in parts]).masked_fill(of_ranks == -torch.inf, 0.0)
    logs = (log_sums + of_ranks) - anchor
    log_sum = logs.logsumexp(0)
    target = torch.stack([part.target for part in parts]).sum(0)
    entropy = None
    if own.entropy is not None:  # H = Σ_r w_r (H_r − log w_r), w_r the probability of rank r's entries
        log_share = logs - log_sum
        if measured is not None:
            log_share = log_share[:, measured]
        has_no_mass = log_share == -torch.inf
        entropies = torch.stack([part.entropy for part in parts if part.entropy is not None])
        surprise = entropies.masked_fill(has_no_mass, 0.0) - log_share.masked_fill(has_no_mass, 0.0)
        entropy = (log_share.exp() * surprise).sum(0)
    return LogSums(largest, log_sum, target, entropy)


class _SumGradientOverRanks(torch.autograd.Function):
    """The hidden states unchanged; backward sums their gradient over the ranks, each of which computes a part."""

    @staticmethod
    def forward(ctx: Context, hidden: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        torch.distributed.all_reduce(total, group=ctx.group)
        return total.to(gradient.dtype), None


def _gather_sums(own: LogSums, group: ProcessGroup) -> list[LogSums]:
    """Return the sums of each rank, without gradients."""
    vectors = [x.detach() for x in own if x is not None]
    sizes = [x.numel() for x in vectors]
    sent = torch.cat(vectors)
    received = [torch.empty_like(sent) for _ in range(group.size())]
    torch.distributed.all_gather(received, sent, group=group)
    return [LogSums(*part.split(sizes), *[None] * (4 - len(sizes))) for part in received]
