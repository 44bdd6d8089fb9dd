"""Write a correction into TRL's generation batch: only the tensors that its losses read.

    importance_sampling_ratio    the weights, if TRL multiplies by them (GRPO with vLLM) or reads their log (VESPO)
    advantages                   A · w, (B, T), if it does not multiply; RLOO: (B,), one weight for each sequence
    tool_mask                    the tokens in the loss (TRL's losses read completion_mask · tool_mask)
    num_items_in_batch           the divisor of cispo, dapo and vespo

Symbols (docs/reference/notation.md): B sequences, T padded completion length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig

Trainer = Any  # one of TRL's trainers: they are not imported here

COUNTED_LOSSES = ("cispo", "dapo", "vespo")  # these read num_items_in_batch
MASK_COUNTING_LOSSES = ("grpo", "sapo", "bnpo")  # these count the mask themselves


def loss_type_of(trainer: Trainer) -> str:
    """Return TRL's name of the loss; "rloo" for RLOO's, and "async_grpo" for AsyncGRPOTrainer's."""
    return getattr(trainer, "loss_type", "async_grpo" if hasattr(trainer, "rollout_queue") else "rloo")


def train_or_eval(trainer: Trainer) -> str:
    """Return the trainer's mode, as TRL names its metrics: "train" or "eval"."""
    return "train" if trainer.model.training else "eval"


def group_of_all_ranks() -> torch.distributed.ProcessGroup | None:
    """Return the group of all ranks, each with its own sequences, or None for a single process."""
    world = torch.distributed.group.WORLD if torch.distributed.is_available() else None
    return None if world is None or world.size() == 1 else world


def multiplies(trainer: Trainer) -> bool:
    """Return whether TRL multiplies its loss by `importance_sampling_ratio`. VESPO reads it in any case."""
    return bool(getattr(trainer, "use_vllm", False) and getattr(trainer, "vllm_importance_sampling_correction", False))


def of_all_ranks(value: Any, group: torch.distributed.ProcessGroup | None) -> list[Any]:  # noqa: ANN401 (any picklable value)
    """Return the values of all ranks, in rank order: a collective whose result is read on the host."""
    values = [value] * (1 if group is None else group.size())
    if group is not None:
        torch.distributed.all_gather_object(values, value, group=group)
    return values


def tokens_in_loss(batch: dict[str, Any]) -> Tensor:
    """Return the mask of the tokens that TRL's loss reads: completion_mask · tool_mask, (B, T)."""
    mask: Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def rejects(config: RolloutCorrectionConfig) -> bool:
    """Return whether any option of the configuration can remove a token from the loss."""
    removes = config.nonfinite in ("reject_token", "reject_sequence") or bool(config.criteria)
    return (removes or config.rollout_token_veto_threshold is not None) and not config.only_measures


def needs_count(config: RolloutCorrectionConfig, loss_type: str) -> bool:
    """Return whether the correction changes `num_items_in_batch`, which this loss divides by."""
    loses_tokens = rejects(config) and config.normalizer != "original"
    return loss_type in COUNTED_LOSSES and (loses_tokens or config.normalizer == "weights")


def weight_name(trainer: Trainer) -> str:
    """Return the name of the tensor in TRL's batch that carries the weights."""
    reads_ratio = loss_type_of(trainer) == "vespo" or multiplies(trainer)
    return "importance_sampling_ratio" if reads_ratio else "advantages"


def weights_reject(config: RolloutCorrectionConfig, loss_type: str) -> bool:
    """Return whether a rejected token stays in the mask with weight 0, because the loss divides by its mask."""
    return rejects(config) and config.normalizer == "original" and loss_type in MASK_COUNTING_LOSSES


def write_to_batch(trainer: Trainer, batch: dict[str, Any], correction: Any) -> None:  # noqa: ANN401
    """Write the correction into a trainer's batch, in place.

    Args:
        trainer: a `GRPOTrainer` or `RLOOTrainer`.
        batch: the return value of `_generate_and_score_completions`.
        correction: a `Correction` of this batch, with `fill=1`, or an object with the same attributes.
    """
    config, mask, weights = correction.config, tokens_in_loss(batch), correction.loss_weights
    if loss_type_of(trainer) == "rloo":
        _write_to_rloo_batch(batch, correction, mask != 0)
        return

    if weights_reject(config, trainer.loss_type):
        rejected = (mask != 0) & ~correction.loss_mask
        ones = torch.ones_like(mask, dtype=torch.float32)
        weights = (ones if weights is None else weights).masked_fill(rejected, 0.0)
    elif rejects(config):
        batch["tool_mask"] = correction.loss_mask.to(mask.dtype)

        # VESPO sums the logs of all weights without a mask, so a rejected token must leave that sum as well.
        if weights is not None and trainer.loss_type == "vespo":
            weights = weights.masked_fill(~correction.loss_mask, 1.0)

    if needs_count(config, trainer.loss_type):
        count = torch.as_tensor(correction.denominators().tokens, device=mask.device)
        batch["num_items_in_batch"] = (
            count.float() if config.normalizer == "weights" else count.to(batch["num_items_in_batch"].dtype)
        )

    if weights is None:
        remove_trl_weights(trainer, batch)
    elif weight_name(trainer) == "advantages":
        # A subclass may compute an advantage for each token.
        batch["advantages"] = batch["advantages"].reshape(len(mask), -1) * weights
    else:
        batch["importance_sampling_ratio"] = weights


def _write_to_rloo_batch(batch: dict[str, Any], correction: Any, mask: Tensor) -> None:  # noqa: ANN401
    """Write the correction into the batch of an `RLOOTrainer`, in place: only the advantages, (B,).

    The policy ratio and its clipping stay TRL's: −min(r A w, clip(r) A w) = w · −min(r A, clip(r) A), as w ≥ 0.
    """
    advantages = batch["advantages"]
    if correction.loss_weights is not None:
        # All tokens of a sequence have its weight; a sequence without a token has the fill.
        first = mask.int().argmax(dim=1, keepdim=True)
        advantages = advantages * correction.loss_weights.gather(1, first).squeeze(1)
    batch["advantages"] = advantages.masked_fill(~correction.sequence_kept, 0.0)


def remove_trl_weights(trainer: Trainer, batch: dict[str, Any]) -> None:
    """Remove TRL's own weights from a batch, in place."""
    if weight_name(trainer) == "advantages":
        return
    if trainer.loss_type == "vespo":
        batch.pop("importance_sampling_ratio", None)
    else:
        batch["importance_sampling_ratio"] = torch.ones_like(batch["completion_mask"][:, :1], dtype=torch.float32)
