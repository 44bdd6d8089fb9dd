"""The capture of rollouts: what stays in the folder, its limits, kills and failing disks."""

from __future__ import annotations

import logging
import os
import random
import signal
import stat

import pytest
import torch
from faulty_disk import Faults, faulty_disk

from rollcorr.monitor.capture import RolloutCapture
from rollcorr.rollout_log import read_rollout_log

ROWS, TOKENS = 8, 64
ROOM = ROWS * TOKENS * (1 + 4 + 4 + 8) + (32 << 10)  # of one step


def add_step(capture: RolloutCapture, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(ROWS, TOKENS, generator=draw)
    columns = {
        "old_log_prob": rollout + 0.01 * torch.randn(ROWS, TOKENS, generator=draw),
        "rollout_log_prob": rollout,
        "response_ids": torch.randint(0, 50, (ROWS, TOKENS), generator=draw),
    }
    capture.add(torch.ones(ROWS, TOKENS, dtype=torch.bool), columns)
    capture.step()


def steps_in(folder) -> list[int]:
    return [int(path.stem.removeprefix("step_")) for path in sorted(folder.glob("step_*.parquet"))]


def size_of(folder) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_the_last_steps_and_step_0_stay(tmp_path):
    capture = RolloutCapture(tmp_path / "ring", steps=3)
    for seed in range(8):
        add_step(capture, seed)
    assert capture.flush()
    assert steps_in(tmp_path / "ring") == [0, 5, 6, 7]
    assert sum(len(batch) for batch in read_rollout_log(tmp_path / "ring")) == 4 * ROWS
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "ring").iterdir()} == {0o600}
    capture.close()


def test_the_folder_stays_below_its_limit(tmp_path):
    capture = RolloutCapture(tmp_path / "ring", max_bytes=3 * ROOM)
    for seed in range(8):
        add_step(capture, seed)
        assert capture.flush()
        assert size_of(tmp_path / "ring") <= 3 * ROOM
    assert steps_in(tmp_path / "ring")[0] == 0
    assert steps_in(tmp_path / "ring")[-1] == 7
    capture.close()


def test_a_step_above_the_limit_is_dropped(tmp_path, caplog):
    capture = RolloutCapture(tmp_path / "ring", max_bytes=1000)
    with caplog.at_level(logging.ERROR):
        for seed in range(3):
            add_step(capture, seed)
        capture.flush()
    assert steps_in(tmp_path / "ring") == []
    assert "limit" in caplog.text
    capture.close()


def test_a_resumed_run_continues_the_numbers(tmp_path):
    ring = tmp_path / "ring"
    for start in (0, 2):
        capture = RolloutCapture(ring, steps=5)
        add_step(capture, start)
        add_step(capture, start + 1)
        capture.close()
        (ring / ".step_000001.parquet.tmp-1-00").write_bytes(b"cut off")
    assert steps_in(ring) == [0, 1, 2, 3]
    capture = RolloutCapture(ring, steps=5)
    add_step(capture, 4)
    capture.close()
    assert not list(ring.glob(".step_*"))


def test_ids_are_left_out_on_request(tmp_path):
    capture = RolloutCapture(tmp_path / "ring", ids=False)
    add_step(capture, 0)
    capture.close()
    (batch,) = read_rollout_log(tmp_path / "ring")
    assert not batch.has("response_ids")
    assert batch.has("rollout_log_prob")


def test_ranks_share_the_folder_and_its_limit(tmp_path):
    captures = [RolloutCapture(tmp_path / "ring", steps=2, rank=rank, ranks=2) for rank in (0, 1)]
    for seed in range(5):
        for capture in captures:
            add_step(capture, seed)
            assert capture.flush()
    names = sorted(path.name for path in (tmp_path / "ring").iterdir())
    assert names == [f"step_{step:06d}-rank_{rank:04d}.parquet" for step in (0, 3, 4) for rank in (0, 1)]
    for capture in captures:
        capture.close()


def test_errors_are_logged_once_and_never_raised(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    capture = RolloutCapture(tmp_path / "file")
    with caplog.at_level(logging.ERROR):
        capture.add(torch.ones(2, 3), {"old_log_prob": torch.zeros(5, 3)})
        capture.add("no tensor", {})  # type: ignore[arg-type]
        add_step(capture, 0)
        capture.close()
    assert sum("rollouts are not kept" in record.message for record in caplog.records) == 1


def test_a_full_disk_loses_steps_only(tmp_path, caplog):
    faults = Faults(28, first=3, count=10**6)
    capture = RolloutCapture(tmp_path / "ring")
    with faulty_disk(tmp_path, faults), caplog.at_level(logging.ERROR):
        faults.happen = True
        for seed in range(4):
            add_step(capture, seed)
        capture.flush()
        faults.happen = False
        capture.close()
    for batch in read_rollout_log(tmp_path / "ring"):
        assert len(batch) == ROWS


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills need fork")
def test_a_killed_job_leaves_a_readable_ring(tmp_path):
    ring = tmp_path / "ring"
    draw = random.Random(0)
    for _ in range(20):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            capture = RolloutCapture(ring, steps=4, max_bytes=5 * ROOM)
            for seed in range(10**6):
                add_step(capture, seed)
                capture.flush()
                os.write(writer, b".")
        os.close(writer)
        for _ in range(draw.randint(1, 4)):
            os.read(reader, 1)
        for _ in range(draw.randint(0, 2000)):  # somewhere in the next write
            pass
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        assert all(len(batch) == ROWS for batch in read_rollout_log(ring))
        assert size_of(ring) <= 5 * ROOM
