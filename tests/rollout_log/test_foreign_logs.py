"""Dumps of other frameworks: fields read from each, rejected files and reasons, and no code execution."""

import gzip
import json
import math
import pickle
import zipfile
import zlib

import foreign_dumps as dumps
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rollcorr.diagnostics.log_check import check_logs
from rollcorr.rollout_log import (
    COLUMNS,
    FRAMEWORKS,
    FileLimits,
    JsonlSource,
    RolloutBatch,
    RolloutLogError,
    RolloutLogWriter,
    convert_log,
    count_rows,
    read_rollout_log,
    validate_rollout_log,
)
from rollcorr.rollout_log.frameworks import parse_column_names
from rollcorr.rollout_log.reader import log_files
from rollcorr.run_directory.stored_run import BadInputError

WRITERS = {
    "prime-rl": dumps.write_prime_rl,
    "slime": dumps.write_slime_train,
    "SkyRL": dumps.write_skyrl,
    "SkyRL, older": lambda folder, **changes: dumps.write_skyrl(folder, older=True, **changes),
}


def rows_of(path, **options):
    """Return the rows of a log as dictionaries without missing values."""
    rows = []
    for batch in read_rollout_log(path, **options):
        rows += [{name: value for name, value in row.items() if value is not None} for row in batch.records.to_pylist()]
    return rows


@pytest.mark.parametrize("framework", WRITERS)
def test_a_dump_with_log_probs_of_both_sides_is_read_as_a_log(framework, tmp_path):
    path = WRITERS[framework](tmp_path)
    rows = rows_of(path)
    train = "log_prob" if framework == "prime-rl" else "old_log_prob"
    for i, row in enumerate(rows):
        assert row["prompt_ids"] == dumps.PROMPTS[i]
        assert row["response_ids"] == dumps.RESPONSES[i]
        assert row["response_mask"] == [bool(x) for x in dumps.MASKS[i]]
        assert row["rollout_log_prob"] == dumps.ROLLOUT[i]
        assert row[train] == dumps.TRAIN[i]
        assert row["advantages"] == dumps.ADVANTAGES[i]
        assert row["step"] == dumps.STEP
    assert len(rows) == count_rows(path) == 2
    assert validate_rollout_log(path).errors == ()


@pytest.mark.parametrize("framework", WRITERS)
def test_a_check_of_a_dump_gives_the_numbers_of_the_same_log_in_our_form(framework, tmp_path):
    path = WRITERS[framework](tmp_path)
    own = RolloutBatch.from_rows(
        [
            {"response_mask": mask, "rollout_log_prob": rollout, "old_log_prob": train}
            for mask, rollout, train in zip(dumps.MASKS, dumps.ROLLOUT, dumps.TRAIN, strict=True)
        ]
    )
    with RolloutLogWriter(tmp_path / "own.parquet") as log:
        log.write(own)
    ours, theirs = check_logs([tmp_path / "own.parquet"]).metrics, check_logs([path]).metrics
    assert ours["rollout_corr/token_count"] == 4
    assert ours["rollout_corr/kl"] == pytest.approx((0.25 + 0.5) / 4)
    recorded = {name: value for name, value in theirs.items() if not name.startswith("reward/")}
    assert recorded == pytest.approx(ours, nan_ok=True)


def test_the_reward_of_slime_is_the_raw_one_of_its_place_in_the_batch(tmp_path):
    assert [row["reward"] for row in rows_of(dumps.write_slime_train(tmp_path))] == dumps.REWARDS
    without = rows_of(dumps.write_slime_train(tmp_path, rollout_position=None))
    assert all("reward" not in row for row in without), "the normalized reward is another number"


def test_the_sampler_s_side_of_slime_is_read_and_says_where_the_other_side_is(tmp_path):
    path = dumps.write_slime_rollout(tmp_path)
    assert [row["rollout_log_prob"] for row in rows_of(path)] == dumps.ROLLOUT
    assert [row["group_id"] for row in rows_of(path)] == ["0", "0"]
    with pytest.raises(BadInputError, match=r"none of the trainer.*--save-debug-train-data"):
        check_logs([path])


def test_kept_sets_of_slime_become_those_of_the_log(tmp_path):
    kept = {
        "rollout_top_p_token_ids": torch.tensor([11, 4, 12]),
        "rollout_top_p_token_offsets": torch.tensor([0, 2, 3]),
    }
    path = dumps.write_slime_train(tmp_path)
    payload = torch.load(path)
    payload["samples"] = [payload["samples"][0] | kept]
    torch.save(payload, path)
    (row,) = rows_of(path)
    assert (row["kept_ids"], row["kept_offsets"]) == ([11, 4, 12], [0, 2, 3])
    assert validate_rollout_log(path).errors == ()


def test_tokens_that_prime_rl_distils_from_another_model_are_masked(tmp_path):
    """Their component is ce: they have no log-prob under the sampler."""
    (path,) = [dumps.write_prime_rl(tmp_path)]
    record = json.loads(path.read_text().splitlines()[1])
    record["rl_weights"], record["ref_kl_weights"] = [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.5]
    path.write_text(json.dumps(record))
    assert rows_of(path)[0]["response_mask"] == [True, False, True]
    record["ref_kl_weights"] = [None] * 4
    path.write_text(json.dumps(record))
    assert rows_of(path)[0]["response_mask"] == [True, False, False]


@pytest.mark.parametrize(
    ("writer", "message"),
    [
        (dumps.write_verl, "dump of generations contains text and scores.*no setting of verl.*calculate_log_probs"),
        (dumps.write_trl, r"(?s)TRL's table of completions contains text.*no setting of TRL.*attach\(trainer"),
    ],
)
def test_a_dump_without_log_probs_is_recognized_and_the_error_says_what_to_do(writer, message, tmp_path):
    path = writer(tmp_path)
    assert [row["step"] for row in rows_of(path)] == [dumps.STEP] * 2, "what it has is read"
    with pytest.raises(BadInputError, match=message):
        check_logs([path])
    with pytest.raises(RolloutLogError, match=message):
        convert_log(path, tmp_path / "log.parquet", required=["rollout_log_prob"])
    assert not (tmp_path / "log.parquet").exists()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"id": "x", "env": {"id": "gsm8k"}, "traces": [], "errors": []}, "enable_token_export"),
        ({"input_prompt": "a", "output_response": "b", "score": [1.0]}, "dump_data_batch"),
    ],
)
def test_text_dumps_of_prime_rl_and_skyrl_name_the_setting_of_the_other_dump(record, message, tmp_path):
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps(record))
    with pytest.raises(BadInputError, match=message):
        check_logs([path])


@pytest.mark.parametrize(
    ("writer", "changes", "message"),
    [
        (dumps.write_prime_rl, {"inference_logprobs": [-1.0]}, "row 0: inference_logprobs has 1 values for 4 tokens"),
        (dumps.write_prime_rl, {"trainer_logprobs": "x"}, "row 0: trainer_logprobs is a str, not a list"),
        (dumps.write_prime_rl, {"schema_version": 2}, "of schema 2; this release reads 1"),
        (dumps.write_slime_train, {"log_probs": torch.zeros(7)}, "row 0: log_probs has 7 values for 2 tokens"),
        (dumps.write_slime_train, {"response_lengths": 9}, "row 0: response_lengths is 9 for 4 tokens"),
        (dumps.write_slime_train, {"log_probs": torch.zeros(4)[::2]}, "not contiguous"),
        (dumps.write_slime_rollout, {"rollout_log_probs": [-1.0]}, "row 0: rollout_log_probs has 1 values for 2"),
        (dumps.write_slime_rollout, {"tokens": None}, "row 0: tokens is a NoneType, not a list"),
        (dumps.write_skyrl, {"response_mask": torch.tensor([[1, 0, 1]] * 3)}, "row 0: response_mask has 2 ones.*False"),
        (dumps.write_skyrl, {"attention_mask": torch.zeros(3, 4)}, "row 0: response_mask has 2 ones for 0 tokens"),
        (dumps.write_skyrl, {"rollout_logprobs": torch.zeros(3, 4)}, "do not fit together"),
    ],
)
def test_a_dump_that_contradicts_its_layout_is_refused_with_the_reason(writer, changes, message, tmp_path):
    path = writer(tmp_path, **changes)
    with pytest.raises(RolloutLogError, match=message):
        rows_of(path)


@pytest.mark.parametrize(
    ("writer", "changes", "message"),
    [
        (
            dumps.write_skyrl,
            {"rollout_logprobs": None},
            r"rollout_logprobs is not recorded.*sampling_params\.logprobs=1",
        ),
        (
            dumps.write_skyrl,
            {"action_log_probs": None},
            "action_log_probs is not recorded.*no training side.*reads π_old",
        ),
        (
            dumps.write_slime_train,
            {"rollout_log_probs": None},
            r"rollout_log_probs is not recorded.*Sample\.rollout_log",
        ),
    ],
)
def test_a_column_that_a_setting_left_out_is_named_with_the_setting(writer, changes, message, tmp_path):
    with pytest.raises(BadInputError, match=message):
        check_logs([writer(tmp_path, **changes)])


class Trap:
    """The code that its pickle would run."""

    ran = 0

    def __reduce__(self):
        return _spring, ()


def _spring():
    Trap.ran += 1


def test_nothing_in_a_pickle_is_run(tmp_path):
    path = dumps.write_slime_rollout(tmp_path, metadata=Trap(), tokens=Trap())
    pickle.loads(pickle.dumps(Trap()))
    assert Trap.ran == 1, "the trap works"
    with pytest.raises(RolloutLogError, match="tokens is a NoneType"):
        rows_of(path)
    assert len(rows_of(dumps.write_slime_rollout(tmp_path, metadata=Trap()))) == 2, "it is no field that is needed"
    (tmp_path / "trap.pkl").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(RolloutLogError, match="not a TrainingInputBatch"):
        rows_of(tmp_path / "trap.pkl")
    assert Trap.ran == 1


def write_torch(path, content, *, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3")


def huge_tensor(count):
    """A tensor of `count` values whose storage has 4 bytes."""
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ"
    shape = b"(J" + count.to_bytes(4, "little") + b"t(K\x00t"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + shape + b"\x89N" + b"tR"


def hostile_pickles():
    tokens = pickle.dumps({"samples": [{"tokens": [1], "response_length": 1, "loss_mask": [1]}]}, protocol=2)
    sample = b"\x80\x02}(X\x07\x00\x00\x00samples](}("
    fields = b"X\x0f\x00\x00\x00response_lengthK\x01X\x09\x00\x00\x00loss_maskNX\x06\x00\x00\x00tokens"
    return {
        "tuples": (b"\x80\x02" + b"N\x85" * 21_000 + b".", "objects in the pickle; the limit is 100,000"),
        "memo": (b"\x80\x02" + b"Nr\xff\xff\xff\x7f" * 26_000 + b".", "objects in the pickle; the limit is 100,000"),
        "lists": (b"\x80\x02" + b"]" * 26_000 + b".", "objects in the pickle; the limit is 100,000"),
        "cut": (tokens[:-4], "unreadable|not|Error"),
        "no pickle": (b"hello", "Error"),
        "extension": (b"\x80\x02\x82\x01.", "KeyError"),
        "bytearray": (b"\x80\x05\x96" + b"\xff" * 7 + b"\x00.", "KeyError"),
        "huge tensor": (sample + fields + huge_tensor(1 << 30) + b"ueu.", "a tensor of 1,073,741,824 values"),
        "bent tensor": (sample + fields + huge_tensor(4) + b"ueu.", "not contiguous"),
    }


@pytest.mark.parametrize("name", hostile_pickles())
def test_a_hostile_pickle_is_answered_with_what_is_wrong(name, tmp_path):
    """That the limits bound the memory is asserted with the other bombs."""
    content, message = hostile_pickles()[name]
    write_torch(tmp_path / "0.pt", content)
    with pytest.raises(RolloutLogError, match=message):
        rows_of(tmp_path / "0.pt", file_limits=FileLimits(pickle_objects=100_000))


def test_a_memo_entry_far_away_reserves_no_memory(tmp_path):
    """The unpickler in C would make a table of 32 GB for it."""
    sample = {"tokens": [1], "response_length": 1, "loss_mask": [1]}
    content = pickle.dumps({"samples": [sample]}, protocol=2)
    write_torch(tmp_path / "0.pt", b"\x80\x02Nr\xff\xff\xff\x7f0" + content[2:])
    assert len(rows_of(tmp_path / "0.pt")) == 1


def test_a_compressed_archive_and_other_files_are_refused(tmp_path):
    write_torch(tmp_path / "0.pt", b"\x80\x02N.", compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(RolloutLogError, match="its archive has another form"):
        rows_of(tmp_path / "0.pt")
    (tmp_path / "1.pt").write_bytes(zlib.compress(b"x"))
    with pytest.raises(RolloutLogError, match=r"not a file of torch\.save"):
        rows_of(tmp_path / "1.pt")
    torch.save({"model": torch.ones(2)}, tmp_path / "2.pt")
    with pytest.raises(RolloutLogError, match=r"neither a dump of slime .* nor of SkyRL"):
        rows_of(tmp_path / "2.pt")


def test_damage_in_a_tensor_is_an_error_and_not_another_number(tmp_path):
    """The archive has a checksum for each storage."""
    path = dumps.write_slime_train(tmp_path)
    data = bytearray(path.read_bytes())
    place = data.index(np.array(dumps.TRAIN[0], "<f4").tobytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(RolloutLogError, match="CRC"):
        rows_of(path)


def test_limits_hold_for_pickles_and_can_be_raised(tmp_path):
    path = dumps.write_skyrl(tmp_path)
    with pytest.raises(RolloutLogError, match=r"a pickle of .* bytes; the limit is 100\b.*--limit pickle_bytes"):
        rows_of(path, file_limits=FileLimits(pickle_bytes=100))
    with pytest.raises(RolloutLogError, match="--limit pickle_objects"):
        rows_of(path, file_limits=FileLimits(pickle_objects=20))
    with pytest.raises(RolloutLogError, match="--limit row_tokens"):
        rows_of(dumps.write_slime_train(tmp_path), file_limits=FileLimits(row_tokens=1))
    with pytest.raises(RolloutLogError, match="--limit rows"):
        rows_of(path, file_limits=FileLimits(rows=1))


def test_checkpoints_beside_a_log_are_no_logs_but_a_folder_of_dumps_is(tmp_path):
    path = dumps.write_slime_train(tmp_path)
    assert log_files(path.parent) == [path]
    log = dumps.write_verl(path.parent)
    assert log_files(path.parent) == [log]
    with pytest.raises(RolloutLogError, match=r"a rollout log ends in \.parquet, \.jsonl, \.jsonl\.gz$"):
        RolloutLogWriter(tmp_path / "log.pt")


THEIRS = {"rollout_log_prob": "rollout_logprobs", "old_log_prob": "train_lp"}


def their_file(folder, suffix):
    rows = [
        {"rollout_logprobs": rollout, "train_lp": train, "old_log_prob": [9.0], "reward": 1.0, "note": "x"}
        for rollout, train in zip(dumps.ROLLOUT, dumps.TRAIN, strict=True)
    ]
    path = folder / f"theirs{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(text) if suffix.endswith(".gz") else text)
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".jsonl.gz"])
def test_columns_with_names_of_others_are_read_by_those_names(suffix, tmp_path):
    """The column that a name is given for is that one, whatever else the file calls so."""
    path = their_file(tmp_path, suffix)
    rows = rows_of(path, column_names=THEIRS)
    assert [row["rollout_log_prob"] for row in rows] == dumps.ROLLOUT
    assert [row["old_log_prob"] for row in rows] == dumps.TRAIN
    assert [row["reward"] for row in rows] == [1.0, 1.0]
    metrics = check_logs([path], column_names=THEIRS).metrics
    assert metrics["rollout_corr/kl"] == pytest.approx((0.25 + -0.0 + 0.125 + 0.5) / 5)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_field_that_another_column_takes_is_not_read_under_its_own_name(suffix, tmp_path):
    rows = rows_of(their_file(tmp_path, suffix), column_names={"log_prob": "old_log_prob"})
    assert [row["log_prob"] for row in rows] == [[9.0], [9.0]]
    assert all("old_log_prob" not in row for row in rows)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_near_names_are_suggested(suffix, tmp_path):
    path = their_file(tmp_path, suffix)
    expected = (
        "no column rollout_log_prob; the file has rollout_logprobs; use --columns rollout_log_prob=rollout_logprobs$"
    )
    with pytest.raises(BadInputError, match=expected):
        check_logs([path])
    with pytest.raises(BadInputError, match=r"no column rollout_log_prob; the file has .*train_lp.*=THEIR_NAME"):
        check_logs([path], column_names={"log_prob": "rollout_logprobs"})


def test_metrics_in_place_of_a_log_are_called_that(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "rollout_corr/kl": 0.01}\n')
    with pytest.raises(BadInputError, match="these are the metrics of steps, without tokens; give a rollout log; `"):
        check_logs([path])


def test_tokens_with_metrics_beside_them_are_a_log_with_other_names(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"old_log_prob": [-1.0], "rollout_logprobs": [-1.0], "rollout_corr/kl": 0.01}\n')
    with pytest.raises(BadInputError, match=r"use --columns rollout_log_prob=rollout_logprobs$"):
        check_logs([path])


def test_names_of_columns_are_read_from_the_command_line():
    assert parse_column_names(["rollout_log_prob=a, old_log_prob=b", "reward=c"]) == {
        "rollout_log_prob": "a",
        "old_log_prob": "b",
        "reward": "c",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout_log_prob", "not of the form OUR_NAME=THEIR_NAME"),
        ("logprobs=rollout_log_prob", "our name stands on the left; write rollout_log_prob=logprobs"),
        ("rollout_logprob=x", "Did you mean 'rollout_log_prob'"),
        ("reward=a,reward=b", "reward is given twice"),
        ("log_prob=a,old_log_prob=a", "one field is one column"),
    ],
)
def test_a_wrong_name_of_a_column_is_answered_with_the_right_form(text, message):
    with pytest.raises(ValueError, match=message):
        parse_column_names([text])


def test_names_with_dots_and_names_for_pickles_are_refused(tmp_path):
    with pytest.raises(RolloutLogError, match="has a dot"):
        rows_of(their_file(tmp_path, ".parquet"), column_names={"reward": "a.b"})
    with pytest.raises(RolloutLogError, match="leave out --columns"):
        rows_of(dumps.write_skyrl(tmp_path), column_names=THEIRS)


def test_own_rows_are_never_taken_for_those_of_others(tmp_path):
    row = {"schema_version": "1.0", "input": "a", "output": "b", "score": 5.0, "reward": 1.0, "token_ids": [1]}
    (tmp_path / "log.jsonl").write_text(json.dumps(row))
    assert rows_of(tmp_path / "log.jsonl") == [{"reward": 1.0}]


def test_a_subclass_with_its_own_row_sees_every_object_as_it_is(tmp_path):
    class Other(JsonlSource):
        def row(self, value, *, file, row):
            return {"reward": -value["score"]}

    assert [row["reward"] for row in rows_of(dumps.write_verl(tmp_path), source=Other())] == [-1.0, -0.0]


def test_the_table_of_frameworks_names_columns_of_the_log():
    for framework in FRAMEWORKS:
        assert framework.tensors.keys() <= COLUMNS.keys(), framework.name
        for dump in framework.dumps:
            assert dump.fields.keys() <= COLUMNS.keys(), dump.files
            has_both = "rollout_log_prob" in dump.fields and {"old_log_prob", "log_prob"} & dump.fields.keys()
            assert bool(has_both) != bool(dump.lacks), dump.files
            assert bool(dump.instead) <= bool(dump.lacks) <= bool(dump.instead or framework.lines), dump.files


def test_long_dumps_come_in_batches(tmp_path):
    path = dumps.write_slime_train(tmp_path)
    payload = torch.load(path)
    payload["samples"] *= 5
    torch.save(payload, path)
    assert [len(batch) for batch in read_rollout_log(path, batch_size=4)] == [4, 4, 2]
    assert math.isclose(sum(row["reward"] for row in rows_of(path, batch_size=3)), 5.0)
