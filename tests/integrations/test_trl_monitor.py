"""A Monitor in TRL's loop: each optimizer step is one of its steps, and its directory is read like any other."""

import errno
import math
import re
from contextlib import ExitStack
from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch
from faulty_disk import Faults, faulty_disk
from trl_stand_in import StandInRLOOTrainer, StandInTrainer, recorded_batch

from rollcorr import Monitor, RolloutCorrectionConfig, RolloutSample, correct, read_rollout_log, read_run
from rollcorr.config import InertOptionWarning, SamplingSpec
from rollcorr.config.documents import BadInputError
from rollcorr.diagnostics import check_logs
from rollcorr.integrations.trl import RolloutCorrectionMixin, attach
from rollcorr.run_directory import read_metrics

REJECTING = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.5"}


@pytest.fixture
def monitor_in():
    """Make Monitors whose files are written when a step returns, and that are closed after the test."""
    with ExitStack() as opened:
        yield lambda *arguments, **options: opened.enter_context(Monitor(*arguments, strict=True, **options))


@pytest.fixture
def watched(monitor_in):
    """Make a trainer with a Monitor."""

    def make(folder, config=None, *, monitor=None, **options):
        made = monitor_in(folder, **(monitor or {}))
        return attach(StandInTrainer(**options), config, monitor=made), made

    return make


def steps_of(folder):
    return read_metrics(folder / "metrics.jsonl")


def test_a_step_of_trl_is_one_step_with_its_correction_its_rewards_its_loss_and_the_metrics_of_trl(tmp_path, watched):
    trainer, monitor = watched(tmp_path, REJECTING)
    trainer.train(2)
    first, second = steps_of(tmp_path)

    batch = recorded_batch()
    inputs = (batch["old_per_token_logps"], batch["sampling_per_token_logps"], batch["completion_mask"])
    expected = correct(*inputs, RolloutCorrectionConfig(**REJECTING), fill=1.0).metrics()
    finite = {name: value for name, value in expected.items() if math.isfinite(value)}
    assert {name: first[name] for name in finite} == pytest.approx(finite)
    assert monitor.steps == 2

    # By hand: row r has the rewards 2 r + step and, if r is even, half of 2 r + 1 + step; the last row has none.
    rewards = torch.tensor([2.0 * row + (0.5 * (2 * row + 1) if row % 2 == 0 else 0) for row in range(7)])
    assert first["reward/mean"] == pytest.approx(rewards.mean().item())
    assert first["reward/max"] == rewards.max()
    assert second["reward/max"] == rewards.max() + 1.5
    assert first["reward/nonfinite_count"] == 1
    assert (first["loss"], first["trl/kl"], second["trl/kl"]) == (0.5, 0.0, 1.0)
    assert (first["trl/num_tokens"], second["trl/num_tokens"]) == (0.0, 100.0)


def test_the_log_of_trl_stays_as_it_is(tmp_path, watched):
    trainer, _ = watched(tmp_path, REJECTING)
    plain = attach(StandInTrainer(), REJECTING)
    trainer.train(2)
    plain.train(2)
    assert [dict(logs) for logs in trainer.logged] == [dict(logs) for logs in plain.logged]
    assert "rollout_corr/kl" in trainer.logged[0]


def test_each_step_has_what_trl_added_in_it_however_rarely_trl_logs(tmp_path, watched):
    trainer, _ = watched(tmp_path)
    trainer.train(5, log_every=3)
    assert [metrics["trl/kl"] for metrics in steps_of(tmp_path)] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_step_that_goes_on_with_an_earlier_batch_has_no_correction_of_its_own(tmp_path, watched):
    trainer, _ = watched(tmp_path, monitor={"rollouts": RolloutSample()})
    trainer.train(4, generate_every=2)
    steps = steps_of(tmp_path)
    assert ["rollout_corr/kl" in metrics for metrics in steps] == [True, False, True, False]
    assert ["reward/mean" in metrics for metrics in steps] == [True, False, True, False]
    assert [metrics["loss"] for metrics in steps] == [0.5] * 4


def test_an_evaluation_is_corrected_and_is_no_part_of_the_step(tmp_path, watched):
    trainer, monitor = watched(tmp_path, REJECTING)
    trainer.model.eval()
    trainer._calculate_rewards([], ["prompt"] * 8, [], [])
    assert "tool_mask" in trainer._generate_and_score_completions([])
    trainer.model.train()
    trainer._monitored_steps.end_step()
    assert steps_of(tmp_path) == [{"step": 1}]
    assert monitor.verdict == "not judged"


def test_the_run_directory_is_read_like_any_other(tmp_path, watched):
    trainer, monitor = watched(tmp_path, "tis", monitor={"rollouts": RolloutSample()})
    trainer.train(3)
    monitor.close()
    run = read_run(tmp_path)
    assert run.config == RolloutCorrectionConfig.preset("tis")
    assert [metrics["step"] for metrics in run.series] == [1, 2, 3]

    rows = [row for part in read_rollout_log(tmp_path) for row in part.to_rows()]
    assert len(rows) == 3 * 8
    assert {row["group_id"] for row in rows} == {f"{step}-{group}" for step in (1, 2, 3) for group in (0, 1)}
    assert rows[0]["response_ids"] is not None
    assert rows[8]["reward"] == rows[0]["reward"] + 1.5


@pytest.mark.parametrize("ranks", [1, 2])
def test_group_ids_are_unique_within_a_step(tmp_path, watched, ranks):
    """Two generation batches in each step: steps_per_generation=2 and gradient_accumulation_steps=4."""
    trainer, monitor = watched(tmp_path, monitor={"rollouts": RolloutSample()})
    trainer.accelerator.num_processes, trainer.accelerator.process_index = ranks, ranks - 1
    for _ in range(2):
        for _ in range(2):
            trainer._generate_and_score_completions([])
        trainer._monitored_steps.end_step()
    monitor.close()
    rows = [row for part in read_rollout_log(tmp_path) for row in part.to_rows()]
    groups = [0, 1, 2, 3] if ranks == 1 else [2, 3, 6, 7]
    expected = [f"{step}-{group}" for step in (1, 2) for group in groups for _ in range(4)]
    assert [row["group_id"] for row in rows] == expected


def test_without_a_tracker_five_keys_are_printed(tmp_path, watched):
    trainer, monitor = watched(tmp_path, REJECTING, report_to=[])
    trainer.train(3, log_every=2)
    [printed, metrics] = trainer.printed[0], trainer.logged[0]
    added = {name: value for name, value in printed.items() if name.startswith("rollout_corr/")}
    assert added == {
        "rollout_corr/k3_kl": metrics["rollout_corr/k3_kl"],
        "rollout_corr/kept_fraction": 1 - metrics["rollout_corr/rollout_rs_masked_fraction"],
        "rollout_corr/rollout_is_eff_sample_size": metrics["rollout_corr/rollout_is_eff_sample_size"],
        "rollout_corr/verdict": monitor.verdict,
        "rollout_corr/alarms": len(monitor.alarms),
    }
    assert printed["kl"] == 0.5

    # The history and the caller of `log` have every metric.
    assert {"rollout_corr/kl", "rollout_corr/verdict"} <= trainer.state.log_history[0].keys()
    assert {"rollout_corr/kl", "rollout_corr/verdict"} <= metrics.keys()
    assert "rollout_corr/verdict" not in steps_of(tmp_path)[0]


def test_a_printed_k3_is_weighted_by_tokens():
    trainer, second = attach(StandInTrainer(report_to=[]), REJECTING), recorded_batch()
    trainer._generate_and_score_completions([])
    second["completion_mask"][1:] = 0
    trainer.batch = second
    trainer._generate_and_score_completions([])
    trainer.log({})
    parts = [
        (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).double()
        for batch in [recorded_batch(), second]
    ]
    masks = [recorded_batch()["completion_mask"], second["completion_mask"]]
    d = torch.cat([part[mask != 0] for part, mask in zip(parts, masks, strict=True)])
    d = d[~d.isnan()]
    assert trainer.printed[0]["rollout_corr/k3_kl"] == pytest.approx((d.expm1() - d).mean().item(), rel=1e-5)
    assert trainer.printed[0]["rollout_corr/verdict"] in ("healthy", "not judged", "unhealthy")


def test_a_tracker_gets_every_metric(tmp_path, watched):
    trainer, _ = watched(tmp_path, REJECTING, report_to=["wandb"])
    trainer.train(1)
    assert len([name for name in trainer.printed[0] if name.startswith("rollout_corr/")]) > 40
    assert "rollout_corr/verdict" not in trainer.printed[0]


def test_nothing_in_the_loop_raises(tmp_path, watched, monkeypatch):
    """Metrics that are no numbers, rewards of other rows, odd masks, log-probs of a different shape, a bad judge."""
    trainer, monitor = watched(tmp_path, "tis", report_to=[], monitor={"rollouts": RolloutSample()})
    trainer._metrics["train"]["user"] += ["text", None, torch.ones(2), 2.0]
    for rows in (7, 8):
        trainer._calculate_rewards([], ["prompt"] * rows, [], [])
        trainer._generate_and_score_completions([])
    trainer._monitored_steps.end_step()
    [step] = steps_of(tmp_path)
    assert step["trl/user"] == 2.0
    assert "reward/mean" not in step

    trainer._metrics["train"].clear()
    trainer.batch = recorded_batch() | {"sampling_per_token_logps": torch.zeros(8, 3)}
    with pytest.warns(InertOptionWarning, match="one for each token"):
        trainer.train(1, first=1)
    assert monitor.steps == 2

    mask = recorded_batch()["completion_mask"]
    trainer.batch = recorded_batch() | {
        "tool_mask": torch.where(mask.bool(), -1, 0),
        "sampling_per_token_logps": mask * 0.5,
    }
    trainer.train(1, first=2)
    assert monitor.steps == 3

    trainer.batch = recorded_batch()
    monkeypatch.setattr("rollcorr.integrations.trl.logged_correction.console_metrics", lambda *_: 1 / 0)
    trainer.train(1, first=3)
    assert "rollout_corr/kl" in trainer.logged[-1]


@pytest.mark.parametrize("rewards", [torch.ones(8), [1.0] * 8, torch.ones(8, 3), None])
def test_rewards_of_another_kind_are_left_out(tmp_path, monitor_in, rewards):
    class Mine(StandInTrainer):
        def _calculate_rewards(self, *arguments):
            return rewards

    trainer = attach(Mine(), "measure", monitor=monitor_in(tmp_path))
    trainer.train(2)
    assert ["reward/mean" in metrics for metrics in steps_of(tmp_path)] == [False, False]


def test_the_log_says_which_engine_sampled_and_with_which_settings(tmp_path, monitor_in):
    from test_trl import FakeEngine

    monitor = monitor_in(tmp_path, rollouts=RolloutSample())
    engine = FakeEngine(engine="transformers", temperature=1.0, logprobs="processed", policy_version=3)
    trainer = attach(StandInTrainer(use_vllm=False), engine=engine, monitor=monitor)
    trainer.train(2)
    monitor.close()
    rows = [row for part in read_rollout_log(tmp_path) for row in part.to_rows()]
    assert {row["engine"] for row in rows} == {"transformers"}
    assert {(row["sampling"]["temperature"], row["sampling"]["logprobs"]) for row in rows} == {(1.0, "processed")}
    assert {row.get("policy_versions") for row in rows} == {None}


def test_lines_that_check_prints_log_both_log_probs(tmp_path, monkeypatch):
    class TwoSteps(StandInTrainer):
        def train(self, steps=2):
            super().train(steps)

    with pytest.raises(BadInputError, match="in place of trainer") as error:
        check_logs(["TRL"])
    lines = dedent("\n".join(re.findall(r"^    .*$", str(error.value), re.MULTILINE)))
    monkeypatch.chdir(tmp_path)
    exec(lines, {"trainer": TwoSteps()})
    tokens = int(recorded_batch()["completion_mask"].sum())
    assert check_logs(["run"]).metrics["rollout_corr/token_count"] == 2 * tokens


@pytest.mark.parametrize("generation", [None, SimpleNamespace(), SimpleNamespace(engine=object())])
def test_a_sampler_without_a_spec_leaves_the_settings_out(tmp_path, watched, generation):
    trainer, monitor = watched(tmp_path, monitor={"rollouts": RolloutSample()})
    trainer.vllm_generation = generation
    trainer.train(1)
    monitor.close()
    rows = [row for part in read_rollout_log(tmp_path) for row in part.to_rows()]
    assert len(rows) == 8
    assert {row.get("sampling") for row in rows} == {None}


def test_attach_records_the_settings_of_trls_sampler(tmp_path, monitor_in):
    spec = SamplingSpec(top_p=0.9, logprobs="raw", engine="vllm")
    monitor = monitor_in(tmp_path, rollouts=RolloutSample())
    trainer = attach(StandInTrainer(), monitor=monitor, sampling=spec)
    trainer.train(1)
    monitor.close()
    rows = [row for part in read_rollout_log(tmp_path) for row in part.to_rows()]
    assert {(row["sampling"]["top_p"], row["sampling"]["logprobs"]) for row in rows} == {(0.9, "raw")}
    assert read_run(tmp_path).sampling
    with pytest.raises(ValueError, match="a Monitor records SamplingSpec"):
        attach(StandInTrainer(), sampling=spec)


def test_alarms_sound_in_the_loop_of_trl(tmp_path, watched):
    heard = []
    batch = recorded_batch()
    batch["sampling_per_token_logps"] = 3 * batch["sampling_per_token_logps"]
    trainer, monitor = watched(tmp_path, batch=batch, monitor={"on_alarm": heard.append})
    trainer.train(4)
    assert heard
    assert monitor.verdict == "unhealthy"


@pytest.mark.parametrize(
    ("number", "first", "count"), [(errno.ENOSPC, 2, 9), (errno.ESTALE, 12, 1), (errno.EMFILE, 5, 40)]
)
def test_trl_trains_on_while_the_disk_fails(tmp_path, number, first, count):
    faults = Faults(number, first, count)
    with faulty_disk(tmp_path, faults), Monitor(tmp_path, rollouts=RolloutSample()) as monitor:
        trainer = attach(StandInTrainer(), REJECTING, monitor=monitor)
        faults.happen = True
        trainer.train(5)
        monitor.flush()
        assert faults.calls >= first, "the disk has failed"
        faults.happen = False
    run = read_run(tmp_path)
    assert [(metrics["step"], metrics["trl/kl"]) for metrics in run.series] == [(n + 1, float(n)) for n in range(5)]
    assert len({metrics["rollout_corr/token_count"] for metrics in run.series}) == 1
    assert len([row for part in read_rollout_log(tmp_path) for row in part.to_rows()]) == 5 * 8
    assert run.remarks == ()


def test_either_the_monitor_or_attach_brings_the_configuration(tmp_path, caplog, monitor_in):
    for name, given, of_monitor, found in [
        ("of trl", None, (), ("sequence", 3.0)),
        ("of attach", "tis", (), ("token", 2.0)),
        ("of the monitor", None, ("tis",), ("token", 2.0)),
        ("of both", "tis", ("tis",), ("token", 2.0)),
    ]:
        monitor = monitor_in(tmp_path / name, *of_monitor)
        trainer = attach(StandInTrainer(mode="sequence_truncate"), given, monitor=monitor)
        trainer.train(1)
        config = trainer._correction_config
        assert (config.rollout_is, config.rollout_is_threshold) == found
        assert monitor.config == read_run(tmp_path / name).config == config
        assert f"steps go to {tmp_path / name}" in caplog.text

    trainer = StandInTrainer()
    with pytest.raises(ValueError, match="give the configuration to one of them"):
        attach(trainer, "icepop", monitor=monitor_in(tmp_path / "other", "tis"))
    assert type(trainer) is StandInTrainer


def test_a_monitor_that_does_not_go_on_where_the_trainer_does_is_refused(tmp_path, watched):
    trainer, _ = watched(tmp_path / "fresh")
    with pytest.raises(ValueError, match="after step 20 and the Monitor after step 0: make the Monitor with start=20"):
        trainer.train(1, first=20)

    trainer, monitor = watched(tmp_path / "resumed", monitor={"start": 20})
    trainer.train(1, first=20)
    assert monitor.steps == 21


def test_a_monitor_of_other_ranks_is_refused(tmp_path, monkeypatch, watched):
    monkeypatch.setattr(
        "rollcorr.integrations.trl.corrected_trainer.group_of_all_ranks", lambda: torch.distributed.group
    )
    monkeypatch.setattr(torch.distributed.group, "size", lambda: 2, raising=False)
    with pytest.raises(ValueError, match="has 2 ranks and the Monitor counts 1: make it after the trainer"):
        watched(tmp_path)


def test_attaching_again_replaces_the_monitor(tmp_path, watched, monitor_in):
    trainer, first = watched(tmp_path / "first")
    attach(trainer, monitor=monitor_in(tmp_path / "second"))
    trainer.train(1)
    assert (first.steps, len(trainer.callbacks)) == (0, 1)
    assert len(steps_of(tmp_path / "second")) == 1


def test_attaching_again_keeps_what_is_not_given(tmp_path, monitor_in):
    from test_trl import FakeEngine

    monitor, engine = monitor_in(tmp_path, "tis"), FakeEngine()
    trainer = StandInTrainer(use_vllm=False)
    attach(trainer, monitor=monitor)
    attach(trainer, engine=engine)
    attach(trainer)
    trainer.train(1)
    assert trainer._correction_config == RolloutCorrectionConfig.preset("tis")
    assert trainer.vllm_generation.engine is engine
    assert (len(trainer.callbacks), len(steps_of(tmp_path))) == (1, 1)
    assert steps_of(tmp_path)[0]["rollout_corr/token_count"] > 0


def test_attaching_again_with_a_configuration_keeps_the_monitor_and_another_monitor_keeps_the_configuration(
    tmp_path, watched, monitor_in
):
    trainer, monitor = watched(tmp_path / "first", "tis")
    attach(trainer, "measure")
    trainer.train(1)
    assert monitor.steps == 1
    assert read_run(tmp_path / "first").config == RolloutCorrectionConfig.preset("measure")

    attach(trainer, monitor=monitor_in(tmp_path / "second"))
    trainer.train(1)
    assert monitor.steps == 1
    assert read_run(tmp_path / "second").config == RolloutCorrectionConfig.preset("measure")

    # The Monitor that is kept was made with a configuration, which a second one contradicts.
    attach(trainer, monitor=monitor_in(tmp_path / "third", "tis"))
    with pytest.raises(ValueError, match="give the configuration to one of them"):
        attach(trainer, "icepop")
    assert trainer._correction_config == RolloutCorrectionConfig.preset("tis")


def test_the_mixin_takes_a_monitor(tmp_path, monitor_in):
    class Trainer(RolloutCorrectionMixin, StandInTrainer):
        pass

    monitor = monitor_in(tmp_path)
    Trainer(rollout_correction="tis", rollout_monitor=monitor).train(1)
    assert monitor.steps == 1


def test_rloo_is_watched_with_what_its_loss_can_do(tmp_path, monitor_in):
    """Its configuration rejects sequences with a missing log-prob; the run directory records this."""
    from test_trl import Sampler

    monitor = monitor_in(tmp_path, rollout_is="sequence")
    trainer = attach(StandInRLOOTrainer(Sampler()), monitor=monitor)
    trainer.train(1)
    assert read_run(tmp_path).config.nonfinite == "reject_sequence"
    assert steps_of(tmp_path)[0]["rollout_corr/token_count"] > 0


def test_fresh_nulls_need_an_engine_and_a_monitor(monitor_in, tmp_path):
    with pytest.raises(ValueError, match=r"null_every=2 needs .* attach\(engine=…, monitor=…\)"):
        attach(StandInTrainer(), null_every=2, monitor=monitor_in(tmp_path))


def test_a_null_that_fails_is_logged_only(monitor_in, tmp_path, caplog):
    from test_trl import FakeEngine

    engine = FakeEngine(temperature=1.0, logprobs="processed")
    trainer = attach(StandInTrainer(use_vllm=False), engine=engine, monitor=monitor_in(tmp_path), null_every=1)
    trainer.batch |= {"prompt_mask": trainer.batch["prompt_mask"][:0]}
    trainer._last_loaded_step = 0
    trainer.train(2)
    assert caplog.text.count("the null was not measured again") == 1  # the weights of step 2 were not sent
    assert trainer._monitored_steps.monitor.steps == 2
