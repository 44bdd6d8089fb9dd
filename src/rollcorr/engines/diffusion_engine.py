"""Protocol of engines that sample denoising trajectories: prompts in; latents and log μ of each noisy step out.

Symbols (docs/reference/notation.md): B pictures, S denoising steps, W of them in the window (sampled with noise), D
latent dimensions. Log-probs are in nats, averaged over D.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rollcorr.config.checks import check_integer, check_number
from rollcorr.core.diffusion import gaussian_log_prob
from rollcorr.engines.base import EngineAnswerError

# Largest difference, nats per dimension, between a reported log-prob and the density of its step: latents in half
# precision differ less, a sum over D or a density without its constants more.
LARGEST_DIFFERENCE = 0.05


@dataclass(frozen=True, kw_only=True)
class DiffusionSettings:
    """Sampling settings of a remote engine for diffusion models.

    Attributes:
        sigmas: the trainer's schedule: σ of every step and after the last, falling from at most 1 to 0. The engine's
            must be the same.
        height: pixels.
        width: pixels.
        noise_level: a of Flow-GRPO's step.
        guidance_scale: γ of classifier-free guidance; 1 disables it.

    Raises:
        ValueError: a number is out of range, or σ does not fall to 0.
    """

    sigmas: Sequence[float]
    height: int
    width: int
    noise_level: float = 0.7
    guidance_scale: float = 1.0

    def __post_init__(self) -> None:
        check_integer("height", self.height, at_least=1)
        check_integer("width", self.width, at_least=1)
        check_number("noise_level", self.noise_level, above=0)
        falling = all(later < earlier for earlier, later in zip(self.sigmas, self.sigmas[1:], strict=False))
        if len(self.sigmas) < 2 or not falling or self.sigmas[0] > 1 or self.sigmas[-1] != 0:
            raise ValueError(f"sigmas must fall from at most 1 to 0, got {list(self.sigmas)}")

    @property
    def num_steps(self) -> int:
        """Return S."""
        return len(self.sigmas) - 1

    def std(self, steps: Tensor) -> Tensor:
        """Compute s = a sqrt(σ / (1 − σ)) sqrt(σ − σ_next) of step numbers, in their shape; σ₁ replaces σ = 1 below."""
        sigmas = torch.tensor(self.sigmas, dtype=torch.float32, device="cpu")
        sigma, after = sigmas[steps], sigmas[steps + 1]
        below_one = torch.where(sigma == 1, sigmas[1], sigma)
        return self.noise_level * (sigma / (1 - below_one) * (sigma - after)).sqrt()


@dataclass(frozen=True, eq=False, kw_only=True)
class DiffusionRollout:
    """B trajectories; tensors are float32 unless noted otherwise.

    Attributes:
        sigmas: σ of every step and after the last, (S + 1,), on the CPU.
        steps: step numbers inside each row's window, rising, (B, W) int64.
        final: x at σ = 0, (B, …); None if the engine does not return it.
        version: of the weights that sampled.
        data: tensors by the keys of `rollcorr.diffusion`: `latents` (x before each step of the window, and after the
            last), `next_latents` (x after each step, only if the window has holes), `rollout_log_probs`, `std`,
            `timesteps`, `dt`, and `prev_sample_mean` if the engine returns it: the exact KL and a null need it.
    """

    sigmas: Tensor
    steps: Tensor
    final: Tensor | None
    version: int
    data: dict[str, Tensor]


class DiffusionEngine(Protocol):
    """Sampler of denoising trajectories with log-probs.

    Attributes:
        engine: its name in a rollout log.
    """

    engine: str

    def sample(self, prompts: Sequence[str], windows: Tensor, *, seed: int) -> DiffusionRollout:
        """Sample one trajectory per prompt: steps with noise inside its window, ODE steps outside.

        Args:
            prompts: B texts.
            windows: step numbers of each row's window, rising, (B, W) integers.
            seed: seeds the noise, together with the row.

        Raises:
            ValueError: the engine cannot sample such a window.
            EngineError: the engine failed, or its answer is incomplete; no part of it may be used.
        """
        ...


def build_rollout(
    settings: DiffusionSettings,
    windows: Tensor,
    latents: Sequence[Tensor],
    log_probs: Tensor,
    *,
    following: Sequence[Tensor] | None = None,
    means: Tensor | None = None,
    final: Tensor | None = None,
    version: int = 0,
) -> DiffusionRollout:
    """Check the trajectories of an answer and return them.

    Args:
        settings: settings that contain the trainer's schedule.
        windows: (B, W) step numbers.
        latents: x before each step of a row's window and after its last, (W + 1, …) each.
        log_probs: log μ of the window's steps, averaged over D, (B, W).
        following: x after each step, (W, …) each; optional, only for windows that skip steps.
        means: m of the window's steps, (B, W, …); optional.
        final: x at σ = 0, (B, …); optional.
        version: version of the weights.

    Raises:
        EngineAnswerError: a shape or number is invalid, or log-probs are no averages of the step's log-density.
    """
    rows, window = windows.shape
    before = torch.stack([x.float() for x in latents])
    if before.shape[:2] != (rows, window + 1) or log_probs.shape != (rows, window):
        raise EngineAnswerError(
            f"latents {tuple(before.shape)}, log-probs {tuple(log_probs.shape)} do not fit {rows} windows of {window} "
            f"steps: expected ({rows}, {window + 1}, …) and ({rows}, {window})"
        )
    log_probs, std = log_probs.float(), settings.std(windows)
    sigmas = torch.tensor(settings.sigmas, dtype=torch.float32, device="cpu")
    data = {
        "rollout_log_probs": log_probs,
        "latents": before,
        "std": std,
        "timesteps": sigmas[windows] * 1000,
        "dt": sigmas[windows + 1] - sigmas[windows],
    }
    after = before[:, 1:]
    if following is not None:
        after = data["next_latents"] = torch.stack([x.float() for x in following])

    # The density at the mean bounds every log-prob; with the means, each can be computed.
    expected = -std.log() - math.log(math.sqrt(2 * math.pi))
    too_far = log_probs > expected + LARGEST_DIFFERENCE
    if means is not None:
        data["prev_sample_mean"] = means = means.float()
        if means.shape != after.shape:
            raise EngineAnswerError(f"means {tuple(means.shape)} do not fit latents {tuple(before.shape)}")
        expected = gaussian_log_prob(after.flatten(0, 1), means.flatten(0, 1), std.flatten()).view(rows, window)
        too_far = ~((log_probs - expected).abs() <= LARGEST_DIFFERENCE)

    # Report the first bad step: a log-prob of another definition is worse than none.
    for name, bad in (("is not finite", ~log_probs.isfinite()), ("is no mean of the step's log-density", too_far)):
        if bad.any():
            row, column = bad.nonzero()[0].tolist()
            raise EngineAnswerError(
                f"log-prob {float(log_probs[row, column]):g} of prompt {row}, step {int(windows[row, column])} {name}: "
                f"expected about {float(expected[row, column]):g} nats per dimension at noise level "
                f"{settings.noise_level:g}; compare noise level, schedule and constants of the two sides"
            )
    if not all(tensor.isfinite().all() for tensor in data.values()):
        raise EngineAnswerError("the answer has NaN or inf in its latents or means: the weights are broken")
    return DiffusionRollout(sigmas=sigmas, steps=windows, final=final, version=version, data=data)
