"""Schedules of denoising steps: the noise of every step, and the Gaussian that a step samples from.

    Schedule        flow matching: x_σ = (1 − σ) x₀ + σ ε, the model predicts v = ε − x₀; Flow-GRPO's step
    DdimSchedule    x = sqrt(ᾱ) x₀ + sqrt(1 − ᾱ) ε, the model predicts ε or v; DDIM's step with η = noise level

Everything is float32. A schedule is made by a family (`rollcorr.train.flow_grpo.families`) from diffusers' scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from rollcorr.core.diffusion import sde_step_mean


@dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
    """σ of every step of a flow-matching model, and the noise level.

    Attributes:
        sigmas: (S + 1,) float32 on the CPU, falling, the last one 0.
        noise_level: a, inside the window.
        values: timestep values, the network's input, (S,) float32; defaults to σ × 1000.

    Source: Liu et al. (2025), "Flow-GRPO", arXiv:2505.05470.
    """

    sigmas: Tensor
    noise_level: float = 0.7
    values: Tensor | None = None

    def __post_init__(self) -> None:
        if not (self._is_falling and self.sigmas[-1] == 0):
            raise ValueError(f"sigmas must fall from at most 1 to 0, got {[round(s, 4) for s in self.sigmas.tolist()]}")

    @property
    def _is_falling(self) -> bool:
        return bool((self.sigmas.diff() < 0).all()) and bool(self.sigmas[0] <= 1)

    @property
    def steps(self) -> int:
        """Return S."""
        return len(self.sigmas) - 1

    @property
    def timesteps(self) -> Tensor:
        """Return the timestep values, (S,)."""
        return self.sigmas[:-1] * 1000 if self.values is None else self.values

    def at(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Return σ and the next σ of some step numbers, any shape, on their device."""
        sigmas = self.sigmas.to(steps.device)
        return sigmas[steps], sigmas[steps + 1]

    def logged(self, steps: Tensor) -> dict[str, Tensor]:
        """Return the columns `sigma` and `sigma_next` of a rollout log for step numbers, in their shape.

        Checks of a log relate them to s by the formula of Flow-GRPO, so other schedules return none.
        """
        return dict(zip(("sigma", "sigma_next"), self.at(steps), strict=True))

    def timestep(self, steps: Tensor) -> Tensor:
        """Return the timestep values of some step numbers, any shape, on their device."""
        return self.timesteps.to(steps.device)[steps]

    def moments(self, prediction: Tensor, sample: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Compute mean m and deviation s of a noisy step from x at given step numbers; see `rollcorr.core.diffusion`.

        Args:
            prediction: the model's, (B, …) float32.
            sample: x, same shape.
            steps: step numbers, (B,).

        Returns:
            m in the shape of the sample, s (B,).
        """
        mean, std = self._mean_and_std(prediction, sample, steps, self.noise_level)
        assert std is not None, "a step without noise has no log-prob"
        return mean, std.flatten()

    def straight(self, prediction: Tensor, sample: Tensor, steps: Tensor) -> Tensor:
        """Compute the step without noise, (B, …): x + (σ_next − σ) v for a flow-matching model.

        Args:
            prediction: the model's, (B, …) float32.
            sample: x, same shape.
            steps: step numbers, (B,).
        """
        return self._mean_and_std(prediction, sample, steps, 0.0)[0]

    def predicted_clean(self, mean: Tensor, sample: Tensor, steps: Tensor) -> Tensor:
        """Compute x̂₀, (B, …), from the mean m of a noisy step; approximate if DDIM clips x̂₀.

        m is affine in the model's prediction, so the means of two known predictions give the prediction.

        Args:
            mean: m, (B, …) float32.
            sample: x, same shape.
            steps: step numbers, (B,).
        """
        at_zero, at_one = (self.moments(torch.full_like(sample, value), sample, steps)[0] for value in (0.0, 1.0))
        return self._clean((mean - at_zero) / (at_one - at_zero), sample, steps)

    def _clean(self, prediction: Tensor, sample: Tensor, steps: Tensor) -> Tensor:
        """Compute x̂₀ = x − σ v."""
        return sample - self.at(steps)[0].view(-1, *[1] * (sample.dim() - 1)) * prediction

    def _mean_and_std(
        self, prediction: Tensor, sample: Tensor, steps: Tensor, noise_level: float
    ) -> tuple[Tensor, Tensor | None]:
        at = dict(zip(("sigma", "sigma_next"), self.at(steps), strict=True))
        return sde_step_mean(prediction, sample, **at, sigma_max=float(self.sigmas[1]), noise_level=noise_level)


@dataclass(frozen=True, eq=False, kw_only=True)
class DdimSchedule(Schedule):
    """DDIM's steps, with σ = sqrt(1 − ᾱ) and η = `noise_level`; η = 1 is DDPM.

        s = η sqrt((1 − ᾱ′) / (1 − ᾱ) · (1 − ᾱ / ᾱ′))        m = sqrt(ᾱ′) x̂₀ + sqrt(1 − ᾱ′ − s²) ε̂

    Attributes:
        sigmas: (S + 1,), falling; the last one is 0 if ᾱ′ of the last step is 1.
        alphas: ᾱ of every step and after the last, (S + 1,) float32.
        predicts: "epsilon", or "v_prediction" for v = sqrt(ᾱ) ε − sqrt(1 − ᾱ) x₀.
        clip: largest |x̂₀|; optional.

    Raises:
        ValueError: the noise level exceeds 1, where s² exceeds 1 − ᾱ′, or ᾱ does not rise.

    Source: Song et al. (2021), "Denoising Diffusion Implicit Models", arXiv:2010.02502; Black et al. (2023), "Training
    Diffusion Models with Reinforcement Learning", arXiv:2305.13301, for its log-prob.
    """

    alphas: Tensor
    predicts: Literal["epsilon", "v_prediction"] = "epsilon"
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.noise_level > 1:
            raise ValueError(
                f"rollout.noise_level={self.noise_level:g} is η of DDIM, which is at most 1 (DDPM); set it to 1 or less"
            )
        if not self._is_falling:
            raise ValueError(f"noise must fall at every step, got {[round(s, 4) for s in self.sigmas.tolist()]}")

    def logged(self, steps: Tensor) -> dict[str, Tensor]:
        """Return no column: s of DDIM follows a different formula."""
        return {}

    def predicted_clean(self, mean: Tensor, sample: Tensor, steps: Tensor) -> Tensor:
        """Compute x̂₀ as `Schedule` does, as if nothing was clipped: only then is the mean affine."""
        return Schedule.predicted_clean(replace(self, clip=None), mean, sample, steps)

    def _clean(self, prediction: Tensor, sample: Tensor, steps: Tensor) -> Tensor:
        """Compute x̂₀ from ε or v."""
        now = self.alphas.to(steps.device)[steps].view(-1, *[1] * (sample.dim() - 1))
        if self.predicts == "v_prediction":
            clean = now.sqrt() * sample - (1 - now).sqrt() * prediction
        else:
            clean = (sample - (1 - now).sqrt() * prediction) / now.sqrt()
        return clean if self.clip is None else clean.clamp(-self.clip, self.clip)

    def _mean_and_std(
        self, prediction: Tensor, sample: Tensor, steps: Tensor, noise_level: float
    ) -> tuple[Tensor, Tensor | None]:
        wide = (-1, *[1] * (sample.dim() - 1))
        alphas = self.alphas.to(steps.device)
        now, then = alphas[steps].view(wide), alphas[steps + 1].view(wide)

        # Estimate x₀ and ε from the prediction.
        clean, epsilon = self._clean(prediction, sample, steps), prediction
        if self.predicts == "v_prediction":
            epsilon = now.sqrt() * prediction + (1 - now).sqrt() * sample

        # Mix them again for the next step; noise replaces a part of ε.
        variance = noise_level**2 * (1 - then) / (1 - now) * (1 - now / then)
        mean = then.sqrt() * clean + (1 - then - variance).sqrt() * epsilon
        return mean, variance.sqrt() if noise_level else None
