"""What one rank of the TRL test does: it corrects its own sequences of the recorded batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from trl_stand_in import StandInTrainer, recorded_batch

from rollcorr.integrations.trl import attach

SHARDS = ((0, 3), (3, 8))
CONFIG = {
    "rollout_is": "token",
    "rollout_is_batch_normalize": True,
    "rollout_rs": "token_k1",
    "rollout_rs_threshold": "0.7_1.5",
}


def corrected(first: int, last: int) -> dict[str, Any]:
    """The weights, mask, count and log of some sequences."""
    batch = {name: value[first:last] if value.dim() else value for name, value in recorded_batch().items()}
    trainer = attach(StandInTrainer(batch, "dapo"), CONFIG)
    result = trainer._generate_and_score_completions([])
    trainer.log({})
    kept = ("importance_sampling_ratio", "tool_mask", "num_items_in_batch")
    return {name: result[name] for name in kept} | {"log": trainer.logged[0]}


def run(rank: int, path: str) -> None:
    """Write what this rank has."""
    dist.init_process_group("gloo", init_method=f"file://{path}/meeting", rank=rank, world_size=len(SHARDS))
    torch.save(corrected(*SHARDS[rank]), f"{path}/{rank}.pt")
    dist.destroy_process_group()
