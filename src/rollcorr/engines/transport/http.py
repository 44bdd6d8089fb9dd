"""HTTP client for a server: concurrent JSON requests, waits and retries; a batch succeeds completely or raises.

How each fault is handled:

- no connection, HTTP 408, 425, 429, 502, 503, 504: the server is away. The client retries with growing delays, until
  the server answers or has been away for `wait_minutes`; then `EngineUnavailableError`. `Retry-After` is honored;
- a connection that breaks before the first byte of an answer: the client requests "/". If that breaks as well, the
  server is away behind a proxy or tunnel that accepts connections for it;
- any other broken connection, no byte for `timeout` seconds, any other HTTP 5xx: retried `retries` times, then
  `EngineUnavailableError`;
- HTTP 4xx or a redirect: `EngineAnswerError` with the server's text, at once, because the request would fail again;
- a body that is not JSON, or longer than `max_answer_bytes`: `EngineAnswerError`, at once.

Redirects are never followed. A redirect may turn a POST into a GET, and would send the headers, which may contain a
key, to an unknown server.

A request may be sent more than once, so it should be idempotent: give generations a seed.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from rollcorr.config.checks import check_integer, check_number
from rollcorr.config.secrets import hide_in_log, redact, redact_text
from rollcorr.engines.base import EngineAnswerError, EngineUnavailableError
from rollcorr.engines.transport import waiting
from rollcorr.engines.transport.answer_body import READ_FOR_SECRETS, parse_json, printable, read_body

try:
    import httpx
except ImportError as missing:
    raise ImportError("engines behind HTTP need httpx: pip install 'rollcorr[http]'") from missing

# Status codes of a server, or of the proxy before it, that is temporarily unavailable.
AWAY = frozenset({408, 425, 429, 502, 503, 504})

# Seconds to wait for a connection; a server that accepts none in time is away.
CONNECT_SECONDS = 30.0

# Timeout, in seconds, of the request that checks whether a server behind a broken connection is up.
PROBE_SECONDS = 10.0

# Default limit of an answer's size.
MAX_ANSWER_BYTES = 32_000_000

# Errors of a connection that the server did not accept.
_CONNECT_ERRORS = (httpx.ConnectError, httpx.ConnectTimeout)


@dataclass(eq=False)
class _TransientError(Exception):
    """A transient failure.

    Attributes:
        reason: description of the failure.
        is_away: the server did not accept the request.
        retry_after: seconds to wait, as requested by a server that is away.
    """

    reason: str
    is_away: bool
    retry_after: float = 0.0


class JsonClient:
    """JSON client with GET and POST, waits and retries.

    Connections last for one call. Proxy settings of the environment are ignored: an engine runs on a machine of your
    own. Ctrl-C ends any call at once.

    Args:
        url: the server's address, for instance "http://localhost:30000". Each request contains its user, password and
            query, such as `?api_key=…`; errors do not.
        timeout: seconds to wait for the next byte. A server may be silent until a response is complete, so allow for
            the longest one.
        retries: how often a request is sent again after a broken connection, a timeout, or an HTTP 5xx other than 502,
            503 and 504.
        backoff: seconds before the first retry; doubles with each retry, up to 30.
        wait_minutes: how long the server may be away during a call; 0 disables the wait.
        deadline_minutes: time limit of a call, with all its requests and waits.
        max_answer_bytes: size limit of one answer, unpacked.
        concurrency: maximum number of concurrent requests of `post_all`.
        headers: sent with each request, such as an API key. Errors do not show them.
        parse: reads the body of an answer; defaults to `parse_json`.

    Attributes:
        url: the address without user, password and query, which may be secret.
        faults: number of transient failures so far. While it is unchanged, the server was not away.

    Raises:
        TypeError: a value has an invalid type.
        ValueError: a number is out of range, `url` is not an HTTP address, or a header contains characters that HTTP
            does not allow.
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
        parse: Callable[..., Any] = parse_json,
    ) -> None:
        self._address = read_address(url)
        self.url = str(self._address.copy_with(username=None, password=None, query=None)).rstrip("/")
        self.timeout = check_number("timeout", timeout, above=0)
        self.retries = check_integer("retries", retries, at_least=0)
        self.backoff = check_number("backoff", backoff, at_least=0)
        self.wait_minutes = check_number("wait_minutes", wait_minutes, at_least=0)
        self.deadline_minutes = check_number("deadline_minutes", deadline_minutes, above=0)
        self.max_answer_bytes = check_integer("max_answer_bytes", max_answer_bytes, at_least=1)
        self.concurrency = check_integer("concurrency", concurrency, at_least=1)
        self._headers = {str(name): str(value) for name, value in (headers or {}).items()}
        for name, value in self._headers.items():  # here, because httpx would show the value in its error
            if not (value.isascii() and value.isprintable() and value == value.strip() and name.isascii() and name):
                raise ValueError(
                    f"the value of the header {name!r} has a character that HTTP headers cannot hold, or a space or "
                    "line break around it; take it out"
                )
        self._tls = httpx.create_ssl_context(trust_env=False)  # once: as slow as a batch of requests
        self._parse = parse
        self.faults = 0

    def get(self, path: str) -> Any:  # noqa: ANN401 (any JSON)
        """GET `path` and return the JSON of the answer.

        Raises:
            EngineUnavailableError: no answer after all waits and retries, or before the deadline; or the run was
                stopped while the server was away.
            EngineAnswerError: the server refused, or its answer is over the limit or not JSON.
        """
        return self._request_all("GET", path, [None])[0]

    def post(self, path: str, body: object) -> Any:  # noqa: ANN401 (any JSON)
        """POST `body` as JSON to `path` and return the JSON of the answer. Raises as `get`."""
        return self._request_all("POST", path, [body])[0]

    def post_all(self, path: str, bodies: Sequence[object]) -> list[Any]:
        """POST every body and return the answers in their order, or raise the first error.

        After an error no further request is sent or retried, and running requests are aborted. Raises as `get`.

        Args:
            path: below the server's address.
            bodies: JSON values, one per request.
        """
        return self._request_all("POST", path, bodies)

    def _request_all(self, method: str, path: str, bodies: Sequence[object]) -> list[Any]:
        """Return the answers to a batch of requests from a thread pool, without waiting for hung threads."""
        batch = waiting.RequestBatch(self.url, deadline_minutes=self.deadline_minutes, wait_minutes=self.wait_minutes)
        connections = _Connections(
            self._address, self._headers, tls=self._tls, count=self.concurrency, ended=batch.ended
        )
        pool = futures.ThreadPoolExecutor(self.concurrency, thread_name_prefix="rollcorr-engine")
        answers: list[futures.Future[Any]] = []
        try:
            answers += [
                pool.submit(self._request_with_retries, method, path, body, batch, connections) for body in bodies
            ]
            pending = set(answers)
            while pending:
                batch.check()  # a thread never reaches the deadline while its server keeps sending bytes
                done, pending = futures.wait(pending, timeout=waiting.SLICE, return_when=futures.FIRST_EXCEPTION)
                for answer in done:
                    answer.result()
            return [answer.result() for answer in answers]
        finally:
            batch.ended.set()
            pool.shutdown(wait=False, cancel_futures=True)

            # Threads must stop using their sockets before these are closed: the OS may reuse the number of a closed
            # socket, and a thread would then wait for the wrong connection.
            connections.cut()
            futures.wait(answers, timeout=waiting.SLICE)
            connections.client.close()

    def _request_with_retries(
        self, method: str, path: str, body: object, batch: waiting.RequestBatch, connections: _Connections
    ) -> Any:  # noqa: ANN401 (any JSON)
        """Return the response, retrying transient failures."""
        where = f"{method} {self.url}{path}"
        retries_left, delay = self.retries, self.backoff
        for tries in itertools.count(1):
            batch.check()
            try:
                answer = self._request_once(method, path, body, batch, connections, where)
                batch.note_answer()
                return answer
            except _TransientError as passing:
                fault, cause = passing, passing.__cause__
            self.faults += 1
            failed = f"{where} failed {tries} times, at last with {fault.reason}; "

            # A connected server may break because of this very request: such tries are counted.
            pause = delay
            if fault.is_away:
                budget_left = batch.note_absence(fault.reason)
                if budget_left <= 0:
                    raise EngineUnavailableError(
                        f"{failed}the engine has been away for {self.wait_minutes:g} minutes, all of wait_minutes. "
                        "Check that it lives and that the url is right, or raise wait_minutes"
                    ) from cause
                pause = min(max(delay, fault.retry_after), budget_left)
            elif retries_left == 0:
                raise EngineUnavailableError(
                    f"{failed}check that the engine lives and that the timeout, {self.timeout:g} s, allows for its "
                    "longest response"
                ) from cause
            else:
                retries_left -= 1

            delay = min(2 * delay, waiting.LONGEST_DELAY)
            if not batch.pause(pause):
                batch.check()
                raise EngineUnavailableError(f"{failed}the run was asked to stop before the engine was back") from cause
        raise AssertionError("every try returns, raises or waits for the next one")

    def _request_once(
        self, method: str, path: str, body: object, batch: waiting.RequestBatch, connections: _Connections, where: str
    ) -> Any:  # noqa: ANN401 (any JSON)
        """Send a request once, without retries.

        Raises:
            _TransientError: a retry may succeed.
            EngineAnswerError: a retry would fail again.
        """
        timeout = min(self.timeout, max(batch.seconds_left, waiting.SLICE))
        has_begun = False
        try:
            with connections.stream(method, path, body, timeout=timeout) as response:
                has_begun = True
                status, headers = response.status_code, response.headers
                refused = not 200 <= status < 300
                limit = READ_FOR_SECRETS if refused else self.max_answer_bytes
                content, problem = read_body(response, limit=limit, between=batch.check)
        except httpx.TransportError as error:
            reason = f"{type(error).__name__} ({printable(str(error))})".replace(" ()", "")
            is_away = isinstance(error, _CONNECT_ERRORS)
            if not (is_away or has_begun) and _ended_without_answer(error):
                batch.check()  # stop sending once the batch is over
                is_away = _is_server_down(connections, timeout)
            raise _TransientError(reason, is_away) from error
        if not refused:
            return self._parse(content, problem, limit=limit, where=where)

        text = printable(content.decode("utf-8", "replace"))
        if status in AWAY or status >= 500:
            retry_after = waiting.retry_after_seconds(headers.get("retry-after"))
            raise _TransientError(f"HTTP {status}: {text}", status in AWAY, retry_after)
        batch.note_answer()
        if 300 <= status < 400:
            place = printable(headers.get("location", "nowhere"))
            raise EngineAnswerError(
                f"{where} was answered with a redirect, HTTP {status}, to {place}. Redirects are not followed, because "
                "a key in the headers would go there too: set url to where the server is"
            )
        raise EngineAnswerError(f"{where} was refused, HTTP {status}: {text}")


class _Connections:
    """The connections of one batch, which `cut` can close while other threads wait on them.

    A thread that waits for a byte cannot be interrupted, but a shutdown of its socket ends the wait. The sockets come
    from httpx's trace of the connections that it opens.

    Args:
        address: the server, with user, password and query, which each request contains.
        headers: sent with each request, never to a different server: redirects are not followed.
        tls: the trusted certificates.
        count: maximum number of connections.
        ended: event that is set before the connections are cut.
    """

    def __init__(
        self,
        address: httpx.URL,
        headers: Mapping[str, str],
        *,
        tls: ssl.SSLContext,
        count: int,
        ended: threading.Event,
    ) -> None:
        self._base, self._query = str(address.copy_with(query=None)).rstrip("/"), address.params
        self._ended = ended
        self._sockets: list[socket.socket] = []
        self.client = httpx.Client(
            headers={"Accept-Encoding": "gzip", **headers},
            verify=tls,
            limits=httpx.Limits(max_connections=count),
            follow_redirects=False,
            trust_env=False,  # no proxy or .netrc from the environment
        )
        hide_in_log("httpx")  # its log has URLs, which may contain keys

    def stream(self, method: str, path: str, body: object, *, timeout: float) -> AbstractContextManager[httpx.Response]:
        """Send a request; read the answer's body inside the `with` block."""
        url = httpx.URL(self._base + path).copy_merge_params(self._query)
        limits = httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS), pool=None)
        return self.client.stream(method, url, json=body, timeout=limits, extensions={"trace": self._note_socket})

    def _note_socket(self, event: str, details: Mapping[str, Any]) -> None:
        # A connection over TLS has a second socket around the first.
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            opened = details["return_value"].get_extra_info("socket")
            self._sockets.append(opened)
            if self._ended.is_set():  # opened after `cut`
                _shut_down_socket(opened)

    def cut(self) -> None:
        """Abort every running exchange: the waiting threads get an error."""
        for opened in self._sockets:
            _shut_down_socket(opened)


def _shut_down_socket(opened: socket.socket) -> None:
    # A plain shutdown, also for a TLS socket: it wakes the reading thread, which does the rest.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(opened, socket.SHUT_RDWR)


def read_address(url: str) -> httpx.URL:
    """Return an HTTP address. Its user, password and query are sent but must not be shown.

    Raises:
        TypeError: the value is not a string.
        ValueError: the value is not an HTTP address.
    """
    if not isinstance(url, str):
        raise TypeError(f"url must be a text such as 'http://localhost:8000', got one of type {type(url).__name__}")
    address = httpx.URL("")
    with contextlib.suppress(httpx.InvalidURL):
        address = httpx.URL(url).copy_with(fragment=None)
    if not (address.scheme in ("http", "https") and address.host and 0 < (address.port or 80) < 65536):
        raise ValueError(
            f"url must begin with http:// or https:// and name a host, got {redact_text(redact(url, 'url'))!r}"
        )
    return address


def _is_server_down(connections: _Connections, timeout: float) -> bool:
    """Return whether a minimal request breaks as well, so that the first request was not the cause.

    A proxy or a tunnel accepts connections for a dead server, and closes them.
    """
    try:
        with connections.stream("GET", "/", None, timeout=min(timeout, PROBE_SECONDS)) as response:
            return response.status_code in AWAY
    except httpx.TransportError as error:
        return isinstance(error, _CONNECT_ERRORS) or _ended_without_answer(error)


def _ended_without_answer(error: Exception) -> bool:
    """Return whether the connection ended without an answer. Bytes that are not HTTP count as an answer."""
    return isinstance(error, httpx.NetworkError) or "without sending a response" in str(error)
