"""The three stories of `rollcorr demo`, as numbers: real sampling, real corrections, and no model.

The policy is a table. A response has T tokens, and some tokens score a point. The reward is highest where the points
reach a target, and falls with the distance on both sides. So a policy that overshoots loses reward. This happens when
the trainer does not correct for a stale sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.core.advantages import grpo_advantages
from rollcorr.correction import PolicyLogProbs, correct, policy_loss
from rollcorr.diagnostics.provenance import Provenance, estimate_provenance
from rollcorr.simulation.mismatches import make_pair
from rollcorr.simulation.sequence_rows import SequenceRows, sample_rows

LENGTH = 24
TARGET = 18
"""Points that a response should have."""
BATCH_SIZE = 128
GROUP_SIZE = 8
EVALUATED = 256
LEARNING_RATE = 6.0

TEMPERATURE = 0.7
SYNC_EVERY = 20
SEEDS = (0, 1, 2)
STEPS = 60
LAST = 20
"""Steps of a run whose log-probs are judged, and steps at the end over which a reward is averaged."""
JUDGED = 10
"""Steps at the end whose log-probs are judged."""

LANGUAGE: Mapping[str, Any] = {"vocabulary": 64, "states": 64, "spread": 4.0}
"""Peaked probabilities in 64 contexts, as a language model has them."""

ARMS: Mapping[str, str] = {
    "no correction": "measure",
    "token weights": "decoupled_token_is",
    "sequence weights": "decoupled_seq_is",
}
"""What the story of the stale sampler compares: a label, and its preset."""

Sampler = Callable[[Tensor], Tensor]
"""The trainer's logits, (S, V) → those of the engine that samples."""
OnStep = Callable[[], object]


class JudgedRollouts(NamedTuple):
    """The library's judgment of the log-probs of a run's last steps.

    Attributes:
        metrics: of the last step.
        provenance: the sampling settings that the log-probs show.
    """

    metrics: Mapping[str, float]
    provenance: Provenance


def healthy_story(on_step: OnStep = lambda: None) -> JudgedRollouts:
    """Compute a healthy run: the sampler rounds its logits to bfloat16, and otherwise equals the trainer."""
    rollouts, _ = train("measure", sampler=_round_logits, steps=LAST, on_step=on_step, **LANGUAGE)
    return _judge(rollouts)


def fault_story(on_step: OnStep = lambda: None) -> tuple[JudgedRollouts, JudgedRollouts]:
    """Compute a run whose trainer ignores the sampler's temperature, then the fix: divide its logits by it."""
    rollouts, _ = train(
        "measure", sampler=lambda logits: _round_logits(logits / TEMPERATURE), steps=LAST, on_step=on_step, **LANGUAGE
    )
    return _judge(rollouts), _judge(rollouts, temperature=TEMPERATURE)


def stale_story(on_step: OnStep = lambda: None, seeds: Sequence[int] = SEEDS) -> dict[str, list[float]]:
    """Sync weights every 20th step; return {label of an arm: its reward at each step, mean over seeds}."""
    curves = {}
    for label, preset in ARMS.items():
        rewards = [train(preset, sync_every=SYNC_EVERY, on_step=on_step, seed=seed)[1] for seed in seeds]
        curves[label] = [fmean(step) for step in zip(*rewards, strict=True)]
    return curves


def train(
    preset: str,
    *,
    sampler: Sampler = lambda logits: logits,
    sync_every: int = 1,
    steps: int = STEPS,
    on_step: OnStep,
    vocabulary: int = 16,
    seed: int = 2,
    **policy: Any,  # noqa: ANN401 (options of `make_pair`)
) -> tuple[list[SequenceRows], list[float]]:
    """Train the policy on an engine's samples, with the code of a user's training loop.

    Args:
        preset: the correction.
        sampler: maps the trainer's logits to the engine's logits. Defaults to the identity.
        sync_every: steps between two updates of the engine. Above 1, rollouts are stale.
        steps: optimizer steps.
        on_step: called after each step.
        vocabulary: V.
        seed: of the policy at the start, and of sampling.
        **policy: of the policy at the start.

    Returns:
        For each step, the engine's samples, and the mean reward of the trained policy before the update.
    """
    shape = {"length": LENGTH, "vocabulary": vocabulary, "states": 1, "spread": 1.5, "seed": seed, **policy}
    start = make_pair("noise", 0.0, outcome=True, **shape)
    logits = start.trainer.logits.clone().requires_grad_()
    optimizer = torch.optim.SGD([logits], lr=LEARNING_RATE)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    groups = torch.arange(BATCH_SIZE, device="cpu") // GROUP_SIZE

    engine = start.trainer
    rollouts: list[SequenceRows] = []
    rewards: list[float] = []
    for step in range(steps):
        policy_now = start.trainer.with_logits(logits.detach().clone())
        if step % sync_every == 0:
            engine = start.trainer.with_logits(sampler(policy_now.logits))

        # The engine samples. The trainer scores the same tokens, and corrects the difference.
        rows = sample_rows(replace(start, trainer=policy_now, rollout=engine), BATCH_SIZE, generator)
        old_log_prob, rollout_log_prob = rows.train_log_prob.float(), rows.rollout_log_prob.float()
        correction = correct(old_log_prob, rollout_log_prob, rows.mask, RolloutCorrectionConfig.preset(preset))
        log_prob = logits.log_softmax(-1)[rows.states, rows.tokens].float()
        policies = PolicyLogProbs(log_prob=log_prob, old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob)
        advantages = grpo_advantages(_compute_rewards(rows), groups)[:, None].expand(-1, LENGTH)
        loss = policy_loss(policies, advantages, rows.mask, correction=correction).loss

        own = sample_rows(replace(start, trainer=policy_now, rollout=policy_now), EVALUATED, generator)
        rollouts.append(rows)
        rewards.append(float(_compute_rewards(own).mean()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        on_step()
    return rollouts, rewards


def _compute_rewards(rows: SequenceRows) -> Tensor:
    """Compute R = 1 − |points − target| / T of each response, (n,)."""
    points = rows.pair.rule.points[rows.states, rows.tokens].sum(-1)
    return (1 - (points - TARGET).abs() / LENGTH).float()


def _round_logits(logits: Tensor) -> Tensor:
    return logits.bfloat16().double()


def _judge(rollouts: Sequence[SequenceRows], temperature: float = 1.0) -> JudgedRollouts:
    """Judge the last rollouts, with log-probs of a trainer that divides its logits by a temperature."""
    judged = rollouts[-JUDGED:]
    scored = [(rows.pair.trainer.logits / temperature).log_softmax(-1)[rows.states, rows.tokens] for rows in judged]
    reported = [rows.rollout_log_prob for rows in judged]
    metrics = correct(scored[-1], reported[-1], judged[-1].mask).metrics()
    return JudgedRollouts(metrics, estimate_provenance(torch.cat(scored), torch.cat(reported)))
