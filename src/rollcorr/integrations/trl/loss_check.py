"""Check, once and before the first update, that a trainer's loss reads the correction that it is given.

A subclass may have a loss of its own that ignores the weights, the mask or the count: the run would be reported as
corrected, and is not. The loss is called on a synthetic micro-batch, with synthetic log-probs in the place of the
model's, so that no model runs. Its gradient with respect to these log-probs shows what it reads.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.integrations.trl.generation_batch import (
    loss_type_of,
    needs_count,
    rejects,
    weight_name,
    weights_reject,
    write_to_batch,
)

logger = logging.getLogger(__name__)

# The same on every rank, because a loss gathers its metrics: a loss that fails must fail on every rank.
ROWS, LENGTH = 4, 6


def check_loss(trainer: Any, batch: Mapping[str, Any], config: RolloutCorrectionConfig) -> None:  # noqa: ANN401
    """Check that the trainer's loss reads the weights, the mask and the count that the configuration hands over.

    Every rank must call it. Random numbers, metrics, model and optimizer stay as they are.

    Args:
        trainer: one of TRL's trainers.
        batch: its generation batch, before the correction; other tensors of the synthetic batch are taken from it.
        config: the configuration.

    Raises:
        ValueError: the loss ignores one of them; the message names the class and the tensor.
    """
    # The loss runs on the trainer itself, since it may be bound to it. Afterwards every attribute is put back.
    before = dict(vars(trainer))
    trainer._metrics, trainer.args = copy.deepcopy(trainer._metrics), copy.copy(trainer.args)
    trainer.args.report_to = []  # TRL reports how long its functions take
    trainer.current_gradient_accumulation_steps = 1
    try:
        _raise_if_unread(_LossProbe(trainer, batch, config), trainer, config)
    finally:
        vars(trainer).clear()
        vars(trainer).update(before)


def _raise_if_unread(probe: _LossProbe, trainer: Any, config: RolloutCorrectionConfig) -> None:  # noqa: ANN401
    """Raise where the loss fails with a correction, or ignores a part of it; warn where that cannot be known."""
    name = getattr(trainer, "_named_by_user", type(trainer).__name__)
    problem = "it does not compute log-probs by _get_per_token_logps_and_entropies"
    try:
        readable = bool(probe.gradient(corrected=False).any())
    except Exception as error:  # a loss of its own may need more than a synthetic batch has
        readable, problem = False, f"it failed on a synthetic batch: {error!r}"
    if not readable:
        logger.warning("rollcorr could not check that the loss of %s reads the correction: %s", name, problem)
        return

    try:
        unread = _unread(probe, trainer, config)
    except Exception as error:
        weights = weight_name(trainer)
        raise ValueError(f"the loss of {name} fails on a batch with a correction in {weights!r}: {error}") from error
    if unread is not None:
        raise ValueError(
            f"the loss of {name} (loss_type {loss_type_of(trainer)!r}) does not apply {unread!r} as TRL's does, so the "
            "correction would not act. Read it in the loss as GRPOTrainer does; or use a configuration that does not "
            "need it, such as 'measure', or a loss_type that names how the loss divides"
        )


def _unread(probe: _LossProbe, trainer: Any, config: RolloutCorrectionConfig) -> str | None:  # noqa: ANN401
    """Return the tensor of the batch that the loss does not apply, or None."""
    loss_type, weights, policy = loss_type_of(trainer), weight_name(trainer), probe.policy_gradient()
    tolerance = 1e-4 * float(policy.abs().max())

    def differs(gradient: Tensor, expected: Tensor) -> bool:
        return not torch.allclose(gradient, expected, rtol=1e-3, atol=tolerance)

    if config.weights_reach_loss:
        doubled = torch.ones_like(policy)
        doubled[::2] = 2.0

        # VESPO is no linear function of the weight.
        linear = loss_type != "vespo"
        if differs(probe.policy_gradient(weights=0 * doubled), 0 * policy) or (
            linear and differs(probe.policy_gradient(weights=doubled), doubled * policy)
        ):
            return weights

    # RLOO rejects sequences, and so do weights of 0 where the loss divides by its mask.
    if rejects(config):
        by_weight = loss_type == "rloo" or weights_reject(config, loss_type)
        kept = torch.ones_like(policy, dtype=torch.bool)
        kept[0, : LENGTH if by_weight else 1] = False
        found = probe.policy_gradient(kept=kept) if by_weight else probe.gradient(kept=kept)
        if differs(found[~kept], 0 * found[~kept]):
            return weights if by_weight else "tool_mask"

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

    def __init__(self, trainer: Any, batch: Mapping[str, Any], config: RolloutCorrectionConfig) -> None:  # noqa: ANN401
        self._trainer, self._config = trainer, config
        mask = batch["completion_mask"]
        drawn = torch.rand(ROWS, LENGTH + 1, generator=torch.Generator().manual_seed(0), device="cpu").to(mask.device)
        self._log_prob, sign = -1 - drawn[:, :LENGTH], 1 - 2 * (torch.arange(ROWS, device=mask.device) % 2)
        self._ones = torch.ones_like(self._log_prob)

        # Every token counts, and all policies are equal, so that nothing is clipped.
        policies = ("old_per_token_logps", "sampling_per_token_logps", "ref_per_token_logps")
        given = {name: self._log_prob for name in policies if name == policies[0] or name in batch}
        given |= {"old_logps": self._log_prob.sum(1), "completion_mask": self._ones.long()}
        given |= {"num_items_in_batch": self._ones.long().sum(), "importance_sampling_ratio": self._ones}
        given["advantages"] = sign * (0.5 + drawn[:, LENGTH])
        others = {name: _resized(value, mask.shape) for name, value in batch.items() if name != "tool_mask"}
        self._batch = others | given

    def policy_gradient(self, **options: Any) -> Tensor:  # noqa: ANN401
        """Return the part of the gradient that the advantages are in, (ROWS, LENGTH)."""
        return self.gradient(**options) - self.gradient(advantage=0.0, **options)

    def gradient(
        self,
        *,
        corrected: bool = True,
        advantage: float = 1.0,
        weights: Tensor | None = None,
        kept: Tensor | None = None,
        factor: float = 1.0,
    ) -> Tensor:
        """Return the gradient of the loss, (ROWS, LENGTH), 0 if it does not read the log-probs.

        Weights and mask are 1 where they are not given; `factor` multiplies the count, `advantage` the advantages.
        """
        leaf, zeros = self._log_prob.clone().requires_grad_(), 0 * self._ones
        self._trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, zeros, zeros.sum())
        batch = self._batch | {"advantages": advantage * self._batch["advantages"]}
        if corrected:
            weights = self._ones if weights is None else weights
            kept = self._ones.bool() if kept is None else kept
            correction = SimpleNamespace(
                config=self._config,
                loss_weights=weights if self._config.weights_reach_loss else None,
                loss_mask=kept,
                sequence_kept=kept.any(1),
                denominators=lambda: SimpleNamespace(tokens=factor * ROWS * LENGTH),
            )
            write_to_batch(self._trainer, batch, correction)

        devices = [] if leaf.device.type == "cpu" else [leaf.device]
        with torch.enable_grad(), torch.random.fork_rng(devices, device_type=leaf.device.type if devices else "cuda"):
            loss = self._trainer.compute_loss(self._trainer.model, batch)
        gradient = torch.autograd.grad(loss, leaf, allow_unused=True)[0] if loss.requires_grad else None
        return zeros if gradient is None else gradient


def _resized(value: Any, shape: tuple[int, ...]) -> Any:  # noqa: ANN401 (whatever a trainer puts into its batch)
    """Repeat or cut the rows of a tensor, and its columns if it has one for each of the completion's tokens."""
    if not isinstance(value, Tensor) or value.shape[:1] != shape[:1]:
        return value
    rows, columns = (torch.arange(size, device=value.device) for size in (ROWS, LENGTH))
    resized = value[rows % shape[0]]
    return resized[:, columns % shape[1]] if value.shape[:2] == shape else resized
