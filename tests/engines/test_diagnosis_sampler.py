"""vLLM as the sampler of experiments/diagnosis, with `fake_vllm` in the place of the package."""

import sys
from pathlib import Path

import fake_vllm
import pytest

pytest.importorskip("transformers", reason="pip install 'rollcorr[train]'")
pytest.importorskip("pyarrow", reason="pip install 'rollcorr[log]'")

LANES = Path(__file__).parents[2] / "experiments" / "diagnosis"
PROMPTS = [[1, 403, 407, 261], [1, 410]]
ASKED = {"engine": "vllm_fp32", "tokens": 6, "seed": 3}


@pytest.fixture(scope="module")
def lanes():
    """The scripts import each other by name, as scripts do."""
    sys.path.insert(0, str(LANES))
    try:
        import live_faults
        import small_model
        import vllm_sampler

        yield {module.__name__: module for module in (live_faults, small_model, vllm_sampler)}
    finally:
        sys.path.remove(str(LANES))


@pytest.fixture(scope="module")
def model(lanes):
    return lanes["small_model"].load_model()


@pytest.fixture
def sampler(lanes, monkeypatch):
    for name, value in lanes["vllm_sampler"].ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "vllm", fake_vllm)
    sampler = lanes["vllm_sampler"].VllmSampler()
    yield sampler
    sampler.close()


def other_weights(lanes, model):
    """The model with a low-rank adapter, of which vLLM must get the product."""
    adapted, parameters, _ = lanes["small_model"].with_adapter(model, rank=2, seed=0)
    for parameter in parameters:
        parameter.data += 0.05
    return adapted


def test_one_engine_samples_with_the_weights_of_each_log(lanes, model, sampler):
    tools = lanes["small_model"]
    for weights in (model, other_weights(lanes, model), model):
        drawn = sampler.sample(weights, PROMPTS, temperature=0.7, **ASKED)
        scored = tools.score(weights, PROMPTS, drawn.ids, temperature=0.7)
        for rollout, train in zip(drawn.log_prob, scored, strict=True):
            assert rollout == pytest.approx(train, abs=5e-5)
    assert len(sampler._engines) == 1


def test_another_rotary_base_gets_an_engine_of_its_own(lanes, model, sampler):
    tools = lanes["small_model"]
    other = tools.with_rope_theta(model, 20_000.0)
    drawn = sampler.sample(other, PROMPTS, **ASKED)
    sampler.sample(model, PROMPTS, **ASKED)
    assert list(sampler._engines) == [("vllm_fp32", 20_000.0), ("vllm_fp32", 10_000.0)]
    assert drawn.log_prob[0] == pytest.approx(tools.score(other, PROMPTS, drawn.ids)[0], abs=5e-5)


def test_a_weight_that_does_not_arrive_is_no_log(lanes, model, sampler, monkeypatch):
    sampler.sample(model, PROMPTS, **ASKED)
    monkeypatch.setattr(fake_vllm.Worker, "reload_weights", lambda self, *, weights_iterator: None)
    with pytest.raises(RuntimeError, match="a weight did not arrive"):
        sampler.sample(other_weights(lanes, model), PROMPTS, **ASKED)


def test_every_log_of_vllm_has_an_engine_of_vllm_and_a_null_of_it(lanes):
    faults, engines = lanes["live_faults"], lanes["vllm_sampler"].DTYPES
    names = faults.faults_of("vllm")
    asked = {faults.engine_of("vllm", fault, number) for fault in names for number in range(10)}
    assert asked == set(faults.NULL_ENGINES["vllm"]) == set(engines)

    controls = {name for name in names if name.startswith("healthy_")}
    assert controls == {f"healthy_{engine}" for engine in engines}
    assert set(names) - controls == set(faults.faults_of("model")) - {
        f"healthy_{e}" for e in faults.NULL_ENGINES["model"]
    }
    assert not any(engine in engines for engine in faults.NULL_ENGINES["model"])
