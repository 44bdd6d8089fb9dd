"""Files: complete or absent, in a fixed order, memory bounded by a batch, and errors with the place."""

import gzip
import json
import os
import signal
import textwrap

import pytest
import torch
from processes import run_python

from rollcorr.rollout_log import (
    COLUMNS,
    RolloutBatch,
    RolloutLogError,
    RolloutLogWriter,
    convert_log,
    count_rows,
    read_rollout_log,
)
from rollcorr.rollout_log.reader import log_files
from rollcorr.rollout_log.schema import SCHEMA_VERSION

pa = pytest.importorskip("pyarrow", reason="needs rollcorr[log]")
pq = pytest.importorskip("pyarrow.parquet", reason="needs rollcorr[log]")

SUFFIXES = [".parquet", ".jsonl", ".jsonl.gz"]


def batch_of(steps, *, tokens=3):
    steps = torch.as_tensor(steps)
    values = -torch.arange(1.0, len(steps) * tokens + 1).view(len(steps), tokens)
    ids = torch.arange(tokens).expand(len(steps), tokens)
    mask = torch.ones(len(steps), tokens)
    return RolloutBatch.from_padded(mask, step=steps, response_ids=ids, rollout_log_prob=values, old_log_prob=values)


def write(path, *step_lists, **options):
    with RolloutLogWriter(path, **options) as log:
        for steps in step_lists:
            log.write(batch_of(steps))


def steps_of(paths, **options):
    return [step for batch in read_rollout_log(paths, **options) for step in batch.values("step").tolist()]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_batches_are_appended_and_counted(tmp_path, suffix):
    path = tmp_path / "new" / f"log{suffix}"
    with RolloutLogWriter(path) as log:
        for steps in ([1, 2], [], [3]):
            log.write(batch_of(steps))
        assert log.rows == 3
        assert not path.exists()
        assert log_files_or_none(path.parent) is None  # an unfinished log is no log
    assert os.listdir(path.parent) == [path.name]
    assert steps_of(path) == [1, 2, 3]
    assert count_rows(path) == 3


def log_files_or_none(path):
    try:
        return log_files(path)
    except RolloutLogError:
        return None


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_empty_log_is_a_whole_file(tmp_path, suffix):
    write(tmp_path / f"log{suffix}")
    assert steps_of(tmp_path) == []
    assert count_rows(tmp_path) == 0


def write_and_fail(path, error):
    with RolloutLogWriter(path) as log:
        log.write(batch_of([1, 2]))
        log.write(batch_of([3]))
        raise error


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_keeps_every_batch_that_was_written(tmp_path, suffix, error):
    path = tmp_path / f"log{suffix}"
    with pytest.raises(error):
        write_and_fail(path, error)
    assert steps_of(path) == [1, 2, 3]
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_exception_before_the_first_batch_leaves_nothing(tmp_path, suffix):
    with pytest.raises(RuntimeError), RolloutLogWriter(tmp_path / f"log{suffix}"):
        raise RuntimeError
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_batch_that_is_interrupted_half_way_is_left_out(tmp_path, suffix):
    log = RolloutLogWriter(tmp_path / f"log{suffix}")
    log.write(batch_of([1]))
    whole_file = log._sink._file

    class Interrupted:
        def write(self, data):
            whole_file.write(data[: len(data) // 2])
            raise KeyboardInterrupt

        def __getattr__(self, name):
            return getattr(whole_file, name)

    log._sink._file = Interrupted()
    with pytest.raises(KeyboardInterrupt), log:
        log.write(batch_of([2]))
    assert steps_of(tmp_path) == [1]


def test_a_disk_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*args, **options):
        raise OSError("No space left on device")

    log = RolloutLogWriter(tmp_path / "log.parquet")
    log.write(batch_of([1]))
    monkeypatch.setattr(log._sink._writer, "write_table", fail)
    with pytest.raises(OSError, match="No space left"), log:
        log.write(batch_of([2]))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_killed_run_leaves_whole_files_only(tmp_path, suffix):
    script = textwrap.dedent(
        f"""
        import os, signal, torch
        from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter
        batch = RolloutBatch.from_padded(torch.ones(2, 3), step=1)
        with RolloutLogWriter({str(tmp_path / f"whole{suffix}")!r}) as log:
            log.write(batch)
        log = RolloutLogWriter({str(tmp_path / f"half{suffix}")!r})
        log.write(batch)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert run_python(script).returncode == -signal.SIGKILL
    names = sorted(os.listdir(tmp_path))
    assert len(names) == 2
    assert names[0].startswith(f".half{suffix}.tmp-")
    assert names[1] == f"whole{suffix}"
    assert steps_of(tmp_path) == [1, 1]
    assert steps_of(str(tmp_path / "*")) == [1, 1]


def test_an_existing_file_is_replaced_only_on_request_and_only_when_done(tmp_path):
    path = tmp_path / "log.parquet"
    write(path, [1])
    with pytest.raises(FileExistsError, match=r"log.parquet exists; choose another name or pass overwrite=True"):
        RolloutLogWriter(path)
    with RolloutLogWriter(path, overwrite=True) as log:
        log.write(batch_of([2]))
        assert steps_of(path) == [1]
    assert steps_of(path) == [2]


def test_two_writers_of_one_name_do_not_mix_and_the_second_loses_nothing(tmp_path):
    path = tmp_path / "log.parquet"
    first, second = RolloutLogWriter(path), RolloutLogWriter(path)
    first.write(batch_of([1]))
    second.write(batch_of([2]))
    first.close()
    with pytest.raises(
        FileExistsError, match=r"written by another process meanwhile; this log is whole in (.*), rename"
    ) as e:
        second.close()
    assert steps_of(path) == [1]
    (kept,) = tmp_path.glob(".log.parquet.tmp-*")
    assert str(kept) in str(e.value)
    os.replace(kept, tmp_path / "second.parquet")
    assert steps_of(tmp_path / "second.parquet") == [2]


def test_a_file_system_without_hard_links_works_too(tmp_path, monkeypatch):
    def no_links(*args):
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", no_links)
    first, second = RolloutLogWriter(tmp_path / "log.jsonl"), RolloutLogWriter(tmp_path / "log.jsonl")
    first.close()
    with pytest.raises(FileExistsError, match="by another process"):
        second.close()


@pytest.fixture
def permissive_umask():
    """Let every new file be read and written by everybody, unless its writer asks for less."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_only_the_owner_reads_a_log(tmp_path, suffix, permissive_umask):
    path = tmp_path / f"log{suffix}"
    for overwrite in (False, True):
        with RolloutLogWriter(path, overwrite=overwrite) as log:
            log.write(batch_of(range(3)))
            unfinished = [file for file in tmp_path.iterdir() if file != path]
            assert [oct(file.stat().st_mode & 0o777) for file in unfinished] == ["0o600"]
        assert oct(path.stat().st_mode & 0o777) == "0o600"
        path.chmod(0o644)

    convert_log(path, tmp_path / f"copy{suffix}")
    assert oct((tmp_path / f"copy{suffix}").stat().st_mode & 0o777) == "0o600"


def test_a_closed_writer_takes_nothing_more(tmp_path):
    log = RolloutLogWriter(tmp_path / "log.jsonl")
    log.close()
    log.close()
    log.discard()
    assert (tmp_path / "log.jsonl").exists()
    with pytest.raises(ValueError, match="is closed"):
        log.write(batch_of([1]))


def test_a_batch_with_uneven_columns_is_not_written(tmp_path):
    batch = RolloutBatch.from_rows(
        [{"response_ids": [1], "log_prob": [-1]}, {"response_ids": [1], "log_prob": [-1, -2]}]
    )
    with RolloutLogWriter(tmp_path / "log.parquet") as log:
        with pytest.raises(RolloutLogError, match="row 1, column log_prob: 2 values for a response of 1 tokens"):
            log.write(batch)
        log.write(batch_of([7]))
    assert steps_of(tmp_path) == [7]


def test_the_parquet_file_says_its_version_and_units(tmp_path):
    write(tmp_path / "log.parquet", [1, 2, 3], [4], row_group_rows=2)
    with pq.ParquetFile(tmp_path / "log.parquet") as file:
        metadata = file.metadata.metadata
        assert metadata[b"rollcorr.schema_version"].decode() == SCHEMA_VERSION
        assert json.loads(metadata[b"rollcorr.units"])["old_log_prob"] == "nats"
        assert file.schema_arrow.names == list(COLUMNS)
        assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [2, 1, 1]


def test_files_come_in_natural_order_and_once(tmp_path):
    for step in (10, 9, 100):
        write(tmp_path / f"step_{step}.parquet", [step])
    write(tmp_path / "step_11.jsonl", [11])
    write(tmp_path / "deeper" / "step_12.jsonl", [12])
    (tmp_path / "notes.txt").write_text("not a log")
    assert steps_of(tmp_path) == [9, 10, 11, 100]
    assert steps_of([tmp_path / "step_100.parquet", str(tmp_path / "*.parquet")]) == [100, 9, 10]
    assert steps_of(f"{tmp_path}/**/*.jsonl") == [12, 11]
    assert count_rows([tmp_path]) == 4


def test_a_run_directory_means_its_rollouts(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    write(tmp_path / "rollouts" / "step_000001.parquet", [1])
    assert log_files(tmp_path) == [tmp_path / "rollouts" / "step_000001.parquet"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_batches_have_the_asked_size_and_know_where_they_are_from(tmp_path, suffix):
    path = tmp_path / f"log{suffix}"
    write(path, range(5), range(5, 7))
    batches = list(read_rollout_log(path, batch_size=3))
    assert [step for batch in batches for step in batch.values("step").tolist()] == list(range(7))
    assert max(map(len, batches)) == 3
    assert [batch.first_row for batch in batches] == [sum(map(len, batches[:i])) for i in range(len(batches))]
    assert {batch.file for batch in batches} == {str(path)}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_columns_can_be_chosen_and_the_mask_comes_along(tmp_path, suffix):
    mask = torch.tensor([[1, 0, 1]])
    with RolloutLogWriter(tmp_path / f"log{suffix}") as log:
        log.write(RolloutBatch.from_padded(mask, log_prob=torch.zeros(1, 3), reward=[2.0], step=1))
    (batch,) = read_rollout_log(tmp_path, columns=["log_prob"])
    assert batch.columns == ("response_mask", "log_prob")
    assert batch.response_mask().tolist() == mask.bool().tolist()
    (batch,) = read_rollout_log(tmp_path, columns=["engine", "reward"])
    assert batch.columns == ("reward", "engine")
    assert len(batch) == 1
    with pytest.raises(ValueError, match="Did you mean 'log_prob'"):
        read_rollout_log(tmp_path, columns=["logprob"])


def test_reading_holds_no_more_than_a_batch(tmp_path):
    """A foreign file with one huge row group of 24 MB; batches of 16 rows are 48 kB each."""
    rows, tokens = 4000, 500
    values = pa.array(torch.randn(rows * tokens).neg().numpy())
    column = pa.ListArray.from_arrays(pa.array(range(0, rows * tokens + 1, tokens), pa.int32()), values)
    table = pa.table({"rollout_log_prob": column, "old_log_prob": column, "log_prob": column})
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=rows)
    del table, column, values
    before = pa.total_allocated_bytes()
    most, seen = 0, 0
    for batch in read_rollout_log(tmp_path, batch_size=16):
        assert len(batch) <= 16
        seen += len(batch)
        most = max(most, pa.total_allocated_bytes() - before)
    assert seen == rows
    assert most < 8_000_000


def test_writing_holds_no_more_than_a_batch(tmp_path):
    batch = batch_of(range(256), tokens=500)
    before, most = pa.total_allocated_bytes(), 0
    with RolloutLogWriter(tmp_path / "log.parquet") as log:
        for _ in range(40):
            log.write(batch)
            most = max(most, pa.total_allocated_bytes() - before)
    assert count_rows(tmp_path) == 40 * 256
    assert most < 4_000_000  # all batches together: 41 MB of log-probs


@pytest.mark.parametrize("source", SUFFIXES)
@pytest.mark.parametrize("target", SUFFIXES)
def test_every_form_converts_to_every_other(tmp_path, source, target):
    write(tmp_path / f"a{source}", [1, 2], [3])
    assert convert_log(tmp_path / f"a{source}", tmp_path / f"b{target}", batch_size=2) == 3
    one = [row for batch in read_rollout_log(tmp_path / f"a{source}") for row in batch.to_rows()]
    two = [row for batch in read_rollout_log(tmp_path / f"b{target}") for row in batch.to_rows()]
    assert one == two


def test_a_conversion_that_fails_leaves_nothing(tmp_path):
    write(tmp_path / "a.jsonl", [1])
    with (tmp_path / "a.jsonl").open("a", encoding="utf-8") as file:
        file.write("{\n")
    with pytest.raises(RolloutLogError, match="line 2 is not JSON"):
        convert_log(tmp_path / "a.jsonl", tmp_path / "b.parquet", batch_size=1)
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_the_json_form_by_hand(tmp_path):
    values = torch.tensor([[-0.5, torch.nan, -torch.inf, torch.inf]])
    batch = RolloutBatch.from_padded(torch.tensor([[1, 0, 1, 1]]), rollout_log_prob=values, engine="NaN ∞")
    with RolloutLogWriter(tmp_path / "log.jsonl") as log:
        log.write(batch)
    assert (tmp_path / "log.jsonl").read_text(encoding="utf-8") == (
        '{"schema_version": "1.3", "response_mask": [true, false, true, true], '
        '"rollout_log_prob": [-0.5, null, -1e999, 1e999], "engine": "NaN ∞"}\n'
    )
    (back,) = read_rollout_log(tmp_path)
    torch.testing.assert_close(back.padded("rollout_log_prob"), values, equal_nan=True)


def test_json_of_others_may_have_more_keys_blank_lines_and_flags_as_numbers(tmp_path):
    lines = ['{"response_mask": [1, 0], "log_prob": [-1, -2.5], "sequence_id": 7, "extra": {}}', "", "{}", "  "]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    assert count_rows(tmp_path) == 2
    (batch,) = read_rollout_log(tmp_path)
    assert batch.lengths.tolist() == [2, 0]
    assert batch.packed("response_mask").tolist() == [True, False]
    assert batch.objects("sequence_id") == ["7", None]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"log_prob": [-1.0', r"log.jsonl, row 1: line 3 is not JSON: .*; correct or delete it"),
        ("[1]", r"log.jsonl, row 1: line 3 is a JSON list, not an object"),
        ('{"log_prob": ["x"]}', r"log.jsonl, row 1, column log_prob: .*; expected list<float32>"),
        ('{"log_prob": -1.0}', r"log.jsonl, row 1, column log_prob: .*; expected list<float32>"),
        ('{"response_mask": ["x"]}', r"log.jsonl, row 1, column response_mask"),
        ('{"response_mask": true}', r"log.jsonl, row 1, column response_mask"),
        ('{"response_ids": [1.5]}', r"log.jsonl, row 1, column response_ids"),
        ('{"response_ids": [99999999999]}', r"log.jsonl, row 1, column response_ids"),
        ('{"reward": "high"}', r"log.jsonl, row 1, column reward"),
        ('{"sampling": 1}', r"log.jsonl, row 1, column sampling"),
        ('{"schema_version": "2.0"}', r"log.jsonl, row 1: schema version 2.0 is newer than 1.3.*; upgrade rollcorr"),
        ("\udcff", r"log.jsonl, row 1: line 3 is not JSON"),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 10])
def test_bad_json_names_file_row_and_column(tmp_path, line, message, batch_size):
    good = '{"response_mask": null}\n\n'
    (tmp_path / "log.jsonl").write_text(good + line + "\n", errors="surrogateescape")
    with pytest.raises(RolloutLogError, match=message):
        list(read_rollout_log(tmp_path, batch_size=batch_size))


def test_a_cut_gzip_file_names_the_line(tmp_path):
    whole = gzip.compress(b'{"step": 1}\n' * 1000)
    (tmp_path / "log.jsonl.gz").write_bytes(whole[:-9])
    with pytest.raises(RolloutLogError, match=r"log.jsonl.gz: line \d+ cannot be read: .*; was it cut off"):
        steps_of(tmp_path)
    (tmp_path / "log.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(RolloutLogError, match=r"log.jsonl.gz: line 1 cannot be read"):
        count_rows(tmp_path)


@pytest.mark.parametrize("damage", ["empty", "cut", "text", "pages"])
def test_a_damaged_parquet_file_is_named(tmp_path, damage):
    path = tmp_path / "log.parquet"
    with RolloutLogWriter(path) as log:
        log.write(batch_of(range(100), tokens=200))
    data = path.read_bytes()
    middle = b"\xff" * 2000
    damaged = {
        "empty": b"",
        "cut": data[:-100],
        "text": b"step,reward\n" * 9,
        "pages": data[:300] + middle + data[2300:],
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(RolloutLogError, match=r"log.parquet: not a whole Parquet file: .*; copy or write it again"):
        steps_of(path)


def test_a_newer_major_version_is_refused_and_a_newer_minor_one_is_read(tmp_path):
    table = pa.table({"step": [1]})
    path = tmp_path / "log.parquet"
    for version, message in (("2.0", "2.0 is newer than 1.3"), ("next", "'next' is not 'major.minor'")):
        pq.write_table(table.replace_schema_metadata({"rollcorr.schema_version": version}), path)
        with pytest.raises(RolloutLogError, match=f"log.parquet: schema version {message}"):
            count_rows(path)
    pq.write_table(table.replace_schema_metadata({"rollcorr.schema_version": "1.7"}), path)
    assert steps_of(path) == [1]


def test_columns_of_the_wrong_type_name_file_and_column(tmp_path):
    for column, values in (("rollout_log_prob", [0.5]), ("response_ids", ["a b"]), ("step", ["first"])):
        pq.write_table(pa.table({column: values}), tmp_path / "log.parquet")
        with pytest.raises(RolloutLogError, match=f"log.parquet, row 0, column {column}: .* cannot be read as"):
            list(read_rollout_log(tmp_path))
    pq.write_table(pa.table({"input": [1], "output": [2]}), tmp_path / "log.parquet")
    with pytest.raises(RolloutLogError, match=r"log.parquet: none of the columns .*; it has \['input', 'output'\]"):
        list(read_rollout_log(tmp_path))


@pytest.mark.parametrize("path", ["nowhere", "nowhere/*.parquet", "nowhere.parquet", ""])
def test_a_path_without_a_log_is_told_at_once(tmp_path, path):
    with pytest.raises(RolloutLogError, match=r"no rollout log here; looked for .parquet, .jsonl, .jsonl.gz"):
        read_rollout_log(tmp_path / path)


@pytest.mark.parametrize("with_folder", [False, True])
def test_a_run_without_rollouts_is_told_what_is_missing_and_how_to_keep_them(tmp_path, with_folder):
    """Its metrics.jsonl was read as a log that lacks its columns."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    if with_folder:
        (tmp_path / "rollouts").mkdir()
    with pytest.raises(RolloutLogError, match=r"kept no rollouts.*rollouts=RolloutSample\(\) of the Monitor"):
        log_files(tmp_path)


def test_the_metrics_beside_logs_are_no_log(tmp_path):
    for name in ("metrics.jsonl", "step_1.jsonl"):
        (tmp_path / name).write_text('{"step": 1}\n', encoding="utf-8")
    assert [file.name for file in log_files(tmp_path)] == ["step_1.jsonl"]


def test_an_unknown_ending_is_told(tmp_path):
    (tmp_path / "log.csv").write_text("step\n")
    for act in (RolloutLogWriter, count_rows):
        with pytest.raises(RolloutLogError, match=r"log.csv: a rollout log ends in .parquet, .jsonl, .jsonl.gz"):
            act(tmp_path / "log.csv")
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        read_rollout_log(tmp_path, batch_size=0)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet", ".pt"])
def test_a_pipe_is_no_log(tmp_path, suffix):
    """Opening one waits for a writer, which may never come."""
    os.mkfifo(tmp_path / f"log{suffix}")
    for read in (read_rollout_log, count_rows):
        with pytest.raises(RolloutLogError, match=rf"log{suffix}: no regular file"):
            read(tmp_path / f"log{suffix}")


@pytest.mark.parametrize("blank", ["\n", " \t\n"])
def test_reading_stops_at_many_blank_lines(tmp_path, blank):
    with gzip.open(tmp_path / "log.jsonl.gz", "wt") as file:
        file.write("{}\n" + blank * 1_000_000)
    with pytest.raises(RolloutLogError, match=r"line 1,?\d{3} .* blank lines"):
        count_rows(tmp_path)

    (tmp_path / "log.jsonl.gz").unlink()
    (tmp_path / "log.jsonl").write_text(("{}\n" + blank) * 5_000)  # a blank line after each row
    assert count_rows(tmp_path) == 5_000


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ('{"rollout_log_prob": [-0.5, true]}', "rollout_log_prob"),
        ('{"log_prob": [false, false]}', "log_prob"),
        ('{"reward": true}', "reward"),
    ],
)
def test_true_is_no_number(tmp_path, row, column):
    (tmp_path / "log.jsonl").write_text("{}\n" + row)
    with pytest.raises(RolloutLogError, match="true or false in place of a number") as error:
        list(read_rollout_log(tmp_path))
    assert (error.value.findings[0].first_row, error.value.findings[0].column) == (1, column)


def test_a_column_of_flags_is_no_log_prob(tmp_path):
    pq.write_table(pa.table({"rollout_log_prob": [[True, False]]}), tmp_path / "log.parquet")
    with pytest.raises(RolloutLogError, match="true or false in place of a number"):
        list(read_rollout_log(tmp_path))


def test_a_key_that_is_written_twice_is_an_error(tmp_path):
    (tmp_path / "log.jsonl").write_text('{}\n{"log_prob": [-1.0], "log_prob": [-2.0]}')
    with pytest.raises(RolloutLogError, match="line 2 is not JSON: key 'log_prob' is written twice"):
        list(read_rollout_log(tmp_path))
    (tmp_path / "log.jsonl").write_text('{"sampling": {"top_k": 1, "top_k": 2}}')
    with pytest.raises(RolloutLogError, match="key 'top_k' is written twice"):
        list(read_rollout_log(tmp_path))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_step_is_not_negative(tmp_path, suffix):
    path = tmp_path / f"log{suffix}"
    if suffix == ".jsonl":
        path.write_text('{"step": 3}\n{"step": -1}')
    else:
        pq.write_table(pa.table({"step": [3, -1]}), path)
    with pytest.raises(RolloutLogError, match="step is -1") as error:
        list(read_rollout_log(path))
    assert error.value.findings[0].first_row == 1
    with pytest.raises(RolloutLogError, match="step is -1"):
        batch_of([-1])
