"""A finding by hand: its text, its place, merging, and sorting by severity."""

from rollcorr.config import Finding
from rollcorr.config.finding import merge_findings
from rollcorr.config.sampling_spec import Comparison


def test_a_finding_reads_as_place_title_reason_and_fix():
    finding = Finding(code="x", title="broken", reason="it fell", fix="glue it", file="a.parquet", first_row=3)
    assert finding.place == "a.parquet, row 3"
    assert str(finding) == "a.parquet, row 3: broken; it fell; glue it"
    assert str(Finding(code="x", title="broken", fix="glue it")) == "broken; glue it"


def test_one_code_and_column_is_one_finding_with_all_rows_and_tokens():
    first = Finding(code="x", title="broken", column="reward", first_row=3, rows=2, tokens=5)
    later = Finding(code="x", title="broken", column="reward", first_row=9, rows=1, tokens=1)
    other = Finding(code="x", title="broken", column="step", first_row=1, rows=1)
    merged, kept = merge_findings([first, other, later])
    assert (merged.first_row, merged.rows, merged.tokens) == (3, 3, 6)
    assert kept == other
    (unknown,) = merge_findings([other, other])
    assert (unknown.rows, unknown.tokens) == (2, None)


def test_findings_are_sorted_by_severity():
    error, warning, note = (Finding(code=s, title=s, severity=s) for s in ("error", "warning", "note"))
    found = Comparison((note, warning, error))
    assert (found.errors, found.warnings, found.notes) == ((error,), (warning,), (note,))
    assert found.verdict == "different"
    assert Comparison((warning,)).verdict == "approximate"
    assert Comparison().verdict == "same"
