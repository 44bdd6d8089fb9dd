"""Set both of verl's switches of bypass mode, and warn if only one of them is on.

`algorithm.rollout_correction.bypass_mode` makes verl's trainers use the rollout log-probs as old log-probs. The actor
chooses its loss by `actor_rollout_ref.actor.policy_loss`, which it reads once, when it is built. verl 0.9.1 leaves the
second switch off: its default (V1) trainer never sets it, and its legacy trainer sets it in the first step, in a
configuration that the actor has copied before. Rejection and `loss_type` are inert then. `wire_bypass_mode` turns the
second switch on in time; the other functions here warn if it is off.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rollcorr.config import InertOptionWarning
from rollcorr.integrations.verl.config import RolloutCorrectionConfig
from rollcorr.integrations.verl.correction import Batch

Config = Any  # the full configuration of a verl run: an OmegaConf node or nested dictionaries

ACTOR_SWITCH = """
  actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode}
  '+actor_rollout_ref.actor.policy_loss.rollout_correction=${{algorithm.rollout_correction}}'
"""


def wire_bypass_mode(config: Config) -> bool:
    """Configure the actor's bypass loss and its correction if `rollout_correction.bypass_mode` is set.

    Call it on the configuration of the run before the trainer is built; `install` does so in verl's own trainers. It
    sets the same options as verl's legacy trainer, and it warns of options that the run would ignore.

    Args:
        config: has algorithm.rollout_correction and actor_rollout_ref.actor.policy_loss. The latter gets loss_mode
            "bypass_mode" and rollout_correction. A loss_mode other than "vanilla" stays.

    Returns:
        True if the actor will use the bypass loss.

    Raises:
        TypeError: an option's type is invalid.
        ValueError: a key is unknown, an option is outside its limits, bypass mode lacks rollout log-probs, or the actor
            already has a different rollout_correction.
    """
    correction = _nested_value(config, "algorithm", "rollout_correction")
    if correction is None:
        return False

    settings = RolloutCorrectionConfig.read(correction)
    if settings.loss_type == "reinforce" and not settings.bypass_mode:  # verl accepts it silently
        _warn("loss_type='reinforce' has no effect without bypass mode; set bypass_mode=True, or loss_type='ppo_clip'")
        settings = dataclasses.replace(settings, loss_type="ppo_clip")

    # Options outside their limits fail here, before a worker is built, and those that cannot act are named.
    settings.to_config()

    log_probs = _nested_value(config, "actor_rollout_ref", "rollout", "calculate_log_probs")
    if not settings.bypass_mode:
        # Both trainers skip the correction of a batch without rollout log-probs.
        if log_probs is False:
            _warn_inert_options(settings, "with actor_rollout_ref.rollout.calculate_log_probs=False; set it to True")
        return False
    if log_probs is False:
        raise ValueError(
            "bypass_mode=True needs rollout log-probs; got actor_rollout_ref.rollout.calculate_log_probs=False. "
            "Set it to True"
        )

    # The actor's own section names its loss. Keep a loss that the user chose.
    policy_loss = _nested_value(config, "actor_rollout_ref", "actor", "policy_loss")
    if policy_loss is None:
        raise ValueError(
            "bypass_mode=True needs actor_rollout_ref.actor.policy_loss: the actor learns from it which loss to use"
        )
    loss_mode = policy_loss.get("loss_mode", "vanilla")
    if loss_mode not in ("vanilla", "bypass_mode"):
        _warn_inert_options(
            settings,
            f"in bypass mode with actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode!r}: the bypass loss alone "
            "reads it. Set loss_mode to 'bypass_mode', or bypass_mode to False",
        )
        return False

    # An actor's own correction must not differ from the algorithm's.
    of_actor = policy_loss.get("rollout_correction", None)
    for name, theirs in ({} if of_actor is None else RolloutCorrectionConfig.read(of_actor)).items():
        if settings[name] != theirs:
            raise ValueError(
                f"algorithm.rollout_correction.{name} is {settings[name]!r}, but "
                f"actor_rollout_ref.actor.policy_loss.rollout_correction.{name} is {theirs!r}. Leave the second out, "
                "or write rollout_correction: ${algorithm.rollout_correction}"
            )
    _write_policy_loss(policy_loss, "bypass_mode", correction)
    return True


def apply_bypass_mode(
    batch: Batch,
    rollout_corr_config: Mapping[str, Any] | None = None,
    policy_loss_config: Any = None,  # noqa: ANN401 (an OmegaConf node or a dictionary)
) -> None:
    """Use the rollout log-probs as old log-probs, and configure the actor's bypass loss with this correction.

    verl's legacy trainer calls this in every step, after its actor was built; it warns then. The V1 trainer never calls
    it. `wire_bypass_mode` configures the actor in time.

    Args:
        batch: has rollout_log_probs; gets old_log_probs.
        rollout_corr_config: passed to the actor unchanged.
        policy_loss_config: gets loss_mode "bypass_mode" and rollout_correction.

    Raises:
        ValueError: the batch has no rollout_log_probs, or policy_loss_config is missing.
    """
    if policy_loss_config is None:
        raise ValueError("policy_loss_config is required: the actor learns from it to use the bypass loss")
    take_rollout_log_probs(batch, option="bypass_mode")
    tell_actor(policy_loss_config, "bypass_mode", rollout_corr_config)


def take_rollout_log_probs(batch: Batch, *, option: str) -> None:
    """Set π_old := μ: use the rollout log-probs as old log-probs, as `option` requests.

    Raises:
        ValueError: the batch has no rollout_log_probs.
    """
    if "rollout_log_probs" not in batch.batch:
        raise ValueError(f"{option}=True needs rollout_log_probs in the batch; set rollout.calculate_log_probs=true")
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]


def tell_actor(policy_loss_config: Any, loss_mode: str, correction: Mapping[str, Any] | None) -> None:  # noqa: ANN401
    """Set the loss and its correction in the actor's configuration, and warn if the actor was built without them."""
    # Only verl's own trainers use an OmegaConf node, which their actors copy. A dictionary may be shared.
    built_with = policy_loss_config.get("loss_mode", "vanilla")
    if _is_omegaconf(policy_loss_config) and built_with != loss_mode:
        _warn(
            f"The actor was built with loss_mode={built_with!r} and keeps it: "
            f"verl's trainer asks for {loss_mode!r} only now, so rollout_correction does not act in this run. "
            f"{_suggest_fix(loss_mode)}"
        )
    _write_policy_loss(policy_loss_config, loss_mode, correction)


def _write_policy_loss(policy_loss: Any, loss_mode: str, correction: Mapping[str, Any] | None) -> None:  # noqa: ANN401
    unlocked: AbstractContextManager[Any] = nullcontext()
    if _is_omegaconf(policy_loss):
        from omegaconf import open_dict

        unlocked = open_dict(policy_loss)  # the nodes of a run refuse new keys
    with unlocked:
        policy_loss["rollout_correction"] = correction
        policy_loss["loss_mode"] = loss_mode


def _is_omegaconf(config: Any) -> bool:  # noqa: ANN401 (a node or a dictionary)
    return type(config).__module__.startswith("omegaconf")


def warn_if_vanilla_in_bypass(actor: Any) -> None:  # noqa: ANN401 (verl's ActorConfig, or an object like it)
    """Warn if an actor with a bypass correction uses the vanilla loss."""
    policy_loss = getattr(actor, "policy_loss", None) or {}
    correction = policy_loss.get("rollout_correction", None) or {}
    if policy_loss.get("loss_mode", None) not in (None, "bypass_mode") and correction.get("bypass_mode", False):
        _warn(
            "policy_loss.rollout_correction has bypass_mode=True, but the actor's loss_mode is "
            f"{policy_loss.get('loss_mode')!r}, which never reads it: rollout_correction does not act in this run. "
            f"{_suggest_fix('bypass_mode')}"
        )


def warn_if_not_for_bypass(correction: Mapping[str, Any]) -> None:
    """Warn if a bypass loss got a correction that is not for bypass mode, such as verl's default."""
    if correction.get("bypass_mode", None) is False:
        _warn(
            "The bypass loss got a rollout_correction with bypass_mode=False. verl fills in such a one, without "
            "rejection, when policy_loss.rollout_correction is left out; algorithm.rollout_correction does not reach "
            f"the actor. {_suggest_fix('bypass_mode')}"
        )


def _nested_value(config: Config, *names: str) -> Any:  # noqa: ANN401 (a node, a dictionary or a value)
    """Return the value under these nested names, or None if one is missing."""
    for name in names:
        config = None if config is None else config.get(name, None)
    return config


def _warn_inert_options(settings: RolloutCorrectionConfig, reason: str) -> None:
    """Warn of each option that is set but has no effect."""
    unset = {"rollout_is": None, "rollout_rs": None, "rollout_token_veto_threshold": None, "loss_type": "ppo_clip"}
    for name, nothing in unset.items():
        if settings[name] != nothing:
            _warn(f"{name}={settings[name]!r} has no effect {reason}")


def _suggest_fix(loss_mode: str) -> str:
    lines = f"Add to verl's command line:{ACTOR_SWITCH.format(loss_mode=loss_mode)}"
    if loss_mode != "bypass_mode":  # an older generation, whose options are other ones
        return lines.rstrip()
    return f"{lines}or call rollcorr.integrations.verl.wire_bypass_mode(config) before the trainer is built"


def _warn(message: str) -> None:
    # Emit all warnings from one line: Python then shows each message once per process, however often a loss is called.
    warnings.warn(message, InertOptionWarning, stacklevel=1)
