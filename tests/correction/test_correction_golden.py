"""Weights, masks and shared metrics agree with verl 0.9.1 on 45 recorded calls (tests/golden/README.md)."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from implementations import per_implementation

from rollcorr import correct
from rollcorr.config import InertOptionWarning, RolloutCorrectionConfig

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = {case["name"]: case for case in json.loads((GOLDEN / "golden.json").read_text(encoding="utf-8"))["cases"]}

TOKEN_METRICS = {"kl", "k3_kl", "chi2_token", "rollout_is_mean", "rollout_rs_masked_fraction"}
SEQUENCE_METRICS = {
    "training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "log_ppl_diff", "log_ppl_abs_diff",
    "log_ppl_diff_max", "log_ppl_diff_min", "ppl_ratio", "chi2_seq", "rollout_is_batch_norm_factor",
    "rollout_rs_seq_masked_fraction",
}  # fmt: skip
NONFINITE = {"nan_at_valid_token", "posinf_at_valid_token", "neginf_at_valid_token"}


def shared_metrics(case: dict, train: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> set[str]:
    """The metrics that both sides define alike on this batch.

    verl averages sequence metrics over empty rows, counts a sequence-level effective sample size in tokens, and
    does not cap k3.
    """
    shared = set(TOKEN_METRICS)
    if mask.any(-1).all():
        shared |= SEQUENCE_METRICS
    if case["kwargs"].get("rollout_is") == "token":
        shared.add("rollout_is_eff_sample_size")
    if ((train - rollout).abs() > 20)[mask].any():
        shared.remove("k3_kl")
    return shared


def reciprocal(thresholds: str | float | None, criteria: str | None) -> str | float | None:
    """verl keeps ρ in [1/upper, 1/lower] for k1: turn its bounds around."""
    if criteria is None or not isinstance(thresholds, str):
        return thresholds
    parts = thresholds.split(",")
    names = list(dict.fromkeys(name.strip() for name in criteria.split(",")))
    turned = []
    for name, part in zip(names, parts, strict=True):
        if name.endswith("k1") and "_" in part:
            lower, upper = (float(side) for side in part.split("_"))
            part = f"{1 / upper!r}_{1 / lower!r}"
        turned.append(part)
    return ",".join(turned)


def run(case: dict, dtype: torch.dtype):
    data = np.load(GOLDEN / case["file"])
    kwargs = dict(case["kwargs"])
    kwargs["rollout_rs_threshold"] = reciprocal(kwargs.get("rollout_rs_threshold"), kwargs.get("rollout_rs"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InertOptionWarning)
        config = RolloutCorrectionConfig(**kwargs)
    train, rollout = (torch.from_numpy(data[name]).to(dtype) for name in ("old_log_prob", "rollout_log_prob"))
    mask = torch.from_numpy(data["response_mask"]).to(getattr(torch, case["mask_dtype"]))
    return data, mask != 0, correct(train, rollout, mask, config)


@per_implementation
@pytest.mark.parametrize("name", CASES)
def test_weights_and_masks_agree(name):
    case = CASES[name]
    data, mask, correction = run(case, getattr(torch, case["dtype"]))
    expected = torch.from_numpy(data["modified_mask"]) != 0
    comparable = mask.clone()
    if name.endswith("_valid_token"):  # a non-finite log-prob: ours is a declared policy, theirs a comparison with NaN
        train, rollout = torch.from_numpy(data["old_log_prob"]), torch.from_numpy(data["rollout_log_prob"])
        hit = (mask & ~(train.isfinite() & rollout.isfinite())).any(-1, keepdim=True)
        comparable &= ~hit
    if case["dtype"] == "float32":
        assert torch.equal(correction.loss_mask & comparable, expected & comparable)
    key = "weights_fp64" if "weights_fp64" in data else "weights"
    if key not in data:
        assert correction.weights is None
        return
    torch.testing.assert_close(
        correction.weights.masked_fill(~comparable, 0.0),
        torch.from_numpy(data[key]).float().masked_fill(~comparable, 0.0),
        rtol=1e-5,
        atol=1e-7,
    )


@per_implementation
@pytest.mark.parametrize("name", [name for name in CASES if name not in NONFINITE])
def test_shared_metrics_agree_with_the_float64_formulas(name):
    case = CASES[name]
    data, mask, correction = run(case, torch.float64)
    train, rollout = (torch.from_numpy(data[key]).double() for key in ("old_log_prob", "rollout_log_prob"))
    ours = correction.metrics(prefix="")
    compared = shared_metrics(case, train, rollout, mask) & case["metrics_fp64"].keys()
    assert len(compared) >= 4
    for key in compared:
        assert ours[key] == pytest.approx(float(case["metrics_fp64"][key]), rel=1e-6, abs=1e-9), key
    assert all(math.isfinite(value) for value in ours.values())
