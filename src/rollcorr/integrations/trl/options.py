"""Convert TRL's options and losses to this library's configuration, and to the log line that `attach` writes.

    mode                  rollout_is    rollout_is_threshold     rollout_is_floor
    token_truncate        token         clip_max                 clip_min
    token_mask            token         "clip_min_clip_max"      –
    sequence_truncate     sequence      clip_max                 clip_min
    sequence_mask         sequence      "clip_min_clip_max"      –

A bound of None in TRL is an open side here. TRL reads a missing log-prob as a ratio of 1, so `nonfinite` is "neutral".
"""

from __future__ import annotations

from typing import Any

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.correction_options import KERNEL_SAFETY_BOUND
from rollcorr.config.criteria import Threshold
from rollcorr.correction.overview import described
from rollcorr.integrations.trl.generation_batch import Trainer, loss_type_of, multiplies, rejects

# The divisor of each TRL loss, as the log line names it.
DIVISORS = {
    "grpo": "the kept tokens of each sequence, then all sequences",
    "sapo": "the kept tokens of each sequence, then all sequences",
    "bnpo": "the kept tokens of the micro-batch",
    "dr_grpo": "a constant",
    "luspo": "all sequences",
    "cispo": "the kept tokens",
    "dapo": "the kept tokens",
    "vespo": "the kept tokens",
    "rloo": "all sequences",
    "async_grpo": "the kept tokens of the micro-batch",
}
THE_POLICY = "the policy itself"  # the sampler without vLLM and without an engine

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def config_from_trl(args: Any) -> RolloutCorrectionConfig:  # noqa: ANN401 (a GRPOConfig, or an object like it)
    """Return TRL's options as a configuration: weights at one level, truncated or zeroed outside a band, no rejection.

    Args:
        args: has `vllm_importance_sampling_correction`, `_mode`, `_clip_max` and `_clip_min`, or the older `_cap`, as
            TRL's `GRPOConfig` does. TRL's `RLOOConfig` lacks them.

    Returns:
        The configuration. If TRL does not correct, it only measures: the preset `measure`.

    Raises:
        ValueError: the mode is unknown, or a bound is invalid.

    Example:
        >>> from types import SimpleNamespace
        >>> args = SimpleNamespace(
        ...     vllm_importance_sampling_correction=True,
        ...     vllm_importance_sampling_mode="sequence_mask",
        ...     vllm_importance_sampling_clip_max=3.0,
        ...     vllm_importance_sampling_clip_min=None,
        ... )
        >>> config = config_from_trl(args)
        >>> config.rollout_is, config.rollout_is_threshold
        ('sequence', '0_3.0')
    """
    if not getattr(args, "vllm_importance_sampling_correction", False):
        return RolloutCorrectionConfig.preset("measure").with_options(nonfinite="neutral")

    mode = args.vllm_importance_sampling_mode
    if mode not in MODES:
        raise ValueError(f"vllm_importance_sampling_mode must be one of {', '.join(MODES)}; got {mode!r}")
    level, constraint = mode.split("_")

    # TRL copies the older name into the newer one; an object that has only the older one means the same.
    cap = getattr(args, "vllm_importance_sampling_cap", None)
    upper = getattr(args, "vllm_importance_sampling_clip_max", None) if cap is None else cap

    # No ratio is below 0, so such a bound is an open side.
    lower = getattr(args, "vllm_importance_sampling_clip_min", None)
    lower = None if lower is None or lower <= 0 else lower

    threshold: Threshold | None = upper
    if constraint == "mask" and (lower is not None or upper is not None):
        threshold = f"{'0' if lower is None else lower}_{'inf' if upper is None else upper}"
    return RolloutCorrectionConfig(
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_is_floor=lower if constraint == "truncate" else None,
        nonfinite="neutral",
        # TRL has no such bound. The largest one that the compiled kernels take is far beyond any useful weight.
        safety_bound=KERNEL_SAFETY_BOUND,
    )


def check_config(config: RolloutCorrectionConfig, loss_type: str) -> RolloutCorrectionConfig:
    """Return the configuration for one of TRL's losses ("rloo" for RLOO's), limited to the options it supports.

    RLOO has one ratio for each sequence, so a token cannot leave it: a missing log-prob rejects its sequence there.

    Raises:
        ValueError: the loss does not support the configuration; the message names the fix.
    """
    is_rloo, weighted = loss_type == "rloo", config.weights_reach_loss
    token_criteria = [criterion.name for criterion in config.criteria if criterion.scope == "token"]
    # (condition, reason why TRL's loss does not support it, with the option to set instead)
    refused = [
        (
            loss_type == "async_grpo" and not (config.bypass_mode or config.only_measures),
            "bypass_mode=False needs π_old, which AsyncGRPOTrainer cannot recompute: a sample from its queue is of "
            "an earlier policy. Set bypass_mode=True, as in the preset 'bypass_pg_is'",
        ),
        (
            config.bypass_mode and loss_type != "async_grpo",
            "bypass_mode=True replaces the old log-probs in the loss, which this adapter leaves to TRL; "
            "set bypass_mode=False",
        ),
        (
            config.normalizer == "weights" and loss_type not in ("cispo", "dapo", "async_grpo"),
            f"normalizer='weights' needs loss_type 'cispo' or 'dapo', which divide by a count; got {loss_type!r}. "
            "Set normalizer='kept'",
        ),
        (
            loss_type == "vespo" and weighted and config.rollout_is != "token",
            f"loss_type='vespo' multiplies the weights of a sequence's tokens itself; got "
            f"rollout_is={config.rollout_is!r}. Set rollout_is='token'; in TRL's options, "
            "vllm_importance_sampling_mode='token_truncate'",
        ),
        (
            is_rloo and weighted and config.weighs_tokens,
            f"RLOOTrainer's loss has one ratio for each sequence, so rollout_is={config.rollout_is!r} cannot weight "
            "it; set rollout_is='sequence' or 'geometric'",
        ),
        (
            is_rloo and bool(token_criteria),
            f"RLOOTrainer's loss cannot leave out single tokens; got rollout_rs={','.join(token_criteria)!r}. "
            "Use a criterion of a sequence, such as 'seq_max_k2'",
        ),
    ]
    for applies, reason in refused:
        if applies:
            raise ValueError(reason)
    rejects_tokens = is_rloo and config.nonfinite == "reject_token" and not config.only_measures
    return config.with_options(nonfinite="reject_sequence") if rejects_tokens else config


def start_up_line(trainer: Trainer) -> str:
    """Return one line: source of the options, weights, rejection, sampler, the loss's divisor, TRL's correction.

    Args:
        trainer: a trainer that was attached to.
    """
    config, loss_type = trainer._correction_config, loss_type_of(trainer)

    # The sampler, which decides whether log-probs exist.
    engine = getattr(getattr(trainer, "vllm_generation", None), "engine", None)
    sampler = "vLLM" if getattr(trainer, "use_vllm", False) else THE_POLICY
    sampler = "rollout_worker" if loss_type == "async_grpo" else sampler
    sampler = sampler if engine is None else type(engine).__name__
    sampler = sampler if getattr(trainer, "rollout_func", None) is None else "rollout_func"

    # The source of the options, and whether they change the training.
    is_given = trainer._correction_asked is not None
    is_rloo = loss_type == "rloo"
    of_trl = "default, as RLOOTrainer has no options for it" if is_rloo else "TRL's vllm_importance_sampling_* options"
    name = f"{getattr(trainer, '_named_by_user', type(trainer).__name__)} ({loss_type})"
    start = f"rollcorr corrects {name} by {'its own configuration' if is_given else of_trl}"
    if sampler == THE_POLICY:
        start = (
            f"rollcorr is attached to {name}, but corrects nothing: TRL's own sampler reports no log-probs; set "
            "use_vllm=True, or give attach an engine. Configuration"
        )
    elif config.only_measures:
        reason = "as configured" if is_given else f"by {of_trl}"
        start = f"rollcorr is attached to {name} and measures only, {reason}. Configuration"

    divisor = DIVISORS.get(loss_type, "what TRL chooses")
    if config.normalizer == "weights":
        divisor = "the weights of the kept tokens"
    elif config.normalizer == "original" or not rejects(config):
        divisor = divisor.replace("kept", "original")

    # TRL's own correction, before and after.
    own, measured_state = "none", "disabled" if trainer._disable_trl_correction else "stays"
    if multiplies(trainer):
        state = measured_state if config.only_measures else "replaced"
        own = f"{trainer.args.vllm_importance_sampling_mode}, {state}"

    steps = trainer._monitored_steps
    return (
        f"{start}: {described(config)}; missing log-probs: "
        f"{'left to TRL' if config.only_measures else config.nonfinite}; sampler: {sampler}; "
        f"the loss is divided by {divisor}; TRL's own correction: {own}"
        f"{'' if steps is None else f'; steps go to {steps.monitor.directory.path}'}"
    )
