"""Record a vLLM server's responses to the tests' requests: `python record_vllm.py`, where `make test-vllm` runs.

Starts the server on the policy of `recorded_policy`, puts a recording proxy before it, and lets the engine ask.
"""

import json
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from test_vllm_server import RECORDING, TRUNCATED, make_engine, recorded_policy
from vllm_doubles import serving
from vllm_server_process import running_server

from rollcorr.engines.base import EngineAnswerError
from rollcorr.engines.vllm.server import GENERATE


def forward(url, path, body):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def main():
    policy, entries, hidden = recorded_policy(), {}, set()
    with tempfile.TemporaryDirectory() as folder:
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        options = ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "64", "--enable-scale-out"]
        with running_server(folder, *options) as url:

            def record(path, body):
                status, told = forward(url, path, body)
                if path == "/openapi.json":
                    told = {"paths": {p: {} for p in told["paths"]}}
                entries[path, json.dumps(body, sort_keys=True)] = {
                    "path": path,
                    "request": body,
                    "status": status,
                    "response": json.loads(json.dumps(told).replace(folder, "recorded_policy")),
                }
                if path == "/openapi.json":
                    told = {"paths": {p: {} for p in told["paths"] if p not in hidden}}
                return status, told

            with serving(record) as proxy:
                for hide in (set(), {GENERATE}):
                    hidden.clear()
                    hidden.update(hide)
                    for top_k in (4, 60):
                        sampling = {**TRUNCATED, "top_k": top_k}
                        try:
                            engine = make_engine(proxy, policy, sampling=sampling, tokens=6, dtype="bfloat16")
                            engine.generate([[1, 2, 3], [4, 5]], seed=0)
                        except EngineAnswerError:
                            assert top_k == 60
    RECORDING.write_text("[\n" + ",\n".join(json.dumps(entry) for entry in entries.values()) + "\n]\n")


if __name__ == "__main__":
    main()
