"""How verl calls a policy loss: the arguments, written once, and a decorator that gives a function their signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

Config = Any  # verl's ActorConfig, or any object with its attributes and `get`

P = ParamSpec("P")
C = TypeVar("C")
R = TypeVar("R")


@dataclass(frozen=True)
class PolicyTensors:
    """The four tensors that every policy loss reads, each (B, T).

    Attributes:
        old_log_prob: log π_old, nats; in bypass mode log μ, because the trainer put it there.
        log_prob: log π_θ, nats; carries the gradient.
        advantages: per token.
        response_mask: tokens in the loss, after rejection. A loss that rejects by itself takes the tokens that the
            policy sampled.
    """

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor


@dataclass(frozen=True)
class ClipLossCall(PolicyTensors):
    """The arguments of `compute_policy_loss`, verl's older form, in their order.

    Attributes:
        cliprange: ε on both sides; stands in for either of the next two.
        cliprange_low: how far the ratio may fall.
        cliprange_high: how far it may rise.
        clip_ratio_c: c of the dual clip, > 1.
        loss_agg_mode: as in `agg_loss`.
    """

    cliprange: float | None = None
    cliprange_low: float | None = None
    cliprange_high: float | None = None
    clip_ratio_c: float = 3.0
    loss_agg_mode: str = "token-mean"


@dataclass(frozen=True)
class PolicyLossCall(PolicyTensors):
    """The arguments of a loss in verl's registry of policy losses, in their order.

    Attributes:
        loss_agg_mode: as in `agg_loss`.
        config: the actor's. It has clip_ratio, clip_ratio_low, clip_ratio_high and get("clip_ratio_c", 3.0); for the
            newest losses global_batch_info; for bypass losses policy_loss.get("rollout_correction").
        rollout_is_weights: weights π_old / μ; None for none. Bypass losses compute their own and ignore these, as verl
            does.
    """

    loss_agg_mode: str = "token-mean"
    config: Config = None
    rollout_is_weights: Tensor | None = None


@dataclass(frozen=True)
class ParityLossCall(PolicyLossCall):
    """The same, for losses that can also compute verl 0.9.1's numbers.

    Attributes:
        verl_parity: compute verl 0.9.1's numbers.
    """

    verl_parity: bool = field(default=False, kw_only=True)


def called_as(call: Callable[P, C]) -> Callable[[Callable[[C], R]], Callable[P, R]]:
    """Give a function of one `call` the signature of that call's fields, so that verl's call sites keep working."""

    def decorate(function: Callable[[C], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def with_arguments(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(call(*args, **kwargs))

        # `help()` and editors show verl's arguments, not `call`.
        returned = inspect.signature(function).return_annotation
        signature = inspect.signature(call).replace(return_annotation=returned)
        with_arguments.__signature__ = signature  # type: ignore[attr-defined]
        return with_arguments

    return decorate
