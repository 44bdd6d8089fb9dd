"""The engine's two ways to vLLM with `fake_vllm` at the other end: in this process, and behind HTTP on this machine."""

import json
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fake_vllm

from rollcorr.engines.base import EngineAnswerError, EngineUnavailableError
from rollcorr.engines.vllm.worker_program import Worker


class InProcess:
    """Replace `WorkerProcess`: run the worker's own code in this process. `dies` counts the requests that kill it."""

    dies = 0
    started = 0

    def __init__(self, command, *, env, name):
        type(self).started += 1
        self.worker, self.alive = Worker(), True

    def ask(self, what, *, timeout, **values):
        if not self.alive or (what == "generate" and type(self).dies > 0):
            type(self).dies -= 1
            self.alive = False
            raise EngineUnavailableError(f"died when asked to {what}")
        try:
            return json.loads(json.dumps(getattr(self.worker, what)(**json.loads(json.dumps(values)))))
        except Exception as error:
            raise EngineAnswerError(f"could not {what}: {error}") from error

    def close(self):
        self.alive = False


def use_in_process(monkeypatch, process=InProcess):
    """Make `VllmEngine` use the stand-in."""
    monkeypatch.setitem(sys.modules, "vllm", fake_vllm)
    monkeypatch.setattr("rollcorr.engines.vllm.offline.WorkerProcess", process)
    process.dies = process.started = 0


@contextmanager
def serving(answer):
    """Start a server that answers (path, body) by `answer`; return its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # otherwise the body of an answer waits 40 ms for the receipt of its headers

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
            status, told = answer(self.path, body)
            data = told if isinstance(told, bytes) else json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST  # noqa: N815 (http.server's names)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.005})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
