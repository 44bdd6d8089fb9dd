"""The demo's judge by hand, and one step of the demo itself."""

import importlib.util
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rollcorr.train import load_config, train

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPT = ROOT / "experiments" / "training_runs" / "demo_seeds.py"


@pytest.fixture(scope="module")
def demo_seeds():
    spec = importlib.util.spec_from_file_location("demo_seeds", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_run_is_judged_by_its_first_and_last_ten_steps(demo_seeds):
    rewards = [0.0, 1.0] * 5 + [99.0] + [1.0, 2.0] * 5
    verdict = demo_seeds.judge(0.4, rewards, [1e-5, 3e-5])
    assert (verdict.first, verdict.last, verdict.gain, verdict.k3) == (0.5, 1.5, 1.0, 2e-5)
    # Sample variance of ten alternating values is 0.25 · 10 / 9; two windows of ten.
    assert verdict.standard_error == pytest.approx((2 * 0.25 * 10 / 9 / 10) ** 0.5)
    assert verdict.failures == []


@pytest.mark.parametrize(
    ("accuracy", "gain", "noise", "k3", "failure"),
    [
        (0.1, 1.0, 0.1, 1e-5, "accuracy 10.0% outside 20%–60%"),
        (0.4, 0.1, 0.0, 1e-5, "gain 0.100 below 0.15"),
        (0.4, 0.5, 1.0, 1e-5, "standard errors"),
        (0.4, 1.0, 0.1, 0.0, "k3 0.0e+00 outside"),
    ],
)
def test_each_condition_can_fail_alone(demo_seeds, accuracy, gain, noise, k3, failure):
    rewards = [-noise, noise] * 5 + [gain - noise, gain + noise] * 5
    (found,) = demo_seeds.judge(accuracy, rewards, [k3]).failures
    assert failure in found


def test_the_demo_starts_where_the_documentation_says(tmp_path):
    overrides = [f"run_dir={tmp_path / 'run'}", "steps=1", "log.evaluate=128", "log.tensorboard=false", "threads=null"]
    with Console(quiet=True) as console:
        summary = train(load_config(EXAMPLES / "train" / "demo.yaml", overrides), console=console)
    assert 0.2 <= summary.before["accuracy"] <= 0.6
    assert summary.skipped_steps == 0
