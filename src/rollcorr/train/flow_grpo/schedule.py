"""The steps of a trajectory: diffusers' own schedule, the window in which noise is added, the Gaussian of each step.

A trajectory of S steps visits σ_0 = 1 > σ_1 > … > σ_S = 0. Inside the window of W steps the sampler takes SDE steps,
which are trained on; outside it follows the ODE.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rollcorr.core.diffusion import sde_step_mean
from rollcorr.train.steps import derived_seed

if TYPE_CHECKING:
    from rollcorr.train.flow_grpo.diffusion_policy import DiffusionPolicy


@dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
    """σ of every step, and how noise is added.

    Attributes:
        sigmas: (S + 1,) float32 on the CPU, falling, the last one 0.
        noise_level: a, inside the window.
    """

    sigmas: Tensor
    noise_level: float = 0.7

    def __post_init__(self) -> None:
        sigmas = self.sigmas
        falling = bool((sigmas.diff() < 0).all()) and sigmas[0] <= 1 and sigmas[-1] == 0
        if not falling:
            raise ValueError(f"sigmas must fall from at most 1 to 0, got {[round(s, 4) for s in sigmas.tolist()]}")

    @property
    def steps(self) -> int:
        """S."""
        return len(self.sigmas) - 1

    @property
    def timesteps(self) -> Tensor:
        """(S,) σ × 1000, as the transformer reads it."""
        return self.sigmas[:-1] * 1000

    def at(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        """σ and the next σ of some step numbers, any shape, on their device."""
        sigmas = self.sigmas.to(steps.device)
        return sigmas[steps], sigmas[steps + 1]

    def moments(self, velocity: Tensor, sample: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Mean m and deviation s of an SDE step from x at given step numbers: see `rollcorr.core.diffusion`.

        Args:
            velocity: v, (B, …) float32.
            sample: x, same shape.
            steps: step numbers, (B,).

        Returns:
            m in the shape of the sample, s (B,).
        """
        mean, std = self._step(velocity, sample, steps, self.noise_level)
        assert std is not None, "a step without noise has no log-prob"
        return mean, std.flatten()

    def straight(self, velocity: Tensor, sample: Tensor, steps: Tensor) -> Tensor:
        """x + (σ_next − σ) v: the Euler step of the ODE, (B, …)."""
        return self._step(velocity, sample, steps, 0.0)[0]

    def _step(
        self, velocity: Tensor, sample: Tensor, steps: Tensor, noise_level: float
    ) -> tuple[Tensor, Tensor | None]:
        sigma, sigma_next = self.at(steps)
        largest = float(self.sigmas[1])
        return sde_step_mean(
            velocity, sample, sigma=sigma, sigma_next=sigma_next, sigma_max=largest, noise_level=noise_level
        )


def make_schedule(policy: DiffusionPolicy, steps: int, *, noise_level: float = 0.7) -> Schedule:
    """The schedule that the pipeline of this model would use, by diffusers' own scheduler.

    Raises:
        ValueError: the scheduler's σ do not fall from 1 to 0 (`invert_sigmas`, for instance).
    """
    # Setting the steps changes a scheduler, and the policy keeps its own.
    scheduler: Any = copy.deepcopy(policy.scheduler)
    config = scheduler.config
    shift = {"mu": _dynamic_shift(config, policy.sequence_length)} if config.use_dynamic_shifting else {}
    if policy.family.even_sigmas:
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), **shift)
    else:
        scheduler.set_timesteps(steps, **shift)

    return Schedule(sigmas=scheduler.sigmas.float().cpu(), noise_level=noise_level)


def draw_windows(rows: int, size: int, span: tuple[int, int], *, per_sample: bool, seed: int, step: int) -> Tensor:
    """Step numbers of each sample's window: (rows, W) integers.

    Args:
        rows: samples.
        size: W.
        span: [lo, hi): steps that a window may hold.
        per_sample: draw for every sample, else once for all.
        seed: the run's.
        step: training step.
    """
    rng = random.Random(derived_seed(seed, "window", step))
    low, high = span
    starts = [rng.randint(low, high - size) for _ in range(rows if per_sample else 1)]
    return (torch.tensor(starts, device="cpu")[:, None] + torch.arange(size, device="cpu")).expand(rows, size)


def _dynamic_shift(config: Any, sequence_length: int) -> float:  # noqa: ANN401
    """μ, linear in the number of image tokens, as the pipelines of diffusers take it from the configuration."""
    low, high = config.base_image_seq_len, config.max_image_seq_len
    slope = (config.max_shift - config.base_shift) / (high - low)
    return float(config.base_shift + slope * (sequence_length - low))
