"""Programs of two ranks that make different calls; each scenario ends with an error."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed as dist

from rollcorr import Monitor, PolicyLogProbs, correct, policy_loss
from rollcorr.config import InertOptionWarning

SIZE = 2


def fewer_calls(rank: int, folder: Path, impatient: Any) -> None:
    """The first rank corrects three micro-batches, the second one two, and then ends the step."""
    with Monitor(folder / "calls", ranks.STANDARD, group=dist.group.WORLD) as monitor:
        for _ in range(3 - rank):
            on_the_batch(monitor.correct)
        monitor.step()


def fewer_calls_later(rank: int, folder: Path, impatient: Any) -> None:
    """The same in a later step, when the ranks know each other's layouts."""
    with Monitor(folder / "later", ranks.STANDARD, group=dist.group.WORLD) as monitor:
        for step in range(3):
            for _ in range(3 - rank * (step == 2)):
                on_the_batch(monitor.correct)
            monitor.step()


def other_configurations(rank: int, folder: Path, impatient: Any) -> None:
    """Both correct once, by different criteria."""
    fields = ranks.STANDARD if rank == 0 else {"rollout_is": "token"}
    on_the_batch(correct, ranks.config(fields), group=dist.group.WORLD)


def no_call(rank: int, folder: Path, impatient: Any) -> None:
    """Only the first rank corrects. The second stays alive, so only the timeout ends the wait."""
    try:
        if rank == 0:
            on_the_batch(correct, ranks.config(ranks.STANDARD), group=impatient)
    finally:
        dist.barrier()


def other_policy(rank: int, folder: Path, impatient: Any) -> None:
    """Correction and loss use different π_old. The second rank's slice is empty: there π_old equals π_θ."""
    tokens = 6 * (1 - rank)
    old, rollout = torch.full((2, tokens), -1.0), torch.full((2, tokens), -1.5)
    mask = torch.ones(2, tokens, dtype=torch.bool)
    correction = correct(old - 1, rollout, mask, "decoupled_token_is", context_group=impatient)
    policies = PolicyLogProbs(log_prob=old + 0.1, old_log_prob=old, rollout_log_prob=rollout)
    policy_loss(policies, torch.ones(2), mask, correction=correction)


SCENARIOS = (fewer_calls, fewer_calls_later, other_configurations, other_policy, no_call)


def on_the_batch(call: Callable[..., object], *arguments: Any, **options: Any) -> None:
    data = ranks.make_data()
    call(data.old, data.rollout, data.mask, *arguments, **options)


def run(rank: int, path: str) -> None:
    """One process: the scenarios one after the other."""
    warnings.simplefilter("ignore", InertOptionWarning)
    torch.set_num_threads(1)
    folder = Path(path)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=SIZE)
    impatient = dist.new_group(timeout=datetime.timedelta(seconds=1))
    errors = {}
    for scenario in SCENARIOS:
        try:
            scenario(rank, folder, impatient)
        except (RuntimeError, ValueError) as error:
            errors[scenario.__name__] = str(error)
    torch.save(errors, folder / f"{rank}.pt")
    dist.destroy_process_group()
