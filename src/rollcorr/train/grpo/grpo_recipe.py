"""GRPO as a recipe of the run loop: build, save and evaluate its policy."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rollcorr.run_directory.directory import RunDirectory
from rollcorr.run_directory.sinks import ProgressColumn
from rollcorr.run_directory.stored_run import BadInputError
from rollcorr.train.checkpoint import Checkpoint
from rollcorr.train.grpo.actor import StepResult
from rollcorr.train.grpo.engine_choice import engine_options, make_engine
from rollcorr.train.grpo.grpo_config import GrpoConfig, TaskConfig
from rollcorr.train.grpo.grpo_trainer import GrpoTrainer
from rollcorr.train.grpo.policy import load_policy, save_policy
from rollcorr.train.grpo.tasks import ArithmeticTask, Gsm8kTask, OwnTask, ScratchpadTask, Task
from rollcorr.train.grpo.warmup import evaluate, warm_up
from rollcorr.train.loop import Evaluation, Recipe
from rollcorr.train.reference_policy import reference_model

if TYPE_CHECKING:
    from rollcorr.diagnostics import MismatchNull
    from rollcorr.rollout_log import RolloutBatch

logger = logging.getLogger("rollcorr.train")


class GrpoRecipe(Recipe):
    """A language model, its engine and its task.

    Args:
        trainer: at the start of the run, or with the policy of a checkpoint.
        directory: where the rollout logs go.
    """

    config_class = GrpoConfig
    columns = (
        ProgressColumn("reward", "reward/mean", "{:.3f}"),
        ProgressColumn("accuracy", "reward/accuracy", "{:.2f}"),
        ProgressColumn("KL", "rollout_corr/kl", "{:+.1e}"),
        ProgressColumn("k3", "rollout_corr/k3_kl", "{:.1e}"),
        ProgressColumn("ESS", "rollout_corr/rollout_is_eff_sample_size", "{:.3f}"),
        ProgressColumn("rejected", "rollout_corr/rollout_rs_masked_fraction", "{:.1%}"),
        ProgressColumn("tokens/s", "perf/tokens_per_second", "{:,.0f}"),
    )
    evaluation_text = "accuracy {accuracy:.1%}, reward {reward:.3f} over {problems} sampled responses"

    def __init__(self, trainer: GrpoTrainer, directory: RunDirectory) -> None:
        self.trainer: GrpoTrainer = trainer
        self.directory = directory
        self.newest: StepResult | None = None
        self.keeps_reference = trainer.reference is not None

    @classmethod
    def build(cls, config: GrpoConfig, directory: RunDirectory, checkpoint: Checkpoint | None) -> GrpoRecipe:
        """Load the policy (and warm it up, at the start of a run), then start the engine.

        Args:
            config: the run's configuration.
            directory: the run's directory.
            checkpoint: checkpoint to resume from; optional. Without it, the run starts new.
        """
        engine_options(config)  # raise for an unset variable before the warm-up
        task = make_task(config.task)
        if checkpoint is None:
            policy = load_policy(config.model.path, config=config.model.config, seed=config.seed)
        else:
            policy = load_policy(str(checkpoint.path))
        policy.model.to(config.device)

        if checkpoint is None and config.warm_up.steps:
            warm_up(
                policy,
                task,
                steps=config.warm_up.steps,
                batch_size=config.warm_up.batch_size,
                learning_rate=config.warm_up.lr,
                seed=config.seed,
            )
        reference = None
        if config.algorithm.loss.kl_coef:
            reference = reference_model(
                policy.model,
                directory.reference,
                checkpoint,
                lambda folder: load_policy(str(folder)).model.to(config.device),
            )
        engine = make_engine(config, policy, version=0 if checkpoint is None else checkpoint.state.step)
        return cls(GrpoTrainer(config, policy, engine, task, reference=reference), directory)

    def step(self, step: int) -> dict[str, float]:
        """Run one step of the trainer."""
        every = self.trainer.config.log.null_every
        is_due = every > 0 and step % every == 0 and self.directory.null.exists()
        self.newest = self.trainer.step(step, null_rows=8 if is_due else 0)
        return self.newest.metrics

    def save_policy(self, directory: Path) -> None:
        """Write model and tokenizer."""
        save_policy(self.trainer.policy, directory)

    def evaluate(self, when: str) -> Evaluation:
        """Sample responses to held-out problems."""
        trainer, config = self.trainer, self.trainer.config
        return evaluate(
            trainer.engine,
            trainer.policy,
            trainer.task,
            problems=config.log.evaluate,
            bonus_length=config.task.bonus_length,
            seed=config.seed,
            own_reward=trainer.own_reward,
        )

    def measure_null(self) -> MismatchNull | None:
        """Sample held-out problems with the engine and score them with the trainer, whose weights are the same."""
        trainer, config = self.trainer, self.trainer.config
        if not config.log.null:
            return None
        if config.actor.allow_incompatible:
            raise BadInputError("actor.allow_incompatible=true, so the two sides need not be the same distribution")
        mini_batch = config.optim.mini_batch_size or config.rollout.rows
        has_moved = config.optim.ppo_epochs > 1 or mini_batch < config.rollout.rows
        if trainer.bypass and has_moved:
            raise BadInputError(
                "with several optimizer steps per batch, bypass mode's metrics are of weights that have moved since "
                "the batch was sampled"
            )

        from rollcorr.diagnostics.log_check import null_of_batch  # it needs Arrow

        return null_of_batch(trainer.null_rollouts(config.log.null), name=self.directory.null.name)

    def write_extras(self, step: int) -> None:
        """Write the rollout log of the step, and the null if it was measured again."""
        result = self.newest
        if result is not None and result.fresh_null is not None:
            self._update_null(step, result.fresh_null)
        if not self.trainer.config.log.rollouts or result is None:
            return
        from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter

        batch, rollout = result.batch, result.batch.rollout
        tokens = rollout.tokens
        # All columns that `rollcorr check` and a replay of the ratio need.
        log = RolloutBatch.from_padded(
            tokens.response_mask,
            prompt_mask=tokens.prompt_mask,
            step=step,
            sequence_id=[f"{step}-{row}" for row in range(len(tokens))],
            group_id=[f"{step}-{group}" for group in batch.group_ids.tolist()],
            prompt_ids=tokens.prompt_ids,
            response_ids=tokens.response_ids,
            rollout_log_prob=rollout.rollout_log_prob,
            old_log_prob=batch.old_log_prob,
            log_prob=result.log_prob,
            reward=[reward.value for reward in batch.rewards],
            advantages=batch.advantages[:, None].expand_as(tokens.response_mask),
            sampling=rollout.sampling,
            policy_versions=rollout.policy_versions,
            kept=rollout.kept,
            model=self.trainer.config.model.path or "random weights",
        )
        with RolloutLogWriter(self.directory.rollout_log(step), overwrite=True) as writer:
            writer.write(log)

    def _update_null(self, step: int, rows: RolloutBatch) -> None:
        """Merge a measurement into the run's own null; a null that the user put there stays."""
        from rollcorr.diagnostics.log_check import null_of_batch
        from rollcorr.diagnostics.null import read_null
        from rollcorr.diagnostics.null.run_null import follow_policy

        try:
            null = read_null(self.directory.null)

            # A step that a resumed run repeats is measured already.
            known = [part.last_step or 0 for part in null.measured]
            if null.kind != "engine" or max(known, default=0) >= step:
                return
            fresh = null_of_batch(rows, name=f"the measurement of step {step}")
            parts = tuple(part._replace(first_step=step, last_step=step) for part in fresh.measured)
            follow_policy(null, replace(fresh, measured=parts)).save(self.directory.null)
        except BadInputError as error:
            logger.warning("step %d: the null stays as it is: %s", step, error)

    def close(self) -> None:
        """Close the engine."""
        self.trainer.engine.close()


def make_task(config: TaskConfig) -> Task:
    """Return the task that a configuration names."""
    if config.problems is not None:
        return OwnTask(config.problems)
    if config.path is not None:
        return Gsm8kTask(config.path)
    if config.name == "scratchpad":
        return ScratchpadTask(additions=config.additions)
    return ArithmeticTask(max_operand=config.max_operand)
