"""Cost of a correction in machine-independent counts: operations, waits, bytes moved, memory allocated."""

from __future__ import annotations

import counting
import pytest
import torch
from correction_cases import configuration, everything

from rollcorr import correct
from rollcorr.core.layout import pack
from rollcorr.kernels.correction import implementations
from rollcorr.kernels.correction.torch.blocks import CPU_BLOCK

T = 2048
OUTPUTS = 5  # bytes a token: a float32 weight, a bool
STANDARD = configuration(rollout_is="token", rollout_rs="seq_mean_k3", rollout_rs_threshold=0.01)
IMPLEMENTATIONS = [name for name in ("reference", "torch", "cpu") if implementations()[name][0]]


@pytest.fixture(autouse=True)
def one_thread(threads):
    """Operations in other threads are not seen."""
    threads(1)


def batch(blocks: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return enough rows to fill that number of blocks."""
    shape = blocks * CPU_BLOCK // T, T
    if device == "meta":
        return (
            torch.zeros(shape, device="meta"),
            torch.zeros(shape, device="meta"),
            torch.ones(shape, device="meta") > 0,
        )
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(shape, generator=generator)
    train = rollout + 0.02 * torch.randn(shape, generator=generator)
    return train, rollout, torch.rand(shape, generator=generator) < 0.9


def counted(blocks: int, config, impl: str, *, packed: bool = False, device: str = "cpu"):
    """Count one correction with fresh outputs, after a first call that fills the caches."""
    tensors, cu_seqlens = batch(blocks, device), None
    if packed:
        (train, cu_seqlens), (rollout, _) = pack(tensors[0], tensors[2]), pack(tensors[1], tensors[2])
        tensors = train, rollout, torch.ones_like(train, dtype=torch.bool)
    correct(
        *(x[:1] for x in tensors),
        config,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens[:2].clamp(max=1),
        impl=impl,
    )
    with counting.Counts() as counts:
        correct(*tensors, config, cu_seqlens=cu_seqlens, impl=impl)
    return counts


@pytest.mark.parametrize(
    ("config", "fixed", "each_block", "bytes_each_token"),
    [(STANDARD, 117, 142, 1680), (everything(), 277, 240, 2880), (configuration(), 67, 90, 1070)],
    ids=["standard", "everything", "metrics only"],
)
def test_the_torch_kernel_asks_for_few_operations_on_each_block(config, fixed, each_block, bytes_each_token):
    """Counts the bytes of float64 buffers that stay in cache; memory sees 9 in and 5 out."""
    few, many = counted(2, config, "torch"), counted(4, config, "torch")
    assert (many.operations - few.operations) / 2 <= each_block
    assert few.operations - 2 * each_block <= fixed
    assert many.bytes_moved / batch(4)[0].numel() <= bytes_each_token


@pytest.mark.parametrize(
    ("config", "operations", "bytes_each_token"),
    [(STANDARD, 450, 2620), (everything(), 1250, 5450)],
    ids=["standard", "everything"],
)
def test_the_reference_asks_for_the_same_operations_on_any_batch(config, operations, bytes_each_token):
    few, many = counted(1, config, "reference"), counted(2, config, "reference")
    assert few.operations == many.operations <= operations
    assert many.bytes_moved / batch(2)[0].numel() <= bytes_each_token


@pytest.mark.parametrize("config", [STANDARD, everything(), everything(rollout_is="sequence")])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_correction_waits_for_nothing(config, impl, packed):
    counts = counted(1, config, impl, packed=packed)
    assert (counts.waits, counts.transfers) == (0, 0)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_metrics_are_one_transfer_and_nothing_is_read_before_it(impl):
    """Tensors without values: reading one is an error, and the first to be read is the vector of all rows."""
    correction = correct(*batch(1, device="meta"), STANDARD, impl=impl)
    with counting.Counts() as counts, pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        correction.metrics()
    assert counts.operations == 1  # the rows become one vector; its copy fails
    assert counts.waits == 0


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("config", [STANDARD, everything()])
@pytest.mark.parametrize("impl", [name for name in IMPLEMENTATIONS if name != "reference"])
def test_memory_grows_by_the_outputs_and_a_tenth(impl, config, packed):
    """A block's buffers are the same for any batch; outputs grow by 5 bytes per token and a little per sequence."""
    few, many = counted(2, config, impl, packed=packed), counted(6, config, impl, packed=packed)
    tokens = [int(batch(blocks)[2].sum()) if packed else batch(blocks)[2].numel() for blocks in (2, 6)]
    assert many.peak_bytes - few.peak_bytes <= 1.1 * OUTPUTS * (tokens[1] - tokens[0])


@pytest.mark.parametrize(("config", "bytes_each_token"), [(STANDARD, 113), (configuration(), 97)])
def test_the_torch_kernel_works_in_buffers_of_one_block(config, bytes_each_token):
    counts = counted(4, config, "torch")
    outputs = OUTPUTS if config.rollout_is else 1
    assert counts.peak_bytes - outputs * 4 * CPU_BLOCK <= bytes_each_token * CPU_BLOCK


def test_counts_by_hand():
    x, mask = torch.ones(4, 8), torch.ones(4, 8, dtype=torch.bool)
    with counting.Counts() as counts:
        y = x.view(-1) + 1.0  # 128 bytes in, 128 out
        y.mul_(2.0)  # the same again
        torch.add(y, 1.0, out=y)
        y.copy_(x.view(-1))
        x.t()[0].sum().item()  # 4 numbers in, 1 out; then a wait
        torch.ones(1).expand(1000) + 0.0  # 4 bytes out; 4 bytes in, 4,000 out
    assert counts.operations == 8
    assert counts.waits == 1
    assert counts.bytes_read == 4 * 128 + 16 + 4 + 4
    assert counts.bytes_written == 4 * 128 + 4 + 4 + 4000
    with counting.Counts() as counts:
        z = x[mask]
        del z
        x + 1.0
    assert counts.waits == 1
    assert counts.peak_bytes == 128
