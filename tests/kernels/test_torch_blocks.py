"""The torch path reads blocks in a thread pool and does not change torch's own threads."""

from __future__ import annotations

import contextlib
import math
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from rollcorr import correct
from rollcorr.config import RolloutCorrectionConfig
from rollcorr.core.mergeable_statistics import Statistics
from rollcorr.kernels.correction.torch import blocks
from rollcorr.kernels.correction.torch.table import SequenceTable

B, T = 6, 40
ODD = {
    "no": None,
    "missing": (math.nan, -1.0),
    "zero": (-math.inf, -1.0),
    "far": (-1.0, -30.0),
    "density": (60.0, 60.0),
}


def batch(spread: float, *, whole: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    rollout = -3 * torch.rand(B, T, generator=generator)
    train = rollout + spread * torch.randn(B, T, generator=generator)
    lengths = torch.full((B,), T) if whole else torch.tensor([40, 0, 1, 7, 39, 20])
    return train, rollout, torch.arange(T) < lengths[:, None]


@pytest.mark.parametrize("odd", ODD)
def test_odd_values_warn_of_nothing(odd):
    train, rollout, mask = batch(0.3, whole=True)
    if ODD[odd] is not None:
        train[0, 5], rollout[0, 5] = ODD[odd]
    rollout[1, 2] = train[1, 2] = -math.inf  # ∞ − ∞
    with warnings.catch_warnings(), np.errstate(all="warn"):
        warnings.simplefilter("error")
        correct(train, rollout, mask, RolloutCorrectionConfig(rollout_is="token"), impl="torch")


@pytest.mark.parametrize("fails", [False, True])
def test_readers_leave_the_number_of_threads(fails, threads):
    """A reader has one thread; its caller, and a thread that begins later, keep their number of threads."""
    threads(3)
    blocks._thread_pool.cache_clear()
    seen = []

    def read(block):
        seen.append(torch.get_num_threads())
        if fails:
            raise ValueError("odd")
        return SequenceTable(), Statistics.of(sums={"tokens": torch.ones(())})

    with pytest.raises(ValueError, match="odd") if fails else contextlib.nullcontext():
        blocks.read_blocks(read, torch.ones(4, 2, dtype=torch.bool), None, 2)
    assert set(seen) == {1}
    assert torch.get_num_threads() == 3
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 3


def test_concurrent_callers_get_their_own_numbers(monkeypatch, threads):
    monkeypatch.setattr(blocks, "CPU_BLOCK", T)
    batches = [batch(0.02 + 0.1 * i, whole=True) for i in range(3)]
    threads(3)
    expected = [correct(*of, impl="torch").statistics.pack() for of in batches]
    with ThreadPoolExecutor(3) as callers:
        for _ in range(5):
            found = callers.map(lambda of: correct(*of, impl="torch").statistics.pack(), batches)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
