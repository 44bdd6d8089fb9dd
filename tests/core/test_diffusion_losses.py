"""Losses of denoising steps: by hand, with arbitrary values in rejected steps, and under mismatch."""

from __future__ import annotations

import math

import pytest
import torch

from rollcorr.core.diffusion import gaussian_log_prob
from rollcorr.core.diffusion_losses import flow_dppo_loss, flow_grpo_loss, grpo_guard_loss

NAN, INF = math.nan, math.inf


def rows(statistics) -> dict[str, float]:
    return {name: moments.mean for name, moments in statistics.read().moments.items()}


def steps(rows: int = 4, window: int = 2, dimensions: int = 6, seed: int = 0):
    """log_prob, old_log_prob, mean, old_mean, std, dt, advantages, keep: of two policies and samples of the old one."""
    generator = torch.Generator().manual_seed(seed)
    kw = {"dtype": torch.float64, "generator": generator}
    old_mean = torch.randn(rows, window, dimensions, **kw)
    mean = old_mean + 0.2 * torch.randn(rows, window, dimensions, **kw)
    std = 0.3 + torch.rand(rows, window, **kw)
    x = old_mean + std[..., None] * torch.randn(rows, window, dimensions, **kw)

    def log_prob(m):
        return gaussian_log_prob(x.flatten(0, 1), m.flatten(0, 1), std.flatten()).view(rows, window)

    dt = -0.05 - torch.rand(rows, window, **kw) / 10
    advantages = torch.randn(rows, **kw)
    return log_prob, mean, old_mean, std, dt, advantages, torch.ones(rows, window, dtype=torch.bool)


def losses(seed: int = 0):
    """Each loss as a function of (mean, spoil): `spoil` overwrites step (1, 0) of every input and masks it."""
    log_prob, mean, old_mean, std, dt, advantages, keep = steps(seed=seed)

    def inputs(m, garbage):
        values = [log_prob(m), log_prob(old_mean), m, old_mean.clone(), std.clone(), dt.clone()]
        mask = keep.clone()
        if garbage is not None:
            mask[1, 0] = False
            spoil = torch.zeros_like(keep)
            spoil[1, 0] = True
            values = [torch.where(spoil[..., None] if v.dim() == 3 else spoil, garbage, v) for v in values]
        return values, mask

    def guard(m, garbage=None):
        (lp, old, new, was, s, t), mask = inputs(m, garbage)
        return grpo_guard_loss(lp, old, new, was, s, t, advantages, mask, clip_ratio=0.2), mask

    def grpo(m, garbage=None):
        (lp, old, *_), mask = inputs(m, garbage)
        return flow_grpo_loss(lp, old, advantages, mask, clip_ratio=0.2), mask

    def dppo(m, garbage=None):
        (lp, old, new, was, s, _), mask = inputs(m, garbage)
        return flow_dppo_loss(lp, old, new, was, s, advantages, mask, kl_threshold=0.02), mask

    return mean, {"flow_grpo": grpo, "grpo_guard": guard, "flow_dppo": dppo}


def test_the_clip_by_hand():
    """ε = 0.5: ratios 2 and 1/4, each at A = 2 and A = −1."""
    ratio = torch.tensor([[2.0, 0.25], [2.0, 0.25]], dtype=torch.float64)
    log_prob = ratio.log().requires_grad_()
    loss, statistics = flow_grpo_loss(
        log_prob, torch.zeros(2, 2), torch.tensor([2.0, -1.0]), torch.ones(2, 2), clip_ratio=0.5
    )
    assert loss.tolist() == [[-3.0, -0.5], [2.0, 0.5]]
    loss.sum().backward()
    torch.testing.assert_close(log_prob.grad, torch.tensor([[0.0, -0.5], [2.0, 0.0]], dtype=torch.float64))
    seen = rows(statistics)
    assert seen["clip_fraction_high"] == seen["clip_fraction_low"] == 0.5
    assert (seen["zeroed_fraction_positive"], seen["zeroed_fraction_negative"]) == (0.5, 0.5)
    assert seen["policy_kl"] == pytest.approx(math.log(2) / 2)
    assert seen["ratio"] == pytest.approx(1.125)


@pytest.mark.parametrize("log_ratio", [10.5, 19.5, 20.5])
def test_only_ratios_above_e20_lose_their_gradient(log_ratio):
    log_prob = torch.full((1, 1), log_ratio, dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    loss, _ = flow_grpo_loss(log_prob, zero, torch.tensor([-1.0]), zero + 1, clip_ratio=0.5)
    loss.sum().backward()
    assert loss.item() == pytest.approx(math.exp(min(log_ratio, 20.0)))
    assert log_prob.grad.item() == pytest.approx(math.exp(log_ratio) if log_ratio < 20 else 0.0)


def test_the_guard_by_hand():
    """m = 1, m_old = 0, s = 1/2, dt = −1/4: b = 2; log r = s (d + b) = (−1.8 + 2) / 2 = 0.1; the loss is ×4."""
    shape = {"dtype": torch.float64}
    loss, statistics = grpo_guard_loss(
        torch.tensor([[-1.8]], **shape),
        torch.zeros(1, 1, **shape),
        torch.ones(1, 1, 3, **shape),
        torch.zeros(1, 1, 3, **shape),
        torch.full((1, 1), 0.5, **shape),
        torch.full((1, 1), -0.25, **shape),
        torch.tensor([3.0]),
        torch.ones(1, 1),
        clip_ratio=0.5,
    )
    assert loss.item() == pytest.approx(-3 * math.exp(0.1) * 4)
    assert rows(statistics)["ratio_mean_bias"] == 2.0


def test_the_guard_puts_the_mean_log_ratio_back_to_0():
    log_prob, mean, old_mean, std, dt, _, keep = steps(rows=20_000, seed=1)
    plain, guarded = (
        rows(
            loss(
                log_prob(mean), log_prob(old_mean), *more, torch.ones(20_000, dtype=torch.float64), keep, clip_ratio=9
            )[1]
        )["ratio"]
        for loss, more in ((flow_grpo_loss, ()), (grpo_guard_loss, (mean, old_mean, torch.ones_like(std), dt)))
    )
    assert plain < 0.98
    bias = (mean - old_mean).square().mean(-1) / (2 * std.square())
    centered = log_prob(mean) - log_prob(old_mean) + bias
    assert centered.mean().abs().item() < 5 * centered.std().item() / math.sqrt(centered.numel())
    assert guarded > plain


def test_the_divergence_mask_by_hand():
    """KL/D = 1/8 at every step, threshold below: masked where r leads farther away; above: nowhere."""
    old_mean, mean = torch.zeros(2, 2, 3), torch.full((2, 2, 3), 0.5)
    log_prob = torch.tensor([[0.1, -0.1], [0.1, -0.1]], requires_grad=True)
    args = torch.zeros(2, 2), mean, old_mean, torch.ones(2, 2), torch.tensor([1.0, -1.0]), torch.ones(2, 2)
    loss, statistics = flow_dppo_loss(log_prob, *args, kl_threshold=0.1)
    torch.testing.assert_close(loss, torch.tensor([[-1.0, -1.0], [1.0, 1.0]]) * log_prob.detach().exp())
    loss.sum().backward()
    assert (log_prob.grad != 0).tolist() == [[False, True], [True, False]]
    assert rows(statistics)["divergence"] == pytest.approx(0.125)
    assert rows(statistics)["zeroed_fraction_negative"] == 0.5
    assert rows(flow_dppo_loss(log_prob, *args, kl_threshold=0.2)[1])["zeroed_fraction_negative"] == 0.0


@pytest.mark.parametrize("name", ["flow_grpo", "grpo_guard", "flow_dppo"])
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
def test_a_rejected_step_may_hold_anything_forward_and_backward(name, garbage):
    mean, functions = losses()
    clean, dirty = mean.clone().requires_grad_(), mean.clone().requires_grad_()
    (loss, _), mask = functions[name](clean)
    (spoiled, statistics), dirty_mask = functions[name](dirty, garbage)
    assert mask.sum() - dirty_mask.sum() == 1
    loss[dirty_mask].sum().backward()
    spoiled.sum().backward()
    torch.testing.assert_close(spoiled[dirty_mask], loss[dirty_mask])
    assert spoiled[1, 0] == 0
    assert dirty.grad.isfinite().all()
    torch.testing.assert_close(dirty.grad, clean.grad)
    assert all(map(math.isfinite, rows(statistics).values()))


def test_weights_scale_the_loss_without_a_gradient_and_0_leaves_a_step_out():
    log_prob = torch.tensor([[0.1, NAN]], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([[0.5, 0.0]], dtype=torch.float64, requires_grad=True)
    args = torch.zeros(1, 2), torch.tensor([2.0]), torch.ones(1, 2)
    loss, _ = flow_grpo_loss(log_prob, *args, clip_ratio=0.5, weights=weights)
    loss.sum().backward()
    assert loss.tolist() == [[pytest.approx(-math.exp(0.1)), 0.0]]
    assert weights.grad is None
    assert log_prob.grad.tolist() == [[pytest.approx(-math.exp(0.1)), 0.0]]


def test_one_sided_clipping_under_mismatch_and_what_the_guard_makes_of_it():
    """Rollout and trainer differ before any update: log r lies about −KL/D, so A < 0 is stopped and A > 0 is not."""
    generator = torch.Generator().manual_seed(2)
    n, d, s = 4_000, 64, 0.5
    old_mean = torch.zeros(n, 1, d, dtype=torch.float64)
    mean = old_mean + 0.2
    x = old_mean + s * torch.randn(n, 1, d, dtype=torch.float64, generator=generator)
    std, dt = torch.full((n, 1), s, dtype=torch.float64), torch.full((n, 1), -0.1, dtype=torch.float64)
    old, new = (gaussian_log_prob(x[:, 0], m[:, 0], std[:, 0])[:, None] for m in (old_mean, mean))
    advantages = torch.randn(n, dtype=torch.float64, generator=generator)
    keep = torch.ones(n, 1)
    plain = rows(flow_grpo_loss(new, old, advantages, keep, clip_ratio=0.05)[1])
    guard = rows(grpo_guard_loss(new, old, mean, old_mean, std, dt, advantages, keep, clip_ratio=0.025)[1])
    assert plain["zeroed_fraction_negative"] > 4 * plain["zeroed_fraction_positive"]
    assert guard["zeroed_fraction_negative"] == pytest.approx(guard["zeroed_fraction_positive"], abs=0.05)
    assert guard["zeroed_fraction_negative"] > 0.05


def test_shapes_and_settings_are_checked():
    log_prob, mean, old_mean, std, dt, advantages, keep = steps()
    pair = log_prob(mean), log_prob(old_mean)
    with pytest.raises(ValueError, match=r"log_prob \(4, 2\) and old_log_prob \(4, 1\)"):
        flow_grpo_loss(pair[0], pair[1][:, :1], advantages, keep, clip_ratio=0.1)
    with pytest.raises(ValueError, match=r"advantages \(4, 2\).*one for each sample, \(4,\)"):
        flow_grpo_loss(*pair, advantages[:, None].expand(4, 2), keep, clip_ratio=0.1)
    with pytest.raises(ValueError, match=r"clip_ratio must be finite and > 0, got 0"):
        flow_grpo_loss(*pair, advantages, keep, clip_ratio=0)
    with pytest.raises(ValueError, match=r"std \(4,\) must be one for each step, \(4, 2\)"):
        grpo_guard_loss(*pair, mean, old_mean, std[:, 0], dt, advantages, keep, clip_ratio=0.1)
    with pytest.raises(ValueError, match=r"mean \(4, 2\) and old_mean"):
        grpo_guard_loss(*pair, mean[..., 0], old_mean, std, dt, advantages, keep, clip_ratio=0.1)
    with pytest.raises(ValueError, match=r"kl_threshold must be finite and > 0, got -1"):
        flow_dppo_loss(*pair, mean, old_mean, std, advantages, keep, kl_threshold=-1)


def test_nothing_reads_a_value():
    lp, m, flat, keep = (torch.ones(*shape, device="meta") for shape in ((2, 3), (2, 3, 4), (2,), (2, 3)))
    assert flow_grpo_loss(lp, lp, flat, keep, clip_ratio=0.1, weights=lp)[0].shape == (2, 3)
    assert grpo_guard_loss(lp, lp, m, m, lp, lp, flat, keep, clip_ratio=0.1)[0].shape == (2, 3)
    assert flow_dppo_loss(lp, lp, m, m, lp, flat, keep, kl_threshold=0.1)[0].shape == (2, 3)
