"""Check, once and before the first update, that a trainer's loss reads the correction that it is given.

A subclass may have its own loss that ignores the weights, the mask or the count: the run would be reported as
corrected, and is not. The loss is called on a synthetic micro-batch, with synthetic log-probs instead of the model's,
so that no model runs. Its gradient with respect to these log-probs shows which tensors it reads. Only a clear omission
ends the run; if the gradients are inconclusive, a log line states the reason.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.integrations.trl.generation_batch import (
    loss_type_of,
    needs_count,
    of_all_ranks,
    rejects,
    weight_name,
    weights_reject,
    write_to_batch,
)

logger = logging.getLogger(__name__)

ROWS, LENGTH = 4, 6

# Methods by which a loss exchanges its metrics. If a loss fails on one rank, the other ranks would hang there.
EXCHANGES = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")


def check_loss(
    trainer: Any,  # noqa: ANN401
    batch: Mapping[str, Any],
    config: RolloutCorrectionConfig,
    group: torch.distributed.ProcessGroup | None = None,
) -> None:
    """Check that the trainer's loss reads the weights, the mask and the count that the configuration needs.

    Every rank must call it, and all ranks raise the same error. The trainer's attributes, its model, random numbers
    and optimizer stay as they are.

    Args:
        trainer: one of TRL's trainers.
        batch: its generation batch, before the correction; other tensors of the synthetic batch are taken from it.
        config: the configuration.
        group: optional; the group of all ranks.

    Raises:
        ValueError: the loss ignores one of them; the message names the class and the tensor.
    """
    try:
        found = _find_loss_error(trainer, batch, config)
    except Exception as error:  # a subclass's loss may need more than a synthetic batch contains
        found = False, f"it failed on a synthetic batch: {error!r}"

    # Report the first error of any rank, else the first remark: if only one rank raised, all other ranks would hang.
    refused, text = max(of_all_ranks(found, group), key=lambda each: (each[0], each[1] != ""))
    name = getattr(trainer, "_named_by_user", type(trainer).__name__)
    if refused:
        raise ValueError(f"the loss of {name} {text}")
    if text and trainer.accelerator.is_main_process:
        logger.warning("rollcorr could not check that the loss of %s reads the correction: %s", name, text)


def _find_loss_error(trainer: Any, batch: Mapping[str, Any], config: RolloutCorrectionConfig) -> tuple[bool, str]:  # noqa: ANN401
    """Return (True, error) if this rank's loss fails, (False, reason) if it cannot be checked, else (False, "")."""
    probe = _LossProbe(trainer, batch, config)
    uncorrected = probe.policy_gradient(corrected=False)
    if not uncorrected.any():
        return False, "it does not compute log-probs by _get_per_token_logps_and_entropies, or its gradient is 0"
    if _gradients_differ(probe.policy_gradient(corrected=False), uncorrected, uncorrected):
        return False, "its gradient changes between two calls on one batch"

    try:
        policy = probe.policy_gradient()
    except Exception as error:
        return True, f"fails on a batch with a correction in {weight_name(trainer)!r}: {error}"
    ignored = _find_ignored_tensor(probe, policy, trainer, config)
    if ignored is None:
        return False, ""
    return True, (
        f"(loss_type {loss_type_of(trainer)!r}) does not apply {ignored!r} as TRL's does, so the correction would not "
        "act. Read it in the loss as GRPOTrainer does; or use a configuration that does not need it, such as "
        "'measure', or a loss_type that names how the loss divides"
    )


def _find_ignored_tensor(
    probe: _LossProbe,
    policy: Tensor,
    trainer: Any,  # noqa: ANN401 (one of TRL's trainers)
    config: RolloutCorrectionConfig,
) -> str | None:
    """Return the tensor of the batch that the loss does not apply, or None."""
    loss_type, weights = loss_type_of(trainer), weight_name(trainer)
    if config.weights_reach_loss:
        doubled = policy.new_tensor([2.0, 1.0] * (ROWS // 2)).unsqueeze(1)
        found = torch.stack([probe.policy_gradient(weights=0 * doubled), probe.policy_gradient(weights=doubled)])

        # VESPO is not linear in the weight, and its options limit a weight's effect: its gradient must only differ.
        is_vespo = loss_type == "vespo"
        expected = policy.expand_as(found) if is_vespo else torch.stack([0 * policy, doubled * policy])
        if _gradients_differ(found, expected, policy) != is_vespo:
            return weights

    # RLOO rejects sequences, and so do weights of 0 if the loss divides by its mask.
    if rejects(config):
        by_weight = loss_type == "rloo" or weights_reject(config, loss_type)
        kept = torch.ones_like(policy, dtype=torch.bool)
        kept[0, : LENGTH if by_weight else 1] = False
        found = probe.policy_gradient(kept=kept) if by_weight else probe.gradient(kept=kept)
        if _gradients_differ(torch.where(kept, 0.0, found), 0 * policy, policy):
            return weights if by_weight else "tool_mask"

    if needs_count(config, loss_type) and _gradients_differ(probe.policy_gradient(factor=2.0), policy / 2, policy):
        return "num_items_in_batch"
    return None


def _gradients_differ(found: Tensor, expected: Tensor, policy: Tensor) -> bool:
    return not torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * float(policy.abs().max()))


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
        draws = torch.rand(ROWS, LENGTH + 1, generator=torch.Generator().manual_seed(0), device="cpu").to(mask.device)
        self._log_prob, sign = -1 - draws[:, :LENGTH], 1 - 2 * (torch.arange(ROWS, device=mask.device) % 2)
        self._ones = torch.ones_like(self._log_prob)

        # Every token counts, and all policies are equal, so that no ratio is clipped.
        others = {name: _resize(value, mask.shape) for name, value in batch.items() if name != "tool_mask"}
        policies = {"sampling_per_token_logps", "ref_per_token_logps"} & batch.keys()
        self._batch: dict[str, Any] = {
            **others,
            **dict.fromkeys(policies, self._log_prob),
            "old_per_token_logps": self._log_prob,
            "old_logps": self._log_prob.sum(1),
            "completion_mask": self._ones.long(),
            "num_items_in_batch": self._ones.long().sum(),
            "importance_sampling_ratio": self._ones,
            "advantages": sign * (0.5 + draws[:, LENGTH]),
        }

    def policy_gradient(self, **options: Any) -> Tensor:  # noqa: ANN401
        """Return the part of the gradient that depends on the advantages, (ROWS, LENGTH)."""
        return self.gradient(**options) - self.gradient(advantage=0.0, **options)

    def gradient(
        self,
        *,
        corrected: bool = True,
        advantage: float = 1.0,
        weights: Tensor | float = 1.0,
        kept: Tensor | None = None,
        factor: float = 1.0,
    ) -> Tensor:
        """Return the gradient of the loss, (ROWS, LENGTH), 0 if it does not read the log-probs.

        Weights and mask default to 1; `factor` multiplies the count, `advantage` the advantages.

        Raises:
            ValueError: the gradient is not finite.
        """
        leaf, zeros = self._log_prob.clone().requires_grad_(), 0 * self._ones
        batch = tree_map(_copy_leaf, self._batch) | {"advantages": advantage * self._batch["advantages"]}
        if corrected:
            kept = self._ones.bool() if kept is None else kept
            correction = SimpleNamespace(
                config=self._config,
                loss_weights=weights * self._ones if self._config.weights_reach_loss else None,
                loss_mask=kept,
                sequence_kept=kept.any(1),
                denominators=lambda: SimpleNamespace(tokens=factor * ROWS * LENGTH),
            )
            write_to_batch(self._trainer, batch, correction)

        with _isolate_trainer(self._trainer, leaf.device), torch.enable_grad():
            self._trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf.clone(), zeros, zeros.sum())
            loss = self._trainer.compute_loss(self._trainer.model, batch)
            (gradient,) = torch.autograd.grad(loss, leaf, materialize_grads=True) if loss.requires_grad else (zeros,)
        if not gradient.isfinite().all():
            raise ValueError("its gradient is not finite")
        return gradient


@contextmanager
def _isolate_trainer(trainer: Any, device: torch.device) -> Iterator[None]:  # noqa: ANN401
    """Disable collectives in a `with` block and restore the trainer after it; its loss may be a bound method."""
    before, random_states = vars(trainer), (random.getstate(), numpy.random.get_state())  # noqa: NPY002
    models = {part for leaf in tree_leaves(before) if isinstance(leaf, nn.Module) for part in leaf.modules()}

    def refuse_to_run(module: nn.Module, _inputs: Any) -> None:  # noqa: ANN401
        # A model may count its calls, or run a collective that needs all ranks.
        if module in models:
            raise RuntimeError("it runs a model, which the check must not change")

    # TRL logs the run time of its functions, and a loss may log or train by itself.
    args, accelerator = copy.copy(trainer.args), copy.copy(trainer.accelerator)
    args.report_to = []
    vars(accelerator).update(dict.fromkeys(EXCHANGES, lambda tensor, *_, **__: tensor))
    replaced = {
        "args": args,
        "accelerator": accelerator,
        "current_gradient_accumulation_steps": 1,
        "log": lambda *_, **__: None,
        "optimizer": None,
        "lr_scheduler": None,
    }

    devices = [] if device.type == "cpu" else [device]
    hook = register_module_forward_pre_hook(refuse_to_run)
    try:
        trainer.__dict__ = tree_map(_copy_leaf, before) | replaced
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            yield
    finally:
        trainer.__dict__ = before
        hook.remove()
        random.setstate(random_states[0])
        numpy.random.set_state(random_states[1])  # noqa: NPY002


def _copy_leaf(leaf: Any) -> Any:  # noqa: ANN401 (any attribute of a trainer)
    """Return a tensor or set that a loss may change in place. Around it, lists and dictionaries are copied."""
    if isinstance(leaf, Tensor) and not leaf.requires_grad:
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, set) else leaf


def _resize(value: Any, shape: tuple[int, ...]) -> Any:  # noqa: ANN401 (any value of a trainer's batch)
    """Repeat or cut the rows of a tensor, and its columns if it has one for each of the completion's tokens."""
    if not isinstance(value, Tensor) or value.shape[:1] != shape[:1]:
        return value
    rows, columns = (torch.arange(size, device=value.device) for size in (ROWS, LENGTH))
    resized = value[rows % shape[0]]
    return resized[:, columns % shape[1]] if value.shape[:2] == shape else resized
