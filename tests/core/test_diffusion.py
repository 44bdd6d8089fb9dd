"""The denoising step as a Gaussian policy: by hand, against closed forms, and against diffusers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollcorr.core.diffusion import (
    SdeWindow,
    cps_step_mean,
    dance_sde_step_mean,
    density_from_cps,
    gaussian_kl,
    gaussian_log_prob,
    power_of,
    sde_step,
    sde_step_mean,
    take_step,
)
from rollcorr.core.divergence import k3

HALF_LOG_2_PI = math.log(math.sqrt(2 * math.pi))
MEANS = {
    "sde": lambda v, x, **at: sde_step_mean(v, x, sigma_max=0.9, **at),
    "dance": dance_sde_step_mean,
    "cps": cps_step_mean,
}


def random_step(rows: int = 3, shape: tuple[int, ...] = (2, 4, 4), dtype=torch.float32, seed: int = 0):
    """(velocity, sample, noise)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, *shape, dtype=dtype, generator=generator) for _ in range(3)]


def test_a_step_by_hand():
    """σ = 0.5, σ_next = 0.25, a = 1: g = 1, dt = −1/4, g²/2σ = 1, so m = 3/4 x − 3/8 v and s = 1/2."""
    velocity, sample, noise = torch.tensor([[2.0, -4.0]]), torch.tensor([[1.0, 8.0]]), torch.tensor([[1.0, -1.0]])
    step = sde_step(velocity, sample, sigma=0.5, sigma_next=0.25, sigma_max=0.9, noise_level=1.0, noise=noise)
    assert step.mean.tolist() == [[0.0, 7.5]]
    assert step.std.item() == 0.5
    assert step.prev_sample.tolist() == [[0.5, 7.0]]
    # z = ±1: log p = −1/2 − log(1/2) − log sqrt(2π) in each dimension
    each = -0.5 + math.log(2) - HALF_LOG_2_PI
    assert step.log_prob().item() == pytest.approx(each)
    assert step.log_prob(reduction="sum").item() == pytest.approx(2 * each)
    assert step.log_prob(reduction=0.25).item() == pytest.approx(0.5 * each)


def test_the_first_step_takes_the_second_sigma_under_the_root():
    """σ = 1, σ₁ = 0.75, a = 1: g = sqrt(1 / 0.25) = 2, dt = −1/4, so m = x (1 − 1/2) + v dt and s = 1."""
    velocity, sample = torch.full((1, 1), 4.0), torch.full((1, 1), 8.0)
    mean, std = sde_step_mean(velocity, sample, sigma=1.0, sigma_next=0.75, sigma_max=0.75, noise_level=1.0)
    assert (mean.item(), std.item()) == (3.0, 1.0)


def test_dance_and_cps_steps_by_hand():
    velocity, sample = torch.full((1, 1), 2.0), torch.full((1, 1), 4.0)
    # g = 2, dt = −1/4, g²/2σ = 4: m = 4 (1 − 1) + 2 (1 + 2) (−1/4)
    mean, std = dance_sde_step_mean(velocity, sample, sigma=0.5, sigma_next=0.25, noise_level=2.0)
    assert (mean.item(), std.item()) == (-1.5, 1.0)
    # sin(π/6) = 1/2: s = 0.3, x̂₀ = 3, ε̂ = 5, m = 0.4 · 3 + sqrt(0.36 − 0.09) · 5
    mean, std = cps_step_mean(velocity, sample, sigma=0.5, sigma_next=0.6, noise_level=1 / 3)
    assert std.item() == pytest.approx(0.3)
    assert mean.item() == pytest.approx(1.2 + 5 * math.sqrt(0.27))


@pytest.mark.parametrize("variant", MEANS)
def test_noise_level_0_is_the_euler_step_without_a_log_prob(variant):
    velocity, sample, _ = random_step()
    mean, std = MEANS[variant](velocity, sample, sigma=0.5, sigma_next=0.3, noise_level=0.0)
    step = take_step(mean, std, None)
    assert std is None
    assert step.log_prob() is None
    torch.testing.assert_close(step.prev_sample, sample - 0.2 * velocity)


@pytest.mark.parametrize("variant", MEANS)
def test_rows_at_different_sigmas_are_the_rows_one_by_one(variant):
    velocity, sample, noise = random_step()
    now, then = torch.tensor([1.0, 0.6, 0.2]), torch.tensor([0.9, 0.5, 0.1])
    if variant == "cps":
        now, then = now.clamp(max=0.95), then.clamp(max=0.8)
    together = take_step(*MEANS[variant](velocity, sample, sigma=now, sigma_next=then, noise_level=0.7), noise)
    for i in range(3):
        row = slice(i, i + 1)
        at = {"sigma": now[i].item(), "sigma_next": then[i].item(), "noise_level": 0.7}
        alone = take_step(*MEANS[variant](velocity[row], sample[row], **at), noise[row])
        torch.testing.assert_close(together.prev_sample[row], alone.prev_sample)
        torch.testing.assert_close(together.log_prob()[row], alone.log_prob())


def test_a_step_keeps_the_marginal_of_the_flow():
    """With the exact velocity of a Gaussian data distribution, a small step moves N(0, var(σ)) to N(0, var(σ_next)).

    x₀ ~ N(0, c²): var(σ) = (1 − σ)² c² + σ², and v(x) = E[ε − x₀ | x] = x (σ − (1 − σ) c²) / var(σ).
    """
    c2, sigma, dt = 0.25, 0.5, 1e-4

    def variance(at):
        return (1 - at) ** 2 * c2 + at**2

    slope = (sigma - (1 - sigma) * c2) / variance(sigma)
    at = {"sigma": sigma, "sigma_next": sigma - dt, "noise_level": 0.7}
    x = torch.ones(1, 1, dtype=torch.float64)
    for variant in ("sde", "dance"):
        mean, std = MEANS[variant](slope * x, x, **at)
        after = mean.item() ** 2 * variance(sigma) + std.item() ** 2
        assert after - variance(sigma - dt) == pytest.approx(0.0, abs=1e-7), variant


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("steps", [4, 10, 28])
def test_the_ode_is_the_step_of_diffusers_to_the_bit(steps, shift):
    diffusers = pytest.importorskip("diffusers", reason="needs rollcorr[diffusion]")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    sigmas, sample = scheduler.sigmas, random_step()[1]
    theirs = ours = sample
    for i, timestep in enumerate(scheduler.timesteps):
        velocity = random_step(seed=i)[0]
        theirs = scheduler.step(velocity, timestep, theirs, return_dict=False)[0]
        at = {"sigma": sigmas[i], "sigma_next": sigmas[i + 1], "sigma_max": sigmas[1], "noise_level": 0.0}
        ours = sde_step(velocity, ours, **at).prev_sample
        assert torch.equal(ours, theirs)


def test_every_step_of_a_diffusers_schedule_has_a_finite_log_prob():
    diffusers = pytest.importorskip("diffusers", reason="needs rollcorr[diffusion]")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    sigmas = scheduler.sigmas
    velocity, sample, noise = random_step()
    for i in range(10):
        at = {"sigma": sigmas[i], "sigma_next": sigmas[i + 1], "sigma_max": sigmas[1], "noise_level": 0.7}
        step = sde_step(velocity, sample, **at, noise=noise)
        assert step.prev_sample.isfinite().all()
        assert step.log_prob().isfinite().all()


@given(rows=st.integers(1, 4), dimensions=st.integers(1, 40), seed=st.integers(0, 2**16))
def test_sum_is_d_times_mean_and_a_power_is_that_share_of_the_sum(rows, dimensions, seed):
    x, mean, _ = random_step(rows, (dimensions,), torch.float64, seed)
    log_prob = {r: gaussian_log_prob(x, mean, torch.tensor(0.3), reduction=r) for r in ("mean", "sum", 0.5)}
    torch.testing.assert_close(log_prob["sum"], dimensions * log_prob["mean"])
    torch.testing.assert_close(log_prob[0.5], 0.5 * log_prob["sum"])
    assert power_of("mean", dimensions) * dimensions == pytest.approx(1)
    normal = torch.distributions.Normal(mean, 0.3).log_prob(x).sum(1)
    torch.testing.assert_close(log_prob["sum"], normal)


def test_the_mean_log_prob_of_a_sample_is_minus_a_half_less_the_log_of_the_spread():
    """E[mean_D log p] = −1/2 − log s − log sqrt(2π), with a spread of sqrt(1 / 2D) around it."""
    velocity, sample, noise = random_step(4, (100_000,), seed=3)
    step = sde_step(velocity, sample, sigma=0.6, sigma_next=0.5, sigma_max=0.9, noise_level=0.7, noise=noise)
    expected = -0.5 - math.log(step.std.item()) - HALF_LOG_2_PI
    assert step.log_prob().tolist() == pytest.approx([expected] * 4, abs=5 * math.sqrt(1 / 200_000))


def test_the_same_model_gives_a_log_ratio_of_exactly_0():
    velocity, sample, noise = random_step()
    at = {"sigma": 0.6, "sigma_next": 0.5, "sigma_max": 0.9, "noise_level": 0.7}
    step = sde_step(velocity, sample, **at, noise=noise)
    again = gaussian_log_prob(step.prev_sample, *sde_step_mean(velocity, sample, **at))
    assert torch.equal(again, step.log_prob())


def test_the_joint_log_ratio_is_normal_about_minus_the_kl():
    """J ~ N(−KL, 2 KL), so E[exp(αJ)] = exp(−α(1 − α) KL), and E[exp J] = 1. 400,000 samples: 5 standard errors."""
    generator = torch.Generator().manual_seed(0)
    n, shift = 400_000, torch.tensor([0.3, -0.2, 0.1, 0.25], dtype=torch.float64)
    std = torch.tensor(0.5, dtype=torch.float64)
    m_rollout = torch.zeros(n, 4, dtype=torch.float64)
    m_train = m_rollout + shift
    x = m_rollout + std * torch.randn(n, 4, generator=generator, dtype=torch.float64)
    j = gaussian_log_prob(x, m_train, std, reduction="sum") - gaussian_log_prob(x, m_rollout, std, reduction="sum")
    kl = gaussian_kl(m_rollout[:1], m_train[:1], std).item()
    assert kl == pytest.approx(shift.square().sum().item() / (2 * 0.25))
    assert j.mean().item() == pytest.approx(-kl, abs=5 * math.sqrt(2 * kl / n))
    assert j.var().item() == pytest.approx(2 * kl, rel=0.02)
    for alpha in (0.25, 0.5, 1.0, 1.5):
        powers = (alpha * j).exp()
        expected = math.exp(-alpha * (1 - alpha) * kl)
        assert powers.mean().item() == pytest.approx(expected, abs=5 * powers.std().item() / math.sqrt(n)), alpha


@given(
    sigma=st.floats(0.05, 0.95),
    share=st.floats(0.1, 0.9),
    noise_level=st.floats(0.1, 3.0),
    seed=st.integers(0, 2**16),
)
def test_the_kl_of_a_velocity_error_has_a_closed_form(sigma, share, noise_level, seed):
    """KL = ‖Δv‖² |dt| (1 + a²/2)² (1 − σ) / (2 a² σ) for σ < 1."""
    velocity, sample, error = random_step(2, (5,), torch.float64, seed)
    at = {"sigma": sigma, "sigma_next": sigma * share, "sigma_max": 0.97, "noise_level": noise_level}
    mean, std = sde_step_mean(velocity, sample, **at)
    other, _ = sde_step_mean(velocity + error, sample, **at)
    a2, dt = noise_level**2, sigma * (1 - share)
    closed = error.square().sum(1) * dt * (1 + a2 / 2) ** 2 * (1 - sigma) / (2 * a2 * sigma)
    torch.testing.assert_close(gaussian_kl(mean, other, std), closed, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gaussian_kl(other, mean, std), closed, rtol=1e-9, atol=1e-12)


def test_the_kl_of_a_velocity_error_is_smallest_at_a_noise_level_of_the_root_of_2():
    velocity, sample, error = random_step(1, (5,), torch.float64)

    def kl(noise_level):
        at = {"sigma": 0.5, "sigma_next": 0.4, "sigma_max": 0.9, "noise_level": noise_level}
        mean, std = sde_step_mean(velocity, sample, **at)
        return gaussian_kl(mean, sde_step_mean(velocity + error, sample, **at)[0], std).item()

    best = math.sqrt(2)
    assert kl(best) < min(kl(best - 0.05), kl(best + 0.05))


def test_k3_of_a_mean_pooled_mismatch_is_not_lost():
    assert k3(torch.tensor(1e-4)).item() == pytest.approx(5.0e-9, rel=1e-3)


def test_the_cps_log_prob_becomes_a_density():
    velocity, sample, noise = random_step(dtype=torch.float64)
    step = take_step(*cps_step_mean(velocity, sample, sigma=0.5, sigma_next=0.4, noise_level=0.8), noise)
    theirs = -(step.prev_sample - step.mean).square().flatten(1).mean(1)
    torch.testing.assert_close(density_from_cps(theirs, step.std.expand(3)), step.log_prob())


def test_the_gradient_of_a_log_prob_by_hand_and_none_through_the_sample():
    """d/dm mean_D log p = (x′ − m) / (D s²)."""
    mean = torch.tensor([[1.0, 2.0]], requires_grad=True)
    x = torch.tensor([[2.0, 1.0]], requires_grad=True)
    gaussian_log_prob(x, mean, torch.tensor(0.5)).sum().backward()
    assert mean.grad.tolist() == [[2.0, -2.0]]
    assert x.grad is None


def test_a_spread_of_0_in_a_tensor_is_a_missing_log_prob():
    x = torch.ones(2, 3)
    log_prob = gaussian_log_prob(x, x, torch.tensor([0.0, 1.0]))
    assert log_prob.isnan().tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_refused_with_the_fix(dtype):
    velocity, sample, _ = random_step()
    at = {"sigma": 0.5, "sigma_next": 0.4, "sigma_max": 0.9, "noise_level": 0.7}
    with pytest.raises(TypeError, match=rf"velocity is {dtype}.*call \.float\(\)"):
        sde_step_mean(velocity.to(dtype), sample, **at)
    with pytest.raises(TypeError, match=rf"prev_sample is {dtype}.*keep latents in float32"):
        gaussian_log_prob(sample.to(dtype), sample.to(dtype), torch.tensor(1.0))


def test_shapes_and_settings_out_of_bounds_are_named():
    velocity, sample, noise = random_step()
    at = {"sigma": 0.5, "sigma_next": 0.4, "sigma_max": 0.9}
    with pytest.raises(ValueError, match=r"velocity \(2, 2, 4, 4\) and sample \(3, 2, 4, 4\)"):
        sde_step_mean(velocity[:2], sample, **at, noise_level=0.7)
    with pytest.raises(ValueError, match=r"noise_level must be finite and ≥ 0.*got -1"):
        sde_step_mean(velocity, sample, **at, noise_level=-1)
    with pytest.raises(ValueError, match=r"each of the 3 samples; got shape \(2,\)"):
        sde_step_mean(velocity, sample, sigma=torch.ones(2), sigma_next=0.4, sigma_max=0.9, noise_level=0.7)
    with pytest.raises(ValueError, match=r"noise must be standard normal.*got None"):
        sde_step(velocity, sample, **at, noise_level=0.7)
    with pytest.raises(ValueError, match=r"got \(3, 2, 4\)"):
        sde_step(velocity, sample, **at, noise_level=0.7, noise=noise[..., 0])
    with pytest.raises(ValueError, match=r"cps step must be in \[0, 1\], got 1.5"):
        cps_step_mean(velocity, sample, sigma=0.5, sigma_next=0.4, noise_level=1.5)
    for wrong in ("median", 0.0, -1.0, math.inf, True):
        with pytest.raises(ValueError, match="reduction must be"):
            gaussian_log_prob(sample, sample, torch.tensor(1.0), reduction=wrong)


def test_windows_hold_their_steps():
    assert list(SdeWindow(2, 3).steps) == [2, 3, 4]
    with pytest.raises(ValueError, match="starts at 0 or later"):
        SdeWindow(-1, 2)
    with pytest.raises(ValueError, match="a step or more"):
        SdeWindow(0, 0)


def test_nothing_reads_a_value():
    """And every tensor that is made on the way is made where the sample is."""
    velocity, sample, sigma = (torch.ones(*shape, device="meta") for shape in ((2, 3), (2, 3), (2,)))
    for variant in MEANS:
        mean, std = MEANS[variant](velocity, sample, sigma=sigma, sigma_next=sigma, noise_level=0.7)
        assert gaussian_log_prob(sample, mean, std).shape == (2,)
        assert gaussian_kl(mean, sample, std).shape == (2,)
