"""The fingerprint of a correction: sums of its policies, by which a loss tells its own rows from others.

The correction of other rows has the right shape, and training with it looks like training. The kernel sums both
policies over each sequence in any case. A loss sums the policies that it is given, and compares.
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
"""Row of a loss's statistics on a device: the share of sequences whose correction is of other tokens."""


class Fingerprint(NamedTuple):
    """The policies that `correct` was given, as four numbers for each sequence.

    Attributes:
        sums: (4, B) float64: valid tokens, measured tokens, and Σ log π and Σ log μ over the measured ones; of whole
            sequences, also with a context group.
        dtypes: of log π and log μ.
    """

    sums: Tensor
    dtypes: tuple[torch.dtype, torch.dtype]

    def of(self, index: slice | Tensor) -> Fingerprint:
        """Return the fingerprint of some sequences."""
        return self._replace(sums=self.sums[:, index])

    def to(self, device: torch.device | str) -> Fingerprint:
        """Return the same fingerprint on another device."""
        return self._replace(sums=self.sums.to(device))


def compare_policies(
    fingerprint: Fingerprint | None,
    policies: PolicyLogProbs,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    context_group: ProcessGroup | None,
) -> Statistics | None:
    """Check that a loss has the policies of its correction: the same rows, in the same order.

    For each token the sum may differ by 2 ulp of the coarser dtype (at least float32) at the sequence's largest
    |log-prob|, and by 1e-6 in all. A sequence with other missing tokens than in the correction is skipped.

    Args:
        fingerprint: the correction's. None checks nothing.
        policies: those of the loss. Without `rollout_log_prob` log π_old alone is compared. Where log π_θ serves as
            `old_log_prob` too, this warns once.
        mask: the response mask, bool. Same shape.
        cu_seqlens: (B + 1,) token offsets, only when packed.
        context_group: ranks that hold other tokens of the same sequences, with which sums are exchanged.

    Returns:
        On a device, where no value is read, the share of sequences that differ; a Monitor raises an alarm. In host
        memory, None.

    Raises:
        ValueError: the correction is of other rows, or of swapped policies. In host memory only.
    """
    if fingerprint is None or fingerprint.sums.shape[1] != sequence_count(mask, cu_seqlens=cu_seqlens):
        return None
    given = [policy.detach() for policy in (policies.old_log_prob, policies.rollout_log_prob) if policy is not None]
    measured = mask & sum(given[1:], start=given[0]).isfinite()

    # Slices of sequences add up.
    counts = [token_count(x, cu_seqlens=cu_seqlens).double() for x in (mask, measured)]
    sums = [sequence_sum(policy.double(), measured, cu_seqlens=cu_seqlens) for policy in given]
    tokens, measured_tokens, *sums = sum_over(torch.stack([*counts, *sums]), context_group)

    # A sequence with other missing tokens than in the correction has no sums to compare.
    here, there = torch.stack(sums), fingerprint.sums[2:]
    comparable = fingerprint.sums[1] == measured_tokens
    straight = (here - there[: len(given)]).abs() * comparable
    swapped = (here - there.flip(0)[: len(given)]).abs() * comparable
    other_tokens = fingerprint.sums[0] != tokens

    # Nearly always the sums agree, to less than rounding could explain: |Σ| is at most n · max |log-prob|.
    readable = in_host_memory(mask, there, *given)
    if readable and not bool(other_tokens.any() | (straight > _limit(here.abs())).any()):
        return None
    largest = [sequence_max(policy.abs(), measured, cu_seqlens=cu_seqlens).clamp(min=0.0) for policy in given]
    spread = sum_over(torch.stack([counts[1] * size for size in largest]), context_group)

    # The wide limit allows a conversion to another dtype. What stays within the narrow one was not converted.
    pairs = zip(spread, given, fingerprint.dtypes, strict=False)
    narrow, wide = _limit(spread), torch.stack([_limit(width, x.dtype, dtype) for width, x, dtype in pairs])
    differs = straight > wide
    exchanged = (swapped <= narrow).all() & (straight > narrow).any()
    fits_swapped = exchanged | (differs.any() & (swapped <= wide).all())

    # A loss at π_old = π_θ has the ratio 1, whatever π_old the correction saw.
    on_policy = ((policies.log_prob.detach() == given[0]) | ~measured).all()
    excused = on_policy & differs[0].any()
    differs = torch.cat([differs[:1] & ~on_policy, differs[1:]])
    foreign = other_tokens | differs.any(0) | fits_swapped
    if not readable:
        return Statistics.of(moments={MISMATCH: moments_of(foreign.double(), tokens > 0)})

    if fits_swapped or (on_policy and 2 * swapped.sum() < straight.sum()):
        raise ValueError(
            "old_log_prob and rollout_log_prob are swapped, here or in correct: the order there is "
            "correct(old_log_prob, rollout_log_prob, response_mask)"
        )
    if foreign.any():
        row = int(foreign.nonzero()[0])
        policy = int(not other_tokens[row] and not differs[0, row])
        raise ValueError(
            f"the correction is of other rows: in row {row}, {('old_log_prob', 'rollout_log_prob')[policy]} has "
            f"{int(tokens[row])} response tokens that sum to {here[policy, row].item():.6g}; in correct it had "
            f"{int(fingerprint.sums[0, row])} that sum to {there[policy, row].item():.6g}. Index all with the same "
            "rows, correction[rows] beside old_log_prob[rows], and call correct again for every batch"
        )
    if excused:
        warn_once(
            "old_log_prob equals log_prob, and the correction was computed with another old_log_prob: its weights are "
            "not those of this policy; give policy_loss the old_log_prob that correct was given",
            stacklevel=5,
        )
    return None


def _limit(spread: Tensor, *dtypes: torch.dtype) -> Tensor:
    """Return how far two sums may differ if one was rounded to one of the dtypes, or to float32.

    Args:
        spread: n · max |log-prob|, which bounds the sum of |log-prob|.
        dtypes: of the values.
    """
    eps = max(torch.finfo(dtype).eps for dtype in (torch.float32, *dtypes))
    return 2 * eps * spread + 1e-6
