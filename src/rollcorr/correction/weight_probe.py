"""Weight probe: score the same tokens again with the trainer's weights, to tell stale weights, dropout and noise apart.

Three numbers, each the mean k3 = exp(d) − 1 − d over the sampled tokens, with d = log π − log μ in nats:

    sampled_k3     the trainer against the log-probs that the engine reported while it sampled
    synced_k3      the trainer against the engine's score after a weight sync
    repeated_k3    the trainer against its own second pass

A sync that removes most of the mismatch shows stale weights. A second pass that differs as much shows dropout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rollcorr.core.divergence import k3

# STALE: from this sampled_k3 / synced_k3 on, the weights were stale. STOCHASTIC: from this repeated_k3 / sampled_k3 on,
# the trainer is random in each pass (dropout). ROUNDING: the k3, in nats, that float32 rounding may cause.
STALE, STOCHASTIC, ROUNDING = 3.0, 0.5, 1e-9


@dataclass(frozen=True, kw_only=True)
class WeightProbe:
    """The mismatch of some rows before and after a weight sync, and of the trainer with itself.

    Attributes:
        sampled_k3: of the trainer and the log-probs reported during sampling, nats per token.
        synced_k3: of the trainer and the engine's score after a sync, nats per token.
        repeated_k3: of two passes of the trainer, nats per token.
        tokens: number of tokens.
    """

    sampled_k3: float
    synced_k3: float
    repeated_k3: float
    tokens: int

    @classmethod
    def of(
        cls, *, sampled: Tensor, synced: Tensor, trained: Tensor, trained_again: Tensor, response_mask: Tensor
    ) -> WeightProbe:
        """Compare log-probs of the same tokens, nats, each (B, T).

        Args:
            sampled: log μ, as reported during sampling.
            synced: the engine's score with the trainer's weights.
            trained: log π of the trainer.
            trained_again: log π of a second pass of the trainer, in the same mode.
            response_mask: non-zero on sampled tokens.

        Raises:
            ValueError: no token is sampled.

        Example:
            >>> old, now = torch.full((1, 4), -1.2), torch.full((1, 4), -1.0)
            >>> mask = torch.ones(1, 4)
            >>> WeightProbe.of(sampled=old, synced=now, trained=now, trained_again=now, response_mask=mask).cause
            'stale weights'
        """
        mask = response_mask != 0
        count = int(mask.sum())
        if not count:
            raise ValueError("response_mask has no sampled token, so there is nothing to compare; give other rows")

        def mean_k3(train: Tensor, rollout: Tensor) -> float:
            log_ratio = (train.to(mask.device).double() - rollout.to(mask.device).double())[mask]
            return float(k3(log_ratio).mean())

        return cls(
            sampled_k3=mean_k3(trained, sampled),
            synced_k3=mean_k3(trained, synced),
            repeated_k3=mean_k3(trained_again, trained),
            tokens=count,
        )

    @property
    def cause(self) -> Literal["stale weights", "dropout", "noise"]:
        """Return the main cause of `sampled_k3`. Noise includes settings that differ with equal weights."""
        if not self.sampled_k3 < STALE * max(self.synced_k3, ROUNDING):  # also true for NaN
            return "stale weights"
        if self.repeated_k3 >= max(STOCHASTIC * self.sampled_k3, ROUNDING):
            return "dropout"
        return "noise"
