"""Reach a program over pipes: it runs in a process of its own and answers one question at a time, in lines of JSON.

The engine writes a question to the program's standard input, `{"id": 1, "do": "generate", …}`, and reads the answer
from its standard output: `{"id": 1, …}`, or `{"id": 1, "error": "…"}` when it cannot. What it writes to standard error
is kept for error messages. It ends when its input does, so it does not outlive the engine. The program leads a process
group, and what it has started ends with it.

A worker that dies, does not answer in time, or answers something else is ended: a late answer would be taken for the
answer to the next question.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import signal
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rollcorr.config.secrets import redact
from rollcorr.engines.base import EngineAnswerError, EngineUnavailableError

# How many last lines of the program's standard error an error shows.
STDERR_LINES = 20

# How long a program may take to end after its input has ended, before it is killed.
END_SECONDS = 10.0


class WorkerProcess:
    """A running program, and a way to ask it.

    Args:
        command: program and arguments.
        env: environment variables in addition to those of this process.
        name: what errors call it.

    Raises:
        EngineUnavailableError: the program cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        name: str = "worker",
    ) -> None:
        self.name = name
        redact(dict(env or {}))  # a program that fails may print them
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,  # a buffered pipe cannot be closed while a thread is stuck writing to it
                env={**os.environ, **(env or {})},
                start_new_session=True,  # Ctrl-C asks the trainer to stop after a step, which needs the engine alive
            )
        except OSError as error:
            raise EngineUnavailableError(f"the {name} {command[0]!r} cannot be started: {error}") from error

        self._asked = 0
        self._answers: queue.Queue[bytes | None] = queue.Queue()
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)

        # One thread reads each pipe, or the program would block once a pipe is full.
        threads = [
            threading.Thread(target=_read_answers, args=(self._process.stdout, self._answers), daemon=True),
            threading.Thread(target=_read_log, args=(self._process.stderr, self._stderr), daemon=True),
        ]
        for thread in threads:
            thread.start()
        self._end = weakref.finalize(self, _end, self._process, threads)  # also when the interpreter exits

    @property
    def pid(self) -> int:
        """The number of the program's process, and of its group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._end.alive and self._process.poll() is None

    def ask(self, what: str, *, timeout: float, **values: Any) -> dict[str, Any]:  # noqa: ANN401 (any JSON)
        """Ask for `what` and return the answer.

        Args:
            what: the question, for instance "generate".
            timeout: seconds until the whole answer must be here.
            values: what goes with the question; anything that JSON can hold.

        Raises:
            EngineUnavailableError: it is dead, dies, or does not answer in time.
            EngineAnswerError: it answers that it cannot, or its answer does not belong to this question.
        """
        self._asked += 1
        question = json.dumps({"id": self._asked, "do": what, **values}).encode() + b"\n"
        deadline = time.monotonic() + timeout
        if not self.alive:
            raise self._died(what)

        # A thread writes the question: a program that hangs reads nothing, and a full pipe blocks.
        writer = threading.Thread(target=_write, args=(self._process.stdin, question), daemon=True)
        writer.start()

        try:
            line = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            self.close(patience=0.0)
            raise EngineUnavailableError(
                f"the {self.name} did not answer {what!r} within {timeout:g} s and was ended; raise the timeout if it "
                f"may need longer.{self._last_words()}"
            ) from None

        if line is None:
            raise self._died(what)
        return self._checked(what, line)

    def close(self, *, patience: float = END_SECONDS) -> None:
        """End its input, and kill it if it still runs `patience` seconds later. May be called twice."""
        arguments = self._end.detach()
        if arguments is not None:
            _end(*arguments[2], patience=patience)

    def _checked(self, what: str, line: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(line)
            known = isinstance(answer, dict) and answer.pop("id") == self._asked
        except (ValueError, KeyError):
            known = False

        if not known:
            self.close(patience=0.0)
            raise EngineAnswerError(
                f"the {self.name} answered {what!r} with {line[:200]!r}, which is no answer to it; it was ended."
                f"{self._last_words()}"
            )
        if "error" in answer:
            raise EngineAnswerError(f"the {self.name} could not {what}: {answer['error']}")
        return dict(answer)

    def _died(self, what: str) -> EngineUnavailableError:
        self.close()
        code = self._process.returncode
        return EngineUnavailableError(
            f"the {self.name} died when asked to {what} (exit code {code}).{self._last_words()}"
        )

    def _last_words(self) -> str:
        return " Its last lines:\n" + "\n".join(self._stderr) if self._stderr else ""


def _read_answers(stream: io.FileIO, answers: queue.Queue[bytes | None]) -> None:
    with io.BufferedReader(stream) as lines:
        for line in lines:
            if line.endswith(b"\n"):  # without it the program died within a line, and half an answer is none
                answers.put(line)
    answers.put(None)


def _read_log(stream: io.FileIO, lines: deque[str]) -> None:
    with io.BufferedReader(stream) as written:
        for line in written:
            lines.append(line.decode(errors="replace").rstrip())


def _write(stream: io.FileIO, question: bytes) -> None:
    rest = memoryview(question)
    try:
        while rest:
            rest = rest[stream.write(rest) :]
    except (OSError, ValueError):  # the program is dead or was ended; whoever waits for the answer learns of it
        return


def _end(process: subprocess.Popen[bytes], threads: list[threading.Thread], *, patience: float = END_SECONDS) -> None:
    """Close the input, wait, kill the program's group, and read its pipes to their end."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)

    # What the program has started may outlive it, and would hold its pipes open.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for thread in threads:  # each closes the pipe that it reads
        thread.join(END_SECONDS)
