"""Active nulls: the same weights scored twice, as a rollout log that becomes a null."""

import pytest
import torch
from stories import load_stories

from rollcorr.config import SamplingSpec
from rollcorr.engines import GenerationSettings, TransformersEngine, measure_null, score_responses
from rollcorr.rollout_log import RolloutLogWriter

PROMPTS = [[1, 10 + i, 40 + i] for i in range(12)]


@pytest.fixture(scope="module")
def model():
    return load_stories()


def engine_of(model, *, dtype=torch.bfloat16, **sampling):
    settings = GenerationSettings(sampling=SamplingSpec(**sampling), max_new_tokens=24, eos_token_id=2, pad_token_id=0)
    return TransformersEngine(model, settings, dtype=dtype)


def spread(batch):
    log_ratio = batch.packed("old_log_prob") - batch.packed("rollout_log_prob")
    return float(log_ratio.abs().max())


def test_the_two_sides_of_an_active_null_differ_by_rounding_alone(model):
    exact = measure_null(engine_of(model, dtype=torch.float32), PROMPTS, seed=0)
    assert 0 < spread(exact) < 1e-4

    # A float32 trainer against a bfloat16 engine: the null of a run.
    def score(rollout):
        with torch.no_grad():
            return score_responses(model, rollout.tokens).log_prob

    run = measure_null(engine_of(model), PROMPTS, seed=0, score=score)
    assert 1e-3 < spread(run) < 0.5
    assert len(run) == 12
    assert run.objects("engine") == ["transformers"] * 12
    assert run.has("prompt_ids")
    assert run.has("policy_versions")


def test_a_truncated_engine_is_compared_over_what_it_kept(model):
    engine = engine_of(model, dtype=torch.float32, top_k=5, temperature=0.7, logprobs="processed")
    assert 0 < spread(measure_null(engine, PROMPTS, seed=0)) < 1e-4


def test_raw_log_probs_of_a_tempered_sampler_make_no_null(model):
    with pytest.raises(ValueError, match="logprobs='processed', or temperature=1"):
        measure_null(engine_of(model, temperature=0.7), PROMPTS, seed=0)


def test_an_active_null_is_what_check_takes(model, tmp_path):
    from rollcorr.diagnostics import null_of_logs

    with RolloutLogWriter(tmp_path / "null.parquet") as log:
        log.write(measure_null(engine_of(model), PROMPTS, seed=0))
    null = null_of_logs([tmp_path / "null.parquet"], kind="engine")
    assert null.kind == "engine"
    assert null.origin.engine == ("transformers",)
    assert 1e-6 < null.profile.k3 < 1e-2


def test_a_second_score_stands_in_for_what_the_engine_reported(model):
    def score(rollout):
        return torch.full(rollout.tokens.response_ids.shape, -1.0)

    def again(rollout):
        return torch.full(rollout.tokens.response_ids.shape, -2.0)

    batch = measure_null(engine_of(model), PROMPTS, seed=0, score=score, again=again, model="stories")
    log_ratio = batch.packed("old_log_prob") - batch.packed("rollout_log_prob")
    assert log_ratio[batch.packed("response_mask")].unique().tolist() == [1.0]
    assert batch.objects("model") == ["stories"] * 12
