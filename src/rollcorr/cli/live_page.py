"""A server on the loopback address that follows a run: the page of `rollcorr view --live`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rollcorr.config.documents import BadInputError
from rollcorr.diagnostics.report.view_page import view_page
from rollcorr.run_directory.directory import RunDirectory

LOOPBACK = "127.0.0.1"


class LivePage(ThreadingHTTPServer):
    """Server that renders the page again when the run has grown.

    Args:
        paths: as for `view_page`.
        port: of the server; 0 takes a free one.
        options: further arguments of `view_page`.

    Raises:
        BadInputError: the port is in use.
    """

    daemon_threads = True
    allow_reuse_address = os.name == "posix"

    def __init__(self, paths: Sequence[Path], *, port: int, **options: Any) -> None:  # noqa: ANN401 - of view_page
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise BadInputError(
                f"port {port} of {LOOPBACK} is in use ({error.strerror}); choose another with --port"
            ) from error
        self.paths, self.options, self._rendered = paths, options, ("", "")

    def version(self) -> str:
        """Return what changes when a run grows: the number of lines, then sizes and times of its metrics."""
        files = [RunDirectory(path).metrics for path in self.paths]
        states = [file.stat() for file in files]
        lines = sum(file.read_bytes().count(b"\n") for file in files)
        return f"{lines} {' '.join(f'{state.st_size}-{state.st_mtime_ns}' for state in states)}"

    def page(self) -> str:
        """Return the page of the runs as they are now."""
        version = self.version()
        if self._rendered[0] != version:
            self._rendered = (version, view_page(self.paths, live=True, **self.options))
        return self._rendered[1]


class _Handler(BaseHTTPRequestHandler):
    server: LivePage

    def do_GET(self) -> None:
        """Send the page or its version. Reject other host names (DNS rebinding), and a host without a port."""
        host = self.headers.get("Host", "").rpartition(":")[0]
        content = {"/": self.server.page, "/version": self.server.version}.get(self.path)
        if host not in (LOOPBACK, "localhost") or content is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            text = content()
        except (OSError, ValueError) as error:  # the run is being moved or written
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, type(error).__name__)
            return
        body = text.encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"text/{'html' if self.path == '/' else 'plain'}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet: the terminal shows only the address."""
