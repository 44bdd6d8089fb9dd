"""`rollcorr calibrate`, `rollcorr advise` and `rollcorr check --what-if`: output and exit codes."""

import json
import re
import shutil

import pytest
import torch
from typer.testing import CliRunner

from rollcorr import RolloutCorrectionConfig
from rollcorr.cli import app
from rollcorr.config import load_yaml
from rollcorr.config.conversion import resolve
from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A log of noise, and its null."""
    path = tmp_path_factory.mktemp("advice")
    generator = torch.Generator().manual_seed(0)
    rollout = torch.full((256, 24), -3.0)
    train = rollout + 0.02 * torch.randn(256, 24, generator=generator) - 0.0002
    with RolloutLogWriter(path / "log.parquet") as log:
        log.write(RolloutBatch.from_padded(torch.ones(256, 24), rollout_log_prob=rollout, old_log_prob=train))
    assert invoke("null", path / "log.parquet", "-o", path / "null.json").exit_code == 0
    return path


def invoke(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})


def test_thresholds_of_a_null(folder):
    shown = invoke("calibrate", folder / "null.json", "--lengths", "24,100", "-o", folder / "thresholds.json")
    assert shown.exit_code == 0, shown.output
    assert "thresholds that reject 5.00% of healthy tokens or sequences" in shown.output
    assert "T = 100 is extrapolated" in shown.output
    assert "k3_kl" in shown.output
    written = json.loads((folder / "thresholds.json").read_text(encoding="utf-8"))
    printed = invoke("calibrate", folder / "null.json", "--lengths", "24,100", "--json")
    assert json.loads(printed.output) == written
    again = invoke("calibrate", folder / "null.json", "-o", folder / "thresholds.json")
    assert (again.exit_code, "exists; choose another name" in again.output) == (2, True)


def test_the_table_of_noise_needs_no_null(folder):
    shown = invoke("calibrate", "--noise", "--lengths", "500")
    assert shown.exit_code == 0
    assert "seq_mean_k1 0.999_1.001" in shown.output
    assert "T = 500" in shown.output
    rows = json.loads(invoke("calibrate", "--noise", "--lengths", "500", "--json").output)
    assert {len(row["shares"]) for row in rows} == {1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a null"),
        (("--noise", "--lengths", "many"), "lengths are whole numbers with commas"),
        (("missing.json",), "No such file"),
        (("missing.json", "--noise"), "--noise takes neither"),
    ],
)
def test_wrong_questions_are_refused(arguments, message):
    shown = invoke("calibrate", *arguments)
    assert shown.exit_code == 2
    assert message in shown.output


def test_advice_with_yaml_to_paste(folder, tmp_path):
    asked = ("advise", folder / "log.parquet", "--null", folder / "null.json", "--intended")
    shown = invoke(*asked)
    assert shown.exit_code == 0, shown.output
    assert "take Seq-TIS 4: the preset decoupled_seq_is with rollout_is_threshold 4.0" in shown.output
    assert "    rollout_is_threshold: 4.0" in shown.output
    assert [line.split()[0] for line in shown.output.splitlines() if line.startswith("Seq-")] == ["Seq-TIS", "Seq-MIS"]
    document = json.loads(invoke(*asked, "--json").output)
    assert (document["decision"], document["candidate"]) == ("correct", "Seq-TIS 4")
    alone = shutil.copy(folder / "log.parquet", tmp_path)
    unjudged = invoke("advise", alone)
    assert (unjudged.exit_code, "take " in unjudged.output) == (3, False)


def test_the_file_of_an_advice_is_the_yaml_alone(folder, tmp_path):
    asked = (
        "advise",
        folder / "log.parquet",
        "--null",
        folder / "null.json",
        "--intended",
        "-o",
        tmp_path / "correction.yaml",
    )
    shown = invoke(*asked)
    assert shown.exit_code == 0, shown.output
    written = (tmp_path / "correction.yaml").read_text(encoding="utf-8")
    assert shown.output.endswith("\n\n" + written)
    assert resolve(load_yaml(written)) == RolloutCorrectionConfig.decoupled_seq_is(threshold=4.0)
    assert [file.name for file in tmp_path.iterdir()] == ["correction.yaml"]

    again = invoke(*asked)
    assert (again.exit_code, "exists; choose another name" in again.output) == (2, True)
    assert invoke(*asked, "--overwrite").exit_code == 0
    nowhere = invoke(*asked[:-1], tmp_path / "missing" / "correction.yaml")
    assert (nowhere.exit_code, "Traceback" in nowhere.output) == (2, False)


def test_without_a_configuration_no_file_is_written(tmp_path):
    with RolloutLogWriter(tmp_path / "log.parquet") as log:
        one = torch.full((1, 4), -1.0)
        log.write(RolloutBatch.from_padded(torch.ones(1, 4), rollout_log_prob=one, old_log_prob=one))
    shown = invoke("advise", tmp_path / "log.parquet", "-o", tmp_path / "correction.yaml")
    assert (shown.exit_code, "is not written" in shown.output) == (3, True)
    assert not (tmp_path / "correction.yaml").exists()


def test_every_preset_side_by_side(folder):
    shown = invoke("check", folder / "log.parquet", "--null", folder / "null.json", "--what-if")
    assert "what each preset would do to this log" in shown.output
    assert "decoupled_geo_rs_token_tis" in shown.output
    assert "not recorded" in shown.output
    document = json.loads(invoke("check", folder / "log.parquet", "--what-if", "--json").output)
    by_preset = {row["preset"]: row for row in document["what_if"]}
    assert by_preset["decoupled_geo_rs"]["rejected_sequences"] > 0.5
    assert by_preset["decoupled_token_is"]["rejected_tokens"] == 0
    assert "what_if" not in json.loads(invoke("check", folder / "log.parquet", "--json").output)


def test_the_page_has_the_same_presets_as_the_text_and_the_json(folder, tmp_path):
    log = (folder / "log.parquet", "--null", folder / "null.json", "--what-if")
    shown = invoke("check", *log, "-o", tmp_path)
    document = json.loads(invoke("check", *log, "--json").output)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    section = page.partition('id="what-if"')[2].partition("<h2")[0]
    cell = r"<t[dh](?: [^>]*)?>(?:<code>)?(.*?)(?:</code>)?</t[dh]>"
    cells = [re.findall(cell, line) for line in section.splitlines()]
    heading, *rows = [line for line in cells if line]
    assert [row[0] for row in rows] == [row["preset"] for row in document["what_if"]]

    # The terminal has the same texts, in the same order.
    table = shown.output.partition("what each preset would do to this log")[2]
    lines = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines() if line.strip()]
    assert lines[: len(rows) + 1] == [heading, *rows]

    # Without the option there is no such table.
    invoke("check", *log[:-1], "-o", tmp_path / "without")
    assert "what-if" not in (tmp_path / "without" / "report.html").read_text(encoding="utf-8")
