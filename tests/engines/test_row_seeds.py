"""One seed per row: the draw by hand, equal numbers for any batches and ranks, and engines that cannot do it."""

import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from test_transformers import CONTINUOUS, make_engine

from rollcorr.engines import row_seeds
from rollcorr.engines.base import EngineAnswerError, require_row_seeds
from rollcorr.engines.ctranslate2 import CTranslate2Engine
from rollcorr.engines.row_seeds import draw_tokens, row_seed
from rollcorr.integrations.trl.sampling_backends import EngineGeneration

PROMPTS = [[1 + row % 7] * (1 + row % 3) for row in range(32)]
TOKENS = 5


def test_a_token_is_drawn_by_inverse_distribution():
    log_prob = torch.tensor([0.5, 0.0, 0.25, 0.25]).log().expand(6, 4) + 3.0
    uniform = torch.tensor([0.0, 0.49, 0.51, 0.74, 0.76, 1 - 2**-53], dtype=torch.float64)
    assert draw_tokens(log_prob, uniform).tolist() == [0, 0, 2, 2, 3, 3]


def test_rare_tokens_of_large_vocabularies_can_be_drawn():
    scores = torch.zeros(1, 100_001)
    scores[0, -1] = math.log(1e-6)  # a share of 1e-11, below what float32 resolves
    assert draw_tokens(scores, torch.tensor([1 - 1e-12], dtype=torch.float64)).item() == 100_000


def drawn(monkeypatch, sample):
    """Run `sample` and return the numbers that each call of `generate` consumed, (rows, positions) each."""
    taken = []

    class Recorder(row_seeds.RowSampler):
        def __init__(self, seed, rows):
            super().__init__(seed, rows)
            self.numbers = []
            taken.append(self.numbers)

    def record(scores, uniform):
        taken[-1].append(uniform)
        return draw_tokens(scores, uniform)

    monkeypatch.setattr("rollcorr.engines.transformers.RowSampler", Recorder)
    monkeypatch.setattr(row_seeds, "draw_tokens", record)
    tokens = sample()
    return [torch.stack(numbers, dim=1) for numbers in taken], tokens


def rank_of_two(engine, rank):
    """TRL's sampler on one of two ranks."""
    accelerator = SimpleNamespace(process_index=rank, num_processes=2, unwrap_model=lambda model: model)
    return EngineGeneration(engine, trainer_of(accelerator))


def trainer_of(accelerator):
    return SimpleNamespace(
        accelerator=accelerator,
        model=torch.nn.Linear(1, 1),
        temperature=1.0,
        state=SimpleNamespace(global_step=3),
        args=SimpleNamespace(seed=7),
    )


@pytest.mark.parametrize(("batch_size", "calls"), [(8, 4), (1, 32)])
def test_batches_draw_the_numbers_of_one_call(micro_policy, monkeypatch, batch_size, calls):
    settings = {"dtype": torch.float32, "tokens": TOKENS, "min_new_tokens": TOKENS, "logprobs": "processed"}
    whole, expected = drawn(
        monkeypatch, lambda: make_engine(micro_policy, **settings).generate(PROMPTS, seed=5).tokens.response_ids
    )
    engine = make_engine(micro_policy, batch_size=batch_size, **settings)
    parts, tokens = drawn(monkeypatch, lambda: engine.generate(PROMPTS, seed=5).tokens.response_ids)
    assert (len(whole), len(parts)) == (1, calls)
    assert whole[0].shape == (32, TOKENS)
    assert len(whole[0].unique()) == 32 * TOKENS
    assert torch.equal(torch.cat(parts), whole[0])
    assert torch.equal(tokens, expected)


def test_two_ranks_draw_the_numbers_of_one(micro_policy, monkeypatch):
    settings = {"dtype": torch.float32, "tokens": TOKENS, "min_new_tokens": TOKENS, "logprobs": "processed"}
    engine = make_engine(micro_policy, **settings)
    alone = SimpleNamespace(process_index=0, num_processes=1, unwrap_model=lambda model: model)
    generation = EngineGeneration(engine, trainer_of(alone))
    whole, expected = drawn(monkeypatch, lambda: generation.generate(PROMPTS)[1])
    ranks, tokens = drawn(
        monkeypatch,
        lambda: [
            row
            for rank, part in enumerate((PROMPTS[:16], PROMPTS[16:]))
            for row in rank_of_two(engine, rank).generate(part)[1]
        ],
    )
    assert torch.equal(torch.cat(ranks), whole[0])
    assert tokens == expected


def test_calls_of_one_step_draw_apart(micro_policy):
    generation = rank_of_two(make_engine(micro_policy, tokens=TOKENS, logprobs="processed"), 1)
    seen = []
    generation.engine.generate = lambda prompts, *, seed, first_row: seen.append((seed, first_row)) or 1 / 0
    for rows, step in ((16, 3), (4, 3), (16, 4), (16, 3)):
        generation._trainer.state.global_step = step
        with pytest.raises(ZeroDivisionError):
            generation.generate(PROMPTS[:rows])

    # Turns with fewer rows keep the place of the rank, and the same step draws the same after a resume.
    assert [first_row for _, first_row in seen] == [16] * 4
    assert len({seed for seed, _ in seen[:3]}) == 3
    assert seen[3] == seen[0]
    assert seen[0][0] == row_seed(7, "train", 3, 0)


def test_one_seed_per_process_refuses_several_ranks(micro_policy):
    if not hasattr(transformers, "ContinuousBatchingConfig"):
        pytest.skip("this release of transformers has no log-probs from continuous batching")
    engine = make_engine(micro_policy, continuous_batching=CONTINUOUS, logprobs="processed")
    assert not CTranslate2Engine.row_seeds
    assert make_engine(micro_policy).row_seeds
    with pytest.raises(ValueError, match=r"2 ranks .* engine 'transformers'.*limit is 1 rank.*vllm_server"):
        rank_of_two(engine, 0)
    require_row_seeds(engine, 1)


def test_weights_that_are_not_numbers_raise(micro_policy):
    engine = make_engine(micro_policy, logprobs="processed")
    next(engine.model.parameters()).data.fill_(math.nan)
    with pytest.raises(EngineAnswerError, match="log-prob NaN: the weights are broken"):
        engine.generate([[1, 2]], seed=0)
