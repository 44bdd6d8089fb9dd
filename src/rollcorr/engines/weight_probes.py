"""Probe of an engine's weights during a run, which leaves the run as it was."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rollcorr.config import SamplingSpec
from rollcorr.core.sampling import KeptSets
from rollcorr.correction.weight_probe import WeightProbe

if TYPE_CHECKING:
    from rollcorr.engines.base import Engine, Rollout


@contextmanager
def untouched(model: nn.Module | None = None) -> Iterator[None]:
    """Run a block without gradients; restore the random states, and the model's modes and buffers, afterwards.

    Args:
        model: its modules keep their train or eval mode, and its buffers their values; optional.
    """
    modules = [] if model is None else [(module, module.training) for module in model.modules()]
    buffers = [] if model is None else [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 (of the caller)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)

        # `train` would also change submodules, each of which has a mode of its own.
        for module, mode in modules:
            module.training = mode


def probe_engine(
    engine: Engine, rollout: Rollout, model: nn.Module, score: Callable[[Rollout], Tensor], *, rows: int
) -> WeightProbe:
    """Probe an engine: arguments and errors are those of `Engine.probe`."""
    check_scorable(rollout.sampling)
    rollout = _first_rows(rollout, rows)
    with untouched(model):
        trained, trained_again = score(rollout), score(rollout)

        # An engine may lag behind on purpose, so it gets its own weights back.
        version = engine.weight_version
        weights = {name: weight.clone() for name, weight in engine.export_weights().items()}
        try:
            engine.update_weights(model, version=version)
            synced = engine_score(engine, rollout)
        finally:
            engine.import_weights(weights, version=version)
    return WeightProbe.of(
        sampled=rollout.rollout_log_prob,
        synced=synced,
        trained=trained,
        trained_again=trained_again,
        response_mask=rollout.tokens.response_mask,
    )


def _first_rows(rollout: Rollout, rows: int) -> Rollout:
    """Return the first rows of a rollout."""
    tokens = rollout.tokens.select(torch.arange(min(rows, len(rollout.tokens)), device="cpu"))
    names = ("rollout_log_prob", "raw_log_prob", "log_kept_mass", "policy_versions")
    columns: dict[str, Any] = {
        name: None if (value := getattr(rollout, name)) is None else value[:rows] for name in names
    }

    # Kept sets are packed: one for each sampled token.
    kept = rollout.kept
    if kept is not None:
        offsets = kept.offsets[: int(tokens.response_mask.sum()) + 1]
        kept = KeptSets(kept.ids[: int(offsets[-1])], offsets)
    return dataclasses.replace(rollout, tokens=tokens, kept=kept, **columns)


def check_scorable(sampling: SamplingSpec) -> None:
    """Raise `ValueError` if an engine's log-probs are not of the distribution that it samples from."""
    if sampling.logprobs == "raw" and (sampling.temperature != 1 or sampling.truncates):
        raise ValueError(
            f"the engine returns raw log-probs of tokens sampled at temperature {sampling.temperature:g}, top_p "
            f"{sampling.top_p:g}, top_k {sampling.top_k}; a null needs log-probs of what was sampled: set "
            "logprobs='processed', or temperature=1 without truncation"
        )


def engine_score(engine: Engine, rollout: Rollout) -> Tensor:
    """Compute the engine's own score; a truncated log-prob is the full one minus the log of the kept mass."""
    full = engine.score(rollout.tokens)
    if not engine.sampling.restricts:
        return full
    if rollout.log_kept_mass is None:
        raise ValueError(
            "the engine truncates and does not report the kept mass, so its own score does not match; sample with "
            "top_p=1, top_k=-1, min_p=0, or give a score over the kept sets"
        )
    return full - rollout.log_kept_mass.to(full.device)
