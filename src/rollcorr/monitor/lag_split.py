"""The mismatch of a training step by lag, from the versions of the weights that sampled its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from rollcorr.core.lag_statistics import PolicyClock, lag_statistics, newest_version
from rollcorr.core.mergeable_statistics import Statistics


class LagSplit:
    """The lags of a run's micro-batches on one rank: the clock has seen every version so far."""

    def __init__(self) -> None:
        self._clock = PolicyClock()

    def statistics(
        self,
        step: int,
        versions: object,
        train_log_prob: Tensor,
        rollout_log_prob: Tensor,
        mask: Tensor,
        cu_seqlens: Tensor | None,
    ) -> Statistics | None:
        """Compute the sums of a micro-batch; None if the versions are neither one, nor per sequence, nor per token.

        Args:
            step: the training step.
            versions: as in the column `policy_versions` of the rollout log; None without any.
            train_log_prob: log π, nats, (B, T), or (N,) with `cu_seqlens`.
            rollout_log_prob: log μ, the same shape.
            mask: non-zero on valid tokens, the same shape.
            cu_seqlens: (B + 1,) token offsets, only when packed.
        """
        of_token = None if versions is None else _token_versions(versions, mask, cu_seqlens)
        if of_token is None:
            return None
        log_ratio = train_log_prob.detach().float() - rollout_log_prob.float()
        self._clock.see(step, newest_version(of_token, mask != 0))
        return lag_statistics(log_ratio, mask, self._clock.version(step, self._clock.newest) - of_token)


def _token_versions(versions: object, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
    """Return the version of each token, in the shape of the mask; None for spans and other forms."""
    try:
        given = torch.as_tensor(versions, device=mask.device)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    if given.is_floating_point() or given.shape == mask.shape or not given.dim():
        return None if given.is_floating_point() else given.long().expand(mask.shape)
    sequences = len(mask) if cu_seqlens is None else len(cu_seqlens) - 1
    if given.shape != (sequences,):
        return None
    if cu_seqlens is None:
        return given.long()[:, None].expand(mask.shape)
    return given.long().repeat_interleave(cu_seqlens.diff(), output_size=len(mask))
