"""From sums to log-probs: what every form shares, whichever way the sums are made."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rollcorr.kernels.linear_logprob.dense import Epilogue, dense_sums
from rollcorr.kernels.linear_logprob.kept import Membership, membership
from rollcorr.kernels.linear_logprob.problem import LinearLogProb, LogSums, Problem, at_rows
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
    if problem.kept is None:
        return _whole(problem, operations)
    member = membership(problem.kept, problem.token_ids, problem.mask)
    sums = merged_sums(operations.kept_sums(problem, member), None, problem.group)
    log_prob = torch.where(member.working, sums.log_prob, 0.0)
    entropy = None
    if sums.entropy is not None:
        entropy = torch.where(member.working, sums.entropy, 0.0)
        for wanted in (problem.entropy, problem.mask):
            entropy = entropy.where(wanted, torch.nan) if isinstance(wanted, Tensor) else entropy
    log_kept_mass = None if problem.log_kept_mass is False else _log_kept_mass(problem, operations, member, sums)
    return LinearLogProb(log_prob, member.outside, entropy, log_kept_mass)


def _whole(problem: Problem, operations: Operations) -> LinearLogProb:
    """Over the vocabulary: tokens beyond the mask are dropped before anything is computed."""
    N = problem.token_ids.numel()
    rows = None if problem.mask is None else torch.where(problem.mask)[0]
    measured = None
    if isinstance(problem.entropy, Tensor):
        measured = torch.where(problem.entropy if rows is None else problem.entropy[rows])[0]
    sums = _dense(problem, operations, rows, measured, entropy=problem.entropy is not False)
    log_prob, entropy = sums.log_prob, sums.entropy
    if rows is not None:
        log_prob = log_prob.new_zeros(N).index_copy(0, rows, log_prob)
    place = measured if rows is None or measured is None else rows[measured]
    place = rows if place is None else place
    if entropy is not None and place is not None:
        entropy = entropy.new_full((N,), torch.nan).index_copy(0, place, entropy)
    return LinearLogProb(log_prob, torch.zeros_like(problem.token_ids, dtype=torch.bool), entropy, None)


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
    )
    return merged_sums(sums, measured, problem.group)


@torch.no_grad()
def _log_kept_mass(problem: Problem, operations: Operations, member: Membership, sums: LogSums) -> Tensor:
    """log Σ_{j ∈ K ∪ {a}} p_j where it is asked for: one pass over the head for those tokens alone."""
    wanted = torch.ones_like(member.working) & problem.log_kept_mass
    rows = torch.where(wanted if problem.mask is None else wanted & problem.mask)[0]
    whole = _dense(problem, operations, rows, entropy=False)
    chosen = (sums.largest[rows] - whole.largest) + (sums.log_sum[rows] - whole.log_sum)
    mass = torch.where(member.working[rows], chosen, whole.log_prob)  # a set of one is the sampled token
    return mass.new_full(member.working.shape, torch.nan).index_copy(0, rows, mass)
