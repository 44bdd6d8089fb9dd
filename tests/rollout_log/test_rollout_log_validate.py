"""Validation: each kind of fault is found in its row and column, and a valid log has no finding."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcorr.config import Finding
from rollcorr.rollout_log import RolloutBatch, RolloutLogError, RolloutLogWriter, validate_rollout_log
from rollcorr.rollout_log.validate import validate_batch

pa = pytest.importorskip("pyarrow", reason="needs rollcorr[log]")
pq = pytest.importorskip("pyarrow.parquet", reason="needs rollcorr[log]")

NAN = math.nan
SOUND = {
    "prompt_ids": [5],
    "response_ids": [1, 2, 3],
    "response_mask": [True, False, True],
    "rollout_log_prob": [-0.5, NAN, -0.25],
    "old_log_prob": [-0.5, -9999.0, -0.25],
    "policy_versions": [{"start": 0, "length": 1, "version": 1}, {"start": 1, "length": 2, "version": 2}],
    "kept_ids": [1, 9, 7, 3],
    "kept_offsets": [0, 2, 3, 4],
}
EMPTY = {name: [0] if name == "kept_offsets" else [] for name in SOUND}
NULL = dict.fromkeys(SOUND) | {"response_ids": [4], "rollout_log_prob": [-1.0], "old_log_prob": [-1.0]}


def findings(*rows):
    """Findings in the last of some rows, the first of which are sound: a fault must be laid to its own row."""
    found = validate_batch(RolloutBatch.from_rows([SOUND, EMPTY, NULL, *rows]))
    texts = [": ".join(part for part in (f.title, f.reason.split(";")[0]) if part) for f in found]
    return [(f.first_row, f.column, f.code, f.severity, text) for f, text in zip(found, texts, strict=True)]


def test_a_sound_batch_has_no_finding():
    assert findings() == []


@pytest.mark.parametrize(
    ("change", "column", "code", "message"),
    [
        ({"old_log_prob": [-1.0, -2.0]}, "old_log_prob", "length", "2 values for a response of 3 tokens"),
        ({"response_mask": [True]}, "response_mask", "length", "1 values for a response of 3 tokens"),
        ({"response_mask": []}, "response_mask", "length", "0 values for a response of 3 tokens"),
        ({"advantages": [0.0] * 4}, "advantages", "length", "4 values for a response of 3 tokens"),
        ({"prompt_ids": [5, -1, -1]}, "prompt_ids", "negative", "negative ids: 2 in this row"),
        ({"response_ids": [1, -100, 3]}, "response_ids", "negative", "negative ids: 1 in this row"),
        ({"kept_ids": [1, 9, -7, 3]}, "kept_ids", "negative", "negative ids: 1 in this row"),
        ({"kept_offsets": [0, 2, 4]}, "kept_offsets", "kept_length", "3 offsets for a response of 3 tokens"),
        ({"kept_offsets": []}, "kept_offsets", "kept_length", "0 offsets for a response of 3 tokens"),
        ({"kept_offsets": [0, 3, 2, 4]}, "kept_offsets", "kept_offsets", "fall"),
        ({"kept_offsets": [0, 2, 3, 5]}, "kept_offsets", "kept_offsets", "from 0 to the number of kept ids"),
        ({"kept_offsets": [1, 2, 3, 4]}, "kept_offsets", "kept_offsets", "from 0 to the number of kept ids"),
        ({"kept_offsets": None}, "kept_offsets", "kept", "only one of kept_ids and kept_offsets"),
        ({"kept_ids": [1, 1, 7, 3]}, "kept_ids", "kept_twice", "ids twice in one set: 1 in this row"),
    ],
)
def test_errors_name_row_and_column(change, column, code, message):
    ((row, *found, text),) = findings(SOUND | change)
    assert (row, *found) == (3, column, code, "error")
    assert message in text


@pytest.mark.parametrize(
    "spans", [[], [(1, 2)], [(0, 2)], [(0, 4)], [(0, 2), (1, 2)], [(0, 1), (2, 1)], [(0, 0), (0, 3)], [(0, 3), (3, 0)]]
)
def test_version_spans_must_tile_the_response(spans):
    row = SOUND | {"policy_versions": [{"start": s, "length": n, "version": 1} for s, n in spans]}
    ((*found, text),) = findings(row, SOUND)
    assert found == [3, "policy_versions", "spans", "error"]
    assert text == f"spans (start, length) {spans} do not tile a response of 3 tokens"


@pytest.mark.parametrize(
    ("change", "column", "code", "message"),
    [
        ({"rollout_log_prob": [0.5, 9.0, 0.1]}, "rollout_log_prob", "positive", "log-probs above 0: 2 in this row"),
        ({"old_log_prob": [-9999.0, -1.0, -1.0]}, "old_log_prob", "sentinel", "log-probs of −9999: 1 in this row"),
        ({"log_prob": [NAN, NAN, -math.inf]}, "log_prob", "nonfinite", "NaN or infinite log-probs: 2 in this row"),
        ({"log_prob": [None, -1.0, -1.0]}, "log_prob", "nonfinite", "NaN or infinite log-probs: 1 in this row"),
        ({"response_ids": [2, 2, 3]}, "kept_ids", "membership", "sampled ids outside their kept set: 1 in this row"),
    ],
)
def test_warnings_look_at_sampled_tokens_only(change, column, code, message):
    assert findings(SOUND | change, SOUND) == [(3, column, code, "warning", message)]


def test_positive_infinity_is_both_above_zero_and_infinite():
    assert [code for _, _, code, _, _ in findings(SOUND | {"log_prob": [math.inf, -1.0, -1.0]})] == [
        "positive",
        "nonfinite",
    ]


def test_rows_of_placeholder_zeros_are_flagged_and_a_confident_row_is_not():
    confident = {"rollout_log_prob": [0.0] * 5 + [-0.1] * 5}
    short = {"rollout_log_prob": [0.0] * 7}
    masked = {"rollout_log_prob": [0.0] * 10, "response_mask": [False] * 10}
    placeholder = {"rollout_log_prob": [0.0] * 6 + [-0.1] * 4}
    text = "most log-probs of a sequence are exactly 0: 6 of 10 in this row"
    found = findings(confident, short, masked, placeholder, placeholder)
    assert found == [(6, "rollout_log_prob", "zeros", "warning", text)]


TRUNCATED = {"temperature": 0.7, "top_p": 0.9, "logprobs": "processed"}


@pytest.mark.parametrize(
    ("recorded", "suspicious"),
    [
        ({}, True),
        ({"sampling": TRUNCATED}, False),
        ({"sampling": TRUNCATED | {"logprobs": "raw"}}, True),
        ({"sampling": {"temperature": 0.7, "logprobs": "processed"}}, True),
        ({"kept_ids": [*range(8), 1, 2], "kept_offsets": [*range(9), 10]}, False),
        ({"kept_ids": [*range(18)], "kept_offsets": [*range(0, 20, 2)]}, True),
        ({"sampling": TRUNCATED, "kept_ids": [*range(18)], "kept_offsets": [*range(0, 20, 2)]}, True),
    ],
)
def test_zeros_of_tokens_that_a_truncation_left_without_a_choice_are_no_placeholders(recorded, suspicious):
    row = {"rollout_log_prob": [0.0] * 8 + [-1.0], "old_log_prob": [-0.3] * 9, **recorded}
    found = [(row, column) for row, column, code, *_ in findings(row) if code == "zeros"]
    assert found == ([(3, "rollout_log_prob")] if suspicious else [])


def test_zeros_that_both_sides_computed_are_no_placeholders():
    row = {"rollout_log_prob": [0.0] * 8 + [-1.0], "old_log_prob": [0.0] * 4 + [-5e-4] * 4 + [-1.0]}
    assert "zeros" not in [code for _, _, code, *_ in findings(row)]


def test_one_of_the_kept_columns_alone_is_an_error():
    for column in ("kept_ids", "kept_offsets"):
        (problem,) = validate_batch(RolloutBatch.from_rows([{"response_ids": [1], column: [0, 1]}]))
        assert (problem.code, problem.first_row) == ("kept", 0)


@settings(deadline=None, max_examples=50)
@given(
    rows=st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 3), max_size=4)), max_size=4), max_size=4
    ),
)
def test_membership_agrees_with_a_loop(rows):
    batch = RolloutBatch.from_rows(
        [
            {
                "response_ids": [token for token, _ in row],
                "kept_ids": [i for _, kept in row for i in kept],
                "kept_offsets": [sum(len(kept) for _, kept in row[:t]) for t in range(len(row) + 1)],
            }
            for row in rows
        ]
    )
    expected = [i for i, row in enumerate(rows) if any(token not in kept for token, kept in row)]
    problems = validate_batch(batch)
    assert [(p.code, p.first_row, p.rows) for p in problems] == (
        [("membership", expected[0], len(expected))] if expected else []
    )


def test_findings_are_collected_over_batches_and_files(tmp_path):
    """The rows are counted, the first is named by its place in its file, and a damaged file does not hide the next."""
    bad = SOUND | {"old_log_prob": [-1.0, -2.0]}
    values = [row["old_log_prob"] for row in (SOUND, SOUND, bad, SOUND, bad)]
    ids = pa.array([[1, 2, 3]] * 5)
    table = pa.table({"response_ids": ids, "rollout_log_prob": [[-1.0] * 3] * 5, "old_log_prob": values})
    pq.write_table(table, tmp_path / "step_1.parquet")
    (tmp_path / "step_2.parquet").write_bytes(b"PAR1 and nothing else")
    pq.write_table(table.select(["rollout_log_prob"]), tmp_path / "step_10.parquet")
    report = validate_rollout_log(tmp_path, batch_size=2)
    assert [file.rsplit("/", 1)[1] for file in report.files] == ["step_1.parquet", "step_2.parquet", "step_10.parquet"]
    assert report.rows == 10
    assert report.recorded == {"response_ids", "rollout_log_prob", "old_log_prob"}
    (warning,) = [str(p).removeprefix(str(tmp_path)) for p in report.warnings]
    assert warning.startswith(
        "/step_1.parquet, row 0, column old_log_prob: log-probs of −9999 (and 2 more rows); 1 in this row; an engine"
    )
    first, second, third = (str(p).removeprefix(str(tmp_path)) for p in report.errors)
    assert first.startswith(
        "/step_1.parquet, row 2, column old_log_prob: 2 values for a response of 3 tokens (and 1 more row); give every"
    )
    assert second.startswith("/step_2.parquet: not a whole Parquet file")
    assert third == (
        "/step_10.parquet, column old_log_prob or log_prob: not recorded in any row; recorded are rollout_log_prob; "
        "rename the column that holds it"
    )
    with pytest.raises(RolloutLogError) as raised:
        report.raise_errors()
    assert raised.value.findings == report.errors
    assert str(raised.value).count("\n") == 2


def test_what_is_required_can_be_chosen(tmp_path):
    with RolloutLogWriter(tmp_path / "log.jsonl") as log:
        log.write(RolloutBatch.from_padded(torch.ones(2, 3), reward=1.0))
    assert {problem.column for problem in validate_rollout_log(tmp_path).errors} == {
        "rollout_log_prob",
        "old_log_prob or log_prob",
    }
    assert validate_rollout_log(tmp_path, required=()).findings == ()
    assert validate_rollout_log(tmp_path, required=[["reward"]]).findings == ()
    with pytest.raises(ValueError, match="Did you mean 'reward'"):
        validate_rollout_log(tmp_path, required=[["rewards"]])


def test_an_empty_log_is_only_warned_about(tmp_path):
    RolloutLogWriter(tmp_path / "log.parquet").close()
    assert [str(p) for p in validate_rollout_log(tmp_path).warnings] == [f"{tmp_path}/log.parquet: no rows"]
    validate_rollout_log(tmp_path).raise_errors()


def test_a_log_without_token_columns_only_lacks_what_is_required(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n')
    report = validate_rollout_log(tmp_path)
    assert report.rows == 1
    assert [problem.code for problem in report.findings] == ["missing", "missing"]
    pq.write_table(pa.table({"step": [1]}), tmp_path / "log2.parquet")
    assert [p.code for p in validate_rollout_log(tmp_path / "log2.parquet").findings] == ["missing", "missing"]


def test_a_finding_reads_as_one_sentence():
    finding = Finding(code="x", title="broken", fix="fix it", file="a.parquet", first_row=3, column="reward", rows=2)
    assert str(finding) == "a.parquet, row 3, column reward: broken (and 1 more row); fix it"
    assert str(Finding(code="x", title="broken")) == "broken"


def test_an_empty_batch_has_no_finding():
    assert validate_batch(RolloutBatch.from_rows([])) == ()
    assert validate_batch(RolloutBatch.from_rows([EMPTY])) == ()
