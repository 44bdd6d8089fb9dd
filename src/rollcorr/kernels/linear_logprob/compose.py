"""From sums to log-probs: what every form shares, whichever way the sums are made."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rollcorr.kernels.linear_logprob.dense import Epilogue, dense_sums
from rollcorr.kernels.linear_logprob.kept import Membership, RaggedProducts, kept_sums, membership
from rollcorr.kernels.linear_logprob.problem import LinearLogProb, LogSums, Problem, at_rows, placed, rows_where
from rollcorr.kernels.linear_logprob.vocabulary import merged_sums, with_summed_gradient


def composed_log_prob(problem: Problem, epilogue: Epilogue, products: RaggedProducts) -> LinearLogProb:
    """Log-probs, and what else is asked for, (N,): one implementation of chunks of logits and one of kept rows."""
    problem = replace(problem, hidden=with_summed_gradient(problem.hidden, problem.group))
    if problem.mask is not None and not problem.compact:
        problem = problem.harmless(problem.mask)
    if problem.kept is None:
        return _over_vocabulary(problem, epilogue)

    member = membership(problem.kept, problem.token_ids, problem.mask)
    sums = merged_sums(kept_sums(problem, member, products), None, problem.group)
    log_prob = torch.where(member.working, sums.log_prob, 0.0)
    entropy = None
    if sums.entropy is not None:
        entropy = torch.where(member.working, sums.entropy, 0.0)
        entropy = _where_wanted(entropy, problem.entropy, problem.mask)
    log_kept_mass = None if problem.log_kept_mass is False else _log_kept_mass(problem, epilogue, member, sums)
    return LinearLogProb(log_prob, member.outside, entropy, log_kept_mass)


def _over_vocabulary(problem: Problem, epilogue: Epilogue) -> LinearLogProb:
    """Over the vocabulary. Compact: tokens that do not count are dropped before anything is computed.

    Otherwise no token is dropped: nothing is read, so nothing waits.
    """
    mask, N = problem.mask, problem.token_ids.numel()
    rows = rows_where(mask) if problem.compact and mask is not None else None
    part = problem.at(rows)
    measured = rows_where(part.entropy) if problem.compact and isinstance(part.entropy, Tensor) else None
    sums = dense_sums(part, epilogue, measured=measured, entropy=problem.entropy is not False)
    sums = merged_sums(sums, measured, problem.group)

    # What was dropped gets log-prob 0 and entropy NaN, like what was computed and does not count.
    log_prob, entropy = placed(sums.log_prob, rows, N, 0.0), sums.entropy
    if mask is not None:
        log_prob = log_prob.where(mask, 0.0)
    if entropy is not None:
        entropy = placed(entropy, measured, part.token_ids.numel(), torch.nan)
        entropy = _where_wanted(placed(entropy, rows, N, torch.nan), problem.entropy, mask)
    return LinearLogProb(log_prob, torch.zeros_like(problem.token_ids, dtype=torch.bool), entropy, None)


def _where_wanted(values: Tensor, *wanted: Tensor | bool | None) -> Tensor:
    """The values where every choice of tokens has them, and NaN elsewhere; None and True choose all tokens."""
    for choice in wanted:
        values = values.where(choice, torch.nan) if isinstance(choice, Tensor) else values
    return values


@torch.no_grad()
def _log_kept_mass(problem: Problem, epilogue: Epilogue, member: Membership, sums: LogSums) -> Tensor:
    """log Σ_{j ∈ K ∪ {a}} p_j where it is asked for: one pass over the head, for those tokens alone if compact."""
    rows = None
    if problem.compact:
        wanted = torch.ones_like(member.working) & problem.log_kept_mass
        rows = rows_where(wanted if problem.mask is None else wanted & problem.mask)
    part = replace(problem, kept=None).at(rows)
    whole = merged_sums(dense_sums(part, epilogue, entropy=False), None, problem.group)

    largest, log_sum, working = (at_rows(x, rows) for x in (sums.largest, sums.log_sum, member.working))
    mass = (largest - whole.largest) + (log_sum - whole.log_sum)
    mass = torch.where(working, mass, whole.log_prob)  # a set of one is the sampled token
    return _where_wanted(placed(mass, rows, len(member.working), torch.nan), problem.log_kept_mass, problem.mask)
