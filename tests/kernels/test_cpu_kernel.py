"""The compiled kernel equals the reference on every instruction set, for any data and memory layout."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from correction_cases import (
    SPECIAL,
    WITH_HORIZON,
    assert_same,
    batches,
    configuration,
    configurations,
    cpu_correction,
    everything,
    reference_correction,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rollcorr import correct
from rollcorr.core.layout import pack
from rollcorr.core.metric_registry import finalize
from rollcorr.kernels.correction import implementations
from rollcorr.kernels.correction.call import Batch
from rollcorr.kernels.correction.cpu import kernel
from rollcorr.kernels.correction.cpu.job import accepted_log_ratios
from rollcorr.kernels.correction.cpu.kernel import why_not
from rollcorr.kernels.correction.cpu.library import FOLDER, LEVELS, Library, load
from rollcorr.kernels.correction.dispatch import correction_kernel

USABLE = [level for level in LEVELS if isinstance(load(FOLDER, level), Library)]
CLOSE = {"rel": 1e-5, "abs": 1e-5}
STANDARD = configuration(rollout_is="token", rollout_rs="seq_mean_k3", rollout_rs_threshold=0.01)

pytestmark = pytest.mark.skipif(not USABLE, reason=f"{load(FOLDER, 'portable')}; `make install` does")
levels = pytest.mark.parametrize("level", USABLE)


def noisy(B: int, T: int, spread: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rollout = -2 * torch.rand(B, T, generator=generator)
    train = rollout + spread * torch.randn(B, T, generator=generator)
    return train, rollout, torch.rand(B, T, generator=generator) < 0.9


def numbers(output) -> dict[str, float]:
    return finalize(output.statistics.read(), prefix="")


@levels
@given(batch=batches(), config=configurations(levels=WITH_HORIZON))
def test_every_configuration_gives_the_reference(level, batch, config):
    assert_same(cpu_correction(*batch, config, level=level), reference_correction(*batch, config), **CLOSE)


@levels
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
@settings(max_examples=8)
@given(
    row=st.integers(0, 299), column=st.integers(0, 699), packed=st.booleans(), bad=st.sampled_from(["-1", "inf", "nan"])
)
def test_every_token_of_a_mask_is_checked(level, dtype, row, column, packed, bad):
    bad = float(bad) if dtype.is_floating_point else -1
    train, rollout, mask = noisy(300, 700, 0.1)
    mask, batch = mask.to(dtype), (train, rollout)
    mask[row, column] = bad
    offsets = torch.arange(0, 300 * 700 + 1, 700) if packed else None
    where = f"index {row * 700 + column}" if packed else f"row {row}, column {column}"
    tensors = [x.flatten() if packed else x for x in (*batch, mask)]
    with pytest.raises(ValueError, match=f"response_mask contains {bad:g} at {where}, "):
        cpu_correction(*tensors, STANDARD, cu_seqlens=offsets, level=level)


@levels
def test_a_negative_zero_in_a_mask_is_a_zero(level):
    train, rollout, mask = noisy(3, 70, 0.1)
    plus, minus = (
        cpu_correction(train, rollout, mask.float().where(mask, zero), STANDARD, level=level) for zero in (0.0, -0.0)
    )
    assert_same(minus, plus)


@levels
@given(
    batch=batches(),
    config=configurations(levels=WITH_HORIZON),
    lengths=st.lists(st.integers(0, 17), min_size=6, max_size=6),
)
def test_packed_equals_padded(level, batch, config, lengths):
    train, rollout, mask = batch
    B, T = mask.shape
    rows = torch.arange(T).expand(B, T) < torch.tensor(lengths)[:B, None]
    expected = reference_correction(train, rollout, mask & rows, config)
    (packed_train, cu_seqlens), (packed_rollout, _), (packed_mask, _) = (pack(x, rows) for x in batch)
    packed = packed_train, packed_rollout, packed_mask
    assert_same(cpu_correction(*packed, config, cu_seqlens=cu_seqlens, level=level), expected, rows, **CLOSE)
    narrow = cu_seqlens.to(torch.int32)
    assert_same(cpu_correction(*packed, config, cu_seqlens=narrow, level=level), expected, rows, **CLOSE)


@pytest.mark.covering(2)
@levels
@pytest.mark.parametrize("T", [0, 1, 3, 15, 16, 17, 31, 511, 512, 513, 1025])
@pytest.mark.parametrize("rollout_is", ["token", "sequence", "horizon", None])
def test_any_length_gives_the_reference(level, T, rollout_is):
    """Lengths around the width of a vector and of a block: the last vector of a row is filled up with padding."""
    batch = noisy(3, T, 0.3)
    config = everything(rollout_is=rollout_is)
    assert_same(cpu_correction(*batch, config, level=level), reference_correction(*batch, config), **CLOSE)


@pytest.mark.covering(2)
@levels
@pytest.mark.parametrize("spread", [1e-4, 1e-3, 1e-2, 0.1, 1.0])
@pytest.mark.parametrize("rollout_is", ["token", "sequence", "geometric", "horizon"])
def test_metrics_agree_with_float64_at_every_mismatch(level, spread, rollout_is):
    """Within 1e-5, relative: float32 as such would give a standard deviation of 0, chi² of 0 and a negative k3."""
    batch = noisy(16, 3000, spread)
    config = everything(rollout_is=rollout_is)
    actual, expected = cpu_correction(*batch, config, level=level), reference_correction(*batch, config)
    assert_same(actual, expected, rel=1e-5, abs=1e-7 * spread**2, weights_rel=1e-5)


@levels
@pytest.mark.parametrize("offset", [0.6, -3.0])
def test_a_small_spread_around_a_large_mean_survives(level, offset):
    train, rollout, mask = noisy(8, 2000, 1e-3)
    batch = train + offset, rollout, mask
    config = everything(rollout_is_threshold=None)
    actual, expected = (
        numbers(cpu_correction(*batch, config, level=level)),
        numbers(reference_correction(*batch, config)),
    )
    for name in ("log_ratio", "rollout_is", "rollout_is_raw", "rollout_rs_token_k2", "rollout_rs_token_k3"):
        assert actual[f"{name}_std"] == pytest.approx(expected[f"{name}_std"], rel=1e-5), name


@levels
@pytest.mark.parametrize(
    "config",
    [
        everything(),
        everything(rollout_is="sequence", nonfinite="neutral"),
        everything(rollout_is="horizon"),
        everything(rollout_is="horizon", nonfinite="neutral", rollout_is_threshold="0.5_2.0"),
    ],
)
@pytest.mark.parametrize("where", ["train", "rollout", "both"])
def test_values_that_are_not_finite_may_stand_anywhere(level, config, where):
    """One in three, on valid and masked tokens, in rows of every kind."""
    train, rollout, mask = noisy(9, 700, 0.2)
    for i, value in enumerate(SPECIAL):
        if where != "rollout":
            train[:, i::11] = value
        if where != "train":
            rollout[:, i::7] = value
    mask[0] = False
    train[1], rollout[2] = -math.inf, math.nan
    batch = train, rollout, mask
    assert_same(cpu_correction(*batch, config, level=level), reference_correction(*batch, config), **CLOSE)


@pytest.mark.covering(2)
@levels
@pytest.mark.parametrize("train", [-1000.0, 500.0, -1e9, -1e30, torch.finfo(torch.float32).min, 70.0, -0.5])
@pytest.mark.parametrize("rollout", [-1000.0, 500.0, -1e30, 100.0, -0.75])
def test_extreme_values_overflow_nothing(level, train, rollout):
    """Sentinels, densities and garbage among common values; float64 represents all of them."""
    batch = noisy(3, 600, 0.2)
    batch[0][1, 3:550], batch[1][1, 3:590] = train, rollout
    for config in (everything(), everything(rollout_is="horizon"), configuration(rollout_is="geometric")):
        actual, expected = cpu_correction(*batch, config, level=level), reference_correction(*batch, config)
        assert_same(actual, expected, rel=1e-5, abs=1e-5)
        assert actual.weights.isfinite().all()


@levels
@pytest.mark.parametrize("log_prob", [-195.6, -196.7, -300.06, -600.06])
def test_perplexities_of_tiny_probabilities_keep_their_digits(level, log_prob):
    """Equal addends round the same way each time: float32 sums of 512 lose the fourth digit of exp of their mean."""
    rollout = torch.full((2, 512), log_prob)
    batch = rollout + 0.5, rollout, torch.ones(2, 512, dtype=torch.bool)
    config = configuration(rollout_is="token")
    actual = numbers(cpu_correction(*batch, config, level=level))
    expected = numbers(reference_correction(*batch, config))
    for name in ("training_ppl", "rollout_ppl"):
        assert actual[name] == pytest.approx(expected[name], rel=1e-5), name


@levels
@pytest.mark.parametrize("rounded_off", [-9e-7, 9e-7])
@pytest.mark.parametrize("rest", [0.0, -25.0])
def test_rounding_of_a_log_ratio_is_corrected(level, rounded_off, rest):
    """d = 19.5 ± 9e-7 is 19.5 in float32: relative errors are 9e-7 in exp and k3, and twice as much in chi²."""
    rollout = torch.full((1, 64), -19.5)
    train, mask = torch.full_like(rollout, rounded_off), torch.ones(1, 64, dtype=torch.bool)
    train[0, 1:9] = rollout[0, 1:9] + rest
    config = configuration(rollout_is="token", rollout_is_threshold=None)
    output = cpu_correction(train, rollout, mask, config, level=level)
    exact, actual = train.double() - rollout.double(), numbers(output)
    torch.testing.assert_close(output.weights[:, 9:].double(), exact[:, 9:].exp(), rtol=3e-7, atol=0.0)
    assert actual["k3_kl"] == pytest.approx((exact.expm1() - exact).mean().item(), rel=3e-7)
    assert actual["chi2_token"] == pytest.approx((2 * exact).expm1().mean().item(), rel=5e-7)


@pytest.mark.covering(2)
@levels
@pytest.mark.parametrize("bound", [1.0, 5.0, 30.0, 40.0])
@pytest.mark.parametrize("threshold", [None, 2.0, 1e6, "0.5_2.0"])
def test_any_safety_bound_clamps_as_the_reference_does(level, bound, threshold):
    batch = noisy(4, 530, 25.0)
    config = configuration(rollout_is="token", rollout_is_threshold=threshold, safety_bound=bound)
    actual, expected = cpu_correction(*batch, config, level=level), reference_correction(*batch, config)
    torch.testing.assert_close(actual.weights, expected.weights, rtol=1e-5, atol=0.0)
    assert_same(actual._replace(weights=expected.weights), expected, rel=2e-5, abs=1e-5)


@pytest.mark.covering(2)
@levels
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("other", [torch.int16, torch.float64, torch.bfloat16])
def test_masks_of_any_type_mean_the_same(level, dtype, other):
    train, rollout, mask = noisy(3, 530, 0.2)
    expected = cpu_correction(train, rollout, mask, everything(), level=level)
    for typed in (mask.to(dtype), mask.to(other)):
        assert_same(cpu_correction(train, rollout, typed, everything(), level=level), expected, rel=0.0, abs=0.0)


@levels
def test_a_byte_mask_may_hold_more_than_one(level):
    train, rollout, mask = noisy(3, 530, 0.2)
    expected = cpu_correction(train, rollout, mask, configuration(), level=level)
    actual = cpu_correction(train, rollout, mask.to(torch.uint8) * 255, configuration(), level=level)
    assert_same(actual, expected, rel=0.0, abs=0.0)
    assert actual.loss_mask.view(torch.uint8).max() == 1


@levels
@pytest.mark.parametrize("train_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rollout_type", [torch.float32, torch.bfloat16])
def test_half_precision_is_widened_before_anything_is_subtracted(level, train_type, rollout_type):
    train, rollout, mask = noisy(3, 530, 0.2)
    train[0, 5], rollout[0, 9] = -math.inf, math.nan
    batch = train.to(train_type), rollout.to(rollout_type), mask
    for config in (everything(), everything(rollout_is="sequence"), everything(rollout_is="horizon")):
        assert_same(cpu_correction(*batch, config, level=level), reference_correction(*batch, config), **CLOSE)


@levels
def test_rows_may_lie_apart(level):
    """A slice of columns, like `log_prob[:, -response_length:]`; a transposed mask is copied."""
    train, rollout, mask = noisy(4, 700, 0.2)
    sliced = train[:, 37:], rollout[:, 37:], mask.T.contiguous().T[:, 37:]
    for config in (everything(), everything(rollout_is="horizon")):
        expected = reference_correction(*sliced, config)
        assert_same(cpu_correction(*sliced, config, level=level), expected, **CLOSE)


@levels
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("config", "spread"),
    [(everything(), 0.3), (STANDARD, 0.02), (everything(rollout_is="horizon"), 0.3)],
    ids=["every criterion", "close", "horizon"],
)
def test_the_number_of_threads_changes_no_bit(level, packed, config, spread, threads):
    """Enough tokens for several tasks."""
    batch, cu_seqlens = noisy(200, 700, spread), None
    if packed:
        batch = tuple(x.flatten() for x in batch)
        cu_seqlens = torch.tensor([0, 1, 1, 512, 70_000, 70_001, 139_990, 140_000])
    outputs = []
    for count in (1, 2, 3):
        threads(count)
        outputs.append(cpu_correction(*batch, config, cu_seqlens=cu_seqlens, level=level))
    for output in outputs[1:]:
        assert torch.equal(output.weights, outputs[0].weights)
        assert torch.equal(output.loss_mask, outputs[0].loss_mask)
        assert torch.equal(output.statistics.pack(), outputs[0].statistics.pack())


@given(batch=batches(), config=configurations(), parts=st.integers(1, 8))
def test_statistics_of_shards_merge_to_those_of_the_whole(batch, config, parts):
    whole = cpu_correction(*batch, config).statistics
    shards = zip(*(tensor.tensor_split(parts) for tensor in batch), strict=True)
    merged, *rest = [cpu_correction(*shard, config).statistics for shard in shards]
    for statistics in rest:
        merged = merged.merge(statistics)
    a, b = finalize(merged.read()), finalize(whole.read())
    for name in b:
        assert a[name] == pytest.approx(b[name], rel=1e-12, abs=1e-12), name


@pytest.mark.covering(2)
@levels
@pytest.mark.parametrize("rollout_is", ["token", "sequence", None])
@pytest.mark.parametrize("spread", [0.02, 0.4])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("T", [16, 513, 700, 1337])
def test_nothing_is_written_outside_the_outputs(level, rollout_is, T, whole, spread):
    """The buffers lie in larger ones; neighbours and inputs stay as they are."""
    batch = noisy(3, T, spread)
    if whole:
        batch = *batch[:2], torch.ones_like(batch[2])
    before = [x.clone() for x in batch]
    around = torch.full((3 * T + 64,), 7.0), torch.full((3 * T + 64,), True)
    weights, loss_mask = (x[32 : 32 + 3 * T].view(3, T) for x in around)
    out = (None if rollout_is is None else weights, loss_mask)
    cpu_correction(*batch, everything(rollout_is=rollout_is), out=out, level=level)
    for x, value in zip(around, (7.0, True), strict=True):
        assert (x[:32] == value).all()
        assert (x[32 + 3 * T :] == value).all()
    for x, y in zip(batch, before, strict=True):
        assert torch.equal(x, y)


@given(
    kind=st.sampled_from(["k2", "k3"]),
    upper=st.floats(1e-9, 1e12),
    d=st.floats(-1e3, 25.0),
)
def test_a_bound_on_a_divergence_is_a_bound_on_the_log_ratio(kind, upper, d):
    low, high = accepted_log_ratios(kind, upper)
    capped = min(d, 20.0)
    value = d * d / 2 if kind == "k2" else math.expm1(capped) - capped
    assert low <= 0 <= high
    if abs(value - upper) > 1e-9 * upper:
        assert (value <= upper) == (low <= d <= high)


class Operations(TorchDispatchMode):
    """Counts torch operations."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("config", [STANDARD, everything(), configuration()])
def test_torch_is_asked_to_do_little_whatever_the_configuration(config):
    """The torch kernel dispatches 400 to 1,500 operations on the same batch, and verl 308 to 1,218."""
    batch = noisy(4, 600, 0.2)
    correct(*batch, config, impl="cpu")
    with Operations() as operations:
        correct(*batch, config, impl="cpu")
    assert operations.count <= 16


def test_auto_takes_the_compiled_kernel_where_it_applies(monkeypatch):
    batch = noisy(2, 5, 0.2)
    cpu = correction_kernel(*batch, STANDARD, impl="cpu")
    assert torch.equal(correction_kernel(*batch, STANDARD).statistics.pack(), cpu.statistics.pack())
    wide = batch[0].double(), *batch[1:]
    eager = correction_kernel(*wide, STANDARD, impl="torch")
    assert torch.equal(correction_kernel(*wide, STANDARD).statistics.pack(), eager.statistics.pack())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"train": torch.zeros(2, 5, dtype=torch.float64)}, "train_log_prob is torch.float64"),
        ({"rollout": torch.zeros(2, 5, dtype=torch.float16)}, "rollout_log_prob is torch.float16"),
        (
            {"train": torch.zeros(5, 2).T},
            r"the tokens of train_log_prob do not lie next to each other \(strides \(1, 2\)\)",
        ),
        ({"mask": torch.zeros(2, 5, device="meta")}, "response_mask is on meta"),
        (
            {"config": configuration(safety_bound=41.0)},
            "safety_bound is 41, and it sums the squares of weights up to e\\^40",
        ),
    ],
)
def test_a_batch_that_it_cannot_take_is_refused_with_the_reason(change, said):
    batch = {"train": torch.zeros(2, 5), "rollout": torch.zeros(2, 5), "mask": torch.ones(2, 5), "config": STANDARD}
    batch |= change
    with pytest.raises(ValueError, match=f"impl='cpu' cannot take this batch: {said}.*use impl='auto'"):
        correction_kernel(*batch.values(), impl="cpu")


def test_tensors_that_hold_no_memory_are_left_to_torch():
    class Wrapped(torch.Tensor):
        pass

    x = torch.zeros(2, 3)
    assert "is a Wrapped" in why_not(Batch(x.as_subclass(Wrapped), x, x), STANDARD)


@pytest.mark.parametrize(
    ("offsets", "said"),
    [([1, 4], "must start at 0, got 1"), ([0, 5, 3, 4], "entry 2 is 3 after 5"), ([0, 9], "must end at .* 4, got 9")],
)
def test_offsets_that_would_read_beyond_the_data_are_an_error(offsets, said):
    x = torch.zeros(4)
    with pytest.raises(ValueError, match=said):
        correct(x, x, x, STANDARD, cu_seqlens=torch.tensor(offsets), impl="cpu")


def test_it_is_listed_with_its_instruction_set():
    usable, note = implementations()["cpu"]
    assert usable
    assert note.endswith(USABLE[0])


def test_no_memory_for_the_statistics_is_an_error_and_nothing_is_written(monkeypatch):
    log_prob, out = torch.zeros(2, 3), (torch.full((2, 3), 7.0), torch.zeros(2, 3, dtype=torch.bool))
    pack = kernel.OF_BATCH.pack
    monkeypatch.setattr(kernel, "OF_BATCH", SimpleNamespace(pack=lambda *x: pack(*x[:13], 1 << 50, *x[14:])))
    with pytest.raises(MemoryError, match="no memory for the statistics of 2 sequences"):
        correct(log_prob, log_prob, log_prob + 1, STANDARD, out=out, impl="cpu")
    assert (out[0] == 7).all()
    assert not out[1].any()
