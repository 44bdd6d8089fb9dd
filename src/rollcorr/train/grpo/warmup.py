"""Supervised warm-up: imitate solutions until the policy is correct often enough for rewards to differ."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rollcorr.engines import Engine, TokenBatch
from rollcorr.engines.base import pad_prompts
from rollcorr.train.grpo.actor import whole_scores
from rollcorr.train.grpo.policy import Policy
from rollcorr.train.grpo.tasks import OwnReward, Task, TaskProblem, hard_gated_reward
from rollcorr.train.steps import HELD_OUT, fit


def warm_up(
    policy: Policy,
    task: Task,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int = 0,
    good_enough: Callable[[int, float], bool] = lambda step, loss: False,
) -> float:
    """Minimize −mean log π(solution | prompt) over freshly drawn problems.

    The learning rate rises over the first 20 steps and falls along a cosine to 0 at `steps`.

    Args:
        policy: trained in place.
        task: source of the problems.
        steps: number of AdamW steps at most.
        batch_size: problems per step.
        learning_rate: peak learning rate.
        seed: seeds the draw of the problems.
        good_enough: callback after each step with the number of steps and the loss; true ends the warm-up.

    Returns:
        The last loss, nats per token.
    """
    return fit(
        policy.model,
        lambda step: solution_loss(policy, task.problems(batch_size, seed=seed, step=step)),
        steps=steps,
        learning_rate=learning_rate,
        rise=20,
        betas=(0.9, 0.95),
        after_step=good_enough,
    )


def solution_loss(policy: Policy, problems: list[TaskProblem]) -> Tensor:
    """Compute −mean log π(solution and end of sequence | prompt) over the solutions' tokens, nats, 0-d."""
    tokens = _solution_tokens(policy, problems)
    log_prob = whole_scores(policy.model, tokens).log_prob
    return -log_prob.masked_fill(~tokens.response_mask, 0.0).sum() / tokens.response_mask.sum()


def evaluate(
    engine: Engine,
    policy: Policy,
    task: Task,
    *,
    problems: int,
    bonus_length: int,
    seed: int,
    own_reward: OwnReward | None = None,
) -> dict[str, float]:
    """Sample a response to each held-out problem; return the share of correct answers, mean reward and count.

    Args:
        engine: samples.
        policy: its tokenizer decodes the responses.
        task: source of the problems.
        problems: number of problems.
        bonus_length: as in the task's options.
        seed: seed of the problems and the sampling.
        own_reward: reward by another rule than `hard_gated_reward`; optional.
    """
    drawn = task.problems(problems, seed=seed, step=HELD_OUT)
    tokens = engine.generate([policy.encode(problem.prompt) for problem in drawn], seed=seed).tokens

    rewards = []
    for ids, problem in zip(tokens.to("cpu").unpadded()[1], drawn, strict=True):
        if own_reward is not None:
            rewards.append(own_reward(ids, problem))
        else:
            rewards.append(hard_gated_reward(ids, problem.answer, policy.tokenizer, bonus_length=bonus_length))
    return {
        "accuracy": sum(reward.correct for reward in rewards) / problems,
        "reward": sum(reward.value for reward in rewards) / problems,
        "problems": problems,
    }


def _solution_tokens(policy: Policy, problems: list[TaskProblem]) -> TokenBatch:
    """Return prompts and solutions as one batch; the end-of-sequence token belongs to the solution."""
    device = next(policy.model.parameters()).device
    prompt_ids, prompt_mask = pad_prompts([policy.encode(p.prompt) for p in problems], pad_token_id=policy.pad_token_id)

    if not all(problem.solution for problem in problems):
        raise ValueError(
            "the warm-up imitates solutions: add `solution` to each row of task.problems, or warm_up.steps=0"
        )

    # The policy must learn to stop, so it imitates the end of the sequence as well.
    solutions = [[*policy.encode(problem.solution), policy.eos_token_id] for problem in problems]
    width = max(map(len, solutions))
    response_ids = torch.tensor([ids + [policy.pad_token_id] * (width - len(ids)) for ids in solutions], device="cpu")
    response_mask = (
        torch.arange(width, device="cpu") < torch.tensor([len(ids) for ids in solutions], device="cpu")[:, None]
    )
    return TokenBatch(prompt_ids, prompt_mask, response_ids, response_mask).to(device)
