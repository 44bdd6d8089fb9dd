"""The container that call sites expect around the weights: verl's DataProto where verl is installed, or a stand-in."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

WEIGHTS = "rollout_is_weights"


class Batch(Protocol):
    """What the functions here need of a batch: named tensors, and a union with another batch."""

    batch: Any

    def union(self, other: Any) -> Any:  # noqa: ANN401 (a DataProto, or the stand-in below)
        """This batch with the other's tensors."""


@dataclass
class TensorBatch:
    """Named tensors under `.batch`, as in verl's DataProto; what is returned where verl is not installed.

    Attributes:
        batch: name → tensor, all with the same first dimension.
    """

    batch: MutableMapping[str, Tensor] = field(default_factory=dict)

    def union(self, other: TensorBatch) -> TensorBatch:
        """This batch with the other's tensors.

        Args:
            other: tensors with the same number of rows, of any shape.

        Raises:
            ValueError: both hold different tensors under one name.
        """
        for name, tensor in other.batch.items():
            if name in self.batch and not self.batch[name].equal(tensor):
                raise ValueError(f"both batches hold {name!r}, with different values")
            self.batch[name] = tensor
        return self


def weight_batch(weights: Tensor) -> Batch:
    """Weights as `.batch["rollout_is_weights"]` of a DataProto, or of a `TensorBatch` without verl."""
    try:
        from verl.protocol import DataProto
    except ImportError:
        return TensorBatch({WEIGHTS: weights})
    return DataProto.from_dict(tensors={WEIGHTS: weights})


@contextmanager
def new_keys_allowed(config: Any) -> Iterator[None]:  # noqa: ANN401 (a verl dataclass, an OmegaConf node or a dict)
    """Let a struct-locked OmegaConf node take new keys; any other mapping takes them anyway."""
    if not type(config).__module__.startswith("omegaconf"):
        yield
        return
    from omegaconf import open_dict

    with open_dict(config):
        yield
