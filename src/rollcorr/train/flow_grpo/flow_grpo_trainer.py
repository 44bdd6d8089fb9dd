"""Flow-GRPO with rollout correction, one training step from top to bottom.

    sample      the rollout copy draws a group of pictures for each prompt and reports log μ of the steps in the window
    reward      each picture is judged
    old         the trainer recomputes log π_old of the same steps (decoupled mode; bypass mode skips this)
    correct     weights and keep mask from π_old / μ, once per batch (decoupled mode; bypass mode does it in the loss)
    advantage   rewards become advantages within their group
    update      PPO epochs × mini-batches × micro-batches × steps of the window

`FlowGrpoTrainer.step` is this list. Files, checkpoints and Ctrl-C are in `rollcorr.train.loop`.
Symbols: B pictures, W steps in the window, D latent dimensions; log-probs in nats, averaged over D.

Source: Liu et al. (2025), "Flow-GRPO", arXiv:2505.05470.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rollcorr.core.diffusion import gaussian_log_prob
from rollcorr.correction.losses import PolicyLossOutput
from rollcorr.correction.training_step import TrainingStep
from rollcorr.diffusion import (
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_diffusion_batch,
    check_schedule,
    loss_step_metrics,
)
from rollcorr.engines import DiffusionEngine
from rollcorr.train.flow_grpo.diffusion_policy import DiffusionPolicy
from rollcorr.train.flow_grpo.family import Prompts, predict
from rollcorr.train.flow_grpo.flow_grpo_config import DiffusionRolloutConfig, FlowGrpoConfig
from rollcorr.train.flow_grpo.fresh_pictures import fresh_pictures
from rollcorr.train.flow_grpo.sampler import RolloutModel, Sampler, Trajectories, draw_windows, make_schedule
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
    shuffled_walk,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rollcorr.rollout_log import RolloutBatch

PictureReward = Callable[[Tensor, list[str]], Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class PictureBatch:
    """One step's pictures.

    Attributes:
        trajectories: the sampled trajectories.
        texts: their prompts, length B.
        images: (B, 3, H, W) in [0, 1].
        rewards: (B,) on the CPU.
        group_ids: index of its prompt in the step, (B,) on the CPU.
        data: the tensors that the correction and the loss read, by the keys of `rollcorr.diffusion`.
    """

    trajectories: Trajectories
    texts: list[str]
    images: Tensor
    rewards: Tensor
    group_ids: Tensor
    data: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True, eq=False)
class FirstScores:
    """What the loss computed before the first update of a step, in bypass mode.

    Attributes:
        rows: pictures of the first mini-batch that this rank scored, (b,) int64.
        data: `old_log_probs` (b, W) and `old_prev_sample_mean` (b, W, …) of π_θ, without gradient.
    """

    rows: Tensor
    data: dict[str, Tensor]

    @classmethod
    def of(cls, parts: list[tuple[Tensor, dict[str, Tensor]]], window: int) -> FirstScores:
        """Join the scores of micro-batches, each with its rows: one for each step of the window, in order."""
        scores = [score for _, score in parts]
        data = {
            f"old_{name}": torch.cat(
                [torch.cat([s[name] for s in scores[i : i + window]], dim=1) for i in range(0, len(scores), window)]
            )
            for name in ("log_probs", "prev_sample_mean")
        }
        return cls(torch.cat([rows for rows, _ in parts[::window]]), data)


@dataclass(frozen=True, eq=False)
class PictureStepResult:
    """Metrics and batch of a step; in bypass mode also the scores before its first update; and a null, if measured."""

    metrics: dict[str, float]
    batch: PictureBatch
    first: FirstScores | None = None
    fresh_null: tuple[RolloutBatch, ...] = ()


class FlowGrpoTrainer:
    """The state of a training run in memory, and one step of it.

    Args:
        config: the run's configuration.
        policy: trained in place, in float32.
        texts: the prompts to draw.
        reward: computes the reward of pictures.
        reference: frozen transformer for the KL penalty; optional. None with adapters: the policy without them is used.
        group: data-parallel ranks that share the update. Each samples and corrects the same batch, from the same seed
            and weights; forward and backward passes of the update are divided, and the gradients summed.

    Raises:
        ValueError: a mini-batch would have fewer pictures than there are ranks.
    """

    def __init__(
        self,
        config: FlowGrpoConfig,
        policy: DiffusionPolicy,
        texts: Sequence[str],
        reward: PictureReward,
        *,
        reference: nn.Module | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        self.config = config
        self.policy = policy
        self.texts = tuple(texts)
        self.reward = reward
        self.reference = reference
        self.group = group
        self.actor = config.algorithm.actor
        self.model: nn.Module = policy.transformer
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]

        # The sampler has a copy of the weights in its own precision, which may lag behind.
        rollout = config.rollout
        self.engine = RolloutModel(self.model, dtype=rollout.dtype)
        self.schedule = make_schedule(policy, rollout.num_steps, noise_level=rollout.noise_level)
        self.sampler = Sampler(policy=policy, model=self.engine, schedule=self.schedule, batch_size=rollout.batch_size)
        self.optimizer = make_optimizer(self.parameters, config.optim)
        self.micro_batch_size = micro_batch_size(rollout.rows, config.optim)
        self.skipped_steps = 0
        self.forward_passes = 0
        _check_divisible_among(group, rollout.rows, config.optim.mini_batch_size)

    def step(self, step: int, *, null_pictures: int = 0) -> PictureStepResult:
        """Run training step `step` (1, 2, …): a function of the weights, the optimizer and (seed, step).

        Args:
            step: its number.
            null_pictures: pictures to sample and score for the null after a weight sync; they do not change the step.
        """
        clock = Clock()
        with clock("rollout"):
            staleness = refresh_weights(self.engine, self.model, step, every=self.config.rollout.refresh_every)
            is_synced = self.engine.weight_version == step - 1
            fresh_null = tuple(self.null_pictures(null_pictures, step=step)) if null_pictures and is_synced else ()
            passes = self.forward_passes
            trajectories, texts = self.sample(step)
        with clock("reward"):
            batch = self._build_batch(trajectories, texts)
        with clock("old_log_prob"):
            self._add_old_log_probs(batch)

        # Advantages come after the correction, which may reject samples.
        with clock("correction"):
            metrics = self._add_correction(batch)
            advantages = ADVANTAGES[self.config.algorithm.advantage](batch.rewards, batch.group_ids)
            batch.data["advantages"] = advantages.to(batch.trajectories.steps.device)
        with clock("update"):
            updated, first = self._update(batch, step)
            metrics |= updated

        metrics |= {
            "reward/mean": float(batch.rewards.double().mean()),
            "reward/std": float(batch.rewards.double().std(correction=0)),
            "actor/skipped_steps": float(self.skipped_steps),
            "engine/staleness": float(staleness),
            "perf/forward_passes": float(self.forward_passes - passes),
            "perf/images_per_second": len(batch) / clock.total,
            **clock.metrics(),
        }
        return PictureStepResult(metrics, batch, first, fresh_null)

    def null_pictures(
        self, pictures: int, *, step: int = 0, engine: DiffusionEngine | None = None
    ) -> Iterator[RolloutBatch]:
        """Sample and score pictures like a step; yield batches of a rollout log. With equal weights this is a null.

        Each picture has a window of its own, so that few pictures cover every timestep of the run.

        Args:
            pictures: how many, at least.
            step: number of the training step that follows.
            engine: samples instead of the rollout copy; optional.

        Raises:
            EngineError: the engine failed.
            KeyError: the engine returns no means.
            ValueError: the engine's schedule differs.
        """
        # A few pictures are two of each prompt.
        rollout = replace(self.config.rollout, sde_window="per_sample")
        if pictures < rollout.rows:
            rollout = replace(rollout, prompts_per_step=-(-pictures // 2), group_size=2)
        name = f"rollout copy, {rollout.dtype}" if engine is None else engine.engine

        def sample(number: int) -> Mapping[str, Any]:
            trajectories, prompts = self.sample(HELD_OUT + step + number, engine, rollout=rollout)
            return {
                **trajectories.data,
                **trajectories.schedule.logged(trajectories.steps),
                "prompt": prompts,
                "engine": name,
                "model": self.config.model.path,
                "trajectories": trajectories,
            }

        def score(sampled: Mapping[str, Any]) -> Mapping[str, Tensor]:
            return self.score_all(sampled["trajectories"], self.model)

        return fresh_pictures(sample, score, pictures=pictures)

    def prompts(self, texts: Iterable[str], *, copies: int = 1) -> Prompts:
        """Return prompt inputs of the transformer, each repeated `copies` times in a row.

        Args:
            texts: the prompts.
            copies: pictures of each prompt.
        """
        given = list(texts)
        rows = torch.arange(len(given), device="cpu").repeat_interleave(copies)
        condition = self.policy.encoder.encode(given)

        # Guidance compares each prompt with the empty one.
        guidance, empty = self.config.rollout.guidance_scale, None
        if guidance != 1.0:
            empty = self.policy.encoder.encode([""]).select(torch.zeros_like(rows))
        return Prompts(condition.select(rows), empty, guidance)

    def sample(
        self, step: int, engine: DiffusionEngine | None = None, *, rollout: DiffusionRolloutConfig | None = None
    ) -> tuple[Trajectories, list[str]]:
        """Sample the trajectories of the step, a group for each prompt; return them with their prompts.

        Args:
            step: seeds prompts, windows and noise.
            engine: samples instead of the rollout copy; optional. It must have the trainer's weights.
            rollout: numbers of prompts and pictures, and windows; defaults to the configuration's.

        Raises:
            ValueError: the engine's schedule differs from the trainer's.
            EngineError: the engine failed.
        """
        rollout, seed = rollout or self.config.rollout, self.config.seed
        walk = shuffled_walk(len(self.texts), rollout.prompts_per_step, purpose="prompts", seed=seed, step=step)
        texts = [self.texts[row] for row in walk]
        windows = draw_windows(rollout, seed=seed, step=step)

        prompts = self.prompts(texts, copies=rollout.group_size)
        repeated = [text for text in texts for _ in range(rollout.group_size)]
        if engine is None:
            return self.sampler.sample(prompts, windows, seed=seed, step=step), repeated

        # Densities of steps between other σ are not comparable.
        sampled = engine.sample(repeated, windows, seed=derived_seed(seed, "engine", step))
        check_schedule(sampled.sigmas.tolist(), self.schedule.sigmas.tolist())
        device = self.parameters[0].device
        here = {name: tensor.to(device) for name, tensor in sampled.data.items()}
        own = {"schedule": self.schedule, "prompts": prompts, "data": here, "steps": sampled.steps.to(device)}
        return Trajectories(**vars(sampled) | own), repeated

    def _build_batch(self, trajectories: Trajectories, texts: list[str]) -> PictureBatch:
        assert trajectories.final is not None, "the rollout copy returns x at σ = 0"
        images = self.policy.decode(trajectories.final)
        groups = torch.arange(self.config.rollout.prompts_per_step, device="cpu").repeat_interleave(
            self.config.rollout.group_size
        )
        return PictureBatch(
            trajectories=trajectories,
            texts=texts,
            images=images,
            rewards=self.reward(images, texts),
            group_ids=groups,
            data=trajectories.data,
        )

    def _add_old_log_probs(self, batch: PictureBatch) -> None:
        """Compute log π_old, and means of the reference. Bypass mode uses μ as π_old and skips this forward pass."""
        # Densities of steps between other σ are not comparable.
        check_schedule(batch.trajectories.schedule.sigmas.tolist(), self.schedule.sigmas.tolist())

        if not self.actor.bypass_mode:
            old = self.score_all(batch.trajectories, self.model)
            batch.data.update(old_log_probs=old["log_probs"], old_prev_sample_mean=old["prev_sample_mean"])

        if self.actor.kl_coef:
            # With adapters, the reference is the base transformer.
            with self.policy.without_adapters():
                reference = self.score_all(batch.trajectories, self.reference or self.model)
            batch.data.update(ref_prev_sample_mean=reference["prev_sample_mean"])

    @torch.no_grad()
    def score_all(self, trajectories: Trajectories, model: nn.Module) -> dict[str, Tensor]:
        """Compute `log_probs` (B, W) and `prev_sample_mean` (B, W, …) of trajectories under a model."""
        rows, window = trajectories.steps.shape
        parts = [
            [self._compute_step_log_probs(trajectories, model, chunk, column) for column in range(window)]
            for chunk in torch.arange(rows, device="cpu").split(self.micro_batch_size)
        ]
        return {
            name: torch.cat([torch.cat([step[name] for step in part], dim=1) for part in parts])
            for name in ("log_probs", "prev_sample_mean")
        }

    def _compute_step_log_probs(
        self, trajectories: Trajectories, model: nn.Module, rows: Tensor, column: int
    ) -> dict[str, Tensor]:
        """Compute log-probs (b, 1) and means (b, 1, …) of one step of the window, with gradient."""
        data = trajectories.data
        x, after = (data["latents"][rows, column + i] for i in (0, 1))
        if "next_latents" in data:
            after = data["next_latents"][rows, column]
        steps = trajectories.steps[rows, column]
        self.forward_passes += 1
        prompts, size = trajectories.prompts.select(rows), self.policy.size
        v = predict(model, self.policy.family, x, self.schedule.timestep(steps), prompts, size=size)

        # Log-density of the sampled step under this model: a Gaussian around the mean from its prediction.
        mean, std = self.schedule.moments(v, x, steps)
        log_prob = gaussian_log_prob(after, mean, std)
        return {"log_probs": log_prob.unsqueeze(1), "prev_sample_mean": mean.unsqueeze(1)}

    def _add_correction(self, batch: PictureBatch) -> dict[str, float]:
        schedule = self.schedule.timesteps.tolist()
        if self.actor.bypass_mode:
            apply_bypass_mode_to_diffusion_batch(batch.data, schedule=schedule)
            return {}
        return apply_rollout_correction_to_diffusion_batch(batch.data, self.actor, schedule=schedule)[1]

    def _update(self, batch: PictureBatch, step: int) -> tuple[dict[str, float], FirstScores | None]:
        """Run every optimizer step of the batch; return their combined metrics, and the first scores in bypass mode."""
        optim = self.config.optim
        set_learning_rate(self.optimizer, optim, step)
        parts = mini_batches(len(batch), optim, seed=self.config.seed, step=step)
        scores: list[tuple[Tensor, dict[str, Tensor]]] = []
        done: list[tuple[list[PolicyLossOutput], dict[str, float]]] = []
        for _, mini_batch in parts:
            # Before the first update π_θ is the policy that decoupled mode calls π_old.
            seen = scores if self.actor.bypass_mode and self.config.log.rollouts and not done else None
            done.append(self._train_on_mini_batch(batch, mini_batch, seen))

        outputs = [output for found, _ in done for output in found]
        means = {name: sum(numbers[name] for _, numbers in done) / len(done) for name in done[0][1]}
        first = FirstScores.of(scores, batch.trajectories.steps.shape[1]) if scores else None
        return loss_step_metrics(outputs, self.actor, group=self.group) | means, first

    def _train_on_mini_batch(
        self, batch: PictureBatch, rows: Tensor, seen: list[tuple[Tensor, dict[str, Tensor]]] | None
    ) -> tuple[list[PolicyLossOutput], dict[str, float]]:
        """Accumulate a mini-batch's gradients over micro-batches and steps, then step; append its scores to `seen`.

        The step is skipped if less than `min_keep_fraction` or no sample was kept, or if a number is not finite.
        """
        window = batch.trajectories.steps.shape[1]
        self.optimizer.zero_grad()
        outputs = []
        with TrainingStep(self.model, self.actor, group=self.group or "local") as gradients:
            for micro_batch in own_rows(rows, self.group).split(self.micro_batch_size):
                for column in range(window):
                    scores = self._compute_step_log_probs(batch.trajectories, self.model, micro_batch, column)
                    if seen is not None:
                        seen.append((micro_batch, {name: score.detach() for name, score in scores.items()}))
                    output = gradients.diffusion_loss(
                        scores,
                        _select_step(batch.data, micro_batch, column),
                        schedule=self.schedule.timesteps.tolist(),
                    )
                    gradients.backward(output)
                    outputs.append(output)
            outcome = gradients.finish()

        # Whether to step depends on these numbers: read them from the device together, once per optimizer step.
        clipped = nn.utils.clip_grad_norm_(self.parameters, self.config.optim.max_grad_norm)
        numbers = outcome.loss, clipped.to(outcome.loss), outcome.kept_fraction, outcome.skipped.double()
        loss, norm, kept_fraction, skipped = torch.stack(numbers).tolist()
        if skipped or not math.isfinite(loss + norm):
            self.skipped_steps += 1
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()

        return outputs, {"actor/loss": loss, "actor/grad_norm": norm, "actor/kept_fraction": kept_fraction}


def _select_step(data: dict[str, Tensor], rows: Tensor, column: int) -> dict[str, Tensor]:
    """Return one step of the window of some rows: tensors (b, 1, …), latents (b, 2, …), advantages (b,)."""
    width = {"latents": 2}
    return {
        name: tensor[rows] if name == "advantages" else tensor[:, column : column + width.get(name, 1)][rows]
        for name, tensor in data.items()
    }


def _check_divisible_among(group: ProcessGroup | None, rows: int, mini_batch_size: int | None) -> None:
    """Raise if a mini-batch has fewer pictures than ranks: each rank contributes to every collective."""
    size = mini_batch_size or rows
    smallest = min(size, rows % size or size)
    if group is not None and smallest < group.size():
        raise ValueError(
            f"a mini-batch of {smallest} pictures cannot be divided among {group.size()} ranks; raise "
            "optim.mini_batch_size, or make rollout.prompts_per_step × rollout.group_size a multiple of it"
        )
