"""A run and its directory: resume is exact, Ctrl-C saves, half-written files never count."""

import errno
import json
import os
import signal

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from rollcorr.cli import app
from rollcorr.core.sampling import check_kept_sets
from rollcorr.engines.base import EngineAnswerError, EngineUnavailableError
from rollcorr.engines.transformers import TransformersEngine
from rollcorr.rollout_log import convert_log, read_rollout_log, validate_rollout_log
from rollcorr.run_directory import read_metrics
from rollcorr.train import checkpoint as checkpoints
from rollcorr.train import latest_checkpoint, load_config, train
from rollcorr.train.grpo import grpo_recipe as recipe_module
from rollcorr.train.grpo import grpo_trainer as grpo
from rollcorr.train.grpo.engine_choice import make_engine
from rollcorr.train.grpo.grpo_trainer import GrpoTrainer
from rollcorr.train.grpo.policy import load_policy
from rollcorr.train.grpo.tasks import Reward


@pytest.fixture
def console(tmp_path):
    with (tmp_path / "console.txt").open("w", encoding="utf-8") as file:
        yield Console(file=file, width=200)


def outcome(run_dir):
    """Everything a run computed: final weights, optimizer state, and metrics without timings."""
    path = latest_checkpoint(run_dir / "checkpoints")
    rows = [
        {name: value for name, value in row.items() if not name.startswith("perf/")}
        for row in read_metrics(run_dir / "metrics.jsonl")
    ]
    return (
        load_policy(str(path)).model.state_dict(),
        torch.load(path / "optimizer.pt", weights_only=True)["state"],
        rows,
    )


def assert_same(got, expected):
    for mine, theirs in zip(got[:2], expected[:2], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            torch.testing.assert_close(value, theirs[key], rtol=0, atol=0)
    assert got[2] == expected[2]


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.rollout_correction=decoupled_seq_is_rs", "rollout.refresh_every=2", "optim.mini_batch_size=6"],
        ["algorithm.rollout_correction=bypass_pg_is", "algorithm.loss.kl_coef=0.1", "optim.ppo_epochs=2"],
    ],
    ids=["decoupled, stale engine", "bypass, reference KL"],
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(micro_config, tmp_path, console, overrides):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train(micro_config(f"run_dir={whole}", "steps=5", *overrides), console=console)
    train(micro_config(f"run_dir={parted}", "steps=3", *overrides), console=console)
    torch.rand(3)  # whatever else happens in the process
    train(load_config(parted / "config.yaml", ["steps=5"]), console=console)
    assert_same(outcome(parted), outcome(whole))


def test_steps_logged_after_the_checkpoint_are_computed_again(micro_config, tmp_path, console):
    """A run killed at step 4 after a checkpoint at step 2 goes on as if steps 3 and 4 had not been logged."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    logs = ["log.rollouts=true", "log.tensorboard=true"]
    train(micro_config("steps=2", *logs), console=console)
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "reward/mean": 9}\n{"step": 4, "rew')
    (run / "rollouts" / "step_000004.parquet").write_bytes(b"half")
    train(micro_config("steps=3", *logs), console=console)
    train(micro_config(f"run_dir={whole}", "steps=3", *logs), console=console)
    assert_same(outcome(run), outcome(whole))
    assert sorted(path.name for path in (run / "rollouts").iterdir()) == [f"step_{i:06d}.parquet" for i in (1, 2, 3)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(micro_config, tmp_path, console, monkeypatch, number):
    handler = signal.getsignal(number)
    step = GrpoTrainer.step

    def interrupted_step(self, count, **options):
        if count == 2:
            signal.raise_signal(number)
        return step(self, count, **options)

    monkeypatch.setattr(GrpoTrainer, "step", interrupted_step)
    summary = train(micro_config("steps=4"), console=console)
    assert (summary.step, summary.interrupted) == (2, True)
    assert signal.getsignal(number) == handler
    console.file.flush()
    told = (tmp_path / "console.txt").read_text(encoding="utf-8")
    assert f"stopped by {number.name} after step 2 of 4\nthe same command continues after step 2\n" in told

    monkeypatch.setattr(GrpoTrainer, "step", step)
    whole = tmp_path / "whole"
    train(micro_config("steps=4"), console=console)
    train(micro_config(f"run_dir={whole}", "steps=4"), console=console)
    assert_same(outcome(tmp_path / "run"), outcome(whole))


@pytest.mark.usefixtures("ctrl_c_at_start")
def test_a_second_ctrl_c_stops_at_once_and_keeps_the_last_checkpoint(micro_config, tmp_path, console, monkeypatch):
    step = GrpoTrainer.step

    def impatient_step(self, count, **options):
        if count == 3:
            signal.raise_signal(signal.SIGINT)  # on this thread: two sent to the process may arrive as one
            signal.raise_signal(signal.SIGINT)
        return step(self, count, **options)

    monkeypatch.setattr(GrpoTrainer, "step", impatient_step)
    with pytest.raises(KeyboardInterrupt):
        train(micro_config("checkpoint.every=2"), console=console)
    assert latest_checkpoint(tmp_path / "run" / "checkpoints").name == "step_000002"
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_a_run_is_not_written_over(micro_config, tmp_path, console):
    train(micro_config("steps=1"), console=console)
    with pytest.raises(FileExistsError, match=r"holds a run already: leave out resume=false .* or choose another"):
        train(micro_config("steps=1", "resume=false"), console=console)
    with pytest.raises(FileNotFoundError, match="has no checkpoint to resume from"):
        train(micro_config(f"run_dir={tmp_path / 'new'}", "resume=true"), console=console)
    assert not (tmp_path / "new").exists()


def test_a_resumed_run_says_what_was_changed(micro_config, tmp_path, console):
    train(micro_config("steps=1"), console=console)
    train(micro_config("steps=2", "optim.lr=0.5"), console=console)
    console.file.flush()
    told = (tmp_path / "console.txt").read_text(encoding="utf-8")
    assert "changed since this run began: optim.lr: 0.01 → 0.5" in told


def test_the_newest_checkpoints_are_kept_and_a_policy_loads_from_each(micro_config, tmp_path, console):
    train(micro_config("steps=4", "checkpoint.every=1", "checkpoint.keep=2"), console=console)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("*step_*"))
    assert names == ["step_000003", "step_000004"]
    reloaded = micro_config(
        f"run_dir={tmp_path / 'next'}",
        "steps=1",
        "model.config=null",
        f"model.path={tmp_path / 'run/checkpoints/step_000004'}",
    )
    assert train(reloaded, console=console).step == 1


def test_a_crash_while_saving_leaves_the_checkpoint_before(micro_config, tmp_path, console, monkeypatch):
    train(micro_config("steps=1"), console=console)
    before = outcome(tmp_path / "run")

    def full_disk(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints.torch, "save", full_disk)
    summary = train(micro_config("steps=2"), console=console)
    assert (summary.step, summary.interrupted, summary.engine_failed) == (1, True, False)
    assert "step 2 could not be saved" in summary.failure
    assert "No space left" in summary.failure
    monkeypatch.undo()
    after = outcome(tmp_path / "run")
    assert latest_checkpoint(tmp_path / "run" / "checkpoints").name == "step_000001"
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)


def test_rollout_logs_are_valid_and_hold_what_the_step_saw(micro_config, tmp_path, console):
    train(micro_config("steps=2", "log.rollouts=true", "rollout.refresh_every=2"), console=console)
    logs = sorted((tmp_path / "run" / "rollouts").iterdir())
    assert validate_rollout_log(logs).findings == ()
    rows = [row for batch in read_rollout_log(logs) for row in batch.to_rows()]
    assert [row["step"] for row in rows] == [1] * 12 + [2] * 12
    first = rows[0]
    assert len(first["response_ids"]) == len(first["rollout_log_prob"]) == len(first["log_prob"])
    assert (first["engine"], first["group_id"], rows[-1]["group_id"]) == ("transformers", "1-0", "2-2")
    assert [span["version"] for span in rows[-1]["policy_versions"]] == [0]
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert sum(row["reward"] for row in rows[:12]) / 12 == pytest.approx(metrics[0]["reward/mean"], abs=1e-6)


def test_a_log_of_truncated_rollouts_holds_the_kept_sets(micro_config, tmp_path, console):
    """Policy and log suffice to replay the ratio."""
    truncated = "rollout.sampling={temperature: 0.7, top_p: 0.9, top_k: 20, logprobs: processed}"
    train(micro_config("steps=1", "log.rollouts=true", "checkpoint.every=1", truncated), console=console)
    (log,) = (tmp_path / "run" / "rollouts").iterdir()
    assert [problem.code for problem in validate_rollout_log(log).findings] == []
    (batch,) = read_rollout_log(log)
    kept, ids = batch.kept_sets(), batch.packed("response_ids")
    check_kept_sets(kept, tokens=len(ids), vocabulary=258)
    assert 1 < kept.ids.numel() / len(kept) <= 20
    copied = tmp_path / "copy.jsonl"
    convert_log(log, copied)
    (again,) = read_rollout_log(copied)
    assert torch.equal(again.kept_sets().ids, kept.ids)
    assert torch.equal(again.kept_sets().offsets, kept.offsets)


class FailingEngine(TransformersEngine):
    """Fails at the rollouts of step 3, and rejects new weights from then on."""

    error, calls = EngineUnavailableError("no answer within 60 s"), 0

    def generate(self, prompts, *, seed, first_row=0):
        type(self).calls += 1
        if self.calls == 3:
            raise self.error
        return super().generate(prompts, seed=seed)

    def export_weights(self):
        raise self.error


@pytest.fixture
def failing_engine(monkeypatch):
    """Runs sample with a new `FailingEngine` until it is undone."""

    def install(error=FailingEngine.error):
        fails = type("Fails", (FailingEngine,), {"error": error})
        monkeypatch.setattr(recipe_module, "make_engine", lambda *a, **k: _as(fails, make_engine(*a, **k)))

    return install


def _as(cls, engine):
    engine.__class__ = cls
    return engine


@pytest.mark.parametrize("error", [FailingEngine.error, EngineAnswerError("2 log-probs for 3 tokens")])
def test_a_step_whose_engine_fails_is_not_trained_on_and_the_run_goes_on_later(
    micro_config, tmp_path, console, monkeypatch, failing_engine, error
):
    failing_engine(error)
    summary = train(micro_config("steps=4"), console=console)
    assert (summary.step, summary.interrupted) == (2, True)
    assert summary.failure == f"step 3 was not trained on, the engine failed: {error}"
    console.file.flush()
    told = (tmp_path / "console.txt").read_text(encoding="utf-8")
    assert f"{error}" in told
    assert "the same command continues after step 2" in told
    assert latest_checkpoint(tmp_path / "run" / "checkpoints").name == "step_000002"

    monkeypatch.undo()
    monkeypatch.setattr(grpo, "hard_gated_reward", lambda *_, **__: Reward(0.0, correct=False))
    train(load_config(tmp_path / "run" / "config.yaml"), console=console)
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_stop_that_ends_the_wait_for_an_engine_while_a_checkpoint_is_restored_is_no_failure(
    micro_config, console, monkeypatch
):
    lagging = ["rollout.refresh_every=4"]
    train(micro_config("steps=1", *lagging), console=console)

    def wait_until_stopped(engine, weights, *, version):
        signal.raise_signal(signal.SIGINT)
        raise EngineUnavailableError("the run was asked to stop before the engine was back")

    monkeypatch.setattr(TransformersEngine, "import_weights", wait_until_stopped)
    summary = train(micro_config("steps=2", *lagging), console=console)
    assert (summary.step, summary.interrupted, summary.failure, summary.engine_failed) == (1, True, None, False)


def test_older_weights_that_a_dead_engine_keeps_are_said_to_be_lost(micro_config, tmp_path, console, failing_engine):
    failing_engine()
    train(micro_config("steps=4", "rollout.refresh_every=4"), console=console)
    console.file.flush()
    assert "the engine's weights, version 0, are lost" in (tmp_path / "console.txt").read_text(encoding="utf-8")
    saved = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert json.loads((saved / "state.json").read_text(encoding="utf-8"))["engine_version"] == 2


def test_the_command_leaves_with_code_3_when_the_engine_fails(tmp_path, low_byte_reward, micro_run, failing_engine):
    failing_engine()
    result = CliRunner().invoke(app, ["train", f"run_dir={tmp_path / 'run'}", *micro_run])
    assert result.exit_code == 3
    assert "Traceback" not in result.output
    assert "no answer within 60 s" in result.output


def test_a_run_leaves_its_configuration_metrics_events_and_summary(micro_config, tmp_path, console):
    run = tmp_path / "run"
    train(micro_config("steps=2", "log.tensorboard=true", "log.evaluate=4", "warm_up.steps=2"), console=console)
    assert load_config(run / "config.yaml").steps == 2
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2]
    assert list((run / "tensorboard").iterdir())
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert summary["step"] == 2
    assert summary["before"]["problems"] == summary["after"]["problems"] == 4
    # A resumed run remembers earlier measurements.
    train(micro_config("steps=3", "log.evaluate=4", "warm_up.steps=2"), console=console)
    assert json.loads((run / "summary.json").read_text(encoding="utf-8"))["before"] == summary["before"]


def test_gsm8k_files_train_too(micro_config, tmp_path, console):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"question": "One and one?", "answer": "1+1=2\\n#### 2"}\n', encoding="utf-8")
    config = micro_config("steps=1", "task.name=gsm8k", f"task.path={path}", "rollout.group_size=2")
    assert train(config, console=console).step == 1


def test_the_command_trains_and_explains_mistakes(tmp_path, low_byte_reward, micro_run):
    runner = CliRunner()
    good = runner.invoke(app, ["train", f"run_dir={tmp_path / 'run'}", *micro_run, "steps=1"])
    assert good.exit_code == 0, good.output
    again = runner.invoke(app, ["train", f"run_dir={tmp_path / 'run'}", *micro_run, "steps=1"])
    assert again.exit_code == 0, again.output
    assert "finished: step 1 of 1 is done" in again.output
    for arguments, message in (
        (["a.yaml", "b.yaml"], "one configuration file at most"),
        (["optim.rl=1"], "Did you mean 'optim.lr'?"),
        (["model.path=/nowhere"], "does not exist"),
    ):
        result = runner.invoke(app, ["train", f"run_dir={tmp_path / 'other'}", *arguments])
        assert result.exit_code == 2
        assert message in result.output
    assert not (tmp_path / "other").exists()
