"""A denoiser with a few parameters, and batches sampled with it, for the tests of rollcorr.diffusion."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rollcorr.core.diffusion import gaussian_log_prob, sde_step, sde_step_mean

SCHEDULE = (1000.0, 900.0, 750.0, 500.0, 250.0)
SIGMAS = (1.0, 0.9, 0.75, 0.5, 0.25, 0.0)
SHAPE = (2, 3, 3)
D = 18


class Denoiser(nn.Module):
    """v(x, σ): two layers on the flattened latents."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(D + 1, 24, generator=generator, dtype=torch.float64) / 4)
        self.second = nn.Parameter(torch.randn(24, D, generator=generator, dtype=torch.float64) / 4)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        flat = torch.cat([x.flatten(1), sigma.unsqueeze(1)], dim=1)
        return (torch.tanh(flat @ self.first) @ self.second).view(x.shape)


def perturbed(model: Denoiser, scale: float, seed: int = 1) -> Denoiser:
    """A copy whose weights are off by some noise: a rollout in low precision."""
    generator = torch.Generator().manual_seed(seed)
    other = Denoiser()
    with torch.no_grad():
        for p, q in zip(other.parameters(), model.parameters(), strict=True):
            p.copy_(q + scale * torch.randn(q.shape, generator=generator, dtype=q.dtype))
    return other


def _sigmas(step: Tensor) -> dict[str, Tensor | float]:
    table = torch.tensor(SIGMAS, dtype=torch.float64)
    return {"sigma": table[step], "sigma_next": table[step + 1], "sigma_max": SIGMAS[1], "noise_level": 0.7}


def make_batch(rollout: Denoiser, rows: int = 6, window: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Samples of `window` steps from windows at random places, as the rollout ships them. Float64."""
    generator = torch.Generator().manual_seed(seed)
    kw = {"dtype": torch.float64, "generator": generator}
    start = torch.randint(0, len(SCHEDULE) - window + 1, (rows,), generator=generator)
    latents, means, stds, log_probs, dts = [torch.randn(rows, *SHAPE, **kw)], [], [], [], []
    with torch.no_grad():
        for j in range(window):
            at = _sigmas(start + j)
            step = sde_step(rollout(latents[-1], at["sigma"]), latents[-1], **at, noise=torch.randn(rows, *SHAPE, **kw))
            latents.append(step.prev_sample)
            means.append(step.mean)
            stds.append(step.std.flatten())
            dts.append(at["sigma_next"] - at["sigma"])
            log_probs.append(step.log_prob())
    steps = start[:, None] + torch.arange(window)
    return {
        "latents": torch.stack(latents, 1),
        "prev_sample_mean": torch.stack(means, 1),
        "std": torch.stack(stds, 1),
        "dt": torch.stack(dts, 1),
        "rollout_log_probs": torch.stack(log_probs, 1),
        "timesteps": torch.tensor(SCHEDULE)[steps],
        "steps": steps,
        "advantages": torch.randn(rows, **kw),
    }


def evaluate(model: Denoiser, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's log-prob and mean of every step in a batch."""
    rows, window = batch["steps"].shape
    x, after = batch["latents"][:, :-1].flatten(0, 1), batch["latents"][:, 1:].flatten(0, 1)
    at = _sigmas(batch["steps"].flatten())
    mean, std = sde_step_mean(model(x, at["sigma"]), x, **at)
    log_probs = gaussian_log_prob(after, mean, std)
    return {"log_probs": log_probs.view(rows, window), "prev_sample_mean": mean.view(rows, window, *SHAPE)}


def with_old(batch: dict[str, Tensor], old: Denoiser) -> dict[str, Tensor]:
    """The batch with the log-probs and means of π_old."""
    with torch.no_grad():
        output = evaluate(old, batch)
    return batch | {"old_log_probs": output["log_probs"], "old_prev_sample_mean": output["prev_sample_mean"]}


def rows_of(batch: dict[str, Tensor], rows) -> dict[str, Tensor]:
    return {key: values[rows] for key, values in batch.items()}


def step_of(batch: dict[str, Tensor], j: int) -> dict[str, Tensor]:
    """One step of the window, as (b, 1)."""
    whole = ("advantages", "latents")
    cut = {key: values[:, j : j + 1] for key, values in batch.items() if key not in whole}
    return cut | {"advantages": batch["advantages"], "latents": batch["latents"][:, j : j + 2]}
