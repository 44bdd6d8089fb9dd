"""Correct a batch of a diffusion model in bypass mode over micro-batches, then in decoupled mode.

The policy has one weight: 1.1 in the sampler, 1 in the trainer. Two denoising steps of ten are sampled from the SDE.
"""

import torch

from rollcorr import TrainingStep
from rollcorr.core import SdeWindow, gaussian_log_prob, sde_step_mean
from rollcorr.diffusion import (
    DiffusionActorConfig,
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_diffusion_batch,
    loss_step_metrics,
)

B, W = 8, 2
window = SdeWindow(start=4, size=W)
sigmas = torch.cat([torch.linspace(1.0, 0.1, 10), torch.zeros(1)])
schedule = (1000 * sigmas[:-1]).tolist()  # the timesteps of the trainer's schedule


def policy(x, step, weight):
    """Return mean m and standard deviation s of a step, for a model with one weight."""
    at = {"sigma": sigmas[step], "sigma_next": sigmas[step + 1], "sigma_max": sigmas[1], "noise_level": 0.7}
    return sde_step_mean(weight * torch.tanh(x), x, **at)


def evaluate(weight, latents):
    """Map latents (b, W + 1, …) to log-probs (b, W) and means (b, W, …)."""
    moments = [policy(latents[:, j], step, weight) for j, step in enumerate(window.steps)]
    log_probs = [gaussian_log_prob(latents[:, j + 1], *moment) for j, moment in enumerate(moments)]
    return {"log_probs": torch.stack(log_probs, 1), "prev_sample_mean": torch.stack([m for m, _ in moments], 1)}


# The rollout: the sampler's weight is 1.1.
generator = torch.Generator().manual_seed(1)
latents, stds = [torch.randn(B, 16, 8, 8, generator=generator)], []
for step in window.steps:
    mean, std = policy(latents[-1], step, 1.1)
    latents.append(mean + std * torch.randn(mean.shape, generator=generator))
    stds.append(std.expand(B))
latents = torch.stack(latents, 1)
rollout = evaluate(1.1, latents)
batch = {
    "latents": latents,
    "rollout_log_probs": rollout["log_probs"],
    "prev_sample_mean": rollout["prev_sample_mean"],
    "std": torch.stack(stds, 1),
    "timesteps": torch.tensor(schedule)[list(window.steps)].expand(B, W),
    "advantages": torch.linspace(-1, 1, B),
}

# Bypass mode: the loss corrects each micro-batch with π_θ / μ.
model = torch.nn.ParameterList([torch.tensor(1.0)])
rejection = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"}
bypass = DiffusionActorConfig(reduction="sum", clip_ratio=1e-4, rollout_correction={"bypass_mode": True, **rejection})
data = apply_bypass_mode_to_diffusion_batch(dict(batch), schedule=schedule)  # old_log_probs := rollout_log_probs
outputs = []
with TrainingStep(model, bypass) as gradients:  # over ranks: group=…
    for rows in torch.arange(B).split(4):
        part = {key: values[rows] for key, values in data.items()}
        outputs.append(gradients.diffusion_loss(evaluate(model[0], part["latents"]), part, schedule=schedule))
        gradients.backward(outputs[-1])
    outcome = gradients.finish()
print(f"bypass: {outcome.kept:.0f} of {outcome.total:.0f} steps kept, skipped: {bool(outcome.skipped)}")
metrics = loss_step_metrics(outputs, bypass)
for name in ("kl_joint", "exact_kl_mean", "rejected_ratio"):
    print(f"  {name:15} {metrics[f'actor/rollout_corr/{name}']:.3f}")

# Decoupled mode: recompute the old log-probs, and correct the batch once with π_old / μ.
old = evaluate(1.0, latents)
batch |= {"old_log_probs": old["log_probs"], "old_prev_sample_mean": old["prev_sample_mean"]}
decoupled = DiffusionActorConfig(reduction="sum", rollout_correction={"rollout_is": "sequence", **rejection})
batch, metrics = apply_rollout_correction_to_diffusion_batch(batch, decoupled, schedule=schedule)
print(f"decoupled: effective sample size {metrics['rollout_corr/rollout_is_eff_sample_size']:.3f}")
