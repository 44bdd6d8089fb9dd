"""The engine that a configuration names, with the options it takes."""

import pytest
import torch

from rollcorr.engines.transformers import TransformersEngine
from rollcorr.train.engines import make_engine


def test_the_transformers_engine_gets_what_the_rollout_section_says(micro_config, micro_policy):
    config = micro_config("rollout.dtype=float32", "rollout.batch_size=5", "rollout.sampling.top_k=-1")
    engine = make_engine(config, micro_policy, version=4)
    assert isinstance(engine, TransformersEngine)
    assert (engine.dtype, engine.batch_size, engine.weight_version) == (torch.float32, 5, 4)
    assert (engine.eos_token_id, engine.pad_token_id) == (micro_policy.eos_token_id, micro_policy.pad_token_id)


@pytest.mark.parametrize("option", ["versoin=3", "sampling=3"])
def test_an_option_that_the_engine_does_not_know_is_named(micro_config, micro_policy, option):
    name = option.partition("=")[0]
    with pytest.raises(ValueError, match=rf"rollout.engine_options.{name} is no option of the engine 'transformers'"):
        make_engine(micro_config(f"rollout.engine_options.{option}"), micro_policy)
