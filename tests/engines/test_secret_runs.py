"""A run with secrets in every place of its configuration leaks none: files, report, output, logs, errors."""

import base64
import json
import logging
import re
import subprocess
import sys
import textwrap

import pyarrow.parquet as pq
import pytest
from local_server import serving
from micro_policy import make_micro_policy
from test_sglang import PretendedServer
from typer.testing import CliRunner

from rollcorr.cli import app
from rollcorr.config.documents import load_yaml
from rollcorr.engines.base import EngineAnswerError, EngineUnavailableError
from rollcorr.engines.transport.http import JsonClient
from rollcorr.engines.transport.pipes import WorkerProcess
from rollcorr.train import load_config

SECRETS = {
    "in the address": "url-p4ssw0rd",
    "in the query": "query-t0ken",
    "in Authorization": "b3arer-t0ken",
    "in X-API-Key": "x-api-k3y",
    "in a cookie": "c00kie-value",
    "in a header of any name": "t3am-value",
    "in a query of any name": "k-qu3ry-value",
    "from a reference": "ref3renced-value",
    "from headers_env": "env1ronment-value",
}
ENCODED = base64.b64encode(f"user:{SECRETS['in the address']}".encode()).decode()
RUN = (
    "model.path=null",
    "model.config={hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2, "
    "num_key_value_heads: 1, head_dim: 16}",
    "rollout.engine=sglang",
    "rollout.dtype=float32",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.max_new_tokens=4",
    "checkpoint.every=1",
    "log.evaluate=0",
    "log.null=0",
    "log.tensorboard=true",
)


class Echoing(PretendedServer):
    """Answers as SGLang; once broken, it sends back everything that it was sent."""

    broken = False

    def __init__(self, model):
        super().__init__(model)
        self.seen = []

    def __call__(self, handler, body):
        self.seen.append((handler.path, dict(handler.headers)))
        handler.path, _, query = handler.path.partition("?")
        if self.broken:
            handler.send(500, f"{handler.path}?{query} {dict(handler.headers)}".encode())
        else:
            super().__call__(handler, body)


@pytest.fixture
def command(monkeypatch):
    def run(*arguments):
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
        return result.exit_code, result.output

    monkeypatch.setenv("REFERENCED", SECRETS["from a reference"])
    monkeypatch.setenv("FROM_ENVIRONMENT", SECRETS["from headers_env"])
    return run


def leaks(text):
    """Return the secrets in a text or a file's bytes, and their places."""
    content = text if isinstance(text, bytes) else text.encode()
    return [place for place, secret in {**SECRETS, "encoded": ENCODED}.items() if secret.encode() in content]


def leaking_files(folder):
    found = {}
    for file in folder.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            if file.suffix == ".parquet":  # its pages are compressed
                table = pq.read_table(file)
                content += str([table.to_pylist(), table.schema.metadata, pq.read_metadata(file).metadata]).encode()
            found[str(file.relative_to(folder))] = leaks(content)
    return found


def options_of(server, folder):
    """Engine options with a secret in every place, as arguments of the command."""
    url = server.url.replace("http://", f"http://user:{SECRETS['in the address']}@")
    headers = {
        "Authorization": f"Bearer {SECRETS['in Authorization']}",
        "X-API-Key": SECRETS["in X-API-Key"],
        "Cookie": f"session={SECRETS['in a cookie']}",
        "X-Signature": "${env:REFERENCED}",
        "X-Team": SECRETS["in a header of any name"],
    }
    options = {
        "url": f"{url}?api_key={SECRETS['in the query']}&k={SECRETS['in a query of any name']}",
        "folder": str(folder),
        "headers": headers,
        "headers_env": {"X-Token": "FROM_ENVIRONMENT"},
        "retries": 0,
    }
    return f"rollout.engine_options={json.dumps(options)}"


def test_a_run_full_of_secrets_leaves_none(tmp_path, command, caplog):
    caplog.set_level(logging.DEBUG)
    run, answer = tmp_path / "run", Echoing(make_micro_policy().model)
    with serving(answer) as server:
        arguments = ["train", *RUN, f"run_dir={run}", options_of(server, tmp_path / "weights")]
        code, said = command(*arguments, "steps=1")
        assert code == 0, said

        # Everything reached the server.
        path, headers = answer.seen[-1]
        assert path.endswith(f"?api_key={SECRETS['in the query']}&k={SECRETS['in a query of any name']}")
        assert headers["X-Team"] == SECRETS["in a header of any name"]
        assert headers["Authorization"] == f"Basic {ENCODED}"
        assert headers["X-API-Key"] == SECRETS["in X-API-Key"]
        assert headers["X-Signature"] == SECRETS["from a reference"]
        assert headers["X-Token"] == SECRETS["from headers_env"]

        # The same command resumes with the secrets, which the files lack; then the engine fails.
        answer.broken = True
        code, failed = command(*arguments, "steps=3", "resume=true")
        assert code in (2, 3), failed
        answer.broken = False
        breaking = answer.generate

        def break_later(body):
            answer.broken = body["sampling_params"]["max_new_tokens"] > 0 and answer.label != "1"
            return breaking(body)

        answer.generate = break_later
        code, failed_later = command(*arguments, "steps=4", "resume=true")
        assert code == 3, failed_later
        assert "steps: 1 → 4" in failed_later
        assert "engine_options:" not in failed_later
        assert "engine_options." not in failed_later.partition("changed since this run began")[2]

    assert said.count("${env:NAME} instead") == 1
    assert "rollout.engine_options.url, rollout.engine_options.headers.Authorization" in said
    assert "HTTP 500" in failed + failed_later

    # The file keeps everything else.
    stored = load_yaml((run / "config.yaml").read_text(encoding="utf-8"))["rollout"]["engine_options"]
    assert re.fullmatch(r"http://\*\*\*@127\.0\.0\.1:\d+\?api_key=\*\*\*&k=\*\*\*", stored["url"])
    assert stored["headers"]["X-Signature"] == "${env:REFERENCED}"
    assert stored["headers_env"] == {"X-Token": "FROM_ENVIRONMENT"}
    assert "HTTP 500" in json.loads((run / "summary.json").read_text(encoding="utf-8"))["failure"]

    code, as_text = command("report", str(run))
    assert code in (1, 3)  # no verdict "healthy" without a null
    code, as_json = command("report", str(run), "--json")
    assert code in (1, 3)  # no verdict "healthy" without a null
    files = leaking_files(run)
    assert {"config.yaml", "report/report.html", "summary.json", "rollouts/step_000001.parquet"} <= files.keys()
    assert any(name.startswith("tensorboard/") for name in files)
    assert any(name.startswith("checkpoints/") for name in files)
    assert not any(files.values()), files
    for text in (said, failed, failed_later, as_text, as_json, caplog.text):
        assert leaks(text) == []
    assert "HTTP Request" in caplog.text  # it was logged


def test_the_configuration_file_alone_does_not_go_on_without_its_secret(tmp_path, command):
    written = load_config(None, [*RUN, "rollout.engine_options={url: 'http://u:pass-word@host'}"]).to_yaml()
    (tmp_path / "config.yaml").write_text(written, encoding="utf-8")
    code, said = command("train", str(tmp_path / "config.yaml"), f"run_dir={tmp_path / 'run'}")
    assert code == 2
    assert "rollout.engine_options.url holds ***" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", ["url: 'http://${env:NOT_SET}'", "url: 'http://h', headers_env: {X-Key: NOT_SET}"])
def test_a_missing_variable_is_one_line_before_anything_is_done(tmp_path, command, option):
    run = tmp_path / "run"
    code, said = command(
        "train", *RUN, f"run_dir={run}", f"rollout.engine_options={{{option}}}", "warm_up.steps=100000"
    )
    assert code == 2
    assert "the environment variable NOT_SET is not set" in said
    assert said.strip().count("\n") == 0
    assert not run.exists()


def test_an_error_of_the_command_line_quotes_no_secret(command):
    secret = SECRETS["in Authorization"]
    for wrong in (
        f"rollout.engine_optionss.headers={{Authorization: Bearer {secret}}}",
        f"rollout.engine_options.headers={{Authorization: Bearer {secret}",
        f"rollout=http://user:{secret}@host",
        f"rollout.sampling.temperature=http://user:{secret}@host",
    ):
        code, said = command("train", wrong)
        assert code == 2
        assert leaks(said) == []


def test_an_unexpected_traceback_of_the_command_line_hides_secrets():
    code = f"""
        from rollcorr import cli
        from rollcorr.config.secrets import redact

        def command():
            redact({{"password": "{SECRETS["in the address"]}"}})
            try:
                raise KeyError("{SECRETS["in the address"]}")
            except KeyError as error:
                raise RuntimeError("http://user:x{SECRETS["in X-API-Key"]}@host") from error

        cli.app = command
        cli.main()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "KeyError: '***'" in done.stderr
    assert "RuntimeError: http://***@host" in done.stderr
    assert leaks(done.stderr) == []


def test_a_client_tells_no_secret_that_the_server_sends_back():
    secret = SECRETS["in X-API-Key"]
    with serving(lambda handler, body: handler.send(403, f"who is {dict(handler.headers)}".encode())) as server:
        url = server.url.replace("//", f"//user:{secret}@")
        client = JsonClient(url, headers={"X-API-Key": secret})
        with pytest.raises(EngineAnswerError) as error:
            client.get("/x")
    assert leaks(str(error.value)) == []
    assert leaks(client.url) == []
    assert "HTTP 403: who is" in str(error.value)


def test_a_worker_that_prints_its_environment_when_it_dies_tells_no_secret():
    program = "import os, sys; print(os.environ['HF_TOKEN'], sys.argv, file=sys.stderr, flush=True); os._exit(1)"
    secret = SECRETS["in a cookie"]
    worker = WorkerProcess([sys.executable, "-S", "-c", program], env={"HF_TOKEN": secret})
    with pytest.raises(EngineUnavailableError, match=r"\*\*\* \['-c'\]") as error:
        worker.ask("start", timeout=600)
    assert leaks(str(error.value)) == []
