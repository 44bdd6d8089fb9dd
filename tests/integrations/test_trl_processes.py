"""TRL's trainers on two processes: replayed samples, a sharded policy, and the example of examples/scale."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trl_ranks

from rollcorr import read_run
from rollcorr.run_directory import read_metrics

pytest.importorskip("trl", reason="TRL is not installed; `make test-trl` runs these tests in an environment of its own")

EXAMPLE = Path(__file__).parents[2] / "examples" / "scale" / "trl_two_processes.py"

# A time, and a mean over tokens that TRL takes over each rank first.
OF_EACH_RANK = {"trl/step_time", "trl/sampling/sampling_logp_difference/mean"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("replayed")
    for world in (1, 2):
        trl_ranks.start(trl_ranks.replay, path, world)
    return path


@pytest.mark.parametrize("loss_type", trl_ranks.REPLAYED_LOSSES)
def test_two_processes_train_the_weights_of_one(folder, loss_type):
    alone, *ranks = (torch.load(folder / name, weights_only=True)[loss_type] for name in ("1 0.pt", "2 0.pt", "2 1.pt"))
    moved = (alone["after"] - alone["before"]).abs().max()
    assert moved > 1e-2
    for rank in ranks:
        assert (rank["after"] - alone["after"]).abs().max() <= 1e-5 * moved


@pytest.mark.parametrize("loss_type", trl_ranks.REPLAYED_LOSSES)
def test_two_processes_report_the_metrics_of_one(folder, loss_type):
    alone, both = (read_metrics(folder / f"{loss_type} {world}" / "metrics.jsonl") for world in (1, 2))
    assert len(alone) == len(both) == 3
    for one, two in zip(alone, both, strict=True):
        assert one.keys() == two.keys()
        assert {"loss", "reward/mean", "trl/entropy", "rollout_corr/rollout_rs_masked_fraction"} <= one.keys()
        for name in one.keys() - OF_EACH_RANK:
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-4), name


def test_an_engine_samples_for_a_sharded_policy(tmp_path):
    trl_ranks.start(trl_ranks.shard, tmp_path, 2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert first == second
    assert first["without"] == "DistributedType.MULTI_CPU"  # the reason why FSDP is chosen by hand
    assert first["sharded"]
    assert first["versions"] == (3, 2)
    assert len(first["k3"]) == 3
    assert all(0 < value < 1e-5 for value in first["k3"])  # bfloat16 against float32, at the same weights
    assert all(0 < value < 10 for value in first["grad_norm"])


def test_the_example_trains_on_two_processes(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, str(tmp_path / "run"), "--steps", "3"], capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr.decode()
    series = read_run(tmp_path / "run").series
    assert len(series) == 3
    assert all(metrics["rollout_corr/token_count"] > 16 for metrics in series)  # of both ranks' eight rows
