"""One process: counts, files and verdicts of a step, and files after a kill."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_python

from rollcorr import Monitor, PolicyLogProbs, RolloutSample, correct, health, policy_loss, read_rollout_log, read_run
from rollcorr.config.finding import Finding
from rollcorr.core.mergeable_statistics import STATISTICS_DTYPE
from rollcorr.diagnostics import bare_metrics
from rollcorr.monitor import step_totals
from rollcorr.monitor.running_judge import RunningJudge

CONFIG = {"rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.05}


def batch(rows=6, width=5, seed=0, noise=0.02):
    generator = torch.Generator().manual_seed(seed)
    train = -2 * torch.rand(rows, width, generator=generator)
    rollout = train + noise * torch.randn(rows, width, generator=generator)
    return train, rollout, torch.rand(rows, width, generator=generator) > 0.1


def lines_of(path):
    """The lines of a metrics.jsonl, in strict JSON."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    text = path.read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


# --- Counts of a step -------------------------------------------------------------------------------------------------


def test_a_step_has_the_metrics_of_its_correction_and_the_callers_own(tmp_path):
    with Monitor(tmp_path, CONFIG) as monitor:
        correction = monitor.correct(*batch())
        metrics = monitor.step(reward=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), loss=torch.tensor(0.25), lr=1e-4)
    assert {name: metrics[name] for name in correction.metrics()} == correction.metrics()
    assert (metrics["reward/mean"], metrics["reward/min"], metrics["reward/max"]) == (3.5, 1.0, 6.0)
    assert metrics["reward/std"] == pytest.approx(math.sqrt(35 / 12))
    assert (metrics["loss"], metrics["lr"]) == (0.25, 1e-4)


@pytest.mark.parametrize("config", ["tis", {"rollout_is": "token"}])
def test_a_configuration_for_one_call_names_the_constructor(tmp_path, config):
    with Monitor(tmp_path, "decoupled_token_is") as monitor:
        for arguments, options in (((*batch(), config), {}), (batch(), {"config": config})):
            with pytest.raises(TypeError, match=r"give it to the constructor, Monitor\(run_dir, .*(tis|rollout_is)"):
                monitor.correct(*arguments, **options)
        monitor.correct(*batch(), rollout_is_threshold=3.0)
        assert monitor.step()["rollout_corr/sequence_count"] == 6.0


@pytest.mark.parametrize("missing", [1, 2])
def test_a_missing_argument_names_all_three(tmp_path, missing):
    arguments = [None if place == missing else values for place, values in enumerate(batch())]
    with Monitor(tmp_path) as monitor, pytest.raises(TypeError, match="takes train_log_prob, rollout_log_prob and"):
        monitor.correct(*arguments)


def test_micro_batches_of_any_layout_are_merged(tmp_path):
    train, rollout, mask = batch()
    with Monitor(tmp_path / "whole", CONFIG) as whole, Monitor(tmp_path / "parts", CONFIG) as parts:
        whole.correct(train, rollout, mask)
        parts.correct(train[:1], rollout[:1], mask[:1])
        offsets = torch.arange(0, 26, 5)
        packed = (tensor[1:].flatten() for tensor in (train, rollout, mask))
        parts.correct(*packed, cu_seqlens=offsets)
        assert parts.step() == pytest.approx(whole.step(), rel=1e-6, abs=1e-9)


def test_quantiles_are_merged_where_detail_is_asked_for(tmp_path):
    train, rollout, mask = batch()
    with Monitor(tmp_path / "whole") as whole, Monitor(tmp_path / "parts") as parts:
        whole.correct(train, rollout, mask, detail=True)
        for rows in (slice(0, 2), slice(2, 6)):
            parts.correct(train[rows], rollout[rows], mask[rows], detail=True)
        metrics = parts.step()
        assert metrics == pytest.approx(whole.step(), rel=1e-6, abs=1e-9)
    assert metrics["rollout_corr/log_ratio_abs_p99"] > 0


def test_losses_are_counted_and_bypass_mode_brings_its_correction(tmp_path):
    train, rollout, mask = batch()
    policies = PolicyLogProbs(log_prob=train.requires_grad_(), rollout_log_prob=rollout)
    config = {"bypass_mode": True, "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.05}
    with Monitor(tmp_path, config) as monitor:
        loss = policy_loss(policies, torch.ones(6, 5), mask, config=config, whole_step=True)
        monitor.add(loss)
        metrics = monitor.step()
    assert metrics["rollout_corr/token_count"] == mask.sum()
    assert "actor/policy_kl" in metrics


def test_the_correction_is_that_of_correct_and_the_options_go_there(tmp_path):
    with Monitor(tmp_path, CONFIG) as monitor:
        ours = monitor.correct(*batch(), rollout_is_threshold=1.01)
    other = correct(*batch(), CONFIG, rollout_is_threshold=1.01)
    assert ours.config == other.config
    assert torch.equal(ours.weights, other.weights)


def test_calls_of_a_step_that_measure_differently_are_refused(tmp_path):
    with Monitor(tmp_path, CONFIG) as monitor:
        monitor.correct(*batch())
        with pytest.raises(ValueError, match=r"must be measured alike.*Give every call of a step the same options"):
            monitor.correct(*batch(), detail=True)


def test_a_correction_is_counted_once_and_so_are_its_parts(tmp_path):
    with Monitor(tmp_path, CONFIG) as monitor:
        correction = monitor.correct(*batch())
        for again in (correction, correction[:2]):
            with pytest.raises(ValueError, match="was counted in this step already"):
                monitor.add(again)
        monitor.step()
        monitor.add(correct(*batch(seed=1), CONFIG))
        assert monitor.step()["rollout_corr/sequence_count"] == 6


@pytest.mark.parametrize("name", ["kl", "rollout_corr/kl", "step", "rollout_rs_masked_fraction", "mismatch/kl"])
def test_a_name_that_the_judge_would_misread_is_refused(tmp_path, name):
    with Monitor(tmp_path) as monitor, pytest.raises(ValueError, match=f"call it train/{name}"):
        monitor.step(**{name: 0.5})


def test_what_is_no_number_is_refused(tmp_path):
    with Monitor(tmp_path) as monitor, pytest.raises(TypeError, match="model must be a number"):
        monitor.step(model="small")


def test_values_that_are_not_finite_are_counted_and_written_as_null(tmp_path):
    with Monitor(tmp_path) as monitor:
        monitor.step(reward=[1.0, math.nan, 3.0, math.inf], loss=math.nan, nothing=torch.zeros(0))
    (line,) = lines_of(tmp_path / "metrics.jsonl")
    assert (line["reward/mean"], line["reward/max"], line["reward/nonfinite_count"]) == (2.0, 3.0, 2.0)
    assert (line["loss"], line["nothing/mean"], line["nothing/min"]) == (None, None, None)


# --- Costs of a step --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_a_step_is_one_transfer_whatever_it_holds(tmp_path, monkeypatch, packed):
    """On meta tensors, which have no values, every other read raises."""
    reads = []

    def on_host(exchange, vector):
        assert vector.is_meta
        reads.append(vector.numel())
        return torch.zeros(vector.numel(), dtype=STATISTICS_DTYPE)

    monkeypatch.setattr(step_totals.RankExchange, "_to_host", on_host)
    shape = (12,) if packed else (3, 4)
    with torch.device("meta"):
        log_prob, mask, reward, loss = torch.zeros(shape), torch.ones(shape).bool(), torch.zeros(3), torch.zeros(())
        offsets = torch.arange(4) if packed else None
    with Monitor(tmp_path, CONFIG) as monitor:
        for step in range(1, 4):
            for _ in range(4):
                monitor.correct(log_prob, log_prob, mask, cu_seqlens=offsets)
            monitor.step(reward=reward, loss=loss, lr=1e-4, lengths=[3.0, 4.0])
            assert len(reads) == step
    assert len(set(reads)) == 1


def test_the_judge_looks_at_ten_steps_however_long_the_run_is(monkeypatch):
    from rollcorr.monitor import running_judge

    looked_at = []
    real = running_judge.judge

    def counted(evidence, *, broken):
        looked_at.append((len(evidence.history), len(broken)))
        return real(evidence, broken=broken)

    monkeypatch.setattr(running_judge, "judge", counted)
    judge = RunningJudge()
    metrics = bare_metrics(correct(*batch()).metrics())
    for step in range(1, 201):
        judge.judge(step, metrics, None)
    assert [steps for steps, _ in looked_at] == [*range(1, 11), *[10] * 190]
    assert len({broken for _, broken in looked_at}) == 1


def test_the_judge_computes_only_the_medians_asked_for(monkeypatch):
    """Listing the names of ten steps took an eighth of a step's time."""
    listed = []
    monkeypatch.setattr(
        "rollcorr.monitor.running_judge.RecentMedians.__iter__", lambda own: iter(listed.append(own) or ())
    )
    judge = RunningJudge()
    metrics = bare_metrics(correct(*batch()).metrics()) | {"actor/policy_kl": 0.0, "actor/first/policy_kl": 0.0}
    for step in range(1, 13):
        judge.judge(step, metrics, None)
    assert listed == []


steps_of_runs = st.lists(
    st.fixed_dictionaries(
        {
            "rollout_corr/token_count": st.sampled_from([0.0, 10.0]),
            "rollout_corr/kl": st.sampled_from([0.0, 1e-3, 0.2, -0.3, math.nan]),
            "rollout_corr/rollout_is_mean": st.sampled_from([1.0, 0.2, 3.0, math.inf]),
            "rollout_corr/nonfinite_count": st.sampled_from([0.0, 0.0, 2.0]),
            "rollout_corr/rollout_rs_seq_masked_fraction": st.sampled_from([0.0, 0.07, 0.5]),
        }
    ),
    min_size=1,
    max_size=25,
)


@settings(deadline=None, max_examples=60)
@given(steps_of_runs)
def test_the_running_judge_finds_what_the_health_check_finds_in_the_recent_steps(series):
    judge, kept = RunningJudge(), []
    for step, metrics in enumerate(series, start=1):
        judge.judge(step, bare_metrics(metrics), None)
        if metrics["rollout_corr/token_count"] > 0:
            kept.append(metrics | {"step": step})
        expected = {(finding.code, finding.metric) for finding in health(kept[-10:]).warnings}
        lasting = {(finding.code, finding.metric) for finding in judge.alarms}
        assert expected <= lasting
        assert all(absent < 10 for absent in judge._absent.values())
        assert lasting - expected == set(judge._absent)


# --- Alarms -----------------------------------------------------------------------------------------------------------


def test_an_alarm_names_cause_and_fix_and_comes_once(tmp_path, caplog):
    heard = []
    caplog.set_level(logging.INFO, logger="rollcorr.monitor")
    with Monitor(tmp_path, on_alarm=heard.append) as monitor:
        for step in range(1, 6):
            monitor.correct(*batch(noise=2.0, seed=step))
            monitor.step()
    codes = [(finding.code, finding.metric) for finding in heard]
    assert ("out_of_range", "kl") in codes or ("out_of_range", "chi2_token") in codes
    assert len(codes) == len(set(codes))
    assert all(finding.reason and finding.fix and finding.first_step for finding in heard)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(heard) + 1  # the writer thread adds the first cause, once
    assert "log-probs above 0" in messages[-1]
    assert messages[0].startswith("step 1: ")
    assert f"Cause: {heard[0].reason}" in messages[0]
    assert f"Fix: {heard[0].fix}" in messages[0]
    assert {finding.metric for finding in monitor.alarms} == {finding.metric for finding in heard}


def test_an_alarm_passes_after_a_healthy_window_and_can_come_again(tmp_path, caplog):
    heard = []
    caplog.set_level(logging.INFO, logger="rollcorr.monitor")
    bad, good = batch(noise=2.0), batch(noise=0.01)
    with Monitor(tmp_path, on_alarm=[lambda finding: heard.append(finding.metric)]) as monitor:
        for tensors, steps in ((bad, 3), (good, 20), (bad, 12)):
            for _ in range(steps):
                monitor.correct(*tensors)
                monitor.step()
            if tensors is good:
                assert monitor.alarms == ()
    assert heard.count("chi2_token") == 2
    assert any("has passed" in record.getMessage() for record in caplog.records)


def test_an_error_of_a_callback_is_logged(tmp_path, caplog):
    heard = []

    def fail(finding):
        raise RuntimeError(f"no mail about {finding.metric}")

    with Monitor(tmp_path / "run", on_alarm=[fail, heard.append]) as monitor:
        monitor.correct(*batch(noise=2.0))
        monitor.step()
        assert (monitor.steps, len(heard)) == (1, len(monitor.alarms))
    assert len(lines_of(tmp_path / "run" / "metrics.jsonl")) == 1
    assert "step 1: on_alarm failed" in caplog.text
    assert f"no mail about {heard[0].metric}" in caplog.text

    with Monitor(tmp_path / "strict", on_alarm=fail, strict=True) as monitor:
        monitor.correct(*batch(noise=2.0))
        with pytest.raises(RuntimeError, match="no mail about"):
            monitor.step()


def test_a_callback_may_end_the_program(tmp_path):
    with Monitor(tmp_path, on_alarm=lambda finding: sys.exit(finding.title)) as monitor:
        monitor.correct(*batch(noise=2.0))
        with pytest.raises(SystemExit):
            monitor.step()
    assert len(lines_of(tmp_path / "metrics.jsonl")) == 1


def test_an_error_of_the_judge_is_logged(tmp_path, caplog, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("a rule")

    with Monitor(tmp_path) as monitor:
        monkeypatch.setattr(monitor._judge, "judge", fail)
        for _ in range(2):
            monitor.correct(*batch())
            monitor.step()
    assert [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")] == [1, 2]
    assert "step 1 could not be judged" in caplog.text


def test_a_step_without_a_correction_is_not_judged(tmp_path):
    with Monitor(tmp_path) as monitor:
        assert monitor.step(reward=1.0) == {"reward": 1.0}
        assert monitor.alarms == ()


# --- The run directory ------------------------------------------------------------------------------------------------


def test_a_run_goes_on_after_the_steps_that_count(tmp_path):
    with Monitor(tmp_path, CONFIG, rollouts=RolloutSample()) as monitor:
        for step in range(1, 5):
            monitor.correct(*batch(seed=step))
            monitor.step(reward=float(step))
    with pytest.raises(FileExistsError, match="has 4 steps already: say how many of them count, start=N"):
        Monitor(tmp_path, CONFIG)
    with Monitor(tmp_path, CONFIG, start=2, rollouts=RolloutSample()) as monitor:
        assert (monitor.steps, len(monitor._judge._history)) == (2, 2)
        monitor.correct(*batch(seed=9))
        monitor.step(reward=30.0)
    run = read_run(tmp_path)
    assert [(metrics["step"], metrics["reward"]) for metrics in run.series] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert run.remarks == ()
    assert run.config == monitor.config
    assert [path.name for path in sorted((tmp_path / "rollouts").iterdir())] == [
        f"step_{step:06d}.parquet" for step in (1, 2, 3)
    ]


def test_resuming_changes_no_alarm(tmp_path):
    """The rise at step 9 comes with older weights; 25 steps are more than the judge's window."""

    def log(monitor, steps):
        for step in steps:
            fresh = step <= 8
            monitor.correct(*batch(rows=32, width=16, seed=step, noise=0.02 if fresh else 0.2))
            monitor.step(**{"engine/staleness": 0.0 if fresh else 4.0})

    with Monitor(tmp_path / "whole", CONFIG) as whole:
        log(whole, range(1, 28))
    with Monitor(tmp_path / "resumed", CONFIG) as started:
        log(started, range(1, 26))
    with Monitor(tmp_path / "resumed", CONFIG, start=25) as resumed:
        log(resumed, range(26, 28))
    assert [finding.code for finding in whole.alarms] == ["changed_at_step"]
    assert resumed.alarms == whole.alarms
    assert lines_of(tmp_path / "resumed" / "metrics.jsonl") == lines_of(tmp_path / "whole" / "metrics.jsonl")


def test_metrics_that_end_anywhere_can_be_read_and_continued(tmp_path):
    """A kill may leave any number of bytes."""
    with Monitor(tmp_path / "whole") as monitor:
        for step in range(1, 4):
            monitor.correct(*batch(seed=step))
            monitor.step()
    text = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    first = text.index(b"\n") + 1
    for number, end in enumerate(range(first, len(text), 397)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "metrics.jsonl").write_bytes(text[:end])
        done = [metrics["step"] for metrics in read_run(folder).series]
        assert done == list(range(1, text[:end].count(b"\n") + 1))
        with Monitor(folder, start=1) as monitor:
            monitor.step(reward=1.0)
        assert [metrics["step"] for metrics in read_run(folder).series] == [1, 2]


CHILD = """
    import sys, torch
    from rollcorr import Monitor, RolloutSample
    generator = torch.Generator().manual_seed(0)
    train = -torch.rand(64, 200, generator=generator)
    with Monitor(sys.argv[1], rollouts=RolloutSample()) as monitor:
        for _ in range(100_000):
            monitor.correct(train, train + 0.01, torch.ones(64, 200, dtype=torch.bool))
            monitor.step(reward=torch.ones(64))
            assert monitor.flush()
            print(monitor.steps, flush=True)
"""


def test_a_killed_run_can_be_read(tmp_path):
    """Whatever the process was doing: the steps that it has reported are there, and so are their rows."""
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}) as child:
        reported = [int(child.stdout.readline()) for _ in range(5)]
        child.send_signal(signal.SIGKILL)
    steps = [metrics["step"] for metrics in read_run(tmp_path).series]
    assert steps[: len(reported)] == reported == [1, 2, 3, 4, 5]
    rows = [row for part in read_rollout_log(tmp_path) for row in part.to_rows()]
    assert {row["step"] for row in rows} >= set(steps)
    assert all(len([row for row in rows if row["step"] == step]) == 64 for step in steps)


# --- The rollout log --------------------------------------------------------------------------------------------------


def run_with_log(folder, sample, steps=6, **columns):
    with Monitor(folder, rollouts=sample) as monitor:
        for step in range(1, steps + 1):
            monitor.correct(*batch(rows=40), columns={"x_row": list(range(40)), **columns})
            monitor.step(reward=torch.arange(40.0) + step)
    return [row for part in read_rollout_log(folder) for row in part.to_rows()]


def test_the_rule_keeps_the_same_rows_in_every_repetition_and_their_share(tmp_path):
    sample = RolloutSample(every=2, share=0.25, seed=3)
    rows = run_with_log(tmp_path / "one", sample)
    assert rows == run_with_log(tmp_path / "two", sample)
    assert {row["step"] for row in rows} == {2, 4, 6}
    expected = [(step, row) for step in (2, 4, 6) for row in range(40) if sample.takes_row(step, f"0/{row}")]
    assert [(row["step"], row["x_row"]) for row in rows] == expected
    assert 0.1 < len(expected) / 120 < 0.4
    assert all(row["reward"] == row["x_row"] + row["step"] for row in rows)


def test_the_answers_to_one_prompt_stay_together(tmp_path):
    rows = run_with_log(tmp_path, RolloutSample(share=0.5), group_id=[row // 8 for row in range(40)])
    for step in range(1, 7):
        groups = [row["group_id"] for row in rows if row["step"] == step]
        assert all(groups.count(group) == 8 for group in set(groups))
    assert 0 < len(rows) < 240


def test_the_log_keeps_what_the_buffers_held_then(tmp_path):
    train, rollout, mask = batch()
    with Monitor(tmp_path, rollouts=RolloutSample()) as monitor:
        monitor.correct(train, rollout, mask)
        expected = rollout.clone()
        rollout.zero_()
        monitor.step()
    (part,) = read_rollout_log(tmp_path)
    ends = (mask * torch.arange(1, 6)).amax(1)
    inside = torch.arange(5) < ends[:, None]
    assert torch.equal(part.packed("rollout_log_prob"), expected[inside])


def test_rewards_that_do_not_fit_the_rows_are_refused(tmp_path):
    with Monitor(tmp_path, rollouts=RolloutSample()) as monitor:
        monitor.correct(*batch())
        with pytest.raises(ValueError, match=r"reward is \(5,\), and this step had 6 sequences"):
            monitor.step(reward=torch.zeros(5))


def test_one_advantage_for_each_sequence_fills_its_tokens(tmp_path):
    with Monitor(tmp_path, rollouts=RolloutSample()) as monitor:
        monitor.correct(*batch(rows=2), columns={"advantages": torch.tensor([0.5, -0.5])})
        monitor.step()
    (part,) = read_rollout_log(tmp_path)
    assert [set(row["advantages"]) for row in part.to_rows()] == [{0.5}, {-0.5}]


def test_without_pyarrow_a_monitor_runs_and_a_log_names_the_extra(tmp_path):
    program = """
        import sys
        sys.modules["pyarrow"] = None
        import torch
        from rollcorr import Monitor, RolloutSample
        with Monitor(sys.argv[1]) as monitor:
            monitor.correct(-torch.rand(2, 3), -torch.rand(2, 3), torch.ones(2, 3))
            monitor.step(reward=1.0)
        try:
            Monitor(sys.argv[1], start=1, rollouts=RolloutSample())
        except ImportError as error:
            print(error)
    """
    done = run_python(textwrap.dedent(program), tmp_path)
    assert done.stdout == "the rollout log needs pyarrow: pip install 'rollcorr[log]'\n"


@pytest.mark.parametrize(("option", "value"), [("every", 0), ("share", 0.0), ("share", 1.5)])
def test_a_rule_outside_its_limits_is_refused(option, value):
    with pytest.raises(ValueError, match=f"{option} must be"):
        RolloutSample(**{option: value})


def test_an_alarm_of_the_caller_lasts_and_passes(tmp_path, caplog):
    heard = []
    finding = Finding(code="rank_without_log_probs", title="rank 1 reported no log-probs", fix="report them")
    with Monitor(tmp_path, on_alarm=heard.append) as monitor:
        for _ in range(2):
            monitor.raise_alarm(finding)
            monitor.step()
        assert (monitor.alarms, monitor.verdict, heard) == ((finding,), "unhealthy", [finding])
        for _ in range(10):
            assert monitor.alarms == (finding,)
            monitor.correct(*batch())
            monitor.step()
        assert finding not in monitor.alarms
    texts = [record.getMessage() for record in caplog.records]
    assert texts.count("step 1: rank 1 reported no log-probs. Fix: report them") == 1


def test_before_the_first_step_nothing_is_judged(tmp_path):
    with Monitor(tmp_path) as monitor:
        assert monitor.verdict == "not judged"
        assert monitor.not_judged
