"""Reach a program over pipes: it runs in a process of its own and answers one question at a time, in lines of JSON.

The engine writes a question to the program's standard input, `{"id": 1, "do": "generate", …}`, and reads the answer
from its standard output: `{"id": 1, …}`, or `{"id": 1, "error": "…"}` when it cannot. The last lines that it writes to
standard error are kept for error messages. The program leads a process group, and what it has started ends with it. It
should end when its input does, so that it does not outlive an engine that was killed.

A worker that dies, does not answer in time, or answers something else is ended: a late answer would be taken for the
answer to the next question.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO, Any

from rollcorr.config.secrets import redact
from rollcorr.engines.base import EngineAnswerError, EngineUnavailableError

# How many last lines of the program's standard error an error shows.
STDERR_LINES = 20

# How long a program that stops to answer may take to end by itself, and its pipes to be empty, before it is killed.
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
                encoding="utf-8",
                errors="replace",
                env={**os.environ, **(env or {})},
                start_new_session=True,  # Ctrl-C asks the trainer to stop after a step, which needs the engine alive
            )
        except OSError as error:
            raise EngineUnavailableError(f"the {name} {command[0]!r} cannot be started: {error}") from error

        # The program would block once the pipe of its log is full.
        self._log: deque[str] = deque(maxlen=STDERR_LINES)
        reader = threading.Thread(target=_read_log, args=(self._process.stderr, self._log), daemon=True)
        reader.start()
        self._asked = 0
        self._end = weakref.finalize(self, _end, self._process, reader)  # also when the interpreter exits

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
        question = json.dumps({"id": self._asked, "do": what, **values})
        if not self.alive:
            raise self._died(what)

        # In a thread of its own: a program that hangs reads nothing, and a full pipe blocks.
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_exchange, args=(self._process, question, lines), daemon=True).start()
        try:
            line = lines.get(timeout=timeout)
        except queue.Empty:
            self.close()
            raise EngineUnavailableError(
                f"the {self.name} did not answer {what!r} within {timeout:g} s and was ended; raise the timeout if it "
                f"may need longer.{self._last_words()}"
            ) from None

        # Without its end the program died within a line, and half an answer is none.
        if not line.endswith("\n"):
            raise self._died(what)
        try:
            answer: dict[str, Any] = json.loads(line)
            if answer.pop("id") != self._asked:
                raise ValueError("the answer to another question")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self.close()
            raise EngineAnswerError(
                f"the {self.name} answered {what!r} with {line[:200]!r}, which is no answer to it; it was ended."
                f"{self._last_words()}"
            ) from error
        if "error" in answer:
            raise EngineAnswerError(f"the {self.name} could not {what}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the program and all that it has started. May be called twice."""
        self._end()

    def _died(self, what: str) -> EngineUnavailableError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self.close()
        code = self._process.returncode
        return EngineUnavailableError(
            f"the {self.name} died when asked to {what} (exit code {code}).{self._last_words()}"
        )

    def _last_words(self) -> str:
        return " Its last lines:\n" + "".join(self._log).rstrip() if self._log else ""


def _read_log(stream: IO[str], log: deque[str]) -> None:
    with stream:
        log.extend(stream)


def _exchange(process: Any, question: str, lines: queue.SimpleQueue[str]) -> None:  # noqa: ANN401 (a Popen of pipes)
    """Write a question and read a line; an empty one where the program is dead."""
    try:
        print(question, file=process.stdin, flush=True)
        lines.put(process.stdout.readline())
    except (OSError, ValueError):
        lines.put("")


def _end(process: Any, reader: threading.Thread) -> None:  # noqa: ANN401 (a Popen of pipes)
    """Kill the program's group, and close its pipes."""
    # What the program has started may outlive it, and would hold its pipes open.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    reader.join(END_SECONDS)  # it closes the pipe that it reads
    process.stdout.close()
    with contextlib.suppress(OSError):
        process.stdin.close()
