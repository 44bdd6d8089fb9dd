"""Randomness as a function: every draw is named by (seed, purpose, step), so a resumed run repeats it exactly."""

from __future__ import annotations

import hashlib

import torch


def derived_seed(seed: int, purpose: str, step: int = 0) -> int:
    """A 63-bit seed that depends on nothing but its arguments.

    Args:
        seed: the run's seed.
        purpose: what is drawn, for instance "problems" or "sampling"; two purposes never share a stream.
        step: the training step, or any other counter.
    """
    digest = hashlib.blake2b(f"{seed}/{purpose}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def derived_generator(seed: int, purpose: str, step: int = 0) -> torch.Generator:
    """A CPU generator seeded by `derived_seed`."""
    return torch.Generator().manual_seed(derived_seed(seed, purpose, step))
