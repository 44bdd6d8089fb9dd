"""Configuration of a training run: frozen dataclasses, checked at construction.

`algorithm.rollout_correction` is the name of a preset, a block of options in any generation of the schema, or null for
no correction at all; an empty block measures and corrects nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from rollcorr.config import LossConfig, RolloutCorrectionConfig, SamplingSpec
from rollcorr.config.conversion import resolve
from rollcorr.config.sampling_spec import IncompatibleSamplingError, compare
from rollcorr.config.yaml_text import dump_yaml


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which policy to train.

    Attributes:
        path: directory with a causal language model and its tokenizer; "demo" is the tiny one in the package.
        config: instead of `path`, fields of a `transformers` configuration for random weights over bytes.
    """

    path: str | None = "demo"
    config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.config is None):
            raise ValueError(
                f"set either model.path or model.config and make the other null, got {self.path!r} and {self.config!r}"
            )


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What to train on.

    Attributes:
        name: "arithmetic" (synthetic) or "gsm8k" (a JSONL file in the GSM8K format).
        path: the file, for "gsm8k".
        max_operand: largest operand, for "arithmetic".
        bonus_length: tokens after the answer line that earn the whole length bonus.
    """

    name: Literal["arithmetic", "gsm8k"] = "arithmetic"
    path: str | None = None
    max_operand: int = 99
    bonus_length: int = 24

    def __post_init__(self) -> None:
        at_least("task", self, max_operand=1, bonus_length=1)
        if (self.name == "gsm8k") != (self.path is not None):
            raise ValueError(f"task.path belongs to task.name=gsm8k, got name={self.name!r} and path={self.path!r}")


@dataclass(frozen=True, kw_only=True)
class WarmUpConfig:
    """Supervised steps before the first reinforcement step.

    Attributes:
        steps: how many; 0 for none.
        batch_size: problems a step.
        lr: peak learning rate.
    """

    steps: int = 0
    batch_size: int = 128
    lr: float = 3e-3

    def __post_init__(self) -> None:
        at_least("warm_up", self, steps=0, batch_size=1)
        _positive("warm_up", self, "lr")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are sampled.

    Attributes:
        engine: which engine samples.
        engine_options: options of that engine alone, as its class takes them.
        prompts_per_step: problems a step.
        group_size: responses to each problem.
        max_new_tokens: longest response.
        dtype: precision of the sampling copy, where the engine has this option.
        refresh_every: steps between two weight updates of the engine; above 1 the rollouts are stale on purpose.
        batch_size: rows sampled at a time, where the engine has this option; null for all at once.
        sampling: temperature, truncation, and which log-probs are recorded.
    """

    engine: Literal["transformers", "ctranslate2", "vllm", "vllm_server", "sglang"] = "transformers"
    engine_options: dict[str, Any] = field(default_factory=dict)
    prompts_per_step: int = 16
    group_size: int = 8
    max_new_tokens: int = 48
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    refresh_every: int = 1
    batch_size: int | None = None
    sampling: SamplingSpec = field(default_factory=SamplingSpec)

    def __post_init__(self) -> None:
        at_least("rollout", self, prompts_per_step=1, group_size=2, max_new_tokens=1, refresh_every=1, batch_size=1)

    @property
    def rows(self) -> int:
        """Responses a step."""
        return self.prompts_per_step * self.group_size


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """What the trainer's log-probs are log-probs of.

    Attributes:
        sampling: what becomes of a truncated rollout: "replay" the engine's kept sets, "recompute" the truncation from
            the trainer's own logits, subtract the log of the engine's "kept_mass", or score over the "full" vocabulary.
            All four divide by the sampling temperature, and all are one where nothing truncates.
        allow_incompatible: train even when the two log-probs are of different things, which biases every ratio. For
            comparisons.
    """

    sampling: Literal["replay", "recompute", "kept_mass", "full"] = "replay"
    allow_incompatible: bool = False

    def spec(self, rollout: SamplingSpec) -> SamplingSpec:
        """What the trainer's log-probs of a rollout are, after checking that log π − log μ is a log-ratio.

        Raises:
            IncompatibleSamplingError: it is not; names the reason and the mend.
        """
        trainer = rollout.for_actor(self.sampling)
        comparison = compare(rollout, trainer)
        if comparison.verdict == "different" and not self.allow_incompatible:
            raise IncompatibleSamplingError(
                f"log-probs of the rollout and of actor.sampling={self.sampling} are of different things: "
                f"{comparison.reason}. To mend it: {_mend(rollout, self.sampling) or comparison.fix}. To train on the "
                "biased ratio all the same, set actor.allow_incompatible=true"
            )
        return trainer


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """What the batch becomes: advantages, correction, loss.

    Attributes:
        advantage: "grpo" (divides by the group's deviation), "dr_grpo" (does not) or "rloo" (leave one out).
        rollout_correction: preset name, block of options, or null for no correction at all.
        leave_rejected_out_of_baseline: rejected rows do not move their group's baseline; decoupled mode only.
        loss: clipping, aggregation, and the weights of reference KL and entropy.
    """

    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    rollout_correction: Any = field(default_factory=dict)
    leave_rejected_out_of_baseline: bool = False
    loss: LossConfig = field(default_factory=LossConfig)

    def __post_init__(self) -> None:
        correction = self.correction
        if self.leave_rejected_out_of_baseline and (correction is None or correction.bypass_mode):
            raise ValueError(
                "algorithm.leave_rejected_out_of_baseline=true needs a correction in decoupled mode: bypass mode "
                "rejects during the update, after the advantages; set it to false or choose a decoupled preset"
            )

    @cached_property
    def correction(self) -> RolloutCorrectionConfig | None:
        """The checked correction; None for no correction at all."""
        return None if self.rollout_correction is None else resolve(self.rollout_correction)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, and how a batch is cut into optimizer steps.

    Attributes:
        lr: learning rate after `lr_warmup_steps`, constant from there.
        lr_warmup_steps: training steps over which the learning rate rises linearly.
        betas: decay of the first and second moment.
        weight_decay: decoupled decay.
        max_grad_norm: gradients are scaled down to this norm.
        ppo_epochs: passes over a batch.
        mini_batch_size: responses per optimizer step; null for the whole batch.
        micro_batch_size: responses per forward pass, gradients being accumulated; null for a mini-batch. It changes
            memory and speed, never the result.
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
        _positive("optim", self, "lr", "max_grad_norm")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save.

    Attributes:
        every: training steps between checkpoints; 0 saves only at the end and on interruption.
        keep: newest checkpoints to keep.
    """

    every: int = 25
    keep: int = 2

    def __post_init__(self) -> None:
        at_least("checkpoint", self, every=0, keep=1)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What a run leaves behind, beside `metrics.jsonl`.

    Attributes:
        rollouts: write a rollout log (Parquet) for each step.
        tensorboard: write TensorBoard events.
        evaluate: problems sampled before and after the training to measure accuracy; 0 for none.
    """

    rollouts: bool = True
    tensorboard: bool = True
    evaluate: int = 256

    def __post_init__(self) -> None:
        at_least("log", self, evaluate=0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run.

    Attributes:
        recipe: names this kind of run; `rollcorr.train.recipes` lists the others.
        run_dir: directory of the run; must not hold one already unless `resume`.
        resume: go on from the newest checkpoint in `run_dir`.
        seed: decides data order, sampling and shuffles.
        steps: training steps in total.
        device: where the policy trains and samples, e.g. "cpu" or "cuda".
        threads: CPU threads of torch; null leaves torch's choice. Bit-for-bit repetition needs the same number.
    """

    recipe: Literal["grpo"] = "grpo"
    run_dir: str = "runs/grpo"
    resume: bool = False
    seed: int = 0
    steps: int = 100
    device: str = "cpu"
    threads: int | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    warm_up: WarmUpConfig = field(default_factory=WarmUpConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        at_least("", self, seed=0, steps=1, threads=1)
        self.actor.spec(dataclasses.replace(self.rollout.sampling, engine=self.rollout.engine.removesuffix("_server")))

    def to_yaml(self) -> str:
        """The effective configuration: every option, and the correction spelled out."""
        return effective_yaml(self, self.algorithm.correction)


def effective_yaml(config: Any, correction: RolloutCorrectionConfig | None) -> str:  # noqa: ANN401 (a dataclass)
    """Every option of a run as YAML, with `algorithm.rollout_correction` spelled out."""
    values = dataclasses.asdict(config)
    values["algorithm"]["rollout_correction"] = None if correction is None else correction.to_dict()
    return dump_yaml(_plain(values))


def _mend(rollout: SamplingSpec, actor: str) -> str:
    """The mend as options of a run, where one option does it."""
    if rollout.logprobs == "raw" and "processed" in rollout.engine_sampling.logprobs:
        return "set rollout.sampling.logprobs=processed"
    if rollout.logprobs == "processed" and rollout.truncates and actor == "full":
        return "set actor.sampling=replay, or sample with top_p=1, top_k=-1 and min_p=0"
    return ""


def _plain(value: Any) -> Any:  # noqa: ANN401
    """Only what YAML can write safely: tuples become lists."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def at_least(section: str, config: object, **lowest: int) -> None:
    """Check that options are None or at least so much."""
    for name, limit in lowest.items():
        value = getattr(config, name)
        if value is not None and value < limit:
            raise ValueError(f"{section}.{name} must be at least {limit}, got {value}".removeprefix("."))


def _positive(section: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise ValueError(f"{section}.{name} must be > 0, got {value}")
