"""Program of one rank of the diffusion tests. Without a group it computes the expected result."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollcorr.config import InertOptionWarning
from rollcorr.core.diffusion import gaussian_log_prob
from rollcorr.correction.training_step import TrainingStep
from rollcorr.diffusion import (
    DiffusionActorConfig,
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_diffusion_batch,
    loss_step_metrics,
)

SIZE = 4
SHARDS = {1: (0, 9), 2: (0, 2, 9), 3: (0, 4, 6, 9), 4: (0, 3, 3, 7, 9)}  # uneven; of four ranks, one is empty
MICRO = {2: 3, 3: 1, 4: 2}  # samples in a micro-batch
WINDOW, D = 2, 6
SCHEDULE = (900.0, 750.0, 500.0)
BAND = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"}
MODES: dict[str, dict[str, Any]] = {
    "decoupled": {"rollout_is": "sequence", **BAND},
    "decoupled, exact KL": {
        "rollout_is": "token",
        "rollout_is_batch_normalize": True,
        "rollout_rs": "seq_mean_k1,step_kl",
        "rollout_rs_threshold": "0.3_3.0,0.12",
    },
    "bypass": {"bypass_mode": True, **BAND},
    "reinforce": {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token", **BAND},
}
DENOMINATORS = ("all", "kept", "weights")
CASES = list(itertools.product(MODES, DENOMINATORS))


def cases(size: int) -> list[tuple[str, str]]:
    """Everything on four ranks, and one denominator each on two and three."""
    return [case for case in CASES if size == 4 or case[1] == {2: "kept", 3: "weights"}[size]]


def actor(mode: str, denominator: str) -> DiffusionActorConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InertOptionWarning)
        return DiffusionActorConfig(
            reduction="sum", clip_ratio=0.05, kl_coef=0.1, rs_denominator=denominator, rollout_correction=MODES[mode]
        )


class Mean(nn.Module):
    """m of a step from its latent."""

    def __init__(self, scale: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, D)).double()
        noise = torch.Generator().manual_seed(6)
        with torch.no_grad():
            for p in self.parameters():
                p.add_(scale * torch.randn(p.shape, generator=noise, dtype=p.dtype))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        mean = self.layers(batch["latents"][:, :-1])
        flat = (x.flatten(0, 1) for x in (batch["latents"][:, 1:], mean, batch["std"]))
        return {"log_probs": gaussian_log_prob(*flat).view(batch["std"].shape), "prev_sample_mean": mean}


def make_batch() -> dict[str, Tensor]:
    """Nine samples of two steps, sampled by a policy off by some noise; one log-prob is missing."""
    generator = torch.Generator().manual_seed(3)
    kw = {"generator": generator, "dtype": torch.float64}
    x, std = torch.randn(9, D, **kw), 0.3 + 0.2 * torch.rand(9, WINDOW, **kw)
    rollout, latents, means = Mean(0.06), [x], []
    with torch.no_grad():
        for j in range(WINDOW):
            means.append(rollout.layers(latents[-1]))
            latents.append(means[-1] + std[:, j, None] * torch.randn(9, D, **kw))
    batch = {"latents": torch.stack(latents, 1), "prev_sample_mean": torch.stack(means, 1), "std": std}
    with torch.no_grad():
        batch["rollout_log_probs"] = rollout(batch)["log_probs"]
        old, reference = Mean(0.02)(batch), Mean(0.1)(batch)
    batch["rollout_log_probs"][5, 1] = torch.nan
    start = torch.randint(0, 2, (9,), generator=generator)
    return batch | {
        "old_log_probs": old["log_probs"],
        "old_prev_sample_mean": old["prev_sample_mean"],
        "ref_prev_sample_mean": reference["prev_sample_mean"],
        "timesteps": torch.tensor(SCHEDULE)[start[:, None] + torch.arange(WINDOW)],
        "advantages": torch.randn(9, **kw),
    }


def optimizer_step(
    mode: str, denominator: str, size: int, rank: int, micro: int, group: Any = None, *, ddp: bool = False
) -> dict[str, Any]:
    """One optimizer step on this rank's samples, through micro-batches of single steps of the window."""
    config, batch, model = actor(mode, denominator), make_batch(), Mean()
    model = nn.parallel.DistributedDataParallel(model, process_group=group) if ddp else model
    own = {key: values[slice(*SHARDS[size][rank : rank + 2])] for key, values in batch.items()}
    metrics: dict[str, float] = {}
    if config.bypass_mode:
        apply_bypass_mode_to_diffusion_batch(own, schedule=SCHEDULE)
    else:
        _, metrics = apply_rollout_correction_to_diffusion_batch(own, config, schedule=SCHEDULE, group=group)
    outputs = []
    with TrainingStep(model, config, group=group) as step:
        for rows in torch.arange(len(own["std"])).split(micro):
            for j in range(WINDOW):
                part = {key: values[rows] for key, values in own.items()}
                part = {key: v if key in ("advantages", "latents") else v[:, j : j + 1] for key, v in part.items()}
                part["latents"] = part["latents"][:, j : j + 2]
                output = model(part)
                outputs.append(step.diffusion_loss(output, part, schedule=SCHEDULE))
                step.backward(outputs[-1])
        outcome = step.finish()
    return {
        "gradient": torch.cat([p.grad.flatten() for p in model.parameters()]),
        "outcome": tuple(x.item() for x in outcome),
        "metrics": metrics | loss_step_metrics(outputs, config, group=group),
    }


def nothing_kept(size: int, rank: int, group: Any = None) -> tuple[Any, ...]:
    """A band that no step meets: every rank must skip."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InertOptionWarning)
        config = DiffusionActorConfig(
            rollout_correction={"bypass_mode": True, "rollout_rs": "token_k1", "rollout_rs_threshold": "100_200"}
        )
    batch, model = make_batch(), Mean()
    own = {key: values[slice(*SHARDS[size][rank : rank + 2])] for key, values in batch.items()}
    with TrainingStep(model, config, group=group) as step:
        step.backward(step.diffusion_loss(model(own), own))
        outcome = step.finish()
    return (*(x.item() for x in outcome), all(p.grad is None for p in model.parameters()))


def run(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/init", rank=rank, world_size=SIZE)
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3, 4)}
    results: dict[Any, Any] = {}
    for size, group in groups.items():
        if rank >= size:
            continue
        for mode, denominator in cases(size):
            results[size, mode, denominator] = optimizer_step(mode, denominator, size, rank, MICRO[size], group)
        for mode in MODES:
            results[size, mode, "DDP"] = optimizer_step(mode, "kept", size, rank, MICRO[size], group, ddp=True)
        results[size, "nothing"] = nothing_kept(size, rank, group)
    torch.save(results, f"{path}/{rank}.pt")
    dist.destroy_process_group()
