"""Loops on two ranks (7 + 2 rows) that gave an incorrect gradient in silence: each now equals one process."""

from __future__ import annotations

import diffusion_ranks
import pytest
import step_ranks
import torch
from processes import start_ranks
from step_ranks import CONFIGS, PLAIN, REGULARIZED, SIZE

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]
WRAPPERS = ["plain", "DDP", "FSDP2", "accelerate"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of each rank, from one start of two processes."""
    path = tmp_path_factory.mktemp("steps")
    start_ranks(step_ranks.run, path, SIZE, 0)
    return [torch.load(path / f"{rank}.pt", weights_only=False) for rank in range(SIZE)]


def assert_same(actual, expected):
    """Equal within 1e-12; a wrapper that joins every pass has 0 where one process has no gradient."""
    assert max(g.abs().max().item() for g in expected.values() if g is not None) > 1e-3
    for name, gradient in expected.items():
        other = actual[name]
        zero = torch.zeros(()) if other is None else torch.zeros_like(other)
        left, right = zero if other is None else other, zero if gradient is None else gradient
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12, msg=name)


def needs(wrapper):
    if wrapper not in step_ranks.WRAPPERS:
        pytest.skip("needs accelerate" if wrapper == "accelerate" else "FSDP2 needs torch 2.7 or newer on a CPU")


@pytest.mark.covering(2)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("mode", CONFIGS)
@pytest.mark.parametrize("loss", [PLAIN, REGULARIZED], ids=["policy gradient", "KL and entropy"])
def test_a_step_equals_one_process(results, wrapper, mode, loss):
    """Rows (a) to (d): `correct` without a group, no factor R, four micro-batches, and accelerator.backward."""
    needs(wrapper)
    expected = step_ranks.alone(mode, loss)
    for rank in range(SIZE):
        assert_same(results[rank][wrapper, mode, loss], expected)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_correction_over_the_group_equals_one_process(results, wrapper):
    needs(wrapper)
    for rank in range(SIZE):
        assert_same(results[rank][wrapper, "known"], step_ranks.alone("decoupled", REGULARIZED))


@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
def test_a_diffusion_step_equals_one_process(results, mode):
    expected = step_ranks.diffusion(diffusion_ranks.Mean(), None, mode, None)
    for rank in range(SIZE):
        torch.testing.assert_close(results[rank]["diffusion", mode], expected, rtol=1e-12, atol=1e-12)


def test_ranks_without_a_group_warn_once(results):
    expected = step_ranks.alone("decoupled", PLAIN)["first.weight"]
    for rank in range(SIZE):
        gradients, messages = results[rank]["functional"]
        assert (gradients["first.weight"] - expected).norm() > 0.1 * expected.norm()
        assert len(messages) == 1
        assert "there are 2 ranks, and the loss is divided by the counts of this one" in messages[0]
        assert results[rank]["functional, local"][1] == results[rank]["functional, group"][1] == []


def test_micro_batches_of_bypass_mode_raise(results):
    for rank in range(SIZE):
        assert "use TrainingStep(model, config)" in results[rank]["micro-batches in bypass mode"]


def test_a_whole_bypass_step_counts_over_its_group(results):
    model, data = step_ranks.wrapper_ranks.Policy(), step_ranks.make_data()
    given, _ = step_ranks.arguments(model, data, "bypass")
    expected = step_ranks.policy_loss(*given, config=CONFIGS["bypass"], whole_step=True).loss.item()
    for rank in range(SIZE):
        assert results[rank]["bypass over the group"] == pytest.approx(expected, rel=1e-12)
