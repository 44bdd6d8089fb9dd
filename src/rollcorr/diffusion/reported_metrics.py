"""Metrics of denoising steps as numbers, and a warning about thresholds that nothing can reach."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollcorr.config import Criterion, InertOptionWarning
from rollcorr.core.host_statistics import HostStatistics
from rollcorr.core.mergeable_statistics import Statistics, merge_statistics
from rollcorr.core.metric_registry import PREFIX, finalize
from rollcorr.correction.losses import PolicyLossOutput, loss_metrics
from rollcorr.correction.process_groups import gather_statistics
from rollcorr.diffusion.actor_config import DiffusionActorConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BYPASS_PREFIX = f"actor/{PREFIX}"
ROUNDING = 1e-9
"""Nats. A smaller spread of log-ratios comes from the order of additions, not from two policies that differ."""

OUT_OF_REACH = 20.0
"""Standard deviations of what is seen. A bound farther away than this is never met."""

_warned_of: set[tuple[DiffusionActorConfig, str]] = set()


def diffusion_metrics(
    statistics: Statistics, config: DiffusionActorConfig, *, prefix: str | None = None
) -> dict[str, float]:
    """Every metric of (merged) correction statistics, in one transfer.

    Warns, once for each configuration and criterion, of a threshold that is out of reach: `InertOptionWarning`.

    Args:
        statistics: of `Correction.statistics`; merged over micro-batches and ranks.
        config: what they were computed with.
        prefix: None takes `rollout_corr/` in decoupled mode and `actor/rollout_corr/` in bypass mode.
    """
    host = statistics.read()
    for name, reason in out_of_reach(host, config).items():
        if (config, name) not in _warned_of:
            _warned_of.add((config, name))
            warnings.warn(reason, InertOptionWarning, stacklevel=2)
    return finalize(host, prefix=prefix or (BYPASS_PREFIX if config.bypass_mode else PREFIX))


def loss_step_metrics(
    outputs: Sequence[PolicyLossOutput], config: DiffusionActorConfig, *, group: ProcessGroup | None = None
) -> dict[str, float]:
    """The metrics of an optimizer step: `actor/…` of the loss, and in bypass mode `actor/rollout_corr/…`.

    Args:
        outputs: of every micro-batch and step of this rank.
        config: as given to `diffusion_loss`.
        group: data-parallel group; every rank must have an output.
    """
    merged = gather_statistics(merge_statistics(output.statistics for output in outputs), group)
    metrics = loss_metrics(merged)

    # In bypass mode every loss made its own correction.
    corrections = [output.correction.statistics for output in outputs if output.correction is not None]
    found = [statistics for statistics in corrections if statistics is not None]
    if found:
        metrics |= diffusion_metrics(gather_statistics(merge_statistics(found), group), config)
    return metrics


def out_of_reach(statistics: HostStatistics, config: DiffusionActorConfig) -> dict[str, str]:
    """Criteria of which every bound lies beyond 20 standard deviations of what was seen, and why that is."""
    criteria = () if config.correction is None else config.correction.criteria
    reasons = {}
    for criterion in criteria:
        seen = statistics.moments.get(f"rs/{criterion.name}")
        if seen is None or seen.count < 2 or seen.std <= ROUNDING:
            continue  # one value, or two policies that agree up to rounding, have no spread to measure by

        distance = _distance(criterion, seen.mean) / seen.std
        if not OUT_OF_REACH < distance < math.inf:
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


def _distance(criterion: Criterion, mean: float) -> float:
    """From the mean of a criterion's statistic to its nearest bound; negative beyond it, inf without one."""
    if criterion.kind != "k1":
        return math.inf if criterion.upper is None else criterion.upper - mean

    # The statistic of k1 is −log ρ; its bounds are on ρ.
    log_ratio = -mean
    above = math.inf if criterion.upper is None else math.log(criterion.upper) - log_ratio
    below = math.inf if criterion.lower is None else log_ratio - math.log(criterion.lower)
    return min(above, below)
