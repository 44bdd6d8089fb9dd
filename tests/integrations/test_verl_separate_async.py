"""verl's asynchronous trainer, run by the example of examples/scale on a Ray cluster. Runs with `make test-verl`.

verl's program, trainer, queue and FSDP2 engine are its own; the example adds a platform and a sampler for the CPU.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import environment_of_package

from rollcorr import read_rollout_log

REASON = "verl or Ray is not installed: `make test-verl` installs them; test_verl_own_trainers.py starts no process"
pytest.importorskip("verl.trainer.ppo.v1", reason=REASON, exc_type=ImportError)
pytest.importorskip("ray", reason=REASON, exc_type=ImportError)

EXAMPLE = Path(__file__).parents[2] / "examples" / "scale" / "verl_separate_async.py"
STEPS = 20
OPTIONS = ["rollout_is=token", "rollout_is_threshold=2.0", "rollout_rs=seq_mean_k3", "rollout_rs_threshold=0.01"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl") / "run"
    environment = environment_of_package() | {"ROLLCORR_VERL": "1", "ROLLCORR_VERL_ROLLOUTS": str(folder / "capture")}
    options = [f"algorithm.rollout_correction.{option}" for option in OPTIONS]
    command = [sys.executable, str(EXAMPLE), str(folder), "--steps", str(STEPS), *options]
    done = subprocess.run(command, cwd=folder.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def steps(run):
    return [json.loads(line)["data"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_each_of_twenty_steps_is_corrected_by_us(steps):
    assert [step["training/global_step"] for step in steps] == list(range(1, STEPS + 1))
    for step in steps:
        assert step["rollout_corr/token_count"] > 16, "a metric that verl lacks, of 16 rows"
        assert 0 < step["rollout_corr/rollout_is_mean"] <= 2
        assert 0 <= step["rollout_corr/rollout_rs_masked_fraction"] < 1
        assert step["actor/grad_norm"] > 0


def test_older_samples_are_further_from_the_policy(steps):
    """In the first step they differ by bfloat16 only."""
    behind = [step["training/off_policy/trajectory_staleness/min"] for step in steps]
    assert behind[0] == 0
    assert max(behind) >= 1
    k3 = [step["rollout_corr/k3_kl"] for step in steps]
    assert 0 < k3[0] < 1e-5
    assert all(value > 10 * k3[0] for value, lag in zip(k3, behind, strict=True) if lag >= 1)


def test_the_capture_has_the_trainers_own_batches(run):
    rows = [row for part in read_rollout_log(run / "capture") for row in part.to_rows()]
    assert {row["engine"] for row in rows} == {"verl"}
    assert len({row["step"] for row in rows}) == 20
