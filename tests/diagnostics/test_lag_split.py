"""The split of k3 by lag: the engine's mismatch at lag 0, and what old weights add."""

import json
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from rollcorr import Monitor, RolloutSample
from rollcorr.cli.app import app
from rollcorr.diagnostics.log_check import check_logs
from rollcorr.diagnostics.log_check.check import DIAGNOSIS
from rollcorr.diagnostics.log_check.log_tally import read_log
from rollcorr.diagnostics.null.version_cells import VersionCells, lag_metrics, lag_rows
from rollcorr.diagnostics.report.curves import panels_of
from rollcorr.diagnostics.report.html_page import series_by_name
from rollcorr.diagnostics.report.report_data import run_report
from rollcorr.monitor.lag_split import LagSplit
from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter
from rollcorr.run_directory.stored_run import read_run

STEPS, ROWS, LENGTH, VOCABULARY = 10, 64, 40, 16
LAGS = (0, 0, 1, 2, 4)


def log_softmax(z):
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def write_log(path, seed=0, *, grid=0.0, drift=0.0, version=lambda step, lag: step - 1 - lag):
    """Sample from policies of several ages, rounded to a grid, and log them; return Σ k3 of the rounding.

    Args:
        path: the file.
        seed: of policies and draws.
        grid: width of the grid that the sampler rounds its logits to.
        drift: size of an update of the logits.
        version: what the log records for a step and a lag.
    """
    random = np.random.default_rng(seed)
    updates = drift * random.normal(size=(STEPS, VOCABULARY, VOCABULARY))
    versions = np.concatenate([random.normal(size=(1, VOCABULARY, VOCABULARY)), updates]).cumsum(0)
    step = np.arange(1, STEPS + 1).repeat(ROWS)
    lag = np.minimum(random.choice(LAGS, size=len(step)), step - 1)
    contexts = random.integers(VOCABULARY, size=(len(step), LENGTH))
    old = versions[(step - 1 - lag)[:, None], contexts]
    mu = log_softmax(np.round(old / grid) * grid if grid else old)
    ids = (random.random((*contexts.shape, 1)) > np.exp(mu).cumsum(-1)).sum(-1).clip(max=VOCABULARY - 1)
    sides = (log_softmax(versions[(step - 1)[:, None], contexts]), mu, log_softmax(old))
    pi, mu, unrounded = (torch.from_numpy(np.take_along_axis(side, ids[..., None], -1)[..., 0]) for side in sides)

    recorded = [int(version(*pair)) for pair in zip(step.tolist(), lag.tolist(), strict=True)]
    columns = {"rollout_log_prob": mu, "old_log_prob": pi, "step": step.tolist(), "policy_versions": recorded}
    with RolloutLogWriter(path) as log:
        log.write(RolloutBatch.from_padded(torch.ones(mu.shape, dtype=torch.bool), **columns))
    return float((torch.expm1(unrounded - mu) - (unrounded - mu)).sum())


def split(path):
    """Σ k3 of a log, and of it the engine's and the old weights'."""
    rows = lag_rows(read_log([path], DIAGNOSIS).tally.versions.by_lag())
    count, metrics = sum(row.tokens for row in rows), lag_metrics(rows)
    parts = [count * metrics[f"rollout_corr/{name}"] for name in ("k3_kl_lag0", "k3_kl_staleness")]
    return sum(row.tokens * row.k3_kl for row in rows), *parts


@pytest.mark.parametrize("seed", range(20))
def test_lag_and_quantization_land_apart(tmp_path, seed):
    write_log(tmp_path / "lag.parquet", seed, drift=0.05)
    total, engine, stale = split(tmp_path / "lag.parquet")
    assert total > 0
    assert stale >= 0.95 * total
    assert abs(engine) <= 0.05 * total
    write_log(tmp_path / "grid.parquet", seed, grid=0.25)
    total, engine, stale = split(tmp_path / "grid.parquet")
    assert total > 0
    assert engine >= 0.95 * total
    assert abs(stale) <= 0.05 * total


@pytest.mark.parametrize("seed", range(3))
def test_both_at_once_are_separated(tmp_path, seed):
    quantized = write_log(tmp_path / "both.parquet", seed, grid=0.25, drift=0.05)
    total, engine, stale = split(tmp_path / "both.parquet")
    assert engine + stale == pytest.approx(total)
    assert engine == pytest.approx(quantized, rel=0.05)
    assert stale == pytest.approx(total - quantized, rel=0.1)


@pytest.mark.parametrize(
    "version",
    [
        lambda step, lag: step - lag,  # the policy of step s has version s
        lambda step, lag: 100 + step - lag,  # versions count from elsewhere
        lambda step, lag: (step - 1) // 3 - lag,  # versions count weight syncs
    ],
    ids=["from one", "ahead", "syncs"],
)
def test_lag_needs_no_common_counter(tmp_path, version):
    write_log(tmp_path / "log.parquet", drift=0.05, version=version)
    rows = read_log([tmp_path / "log.parquet"], DIAGNOSIS).tally.versions.by_lag()
    assert [row.lag for row in lag_rows(rows)] == [0, 1, 2, 3, 4]
    assert rows[STEPS].keys() == {0, 1, 2, 4}


def test_versions_that_never_rise_are_old_weights():
    cells = VersionCells({(step, 0): (100.0, 1e-3 * step) for step in range(1, 5)})
    assert [next(iter(lags)) for lags in cells.by_lag().values()] == [0, 1, 2, 3]


@pytest.mark.parametrize("steps", range(2, 30))
def test_filling_queue_is_no_slow_counter(steps):
    """Versions stay at 0 while a queue of eight steps fills."""
    cells = {(step, max(step - 8, 0)): (100.0, 1.0) for step in range(steps)}
    assert [next(iter(lags)) for lags in VersionCells(cells).by_lag().values()] == [min(s, 8) for s in range(steps)]


@pytest.mark.parametrize("steps", range(2, 14))
def test_rare_syncs_are_no_slow_counter(steps):
    """New weights before every fourth step, with versions that count steps."""
    cells = {(step, (step - 1) // 4 * 4): (100.0, 1.0) for step in range(1, steps + 1)}
    lags = [next(iter(lags)) for lags in VersionCells(cells).by_lag().values()]
    assert lags == [step % 4 for step in range(steps)]


def test_error_of_a_lag_is_its_spread_over_steps():
    """Means 0.1 and 0.3 of equal counts: 0.2 ± 0.1."""
    (row,) = lag_rows(VersionCells({(1, 0): (10.0, 1.0), (2, 1): (10.0, 3.0)}).by_lag())
    assert row == (0, 20, pytest.approx(0.2), pytest.approx(0.1))
    (single,) = lag_rows(VersionCells({(1, 0): (10.0, 1.0)}).by_lag())
    assert math.isnan(single.error)


def test_without_lag_0_nothing_is_split():
    assert lag_metrics(lag_rows(VersionCells({(5, 2): (100.0, 1.0)}).by_lag())) == {}


def test_check_prints_and_exports_the_split(tmp_path):
    write_log(tmp_path / "log.parquet", grid=0.25, drift=0.05)
    command = ["check", str(tmp_path / "log.parquet")]
    shown = CliRunner().invoke(app, command).output
    assert "of the engine, at lag 0" in shown
    assert "of old weights, over all tokens" in shown
    document = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert [row["lag"] for row in document["lags"]] == [0, 1, 2, 3, 4]
    parts = (document["metrics"][name] for name in ("k3_kl_lag0", "k3_kl_staleness"))
    assert sum(parts) == pytest.approx(document["metrics"]["k3_kl"])


def test_monitor_report_and_watch_agree_with_check(tmp_path):
    """Two micro-batches, packed and padded, by token and by sequence."""
    random = torch.Generator().manual_seed(0)
    pi, mu = (-torch.rand(4, 5, generator=random) for _ in range(2))
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[0, 3:] = False
    versions = torch.tensor([1, 2, 2, 0])
    with Monitor(tmp_path / "run", rollouts=RolloutSample(), strict=True) as monitor:
        for step in (1, 2, 3):
            offsets = torch.tensor([0, 5, 10])
            columns = {"policy_versions": (versions[:2, None] + step - 3).expand(2, 5)}
            monitor.correct(pi[:2], mu[:2], mask[:2], columns=columns)
            columns = {"policy_versions": (versions[2:] + step - 3).tolist()}
            rest = (x[2:].flatten() for x in (pi, mu, mask))
            monitor.correct(*rest, cu_seqlens=offsets, columns=columns)
            metrics = monitor.step()
    checked = check_logs([tmp_path / "run"])
    for name in ("k3_kl_lag0", "k3_kl_staleness", "k3_kl_per_version"):
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(checked.metrics[f"rollout_corr/{name}"], rel=1e-6)
    assert [(row.lag, row.tokens) for row in checked.lags] == [(0, 30), (1, 9), (2, 15)]
    assert "k3_kl_lag0" in CliRunner().invoke(app, ["watch", str(tmp_path / "run"), "--once"]).output
    data = run_report(read_run(tmp_path / "run"))
    assert data.metrics["k3_kl_lag0"] == metrics["rollout_corr/k3_kl_lag0"]
    panels = panels_of(series_by_name(data.series), diffusion=False)
    assert [panel.name for panel in panels][-2:] == ["lags", "reward"]
    fresh = panels_of({"k3_kl_lag0": (), "k3_kl_staleness": ()}, diffusion=False)
    assert "lags" not in {panel.name for panel in fresh}, "a panel of zeros in every run"


def test_other_forms_of_versions_are_left_out():
    split, values, mask = LagSplit(), torch.zeros(2, 3), torch.ones(2, 3)
    for versions in ([0.5, 1.5], [[(0, 3, 1)], [(0, 2, 1), (2, 1, 2)]], ["a", "b"], [1, 2, 3]):
        assert split.statistics(1, versions, values, values, mask, None) is None
    sums = split.statistics(1, 0, values, values - 0.5, torch.zeros(2, 3), None)
    assert sums is not None
    assert not any(sums.read().numbers), "a batch without a token"


def test_parts_add_up_to_k3_in_a_monitor(tmp_path):
    """Also with a log-ratio below −20, which k3 does not cap."""
    pi, mu = torch.tensor([[-30.0, -1.0], [-2.0, -0.5]]), torch.tensor([[-1.0, -1.5], [-1.0, -1.0]])
    with Monitor(tmp_path / "run") as monitor:
        monitor.correct(pi, mu, torch.ones(2, 2), columns={"policy_versions": [0, -1]})
        metrics = monitor.step()
    parts = metrics["rollout_corr/k3_kl_lag0"] + metrics["rollout_corr/k3_kl_staleness"]
    assert parts == pytest.approx(metrics["rollout_corr/k3_kl"], rel=1e-6)
    assert metrics["rollout_corr/k3_kl_lag0"] == pytest.approx((28 + math.expm1(0.5) - 0.5) / 2)
