"""The line of the log that `attach` writes: the correction in force, and TRL's own before and after."""

from __future__ import annotations

from typing import Any

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.correction.overview import described
from rollcorr.integrations.trl.generation_batch import (
    DIVISORS,
    loss_type_of,
    multiplies,
    rejects,
)

THE_POLICY = "the policy itself"  # what samples where there is neither vLLM nor an engine

Trainer = Any  # one of TRL's trainers: they are not imported here


def start_up_line(trainer: Trainer) -> str:
    """Return one line: whose options, which weights, what rejects and samples, the loss's divisor, TRL's correction.

    Args:
        trainer: a trainer that was attached to.
    """
    config, loss_type = trainer._correction_config, loss_type_of(trainer)
    is_rloo, is_given = loss_type == "rloo", trainer._correction_asked is not None
    of_trl = "default, as RLOOTrainer has no options for it" if is_rloo else "TRL's vllm_importance_sampling_* options"
    name = f"{getattr(trainer, '_named_by_user', type(trainer).__name__)} ({loss_type})"
    if _sampler_text(trainer) == THE_POLICY:
        start = (
            f"rollcorr is attached to {name}, but corrects nothing: TRL's own sampler reports no log-probs; set "
            "use_vllm=True, or give attach an engine. Configuration"
        )
    elif config.only_measures:
        reason = "as configured" if is_given else f"by {of_trl}"
        start = f"rollcorr is attached to {name} and measures only, {reason}. Configuration"
    else:
        start = f"rollcorr corrects {name} by {'its own configuration' if is_given else of_trl}"
    monitored = trainer._monitored_steps
    steps = "" if monitored is None else f"; steps go to {monitored.monitor.directory.path}"
    return (
        f"{start}: {described(config)}; missing log-probs: "
        f"{'left to TRL' if config.only_measures else config.nonfinite}; sampler: {_sampler_text(trainer)}; "
        f"the loss is divided by {_divisor_text(config, loss_type)}; TRL's own correction: {_trl_text(trainer)}{steps}"
    )


def _sampler_text(trainer: Trainer) -> str:
    if getattr(trainer, "rollout_func", None) is not None:
        return "rollout_func"
    engine = getattr(getattr(trainer, "vllm_generation", None), "engine", None)
    if engine is not None:
        return type(engine).__name__
    return "vLLM" if trainer.use_vllm else THE_POLICY


def _divisor_text(config: RolloutCorrectionConfig, loss_type: str) -> str:
    if config.normalizer == "weights":
        return "the weights of the kept tokens"
    divisor = DIVISORS.get(loss_type, "what TRL chooses")
    keeps_original = config.normalizer == "original" or not rejects(config)
    return divisor.replace("kept", "original") if keeps_original else divisor


def _trl_text(trainer: Trainer) -> str:
    """Return TRL's own correction before, and the state that it has from now on."""
    if not multiplies(trainer):
        return "none"
    state = "disabled" if trainer._disable_trl_correction else "stays"
    if not trainer._correction_config.only_measures:
        state = "replaced"
    return f"{trainer.args.vllm_importance_sampling_mode}, {state}"
