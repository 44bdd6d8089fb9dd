"""The engine that a configuration names, with its options."""

import dataclasses
import importlib
import inspect
from contextlib import closing
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch

from rollcorr.config.sampling_spec import IncompatibleSamplingError
from rollcorr.config.secrets import secret_places
from rollcorr.engines import Engine, TransformersEngine, VllmOptions
from rollcorr.train import load_config
from rollcorr.train.grpo.engine_choice import CLASSES, make_engine
from rollcorr.train.grpo.grpo_config import RolloutConfig
from rollcorr.train.grpo.grpo_recipe import GrpoRecipe


def test_the_transformers_engine_gets_what_the_rollout_section_says(micro_config, micro_policy):
    config = micro_config("rollout.dtype=float32", "rollout.batch_size=5", "rollout.sampling.top_k=-1")
    engine = make_engine(config, micro_policy, version=4)
    assert isinstance(engine, TransformersEngine)
    assert (engine.dtype, engine.batch_size, engine.weight_version) == (torch.float32, 5, 4)
    assert (engine.settings.eos_token_id, engine.settings.pad_token_id) == (
        micro_policy.eos_token_id,
        micro_policy.pad_token_id,
    )


@pytest.mark.parametrize("engine", ["transformers", "ctranslate2"])
def test_every_engine_trains(micro_trainer, engine):
    """The same check determines the kind of the engine's log-probs, so k3 shows only its precision."""
    if engine != "transformers":
        pytest.importorskip(engine, reason=f"needs rollcorr[{engine}]")
    metrics = (
        micro_trainer(f"rollout.engine={engine}", "algorithm.rollout_correction=decoupled_token_is").step(1).metrics
    )
    assert 1e-9 < metrics["rollout_corr/k3_kl"] < 1e-3
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.01)


def test_the_configuration_knows_every_engine_and_every_engine_exists():
    assert get_args(get_type_hints(RolloutConfig)["engine"]) == tuple(CLASSES)
    for place in CLASSES.values():
        module, _, name = place.partition(":")
        known = inspect.signature(getattr(importlib.import_module(module), name)).parameters
        assert {"model", "settings", "version"} <= set(known)


def test_a_server_without_an_address_is_asked_for_one(micro_config, micro_policy):
    with pytest.raises(ValueError, match=r"the engine 'sglang' needs rollout\.engine_options\.url"):
        make_engine(micro_config("rollout.engine=sglang"), micro_policy)


class EngineInProcess(Engine):
    """It has no resource to close."""


def test_an_engine_with_a_process_is_let_go_even_after_a_failure():
    def recipe(engine):
        return GrpoRecipe(SimpleNamespace(engine=engine, reference=None), directory=None)

    closed = []
    with pytest.raises(RuntimeError, match="lost"), closing(recipe(SimpleNamespace(close=lambda: closed.append(1)))):
        raise RuntimeError("lost")
    with closing(recipe(EngineInProcess())):
        closed.append(2)
    assert closed == [1, 2]


@pytest.mark.parametrize("setting", ["temperature: 0.7", "top_p: 0.9", "top_k: 20"])
def test_an_engine_with_raw_log_probs_samples_untouched_or_not_at_all(micro_config, setting):
    with pytest.raises(IncompatibleSamplingError, match="sample at temperature 1 without truncation"):
        micro_config("rollout.engine=ctranslate2", f"rollout.sampling={{{setting}}}")


def test_an_option_of_another_engine_is_not_ignored(micro_config, micro_policy):
    pytest.importorskip("ctranslate2", reason="needs rollcorr[ctranslate2]")
    with pytest.raises(ValueError, match=r"rollout\.dtype=float32 is no option of the engine 'ctranslate2'"):
        make_engine(micro_config("rollout.engine=ctranslate2", "rollout.dtype=float32"), micro_policy)


@pytest.mark.parametrize("option", ["versoin=3", "sampling=3"])
def test_an_option_that_the_engine_does_not_know_is_named(micro_config, micro_policy, option):
    name = option.partition("=")[0]
    with pytest.raises(ValueError, match=rf"rollout.engine_options.{name} is no option of the engine 'transformers'"):
        make_engine(micro_config(f"rollout.engine_options.{option}"), micro_policy)


class WithOptions:
    """An engine whose own options are in a class."""

    def __init__(self, model, settings, options: VllmOptions, *, version=0):
        self.settings, self.options, self.version = settings, options, version


def test_options_of_an_engine_that_has_a_class_for_them_reach_it(micro_config, micro_policy, monkeypatch):
    monkeypatch.setitem(CLASSES, "vllm", f"{__name__}:WithOptions")
    changes = ("rollout.engine=vllm", "rollout.dtype=float32", "rollout.engine_options={restarts: 3}")
    engine = make_engine(micro_config(*changes), micro_policy, version=4)
    assert (engine.options.dtype, engine.options.restarts, engine.version) == ("float32", 3, 4)
    assert engine.settings.max_new_tokens == micro_config().rollout.max_new_tokens
    with pytest.raises(
        ValueError, match=r"Did you mean .* rollout\.engine_options\.restart is no option of the engine 'vllm'"
    ):
        make_engine(micro_config("rollout.engine=vllm", "rollout.engine_options.restart=3"), micro_policy)


def test_options_take_values_from_the_environment_where_the_engine_is_built(micro_config, micro_policy, monkeypatch):
    monkeypatch.setitem(CLASSES, "vllm", f"{__name__}:WithOptions")
    monkeypatch.setenv("TOKEN_OF_MINE", "t0ken-value")
    config = micro_config("rollout.engine=vllm", "rollout.engine_options.env={HF_TOKEN: '${env:TOKEN_OF_MINE}'}")
    engine = make_engine(config, micro_policy)
    assert engine.options.env == {"HF_TOKEN": "t0ken-value"}
    assert "HF_TOKEN: ${env:TOKEN_OF_MINE}" in config.to_yaml()
    assert "t0ken-value" not in config.to_yaml() + repr(engine.options) + repr(config)


def test_no_option_of_a_run_by_itself_looks_like_a_secret(micro_config):
    for config in (micro_config(), load_config(None, ["recipe=flow_grpo"])):
        assert secret_places(dataclasses.asdict(config)) == []
