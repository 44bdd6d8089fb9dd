"""Log-ratios between the training and the rollout policy, per token and per sequence.

Symbols (docs/reference/notation.md): μ the rollout policy that sampled the tokens, π the training-side policy;
d = log π − log μ in nats, ρ = exp(d). Every ratio in the library is train / rollout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenClasses(NamedTuple):
    """Partition of the valid tokens by whether their two log-probs are usable. Each is bool, in the inputs' shape.

    Attributes:
        measured: both log-probs are finite, so d is.
        zero_probability: log π = −inf with a finite log μ, so ρ = 0. A valid value, not an error.
        missing: all remaining tokens: NaN, an infinite rollout log-prob, +inf from the trainer.
    """

    measured: Tensor
    zero_probability: Tensor
    missing: Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32, or in its own dtype if that is wider. Half types are for storage, not for arithmetic."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def classify_tokens(train_log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> TokenClasses:
    """Split the valid tokens into measured, zero-probability and missing ones.

    Args:
        train_log_prob: log π, nats. Any shape.
        rollout_log_prob: log μ, nats. Same shape.
        mask: bool, true on response tokens. Same shape.
    """
    rollout_finite = mask & rollout_log_prob.isfinite()
    measured = rollout_finite & train_log_prob.isfinite()
    zero_probability = rollout_finite & (train_log_prob == -torch.inf)
    return TokenClasses(measured, zero_probability, mask & ~measured & ~zero_probability)


def token_log_ratio(train_log_prob: Tensor, rollout_log_prob: Tensor, measured: Tensor) -> Tensor:
    """Compute d = log π − log μ where `measured`, and 0 elsewhere, in at least float32.

    The inputs are widened before the subtraction: in bfloat16 one unit in the last place of a log-prob near −5 is
    0.03, which is larger than the mismatch to be measured.
    """
    train, rollout = (at_least_float32(x).masked_fill(~measured, 0.0) for x in (train_log_prob, rollout_log_prob))
    return train - rollout
