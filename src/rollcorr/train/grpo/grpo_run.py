"""A training run and its directory: start or resume, train, save, stop on Ctrl-C, say what came out."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from rollcorr.engines.base import EngineError
from rollcorr.run_directory.run_logger import RunLogger
from rollcorr.train.checkpoint import Checkpoint, TrainState, save_checkpoint
from rollcorr.train.grpo.engine_choice import closing, make_engine
from rollcorr.train.grpo.grpo_config import TaskConfig, TrainConfig
from rollcorr.train.grpo.grpo_trainer import GrpoTrainer, StepResult
from rollcorr.train.grpo.policy import Policy, load_policy, save_policy
from rollcorr.train.grpo.tasks import ArithmeticTask, Gsm8kTask, Task
from rollcorr.train.grpo.warmup import Evaluation, evaluate, warm_up
from rollcorr.train.session import find_checkpoint, interruption, resume_command


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run came to.

    Attributes:
        run_dir: where everything is.
        step: completed training steps.
        interrupted: it was stopped before its last step.
        failure: what the engine died of, when that stopped it; None otherwise.
        skipped_steps: optimizer steps lost to a non-finite loss or gradient, or with nothing kept.
        before: quality before the first training step; None when it was not measured.
        after: quality after the last one; None when it was not measured.
    """

    run_dir: Path
    step: int
    interrupted: bool
    failure: str | None
    skipped_steps: int
    before: Evaluation | None
    after: Evaluation | None


def train(config: TrainConfig, *, console: Console | None = None) -> Summary:
    """Train from the start, or from the newest checkpoint when `config.resume`.

    Ctrl-C (or SIGTERM) finishes the step, saves, and returns; a second one stops at once. An engine that fails in a
    step costs that step: nothing is trained on, the run saves and returns, `Summary.failure` says why. A resumed run
    equals an uninterrupted one, on the CPU to the last bit.

    Args:
        config: the run.
        console: where to show progress.

    Raises:
        FileExistsError: the directory holds a run already and `resume` is false.
        FileNotFoundError: there is nothing to resume from, or a model or data file does not exist.
        ValueError: a model, checkpoint or data file cannot be read.
        EngineError: the engine failed before the first step, or after the last.
    """
    console = console or Console()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    run_dir = Path(config.run_dir)
    checkpoint, changes = find_checkpoint(config, run_dir)
    trainer, state = _build(config, run_dir, checkpoint)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    with (
        closing(trainer.engine),
        RunLogger(run_dir, config.steps, start=state.step, tensorboard=config.log.tensorboard, console=console) as log,
        interruption(log) as stop_requested,
    ):
        for change in changes:
            log.say(f"changed since this run began: {change}")
        before = _measure_before(trainer, run_dir, log, fresh=checkpoint is None)
        step, failure = state.step, None
        while step < config.steps and not stop_requested():
            try:
                result = trainer.step(step + 1)
            except EngineError as error:  # raised while sampling, so nothing of this step has reached the weights
                failure = f"step {step + 1} was not trained on, the engine failed: {error}"
                log.say(failure)
                break
            step += 1
            log.log(step, result.metrics)
            if config.log.rollouts:
                _write_rollouts(run_dir, step, result, config)
            if config.checkpoint.every and step % config.checkpoint.every == 0 and step < config.steps:
                _save(trainer, run_dir, step, log)
        if step > state.step or checkpoint is None:
            saved = _save(trainer, run_dir, step, log)
            log.say(f"saved {saved}")
        interrupted = step < config.steps
        if interrupted:
            log.say(f"stopped after step {step} of {config.steps}; go on with: {resume_command(config)}")
        after = None if interrupted else _measure(trainer, "after", log, version=step)
    summary = Summary(
        run_dir=run_dir,
        step=step,
        interrupted=interrupted,
        failure=failure,
        skipped_steps=trainer.skipped_steps,
        before=before,
        after=after,
    )
    _write_summary(summary)
    return summary


def make_task(config: TaskConfig) -> Task:
    """The task that a configuration names."""
    if config.path is not None:
        return Gsm8kTask(config.path)
    return ArithmeticTask(max_operand=config.max_operand)


def _build(config: TrainConfig, run_dir: Path, checkpoint: Checkpoint | None) -> tuple[GrpoTrainer, TrainState]:
    task = make_task(config.task)
    if checkpoint is None:
        policy = load_policy(config.model.path, config=config.model.config, seed=config.seed)
    else:
        policy = load_policy(str(checkpoint.path))
    policy.model.to(config.device)
    if checkpoint is None and config.warm_up.steps:
        warm_up_config = config.warm_up
        warm_up(
            policy,
            task,
            steps=warm_up_config.steps,
            batch_size=warm_up_config.batch_size,
            learning_rate=warm_up_config.lr,
            seed=config.seed,
        )
    reference = _reference(config, run_dir, policy, fresh=checkpoint is None)
    state = TrainState() if checkpoint is None else checkpoint.state
    trainer = GrpoTrainer(config, policy, make_engine(config, policy, version=state.step), task, reference=reference)
    if checkpoint is not None:
        trainer.optimizer.load_state_dict(checkpoint.optimizer)
        trainer.skipped_steps = state.skipped_steps
        if checkpoint.engine_weights is not None:
            trainer.engine.import_weights(checkpoint.engine_weights, version=state.engine_version)
    return trainer, state


def _reference(config: TrainConfig, run_dir: Path, policy: Policy, *, fresh: bool) -> nn.Module | None:
    """The policy that the run started from, kept beside its checkpoints when a KL penalty asks for it."""
    if config.algorithm.loss.kl_coef == 0:
        return None
    directory = run_dir / "reference"
    if fresh:
        save_policy(policy, directory)
        return copy.deepcopy(policy.model).eval().requires_grad_(False)
    return load_policy(str(directory)).model.to(config.device).eval().requires_grad_(False)


def _save(trainer: GrpoTrainer, run_dir: Path, step: int, log: RunLogger) -> Path:
    version, weights = trainer.engine.weight_version, None
    if version != step:
        try:
            weights = trainer.engine.export_weights()
        except EngineError as error:
            log.say(f"the engine's weights, version {version}, are lost ({error}); it goes on with version {step}")
            version = step
    return save_checkpoint(
        run_dir / "checkpoints",
        partial(save_policy, trainer.policy),
        trainer.optimizer,
        TrainState(step=step, engine_version=version, skipped_steps=trainer.skipped_steps),
        engine_weights=weights,
        keep=trainer.config.checkpoint.keep,
    )


def _write_rollouts(run_dir: Path, step: int, result: StepResult, config: TrainConfig) -> None:
    from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter

    batch, tokens, kept = result.batch, result.batch.rollout.tokens, result.batch.rollout.kept
    log = RolloutBatch.from_padded(
        tokens.response_mask,
        prompt_mask=tokens.prompt_mask,
        step=step,
        sequence_id=[f"{step}-{row}" for row in range(len(tokens))],
        group_id=[f"{step}-{group}" for group in batch.group_ids.tolist()],
        prompt_ids=tokens.prompt_ids,
        response_ids=tokens.response_ids,
        rollout_log_prob=batch.rollout.rollout_log_prob,
        old_log_prob=batch.old_log_prob,
        log_prob=result.log_prob,
        reward=[reward.value for reward in batch.rewards],
        advantages=batch.advantages[:, None].expand_as(tokens.response_mask),
        sampling=batch.rollout.sampling,
        policy_versions=batch.rollout.policy_versions,
        kept=kept,
        model=config.model.path or "random weights",
    )
    with RolloutLogWriter(run_dir / "rollouts" / f"step_{step:06d}.parquet", overwrite=True) as writer:
        writer.write(log)


def _measure_before(trainer: GrpoTrainer, run_dir: Path, log: RunLogger, *, fresh: bool) -> Evaluation | None:
    """Quality before the first step; a resumed run remembers it."""
    path = run_dir / "evaluation_before.json"
    if not fresh:
        return Evaluation(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
    evaluation = _measure(trainer, "before", log, version=0)
    if evaluation is not None:
        path.write_text(json.dumps(asdict(evaluation)) + "\n", encoding="utf-8")
    return evaluation


def _measure(trainer: GrpoTrainer, when: str, log: RunLogger, *, version: int) -> Evaluation | None:
    config = trainer.config
    if not config.log.evaluate:
        return None
    if trainer.engine.weight_version != version:
        trainer.engine.update_weights(trainer.model, version=version)
    evaluation = evaluate(
        trainer.engine,
        trainer.policy,
        trainer.task,
        problems=config.log.evaluate,
        bonus_length=config.task.bonus_length,
        seed=config.seed,
    )
    log.say(
        f"{when} training: accuracy {evaluation.accuracy:.1%}, reward {evaluation.reward:.3f} "
        f"over {evaluation.problems} sampled responses"
    )
    return evaluation


def _write_summary(summary: Summary) -> None:
    text = json.dumps(asdict(summary) | {"run_dir": str(summary.run_dir)}, indent=2)
    (summary.run_dir / "summary.json").write_text(text + "\n", encoding="utf-8")
