"""A real vLLM server on this machine, for the length of a `with`."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
START_SECONDS = 1200


@contextmanager
def running_server(folder, *options, env=None):
    """Serve the model in `folder` as "tiny" and return the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--max-model-len", "128", "--generation-config", "vllm", "--dtype", "bfloat16", *options]
    log = open(os.path.join(folder, "server.log"), "wb")  # noqa: SIM115 (closed below)
    server = subprocess.Popen(
        command, env={**os.environ, **CPU, **QUIET, **(env or {})}, stdout=log, stderr=subprocess.STDOUT
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(server, url, log.name)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        log.close()


def _wait(server, url, log):
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if server.poll() is not None or time.monotonic() > deadline:
                with open(log, encoding="utf-8", errors="replace") as lines:
                    raise RuntimeError("the server did not start:\n" + lines.read()[-3000:]) from None
            time.sleep(0.5)
