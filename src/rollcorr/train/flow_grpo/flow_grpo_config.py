"""Configuration of a Flow-GRPO run: frozen dataclasses, checked at construction.

Options of all recipes are in `rollcorr.train.run_config`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from rollcorr.diffusion import DiffusionActorConfig
from rollcorr.train.flow_grpo.diffusion_policy import LoraSettings
from rollcorr.train.flow_grpo.rewards import COLORS
from rollcorr.train.flow_grpo.sampler import RolloutDtype
from rollcorr.train.run_config import AlgorithmConfig, LogConfig, OptimConfig, RunConfig, at_least


@dataclass(frozen=True, kw_only=True)
class DiffusionModelConfig:
    """The policy to train.

    Attributes:
        path: directory in the layout of diffusers (transformer, scheduler, text encoders, VAE), its id on the hub,
            or a checkpoint of a run; "shapes" is the small one in the package rollcorr-demo-models.
        family: a family of your own (`rollcorr.train.Family`), as `package.module:Class` or `file.py:Class`; defaults
            to the family of the network's class.
        height: height of pictures in pixels; defaults to the model's own size, if it has one.
        width: width of pictures in pixels; defaults to the height.
        lora: train adapters instead of the full transformer.
        gradient_checkpointing: recompute activations in the backward pass, to save memory.
        encoder_dtype: precision of text encoders and VAE, which are not trained.
    """

    path: str = "shapes"
    family: str | None = None
    height: int | None = None
    width: int | None = None
    lora: LoraSettings = field(default_factory=LoraSettings)
    gradient_checkpointing: bool = False
    encoder_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        at_least("model", self, height=1, width=1)


@dataclass(frozen=True, kw_only=True)
class PromptConfig:
    """The prompts to draw.

    Attributes:
        path: a file with one prompt per line; defaults to the prompts of the small model, four
            of which are held out for the evaluation.
    """

    path: str | None = None


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """The reward of pictures.

    Attributes:
        name: name of the reward; `rollcorr.train.flow_grpo.rewards` describes them.
        color: the rewarded color, for name=color.
        function: the reward for name=function, as `package.module:name` or `file.py:name`.
    """

    name: Literal["prompt_match", "color_and_shape", "color", "jpeg_compressibility", "ocr", "function"] = (
        "prompt_match"
    )
    color: str = "red"
    function: str | None = None

    def __post_init__(self) -> None:
        if self.color not in COLORS:
            raise ValueError(f"reward.color={self.color!r} is unknown; choose from {', '.join(COLORS)}")
        if (self.name == "function") != (self.function is not None):
            raise ValueError(
                f"reward.function belongs to reward.name=function, got name={self.name!r}, function={self.function!r}"
            )


@dataclass(frozen=True, kw_only=True)
class DiffusionRolloutConfig:
    """How trajectories are sampled.

    Attributes:
        prompts_per_step: prompts per training step.
        group_size: pictures per prompt.
        num_steps: denoising steps, S.
        noise_level: noise level a of the steps in the window.
        sde_window_size: W, number of steps with noise; the loss uses only these.
        sde_window_range: [lo, hi): range of the window; defaults to all steps of the trajectory except the last.
        sde_window: one random window for the batch ("shared"), or one for each picture ("per_sample"); "moving" starts
            at the lowest step and moves to later ones during the training (MixGRPO).
        sde_window_spacing: distance between the steps of the window; above 1, the steps between follow the ODE.
        sde_window_interval: training steps until a moving window moves by one.
        dtype: precision of the sampling copy: "bfloat16", "float16", "fp8" (emulated), "fp8_matmul" (e4m3
            products, on a device that has them) or the trainer's "float32".
        guidance_scale: γ of classifier-free guidance, 1 disables it; a distilled model reads it as an input.
        refresh_every: training steps between weight updates of the copy; above 1, rollouts are intentionally stale.
        batch_size: pictures sampled at a time; null for all at once.
    """

    prompts_per_step: int = 8
    group_size: int = 8
    num_steps: int = 10
    noise_level: float = 0.7
    sde_window_size: int = 2
    sde_window_range: tuple[int, int] | None = None
    sde_window: Literal["shared", "per_sample", "moving"] = "shared"
    sde_window_spacing: int = 1
    sde_window_interval: int = 25
    dtype: RolloutDtype = "bfloat16"
    guidance_scale: float = 1.0
    refresh_every: int = 1
    batch_size: int | None = None

    def __post_init__(self) -> None:
        at_least(
            "rollout",
            self,
            prompts_per_step=1,
            group_size=2,
            num_steps=2,
            sde_window_size=1,
            sde_window_spacing=1,
            sde_window_interval=1,
            refresh_every=1,
            batch_size=1,
        )
        if not 0 < self.noise_level < float("inf"):
            raise ValueError(
                f"rollout.noise_level must be above 0, got {self.noise_level}: a step without noise has no log-prob"
            )
        low, high = self.window_range
        if not 0 <= low < high <= self.num_steps or high - low < self.window_extent:
            raise ValueError(
                f"rollout.sde_window_range=[{low}, {high}] must lie in [0, num_steps={self.num_steps}] and hold "
                f"{self.window_extent} steps, for sde_window_size={self.sde_window_size} and "
                f"sde_window_spacing={self.sde_window_spacing}"
            )

    @property
    def window_range(self) -> tuple[int, int]:
        """Return [lo, hi), with the default filled in."""
        return (0, self.num_steps - 1) if self.sde_window_range is None else self.sde_window_range

    @property
    def window_extent(self) -> int:
        """Return the number of steps from the first to the last of a window, with its holes."""
        return (self.sde_window_size - 1) * self.sde_window_spacing + 1

    @property
    def rows(self) -> int:
        """Return the number of pictures per step."""
        return self.prompts_per_step * self.group_size


@dataclass(frozen=True, kw_only=True)
class DiffusionLossConfig:
    """Loss of denoising steps; `rollcorr.diffusion.DiffusionActorConfig` documents the fields."""

    loss_mode: Literal["flow_grpo", "grpo_guard", "flow_dppo"] = "flow_grpo"
    clip_ratio: float = 1e-4
    kl_mask_threshold: float = 1e-5
    adv_clip_max: float = 5.0
    kl_coef: float = 0.0
    reduction: Any = "mean"
    rs_denominator: Literal["all", "kept", "weights"] | None = None
    min_keep_fraction: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DiffusionAlgorithmConfig(AlgorithmConfig):
    """Advantages, correction and loss.

    Attributes:
        loss: the rest of `DiffusionActorConfig`.
    """

    loss: DiffusionLossConfig = field(default_factory=DiffusionLossConfig)

    def __post_init__(self) -> None:
        _ = self.actor

    @cached_property
    def actor(self) -> DiffusionActorConfig:
        """Return the configuration for `rollcorr.diffusion`."""
        return DiffusionActorConfig(**asdict(self.loss), rollout_correction=self.correction)


@dataclass(frozen=True, kw_only=True)
class DiffusionLogConfig(LogConfig):
    """Logs of a run in addition to `metrics.jsonl`.

    Attributes:
        evaluate: pictures sampled without noise before and after the training; 0 disables it.
        images: number of pictures in the report. Above 0, the rollout log shows what both policies predicted at each
            step of the four pictures with the largest exact KL.
        rollouts: write a rollout log (Parquet) for each step, without latents. In bypass mode it has
            the pictures of the first mini-batch, with log π_θ before the update.
        null: pictures sampled and scored before the first step, with equal weights on both sides, to measure the
            mismatch of sampler and trainer (RUN/null.json); 0 disables it.
        null_every: steps between further measurements of 8 pictures, right after a weight sync. They are merged into
            the null, and older ones count less. 0 disables it.
    """

    evaluate: int = 48
    images: int = 24
    rollouts: bool = True
    null: int = 64
    null_every: int = 20

    def __post_init__(self) -> None:
        LogConfig.__post_init__(self)
        at_least("log", self, images=0, null=0, null_every=0)


@dataclass(frozen=True, kw_only=True)
class FlowGrpoConfig(RunConfig):
    """A Flow-GRPO run.

    Attributes:
        model: the policy to train.
        prompts: the prompts to draw.
        reward: the reward of pictures.
        rollout: how trajectories are sampled.
        algorithm: advantages, correction, loss.
        optim: AdamW.
    """

    recipe: Literal["flow_grpo"] = "flow_grpo"
    run_dir: str = "runs/flow-grpo"
    model: DiffusionModelConfig = field(default_factory=DiffusionModelConfig)
    prompts: PromptConfig = field(default_factory=PromptConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: DiffusionRolloutConfig = field(default_factory=DiffusionRolloutConfig)
    algorithm: DiffusionAlgorithmConfig = field(default_factory=DiffusionAlgorithmConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    log: DiffusionLogConfig = field(default_factory=DiffusionLogConfig)
