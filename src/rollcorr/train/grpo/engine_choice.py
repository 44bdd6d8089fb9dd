"""Make the engine that a run's configuration names; a heavy package is imported only when its engine is chosen."""

from __future__ import annotations

import inspect
import pkgutil
from typing import Any, get_type_hints

import torch

from rollcorr.config.checks import unknown_name
from rollcorr.config.secrets import header_values, resolve_references
from rollcorr.engines import Engine, GenerationSettings
from rollcorr.train.grpo.grpo_config import GrpoConfig, RolloutConfig
from rollcorr.train.grpo.policy import Policy

# Engine name → module and class. Each class is called with the model, `settings` and `version`. If it has a parameter
# `options`, `rollout.engine_options` are its fields; otherwise they are further arguments.
CLASSES = {
    "transformers": "rollcorr.engines.transformers:TransformersEngine",
    "ctranslate2": "rollcorr.engines.ctranslate2:CTranslate2Engine",
    "vllm": "rollcorr.engines.vllm.offline:VllmEngine",
    "vllm_server": "rollcorr.engines.vllm.server:VllmServerEngine",
    "sglang": "rollcorr.engines.sglang:SglangEngine",
}


def make_engine(config: GrpoConfig, policy: Policy, *, version: int = 0) -> Engine:
    """Return the engine of `rollout.engine` with the policy's weights.

    Args:
        config: the run.
        policy: model and tokenizer; the engine copies the weights.
        version: policy version of the weights.

    Raises:
        ValueError: `rollout.engine_options` has an option that the engine does not know or lacks one that it needs, or
            the engine refuses a value, or an environment variable is not set.
        ImportError: the engine's package is missing; the message names the extra.
        EngineError: the engine did not start.
    """
    rollout = config.rollout
    engine_class = pkgutil.resolve_name(CLASSES[rollout.engine])
    settings = GenerationSettings(
        sampling=rollout.sampling,
        max_new_tokens=rollout.max_new_tokens,
        eos_token_id=policy.eos_token_id,
        pad_token_id=policy.pad_token_id,
    )

    # An option that the engine does not have must not be ignored.
    options_class = get_type_hints(engine_class.__init__).get("options")
    known = inspect.signature(options_class or engine_class).parameters

    given: dict[str, Any] = {}
    for name in ("dtype", "batch_size"):
        value = getattr(rollout, name)
        if name in known:
            given[name] = value
        elif value != getattr(RolloutConfig(), name):
            raise ValueError(f"rollout.{name}={value} is no option of the engine {rollout.engine!r}: leave it out")
    if rollout.engine == "transformers":
        given["dtype"] = getattr(torch, rollout.dtype)
    options = {name: known[name] for name in known if name not in {*given, "model", "settings", "version"}}
    for option, parameter in options.items():
        if parameter.default is parameter.empty and option not in rollout.engine_options:
            raise ValueError(f"the engine {rollout.engine!r} needs rollout.engine_options.{option}")
    for option in rollout.engine_options:
        if option not in options:
            raise ValueError(
                unknown_name(
                    f"rollout.engine_options.{option} is no option of the engine {rollout.engine!r}", option, options
                )
            )

    given |= engine_options(config)
    if options_class is not None:
        given = {"options": options_class(**given)}
    engine: Engine = engine_class(policy.model, settings, version=version, **given)
    return engine


def engine_options(config: GrpoConfig) -> dict[str, Any]:
    """Return `rollout.engine_options` with environment variables expanded.

    Raises:
        ValueError: a variable is not set; the message names it and the option.
    """
    options: dict[str, Any] = resolve_references(config.rollout.engine_options, "rollout.engine_options")
    if options.get("headers_env"):
        header_values(options.get("headers"), options["headers_env"])
    return options
