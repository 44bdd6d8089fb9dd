"""The Triton kernels equal the reference, in three launches and without a wait.

They run interpreted, on the CPU (`tests/conftest.py` asks for it before Triton is imported). On a machine with a GPU,
`TRITON_INTERPRET=0` runs the same tests compiled, on the device.
"""

from __future__ import annotations

import itertools
import math
import os

import pytest
import torch
from correction_cases import (
    WEIGHT_BOUNDS,
    batches,
    configuration,
    configurations,
    reference_correction,
    torch_correction,
    triton_correction,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rollcorr.core.layout import pack
from rollcorr.core.metric_registry import CRITERIA, finalize
from rollcorr.correction import correct
from rollcorr.kernels import correction as kernels
from rollcorr.kernels.correction.call import Batch, CorrectionOutput
from rollcorr.kernels.correction.dispatch import correction_kernel
from rollcorr.kernels.correction.triton import status, why_not

pytest.importorskip("triton", reason="Triton is not installed; `make test-triton` installs it")
if status() is not None:
    pytest.skip(str(status()), allow_module_level=True)

import triton
import triton.language as tl

from rollcorr.kernels.correction.triton import launch
from rollcorr.kernels.correction.triton.token_pass import BLOCK, share_of, tokens_at

# The interpreter computes with numpy, which reports infinities that a selection afterwards drops.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
LEVELS = [None, "token", "sequence", "geometric"]
THRESHOLDS = ",".join("0.3_3.0" if name.endswith("k1") else "2.0" for name in CRITERIA)


def every_criterion(**fields):
    return configuration(
        rollout_rs=",".join(CRITERIA), rollout_rs_threshold=THRESHOLDS, rollout_token_veto_threshold=1e-2, **fields
    )


def batch_of(B, T, mismatch=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(B, T, generator=generator) * 3
    train = rollout + torch.randn(B, T, generator=generator) * mismatch
    return train, rollout, torch.rand(B, T, generator=generator) < 0.8


def with_accidents(train, rollout, mask):
    """A missing token on either side, a probability of zero, a sentinel, and a sequence without a token."""
    train[0, 3], train[1, 5], rollout[2, 7], rollout[0, 9] = math.nan, -math.inf, math.inf, -math.inf
    mask[0, 3] = mask[1, 5] = mask[2, 7] = mask[0, 9] = True
    mask[3] = False
    return train, rollout, mask


def run(train, rollout, mask, config, **options) -> CorrectionOutput:
    on_device = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    output = triton_correction(train.to(DEVICE), rollout.to(DEVICE), mask.to(DEVICE), config, **on_device)
    weights = None if output.weights is None else output.weights.cpu()
    flags = output.loss_mask.cpu(), output.sequence_kept.cpu()
    return CorrectionOutput(weights, *flags, output.statistics, output.policy_sums.cpu())


def assert_close(actual: CorrectionOutput, expected: CorrectionOutput, rows=None, rel=1e-5, abs=1e-6) -> None:
    """Compare decisions, weights to float32, metrics to `rel`; `rows` selects the tokens of a packed result."""
    select = (lambda x: x) if rows is None else (lambda x: x[rows])
    assert torch.equal(actual.loss_mask, select(expected.loss_mask))
    assert torch.equal(actual.sequence_kept, expected.sequence_kept)
    assert (actual.weights is None) == (expected.weights is None)
    if expected.weights is not None:
        torch.testing.assert_close(actual.weights, select(expected.weights), rtol=3e-6, atol=1e-12)
    a, b = finalize(actual.statistics.read()), finalize(expected.statistics.read())
    assert list(a) == list(b)
    for name in b:
        if not name.endswith("max_viable_length"):  # the reciprocal of `kl`, which may be near 0
            assert a[name] == pytest.approx(b[name], rel=rel, abs=abs), name


@settings(max_examples=15, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking would take minutes
@given(
    batch=batches(),
    config=configurations(WEIGHT_BOUNDS),
    lengths=st.lists(st.integers(0, 17), min_size=6, max_size=6),
    mask_type=st.sampled_from([torch.bool, torch.uint8, torch.int64, torch.float32]),
    splits=st.sampled_from([1, 2]),
)
def test_padded_and_packed_equal_the_reference(batch, config, lengths, mask_type, splits):
    train, rollout, mask = batch
    B, T = mask.shape
    rows = torch.arange(T).expand(B, T) < torch.tensor(lengths)[:B, None]
    expected = reference_correction(train, rollout, mask & rows, config)
    assert_close(run(train, rollout, (mask & rows).to(mask_type), config, splits=splits), expected)
    (packed_train, cu_seqlens), (packed_rollout, _), (packed_mask, _) = (pack(x, rows) for x in batch)
    actual = run(packed_train, packed_rollout, packed_mask.to(mask_type), config, cu_seqlens=cu_seqlens, splits=splits)
    assert_close(actual, expected, rows)


@pytest.mark.parametrize(("level", "threshold"), [(None, 2.0), *itertools.product(LEVELS[1:], [2.0, "0.5_2.0", None])])
def test_every_criterion_at_every_level(level, threshold):
    config = every_criterion(
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_is_batch_normalize=True,
        batch_normalize_over="kept" if threshold is None else "valid",
        nonfinite={2.0: "reject_token", "0.5_2.0": "reject_sequence"}.get(threshold, "neutral"),
        safety_bound=5.0 if threshold is None else 20.0,
    )
    batch = with_accidents(*batch_of(5, 700))
    assert_close(run(*batch, config, splits=2), reference_correction(*batch, config))


@pytest.mark.parametrize("splits", [1, 2])
def test_policy_sums_equal_those_of_the_reference(splits):
    batch = with_accidents(*batch_of(5, 700))
    config = every_criterion(rollout_is="token")
    actual, expected = run(*batch, config, splits=splits).policy_sums, reference_correction(*batch, config).policy_sums
    assert torch.equal(actual[:2], expected[:2])
    torch.testing.assert_close(actual[2:], expected[2:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("T", [512, 528, 700])
def test_rows_of_whole_blocks_of_aligned_and_of_any_length(T):
    batch = with_accidents(*batch_of(4, T))
    config = configuration(rollout_is="sequence", rollout_rs="token_k2,seq_sum_k1", rollout_rs_threshold="0.4,0.1_10")
    assert_close(run(*batch, config), reference_correction(*batch, config))


@pytest.mark.parametrize("splits", [1, 16])
@pytest.mark.parametrize("packed", [False, True])
def test_a_long_sequence_is_read_in_chunks_and_by_several_programs(packed, splits):
    """17,000 tokens: two chunks of one program, or shares of three blocks."""
    batch = batch_of(1, 17_000, mismatch=0.05)
    config = configuration(rollout_is="token", rollout_rs="token_k3,seq_mean_k3", rollout_rs_threshold="0.01,0.1")
    expected = reference_correction(*batch, config)
    if not packed:
        assert_close(run(*batch, config, splits=splits), expected)
        return
    flat = [x.flatten() for x in batch]
    actual = run(*flat, config, cu_seqlens=torch.tensor([0, 17_000]), splits=splits)
    assert_close(actual, expected, torch.ones_like(batch[2]))


@triton.jit
def last_tokens(found, T, splits, ALIGN: tl.constexpr):
    """Return the end of the last share, its last token, and the number of tokens in its last block, for a row of T."""
    program = tl.program_id(0).to(tl.int64) + splits - 1
    start, end, begin, stop = share_of(program, found, T, splits, False, ALIGN)
    at = begin + (stop - begin - 1) // BLOCK * BLOCK
    local, inside = tokens_at(at, start, end, 4, 32, ALIGN)
    inside_here = tl.reshape(inside, [BLOCK]).to(tl.int32)
    tl.store(found, stop)
    tl.store(found + 1, at + tl.max(tl.reshape(local, [BLOCK]) * inside_here, axis=0))
    tl.store(found + 2, tl.sum(inside_here, axis=0))


@pytest.mark.parametrize(("extra", "splits", "align"), [(4096, 1, 0), (528, 64, 1), (17, 64, 16)])
def test_a_row_of_more_tokens_than_32_bits_count_is_read_to_its_end(extra, splits, align):
    T = (1 << 31) + extra
    found = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    last_tokens[(1,)](found, T, splits, ALIGN=align)
    assert found.tolist() == [T, T - 1, T % 512 or 512]


def test_packed_sequences_that_start_anywhere_leave_their_neighbours_alone():
    lengths = [3, 0, 517, 16, 1, 1030]
    train, rollout, mask = (x[0] for x in batch_of(1, sum(lengths)))
    config = configuration(rollout_is="geometric", rollout_rs="seq_mean_k3", rollout_rs_threshold=0.05)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    expected = reference_correction(train, rollout, mask, config, cu_seqlens=cu_seqlens)
    for splits in (1, 4):
        assert_close(run(train, rollout, mask, config, cu_seqlens=cu_seqlens, splits=splits), expected)


@pytest.mark.parametrize("mismatch", [1e-4, 1e-2, 1.0])
def test_every_metric_is_within_1e_5_of_float64(mismatch):
    batch = batch_of(4, 2048, mismatch)
    config = every_criterion(rollout_is="token")
    assert_close(run(*batch, config), reference_correction(*batch, config), abs=1e-9)


@pytest.mark.parametrize("shift", [-19.0, -3.0, 2.0])
def test_a_small_spread_around_a_large_mean_is_measured(shift):
    """Sums of squares around 0 would lose it: the spread is 1e-3 of a log-ratio, and of a weight near e^−19."""
    train, rollout, mask = batch_of(2, 1024, mismatch=1e-3)
    rollout = rollout.double() - shift
    batch = train.double(), rollout, mask
    config = configuration(rollout_is="token", rollout_is_threshold=None, rollout_rs="token_k2", rollout_rs_threshold=9)
    actual, expected = (
        finalize(run(*batch, config).statistics.read()),
        finalize(reference_correction(*batch, config).statistics.read()),
    )
    for name in ("log_ratio_std", "rollout_is_eff_sample_size", "rollout_is_raw_std", "rollout_rs_token_k2_std"):
        assert actual[f"rollout_corr/{name}"] == pytest.approx(expected[f"rollout_corr/{name}"], rel=1e-3), name


@pytest.mark.parametrize("threshold", [2.0, "0.5_2.0"])
def test_an_outlier_at_the_start_costs_the_bounded_weights_no_digits(threshold):
    """The first value of a lane becomes the point that it sums around; e^15 must not be that for weights below 2."""
    train, rollout, mask = batch_of(2, 1500, mismatch=1e-3)
    train[:, :512] = rollout[:, :512] + 15
    config = configuration(rollout_is="token", rollout_is_threshold=threshold)
    assert_close(run(train, rollout, mask, config), reference_correction(train, rollout, mask, config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_inputs_of_any_floating_type(dtype):
    train, rollout, mask = with_accidents(*batch_of(4, 40))
    batch = train.to(dtype), rollout.to(dtype), mask
    config = configuration(rollout_is="token", rollout_rs="seq_max_k2", rollout_rs_threshold=0.1)
    assert_close(run(*batch, config), reference_correction(*batch, config))


def test_sentinels_and_densities_leave_no_nan():
    """An engine's −1e30 for a token it did not score, and log-densities of hundreds of nats."""
    train, rollout, mask = batch_of(2, 64)
    rollout[0, 5], train[1, 6], train[1, 7], rollout[1, 7] = -1e30, -3e38, 300.0, 299.0
    mask[:] = True
    output = run(train, rollout, mask, every_criterion(rollout_is="token"))
    assert output.weights.isfinite().all()
    assert not output.statistics.pack().isnan().any()


def test_rows_are_those_of_every_other_kernel():
    batch = batch_of(2, 20)
    for level in LEVELS:
        config = every_criterion(rollout_is=level, rollout_is_batch_normalize=level is not None)
        merged = run(*batch, config).statistics.merge(torch_correction(*batch, config).statistics)
        assert merged.read().sums["tokens"] == 2 * batch[2].sum()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", [2.0, "0.5_2.0", None])
def test_no_row_is_left_unwritten(level, mode, monkeypatch):
    """Memory that a launch should have written is NaN here before it."""
    empty = torch.empty

    def poisoned(*size, **options):
        out = empty(*size, **options)
        return out.fill_(math.nan) if out.is_floating_point() else out

    monkeypatch.setattr(launch.torch, "empty", poisoned)
    config = every_criterion(rollout_is=level, rollout_is_threshold=mode, rollout_is_batch_normalize=level is not None)
    output = run(*batch_of(3, 20), config)
    assert not output.statistics.pack().isnan().any()
    assert output.weights is None or not output.weights.isnan().any()


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class _Counter:
    """Stands for a kernel and counts its launches."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda **arguments: None


@pytest.mark.parametrize("mask_type", [torch.bool, torch.int64])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_three_launches_and_no_wait(level, packed, mask_type, monkeypatch):
    """Only three kernels do work: torch allocates memory and views of it. On meta tensors a read would raise."""
    counters = {name: _Counter() for name in ("read_tokens", "decide_sequences", "finish")}
    for name, counter in counters.items():
        monkeypatch.setattr(launch, name, counter)
    config = every_criterion(rollout_is=level)
    launch.plan_of(config)
    with torch.device("meta"):
        train, mask = torch.zeros(8, 4096), torch.ones(8, 4096, dtype=mask_type)
        cu_seqlens = torch.arange(9) * 4096 if packed else None
    inputs = [x.flatten() if packed else x for x in (train, train, mask)]
    with _Recorder() as recorder:
        output = launch.launch_correction(Batch(*inputs, cu_seqlens), config)
    assert [len(counter.grids) for counter in counters.values()] == [1, 1, 1]
    assert recorder.operations <= {"empty", "view", "detach", "split_with_sizes"}
    assert output.loss_mask.device.type == "meta"


def test_equal_inputs_give_equal_bits():
    batch = batch_of(3, 600)
    config = every_criterion(rollout_is="token")
    first, second = run(*batch, config, splits=2), run(*batch, config, splits=2)
    assert torch.equal(first.statistics.pack(), second.statistics.pack())
    assert torch.equal(first.weights, second.weights)


@pytest.mark.parametrize(
    ("tokens", "sequences", "splits"),
    [(1024 * 8192, 1024, 2), (4096 * 8192, 4096, 1), (8 * 131072, 8, 64), (128 * 8192, 128, 8), (3, 3, 1)],
)
def test_few_long_sequences_are_split_and_many_are_not(tokens, sequences, splits):
    assert launch.choose_splits(tokens, sequences) == splits


def test_out_is_written_to():
    train, rollout, mask = (x.to(DEVICE) for x in batch_of(2, 20))
    out = torch.full((2, 20), math.nan, device=DEVICE), torch.empty(2, 20, dtype=torch.bool, device=DEVICE)
    result = correct(train, rollout, mask, {"rollout_is": "token"}, impl="triton", out=out)
    assert result.weights.data_ptr() == out[0].data_ptr()
    assert not out[0].isnan().any()


def test_an_empty_batch_and_strided_inputs_are_taken():
    config = every_criterion(rollout_is="sequence")
    empty = torch.zeros(3, 0)
    assert run(empty, empty, empty.bool(), config).sequence_kept.all()
    train, rollout, mask = (x.T for x in batch_of(9, 5))
    assert_close(run(train, rollout, mask, config), reference_correction(train, rollout, mask, config))


def test_what_the_kernels_cannot_take_is_said_and_left_to_others(monkeypatch):
    train, rollout, mask = batch_of(2, 5)
    large = configuration(safety_bound=50.0)
    with pytest.raises(ValueError, match=r"safety_bound is 50, .*use impl='auto' or 'torch'"):
        correction_kernel(train, rollout, mask, large, impl="triton")
    assert "cuda" in why_not(Batch(train.to("meta"), rollout, mask), large).lower() or DEVICE == "cpu"
    monkeypatch.setattr(kernels.triton, "status", lambda: "Triton is not installed")
    with pytest.raises(ImportError, match="impl='triton' cannot run here: Triton is not installed"):
        correction_kernel(train, rollout, mask, configuration(), impl="triton")
