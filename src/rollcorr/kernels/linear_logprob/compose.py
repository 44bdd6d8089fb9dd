"""From sums to log-probs: what every form shares, whichever way the sums are made."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rollcorr.kernels.linear_logprob.dense import Epilogue, dense_sums
from rollcorr.kernels.linear_logprob.kept import Membership, membership
from rollcorr.kernels.linear_logprob.problem import LinearLogProb, LogSums, Problem, at_rows, harmless
from rollcorr.kernels.linear_logprob.vocabulary import merged_sums, with_summed_gradient


class KeptSums(Protocol):
    """Sums over the kept sets of a problem, (N,); what it says of tokens that do not work is not read."""

    def __call__(self, problem: Problem, member: Membership) -> LogSums:
        """See above."""


class Operations(NamedTuple):
    """An implementation: what works on a chunk of logits, and what makes the sums of kept sets."""

    epilogue: Epilogue
    kept_sums: KeptSums


def composed_log_prob(problem: Problem, operations: Operations) -> LinearLogProb:
    """Log-probs, and what else is asked for, (N,)."""
    problem = replace(problem, hidden=with_summed_gradient(problem.hidden, problem.group))
    if problem.mask is not None and not problem.compact:
        hidden, temperature = harmless(problem.hidden, problem.temperature, problem.mask)
        problem = replace(problem, hidden=hidden, temperature=temperature)
    if problem.kept is None:
        return _over_vocabulary(problem, operations)
    member = membership(problem.kept, problem.token_ids, problem.mask)
    sums = merged_sums(operations.kept_sums(problem, member), None, problem.group)
    log_prob = torch.where(member.working, sums.log_prob, 0.0)
    entropy = None
    if sums.entropy is not None:
        entropy = torch.where(member.working, sums.entropy, 0.0)
        entropy = _where_wanted(entropy, problem.entropy, problem.mask)
    log_kept_mass = None if problem.log_kept_mass is False else _log_kept_mass(problem, operations, member, sums)
    return LinearLogProb(log_prob, member.outside, entropy, log_kept_mass)


def _over_vocabulary(problem: Problem, operations: Operations) -> LinearLogProb:
    """Over the vocabulary. Compact: tokens that do not count are dropped before anything is computed.

    Otherwise no token is dropped: nothing is read, so nothing waits.
    """
    mask, N = problem.mask, problem.token_ids.numel()
    rows = torch.where(mask)[0] if problem.compact and mask is not None else None
    measured = None
    if problem.compact and isinstance(problem.entropy, Tensor):
        measured = torch.where(problem.entropy if rows is None else problem.entropy[rows])[0]
    sums = _dense(problem, operations, rows, measured, entropy=problem.entropy is not False)

    # What was dropped gets log-prob 0 and entropy NaN, like what was computed and does not count.
    log_prob, entropy = sums.log_prob, sums.entropy
    if rows is not None:
        log_prob = log_prob.new_zeros(N).index_copy(0, rows, log_prob)
    elif mask is not None:
        log_prob = log_prob.where(mask, 0.0)
    place = measured if rows is None or measured is None else rows[measured]
    place = rows if place is None else place
    if entropy is not None and place is not None:
        entropy = entropy.new_full((N,), torch.nan).index_copy(0, place, entropy)
    elif entropy is not None:
        entropy = _where_wanted(entropy, problem.entropy, mask)
    return LinearLogProb(log_prob, torch.zeros_like(problem.token_ids, dtype=torch.bool), entropy, None)


def _where_wanted(values: Tensor, *wanted: Tensor | bool | None) -> Tensor:
    """The values where every choice of tokens has them, and NaN elsewhere; None and True choose all tokens."""
    for choice in wanted:
        values = values.where(choice, torch.nan) if isinstance(choice, Tensor) else values
    return values


def _dense(
    problem: Problem, operations: Operations, rows: Tensor | None, measured: Tensor | None = None, *, entropy: bool
) -> LogSums:
    """Sums over the vocabulary for some tokens, None for all; entropy of all of them or of those measured."""
    sums = dense_sums(
        problem.hidden if rows is None else problem.hidden[rows],
        problem.weight,
        problem.token_ids if rows is None else problem.token_ids[rows],
        bias=problem.bias,
        temperature=at_rows(problem.temperature, rows),
        measured=measured,
        entropy=entropy,
        accumulate_into=problem.accumulate_into,
        first_id=problem.first_id,
        chunk=problem.chunk,
        epilogue=operations.epilogue,
        precision=problem.precision,
        compact=problem.compact,
    )
    return merged_sums(sums, measured, problem.group)


@torch.no_grad()
def _log_kept_mass(problem: Problem, operations: Operations, member: Membership, sums: LogSums) -> Tensor:
    """log Σ_{j ∈ K ∪ {a}} p_j where it is asked for: one pass over the head, for those tokens alone if compact."""
    if not problem.compact:
        whole = _dense(problem, operations, None, entropy=False)
        mass = torch.where(member.working, _share(sums, whole), whole.log_prob)
        return _where_wanted(mass, problem.log_kept_mass, problem.mask)
    wanted = torch.ones_like(member.working) & problem.log_kept_mass
    rows = torch.where(wanted if problem.mask is None else wanted & problem.mask)[0]
    whole = _dense(problem, operations, rows, entropy=False)
    chosen = _share(LogSums(sums.largest[rows], sums.log_sum[rows], whole.target, None), whole)
    mass = torch.where(member.working[rows], chosen, whole.log_prob)  # a set of one is the sampled token
    return mass.new_full(member.working.shape, torch.nan).index_copy(0, rows, mass)


def _share(part: LogSums, whole: LogSums) -> Tensor:
    """log of the part's Σ exp(z) over that of the whole."""
    return (part.largest - whole.largest) + (part.log_sum - whole.log_sum)
