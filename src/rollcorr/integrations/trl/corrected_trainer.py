"""TRL's trainers with a correction: `class Trainer(RolloutCorrectionMixin, GRPOTrainer)`, or `attach(trainer)`.

TRL samples, scores and rewards one generation batch in `_generate_and_score_completions`, and cuts it into
micro-batches afterwards. So a correction at the end of that method reads its rank's full batch, once.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rollcorr.config import InertOptionWarning, PresetName, RolloutCorrectionConfig, SamplingSpec
from rollcorr.config.conversion import resolve
from rollcorr.config.finding import Finding
from rollcorr.config.sampling_spec import Actor
from rollcorr.correction import correct
from rollcorr.engines import Engine
from rollcorr.integrations.trl.async_correction import AsyncCorrection
from rollcorr.integrations.trl.fresh_null import add_fresh_null, check_null_every
from rollcorr.integrations.trl.generation_batch import (
    Trainer,
    group_of_all_ranks,
    loss_type_of,
    of_all_ranks,
    remove_trl_weights,
    tokens_in_loss,
    train_or_eval,
    write_to_batch,
)
from rollcorr.integrations.trl.kept_rollouts import keep_batch, make_capture
from rollcorr.integrations.trl.logged_correction import LoggedCorrection, keep_statistics
from rollcorr.integrations.trl.loss_check import check_loss
from rollcorr.integrations.trl.monitored_steps import MonitoredSteps
from rollcorr.integrations.trl.options import check_config, config_from_trl, start_up_line
from rollcorr.integrations.trl.sampling_backends import EngineGeneration, GenerationRecorder
from rollcorr.integrations.trl.truncated_sampling import (
    KEPT_SETS,
    add_kept_sets,
    replayed_scores,
    subtract_kept_mass,
)

if TYPE_CHECKING:
    from rollcorr.monitor import Monitor
    from rollcorr.monitor.capture import RolloutCapture

logger = logging.getLogger(__name__)

Asked = RolloutCorrectionConfig | PresetName | Mapping[str, Any] | None

# Model inputs other than the tokens, by their keys in TRL's batch.
MODEL_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


class RolloutCorrectionMixin(LoggedCorrection):
    """Mixin that corrects a trainer; list it before `GRPOTrainer` or `RLOOTrainer` in the bases of a class.

    Args:
        rollout_correction: a configuration, a preset's name or a dictionary. Defaults to TRL's own
            `vllm_importance_sampling_*` options (`config_from_trl`).
        rollout_engine: an engine that samples instead of vLLM. Leave `use_vllm` out then.
        rollout_monitor: counts, logs and judges each step of the trainer; see `attach`.
        disable_trl_correction: disable TRL's own weights, also with a configuration that only measures; see `attach`.
        rollout_actor: how the trainer scores truncated samples; see `attach`.
        args: passed on to TRL's method.
        kwargs: passed on to TRL's method.

    Raises:
        ValueError: TRL's loss does not support the configuration, or the engine cannot sample for this trainer.
    """

    _token_log_prob: Tensor | None
    _awaits_token_log_prob: bool
    _batch_in_loss: Mapping[str, Any]

    def __init__(
        self,
        *args: Any,  # noqa: ANN401
        rollout_correction: Asked = None,
        rollout_engine: Engine | None = None,
        rollout_monitor: Monitor | None = None,
        disable_trl_correction: bool = False,
        rollout_actor: Actor = "full",
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(*args, **kwargs)
        options = (rollout_engine, rollout_actor, rollout_monitor, disable_trl_correction)
        _set_up_trainer(self, rollout_correction, *options)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return TRL's batch, with the correction in it."""
        self._awaits_token_log_prob = loss_type_of(self) == "rloo"
        batch: dict[str, Any] = cast("Any", super())._generate_and_score_completions(inputs)
        _correct_batch(self, batch)
        self._token_log_prob = None
        add_kept_sets(getattr(self, "vllm_generation", None), batch)
        return batch

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        """Compute TRL's loss. A replay of kept sets uses the sets of these rows.

        Args:
            model: passed on to TRL's method.
            inputs: passed on to TRL's method.
            args: passed on to TRL's method.
            kwargs: passed on to TRL's method.
        """
        self._batch_in_loss = inputs
        try:
            loss: Tensor = cast("Any", super()).compute_loss(model, inputs, *args, **kwargs)
        finally:
            self._batch_in_loss = {}
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Return log-probs and entropies as TRL does, or over kept sets in a replay.

        Also keep the old log-probs of each token, because RLOO's batch contains only their sums.
        """
        trainer: Trainer = self
        generation: Any = getattr(trainer, "vllm_generation", None)
        if getattr(generation, "kept_sets", None) is None:
            scores = cast("Any", super())._get_per_token_logps_and_entropies(*args, **kwargs)
        else:
            scores = replayed_scores(self, self._batch_in_loss.get(KEPT_SETS, generation.kept_sets), *args, **kwargs)

        # TRL scores the old policy of a batch first, and the reference policy afterwards.
        if self._awaits_token_log_prob:
            self._token_log_prob, self._awaits_token_log_prob = scores[0].detach(), False
        return scores

    def _calculate_rewards(self, inputs: Any, prompts: Any, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        """As TRL's: return the rewards of all ranks. A Monitor gets only this rank's."""
        rewards: Tensor = cast("Any", super())._calculate_rewards(inputs, prompts, *args, **kwargs)
        if self._monitored_steps is not None and train_or_eval(self) == "train":
            self._monitored_steps.remember_rewards(rewards, len(prompts))
        return rewards


def attach(
    trainer: Trainer,
    config: Asked = None,
    *,
    engine: Engine | None = None,
    actor: Actor = "full",
    monitor: Monitor | None = None,
    disable_trl_correction: bool | None = None,
    sampling: SamplingSpec | None = None,
    keep_rollouts: str | os.PathLike[str] | RolloutCapture | None = None,
    null_every: int | None = None,
) -> Trainer:
    """Correct the batches of an existing trainer. Call it before `trainer.train()`.

    The trainer's class becomes a subclass of itself with `RolloutCorrectionMixin`. A log line states the correction,
    and TRL's own correction before and after. Pass all arguments in one call. A second call replaces only the given
    arguments.

    A configuration with weights or rejection replaces TRL's own correction. One that only measures does not change
    training: mask, counts, loss and correction are TRL's, bit for bit.

    Args:
        trainer: a `GRPOTrainer`, `RLOOTrainer` or `AsyncGRPOTrainer`, or one derived from them.
        config: a configuration, a preset's name or a dictionary. Defaults to the Monitor's configuration, then to an
            earlier call's, then to TRL's own `vllm_importance_sampling_*` options (`config_from_trl`).
        engine: an engine that samples instead of vLLM. Build the trainer without `use_vllm` then.
        actor: how the trainer scores tokens of an engine that truncates (top-p, top-k, min-p), with processed
            log-probs: "replay" takes the softmax over the engine's kept sets; "kept_mass" keeps TRL's full softmax and
            adds the log of the engine's kept mass to log μ. Defaults to "full", which refuses truncation.
        monitor: a `rollcorr.Monitor`, made after the trainer, on every rank. Every optimizer step of the trainer is
            a step of it, with the correction of its batch, its rewards, its loss, and TRL's own metrics as `trl/…`.
        disable_trl_correction: True disables TRL's own weights (`vllm_importance_sampling_correction`), also with a
            configuration that only measures; defaults to the earlier call's value, then to False.
        sampling: the settings of TRL's own sampler, which the Monitor records (an error without a Monitor); an engine
            has its own.
        keep_rollouts: a folder, or a `rollcorr.monitor.capture.RolloutCapture` with limits of its own. The last 20
            generation batches stay there as a rollout log, at most 2 GiB, with token ids of prompts and responses.
            Never raises or blocks.
        null_every: steps between measurements of the Monitor's null: the engine samples 8 prompts again right after a
            weight sync, and the trainer scores them. They do not change the training. Defaults to the earlier call's
            value, then to 0, none.

    Returns:
        The trainer.

    Raises:
        TypeError: the trainer has no `_generate_and_score_completions`, so it is not one of TRL's online trainers.
        ValueError: TRL's loss does not support the configuration, the engine cannot sample for this trainer, or the
            Monitor was made with a different configuration, or for different ranks; or `null_every` lacks an engine,
            a Monitor, or a distribution without truncation. Training raises it before the
            first update if the loss of a subclass ignores the correction.
    """
    is_async = loss_type_of(trainer) == "async_grpo"
    if not (is_async or hasattr(trainer, "_generate_and_score_completions")):
        raise TypeError(
            f"attach takes a GRPOTrainer, RLOOTrainer or AsyncGRPOTrainer of TRL; {type(trainer).__name__} has no "
            "_generate_and_score_completions"
        )
    if is_async and (engine is not None or disable_trl_correction or keep_rollouts is not None):
        raise ValueError(
            "engine, disable_trl_correction and keep_rollouts have no effect on AsyncGRPOTrainer, which has no "
            "correction and samples with its rollout_worker: leave them out; Monitor(rollouts=…) logs its rollouts"
        )
    if sampling is not None and monitor is None and getattr(trainer, "_monitored_steps", None) is None:
        raise ValueError(f"a Monitor records {sampling}: give attach(monitor=…) too, or leave sampling out")
    _set_up_trainer(trainer, config, engine, actor, monitor, disable_trl_correction, sampling)
    every = getattr(trainer, "_null_every", 0) if null_every is None else null_every
    check_null_every(trainer, every)
    trainer._null_every, trainer._next_null = every, 0
    if keep_rollouts is not None:
        trainer._rollout_capture = make_capture(trainer, keep_rollouts)
    if not isinstance(trainer, LoggedCorrection):
        plain, mixin = type(trainer), AsyncCorrection if is_async else RolloutCorrectionMixin
        trainer.__class__ = type(f"Corrected{plain.__name__}", (mixin, plain), {"_named_by_user": plain.__name__})
    return trainer


def _set_up_trainer(
    trainer: Trainer,
    given: Asked,
    engine: Engine | None,
    actor: Actor,
    monitor: Monitor | None,
    disable_trl_correction: bool | None,
    sampling: SamplingSpec | None = None,
) -> None:
    """Set the configuration, the engine and the Monitor, and log the active correction.

    A failed call leaves the trainer unchanged. A missing argument keeps its value of an earlier call.
    """
    earlier = getattr(trainer, "_monitored_steps", None)
    if monitor is None and earlier is not None:
        monitor = earlier.monitor
    of_monitor: Asked = None
    if monitor is not None and monitor.config_was_given:
        of_monitor = "disabled" if monitor.config is None else monitor.config
    choices = (given, of_monitor, getattr(trainer, "_correction_asked", None))
    asked = next((choice for choice in choices if choice is not None), None)
    config = _resolve_config(trainer, asked)

    # A run has one configuration, and its directory contains that of the Monitor.
    if of_monitor is not None and _resolve_config(trainer, of_monitor) != config:
        raise ValueError(
            f"the Monitor was made with {of_monitor}, and attach was given {config}: give the configuration to one of "
            "them"
        )
    if engine is None and actor != "full":
        raise ValueError(f"actor={actor!r} needs engine=: only an engine of this library reports what it kept")
    generation = None if engine is None else EngineGeneration(engine, trainer, actor)
    steps = None if monitor is None else MonitoredSteps(trainer, monitor, config, group_of_all_ranks())

    # All checks have passed: only assignments follow.
    if earlier is not None:
        trainer.remove_callback(trainer._monitor_callback)
    trainer._monitored_steps = steps
    if steps is not None:
        trainer._monitor_callback = steps.callback()
        trainer.add_callback(trainer._monitor_callback)

    if disable_trl_correction is None:
        disable_trl_correction = getattr(trainer, "_disable_trl_correction", False)
    trainer._correction_asked, trainer._correction_config = asked, config
    trainer._correction_statistics, trainer._reported_ranks = {}, set()
    trainer._token_log_prob, trainer._awaits_token_log_prob, trainer._loss_was_checked = None, False, False
    trainer._disable_trl_correction, trainer._batch_in_loss = disable_trl_correction, {}

    if generation is not None:
        trainer.vllm_generation = generation
        trainer.use_vllm = True
        trainer._last_loaded_step = -1  # TRL's mark of "no weights loaded yet"

        # "colocate" would ask vLLM itself how long a prompt may be, and any other mode asks the model's configuration.
        trainer.vllm_mode = "rollcorr"
    if (
        loss_type_of(trainer) == "rloo"
        and trainer.use_vllm
        and not isinstance(trainer.vllm_generation, GenerationRecorder)
    ):
        trainer.vllm_generation = GenerationRecorder(trainer.vllm_generation)

    # Omit the policy version: TRL numbers its own steps, and may train again on an earlier batch.
    sampler = getattr(getattr(trainer, "vllm_generation", None), "engine", None)
    known = sampling or getattr(sampler, "sampling", None)
    if steps is not None and isinstance(known, SamplingSpec):
        steps.monitor.use_config(config, sampling=dataclasses.replace(known, policy_version=None))

    if trainer.accelerator.is_main_process:
        logger.warning("%s", start_up_line(trainer))


def _resolve_config(trainer: Trainer, asked: Asked) -> RolloutCorrectionConfig:
    config = config_from_trl(trainer.args) if asked is None else resolve(asked)
    return check_config(config or RolloutCorrectionConfig.preset("measure"), loss_type_of(trainer))


def _correct_batch(trainer: Trainer, batch: dict[str, Any]) -> None:
    """Correct one generation batch, in place, and remember its statistics."""
    rollout = _rollout_log_prob(trainer, batch)

    # `correct` is a collective, so all ranks must call it or skip it together: each needs a log-prob for every token.
    fits = rollout is not None and rollout.shape == batch["completion_mask"].shape
    of_ranks = of_all_ranks(fits, group_of_all_ranks())
    if rollout is None or not all(of_ranks):
        _report_missing_log_probs(trainer, of_ranks)
        return

    config, steps, mask = trainer._correction_config, trainer._monitored_steps, tokens_in_loss(batch) != 0
    old = trainer._token_log_prob if loss_type_of(trainer) == "rloo" else batch.get("old_per_token_logps")
    if old is None:
        old = _old_log_prob(trainer, batch)

        # Without old log-probs TRL's ratio is exactly 1, and a measurement must keep it so.
        if not config.only_measures:
            batch["old_per_token_logps"] = old

    # End the run before its first update if the loss would ignore the correction.
    if not (config.only_measures or trainer._loss_was_checked) and train_or_eval(trainer) == "train":
        check_loss(trainer, batch, config, group_of_all_ranks())
        trainer._loss_was_checked = True

    old, rollout = subtract_kept_mass(getattr(trainer, "vllm_generation", None), old, rollout)
    if train_or_eval(trainer) == "train":
        keep_batch(trainer, batch, old, rollout, mask)
        add_fresh_null(trainer, batch, partial(_old_log_prob, trainer))
    # Fill with 1: TRL's own ratio is 1 outside the mask, and VESPO reads its log there.
    if steps is not None and train_or_eval(trainer) == "train":
        correction = steps.correct(batch, old, rollout, mask)
    else:
        correction = correct(old, rollout, mask, config, group=group_of_all_ranks(), fill=1.0, densities=True)
    if not config.only_measures:
        write_to_batch(trainer, batch, correction)
    elif trainer._disable_trl_correction:
        remove_trl_weights(trainer, batch)

    keep_statistics(trainer, correction)


def _rollout_log_prob(trainer: Trainer, batch: dict[str, Any]) -> Tensor | None:
    """Return the sampler's log-probs of the completions, (B, T), NaN where missing; None if it reports no log-probs."""
    if loss_type_of(trainer) != "rloo":
        # TRL converts a list of integers, such as a greedy sampler's zeros, to a tensor of integers.
        found = batch.get("sampling_per_token_logps")
        return found if found is None or found.is_floating_point() else found.float()
    recorder = getattr(trainer, "vllm_generation", None)
    return recorder.padded(batch["completion_mask"]) if isinstance(recorder, GenerationRecorder) else None


def _old_log_prob(trainer: Trainer, batch: dict[str, Any]) -> Tensor:
    """Return log π_old of the completions, by the trainer's own forward pass if TRL skipped it for an unchanged policy.

    Without vLLM, the correction needs it although TRL does not.
    """
    # Dropout must not shift the random numbers of the training.
    device = batch["completion_ids"].device
    devices = [] if device.type == "cpu" else [device]
    with torch.no_grad(), torch.random.fork_rng(devices, device_type="cuda" if not devices else device.type):
        scores = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].shape[1],
            batch_size=getattr(trainer.args, f"per_device_{train_or_eval(trainer)}_batch_size"),
            **{name: batch[name] for name in MODEL_INPUTS if name in batch},
        )
    return cast("Tensor", scores[0])


def _report_missing_log_probs(trainer: Trainer, of_ranks: list[bool]) -> None:
    """Report that this batch stays uncorrected: a warning if no rank has log-probs, else an alarm.

    Args:
        trainer: the trainer.
        of_ranks: whether each rank's sampler reported one log-prob for each token.
    """
    if not any(of_ranks):
        warnings.warn(
            "The sampler reported no log-probs, so there is nothing to correct and nothing to measure. They come from "
            "use_vllm=True, from an engine, or as 'logprobs' from rollout_func, one for each token",
            InertOptionWarning,
            stacklevel=1,
        )
        return

    names = ", ".join(f"rank {rank}" for rank, fits in enumerate(of_ranks) if not fits)
    finding = Finding(
        code="rank_without_log_probs",
        title=f"{names} reported no log-probs: no rank corrects this batch, and TRL trains on it as it is",
        reason="a correction takes the log-probs of every rank, one for each token",
        fix="return 'logprobs' for every batch on every rank",
    )
    if trainer._monitored_steps is not None:
        trainer._monitored_steps.monitor.raise_alarm(finding)
    elif trainer.accelerator.is_main_process and names not in trainer._reported_ranks:
        trainer._reported_ranks.add(names)
        logger.error("%s", finding)
