"""What a rollout in low precision does to denoising steps, and which criterion finds a wrong prompt.

    python benchmarks/diffusion_mismatch.py          # 512 samples, about two minutes on one core
    python benchmarks/diffusion_mismatch.py --save   # also writes benchmarks/results/

A tiny Stable-Diffusion-3 transformer (diffusers' class, random weights, D = 3 · 16 · 16 = 768) samples in bf16, or with
fp8 weights and activations; the float32 model scores the same steps. Some samples come from another prompt than the
trainer is told, with latents and log-probs that look like any other's.

Needs `pip install 'rollcorr[diffusion]'`.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollcorr.config import InertOptionWarning
from rollcorr.core.diffusion import gaussian_log_prob, sde_step, sde_step_mean
from rollcorr.diffusion import (
    DiffusionActorConfig,
    apply_rollout_correction_to_diffusion_batch,
    diffusion_loss,
    loss_step_metrics,
)

RESULT = Path(__file__).parent / "results" / "diffusion_mismatch.json"
STEPS, WINDOW, NOISE_LEVEL, SHIFT = 10, 2, 0.7, 3.0
PROMPTS, WRONG_SHARE = 16, 1 / 8
WINDOWS = {"start": 0, "middle": 4, "end": STEPS - WINDOW - 1}  # the very last step apart
CRITERIA: dict[str, tuple[str, str, str]] = {  # name: reduction, rollout_rs, threshold
    "mean-pooled seq_mean_k1 0.5_2.0": ("mean", "seq_mean_k1", "0.5_2.0"),
    "joint seq_mean_k1 0.5_2.0": ("sum", "seq_mean_k1", "0.5_2.0"),
    "joint seq_mean_k1 0.2_5.0": ("sum", "seq_mean_k1", "0.2_5.0"),
    "joint seq_mean_k1 0.1_10": ("sum", "seq_mean_k1", "0.1_10"),
    "exact step_kl 0.05": ("mean", "step_kl", "0.05"),
    "exact step_kl 2.0": ("mean", "step_kl", "2.0"),
}

Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]


class Policy:
    """A model, a prompt table and the schedule: velocities in the model's dtype, everything else in float32."""

    def __init__(self, model: nn.Module, prompts: Tensor, pooled: Tensor, schedule: tuple[Tensor, Tensor]) -> None:
        self.model, self.prompts, self.pooled = model, prompts, pooled
        self.sigmas, self.timesteps = schedule
        self.dtype = next(model.parameters()).dtype

    def velocity(self, x: Tensor, step: Tensor, prompt: Tensor) -> Tensor:
        """v of latents x at schedule entries `step`."""
        to = self.dtype
        return self.model(
            x.to(to),
            encoder_hidden_states=self.prompts[prompt].to(to),
            pooled_projections=self.pooled[prompt].to(to),
            timestep=self.timesteps[step],
            return_dict=False,
        )[0].float()

    def at(self, step: Tensor) -> dict[str, Any]:
        """The arguments of a step function."""
        return {
            "sigma": self.sigmas[step],
            "sigma_next": self.sigmas[step + 1],
            "sigma_max": self.sigmas[1],
            "noise_level": NOISE_LEVEL,
        }


class Fp8Linear(nn.Module):
    """A linear layer whose weights and inputs are rounded to float8_e4m3fn, each with one scale; bf16 arithmetic."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(_fp8(linear.weight.detach()).bfloat16(), requires_grad=False)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().bfloat16(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b."""
        return nn.functional.linear(_fp8(x), self.weight, self.bias)


def _fp8(x: Tensor) -> Tensor:
    scale = x.abs().amax().clamp(min=1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def make_policies(seed: int = 0) -> dict[str, Policy]:
    """The trainer in float32, and its copies in bf16 and fp8."""
    import diffusers

    torch.manual_seed(seed)
    model = diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=4,
        in_channels=3,
        out_channels=3,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
    ).eval()
    prompts, pooled = 2 * torch.randn(PROMPTS, 4, 32), 2 * torch.randn(PROMPTS, 32)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    scheduler.set_timesteps(STEPS)
    schedule = (scheduler.sigmas, scheduler.timesteps)
    bf16 = copy.deepcopy(model).bfloat16()
    fp8 = copy.deepcopy(model).bfloat16()
    for name, module in list(fp8.named_modules()):
        if isinstance(module, nn.Linear):
            path, _, own = name.rpartition(".")
            setattr(fp8.get_submodule(path), own, Fp8Linear(module))
    models = {"float32": model, "bf16": bf16, "fp8": fp8}
    return {name: Policy(m, prompts, pooled, schedule) for name, m in models.items()}


@torch.no_grad()
def sample(policy: Policy, prompt: Tensor, start: int, window: int, seed: int) -> dict[str, Tensor]:
    """Denoise: the ODE up to the window, then its steps with noise, as a rollout ships them."""
    rows, generator = len(prompt), torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, 16, 16, generator=generator)
    latents, means, stds, log_probs = [], [], [], []
    for i in range(start + window):
        step = torch.full((rows,), i)
        at = policy.at(step)
        noise = torch.randn(x.shape, generator=generator)
        if i < start:
            x = sde_step(policy.velocity(x, step, prompt), x, **at | {"noise_level": 0.0}).prev_sample
            continue
        taken = sde_step(policy.velocity(x, step, prompt), x, **at, noise=noise)
        log_prob, std = taken.log_prob(), taken.std
        assert log_prob is not None
        assert std is not None
        latents.append(x)
        means.append(taken.mean)
        stds.append(std.flatten())
        log_probs.append(log_prob)
        x = taken.prev_sample
    steps = torch.arange(start, start + window).expand(rows, window)
    return {
        "latents": torch.stack([*latents, x], 1),
        "prev_sample_mean": torch.stack(means, 1),
        "std": torch.stack(stds, 1),
        "dt": (policy.sigmas[steps + 1] - policy.sigmas[steps]).contiguous(),
        "rollout_log_probs": torch.stack(log_probs, 1),
        "timesteps": policy.timesteps[steps],
        "steps": steps,
    }


@torch.no_grad()
def score(policy: Policy, batch: dict[str, Tensor], prompt: Tensor) -> dict[str, Tensor]:
    """The policy's log-prob and mean of every step."""
    log_probs, means = [], []
    for j in range(batch["steps"].shape[1]):
        x, step = batch["latents"][:, j], batch["steps"][:, j]
        mean, std = sde_step_mean(policy.velocity(x, step, prompt), x, **policy.at(step))
        assert std is not None
        means.append(mean)
        log_probs.append(gaussian_log_prob(batch["latents"][:, j + 1], mean, std))
    return {"log_probs": torch.stack(log_probs, 1), "prev_sample_mean": torch.stack(means, 1)}


def scored(rollout: Policy, trainer: Policy, said: Tensor, used: Tensor, start: int, window: int, seed: int) -> Any:
    """A decoupled batch: sampled with the prompts `used`, scored with those that are `said`."""
    batch = sample(rollout, used, start, window, seed)
    old = score(trainer, batch, said)
    return batch | {"old_log_probs": old["log_probs"], "old_prev_sample_mean": old["prev_sample_mean"]}


def mismatch(policies: dict[str, Policy], rollout: str, samples: int) -> list[dict[str, float]]:
    """The mismatch of every step of the schedule, in both units."""
    said = torch.arange(samples) % PROMPTS
    batch = scored(policies[rollout], policies["float32"], said, said, 0, STEPS, seed=1)
    d = (batch["old_log_probs"] - batch["rollout_log_probs"]).double()
    D = batch["latents"][0, 0].numel()
    shift = (batch["old_prev_sample_mean"] - batch["prev_sample_mean"]).flatten(2) / batch["std"].unsqueeze(-1)
    kl = shift.double().square().sum(-1) / 2
    return [
        {
            "timestep": batch["timesteps"][0, i].item(),
            "worst_mean_pooled": d[:, i].abs().max().item(),
            "joint_mean": D * d[:, i].mean().item(),
            "joint_std": D * d[:, i].std().item(),
            "exact_kl": kl[:, i].mean().item(),
        }
        for i in range(STEPS)
    ]


def detection(policies: dict[str, Policy], rollout: str, samples: int, start: int) -> dict[str, Any]:
    """Share of wrong-prompt samples that each criterion finds, and of the others that it rejects."""
    said = torch.arange(samples) % PROMPTS
    wrong = torch.arange(samples) % round(1 / WRONG_SHARE) == 0
    used = torch.where(wrong, (said + 1 + torch.arange(samples) // PROMPTS % (PROMPTS - 1)) % PROMPTS, said)
    batch = scored(policies[rollout], policies["float32"], said, used, start, WINDOW, seed=2)
    joint = 768 * (batch["old_log_probs"] - batch["rollout_log_probs"]).double().mean(1).abs()
    shift = (batch["old_prev_sample_mean"] - batch["prev_sample_mean"]).flatten(2) / batch["std"].unsqueeze(-1)
    exact = shift.double().square().sum(-1).amax(1) / 2
    found: dict[str, Any] = {
        "median exact KL": {"right": exact[~wrong].median().item(), "wrong": exact[wrong].median().item()},
        "found at 1 % false positives": {
            name: (x[wrong] > x[~wrong].quantile(0.99)).double().mean().item()
            for name, x in (("joint", joint), ("exact", exact))
        },
    }
    for name, (reduction, criterion, threshold) in CRITERIA.items():
        correction = {"rollout_rs": criterion, "rollout_rs_threshold": threshold}
        config = DiffusionActorConfig(reduction=reduction, rollout_correction=correction)
        with warnings.catch_warnings(record=True) as said_so:
            warnings.simplefilter("always", InertOptionWarning)
            result, _ = apply_rollout_correction_to_diffusion_batch(dict(batch), config)
        rejected = ~result["rollout_keep_mask"].all(1)
        found[name] = {
            "found": rejected[wrong].double().mean().item(),
            "false_positives": rejected[~wrong].double().mean().item(),
            "out_of_reach": float(bool(said_so)),
        }
    return found


def one_sided(policies: dict[str, Policy], rollout: str, samples: int, start: int) -> dict[str, dict[str, float]]:
    """Share of samples whose gradient the clip zeroes before any update, in bypass mode, by the sign of A."""
    said = torch.arange(samples) % PROMPTS
    batch = scored(policies[rollout], policies["float32"], said, said, start, WINDOW, seed=3)
    data = batch | {
        "advantages": torch.randn(samples, generator=torch.Generator().manual_seed(4)),
        "old_prev_sample_mean": batch["prev_sample_mean"],
    }
    output = {"log_probs": batch["old_log_probs"], "prev_sample_mean": batch["old_prev_sample_mean"]}
    shares = {}
    for loss_mode, clip_ratio in (("flow_grpo", 1e-4), ("grpo_guard", 1e-4 * data["std"].mean().item())):
        correction = {"bypass_mode": True}
        config = DiffusionActorConfig(loss_mode=loss_mode, clip_ratio=clip_ratio, rollout_correction=correction)
        metrics = loss_step_metrics([diffusion_loss(config, output, data, whole_step=True)], config)
        signs = ("negative", "positive")
        shares[loss_mode] = {sign: metrics[f"actor/rollout_corr/zeroed_fraction_{sign}"] for sign in signs}
    return shares


def measure(samples: int = 512) -> dict[str, Any]:
    """Every figure of the page."""
    torch.set_num_threads(1)
    policies = make_policies()
    return {
        "D": 768,
        "samples": samples,
        "schedule": [round(t, 3) for t in policies["float32"].timesteps.tolist()],
        "mismatch": {name: mismatch(policies, name, samples // 4) for name in ("bf16", "fp8")},
        "detection": {
            f"{name}, window at the {place}": detection(policies, name, samples, start)
            for name in ("bf16", "fp8")
            for place, start in WINDOWS.items()
        },
        "zeroed": {name: one_sided(policies, name, samples, STEPS - WINDOW) for name in ("bf16", "fp8")},
    }


def main() -> None:
    """Measure, print, and save on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512, help="samples of each measurement (default 512)")
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    arguments = parser.parse_args()
    result = measure(arguments.samples)
    for name, rows in result["mismatch"].items():
        print(f"\n{name}      timestep  worst |d|   joint mean   joint std   exact KL   (−KL, √2KL expected)")
        for row in rows:
            print(
                f"{row['timestep']:18.1f} {row['worst_mean_pooled']:10.1e} {row['joint_mean']:12.4f}"
                f" {row['joint_std']:11.4f} {row['exact_kl']:10.2e}   {math.sqrt(2 * row['exact_kl']):.4f}"
            )
    for name, criteria in result["detection"].items():
        print(f"\n{name}")
        kl, at_1 = criteria["median exact KL"], criteria["found at 1 % false positives"]
        print(f"  median exact KL: right prompt {kl['right']:.1e}, wrong prompt {kl['wrong']:.1e}")
        print(f"  found at 1 % false positives: joint log-ratio {at_1['joint']:.1%}, exact KL {at_1['exact']:.1%}")
        for criterion in CRITERIA:
            found = criteria[criterion]
            reach = "   out of reach" if found["out_of_reach"] else ""
            print(f"  {criterion:34s} found {found['found']:6.1%}  rejected {found['false_positives']:6.2%}{reach}")
    for name, modes in result["zeroed"].items():
        for mode, shares in modes.items():
            print(f"{name} {mode:12s} zeroed: A < 0 {shares['negative']:.0%}, A > 0 {shares['positive']:.0%}")
    if arguments.save:
        about = {"date": str(date.today()), "machine": platform.machine(), "torch": torch.__version__}
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(about | result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
