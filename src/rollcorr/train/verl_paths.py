"""Paths of verl's and verl-omni's configuration files, and the options of `rollcorr train` that they set.

The correction's own options are read in every form by `rollcorr.config`; this table has the paths around it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

from rollcorr.config.checks import did_you_mean
from rollcorr.config.conversion import LOGPROBS_MODES
from rollcorr.config.secrets import redact_text


class VerlPath(NamedTuple):
    """The meaning of a path here.

    Attributes:
        option: option of `rollcorr train`; empty if there is nothing to set, because only one value makes sense here.
        values: verl's values and ours; defaults to the same values.
    """

    option: str
    values: Mapping[Any, str] | None = None


ROLLOUT, ACTOR, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.model"
OMNI = ("algo.noise_level", "algo.sde_window_size", "algo.sde_window_range")
SAMPLING = ("temperature", "top_p", "top_k")
LOSS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode")

VERL_PATHS: dict[str, VerlPath] = {
    # What a correction needs.
    f"{ROLLOUT}.calculate_log_probs": VerlPath("", {True: ""}),
    f"{ROLLOUT}.logprobs_mode": VerlPath("rollout.sampling.logprobs", LOGPROBS_MODES),
    f"{ROLLOUT}.engine_kwargs.vllm.logprobs_mode": VerlPath("rollout.sampling.logprobs", LOGPROBS_MODES),
    f"{ACTOR}.policy_loss.loss_mode": VerlPath("", {"vanilla": "", "bypass_mode": ""}),
    # Sampling.
    f"{ROLLOUT}.name": VerlPath("rollout.engine", {"hf": "transformers", "vllm": "vllm", "sglang": "sglang"}),
    **{f"{ROLLOUT}.{name}": VerlPath(f"rollout.sampling.{name}") for name in SAMPLING},
    f"{ROLLOUT}.n": VerlPath("rollout.group_size"),
    f"{ROLLOUT}.dtype": VerlPath("rollout.dtype"),
    f"{ROLLOUT}.response_length": VerlPath("rollout.max_new_tokens"),
    "data.max_response_length": VerlPath("rollout.max_new_tokens"),
    "data.train_batch_size": VerlPath("rollout.prompts_per_step"),
    # DAPO.
    "algorithm.filter_groups.enable": VerlPath("", {True: ""}),
    "reward_model.overlong_buffer.enable": VerlPath("", {True: ""}),
    "algorithm.filter_groups.max_num_gen_batches": VerlPath("rollout.max_rounds"),
    "reward_model.overlong_buffer.len": VerlPath("rollout.overlong_buffer"),
    "reward_model.overlong_buffer.penalty_factor": VerlPath("rollout.overlong_penalty"),
    # Denoising, in verl-omni.
    **{f"{ROLLOUT}.{name}": VerlPath(f"rollout.{name.removeprefix('algo.')}") for name in OMNI},
    f"{ROLLOUT}.algo.sde_type": VerlPath("", {"sde": ""}),
    f"{ROLLOUT}.algo.sample_strategy": VerlPath("rollout.sde_window", {"random": "shared"}),
    f"{MODEL}.algorithm": VerlPath("", {"flow_grpo": "", "mix_grpo": ""}),
    f"{ACTOR}.diffusion_loss.loss_mode": VerlPath("algorithm.loss.loss_mode"),
    f"{ROLLOUT}.pipeline.num_inference_steps": VerlPath("rollout.num_steps"),
    f"{ROLLOUT}.pipeline.guidance_scale": VerlPath("rollout.guidance_scale"),
    f"{ROLLOUT}.pipeline.true_cfg_scale": VerlPath("rollout.guidance_scale"),
    f"{ROLLOUT}.pipeline.height": VerlPath("model.height"),
    f"{ROLLOUT}.pipeline.width": VerlPath("model.width"),
    # Model, loss and optimizer.
    f"{MODEL}.path": VerlPath("model.path"),
    f"{MODEL}.lora_rank": VerlPath("model.lora.rank"),
    f"{MODEL}.lora_alpha": VerlPath("model.lora.alpha"),
    f"{MODEL}.target_modules": VerlPath("model.lora.target_modules"),
    "algorithm.adv_estimator": VerlPath("algorithm.advantage", {"grpo": "grpo", "flow_grpo": "grpo", "rloo": "rloo"}),
    **{f"{ACTOR}.{name}": VerlPath(f"algorithm.loss.{name}") for name in LOSS},
    f"{ACTOR}.entropy_coeff": VerlPath("algorithm.loss.entropy_coef"),
    f"{ACTOR}.kl_loss_coef": VerlPath("algorithm.loss.kl_coef"),
    **{f"{ACTOR}.optim.{name}": VerlPath(f"optim.{name}") for name in ("lr", "lr_warmup_steps", "weight_decay")},
    f"{ACTOR}.grad_clip": VerlPath("optim.max_grad_norm"),
    f"{ACTOR}.ppo_epochs": VerlPath("optim.ppo_epochs"),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": VerlPath("optim.micro_batch_size"),
    "trainer.total_training_steps": VerlPath("steps"),
    "trainer.save_freq": VerlPath("checkpoint.every"),
}
"""Path → the option that it sets."""
SECTIONS = (
    *(f"algorithm.{name}" for name in ("filter_groups.", "gamma", "kl_ctrl.", "lam", "use_kl_in_reward")),
    *(f"reward.{name}" for name in ("custom_reward_function.", "num_workers", "reward_model.")),
    *("actor_rollout_ref.", "critic.", "data.", "reward_model.", "trainer."),
)
"""First parts of verl's paths, of which none is an option here."""


def check_paths(names: Iterable[str]) -> None:
    """Check that each path of verl sets an option here.

    Raises:
        ValueError: paths have no counterpart; the message lists all of them, to leave out. For one path, perhaps
            misspelled, it also suggests the nearest.
    """
    unknown = [name for name in names if name.startswith(SECTIONS) and name not in VERL_PATHS]
    if unknown:
        hint = did_you_mean(unknown[0], VERL_PATHS) if len(unknown) == 1 else ""
        if f"{ACTOR}.ppo_mini_batch_size" in unknown:
            hint = "optim.mini_batch_size counts responses, not prompts. "
        raise ValueError(f"{hint}verl's paths without a counterpart here: leave out {redact_text(' '.join(unknown))}")


def translated(name: str, value: Any, known: Container[str]) -> tuple[str, Any]:  # noqa: ANN401 (any plain value)
    """Return the option and value of `rollcorr train` that a path of verl sets; any other name stays.

    Args:
        name: dotted name. verl-omni's pages leave the first part of `actor_rollout_ref.rollout` out.
        value: its value.
        known: options of the recipe.

    Returns:
        Name and value; the name is empty if there is nothing to set.

    Raises:
        ValueError: this recipe has no such option, or the value has no counterpart here; the message names the option
            or the values to type.
    """
    path = name if name in VERL_PATHS else f"actor_rollout_ref.{name}"
    if name in known or path not in VERL_PATHS:
        return name, value
    option, values = VERL_PATHS[path]
    if option and option not in known:
        other = "flow_grpo" if "task" in known else "grpo"
        raise ValueError(f"{name} is {option}, which this recipe does not have; leave it out, or add recipe={other}")
    if values is None:
        return option, value
    if not isinstance(value, str | bool) or value not in values:
        texts = " or ".join(f"{name}={str(one).lower()}" for one in values)
        raise ValueError(f"{name}={str(value).lower()} has no counterpart here; leave it out, or write {texts}")
    return option, values[value] or None
