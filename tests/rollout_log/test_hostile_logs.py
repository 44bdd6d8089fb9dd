"""Rollout logs of strangers: flipped bits, and files of a kilobyte that stand for gigabytes."""

import gzip
import json
import os
import random
import struct
import subprocess
import sys
import textwrap

import parquet_forge as forge
import pytest
import torch

from rollcorr.diagnostics.log_check import check_logs
from rollcorr.rollout_log import (
    FileLimits,
    RolloutBatch,
    RolloutLogError,
    RolloutLogWriter,
    convert_log,
    read_rollout_log,
)
from rollcorr.rollout_log import parquet as parquet_module
from rollcorr.run_directory.stored_run import BadInputError

pa = pytest.importorskip("pyarrow", reason="needs rollcorr[log]")
pq = pytest.importorskip("pyarrow.parquet", reason="needs rollcorr[log]")

SEEDS = int(os.environ.get("ROLLCORR_FLIP_SEEDS", "150"))
MEGABYTE = 1 << 20
BOTH = ("rollout_log_prob", "old_log_prob")


def write_log(path, *, rows=24, tokens=20):
    generator = torch.Generator().manual_seed(0)
    rollout = -3 * torch.rand(rows, tokens, generator=generator) - 0.1
    columns = {"step": 3, "group_id": list(range(rows)), "prompt_ids": [[1, 2, 3]] * rows, "model": "policy"}
    columns["sampling"] = {"temperature": 0.7, "engine": "vllm", "engine_version": "1", "policy_version": 2}
    with RolloutLogWriter(path, row_group_rows=8) as log:
        log.write(
            RolloutBatch.from_padded(
                torch.ones(rows, tokens),
                rollout_log_prob=rollout,
                old_log_prob=rollout + 0.01 * torch.randn(rows, tokens, generator=generator),
                response_ids=torch.randint(0, 50_000, (rows, tokens), generator=generator),
                reward=[1.0] * rows,
                **columns,
            )
        )
    return path


def rows_of(path):
    return [row for batch in read_rollout_log(path) for row in batch.to_rows()]


def flip(content, chance, region):
    flipped = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 8))):
        flipped[chance.choice(region)] ^= 1 << chance.randrange(8)
    return bytes(flipped)


def refused(read, path):
    """Whether a reader refuses a file, as it should: with one line that names the file. Other exceptions pass through.

    A column whose name is damaged is a column that is not recorded.
    """
    try:
        read(path)
    except (RolloutLogError, BadInputError) as error:
        text = str(error)
    else:
        return False
    assert str(path) in text
    assert len(text.splitlines()) == 1
    return True


def test_flipped_bits_in_parquet_are_refused_or_change_no_value(tmp_path):
    """Half of the flips are in the footer. Pages have checksums, so no flip in one changes a number."""
    content = write_log(tmp_path / "sound.parquet").read_bytes()
    whole = {json.dumps(row, sort_keys=True) for row in rows_of(tmp_path / "sound.parquet")}
    footer = struct.unpack("<I", content[-8:-4])[0]
    refusals = {"pages": 0, "footer": 0}
    for seed in range(SEEDS):
        chance = random.Random(seed)
        where = "footer" if seed % 2 else "pages"
        first = len(content) - footer - 8
        region = range(first, len(content)) if where == "footer" else range(first)
        path = tmp_path / f"flipped_{seed}.parquet"
        path.write_bytes(flip(content, chance, region))
        refusals[where] += refused(lambda path: check_logs([path]), path)
        rows = []
        if not refused(lambda path: rows.extend(rows_of(path)), path) and where == "pages":  # noqa: B023
            assert {json.dumps(row, sort_keys=True) for row in rows} == whole
    assert refusals["pages"] > SEEDS // 4
    assert refusals["footer"] > SEEDS // 8


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_flipped_bits_in_lines_are_refused_or_read(tmp_path, suffix):
    convert_log(write_log(tmp_path / "sound.parquet", rows=4), tmp_path / f"sound{suffix}")
    content = (tmp_path / f"sound{suffix}").read_bytes()
    refusals = 0
    for seed in range(60):
        path = tmp_path / f"flipped_{seed}{suffix}"
        path.write_bytes(flip(content, random.Random(seed), range(len(content))))
        refusals += refused(lambda path: check_logs([path]), path)
    assert refusals > 15


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"reward": 1.0, "model": "\xff"}', "row 0: line 1 is not JSON: 'utf-8' codec can't decode byte 0xff"),
        (b'{"a": ' + b"[" * 100_000, "line 1 is not JSON: nested 100,001 levels deep; the limit is 64"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "nested 65 levels deep; the limit is 64"),
        (b'{"model": "\\ud800"}', "row 0, column model: 'utf-8' codec can't encode"),
        (b'{"step": 1' + b"0" * 400 + b"}", "row 0, column step: "),
        (b'{"step": 1' + b"0" * 5000 + b"}", "line 1 is not JSON: Exceeds the limit"),
        (b'{"response_ids": [[[1]]]}', "row 0, column response_ids: "),
        (b'{"sampling": [1]}', "row 0, column sampling: "),
        (b'{"policy_versions": 3}', "row 0, column policy_versions: "),
        ("{}".encode("utf-16"), "line 1 is not JSON"),
    ],
)
def test_a_hostile_line_is_named(tmp_path, line, message):
    path = tmp_path / "log.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(RolloutLogError) as caught:
        rows_of(path)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_brackets_within_texts_are_no_depth(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"model": '"[{\\' * 100, "reward": 1.0}) + "\n", encoding="utf-8")
    assert rows_of(path)[0]["model"] == '"[{\\' * 100


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".jsonl.gz"])
def test_a_limit_names_the_value_and_the_option_and_can_be_raised(tmp_path, suffix):
    path = tmp_path / f"log{suffix}"
    convert_log(write_log(tmp_path / "sound.parquet", rows=10), path)
    for limits, message in (
        (FileLimits(rows=9), r"10 rows; the limit is 9; .*--limit rows=NUMBER, or FileLimits\(rows=NUMBER\)"),
        (FileLimits(row_tokens=19), "row 0, column response_ids: 20 values in one row; the limit is 19"),
    ):
        with pytest.raises(RolloutLogError, match=message):
            list(read_rollout_log(path, file_limits=limits))
    assert sum(len(batch) for batch in read_rollout_log(path, file_limits=FileLimits(rows=10, row_tokens=20))) == 10


def test_limits_are_read_from_texts():
    assert FileLimits.from_texts(["rows=5", "line_bytes=7"]) == FileLimits(rows=5, line_bytes=7)
    for text in ("rows", "rows=x", "row=5", "rows=0", "rows=-1"):
        with pytest.raises(ValueError, match="limit"):
            FileLimits.from_texts([text])


def test_rows_of_very_different_lengths_in_one_large_row_group_are_read_whole(tmp_path):
    """The levels of a group of 17 million values are decoded first. Batches are as small as its longest rows need."""
    lengths = [1] * 300 + [1_200_000] * 14 + [1] * 5
    runs = [run for length in lengths for run in ((0, 1), (1, length - 1)) if run[1]]
    path = tmp_path / "log.parquet"
    path.write_bytes(forge.parquet([forge.repeated("rollout_log_prob", *runs)], len(lengths)))
    batches = list(read_rollout_log(path, batch_size=256))
    assert [size for batch in batches for size in batch.lengths.tolist()] == lengths
    assert max(len(batch) for batch in batches) < 256
    with pytest.raises(RolloutLogError, match="row 300, column rollout_log_prob: 1,200,000 values in one row"):
        list(read_rollout_log(path, file_limits=FileLimits(row_tokens=MEGABYTE)))


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "zstd", "lz4"])
def test_levels_are_decoded_in_every_compression(tmp_path, monkeypatch, codec, version):
    """As if its 480 tokens were more than can be decoded at once. Noise becomes longer when it is compressed."""
    whole = pq.read_table(write_log(tmp_path / "sound.parquet"))
    pq.write_table(whole, tmp_path / "log.parquet", compression=codec, data_page_version=version)
    rows = rows_of(tmp_path / "log.parquet")
    monkeypatch.setattr(parquet_module, "_MAX_BATCH_VALUES", 100)
    batches = list(read_rollout_log(tmp_path / "log.parquet", columns=["rollout_log_prob"]))
    assert [len(batch) for batch in batches] == [2] * 12
    assert rows_of(tmp_path / "log.parquet") == rows


def lists(count, **options):
    return [forge.repeated(name, (0, 1), (1, count - 1), **options) for name in BOTH]


def zeros_page():
    """A gigabyte of zeros in one page of 32 kB."""
    body = forge.levels((0, 1)) + forge.levels((3, 1)) + bytes(1 << 28)
    return forge.data_page(body, 1, encoding=0, codec=pa.Codec("zstd"))


def bombs(folder):
    """Write each bomb; return name → (command arguments, expected error)."""
    found = {}

    def add(name, content, message, *, suffix="parquet"):
        path = folder / f"{name}.{suffix}"
        path.write_bytes(content)
        found[name] = (["check", str(path)], message)

    whole = "not a whole Parquet file: "
    add("one_row", forge.parquet(lists(10**9), 1), "1,000,000,000 values in one row; the limit is 2,097,152")
    add("lie", forge.parquet(lists(10**9, claimed=10), 1), "values more than its row group says 10")
    add("pages", forge.parquet(lists(10**9, pages=20), 1), "a column has more rows than the 1 of its row group")
    add("rows", forge.parquet([forge.repeated(name, (0, 10**9)) for name in BOTH], 10**9), "1,000,000,000 rows; the")
    add("fewer_rows", forge.parquet([forge.repeated(name, (0, 10**9)) for name in BOTH], 5), "more rows than the 5")
    add("nested", forge.parquet(lists(10**9, nested=3), 1), "cannot be read as list<float32>")
    page = zeros_page()
    zeros = [forge.column(name, page, 1, codec=forge.ZSTD) for name in BOTH]
    add("zeros", forge.parquet(zeros, 1), "decompress to 536,870,936 bytes at once; the limit is 134,217,728")
    text = forge.dictionary_page(struct.pack("<I", 1 << 28) + bytes(1 << 28), 1, pa.Codec("zstd"))
    rows = forge.levels((1, 256)) + b"\1" + forge.varint(512) + b"\0"
    indices = forge.data_page(rows, 256, codec=pa.Codec("zstd"))
    options = {"dictionary": text, "nested": 0, "kind": forge.BYTE_ARRAY, "codec": forge.ZSTD}
    texts = [*(forge.repeated(name, (0, 256)) for name in BOTH), forge.column("engine", indices, 256, **options)]
    add("text", forge.parquet(texts, 256), "the limit is 134,217,728")
    huge = forge.column("old_log_prob", forge.data_page(b"", 1), 1, dictionary=forge.dictionary_page(b"", 2**31 - 1))
    add("dictionary", forge.parquet([huge], 1), whole + "the dictionary at byte 4 has 2,147,483,647 values in 0 bytes")
    no_page = forge.column("old_log_prob", forge.page(b"", -4, 5, (1, forge.I32, 1)), 1)
    add("kind", forge.parquet([no_page], 1), whole + "there is no page at byte 4")
    histogram = forge.structure((3, forge.LIST, forge.array(forge.I64, [1])))
    wrong = [forge.repeated(name, (0, 1), extra=[(16, forge.STRUCT, histogram)]) for name in BOTH]
    add("statistics", forge.parquet(wrong, 1), whole)
    chunk = forge.structure((2, forge.I64, 0))
    parts = [(1, forge.LIST, forge.array(forge.STRUCT, [chunk] * 10**6)), (2, forge.I64, 0), (3, forge.I64, 0)]
    schema = forge.schema_of([forge.column("reward", b"", 0, nested=0)])
    add(
        "chunks",
        forge.with_footer(b"PAR1", schema, [forge.structure(*parts)], 0),
        "has 1,000,000 columns, the schema 1",
    )
    add("footer", forge.with_footer(b"PAR1", schema, [], 0, claimed=2**32 - 1), "a footer of 4,294,967,295 bytes")
    # A list of 2^40 numbers that are not there, and a field that Arrow would take for field 4.
    for name, footer, message in (
        ("list", forge.structure((15, forge.LIST, b"\xf7" + forge.varint(1 << 40))), "the footer is cut off"),
        ("field", b"\5" + forge.integer((1 << 16) + 4) + forge.integer(1) + b"\0", "a field of the number 65540"),
    ):
        add(name, b"PAR1" + footer + struct.pack("<I", len(footer)) + b"PAR1", whole + message)
    deep = [forge.structure((3, forge.I32, 1), (4, forge.BINARY, "a"), (5, forge.I32, 1))] * 10**5
    add("schema", forge.with_footer(b"PAR1", [*deep, schema[1]], [], 0), whole)

    # A gigabyte of one line: sixty-four times the same compressed part.
    part = gzip.compress(b"[" * (16 * MEGABYTE), compresslevel=1)
    add("line", part * 64, "line 1 has more than 16,777,216 bytes", suffix="jsonl.gz")
    add("deep", b'{"a": ' + b"[" * (8 * MEGABYTE) + b"\n", "levels deep; the limit is 64", suffix="jsonl")
    lists_in_list = b'{"a": [' + b"[]," * (5 * MEGABYTE) + b"[]]}\n"
    add("lists", lists_in_list, "no training side", suffix="jsonl")
    ids = b'{"response_ids": [' + b"1," * (5 * MEGABYTE) + b"1]}\n"
    add("tokens", ids, "5,242,881 values in one row; the limit is 2,097,152", suffix="jsonl")
    # Pickles: one byte can be a list, and one wide character makes a text wide.
    objects = "objects in the pickle; the limit is 8,388,608"
    add("pickled lists", b"\x80\x02" + b"]" * (3 * MEGABYTE) + b".", objects, suffix="pkl")
    add("pickled numbers", b"\x80\x02](" + b"M\xff\x7f" * (9 * MEGABYTE) + b"e.", objects, suffix="pkl")
    with (folder / "text.pkl").open("wb") as file:
        file.write(b"\x80\x02X" + (100 * MEGABYTE + 4).to_bytes(4, "little"))
        for _ in range(100):
            file.write(b"x" * MEGABYTE)
        file.write("\U0001f600".encode() + b".")
    found["pickled text"] = (["check", str(folder / "text.pkl")], objects)
    with (folder / "sparse.jsonl").open("wb") as file:
        file.truncate(1 << 30)
    found["sparse"] = (["check", str(folder / "sparse.jsonl")], "line 1 has more than 16,777,216 bytes")

    # The other files that commands read.
    aliases = "a0: &a0 x\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    (folder / "aliases.yaml").write_text(aliases, encoding="utf-8")
    found["aliases"] = (["convert-config", str(folder / "aliases.yaml")], "values, with aliases written out")
    (folder / "deep.yaml").write_text("a: " + "[" * 50_000, encoding="utf-8")
    found["deep yaml"] = (["check", "--config", str(folder / "deep.yaml"), str(folder / "deep.jsonl")], "limit is 64")
    for name, content, message in (
        ("metrics", b'{"step": 1, "x": ' + b"[" * 100_000 + b"\n", "levels deep; the limit is 64"),
        ("metrics_line", b'{"step": 1, "x": "' + b"x" * 2 * MEGABYTE, "the line has more than 1,048,576 bytes"),
        ("metrics_values", b'{"a":[' + b"[]," * 100_000 + b'[]],"b":1}\n', "MB of memory, the limit; thin it out"),
    ):
        run = folder / name
        run.mkdir()
        (run / "metrics.jsonl").write_bytes(content * 40)
        found[name] = (["report", str(run)], message)
    return found


RUN_ALL = """
    import json, sys
    from pathlib import Path
    from typer.testing import CliRunner
    from rollcorr.cli import app

    for name, arguments in json.load(sys.stdin):
        result = CliRunner().invoke(app, arguments)
        problem = result.exception if not isinstance(result.exception, SystemExit) else None
        # Not ru_maxrss: that begins with the peak of the process that started this one.
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        peak = int(status["VmHWM"].split()[0]) >> 10
        print(json.dumps([name, result.exit_code, result.stderr, repr(problem), peak]), flush=True)
"""


def test_no_bomb_takes_a_gigabyte_and_each_is_answered_with_one_line(tmp_path):
    """One process for all: it measures the worst peak."""
    planted = bombs(tmp_path)
    assert len(planted) > 20
    given = json.dumps([(name, arguments) for name, (arguments, _) in planted.items()])
    program = [sys.executable, "-c", textwrap.dedent(RUN_ALL)]
    ended = subprocess.run(program, input=given, capture_output=True, text=True, check=False)
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [name for name, *_ in answers] == list(planted), ended.stderr[-1000:]
    for name, exit_code, stderr, problem, peak in answers:
        assert (exit_code, problem) == (2, "None"), (name, stderr, problem)
        (line,) = stderr.splitlines()
        assert planted[name][1] in line, name
        assert len(line) < 2000
        assert peak < 1000, name
