"""Check, once and before the first update, that a trainer's loss reads the correction that it is given.

A subclass may have a loss of its own that ignores the weights, the mask or the count: the run would be reported as
corrected, and is not. The loss is called on a synthetic micro-batch, with synthetic log-probs in the place of the
model's, so that no model runs. Its gradient with respect to these log-probs shows what it reads.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.integrations.trl.generation_batch import (
    AppliedCorrection,
    is_rloo,
    loss_type_of,
    needs_count,
    rejects,
    weight_name,
    weights_reject,
    write_to_batch,
)

logger = logging.getLogger(__name__)

Trainer = Any  # one of TRL's trainers: they are not imported here

# The same on every rank, because a loss gathers its metrics: a loss that fails must fail on every rank.
ROWS, LENGTH = 4, 6

# Losses that are no linear function of the weight.
NONLINEAR = ("vespo",)


def check_loss(trainer: Trainer, batch: Mapping[str, Any], config: RolloutCorrectionConfig) -> None:
    """Check that the trainer's loss reads the weights, the mask and the count that the configuration hands over.

    Every rank must call it. Random numbers, metrics, model and optimizer stay as they are.

    Args:
        trainer: one of TRL's trainers.
        batch: its generation batch, before the correction; other tensors of the synthetic batch are taken from it.
        config: the configuration.

    Raises:
        ValueError: the loss ignores one of them; the message names the class and the tensor.
    """
    with _restored(trainer):
        _check_loss(trainer, batch, config)


def _check_loss(trainer: Trainer, batch: Mapping[str, Any], config: RolloutCorrectionConfig) -> None:
    name, loss_type = getattr(trainer, "_named_by_user", type(trainer).__name__), loss_type_of(trainer)
    probe = _LossProbe(trainer, batch, config)
    try:
        readable = bool(probe.gradient(None).any())
        reason = "it does not compute log-probs by _get_per_token_logps_and_entropies"
    except Exception as error:  # a loss of its own may need more than a synthetic batch has
        readable, reason = False, f"it failed on a synthetic batch: {error!r}"
    if not readable:
        logger.warning("rollcorr could not check that the loss of %s reads the correction: %s", name, reason)
        return

    weights = weight_name(trainer)
    by_weight = is_rloo(trainer) or weights_reject(config, loss_type)
    try:
        unread = _unread(probe, config, loss_type, weights, mask=weights if by_weight else "tool_mask")
    except Exception as error:
        raise ValueError(f"the loss of {name} fails on a batch with a correction in {weights!r}: {error}") from error
    if unread is not None:
        raise ValueError(
            f"the loss of {name} (loss_type {loss_type!r}) does not apply {unread!r} as TRL's does, so this correction "
            "would not act on it. Read it in the loss as GRPOTrainer does; or use a configuration that needs none of "
            "it, such as 'measure', or a loss_type that names how the loss divides"
        )


@contextmanager
def _restored(trainer: Trainer) -> Iterator[None]:
    """Restore every attribute of the trainer afterwards; its metrics and arguments are copies until then."""
    before = dict(vars(trainer))
    trainer._metrics, trainer.args = copy.deepcopy(trainer._metrics), copy.copy(trainer.args)
    trainer.args.report_to = []  # TRL reports how long its functions take
    trainer.current_gradient_accumulation_steps = 1
    try:
        yield
    finally:
        vars(trainer).clear()
        vars(trainer).update(before)


def _unread(
    probe: _LossProbe, config: RolloutCorrectionConfig, loss_type: str, weights: str, *, mask: str
) -> str | None:
    """Return the tensor of the batch that the loss does not apply, or None."""
    policy = probe.policy_gradient()
    tolerance = 1e-4 * float(policy.abs().max())

    def differs(gradient: Tensor, expected: Tensor) -> bool:
        return not torch.allclose(gradient, expected, rtol=1e-3, atol=tolerance)

    if config.weights_reach_loss:
        doubled = torch.ones_like(policy)
        doubled[::2] = 2.0
        if differs(probe.policy_gradient(weights=0 * doubled), 0 * policy):
            return weights
        if loss_type not in NONLINEAR and differs(probe.policy_gradient(weights=doubled), doubled * policy):
            return weights

    # RLOO rejects sequences, and so do weights of 0 where the loss divides by its mask.
    if rejects(config):
        kept = torch.ones_like(policy, dtype=torch.bool)
        kept[0, : LENGTH if mask == weights else 1] = False
        found = probe.policy_gradient(kept=kept) if mask == weights else probe.gradient(probe.applied(kept=kept))
        if differs(found[~kept], 0 * found[~kept]):
            return mask

    if needs_count(config, loss_type) and differs(probe.policy_gradient(factor=2.0), policy / 2):
        return "num_items_in_batch"
    return None


class _LossProbe:
    """Gradients of a trainer's loss on a synthetic micro-batch, with respect to its log-probs.

    Args:
        trainer: one of TRL's trainers.
        batch: a generation batch.
        config: the configuration.
    """

    def __init__(self, trainer: Trainer, batch: Mapping[str, Any], config: RolloutCorrectionConfig) -> None:
        self._trainer, self._config = trainer, config
        device = batch["completion_mask"].device
        drawn = torch.rand(ROWS, LENGTH + 1, generator=torch.Generator().manual_seed(0), device="cpu").to(device)
        self._log_prob = -1 - drawn[:, :LENGTH]
        sign = 1 - 2 * (torch.arange(ROWS, device=device) % 2)
        self._advantages = sign * (0.5 + drawn[:, LENGTH])
        self._batch = self._synthetic(batch)

    def _synthetic(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch of the probe's size: every token counts, and all policies are equal."""
        rows, width = batch["completion_mask"].shape
        synthetic = {name: _resized(value, rows, width) for name, value in batch.items()}
        ones = torch.ones_like(self._log_prob)
        policies = ("old_per_token_logps", "sampling_per_token_logps", "ref_per_token_logps")
        given = {"completion_mask": ones.long(), "tool_mask": ones.long(), "importance_sampling_ratio": ones}
        given |= {"num_items_in_batch": torch.tensor(ROWS * LENGTH, device=ones.device)}
        given |= dict.fromkeys(policies, self._log_prob) | {"old_logps": self._log_prob.sum(1)}
        old = "old_logps" if is_rloo(self._trainer) else "old_per_token_logps"
        always = {"completion_mask", old, weight_name(self._trainer)}
        return synthetic | {name: value for name, value in given.items() if name in always or name in batch}

    def applied(
        self, *, weights: Tensor | None = None, kept: Tensor | None = None, factor: float = 1.0
    ) -> AppliedCorrection:
        """A correction: weights and mask of 1 where they are not given; `factor` multiplies the count."""
        ones = torch.ones_like(self._log_prob)
        weights = ones if weights is None else weights
        kept = ones.bool() if kept is None else kept
        divisor = factor * ROWS * LENGTH if needs_count(self._config, loss_type_of(self._trainer)) else None
        return AppliedCorrection(weights if self._config.weights_reach_loss else None, kept, kept.any(1), divisor)

    def policy_gradient(self, **options: Any) -> Tensor:  # noqa: ANN401
        """The part of the gradient that the advantages are in, (ROWS, LENGTH)."""
        applied = self.applied(**options)
        return self.gradient(applied) - self.gradient(applied, advantage=0.0)

    def gradient(self, applied: AppliedCorrection | None, *, advantage: float = 1.0) -> Tensor:
        """The gradient of the loss, (ROWS, LENGTH); 0 if the loss does not read the log-probs."""
        leaf = self._log_prob.clone().requires_grad_()
        zeros = torch.zeros_like(self._log_prob)
        self._trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, zeros, zeros.sum())

        batch = self._batch | {"advantages": advantage * self._advantages}
        if applied is not None:
            write_to_batch(self._trainer, batch, applied, self._config)
        devices = [] if leaf.device.type == "cpu" else [leaf.device]
        with torch.enable_grad(), torch.random.fork_rng(devices, device_type=leaf.device.type if devices else "cuda"):
            loss = self._trainer.compute_loss(self._trainer.model, batch)
        gradient = torch.autograd.grad(loss, leaf, allow_unused=True)[0] if loss.requires_grad else None
        return zeros if gradient is None else gradient


def _resized(value: Any, rows: int, width: int) -> Any:  # noqa: ANN401 (whatever a trainer puts into its batch)
    """Repeat or cut the rows of a value, and the columns of a tensor of tokens."""
    if isinstance(value, list) and len(value) == rows:
        return [value[row % rows] for row in range(ROWS)]
    if not isinstance(value, Tensor) or not value.dim() or len(value) != rows:
        return value
    value = value[torch.arange(ROWS, device=value.device) % rows]
    is_of_tokens = value.dim() > 1 and value.shape[1] == width
    return value[:, torch.arange(LENGTH, device=value.device) % width] if is_of_tokens else value
