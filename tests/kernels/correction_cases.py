"""Shared by the tests of every kernel: configurations, batches with every kind of value, and the comparison."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import strategies as st

from rollcorr.config import InertOptionWarning, RolloutCorrectionConfig
from rollcorr.core.metric_registry import CRITERIA, finalize
from rollcorr.kernels.correction import reference, triton
from rollcorr.kernels.correction.call import Batch, CorrectionOutput
from rollcorr.kernels.correction.cpu import kernel
from rollcorr.kernels.correction.torch import blocks


def positional(kernel):
    """An implementation that accepts a batch as three tensors, like `correction_kernel`."""

    def call(train, rollout, mask, config, *, cu_seqlens=None, **options) -> CorrectionOutput:
        return kernel(Batch(train, rollout, mask, cu_seqlens), config, **options)

    return call


reference_correction = positional(reference.reference_correction)
torch_correction = positional(blocks.torch_correction)
cpu_correction = positional(kernel.cpu_correction)
triton_correction = positional(triton.triton_correction)

SPECIAL = [math.nan, math.inf, -math.inf]


def configuration(**fields) -> RolloutCorrectionConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InertOptionWarning)
        return RolloutCorrectionConfig(**fields)


WEIGHT_BOUNDS = [(None, None), (2.0, None), (0.5, None), ("0.5_2.0", None), ("1.5_3.0", None), ("0_2.0", None)]
"""Thresholds and floors of weights that every kernel takes."""

MORE_WEIGHT_BOUNDS = [("0.7_inf", None), (2.0, 0.5), (None, 0.8), (2.0, 1.2)]
"""Those that Triton leaves to others."""


LEVELS = (None, "token", "sequence", "geometric")
WITH_HORIZON = (*LEVELS, "horizon")


@st.composite
def configurations(draw, bounds=(*WEIGHT_BOUNDS, *MORE_WEIGHT_BOUNDS), levels=LEVELS):
    threshold, floor = draw(st.sampled_from(bounds))
    criteria = draw(st.lists(st.sampled_from(CRITERIA), unique=True, max_size=5))
    return configuration(
        rollout_is=draw(st.sampled_from(levels)),
        rollout_is_horizon=draw(st.sampled_from([0.6, 0.0, 0.99, 1.0])),
        rollout_is_horizon_per_turn=draw(st.booleans()),
        rollout_is_threshold=threshold,
        rollout_is_floor=floor,
        rollout_is_batch_normalize=draw(st.booleans()),
        batch_normalize_over=draw(st.sampled_from(["valid", "kept"])),
        rollout_rs=",".join(criteria) or None,
        rollout_rs_threshold=",".join("0.6_1.5" if name.endswith("k1") else "0.3" for name in criteria) or None,
        rollout_token_veto_threshold=draw(st.sampled_from([None, 1e-2])),
        nonfinite=draw(st.sampled_from(["reject_token", "reject_sequence", "neutral"])),
        safety_bound=draw(st.sampled_from([20.0, 5.0, 30.0])),
    )


@st.composite
def batches(draw):
    B, T = draw(st.sampled_from([0, 1, 3, 6])), draw(st.sampled_from([0, 1, 5, 17]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    train = -torch.rand(B, T, generator=generator) * 3
    rollout = train + torch.randn(B, T, generator=generator) * draw(st.sampled_from([1e-4, 0.1, 1.0, 15.0]))
    mask = torch.rand(B, T, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=4)) if B * T else []:
        tensor = train if draw(st.booleans()) else rollout
        tensor.view(-1)[draw(st.integers(0, B * T - 1))] = value
    return train, rollout, mask


def everything(**fields) -> RolloutCorrectionConfig:
    """Token weights, all eleven criteria and the veto, bounded so that some tokens and sequences go and some stay."""
    thresholds = ",".join("0.6_1.5" if name.endswith("k1") else "0.3" for name in CRITERIA)
    fields = {"rollout_is": "token", "rollout_is_horizon": 0.9, "rollout_token_veto_threshold": 1e-2} | fields
    return configuration(rollout_rs=",".join(CRITERIA), rollout_rs_threshold=thresholds, **fields)


def assert_same(
    actual: CorrectionOutput,
    expected: CorrectionOutput,
    rows: torch.Tensor | None = None,
    *,
    rel: float = 1e-9,
    abs: float = 1e-9,
    weights_rel: float = 3e-6,
) -> None:
    """Compare outputs; `rows`: the tokens of a padded result that a packed one contains. Tolerances are for metrics."""
    select = (lambda x: x) if rows is None else (lambda x: x[rows])
    assert torch.equal(actual.loss_mask, select(expected.loss_mask))
    assert torch.equal(actual.sequence_kept, expected.sequence_kept)
    if expected.weights is None:
        assert actual.weights is None
    else:
        torch.testing.assert_close(actual.weights, select(expected.weights), rtol=weights_rel, atol=1e-9)
    a, b = finalize(actual.statistics.read()), finalize(expected.statistics.read())
    assert list(a) == list(b)
    for name in b:
        if name.endswith("max_viable_length") and rel > 1e-9:
            continue  # 1 / kl, which has no precision where kl is near 0
        assert a[name] == pytest.approx(b[name], rel=rel, abs=abs), name
