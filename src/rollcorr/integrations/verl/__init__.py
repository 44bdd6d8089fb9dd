"""verl's rollout-correction functions on this library: change the import, keep the call sites.

Names, arguments and return values equal verl 0.9.1's; verl itself is not needed. `verl_parity=True` computes its
numbers where they differ. docs/coming_from/verl.md describes the switch and its effects; `install()` switches a verl
that cannot be edited. `rollcorr.integrations.verl.v2025_11` and `.v2025_10` have the functions of the two older
generations.
"""

from rollcorr.integrations.verl.bypass import apply_bypass_mode, wire_bypass_mode
from rollcorr.integrations.verl.config import SUPPORTED_ROLLOUT_RS_OPTIONS, RolloutCorrectionConfig
from rollcorr.integrations.verl.correction import (
    TensorBatch,
    compute_is_metrics,
    compute_offpolicy_metrics,
    compute_rollout_corr_metrics_from_logprobs,
    compute_rollout_correction_and_add_to_batch,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from rollcorr.integrations.verl.losses import (
    agg_loss,
    compute_policy_loss,
    compute_policy_loss_bypass_mode,
    compute_policy_loss_reinforce,
    compute_policy_loss_vanilla,
)
from rollcorr.integrations.verl.switch import install, uninstall

__all__ = [
    "SUPPORTED_ROLLOUT_RS_OPTIONS",
    "RolloutCorrectionConfig",
    "TensorBatch",
    "agg_loss",
    "apply_bypass_mode",
    "compute_is_metrics",
    "compute_offpolicy_metrics",
    "compute_policy_loss",
    "compute_policy_loss_bypass_mode",
    "compute_policy_loss_reinforce",
    "compute_policy_loss_vanilla",
    "compute_rollout_corr_metrics_from_logprobs",
    "compute_rollout_correction_and_add_to_batch",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "install",
    "uninstall",
    "wire_bypass_mode",
]
