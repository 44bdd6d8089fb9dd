"""A GRPO loop as a user writes it after README and docs/tutorials/own_loop.md; it writes a rollout log.

It uses the public interface only, and no fault is in it: `loop_faults.py` overrides single methods.
"""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path

import torch
from judge_engine import Rollout, engine_copy, sample, trainer_log_prob
from judge_tasks import EOS, PAD, Task
from torch import Tensor, nn

from rollcorr import (
    PolicyLogProbs,
    RolloutBatch,
    RolloutLogWriter,
    SamplingSpec,
    correct,
    grpo_advantages,
    policy_loss,
)

NULL_TOKENS = 12_000
"""docs/guides/null.md asks for 10,000."""


class Loop:
    """One run: sample, score, log, update, sync.

    Args:
        task: the task.
        seed: seeds prompts, draws, dropout and the order of rows.
        start: the trainer's weights before the first update.
        steps: number of steps; defaults to the task's.
        rows: responses per step; defaults to the task's.
    """

    def __init__(
        self, task: Task, seed: int, start: dict[str, Tensor], *, steps: int | None = None, rows: int | None = None
    ) -> None:
        torch.manual_seed(1000 + seed)
        self.task, self.seed = task, seed
        self.steps, self.rows = steps or task.steps, rows or task.rows
        self.generator = torch.Generator().manual_seed(seed)
        self.trainer = task.build().eval()
        self.trainer.load_state_dict(start)
        self.optimizer = torch.optim.Adam(self.trainer.parameters(), lr=task.learning_rate)
        self.sampler: nn.Module = engine_copy(self.trainer, task.engine)

    # ------------------------------------------------------------------ the five places where a run can go wrong

    def sync(self, step: int) -> None:
        """Give the sampler the trainer's weights, before the samples of `step` are drawn."""
        self.sampler = engine_copy(self.trainer, self.task.engine)

    def sample(self, prompts: Tensor) -> Rollout:
        """Draw responses and their log-probs from the sampler."""
        return sample(
            self.sampler,
            prompts,
            width=self.task.width,
            generator=self.generator,
            temperature=self.task.temperature,
        )

    def log_probs(self, prompts: Tensor, ids: Tensor) -> Tensor:
        """Return the trainer's log-probs (B, T), with a graph."""
        return trainer_log_prob(self.trainer, prompts, ids, temperature=self.task.temperature)

    def reported(self, rollout: Rollout) -> Tensor:
        """Return the sampler's log-probs (B, T) as they arrive at the trainer."""
        return rollout.log_prob

    def settings(self) -> SamplingSpec:
        """Return the sampling settings as the user knows them."""
        return SamplingSpec(temperature=self.task.temperature, logprobs="processed", engine="own")

    # ---------------------------------------------------------------------------------------------- the run itself

    def prompts(self) -> tuple[Tensor, Tensor]:
        """Return the prompts of a step, one per group and repeated (B, P), and the groups (B,)."""
        groups = self.rows // self.task.group
        drawn = self.task.prompts(groups, self.seed, self.generator)
        return drawn.repeat_interleave(self.task.group, dim=0), torch.arange(self.rows) // self.task.group

    def batch(
        self, step: int, prompts: Tensor, rollout: Rollout, old_log_prob: Tensor, **columns: object
    ) -> RolloutBatch:
        """Return the rows of a step for the log."""
        return RolloutBatch.from_padded(
            rollout.mask,
            prompt_mask=torch.ones_like(prompts, dtype=torch.bool),
            rollout_log_prob=self.reported(rollout),
            old_log_prob=old_log_prob,
            response_ids=rollout.ids,
            prompt_ids=prompts,
            step=step,
            sampling=self.settings(),
            model=f"{self.task.name}-policy",
            **columns,
        )

    def step(self, step: int, log: RolloutLogWriter) -> float:
        """Do one step and append its rows to the log. Returns the mean reward."""
        self.sync(step)
        prompts, groups = self.prompts()
        rollout = self.sample(prompts)
        rewards = self.task.reward(prompts, rollout.ids, rollout.mask)

        # Scored before the first update, as the tutorial asks.
        with torch.no_grad():
            old_log_prob = self.log_probs(prompts, rollout.ids)
        log.write(self.batch(step, prompts, rollout, old_log_prob, reward=rewards, group_id=groups))

        # One optimizer step per mini-batch.
        correction = correct(old_log_prob, self.reported(rollout), rollout.mask, "tis")
        advantages = grpo_advantages(rewards, groups)
        order = torch.randperm(self.rows, generator=self.generator)
        for rows in order.split(self.rows // self.task.mini_batches):
            part = correction.mini_batch(rows)
            policies = PolicyLogProbs(
                log_prob=self.log_probs(prompts[rows], rollout.ids[rows]),
                old_log_prob=old_log_prob[rows],
                rollout_log_prob=self.reported(rollout)[rows],
            )
            output = policy_loss(policies, advantages[rows], rollout.mask[rows], correction=part)
            self.optimizer.zero_grad()
            output.loss.backward()
            nn.utils.clip_grad_norm_(self.trainer.parameters(), 1.0)
            self.optimizer.step()
        return float(rewards.mean())

    def run(self, path: Path) -> list[float]:
        """Train and write the rollout log. Returns the rewards of the steps."""
        with RolloutLogWriter(path) as log:
            return [self.step(number, log) for number in range(1, self.steps + 1)]

    def write_null(self, path: Path, *, tokens: int = NULL_TOKENS) -> None:
        """Write rollouts of the start policy, scored before any update: the log to measure a null from."""
        with RolloutLogWriter(path) as log:
            written = 0
            while written < tokens:
                prompts, groups = self.prompts()
                rollout = self.sample(prompts)
                with torch.no_grad():
                    log.write(self.batch(0, prompts, rollout, self.log_probs(prompts, rollout.ids), group_id=groups))
                written += int(rollout.mask.sum())


def supervised(model: nn.Module, task: Task, seed: int, steps: int) -> None:
    """Train on right answers: the start from which reinforcement learning goes on."""
    assert task.answers is not None
    generator = torch.Generator().manual_seed(7000 + seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=task.start_rate)
    for _ in range(steps):
        prompts = task.prompts(task.rows, seed, generator)
        answers = task.answers(prompts, seed, generator)
        # Nothing follows EOS.
        ended = (answers == EOS).cumsum(1) - (answers == EOS).long() > 0
        log_prob = trainer_log_prob(model, prompts, answers.masked_fill(ended, PAD))
        loss = -log_prob.where(~ended, 0.0).sum() / (~ended).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def start_weights(task: Task, seed: int, root: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the start of (task, seed) and another checkpoint of the same model, from `root/starts` if they are there.

    The other checkpoint is an earlier one of the supervised training, or the pretrained model in 6 bits.
    """
    path = root / "starts" / f"{task.name}-{seed}.pt"
    if not path.exists():
        torch.manual_seed(seed)
        model = task.build()
        if task.answers is None:
            model.eval()
            other = engine_copy(model, "int6").state_dict()
        else:
            supervised(model, task, seed, task.start_steps * 3 // 4)
            other = copy.deepcopy(model.state_dict())
            supervised(model, task, seed + 100, task.start_steps // 4)

        # Two workers may both make it: the file appears whole.
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            torch.save({"start": model.state_dict(), "other": other}, file)
        os.replace(file.name, path)
    saved = torch.load(path, weights_only=True)
    return saved["start"], saved["other"]
