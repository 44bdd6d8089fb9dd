"""What verl's trainer calls on its batches: correct a batch in place, or switch it to bypass mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollcorr.integrations.verl.batch import Batch, weight_batch
from rollcorr.integrations.verl.bypass import take_rollout_log_probs, tell_actor
from rollcorr.integrations.verl.config import RolloutCorrectionConfig
from rollcorr.integrations.verl.correction import CorrectWith, Settings, corrected


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
    settings = RolloutCorrectionConfig.read(rollout_corr_config, verl_parity=verl_parity)
    return corrected_batch(batch, settings, corrected)


def corrected_batch(
    batch: Batch, settings: Settings, correct_with: CorrectWith[Settings]
) -> tuple[Batch, dict[str, float]]:
    """The batch with its loss mask, and weights if there are any; and the metrics, by one generation's `corrected`.

    The mask takes the place of response_mask: that is how a rejected token leaves verl's loss.
    """
    tensors = batch.batch
    weights, tensors["response_mask"], metrics = correct_with(
        tensors["old_log_probs"], tensors["rollout_log_probs"], tensors["response_mask"], settings
    )
    return batch if weights is None else batch.union(weight_batch(weights)), metrics


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
    if policy_loss_config is None:
        raise ValueError("policy_loss_config is required: the actor learns from it to use the bypass loss")
    take_rollout_log_probs(batch, option="bypass_mode")
    tell_actor(policy_loss_config, "bypass_mode", rollout_corr_config)
