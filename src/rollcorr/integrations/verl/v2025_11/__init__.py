"""verl's rollout-correction functions of November 2025, on this library.

One band for rejection, at token, sequence or geometric level, and a veto; the pure loss has a function of its own.
`rollcorr.integrations.verl` has the newest; docs/coming_from/verl.md says how to switch.
"""

from rollcorr.integrations.verl.correction import compute_offpolicy_metrics, compute_rollout_corr_metrics_from_logprobs
from rollcorr.integrations.verl.losses import compute_policy_loss
from rollcorr.integrations.verl.v2025_11.config import RolloutCorrectionConfig
from rollcorr.integrations.verl.v2025_11.correction import (
    compute_is_metrics,
    compute_rollout_correction_and_add_to_batch,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
    maybe_apply_rollout_correction,
)
from rollcorr.integrations.verl.v2025_11.losses import (
    compute_policy_loss_rollout_correction_wrapper,
    compute_policy_loss_vanilla,
    compute_policy_loss_with_rollout_correction,
)

__all__ = [
    "RolloutCorrectionConfig",
    "compute_is_metrics",
    "compute_offpolicy_metrics",
    "compute_policy_loss",
    "compute_policy_loss_rollout_correction_wrapper",
    "compute_policy_loss_vanilla",
    "compute_policy_loss_with_rollout_correction",
    "compute_rollout_corr_metrics_from_logprobs",
    "compute_rollout_correction_and_add_to_batch",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "maybe_apply_rollout_correction",
]
