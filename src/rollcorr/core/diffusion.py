"""One denoising step of a flow-matching sampler as a Gaussian policy: mean and standard deviation, log-probs, exact KL.

Symbols: x_σ = (1 − σ) x₀ + σ ε is the latent at noise σ, v = ε − x₀ the model's velocity, dt = σ_next − σ < 0, a the
noise level, g the diffusion coefficient, D the number of latent dimensions. A step samples x′ = m + s z, z ~ N(0, 1):

    m = x (1 + g² dt / 2σ) + v (1 + g² (1 − σ) / 2σ) dt        s = g sqrt(−dt)

    sde (Flow-GRPO)    g = a sqrt(σ / (1 − σ)), with σ₁ in place of σ under the root where σ = 1
    dance (DanceGRPO)  g = a
    cps                s = σ_next sin(a π / 2), with a different mean

a = 0 is the Euler step of the ODE. It is deterministic, so it has no log-prob, and its std is None.

Latents and velocities are float32 or float64. Half precision is rejected: its rounding error would be the very mismatch
to be measured. Every function is pure and reads shapes, not values.

Source: Liu et al. (2025), "Flow-GRPO", arXiv:2505.05470; Xue et al. (2025), "DanceGRPO", arXiv:2505.07818; Wang et al.
(2025), "Coefficients-Preserving Sampling", arXiv:2509.05952.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Reduction = Literal["mean", "sum"] | float
Sigma = float | Tensor


class SdeStep(NamedTuple):
    """Result of one sampler step.

    Attributes:
        prev_sample: x′, the sample at σ_next ("previous" as diffusers counts), in the shape of the sample.
        mean: m, same shape.
        std: s, broadcastable to the sample: 0-d, or (B, 1, …). None for a deterministic step.
    """

    prev_sample: Tensor
    mean: Tensor
    std: Tensor | None

    def log_prob(self, *, reduction: Reduction = "mean") -> Tensor | None:
        """Compute `gaussian_log_prob` of x′, (B,) nats; None for a deterministic step, which has no density."""
        if self.std is None:
            return None
        return gaussian_log_prob(self.prev_sample, self.mean, self.std, reduction=reduction)


def sde_step_mean(
    velocity: Tensor, sample: Tensor, *, sigma: Sigma, sigma_next: Sigma, sigma_max: Sigma, noise_level: float
) -> tuple[Tensor, Tensor | None]:
    """Compute m and s of Flow-GRPO's step, where g = a sqrt(σ / (1 − σ)).

    Args:
        velocity: v, the model's prediction. (B, …), float32. Carries the gradient.
        sample: x at σ, same shape and dtype.
        sigma: σ in (0, 1], a number or (B,).
        sigma_next: σ of the next step, below σ, a number or (B,).
        sigma_max: σ₁, the schedule's second entry: replaces σ = 1, where g would be infinite.
        noise_level: a ≥ 0.

    Returns:
        m in the shape of the sample, and s, 0-d or (B, 1, …); s is None for a = 0.

    Raises:
        TypeError: a tensor is in half precision, or the two have different dtypes.
        ValueError: shapes differ, or noise_level is negative.

    Source: Liu et al. (2025), arXiv:2505.05470.
    """
    sigma, _, dt = _broadcast_schedule(velocity, sample, sigma, sigma_next, noise_level)
    if noise_level == 0:
        return sample + dt * velocity, None
    below_one = torch.where(sigma == 1, _broadcast_like(sigma_max, sample), sigma)  # where σ = 1, g would be infinite
    return _sde_mean_and_std(velocity, sample, sigma, dt, noise_level * (sigma / (1 - below_one)).sqrt())


def dance_sde_step_mean(
    velocity: Tensor, sample: Tensor, *, sigma: Sigma, sigma_next: Sigma, noise_level: float
) -> tuple[Tensor, Tensor | None]:
    """Compute m and s of DanceGRPO's step, where g = a at every σ. Arguments, Returns, Raises: as in `sde_step_mean`.

    Source: Xue et al. (2025), arXiv:2505.07818.
    """
    sigma, _, dt = _broadcast_schedule(velocity, sample, sigma, sigma_next, noise_level)
    if noise_level == 0:
        return sample + dt * velocity, None
    return _sde_mean_and_std(velocity, sample, sigma, dt, torch.full_like(sigma, noise_level))


def cps_step_mean(
    velocity: Tensor, sample: Tensor, *, sigma: Sigma, sigma_next: Sigma, noise_level: float
) -> tuple[Tensor, Tensor | None]:
    """Compute m = (1 − σ_next) x̂₀ + sqrt(σ_next² − s²) ε̂, s = σ_next sin(a π / 2): replaces noise instead of adding it.

    x̂₀ = x − σ v and ε̂ = x + (1 − σ) v. The log-prob here is the Gaussian's. The original's "log-prob", −(x′ − m)², is
    not a density (`density_from_cps`). At σ_next = 0 its s is 0: exclude the last step from the window.
    Arguments, Returns, Raises: as in `sde_step_mean`, with a in [0, 1].

    Source: Wang et al. (2025), arXiv:2509.05952.
    """
    sigma, sigma_next, dt = _broadcast_schedule(velocity, sample, sigma, sigma_next, noise_level)
    if noise_level > 1:
        raise ValueError(f"noise_level of a cps step must be in [0, 1], got {noise_level}: at 1 all noise is replaced")
    if noise_level == 0:
        return sample + dt * velocity, None

    # Estimate x₀ and ε; the step mixes them again for σ_next.
    angle = noise_level * math.pi / 2
    clean = sample - sigma * velocity
    noise = sample + (1 - sigma) * velocity
    mean = (1 - sigma_next) * clean + sigma_next * math.cos(angle) * noise
    return mean, sigma_next * math.sin(angle)


def sde_step(
    velocity: Tensor,
    sample: Tensor,
    *,
    sigma: Sigma,
    sigma_next: Sigma,
    sigma_max: Sigma,
    noise_level: float,
    noise: Tensor | None = None,
) -> SdeStep:
    """Compute x′ = m + s z: one step of Flow-GRPO's sampler. For the remaining variants, use `take_step`.

    Args:
        velocity: as in `sde_step_mean`, like the next five arguments.
        sample: x at σ.
        sigma: σ.
        sigma_next: σ of the next step.
        sigma_max: σ₁.
        noise_level: a; 0 selects the Euler step.
        noise: z, standard normal, in the shape of the sample. Not read for a = 0, where it may be None.

    Raises:
        TypeError, ValueError: as in `sde_step_mean`; or the noise is missing, or its shape differs.
    """
    moments = sde_step_mean(
        velocity, sample, sigma=sigma, sigma_next=sigma_next, sigma_max=sigma_max, noise_level=noise_level
    )
    return take_step(*moments, noise)


def take_step(mean: Tensor, std: Tensor | None, noise: Tensor | None) -> SdeStep:
    """Compute x′ = m + s z; x′ = m where std is None.

    Raises:
        ValueError: the noise is missing, or not in the shape of the mean.
    """
    if std is None:
        return SdeStep(mean, mean, None)
    if noise is None or noise.shape != mean.shape:
        got = "None" if noise is None else str(tuple(noise.shape))
        raise ValueError(f"noise must be standard normal in the shape of the sample, {tuple(mean.shape)}; got {got}")
    return SdeStep(mean + std * noise.to(mean.dtype), mean, std)


def gaussian_log_prob(prev_sample: Tensor, mean: Tensor, std: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """Compute p · Σ_D [ −(x′ − m)² / 2s² − log s − log sqrt(2π) ]: the log-density of a step, to the power p.

    "mean" is p = 1/D, as in Flow-GRPO; "sum" is p = 1, the log-likelihood; a number is p itself. A ratio of
    means is the true likelihood ratio to the power 1/D.

    Args:
        prev_sample: x′, (B, …); detached here.
        mean: m, same shape. Carries the gradient.
        std: s > 0, 0-d, (B,) or (B, 1, …). An s of 0 has no density: NaN, which a correction rejects and counts.
        reduction: the power.

    Returns:
        (B,), nats.

    Raises:
        TypeError: a tensor is in half precision.
        ValueError: shapes differ, or the power is not finite and above 0.
    """
    _check_same_layout("prev_sample", prev_sample, "mean", mean)
    std = _broadcast_like(std, mean)
    z = (prev_sample.detach() - mean) / std
    log_prob = (-z.square() / 2 - std.log() - math.log(math.sqrt(2 * math.pi))).expand(mean.shape).flatten(1)
    if reduction == "mean":
        return log_prob.mean(1)
    return log_prob.sum(1) * (1.0 if reduction == "sum" else power_of(reduction, 1))


def gaussian_kl(mean_p: Tensor, mean_q: Tensor, std: Tensor) -> Tensor:
    """Compute KL(p‖q) = Σ_D (m_p − m_q)² / 2s² of two steps with the same s: exact, and equal in both directions.

    Under p, the joint log-ratio J = log q − log p is normal with mean −KL and variance 2 KL.

    Args:
        mean_p: (B, …).
        mean_q: same shape.
        std: s > 0, 0-d, (B,) or (B, 1, …).

    Returns:
        (B,), nats, over all D dimensions.

    Raises:
        TypeError: a tensor is in half precision.
        ValueError: shapes differ.
    """
    _check_same_layout("mean_p", mean_p, "mean_q", mean_q)
    return ((mean_p - mean_q) / _broadcast_like(std, mean_p)).square().flatten(1).sum(1) / 2


def density_from_cps(log_prob: Tensor, std: Tensor) -> Tensor:
    """Compute l / 2s² − log s − log sqrt(2π): the mean log-density of l = mean_D(−(x′ − m)²), CPS's "log-prob".

    A log-ratio computed from l is 2s² times the true one, so the meaning of a threshold on it changes with every step.

    Args:
        log_prob: l, any shape.
        std: s of the step, same shape.
    """
    if log_prob.shape != std.shape:
        raise ValueError(f"log_prob {tuple(log_prob.shape)} and std {tuple(std.shape)} differ; std is one per step")
    return log_prob / (2 * std.square()) - std.log() - math.log(math.sqrt(2 * math.pi))


def power_of(reduction: Reduction, dimensions: int) -> float:
    """Return the power p of the likelihood for a reduction: 1/D for "mean", 1 for "sum", else the number itself.

    Raises:
        ValueError: it is none of these, or not finite, or not above 0.
    """
    if reduction == "mean":
        return 1 / dimensions
    if reduction == "sum":
        return 1.0
    if isinstance(reduction, bool) or not isinstance(reduction, int | float) or not 0 < reduction < math.inf:
        raise ValueError(f"reduction must be 'mean', 'sum' or a power that is finite and > 0; got {reduction!r}")
    return float(reduction)


@dataclass(frozen=True)
class SdeWindow:
    """The steps sampled with noise and trained on: start, …, start + size − 1. Outside it, sampling follows the ODE.

    Attributes:
        start: first step of the window, from 0.
        size: number of steps W in the window.

    Raises:
        ValueError: start is negative, or size is below 1.

    Example:
        >>> SdeWindow(1, 2).steps
        range(1, 3)
    """

    start: int
    size: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.size < 1:
            raise ValueError(f"a window starts at 0 or later and has a step or more; got {self}")

    @property
    def steps(self) -> range:
        """Return the indices of the steps in the window."""
        return range(self.start, self.start + self.size)


def _broadcast_schedule(
    velocity: Tensor, sample: Tensor, sigma: Sigma, sigma_next: Sigma, noise_level: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return σ, σ_next and dt of a step, broadcastable to the sample."""
    _check_same_layout("velocity", velocity, "sample", sample)
    if not 0 <= noise_level < math.inf:
        raise ValueError(f"noise_level must be finite and ≥ 0 (0 is the ODE), got {noise_level}")
    now, then = _broadcast_like(sigma, sample), _broadcast_like(sigma_next, sample)
    return now, then, then - now


def _sde_mean_and_std(velocity: Tensor, sample: Tensor, sigma: Tensor, dt: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Compute m and s of a step with diffusion coefficient g: see the top of this file."""
    drift = g.square() / (2 * sigma)
    mean = sample * (1 + drift * dt) + velocity * (1 + drift * (1 - sigma)) * dt
    return mean, g * (-dt).sqrt()


def _broadcast_like(value: Sigma, sample: Tensor) -> Tensor:
    """Return a number as 0-d, or one number per row as (B, 1, …), in the dtype of the sample."""
    value = torch.as_tensor(value, dtype=sample.dtype, device=sample.device)
    if value.dim() == 0 or value.shape == (sample.shape[0], *[1] * (sample.dim() - 1)):
        return value
    if value.shape != sample.shape[:1]:
        raise ValueError(
            f"expected one number, or one for each of the {sample.shape[0]} samples; got shape {tuple(value.shape)} "
            f"beside a sample of {tuple(sample.shape)}"
        )
    return value.view(-1, *[1] * (sample.dim() - 1))


def _check_same_layout(first_name: str, first: Tensor, second_name: str, second: Tensor) -> None:
    if first.shape != second.shape or first.dim() < 2:
        raise ValueError(
            f"{first_name} {tuple(first.shape)} and {second_name} {tuple(second.shape)} must be (B, …) of one shape"
        )
    if first.dtype != second.dtype or first.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"{first_name} is {first.dtype} and {second_name} {second.dtype}: a step is computed in float32; call "
            ".float() on what a half-precision model returns, and keep latents in float32"
        )
