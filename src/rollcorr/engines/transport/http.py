"""Reach a server over HTTP: many JSON requests at once, waits and retries, and all of a batch or nothing.

What a fault becomes:

- no connection, HTTP 408, 425, 429, 502, 503, 504: the server is away. It is asked again, ever less often, until it
  answers or has been away for `wait_minutes`; then `EngineUnavailableError`. A `Retry-After` is followed;
- a connection that breaks before the first byte of an answer: the server is asked for "/". If that breaks as well, it
  is away behind a proxy or tunnel that takes connections for it;
- any other broken connection, no byte for `timeout` seconds, any other HTTP 5xx: tried again `retries` times, then
  `EngineUnavailableError`;
- HTTP 4xx or a redirect: `EngineAnswerError` with the server's text, at once, because the request would fail again;
- a body that is no JSON, or longer than `max_answer_bytes`: `EngineAnswerError`, at once.

A redirect is never followed. A POST may become a GET on the way, and what the headers hold, such as a key, would reach
a server that nobody named.

A request may be sent more than once, so it should mean the same each time: give generations a seed.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rollcorr.config.checks import check_integer, check_number
from rollcorr.engines.base import EngineAnswerError, EngineError, EngineUnavailableError
from rollcorr.engines.transport import waiting
from rollcorr.engines.transport.answer_body import READ_FOR_SECRETS, parse_json, printable, read_body
from rollcorr.engines.transport.connections import Connections, read_address

# What says that a server, or the proxy before it, cannot answer now but will.
AWAY = frozenset({408, 425, 429, 502, 503, 504})

# How long the question may take whether a server behind a broken connection is there, seconds.
PROBE_SECONDS = 10.0

# What an answer may have at most, unless the caller says otherwise.
MAX_ANSWER_BYTES = 32_000_000


class _Request(NamedTuple):
    method: str
    path: str
    body: object


class _PassingError(Exception):
    """What may be otherwise the next time.

    Args:
        reason: what happened.
        is_away: the server did not take the request.
        retry_after: seconds that the server asks to wait.
    """

    def __init__(self, reason: str, *, is_away: bool, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_away = is_away
        self.retry_after = retry_after


class _Batch:
    """What the requests of one call share: a deadline, the server's absence, and an end for all."""

    def __init__(self, place: str, *, deadline_minutes: float, wait_minutes: float) -> None:
        self.absence = waiting.Absence(place, budget=60 * wait_minutes)
        self.ended = threading.Event()
        self._minutes = deadline_minutes
        self._deadline = waiting.monotonic() + 60 * deadline_minutes

    @property
    def seconds_left(self) -> float:
        return self._deadline - waiting.monotonic()

    def check(self) -> None:
        """Raise once the batch is over."""
        if self.ended.is_set():
            raise EngineUnavailableError("the batch was given up")  # in a thread that nobody listens to any more
        if self.seconds_left <= 0:
            raise EngineUnavailableError(
                f"{self.absence.place} did not finish the batch within deadline_minutes, {self._minutes:g}; nothing of "
                "it is used. Ask for less at a time, or raise deadline_minutes"
            )


class JsonClient:
    """POST and GET JSON, with waits and retries.

    Proxies of the environment are not used: an engine runs on a machine of your own. Ctrl-C ends any call at once.

    Args:
        url: where the server is, for instance "http://localhost:30000". A user and password in it, and a query such as
            `?api_key=…`, are sent with each request and appear in no error.
        timeout: seconds to wait for the next byte. A server may be silent until a response is complete, so allow for
            the longest one.
        retries: how often a request is sent again after a broken connection, a silence, or an HTTP 500.
        backoff: seconds before the first retry; they double with each one, up to 30.
        wait_minutes: how long the server may be away during a call; 0 for no wait.
        deadline_minutes: how long a call may take, with all its requests and waits.
        max_answer_bytes: how long one answer may be, unpacked.
        concurrency: how many requests of `post_all` are under way at a time.
        headers: sent with each request, such as an API key. They appear in no error.

    Attributes:
        url: the address without user, password and query, which may be secret.
        faults: how many faults were waited out so far. While it does not change, the server was not away.

    Raises:
        ImportError: httpx is not installed.
        TypeError: a value is of the wrong type.
        ValueError: a number is out of range, `url` is no HTTP address, or a header holds what HTTP cannot carry.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 600.0,
        retries: int = 3,
        backoff: float = 0.5,
        wait_minutes: float = 30.0,
        deadline_minutes: float = 120.0,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        concurrency: int = 64,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        address = read_address(url)
        check_number("timeout", timeout, above=0)
        check_integer("retries", retries, at_least=0)
        check_number("backoff", backoff, at_least=0)
        check_number("wait_minutes", wait_minutes, at_least=0)
        check_number("deadline_minutes", deadline_minutes, above=0)
        check_integer("max_answer_bytes", max_answer_bytes, at_least=1)
        check_integer("concurrency", concurrency, at_least=1)
        _check_headers(headers or {})
        try:
            import httpx
        except ImportError as error:
            raise ImportError("engines behind HTTP need httpx: pip install 'rollcorr[http]'") from error

        self.url = address.url.rstrip("/")
        self.timeout = timeout
        self.retries = retries
        self.backoff = backoff
        self.wait_minutes = wait_minutes
        self.deadline_minutes = deadline_minutes
        self.max_answer_bytes = max_answer_bytes
        self.concurrency = concurrency
        self.faults = 0

        self._not_connected: tuple[type[Exception], ...] = (httpx.ConnectError, httpx.ConnectTimeout)
        self._cut: type[Exception] = httpx.NetworkError
        self._broken: type[Exception] = httpx.TransportError
        self._connections = Connections(address, count=concurrency, headers=headers or {})
        self._close = weakref.finalize(self, self._connections.close)  # a client that nobody closes leaves no socket

    def __enter__(self) -> JsonClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. May be called twice."""
        self._close()

    def get(self, path: str) -> Any:  # noqa: ANN401 (any JSON)
        """GET `path` and return the JSON of the answer.

        Raises:
            EngineUnavailableError: no answer after all waits and retries, or before the deadline; or the run was asked
                to stop while the server was away.
            EngineAnswerError: the answer is a refusal, too long or no JSON.
        """
        return self._all([_Request("GET", path, None)])[0]

    def post(self, path: str, body: object) -> Any:  # noqa: ANN401 (any JSON)
        """POST `body` as JSON to `path` and return the JSON of the answer. Raises as `get`."""
        return self._all([_Request("POST", path, body)])[0]

    def post_all(self, path: str, bodies: Sequence[object]) -> list[Any]:
        """POST every body and return the answers in their order: all, or the first error.

        After an error no further request is sent or retried, and the requests under way are cut off. Raises as `get`.

        Args:
            path: below the server's address.
            bodies: what is sent, as JSON.
        """
        return self._all([_Request("POST", path, body) for body in bodies])

    def _all(self, requests: Sequence[_Request]) -> list[Any]:
        """The answers to a batch, from threads that nothing ever waits for.

        A pool of `concurrent.futures` waits for its threads, at the latest when Python ends: a request that hangs would
        hold up Ctrl-C for as long as its time-out. The caller's thread only ever waits for a queue.
        """
        if not self._close.alive:
            raise EngineError(f"the client of {self.url} was closed; make a new one")
        batch = _Batch(self.url, deadline_minutes=self.deadline_minutes, wait_minutes=self.wait_minutes)
        waiting_requests: queue.SimpleQueue[tuple[int, _Request]] = queue.SimpleQueue()
        for numbered in enumerate(requests):
            waiting_requests.put(numbered)
        results: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()

        def work() -> None:
            while not batch.ended.is_set():
                try:
                    number, request = waiting_requests.get_nowait()
                except queue.Empty:
                    return
                try:
                    results.put((number, self._answer(request, batch), None))
                except BaseException as error:  # raised again by the caller's thread
                    results.put((number, None, error))

        answers: dict[int, Any] = {}
        try:
            for _ in range(min(self.concurrency, len(requests))):
                threading.Thread(target=work, name="rollcorr-engine", daemon=True).start()
            while len(answers) < len(requests):
                try:
                    number, answer, error = results.get(timeout=waiting.SLICE)
                except queue.Empty:
                    # A server that sends a byte now and then never lets a thread see the deadline.
                    batch.check()
                    continue
                if error is not None:
                    raise error
                answers[number] = answer
        finally:
            batch.ended.set()
            if len(answers) < len(requests):
                self._connections.cut()
        return [answers[number] for number in range(len(requests))]

    def _answer(self, request: _Request, batch: _Batch) -> Any:  # noqa: ANN401 (any JSON)
        """The answer to one request, after what may pass has passed."""
        where = f"{request.method} {self.url}{request.path}"
        tries, retries_left, delay = 0, self.retries, self.backoff
        while True:
            batch.check()
            try:
                answer = self._exchange(request, batch, where)
                batch.absence.end()
                return answer
            except _PassingError as passing:
                fault, cause = passing, passing.__cause__
            tries += 1
            self.faults += 1
            last = f"at last with {fault.reason}"

            # A server that was reached and broke may break over this very request: such tries are counted.
            pause = max(delay, fault.retry_after)
            if fault.is_away:
                batch.absence.begin(fault.reason)
                budget_left = batch.absence.budget - batch.absence.seconds
                if budget_left <= 0:
                    raise EngineUnavailableError(
                        f"{where} failed {tries} times, {last}; the engine has been away for {self.wait_minutes:g} "
                        "minutes, all of wait_minutes. Check that it lives and that the url is right, or raise "
                        "wait_minutes"
                    ) from cause
                pause = min(pause, budget_left)
            elif retries_left == 0:
                raise EngineUnavailableError(
                    f"{where} failed {tries} times, {last}; check that the engine lives and that the timeout, "
                    f"{self.timeout:g} s, allows for its longest response"
                ) from cause
            else:
                retries_left -= 1

            delay = min(2 * delay, waiting.LONGEST_DELAY)
            if not batch.absence.pause(min(pause, max(batch.seconds_left, 0.0)), batch.ended.is_set):
                batch.check()
                raise EngineUnavailableError(
                    f"{where} failed {tries} times, {last}; the run was asked to stop before the engine was back"
                ) from cause

    def _exchange(self, request: _Request, batch: _Batch, where: str) -> Any:  # noqa: ANN401 (any JSON)
        """Send a request once.

        Raises:
            _PassingError: it may be sent again.
            EngineAnswerError: it would fail again.
        """
        limit = self.max_answer_bytes
        timeout = min(self.timeout, max(batch.seconds_left, waiting.SLICE))
        has_begun = False
        try:
            with self._connections.stream(*request, timeout=timeout) as response:
                has_begun = True
                status, headers = response.status_code, response.headers
                refused = not 200 <= status < 300
                body = read_body(
                    response,
                    limit=READ_FOR_SECRETS if refused else limit,
                    between=batch.check,
                    where=where,
                    only_start=refused,
                )
        except self._broken as error:
            reason = f"{type(error).__name__} ({printable(str(error))})".replace(" ()", "")
            is_away = isinstance(error, self._not_connected)
            if not (is_away or has_begun) and self._is_without_answer(error):
                batch.check()  # a batch that is over asks nothing more
                is_away = self._is_nobody_there(timeout)
            raise _PassingError(reason, is_away=is_away) from error
        if not refused:
            return parse_json(body, limit=limit, where=where)

        text = printable(body.decode("utf-8", "replace"))
        if status in AWAY or status >= 500:
            is_away = status in AWAY
            retry_after = waiting.retry_after_seconds(headers.get("retry-after")) if is_away else 0.0
            raise _PassingError(f"HTTP {status}: {text}", is_away=is_away, retry_after=retry_after)
        batch.absence.end()
        if 300 <= status < 400:
            raise EngineAnswerError(
                f"{where} was answered with a redirect, HTTP {status}, to {_origin(headers.get('location'))}. Redirects"
                " are not followed, because a key in the headers would go there too: set url to where the server is"
            )
        raise EngineAnswerError(f"{where} was refused, HTTP {status}: {text}")

    def _is_nobody_there(self, timeout: float) -> bool:
        """Whether the simplest question breaks too, so that what broke is not the fault of one request.

        A proxy or a tunnel takes connections for a server that is dead, and closes them.
        """
        try:
            with self._connections.stream("GET", "/", None, timeout=min(timeout, PROBE_SECONDS)) as response:
                return response.status_code in AWAY
        except self._broken as error:
            return isinstance(error, self._not_connected) or self._is_without_answer(error)

    def _is_without_answer(self, error: Exception) -> bool:
        """Whether the connection ended without an answer; bytes that are no HTTP are one, from a wrong server."""
        return isinstance(error, self._cut) or "without sending a response" in str(error)


def _origin(location: str | None) -> str:
    """Where a redirect leads, without what may be secret in it."""
    try:
        parts = urlsplit(location or "")
    except ValueError:
        return "an address that cannot be read"
    host = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.netloc else ""
    return printable(f"{host}{parts.path}") or "nowhere"


def _check_headers(headers: Mapping[str, str]) -> None:
    """Refuse what HTTP cannot carry here, because httpx would show the value in its error."""
    if not isinstance(headers, Mapping):
        raise TypeError(f"headers must be a mapping of names to texts, got one of type {type(headers).__name__}")
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"the header {name!r} must be a text with a text as its name; quote it in YAML")
        if not (value.isascii() and value.isprintable() and value == value.strip() and name.isascii() and name):
            raise ValueError(
                f"the value of the header {name!r} has a character that HTTP headers cannot hold, or a space or line "
                "break around it; take it out"
            )
