"""TRL's trainers with a correction: `class Trainer(RolloutCorrectionMixin, GRPOTrainer)`, or `attach(trainer)`.

TRL samples, scores and rewards one generation batch in `_generate_and_score_completions`, and cuts it into
micro-batches afterwards. So a correction at the end of that method sees the whole batch of its rank, once.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rollcorr.config import InertOptionWarning, RolloutCorrectionConfig, resolve
from rollcorr.core.metric_registry import PREFIX
from rollcorr.correction import correct
from rollcorr.engines import Engine
from rollcorr.integrations.trl.generation_batch import (
    DIVISORS,
    MASK_COUNTING_LOSSES,
    check_config,
    rejects,
    tokens_in_loss,
    write_to_grpo_batch,
    write_to_rloo_batch,
)
from rollcorr.integrations.trl.importance_sampling_options import config_from_trl
from rollcorr.integrations.trl.sampling_backends import EngineGeneration, GenerationRecorder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rollcorr.core.mergeable_statistics import Statistics

logger = logging.getLogger(__name__)

Asked = RolloutCorrectionConfig | str | Mapping[str, Any] | None
Trainer = Any  # one of TRL's trainers: they are not imported here

# What a model is called with beside the tokens, as TRL puts it into its batch.
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


class RolloutCorrectionMixin:
    """Put this before `GRPOTrainer` or `RLOOTrainer` in the bases of a class.

    Args:
        rollout_correction: a configuration, a preset's name or a dictionary. None: what TRL's own
            `vllm_importance_sampling_*` options say (`config_from_trl`).
        rollout_engine: an engine that samples in the place of vLLM. Leave `use_vllm` out then.
        args: TRL's, handed on.
        kwargs: TRL's, handed on.

    Raises:
        ValueError: TRL's loss cannot do what the configuration asks for, or the engine cannot sample for this trainer.
    """

    _correction_config: RolloutCorrectionConfig
    _correction_statistics: dict[str, Statistics]
    _token_log_prob: Tensor | None
    _awaits_token_log_prob: bool

    def __init__(
        self,
        *args: Any,  # noqa: ANN401
        rollout_correction: Asked = None,
        rollout_engine: Engine | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(*args, **kwargs)
        parts = _checked_config(self, rollout_correction), _generation(self, rollout_engine)
        _start(self, *parts, follows_trl=rollout_correction is None)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch, with the correction in it."""
        self._awaits_token_log_prob = _is_rloo(self)
        batch: dict[str, Any] = cast("Any", super())._generate_and_score_completions(inputs)
        _correct_batch(self, batch)
        self._token_log_prob = None
        return batch

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """As TRL's. RLOO puts its old log-probs into the batch as sums, so those of tokens are kept here."""
        scores = cast("Any", super())._get_per_token_logps_and_entropies(*args, **kwargs)

        # While a batch is made, the old policy is scored first, and the reference policy afterwards.
        if self._awaits_token_log_prob:
            self._token_log_prob, self._awaits_token_log_prob = scores[0].detach(), False
        return scores

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """As TRL's, with the metrics of all generation batches since the last call: one transfer.

        Args:
            logs: name → number; the metrics are added.
            args: TRL's, handed on.
            kwargs: TRL's, handed on.
        """
        mode = _mode(self)
        statistics = self._correction_statistics.pop(mode, None)
        if statistics is not None:
            logs.update(statistics.metrics(prefix=PREFIX if mode == "train" else f"eval_{PREFIX}"))
        cast("Any", super()).log(logs, *args, **kwargs)


def attach(trainer: Trainer, config: Asked = None, *, engine: Engine | None = None) -> Trainer:
    """Correct the batches of a trainer that exists already. Call it before `trainer.train()`.

    The trainer's class becomes a subclass of its own with `RolloutCorrectionMixin`. One line of the log says what is
    active. Calling it again replaces the configuration.

    Args:
        trainer: a `GRPOTrainer` or `RLOOTrainer`, or one derived from them.
        config: a configuration, a preset's name or a dictionary. None: what TRL's own `vllm_importance_sampling_*`
            options say (`config_from_trl`).
        engine: an engine that samples in the place of vLLM. Build the trainer without `use_vllm` then.

    Returns:
        The trainer.

    Raises:
        TypeError: it has no `_generate_and_score_completions`, so it is none of TRL's online trainers.
        ValueError: TRL's loss cannot do what the configuration asks for, or the engine cannot sample for this trainer.
    """
    if not hasattr(trainer, "_generate_and_score_completions"):
        raise TypeError(
            f"attach takes a GRPOTrainer or RLOOTrainer of TRL; {type(trainer).__name__} has no "
            "_generate_and_score_completions"
        )
    # What is refused leaves the trainer as it was.
    parts = _checked_config(trainer, config), _generation(trainer, engine)
    if not isinstance(trainer, RolloutCorrectionMixin):
        plain = type(trainer)
        trainer.__class__ = type(f"Corrected{plain.__name__}", (RolloutCorrectionMixin, plain), {})
    _start(trainer, *parts, follows_trl=config is None)
    return trainer


def _generation(trainer: Trainer, engine: Engine | None) -> EngineGeneration | None:
    return None if engine is None else EngineGeneration(engine, trainer)


def _start(
    trainer: Trainer, config: RolloutCorrectionConfig, generation: EngineGeneration | None, *, follows_trl: bool
) -> None:
    """Put the engine in place, and say what is active."""
    trainer._correction_config = config
    trainer._correction_statistics = {}
    trainer._token_log_prob, trainer._awaits_token_log_prob = None, False

    if generation is not None:
        trainer.vllm_generation = generation
        trainer.use_vllm = True
        trainer._last_loaded_step = -1  # TRL's mark of "no weights loaded yet"

        # "colocate" would ask vLLM itself how long a prompt may be, and any other mode asks the model's configuration.
        trainer.vllm_mode = "rollcorr"
    if _is_rloo(trainer) and trainer.use_vllm and not isinstance(trainer.vllm_generation, GenerationRecorder):
        trainer.vllm_generation = GenerationRecorder(trainer.vllm_generation)

    if trainer.accelerator.is_main_process:
        logger.warning("%s", _start_up_line(trainer, follows_trl=follows_trl))


def _checked_config(trainer: Trainer, asked: Asked) -> RolloutCorrectionConfig:
    if asked is None:
        config = config_from_trl(trainer.args)
    else:
        config = resolve(asked) or RolloutCorrectionConfig.preset("measure")
    return check_config(config, _loss_type(trainer))


def _correct_batch(trainer: Trainer, batch: dict[str, Any]) -> None:
    """Correct one generation batch, in place, and remember its statistics."""
    rollout = _rollout_log_prob(trainer, batch)
    if rollout is None:
        _warn_without_log_probs()
        return

    if "old_per_token_logps" not in batch and not _is_rloo(trainer):
        batch["old_per_token_logps"] = _old_log_prob(trainer, batch)
    old = trainer._token_log_prob if _is_rloo(trainer) else batch["old_per_token_logps"]

    # Outside the mask TRL's own ratio is 1 as well, and VESPO takes its log there.
    config = trainer._correction_config
    correction = correct(old, rollout, tokens_in_loss(batch), config, group=_group(), fill=1.0)
    if _is_rloo(trainer):
        write_to_rloo_batch(batch, correction)
    else:
        write_to_grpo_batch(batch, correction, trainer.loss_type, multiplies=_multiplies(trainer))

    # Statistics merge exactly. So what is logged is that of all tokens since the last call, not a mean of means.
    statistics, mode = correction.statistics, _mode(trainer)
    assert statistics is not None
    earlier = trainer._correction_statistics.get(mode)
    trainer._correction_statistics[mode] = statistics if earlier is None else earlier.merge(statistics)


def _rollout_log_prob(trainer: Trainer, batch: dict[str, Any]) -> Tensor | None:
    """What the sampler gave the completions, (B, T); NaN where it gave nothing. None if it reported none."""
    if not _is_rloo(trainer):
        return batch.get("sampling_per_token_logps")
    recorder = getattr(trainer, "vllm_generation", None)
    return recorder.padded(batch["completion_mask"]) if isinstance(recorder, GenerationRecorder) else None


def _old_log_prob(trainer: Trainer, batch: dict[str, Any]) -> Tensor:
    """log π_old of the completions, by the trainer's own forward pass: TRL skips it where the policy has not changed.

    Without vLLM TRL has no use for it, and the correction has.
    """
    in_training = _mode(trainer) == "train"
    rows = trainer.args.per_device_train_batch_size if in_training else trainer.args.per_device_eval_batch_size
    with torch.no_grad():
        scores = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].shape[1],
            batch_size=rows,
            **{name: batch[name] for name in MODEL_INPUTS if name in batch},
        )
    old: Tensor = scores[0]
    return old


def _multiplies(trainer: Trainer) -> bool:
    """Whether TRL multiplies its loss by `importance_sampling_ratio`. VESPO reads it in any case."""
    return bool(trainer.use_vllm and trainer.vllm_importance_sampling_correction)


def _mode(trainer: Trainer) -> str:
    return "train" if trainer.model.training else "eval"


def _is_rloo(trainer: Trainer) -> bool:
    """RLOO's trainer has no choice of losses."""
    return not hasattr(trainer, "loss_type")


def _loss_type(trainer: Trainer) -> str:
    return "rloo" if _is_rloo(trainer) else trainer.loss_type


def _group() -> ProcessGroup | None:
    """All ranks, each with sequences of its own. None if this process is alone."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed.group.WORLD if torch.distributed.get_world_size() > 1 else None


def _warn_without_log_probs() -> None:
    warnings.warn(
        "The sampler reported no log-probs, so there is nothing to correct and nothing to measure. They come from "
        "use_vllm=True, from an engine, or as 'logprobs' from rollout_func",
        InertOptionWarning,
        stacklevel=1,
    )


def _start_up_line(trainer: Trainer, *, follows_trl: bool) -> str:
    """One line: whose options, which weights, what rejects, what samples, and what the loss is divided by."""
    config, loss_type = trainer._correction_config, _loss_type(trainer)
    if not follows_trl:
        source = "its own configuration"
    elif _is_rloo(trainer):
        source = "default, as RLOOTrainer has no options for it"
    else:
        source = "TRL's vllm_importance_sampling_* options"
    return (
        f"rollcorr corrects {type(trainer).__name__} ({loss_type}) by {source}: {_weights_text(config)}; "
        f"{_rejection_text(config)}; sampler: {_sampler_text(trainer)}; "
        f"the loss is divided by {_divisor_text(config, loss_type)}"
    )


def _weights_text(config: RolloutCorrectionConfig) -> str:
    if config.rollout_is is None:
        return "no weights"
    bounds = []
    if config.is_mode == "icepop":
        bounds.append(f"0 outside the band {config.rollout_is_threshold}")
    elif config.is_upper is not None:
        bounds.append(f"at most {config.is_upper:g}")
    if config.rollout_is_floor is not None:
        bounds.append(f"at least {config.rollout_is_floor:g}")
    text = ", ".join([f"{config.rollout_is} weights", *bounds])
    return text if config.weights_reach_loss else f"{text}, measured only"


def _rejection_text(config: RolloutCorrectionConfig) -> str:
    parts = [criterion.name for criterion in config.criteria]
    if config.rollout_token_veto_threshold is not None:
        parts.append(f"veto below {config.rollout_token_veto_threshold:g}")
    text = f"rejection by {', '.join(parts)}" if parts else "no rejection"
    return f"{text}, missing log-probs: {config.nonfinite}"


def _sampler_text(trainer: Trainer) -> str:
    if getattr(trainer, "rollout_func", None) is not None:
        return "rollout_func"
    engine = getattr(getattr(trainer, "vllm_generation", None), "engine", None)
    if engine is not None:
        return type(engine).__name__
    return "vLLM" if trainer.use_vllm else "the policy itself, which reports no log-probs: nothing is corrected"


def _divisor_text(config: RolloutCorrectionConfig, loss_type: str) -> str:
    divisor = DIVISORS.get(loss_type, "what TRL chooses")
    if config.normalizer == "weights":
        return "the weights of the kept tokens"
    keeps_original = config.normalizer == "original" or not rejects(config)
    if keeps_original and (loss_type in MASK_COUNTING_LOSSES or "kept" in divisor):
        return divisor.replace("kept", "original")
    return divisor
