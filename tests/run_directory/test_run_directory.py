"""Run directories as runs, crashes and resumes leave them."""

import json
import re
import subprocess
import sys
import tracemalloc

import pytest

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.run_directory import read_run, stored_run
from rollcorr.run_directory.directory import RunDirectory
from rollcorr.run_directory.metrics_file import BadInputError, GrowingMetrics, StepStore, drop_later_steps, read_metrics


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


BROKEN = [
    ("nonsense", r"not JSON .* repair or remove the line"),
    ("[1]", "expected a JSON object, got list"),
    ('{"step": "x"}', "step 'x' is not a whole number from 0 on; correct the line"),
    ('{"step": -1}', "step -1 is not a whole number from 0 on"),
    ('{"step": true}', "step True is not a whole number from 0 on"),
    ('{"step": 2, "a": 1, "step": 3}', "key 'step' is written twice"),
    ('{"step": 2, "a": 1, "a": 1}', "key 'a' is written twice"),
    ('{"step": 2, "a": ' + "9" * 30 + "}", "'a' is an integer of more than 63 bits"),
    ('{"step": 2, "a": ' + "[" * 100 + "]" * 100 + "}", "nested 101 levels deep"),
]


@pytest.mark.parametrize(("line", "fault"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_line_is_left_out_with_a_remark(tmp_path, caplog, line, fault):
    path = run(tmp_path, f'{{"step": 1}}\n{line}\n{{"step": 2}}\n', "rollout_correction: null")
    read = read_run(path)
    assert read.series == ({"step": 1}, {"step": 2})
    assert re.fullmatch(rf"1 line was left out; metrics\.jsonl:2: {fault}.*", read.remarks[0])
    assert read_metrics(path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]
    assert [*GrowingMetrics(path / "metrics.jsonl").new_steps()] == [{"step": 1}, {"step": 2}]
    assert len(re.findall(rf"metrics\.jsonl:2 is left out: {fault}", caplog.text)) == 2
    assert drop_later_steps(RunDirectory(path), 2) == []
    assert (path / "metrics.jsonl").read_text(encoding="utf-8") == '{"step": 1}\n{"step": 2}\n'


def test_names_with_colons_and_values_with_names_are_no_repetition(tmp_path):
    lines = '{"step": 1, "a:b": 1, "c": {"a": 1, "c": [{"d": 1}, {"d": 2}]}, "e": "x: y"}\n'
    assert len(read_run(run(tmp_path, lines)).series[0]) == 4


@pytest.mark.parametrize("text", ["", '{"step": 1', "[1]\n", '{"step": -1}\n{"step'])
def test_a_file_without_a_step_is_bad_input(tmp_path, text):
    with pytest.raises(BadInputError, match=r"metrics\.jsonl has no whole line"):
        read_run(run(tmp_path, text))


def test_a_line_beyond_the_limit_is_bad_input(tmp_path):
    path = run(tmp_path, '{"step": 1}\n{"a": "' + "x" * (1 << 20) + '"}\n')
    for read in (read_run, lambda _: [*GrowingMetrics(path / "metrics.jsonl").new_steps()]):
        with pytest.raises(BadInputError, match=r"metrics\.jsonl:2: the line has more than 1,048,576 bytes"):
            read(path)


def test_memory_beyond_the_limit_is_bad_input(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_run, "MAX_MEMORY", 20_000)
    path = run(tmp_path, "".join(f'{{"step": {step}, "a": 0.5}}\n' for step in range(100)))
    with pytest.raises(BadInputError, match="lines take more than 0 MB of memory, the limit; thin it out"):
        read_run(path)


@pytest.mark.parametrize("value", ["[]", "{}", '"ab"', "[0.5]", "256", "null", '["ab"]'])
def test_memory_is_not_underestimated(value):
    """Lines of a kilobyte, with few or with hundreds of names."""
    for row in (
        f'{{"step": 1, "a": [{", ".join([value] * 200)}]}}',
        "{" + ", ".join(f'"n{i}": {value}' for i in range(99)) + "}",
    ):
        store = StepStore()
        text = row.encode()
        tracemalloc.start()
        kept = [store.add(json.loads(text), text_bytes=len(text)) for _ in range(200)]
        used = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert used <= store.bytes, (value, len(kept))


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
    names = "directory, metrics_file, read_run, run_lock, sinks, tracker_sinks"
    heavy = "{'torch', 'rollcorr.train'} & set(sys.modules)"
    code = f"import sys; from rollcorr.run_directory import {names}; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


STEPS = '{"step": 1}\n'
OLD = """\
# rollout.engine_options.password=b3fore
rollout:
  engine_options: {url: 'http://me:b3fore@host', headers: {Authorization: Bearer b3fore}}
rollout_correction: null
"""


def test_an_older_configuration_is_shown_without_its_secrets_and_that_is_said(tmp_path):
    read = read_run(run(tmp_path, STEPS, OLD))
    assert "b3fore" not in read.config_text
    assert "http://***@host" in read.config_text
    (remark,) = read.remarks
    assert "config.yaml itself holds secrets, in rollout.engine_options.url, rollout.engine_options.headers.A" in remark


@pytest.mark.parametrize("spoiled", ["rollout_correction: {rollout_is: nonsense}", "password: b3fore: x", "- a\n- b"])
def test_a_configuration_that_cannot_be_read_is_shown_without_its_secrets_too(tmp_path, spoiled):
    read = read_run(run(tmp_path, STEPS, OLD.replace("rollout_correction: null", spoiled)))
    assert "b3fore" not in read.config_text
    assert "b3fore" not in str(read.remarks)
    assert "could not be interpreted" in read.remarks[-1]


def test_no_link_is_followed_out_of_the_run_and_what_was_left_out_is_said(tmp_path):
    path, outside = tmp_path / "run", tmp_path / "outside"
    for folder in (path / "images", outside):
        folder.mkdir(parents=True)
    (path / "metrics.jsonl").write_text(STEPS)
    for name in ("config.yaml", "before.png"):
        (outside / name).write_text("recipe: private")
    (path / "config.yaml").symlink_to(outside / "config.yaml")
    (path / "images" / "before.png").symlink_to(outside / "before.png")
    (path / "images" / "after.png").symlink_to("after.png")

    read = read_run(path)
    assert (read.config_text, read.pictures) == ("", ())
    assert read.remarks == (
        "images/before.png is a symbolic link out of the run directory, or no regular file, and was left out",
        "images/after.png is a symbolic link out of the run directory, or no regular file, and was left out",
        "config.yaml is a symbolic link out of the run directory, or no regular file, and was left out; so were rules "
        "about thresholds",
    )

    # A folder that leads out is no better than a file.
    for picture in (path / "images").iterdir():
        picture.unlink()
    (path / "images").rmdir()
    (path / "images").symlink_to(outside)
    assert read_run(path).pictures == ()
    assert "images/before.png is a symbolic link out" in str(read_run(path).remarks)

    (path / "metrics.jsonl").rename(outside / "metrics.jsonl")
    (path / "metrics.jsonl").symlink_to(outside / "metrics.jsonl")
    with pytest.raises(BadInputError, match=r"metrics\.jsonl is a symbolic link out .* copy the file into it"):
        read_run(path)


def test_links_within_a_run_and_to_a_run_are_followed(tmp_path):
    path = tmp_path / "runs" / "first"
    (path / "images").mkdir(parents=True)
    (path / "images" / "before.png").write_bytes(b"png")
    (path / "images" / "after.png").symlink_to("before.png")
    run(path, STEPS, "rollout_correction: null")
    (tmp_path / "latest").symlink_to(path)
    read = read_run(tmp_path / "latest")
    assert read.remarks == ()
    assert [title for title, _ in read.pictures] == ["Before training", "After training"]
