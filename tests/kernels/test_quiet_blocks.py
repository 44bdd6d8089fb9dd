"""Quiet blocks of the compiled kernel give the reference, on either side of every limit that ends them."""

from __future__ import annotations

import math

import pytest
import torch
from correction_cases import assert_same, configuration, cpu_correction, reference_correction

from rollcorr.core.metric_registry import finalize
from rollcorr.kernels.correction.cpu.library import FOLDER, LEVELS, Library, load

USABLE = [level for level in LEVELS if isinstance(load(FOLDER, level), Library)]
CLOSE = {"rel": 1e-5, "abs": 1e-5}
CONFIGURATIONS = {
    "truncated": configuration(rollout_is="token", rollout_rs="seq_mean_k3", rollout_rs_threshold=0.01),
    "unbounded": configuration(rollout_is="token", rollout_is_threshold=None),
    "clipped": configuration(rollout_is="token", rollout_is_floor=0.5),
    "icepop": configuration(rollout_is="token", rollout_is_threshold="0.5_2.0"),
    "low safety bound": configuration(rollout_is="token", rollout_is_threshold=None, safety_bound=0.5),
    "tokens by k1": configuration(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.7_1.4"),
    "tokens by k2 and k3": configuration(rollout_rs="token_k2,token_k3", rollout_rs_threshold="0.1,0.2"),
    "sequences by k2": configuration(rollout_is="geometric", rollout_rs="seq_sum_k2", rollout_rs_threshold=4.0),
    "veto": configuration(rollout_is="sequence", rollout_token_veto_threshold=0.4),
    "measured": configuration(),
}

pytestmark = pytest.mark.skipif(not USABLE, reason=f"{load(FOLDER, 'portable')}; `make install` does")
levels = pytest.mark.parametrize("level", USABLE)
configurations = pytest.mark.parametrize("config", CONFIGURATIONS.values(), ids=CONFIGURATIONS)


def close_policies(B: int, T: int, spread: float = 0.02) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    rollout = -2 * torch.rand(B, T, generator=generator)
    return rollout + spread * torch.randn(B, T, generator=generator), rollout, torch.ones(B, T, dtype=torch.bool)


@pytest.mark.covering(2)
@levels
@configurations
@pytest.mark.parametrize("scale", [1.0, 1e-3], ids=["ordinary", "near certain"])
def test_one_token_on_either_side_of_a_limit(level, config, scale):
    """Where the sampler is nearly certain, only log-densities above 0 lead to a large log-ratio."""
    d = torch.tensor([0.05, 0.2, 0.34, 0.49, 0.51, 0.69, 0.7, 0.99, 1.01, 2.74, 2.76, 19.9, 20.1])
    train, rollout, mask = close_policies(2 * len(d), 1040)
    train, rollout = train - rollout + scale * rollout, scale * rollout
    train[:, 600] = rollout[:, 600] + torch.cat([d, -d])
    batch = train, rollout, mask
    assert_same(cpu_correction(*batch, config, level=level), reference_correction(*batch, config), **CLOSE)


@pytest.mark.covering(2)
@levels
@configurations
@pytest.mark.parametrize("spread", [0.02, 0.15])
@pytest.mark.parametrize("log_probs", [torch.float32, torch.bfloat16])
def test_one_odd_token_anywhere_in_a_long_block(level, config, spread, log_probs):
    """Before it, after it and in its place blocks are as long as they get."""
    places = [0, 511, 512, 1023, 1024, 1500, 2047, 2048, 2599, 4095, 4096, 6000]
    odd = torch.tensor([-0.2, 0.9, -2.0, 6.0, -30.0, math.inf, math.nan])
    train, rollout, mask = close_policies(len(places) * len(odd), 6100, spread)
    rows = torch.arange(len(mask))
    at = torch.tensor(places).repeat_interleave(len(odd))
    train[rows, at] = rollout[rows, at] + odd.repeat(len(places))
    batch = train.to(log_probs), rollout.to(log_probs), mask
    assert_same(cpu_correction(*batch, config, level=level), reference_correction(*batch, config), **CLOSE)


@pytest.mark.covering(2)
@levels
@configurations
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -200.0, -60.0, -15.1, -14.9, 0.0, 14.9, 15.1, 90.0])
def test_one_log_prob_on_either_side_of_what_is_ordinary(level, config, value):
    train, rollout, mask = close_policies(4, 528)
    train[0, 100] = rollout[1, 100] = value
    train[2, 100] = rollout[2, 100] = value
    batch = train, rollout, mask
    assert_same(cpu_correction(*batch, config, level=level), reference_correction(*batch, config), **CLOSE)


@pytest.mark.covering(2)
@levels
@configurations
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("log_probs", [torch.float32, torch.bfloat16])
def test_runs_of_the_mask_may_end_anywhere(level, config, dtype, log_probs):
    train, rollout, mask = close_policies(12, 1100)
    for row, (start, end) in enumerate([(0, 1), (0, 15), (0, 16), (0, 63), (0, 64), (0, 65), (0, 1099), (1, 1100)]):
        mask[row, :start] = mask[row, end:] = False
    mask[8, 64:128] = mask[8, 500:530] = mask[8, 1000:] = False
    mask[9, ::2] = False
    mask[10, 40:] = mask[11, :1099] = False
    batch = train.to(log_probs), rollout.to(log_probs), mask.to(dtype)
    expected = reference_correction(*batch[:2], mask, config)
    assert_same(cpu_correction(*batch, config, level=level), expected, **CLOSE)


@pytest.mark.covering(2)
@levels
@pytest.mark.parametrize("mean", [0.0, 1e-3, 0.3, -0.9])
@pytest.mark.parametrize("spread", [1e-4, 1e-2])
def test_a_spread_keeps_its_digits_beside_any_mean(level, mean, spread):
    rollout = -1.5 - torch.rand(3, 1024, generator=torch.Generator().manual_seed(1))
    train, mask = rollout + mean, torch.ones(3, 1024, dtype=torch.bool)
    train += spread * torch.randn(3, 1024, generator=torch.Generator().manual_seed(2))
    got, expected = (
        finalize(output.statistics.read(), prefix="")
        for output in (
            cpu_correction(train, rollout, mask, CONFIGURATIONS["unbounded"], level=level),
            reference_correction(train, rollout, mask, CONFIGURATIONS["unbounded"]),
        )
    )
    for name in ("log_ratio_std", "rollout_is_std"):
        assert got[name] == pytest.approx(expected[name], rel=2e-5)


@levels
def test_a_sum_of_log_ratios_is_better_than_each_of_them(level):
    generator = torch.Generator().manual_seed(3)
    rollout, train = (
        -0.3 * torch.rand(1, 1 << 16, generator=generator),
        -1e-3 * torch.rand(1, 1 << 16, generator=generator),
    )
    output = cpu_correction(train, rollout, torch.ones_like(rollout, dtype=torch.bool), configuration(), level=level)
    exact = (train.double() - rollout.double()).sum().item()
    from_rounded = (train - rollout).double().sum().item()
    assert abs(from_rounded - exact) > 1e-6
    moments = output.statistics.read().moments["log_ratio"]
    assert moments.count * moments.mean == pytest.approx(exact, abs=1e-7)


@levels
def test_a_sum_of_tiny_log_ratios_keeps_its_digits_beside_large_log_probs(level):
    generator = torch.Generator().manual_seed(4)
    rollout = -14 - 0.9 * torch.rand(2, 4096, generator=generator)
    train = rollout + 3e-6 * torch.randn(2, 4096, generator=generator).abs()
    output = cpu_correction(train, rollout, torch.ones_like(rollout, dtype=torch.bool), configuration(), level=level)
    exact = (train.double() - rollout.double()).sum().item()
    moments = output.statistics.read().moments["log_ratio"]
    assert moments.count * moments.mean == pytest.approx(exact, rel=1e-6, abs=1e-8)


@levels
@pytest.mark.parametrize("reach", [0.99, 2.7, 19.9])
def test_exponentials_of_every_block_agree_with_float64(level, reach):
    """Of a quiet block, a regular one and any other; the log-ratios are exact in float32."""
    order = torch.randperm(1024, generator=torch.Generator().manual_seed(6))
    d = torch.linspace(-reach, reach, 1024)[order].mul(512).round().div(512)
    rollout = -torch.arange(1024).remainder(449).div(32.0)
    train, mask = (rollout + d)[None], torch.ones(1, 1024, dtype=torch.bool)
    output = cpu_correction(train, rollout[None], mask, CONFIGURATIONS["unbounded"], level=level)
    exact, metrics = d.double(), finalize(output.statistics.read(), prefix="")
    torch.testing.assert_close(output.weights[0].double(), exact.exp(), rtol=8e-7, atol=0.0)
    difference = (train[0].double().exp() - rollout.double().exp()).abs()
    assert metrics["prob_diff_abs_mean"] == pytest.approx(difference.mean().item(), rel=4e-7)
    assert metrics["k3_kl"] == pytest.approx((exact.expm1() - exact).mean().item(), rel=4e-7)


@levels
@configurations
def test_what_comes_before_a_sequence_changes_no_bit_of_it(level, config):
    train, rollout, mask = close_policies(6, 2080)
    generator = torch.Generator().manual_seed(5)
    for row, spread in ((1, 0.3), (3, 2.0), (4, 30.0)):
        train[row] += spread * torch.randn(2080, generator=generator)
    train[5, 512:1024] *= 3.0
    whole = cpu_correction(train, rollout, mask, config, level=level)
    for row in range(6):
        alone = cpu_correction(train[row, None], rollout[row, None], mask[row, None], config, level=level)
        assert torch.equal(alone.loss_mask[0], whole.loss_mask[row])
        assert alone.weights is None or torch.equal(alone.weights[0], whole.weights[row])
    expected = reference_correction(train, rollout, mask, config)
    assert_same(whole, expected, **CLOSE)
