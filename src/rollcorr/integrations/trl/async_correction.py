"""TRL's `AsyncGRPOTrainer` with a correction: its loss in bypass mode, from the packed rows that it trains on.

A sample that leaves the trainer's queue is of an earlier policy, whose log-probs cannot be recomputed. So π_old is μ,
and weights and rejection depend on π_θ/μ of the current micro-batch. TRL's `compute_loss` runs as it is, for its
metrics; a forward hook reads the log-probs of the model from it, and `rollcorr.policy_loss` replaces its loss.

Symbols (docs/reference/notation.md): N packed tokens of this rank's row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from rollcorr.config import LossConfig
from rollcorr.correction import PolicyLogProbs, correct, policy_loss
from rollcorr.integrations.trl.generation_batch import Trainer, group_of_all_ranks, train_or_eval
from rollcorr.integrations.trl.logged_correction import LoggedCorrection, keep_statistics


class AsyncCorrection(LoggedCorrection):
    """Mixin of a corrected `AsyncGRPOTrainer`; `attach` adds it."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        """Return the corrected loss of one micro-batch; TRL's own if the configuration only measures.

        Args:
            model: the policy, perhaps wrapped.
            inputs: TRL's micro-batch.
            args: passed on to TRL's method.
            kwargs: passed on to TRL's method.
        """
        outputs: list[Any] = []
        handle = model.register_forward_hook(lambda module, given, output: outputs.append(output))
        try:
            loss: Tensor = cast("Any", super()).compute_loss(model, inputs, *args, **kwargs)
        finally:
            handle.remove()
        return _correct_micro_batch(self, inputs, outputs[0], loss)


def _correct_micro_batch(trainer: Trainer, inputs: Mapping[str, Tensor], outputs: Any, loss: Tensor) -> Tensor:  # noqa: ANN401
    """Measure one micro-batch, and return its corrected loss.

    Args:
        trainer: an `AsyncGRPOTrainer`.
        inputs: its micro-batch, (1, …): `token_index` (−1 on padding) is the packed position that predicts each token.
        outputs: the model's output, with log π_θ at every packed position.
        loss: TRL's own loss.
    """
    # Tokens of one completion follow each other; a completion without tokens has length 0.
    selected = inputs["token_index"] >= 0
    position = inputs["token_index"][selected]
    log_prob, rollout = outputs.log_probs.flatten()[position], inputs["old_log_probs"][selected]
    lengths = torch.bincount(inputs["segment_id"][selected])
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    mask = torch.ones_like(rollout, dtype=torch.bool)

    config, group, steps = trainer._correction_config, group_of_all_ranks(), trainer._monitored_steps
    is_counted = steps is not None and train_or_eval(trainer) == "train"
    tensors = (log_prob.detach(), rollout, mask)
    if is_counted:
        response_ids = inputs["shift_labels"].flatten()[position]
        columns = {"response_ids": response_ids, "advantages": inputs["advantages"][selected]}
        correction = steps.monitor.correct(*tensors, cu_seqlens=cu_seqlens, columns=columns, densities=True)
    else:
        correction = correct(*tensors, config, cu_seqlens=cu_seqlens, group=group, densities=True)
    keep_statistics(trainer, correction)
    if config.only_measures:
        return loss

    # TRL averages over the tokens of a micro-batch on all ranks; each rank contributes its part, and DDP averages.
    clip = LossConfig(
        clip_ratio_low=trainer.epsilon_low,
        clip_ratio_high=trainer.epsilon_high,
        clip_ratio_c=None,
        loss_agg_mode="token-mean",
    )
    corrected = policy_loss(
        PolicyLogProbs(log_prob=log_prob, rollout_log_prob=rollout),
        inputs["advantages"][selected],
        mask,
        config=config,
        loss=clip,
        whole_step=True,
        group=group or "local",
        cu_seqlens=cu_seqlens,
    )
    if is_counted:
        steps.monitor.add(corrected.statistics)
    scaled = corrected.loss * trainer.accelerator.num_processes
    if trainer.aux_loss_enabled:
        scaled = scaled + trainer.router_aux_loss_coef * outputs.aux_loss
    return scaled / trainer.current_gradient_accumulation_steps
