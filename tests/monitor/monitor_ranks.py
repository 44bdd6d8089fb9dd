"""Program of one rank of the monitor's distributed tests; without a group, the expected result."""

from __future__ import annotations

import errno
import math
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fault_cases import run_on
from faulty_disk import Faults
from torch import Tensor

from rollcorr import Monitor, read_rollout_log
from rollcorr.config import InertOptionWarning
from rollcorr.monitor import RolloutSample

SIZE = 3
LENGTHS = (5, 1, 0, 7, 3, 2, 6, 4)
# Sequences of each rank, in micro-batches: uneven, and one rank has none.
MICRO_BATCHES: dict[int, tuple[tuple[int, ...], ...]] = {0: ((0, 1), (2,), (3, 4)), 1: (), 2: ((5, 6, 7),)}
FAULTS = (
    ("full on the first", (0,), errno.ENOSPC, 9, 12),
    ("stale on the second", (1,), errno.ESTALE, 4, 20),
    ("gone on all", (0, 1, 2), errno.EIO, 1, 30),
)
"""Name, ranks, error, first call and number of calls that fail."""
CONFIG = {"rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.05}


def sequences() -> list[dict[str, Tensor]]:
    """One dictionary per sequence, with a missing log-prob among them."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for length in LENGTHS:
        train = -2 * torch.rand(length, generator=generator)
        noise = 0.3 * torch.randn(length, generator=generator)
        mask = torch.rand(length, generator=generator) > 0.2
        found.append({"train": train, "rollout": train + noise, "mask": mask})
    found[3]["rollout"][2], found[3]["mask"][2] = math.nan, True
    return found


def packed(numbers: tuple[int, ...]) -> dict[str, Tensor]:
    """Some sequences end to end."""
    chosen = [sequences()[number] for number in numbers]
    joined = {name: torch.cat([one[name] for one in chosen]) for name in ("train", "rollout", "mask")}
    offsets = torch.tensor([0, *(len(one["train"]) for one in chosen)]).cumsum(0)
    return {**joined, "cu_seqlens": offsets}


def correct(monitor: Monitor, numbers: tuple[int, ...], **options: Any):
    batch = packed(numbers)
    ids = [f"row {number}" for number in numbers]
    return monitor.correct(
        batch["train"],
        batch["rollout"],
        batch["mask"],
        cu_seqlens=batch["cu_seqlens"],
        columns={"sequence_id": ids, "x_number": list(numbers)},
        **options,
    )


def rewards(numbers: tuple[int, ...]) -> Tensor:
    return torch.tensor([float(number) ** 2 for number in numbers])


def whole_run(folder: Path) -> list[dict[str, float]]:
    """Two steps of one process with everything in one batch."""
    numbers = tuple(number for batches in MICRO_BATCHES.values() for batch in batches for number in batch)
    with Monitor(folder, CONFIG, rollouts=RolloutSample(share=0.5)) as monitor:
        found = []
        for _ in range(2):
            correct(monitor, numbers)
            found.append(monitor.step(reward=rewards(numbers), number=2.0))
        return found


def run_of_ranks(folder: Path, rank: int, *, over_ranks: bool) -> dict[str, Any]:
    """The same on three ranks; `over_ranks` with one call on each, else in micro-batches."""
    seen: list[str] = []
    group = dist.group.WORLD
    numbers = tuple(number for batch in MICRO_BATCHES[rank] for number in batch)
    with Monitor(
        folder, CONFIG, group=group, rollouts=RolloutSample(share=0.5), on_alarm=lambda f: seen.append(f.code)
    ) as monitor:
        found, tokens = [], []
        for _ in range(2):
            if over_ranks:
                tokens.append(float(correct(monitor, numbers).denominators().tokens) if numbers else empty(monitor))
            else:
                for batch in MICRO_BATCHES[rank]:
                    correct(monitor, batch, over_ranks=False)
            # One number is known to two ranks only, and is the mean of theirs.
            own = {"number": 1.0 + rank} if rank != 1 else {}
            found.append(monitor.step(reward=rewards(numbers), **own))
        return {"metrics": found, "transfers": monitor._exchange.transfers, "tokens": tokens, "alarms": seen}


def late_numbers(folder: Path, rank: int) -> dict[str, Any]:
    """One rank knows more from the second step on, and in the third more than its vector had room for."""
    with Monitor(folder, group=dist.group.WORLD) as monitor:
        found, transfers = [], []
        for step in range(1, 5):
            own = {"lr": 0.5}
            if rank == 2 and step >= 2:
                own |= {f"late/{number}": [1.0, 2.0] for number in range({2: 2, 3: 50, 4: 3}[step])}
            found.append(monitor.step(**own))
            transfers.append(monitor._exchange.transfers)
        return {"metrics": found, "transfers": transfers}


def empty(monitor: Monitor) -> float:
    nothing = torch.zeros(0)
    offsets = torch.zeros(1, dtype=torch.int64)
    correction = monitor.correct(nothing, nothing, nothing.bool(), cu_seqlens=offsets, columns={"x_number": []})
    return float(correction.denominators().tokens)


def refused_on_every_rank(folder: Path) -> str:
    """The directory already has steps: every rank raises, and none waits for the rank that looked."""
    try:
        Monitor(folder, CONFIG, group=dist.group.WORLD)
    except FileExistsError as error:
        return str(error)
    return ""


def faulty_runs(folder: Path, rank: int) -> dict[str, Any]:
    """Three ranks, of which one or all have a disk that fails for a while."""
    found = {}
    for name, ranks, number, first, count in FAULTS:
        faults = Faults(number, first if rank in ranks else 0, count)
        found[name] = run_on(folder / name, faults, group=dist.group.WORLD)
        dist.barrier()
    return found


def context_run(folder: Path, rank: int) -> dict[str, Any]:
    """Three ranks share the same two sequences, each with every third token."""
    numbers = (3, 6)
    batch = [sequences()[number] for number in numbers]
    mine = {name: torch.cat([one[name][rank::SIZE] for one in batch]) for name in ("train", "rollout", "mask")}
    positions = torch.cat([torch.arange(len(one["train"]))[rank::SIZE] for one in batch])
    offsets = torch.tensor([0, *(len(one["train"][rank::SIZE]) for one in batch)]).cumsum(0)
    with Monitor(folder, CONFIG, context_group=dist.group.WORLD, rollouts=RolloutSample()) as monitor:
        monitor.correct(
            mine["train"],
            mine["rollout"],
            mine["mask"],
            cu_seqlens=offsets,
            position_ids=positions,
            columns={"x_number": list(numbers)},
        )
        return {"metrics": monitor.step(reward=rewards(numbers))}


def padded_context_run(folder: Path, rank: int) -> None:
    """The same sequences as padded rows, (2, 9) in all and (2, 3) on each rank."""
    mine, numbers = {}, (3, 6)
    for name in ("train", "rollout", "mask"):
        rows = [torch.nn.functional.pad(one, (0, 9 - len(one))) for one in (sequences()[n][name] for n in numbers)]
        mine[name] = torch.stack(rows)[:, rank::SIZE]
    positions = torch.arange(9)[rank::SIZE].expand(2, -1)
    with Monitor(folder, CONFIG, context_group=dist.group.WORLD, rollouts=RolloutSample()) as monitor:
        monitor.correct(*mine.values(), position_ids=positions, columns={"x_number": list(numbers)})
        monitor.step(reward=rewards(numbers))


def context_whole(folder: Path) -> dict[str, float]:
    with Monitor(folder, CONFIG) as monitor:
        correct(monitor, (3, 6))
        return monitor.step(reward=rewards((3, 6)))


def logged(folder: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """The rows of a run's logs, by step and number."""
    rows = [row for part in read_rollout_log(folder) for row in part.to_rows()]
    return {(row["step"], row["x_number"]): row for row in rows}


def run(rank: int, path: str) -> None:
    """One process."""
    warnings.simplefilter("ignore", InertOptionWarning)
    torch.set_num_threads(1)
    folder = Path(path)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=SIZE)
    results = {
        "micro-batches": run_of_ranks(folder / "micro", rank, over_ranks=False),
        "over ranks": run_of_ranks(folder / "over", rank, over_ranks=True),
        "late": late_numbers(folder / "late", rank),
        "refused": refused_on_every_rank(folder / "micro"),
        "faults": faulty_runs(folder, rank),
        "context": context_run(folder / "context", rank),
    }
    padded_context_run(folder / "padded context", rank)
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()
