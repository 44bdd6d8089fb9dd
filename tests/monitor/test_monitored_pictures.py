"""A Monitor of denoising steps: the exact KL is judged as that of pictures, and a null of pictures is named."""

from __future__ import annotations

import json
import math

import pytest
import torch

from rollcorr import Monitor, read_run
from rollcorr.diagnostics import PictureNull
from rollcorr.diagnostics.null import Origin
from rollcorr.diagnostics.null.picture_null import TimestepNoise
from rollcorr.diagnostics.run_verdict import run_health
from rollcorr.diffusion import DiffusionActorConfig
from rollcorr.diffusion.step_correction import correct_steps

D = 768
CONFIG = DiffusionActorConfig(rollout_correction={})


def add(monitor, kl, offset=0.0):
    """Add a step of 64 pictures with two denoising steps at an exact KL, in nats; J is off by an offset."""
    draw = torch.Generator().manual_seed(monitor.steps)
    joint = offset - kl + math.sqrt(2 * kl) * torch.randn(64, 2, generator=draw, dtype=torch.float64)
    rollout = 0.3 + 0.001 * torch.randn(64, 2, generator=draw, dtype=torch.float64)
    monitor.add(
        correct_steps(rollout + joint / D, rollout, CONFIG, exact_kl=torch.full((64, 2), float(kl)), dimensions=D)
    )
    return monitor.step()


@pytest.mark.parametrize(("growth", "codes"), [(1.15, {"frozen_sampler"}), (1.0, set())])
def test_a_rise_of_the_exact_kl_alarms(tmp_path, growth, codes):
    """From 1.5e-3 to 0.04 nats in 24 steps, as a sampler that never gets weights at lr 1e-5."""
    with Monitor(tmp_path) as monitor:
        for step in range(24):
            metrics = add(monitor, 0.0015 * growth**step)
        assert metrics["rollout_corr/exact_kl_mean"] == pytest.approx(0.0015 * growth**23, rel=1e-4)
        assert {alarm.code for alarm in monitor.alarms} == codes
        assert {alarm.metric for alarm in monitor.alarms} <= {"exact_kl_mean"}
        assert "not recorded" not in " ".join(monitor.not_judged)


def test_a_schedule_that_differs_alarms(tmp_path):
    with Monitor(tmp_path) as monitor:
        add(monitor, 0.02, offset=5.0)
        assert [alarm.code for alarm in monitor.alarms] == ["schedule_differs"]
        assert monitor.verdict == "unhealthy"


def test_a_picture_null_without_rollouts_is_named(tmp_path):
    cells = (TimestepNoise(1000.0, 64, 1e-6, math.nan),)
    with Monitor(tmp_path) as monitor:
        for _ in range(3):
            add(monitor, 0.0015)
    PictureNull(name="null.json", pictures=64, dimensions=D, cells=cells, origin=Origin()).save(tmp_path / "null.json")
    assert json.loads((tmp_path / "null.json").read_text())["pictures"] == 64

    report = run_health(read_run(tmp_path), diffusion=True, tokens=True)
    assert report.verdict == "not judged"
    assert "null.json judges only logged pictures" in " ".join(report.not_judged)
    with Monitor(tmp_path, start=3) as resumed:
        add(resumed, 0.0015)
        assert "there is no null" not in " ".join(resumed.not_judged)

    # In the run of a language model, such a null predicts no metric.
    report = run_health(read_run(tmp_path))
    assert report.expected == {}
    assert report.expected_from == ""
