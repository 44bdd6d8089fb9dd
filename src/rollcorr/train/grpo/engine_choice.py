"""Make the engine that a run's configuration names; a heavy package is imported only when its engine is chosen."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from rollcorr.engines.base import Engine
from rollcorr.train.grpo.grpo_config import GrpoConfig, RolloutConfig
from rollcorr.train.grpo.policy import Policy

CLASSES = {
    "transformers": "rollcorr.engines.transformers:TransformersEngine",
    "ctranslate2": "rollcorr.engines.ctranslate2:CTranslate2Engine",
    "vllm": "rollcorr.engines.vllm.local:VllmEngine",
    "vllm_server": "rollcorr.engines.vllm.server:VllmServerEngine",
    "sglang": "rollcorr.engines.sglang:SglangEngine",
}
"""Engine by name → module and class. All take the model, `sampling`, `max_new_tokens`, `eos_token_id`, `pad_token_id`
and `version`; the rest of a class's arguments are its `rollout.engine_options`."""


def make_engine(config: GrpoConfig, policy: Policy, *, version: int = 0) -> Engine:
    """The engine of `rollout.engine`, holding the policy's weights.

    Args:
        config: the run.
        policy: model and tokenizer; the engine takes a copy.
        version: policy version of the weights.

    Raises:
        ValueError: `rollout.engine_options` has an option that the engine does not know or lacks one that it needs, or
            the engine refuses a value.
        ImportError: the engine's package is missing; names the extra.
        EngineError: the engine did not start.
    """
    rollout = config.rollout
    module, _, name = CLASSES[rollout.engine].partition(":")
    engine_class = getattr(importlib.import_module(module), name)
    given: dict[str, Any] = {
        "model": policy.model,
        "sampling": rollout.sampling,
        "max_new_tokens": rollout.max_new_tokens,
        "eos_token_id": policy.eos_token_id,
        "pad_token_id": policy.pad_token_id,
        "version": version,
    }

    # An option that the engine does not have must not be ignored.
    known = inspect.signature(engine_class).parameters
    for name in ("dtype", "batch_size"):
        value = getattr(rollout, name)
        if name in known:
            given[name] = value
        elif value != getattr(RolloutConfig(), name):
            raise ValueError(f"rollout.{name}={value} is no option of the engine {rollout.engine!r}: leave it out")
    if rollout.engine == "transformers":
        given["dtype"] = getattr(torch, rollout.dtype)

    options = {name: parameter for name, parameter in known.items() if name not in given}
    _check_options(rollout.engine, rollout.engine_options, options)
    engine: Engine = engine_class(**given, **rollout.engine_options)
    return engine


def _check_options(engine: str, options: Mapping[str, Any], known: Mapping[str, inspect.Parameter]) -> None:
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in options:
            raise ValueError(f"the engine {engine!r} needs rollout.engine_options.{name}")
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            fix = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
            raise ValueError(f"rollout.engine_options.{option} is no option of the engine {engine!r}; {fix}")
