"""Token log-probs from logits: over the full vocabulary, over a recomputed support, or over recorded kept sets.

Logits are (…, V) and token ids (…): (B, T, V) and (B, T), or packed (N, V) and (N,). Logits are divided by the
temperature before the softmax, as samplers do. Everything is computed in float32 or wider, is differentiable in the
logits, and reads no value, so nothing waits for the GPU.

A reference policy is scored by `token_log_prob`, never over a support: a token that the reference policy would not
have kept must still have a finite log-prob.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollcorr.core.boundary import check_positive, check_tensors, usable_ids
from rollcorr.core.layout import add_at, sequence_ids
from rollcorr.core.ratios import at_least_float32
from rollcorr.core.sampling import KeptSets, usable_kept_sets, with_sampled


class SupportedLogProb(NamedTuple):
    """Log-probs over a support, and the tokens that had to be added to it.

    Attributes:
        log_prob: log p of the sampled token over the support, nats. The shape of the token ids.
        outside: true where the sampled token was not in the support and was added to it. Same shape, bool.
    """

    log_prob: Tensor
    outside: Tensor


NO_GREEDY = "; greedy decoding has no log-probs"
"""End of the error for a temperature of 0."""


def token_log_prob(logits: Tensor, token_ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Compute log p(a) = z_a/τ − log Σ_j exp(z_j/τ), over the full vocabulary.

    Args:
        logits: z, (…, V), any float dtype.
        token_ids: a, (…), integers in 0 … V − 1.
        temperature: τ, > 0.

    Returns:
        (…), nats, at least float32.

    Raises:
        ValueError: shapes do not fit, the temperature is not above 0, or a token id is outside the vocabulary (checked
            in host memory; clamped on a device).

    Source: this library.
    """
    token_ids = _check_operands(logits, token_ids, temperature)
    return _gather_tokens((at_least_float32(logits) / temperature).log_softmax(-1), token_ids)


def supported_log_prob(
    logits: Tensor, token_ids: Tensor, support: Tensor, *, temperature: float = 1.0
) -> SupportedLogProb:
    """Compute log p(a) = z_a/τ − log Σ_{j ∈ K ∪ {a}} exp(z_j/τ), over a dense support K.

    For supports that the trainer recomputes from its own logits. `rollcorr.core.sampling` explains why that is fragile.

    Args:
        logits: z, (…, V).
        token_ids: a, (…).
        support: K, (…, V) bool.
        temperature: τ, > 0.

    Raises:
        ValueError: as in `token_log_prob`.
    """
    token_ids = _check_operands(logits, token_ids, temperature, support=support)
    if support.shape != logits.shape:
        raise ValueError(f"support {tuple(support.shape)} and logits {tuple(logits.shape)} differ")
    support, outside = with_sampled(support, token_ids)
    scaled = (at_least_float32(logits) / temperature).masked_fill(~support, -torch.inf)
    return SupportedLogProb(_gather_tokens(scaled.log_softmax(-1), token_ids), outside)


def kept_log_prob(logits: Tensor, token_ids: Tensor, kept: KeptSets, *, temperature: float = 1.0) -> SupportedLogProb:
    """Compute log p(a) = z_a/τ − log Σ_{j ∈ K ∪ {a}} exp(z_j/τ), over recorded sets K (replayed keep-sampling-mask).

    Only kept logits are gathered: no mask or softmax of shape (…, V) is created. A token without kept ids (padding;
    see `KeptSets.padded`) gets log 1 = 0 and counts as outside.

    Args:
        logits: z, (…, V).
        token_ids: a, (…).
        kept: K, one set per token, in the order of `token_ids.flatten()`. An id listed twice would count twice.
        temperature: τ, > 0.

    Raises:
        ValueError: as in `token_log_prob`, also for kept ids. Duplicate ids are not checked here: see
            `rollcorr.core.sampling.check_kept_sets`.

    Source: DeepSeek-AI (2025), "DeepSeek-V3.2", keep sampling mask.
    """
    scaled, sampled, rows, is_sampled = _gather_kept_logits(logits, token_ids, kept, temperature)
    largest, log_sum, outside = _log_sum_exp(scaled, sampled, rows, is_sampled)
    log_prob = (sampled - largest) - log_sum
    return SupportedLogProb(log_prob.view(token_ids.shape), outside.view(token_ids.shape))


def kept_log_mass(logits: Tensor, token_ids: Tensor, kept: KeptSets, *, temperature: float = 1.0) -> Tensor:
    """Compute log S = log Σ_{j ∈ K ∪ {a}} p_j: the log of the kept set's share of the full softmax. (…), nats, ≤ 0.

    Arguments and raises are as in `kept_log_prob`.
    """
    scaled, sampled, rows, is_sampled = _gather_kept_logits(logits, token_ids, kept, temperature)
    largest, log_sum, _ = _log_sum_exp(scaled, sampled, rows, is_sampled)
    whole = (at_least_float32(logits) / temperature).logsumexp(-1)
    return (largest.view(token_ids.shape) - whole) + log_sum.view(token_ids.shape)


def token_entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Compute H = log Σ_j exp(z_j/τ) − Σ_j p_j z_j/τ, over the full vocabulary.

    Args:
        logits: z, (…, V), any float dtype.
        temperature: τ, > 0.

    Returns:
        (…), nats, at least float32. The shape of the logits without V.

    Raises:
        ValueError: the temperature is not above 0.

    Source: this library.
    """
    check_positive("temperature", temperature, NO_GREEDY)
    return minus_p_log_p((at_least_float32(logits) / temperature).log_softmax(-1)).sum(-1)


def kept_entropy(logits: Tensor, token_ids: Tensor, kept: KeptSets, *, temperature: float = 1.0) -> Tensor:
    """Compute H = −Σ_{j ∈ K ∪ {a}} p_j log p_j with p over the kept set only. (…), nats; 0 where the set is empty.

    Arguments and raises are as in `kept_log_prob`.
    """
    scaled, sampled, rows, is_sampled = _gather_kept_logits(logits, token_ids, kept, temperature)
    largest, log_sum, outside = _log_sum_exp(scaled, sampled, rows, is_sampled)

    # Add the sampled token's own term only if it is not among the kept ids.
    member = (scaled - largest[rows]) - log_sum[rows]
    sampled_outside = ((sampled - largest) - log_sum).masked_fill(~outside, -torch.inf)
    return add_at(minus_p_log_p(sampled_outside), rows, minus_p_log_p(member)).view(token_ids.shape)


def kept_mass_log_ratio(log_ratio: Tensor, log_kept_mass: Tensor) -> Tensor:
    """Compute d − log S: the log-ratio of two truncated policies, from a trainer's log-prob over the full vocabulary.

    This is the fallback for runs that recorded the kept mass S but not the kept sets. The engine's log-prob is
    log p(a) − log S. The trainer's, over the same set, would be log π(a) − log S_π. This function uses S in place of
    S_π, so a difference between the two masses remains in the ratio, and the gradient is the untruncated policy's.
    Prefer `kept_log_prob`.

    Args:
        log_ratio: d = log π − log μ with π over the full vocabulary, nats. Any shape.
        log_kept_mass: log S of the engine's set at each token, ≤ 0, nats. Same shape.

    Raises:
        ValueError: shapes differ.
    """
    if log_ratio.shape != log_kept_mass.shape:
        raise ValueError(f"log_ratio {tuple(log_ratio.shape)} and log_kept_mass {tuple(log_kept_mass.shape)} differ")
    return at_least_float32(log_ratio) - at_least_float32(log_kept_mass)


def _gather_kept_logits(
    logits: Tensor, token_ids: Tensor, kept: KeptSets, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scaled logits of kept ids (M,) and sampled tokens (N,), each kept id's token, and if it is sampled."""
    token_ids = _check_operands(logits, token_ids, temperature, **{"kept.ids": kept.ids, "kept.offsets": kept.offsets})
    if len(kept) != token_ids.numel():
        raise ValueError(
            f"kept sets are of {len(kept)} tokens, token_ids has {token_ids.numel()}; "
            "one set per token, or KeptSets.padded(mask) for a padded batch"
        )

    kept = usable_kept_sets(kept, (0, logits.shape[-1]))
    flat = logits.reshape(-1, logits.shape[-1])
    rows = sequence_ids(kept.ids, cu_seqlens=kept.offsets)
    scaled = at_least_float32(flat[rows, kept.ids.long()]) / temperature
    sampled = at_least_float32(flat.gather(-1, token_ids.reshape(-1, 1)).squeeze(-1)) / temperature
    return scaled, sampled, rows, kept.ids == token_ids.reshape(-1)[rows]


def _log_sum_exp(scaled: Tensor, sampled: Tensor, rows: Tensor, is_sampled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute max z and log Σ exp(z − max z) of each kept set with its sampled token, and whether that was outside."""
    found = torch.zeros_like(sampled, dtype=torch.int64).index_add(0, rows, is_sampled.long())
    outside = found == 0

    # The maximum cancels in every result. Detach it to exclude it from the backward pass.
    largest = sampled.detach().scatter_reduce(0, rows, scaled.detach(), "amax")

    # A sampled token among the kept ids must count once, so add its own term only where it is outside.
    inserted = (sampled - largest).masked_fill(~outside, -torch.inf).exp()
    total = add_at(inserted, rows, (scaled - largest[rows]).exp())
    return largest, total.log(), outside


def minus_p_log_p(log_p: Tensor) -> Tensor:
    """Compute −p log p, and 0 at p = 0."""
    return -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0))


def _gather_tokens(scaled: Tensor, token_ids: Tensor) -> Tensor:
    return scaled.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def _check_operands(logits: Tensor, token_ids: Tensor, temperature: float, **others: Tensor) -> Tensor:
    """Check operands against each other; return the token ids as int64, clamped to the vocabulary on a device."""
    check_tensors(logits=logits, token_ids=token_ids, **others)
    if logits.shape[:-1] != token_ids.shape:
        raise ValueError(f"logits {tuple(logits.shape)} must be token_ids {tuple(token_ids.shape)} with V added")
    check_positive("temperature", temperature, NO_GREEDY)
    return usable_ids("token_ids", token_ids, (0, logits.shape[-1]))
