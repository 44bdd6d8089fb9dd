"""Numbers that are easy to lose, in every implementation: tiny weights, policies far apart, a clamp inside a band.

Expected values are computed here in float64, from the formulas; no implementation is the reference of the rest.
"""

from __future__ import annotations

import math

import pytest
import torch
from context_slices import Slice, reduced
from correction_cases import configuration, torch_correction
from implementations import IMPLEMENTATIONS
from torch import Tensor

from rollcorr.core.layout import pack
from rollcorr.core.metric_registry import finalize
from rollcorr.kernels.correction.call import CorrectionOutput
from rollcorr.kernels.correction.dispatch import correction_kernel

# Triton's interpreter computes with numpy, which reports infinities that a selection afterwards drops.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

every_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
every_level = pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
END = -3.4e38  # near the end of float32


def metrics_of(output: CorrectionOutput) -> dict[str, float]:
    values = finalize(output.statistics.read())
    return {name.removeprefix("rollout_corr/"): value for name, value in values.items()}


def corrected(log_ratio: Tensor, impl: str, *, mask: Tensor | None = None, packed: bool = False, **fields):
    """The correction of float32 log-ratios, exact because μ = 1; and its metrics."""
    mask = torch.ones(log_ratio.shape, dtype=torch.bool) if mask is None else mask
    tensors, cu_seqlens = (log_ratio, torch.zeros_like(log_ratio), mask), None
    if packed:
        (train, cu_seqlens), (rollout, _), (mask, _) = (pack(x, torch.ones_like(mask)) for x in tensors)
        tensors = train, rollout, mask
    output = correction_kernel(*tensors, configuration(**fields), cu_seqlens=cu_seqlens, impl=impl)
    return output, metrics_of(output)


def moments(values: Tensor) -> tuple[float, float, float]:
    """Mean, population standard deviation and effective sample size, in float64."""
    mean, square = values.mean().item(), values.square().mean().item()
    return mean, values.std(correction=0).item(), mean * mean / square


@pytest.mark.covering(2)
@every_implementation
@every_level
@pytest.mark.parametrize("threshold", [None, 2.0, 1e10, "1e-10_2.0"])
@pytest.mark.parametrize("packed", [False, True])
def test_weights_that_are_all_tiny_are_a_full_sample(impl, level, threshold, packed):
    d = torch.full((3, 600), -20.0)
    if level == "sequence":
        d[:, 1:] = 0.0
    weighing = {"rollout_is": level, "rollout_is_threshold": threshold, "rollout_is_batch_normalize": True}
    _, metrics = corrected(d, impl, packed=packed, **weighing)
    tiny = math.exp(-20) if level != "token" else moments(d.double().exp())[0]
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx(1.0, rel=1e-9)
    assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(tiny, rel=1e-6)
    for name in ("rollout_is", "rollout_is_raw", "rollout_is_seq"):
        assert metrics[f"{name}_mean"] == pytest.approx(tiny, rel=1e-6)
        assert metrics[f"{name}_std"] <= 1e-6 * tiny


@every_implementation
@pytest.mark.parametrize("threshold", [None, 2.0])
def test_tiny_weights_keep_their_spread(impl, threshold):
    d = -19 + 0.7 * torch.randn(4, 700, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(d.shape, generator=torch.Generator().manual_seed(1)) < 0.8
    _, metrics = corrected(d, impl, mask=mask, rollout_is="token", rollout_is_threshold=threshold)
    w = d.double().clamp(-20, 20).exp()
    mean, std, size = moments(w[mask])
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx(size, rel=2e-5)
    for name in ("rollout_is", "rollout_is_raw"):
        assert metrics[f"{name}_mean"] == pytest.approx(mean, rel=2e-5)
        assert metrics[f"{name}_std"] == pytest.approx(std, rel=2e-5)
    of_sequences = torch.stack([row[valid].mean() for row, valid in zip(w, mask, strict=True)])
    assert metrics["rollout_is_seq_mean"] == pytest.approx(of_sequences.mean().item(), rel=2e-5)
    assert metrics["rollout_is_seq_std"] == pytest.approx(moments(of_sequences)[1], rel=2e-4)


@every_implementation
@pytest.mark.parametrize("scale", [1e-3, 1e-7])
def test_weights_near_one_keep_their_spread(impl, scale):
    d = scale * torch.randn(4, 700, generator=torch.Generator().manual_seed(0))
    _, metrics = corrected(d, impl, rollout_is="token")
    std = d.double().expm1().std(correction=0).item()
    assert metrics["rollout_is_std"] == pytest.approx(std, rel=2e-5)
    assert metrics["rollout_is_raw_std"] == pytest.approx(std, rel=2e-5)


@every_implementation
def test_blocks_of_tiny_weights_beside_blocks_of_one(impl):
    """Full blocks of every implementation are all e⁻²⁰, and full blocks all 1."""
    d = torch.zeros(64, 2048)
    d[:48] = -20.0
    _, metrics = corrected(d, impl, rollout_is="token", rollout_is_threshold=None)
    mean, std, size = moments(d.double().exp())
    assert metrics["rollout_is_mean"] == pytest.approx(mean, rel=2e-5)
    assert metrics["rollout_is_std"] == pytest.approx(std, rel=2e-5)
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx(size, rel=2e-5)
    assert metrics["rollout_is_seq_min"] == pytest.approx(math.exp(-20), rel=2e-5)


@every_implementation
@pytest.mark.parametrize("level", ["token", "geometric"])
def test_a_wide_safety_bound_leaves_tiny_weights_exact(impl, level):
    d = torch.tensor([[-38.0, -30.0, -25.5], [-35.25, -39.5, -41.0]])
    output, metrics = corrected(d, impl, rollout_is=level, rollout_is_threshold=None, safety_bound=40.0)
    weights = d.double().clamp(-40, 40).exp()
    if level == "geometric":
        weights = d.double().mean(1, keepdim=True).expand_as(d).exp()
    torch.testing.assert_close(output.weights.double(), weights, rtol=2.5e-7, atol=0.0)
    assert metrics["rollout_is_std"] == pytest.approx(moments(weights.flatten())[1], rel=2e-5)


@every_implementation
def test_weights_are_right_to_two_units_in_the_last_place_far_from_one(impl):
    """Float32 log-ratios of −20 are rounded to 1e-6, and e^d by as much of itself."""
    generator = torch.Generator().manual_seed(0)
    rollout = -10 * torch.rand(8, 600, generator=generator)
    train = rollout - 18 * torch.rand(8, 600, generator=generator)
    d = train.double() - rollout.double()
    mask = torch.ones_like(rollout, dtype=torch.bool)
    config = configuration(rollout_is="token", rollout_is_threshold=None)
    output = correction_kernel(train, rollout, mask, config, impl=impl)
    torch.testing.assert_close(output.weights.double(), d.exp(), rtol=2.4e-7, atol=0.0)


@every_implementation
def test_a_common_log_ratio_cancels_nothing_of_its_spread(impl):
    d = -19 + 1e-5 * torch.randn(3, 700, generator=torch.Generator().manual_seed(0))
    _, metrics = corrected(d, impl, rollout_rs="token_k2", rollout_rs_threshold=1e3)
    assert metrics["log_ratio_std"] == pytest.approx(moments(d.double())[1], rel=2e-5)
    if impl in ("reference", "torch"):  # the rest keep k2 in float32, which has no digits for this spread
        half_squares = d.double().square() / 2
        assert metrics["rollout_rs_token_k2_std"] == pytest.approx(moments(half_squares)[1], rel=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_no_dtype_falls_back_to_noise(dtype):
    d = (-19 + 0.5 * torch.randn(2, 300, generator=torch.Generator().manual_seed(0))).to(dtype)
    output = correction_kernel(d, torch.zeros_like(d), torch.ones(d.shape) > 0, configuration(rollout_is="token"))
    _, std, size = moments(d.double().clamp(-20, 20).exp())
    assert metrics_of(output)["rollout_is_eff_sample_size"] == pytest.approx(size, rel=1e-6)
    assert metrics_of(output)["rollout_is_std"] == pytest.approx(std, rel=1e-6)


def test_slices_threads_and_small_blocks_leave_the_spread_of_tiny_weights(threads):
    """Half of the tokens are e⁻²⁰ and half are 1; every slice, thread and block has mostly one kind."""
    d = -20 + 0.1 * torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    d[3:] = 0.0
    batch = d, torch.zeros_like(d), torch.ones_like(d, dtype=torch.bool)
    config = configuration(rollout_is="token", rollout_is_threshold=None, safety_bound=30.0)
    mean, std, size = moments(d.double().exp())

    threads(3)
    outputs = [torch_correction(*batch, config, block_tokens=40)]
    threads(1)
    outputs += reduced([Slice(*(x[:, at] for x in batch), None) for at in (slice(0, 7), slice(7, 40))], config)
    cu_seqlens = torch.arange(7) * 40
    flat = tuple(x.flatten() for x in batch)
    outputs.append(torch_correction(*flat, config, cu_seqlens=cu_seqlens, block_tokens=23))

    for output in outputs:
        metrics = metrics_of(output)
        assert metrics["rollout_is_mean"] == pytest.approx(mean, rel=1e-12)
        assert metrics["rollout_is_std"] == pytest.approx(std, rel=1e-12)
        assert metrics["rollout_is_eff_sample_size"] == pytest.approx(size, rel=1e-12)
        assert metrics["rollout_is_seq_min"] == pytest.approx(d[:3].double().exp().mean(1).min().item(), rel=1e-6)


@every_implementation
@pytest.mark.parametrize("end", [END, -5e7])
@pytest.mark.parametrize("side", ["train", "rollout"])
def test_a_huge_log_prob_leaves_the_other_policys_perplexity_alone(impl, end, side):
    generator = torch.Generator().manual_seed(0)
    train, rollout = -torch.rand(2, 3, 600, generator=generator)
    {"train": train, "rollout": rollout}[side][1, 5] = end
    mask = torch.ones_like(train, dtype=torch.bool)
    metrics = metrics_of(correction_kernel(train, rollout, mask, configuration(), impl=impl))
    name, other = ("rollout", rollout) if side == "train" else ("training", train)
    log_ppl = -other.double().mean(1)
    assert metrics[f"{name}_log_ppl"] == pytest.approx(log_ppl.mean().item(), rel=2e-6)
    assert metrics[f"{name}_ppl"] == pytest.approx(log_ppl.exp().mean().item(), rel=2e-6)


@every_implementation
def test_two_huge_log_probs_do_not_overflow_their_mean(impl):
    train, rollout = torch.full((2, 1, 600), -1.0)
    train[0, :3] = END
    metrics = metrics_of(correction_kernel(train, rollout, train < 0, configuration(), impl=impl))
    assert metrics["training_log_ppl"] == pytest.approx(-3 * END / 600, rel=1e-6)
    assert metrics["rollout_log_ppl"] == pytest.approx(1.0, rel=1e-6)


@every_implementation
@every_level
def test_the_out_of_band_ratio_counts_tokens_at_every_level(impl, level):
    """Sequence 0 has 6 tokens and leaves the band, sequence 1 has 2 and stays, 2 has one of probability 0, 3 none."""
    d = torch.zeros(4, 6)
    d[0] = 3.0
    d[2, 0] = -math.inf
    lengths = torch.tensor([[6], [2], [4], [0]])
    mask = torch.arange(6) < lengths
    output, metrics = corrected(d, impl, mask=mask, rollout_is=level, rollout_is_threshold="0.5_2.0")
    outside = 6 + (1 if level == "token" else 4)
    assert metrics["rollout_is_oob_ratio"] == pytest.approx(outside / 12)
    assert int((output.weights[mask] == 0).sum()) == outside


@every_implementation
@every_level
def test_icepop_judges_the_clamped_log_weight(impl, level):
    """|ℓ| ≤ 0.3 never leaves [1/2, 2]; the shares beyond the band are of ℓ before the clamp."""
    d = torch.tensor([[3.0], [-3.0], [0.1], [-math.inf]])
    output, metrics = corrected(d, impl, rollout_is=level, rollout_is_threshold="0.5_2.0", safety_bound=0.3)
    expected = torch.tensor([[0.3], [-0.3], [0.1], [-math.inf]]).exp()
    torch.testing.assert_close(output.weights, expected, rtol=1e-6, atol=0.0)
    assert metrics["rollout_is_oob_ratio"] == 0.25  # the token of probability 0
    assert metrics["rollout_is_ratio_fraction_high"] == 0.25
    assert metrics["rollout_is_ratio_fraction_low"] == 0.5
    assert metrics["saturated_high_fraction"] == 0.25


@every_implementation
@every_level
@pytest.mark.parametrize(("d", "band"), [(-3.0, "0.01_0.1"), (3.0, "10_100")])
def test_a_band_that_no_clamped_weight_reaches_keeps_none(impl, level, d, band):
    """The log weight lies in the band, and the clamp moves it out."""
    output, metrics = corrected(
        torch.full((2, 1), d), impl, rollout_is=level, rollout_is_threshold=band, safety_bound=1.0
    )
    assert (output.weights == 0).all()
    assert metrics["rollout_is_oob_ratio"] == 1.0
    assert metrics["rollout_is_ratio_fraction_high"] == metrics["rollout_is_ratio_fraction_low"] == 0.0
