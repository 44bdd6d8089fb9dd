"""Parts of the training steps of all recipes: derived seeds, a clock, weight updates of the engine, AdamW."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from rollcorr.core.advantages import dr_grpo_advantages, grpo_advantages, rloo_advantages
from rollcorr.engines.base import EngineAnswerError, Rollout
from rollcorr.engines.row_seeds import row_seed
from rollcorr.train.run_config import OptimConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
}

HELD_OUT = 1_000_000
"""Data of the steps from here on is for evaluation: no training step sees it."""


def derived_seed(seed: int, purpose: str, step: int = 0) -> int:
    """Return a 63-bit seed that depends only on the arguments, so a resumed run repeats its draws.

    Args:
        seed: the run's seed.
        purpose: name of the random stream, for example "problems" or "sampling"; a different one gives other draws.
        step: the training step, or any other counter.
    """
    return row_seed(seed, purpose, step)


def derived_generator(seed: int, purpose: str, step: int = 0) -> torch.Generator:
    """Return a CPU generator seeded by `derived_seed`.

    Args:
        seed: the run's seed.
        purpose: name of the random stream; each purpose gets different numbers.
        step: number of the step.
    """
    return torch.Generator().manual_seed(derived_seed(seed, purpose, step))


def shuffled_walk(size: int, count: int, *, purpose: str, seed: int, step: int) -> list[int]:
    """Return the rows of a step: the next `count` of an endless walk over `size` rows, reshuffled each epoch."""
    positions = range(step * count, (step + 1) * count)
    orders = {
        epoch: torch.randperm(size, generator=derived_generator(seed, purpose, epoch), device="cpu").tolist()
        for epoch in {position // size for position in positions}
    }
    return [orders[position // size][position % size] for position in positions]


class Clock:
    """Seconds by phase: `with clock("rollout"): …`."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a phase."""
        start = time.perf_counter()
        yield
        self._seconds[phase] = time.perf_counter() - start

    @property
    def total(self) -> float:
        """Return the seconds since the clock was created."""
        return time.perf_counter() - self._start

    def metrics(self) -> dict[str, float]:
        """Return `perf/PHASE_seconds` of each phase and `perf/step_seconds` of the full step."""
        return {f"perf/{phase}_seconds": s for phase, s in self._seconds.items()} | {"perf/step_seconds": self.total}


class SamplingCopy(Protocol):
    """A sampler with its own copy of the policy's weights. Every engine is one."""

    @property
    def weight_version(self) -> int:
        """Return the version of the weights that sample now."""

    def update_weights(self, model: nn.Module, *, version: int) -> None:
        """Copy the weights of `model`."""

    def export_weights(self) -> Mapping[str, Tensor]:
        """Return the weights that sample now, for a checkpoint of a run whose copy lags behind its policy."""

    def import_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Restore the weights that `export_weights` returned."""


def refresh_weights(copy: SamplingCopy, model: nn.Module, step: int, *, every: int) -> int:
    """Give the copy the newest weights, if they are due before this step.

    Returns:
        Age of the copy's weights in versions.
    """
    version = step - 1
    if version % every == 0 and copy.weight_version != version:
        copy.update_weights(model, version=version)
    return version - copy.weight_version


def token_lags(rollout: Rollout, step: int) -> Tensor | None:
    """Compute the age in versions of the weights behind each response token of a step, (B, T); 0 on padding.

    Uses the engine's version per token if reported, else the version of the rollout's `SamplingSpec`.

    Args:
        rollout: the sampled batch.
        step: the training step; its policy has version `step` − 1.

    Returns:
        The lags, int64; None if no version is known.

    Raises:
        EngineAnswerError: a token's version is newer than the policy.
    """
    newest = step - 1
    of_token, of_batch = rollout.policy_versions, rollout.sampling.policy_version
    version = of_batch if of_token is None else of_token
    if version is None:
        return None
    lags = torch.where(rollout.tokens.response_mask, newest - version, 0)
    if bool((lags < 0).any()):
        raise EngineAnswerError(
            f"step {step} was sampled by version {newest - int(lags.min())}, and the policy is at version {newest}: "
            "the engine serves another run as well, or names its weights wrongly. Give each run an engine of its own"
        )
    return lags


def token_staleness(lags: Tensor | None, response_mask: Tensor) -> tuple[float, int]:
    """Compute mean and maximum of `token_lags` over response tokens; NaN and 0 if no version is known."""
    if lags is None:
        return math.nan, 0
    tokens = int(response_mask.sum())
    return (float(lags.double().sum()) / tokens, int(lags.max())) if tokens else (0.0, 0)


def make_optimizer(parameters: Iterable[nn.Parameter], optim: OptimConfig) -> torch.optim.AdamW:
    """Return AdamW over some parameters."""
    return torch.optim.AdamW(parameters, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay)


def set_learning_rate(optimizer: torch.optim.Optimizer, optim: OptimConfig, step: int) -> None:
    """Set the learning rate of a training step: a linear warm-up, then constant."""
    for param_group in optimizer.param_groups:
        param_group["lr"] = optim.lr * min(1.0, step / max(optim.lr_warmup_steps, 1))


def mini_batches(rows: int, optim: OptimConfig, *, seed: int, step: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the mini-batches of a training step: (epoch, row numbers on the host), reshuffled every epoch."""
    for epoch in range(optim.ppo_epochs):
        order = torch.randperm(rows, generator=derived_generator(seed, f"shuffle {epoch}", step), device="cpu")
        for mini_batch in order.split(optim.mini_batch_size or rows):
            yield epoch, mini_batch


def micro_batch_size(rows: int, optim: OptimConfig) -> int:
    """Return the rows per forward pass of a batch with `rows` rows."""
    return optim.micro_batch_size or optim.mini_batch_size or rows


def fit(
    model: nn.Module,
    loss_of_step: Callable[[int], Tensor],
    *,
    steps: int,
    learning_rate: float,
    rise: int,
    betas: tuple[float, float] = (0.9, 0.999),
    after_step: Callable[[int, float], bool | None],
) -> float:
    """Train a model in place with supervision: AdamW with gradients clipped to norm 1.

    The learning rate is the product of three: `learning_rate`, a linear rise from near 0 to 1 over the first `rise`
    steps, and a cosine that falls from 1 at the first step to 0 at `steps`.

    Args:
        model: the trained model; in evaluation mode afterwards.
        loss_of_step: callback that returns the loss of step 0, 1, …
        steps: number of AdamW steps at most.
        learning_rate: the first factor. The peak of the product is slightly lower, because of the cosine.
        rise: steps of the linear rise, at least 1.
        betas: the betas of AdamW.
        after_step: callback with the number of steps done and the loss; true ends the training.

    Returns:
        The last loss; NaN if there was no step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=betas, weight_decay=0.01)
    last_loss = math.nan
    model.train()
    for step in range(steps):
        risen = min(1.0, (step + 1) / rise)
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / steps)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * (risen * cosine)

        loss = loss_of_step(step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        # This waits for the device: `after_step` decides on the host whether to go on.
        last_loss = float(loss.detach())
        if after_step(step + 1, last_loss):
            break

    model.eval()
    return last_loss


def own_rows(rows: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return this rank's part of a mini-batch; empty with fewer rows than ranks."""
    return rows if group is None else rows.tensor_split(group.size())[group.rank()]
