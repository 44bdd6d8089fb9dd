"""`rollcorr watch` and `rollcorr compare` on runs of a Monitor."""

import json

import pytest
import torch
from typer.testing import CliRunner

from rollcorr import Monitor, RolloutSample, SamplingSpec
from rollcorr.cli import app
from rollcorr.run_directory.metrics_file import GrowingMetrics

SPEC = SamplingSpec(logprobs="processed")


def noisy(noise, seed):
    """log π, log μ and the mask of a batch whose sides differ by that noise."""
    generator = torch.Generator().manual_seed(seed)
    train = -torch.rand(16, 50, generator=generator) - 0.2
    rollout = train + noise * torch.randn(16, 50, generator=generator)
    return train, rollout, torch.ones(16, 50, dtype=torch.bool)


def leave_run(path, noise, steps=3, start=None, **options):
    with Monitor(path, "decoupled_token_is", start=start, **options) as monitor:
        for step in range(steps):
            monitor.correct(*noisy(noise, step))
            monitor.step(reward=float(step))
    return path


@pytest.fixture
def runs(tmp_path):
    return leave_run(tmp_path / "healthy", 0.01), leave_run(tmp_path / "broken", 2.0)


def invoke(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})


def test_watch_shows_each_step_and_each_alarm_once(runs):
    healthy, broken = runs
    shown = invoke("watch", healthy, "--once")
    assert shown.exit_code == 3
    *lines, verdict, sentence = [line.split("  ")[0] for line in shown.stdout.splitlines()]
    assert lines == ["step 1", "step 2", "step 3"]
    assert verdict == json.loads(invoke("compare", healthy, "--json").stdout)[0]["verdict"] == "not judged"
    assert sentence.startswith("weights not judged: there is no null, and there are 3 steps")
    shown = invoke("watch", broken, "--once")
    assert shown.exit_code == 1
    assert shown.stdout.count("token-level χ² is too high") == 1
    assert "Cause: " in shown.stdout
    assert "Fix: " in shown.stdout


def test_watch_ends_by_ctrl_c_and_shows_steps_that_come_meanwhile(tmp_path, monkeypatch):
    waits = []

    def sleep(seconds):
        """The run adds steps while the command waits."""
        waits.append(seconds)
        if len(waits) == 1:
            leave_run(tmp_path, 0.01, steps=2)
        elif len(waits) == 2:
            leave_run(tmp_path, 0.01, steps=1, start=1)
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    shown = invoke("watch", tmp_path)
    assert shown.exit_code == 130
    lines = [line.split("  ")[0] for line in shown.stdout.splitlines()]
    assert lines[:5] == ["step 1", "step 2", "the run went on from an earlier step", "step 1", "step 2"]
    assert lines[5] == "not judged"
    assert waits == [2.0] * 3


def test_watch_without_a_run_is_bad_input(tmp_path):
    shown = invoke("watch", tmp_path / "nowhere", "--once")
    assert shown.exit_code == 2
    assert "is not a run directory" in shown.stderr
    assert "It must exist" in invoke("watch", "--help").stdout, "the help says so before"


def test_a_line_is_read_when_it_is_whole(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    metrics = GrowingMetrics(path)
    assert [*metrics.new_steps()] == []
    path.write_text('{"step": 1}\n{"st')
    assert [*metrics.new_steps()] == [{"step": 1}]
    assert [*metrics.new_steps()] == []
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert [*metrics.new_steps()] == [{"step": 2}]
    with path.open("a") as file:
        file.write('[]\n{"a": 1}\n{"step": 3}\n')
    assert [*metrics.new_steps()] == [{"step": 3}]
    assert not metrics.begins_again()
    assert "metrics.jsonl:3 is left out: expected a JSON object" in caplog.text
    assert "metrics.jsonl:4 is left out: it has no step" in caplog.text


def test_compare_puts_verdicts_and_medians_side_by_side(runs):
    shown = invoke("compare", *runs)
    assert shown.exit_code == 0
    rows = {line.split("  ")[0].strip(): line.split() for line in shown.stdout.splitlines()[1:]}
    assert shown.stdout.splitlines()[0].split() == ["healthy", "broken"]
    assert rows["steps"] == ["steps", "3", "3"]
    assert "unhealthy," in rows["verdict"]
    assert "mean weight" in rows


def test_compare_as_json_of_chosen_metrics(runs):
    (healthy, broken) = json.loads(invoke("compare", *runs, "--json", "--metric", "rollout_corr/kl").stdout)
    assert (healthy["verdict"], broken["verdict"]) == ("not judged", "unhealthy")
    assert set(healthy["metrics"]) == {"kl"}
    assert abs(healthy["metrics"]["kl"]) < 0.01 < abs(broken["metrics"]["kl"])


def test_compare_writes_a_page_with_the_curves(runs, tmp_path):
    shown = invoke("compare", *runs, "--output", tmp_path / "page")
    assert shown.exit_code == 0
    page = tmp_path / "page" / "comparison.html"
    assert str(page) in shown.stdout.replace("\n", "")
    assert page.read_text(encoding="utf-8").count("<figure") > 0
    assert list(page.parent.iterdir()) == [page]


def test_compare_names_a_metric_that_no_run_has(runs):
    shown = invoke("compare", *runs, "--metric", "speed")
    assert shown.exit_code == 2
    assert "no run has the metric 'speed'" in shown.stderr


def test_report_reads_what_a_monitor_leaves(runs):
    shown = invoke("report", runs[0])
    assert shown.exit_code == 3
    assert shown.stdout.splitlines()[2] == "Run healthy: 3 steps, the last is 3"
    assert "note:" not in shown.stdout


def test_a_null_in_the_run_directory_judges_the_run_everywhere(tmp_path):
    """The log of the run's own first steps makes the null; a trusted one may lie there as well."""
    right, wrong = (tmp_path / name for name in ("right", "wrong"))
    with Monitor(tmp_path / "source", rollouts=RolloutSample()) as monitor:
        for step in range(3):
            monitor.correct(*noisy(0.01, step))
            monitor.step()
    for run in (right, wrong):
        run.mkdir()
        assert invoke("null", tmp_path / "source" / "rollouts", "-o", run / "null.json").exit_code == 0
    for run, noise, verdict, code in ((right, 0.01, "healthy", 0), (wrong, 0.05, "unhealthy", 1)):
        with Monitor(run, rollouts=RolloutSample(), sampling=SPEC) as monitor:
            for step in range(3):
                monitor.correct(*noisy(noise, step))
                monitor.step()
            assert monitor.verdict == verdict
        for command in (("watch", run, "--once"), ("report", run), ("check", run)):
            shown = invoke(*command)
            assert (shown.exit_code, verdict in shown.stdout) == (code, True), shown.output
            assert str(run / "null.json") in shown.stdout.replace("\n", ""), command
        assert f"judged against {run / 'null.json'}" in invoke("advise", run).stderr
        assert json.loads(invoke("compare", run, "--json").stdout)[0]["verdict"] == verdict
        assert (
            json.loads(invoke("compare", run, "--json").stdout)[0]["judged_against"]
            == f"{run / 'null.json'} (unvetted)"
        )
        assert str(run / "null.json") in invoke("compare", run).stdout.replace("\n", "")
    assert f"times that of {wrong / 'null.json'} (unvetted)" in invoke("watch", wrong, "--once").stdout


def test_without_recorded_settings_no_verdict_is_healthy(tmp_path):
    """Raw log-probs agree also if only the sampler truncates."""
    run = leave_run(tmp_path / "run", 0.01, rollouts=RolloutSample())
    assert invoke("null", run / "rollouts", "-o", run / "null.json").exit_code == 0
    sentence = "log-probs agree; whether tokens were drawn from them is not judged"
    with Monitor(run, start=3) as monitor:
        assert any(sentence in one for one in monitor.not_judged)
        monitor.use_config(monitor.config, sampling=SPEC)
        assert not any(sentence in one for one in monitor.not_judged)
    for recorded in (True, False):
        if not recorded:
            (run / "config.yaml").write_text("rollout_correction: {}\n", encoding="utf-8")
        for command in (("watch", run, "--once"), ("report", run)):
            shown = invoke(*command)
            assert (shown.exit_code, sentence in shown.stdout) == (0 if recorded else 3, not recorded), shown.output


def test_check_takes_no_null_where_another_one_counts(tmp_path):
    """One that is given goes before the run's, and several runs may have several."""
    run, other = (leave_run(tmp_path / name, 0.01, rollouts=RolloutSample()) for name in ("run", "other"))
    assert invoke("null", run, "-o", tmp_path / "given.json").exit_code == 0
    assert invoke("null", run, "-o", run / "null.json").exit_code == 0
    assert invoke("null", other, "--steps", "1:2", "-o", other / "null.json").exit_code == 0

    def judged_against(*arguments):
        return json.loads(invoke("check", *arguments, "--json").stdout)["judged_against"]

    assert judged_against(run) == f"{run / 'null.json'} (unvetted)"
    assert judged_against(run, "--null", tmp_path / "given.json") == "given.json (unvetted)"
    assert judged_against(run, "--null-steps", "1:2") == "steps 1 to 2 of this log (unvetted)"
    assert judged_against(run / "rollouts") == ""
    assert judged_against(run, other) == ""

    # A link may lead to a file that is none of the run's.
    (run / "null.json").unlink()
    (run / "null.json").symlink_to(tmp_path / "given.json")
    assert judged_against(run) == ""


def test_watch_draws_recent_steps(tmp_path):
    """Of k3 the logarithm; a value that is missing adds no point."""
    k3 = [1e-6, 1e-5, None, 1e-4, 2e-4]
    values = [
        {"step": i + 1, "reward/mean": i / 7} | ({"rollout_corr/k3_kl": x} if x else {}) for i, x in enumerate(k3)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in values))
    lines = invoke("watch", tmp_path, "--once").stdout.splitlines()
    assert lines[0].split("  ")[0] == "step 1"
    assert "▁" not in lines[0]
    assert [line.split("  reward ")[1] for line in lines[1:5]] == [
        "▁█  k3 ▁█",
        "▁▅█  k3 ▁█",
        "▁▃▆█  k3 ▁▅█",
        "▁▃▅▆█  k3 ▁▄▇█",
    ]
