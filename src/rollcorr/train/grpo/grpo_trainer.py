"""GRPO with rollout correction, one training step from top to bottom.

    sample      the engine draws a group of responses to each problem and reports log μ
    reward      each response is checked; with `rollout.max_rounds`, groups of equal rewards are sampled again
    old         the trainer recomputes log π_old of the same tokens (decoupled mode; bypass mode skips this)
    correct     weights and loss mask from π_old / μ, once per batch (decoupled mode; bypass mode does it in the loss)
    advantage   rewards become advantages within their group
    update      PPO epochs × mini-batches × micro-batches

`GrpoTrainer.step` is this list. Files, checkpoints and Ctrl-C are in `rollcorr.train.loop`.
Symbols: B responses, T padded response length; log-probs in nats.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rollcorr.core.aggregation import Denominators
from rollcorr.core.lag_statistics import known_metrics, lag_statistics
from rollcorr.core.mergeable_statistics import Statistics, merge_statistics, moments_of
from rollcorr.correction.denominators import count_denominators, loss_denominators
from rollcorr.correction.losses import PolicyLogProbs, PolicyLossOutput, policy_loss
from rollcorr.correction.process_groups import gather_statistics, sum_gradients, sum_over
from rollcorr.correction.rollout_correction import correct
from rollcorr.correction.training_step import TrainingStep
from rollcorr.engines.base import Engine, Rollout, require_row_seeds
from rollcorr.train.grpo.actor import Actor, GrpoBatch, StepResult
from rollcorr.train.grpo.dynamic_sampling import sample_groups
from rollcorr.train.grpo.grpo_config import GrpoConfig
from rollcorr.train.grpo.policy import Policy
from rollcorr.train.grpo.tasks import OwnReward, Reward, Task, hard_gated_reward, overlong_penalty
from rollcorr.train.steps import (
    ADVANTAGES,
    HELD_OUT,
    Clock,
    derived_seed,
    make_optimizer,
    micro_batch_size,
    mini_batches,
    own_rows,
    refresh_weights,
    set_learning_rate,
    token_lags,
    token_staleness,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rollcorr.rollout_log import RolloutBatch


class GrpoTrainer:
    """The state of a training run in memory, and one step of it.

    Args:
        config: the run's configuration.
        policy: trained in place, in float32.
        engine: samples; starts with the policy's weights.
        task: source of the problems.
        reference: frozen model for the KL penalty; needed when `algorithm.loss.kl_coef` is not 0.
        group: data-parallel ranks that share the update. Each samples and corrects the same batch, from the same seed
            and weights; forward and backward passes of the update are divided, and the gradients summed.

    Raises:
        ValueError: several ranks sample with an engine that has one seed per process; or `task.reward` cannot be
            loaded.
    """

    def __init__(
        self,
        config: GrpoConfig,
        policy: Policy,
        engine: Engine,
        task: Task,
        *,
        reference: nn.Module | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        require_row_seeds(engine, 1 if group is None else group.size())
        self.config = config
        self.policy = policy
        self.model = policy.model.eval()  # no dropout: log-probs of one policy must agree between passes
        self.engine = engine
        self.task = task
        self.reference = reference
        self.group = group
        self.correction_config = config.algorithm.correction
        self.bypass = self.correction_config is not None and self.correction_config.bypass_mode
        self.optimizer = make_optimizer(self.model.parameters(), config.optim)
        own_reward = config.task.reward
        self.own_reward = None if own_reward is None else OwnReward(own_reward, policy.tokenizer)
        self.skipped_steps = 0
        self._micro_batch_size = micro_batch_size(config.rollout.rows, config.optim)

    def step(self, step: int, *, null_rows: int = 0) -> StepResult:
        """Run training step `step` (1, 2, …): a function of the weights, the optimizer and (seed, step).

        Args:
            step: its number.
            null_rows: rows to sample and score for the null after a weight sync; they do not change the step.
        """
        clock = Clock()
        with clock("rollout"):
            refresh_weights(self.engine, self.model, step, every=self.config.rollout.refresh_every)
            is_synced = self.engine.weight_version == step - 1
            fresh_null = self.null_rollouts(null_rows, step=step) if null_rows and is_synced else None
            batch = self._sample(step)

            # The rollout's own versions, not the engine's: weights may change within a response.
            lags = token_lags(batch.rollout, step)
            staleness, oldest = token_staleness(lags, batch.response_mask)
        with clock("old_log_prob"):
            batch = self._add_old_log_prob(batch)
        with clock("correction"):
            batch = self._add_correction(batch)
            batch = self._add_advantages(batch)
        with clock("update"):
            statistics, log_prob = self._update(batch, step)
            statistics |= _lag_split(batch, log_prob, lags)
            host = statistics.read()  # every metric of the step crosses to the host here, once

        tokens = host.sums["response_tokens"]
        metrics = batch.metrics | {
            "actor/loss": host.moments["loss"].mean,
            "actor/grad_norm": host.moments["grad_norm"].mean,
            **{f"actor/{name}": host.moments[name].mean for name in ACTOR_METRICS if name in host.moments},
            **{f"sampling/{name}": host.moments[name].mean for name in SAMPLING_METRICS if name in host.moments},
            "actor/skipped_steps": float(self.skipped_steps),
            "response/length_mean": tokens / len(batch.rewards),
            "engine/staleness": staleness,
            "engine/staleness_max": float(oldest),
            **(known_metrics(host) if self.correction_config is not None else {}),
            "perf/tokens_per_second": tokens / clock.total,
            **clock.metrics(),
        }
        return StepResult(metrics, batch, log_prob, fresh_null)

    def null_rollouts(self, count: int, *, step: int = 0) -> RolloutBatch:
        """Sample and score held-out problems like a step; with equal weights on both sides this is a null.

        Args:
            count: problems; each gets one response.
            step: number of the training step that follows.

        Raises:
            ValueError: the configuration allows two sides that cannot be the same distribution.
        """
        from rollcorr.engines import measure_null  # it needs Arrow

        seed = self.config.seed
        problems = self.task.problems(count, seed=seed, step=HELD_OUT + 1 + step)

        def score(rollout: Rollout) -> Tensor:
            actor = Actor.of(rollout, self.config.actor.spec(rollout.sampling))
            return actor.log_prob(self.model, rollout, rows_at_once=self._micro_batch_size)

        return measure_null(
            self.engine,
            [self.policy.encode(problem.prompt) for problem in problems],
            seed=derived_seed(seed, "null", step),
            score=score,
        )

    def _sample(self, step: int) -> GrpoBatch:
        """Sample a group of responses to each problem of the step, and compute their rewards."""
        options = self.config.rollout
        rollout, rewards, metrics = sample_groups(
            lambda number: self._sample_round(step, number),
            groups=options.prompts_per_step,
            group_size=options.group_size,
            max_rounds=options.max_rounds,
        )

        # Raises for log-probs that are not comparable, before any subtraction.
        actor = Actor.of(rollout, self.config.actor.spec(rollout.sampling))

        group_ids = torch.arange(options.prompts_per_step, device="cpu").repeat_interleave(options.group_size)
        group_ids = group_ids.to(rollout.tokens.response_ids.device)
        return GrpoBatch(rollout=rollout, actor=actor, rewards=rewards, group_ids=group_ids, metrics=metrics)

    def _sample_round(self, step: int, number: int) -> tuple[Rollout, list[Reward]]:
        """Sample and reward the responses of one round; further rounds have problems and draws of their own."""
        options, task = self.config.rollout, self.config.task
        seed = derived_seed(self.config.seed, "round", number) if number else self.config.seed
        problems = self.task.problems(options.prompts_per_step, seed=seed, step=step)
        asked = [problem for problem in problems for _ in range(options.group_size)]
        rollout = self.engine.generate(
            [self.policy.encode(problem.prompt) for problem in asked], seed=derived_seed(seed, "sampling", step)
        )

        rewards = []
        _, responses = rollout.tokens.to("cpu").unpadded()
        for ids, problem in zip(responses, asked, strict=True):
            if self.own_reward is not None:
                reward = self.own_reward(ids, problem)
            else:
                reward = hard_gated_reward(ids, problem.answer, self.policy.tokenizer, bonus_length=task.bonus_length)
            penalty = overlong_penalty(len(ids), longest=options.max_new_tokens, buffer=options.overlong_buffer)
            rewards.append(Reward(reward.value + options.overlong_penalty * penalty, reward.correct))
        return rollout, rewards

    def _add_old_log_prob(self, batch: GrpoBatch) -> GrpoBatch:
        """Compute log π_old and log π_ref. Bypass mode uses μ as π_old and skips this forward pass."""
        rows = self._micro_batch_size
        old_log_prob = None if self.bypass else batch.actor.log_prob(self.model, batch.rollout, rows_at_once=rows)
        ref_log_prob = None
        if self.reference is not None:  # never filtered: every token of the policy needs a finite log-prob
            whole = Actor(batch.actor.spec.for_actor("full"))
            ref_log_prob = whole.log_prob(self.reference, batch.rollout, rows_at_once=rows)
        return dataclasses.replace(batch, old_log_prob=old_log_prob, ref_log_prob=ref_log_prob)

    def _add_correction(self, batch: GrpoBatch) -> GrpoBatch:
        if self.correction_config is None or batch.old_log_prob is None:
            return batch
        return dataclasses.replace(
            batch,
            correction=correct(
                batch.old_log_prob, batch.rollout.rollout_log_prob, batch.response_mask, self.correction_config
            ),
        )

    def _add_advantages(self, batch: GrpoBatch) -> GrpoBatch:
        algorithm = self.config.algorithm
        rewards = torch.tensor([reward.value for reward in batch.rewards], device=batch.group_ids.device)

        # Only decoupled mode has a correction before the advantages; without rejection it keeps every row.
        keep = None
        if algorithm.leave_rejected_out_of_baseline is not False and batch.correction is not None:
            keep = batch.correction.sequence_kept
        return dataclasses.replace(
            batch, advantages=ADVANTAGES[algorithm.advantage](rewards, batch.group_ids, keep=keep)
        )

    def _update(self, batch: GrpoBatch, step: int) -> tuple[Statistics, Tensor]:
        """Run every optimizer step of the batch; return merged statistics and log π_θ of the first epoch."""
        optim = self.config.optim
        set_learning_rate(self.optimizer, optim, step)
        first_log_prob = torch.zeros_like(batch.rollout.rollout_log_prob)
        losses: list[Statistics] = []
        measured: list[Statistics] = []
        for epoch, mini_batch in mini_batches(len(batch.rewards), optim, seed=self.config.seed, step=step):
            outputs, log_probs, step_statistics = self._train_on_mini_batch(batch, mini_batch)
            losses.append(step_statistics)
            corrections = [output.correction for output in outputs if output.correction is not None]
            measured += [part.statistics for part in corrections if part.statistics is not None]
            if epoch == 0:
                first_log_prob[batch.on_device(own_rows(mini_batch, self.group))] = log_probs

        # Each rank has filled its own rows; the others are 0.
        first_log_prob = sum_over(first_log_prob, self.group)
        statistics = merge_statistics(losses) | Statistics.of(
            sums={"response_tokens": batch.response_mask.sum().double()}
        )

        # Decoupled mode has one correction for the full batch, the same on every rank; bypass mode one per loss.
        if batch.correction is None and measured:
            statistics |= gather_statistics(merge_statistics(measured), self.group)
        elif batch.correction is not None and batch.correction.statistics is not None:
            statistics |= batch.correction.statistics
        return statistics, first_log_prob

    def _train_on_mini_batch(self, batch: GrpoBatch, rows: Tensor) -> tuple[list[PolicyLossOutput], Tensor, Statistics]:
        """Accumulate a mini-batch's gradients over micro-batches; step if they are finite and any token was kept.

        If no token was kept, the gradients are 0, but momentum and weight decay would still move the weights.
        """
        # In decoupled mode the denominator of the policy gradient is known beforehand.
        here = batch.on_device(rows)
        response_mask, correction = batch.response_mask[here], batch.correction
        original = denominators = count_denominators(response_mask)
        if self.correction_config is not None and correction is not None:
            weights = None if correction.loss_weights is None else correction.loss_weights[here]
            denominators = loss_denominators(
                self.correction_config.normalizer, correction.loss_mask[here], response_mask, weights
            )

        # A rank without rows runs an empty micro-batch, so that it joins every collective.
        own = own_rows(rows, self.group)
        part, batch = (own, batch) if len(own) else (rows[:1], batch.without_tokens())

        # In bypass mode the denominator is known only after the last micro-batch: the gradients are scaled at the end.
        bypass = None
        if self.correction_config is not None and self.bypass:
            bypass = TrainingStep(
                self.model, self.correction_config, loss=self.config.algorithm.loss, group=self.group or "local"
            )

        self.optimizer.zero_grad()
        outputs, log_probs, learned = [], [], []
        with bypass or nullcontext():
            for micro_batch in part.split(self._micro_batch_size):
                output, log_prob = self._micro_batch_loss(batch, micro_batch, denominators, original, bypass)
                outputs.append(output)
                log_probs.append(log_prob)
                if bypass is not None:
                    bypass.backward(output)
                    continue
                output.loss.backward()

                # KL and entropy terms train on rejected tokens as well.
                mask = output.loss_mask if output.regularization is None else batch.response_mask[micro_batch]
                learned.append(torch.stack([output.loss.detach(), mask.sum().to(output.loss.dtype)]))
            if bypass is None:
                sum_gradients(self.model.parameters(), self.group)
                loss, tokens = sum_over(torch.stack(learned).sum(0), self.group)
                skipped = tokens == 0
            else:
                loss, _, _, skipped = bypass.finish()

        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.max_grad_norm)
        if bool((loss + grad_norm).isfinite() & ~skipped):  # one flag is read per optimizer step
            self.optimizer.step()
        else:
            self.skipped_steps += 1
        self.optimizer.zero_grad()

        # One observation of each, which merges into a mean over optimizer steps.
        statistics = gather_statistics(merge_statistics([output.statistics for output in outputs]), self.group)
        one = torch.ones(1, dtype=torch.bool, device=loss.device)
        moments = {"loss": moments_of(loss[None], one), "grad_norm": moments_of(grad_norm[None], one)}
        return outputs, torch.cat(log_probs)[: len(own)], statistics | Statistics.of(moments=moments)

    def _micro_batch_loss(
        self,
        batch: GrpoBatch,
        rows: Tensor,
        denominators: Denominators,
        original: Denominators,
        bypass: TrainingStep | None,
    ) -> tuple[PolicyLossOutput, Tensor]:
        """Return the loss of a micro-batch and its log π_θ."""
        loss_config = self.config.algorithm.loss
        scores = batch.actor.score(
            self.model,
            batch.rollout,
            rows,
            entropy_gradient=loss_config.entropy_coef != 0,
            full_gradient=loss_config.kl_coef != 0,
        )

        rows = batch.on_device(rows)
        policies = PolicyLogProbs(
            log_prob=scores.log_prob,
            old_log_prob=None if batch.old_log_prob is None else batch.old_log_prob[rows],
            rollout_log_prob=None if self.correction_config is None else batch.rollout.rollout_log_prob[rows],
            ref_log_prob=None if batch.ref_log_prob is None else batch.ref_log_prob[rows],
            full_log_prob=scores.full_log_prob,
        )
        # In bypass mode the ratio is π_θ / μ, so the correction is computed inside the step's loss.
        advantages, mask = batch.advantages[rows], batch.response_mask[rows]
        if bypass is not None:
            output = bypass.policy_loss(policies, advantages, mask, entropy=scores.entropy)
        else:
            output = policy_loss(
                policies,
                advantages,
                mask,
                config=self.correction_config,
                loss=loss_config,
                correction=None if batch.correction is None else batch.correction[rows],
                denominators=denominators,
                original_denominators=original,
                entropy=scores.entropy,
            )

        statistics = output.statistics | scores.restriction(mask)
        return dataclasses.replace(output, statistics=statistics), scores.log_prob.detach()


def _lag_split(batch: GrpoBatch, log_prob: Tensor, lags: Tensor | None) -> Statistics:
    """Return the sums by lag, from the rollout log's log π: log π_old, or in bypass mode log π_θ of the first epoch."""
    if lags is None:
        return Statistics.of()
    policy = log_prob if batch.old_log_prob is None else batch.old_log_prob
    return lag_statistics(policy - batch.rollout.rollout_log_prob, batch.response_mask, lags)


ACTOR_METRICS = ("policy_kl", "clip_fraction_high", "clip_fraction_low", "clip_fraction_dual", "entropy", "kl_ref")
SAMPLING_METRICS = ("outside_fraction", "kept_mass")
