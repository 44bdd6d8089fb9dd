"""`rollcorr check-schedule`: files, logs, and invalid input."""

import json

import pytest
import torch
from typer.testing import CliRunner

from rollcorr import RolloutBatch, RolloutLogWriter
from rollcorr.cli import app

SIGMAS = [1.0, 0.9, 0.7, 0.4, 0.0]


def run(tmp_path, rollout, trainer, *more):
    paths = []
    for name, values in (("rollout.json", rollout), ("trainer.json", trainer)):
        (tmp_path / name).write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
        paths.append(str(tmp_path / name))
    return CliRunner().invoke(app, ["check-schedule", *paths, *more])


def test_equal_schedules_agree(tmp_path):
    result = run(tmp_path, SIGMAS, SIGMAS)
    assert (result.exit_code, result.stdout) == (0, "the schedules agree\n")


def test_a_schedule_that_is_off_by_one_is_named(tmp_path):
    result = run(tmp_path, [*SIGMAS[1:], 0.0], SIGMAS)
    assert result.exit_code == 1
    assert "off by one" in result.stdout
    assert "fix:" in result.stdout


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', "[1, true]", "[" * 100 + "]" * 100])
def test_what_is_no_schedule_is_bad_input(tmp_path, text):
    result = run(tmp_path, text, SIGMAS)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_logs_are_compared_by_the_sigmas_of_their_steps(tmp_path):
    for name, sigmas in (("a", SIGMAS[:3]), ("b", SIGMAS[1:4])):
        mask = torch.ones(2, 2, dtype=torch.bool)
        columns = {"sigma": torch.tensor(sigmas[:2]).expand(2, 2), "sigma_next": torch.tensor(sigmas[1:]).expand(2, 2)}
        with RolloutLogWriter(tmp_path / f"{name}.parquet") as writer:
            writer.write(RolloutBatch.from_padded(mask, rollout_log_prob=-mask.float(), dimensions=8, **columns))
    logs = [str(tmp_path / f"{name}.parquet") for name in ("a", "b")]
    assert CliRunner().invoke(app, ["check-schedule", logs[0], logs[0]]).exit_code == 0
    differ = CliRunner().invoke(app, ["check-schedule", *logs])
    assert differ.exit_code == 1
    assert "off by one" in differ.stdout
