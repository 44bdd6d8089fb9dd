"""The supervised warm-up: its loss by hand, and that it teaches."""

import math

import pytest
import torch

from rollcorr.config import SamplingSpec
from rollcorr.engines import GenerationSettings
from rollcorr.engines.transformers import TransformersEngine
from rollcorr.train.grpo.tasks import ArithmeticTask, TaskProblem
from rollcorr.train.grpo.warmup import evaluate, solution_loss, warm_up


def test_the_loss_is_the_mean_over_solution_tokens_and_the_end(micro_policy):
    """Two solutions of different length, each scored separately, token by token."""
    problems = [TaskProblem("1+1=?\n", "2", "#### 2"), TaskProblem("9=\n", "9", "9")]
    total, count = 0.0, 0
    for problem in problems:
        prompt, solution = micro_policy.encode(problem.prompt), micro_policy.encode(problem.solution)
        ids = torch.tensor([[*prompt, *solution, micro_policy.eos_token_id]])
        log_probs = micro_policy.model(ids).logits.log_softmax(-1)
        for position in range(len(prompt), ids.shape[1]):
            total -= float(log_probs[0, position - 1, ids[0, position]].detach())
            count += 1
    assert float(solution_loss(micro_policy, problems).detach()) == pytest.approx(total / count, rel=1e-5)


def test_the_warm_up_teaches_and_stops_when_told(micro_policy, monkeypatch):
    task, losses, rates = ArithmeticTask(max_operand=1), [], []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: rates.append(self.param_groups[0]["lr"]) or step(self))
    last = warm_up(
        micro_policy,
        task,
        steps=100,
        batch_size=16,
        learning_rate=0.01,
        good_enough=lambda step, loss: losses.append(loss) or step == 30,
    )
    assert (len(losses), len(rates)) == (30, 30)
    assert last == losses[-1] < 0.5 * losses[0]
    cosine = [0.005 * (1 + math.cos(math.pi * step / 100)) for step in range(30)]
    assert rates[0] == pytest.approx(cosine[0] / 20)
    assert rates[19:] == pytest.approx(cosine[19:])


def test_an_evaluation_is_repeatable_and_counts_right_answers(micro_policy):
    task = ArithmeticTask(max_operand=1)
    warm_up(micro_policy, task, steps=120, batch_size=32, learning_rate=1e-2)
    settings = GenerationSettings(
        sampling=SamplingSpec(), max_new_tokens=12,
        eos_token_id=micro_policy.eos_token_id, pad_token_id=micro_policy.pad_token_id,
    )  # fmt: skip
    engine = TransformersEngine(micro_policy.model, settings)
    first, again = (evaluate(engine, micro_policy, task, problems=32, bonus_length=8, seed=0) for _ in range(2))
    assert first == again
    assert 0 < first["accuracy"] <= 1
    assert first["accuracy"] <= first["reward"] <= 2 * first["accuracy"]
