"""Base configuration of all recipes: the options of every run, AdamW, checkpoints, logs, and the checks.

A recipe's configuration is a subclass of `RunConfig`: frozen dataclasses, checked at construction.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.conversion import resolve
from rollcorr.config.documents import dump_yaml
from rollcorr.config.secrets import redact
from rollcorr.run_directory.tracker_sinks import check_sink_name


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, and how a batch is cut into optimizer steps.

    Attributes:
        lr: learning rate after `lr_warmup_steps`, constant from there.
        lr_warmup_steps: training steps over which the learning rate rises linearly.
        betas: decay rates of the first and second moments.
        weight_decay: decoupled weight decay.
        max_grad_norm: larger gradients are scaled to this norm.
        ppo_epochs: passes over a batch.
        mini_batch_size: rows per optimizer step; defaults to the full batch.
        micro_batch_size: rows per forward pass; gradients are accumulated over them. Defaults to the mini-batch. It
            changes memory and speed, not the result.
    """

    lr: float = 3e-4
    lr_warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    ppo_epochs: int = 1
    mini_batch_size: int | None = None
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        at_least("optim", self, lr_warmup_steps=0, ppo_epochs=1, mini_batch_size=1, micro_batch_size=1)
        above_zero("optim", self, "lr", "max_grad_norm")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save.

    Attributes:
        every: training steps between checkpoints; 0 saves only at the end and on interruption.
        keep: number of newest checkpoints that are kept.
    """

    every: int = 25
    keep: int = 2

    def __post_init__(self) -> None:
        at_least("checkpoint", self, every=0, keep=1)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Logs of a run in addition to `metrics.jsonl`.

    Attributes:
        tensorboard: write TensorBoard events.
        sinks: further metric trackers, by name: `stdout`, `tensorboard`, `wandb`, `mlflow`, `trackio`.
        evaluate: responses or pictures sampled before and after the training, to measure the quality; 0 disables it.
    """

    tensorboard: bool = True
    sinks: tuple[str, ...] = ()
    evaluate: int = 0

    def __post_init__(self) -> None:
        at_least("log", self, evaluate=0)
        for name in self.sinks:
            check_sink_name(name)


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Advantages and correction.

    Attributes:
        advantage: "grpo" (divided by the group's standard deviation), "dr_grpo" (undivided) or "rloo" (leave one out).
        rollout_correction: name of a preset, block of options of any generation, or null to disable it; an empty block
            only measures the mismatch.
    """

    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    rollout_correction: Any = field(default_factory=dict)

    @cached_property
    def correction(self) -> RolloutCorrectionConfig | None:
        """Return the checked correction, or None if it is disabled."""
        return None if self.rollout_correction is None else resolve(self.rollout_correction)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The options of every run. A recipe adds its own blocks.

    Attributes:
        recipe: kind of run; `rollcorr.train.recipes` lists all kinds.
        run_dir: directory of the run; only one process at a time may use it.
        resume: "auto" starts a run, continues it, or reports that it is finished; true only continues; false only
            starts.
        stop_after_minutes: save and exit after this time in minutes; the same command resumes. Defaults to no limit.
        seed: seed of the data order, of all noise and of shuffles.
        steps: training steps in total.
        device: where the policy trains and samples, for example "cpu" or "cuda".
        threads: CPU threads of torch; defaults to torch's choice. Bit-identical repetition needs an equal number.
        checkpoint: when to save.
        log: metrics and files to write.
    """

    recipe: str
    run_dir: str
    resume: Literal["auto", True, False] = "auto"
    stop_after_minutes: float | None = None
    seed: int = 0
    steps: int = 100
    device: str = "cpu"
    threads: int | None = None
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        at_least("", self, seed=0, steps=1, threads=1)
        if self.resume not in ("auto", True, False):
            raise ValueError(f"resume must be auto, true or false, got {self.resume!r}")
        if self.stop_after_minutes is not None:
            above_zero("", self, "stop_after_minutes")

    def to_yaml(self) -> str:
        """Return the effective configuration: every option, the correction expanded, and `***` for each secret."""
        values = dataclasses.asdict(self)
        algorithm = getattr(self, "algorithm", None)
        if isinstance(algorithm, AlgorithmConfig):
            correction = algorithm.correction
            values["algorithm"]["rollout_correction"] = None if correction is None else correction.to_dict()
        return dump_yaml(redact(values))


def at_least(section: str, config: object, **lowest: int) -> None:
    """Check that options are null or at least a limit."""
    for name, limit in lowest.items():
        value = getattr(config, name)
        if value is not None and value < limit:
            raise ValueError(f"{section}.{name} must be at least {limit}, got {value}".removeprefix("."))


def above_zero(section: str, config: object, *names: str) -> None:
    """Check that options are positive; NaN is not."""
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise ValueError(f"{section}.{name} must be > 0, got {value}".removeprefix("."))
