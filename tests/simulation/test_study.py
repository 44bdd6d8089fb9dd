"""The built-in study: its coverage, numbers of its quick subset, the committed results, resumption, and files."""

import csv
import json
from pathlib import Path

import pytest

from rollcorr.config import CRITERIA, PRESETS, InertOptionWarning, RolloutCorrectionConfig
from rollcorr.simulation.estimators import every_estimator, threshold_sweep
from rollcorr.simulation.mismatches import KINDS
from rollcorr.simulation.simulation_figures import write_figures
from rollcorr.simulation.simulation_file import chosen_estimators, read_simulation_file, run_file_cell
from rollcorr.simulation.studies import APART, STUDIES, Cell, laboratory_cells, run_cell
from rollcorr.simulation.study_run import cell_key, run_cells

RESULTS = Path(__file__).parents[2] / "experiments" / "laboratory"


def committed(study):
    with (RESULTS / f"{study}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def pick(rows, **wanted):
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def test_every_preset_weight_and_criterion_is_measured():
    measured = list(every_estimator().values())
    for name in PRESETS:
        assert (RolloutCorrectionConfig.preset(name) in measured) == ("_horizon_" not in name), name
    assert len(measured) == len({str(config) for config in measured})
    levels = {config.rollout_is for config in measured if config is not None}
    assert levels == {None, "token", "sequence", "geometric"}
    alone = {config.rollout_rs for config in measured if config is not None and config.rollout_is is None}
    assert set(CRITERIA) <= alone
    assert set(CRITERIA) <= set(threshold_sweep())


def test_the_whole_study_has_every_kind_regime_and_study():
    cells = laboratory_cells()
    assert {cell.study for cell in cells} == {cell.study for cell in laboratory_cells(quick=True)} == set(STUDIES)
    regimes = {(c.settings["kind"], c.settings["t_times_kl"]) for c in cells if c.study == "regimes"}
    assert regimes == {(kind, level) for kind in (*KINDS, *APART) for level in (0.1, 1.0, 10.0, 30.0)}
    assert len({cell_key(cell) for cell in cells}) == len(cells)


# At T = 8, KL = 0.01 per token, batches of 256: bias and deviation relative to |∇J|, and ESS.
EXACT = {
    "none": (0.0895446, 0.102777, 1.0),
    "decoupled_token_is": (0.00420889, 0.0913018, 0.981042),
    "decoupled_seq_is": (0.0145667, 0.0966897, 0.868324),
    "decoupled_k3_rs": (0.509577, 0.130005, 0.557112),
}


def test_the_quick_subset_gives_these_numbers():
    quick = {}
    for cell in laboratory_cells(quick=True):
        quick.setdefault(cell.study, []).append(cell)

    # Exact numbers.
    rows = pick(run_cell(quick["length"][1]), batch_size=256)
    found = {row["estimator"]: row for row in rows}
    assert found["none"]["T"] == 8
    numbers = {name: (found[name]["bias"], found[name]["deviation"], found[name]["ess"]) for name in EXACT}
    for name, expected in EXACT.items():
        assert numbers[name] == pytest.approx(expected, rel=2e-3), name

    # Sampled numbers, with their order.
    rows = run_cell(quick["regimes"][0])
    direction = {row["estimator"]: row["direction"] for row in pick(rows, batch_size=1024)}
    assert direction["decoupled_token_is"] < direction["none"] < direction["decoupled_seq_is"]
    none = pick(rows, estimator="none", batch_size=1024)[0]
    assert none["t_times_kl"] == pytest.approx(1.0)
    assert none["ess"] == pytest.approx(1.0)
    assert not none["exact"]
    assert none["direction_error"] > 0

    # Every filter has a control, and only filters have one.
    for row in rows:
        config = every_estimator()[row["estimator"]]
        rejects = config is not None and (config.criteria or config.rollout_token_veto_threshold is not None)
        assert (row["random_direction"] != "") == bool(rejects)

    for cell in quick["agreement"]:
        rows = run_cell(cell)
        assert all(row["draws"] == 20_000 for row in rows)
        assert max(row["largest_z"] for row in rows) < rows[0]["limit"]


def test_the_committed_results_are_those_of_this_code():
    facts = json.loads((RESULTS / "run.json").read_text(encoding="utf-8"))
    assert facts["cells"] == facts["cells_of_the_study"] == len(laboratory_cells())
    assert facts["cpu_seconds"] < 600
    assert facts["command"].startswith("rollcorr simulate")
    assert facts["seeds"]["agreement"] == [11]
    for study, settings in (
        ("length", {"kind": "noise", "length": 4, "kl": 0.01}),
        ("orders", {"index": 1}),
        ("growth", {"length": 10}),
    ):
        assert Cell(study, settings) in laboratory_cells()
        stored = committed(study)
        for row in run_cell(Cell(study, settings)):
            keys = [k for k in ("kind", "T", "estimator", "batch_size", "quantity", "pair", "x") if k in row]
            same = [
                s for s in stored if all(s[k] in (str(row[k]), f"{row[k]:.6g}" if k == "x" else None) for k in keys)
            ]
            assert len(same) == 1, keys
            for name in ("bias", "deviation", "ess", "slope", "y", "log_exact", "random_mse"):
                if row.get(name, "") != "":
                    assert float(same[0][name]) == pytest.approx(row[name], rel=1e-3, abs=1e-6), (study, name)


def test_the_committed_million_samples_agree_with_exact_values():
    rows = committed("agreement")
    assert {row["kind"] for row in rows} == set(KINDS)
    assert {row["estimator"] for row in rows} == set(every_estimator())
    assert all(row["draws"] == "1000000" for row in rows)
    assert all(float(row["largest_z"]) < float(row["limit"]) for row in rows)


def test_the_committed_results_can_be_drawn(tmp_path):
    """The figures of `rollcorr simulate` after a long run, from that run's tables."""

    def typed(value):
        """As `run_cells` returns it: a table is text, and the rows of a run are not."""
        if value in ("True", "False"):
            return value == "True"
        try:
            return float(value)
        except ValueError:
            return value

    rows = {
        study: [{name: typed(value) for name, value in row.items()} for row in committed(study)] for study in STUDIES
    }
    figures = write_figures(rows, tmp_path)
    assert {figure.name for figure in figures} == {figure.name for figure in RESULTS.glob("*.png")}
    assert all(figure.read_bytes().startswith(b"\x89PNG") for figure in figures)


CELLS = [Cell("growth", {"length": length}) for length in (10, 20, 30)]


def test_an_interrupted_run_keeps_what_is_finished_and_goes_on_from_there(tmp_path):
    asked = []

    def run(cell):
        asked.append(cell.settings["length"])
        if asked == [10, 20]:
            raise KeyboardInterrupt
        return [{"T": cell.settings["length"], "value": 0.5}]

    first = run_cells(CELLS, tmp_path, command="rollcorr simulate", run=run)
    assert (first.interrupted, first.done, first.total) == (True, 1, 3)
    assert (tmp_path / "growth.csv").read_text(encoding="utf-8") == "T,value\n10,0.5\n"

    second = run_cells(CELLS, tmp_path, command="rollcorr simulate", run=run)
    assert (second.interrupted, second.done, second.reused) == (False, 3, 1)
    assert asked == [10, 20, 20, 30]
    assert (tmp_path / "growth.csv").read_text(encoding="utf-8").splitlines() == [
        "T,value",
        "10,0.5",
        "20,0.5",
        "30,0.5",
    ]


def test_a_damaged_or_foreign_result_is_measured_again(tmp_path):
    run_cells(CELLS[:1], tmp_path, command="", run=lambda cell: [{"T": 1}])
    path = tmp_path / "cells" / f"{cell_key(CELLS[0])}.json"
    path.write_text(path.read_text(encoding="utf-8")[:20], encoding="utf-8")
    again = run_cells(CELLS[:1], tmp_path, command="", run=lambda cell: [{"T": 2}])
    assert again.reused == 0
    assert again.rows == {"growth": [{"T": 2}]}
    assert cell_key(Cell("growth", {"length": 11})) != cell_key(CELLS[0])


TEN_LINES = """\
pair: {kind: tempered, severity: 0.3, vocabulary: 3}
length: [3, 40]
estimators:
  - none
  - seq_is
  - {name: mine, rollout_is: sequence, rollout_is_threshold: 0.5_4.0}
batch_sizes: [8, 64]
samples: 200
seed: 1
"""


def write(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_of_ten_lines_measures_a_pair_and_an_estimator_of_ones_own(tmp_path):
    assert len(TEN_LINES.splitlines()) <= 10
    cells = read_simulation_file(write(tmp_path, TEN_LINES))
    rows = [row for cell in cells for row in run_file_cell(cell)]
    assert [(row["T"], row["exact"]) for row in rows[::6]] == [(3, True), (40, False)]
    assert {row["estimator"] for row in rows} == {"none", "seq_is", "mine"}
    assert {row["batch_size"] for row in rows} == {8, 64}


def test_an_estimator_may_be_a_preset_with_some_fields_replaced(tmp_path):
    text = TEN_LINES.replace(
        "rollout_is: sequence, rollout_is_threshold: 0.5_4.0", "preset: mis, rollout_is_threshold: 3"
    )
    cell, *_ = read_simulation_file(write(tmp_path, text))
    found = chosen_estimators(cell.settings["chosen"])["mine"]
    assert found == RolloutCorrectionConfig.preset("mis").with_options(rollout_is_threshold=3)


def test_a_warning_about_an_estimator_names_it(tmp_path):
    text = TEN_LINES.replace("rollout_is: sequence", "rollout_rs_threshold: 0.9_1.1, rollout_is: sequence")
    with pytest.warns(InertOptionWarning, match=r"estimator 'mine': rollout_rs_threshold='0.9_1.1' has no effect"):
        read_simulation_file(write(tmp_path, text))


def test_a_pair_may_be_given_as_tables(tmp_path):
    text = """\
pair:
  trainer: [[0.0, 0.0]]
  rollout: [[1.0986122886681098, 0.0]]
  reward: [[1, 0]]
  goal: 2
length: 2
estimators: [none]
batch_sizes: 1
"""
    (row,) = run_file_cell(read_simulation_file(write(tmp_path, text))[0])
    assert row["t_times_kl"] == pytest.approx(2 * (0.75 * 0.405465 - 0.25 * 0.693147), rel=1e-5)
    assert row["exact"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("length: [3, 40]", "lenght: 3"), "Did you mean 'length'.*no option 'lenght'"),
        (("kind: tempered", "kind: temper"), "Did you mean 'tempered'.*kind must be one of"),
        (("severity: 0.3", "severity: 0.3, kl: 0.1"), "severity or kl, one of them"),
        (("  - seq_is", "  - seq_iss"), "Did you mean 'seq_is'.*no estimator is named 'seq_iss'"),
        (("rollout_is: sequence", "rollout_iz: sequence"), "Did you mean 'rollout_is'.*no option 'rollout_iz'"),
        (("samples: 200", "samples: 3"), "samples must be >= 40; got 3"),
        (("length: [3, 40]", "length: []"), "length is an empty list"),
        ((TEN_LINES.splitlines()[0], "pair: {trainer: [[0, 1]]}"), "no rollout and no reward"),
        ((TEN_LINES.splitlines()[0], ""), "names no pair"),
    ],
)
def test_a_mistake_in_a_file_is_named_before_anything_runs(tmp_path, change, message):
    assert change[0] in TEN_LINES
    path = write(tmp_path, TEN_LINES.replace(*change))
    with pytest.raises((TypeError, ValueError), match=message):
        read_simulation_file(path)
