"""Splitting logs at row groups and files: no row is lost or read twice, and every row knows its place."""

import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcorr.rollout_log import (
    JsonlSource,
    RolloutBatch,
    RolloutLogError,
    RolloutLogWriter,
    count_rows,
    log_shards,
    read_rollout_log,
    read_shard,
)
from rollcorr.rollout_log.reader import log_files


def write(path, *group_sizes, tokens=3):
    """A log with one row group a size; `step` counts the rows of the file."""
    first = 0
    with RolloutLogWriter(path) as log:
        for rows in group_sizes:
            log_prob = torch.full((rows, tokens), -1.0)
            step = torch.arange(first, first + rows)
            log.write(RolloutBatch.from_padded(torch.ones(rows, tokens), rollout_log_prob=log_prob, step=step))
            first += rows
    return path


def test_row_groups_are_gathered_until_they_are_worth_a_shard(tmp_path):
    """Groups of 6, 3, 30, 3 and 3 tokens; a shard has 8 or more, or ends its file."""
    path = write(tmp_path / "log.parquet", 2, 1, 10, 1, 1)
    shards = log_shards(path, tokens=8)
    assert [(s.row_groups, s.first_row, s.rows) for s in shards] == [((0, 2), 0, 3), ((2, 3), 3, 10), ((3, 5), 13, 2)]
    assert {s.row_tokens for s in shards} == {3}


def test_a_shard_never_spans_two_files_and_a_jsonl_file_is_one(tmp_path):
    write(tmp_path / "a.parquet", 2, 2)
    write(tmp_path / "b.jsonl", 3, 1)
    write(tmp_path / "c.parquet", 5)
    shards = log_shards(tmp_path)
    assert [(s.file.rsplit("/", 1)[1], s.before, s.rows) for s in shards] == [
        ("a.parquet", 0, 4),
        ("b.jsonl", 4, 4),
        ("c.parquet", 8, 5),
    ]
    assert [s.row_groups for s in shards] == [(0, 2), None, (0, 1)]


@settings(max_examples=25)
@given(
    sizes=st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=4), min_size=1, max_size=3),
    tokens=st.integers(1, 60),
    batch_size=st.integers(1, 9),
)
def test_shards_are_the_log_once_over(tmp_path_factory, sizes, tokens, batch_size):
    folder = tmp_path_factory.mktemp("log")
    for i, groups in enumerate(sizes):
        write(folder / f"{i}.parquet", *groups)
    before = 0
    for shard in log_shards(folder, tokens=tokens):
        assert shard.before == before
        batches = list(read_shard(shard, columns=["rollout_log_prob", "step"], batch_size=batch_size))
        assert all(len(batch) <= batch_size for batch in batches)
        steps = torch.cat([batch.values("step") for batch in batches]).tolist()
        assert steps == list(range(shard.first_row, shard.first_row + shard.rows))
        assert [batch.first_row for batch in batches] == [batch.values("step")[0] for batch in batches]
        before += shard.rows
    assert before == sum(map(sum, sizes))


@pytest.mark.parametrize(("batch_tokens", "rows"), [(1000, [10]), (90, [3, 3, 3, 1]), (1, [1] * 10)])
def test_long_rows_make_short_batches(tmp_path, batch_tokens, rows):
    (shard,) = log_shards(write(tmp_path / "log.parquet", 10, tokens=30))
    assert [len(b) for b in read_shard(shard, columns=["rollout_log_prob"], batch_tokens=batch_tokens)] == rows


def test_the_longest_row_group_decides_for_its_shard(tmp_path):
    path = tmp_path / "log.parquet"
    with RolloutLogWriter(path) as log:
        for tokens in (1, 50, 2):
            mask = torch.ones(4, tokens)
            log.write(RolloutBatch.from_padded(mask, rollout_log_prob=-mask))
    (shard,) = log_shards(path)
    assert shard.row_tokens == 50
    assert max(len(b) for b in read_shard(shard, columns=["rollout_log_prob"], batch_tokens=100)) == 2


def test_large_kept_sets_make_short_batches_too(tmp_path):
    """Rows of 2 tokens with 400 kept ids each, 100 tokens' worth of memory."""
    path = tmp_path / "log.parquet"
    row = {"rollout_log_prob": [-1.0, -1.0], "kept_ids": list(range(800)), "kept_offsets": [0, 400, 800]}
    with RolloutLogWriter(path) as log:
        log.write(RolloutBatch.from_rows([row] * 4))
    (shard,) = log_shards(path)
    assert shard.row_tokens == 100
    columns = ["rollout_log_prob", "kept_ids", "kept_offsets"]
    assert [len(b) for b in read_shard(shard, columns=columns, batch_tokens=200)] == [2, 2]


def test_foreign_files_and_files_without_rows_or_tokens_are_cut_too(tmp_path):
    lists = pa.array([[-1.0, -2.0], [], None, [-3.0]], pa.large_list(pa.float64()))
    pq.write_table(pa.table({"rollout_log_prob": lists, "other": [1, 2, 3, 4]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"reward": pa.array([], pa.float32())}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"reward": [1.0, 0.0]}), tmp_path / "c.parquet")
    (tmp_path / "d.jsonl").write_text("\n")
    first, last = log_shards(tmp_path)
    assert (first.rows, last.rows, last.before, last.row_tokens) == (4, 2, 4, 0)
    (batch,) = read_shard(first, columns=["rollout_log_prob"])
    assert batch.lengths.tolist() == [2, 0, 0, 1]


def test_a_damaged_file_is_named_before_anything_is_read(tmp_path):
    write(tmp_path / "a.parquet", 2)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 this is no log")
    with pytest.raises(RolloutLogError, match=r"b\.parquet: not a whole Parquet file"):
        log_shards(tmp_path)


class Foreign(JsonlSource):
    """A dump of a framework: JSON lines with other names and a different extension."""

    endings = (".dump",)

    def row(self, value, *, file, row):
        return {"rollout_log_prob": value["lp"], "reward": value["score"]}


def test_a_foreign_dump_is_one_class_that_is_read_sharded_and_counted(tmp_path):
    for number in (2, 10):
        lines = [f'{{"lp": [-{number}.0, -1.0], "score": {number}}}\n'] * number
        (tmp_path / f"{number}.dump").write_text("".join(lines))
    source = Foreign()
    assert count_rows(tmp_path, source=source) == 12
    rewards = [batch.values("reward")[0] for batch in read_rollout_log(tmp_path, batch_size=4, source=source)]
    assert rewards == [2, 10, 10, 10]
    first, last = pickle.loads(pickle.dumps(log_shards(tmp_path, source=source)))
    assert (first.rows, last.rows, last.before) == (2, 10, 2)
    (batch,) = read_shard(last, columns=["rollout_log_prob"])
    assert batch.packed("rollout_log_prob")[:2].tolist() == [-10, -1]
    (tmp_path / "log.jsonl").touch()
    with pytest.raises(RolloutLogError, match=r"log\.jsonl: a rollout log ends in \.dump"):
        log_files(tmp_path / "log.jsonl", source=source)
