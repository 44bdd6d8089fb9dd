"""The findings of benchmarks/diffusion_mismatch.py on a tiny SD3 transformer, with fewer samples."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers", reason="needs rollcorr[diffusion]")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "diffusion_mismatch.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("diffusion_mismatch", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def policies(script):
    return script.make_policies()


def test_the_same_model_in_the_same_batch_gives_log_ratios_of_0_up_to_rounding(script, policies):
    trainer, prompt = policies["float32"], torch.arange(8)
    batch = script.scored(trainer, trainer, prompt, prompt, 3, 2, seed=0)
    torch.testing.assert_close(batch["old_log_probs"], batch["rollout_log_probs"], rtol=0, atol=1e-5)
    torch.testing.assert_close(batch["old_prev_sample_mean"], batch["prev_sample_mean"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("rollout", "band"), [("bf16", "0.5_2.0"), ("fp8", "0.1_10")])
def test_joint_rejection_finds_wrong_prompts_and_hardly_anything_else(script, policies, rollout, band):
    """Finds nearly all of 16 swapped prompts among 128 samples, and rejects under 1 % of the correct ones."""
    found = script.detection(policies, rollout, 128, script.WINDOWS["end"])
    joint, pooled = found[f"joint seq_mean_k1 {band}"], found["mean-pooled seq_mean_k1 0.5_2.0"]
    assert joint["found"] >= 0.95
    assert joint["false_positives"] < 0.01
    assert (pooled["found"], pooled["false_positives"]) == (0.0, 0.0)
    assert found["exact step_kl 2.0"]["found"] >= 0.95
    assert found["exact step_kl 2.0"]["false_positives"] < 0.01


def test_the_exact_kl_tells_wrong_prompts_where_the_log_ratio_is_noise(script, policies):
    at_1_percent = script.detection(policies, "fp8", 128, script.WINDOWS["middle"])["found at 1 % false positives"]
    assert at_1_percent["exact"] == 1.0
    assert at_1_percent["joint"] < 0.95


def test_clipping_is_one_sided_under_mismatch_and_the_guard_evens_it_out(script, policies):
    shares = script.one_sided(policies, "fp8", 256, script.STEPS - script.WINDOW)
    grpo, guard = shares["flow_grpo"], shares["grpo_guard"]
    assert grpo["negative"] > 2 * grpo["positive"]
    assert guard["negative"] - guard["positive"] < (grpo["negative"] - grpo["positive"]) / 2
