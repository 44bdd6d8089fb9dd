"""Messages of a step if the group has only a GPU backend, like NCCL: tested without a GPU, on a fake one."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from fake_cuda import fake_cuda, numbers_are_one

from rollcorr import correct
from rollcorr.core.mergeable_statistics import STATISTICS_DTYPE
from rollcorr.correction.process_groups import BLOCK, gather_marked, reads_host_memory
from rollcorr.monitor.step_totals import RankExchange, StepTotals

GROUP = SimpleNamespace(size=lambda: 2, rank=lambda: 0)


@pytest.fixture
def backend(monkeypatch):
    """Record the group's backend, and (device, dtype, numbers) of every message."""
    sent = []

    def gather(parts, vector, group):
        sent.extend((part.device.type, part.dtype, part.numel()) for part in (vector, *parts))

    def choose(config):
        monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
        return sent

    monkeypatch.setattr(dist, "all_gather", gather)
    return choose


class CountedExchange(RankExchange):
    """An exchange that notes from where it brings something to the host. It knows the layout, whose mark is 1 here."""

    def __init__(self, layout):
        super().__init__(GROUP)
        self.brought, self._layouts = [], {1: layout}

    def _to_host(self, vector):
        self.brought.append(vector.device.type)
        return super()._to_host(vector)


def exchanged():
    """One step with numbers on the device and one on the host, through the exchange."""
    totals = StepTotals()
    totals.add_value("loss", torch.zeros((), device="cuda"))
    totals.add_value("reward", torch.zeros(4, device="cuda"))
    totals.add_value("lr", 0.5)
    layout, vector = totals.pack()
    exchange = CountedExchange(layout)
    with numbers_are_one():
        exchange.read(layout, vector)
    return exchange


@pytest.mark.parametrize("config", ["cuda:nccl", "cuda:nccl,xpu:xccl"])
def test_nccl_gets_device_tensors_and_one_transfer_comes_after_it(backend, config):
    sent = backend(config)
    with fake_cuda():
        exchange = exchanged()
    assert sent == [("cuda", STATISTICS_DTYPE, BLOCK)] * 3
    assert exchange.brought == ["cuda"]


def test_a_step_whose_numbers_are_all_on_the_host_is_sent_from_the_device_too(backend):
    """The fake GPU cannot be copied to, so torch's device without memory stands for it here."""
    sent = backend("meta:nccl")
    parts = gather_marked(torch.ones(5, dtype=STATISTICS_DTYPE), 3, GROUP, room=BLOCK)
    assert sent == [("meta", STATISTICS_DTYPE, BLOCK)] * 3
    assert (parts.device.type, tuple(parts.shape)) == ("meta", (2, BLOCK))


@pytest.mark.parametrize("config", ["cpu:gloo,cuda:gloo", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo"])
def test_where_the_host_has_a_backend_the_transfer_comes_first(backend, config):
    sent = backend(config)
    with fake_cuda():
        exchange = exchanged()
    assert sent == [("cpu", STATISTICS_DTYPE, BLOCK)] * 3
    assert exchange.brought == ["cuda"]


def test_correct_sends_its_statistics_from_the_device_and_reads_none(backend):
    """Reading a value of the fake device would be an error."""
    sent = backend("cuda:nccl")
    with fake_cuda():
        log_prob = torch.zeros(4, 8, device="cuda")
        correct(log_prob, log_prob, log_prob == 0, "tis", group=GROUP, impl="torch")
    assert sent == [("cuda", STATISTICS_DTYPE, BLOCK)] * 3


def test_the_backends_are_those_that_torch_reports():
    for config, host in (("nccl", False), ("gloo", True), ("cpu:gloo,cuda:nccl", True)):
        found = str(dist.distributed_c10d.BackendConfig(dist.Backend(config)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_backend_config", lambda group, found=found: found)
            assert reads_host_memory(GROUP) == host
