"""Run directories as runs, crashes and resumes leave them."""

import subprocess
import sys

import pytest

from rollcorr import run_directory
from rollcorr.config import RolloutCorrectionConfig
from rollcorr.run_directory import BadInputError, read_run


def run(path, metrics, config=None):
    (path / "metrics.jsonl").write_text(metrics)
    if config is not None:
        (path / "config.yaml").write_text(config)
    return path


def test_a_run_is_its_steps_and_its_correction(tmp_path):
    config = "model: {layers: 2}\nalgorithm:\n  rollout_correction: {rollout_is: token, rollout_is_threshold: 3.0}\n"
    read = read_run(run(tmp_path, '{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n', config))
    assert read.series == ({"step": 1, "a": 1}, {"step": 2, "a": 2})
    assert read.config == RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=3.0)
    assert (read.config_text, read.remarks) == (config, ())


def test_a_cut_off_last_line_is_left_out_and_said(tmp_path):
    read = read_run(run(tmp_path, '{"step": 1}\n{"step": 2, "rollout_co', "rollout_correction: null"))
    assert read.series == ({"step": 1},)
    (remark,) = read.remarks
    assert "line 2" in remark
    assert "cut off" in remark


def test_steps_that_a_resumed_run_repeats_count_once_and_the_later_wins(tmp_path):
    lines = '{"step": 1, "a": 1}\n{"step": 3, "a": 2}\n{"step": 2, "a": 3}\n{"step": 3, "a": 4}\n'
    read = read_run(run(tmp_path, lines, "rollout_correction: null"))
    assert read.series == ({"step": 1, "a": 1}, {"step": 2, "a": 3}, {"step": 3, "a": 4})
    assert read.remarks == ("1 step was logged twice (a resumed run); the later one counts",)


def test_steps_without_a_number_count_from_one(tmp_path):
    assert read_run(run(tmp_path, '{"a": 1}\n{"a": 2}\n')).series == ({"a": 1, "step": 1}, {"a": 2, "step": 2})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1}\nnonsense\n{"step": 2}\n', r"metrics\.jsonl:2: not JSON .* repair or remove the line"),
        ('{"step": 1}\nnonsense\n', r"metrics\.jsonl:2: not JSON"),
        ('{"step": 1}\n[1]\n', r"metrics\.jsonl:2: expected a JSON object, got list"),
        ('{"step": "x"}\n', r"metrics\.jsonl: step 'x' is not a whole number"),
        ("", "has no whole line"),
        ('{"step": 1', "has no whole line|not JSON"),
    ],
)
def test_bad_metrics_name_the_file_and_the_line(tmp_path, text, message):
    with pytest.raises(BadInputError, match=message):
        read_run(run(tmp_path, text))


def test_what_is_no_run_directory_is_said(tmp_path):
    with pytest.raises(BadInputError, match=r"is not a run directory; give the folder that holds metrics\.jsonl"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(BadInputError, match=r"metrics\.jsonl: No such file"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("config", "remark"),
    [
        (None, "there is no config.yaml"),
        ("algorithm: {rollout_correction: {rollout_si: token}}", "rollout_is"),
        ("a: [", "not a YAML document"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_a_remark(tmp_path, config, remark):
    read = read_run(run(tmp_path, '{"step": 1}\n', config))
    assert read.config is None
    assert remark in read.remarks[0]
    assert "rules about thresholds were left out" in read.remarks[0]


def test_a_run_is_read_without_torch_and_without_the_trainers():
    names = ", ".join(run_directory.__all__)
    heavy = "{'torch', 'rollcorr.train'} & set(sys.modules)"
    code = f"import sys; from rollcorr.run_directory import {names}; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
