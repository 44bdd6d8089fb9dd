"""Columns of the user's own, x_…: written, read back, and converted with the rest."""

import pytest
import torch

from rollcorr.rollout_log import RolloutBatch, RolloutLogError, RolloutLogWriter, convert_log, read_rollout_log

MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])
OWN = {
    "x_task": ["sum", "product"],
    "x_turns": torch.tensor([2, 5]),
    "x_margin": [0.5, None],
    "x_solved": [True, False],
}


def batch(**columns):
    return RolloutBatch.from_padded(MASK, rollout_log_prob=torch.full((2, 3), -0.5), **columns)


@pytest.mark.parametrize("ending", [".parquet", ".jsonl", ".jsonl.gz"])
def test_columns_of_ones_own_come_back_as_they_were_written(tmp_path, ending):
    path = tmp_path / f"log{ending}"
    with RolloutLogWriter(path) as log:
        log.write(batch(**OWN))
        log.write(batch(**OWN))
    read = [row for part in read_rollout_log(path) for row in part.to_rows()]
    assert [row["x_task"] for row in read] == ["sum", "product"] * 2
    assert [row["x_turns"] for row in read] == [2, 5] * 2
    assert [row["x_margin"] for row in read] == [0.5, None] * 2
    assert [row["x_solved"] for row in read] == [True, False] * 2


def test_they_can_be_read_alone_and_survive_a_conversion(tmp_path):
    with RolloutLogWriter(tmp_path / "log.parquet") as log:
        log.write(batch(**OWN))
    convert_log(tmp_path / "log.parquet", tmp_path / "log.jsonl")
    (part,) = read_rollout_log(tmp_path / "log.jsonl", columns=["x_task"])
    assert part.objects("x_task") == ["sum", "product"]


def test_one_value_stands_for_every_row():
    assert batch(x_task="sum").objects("x_task") == ["sum", "sum"]


def test_a_column_that_is_new_in_a_later_batch_is_named_and_the_log_stays_whole(tmp_path):
    path = tmp_path / "log.parquet"
    with RolloutLogWriter(path) as log:
        log.write(batch(x_task="sum"))
        with pytest.raises(RolloutLogError, match="column x_other: string in this batch, and no such column"):
            log.write(batch(x_other="new"))
        with pytest.raises(RolloutLogError, match="column x_task: int64 in this batch, and string in the first"):
            log.write(batch(x_task=3))
        log.write(batch())
    read = [row for part in read_rollout_log(path) for row in part.to_rows()]
    assert [row["x_task"] for row in read] == ["sum", "sum", None, None]


def test_what_is_no_number_flag_or_text_is_refused():
    with pytest.raises(RolloutLogError, match="column x_parts: it holds list"):
        batch(x_parts=[[1, 2], [3]])
    with pytest.raises(RolloutLogError, match="all of one type"):
        batch(x_mixed=[1, "two"])


def test_a_misspelt_column_of_the_schema_is_still_refused():
    with pytest.raises(ValueError, match="'rewrd' is not a column"):
        batch(rewrd=1.0)


def test_a_strangers_column_of_such_a_name_and_another_type_is_passed_over(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"response_mask": [[True, True]], "x_nested": [[[1, 2]]], "x_kind": ["a"]})
    pq.write_table(table, tmp_path / "log.parquet")
    (part,) = read_rollout_log(tmp_path / "log.parquet")
    assert part.columns == ("response_mask", "x_kind")
