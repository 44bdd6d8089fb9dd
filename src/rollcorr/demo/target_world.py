"""A task for a policy that is a table, and a training loop on it: real sampling, real corrections, no model.

A response has T tokens, and some tokens score a point. The reward is highest where the points reach a target, and falls
with the distance on both sides. So a policy that is pushed too far loses reward: what happens when the trainer does not
notice that its sampler is behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.core.advantages import grpo_advantages
from rollcorr.core.metric_registry import finalize
from rollcorr.correction import PolicyLogProbs, correct, policy_loss
from rollcorr.simulation.mismatches import PolicyPair, make_pair
from rollcorr.simulation.sequence_rows import SequenceRows, sample_rows

Sampler = Callable[[Tensor], Tensor]
"""The trainer's logits, (S, V) → those of the engine that samples."""

GROUP_SIZE = 8
EVALUATED = 256


@dataclass(frozen=True)
class TargetWorld:
    """The task and the policy's shape.

    Attributes:
        vocabulary: V.
        states: S. 1: tokens do not depend on the ones before them.
        length: T.
        target: the points that a response should have.
        spread: standard deviation of the first logits, nats; at 4 most tokens are likely ones, as in a language model.
        seed: of the policy at the start, and of sampling.
    """

    vocabulary: int = 16
    states: int = 1
    length: int = 24
    target: int = 18
    spread: float = 1.5
    seed: int = 2

    def start(self) -> PolicyPair:
        """The untrained policy, sampled by itself."""
        return make_pair(
            "noise",
            0.0,
            length=self.length,
            vocabulary=self.vocabulary,
            states=self.states,
            spread=self.spread,
            seed=self.seed,
            outcome=True,
        )

    def rewards(self, rows: SequenceRows) -> Tensor:
        """R = 1 − |points − target| / T of each response, (n,)."""
        points = rows.pair.rule.points[rows.states, rows.tokens].sum(-1)
        return (1 - (points - self.target).abs() / self.length).float()


@dataclass(frozen=True, kw_only=True)
class DemoStep:
    """What one step left.

    Attributes:
        reward: mean reward of the policy that is trained, sampled by itself before the update.
        metrics: those of the correction.
        rows: what the engine sampled.
    """

    reward: float
    metrics: dict[str, float]
    rows: SequenceRows


def train(
    world: TargetWorld,
    preset: str,
    *,
    sampler: Sampler = lambda logits: logits,
    sync_every: int = 1,
    steps: int = 60,
    batch_size: int = 128,
    learning_rate: float = 6.0,
    on_step: Callable[[], object] = lambda: None,
) -> list[DemoStep]:
    """Train the policy on what an engine samples.

    Args:
        world: the task.
        preset: the correction.
        sampler: what the engine makes of the weights that it gets.
        sync_every: steps between two updates of the engine. Above 1, rollouts are stale.
        steps: optimizer steps.
        batch_size: responses in a step, in groups of 8.
        learning_rate: of plain gradient ascent on the logits.
        on_step: called after each step.
    """
    start = world.start()
    logits = start.trainer.logits.clone().requires_grad_()
    optimizer = torch.optim.SGD([logits], lr=learning_rate)
    generator = torch.Generator(device="cpu").manual_seed(world.seed)
    groups = torch.arange(batch_size, device="cpu") // GROUP_SIZE

    engine = start.trainer
    done: list[DemoStep] = []
    for step in range(steps):
        policy = start.trainer.with_logits(logits.detach().clone())
        if step % sync_every == 0:
            engine = start.trainer.with_logits(sampler(policy.logits))

        # The engine samples. The trainer scores the same tokens, and corrects the difference.
        rows = sample_rows(replace(start, trainer=policy, rollout=engine), batch_size, generator)
        old_log_prob, rollout_log_prob = rows.train_log_prob.float(), rows.rollout_log_prob.float()
        correction = correct(old_log_prob, rollout_log_prob, rows.mask, RolloutCorrectionConfig.preset(preset))
        advantages = grpo_advantages(world.rewards(rows), groups)
        log_prob = logits.log_softmax(-1)[rows.states, rows.tokens].float()
        policies = PolicyLogProbs(log_prob=log_prob, old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob)
        loss = policy_loss(
            policies, advantages[:, None].expand(-1, world.length), rows.mask, correction=correction
        ).loss

        own = sample_rows(replace(start, trainer=policy, rollout=policy), EVALUATED, generator)
        metrics = finalize(correction.statistics.read()) if correction.statistics is not None else {}
        done.append(DemoStep(reward=float(world.rewards(own).mean()), metrics=metrics, rows=rows))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        on_step()
    return done
