"""One verdict, three forms: the terminal, the page and JSON agree. And the order of their lines."""

import io
import json
import textwrap
from html.parser import HTMLParser

import pytest
from rich.console import Console
from series_of_runs import broken, metrics_of

from rollcorr.config import Finding, RolloutCorrectionConfig
from rollcorr.diagnostics.health.health_check import HealthReport, health
from rollcorr.diagnostics.report.console import show_health, to_json
from rollcorr.diagnostics.report.html_page import render
from rollcorr.diagnostics.report.report_data import ReportData
from rollcorr.diagnostics.report.verdict_content import verdict_content
from rollcorr.diagnostics.resolver import folded, resolve_findings


def report():
    """A run with a cause, two levels of consequences, evidence, a mixture, and a note."""
    steps = [{"step": s, **metrics_of(k3)} for s, k3 in enumerate(broken("never synced", 2).k3, start=1)]
    steps = [step | {"token_count": 4000.0, "sequence_count": 20.0} for step in steps]
    steps = [step | {"kl": 0.3, "t_times_kl": 150.0, "saturated_low_fraction": 0.9} for step in steps]
    steps = [step | {"saturated_high_fraction": 0.0, "rollout_is_eff_sample_size": 0.99} for step in steps]
    found = health(steps, RolloutCorrectionConfig(rollout_is="sequence"))
    mixture = Finding(
        code="shifted",
        title="some rows are late by one token",
        value=1.0,
        limit="0",
        reason="a cut at the wrong place",
        fix="cut off the first one",
        confirm="score one row by hand",
        file="log.parquet",
        first_row=3,
        rows=12,
        tokens=340,
        row_share=0.25,
        confidence=0.9876,
        evidence={"correlation_at_1": 0.75},
        metric="log/lag",
    )
    note = Finding(code="mixed_settings", title="the rows were not all sampled alike", severity="note", reason="two")
    return HealthReport(
        findings=resolve_findings(metrics=(*found.findings, mixture, note)),
        values=found.values,
        steps=found.steps,
        judged_against=found.judged_against,
        not_judged=found.not_judged,
        expected=found.expected,
        expected_ranges=found.expected_ranges,
        expected_from=found.expected_from,
    )


def on_terminal(shown):
    console = Console(file=io.StringIO(), width=4000)
    show_health(console, shown, subject="a run")
    return " ".join(console.file.getvalue().split())


def on_page(shown):
    class Text(HTMLParser):
        words = ""

        def handle_data(self, data):
            self.words += f" {data}"

    data = ReportData(title="a run", subtitle="", health=shown, series=(), metrics={}, metrics_title="", config_text="")
    page = Text()
    page.feed(render(data).partition("<body>")[2].partition("<script")[0])
    return " ".join(page.words.split())


def from_json(shown):
    """Build the report from the JSON only."""
    document = json.loads(to_json(shown))
    return HealthReport(
        findings=tuple(Finding(**finding) for finding in document["findings"]),
        values=document["metrics"],
        steps=shown.steps,
        judged_against=document["judged_against"],
        not_judged=tuple(document["not_judged"]),
        expected=document["expected"],
        expected_ranges={name: tuple(ends) for name, ends in document["expected_ranges"].items()},
        expected_from=document["expected_from"],
    ), document["verdict"]


def entries_of(entries):
    for entry in entries:
        yield entry
        yield from entries_of(entry.consequences)


def texts_of(content, *, fixes_below=True):
    """Everything that is shown, in order; the page leaves out the fixes of consequences."""
    for entry in entries_of(content.entries):
        yield entry.finding.title
        yield entry.numbers
        for heading, text in entry.lines:
            if fixes_below or entry in content.entries or heading not in ("fix", "confirm"):
                yield f"{heading} {text}"


def test_the_terminal_the_page_and_json_have_the_same_content():
    shown = report()
    content = verdict_content(shown)
    again, verdict = from_json(shown)
    assert (verdict_content(again), verdict) == (content, shown.verdict)

    terminal, page = on_terminal(shown), on_page(shown)
    assert content.headline in page
    for line in content.opening:
        assert textwrap.shorten(line, 100, placeholder=" …") in terminal, "the terminal cuts it"
        assert line.partition(": ")[2] in page, "the page does not"
    for form in (terminal, page):
        place = form.index(content.count)
        for sentence in content.sentences:
            assert sentence in form
        for text in texts_of(content, fixes_below=form is terminal):
            place = form.index(" ".join(text.split()), place)
        for number in content.numbers:
            for text in (number.label, number.value, number.expected):
                assert text in form


def test_everything_that_is_known_of_a_hypothesis_is_shown():
    (entry,) = [e for e in verdict_content(report()).entries if e.finding.code == "shifted"]
    assert dict(entry.lines) == {
        "first in": "log.parquet, row 3",
        "concerns": "12 rows, 340 tokens, 25.0% of the rows",
        "evidence": "correlation at 1 0.75, score 0.9876",
        "confidence": "0.970",
        "why": "a cut at the wrong place",
        "confirm": "score one row by hand",
        "fix": "cut off the first one",
    }
    assert entry.numbers == "log/lag 1, limit 0"


def test_the_cause_comes_first_with_its_consequences_under_it():
    content = verdict_content(report())
    first = content.entries[0]
    assert first.finding.code == "frozen_sampler"
    below = {entry.finding.metric for entry in entries_of(first.consequences)}
    assert {"kl", "t_times_kl", "saturated_low_fraction", "rollout_is_eff_sample_size"} <= below
    (saturated,) = [e for e in first.consequences if e.finding.code == "saturation"]
    assert [e.finding.code for e in saturated.consequences] == ["deceptive_effective_sample_size"]
    warnings = len([e for e in entries_of(first.consequences) if e.finding.severity != "note"])
    assert content.headline == f"unhealthy, 2 findings and {warnings} consequences"


def test_every_number_stands_beside_what_noise_alone_would_show():
    content = verdict_content(report())
    assert {number.name for number in content.numbers if number.expected} >= {"kl", "k3_kl", "t_times_kl"}
    (kl,) = [entry for entry in entries_of(content.entries) if entry.finding.metric == "kl"]
    assert "from noise alone" in kl.numbers
    assert "as in the first steps of this run" in " ".join(content.sentences)


def test_an_estimate_of_either_sign_stands_beside_a_range_and_never_beside_one_number():
    """A KL of −0.002 next to "from noise alone 1.00e−04" looked like a fault."""
    counts = {"token_count": 4000.0, "sequence_count": 40.0}
    shown = health({**counts, "kl": -0.002, "k3_kl": 0.005, "chi2_token": -0.001, "log_ratio_std": 0.1})
    assert set(shown.expected_ranges) == {"kl", "chi2_token"}
    assert set(shown.expected) == {"k3_kl", "log_ratio_std"}
    numbers = {number.name: number.expected for number in verdict_content(shown).numbers}
    assert numbers["kl"] == "0.0019 to 0.0081"
    assert numbers["k3_kl"] == "0.005"
    assert "a range holds 95 % of batches of this size" in " ".join(verdict_content(shown).sentences)

    # Without the size of the batch chance is not known, and neither is a range.
    unknown = health({"kl": -0.002, "k3_kl": 0.005, "log_ratio_std": 0.1})
    assert (unknown.expected_ranges, set(unknown.expected)) == ({}, {"k3_kl", "log_ratio_std"})


def finding(code, severity="warning", **fields):
    return Finding(code=code, title=code, severity=severity, **fields)


def shape(folds):
    return [(one.finding.code, shape(one.consequences)) for one in folds]


def test_a_named_cause_of_most_rows_explains_what_only_measures_the_mismatch():
    found = resolve_findings(
        metrics=[finding("out_of_range", metric="kl"), finding("frozen_sampler"), finding("tempered", row_share=0.9)]
    )
    assert shape(folded(found)) == [("tempered", [("out_of_range", []), ("frozen_sampler", [])])]


@pytest.mark.parametrize(
    "other",
    [finding("shifted", row_share=0.1), finding("placeholder"), finding("kept_twice"), finding("skipped_updates")],
)
def test_a_cause_of_few_rows_or_of_something_else_explains_nothing(other):
    found = resolve_findings(metrics=[finding("out_of_range", metric="kl"), other])
    assert all(one.follows_from is None for one in found)


def test_missing_log_probs_follow_from_nothing():
    found = resolve_findings(metrics=[finding("out_of_range", metric="nonfinite_count"), finding("tempered")])
    assert shape(folded(found)) == [("out_of_range", []), ("tempered", [])]


def test_no_warning_is_hidden_under_a_note_and_no_finding_is_lost_in_a_circle():
    hidden = [finding("cause", "note"), finding("effect", follows_from="cause")]
    assert shape(folded(hidden)) == [("effect", []), ("cause", [])]
    circle = [finding("a", follows_from="b"), finding("b", follows_from="a"), finding("c", follows_from="nowhere")]
    assert [code for code, _ in shape(folded(circle))] == ["a", "b", "c"]
    assert shape(folded([finding("self", follows_from="self")])) == [("self", [])]


def test_a_verdict_in_a_notebook_is_escaped():
    finding = Finding(code="shifted", title="a <script>", fix="do & this", severity="warning")
    shown = HealthReport(findings=(finding,), values={"k3_kl": 0.5})._repr_html_()
    assert "unhealthy: a &lt;script&gt;</b><br>fix: do &amp; this<br>where: everything that was measured" in shown
    assert "<td>KL (k3), nats per token</td><td>0.5</td>" in shown
    assert "<script" not in shown
