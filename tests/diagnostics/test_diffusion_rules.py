"""The rules of denoising steps, on numbers and on whole logs."""

import math
from pathlib import Path
from random import Random

import pytest
import torch

from rollcorr import RolloutBatch, RolloutLogWriter, check_logs, health
from rollcorr.diagnostics import null_of_logs
from rollcorr.diagnostics.health.diffusion_rules import (
    DIFFUSION_RULES,
    densities_contradict_means,
    growth_by_timestep,
    one_sided_gradients,
    step_divergence,
)
from rollcorr.diagnostics.health.evidence import Evidence

D = 65_536
TIMESTEPS = (1000.0, 750.0)


def now(**values):
    return Evidence(current={"token_count": 400.0, **values}, diffusion=True)


def over(name, values):
    history = [(step, {"token_count": 400.0, name: value}) for step, value in enumerate(values, start=1)]
    return Evidence(current=history[-1][1], history=history, diffusion=True)


def write_log(path, *, kl=0.0, offset=0.0, rows=200, with_kl=True, means=None, seed=0, step=None):
    """Pictures whose log-ratios come from two Gaussians at an exact KL, plus an offset per dimension."""
    generator = torch.Generator().manual_seed(seed)
    joint = -kl + math.sqrt(2 * kl) * torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    rollout = 0.3 + 0.001 * torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    std = torch.full((rows, 2), 0.2)
    columns = {"exact_kl": torch.full((rows, 2), kl)} if with_kl else {}
    if means:
        columns = {"mean_distance": torch.full((rows, 2), kl) * 2 * std**2}
    batch = RolloutBatch.from_padded(
        torch.ones(rows, 2, dtype=torch.bool),
        rollout_log_prob=rollout,
        old_log_prob=rollout.float().double() + joint / D + offset,
        step=step,
        dimensions=D,
        timestep=torch.tensor(TIMESTEPS).expand(rows, 2),
        sigma=torch.tensor([1.0, 0.75]).expand(rows, 2),
        sigma_next=torch.tensor([0.75, 0.5]).expand(rows, 2),
        step_std=std,
        prompt=["a red circle"] * rows,
        **columns,
    )
    with RolloutLogWriter(path) as writer:
        writer.write(batch)
    return path


def test_every_rule_is_silent_without_numbers():
    assert [rule(now()) for rule in DIFFUSION_RULES] == [None] * len(DIFFUSION_RULES)


@pytest.mark.parametrize(("kl", "severity"), [(0.1, None), (0.11, "note"), (11, "note")])
def test_a_kl_without_a_null_is_noted(kl, severity):
    finding = step_divergence(now(exact_kl_mean=kl))
    assert (finding.severity if finding else None) == severity


def test_without_means_the_joint_kl_is_judged_and_noise_alone_is_not():
    assert step_divergence(now(kl_joint=0.5, k3_kl_joint=0.4)).metric == "kl_joint"
    assert step_divergence(now(kl_joint=0.5, k3_kl_joint=0.01)) is None


def test_a_run_that_zeroes_one_sign_is_unhealthy():
    metrics = {
        "token_count": 400.0,
        "rollout_corr/kl": 2e-4,
        "rollout_corr/exact_kl_mean": 11.0,
        "actor/zeroed_fraction_negative": 0.975,
        "actor/zeroed_fraction_positive": 0.02,
    }
    report = health(metrics, diffusion=True)
    assert report.verdict == "unhealthy"
    assert {"one_sided_gradients"} <= {finding.code for finding in report.findings}


def test_balanced_zeroing_is_the_clip_at_work():
    assert (
        one_sided_gradients(now(**{"actor/zeroed_fraction_negative": 0.35, "actor/zeroed_fraction_positive": 0.33}))
        is None
    )


def test_growth_at_a_timestep_is_named_with_its_onset():
    name = "log_prob_abs_diff/t_334"
    finding = growth_by_timestep(over(name, [1e-4] * 10 + [9e-4] * 10))
    assert "334" in finding.title
    assert finding.first_step == 11
    assert growth_by_timestep(over(name, [1e-4] * 10 + [3e-4] * 10)) is None
    assert growth_by_timestep(over(name, [1e-4, 9e-4])) is None, "too few steps to have a start"


def test_a_mean_of_j_that_no_kl_explains_is_named():
    assert densities_contradict_means(now(kl_joint=-328.0)).code == "schedule_differs"
    assert densities_contradict_means(now(kl_joint=0.02, exact_kl_mean=0.02)) is None
    assert densities_contradict_means(now(kl_joint=5.0, exact_kl_mean=0.02)).code == "schedule_differs"


def test_an_off_by_one_schedule_is_found_in_a_log(tmp_path):
    result = check_logs([write_log(tmp_path / "log.parquet", kl=0.02, offset=5e-3)])
    assert result.health.verdict == "unhealthy"
    assert result.metrics["rollout_corr/kl_joint"] == pytest.approx(-328, abs=1)
    assert result.health.findings[0].code == "schedule_differs"


@pytest.mark.parametrize("means", [False, True])
def test_a_null_decides_about_2_nats(tmp_path, means):
    log = write_log(tmp_path / "log.parquet", kl=2.0, means=means)
    alone = check_logs([log]).health
    assert (alone.verdict, alone.exit_code) == ("not judged", 3)
    assert "rollcorr null" in alone.not_judged[0]

    for kl, verdict in ((2.0, "healthy"), (0.02, "unhealthy")):
        null = null_of_logs([write_log(tmp_path / f"{kl}.parquet", kl=kl, seed=1)])
        result = check_logs([log], null=null)
        assert result.metrics["rollout_corr/exact_kl_mean"] == pytest.approx(2.0, rel=1e-4)
        assert result.health.verdict == verdict


@pytest.mark.parametrize("with_kl", [True, False])
def test_a_healthy_log_has_no_finding(tmp_path, with_kl):
    result = check_logs([write_log(tmp_path / "log.parquet", kl=0.01, with_kl=with_kl)])
    assert not [finding for finding in result.health.findings if finding.severity != "note"]
    assert {f"rollout_corr/log_prob_abs_diff/t_{t:g}" for t in TIMESTEPS} <= set(result.metrics)


def test_windows_of_several_lengths_and_workers_give_the_same_numbers(tmp_path):
    write_log(tmp_path / "a.parquet", kl=0.02, rows=40)
    write_log(tmp_path / "b.parquet", kl=0.02, rows=30, seed=1)
    together = check_logs([tmp_path]).metrics
    assert together["rollout_corr/token_count"] == 140
    assert check_logs([tmp_path], batch_size=7).metrics["rollout_corr/kl_joint"] == pytest.approx(
        together["rollout_corr/kl_joint"], rel=1e-12
    )


@pytest.mark.parametrize("page", ["health", "diffusion"])
def test_the_pages_list_every_rule(page):
    text = (Path(__file__).parents[2] / "docs" / "guides" / f"{page}.md").read_text(encoding="utf-8")
    first_cells = "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("|"))
    for code in ("step_divergence", "schedule_differs", "one_sided_gradients", "growth_by_timestep"):
        assert f"`{code}`" in first_cells


TIMES = (1000, 889, 778, 667, 556)
NOISE = (0.001, 0.002, 0.005, 0.0098, 0.012)


def windows(growth, seed, steps=24):
    """The metrics of a run whose windows move: the KL of a step depends most on its timesteps."""
    random = Random(seed)
    for step in range(1, steps + 1):
        first = random.randrange(4)
        kl = {t: NOISE[i] * growth(step) * math.exp(random.gauss(0, 0.05)) for i, t in enumerate(TIMES)}
        chosen = {t: kl[t] for t in TIMES[first : first + 2]}
        by_time = {f"rollout_corr/log_prob_abs_diff/t_{t}": math.sqrt(value) / 768 for t, value in chosen.items()}
        mean = sum(chosen.values()) / 2
        yield {
            "step": step,
            "rollout_corr/token_count": 64.0,
            "rollout_corr/sequence_count": 32.0,
            "rollout_corr/k3_kl": mean / 768**2,
            "rollout_corr/exact_kl_mean": mean,
            "engine/staleness": float(step - 1),
            **by_time,
        }


@pytest.mark.parametrize("seed", range(5))
def test_a_rise_of_the_exact_kl_is_named(seed):
    """A sampler that never gets weights at lr 1e-5: 29-fold in 24 steps, and below 0.1 nats throughout."""
    report = health(list(windows(lambda step: 1 + 28 * ((step - 1) / 23) ** 2, seed)), diffusion=True)
    assert report.verdict == "unhealthy"
    assert report.findings[0].metric == "exact_kl_mean"
    assert report.findings[0].code in ("stale_by_lag", "frozen_sampler", "growing_mismatch", "changed_at_step")


def test_moving_windows_are_no_rise():
    reports = [health(list(windows(lambda step: 1.0, seed, steps=60)), diffusion=True) for seed in range(40)]
    assert {report.verdict for report in reports} == {"not judged"}
