"""A run of 20,000 steps is continued and reported in a process of bounded memory."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest
import torch

from rollcorr import Monitor, PolicyLogProbs, policy_loss

pytestmark = pytest.mark.xdist_group("workers")  # files of few tests start last, and this one is long
STEPS = 20_000
MEMORY = 128 * 2**20

PROGRAM = """
import os, resource, sys
import rollcorr, torch
from rollcorr.cli import app
from rollcorr.diagnostics.report import write_report
import matplotlib.backends.backend_agg, matplotlib.figure
from typer.testing import CliRunner

path = sys.argv[1]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with rollcorr.Monitor(path, start=19_990) as monitor:
    for step in range(10):
        monitor.step(reward=1.0)
result = CliRunner().invoke(app, ["report", path, "--output", path + "/page"])
assert result.exit_code in (0, 1, 3), result.output
assert "20000 steps" in result.output, result.output
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.fixture
def long_run(tmp_path):
    """Lines of a real step, with other digits: 68 MB."""
    path = tmp_path
    train = -torch.rand(8, 40)
    with Monitor(path, "decoupled_token_is") as monitor:
        correction = monitor.correct(train, train + 0.01, torch.ones(8, 40), detail=True)
        policies = PolicyLogProbs(log_prob=train + 0.01, old_log_prob=train)
        monitor.add(policy_loss(policies, torch.ones(8, 40), torch.ones(8, 40), correction=correction))
        monitor.step(reward=torch.rand(8), loss=0.1)
    (line,) = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = {name: value for name, value in json.loads(line).items() if name != "step"}
    generator = random.Random(0)
    bodies = []
    for _ in range(50):
        values = {name: (value or 0.0) * (1 + 0.01 * generator.random()) for name, value in metrics.items()}
        bodies.append(json.dumps(values)[1:].ljust(3390))
    with (path / "metrics.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(f'{{"step": {step}, {bodies[step % 50]}\n' for step in range(1, STEPS + 1))
    return path


def test_a_long_run_is_continued_and_reported(long_run):
    assert (long_run / "metrics.jsonl").stat().st_size > 64 * 2**20
    command = [sys.executable, "-c", PROGRAM, str(long_run)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < MEMORY
    with (long_run / "metrics.jsonl").open("rb") as file:
        assert sum(1 for _ in file) == STEPS
