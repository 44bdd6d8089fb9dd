"""`rollcorr simulate`: a file, bad input, and Ctrl-C."""

import re

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


@pytest.mark.parametrize("columns", [40, 80])
def test_a_long_name_is_shortened_and_the_numbers_stay(tmp_path, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    options = "rollout_is: token, rollout_rs: seq_mean_k3, rollout_rs_threshold:"
    study = tmp_path / "study.yaml"
    study.write_text(f"""\
pair: {{kind: tempered, severity: 0.3, vocabulary: 8}}
length: 64
estimators: [decoupled_k3_rs_token_tis, {{{options} 0.05}}, {{{options} 0.06}}]
samples: 256
""")
    lines = simulate(study, "-o", tmp_path / "out").output.splitlines()

    header = next(line for line in lines if line.startswith("estimator"))
    rows = [line.split() for line in lines if re.search(r"\d\.\d{3}±", line)]
    assert header.split()[1:] == ["error", "random", "bias", "deviation", "ESS", "kept"]
    assert [len(row) for row in rows] == [7, 7, 7]
    assert all(re.fullmatch(r"\d+\.\d{3}\*?(±\.\d{3})?", number) for row in rows for number in row[1:])
    assert len({row[0] for row in rows}) == 3, "the two ends of a name tell two estimators apart"
    assert any(row[0] == "decoupled_k3_rs_token_tis" for row in rows) == (columns == 80)


def test_a_bias_of_next_to_nothing_is_marked(tmp_path):
    study = tmp_path / "study.yaml"
    study.write_text("""\
pair: {kind: tempered, severity: 0.3, vocabulary: 8}
length: 64
estimators: [none, {name: few, rollout_rs: seq_mean_k3, rollout_rs_threshold: 0.027}]
samples: 1024
""")
    result = simulate(study, "-o", tmp_path / "out")
    few, none = (next(line for line in result.output.splitlines() if line.startswith(name)) for name in ("few", "none"))
    assert 0 < float(few.split()[-1]) < 0.01
    assert few.split()[3].endswith("*"), few
    assert "*" not in none
    assert "* less than 1 % of the tokens are kept" in result.output


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
    missing = simulate(tmp_path / "none.yaml")
    assert missing.exit_code == 2
    assert missing.output.count("\n") == 1
    assert "none.yaml; `rollcorr simulate --help` shows an example" in missing.output
    assert "--quick is a subset of the built-in study" in simulate(study, "--quick").output


def test_help_teaches_the_file_and_the_kinds():
    text = simulate("--help").output
    for word in ("pair: {kind: tempered", "heavy_tailed", "Ctrl-C keeps what is finished", "130 interrupted"):
        assert word in text
