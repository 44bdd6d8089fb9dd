"""Dynamic sampling: replace groups of equal rewards, whose advantages are 0, by groups of new problems.

Source: Yu et al. (2025), "DAPO", arXiv:2503.14476, section 3.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rollcorr.core.sampling import concatenate_kept_sets
from rollcorr.engines.base import Rollout, TokenBatch, join_padded
from rollcorr.train.grpo.tasks import Reward

COLUMNS = ("rollout_log_prob", "raw_log_prob", "log_kept_mass", "policy_versions")


def sample_groups(
    sample_round: Callable[[int], tuple[Rollout, list[Reward]]], *, groups: int, group_size: int, max_rounds: int
) -> tuple[Rollout, list[Reward], dict[str, float]]:
    """Sample rounds until enough groups have rewards that differ, and return as many groups as one round has.

    Groups stay in the order in which they were sampled. After the last round, groups of equal rewards fill the batch.

    Args:
        sample_round: callback that samples round 0, 1, …: `groups` × `group_size` responses and their rewards.
        groups: number of groups.
        group_size: responses of a group, which follow each other.
        max_rounds: rounds at most; with 1, every group is kept.

    Returns:
        The batch, its rewards, and metrics of all sampled responses.
    """
    rollouts: list[Rollout] = []
    sampled: list[Reward] = []
    differing = torch.zeros(0, dtype=torch.bool, device="cpu")
    while len(rollouts) < max_rounds and int(differing.sum()) < groups:
        rollout, rewards = sample_round(len(rollouts))
        rollouts.append(rollout)
        sampled += rewards

        # NaN differs from itself, so a broken reward is kept and reported rather than resampled.
        values = torch.tensor([reward.value for reward in sampled], dtype=torch.float64, device="cpu")
        by_group = values.view(-1, group_size)
        differing = by_group.amax(1) != by_group.amin(1)

    # Metrics include dropped responses. Without them, accuracy would describe only problems of medium difficulty.
    metrics = {
        "reward/mean": float(values.mean()),
        "reward/std": float(values.std(correction=0)),
        "reward/accuracy": sum(reward.correct for reward in sampled) / len(sampled),
        "rollout/rounds": float(len(rollouts)),
        "rollout/differing_groups": float(differing.double().mean()),
    }
    if len(rollouts) == 1:
        return rollouts[0], sampled, metrics

    chosen = differing.int().argsort(descending=True, stable=True)[:groups].sort().values
    rows = (chosen[:, None] * group_size + torch.arange(group_size, device="cpu")).flatten()
    return select_rows(join_rollouts(rollouts), rows), [sampled[row] for row in rows.tolist()], metrics


def join_rollouts(parts: Sequence[Rollout]) -> Rollout:
    """Join rollouts of one engine along the rows, padded to the longest prompt and response.

    A column that a part lacks is left out; policy versions are filled in from the part's `SamplingSpec`.
    """
    columns: dict[str, Any] = {name: [getattr(part, name) for part in parts] for name in COLUMNS}
    versions = columns["policy_versions"]
    if any(ages is not None for ages in versions):
        own = [torch.full_like(part.tokens.response_ids, part.sampling.policy_version or 0) for part in parts]
        columns["policy_versions"] = [own[row] if ages is None else ages for row, ages in enumerate(versions)]
    for name, values in columns.items():
        columns[name] = None if any(v is None for v in values) else join_padded(values)
    tokens = [part.tokens for part in parts]
    kept = [part.kept for part in parts if part.kept is not None]

    # Prompts are padded on the left.
    return dataclasses.replace(
        parts[-1],
        tokens=TokenBatch(
            prompt_ids=join_padded([part.prompt_ids.flip(1) for part in tokens]).flip(1),
            prompt_mask=join_padded([part.prompt_mask.flip(1) for part in tokens]).flip(1),
            response_ids=join_padded([part.response_ids for part in tokens]),
            response_mask=join_padded([part.response_mask for part in tokens]),
        ),
        kept=concatenate_kept_sets(kept) if len(kept) == len(parts) else None,
        **columns,
    )


def select_rows(rollout: Rollout, rows: Tensor) -> Rollout:
    """Return the given rows of a rollout, with unchanged padding. Syncs, because kept sets are packed.

    Args:
        rollout: B rows.
        rows: int64 indices in host memory, (n,).
    """
    mask = rollout.tokens.response_mask
    rows = rows.to(mask.device)
    kept = rollout.kept
    if kept is not None:  # the position of each token in the packed order
        positions = (mask.flatten().cumsum(0) - 1).view(mask.shape)
        kept = kept.select(positions[rows][mask[rows]])
    columns: dict[str, Any] = {name: getattr(rollout, name) for name in COLUMNS}
    for name, values in columns.items():
        columns[name] = None if values is None else values[rows]
    return dataclasses.replace(
        rollout,
        tokens=rollout.tokens.select(rows),
        kept=kept,
        **columns,
    )
