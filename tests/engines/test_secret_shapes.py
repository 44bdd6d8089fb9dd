"""Secrets in 74 shapes are in no file that the library writes, and in none of its messages."""

import json
import logging
import subprocess
import sys
import textwrap

import pytest
from secret_shapes import Shapes
from typer.testing import CliRunner

from rollcorr.cli import app
from rollcorr.config.documents import dump_yaml, load_yaml
from rollcorr.config.secrets import hide_in_log, redact_text
from rollcorr.engines.transport.answer_body import printable
from rollcorr.train import load_config
from rollcorr.train.option_changes import OptionChange, RunHistory, compared_options

METRICS = "".join(json.dumps({"step": step, "rollout_corr/kl": 1e-3}) + "\n" for step in range(1, 9))


@pytest.fixture
def shapes():
    return Shapes()


def leaks(shapes, folder):
    """Return shapes by file, for each file of a folder with a secret."""
    found = {str(file): shapes.found_in(file.read_bytes()) for file in folder.rglob("*") if file.is_file()}
    assert found
    return {file: names for file, names in found.items() if names}


def test_there_are_enough_shapes(shapes):
    assert len(shapes.secrets) >= 52
    assert len(set(shapes.secrets.values())) == len(shapes.secrets)


def test_no_shape_reaches_the_files_of_options(shapes, tmp_path):
    override = f"rollout.engine_options={json.dumps(shapes.engine_options)}"
    config = load_config(None, ["rollout.engine=sglang", override])
    (tmp_path / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    (tmp_path / "history.json").write_text(RunHistory.begin(compared_options(config)).to_json(), encoding="utf-8")
    assert leaks(shapes, tmp_path) == {}

    # References, and names, stay readable.
    stored = load_yaml(config.to_yaml())["rollout"]["engine_options"]
    assert stored["headers"].keys() == shapes.headers.keys()
    assert stored["engine_args"]["arguments"] == ["--api-key", "***", "--port", "80"]
    assert stored["urls"][0] == "https://host.example/v1?k=***&page=***"


def test_no_shape_reaches_a_report_of_an_old_configuration(shapes, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(METRICS, encoding="utf-8")
    (run / "config.yaml").write_text(dump_yaml({"rollout": {"engine_options": shapes.engine_options}}))
    options = {"rollout.engine_options": {}}
    changes = [OptionChange("rollout.engine_options", text, text[::-1]) for text in shapes.texts.values()]
    (run / "history.json").write_text(RunHistory.begin(options).changed(changes, after_step=3).to_json())

    for arguments in (["report", str(run), "-o", str(tmp_path / "out")], ["report", str(run), "--json"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code in (0, 1, 3), result.output
        assert shapes.found_in(result.output.encode()) == []
    assert leaks(shapes, tmp_path / "out") == {}


def test_no_shape_reaches_a_report_of_a_broken_configuration(shapes, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(METRICS, encoding="utf-8")
    for broken in (dump_yaml(shapes.engine_options) + "a: [", "# x\n" + dump_yaml({"algorithm": shapes.arguments})):
        (run / "config.yaml").write_text(broken)
        assert CliRunner().invoke(app, ["report", str(run), "-o", str(tmp_path / "out")]).exit_code in (0, 1, 3)
        assert leaks(shapes, tmp_path / "out") == {}


def test_no_shape_reaches_a_message(shapes):
    texts = [*shapes.texts.values(), *shapes.queries]
    texts += [quoted(text) for text in texts for quoted in (repr, json.dumps, lambda text: json.dumps(repr(text)))]
    said = "\n".join(shown(text) for text in texts for shown in (redact_text, printable))
    assert shapes.found_in(said.encode()) == []
    assert all(redact_text(redact_text(text)) == redact_text(text) for text in shapes.texts.values())


def test_no_shape_reaches_a_log(shapes, tmp_path):
    logger, handler = logging.getLogger("somebody.client"), logging.FileHandler(tmp_path / "log", encoding="utf-8")
    hide_in_log(logger.name)
    logger.addHandler(handler)
    for text in shapes.texts.values():
        logger.warning("failed: %s", text)
        try:
            raise KeyError(text)
        except KeyError:
            logger.warning("failed", exc_info=True)
    logger.removeHandler(handler)
    handler.close()
    assert leaks(shapes, tmp_path) == {}
    assert "Traceback" in (tmp_path / "log").read_text(encoding="utf-8")


def test_no_shape_reaches_an_error_of_the_command_line(shapes, tmp_path):
    options = json.dumps(shapes.engine_options)
    overrides = [f"rollout.engine_options={options}}}", f"rollout.engine_optionss={options}", f"rollout={options!r}"]
    overrides += [f"rollout.engine_options.texts={text}: x: y" for text in shapes.texts.values()]
    for number, override in enumerate(overrides):
        result = CliRunner().invoke(app, ["train", override], env={"COLUMNS": "300"})
        assert result.exit_code == 2, override
        (tmp_path / f"{number}.txt").write_text(result.output, encoding="utf-8")
    assert leaks(shapes, tmp_path) == {}


def test_no_shape_reaches_a_traceback(shapes, tmp_path):
    code = """
        import json, sys
        from rollcorr import cli

        def command():
            try:
                raise KeyError(sys.stdin.read())
            except KeyError as error:
                raise RuntimeError(error.args[0]) from error

        cli.app = command
        cli.main()
    """
    with (tmp_path / "stderr").open("w") as file:
        texts = "\n\n".join(shapes.texts.values())
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], input=texts, text=True, stderr=file)
    assert done.returncode == 1
    assert leaks(shapes, tmp_path) == {}
    assert "RuntimeError" in (tmp_path / "stderr").read_text(encoding="utf-8")


def test_a_secret_that_a_server_sends_back_is_hidden(shapes):
    load_config(None, [f"rollout.engine_options={json.dumps(shapes.engine_options)}"]).to_yaml()
    for shape, secret in shapes.secrets.items():
        if secret not in "".join(shapes.texts.values()) and "PEM" not in shape:
            assert secret not in redact_text(f"the server said x{secret}y")


def test_a_header_that_is_no_secret_hides_no_other_option():
    options = {
        "model.path=Qwen/Qwen3-8B",
        "rollout.engine_options={headers: {X-Model: Qwen/Qwen3-8B, Host: 'localhost:8000', X-Mode: train}, "
        "url: 'http://localhost:8000/?model=Qwen/Qwen3-8B'}",
    }
    config = load_config(None, sorted(options))
    for _ in range(2):
        stored = load_yaml(config.to_yaml())
        assert stored["model"]["path"] == "Qwen/Qwen3-8B"
        assert stored["rollout"]["engine_options"]["url"] == "http://localhost:8000/?model=***"
        assert set(stored["rollout"]["engine_options"]["headers"].values()) == {"***"}
    assert redact_text("rollcorr train: step 3") == "rollcorr train: step 3"
