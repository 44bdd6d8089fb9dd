"""The rollout log of a step: one row for each picture, one token for each denoising step of its window.

Latents and means are not written: they are large, and what the diagnosis needs of them is one number, the exact KL.
"""

from __future__ import annotations

from pathlib import Path

import torch

from rollcorr.diffusion.batch_checks import dimensions_of
from rollcorr.diffusion.step_correction import step_kl
from rollcorr.train.flow_grpo.flow_grpo_config import FlowGrpoConfig
from rollcorr.train.flow_grpo.flow_grpo_trainer import PictureBatch


def write_denoising_log(path: Path, step: int, batch: PictureBatch, config: FlowGrpoConfig) -> None:
    """Write one step's pictures.

    Args:
        path: the Parquet file; replaced.
        step: the training step.
        batch: with log π_old.
        config: of the run.
    """
    from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter

    data, trajectories = batch.data, batch.trajectories
    window = torch.ones_like(data["rollout_log_probs"], dtype=torch.bool)
    sigma, sigma_next = trajectories.schedule.at(trajectories.steps)
    log = RolloutBatch.from_padded(
        window,
        step=step,
        sequence_id=[f"{step}-{row}" for row in range(len(batch))],
        group_id=[f"{step}-{group}" for group in batch.group_ids.tolist()],
        rollout_log_prob=data["rollout_log_probs"],
        old_log_prob=data["old_log_probs"],
        reward=batch.rewards,
        advantages=data["advantages"][:, None].expand_as(window),
        policy_versions=[trajectories.version] * len(batch),
        engine=f"rollout copy, {config.rollout.dtype}",
        model=config.model.path,
        prompt=batch.texts,
        dimensions=dimensions_of(data),
        timestep=data["timesteps"],
        sigma=sigma,
        sigma_next=sigma_next,
        step_std=data["std"],
        exact_kl=step_kl(data["old_prev_sample_mean"], data["prev_sample_mean"], data["std"]),
    )
    with RolloutLogWriter(path, overwrite=True) as writer:
        writer.write(log)
