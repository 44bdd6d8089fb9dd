"""Checks of a loss against its correction: the tokens, the groups, the optimizer step, and the policies.

A correction of different rows has the right shape, so training with it raises no error. The kernel computes sums of
both policies anyway; the loss computes the same sums from its arguments and compares them with this fingerprint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rollcorr.config.checks import warn_once
from rollcorr.core.boundary import check_tensors, in_host_memory
from rollcorr.core.layout import sequence_count, sequence_max, sequence_sum, token_count
from rollcorr.core.mergeable_statistics import Statistics, moments_of
from rollcorr.correction.process_groups import sum_over

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rollcorr.correction.losses import PolicyLogProbs
    from rollcorr.correction.result import Correction

MISMATCH = "correction_mismatch"
"""Row of a loss's statistics on a device: the share of sequences that differ from the correction's sequences."""


class Fingerprint(NamedTuple):
    """Four sums per sequence that identify the policies of a correction.

    Attributes:
        sums: (4, B) float64: valid tokens, measured tokens, and Σ log π and Σ log μ over measured tokens; with a
            context group, over all slices of a sequence.
        dtypes: of log π and log μ.
    """

    sums: Tensor
    dtypes: tuple[torch.dtype, torch.dtype]


def has_step_counts(correction: Correction, mask: Tensor) -> bool:
    """Return whether a correction has its optimizer step's denominators; False for a full batch changed by hand.

    Raises:
        ValueError: it was changed by hand and covers only a part of the batch or one rank, so its counts are too low.
    """
    if correction.counts is not None:
        return True
    if correction.batch_shape == tuple(mask.shape) and correction.ranks == (1, 1):
        return False
    of = "a batch" if correction.batch_shape is None else f"a batch {correction.batch_shape}"
    raise ValueError(
        f"this correction {tuple(mask.shape)} was cut or changed by hand. It may be a part of {of} over "
        f"{correction.ranks[0] * correction.ranks[1]} ranks, and does not know what the optimizer step is divided by: "
        "take correction[rows], or pass denominators"
    )


def context_group_of(correction: Correction, given: ProcessGroup | None) -> ProcessGroup | None:
    """Return the context group of a loss's collectives: the correction's own group.

    Raises:
        ValueError: `given` has a different size, or the correction lost its group, such as by pickling.
    """
    own, ranks = correction.context_group, correction.ranks[1]
    if given is None and (own is not None or ranks == 1):
        return own
    if given is None:
        raise ValueError(
            f"the correction is of sequences on {ranks} ranks, and their group did not travel with it: pass "
            "context_group too"
        )
    if given.size() != ranks:
        raise ValueError(
            f"context_group has {given.size()} ranks and the correction is of sequences on {ranks}: a decision about a "
            "slice is none about its sequence; pass the same context_group to correct"
        )
    return given


def check_belongs(correction: Correction, mask: Tensor, cu_seqlens: Tensor | None) -> None:
    """Check that a correction belongs to these tokens, as far as possible without synchronization.

    Shapes, devices and layouts are always compared; masks and offsets only on the CPU. A part of a correction that was
    cut out by hand may still have the masks of the full batch. These are not compared.

    Args:
        correction: the correction that was passed to the loss.
        mask: response mask of the loss, bool. (B, T), or (N,) when packed.
        cu_seqlens: (B + 1,) token offsets of the loss; `None` when padded.

    Raises:
        ValueError: a shape, a device, a mask or offsets differ.
    """
    advice = "; take the rows of the correction with those of the batch: correction[rows]"
    loss_mask = correction.loss_mask
    check_tensors(response_mask=mask, **{"correction.loss_mask": loss_mask, "correction.weights": correction.weights})
    for name, tensor in (("loss_mask", loss_mask), ("weights", correction.weights)):
        if tensor is not None and tensor.shape != mask.shape:
            shapes = f"correction.{name} {tuple(tensor.shape)} and response_mask {tuple(mask.shape)}"
            raise ValueError(f"{shapes} differ, so the correction is of other tokens{advice}")

    given = correction.response_mask
    whole = given is not None and given.shape == mask.shape and given.device == mask.device
    if whole and not _same_sequences(correction.cu_seqlens, cu_seqlens):
        raise ValueError(f"correction has other cu_seqlens than the loss, so it is of other sequences{advice}")

    # The checks below read values.
    if not in_host_memory(loss_mask, mask):
        return
    outside = int((loss_mask & ~mask).sum())
    if outside:
        raise ValueError(
            f"correction keeps {outside} tokens outside of response_mask, so it is of other tokens{advice}"
        )
    if whole and given is not None and in_host_memory(given):
        others = int(((given != 0) != mask).sum())
        if others:
            raise ValueError(f"correction was computed with a response_mask that differs at {others} tokens{advice}")


def _same_sequences(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two layouts are equal, as far as that is known without synchronization."""
    if one is None or other is None or one is other:
        return one is other
    return one.shape == other.shape and (not in_host_memory(one, other) or torch.equal(one.long(), other.long()))


def compare_policies(
    fingerprint: Fingerprint | None,
    policies: PolicyLogProbs,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    context_group: ProcessGroup | None,
) -> Statistics | None:
    """Check that a loss has the rows and policies from which its correction was computed.

    Per token, a sum may differ by 2 ulp of the coarser dtype (at least float32) at the sequence's largest |log-prob|,
    plus 1e-6. Sequences whose missing tokens differ from the correction's are skipped.

    Args:
        fingerprint: the correction's fingerprint; optional. Without it, the check is skipped.
        policies: policies of the loss; an omitted `rollout_log_prob` is not compared. If `old_log_prob` equals
            `log_prob`, a difference of π_old only warns, once.
        mask: the response mask, bool. Same shape.
        cu_seqlens: (B + 1,) token offsets, only when packed.
        context_group: ranks with other tokens of the same sequences. Sums are merged over it.

    Returns:
        On a device, where values are not read, the share of sequences that differ; a Monitor raises an alarm for it.
        `None` in host memory.

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

    # Compare only sums over the same tokens, and only finite ones: sums of sentinel values may overflow.
    expected = fingerprint.sums[2:]
    comparable = (fingerprint.sums[1] == found[1]) & expected.isfinite().all(0)
    straight = (found[2:] - expected[: len(given)]).abs().where(comparable, 0.0)
    swapped = (found[2:] - expected.flip(0)[: len(given)]).abs().where(comparable, 0.0)
    other_tokens = fingerprint.sums[0] != found[0]

    # Return early in the usual case: the sums agree within the smallest possible limit, as |Σ| ≤ n · max |log-prob|.
    readable = in_host_memory(mask, expected, *given)
    if readable and not bool(other_tokens.any() | (straight > _rounding_limit(found[2:].abs())).any()):
        return None

    # With π_old = π_θ the ratio is 1, independent of the correction's π_old. Sum over all slices, so that all ranks
    # raise together: if only one raised, its peers would hang in their next collective.
    moved = token_count(measured & (policies.log_prob.detach() != given[0]), cu_seqlens=cu_seqlens).double()
    largest = [sequence_max(policy.abs(), measured, cu_seqlens=cu_seqlens).clamp(min=0.0) for policy in given]
    *spread, moved = sum_over(torch.stack([*(counts[1] * size for size in largest), moved]), context_group)
    on_policy = ~moved.any()

    # The wide limit allows for a conversion to a different dtype, the narrow one for summation.
    narrow = _rounding_limit(torch.stack(spread))
    wide = torch.stack(
        [_rounding_limit(n, x.dtype, dtype) for n, x, dtype in zip(spread, given, fingerprint.dtypes, strict=False)]
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
        raise _other_rows_error(found, fingerprint.sums, row, policy=int(not other_tokens[row] and not differs[0, row]))
    if is_earlier:
        warn_once(
            "old_log_prob equals log_prob, but the correction was computed with a different old_log_prob, so its "
            "weights belong to an earlier policy; give policy_loss the old_log_prob that correct was given",
            stacklevel=5,
        )
    return None


def _is_swapped(straight: Tensor, swapped: Tensor, narrow: Tensor, wide: Tensor, on_policy: Tensor) -> Tensor:
    """Return whether the sums agree within a limit only if the two policies are exchanged."""
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


def _other_rows_error(found: Tensor, expected: Tensor, row: int, *, policy: int) -> ValueError:
    """Return the error for a row whose sums, as in `Fingerprint`, differ for policy 0 (old) or 1 (rollout)."""
    given_sums, expected_sums = (
        f"{int(x[0, row])} response tokens that sum to {x[2 + policy, row].item():.6g}" for x in (found, expected)
    )
    return ValueError(
        f"the correction is of other rows: in row {row}, {('old_log_prob', 'rollout_log_prob')[policy]} has "
        f"{given_sums}, and correct was given {expected_sums}. Index all tensors with the same rows, "
        "correction[rows] as old_log_prob[rows], and call correct again for every batch"
    )


def _rounding_limit(spread: Tensor, *dtypes: torch.dtype) -> Tensor:
    """Return how far two sums may differ if the values were rounded to one of the dtypes, or to float32.

    Args:
        spread: n · max |log-prob| of each sum.
        dtypes: before and after a conversion.
    """
    eps = max(torch.finfo(dtype).eps for dtype in (torch.float32, *dtypes))
    return 2 * eps * spread + 1e-6
