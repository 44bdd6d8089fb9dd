"""The container that call sites expect around the weights: verl's DataProto where verl is installed, or a stand-in."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

WEIGHTS = "rollout_is_weights"

Batch = Any  # verl's DataProto, or a `TensorBatch`: named tensors under `.batch`, and a union with another batch


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
