"""The token pass reads a block in one of several ways. All of them equal the reference, also mixed in one row."""

from __future__ import annotations

import math
import os

import pytest
import torch
from correction_cases import configuration, everything, reference_correction

from rollcorr.kernels.correction.triton import status

pytest.importorskip("triton", reason="Triton is not installed; `make test-triton` installs it")
if status() is not None:
    pytest.skip(str(status()), allow_module_level=True)

import triton
import triton.language as tl
from test_triton_kernel import assert_close, run

from rollcorr.kernels.correction.triton.plan import limits_of, plan_of
from rollcorr.kernels.correction.triton.token_pass import BLOCK, _regularity, tokens_at

# The interpreter computes with numpy, which reports infinities that a selection afterwards drops.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
N = BLOCK.value
WAYS = {"quiet": 2, "noisy": 1, "far": 0, "missing": 0, "zero": 0, "partly masked": 0, "masked": 0, "sentinels": 0}


def block(kind: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """512 tokens of one kind."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(N, generator=generator) * 3
    d = (torch.randn(N, generator=generator) * 0.1).clamp(-0.5, 0.5)
    mask = torch.ones(N, dtype=torch.bool)
    if kind == "noisy":
        d[[7, 300]], d[[8, 301]] = 1.2, -2.6
    train = rollout + d
    if kind == "far":
        train[100] = rollout[100] + 5.0
    if kind == "missing":
        train[100] = math.nan
    if kind == "zero":
        train[100] = -math.inf
    if kind == "partly masked":
        mask[100:300] = False
        train[150] = math.nan
    if kind == "masked":
        mask[:] = False
        rollout[:] = math.nan
    if kind == "sentinels":
        train[100] = rollout[100] = -1e30
    return train, rollout, mask


def rows(*orders: list[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A row for each list of kinds."""
    made = [[block(kind, 10 * i + j) for j, kind in enumerate(order)] for i, order in enumerate(orders)]
    return tuple(torch.stack([torch.cat([b[k] for b in row]) for row in made]) for k in range(3))


@triton.jit
def how_regular(train, rollout, mask, found, limits, PLAN: tl.constexpr):
    """The decisions about one block."""
    local, _ = tokens_at(0, 0, BLOCK, BLOCK // 128, 32, 0)
    pi, mu = tl.load(train + local), tl.load(rollout + local)
    shift = tl.zeros([32], dtype=tl.float32)
    tl.store(found, _regularity(pi, mu, tl.load(mask + local), shift, limits, PLAN))


@pytest.mark.parametrize("kind", WAYS)
def test_how_a_block_is_read(kind):
    config = configuration(rollout_is="token", rollout_is_threshold=2.0)
    train, rollout, mask = (x.to(DEVICE) for x in block(kind, 0))
    found = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    how_regular[(1,)](train, rollout, mask.view(torch.uint8), found, limits_of(config), PLAN=plan_of(config))
    assert found.item() == WAYS[kind]


@pytest.mark.parametrize(
    "config",
    [
        configuration(),
        configuration(rollout_is="token", rollout_is_threshold=None),
        configuration(rollout_is="token", rollout_is_threshold=2.0),
        configuration(rollout_is="token", rollout_is_threshold="0.5_2.0", nonfinite="neutral"),
        configuration(rollout_is="token", rollout_is_threshold="1.5_3.0", safety_bound=1.0),
        configuration(rollout_is="sequence", rollout_rs="seq_mean_k3,seq_max_k2", rollout_rs_threshold="0.01,9"),
        everything(rollout_is_threshold=2.0),
        everything(rollout_is_threshold="0.5_2.0", safety_bound=5.0),
    ],
    ids=["metrics", "unbounded", "truncated", "IcePop", "a band without 1", "sequence", "all", "all, IcePop"],
)
def test_every_way_beside_every_other_equals_the_reference(config):
    """A lane sums around the first value that it meets: an outlier in one row, an ordinary weight in the next."""
    batch = rows(
        ["quiet", "noisy", "quiet", "masked", "partly masked", "quiet"],
        ["far", "quiet", "noisy", "zero", "quiet", "missing"],
        ["noisy", "quiet", "quiet", "quiet", "quiet", "quiet"],
    )
    assert_close(run(*batch, config), reference_correction(*batch, config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_regular_blocks_of_half_precision_and_packed_sequences_that_start_anywhere(dtype):
    train, rollout, mask = (x.flatten() for x in rows(["quiet", "noisy"], ["quiet", "quiet"]))
    batch = train.to(dtype), rollout.to(dtype), mask.long()
    cu_seqlens = torch.tensor([0, 5, 1100, 2048])
    config = configuration(rollout_is="token", rollout_rs="seq_mean_k3", rollout_rs_threshold=0.1)
    actual = run(*batch, config, cu_seqlens=cu_seqlens, splits=1)
    assert_close(actual, reference_correction(*batch[:2], mask, config, cu_seqlens=cu_seqlens))


def test_a_uniform_shift_between_the_policies_costs_the_spread_no_digits():
    """d = −2.5 ± 1e-3 in every token: sums of squares around 0 or 1 would lose the spread."""
    train, rollout, mask = rows(["quiet"] * 4)
    train = rollout - 2.5 + (train - rollout) * 1e-2
    config = configuration(rollout_is="token", rollout_is_threshold=None)
    assert_close(run(train, rollout, mask, config), reference_correction(train, rollout, mask, config), rel=1e-4)
