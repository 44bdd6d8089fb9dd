"""Configuration of a GRPO run: frozen dataclasses, checked at construction.

Options of all recipes are in `rollcorr.train.run_config`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from rollcorr.config import LossConfig, SamplingSpec
from rollcorr.config.sampling_spec import IncompatibleSamplingError, compare
from rollcorr.train.run_config import AlgorithmConfig, LogConfig, OptimConfig, RunConfig, above_zero, at_least

EngineName = Literal["transformers", "ctranslate2", "vllm", "vllm_server", "sglang"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy to train.

    Attributes:
        path: directory with a causal language model and its tokenizer, or its id on the Hugging Face hub, such as
            Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@REVISION; "demo" is the tiny one in the package
            rollcorr-demo-models.
        config: fields of a `transformers` configuration, for a byte-level model with random weights in place of `path`.
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
    """The task to train on.

    Attributes:
        name: "arithmetic" (synthetic), "scratchpad" (synthetic, hundreds of tokens) or "gsm8k" (a JSONL file in the
            GSM8K format).
        path: path of the JSONL file, for "gsm8k".
        max_operand: largest operand, for "arithmetic".
        additions: number of additions, for "scratchpad"; 1 to 52.
        bonus_length: tokens after the answer line that earn the full length bonus; 0 for no bonus.
        problems: problems of your own: a function without arguments, as `package.module:name` or `file.py:name`, which
            returns rows with the texts `prompt`, `answer` and, for the warm-up, `solution`.
        reward: reward of your own: a function of the response's text and the row, in the notation of `problems`. It
            returns a number, and above 0 means correct. `bonus_length` applies only to the default reward.
    """

    name: Literal["arithmetic", "scratchpad", "gsm8k"] = "arithmetic"
    path: str | None = None
    max_operand: int = 99
    additions: int = 26
    bonus_length: int = 24
    problems: str | None = None
    reward: str | None = None

    def __post_init__(self) -> None:
        at_least("task", self, max_operand=1, additions=1, bonus_length=0)
        if (self.name == "gsm8k") != (self.path is not None):
            raise ValueError(f"task.path belongs to task.name=gsm8k, got name={self.name!r} and path={self.path!r}")
        if self.problems is not None and self.name != "arithmetic":
            raise ValueError(f"task.problems replaces task.name={self.name!r}: leave out one of them")


@dataclass(frozen=True, kw_only=True)
class WarmUpConfig:
    """Supervised steps before the first reinforcement step.

    Attributes:
        steps: number of supervised steps before the training; 0 disables the warm-up.
        batch_size: problems per step.
        lr: peak learning rate.
    """

    steps: int = 0
    batch_size: int = 128
    lr: float = 3e-3

    def __post_init__(self) -> None:
        at_least("warm_up", self, steps=0, batch_size=1)
        above_zero("warm_up", self, "lr")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are sampled.

    Attributes:
        engine: name of the engine that samples.
        engine_options: arguments of that engine's class. `${env:NAME}` in a text is replaced by the environment
            variable when the engine is built.
        prompts_per_step: problems per step.
        group_size: responses per problem.
        max_new_tokens: length limit of a response.
        max_rounds: maximum number of sampling rounds per step. Above 1, groups with equal rewards are replaced by
            groups of new problems (DAPO's dynamic sampling). After the last round, such groups fill up the batch.
        overlong_buffer: number of tokens up to `max_new_tokens` over which the reward falls linearly (DAPO's soft
            overlong punishment); 0 disables it.
        overlong_penalty: amount by which the reward is lower at `max_new_tokens`.
        dtype: precision of the engine's copy of the model, if the engine has this option.
        refresh_every: training steps between weight updates of the engine; above 1, rollouts are intentionally stale.
        batch_size: rows sampled at a time, if the engine has this option; null for all at once.
        sampling: temperature, truncation, and the kind of recorded log-probs.
    """

    engine: EngineName = "transformers"
    engine_options: dict[str, Any] = field(default_factory=dict, repr=False)
    prompts_per_step: int = 16
    group_size: int = 8
    max_new_tokens: int = 48
    max_rounds: int = 1
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    refresh_every: int = 1
    batch_size: int | None = None
    sampling: SamplingSpec = field(default_factory=SamplingSpec)

    def __post_init__(self) -> None:
        at_least("rollout", self, prompts_per_step=1, group_size=2, max_new_tokens=1, refresh_every=1, batch_size=1)
        at_least("rollout", self, max_rounds=1, overlong_buffer=0)
        above_zero("rollout", self, "overlong_penalty")
        if self.overlong_buffer > self.max_new_tokens:
            raise ValueError(
                f"rollout.overlong_buffer must be at most rollout.max_new_tokens={self.max_new_tokens}, got "
                f"{self.overlong_buffer}; lower it, or raise rollout.max_new_tokens"
            )

    @property
    def rows(self) -> int:
        """Return the number of responses per step."""
        return self.prompts_per_step * self.group_size


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """The distribution of the trainer's log-probs.

    Attributes:
        sampling: how to score a truncated rollout: "replay" the engine's kept sets, "recompute" the truncation from
            the trainer's own logits, subtract the log of the engine's "kept_mass", or score over the "full" vocabulary.
            All four divide by the sampling temperature, and without truncation they are equal.
        allow_incompatible: train even if the log-probs of the two sides are not comparable, which biases every ratio;
            for experiments.
    """

    sampling: Literal["replay", "recompute", "kept_mass", "full"] = "replay"
    allow_incompatible: bool = False

    def spec(self, rollout: SamplingSpec) -> SamplingSpec:
        """Return the spec of the trainer's log-probs, after checking that log π − log μ is a log-ratio.

        Raises:
            IncompatibleSamplingError: it is not; the message names the reason and the fix.
        """
        trainer = rollout.for_actor(self.sampling)
        comparison = compare(rollout, trainer)
        if comparison.verdict == "different" and not self.allow_incompatible:
            raise IncompatibleSamplingError(
                f"log-probs of the rollout and of actor.sampling={self.sampling} are not comparable: "
                f"{comparison.reason}. To fix it: {_suggest_options(rollout, self.sampling) or comparison.fix}. To "
                "train on the biased ratio anyway, set actor.allow_incompatible=true"
            )
        return trainer


@dataclass(frozen=True, kw_only=True)
class GrpoAlgorithmConfig(AlgorithmConfig):
    """Advantages, correction and loss.

    Attributes:
        leave_rejected_out_of_baseline: exclude rejected rows from their group's baseline. Null means true in decoupled
            mode, and false in bypass mode, which rejects after advantages are computed.
        loss: clipping, aggregation, and the weights of reference KL and entropy.
    """

    leave_rejected_out_of_baseline: bool | None = None
    loss: LossConfig = field(default_factory=LossConfig)

    def __post_init__(self) -> None:
        correction = self.correction
        if self.leave_rejected_out_of_baseline and (correction is None or correction.bypass_mode):
            raise ValueError(
                "algorithm.leave_rejected_out_of_baseline=true needs a correction in decoupled mode: bypass mode "
                "rejects during the update, after the advantages; leave it out or choose a decoupled preset"
            )


@dataclass(frozen=True, kw_only=True)
class GrpoLogConfig(LogConfig):
    """Logs of a run in addition to `metrics.jsonl`.

    Attributes:
        evaluate: held-out problems sampled before and after the training to measure accuracy; 0 disables it.
        rollouts: write a rollout log (Parquet) for each step.
        null: held-out problems sampled and scored before the first step, with equal weights on both sides, to measure
            the mismatch of sampler and trainer (RUN/null.json); 0 disables it.
        null_every: steps between further measurements of 8 rows, right after a weight sync. They are merged into the
            null, and older ones count less. 0 disables it.
    """

    evaluate: int = 256
    rollouts: bool = True
    null: int = 128
    null_every: int = 20

    def __post_init__(self) -> None:
        LogConfig.__post_init__(self)
        at_least("log", self, null=0, null_every=0)


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(RunConfig):
    """A GRPO run.

    Attributes:
        model: the policy to train.
        task: the task to train on.
        warm_up: supervised steps before reinforcement.
        rollout: how responses are sampled.
        actor: distribution of the trainer's log-probs.
        algorithm: advantages, correction, loss.
        optim: AdamW.
    """

    recipe: Literal["grpo"] = "grpo"
    run_dir: str = "runs/grpo"
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    warm_up: WarmUpConfig = field(default_factory=WarmUpConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    algorithm: GrpoAlgorithmConfig = field(default_factory=GrpoAlgorithmConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    log: GrpoLogConfig = field(default_factory=GrpoLogConfig)

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        self.actor.spec(dataclasses.replace(self.rollout.sampling, engine=self.rollout.engine.removesuffix("_server")))


def _suggest_options(rollout: SamplingSpec, actor: str) -> str:
    """Return the fix as options of a run, if a single option suffices."""
    if rollout.logprobs == "raw" and "processed" in rollout.engine_sampling.logprobs:
        return "set rollout.sampling.logprobs=processed"
    if rollout.logprobs == "processed" and rollout.truncates and actor == "full":
        return "set actor.sampling=replay, or sample with top_p=1, top_k=-1 and min_p=0"
    return ""
