"""Logs at D = 65,536 from a denoiser that is known exactly, on latents of 16 × 64 × 64.

Pictures of prompt c are x₀ ~ N(μ_c, τ²), with a smooth μ_c for each prompt. Then E[x₀ | x_σ] is linear in x, and the
velocity is v = (x − E[x₀ | x]) / σ. A 1 × 1 convolution with a residual tanh, whose weights can be trained, stands for
the network; rounding it to 16 or 8 bits, and a relative error of the size that deep networks have, for the precision.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rollcorr.core.diffusion import gaussian_kl, gaussian_log_prob, sde_step_mean, take_step
from rollcorr.train.flow_grpo.sampler import round_to_e4m3

SHAPE, TAU = (16, 64, 64), 0.7
SIGMAS = torch.tensor([1.0, 0.889, 0.778, 0.667, 0.556, 0.445, 0.334, 0.223, 0.112, 0.0])
STEPS, STALE_STEPS, PROMPTS, COPIES = 3, 10, 4, 4
ERROR = {"matched": 0.028, "bf16": 0.004, "fp8": 0.06}
"""Error of the velocity relative to its size. "matched" is that of a published SD3.5-Medium run."""


class Denoiser:
    """The velocity of pictures of some prompts.

    Args:
        seed: of the pictures' means and of the weights.
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        coarse = torch.randn(PROMPTS + 1, SHAPE[0], 8, 8, generator=generator)
        self.means = 0.8 * torch.nn.functional.interpolate(coarse, SHAPE[1:], mode="bilinear")
        self.means[-1] = 0  # the empty prompt
        self.weight = torch.eye(16) + 0.1 * torch.randn(16, 16, generator=generator)

    def __call__(
        self, x: Tensor, sigma: float, rows: Tensor, *, guidance: float = 1.0, precision: str = "", seed: int = 0
    ) -> Tensor:
        """v of some prompts, (B, 16, 64, 64), with guidance, at a precision."""
        v = self._of(x, sigma, self.means[rows], precision)
        if guidance != 1.0:
            empty = self._of(x, sigma, self.means[-1:].expand_as(x), precision)
            v = empty + guidance * (v - empty)
        if precision:
            noise = torch.randn(v.shape, generator=torch.Generator().manual_seed(seed))
            v = v + ERROR[precision] * v.square().mean().sqrt() * noise
        return v

    def _of(self, x: Tensor, sigma: float, mean: Tensor, precision: str) -> Tensor:
        gain = TAU**2 * (1 - sigma) / ((1 - sigma) ** 2 * TAU**2 + sigma**2)
        clean = mean + gain * (x - (1 - sigma) * mean)
        weight = self.weight
        if precision:
            weight = (round_to_e4m3(weight) if precision == "fp8" else weight).bfloat16().float()
        v = (x - clean) / sigma
        mixed = torch.einsum("oc,bchw->bohw", weight, v)
        return 0.9 * mixed + 0.1 * mixed.tanh()


def _run(
    sampler: Denoiser,
    trainer: Denoiser,
    step: int,
    *,
    precision: str,
    seed: int,
    version: int,
    sampled: dict[str, float] | None = None,
    scored: dict[str, float] | None = None,
    level: float = 0.7,
    sigmas: Tensor = SIGMAS,
    lag: int = 0,
    others: int = 0,
) -> dict[str, np.ndarray]:
    """Sample a step's pictures, score them, and return what a log records."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    rows = torch.arange(PROMPTS).repeat_interleave(COPIES)
    wrong = rows.clone()
    if others:
        wrong[::others] = (rows[::others] + 1) % PROMPTS
    x = torch.randn(len(rows), *SHAPE, generator=generator)
    start = int(torch.randint(0, 4, (1,), generator=generator))
    found: list[tuple[Tensor, ...]] = []
    for number in range(start + 2):
        sigma, after = float(SIGMAS[number]), float(SIGMAS[number + 1])
        v = sampler(x, sigma, rows, precision=precision, seed=100 * step + number, **(sampled or {}))
        if number < start:
            x = x + (after - sigma) * v
            continue
        at = {"sigma": sigma, "sigma_next": after, "sigma_max": float(SIGMAS[1]), "noise_level": 0.7}
        mean, std = sde_step_mean(v, x, **at)
        taken = take_step(mean, std, torch.randn(x.shape, generator=generator)).prev_sample

        # The trainer: its σ, noise level, guidance and prompts may be others.
        own = number + lag
        theirs = {
            "sigma": float(sigmas[own]),
            "sigma_next": float(sigmas[own + 1]),
            "sigma_max": float(sigmas[1]),
            "noise_level": level,
        }
        v_own = trainer(x, theirs["sigma"], wrong, **(scored or {}))
        mean_own, std_own = sde_step_mean(v_own, x, **theirs)
        log_mu, log_pi = gaussian_log_prob(taken, mean, std), gaussian_log_prob(taken, mean_own, std_own)
        kl = gaussian_kl(mean_own, mean, std)
        ones = torch.ones(len(rows))
        found.append(
            (
                ones * step,
                rows,
                ones * sigma * 1000,
                ones * sigma,
                ones * after,
                ones * std,
                log_mu,
                log_pi,
                kl,
                ones * version,
            )
        )
        x = taken
    names = ("step", "group", "timestep", "sigma", "sigma_next", "std", "log_mu", "log_pi", "kl", "version")
    columns = [torch.stack([part[i].float() for part in found], 1).flatten().numpy() for i in range(len(names))]
    return dict(zip(names, columns, strict=True))


def analytic_logs(seed: int) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Every log of one seed, with its name."""

    def log(steps: int = STEPS, **settings: object) -> dict[str, np.ndarray]:
        given = {"precision": "matched", "seed": seed, **settings}
        parts = [_run(model, model, s, version=s - 1, **given) for s in range(1, steps + 1)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    model = Denoiser(seed)
    yield "null matched", log(3, seed=seed + 500)
    yield "null fp8", log(3, seed=seed + 500, precision="fp8")
    yield "null bf16", log(3, seed=seed + 500, precision="bf16")
    yield "healthy matched", log()
    yield "healthy fp8", log(precision="fp8")
    yield "healthy bf16", log(precision="bf16")
    choices = np.random.default_rng(seed)
    yield "precision", log(precision="fp8")
    yield "prompts", log(others=8)
    yield "guidance", log(scored={"guidance": float(choices.choice([2.0, 3.0, 4.5]))})
    yield "guidance lost", log(sampled={"guidance": float(choices.choice([2.0, 3.0, 4.5]))})
    yield "noise level", log(level=float(choices.choice([0.5, 0.6, 0.8, 1.0])))
    factor = float(choices.choice([1.5, 2.0, 3.0]))
    yield "shift", log(sigmas=factor * SIGMAS / (1 + (factor - 1) * SIGMAS))
    yield "schedule", log(lag=1)

    # The trainer's weights move in one direction, and the sampler keeps those of the start.
    trained = Denoiser(seed)
    direction = torch.randn(16, 16, generator=torch.Generator().manual_seed(seed + 77))
    rate, parts = float(choices.choice([0.003, 0.01, 0.03])), []
    for step in range(1, STALE_STEPS + 1):
        parts.append(_run(model, trained, step, precision="matched", seed=seed, version=0))
        trained.weight = trained.weight + rate * direction
    yield "stale", {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
