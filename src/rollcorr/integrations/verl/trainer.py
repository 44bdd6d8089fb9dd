"""What verl's trainer calls on its batches: correct a batch in place, or switch it to bypass mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollcorr.integrations.verl.batch import Batch, new_keys_allowed, weight_batch
from rollcorr.integrations.verl.bypass import warn_if_set_too_late
from rollcorr.integrations.verl.config import RolloutCorrectionConfig
from rollcorr.integrations.verl.correction import corrected


def compute_rollout_correction_and_add_to_batch(
    batch: Batch, rollout_corr_config: Mapping[str, Any], *, verl_parity: bool = False
) -> tuple[Batch, dict[str, float]]:
    """Replace the batch's response_mask by the loss mask, and add rollout_is_weights when weights are asked for.

    Args:
        batch: has old_log_probs, rollout_log_probs and response_mask, each (B, T).
        rollout_corr_config: any mapping with verl's keys.
        verl_parity: compute verl 0.9.1's numbers; the config's own `verl_parity` does the same.

    Returns:
        The batch, and every metric under "rollout_corr/".

    Raises:
        TypeError: an option of the wrong type.
        ValueError: an unknown key, an option outside its limits, or shapes that differ.
    """
    settings = RolloutCorrectionConfig.read(rollout_corr_config)
    if verl_parity and not settings.verl_parity:
        settings = RolloutCorrectionConfig(**{**settings, "verl_parity": True})
    tensors = batch.batch
    weights, mask, metrics = corrected(
        tensors["old_log_probs"], tensors["rollout_log_probs"], tensors["response_mask"], settings
    )
    tensors["response_mask"] = mask
    if weights is not None:
        batch = batch.union(weight_batch(weights))
    return batch, metrics


def apply_bypass_mode(
    batch: Batch,
    rollout_corr_config: Mapping[str, Any] | None = None,
    policy_loss_config: Any = None,  # noqa: ANN401 (an OmegaConf node or a dictionary)
) -> None:
    """Take the rollout log-probs as old log-probs, and tell the actor to use the bypass loss with this correction.

    verl's legacy trainer calls this in every step, when its actor has long been built: it warns then. The V1 trainer
    never calls it. `wire_bypass_mode` tells the actor in time.

    Args:
        batch: has rollout_log_probs; gets old_log_probs.
        rollout_corr_config: handed to the actor as it is.
        policy_loss_config: gets loss_mode "bypass_mode" and rollout_correction.

    Raises:
        ValueError: the batch has no rollout_log_probs, or there is no policy_loss_config to tell.
    """
    if "rollout_log_probs" not in batch.batch:
        raise ValueError("bypass_mode=True needs rollout_log_probs in the batch; set rollout.calculate_log_probs=true")
    if policy_loss_config is None:
        raise ValueError("policy_loss_config is required: the actor learns from it to use the bypass loss")
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    warn_if_set_too_late(policy_loss_config, "bypass_mode")
    with new_keys_allowed(policy_loss_config):
        policy_loss_config["rollout_correction"] = rollout_corr_config
        policy_loss_config["loss_mode"] = "bypass_mode"
