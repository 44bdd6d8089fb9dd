"""The comparison of truncated sampling: one short step of two arms, the written files, and the committed ones."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT = ["steps=1", "log.evaluate=4", "rollout.prompts_per_step=2", "threads=null"]


@pytest.fixture(scope="module")
def example():
    path = ROOT / "experiments" / "training_runs" / "truncated_sampling.py"
    spec = importlib.util.spec_from_file_location("truncated_sampling", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_example_trains_reads_what_is_done_and_draws(example, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="needs rollcorr[report]")
    arguments = ["--seeds", "0", "--arms", "token-TIS,replay", "--root", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", ["truncated_sampling.py", *arguments, "--output", str(tmp_path), *SHORT])
    assert example.main() == 0
    told = capsys.readouterr().out
    assert "replay, seed 0" in told
    assert example.main() == 0
    assert capsys.readouterr().out.count("finished: step 1 of 1 is done") == 2  # no arm is trained twice
    written = json.loads((tmp_path / "truncated_sampling.json").read_text(encoding="utf-8"))
    runs = {run["arm"]: run for run in written["runs"]}
    assert runs["replay"]["k3"] < runs["token-TIS"]["k3"]
    assert runs["token-TIS"]["mean_ratio"] < runs["replay"]["mean_ratio"]
    assert (tmp_path / "truncated_sampling.png").stat().st_size > 10_000


def test_the_committed_figures_are_of_three_arms_and_three_seeds(example):
    numbers = json.loads((ROOT / "docs" / "figures" / "truncated_sampling.json").read_text(encoding="utf-8"))
    assert {(run["arm"], run["seed"]) for run in numbers["runs"]} == {
        (arm, s) for arm in example.ARMS for s in range(3)
    }
    assert numbers["settings"] == list(example.SETTINGS)
    assert (ROOT / "docs" / "figures" / "truncated_sampling.png").is_file()
