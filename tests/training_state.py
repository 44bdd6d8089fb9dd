"""What a measurement beside the training must not change."""

import random

import numpy as np
import torch


def training_state(model, optimizer) -> list:
    """Copies of weights, gradients, optimizer state, random states and modes, to compare with `same_state`."""
    moments = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    tensors = [*model.parameters(), *model.buffers(), *[p.grad for p in model.parameters() if p.grad is not None]]
    tensors += [torch.as_tensor(value) for value in moments] + [torch.get_rng_state()]
    modes = [module.training for module in model.modules()]
    numpy_state = np.random.get_state()[1].tolist()  # noqa: NPY002 (of the caller)
    return [[tensor.detach().clone() for tensor in tensors], modes, random.getstate(), numpy_state]


def same_state(before: list, after: list) -> bool:
    """Whether both are equal, bit by bit."""
    tensors = zip(before[0], after[0], strict=True)
    return before[1:] == after[1:] and all(torch.equal(*pair) for pair in tensors)
