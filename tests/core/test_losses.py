"""Losses by hand, gradients against their formulas, then the properties that every loss has, then errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcorr.core.divergence import k1, k2, k3
from rollcorr.core.losses import ppo_clip_loss, reference_kl, reinforce_loss
from rollcorr.core.mergeable_statistics import merge_statistics

NAN, INF = math.nan, math.inf
CLIP = {"clip_low": 0.2, "clip_high": 0.28, "clip_c": 3.0}
GARBAGE = [NAN, INF, -INF, 1e30, 200.0, -200.0]
shapes = given(batch=st.integers(1, 6), width=st.integers(1, 6), seed=st.integers(0, 2**16))


def ppo(log_prob, other, advantages, mask, weights=None, **kwargs):
    return ppo_clip_loss(log_prob, other, advantages, mask, weights=weights, **CLIP, **kwargs)


def reinforce(log_prob, other, advantages, mask, weights=None, **kwargs):
    return reinforce_loss(log_prob, advantages, mask, weights=weights, behavior_log_prob=other, **kwargs)


every_loss = pytest.mark.parametrize("loss_of", [ppo, reinforce])


def random_inputs(batch, width, seed, dtype=torch.float64):
    """log_prob, the other policy, advantages, mask with holes and empty rows, weights."""
    generator = torch.Generator().manual_seed(seed)
    log_prob, noise, advantages = torch.randn(3, batch, width, generator=generator, dtype=torch.float64).to(dtype)
    mask = torch.rand(batch, width, generator=generator) < 0.6
    weights = torch.rand(batch, width, generator=generator, dtype=torch.float64).to(dtype) * 2
    return log_prob - 2, log_prob - 2 + 0.4 * noise, advantages, mask, weights


def means(statistics):
    return {name: moments.mean for name, moments in statistics.read().moments.items()}


def test_ppo_clip_by_hand():
    """One row per case: inside the band, high clip, high but A < 0, low clip, low but A > 0, dual clip."""
    ratio = torch.tensor([1.1, 1.5, 1.5, 0.5, 0.5, 4.0])
    advantages = torch.tensor([2.0, 2.0, -2.0, -2.0, 2.0, -2.0])
    expected = torch.tensor([-2.2, -2.56, 3.0, 1.6, -1.0, 6.0])
    log_prob = ratio.log()[:, None].requires_grad_()
    loss, statistics = ppo(log_prob, torch.zeros(6, 1), advantages[:, None], torch.ones(6, 1))
    torch.testing.assert_close(loss[:, 0], expected)
    loss.sum().backward()
    slope = torch.tensor([-2.2, 0.0, 3.0, 0.0, -1.0, 0.0])  # −A r where no clip binds
    torch.testing.assert_close(log_prob.grad[:, 0], slope)
    assert means(statistics) == pytest.approx(
        {
            "policy_kl": -ratio.log().mean().item(),
            "clip_fraction_high": 1 / 6,
            "clip_fraction_low": 1 / 6,
            "clip_fraction_dual": 1 / 6,
        }
    )


def test_the_dual_clip_can_be_off_and_then_the_loss_grows_with_the_ratio():
    log_prob = torch.tensor([[math.log(4.0)]], requires_grad=True)
    loss, _ = ppo_clip_loss(log_prob, torch.zeros(1, 1), -torch.ones(1, 1), torch.ones(1, 1), clip_low=0.2, clip_high=0)
    loss.sum().backward()
    torch.testing.assert_close((loss, log_prob.grad), (torch.tensor([[4.0]]), torch.tensor([[4.0]])))


def test_weights_scale_the_clipped_loss_and_not_the_clip():
    ratio, weights = torch.tensor([[1.1, 1.5]]), torch.tensor([[0.5, 2.0]])
    loss, _ = ppo(ratio.log(), torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2), weights)
    torch.testing.assert_close(loss, torch.tensor([[0.5 * -1.1, 2.0 * -1.28]]))


def test_reinforce_by_hand():
    log_prob = torch.tensor([[-1.0, -2.0, NAN]], requires_grad=True)
    mask, weights = torch.tensor([[1, 1, 0]]), torch.tensor([[0.5, 2.0, NAN]])
    loss, statistics = reinforce(log_prob, log_prob.detach() + 0.25, torch.tensor([[3.0, -1.0, NAN]]), mask, weights)
    torch.testing.assert_close(loss, torch.tensor([[1.5, -4.0, 0.0]]))
    loss.sum().backward()
    torch.testing.assert_close(log_prob.grad, torch.tensor([[-1.5, 2.0, 0.0]]))
    assert means(statistics) == pytest.approx({"policy_kl": 0.25})


@every_loss
def test_weights_carry_no_gradient(loss_of):
    """grad = sg(w) · ∇log π (times r for PPO), also when w is computed from the log-prob that is trained."""
    log_prob = torch.tensor([[-1.0, -0.9]], dtype=torch.float64, requires_grad=True)
    rollout = torch.tensor([[-1.1, -0.8]], dtype=torch.float64)
    weights = (log_prob - rollout).exp()
    advantages = torch.tensor([[2.0, -3.0]], dtype=torch.float64)
    loss, _ = loss_of(log_prob, rollout, advantages, torch.ones(1, 2), weights)
    (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
    ratio = weights.detach() if loss_of is ppo else 1.0
    torch.testing.assert_close(gradient, -weights.detach() * ratio * advantages)


@every_loss
def test_the_other_policies_get_no_gradient(loss_of):
    tensors = [torch.zeros(1, 2, requires_grad=True) for _ in range(4)]
    log_prob, other, advantages, weights = tensors
    loss, _ = loss_of(log_prob, other, advantages + 1, torch.ones(1, 2), weights + 1)
    loss.sum().backward()
    assert log_prob.grad is not None
    assert other.grad is advantages.grad is weights.grad is None


@every_loss
@pytest.mark.parametrize("garbage", GARBAGE)
def test_masked_values_are_never_read(loss_of, garbage):
    log_prob, other, advantages, mask, weights = random_inputs(4, 5, seed=1)
    results = []
    for dirt in (0.0, garbage):
        dirty = [x.masked_fill(~mask, dirt) for x in (log_prob, other, advantages, weights)]
        leaf = dirty[0].requires_grad_()
        loss, statistics = loss_of(leaf, dirty[1], dirty[2], mask, dirty[3])
        results.append((loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0], statistics.rows["moments"]))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert all(x.isfinite().all() for x in results[1])


@every_loss
def test_a_batch_with_everything_rejected_has_zero_loss_and_zero_gradient(loss_of):
    log_prob = torch.full((2, 3), NAN, requires_grad=True)
    loss, statistics = loss_of(log_prob, log_prob.detach(), torch.ones(2), torch.zeros(2, 3))
    loss.sum().backward()
    assert (loss == 0).all()
    assert (log_prob.grad == 0).all()
    assert set(means(statistics).values()) == {0.0}


@every_loss
def test_a_token_of_weight_zero_adds_nothing_even_with_infinite_log_probs(loss_of):
    log_prob = torch.tensor([[-INF, -1.0]], requires_grad=True)
    old = torch.tensor([[-INF if loss_of is ppo else -1.0, -1.0]])
    loss, _ = loss_of(log_prob, old, torch.ones(1, 2), torch.ones(1, 2), torch.tensor([[0.0, 1.0]]))
    loss.sum().backward()
    assert loss[0, 0] == 0 == log_prob.grad[0, 0]
    torch.testing.assert_close(log_prob.grad[0, 1], torch.tensor(-1.0))


@every_loss
def test_probability_zero_under_the_current_policy_is_finite_without_weights_too(loss_of):
    log_prob = torch.tensor([[-INF, -1.0]], requires_grad=True)
    loss, statistics = loss_of(log_prob, torch.full((1, 2), -1.5), -torch.ones(1, 2), torch.ones(1, 2))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert log_prob.grad.isfinite().all()
    assert means(statistics)["policy_kl"] == pytest.approx(-0.5)  # the infinite one stays out


def test_probability_zero_under_the_old_policy_adds_nothing_without_weights_too():
    """r would be ∞, or ∞ − ∞ when both are 0."""
    log_prob = torch.tensor([[-1.0, -INF, -1.0]], requires_grad=True)
    old = torch.tensor([[-INF, -INF, -1.0]])
    loss, statistics = ppo(log_prob, old, torch.ones(1, 3), torch.ones(1, 3))
    loss.sum().backward()
    torch.testing.assert_close(loss, torch.tensor([[0.0, 0.0, -1.0]]))
    torch.testing.assert_close(log_prob.grad, torch.tensor([[0.0, 0.0, -1.0]]))
    assert means(statistics)["clip_fraction_high"] == 0


@pytest.mark.covering(2)
@pytest.mark.parametrize("log_ratio", [-1e4, -200.0, 200.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("clip_c", [None, 3.0])
def test_extreme_ratios_on_valid_tokens_stay_finite(log_ratio, advantage, clip_c):
    log_prob = torch.full((1, 1), log_ratio, requires_grad=True)
    zero = torch.zeros(1, 1)
    clip = {"clip_low": 0.2, "clip_high": 0.2, "clip_c": clip_c}
    loss, statistics = ppo_clip_loss(log_prob, zero, zero + advantage, zero + 1, **clip)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert log_prob.grad.isfinite().all()
    assert means(statistics)["policy_kl"] == -log_ratio  # the metric is not clamped


@pytest.mark.parametrize("log_ratio", [10.5, 19.5, 20.5])
def test_only_ratios_above_e20_lose_their_gradient(log_ratio):
    log_prob = torch.full((1, 1), log_ratio, dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    loss, _ = ppo_clip_loss(log_prob, zero, zero - 1, zero + 1, clip_low=0.2, clip_high=0.2)
    loss.sum().backward()
    assert loss.item() == pytest.approx(math.exp(min(log_ratio, 20.0)))
    assert log_prob.grad.item() == pytest.approx(math.exp(log_ratio) if log_ratio < 20 else 0.0)


def test_nan_on_a_kept_token_is_not_hidden():
    log_prob = torch.tensor([[NAN, -1.0]])
    loss, _ = ppo(log_prob, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2))
    assert loss[0, 0].isnan()


@every_loss
@settings(deadline=None, max_examples=25)
@shapes
def test_packed_equals_padded(loss_of, batch, width, seed):
    log_prob, other, advantages, mask, weights = random_inputs(batch, width, seed)
    padded, statistics = loss_of(log_prob, other, advantages, mask, weights)
    length = torch.arange(batch) % (width + 1)
    inside = torch.arange(width) < length[:, None]
    flat = [x[inside] for x in (log_prob, other, advantages, mask, weights)]
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), length.cumsum(0)])
    packed, _ = loss_of(*flat[:4], flat[4], cu_seqlens=cu_seqlens)
    torch.testing.assert_close(packed, padded[inside], rtol=0, atol=0)
    assert statistics.rows["moments"].dtype == torch.float64


@every_loss
@settings(deadline=None, max_examples=25)
@shapes
def test_extra_padding_and_row_order_change_nothing(loss_of, batch, width, seed):
    log_prob, other, advantages, mask, weights = random_inputs(batch, width, seed)
    expected, statistics = loss_of(log_prob, other, advantages, mask, weights)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed))

    def widen(x):
        return torch.nn.functional.pad(x, (0, 3), value=0 if x.dtype == torch.bool else NAN)[order]

    changed, same = loss_of(*(widen(x) for x in (log_prob, other, advantages, mask)), widen(weights))
    torch.testing.assert_close(changed[:, :width], expected[order], rtol=0, atol=0)
    torch.testing.assert_close(same.rows["moments"], statistics.rows["moments"], rtol=1e-12, atol=1e-12)


@every_loss
@pytest.mark.parametrize("parts", range(1, 9))
def test_statistics_of_micro_batches_merge_into_those_of_the_whole(loss_of, parts):
    inputs = random_inputs(8, 5, seed=3)
    _, whole = loss_of(*inputs)
    split = zip(*(x.tensor_split(parts) for x in inputs), strict=True)
    merged = merge_statistics(loss_of(*part)[1] for part in split)
    torch.testing.assert_close(merged.rows["moments"], whole.rows["moments"], rtol=1e-12, atol=1e-12)


@every_loss
def test_an_advantage_per_sequence_equals_the_same_one_on_each_token(loss_of):
    log_prob, other, _, mask, weights = random_inputs(4, 5, seed=5)
    per_sequence = torch.tensor([1.0, -2.0, 0.0, 3.0], dtype=torch.float64)
    expected, _ = loss_of(log_prob, other, per_sequence[:, None].expand(4, 5), mask, weights)
    torch.testing.assert_close(loss_of(log_prob, other, per_sequence, mask, weights)[0], expected)


@every_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_arithmetic_is_at_least_float32(loss_of, dtype):
    """Both log-probs are exact in bfloat16, but exp of their difference would have three digits there."""
    log_prob, other = torch.tensor([[-10.0]], dtype=dtype), torch.tensor([[-9.9375]], dtype=dtype)
    loss, statistics = loss_of(log_prob, other, torch.ones(1, 1, dtype=dtype), torch.ones(1, 1), torch.ones(1, 1))
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert means(statistics)["policy_kl"] == 0.0625
    assert loss.item() == pytest.approx(-math.exp(-0.0625) if loss_of is ppo else 10.0, rel=1e-6)


@every_loss
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16])
def test_the_dtype_of_the_mask_does_not_matter(loss_of, dtype):
    log_prob, other, advantages, mask, weights = random_inputs(4, 5, seed=7)
    expected, _ = loss_of(log_prob, other, advantages, mask, weights)
    actual, _ = loss_of(log_prob, other, advantages, mask.to(dtype), weights)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@every_loss
def test_no_loss_reads_tensor_values(loss_of):
    with torch.device("meta"):
        packed, cu_seqlens = torch.zeros(6), torch.arange(3)
        padded = packed.view(2, 3)
        assert loss_of(packed, packed, packed, packed, packed, cu_seqlens=cu_seqlens)[0].shape == (6,)
        assert loss_of(padded, padded, torch.zeros(2), padded, padded)[0].shape == (2, 3)
        assert reference_kl(padded, padded, padded)[0].shape == (2, 3)


@every_loss
@pytest.mark.parametrize("shape", [(2, 1), (1, 3), (3,), (2, 4), ()])
def test_advantages_never_broadcast(loss_of, shape):
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"advantages .* do not fit log_prob \(2, 3\)"):
        loss_of(x, x, torch.zeros(shape), x)


@every_loss
def test_packed_advantages_are_per_token_and_the_error_says_how(loss_of):
    x, cu_seqlens = torch.zeros(6), torch.tensor([0, 2, 6])
    with pytest.raises(ValueError, match=r"advantages \(2,\) do not fit log_prob \(6,\).*layout\.expand"):
        loss_of(x, x, torch.zeros(2), x, cu_seqlens=cu_seqlens)


@every_loss
def test_other_shapes_must_match_too(loss_of):
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"\(2, 3\) and weights \(2, 1\) differ"):
        loss_of(x, x, x, x, torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"\(2, 3\) and loss_mask \(2, 1\) differ"):
        loss_of(x, x, x, torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"\(2, 3\) and (old|behavior)_log_prob \(2, 1\) differ"):
        loss_of(x, x[:, :1], x, x)


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        ({"clip_low": 1.1}, "clip_low must be in"),
        ({"clip_low": -0.1}, "clip_low must be in"),
        ({"clip_high": NAN}, "clip_high must be finite"),
        ({"clip_high": -0.1}, "clip_high must be finite"),
        ({"clip_c": 1.0}, "clip_c must be finite and > 1"),
    ],
)
def test_clip_constants_are_checked(clip, message):
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=message):
        ppo_clip_loss(x, x, x, x, **{**CLIP, **clip})


def test_reference_kl_by_hand():
    log_prob, ref = torch.tensor([[-1.0, -2.0, NAN, -1.0]]), torch.tensor([[-1.5, -1.0, 0.0, -INF]])
    mask = torch.tensor([[1, 1, 0, 1]])
    expected = {
        k1: [0.5, -1.0, 0.0, 0.0],
        k2: [0.125, 0.5, 0.0, 0.0],
        k3: [math.exp(-0.5) - 1 + 0.5, math.e - 2, 0.0, 0.0],
    }
    for estimate, values in expected.items():
        kl, measured = reference_kl(log_prob, ref, mask, estimate=estimate)
        torch.testing.assert_close(kl, torch.tensor([values]))
        assert measured.tolist() == [[True, True, False, False]]


def test_reference_kl_is_the_exact_divergence_in_expectation():
    """Σ_y π(y) k(y) over three outcomes: k1 and k3 are unbiased for KL(π‖π_ref), in this direction."""
    policy, ref = torch.tensor([[0.5, 0.3, 0.2]]).double(), torch.tensor([[0.2, 0.2, 0.6]]).double()
    exact = (policy * (policy / ref).log()).sum().item()
    for estimate in (k1, k3):
        kl, _ = reference_kl(policy.log(), ref.log(), torch.ones(1, 3), estimate=estimate)
        assert (policy * kl).sum().item() == pytest.approx(exact)


def test_k3_is_never_negative_and_its_gradient_is_never_lost():
    log_prob = torch.tensor([-1e3, -30.0, -1.0, -1e-4, 0.0, 1e-4, 1.0, 30.0, 1e3], requires_grad=True)
    kl, _ = reference_kl(log_prob, torch.zeros(9), torch.ones(9))
    kl.sum().backward()
    assert (kl >= 0).all()
    assert log_prob.grad.isfinite().all()
    inside = log_prob.detach().abs() <= 20
    torch.testing.assert_close(log_prob.grad[inside], -torch.expm1(-log_prob.detach()[inside]))


def test_reference_kl_rejects_other_shapes_and_gives_the_reference_no_gradient():
    x = torch.zeros(2, 3, requires_grad=True)
    with pytest.raises(ValueError, match=r"\(2, 3\) and ref_log_prob \(2, 1\) differ"):
        reference_kl(x, torch.zeros(2, 1), x)
    ref = torch.ones(2, 3, requires_grad=True)
    reference_kl(x, ref, torch.ones(2, 3))[0].sum().backward()
    assert ref.grad is None
