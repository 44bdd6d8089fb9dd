"""`rollcorr simulate`: a file, bad input, and Ctrl-C."""

import pytest
from typer.testing import CliRunner

import rollcorr.simulation.simulation_file
from rollcorr.cli import app

TEXT = """\
pair: {kind: noise, severity: 0.4, vocabulary: 3}
length: [2, 3]
estimators: [none, decoupled_seq_is_rs]
batch_sizes: [64]
"""


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def simulate(*arguments):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def test_a_file_prints_its_estimators_from_best_to_worst_and_keeps_the_rows(study, tmp_path):
    result = simulate(study, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert result.output.count("decoupled_seq_is_rs") == 2
    assert "batches of 64, exact" in result.output
    assert "done: 2 of 2 cells (0 from an earlier run)" in result.output
    assert len((tmp_path / "out" / "estimators.csv").read_text(encoding="utf-8").splitlines()) == 5
    assert "2 from an earlier run" in simulate(study, "-o", tmp_path / "out").output


def test_ctrl_c_keeps_what_is_finished_and_says_so(study, tmp_path, monkeypatch):
    measure = rollcorr.simulation.simulation_file.run_file_cell

    def interrupted(cell):
        if cell.settings["length"] == 3:
            raise KeyboardInterrupt
        return measure(cell)

    monkeypatch.setattr(rollcorr.simulation.simulation_file, "run_file_cell", interrupted)
    result = simulate(study, "-o", tmp_path / "out")
    assert result.exit_code == 130
    assert "interrupted; the same command goes on from here: 1 of 2 cells" in result.output
    monkeypatch.undo()
    assert "2 of 2 cells (1 from an earlier run)" in simulate(study, "-o", tmp_path / "out").output


def test_bad_input_is_named_with_exit_code_2(study, tmp_path):
    study.write_text(TEXT.replace("noise", "nois"), encoding="utf-8")
    result = simulate(study, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "Did you mean 'noise'" in result.output
    assert simulate(tmp_path / "none.yaml").exit_code == 2
    assert "--quick is a subset of the built-in study" in simulate(study, "--quick").output


def test_help_teaches_the_file_and_the_kinds():
    text = simulate("--help").output
    for word in ("pair: {kind: tempered", "heavy_tailed", "Ctrl-C keeps what is finished", "130 interrupted"):
        assert word in text
