"""Reach a server over HTTP: many JSON requests at once, retries, and all of a batch or nothing.

What a fault becomes:

- no connection, a broken one, no byte for `timeout` seconds, HTTP 5xx: tried again, then `EngineUnavailableError`;
- HTTP 4xx or a redirect: `EngineAnswerError` with the server's text, at once, because the request would fail again;
- a whole body that is no JSON: `EngineAnswerError`, at once.

A request may be sent more than once, so it should mean the same each time: give generations a seed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from rollcorr.config.checks import check_integer, check_number
from rollcorr.config.secrets import hide_in_log, read_address
from rollcorr.engines.base import EngineAnswerError, EngineUnavailableError

# How many characters of a server's text an error shows.
SHOWN = 500


class JsonClient:
    """POST and GET JSON, with retries.

    Proxies of the environment are not used: an engine runs on a machine of your own.

    Args:
        url: where the server is, for instance "http://localhost:30000". A user and password in it, and a query such as
            `?api_key=…`, are sent with each request and appear in no error.
        timeout: seconds to wait for a connection, and for the next byte. A server may be silent until a response is
            complete, so allow for the longest one.
        retries: how often a failed request is sent again.
        backoff: seconds before the first retry; they double with each retry.
        concurrency: how many requests of `post_all` are under way at a time.
        headers: sent with each request, such as an API key. They appear in no error.

    Raises:
        ImportError: httpx is not installed.
        TypeError: a number is of the wrong type.
        ValueError: a number is out of range, or `url` is no HTTP address.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 600.0,
        retries: int = 3,
        backoff: float = 0.5,
        concurrency: int = 64,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        address = read_address(url)
        check_number("timeout", timeout, above=0)
        check_integer("retries", retries, at_least=0)
        check_number("backoff", backoff, at_least=0)
        check_integer("concurrency", concurrency, at_least=1)
        try:
            import httpx
        except ImportError as error:
            raise ImportError("engines behind HTTP need httpx: pip install 'rollcorr[http]'") from error

        self.url = address.url.rstrip("/")
        self.timeout = timeout
        self.retries = retries
        self.backoff = backoff
        self.concurrency = concurrency
        self._broken: tuple[type[Exception], ...] = (httpx.TransportError, httpx.DecodingError)
        self._client = httpx.Client(
            base_url=self.url,
            timeout=timeout,
            headers=dict(headers or {}),
            auth=address.auth,
            limits=httpx.Limits(max_connections=concurrency),
            trust_env=False,
        )
        hide_in_log("httpx")
        if address.query:  # a client's own parameters would replace those of a path
            self._client.event_hooks["request"] = [lambda request: _add_query(request, address.query)]
        self._close = weakref.finalize(self, self._client.close)  # a client that nobody closes leaves no socket behind

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
            EngineUnavailableError: no answer after all retries.
            EngineAnswerError: the answer is a refusal or no JSON.
        """
        return self._request("GET", path, None, threading.Event())

    def post(self, path: str, body: object) -> Any:  # noqa: ANN401 (any JSON)
        """POST `body` as JSON to `path` and return the JSON of the answer. Raises as `get`."""
        return self._request("POST", path, body, threading.Event())

    def post_all(self, path: str, bodies: Sequence[object]) -> list[Any]:
        """POST every body and return the answers in their order: all, or the first error.

        After an error no further request is sent or retried; the answers still under way are dropped. Raises as `get`.
        """
        if not bodies:
            return []
        failed = threading.Event()
        with ThreadPoolExecutor(min(self.concurrency, len(bodies)), thread_name_prefix="engine") as pool:
            futures = [pool.submit(self._request, "POST", path, body, failed) for body in bodies]
            # All or nothing: the first error stops what has not begun, and retries with it.
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:  # the first error is raised here, before the others are waited for
                    future.result()
                return [future.result() for future in futures]
            finally:
                failed.set()
                for future in futures:
                    future.cancel()

    def _request(self, method: str, path: str, body: object, stop: threading.Event) -> Any:  # noqa: ANN401 (any JSON)
        cause: Exception | None = None
        for attempt in range(self.retries + 1):
            if attempt and stop.wait(self.backoff * 2 ** (attempt - 1)):
                break

            # What may pass is tried again.
            try:
                response = self._client.request(method, path, json=body)
            except self._broken as error:
                cause, reason = error, f"{type(error).__name__} ({error})".replace(" ()", "")
                continue
            if response.status_code >= 500:
                cause, reason = None, f"HTTP {response.status_code}: {response.text[:SHOWN]}"
                continue

            # What would fail again is an error at once.
            if not response.is_success:
                raise EngineAnswerError(
                    f"{method} {self.url}{path} was refused, HTTP {response.status_code}: {response.text[:SHOWN]}"
                )
            try:
                return response.json()
            except ValueError as error:
                raise EngineAnswerError(
                    f"{method} {self.url}{path} did not answer in JSON ({error}): {response.text[:SHOWN]!r}"
                ) from error

        raise EngineUnavailableError(
            f"{method} {self.url}{path} failed {attempt + 1} times, at last with {reason}; check that the engine lives "
            f"and that the timeout, {self.timeout:g} s, allows for its longest response"
        ) from cause


def _add_query(request: Any, query: Mapping[str, str]) -> None:  # noqa: ANN401 (httpx.Request)
    request.url = request.url.copy_merge_params(query)
