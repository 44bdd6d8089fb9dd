"""Every implementation against the float64 oracle (tests/oracle.py), on random batches and random configurations.

Weights within 2 float32 ulps (3 if normalized), masks exactly, metrics within 2e-5; tests/oracle_cases.py lists the
exceptions and reasons. `make test` runs a sample; `make test-oracle` runs 200 batches for each of ten seeds for each
implementation.
"""

from __future__ import annotations

import ast
import math
import os
from collections import Counter
from pathlib import Path

import oracle
import pytest
import torch
from implementations import IMPLEMENTATIONS
from oracle_cases import Case, close_comparisons, differences, draw, ulps

from rollcorr.kernels import correction as kernels

SEEDS = int(os.environ.get("ROLLCORR_ORACLE_SEEDS", "0"))
"""How many seeds of 200 batches; 0 takes the sample."""

BATCHES = 200 if SEEDS else 70
INTERPRETED = BATCHES if SEEDS else 12  # Triton's interpreter needs a tenth of a second per batch


def cases(seed: int, count: int, impl: str = "reference") -> list[Case]:
    return [draw(1000 * seed + i, impl) for i in range(count)]


@pytest.mark.parametrize("seed", range(max(SEEDS, 1)))
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_an_implementation_agrees_with_the_oracle(impl, seed):
    found = []
    for i, case in enumerate(cases(seed, INTERPRETED if impl == "triton" else BATCHES, impl)):
        # Both layouts have the same answer; the slow interpreter alternates between them.
        for packed in [i % 2 == 0] if impl == "triton" else [False, True]:
            correction = case.run(impl, packed=packed)
            layout = "packed" if packed else "padded"
            found += [
                f"batch {1000 * seed + i}, {layout}: {said}"
                for said in differences(case, correction, impl, packed=packed)
            ]
    assert not found, f"{impl} differs from the oracle {len(found)} times:\n" + "\n".join(found[:20])


def test_triton_runs_or_the_reason_is_shown():
    """Its cases are not collected where it cannot run; `make test-triton` installs it."""
    usable, said = kernels.implementations()["triton"]
    assert usable == ("triton" in IMPLEMENTATIONS)
    if not usable:
        pytest.skip(f"no test runs on 'triton': {said}")


def test_the_batches_hold_what_they_are_meant_to_hold():
    """Each kind of value, bound and policy occurs, and few batches had to be drawn again."""
    drawn = cases(0, 200)
    seen = Counter()
    for case in drawn:
        config, metrics, valid = case.config, case.expected.metrics, case.mask != 0
        seen[f"level {config.rollout_is}"] += 1
        seen[f"mode {config.is_mode}"] += config.rollout_is is not None
        seen["band open below"] += config.is_mode == "icepop" and config.is_lower is None
        seen["band open above"] += config.is_mode == "icepop" and config.is_upper is None
        seen["floor, no ceiling"] += config.rollout_is_floor is not None and config.is_upper is None
        seen["floor and ceiling"] += config.rollout_is_floor is not None and config.is_upper is not None
        seen[f"nonfinite {config.nonfinite}"] += metrics["nonfinite_count"] > 0
        seen[f"over {config.batch_normalize_over}"] += "rollout_is_batch_norm_factor" in metrics
        seen["open side"] += any(c.kind == "k1" and None in (c.lower, c.upper) for c in config.criteria)
        seen["veto"] += metrics.get("rollout_is_veto_fraction", 0) > 0
        seen["zero probability"] += metrics["zero_probability_count"] > 0
        seen["empty batch"] += metrics["token_count"] == 0
        seen["empty row"] += 0 < metrics["sequence_count"] < len(case.mask)
        seen["tiny weights"] += 0 < metrics.get("rollout_is_max", 0) < 1e-8
        seen["huge log-ratio"] += metrics["log_ratio_abs_mean"] > 100
        seen["end of the float range"] += metrics["log_ratio_max"] > 1e38 or metrics["log_ratio_min"] < -1e38
        seen["garbage under the mask"] += bool((~(case.train.isfinite() & case.rollout.isfinite()) & ~valid).any())
        seen["some kept, some not"] += 0 < metrics["rollout_rs_masked_fraction"] < 1
        seen["safety bound below the band"] += config.is_mode == "icepop" and config.safety_bound <= 3
        for tensor in (case.train, case.rollout):
            seen[str(tensor.dtype)] += 1
        for criterion in config.criteria:
            seen[criterion.name] += 1
    assert {name: times for name, times in seen.items() if times < 3} == {}
    assert sum(case.redrawn for case in drawn) < 0.1 * len(drawn)


def test_a_batch_that_a_bound_would_decide_by_rounding_is_drawn_again():
    settings = oracle.Settings(criteria=(oracle.Criterion("token", "k1", upper=1.5),))
    for off, close in ((0.0, True), (5e-6, True), (-5e-6, True), (1e-3, False)):
        rows = [[[math.log(1.5) + off - 1.0]], [[-1.0]], [[1.0]]]
        assert any(close_comparisons(rows, settings)) == close


def test_the_oracle_shares_no_code_with_the_package():
    tree = ast.parse(Path(oracle.__file__).read_text(encoding="utf-8"))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported == {"__future__", "collections", "dataclasses", "math", "typing"}


def worked(log_ratios: list[list[float]], **settings) -> oracle.Result:
    """The oracle on sequences with these log-ratios; log μ is −1."""
    train = [[d - 1.0 for d in row] for row in log_ratios]
    ones = [[1.0] * len(row) for row in log_ratios]
    return oracle.correct(train, [[-1.0] * len(row) for row in log_ratios], ones, oracle.Settings(**settings))


def test_the_oracle_by_hand():
    """ρ = (2, 1/2) and (4, 1, 1), truncated at 3; the first product is 1, the second 4."""
    criterion = oracle.Criterion("seq_sum", "k1", 0.5, 2.0)
    found = worked([[math.log(2), -math.log(2)], [math.log(4), 0, 0]], level="token", upper=3.0, criteria=(criterion,))
    assert [w for row in found.weights for w in row] == pytest.approx([2, 0.5, 3, 1, 1])
    assert found.loss_mask == [[True, True], [False, False, False]]
    assert found.sequence_kept == [True, False]
    expected = {
        "kl": -2 * math.log(2) / 5,
        "k3_kl": (1 - math.log(2) - 0.5 + math.log(2) + 3 - math.log(4)) / 5,
        "chi2_token": (3 - 0.75 + 15) / 5,
        "chi2_seq": 15 / 2,
        "training_ppl": (math.e + math.e / 4 ** (1 / 3)) / 2,
        "rollout_is_eff_sample_size": 7.5**2 / (5 * (4 + 0.25 + 9 + 1 + 1)),
        "rollout_is_ratio_fraction_high": 1 / 5,
        "rollout_rs_masked_fraction": 3 / 5,
        "rollout_rs_seq_sum_k1_mean": -math.log(2),
    }
    for name, value in expected.items():
        assert found.metrics[name] == pytest.approx(value), name


def test_the_oracle_on_what_was_decided_for_the_correction():
    tiny = worked([[-25.0, -25.0]], level="token").metrics
    assert (tiny["rollout_is_eff_sample_size"], tiny["saturated_low_fraction"]) == (1.0, 1.0)

    # One of two sequences is outside the band, with three of the four tokens.
    outside = worked([[1.0, 1.0, 1.0], [0.0]], level="sequence", lower=0.5, upper=2.0, band=True).metrics
    assert outside["rollout_is_oob_ratio"] == 0.75

    # The safety bound brings ρ = e³ into the band.
    clamped = worked([[3.0]], level="token", lower=0.5, upper=5.0, safety_bound=1.0)
    assert clamped.weights == [[math.e]]
    assert clamped.metrics["rollout_is_ratio_fraction_high"] == 1.0

    sentinel = oracle.correct([[-1.0, -2.0]], [[-3.4e38, -2.0]], [[1, 1]], oracle.Settings()).metrics
    assert (sentinel["training_log_ppl"], sentinel["rollout_log_ppl"]) == (1.5, 1.7e38)

    neutral = oracle.correct(
        [[math.nan, -2.0]], [[-1.0, -2.5]], [[1, 1]], oracle.Settings(level="token", nonfinite="neutral")
    )
    assert neutral.weights[0] == pytest.approx([1.0, math.exp(0.5)])
    assert neutral.loss_mask == [[True, True]]


def test_the_distance_of_weights_is_measured_in_float32_ulps():
    one = torch.tensor([1.0])
    assert ulps(torch.nextafter(one, 2 * one), one.double()) == 1.0
    assert ulps(torch.zeros(1), torch.zeros(1).double()) == 0.0
    assert ulps(torch.tensor([math.nan]), one.double()) == math.inf
