"""Rivals of horizon weights in the bench: each equals its formula on a small batch, and trains by it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rollcorr import correct

BENCH = Path(__file__).parents[2] / "experiments" / "bench"
D = torch.tensor([[0.02, -0.5, 9.0, 0.3], [0.7, 0.1, 9.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0]], dtype=torch.bool)


@pytest.fixture
def rivals(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import rivals

    return rivals


def expected(name, row):
    """Log weights of one sequence, token by token, from the papers' formulas."""
    ratios = [math.exp(x) for x in D[MASK].tolist()]
    share = sum(ratios) ** 2 / (len(ratios) * sum(x * x for x in ratios))
    found = []
    for t, own in enumerate(row):
        if name == "prefix":
            found.append(max(min(sum(row[: t + 1]), 0.05 * math.sqrt(t + 1)), -0.025 * math.sqrt(t + 1)))
        elif name == "min_prefix":
            found.append(own + (min(row[:t]) if t else 0.0))
        else:
            found.append(min(own, math.log(share)))
    return found


@pytest.mark.parametrize("name", ["prefix", "min_prefix", "ess_cap"])
def test_weights_equal_the_published_formula(rivals, name):
    """A hole in the mask is no token; the ceiling of 1.5 applies afterwards."""
    rollout = torch.full_like(D, -1.0)
    options = {"rollout_is": "horizon", "rollout_is_horizon": 1.0, "rollout_is_threshold": 1.5, "impl": "torch"}
    with rivals.trained_by(name):
        weights = correct(rollout + D, rollout, MASK, **options).weights
    rows = [expected(name, d[valid].tolist()) for d, valid in zip(D, MASK, strict=True)]
    of_tokens = torch.tensor([x for row in rows for x in row], dtype=torch.float32).exp().clamp(max=1.5)
    torch.testing.assert_close(weights[MASK], of_tokens)
    assert (weights[~MASK] == 0).all()


def test_other_corrections_keep_the_horizon(rivals):
    rollout = torch.full_like(D, -1.0)
    options = {"rollout_is": "horizon", "rollout_is_horizon": 0.5, "impl": "torch"}
    before = correct(rollout + D, rollout, MASK, **options).weights
    with rivals.trained_by("seq_tis"):
        assert torch.equal(correct(rollout + D, rollout, MASK, **options).weights, before)
    with rivals.trained_by("prefix"):
        assert not torch.equal(correct(rollout + D, rollout, MASK, **options).weights, before)
    assert torch.equal(correct(rollout + D, rollout, MASK, **options).weights, before)


def test_rivals_take_no_packed_batch(rivals):
    x, offsets = torch.zeros(4), torch.tensor([0, 4])
    with rivals.trained_by("prefix"), pytest.raises(ValueError, match="padded batches"):
        correct(x, x, x == 0, cu_seqlens=offsets, rollout_is="horizon", rollout_is_horizon=1.0, impl="torch")


def test_bench_trains_rivals_in_stage_three(rivals, monkeypatch):
    """The runner enters the cell's own rule around its training, and leaves it afterwards."""
    import bench
    import cell_runner

    from rollcorr.kernels.correction.torch import blocks

    assert set(rivals.RIVALS) == set(bench.STAGES[3])
    horizon, used = blocks.horizon_log_weights, []
    monkeypatch.setattr(cell_runner, "run_cell", lambda cell, console: used.append(blocks.horizon_log_weights))
    for name in rivals.RIVALS:
        fields = bench.Cell("stale", name, 0).config().algorithm.rollout_correction
        assert (fields["rollout_is"], fields["rollout_is_threshold"], fields["impl"]) == ("horizon", 4.0, "torch")
        bench.main([f"stale-{name}-0", "--no-page"])
    assert len(used) == len(rivals.RIVALS)
    assert horizon not in used
    assert blocks.horizon_log_weights is horizon
