"""The null of a run: measured once, before the first step, by an engine that has the trainer's weights."""

import copy
import io

import pytest
import torch
from rich.console import Console
from training_state import same_state, training_state

from rollcorr import read_run
from rollcorr.diagnostics import check_logs, read_null
from rollcorr.diagnostics.null import noise_beside
from rollcorr.diagnostics.run_verdict import run_health
from rollcorr.train import train
from rollcorr.train.grpo import grpo_recipe

ENOUGH = "log.null=160"
"""Problems with 8 tokens each: more than the 1,000 tokens that a null needs."""


def trained(config):
    """Run it and return the console output."""
    shown = io.StringIO()
    train(config, console=Console(file=shown, width=400))
    return shown.getvalue()


def test_a_run_measures_what_equal_weights_differ_by_and_is_judged_by_it(micro_config, tmp_path):
    shown = trained(micro_config("steps=10", ENOUGH, "optim.lr=1e-4"))
    null = read_null(tmp_path / "run" / "null.json")
    assert null.kind == "engine"
    assert null.origin.engine == ("transformers",)
    assert null.profile.row_count == 160
    assert 1e-9 < null.profile.k3 < 1e-3
    assert "null.json: k3" in shown

    report = run_health(read_run(tmp_path / "run"))
    assert (report.verdict, report.judged_against) == ("healthy", str(tmp_path / "run" / "null.json"))


def test_a_null_is_written_once_and_a_resumed_run_keeps_it(micro_config, tmp_path):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    trained(micro_config(f"run_dir={whole}", "log.null=3"))
    trained(micro_config(f"run_dir={parted}", "log.null=3", "steps=2"))
    first = (parted / "null.json").read_bytes()
    assert first == (whole / "null.json").read_bytes()

    assert "k3" not in trained(micro_config(f"run_dir={parted}", "log.null=3")).split("step 3")[0]
    assert (parted / "null.json").read_bytes() == first


def test_a_null_changes_nothing_that_is_trained(micro_config, tmp_path):
    for name, null in (("with", "log.null=5"), ("without", "log.null=0")):
        trained(micro_config(f"run_dir={tmp_path / name}", "steps=2", null))
    with_null, without = (
        (tmp_path / name / "checkpoints" / "step_000002" / "model.safetensors").read_bytes()
        for name in ("with", "without")
    )
    assert with_null == without
    assert not (tmp_path / "without" / "null.json").exists()


def test_a_null_follows_the_policy_and_changes_nothing(micro_config, tmp_path):
    for name, every in (("with", 1), ("without", 0), ("parted", 1)):
        options = ("log.null=5", f"log.null_every={every}", f"run_dir={tmp_path / name}")
        if name == "parted":
            trained(micro_config("steps=1", *options))
        trained(micro_config("steps=3", *options))
    files = {name: tmp_path / name / "null.json" for name in ("with", "without", "parted")}
    weights = [file.parent / "checkpoints" / "step_000003" / "model.safetensors" for file in files.values()]
    assert len({file.read_bytes() for file in weights}) == 1

    # One part before the first step, and one of 8 rows for each step.
    assert [(part.first_step, part.rows) for part in read_null(files["with"]).measured] == [
        (None, 5), (1, 8), (2, 8), (3, 8)
    ]  # fmt: skip
    assert files["parted"].read_bytes() == files["with"].read_bytes()
    assert len(read_null(files["without"]).measured) == 1


def test_measuring_leaves_the_trainer_as_it_was(micro_trainer):
    trainer = micro_trainer()
    trainer.step(1)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trainer.model.train()
    trainer.model.lm_head.eval()
    before = training_state(trainer.model, trainer.optimizer)
    assert len(trainer.null_rollouts(8, step=2)) == 8
    assert same_state(before, training_state(trainer.model, trainer.optimizer))


def test_a_probe_changes_nothing_that_is_trained(micro_trainer, micro_policy):
    weights = []
    for probes in (True, False):
        torch.manual_seed(0)
        trainer = micro_trainer("rollout.refresh_every=2", policy=copy.deepcopy(micro_policy))
        for step in range(1, 4):
            result = trainer.step(step)
            if probes:
                rollout, actor = result.batch.rollout, result.batch.actor
                probe = trainer.engine.probe(
                    rollout,
                    trainer.model,
                    lambda part, actor=actor, model=trainer.model: actor.log_prob(model, part, rows_at_once=4),
                )
                assert probe.tokens > 0
        weights.append([weight.clone() for weight in trainer.model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))


def test_another_precision_of_the_sampler_needs_another_null(micro_config, tmp_path):
    file = tmp_path / "run" / "null.json"
    trained(micro_config("steps=1", "log.null=20", "rollout.refresh_every=3"))
    rounded = read_null(file).profile.k3
    shown = trained(micro_config("steps=2", "log.null=20", "rollout.refresh_every=3", "rollout.dtype=float32"))
    assert read_null(file).profile.k3 < rounded / 100
    assert "null.json: k3" in shown


def test_a_null_that_somebody_put_there_stays(micro_config, tmp_path):
    trained(micro_config(f"run_dir={tmp_path / 'other'}", "steps=1", "log.null=7"))
    file = tmp_path / "run" / "null.json"
    file.parent.mkdir()
    file.write_bytes((tmp_path / "other" / "null.json").read_bytes())
    trained(micro_config("steps=1", "log.null=3"))
    assert read_null(file).profile.row_count == 7


def test_a_truncated_sampler_is_compared_over_the_replayed_sets(micro_config, tmp_path):
    sampling = ["rollout.sampling.top_k=5", "rollout.sampling.logprobs=processed"]
    trained(micro_config("steps=1", "log.null=20", "rollout.dtype=float32", *sampling))
    assert 0 < read_null(tmp_path / "run" / "null.json").profile.k3 < 1e-9


def test_a_run_whose_weights_never_reach_the_engine_is_not_healthy_because_of_its_null(
    micro_config, tmp_path, monkeypatch
):
    """The engine starts correctly, so the null is valid; later it accepts a new version and keeps its weights."""
    make = grpo_recipe.make_engine

    def deaf(*args, **options):
        engine = make(*args, **options)
        monkeypatch.setattr(engine, "_copy_weights", lambda model: None)
        monkeypatch.setattr(engine, "_probe", None)
        monkeypatch.setattr("rollcorr.engines.transformers.check_weight_sync", lambda *got, tolerance: None)
        monkeypatch.setattr("rollcorr.engines.transformers.score_probe", lambda *args, **options: None)
        monkeypatch.setattr(engine, "score", lambda tokens: None)
        return engine

    monkeypatch.setattr(grpo_recipe, "make_engine", deaf)
    trained(micro_config("steps=6", ENOUGH, "log.rollouts=true"))
    run = tmp_path / "run"
    assert read_null(run / "null.json").profile.k3 < 1e-3
    report = run_health(read_run(run))
    assert report.verdict == "unhealthy"
    assert "above_null" in [finding.code for finding in report.warnings]

    check = check_logs([run], null=read_null(run / "null.json"))
    assert check.health.verdict == "unhealthy"
    assert check.hypotheses[0].code in ("weights_differ", "frozen_sampler")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["algorithm.rollout_correction=bypass_pg_is", "optim.ppo_epochs=2"], "several optimizer steps"),
        (["algorithm.rollout_correction=bypass_pg_is", "optim.mini_batch_size=6"], "several optimizer steps"),
        (["actor.allow_incompatible=true"], "allow_incompatible"),
    ],
)
def test_a_run_whose_metrics_no_null_is_like_says_so_and_goes_on(micro_config, tmp_path, overrides, reason):
    shown = trained(micro_config("steps=1", "log.null=3", *overrides))
    assert "null.json was not measured: " in shown
    assert reason in shown
    assert "finished: 1 of 1 steps" in shown
    assert not (tmp_path / "run" / "null.json").exists()


def test_a_null_of_few_tokens_judges_nothing(micro_config, tmp_path):
    trained(micro_config("log.null=3"))
    assert not noise_beside(tmp_path / "run").is_null
    report = run_health(read_run(tmp_path / "run"))
    assert report.verdict == "not judged"
    assert any("null.json has too few tokens" in sentence for sentence in report.not_judged)


def test_a_negative_number_of_problems_is_refused(micro_config):
    with pytest.raises(ValueError, match=r"log\.null must be at least 0, got -1"):
        micro_config("log.null=-1")
