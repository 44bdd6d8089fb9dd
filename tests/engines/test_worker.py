"""The worker process against programs that answer, fail, die, hang and babble."""

import gc
import os
import signal
import sys
import textwrap
import threading
import time

import pytest

from rollcorr.engines.base import EngineAnswerError, EngineUnavailableError
from rollcorr.engines.transport.pipes import WorkerProcess

ANSWER_SECONDS = 300  # a busy machine may take that long to start Python
ECHO = """
    import json, os, sys
    for line in sys.stdin:
        question = json.loads(line)
        if question["do"] == "die":
            print("so it ends", file=sys.stderr, flush=True)
            os._exit(3)
        if question["do"] == "refuse":
            answer = {"error": "ValueError: too long"}
        elif question["do"] == "half":
            sys.stdout.write('{"id": 1, "echo"')
            sys.stdout.flush()
            os._exit(0)
        else:
            answer = {"echo": question.get("value"), "pid": os.getpid(), "variable": os.environ.get("COLOUR")}
        print(json.dumps({"id": question["id"], **answer}), flush=True)
"""


def start(program=ECHO, **options):
    return WorkerProcess([sys.executable, "-S", "-c", textwrap.dedent(program)], name="parrot", **options)


@pytest.fixture
def worker():
    process = start()
    yield process
    process.close()


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_question_is_answered_and_the_next_one_too(worker):
    assert worker.ask("echo", timeout=ANSWER_SECONDS, value=[1, 2.5, "é"])["echo"] == [1, 2.5, "é"]
    assert worker.ask("echo", timeout=ANSWER_SECONDS, value=None)["echo"] is None
    assert worker.alive


def test_the_program_gets_variables_beside_those_of_this_process(monkeypatch):
    monkeypatch.setenv("COLOUR", "red")
    for env, colour in ((None, "red"), ({"COLOUR": "blue"}, "blue")):
        process = start(env=env)
        assert process.ask("echo", timeout=ANSWER_SECONDS)["variable"] == colour
        process.close()


def test_a_refusal_is_an_error_and_the_worker_goes_on(worker):
    with pytest.raises(EngineAnswerError, match="the parrot could not refuse: ValueError: too long"):
        worker.ask("refuse", timeout=ANSWER_SECONDS)
    assert worker.ask("echo", timeout=ANSWER_SECONDS, value=1)["echo"] == 1


def test_death_is_told_with_the_exit_code_and_the_last_words(worker):
    with pytest.raises(EngineUnavailableError, match=r"(?s)died when asked to die \(exit code 3\).*so it ends"):
        worker.ask("die", timeout=ANSWER_SECONDS)
    assert not worker.alive
    with pytest.raises(EngineUnavailableError, match="died when asked to echo"):
        worker.ask("echo", timeout=ANSWER_SECONDS)


def test_a_worker_that_was_killed_between_questions_is_dead(worker):
    pid = worker.ask("echo", timeout=ANSWER_SECONDS)["pid"]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailableError, match=r"exit code -9"):
        worker.ask("echo", timeout=ANSWER_SECONDS)


def test_half_an_answer_is_none(worker):
    with pytest.raises(EngineUnavailableError, match="died when asked to half"):
        worker.ask("half", timeout=ANSWER_SECONDS)


@pytest.mark.parametrize(
    "line", ["nonsense", "[1, 2]", '{"id": 7}', '{"echo": 1}', "null", '{"id": 1, "x": '], ids=lambda line: line
)
def test_what_is_no_answer_to_the_question_ends_the_worker(line):
    process = start(f"import sys\nsys.stdin.readline()\nprint({line!r}, flush=True)\nsys.stdin.readline()")
    with pytest.raises(EngineAnswerError, match="which is no answer to it; it was ended"):
        process.ask("echo", timeout=ANSWER_SECONDS)
    assert not process.alive
    with pytest.raises(EngineUnavailableError):
        process.ask("echo", timeout=ANSWER_SECONDS)


def test_a_worker_that_hangs_is_ended_for_its_answer_would_be_taken_for_the_next():
    process = start("import sys, time\nprint('thinking', file=sys.stderr, flush=True)\ntime.sleep(600)")
    begun = time.monotonic()
    with pytest.raises(EngineUnavailableError, match=r"did not answer 'echo' within 0\.5 s and was ended; raise the"):
        process.ask("echo", timeout=0.5)
    assert time.monotonic() - begun < 300, "the program sleeps for twice as long"
    assert gone(process._process.pid)


def test_a_worker_that_reads_nothing_does_not_block_the_engine():
    process = start("import time\ntime.sleep(600)")
    with pytest.raises(EngineUnavailableError, match="did not answer"):
        process.ask("echo", timeout=0.5, value="x" * 1_000_000)  # more than the buffer of a pipe
    assert gone(process._process.pid)


def test_a_long_log_neither_blocks_nor_is_kept():
    process = start(
        "import os, sys\nsys.stdin.readline()\nfor i in range(20000): print('line', i, file=sys.stderr)\nos._exit(1)"
    )
    with pytest.raises(EngineUnavailableError) as error:
        process.ask("echo", timeout=ANSWER_SECONDS)
    assert "line 19999" in str(error.value)
    assert "line 19979" not in str(error.value)


def test_closing_ends_the_program_and_closing_again_does_nothing():
    process = start()
    process.ask("echo", timeout=ANSWER_SECONDS)
    process.close()
    process.close()
    assert gone(process._process.pid)


def test_a_worker_that_nobody_holds_is_ended():
    process = start()
    pid = process.ask("echo", timeout=ANSWER_SECONDS)["pid"]
    del process
    gc.collect()
    assert gone(pid)


def test_what_the_program_started_ends_with_it():
    before = set(threading.enumerate())
    process = start("""
        import json, subprocess, sys
        child = subprocess.Popen(["sleep", "600"])
        for line in sys.stdin:
            print(json.dumps({"id": json.loads(line)["id"], "child": child.pid}), flush=True)
    """)
    process.ask("start", timeout=ANSWER_SECONDS)
    process.close()
    # Each of them reads a pipe to its end, which the child keeps open while it lives.
    assert not [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]


def test_a_program_that_is_not_there_is_unavailable():
    with pytest.raises(EngineUnavailableError, match="'/no/such/python' cannot be started"):
        WorkerProcess(["/no/such/python"], name="parrot")
