"""Sharded and adapted policies in engines: every parameter arrives, and a lost one is an error."""

from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import sharded_ranks
import torch
from processes import start_ranks
from sharded_ranks import adapt, grow, settings_of
from test_vllm_server import make_engine, server_of

from rollcorr.engines.base import EngineError, WeightSyncError
from rollcorr.engines.ctranslate2 import CTranslate2Engine
from rollcorr.engines.gathered_policy import gather_policy
from rollcorr.engines.response_scoring import make_probe, score_probe
from rollcorr.engines.transformers import TransformersEngine
from rollcorr.integrations.trl.sampling_backends import EngineGeneration

needs_peft = pytest.mark.skipif(
    find_spec("peft") is None, reason="peft is not installed: pip install 'rollcorr[diffusion]'"
)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("adapted", [False, pytest.param(True, marks=needs_peft)])
def test_engine_gets_exact_weights_of_sharded_policy(tmp_path, adapted):
    start_ranks(sharded_ranks.load_into_engines, tmp_path, 2, adapted)


@pytest.mark.xdist_group("ranks")
def test_engine_accepts_mixed_precision_shards(tmp_path):
    start_ranks(sharded_ranks.load_in_mixed_precision, tmp_path, 2)


@pytest.mark.xdist_group("ranks")
def test_second_rank_on_a_folder_is_refused(tmp_path):
    start_ranks(sharded_ranks.share_a_folder, tmp_path, 2)


def test_second_engine_on_a_folder_is_refused(micro_policy, tmp_path):
    with server_of(micro_policy, tmp_path / "served") as (url, _):
        first = make_engine(url, micro_policy, folder=tmp_path / "weights")
        with pytest.raises(EngineError, match=r"the weight folder .* by this process: close the earlier engine"):
            make_engine(url, micro_policy, folder=tmp_path / "weights")
        first.close()
        make_engine(url, micro_policy, folder=tmp_path / "weights").close()


def test_failed_start_releases_the_folder(micro_policy, tmp_path):
    with server_of(micro_policy, tmp_path / "served") as (url, answer):
        answer.paths.remove("/pause")
        for _ in range(2):
            with pytest.raises(RuntimeError, match="takes no weights"):
                make_engine(url, micro_policy, folder=tmp_path / "weights")


def test_plain_policy_is_returned_itself(micro_policy):
    assert gather_policy(micro_policy.model) is micro_policy.model


@needs_peft
class TestAdapters:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_merged_weights_equal_merge_and_unload(self, micro_policy, dtype):
        model = adapt(micro_policy.model).to(dtype)
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        merged = dict(gather_policy(model).named_parameters())

        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
        expected = dict(model.float().merge_and_unload().named_parameters())
        assert merged.keys() == expected.keys()
        for name, weight in merged.items():
            torch.testing.assert_close(weight, expected[name], atol=1e-6, rtol=0)

    @pytest.mark.parametrize("engine_class", [TransformersEngine, CTranslate2Engine])
    def test_engine_samples_from_merged_adapters(self, micro_policy, engine_class):
        probe, model = make_probe(micro_policy.model), adapt(micro_policy.model)
        exact = {"dtype": torch.float32} if engine_class is TransformersEngine else {"compute_type": "float32"}
        engine = engine_class(model, settings_of(micro_policy), **exact)
        grow(model)
        engine.update_weights(model, version=1)
        expected = score_probe(model.eval(), probe, dtype=torch.float32)
        torch.testing.assert_close(engine.score(probe), expected, atol=1e-5, rtol=0)

    def test_server_gets_merged_adapters(self, micro_policy, tmp_path):
        with server_of(micro_policy, tmp_path / "served") as (url, _):
            model = adapt(micro_policy.model)
            engine = make_engine(url, replace(micro_policy, model=model), folder=tmp_path / "weights")
            assert not any("lora" in name for name in engine.export_weights())
            expected = score_probe(model.eval(), engine._probe, dtype=torch.float32)
            torch.testing.assert_close(engine.score(engine._probe), expected, atol=1e-5, rtol=0)

    def test_trl_adapter_sends_merged_adapters(self, micro_policy):
        model, probe = adapt(micro_policy.model), make_probe(micro_policy.model)
        engine = TransformersEngine(model, settings_of(micro_policy), dtype=torch.float32)
        trainer = SimpleNamespace(
            model=model,
            temperature=1.0,
            accelerator=SimpleNamespace(unwrap_model=lambda wrapped: wrapped, num_processes=1),
            state=SimpleNamespace(global_step=3),
        )
        grow(model)
        EngineGeneration(engine, trainer).sync_weights()
        expected = score_probe(model.eval(), probe, dtype=torch.float32)
        torch.testing.assert_close(engine.score(probe), expected, atol=1e-5, rtol=0)
        assert engine.weight_version == 3

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_zeroed_adapter_raises(self, micro_policy, monkeypatch, dtype):
        from peft.tuners.lora import Linear

        model = adapt(micro_policy.model, scale=0.05)
        engine = TransformersEngine(model, settings_of(micro_policy), dtype=dtype)
        delta = Linear.get_delta_weight
        monkeypatch.setattr(Linear, "get_delta_weight", lambda self, name: torch.zeros_like(delta(self, name)))
        with pytest.raises(WeightSyncError, match="nats between its plain copy and policy"):
            engine.update_weights(model, version=1)
        assert engine.weight_version == 0

    def test_unmergeable_adapters_are_refused(self, micro_policy):
        micro_policy.model.peft_config = {}
        with pytest.raises(ValueError, match="cannot be merged"):
            gather_policy(micro_policy.model)
