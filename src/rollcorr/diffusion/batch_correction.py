"""Correction of a batch before training on it, in bypass or decoupled mode, and the metrics of both modes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollcorr.config import Criterion, InertOptionWarning, PresetName, RolloutCorrectionConfig
from rollcorr.core.host_statistics import HostStatistics
from rollcorr.core.mergeable_statistics import Statistics, merge_statistics
from rollcorr.core.metric_registry import PREFIX, finalize
from rollcorr.correction.losses import PolicyLossOutput, loss_metrics
from rollcorr.correction.process_groups import gather_statistics
from rollcorr.diffusion.actor_config import DiffusionActorConfig
from rollcorr.diffusion.batch_checks import Batch, check_diffusion_batch, dimensions_of, require
from rollcorr.diffusion.step_correction import correct_steps, step_kl

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ROUNDING = 1e-9
"""Nats. A smaller spread of log-ratios comes from the order of additions, not from two policies that differ."""

OUT_OF_REACH = 20.0
"""Standard deviations of a criterion's statistic. A bound farther away than this is never reached."""

_warned_options: set[tuple[DiffusionActorConfig, str]] = set()


def apply_bypass_mode_to_diffusion_batch(
    batch: MutableMapping[str, Tensor], *, schedule: Sequence[float] | None = None
) -> MutableMapping[str, Tensor]:
    """Set old_log_probs := rollout_log_probs, and old_prev_sample_mean := prev_sample_mean if present.

    No log-probs are recomputed, and no weights are computed here: `diffusion_loss` corrects each step against π_θ.

    Args:
        batch: tensors of shape (B, W), see `rollcorr.diffusion.batch_checks`; changed in place.
        schedule: the trainer's timestep values; the batch's must be among them, in consecutive order.

    Returns:
        The same batch.

    Raises:
        KeyError: the rollout recorded no log-probs.
        ValueError: as `check_diffusion_batch`.
    """
    require(batch, "rollout_log_probs", reason="bypass mode takes for π_old")
    check_diffusion_batch(batch, schedule=schedule)
    batch["old_log_probs"] = batch["rollout_log_probs"]
    if "prev_sample_mean" in batch:
        batch["old_prev_sample_mean"] = batch["prev_sample_mean"]
    return batch


def apply_rollout_correction_to_diffusion_batch(
    batch: MutableMapping[str, Tensor],
    config: DiffusionActorConfig | RolloutCorrectionConfig | Mapping[str, Any] | PresetName,
    *,
    schedule: Sequence[float] | None = None,
    group: ProcessGroup | None = None,
) -> tuple[MutableMapping[str, Tensor], dict[str, float]]:
    """Compute weights and keep mask of a batch from π_old / μ in decoupled mode: (B, W), once per batch.

    Writes `rollout_keep_mask`, the steps that stay in the loss, and `rollout_is_weights`, the factor of each step's
    loss: 1 without importance weights, and 0 where the step was rejected. The two are separate because a kept step can
    also have weight 0 (IcePop).

    Args:
        batch: see `rollcorr.diffusion.batch_checks`; changed in place.
        config: the actor's; or only a correction, with the actor's defaults.
        schedule: the trainer's timestep values, in order; optional, by default this batch's values without a
            group, and no breakdown with one.
        group: data-parallel group: statistics, and a batch mean of weights, are then computed over the group.

    Returns:
        The same batch, and the metrics under `rollout_corr/`; the metrics are empty without a correction.

    Raises:
        KeyError: a tensor is missing.
        ValueError: the configuration is for bypass mode, or as `check_diffusion_batch`.
    """
    actor = config if isinstance(config, DiffusionActorConfig) else DiffusionActorConfig(rollout_correction=config)
    if actor.bypass_mode:
        raise ValueError(
            "bypass_mode=True takes μ for π_old, so there is nothing to correct before the loss: call "
            "apply_bypass_mode_to_diffusion_batch, or set bypass_mode=False"
        )

    old, rollout = require(batch, "old_log_probs", "rollout_log_probs", reason="the decoupled correction compares")
    check_diffusion_batch(batch, schedule=schedule)
    ones = torch.ones_like(rollout, dtype=torch.float32)
    if actor.correction is None:
        batch["rollout_keep_mask"] = torch.ones_like(rollout, dtype=torch.bool)
        batch["rollout_is_weights"] = ones
        return batch, {}
    if old is rollout:
        raise ValueError(
            "old_log_probs and rollout_log_probs are one tensor, so π_old/μ = 1 and the correction would do nothing: "
            "recompute old_log_probs with the trainer, or set bypass_mode=True"
        )

    # All ranks of a group must use the same values for the breakdown, but each rank knows only its own batch's.
    values = _distinct_timesteps(batch) if schedule is None and group is None else schedule
    correction = correct_steps(
        old,
        rollout,
        actor,
        exact_kl=step_kl(batch.get("prev_sample_mean"), batch.get("old_prev_sample_mean"), batch.get("std")),
        timesteps=batch.get("timesteps"),
        dimensions=dimensions_of(batch),
        schedule=values,
        group=group,
    )

    weights = ones if correction.loss_weights is None else correction.loss_weights
    batch["rollout_keep_mask"] = correction.loss_mask
    batch["rollout_is_weights"] = weights.masked_fill(~correction.loss_mask, 0.0)
    statistics = correction.statistics
    return batch, {} if statistics is None else diffusion_metrics(statistics, actor)


def _distinct_timesteps(batch: Batch) -> list[float] | None:
    """Return the timestep values of a batch, from noise to data."""
    if "timesteps" not in batch:
        return None
    return sorted(batch["timesteps"].detach().float().unique().tolist(), reverse=True)


def diffusion_metrics(statistics: Statistics, config: DiffusionActorConfig) -> dict[str, float]:
    """Compute every metric of (merged) correction statistics, in one transfer.

    Warns with `InertOptionWarning`, once for each configuration and criterion, if a threshold is out of reach.

    Args:
        statistics: `Correction.statistics`; may be merged over micro-batches and ranks.
        config: the configuration that computed them.

    Returns:
        The metrics, prefixed with `rollout_corr/` in decoupled mode and with `actor/rollout_corr/` in bypass mode.
    """
    host = statistics.read()
    for name, reason in out_of_reach(host, config).items():
        if (config, name) not in _warned_options:
            _warned_options.add((config, name))
            warnings.warn(reason, InertOptionWarning, stacklevel=2)
    return finalize(host, prefix=f"actor/{PREFIX}" if config.bypass_mode else PREFIX)


def loss_step_metrics(
    outputs: Sequence[PolicyLossOutput], config: DiffusionActorConfig, *, group: ProcessGroup | None = None
) -> dict[str, float]:
    """Compute the metrics of an optimizer step: `actor/…` of the loss, and in bypass mode `actor/rollout_corr/…`.

    Args:
        outputs: the loss outputs of every micro-batch and step of this rank.
        config: as given to `diffusion_loss`.
        group: data-parallel group; every rank must have an output.
    """
    merged = gather_statistics(merge_statistics(output.statistics for output in outputs), group)
    metrics = loss_metrics(merged)

    # In bypass mode each loss call computed its own correction.
    corrections = [output.correction for output in outputs if output.correction is not None]
    if corrections:
        merged = merge_statistics(correction.statistics for correction in corrections if correction.statistics)
        metrics |= diffusion_metrics(gather_statistics(merged, group), config)
    return metrics


def out_of_reach(statistics: HostStatistics, config: DiffusionActorConfig) -> dict[str, str]:
    """Return criteria whose bounds all lie more than 20 standard deviations from the data, and a message for each."""
    criteria = () if config.correction is None else config.correction.criteria
    reasons = {}
    for criterion in criteria:
        seen = statistics.moments.get(f"rs/{criterion.name}")
        if seen is None or seen.count < 2 or seen.std <= ROUNDING:
            continue  # one value, or two policies that agree up to rounding, have no spread to measure by

        distance = _distance_to_bound(criterion, seen.mean) / seen.std
        if not OUT_OF_REACH < distance < math.inf:  # also skips NaN, and criteria without a bound
            continue
        if config.reduction == "mean" and criterion.kind != "kl":
            fix = (
                "Log-ratios are means over the latent dimensions: set reduction='sum', on which such thresholds are "
                "meant, or a band nearer to 1"
            )
        else:
            fix = "Set a threshold nearer to what is seen, or leave the criterion out"
        reasons[criterion.name] = (
            f"rollout_rs {criterion.name!r} rejects nothing: its bounds lie {distance:.0f} standard deviations or "
            f"more from what is seen (mean {seen.mean:.3g}, std {seen.std:.3g} nats). {fix}"
        )
    return reasons


def _distance_to_bound(criterion: Criterion, mean: float) -> float:
    """Return the distance from a criterion's mean statistic to its nearest bound: negative beyond, inf without."""
    if criterion.kind != "k1":
        return math.inf if criterion.upper is None else criterion.upper - mean

    # The statistic of k1 is −log ρ; its bounds apply to ρ.
    log_ratio = -mean
    above = math.inf if criterion.upper is None else math.log(criterion.upper) - log_ratio
    below = math.inf if criterion.lower is None else log_ratio - math.log(criterion.lower)
    return min(above, below)
