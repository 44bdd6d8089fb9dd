"""An HTTP server on this machine, whose answers a test decides."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Calls `answer(handler, body)` for every request and remembers (path, body)."""

    daemon_threads = True

    def __init__(self, answer, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.answer = answer
        self.requests = []
        self.lock = threading.Lock()
        self.released = threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """A client that went away is part of the play."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise the body of an answer waits 40 ms for the receipt of its headers

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
        with self.server.lock:
            self.server.requests.append((self.path, body))
        self.server.answer(self, body)

    do_GET = do_POST  # noqa: N815 (http.server's names)

    def send(self, status, data, *, announced=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) if announced is None else announced))
        self.end_headers()
        self.wfile.write(data)

    def send_json(self, value, status=200):
        self.send(status, json.dumps(value).encode())

    def log_message(self, *arguments):
        pass


@contextmanager
def serving(answer, *, port=0):
    """A running server; on any free port, or on one that was free a moment ago."""
    server = Server(answer, port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.005})
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
