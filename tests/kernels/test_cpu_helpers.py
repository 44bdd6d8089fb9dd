"""The threads of the compiled kernel stay between calls. Nobody notices, but for the time."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from processes import run_python

from rollcorr import Correction, correct
from rollcorr.kernels.correction.cpu.library import status

pytestmark = pytest.mark.skipif(status()[0] is None, reason=f"{status()[1]}; `make install` builds it")
TASKS = Path("/proc/self/task")


@pytest.fixture(autouse=True)
def three_threads(threads):
    threads(3)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Several tasks, in which the policies are close."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -2 * torch.rand(40, 4000, generator=generator)
    train = rollout + 0.1 * torch.randn(40, 4000, generator=generator)
    return train, rollout, torch.arange(4000) < torch.randint(1, 4001, (40, 1), generator=generator)


def corrected(seed: int) -> Correction:
    options = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.3"}
    return correct(*batch(seed), impl="cpu", **options)


def equal(a: Correction, b: Correction) -> bool:
    pairs = (a.weights, b.weights), (a.loss_mask, b.loss_mask), (a.statistics.pack(), b.statistics.pack())
    return all(torch.equal(x, y) for x, y in pairs)


def test_calls_at_the_same_time_each_get_their_own_numbers():
    """One call has the helpers; concurrent calls work without."""
    expected = [corrected(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as callers:
        for _ in range(10):
            for found, wanted in zip(callers.map(corrected, range(4)), expected, strict=True):
                assert equal(found, wanted)


@pytest.mark.skipif(not TASKS.exists(), reason="counts the threads of the process where Linux lists them")
def test_calls_share_their_helpers():
    corrected(0)
    before = {task.name for task in TASKS.iterdir()}
    for seed in range(20):
        corrected(seed)
    assert {task.name for task in TASKS.iterdir()} <= before  # those of earlier tests may end meanwhile


def test_more_threads_can_be_had_later(threads):
    expected = corrected(0)
    for count in (1, 2, 5, 3):
        threads(count)
        assert equal(corrected(0), expected)


def test_helpers_calculate_as_their_caller_does(threads):
    """Where tiny numbers become 0 for the caller, they do for the helpers: who took a task changes no bit."""
    tiny = torch.full((400, 4000), -1e-39)
    tensors = 3 * tiny, tiny, torch.ones(400, 4000, dtype=torch.bool)
    corrected(0)  # a helper that starts later has its caller's arithmetic in any case
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush")
    try:
        found = [correct(*tensors, impl="cpu").statistics.pack() for _ in range(10)]
        threads(1)
        alone = correct(*tensors, impl="cpu").statistics.pack()
    finally:
        torch.set_flush_denormal(False)
    assert all(torch.equal(x, alone) for x in found)


def test_details_at_the_same_time_are_those_of_each_batch():
    def worst(seed: int):
        return correct(*batch(seed), impl="cpu", detail=True).worst()

    expected = [worst(seed) for seed in range(3)]
    with ThreadPoolExecutor(3) as callers:
        for _ in range(5):
            assert list(callers.map(worst, range(3))) == expected


FOLDERS = [str(folder) for folder in Path(__file__).parents[:2]]
FORK = """
import os, sys
sys.path[:0] = {folders!r}
import torch
torch.set_num_threads(3)
from rollcorr import correct
from test_cpu_helpers import batch

tensors = batch(0)
expected = correct(*tensors, impl="cpu").weights.numpy().tobytes()
child = os.fork()
if child == 0:  # where torch must not compute: its own threads do not survive a fork
    same = [correct(*tensors, impl="cpu").weights.numpy().tobytes() == expected for _ in range(3)]
    os._exit(0 if all(same) else 1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert correct(*tensors, impl="cpu").weights.numpy().tobytes() == expected
sys.exit(code)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_gets_helpers_of_its_own():
    """A data loader forks after the trainer has corrected a batch. The helpers stay behind, with their lock."""
    program = FORK.format(folders=FOLDERS)
    done = run_python(program, timeout=120)
    assert done.returncode == 0, done.stderr


SIGNAL = """
import signal, sys, time
sys.path[:0] = {folders!r}
import torch
torch.set_num_threads(3)
from rollcorr import correct
from test_cpu_helpers import TASKS, batch

tensors = batch(0)
before = {{int(task.name) for task in TASKS.iterdir()}}  # torch's own are among them
correct(*tensors, impl="cpu")
helpers = [task for task in TASKS.iterdir() if int(task.name) not in before]
for task in helpers:
    for attempt in range(600):  # the C library blocks every signal until a new thread runs
        blocked = next(line for line in (task / "status").read_text().splitlines() if line.startswith("SigBlk"))
        blocks = [int(blocked.split()[1], 16) >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGSEGV)]
        if blocks == [1, 0]:
            break
        time.sleep(0.1)
    assert blocks == [1, 0], blocked
assert helpers
"""


@pytest.mark.skipif(not TASKS.exists(), reason="reads the blocked signals of a thread where Linux shows them")
def test_helpers_leave_signals_to_the_threads_of_python():
    """Except its own fault signals."""
    program = SIGNAL.format(folders=FOLDERS)
    done = run_python(program, timeout=120)
    assert done.returncode == 0, done.stderr
