"""One call of the function under test: which options it takes, and its outputs as plain numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollcorr.conformance.batches import Rows, tensors_of

Options = Mapping[str, Any]
Correct = Callable[..., Mapping[str, Any]]

# Values that need no parameter. Without `ceiling`, weights are expected to be unbounded.
DEFAULTS: Options = {"level": "token", "ceiling": 2.0}


class Outcome(NamedTuple):
    """What one call returned.

    Attributes:
        weights: importance weights per token, B rows of T; empty without that output.
        kept: whether each token stays in the loss, B rows of T; empty without that output.
        numbers: every other output that is a number, by name.
        result: the mapping itself.
    """

    weights: list[list[float]]
    kept: list[list[bool]]
    numbers: dict[str, float]
    result: Mapping[str, Any]


@dataclass(frozen=True)
class Subject:
    """A function under test."""

    function: Correct

    def takes(self, name: str) -> bool:
        """Return whether the function has this parameter, or takes any."""
        parameters = inspect.signature(self.function).parameters
        return name in parameters or any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters.values())

    def lacks(self, options: Options) -> str | None:
        """Return the first option that the function does not take; None if it takes all that need a parameter."""
        needed = (name for name, value in options.items() if DEFAULTS.get(name) != value)
        return next((name for name in needed if not self.takes(name)), None)

    def __call__(self, rows: Rows, options: Options) -> Outcome:
        """Call the function once, with the options that it takes.

        Raises:
            TypeError: it returned no mapping, or a table of another shape.
        """
        train, rollout, mask = tensors_of(rows)
        passed = {name: value for name, value in options.items() if self.takes(name)}
        result = self.function(train, rollout, mask, **passed)
        if not isinstance(result, Mapping):
            raise TypeError(f"it returned {type(result).__name__}; return a dictionary of the outputs")
        weights, kept = (_table(result, name, mask) for name in ("weights", "loss_mask"))
        return Outcome(weights.double().tolist(), kept.bool().tolist(), numbers_of(result), result)


def numbers_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among the outputs, by name: Python's, and tensors without dimensions."""
    scalars = {
        name: torch.as_tensor(value, device="cpu") for name, value in result.items() if isinstance(value, Real | Tensor)
    }
    return {name: float(value) for name, value in scalars.items() if value.dim() == 0}


def _table(result: Mapping[str, Any], name: str, mask: Tensor) -> Tensor:
    # As (B, T); an empty tensor without that output.
    value = result.get(name)
    if value is not None and tuple(value.shape) not in {tuple(mask.shape), (mask.shape[0], 1)}:
        raise TypeError(f"{name} is {tuple(value.shape)}; return a tensor of {tuple(mask.shape)} or (B, 1)")
    return mask[:0] if value is None else torch.broadcast_to(value.detach(), mask.shape)
