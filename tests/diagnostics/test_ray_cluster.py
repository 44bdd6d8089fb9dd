"""`rollcorr check --ray local`: a real cluster on this machine; runs where Ray is installed (`make test-ray`)."""

import functools
import json
import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray, or pip install 'rollcorr[ray]'")

from test_workers import write

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("workers")]


def test_a_cluster_gives_the_same_answer_and_the_same_errors_as_one_process(tmp_path):
    logs = [write(tmp_path / "a.parquet", groups=3), write(tmp_path / "b.jsonl", groups=2)]
    command = [sys.executable, "-m", "rollcorr", "check", "--json", *logs]
    run = functools.partial(subprocess.run, capture_output=True, text=True)
    alone, ray = run(command), run([*command, "--ray", "local"])
    assert alone.returncode == ray.returncode == 1, ray.stderr
    assert json.loads(ray.stdout) == json.loads(alone.stdout)
    (tmp_path / "bad.jsonl").write_text('{"rollout_log_prob": [-1.0, -2.0], "old_log_prob": [-1.0]}\n')
    failed = run([*command, tmp_path / "bad.jsonl", "--ray", "local"])
    assert failed.returncode == 2
    assert failed.stderr.startswith(f"error: {tmp_path / 'bad.jsonl'}, row 0, column old_log_prob: 1 values for")


def test_without_a_cluster_the_address_is_at_fault(tmp_path):
    log = write(tmp_path / "a.parquet", groups=1)
    command = [sys.executable, "-m", "rollcorr", "check", log, "--ray", "auto"]
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 2
    assert "Could not find any running Ray instance" in failed.stderr
