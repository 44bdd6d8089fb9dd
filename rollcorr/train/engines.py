"""Making the engine that a run's configuration names; a heavy package is imported only when its engine is chosen."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rollcorr.engines.base import Engine
from rollcorr.train.config import RolloutConfig, TrainConfig
from rollcorr.train.policy import Policy

CLASSES = {
    "transformers": "rollcorr.engines.transformers:TransformersEngine",
    "ctranslate2": "rollcorr.engines.ctranslate2:CTranslate2Engine",
}
"""Engine by name → module and class. All take the model, `sampling`, `max_new_tokens`, `eos_token_id`, `pad_token_id`
and `version`; the rest of a class's keyword arguments are its `rollout.engine_options`."""


def make_engine(config: TrainConfig, policy: Policy, *, version: int = 0) -> Engine:
    """The engine of `rollout.engine`, holding the policy's weights.

    Args:
        config: the run.
        policy: model and tokenizer; the engine takes a copy.
        version: policy version of the weights.

    Raises:
        ValueError: `rollout.engine_options` has an option that the engine does not know, or the engine refuses a value.
        ImportError: the engine's package is missing; names the extra.
        EngineError: the engine did not start.
    """
    rollout = config.rollout
    module, _, name = CLASSES[rollout.engine].partition(":")
    engine_class = getattr(importlib.import_module(module), name)
    given: dict[str, Any] = {
        "sampling": rollout.sampling,
        "max_new_tokens": rollout.max_new_tokens,
        "eos_token_id": policy.eos_token_id,
        "pad_token_id": policy.pad_token_id,
        "version": version,
    }
    parameters = inspect.signature(engine_class).parameters.values()
    known = [option.name for option in parameters if option.kind is option.KEYWORD_ONLY]
    for name in ("dtype", "batch_size"):
        value = getattr(rollout, name)
        if name in known:
            given[name] = value
        elif value != getattr(RolloutConfig(), name):
            raise ValueError(f"rollout.{name}={value} is no option of the engine {rollout.engine!r}: leave it out")
    if rollout.engine == "transformers":
        given["dtype"] = getattr(torch, rollout.dtype)
    _check_options(rollout.engine, rollout.engine_options, [name for name in known if name not in given])
    engine: Engine = engine_class(policy.model, **given, **rollout.engine_options)
    return engine


def _check_options(engine: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            mend = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
            raise ValueError(f"rollout.engine_options.{option} is no option of the engine {engine!r}; {mend}")
