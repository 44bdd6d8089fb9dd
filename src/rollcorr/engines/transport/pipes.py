"""Talk to a worker process over pipes, one request at a time, in lines of JSON.

The engine writes a request to the worker's standard input, `{"id": 1, "do": "generate", …}`, and reads the answer
from its standard output: `{"id": 1, …}`, or `{"id": 1, "error": "…"}` after a failure. The last lines of its standard
error are kept for error messages. The worker leads a process group, and its child processes end with it. It should
end when its input does, so that it does not outlive a killed engine.

A worker that dies, times out, or sends an unexpected answer is killed: a late answer could be mistaken for the
answer to the next request.
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

# Number of last lines of the worker's standard error in an error.
STDERR_LINES = 20

# Seconds that an unresponsive worker gets to exit and to empty its pipes before it is killed.
END_SECONDS = 10.0


class WorkerProcess:
    """A worker process that answers requests.

    Args:
        command: program and arguments.
        env: environment variables in addition to the inherited ones; optional.
        name: the worker's name in errors.

    Raises:
        EngineUnavailableError: the worker cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        name: str = "worker",
    ) -> None:
        self.name = name
        redact(dict(env or {}))  # a failing worker may print them
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                env={**os.environ, **(env or {})},
                start_new_session=True,  # Ctrl-C stops the trainer after a step, which needs the engine alive
            )
        except OSError as error:
            raise EngineUnavailableError(f"the {name} {command[0]!r} cannot be started: {error}") from error

        # The worker would block once the pipe of its log is full.
        self._log: deque[str] = deque(maxlen=STDERR_LINES)
        reader = threading.Thread(target=_read_log, args=(self._process.stderr, self._log), daemon=True)
        reader.start()
        self._asked = 0
        self._kill_worker = weakref.finalize(
            self, _kill_worker, self._process, reader
        )  # also when the interpreter exits

    @property
    def alive(self) -> bool:
        """Return whether the worker accepts requests."""
        return self._kill_worker.alive and self._process.poll() is None

    def ask(self, what: str, *, timeout: float, **values: Any) -> dict[str, Any]:  # noqa: ANN401 (any JSON)
        """Send a request and return the answer.

        Args:
            what: name of the request, for instance "generate".
            timeout: seconds until the complete answer must have arrived.
            values: JSON fields of the request.

        Raises:
            EngineUnavailableError: the worker is dead, dies, or times out.
            EngineAnswerError: the worker reports a failure, or its answer does not match this request.
        """
        self._asked += 1
        question = json.dumps({"id": self._asked, "do": what, **values})
        if not self.alive:
            raise self._worker_died_error(what)

        # In a separate thread: a hung worker does not read, and a full pipe blocks.
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_write_and_read_line, args=(self._process, question, lines), daemon=True).start()
        try:
            line = lines.get(timeout=timeout)
        except queue.Empty:
            self.close()
            raise EngineUnavailableError(
                f"the {self.name} did not answer {what!r} within {timeout:g} s and was ended; raise the timeout if it "
                f"may need longer.{self._last_log_lines()}"
            ) from None

        # A line without a newline means that the worker died while it wrote: discard the partial answer.
        if not line.endswith("\n"):
            raise self._worker_died_error(what)
        try:
            answer: dict[str, Any] = json.loads(line)
            if answer.pop("id") != self._asked:
                raise ValueError("the answer to another question")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self.close()
            raise EngineAnswerError(
                f"the {self.name} answered {what!r} with {line[:200]!r}, which is no answer to it; it was ended."
                f"{self._last_log_lines()}"
            ) from error
        if "error" in answer:
            raise EngineAnswerError(f"the {self.name} could not {what}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Kill the worker and its child processes. Safe to call twice."""
        self._kill_worker()

    def _worker_died_error(self, what: str) -> EngineUnavailableError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self.close()
        code = self._process.returncode
        return EngineUnavailableError(
            f"the {self.name} died when asked to {what} (exit code {code}).{self._last_log_lines()}"
        )

    def _last_log_lines(self) -> str:
        return " Its last lines:\n" + "".join(self._log).rstrip() if self._log else ""


def _read_log(stream: IO[str], log: deque[str]) -> None:
    with stream:
        log.extend(stream)


def _write_and_read_line(process: Any, question: str, lines: queue.SimpleQueue[str]) -> None:  # noqa: ANN401 (a Popen of pipes)
    """Write a request and read one line; an empty line means that the worker is dead."""
    try:
        print(question, file=process.stdin, flush=True)
        lines.put(process.stdout.readline())
    except (OSError, ValueError):
        lines.put("")


def _kill_worker(process: Any, reader: threading.Thread) -> None:  # noqa: ANN401 (a Popen of pipes)
    """Kill the worker's process group, and close its pipes."""
    # Child processes may outlive the worker and keep its pipes open.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    reader.join(END_SECONDS)  # closes the pipe that it reads
    process.stdout.close()
    with contextlib.suppress(OSError):
        process.stdin.close()
