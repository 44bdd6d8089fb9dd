"""Who reads the shards changes no number; interrupts, errors and lost workers end as they do in one process."""

import dataclasses
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import eventually, is_gone

from rollcorr.config.sampling_spec import SamplingSpec
from rollcorr.core.metric_registry import finalize
from rollcorr.diagnostics.log_check import log_tally as module
from rollcorr.diagnostics.log_check.check import DIAGNOSIS, check_logs
from rollcorr.diagnostics.log_check.reader_process import _portable
from rollcorr.diagnostics.log_check.tally import Measurement, Tally, merge_parts
from rollcorr.diagnostics.provenance import pair_sample
from rollcorr.rollout_log import RolloutBatch, RolloutLogError, RolloutLogWriter, log_shards
from rollcorr.run_directory.stored_run import BadInputError

pytestmark = pytest.mark.xdist_group("workers")
T = 9


def write(path, *, groups, seed=0, rows=6):
    """A log of some row groups; steps 1 and 2 alternate, and a few values are what a check complains about."""
    generator = torch.Generator().manual_seed(seed)
    with RolloutLogWriter(path) as log:
        for _ in range(groups):
            rollout = -3 * torch.rand(rows, T, generator=generator) - 0.5
            train = (rollout + 0.1 * torch.randn(rows, T, generator=generator)).clamp(max=-0.01)
            mask = torch.rand(rows, T, generator=generator) < 0.8
            mask[:, 0] = True
            rollout[0, 0], train[1, 0], rollout[2, 0] = -9999.0, 0.25, torch.nan
            columns = {"old_log_prob": train, "step": torch.tensor([1, 2] * (rows // 2)), "reward": 0.5}
            spec = SamplingSpec(temperature=0.7, engine="vllm")
            log.write(RolloutBatch.from_padded(mask, rollout_log_prob=rollout, sampling=spec, **columns))
    return path


@pytest.fixture
def small_shards(monkeypatch):
    """A shard is a row group."""
    monkeypatch.setattr(module, "log_shards", functools.partial(log_shards, tokens=1))


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Twelve row groups in three files, one of them JSONL."""
    folder = tmp_path_factory.mktemp("logs")
    files = [write(folder / f"{i}.parquet", groups=5, seed=i) for i in range(2)]
    return [files[0], write(folder / "between.jsonl", groups=2, seed=7), files[1]]


def answer(result):
    """Return every number of a result, to the last digit, arrays included."""

    def plain(value):
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return value.tolist() if hasattr(value, "tolist") else value

    return repr(plain(dataclasses.asdict(result)))


@settings(max_examples=15)
@given(tokens=st.integers(1, 300), batch_size=st.integers(1, 20))
def test_shards_of_any_size_merge_to_the_whole(tmp_path_factory, tokens, batch_size):
    folder = tmp_path_factory.mktemp("log")
    for i in range(2):
        write(folder / f"{i}.parquet", groups=3, seed=i)
    measurement = Measurement(config=DIAGNOSIS, train_column="old_log_prob", batch_size=batch_size)
    tallies = {}
    for name, size in (("whole", 1 << 30), ("cut", tokens)):
        tally = Tally()
        with mock.patch.object(pair_sample, "TOKENS", 40):  # of 250 or so: the sample is every fourth sequence
            for shard in log_shards(folder, tokens=size):
                tally = tally.merge(measurement.of_shard(shard, lambda rows: None))
        tallies[name] = tally
    whole, cut = tallies["whole"], tallies["cut"]
    assert (cut.rows, cut.findings, cut.claims) == (36, whole.findings, whole.claims)
    assert {finding.rows for finding in cut.findings} == {6}
    assert list(cut.sample.rows) == list(whole.sample.rows)
    assert cut.sample.stride == whole.sample.stride > 1
    assert cut.sample.held == sum(len(row.train) for row in cut.sample.rows.values()) <= 80
    for step in (1, 2):
        metrics = finalize(whole.parts[step].statistics.read())
        assert finalize(cut.parts[step].statistics.read()) == pytest.approx(metrics, rel=1e-12, abs=1e-15)
    assert merge_parts(cut.parts.values()).rewards == 36
    np.testing.assert_allclose(cut.profile.cells, whole.profile.cells, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(cut.profile.rows.values, whole.profile.rows.values)
    assert list(cut.first) == list(whole.first) == [1, 2]


def test_any_number_of_processes_gives_the_same_answer_to_the_last_digit(logs, small_shards):
    """More shards than are handed out at once, findings of every kind, and steps in all of them.

    Meanwhile each worker gets what a terminal sends to the whole process group at Ctrl-C: it is not their affair.
    """
    told = []

    def on_rows(rows, total):
        told.append((rows, total))
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGINT)

    alone = check_logs(logs, batch_size=4)
    many = check_logs(logs, batch_size=4, workers=2, on_rows=on_rows)
    assert answer(many) == answer(alone)
    assert {f.metric for f in many.health.findings} >= {"log/sampling", "log/rollout_log_prob", "log/old_log_prob"}
    assert len(many.series) == 2
    assert sum(rows for rows, _ in told) == many.rows == 72
    assert {total for _, total in told} == {72}


def test_a_log_of_one_shard_starts_no_process(logs):
    started = []
    check_logs(logs[:1], workers=9, on_rows=lambda *_: started.extend(multiprocessing.active_children()))
    assert not started


@pytest.mark.parametrize("ctrl_c_at_start", [signal.default_int_handler], ids=["foreground"], indirect=True)
def test_ctrl_c_keeps_whole_shards_of_workers(tmp_path, small_shards, ctrl_c_at_start):
    """40 shards; the interrupt comes after the first."""
    path = write(tmp_path / "log.parquet", groups=40)
    pressed = []

    def interrupt(rows, total):
        if rows and not pressed:
            pressed.append(rows)
            signal.raise_signal(signal.SIGINT)

    result = check_logs([path], workers=2, on_rows=interrupt)
    assert result.interrupted
    assert pressed[0] <= result.rows < 240
    assert f"interrupted: this covers {result.rows} of 240 rows only" in result.remarks
    assert result.metrics["rollout_corr/sequence_count"] == result.rows
    assert signal.getsignal(signal.SIGINT) is ctrl_c_at_start


def test_a_killed_worker_is_an_error_with_a_fix(logs, small_shards):
    def kill(rows, total):
        for child in multiprocessing.active_children():
            child.kill()

    with pytest.raises(ChildProcessError, match=r"one of 2 workers died without an answer.*use fewer"):
        check_logs(logs, workers=2, on_rows=kill)
    assert not multiprocessing.active_children()


PARENT = """
    import functools, multiprocessing, sys, time
    from multiprocessing import resource_tracker
    from rollcorr.diagnostics.log_check import check_logs
    from rollcorr.diagnostics.log_check import log_tally as module
    from rollcorr.rollout_log import log_shards

    def on_rows(rows, total):
        if rows or "starting" in sys.argv:
            pids = [child.pid for child in multiprocessing.active_children()]
            print(*pids, resource_tracker._resource_tracker._pid, flush=True)
            time.sleep(600)

    if __name__ == "__main__":
        module.log_shards = functools.partial(log_shards, tokens=1)
        check_logs([sys.argv[1]], workers=2, on_rows=on_rows)
"""


def semaphores_of(pid):
    """The named semaphores that a process has in its memory, where the system tells."""
    maps = Path(f"/proc/{pid}/maps")
    lines = maps.read_text(encoding="utf-8").splitlines() if maps.exists() else []
    return [line for line in lines if "/sem." in line]


@pytest.mark.parametrize(("moment", "kill"), [("reading", os.kill), ("starting", os.killpg)], ids=["one", "all"])
def test_a_killed_check_leaves_no_process_and_has_no_semaphore(tmp_path, moment, kill):
    log = write(tmp_path / "log.parquet", groups=20)
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT), encoding="utf-8")
    command = [sys.executable, str(script), str(log), moment]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.stdout.close()
    assert len(pids) == 3  # two readers, and Python's own processes
    assert not any(map(is_gone, pids))
    assert [semaphores_of(pid) for pid in (parent.pid, *pids)] == [[]] * 4

    kill(parent.pid, signal.SIGKILL)
    assert parent.wait() == -signal.SIGKILL
    assert eventually(lambda: all(map(is_gone, pids)))


class Stubborn(Exception):  # noqa: N818 (it is only sent)
    """An error that cannot be made again from its arguments."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def test_an_error_that_cannot_be_sent_is_told_in_words():
    assert repr(_portable(Stubborn("one", "two"))) == repr(RuntimeError("Stubborn: one and two"))
    error = ValueError("as it is")
    assert _portable(error) is error


def test_what_is_wrong_with_the_log_is_said_as_by_one_process(tmp_path, small_shards):
    good = write(tmp_path / "a.parquet", groups=1)
    bad = tmp_path / "b.jsonl"
    bad.write_text('{"rollout_log_prob": [-1.0, -2.0], "old_log_prob": [-1.0]}\n')
    said = []
    for workers in (1, 2):
        with pytest.raises(RolloutLogError) as error:
            check_logs([good, bad], workers=workers)
        said.append(str(error.value))
    assert "b.jsonl, row 0, column old_log_prob: 1 values for a response of 2 tokens" in said[0]
    assert said[0] == said[1]


def test_readers_are_processes_or_a_cluster(logs):
    for wrong in ({"workers": 0}, {"workers": 2, "ray": "local"}):
        with pytest.raises(BadInputError, match="workers="):
            check_logs(logs, **wrong)


def test_a_cluster_without_ray_names_the_extra(logs, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'rollcorr\[ray\]'"):
        check_logs(logs, ray="local")
