"""Program of one rank of a 2 × 2 grid: data-parallel pairs have different sequences, context pairs different tokens."""

from __future__ import annotations

import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollcorr import Monitor, PolicyLogProbs, correct, policy_loss
from rollcorr.config import InertOptionWarning, LossConfig
from rollcorr.correction import Detail

DATA_RANKS, CONTEXT_RANKS = 2, 2
LENGTHS = (5, 1, 0, 7, 3, 2)
SHARDS = ((0, 1, 2, 3), (4, 5))
"""The sequences of each data rank: uneven, and one sequence is empty."""

CONFIG = {"rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.05}
BYPASS = {"bypass_mode": True, "loss_type": "ppo_clip", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.05}
LOSS = LossConfig(kl_coef=0.1, entropy_coef=0.01)
SCENARIOS: tuple[str, ...] = ("over ranks", "micro-batches", "empty slice", "bypass", "correction alone")


def sequences() -> list[dict[str, Tensor]]:
    """One dictionary of tokens per sequence, in float64, with a missing log-prob among them."""
    generator = torch.Generator().manual_seed(11)

    def draw(length: int) -> Tensor:
        return torch.randn(length, generator=generator, dtype=torch.float64)

    found = []
    for length in LENGTHS:
        old = -2 + 0.3 * draw(length)
        found.append(
            {
                "old": old,
                "rollout": old + 0.3 * draw(length),
                "trained": old + 0.2 * draw(length),
                "ref": old + 0.1 * draw(length),
                "entropy": draw(length).abs(),
                "advantages": draw(length),
                "mask": torch.rand(length, generator=generator) > 0.2,
                "position": torch.arange(length),
            }
        )
    found[3]["rollout"][2], found[3]["mask"][2] = math.nan, True
    found[0]["entropy"][1], found[0]["mask"][1] = math.nan, True
    return found


def packed(numbers: tuple[int, ...], tokens: slice) -> dict[str, Tensor]:
    """The given tokens of some sequences, end to end."""
    chosen = [{name: values[tokens] for name, values in sequences()[number].items()} for number in numbers]
    joined = {name: torch.cat([one[name] for one in chosen]) for name in chosen[0]}
    offsets = torch.tensor([0, *(len(one["old"]) for one in chosen)]).cumsum(0)
    return {**joined, "cu_seqlens": offsets}


def rewards(numbers: tuple[int, ...]) -> Tensor:
    """One value per sequence, with a missing one."""
    return torch.tensor([math.nan if number == 3 else float(number) ** 2 for number in numbers])


def add_loss(monitor: Monitor, batch: dict[str, Tensor], **options: Any) -> None:
    policies = {} if "config" in options else {"old_log_prob": batch["old"]}
    monitor.add(
        policy_loss(
            PolicyLogProbs(
                log_prob=batch["trained"], rollout_log_prob=batch["rollout"], ref_log_prob=batch["ref"], **policies
            ),
            batch["advantages"],
            batch["mask"],
            loss=LOSS,
            entropy=batch["entropy"],
            cu_seqlens=batch["cu_seqlens"],
            **options,
        )
    )


def step_of(monitor: Monitor, scenario: str, shard: tuple[int, ...], tokens: slice, context: Any) -> dict[str, float]:
    """One training step of a rank, or of one process with everything."""
    if scenario == "micro-batches":
        for number in shard:
            batch = packed((number,), tokens)
            detail = Detail(sequence_offset=number, position_ids=batch["position"])
            options = {"cu_seqlens": batch["cu_seqlens"], "over_ranks": False, "detail": detail}
            correction = monitor.correct(batch["old"], batch["rollout"], batch["mask"], **options)
            add_loss(monitor, batch, correction=correction)
    elif scenario == "bypass":
        batch = packed(shard, tokens)
        add_loss(monitor, batch, config=monitor.config, context_group=context, whole_step=True)
    elif scenario == "correction alone":
        batch = packed(shard, tokens)
        arguments = (batch["old"], batch["rollout"], batch["mask"], CONFIG)
        monitor.add(correct(*arguments, cu_seqlens=batch["cu_seqlens"], context_group=context))
    else:
        batch = packed(shard, tokens)
        detail = Detail(sequence_offset=shard[0], position_ids=batch["position"])
        options = {"cu_seqlens": batch["cu_seqlens"], "detail": detail}
        correction = monitor.correct(batch["old"], batch["rollout"], batch["mask"], **options)
        add_loss(monitor, batch, correction=correction)

    if scenario == "correction alone":
        return monitor.step(lr=0.25)

    # A tensor of the rank's tokens, one of the sequences shared with its context ranks, and plain numbers.
    per_token = packed(shard, tokens)["entropy"]
    return monitor.step(reward=rewards(shard), token_entropy=per_token, lr=torch.tensor(0.25), epoch=3)


def configuration(scenario: str) -> dict[str, Any]:
    return BYPASS if scenario == "bypass" else CONFIG


def whole_run(folder: Path, scenario: str) -> list[dict[str, float]]:
    """Two steps of one process."""
    everything = tuple(number for shard in SHARDS for number in shard)
    shard = SHARDS[0] if scenario == "correction alone" else everything
    with Monitor(folder, configuration(scenario)) as monitor:
        return [step_of(monitor, scenario, shard, slice(None), None) for _ in range(2)]


def run_of_rank(folder: Path, scenario: str, rank: int, groups: tuple[Any, Any]) -> dict[str, Any]:
    """The same two steps on the grid."""
    data, context = groups
    data_rank, context_rank = divmod(rank, CONTEXT_RANKS)
    tokens = slice(context_rank, None, CONTEXT_RANKS)
    if scenario == "empty slice":
        tokens = slice(0, 0) if context_rank else slice(None)
    shard, arguments = SHARDS[data_rank], {"group": data, "context_group": context}
    if scenario == "correction alone":
        # The Monitor's ranks share one batch, so each pair keeps a directory of its own.
        arguments, shard, folder = {"group": context}, SHARDS[0], folder / str(data_rank)
    with Monitor(folder, configuration(scenario), **arguments) as monitor:
        metrics = [step_of(monitor, scenario, shard, tokens, context) for _ in range(2)]
        return {"metrics": metrics, "transfers": monitor._exchange.transfers}


def pickled_correction(folder: Path, rank: int, groups: tuple[Any, Any]) -> float:
    """Return the tokens of a correction without its groups, as in a pickle."""
    data, context = groups
    batch = packed(SHARDS[rank // CONTEXT_RANKS], slice(rank % CONTEXT_RANKS, None, CONTEXT_RANKS))
    arguments = (batch["old"], batch["rollout"], batch["mask"], CONFIG)
    correction = correct(*arguments, cu_seqlens=batch["cu_seqlens"], group=data, context_group=context)
    with Monitor(folder, CONFIG, group=data, context_group=context) as monitor:
        monitor.add(pickle.loads(pickle.dumps(correction)))
        return monitor.step()["rollout_corr/token_count"]


def overlapping_groups(folder: Path, context: Any) -> str:
    try:
        Monitor(folder, CONFIG, group=dist.group.WORLD, context_group=context)
    except ValueError as error:
        return str(error)
    return ""


def run(rank: int, path: str) -> None:
    """One process."""
    warnings.simplefilter("ignore", InertOptionWarning)
    torch.set_num_threads(1)
    folder = Path(path)
    ranks = DATA_RANKS * CONTEXT_RANKS
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=ranks)
    context, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    data, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    results: dict[str, Any] = {name: run_of_rank(folder / name, name, rank, (data, context)) for name in SCENARIOS}
    results["pickled"] = pickled_correction(folder / "pickled", rank, (data, context))
    results["overlapping"] = overlapping_groups(folder / "overlapping", context)
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()
