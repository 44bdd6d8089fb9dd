"""Three processes give the metrics and the log of one, however their sequences are dealt."""

from __future__ import annotations

import math

import monitor_ranks
import pytest
import torch
from fault_cases import faults_of
from processes import start_ranks

from rollcorr import read_run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where three processes have run every scenario, in one start."""
    path = tmp_path_factory.mktemp("monitors")
    start_ranks(monitor_ranks.run, path, monitor_ranks.SIZE)
    return path


@pytest.fixture(scope="module")
def results(folder):
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(monitor_ranks.SIZE)]


@pytest.fixture(scope="module")
def alone(folder):
    return monitor_ranks.whole_run(folder / "alone")


@pytest.mark.parametrize("scenario", ["micro-batches", "over ranks"])
def test_uneven_packed_micro_batches_on_three_ranks_equal_one_process(results, alone, scenario):
    for rank in range(monitor_ranks.SIZE):
        for step, expected in enumerate(alone):
            found = results[rank][scenario]["metrics"][step]
            assert found == pytest.approx(expected, rel=1e-12, abs=1e-12, nan_ok=True)
            assert found == pytest.approx(results[0][scenario]["metrics"][step], rel=0, abs=0, nan_ok=True)
    assert alone[0]["rollout_corr/nonfinite_count"] == 1
    assert alone[0]["rollout_corr/rollout_rs_masked_fraction"] > 0


@pytest.mark.parametrize("scenario", ["micro-batches", "over ranks"])
def test_a_step_is_one_transfer_and_a_new_layout_one_more(results, scenario):
    """The ranks' layouts differ, and are learned before the first vector travels."""
    assert [results[rank][scenario]["transfers"] for rank in range(monitor_ranks.SIZE)] == [2, 2, 2]


def test_what_one_rank_measures_later_reaches_all(results):
    """A step with a new layout uses a second transfer only where it needs more room than all earlier ones."""
    for result in results:
        names = [sorted(metrics) for metrics in result["late"]["metrics"]]
        assert names[0] == ["lr"]
        assert [sum(name.endswith("/mean") for name in step) for step in names] == [0, 2, 50, 3]
        assert result["late"]["metrics"][3]["late/2/mean"] == 1.5
        assert result["late"]["transfers"] == [1, 2, 4, 5]


def test_denominators_are_those_of_all_ranks(results):
    assert len({tuple(result["over ranks"]["tokens"]) for result in results}) == 1
    assert results[1]["over ranks"]["tokens"][0] > 0


def test_every_rank_raises_the_same_alarms(results):
    alarms = [result["micro-batches"]["alarms"] for result in results]
    assert alarms[0]
    assert alarms == [alarms[0]] * monitor_ranks.SIZE


def test_the_ranks_leave_one_run_that_can_be_read(folder, alone):
    run = read_run(folder / "micro")
    assert [metrics["step"] for metrics in run.series] == [1, 2]
    assert run.series[0]["reward/mean"] == alone[0]["reward/mean"]
    assert run.config.rollout_is == "token"


@pytest.mark.parametrize("name", ["micro", "over"])
def test_the_logs_of_all_ranks_hold_the_rows_that_one_process_keeps(folder, results, alone, name):
    expected, found = monitor_ranks.logged(folder / "alone"), monitor_ranks.logged(folder / name)
    assert 0 < len(expected) < 2 * len(monitor_ranks.LENGTHS)
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        for column in ("sequence_id", "reward", "response_mask"):
            assert found[key][column] == row[column]
        assert found[key]["rollout_log_prob"] == pytest.approx(row["rollout_log_prob"], nan_ok=True)


def test_every_rank_is_told_that_the_directory_is_taken(results):
    for result in results:
        assert "has 2 steps already" in result["refused"]


@pytest.mark.parametrize("name", [fault[0] for fault in monitor_ranks.FAULTS])
def test_ranks_agree_while_a_disk_fails(folder, results, name):
    runs = [result["faults"][name] for result in results]
    assert runs[0] == runs[1] == runs[2]
    assert any("monitor/unwritten_steps" in metrics for metrics in runs[0]) == ("second" not in name)
    assert faults_of(folder / name, runs[0], ranks=monitor_ranks.SIZE) == []


def test_context_slices_are_counted_once(folder, results):
    """Slices use a different kernel than full sequences: sums agree to float32."""
    expected = monitor_ranks.context_whole(folder / "context alone")
    for result in results:
        assert result["context"]["metrics"] == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("layout", ["context", "padded context"])
def test_joined_context_slices_are_whole_rows(folder, results, layout):
    rows = monitor_ranks.logged(folder / layout)
    assert sorted(rows) == [(1, 3), (1, 6)]
    for (_, number), row in rows.items():
        whole = monitor_ranks.sequences()[number]
        logged = len(row["response_mask"])
        assert row["response_mask"] == whole["mask"].tolist()[:logged]
        assert row["old_log_prob"] == pytest.approx(whole["train"].tolist()[:logged])
        assert not any(whole["mask"][logged:])  # a padded row ends with its last token
        assert row["reward"] == number**2
    assert math.isnan(rows[1, 3]["rollout_log_prob"][2])
