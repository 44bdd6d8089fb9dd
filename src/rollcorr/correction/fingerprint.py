"""The fingerprint of a correction: sums of its policies, by which a loss recognizes a correction of different rows.

Such a correction has the right shape, so training with it raises no error. The kernel computes the sums anyway; the
loss computes the same sums from its arguments and compares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rollcorr.config.checks import warn_once
from rollcorr.core.boundary import in_host_memory
from rollcorr.core.layout import sequence_count, sequence_max, sequence_sum, token_count
from rollcorr.core.mergeable_statistics import Statistics, moments_of
from rollcorr.correction.process_groups import sum_over

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rollcorr.correction.losses import PolicyLogProbs

MISMATCH = "correction_mismatch"
"""Row of a loss's statistics on a device: the share of sequences that differ from those of the correction."""


class Fingerprint(NamedTuple):
    """The policies that `correct` was given, as four numbers for each sequence.

    Attributes:
        sums: (4, B) float64: valid tokens, measured tokens, and Σ log π and Σ log μ over measured tokens; with a
            context group, over all slices of a sequence.
        dtypes: of log π and log μ.
    """

    sums: Tensor
    dtypes: tuple[torch.dtype, torch.dtype]


def compare_policies(
    fingerprint: Fingerprint | None,
    policies: PolicyLogProbs,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    context_group: ProcessGroup | None,
) -> Statistics | None:
    """Check that a loss has the rows and the policies that its correction was computed with.

    Per token, a sum may differ by 2 ulp of the coarser dtype (at least float32) at the sequence's largest |log-prob|,
    plus 1e-6. Sequences whose missing tokens differ from the correction's are skipped.

    Args:
        fingerprint: the correction's. None skips the check.
        policies: of the loss; an omitted `rollout_log_prob` is not compared. If `old_log_prob` equals `log_prob`, a
            difference of π_old only warns, once.
        mask: the response mask, bool. Same shape.
        cu_seqlens: (B + 1,) token offsets, only when packed.
        context_group: ranks with the rest of each sequence. Sums are exchanged over it.

    Returns:
        On a device, where values are not read, the share of sequences that differ; a Monitor raises an alarm. In host
        memory None.

    Raises:
        ValueError: the rows differ, or the policies are swapped. In host memory only.
    """
    if fingerprint is None or fingerprint.sums.shape[1] != sequence_count(mask, cu_seqlens=cu_seqlens):
        return None
    given = [policy.detach() for policy in (policies.old_log_prob, policies.rollout_log_prob) if policy is not None]
    measured = mask & sum(given[1:], start=given[0]).isfinite()

    # Slices of a sequence add up.
    counts = [token_count(x, cu_seqlens=cu_seqlens).double() for x in (mask, measured)]
    sums = (sequence_sum(policy.double(), measured, cu_seqlens=cu_seqlens) for policy in given)
    found = sum_over(torch.stack([*counts, *sums]), context_group)

    # Sums over different tokens cannot be compared, nor sums of sentinels near the end of the float range.
    expected = fingerprint.sums[2:]
    comparable = (fingerprint.sums[1] == found[1]) & expected.isfinite().all(0)
    straight = (found[2:] - expected[: len(given)]).abs().where(comparable, 0.0)
    swapped = (found[2:] - expected.flip(0)[: len(given)]).abs().where(comparable, 0.0)
    other_tokens = fingerprint.sums[0] != found[0]

    # Return early in the usual case: the sums agree within the smallest possible limit, as |Σ| ≤ n · max |log-prob|.
    readable = in_host_memory(mask, expected, *given)
    if readable and not bool(other_tokens.any() | (straight > _limit(found[2:].abs())).any()):
        return None

    # With π_old = π_θ the ratio is 1, whatever π_old the correction saw. Every slice counts: a rank that raised alone
    # would leave the others in their next exchange.
    moved = token_count(measured & (policies.log_prob.detach() != given[0]), cu_seqlens=cu_seqlens).double()
    largest = [sequence_max(policy.abs(), measured, cu_seqlens=cu_seqlens).clamp(min=0.0) for policy in given]
    *spread, moved = sum_over(torch.stack([*(counts[1] * size for size in largest), moved]), context_group)
    on_policy = ~moved.any()

    # The wide limit allows for a conversion to a different dtype, the narrow one for summation.
    narrow = _limit(torch.stack(spread))
    wide = torch.stack(
        [_limit(n, x.dtype, dtype) for n, x, dtype in zip(spread, given, fingerprint.dtypes, strict=False)]
    )
    is_swapped = _is_swapped(straight, swapped, narrow, wide, on_policy)
    differs = straight > wide
    is_earlier = on_policy & differs[0].any()
    differs[0] &= ~on_policy
    foreign = other_tokens | differs.any(0) | is_swapped
    if not readable:
        return Statistics.of(moments={MISMATCH: moments_of(foreign.double(), found[0] > 0)})

    if is_swapped or (on_policy and _is_nearer_swapped(straight, swapped, found[0])):
        raise ValueError(
            "old_log_prob and rollout_log_prob are swapped, here or in correct: the order there is "
            "correct(old_log_prob, rollout_log_prob, response_mask)"
        )
    if foreign.any():
        row = int(foreign.nonzero()[0])
        raise _other_rows(found, fingerprint.sums, row, policy=int(not other_tokens[row] and not differs[0, row]))
    if is_earlier:
        warn_once(
            "old_log_prob equals log_prob, but the correction was computed with a different old_log_prob, so its "
            "weights belong to an earlier policy; give policy_loss the old_log_prob that correct was given",
            stacklevel=5,
        )
    return None


def _is_swapped(straight: Tensor, swapped: Tensor, narrow: Tensor, wide: Tensor, on_policy: Tensor) -> Tensor:
    """Return whether the sums fit within a limit if the policies are exchanged, and do not as they are."""
    fits = (swapped <= wide).all() & (straight > wide).any()
    if len(straight) == 2:
        return fits | (swapped <= narrow).all() & (straight > narrow).any()

    # One policy by itself may be near the correction's μ by chance, because the noise of tokens cancels in a sum.
    return fits & ~on_policy


def _is_nearer_swapped(straight: Tensor, swapped: Tensor, tokens: Tensor) -> Tensor:
    """Return whether the sums fit clearly better with the policies exchanged; one policy needs four sequences."""
    if len(straight) == 2:
        return 2 * swapped.sum() < straight.sum()
    return ((tokens > 0).sum() > 3) & (20 * swapped.sum() < straight.sum())


def _other_rows(found: Tensor, expected: Tensor, row: int, *, policy: int) -> ValueError:
    """Return the error for a row whose sums, as in `Fingerprint`, differ for policy 0 (old) or 1 (rollout)."""
    given_sums, expected_sums = (
        f"{int(x[0, row])} response tokens that sum to {x[2 + policy, row].item():.6g}" for x in (found, expected)
    )
    return ValueError(
        f"the correction is of other rows: in row {row}, {('old_log_prob', 'rollout_log_prob')[policy]} has "
        f"{given_sums}, and correct was given {expected_sums}. Index all tensors with the same rows, "
        "correction[rows] as old_log_prob[rows], and call correct again for every batch"
    )


def _limit(spread: Tensor, *dtypes: torch.dtype) -> Tensor:
    """Return how far two sums may differ if the values were rounded to one of the dtypes, or to float32.

    Args:
        spread: n · max |log-prob| of each sum.
        dtypes: before and after a conversion.
    """
    eps = max(torch.finfo(dtype).eps for dtype in (torch.float32, *dtypes))
    return 2 * eps * spread + 1e-6
