"""Denoising steps in a rollout log: statistics in joint units, as for a diffusion batch.

A row with `dimensions` is one picture, and its tokens are denoising steps. Logged log-probs are averages over D
dimensions. Thresholds apply to the joint log-ratio J, which is D times their difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.core.mergeable_statistics import Statistics
from rollcorr.diffusion.actor_config import DiffusionActorConfig
from rollcorr.diffusion.step_correction import correct_steps
from rollcorr.rollout_log import RolloutBatch, Shard, read_shard

# Maximum number of distinct timesteps in a breakdown. A log with more has random timesteps, and gets no breakdown.
MOST_TIMESTEPS = 100
DENOISING_COLUMNS = (
    "dimensions",
    "timestep",
    "sigma",
    "sigma_next",
    "step_std",
    "exact_kl",
    "mean_distance",
)


def timestep_values(shards: Sequence[Shard], batch_size: int) -> tuple[float, ...]:
    """Return the distinct timesteps of a log, from noise to data; empty without a record or above `MOST_TIMESTEPS`."""
    columns = ("timestep",)
    batches = (batch for shard in shards for batch in read_shard(shard, columns=columns, batch_size=batch_size))
    seen = distinct_values(batches, columns, most=MOST_TIMESTEPS)
    return tuple(seen) if len(seen) <= MOST_TIMESTEPS else ()


def distinct_values(batches: Iterable[RolloutBatch], columns: Sequence[str], *, most: float = math.inf) -> list[float]:
    """Return the distinct finite values of some columns, in descending order; stop reading after more than `most`."""
    seen: set[float] = set()
    for batch in batches:
        for values in [batch.packed(column) for column in columns if batch.has(column)]:
            seen.update(values[values.isfinite()].unique().tolist())
        if len(seen) > most:
            break
    return sorted(seen, reverse=True)


def denoising_statistics(
    batch: RolloutBatch,
    rows: Tensor,
    train: Tensor,
    rollout: Tensor,
    config: RolloutCorrectionConfig,
    timesteps: Sequence[float],
    *,
    with_exact_kl: bool,
) -> Iterator[Statistics]:
    """Compute the statistics of some rows: one for each combination of window length and number of dimensions.

    Args:
        batch: rows with `dimensions`.
        rows: rows to include, (B,) bool.
        train: log π of the entire batch, packed, (N,) nats.
        rollout: log μ, likewise.
        config: configuration to measure; its weights and bounds apply to the joint likelihood ratio.
        timesteps: timesteps of the breakdown.
        with_exact_kl: measure the exact KL; NaN where it is not recorded.
    """
    actor = DiffusionActorConfig(rollout_correction=config, reduction="sum")
    dimensions = batch.values("dimensions")
    kl = exact_kl(batch) if with_exact_kl else None
    times = batch.packed("timestep") if batch.has("timestep") and timesteps else None

    # Rows of equal shape form a rectangular tensor; a batch has few shapes.
    shapes = torch.stack([batch.lengths, dimensions], dim=1)
    for width, size in shapes[rows].unique(dim=0).tolist():
        chosen = (rows & (batch.lengths == width) & (dimensions == size)).repeat_interleave(batch.lengths)
        if not width:
            continue

        def rectangle(values: Tensor, chosen: Tensor = chosen, width: int = width) -> Tensor:
            return values[chosen].view(-1, width)

        statistics = correct_steps(
            rectangle(train),
            rectangle(rollout),
            actor,
            exact_kl=None if kl is None else rectangle(kl),
            timesteps=None if times is None else rectangle(times),
            dimensions=int(size),
            schedule=timesteps or None,
        ).statistics
        if statistics is not None:
            yield statistics


def has_exact_kl(batch: RolloutBatch) -> bool:
    """Return whether a batch contains the columns of the exact KL."""
    return batch.has("exact_kl") or (batch.has("mean_distance") and batch.has("step_std"))


def exact_kl(batch: RolloutBatch) -> Tensor:
    """Compute each step's KL over all D, (N,) float64 nats: as recorded, or from the distance of means, or NaN."""
    kl = torch.full((int(batch.lengths.sum()),), torch.nan, dtype=torch.float64, device="cpu")
    if batch.has("mean_distance") and batch.has("step_std"):
        kl = batch.packed("mean_distance").double() / (2 * batch.packed("step_std").double().square())
    if batch.has("exact_kl"):
        recorded = batch.packed("exact_kl").double()
        kl = torch.where(recorded.isfinite(), recorded, kl)
    return kl
