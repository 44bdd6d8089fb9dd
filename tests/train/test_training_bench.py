"""The training bench: its cells, its runner, and tables that claim no more than the finished cells show."""

from __future__ import annotations

import argparse
import csv
import io
from pathlib import Path

import pytest
from rich.console import Console

BENCH = Path(__file__).parents[2] / "experiments" / "bench"

FAKE_PROGRAM = """
import sys
from pathlib import Path
name, folder = sys.argv[1], Path(sys.argv[4])
(folder / name).touch()
sys.exit({"stale-none-0": 1, "stale-none-2": 130}.get(name, 0))
"""


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import bench

    return bench


@pytest.fixture
def page(bench):
    import bench_page

    return bench_page


def result(cell, end):
    held_out = [{"step": 10 * i, "accuracy": value} for i, value in enumerate((0.5, 0.5, end))]
    return {
        "cell": cell.name,
        "column": cell.column,
        "correction": cell.correction,
        "seed": cell.seed,
        "held_out": held_out,
    }


def ends_of(cell):
    """Seq-TIS ends 0.2 above all others, on every sampler."""
    return 0.5 + 0.01 * (cell.seed % 3) + 0.2 * (cell.correction == "seq_tis")


def test_stages_have_whole_seed_sets_in_order(bench):
    first, both = bench.cells(1), bench.cells(2)
    assert (len(first), len(both)) == (200, 320)
    assert len({cell.name for cell in both}) == 320
    assert {cell.name for cell in first} <= {cell.name for cell in both}
    assert [cell.column for cell in first] == [sampler for sampler in bench.SAMPLERS for _ in range(40)]
    assert [cell.seed for cell in first[:40]] == [seed for seed in range(8) for _ in range(5)]


def test_every_cell_has_a_valid_config(bench):
    crosses = [cell for cell in bench.cells(2) if cell.column == "clean" or cell.correction == "horizon"]
    configs = [cell.config() for cell in crosses if cell.seed == 0]
    assert len(configs) == 12
    assert len({config.rollout.rows * config.steps for config in configs}) == 1
    assert len({str(config.model.path) for config in configs}) == 1


def test_failed_cells_stop_nothing_and_stopped_cells_everything(bench, monkeypatch, tmp_path):
    import cell_runner

    monkeypatch.setattr(cell_runner, "RUNS", tmp_path)
    monkeypatch.setattr(cell_runner, "make_warm_up", lambda seed, console: None)
    program = tmp_path / "program.py"
    program.write_text(FAKE_PROGRAM, encoding="utf-8")
    options = argparse.Namespace(minutes=None, jobs=1, folder=tmp_path)
    cells = [bench.Cell("stale", "none", seed) for seed in range(4)]

    assert cell_runner.run_side_by_side(cells[:2], Console(file=io.StringIO()), options, program) == 1
    assert cell_runner.run_side_by_side(cells, Console(file=io.StringIO()), options, program) == 130
    assert [(tmp_path / cell.name).exists() for cell in cells] == [True, True, True, False]


def test_each_pair_of_corrections_is_tested_once(bench, page):
    cells = [cell for cell in bench.cells(1) if cell.column in ("stale", "clean")]
    found = [result(cell, ends_of(cell)) for cell in cells]
    rows = page.contrast_rows(cells, found)
    assert len({frozenset((row["sampler"], row["first"], row["second"])) for row in rows}) == len(rows) == 20
    different = [row for row in rows if row["p"] < 0.05]
    assert len(different) == 8
    assert all("Seq-TIS 4.0" in (row["first"], row["second"]) for row in different)


def test_unfinished_samplers_have_results_and_no_test(bench, page):
    cells = [cell for cell in bench.cells(1) if cell.column in ("stale", "clean")]
    found = [result(cell, ends_of(cell)) for cell in cells[:-1]]
    assert {row["sampler"] for row in page.contrast_rows(cells, found)} == {"stale"}
    assert [row["seeds"] for row in page.result_rows(cells, found)] == [8] * 9 + [7]
    assert "**79 of 80 cells" in page.page_text(cells, found)
    assert "clean lacks 1 cells" in page.page_text(cells, found)
    assert "No sampler has all its cells yet." in page.page_text(cells, found[:3])


def test_results_have_intervals_and_lost_runs(bench, page):
    cells = [bench.Cell("stale", "none", seed) for seed in range(3)]
    (row,) = page.result_rows(cells, [result(cell, end) for cell, end in zip(cells, (0.2, 0.6, 0.7), strict=True)])
    assert (row["seeds"], row["lost"]) == (3, 1)
    assert row["final"].mean == pytest.approx(0.5)
    assert row["final"].half == pytest.approx(4.3027 * 0.07**0.5 / 3**0.5, rel=1e-4)
    assert row["mean"].mean == pytest.approx((0.35 + 0.55 + 0.6) / 3)


@pytest.mark.parametrize(("end", "code"), [(0.52, 0), (0.7, 1)])
def test_a_retrained_cell_lands_within_its_interval(bench, monkeypatch, tmp_path, end, code):
    cells = [bench.Cell("stale", "none", seed) for seed in range(8)]
    found = [result(cell, 0.5 + 0.01 * (cell.seed % 3)) for cell in cells]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "run_cell", lambda cell, console, *overrides: result(cell, end))
    assert bench.train_again(cells[0], found, Console(file=io.StringIO())) == code
    assert bench.train_again(cells[0], found[:1], Console(file=io.StringIO())) == 2


def test_committed_tables_are_those_of_committed_cells(bench, page, tmp_path):
    cells = bench.cells(1)
    found = bench.read_cells(cells, bench.CELLS)
    page.write_page(cells, found, tmp_path)
    for name in ("results.md", "results.csv", "contrasts.csv", "regret.csv", "choices.csv"):
        assert (tmp_path / name).read_bytes() == (BENCH / name).read_bytes()
    with (BENCH / "results.csv").open(encoding="utf-8", newline="") as file:
        assert sum(int(row["seeds"]) for row in csv.DictReader(file)) == len(found)

    config = cells[0].config()
    for one in found:
        assert (one["steps"], one["responses"]) == (config.steps, config.steps * config.rollout.rows)
        assert [point["step"] for point in one["held_out"]] == [0, 10, 20, 30, 40]


def test_the_page_names_untrained_rivals(bench):
    import rivals

    trained = {cell["correction"] for cell in bench.read_cells(bench.cells(3), bench.CELLS)}
    page = " ".join((BENCH / "results.md").read_text(encoding="utf-8").split())
    assert ("no cell of them is trained yet" in page) == trained.isdisjoint(rivals.RIVALS)


def log_rows(sampler, seed, ess, *, decision="correct"):
    """What first_rollouts.csv has of a log: Seq-TIS with an ESS, and a token weight."""
    row = {
        "sampler": sampler,
        "seed": str(seed),
        "decision": decision,
        "printed": "repair the reader",
        "t_times_kl": "5",
    }
    numbers = {"kept": "1", "mean_weight": "0.5", "token_ess": "1", "signal": "", "noise": "", "bias": ""}
    return [{**row, **numbers, "name": name, "sequence_ess": str(ess)} for name in ("Token-TIS 2", "Seq-TIS 4")]


def test_regret_by_hand(bench, page):
    """Seq-TIS ends 0.2 above the rest; one log of eight is advised token weights: an eighth of the room of 0.21."""
    import regret

    cells = [cell for cell in bench.cells(1) if cell.column == "stale"]
    found = [result(cell, ends_of(cell)) for cell in cells]
    first = [row for seed in range(8) for row in log_rows("stale", seed, 0.01 if seed == 3 else 0.5)]
    regimes = regret.regimes(found, first)
    (row,) = regret.regret_rows(regimes)
    assert row["regret"] == row["regret_leave_one_out"] == pytest.approx(0.2 / 8 / (0.2 + 0.07 / 8))
    (choice,) = regret.choice_rows(regimes)
    assert (choice["seed"], choice["advised"], choice["best"]) == (3, "Token-TIS 2.0", "Seq-TIS 4.0")
    assert choice["difference"] == pytest.approx(-0.2)
    assert "below" in choice["reason"]


def test_logs_without_advice_train_without_correction(bench, page):
    import regret

    cells = [cell for cell in bench.cells(1) if cell.column == "stale"]
    found = [result(cell, ends_of(cell)) for cell in cells]
    first = [row for seed in range(8) for row in log_rows("stale", seed, 0.5, decision="repair" if seed else "correct")]
    choices = regret.choice_rows(regret.regimes(found, first))
    assert [choice["seed"] for choice in choices] == list(range(1, 8))
    assert {(choice["advised"], choice["reason"]) for choice in choices} == {("no correction", "repair the reader")}
    advised = [one for one in found if (one["correction"], one["seed"]) != ("seq_tis", 0)]
    assert regret.regimes(found, first[:-2]) == regret.regimes(advised, first) == {}


def test_candidates_and_cells_have_equal_configurations(bench):
    """The advised configuration needs no training of its own: the bench has its cells."""
    import regret

    from rollcorr.diagnostics.advice.candidates import CANDIDATES

    assert regret.CORRECTION_OF.keys() == CANDIDATES.keys() - {"k3 + token"}
    for name, correction in regret.CORRECTION_OF.items():
        trained, advised = bench.Cell("stale", correction, 0).config().algorithm.correction, CANDIDATES[name].config
        # Weights that are only measured change no loss.
        changes_nothing = not any(one.weights_reach_loss or one.rollout_rs for one in (trained, advised))
        assert trained == advised or (name == "none" and changes_nothing), name


def test_measured_logs_are_those_of_the_cells_without_correction(bench):
    """T × KL of each log is that of the first steps of the trained cell."""
    import first_rollouts

    logs = {(row["sampler"], int(row["seed"])): float(row["t_times_kl"]) for row in first_rollouts.read_rows()}
    assert len(logs) >= 8
    for (sampler, seed), measured in logs.items():
        (cell,) = bench.read_cells([bench.Cell(sampler, "none", seed)], bench.CELLS)
        steps = cell["metrics"]["t_times_kl"][: first_rollouts.FIRST_STEPS]
        assert measured == pytest.approx(sum(steps) / len(steps), rel=0.01, abs=0.01), (sampler, seed)
