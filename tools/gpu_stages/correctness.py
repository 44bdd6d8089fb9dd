"""Stage 1: are the numbers right? Golden cases, random batches against float64, 2³¹ tokens, and equal bits twice."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import warnings
from pathlib import Path

import torch

from gpu_stages import Plan
from gpu_stages.batches import STANDARD, make_batch
from gpu_stages.recorder import Rows

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
MORE_THAN_32_BITS = (1 << 31) + 4096
"""Tokens of one sequence: an offset inside it no longer fits into 32 bits."""


def run(plan: Plan, rows: Rows) -> None:
    """Every implementation that runs here, but the specification."""
    # The oracle and its random batches are those of the tests.
    os.environ.setdefault("TRITON_INTERPRET", "0")
    sys.path.insert(0, str(ROOT / "tests"))
    from rollcorr.kernels.correction import implementations

    usable = [name for name, (runs, _) in implementations().items() if runs and name != "reference"]
    chosen = [name for name in usable if name != "cpu" or plan.device == "cpu"]
    rows.add("implementations", usable=chosen, notes={name: note for name, (_, note) in implementations().items()})
    if plan.device == "cuda":
        rows.attempt("the check before 'auto' takes Triton", lambda: _self_check(plan))
        rows.add("Triton runs", right="triton" in chosen)
    for impl in chosen:
        rows.attempt(f"golden cases, {impl}", lambda impl=impl: _golden(plan, impl))
        rows.attempt(f"random batches, {impl}", lambda impl=impl: _random(plan, impl))
        rows.attempt(f"equal bits, {impl}", lambda impl=impl: _equal_bits(plan, impl))
        rows.attempt(f"2³¹ tokens, {impl}", lambda impl=impl: _many_tokens(plan, impl))


def _self_check(plan: Plan) -> dict[str, object]:
    from rollcorr.kernels.correction.triton.self_check import check_kernels

    verdict = check_kernels(torch.device(plan.device, 0))
    return {"right": verdict.agrees, "reason": verdict.reason}


def _golden(plan: Plan, impl: str) -> dict[str, object]:
    """The recorded inputs: masks and weights as the specification computes them in float64."""
    import numpy as np

    from rollcorr import RolloutCorrectionConfig, correct

    cases = json.loads((GOLDEN / "golden.json").read_text(encoding="utf-8"))["cases"]
    differing = []
    for case in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = RolloutCorrectionConfig(**case["kwargs"])
        data = np.load(GOLDEN / case["file"])
        train, rollout = (
            torch.from_numpy(data[name]).to(getattr(torch, case["dtype"]))
            for name in ("old_log_prob", "rollout_log_prob")
        )
        mask = torch.from_numpy(data["response_mask"]).to(getattr(torch, case["mask_dtype"]))
        expected = correct(train.double(), rollout.double(), mask, config, impl="reference", densities=True)
        if impl == "cpu" and train.dtype not in (torch.float32, torch.bfloat16):
            continue
        actual = correct(*(x.to(plan.device) for x in (train, rollout, mask)), config, impl=impl, densities=True)
        same = torch.equal(actual.loss_mask.cpu(), expected.loss_mask)
        if expected.weights is not None:
            same = same and torch.allclose(actual.weights.cpu(), expected.weights, rtol=3e-6, atol=1e-12)
        if not same:
            differing.append(case["name"])
    return {"right": not differing, "cases": len(cases), "differing": differing}


def _random(plan: Plan, impl: str) -> dict[str, object]:
    """200 batches with accidents and any configuration, padded and packed, against the float64 oracle."""
    from oracle_cases import differences, draw

    from rollcorr import correct

    count, found = 20 if plan.quick else 200, []
    for seed in range(count):
        case, packed = draw(seed, impl), seed % 2 == 0
        tensors = [x[case.inside] if packed else x for x in (case.train, case.rollout, case.mask)]
        cu_seqlens = torch.tensor([0, *case.lengths]).cumsum(0).to(plan.device) if packed else None
        correction = correct(
            *(x.to(plan.device) for x in tensors), case.config, cu_seqlens=cu_seqlens, impl=impl, densities=True
        )
        on_host = dataclasses.replace(
            correction,
            weights=None if correction.weights is None else correction.weights.cpu(),
            loss_mask=correction.loss_mask.cpu(),
            sequence_kept=correction.sequence_kept.cpu(),
        )
        found += [f"batch {seed}: {said[:200]}" for said in differences(case, on_host, impl, packed=packed)]
    return {"right": not found, "batches": count, "differences": found[:10]}


def _equal_bits(plan: Plan, impl: str) -> dict[str, object]:
    """Two runs of one batch, in each layout: the same bits, statistics included."""
    from rollcorr import correct

    differing = []
    for layout in ("padded", "dense", "packed"):
        batch = make_batch(1 << (16 if plan.quick else 22), layout, plan.device)
        first, second = (
            correct(batch.train, batch.rollout, batch.mask, cu_seqlens=batch.cu_seqlens, impl=impl, **STANDARD)
            for _ in range(2)
        )
        same = torch.equal(first.weights, second.weights) and torch.equal(first.loss_mask, second.loss_mask)
        if not same or repr(first.metrics()) != repr(second.metrics()):
            differing.append(layout)
    return {"right": not differing, "differing": differing}


def _many_tokens(plan: Plan, impl: str) -> dict[str, object]:
    """One sequence of more than 2³¹ tokens: counted to the last, and the last one has its weight."""
    from rollcorr import correct

    if plan.device == "cpu" or impl != "triton":
        return {"not_run": "on a GPU, for the kernels that take addresses"}
    needed = 40 << 30
    free, _ = torch.cuda.mem_get_info()
    if free < needed:
        return {"not_run": f"needs {needed >> 30} GiB of free device memory, there are {free >> 30}"}
    tokens = MORE_THAN_32_BITS
    train = torch.full((1, tokens), -1.0, dtype=torch.bfloat16, device="cuda")
    rollout = torch.full_like(train, -1.0)
    rollout[0, -1] = -1.5
    mask = torch.ones((1, tokens), dtype=torch.bool, device="cuda")
    correction = correct(train, rollout, mask, rollout_is="token", impl="triton")
    metrics, last = correction.metrics(prefix=""), float(correction.weights[0, -1])
    right = metrics["token_count"] == tokens and abs(last - 1.6487212) < 1e-5 and bool(correction.loss_mask[0, -1])
    return {"right": right, "tokens": tokens, "token_count": metrics["token_count"], "last_weight": last}
