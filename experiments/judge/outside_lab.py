"""The bench of the outside faults: one policy, a correct sampler and trainer, and prompts of four lengths.

A fault samples or scores one group of prompts in a wrong way and marks the tokens it concerns. The bench adds the
log-probs of a correct pipeline for the same tokens: their difference is the excess, token by token.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from judge_engine import Rollout, engine_copy, sample, trainer_log_prob
from judge_tasks import BOS, PAD, stories
from torch import Tensor, nn
from torch.nn.functional import pad

from rollcorr import RolloutBatch, RolloutLogWriter, SamplingSpec

END = 426
"""The id of ".", which ends a response: stories260K ends a sentence more often than a text."""
WIDTH = 40
PROMPT_LENGTHS = (5, 9, 14, 22)
ROWS = 96
NULL_ROWS = 256
"""Rows per prompt length in a log and in a null: 10,000 tokens in a null."""
STEPS = 4
"""The rows of a log are divided over steps, between which the policy does not change."""


class Scored(NamedTuple):
    """Rows with prompts of one length: (B, P) and (B, T)."""

    prompts: Tensor
    rollout: Rollout
    train: Tensor
    """log π as the trainer reports it."""
    planted: Tensor
    """True on the tokens whose log-probs the fault changes."""
    clean: tuple[Tensor, Tensor] | None = None
    """(log μ, log π) of the same tokens without the fault; computed where None."""


@dataclass
class Bench:
    """Sampler and trainer with equal weights; seed 1 differs from seed 0 in policy, temperature and prompts.

    Args:
        seed: seeds the prompts, the draws and the choice of rows.
        temperature: of both sides; defaults to 1.0, and 0.8 for odd seeds.
        numerics: of the engine, as in `engine_copy`.
        sharpness: multiplies the logits of both sides, as a larger head does.
    """

    seed: int
    temperature: float | None = None
    numerics: str = "bf16"
    sharpness: float = 1.0
    spec: SamplingSpec = field(init=False)
    trainer: nn.Module = field(init=False)
    engine: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        if self.temperature is None:
            self.temperature = (1.0, 0.8)[self.seed % 2]
        self.spec = SamplingSpec(temperature=self.temperature, logprobs="processed", engine="own")
        self.trainer = stories().eval().requires_grad_(False)
        if self.seed % 2:
            # A policy that training has changed: other weights, sharper.
            self.trainer = with_update(self.trainer, rank=8, size=0.05, seed=3)
        with torch.no_grad():
            # The last norm scales the head's input, and so its output.
            self.trainer.model.norm.weight.mul_(self.sharpness)
        self.engine = engine_copy(self.trainer, self.numerics)
        self.generator = torch.Generator().manual_seed(self.seed)

    @functools.cached_property
    def prompts(self) -> list[Tensor]:
        """Return prompts of each length, (ROWS, P): texts by the policy itself."""
        return [self.draw_prompts(length, ROWS) for length in PROMPT_LENGTHS]

    def draw_prompts(self, length: int, rows: int) -> Tensor:
        """Return `rows` texts of `length` ids by the policy."""
        begin = torch.full((rows, 1), BOS)
        return torch.cat([begin, self.sample(begin, width=length - 1, eos=-1).ids], dim=1)

    def sample(
        self,
        prompts: Tensor,
        *,
        model: nn.Module | None = None,
        width: int = WIDTH,
        eos: int = END,
        **hooks: Callable[..., object],
    ) -> Rollout:
        """Sample with the correct engine, or with `model`; `hooks` as in `judge_engine.sample`."""
        chosen = model or self.engine
        return sample(
            chosen, prompts, width=width, generator=self.generator, temperature=self.temperature, eos=eos, **hooks
        )

    @torch.no_grad()
    def score(self, prompts: Tensor, ids: Tensor, *, model: nn.Module | None = None) -> Tensor:
        """Return log π (B, T) of the correct trainer, or of `model`."""
        return trainer_log_prob(model or self.trainer, prompts, ids, temperature=self.temperature)

    @torch.no_grad()
    def logits(self, prompts: Tensor, ids: Tensor, *, model: nn.Module | None = None) -> Tensor:
        """Return the trainer's logits at the temperature (B, T, V), those of each response token."""
        tokens = torch.cat([prompts, ids], dim=1)
        return (model or self.trainer)(input_ids=tokens).logits[:, prompts.shape[1] - 1 : -1].float() / self.temperature

    def correct(self, prompts: Tensor, rollout: Rollout | None = None) -> Scored:
        """Return a group without any fault; nothing is planted."""
        rollout = rollout or self.sample(prompts)
        train = self.score(prompts, rollout.ids)
        nothing = torch.zeros_like(rollout.mask)
        return Scored(prompts, rollout, train, nothing, (rollout.log_prob, train))

    def some_rows(self, rows: int, share: float) -> Tensor:
        """Return a random choice of `share` of the rows: (rows,) bool."""
        chosen = torch.zeros(rows, dtype=torch.bool)
        chosen[torch.randperm(rows, generator=self.generator)[: round(share * rows)]] = True
        return chosen


@torch.no_grad()
def with_update(model: nn.Module, *, rank: int, size: float, seed: int, scale: float = 1.0) -> nn.Module:
    """Return `model` plus a random low-rank update of its attention: W + scale · A B, |A B| = size · |W|."""
    generator = torch.Generator().manual_seed(seed)
    updated = copy.deepcopy(model)
    for name, weight in updated.named_parameters():
        if "q_proj" in name or "v_proj" in name or "o_proj" in name:
            first = torch.randn(weight.shape[0], rank, generator=generator)
            second = torch.randn(rank, weight.shape[1], generator=generator)
            update = first @ second
            weight.add_(update * (scale * size * weight.norm() / update.norm()))
    return updated


def k3(log_mu: Tensor, log_pi: Tensor) -> Tensor:
    """exp(d) − 1 − d with d = log π − log μ, in float64."""
    d = (log_pi.double() - log_mu.double()).clamp(-50, 50)
    return d.exp() - 1 - d


def with_clean(bench: Bench, group: Scored) -> Scored:
    """Return the group with the log-probs of a correct pipeline for its tokens."""
    if group.clean is not None:
        return group
    ids = group.rollout.ids
    clean = bench.score(group.prompts, ids, model=bench.engine), bench.score(group.prompts, ids)
    return group._replace(clean=clean)


def padded_right(groups: list[Tensor], width: int, value: float = 0.0) -> Tensor:
    """Return the groups (B, T) below each other, padded to `width`."""
    return torch.cat([pad(group, (0, width - group.shape[1]), value=value) for group in groups])


def write_log(bench: Bench, groups: list[Scored], folder: Path, spec: SamplingSpec | None = None) -> float:
    """Write `rollouts.parquet`, and `excess.npz` with row, position, id, excess and planted flag of each token.

    Returns:
        The share of the excess that lies on the planted tokens.
    """
    groups = [with_clean(bench, group) for group in groups]
    width = max(group.rollout.mask.shape[1] for group in groups)
    mask = padded_right([group.rollout.mask for group in groups], width).bool()
    ids = padded_right([group.rollout.ids for group in groups], width, PAD)
    reported = padded_right([group.rollout.log_prob for group in groups], width)
    train = padded_right([group.train for group in groups], width)
    longest = max(group.prompts.shape[1] for group in groups)
    prompts = padded_right([group.prompts for group in groups], longest, PAD)
    prompt_mask = padded_right([torch.ones_like(group.prompts) for group in groups], longest).bool()

    # Rows of all lengths in every step, in the order in which a reader of the log meets them.
    steps = torch.arange(len(mask)) % STEPS + 1
    order = steps.argsort(stable=True)
    with RolloutLogWriter(folder / "rollouts.parquet") as log:
        for step in range(1, STEPS + 1):
            rows = order[steps[order] == step]
            log.write(
                RolloutBatch.from_padded(
                    mask[rows],
                    prompt_mask=prompt_mask[rows],
                    rollout_log_prob=reported[rows],
                    old_log_prob=train[rows],
                    response_ids=ids[rows],
                    prompt_ids=prompts[rows],
                    step=step,
                    sampling=spec or bench.spec,
                    model="stories260K",
                )
            )

    # The excess over the correct pipeline, token by token.
    clean_mu = padded_right([group.clean[0] for group in groups if group.clean], width)
    clean_pi = padded_right([group.clean[1] for group in groups if group.clean], width)
    excess = (k3(reported, train) - k3(clean_mu, clean_pi)).where(mask, 0.0)[order]
    planted = padded_right([group.planted for group in groups], width).bool()[order] & mask[order]
    row, position = mask[order].nonzero(as_tuple=True)
    columns = {"row": row, "position": position, "id": ids[order][row, position], "excess": excess[row, position]}
    arrays = {name: values.numpy() for name, values in columns.items()}
    np.savez_compressed(folder / "excess.npz", planted=planted[row, position].numpy(), **arrays)
    total = float(excess.sum())
    return float(excess.where(planted, 0.0).sum()) / total if total else 0.0


def write_null(bench: Bench, path: Path) -> None:
    """Write correct rollouts of the same policy and settings, with prompts of their own."""
    groups = [bench.correct(bench.draw_prompts(length, NULL_ROWS)) for length in PROMPT_LENGTHS]
    with RolloutLogWriter(path) as log:
        for group in groups:
            log.write(
                RolloutBatch.from_padded(
                    group.rollout.mask,
                    prompt_mask=torch.ones_like(group.prompts, dtype=torch.bool),
                    rollout_log_prob=group.rollout.log_prob,
                    old_log_prob=group.train,
                    response_ids=group.rollout.ids,
                    prompt_ids=group.prompts,
                    step=0,
                    sampling=bench.spec,
                    model="stories260K",
                )
            )
