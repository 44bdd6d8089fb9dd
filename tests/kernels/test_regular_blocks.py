"""Blocks of host memory that hold nothing odd are read in fewer passes, and come to the same."""

from __future__ import annotations

import contextlib
import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Thread

import numpy as np
import pytest
import torch
from counting import Counts

from rollcorr import correct
from rollcorr.config import RolloutCorrectionConfig
from rollcorr.kernels.correction.torch import blocks, counted_tokens, regular, tokens

B, T = 6, 40
CONFIGURATIONS = {
    "metrics": {},
    "token": {"rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
    "floor, low ceiling": {"rollout_is": "token", "rollout_is_threshold": 0.9, "rollout_is_floor": 0.8},
    "no bound, reach 1": {"rollout_is": "token", "rollout_is_threshold": None, "safety_bound": 1.0},
    "sequence": {"rollout_is": "sequence", "rollout_rs": "seq_sum_k1,seq_mean_k2,seq_max_k3"} | {
        "rollout_rs_threshold": "0.5_2.0,0.01,0.1"
    },
    "geometric, neutral": {"rollout_is": "geometric", "nonfinite": "neutral"},
}  # fmt: skip
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


def both_ways(monkeypatch, data, config, cu_seqlens=None):
    """The correction of host memory, with a block for two rows, and as a device would be read."""
    monkeypatch.setattr(blocks, "CPU_BLOCK", 2 * T)
    results = []
    for readable in (True, False):
        monkeypatch.setattr(blocks, "in_host_memory", lambda *_, readable=readable: readable)
        with Counts() as counts:
            results.append((correct(*data, config, cu_seqlens=cu_seqlens, impl="torch"), counts.operations))
    return results


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_host_memory_gives_what_a_device_gives(name, odd, whole, packed, monkeypatch):
    train, rollout, mask = batch(0.3, whole=whole)
    if ODD[odd] is not None:
        train[0, 5], rollout[0, 5] = ODD[odd]
    data, cu_seqlens = (train, rollout, mask), None
    if packed:
        data, cu_seqlens = tuple(x.flatten() for x in data), torch.arange(B + 1) * T
    (one, _), (other, _) = both_ways(monkeypatch, data, RolloutCorrectionConfig(**CONFIGURATIONS[name]), cu_seqlens)
    assert torch.equal(one.loss_mask, other.loss_mask)
    torch.testing.assert_close(one.weights, other.weights, rtol=1e-7, atol=0)
    expected = other.metrics()
    assert one.metrics() == {key: pytest.approx(x, rel=1e-6, abs=1e-12, nan_ok=True) for key, x in expected.items()}


@pytest.mark.parametrize("spread", [0.0, 1e-7, 1e-3])
def test_a_spread_that_a_fixed_center_would_cancel_is_kept(spread, monkeypatch):
    """Weights near 2 that differ in the seventh digit."""
    train, rollout, mask = batch(spread, whole=True)
    train = (train.double() + math.log(1.9)).contiguous()
    (one, _), (other, _) = both_ways(monkeypatch, (train, rollout, mask), RolloutCorrectionConfig(rollout_is="token"))
    expected = other.metrics()
    assert one.metrics() == {key: pytest.approx(x, rel=1e-6, abs=1e-12, nan_ok=True) for key, x in expected.items()}


@pytest.mark.parametrize("whole", [True, False])
def test_a_regular_block_takes_fewer_operations(whole, monkeypatch):
    config = RolloutCorrectionConfig(**CONFIGURATIONS["token"])
    (_, few), (_, many) = both_ways(monkeypatch, batch(0.3, whole=whole), config)
    assert (many - few) / (B / 2) >= 12


# Where the tokens lie that count, in rows of 40.
PLACES = {
    "on the left": [range(40), range(7), range(0), range(39), range(1), range(20)],
    "on the right": [range(40), range(33, 40), range(0), range(1, 40), range(39, 40), range(20, 40)],
    "two turns": [[*range(12), *range(20, 40)], [*range(3, 9), *range(30, 37)], *[range(40)] * 3, range(5, 25)],
    "every other": [range(i % 2, 40, 2) for i in range(6)],
}


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("short", [1, 512], ids=["runs", "one by one"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["token", "floor, low ceiling", "sequence"])
def test_tokens_that_count_are_found_wherever_they_lie(places, short, packed, name, monkeypatch):
    monkeypatch.setattr(counted_tokens, "SHORT", short)
    train, rollout, mask = batch(0.3, whole=True)
    mask = torch.zeros_like(mask)
    for row, columns in enumerate(PLACES[places]):
        mask[row, list(columns)] = True
    train.masked_fill_(~mask, math.nan)
    data, cu_seqlens = (train, rollout, mask), None
    if packed:
        data, cu_seqlens = tuple(x.flatten() for x in data), torch.tensor([0, 0, 33, 90, 90, 200, 240])
    (one, _), (other, _) = both_ways(monkeypatch, data, RolloutCorrectionConfig(**CONFIGURATIONS[name]), cu_seqlens)
    assert torch.equal(one.loss_mask, other.loss_mask)
    torch.testing.assert_close(one.weights, other.weights, rtol=1e-7, atol=0)
    expected = other.metrics()
    assert one.metrics() == {key: pytest.approx(x, rel=1e-6, abs=1e-12, nan_ok=True) for key, x in expected.items()}


def test_a_mask_of_any_true_byte_counts_each_token_once():
    mask = torch.tensor([[1, 255, 0, 2], [0, 0, 0, 0]], dtype=torch.uint8).view(torch.bool)
    found = counted_tokens.counted_tokens(mask, blocks.Block(slice(0, 2), None))
    assert (found.number, found.counts) == (3, [3, 0])
    marked = torch.ones(2, 4, dtype=torch.bool)
    found.mark(marked)
    assert marked.view(torch.uint8).tolist() == [[1, 1, 0, 1], [0, 0, 0, 0]]


@pytest.mark.parametrize("odd", ODD)
def test_what_a_block_finds_is_no_matter_for_a_warning(odd):
    train, rollout, mask = batch(0.3, whole=True)
    if ODD[odd] is not None:
        train[0, 5], rollout[0, 5] = ODD[odd]
    rollout[1, 2] = train[1, 2] = -math.inf  # ∞ − ∞
    with warnings.catch_warnings(), np.errstate(all="warn"):
        warnings.simplefilter("error")
        correct(train, rollout, mask, RolloutCorrectionConfig(rollout_is="token"), impl="torch")


def test_padding_fills_no_block():
    """Blocks are cut by tokens that count: 3 rows of 2 fit into 6, and a row that is longer has its own."""
    mask = torch.arange(8) < torch.tensor([2, 2, 2, 8, 0, 3])[:, None]
    found = [(block.at, block.counts) for block in regular.filled_blocks(mask, 6)]
    assert found == [(slice(0, 3), [2, 2, 2]), (slice(3, 4), [8]), (slice(4, 6), [0, 3])]


def test_an_odd_token_has_only_the_rows_around_it_read_in_full(monkeypatch):
    """A block of 4 rows is taken apart, and of its halves only the one with the odd token is read in full."""
    seen = []
    read = tokens.TokenPass.read
    monkeypatch.setattr(blocks, "CPU_BLOCK", 2 * T)
    monkeypatch.setattr(
        tokens.TokenPass, "read", lambda self, block, *of: (seen.append(block.at), read(self, block, *of))
    )
    train, rollout, mask = batch(0.3, whole=True)
    train[1, 5] = math.nan
    correct(train, rollout, mask, RolloutCorrectionConfig(rollout_is="token"), impl="torch")
    assert seen == [slice(0, 2)]


@pytest.mark.parametrize("fails", [False, True])
def test_readers_leave_the_number_of_threads_as_it_was(fails, threads):
    """A reader has one thread; its caller, and a thread that begins later, have as many as before."""
    threads(3)
    blocks.forget_readers()
    with pytest.raises(ValueError, match="odd") if fails else contextlib.nullcontext():
        assert blocks.in_threads(partial(threads_of_a_reader, fails=fails), [0, 1, 2], 2) == [1, 1]
    assert torch.get_num_threads() == 3
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 3


def test_readers_that_cannot_start_leave_the_number_of_threads_and_may_start_later(monkeypatch, threads):
    threads(3)
    blocks.forget_readers()
    start = Thread.start

    def refuse(thread):
        if thread.name == "rollcorr_1":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            blocks.in_threads(partial(threads_of_a_reader, fails=False), [0, 1], 2)
    assert torch.get_num_threads() == 3
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 3
    assert blocks.in_threads(partial(threads_of_a_reader, fails=False), [0, 1], 2) == [1, 1]


def test_callers_at_the_same_time_get_their_own_numbers(monkeypatch, threads):
    """They share the readers."""
    monkeypatch.setattr(blocks, "CPU_BLOCK", T)
    batches = [batch(0.02 + 0.1 * i, whole=True) for i in range(3)]
    threads(3)
    expected = [correct(*of, impl="torch").statistics.pack() for of in batches]
    with ThreadPoolExecutor(3) as callers:
        for _ in range(5):
            found = callers.map(lambda of: correct(*of, impl="torch").statistics.pack(), batches)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def threads_of_a_reader(share, fails):
    if fails:
        raise ValueError("odd")
    return torch.get_num_threads()
