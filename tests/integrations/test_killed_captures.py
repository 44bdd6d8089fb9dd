"""The rollouts on disk of TRL and verl jobs that are killed at 20 random points."""

from __future__ import annotations

import os
import random
import signal

import pytest
from test_verl_capture import batch_of
from trl_stand_in import StandInTrainer

from rollcorr import read_rollout_log
from rollcorr.integrations import verl
from rollcorr.integrations.trl import attach
from rollcorr.integrations.verl import capture as verl_capture
from rollcorr.integrations.verl_variables import ROLLOUTS
from rollcorr.monitor.capture import RolloutCapture

STEPS, MOST_BYTES = 4, 400_000


def trl_job(ring, end_step):
    capture = RolloutCapture(ring, steps=STEPS, max_bytes=MOST_BYTES)
    trainer = attach(StandInTrainer(), "measure", keep_rollouts=capture)
    while True:
        trainer._generate_and_score_completions([])
        capture.flush()
        end_step()


def verl_job(ring, end_step):
    setting = os.environ[ROLLOUTS] = f"{ring},steps={STEPS},gib={MOST_BYTES / 2**30}"
    for seed in range(10**6):
        verl.compute_rollout_correction_and_add_to_batch(batch_of(seed), {"rollout_is": "token"})
        verl_capture._capture_of(setting, os.getpid()).flush()
        end_step()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills need fork")
@pytest.mark.parametrize("job", [trl_job, verl_job])
def test_killed_jobs_leave_a_readable_ring(tmp_path, job):
    ring, draw, found = tmp_path / "ring", random.Random(0), 0
    for _ in range(20):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(reader)
                job(ring, lambda to=writer: os.write(to, b"."))
            finally:
                os._exit(1)
        os.close(writer)
        for _ in range(draw.randint(1, 2)):
            assert os.read(reader, 1)
        for _ in range(draw.randint(0, 20_000)):  # somewhere in the next step
            pass
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)

        found = max(found, sum(len(batch) for batch in read_rollout_log(ring)))
        assert len(list(ring.glob("step_*.parquet"))) <= STEPS + 1
        assert sum(path.stat().st_size for path in ring.iterdir()) <= MOST_BYTES
    assert found
