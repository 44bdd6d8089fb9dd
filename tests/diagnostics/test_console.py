"""The verdict for terminals, pipes and machines."""

import io
import json
import math

from rich.console import Console

from rollcorr.config import Finding
from rollcorr.diagnostics.health.health_check import HealthReport, health
from rollcorr.diagnostics.health.noise import Noise
from rollcorr.diagnostics.report.console import row_progress, show_health, to_json

SICK = {"token_count": 100.0, "kl": 0.5, "chi2_token": math.inf, "ppl_ratio": 1.6}


def printed(report, **options):
    console = Console(file=io.StringIO(), width=100, **options)
    show_health(console, report, subject="log [1]", remarks=["read [partly]"])
    return console.file.getvalue()


def shown(metrics, *, judged=False, **options):
    null = Noise(sigma=0.01, source="null.json", is_null=True) if judged else None
    return printed(health(metrics, null=null), **options)


def test_a_pipe_gets_plain_text():
    assert "\x1b" not in shown(SICK)
    assert "\x1b" in shown(SICK, force_terminal=True)


def test_every_finding_is_printed_with_its_numbers_reason_and_fix():
    text = " ".join(shown(SICK).split())
    assert text.startswith("unhealthy: KL is too far from 0 fix: ")
    assert "where: everything that was measured 2 findings log [1] weights not judged: " in text
    assert "note: read [partly]" in text
    for finding in health(SICK).warnings:
        assert finding.title in text
        assert finding.reason in text
        assert finding.fix in text
    assert "kl 0.5, limit −0.1 to 0.1" in text


def opening(text):
    return text.splitlines()[:3]


def test_three_lines_open_a_verdict():
    """The fix was on line 29 of a check."""
    cause = Finding(
        code="frozen_sampler",
        title="the sampler [a] is not synchronized",
        fix=f"check the weight sync: {'every parameter, ' * 9}its version",
        first_step=15,
        steps=6,
        row_share=0.25,
        file="log.parquet",
        first_row=3,
    )
    symptom = Finding(code="out_of_range", metric="kl", title="KL is too far from 0")
    shown = HealthReport(findings=(symptom, cause), values={"kl": 0.5})
    lines = opening(printed(shown))
    assert lines[0] == "unhealthy: the sampler [a] is not synchronized"
    assert lines[1].startswith("fix: check the weight sync: every parameter, every")
    assert lines[1].endswith(" …")
    assert lines[2] == "where: 25.0% of the rows; first at step 15, 6 steps in all; log.parquet, row 3"
    assert max(map(len, lines)) <= 100

    # Without a warning, what could not be judged takes the place of the cause.
    reason, fix, subject = opening(printed(HealthReport(findings=(), values={}, not_judged=("a reason; give --null",))))
    assert (reason, fix, subject) == ("not judged: a reason", "fix: give --null", "log [1]")


def test_a_healthy_verdict_is_one_word_and_its_numbers():
    text = shown(SICK | {"kl": 1e-4, "chi2_token": 1e-4}, judged=True)
    assert text.startswith("healthy")
    assert "why" not in text


def test_json_is_strict_and_holds_the_findings():
    document = json.loads(to_json(health(SICK), rows=3, remarks=("a",)), parse_constant=lambda name: 1 / 0)
    assert document["verdict"] == "unhealthy"
    assert [finding["metric"] for finding in document["findings"]] == ["kl", "chi2_token"]
    assert document["findings"][1]["value"] is None, "infinity is no JSON number"
    assert (document["metrics"]["kl"], document["rows"], document["remarks"]) == (0.5, 3, ["a"])


def test_progress_is_silent_without_a_terminal(capsys):
    with row_progress() as on_rows:
        on_rows(4, 10)
    assert capsys.readouterr() == ("", "")
