"""The connections to one server, which can be cut at once while other threads wait on them."""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from rollcorr.config.secrets import hide_in_log, redact, redact_text

if TYPE_CHECKING:
    import httpx

# Seconds to wait until a server takes a connection; one that does not is away.
CONNECT_SECONDS = 30.0


class Address(NamedTuple):
    """An HTTP address without what must not be shown.

    Attributes:
        url: scheme, host, port and path.
        auth: user and password, or None.
        query: names and values after the `?`.
    """

    url: str
    auth: tuple[str, str] | None
    query: dict[str, str]


def read_address(url: str) -> Address:
    """Take an HTTP address apart, so that its user, password and query are sent but not shown.

    Raises:
        TypeError: it is no text.
        ValueError: it is no HTTP address.
    """
    if not isinstance(url, str):
        raise TypeError(f"url must be a text such as 'http://localhost:8000', got one of type {type(url).__name__}")
    try:
        parts = urlsplit(url)
        is_usable = parts.hostname is not None and parts.port != 0 and url.startswith(("http://", "https://"))
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ValueError(
            f"url must begin with http:// or https:// and name a host, got {redact_text(redact(url, 'url'))!r}"
        )

    user_part, _, host = parts.netloc.rpartition("@")
    return Address(
        url=urlunsplit((parts.scheme, host, parts.path, "", "")),
        auth=(unquote(parts.username or ""), unquote(parts.password or "")) if user_part else None,
        query=dict(parse_qsl(parts.query, keep_blank_values=True)),
    )


class Connections:
    """A pool of connections that knows its sockets.

    A thread that waits for a byte cannot be ended from outside, but its socket can be shut down, and then it stops to
    wait. The sockets come from httpx's trace of the connections that it opens.

    Args:
        address: the server, with user, password and query, which go with each request.
        count: how many connections at most.
        headers: sent with each request, and never to another server: redirects are not followed.
    """

    def __init__(self, address: Address, *, count: int, headers: Mapping[str, str]) -> None:
        self._address, self._count, self._headers = address, count, dict(headers)
        self._lock = threading.Lock()
        self._open()

    def stream(self, method: str, path: str, body: object, *, timeout: float) -> AbstractContextManager[httpx.Response]:
        """Send a request; the answer's body is read inside the `with`."""
        import httpx

        with self._lock:
            client, trace = self._client, self._trace
        limits = httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS), pool=None)
        return client.stream(method, path, json=body, timeout=limits, extensions={"trace": trace})

    def cut(self) -> None:
        """End every exchange that is under way: the threads that wait get an error. Later requests connect again."""
        with self._lock:
            client, sockets = self._client, list(self._sockets)
            self._open()
        _shut(client, sockets)

    def close(self) -> None:
        """Close the connections. May be called twice."""
        with self._lock:
            client, sockets = self._client, list(self._sockets)
        _shut(client, sockets)

    def _open(self) -> None:
        import httpx

        self._client = httpx.Client(
            base_url=self._address.url.rstrip("/"),
            headers={"Accept-Encoding": "gzip", **self._headers},
            auth=self._address.auth,
            limits=httpx.Limits(max_connections=self._count),
            follow_redirects=False,
            trust_env=False,
        )
        hide_in_log("httpx")
        if self._address.query:  # a client's own parameters would replace those of a path
            self._client.event_hooks["request"] = [self._add_query]
        sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._sockets = sockets

        # A connection over TLS has a second socket around the first.
        def trace(event: str, details: Mapping[str, Any]) -> None:
            if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
                opened = details["return_value"].get_extra_info("socket")
                if opened is not None:
                    sockets.add(opened)

        self._trace = trace

    def _add_query(self, request: httpx.Request) -> None:
        request.url = request.url.copy_merge_params(self._address.query)


def _shut(client: httpx.Client, sockets: list[socket.socket]) -> None:
    for opened in sockets:
        # The plain shutdown, also of a TLS socket: it wakes the thread that reads, and leaves the rest to that thread.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(opened, socket.SHUT_RDWR)
    client.close()
