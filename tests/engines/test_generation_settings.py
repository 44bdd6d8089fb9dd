"""Settings of every engine: checked once, with errors that name the value, the limit and the fix."""

import inspect

import pytest

import rollcorr.engines
from rollcorr.config import SamplingSpec
from rollcorr.engines import GenerationSettings

GIVEN = {"sampling": SamplingSpec(), "max_new_tokens": 8, "eos_token_id": 2, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0; give the length of the longest response"),
        ({"eos_token_id": -1}, "eos_token_id must be at least 0, got -1; give the tokenizer's eos_token_id"),
        (
            {"sampling": SamplingSpec(temperature=0.0)},
            "temperature must be > 0 to sample, got 0.0; greedy decoding has",
        ),
        (
            {"sampling": SamplingSpec(logprobs="processed", support="replayed")},
            "support='replayed': an engine reports log-probs over its own support; set support='engine'",
        ),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_limit_and_the_fix(change, message):
    with pytest.raises(ValueError, match=message):
        GenerationSettings(**{**GIVEN, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pad_token_id": None}, "pad_token_id must be an integer, got None of type NoneType; .* if it has none"),
        ({"max_new_tokens": True}, "max_new_tokens must be an integer, got True of type bool"),
        (
            {"sampling": {"temperature": 0.7}},
            r"sampling must be a SamplingSpec, got .* of type dict; write SamplingSpec",
        ),
    ],
)
def test_a_value_of_another_type_is_refused(change, message):
    with pytest.raises(TypeError, match=message):
        GenerationSettings(**{**GIVEN, **change})


def test_every_engine_takes_the_model_the_settings_and_at_most_six_more():
    of_pictures = {"DiffusionEngine", "SglangDiffusionEngine", "VllmOmniEngine"}
    engines = [name for name in rollcorr.engines.__all__ if name.endswith("Engine") and name != "Engine"]
    engines = sorted(set(engines) - of_pictures)
    assert len(engines) == 6
    for name in of_pictures - {"DiffusionEngine"}:
        assert {"settings", "version"} <= set(inspect.signature(getattr(rollcorr.engines, name)).parameters)
    for name in engines:
        parameters = list(inspect.signature(getattr(rollcorr.engines, name)).parameters)
        assert parameters[:2] == ["model", "settings"]
        assert "version" in parameters
        assert len(parameters) <= 8
