"""k3 by step and version: the age of the weights, or a sampler that never took new ones over."""

import numpy as np
import pytest

from rollcorr.diagnostics.faults import is_rise
from rollcorr.diagnostics.health.health_check import health
from rollcorr.diagnostics.health.trend import AGE
from rollcorr.diagnostics.log_check import check_logs
from rollcorr.diagnostics.null.version_cells import VersionCells, judge_versions, mean_lag
from tests.diagnostics.null_logs import rollouts, write_rows


def cells(k3_of, *, steps=12, lags=(0,), tokens=1000.0):
    """Cells of steps 1, 2, …, each with tokens of the given ages; `k3_of(step, lag)` is per token."""
    table = [(step, step - lag, k3_of(step, lag)) for step in range(1, steps + 1) for lag in lags]
    step, version, k3 = (np.array(column) for column in zip(*table, strict=True))
    return VersionCells.of(step, version, k3 * tokens, np.full(len(k3), tokens))


def codes(versions):
    """Codes within the steps, then over the steps."""
    series = []
    for step, lags in versions.by_lag().items():
        tokens, k3 = (sum(cell[part] for cell in lags.values()) for part in (0, 1))
        series.append({"step": step, "k3_kl": k3 / tokens, AGE: mean_lag(lags)})
    over_steps = [finding for finding in health(series).findings if is_rise(finding)] if series else []
    return list(dict.fromkeys(finding.code for finding in (*judge_versions(versions), *over_steps)))


def test_a_mismatch_that_grows_with_the_recorded_age_is_staleness():
    assert codes(cells(lambda step, lag: 0.001 * (1 + lag) ** 2, lags=(0, 1, 4))) == ["stale_by_lag"]
    (finding,) = judge_versions(cells(lambda step, lag: 0.001 * (1 + lag) ** 2, lags=(0, 1)))
    assert finding.evidence["growth"] == pytest.approx(4.0)
    assert finding.value == pytest.approx(0.004), "the value of k3_kl is a k3"
    assert finding.limit == "below 1.5 times 0.001, that of the newest weights"


def test_a_mismatch_that_grows_while_the_recorded_age_stays_is_a_frozen_sampler():
    assert codes(cells(lambda step, lag: 0.001 * step**2)) == ["frozen_sampler"]


def test_growth_with_a_recorded_age_that_grows_too_is_staleness():
    grows = {(step, 0): (1000.0, 0.5 * step**2) for step in range(1, 13)}
    assert codes(VersionCells(grows)) == ["stale_by_lag"]


def test_a_sampler_that_grows_worse_at_one_recorded_age_is_frozen_although_the_age_grew_before():
    """The log records at most 8 versions."""
    lag = [min(step, 8) for step in range(40)]
    frozen = {(step, step - age): (1000.0, 0.1 * (1 + step) ** 2) for step, age in enumerate(lag)}
    assert codes(VersionCells(frozen)) == ["frozen_sampler"]
    stale = {(step, step - age): (1000.0, 0.001 * (1 + age) ** 4 * 1.01**step) for step, age in enumerate(lag)}
    assert codes(VersionCells(stale)) == ["stale_by_lag"]


def test_check_names_a_constant_lag_and_not_a_frozen_sampler(tmp_path):
    rows = []
    for step in range(30):
        lag = min(step, 8)
        fault = rollouts(rows=8, length=40, seed=step, weights=0.02 * lag)
        versions = [{"start": 0, "length": 40, "version": step - lag}]
        rows += [{**row, "step": step, "policy_versions": versions} for row in fault]
    result = check_logs([write_rows(tmp_path / "log.parquet", rows)])
    assert result.hypotheses[0].code == "stale_by_lag"
    assert "frozen_sampler" not in {finding.code for finding in result.health.findings}
    assert result.series[20]["engine/staleness"] == 8


@pytest.mark.parametrize("first", [0, 1, 100], ids=["policy at step - 1", "policy at step", "another counter"])
def test_fresh_tokens_have_age_zero(first):
    """Half of the tokens of step 3 are two versions old; the others of all steps are fresh."""
    fresh = {(step, step - 1 + first): (10.0, 1.0) for step in range(1, 6)}
    versions = VersionCells({**fresh, (3, first): (10.0, 1.0)})
    assert [mean_lag(lags) for lags in versions.by_lag().values()] == [0, 0, 1, 0, 0]


def test_the_same_mismatch_at_every_step_and_age_is_nothing():
    noise = np.random.default_rng(0).uniform(0.8, 1.2, size=100)
    assert codes(cells(lambda step, lag: 0.001 * noise[step], lags=(0, 1, 2))) == []
    assert codes(cells(lambda step, lag: 0.001 * step, steps=4)) == [], "too few steps"
    assert codes(VersionCells()) == []


def test_cells_of_parts_merge_to_those_of_the_whole():
    step, version = np.array([1, 1, 2, 2]), np.array([0, 1, 1, 1])
    k3, tokens = np.array([1.0, 2.0, 3.0, 4.0]), np.array([10.0, 10.0, 5.0, 5.0])
    whole = VersionCells.of(step, version, k3, tokens)
    assert whole.cells == {(1, 0): (10.0, 1.0), (1, 1): (10.0, 2.0), (2, 1): (10.0, 7.0)}
    parts = [VersionCells.of(step[i : i + 1], version[i : i + 1], k3[i : i + 1], tokens[i : i + 1]) for i in range(4)]
    merged = VersionCells()
    for part in parts:
        merged = merged.merge(part)
    assert merged == whole


def test_check_names_a_sampler_that_keeps_old_weights(tmp_path):
    rows = []
    for step in range(1, 11):
        fault = rollouts(rows=8, length=50, seed=step, weights=0.02 * step)
        rows += [
            {**row, "step": step, "policy_versions": [{"start": 0, "length": 50, "version": step}]} for row in fault
        ]
    result = check_logs([write_rows(tmp_path / "log.parquet", rows)])
    assert result.hypotheses[0].code == "frozen_sampler"
    assert {f.code: f.follows_from for f in result.hypotheses}["weights_differ"] == "frozen_sampler"
