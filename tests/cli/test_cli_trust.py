"""`rollcorr train` imports and starts programs that its command names; programs named in a file need --trust."""

import sys

import pytest
from typer.testing import CliRunner

from rollcorr.cli import app
from rollcorr.train import load_config, train


@pytest.fixture
def stranger(tmp_path):
    """A reward file that leaves a mark when it is imported; it has no function, so that no run begins."""
    mark, file = tmp_path / "it_ran", tmp_path / "their_reward.py"
    file.write_text(f"open({str(mark)!r}, 'w').close()\n")
    return mark, file


def options(file, run):
    return ["recipe=flow_grpo", f"run_dir={run}", "reward.name=function", f"reward.function={file}:missing"]


def configuration(path, file, run):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"recipe: flow_grpo\nrun_dir: {run}\nreward: {{name: function, function: '{file}:missing'}}\n")
    return str(path)


def run_train(*arguments):
    result = CliRunner().invoke(app, ["train", *arguments], env={"COLUMNS": "500"})
    assert result.exit_code == 2
    return result.output


def test_a_function_of_a_file_needs_trust(tmp_path, stranger):
    mark, file = stranger
    theirs = configuration(tmp_path / "theirs.yaml", file, tmp_path / "run")
    said = run_train(theirs)
    assert f"reward.function={str(file) + ':missing'!r}" in said
    assert "--trust" in said
    assert not mark.exists()
    assert not (tmp_path / "run").exists()

    assert "cannot be loaded" in run_train(theirs, "--trust")
    assert mark.exists()


@pytest.mark.parametrize("option", ["problems", "reward"])
def test_own_task_of_file_needs_trust(tmp_path, stranger, option):
    mark, file = stranger
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(f"run_dir: {tmp_path / 'run'}\ntask: {{{option}: '{file}:missing'}}\n")
    said = run_train(str(theirs))
    assert f"task.{option}=" in said
    assert "--trust" in said
    assert not mark.exists()

    assert "cannot be loaded" in run_train(str(theirs), "--trust")
    assert mark.exists()
    mark.unlink()
    typed = run_train(f"task.{option}={file}:missing", f"run_dir={tmp_path / 'other'}")
    assert "cannot be loaded" in typed
    assert mark.exists()


def test_a_function_of_the_command_line_needs_none(tmp_path, stranger):
    mark, file = stranger
    theirs = configuration(tmp_path / "theirs.yaml", "/nowhere.py", tmp_path / "run")
    assert "cannot be loaded" in run_train(theirs, f"reward.function={file}:missing")
    assert mark.exists()


@pytest.mark.parametrize("link", [False, True])
def test_a_function_in_the_run_directory_needs_trust(tmp_path, stranger, link):
    mark, file = stranger
    run = tmp_path / "run"
    run.mkdir()
    inside = file.rename(run / file.name)
    if link:
        file.symlink_to(inside)
    given = options(file if link else inside, run)
    assert "--trust" in run_train(*given)
    assert not mark.exists()
    assert "cannot be loaded" in run_train(*given, "--trust")
    assert mark.exists()


def test_a_configuration_in_its_run_directory_needs_trust(tmp_path, stranger):
    mark, file = stranger
    stored = configuration(tmp_path / "run" / "config.yaml", file, tmp_path / "run")
    assert "--trust" in run_train(stored, "steps=3")
    assert not mark.exists()


@pytest.mark.parametrize(
    "block",
    [
        "python: /tmp/theirs",
        "env: {LD_PRELOAD: theirs.so}",
        "engine_args: {trust_remote_code: true}",
        "engine_args: {worker_cls: theirs.Worker}",
        "engine_args: {worker_extension_cls: theirs.Worker}",
        "engine_args: {logits_processors: ['theirs:Processor']}",
        "engine_args: {kv_transfer_config: {kv_connector: Theirs, kv_connector_module_path: theirs}}",
        "engine_args: {distributed_executor_backend: theirs.Executor}",
        "engine_args: {compilation_config: {backend: theirs.backend}}",
        "engine_args: {tool_parser_plugin: theirs.py}",
        "engine_args: {hf_overrides: {auto_map: {AutoModel: theirs.Model}}}",
        "engine_args: {an_argument_of_next_year: theirs.Code}",
        'engine_args: {"a\\nb": theirs.Code}',
    ],
)
def test_an_engine_of_a_file_starts_no_program_without_trust(tmp_path, block):
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(f"run_dir: {tmp_path / 'run'}\nrollout: {{engine: vllm, engine_options: {{{block}}}}}\n")
    said = run_train(str(theirs), "model.path=/nowhere", f"run_dir={tmp_path / 'run'}")
    assert f"rollout.engine_options.{block.partition(':')[0]}" in said
    assert str(theirs) in said
    assert "--trust" in said
    typed = run_train(
        "rollout.engine=vllm",
        f"rollout.engine_options={{{block}}}",
        "model.path=/nowhere",
        f"run_dir={tmp_path / 'run'}",
    )
    assert "/nowhere" in typed
    assert "--trust" not in typed


def test_ordinary_options_of_a_file_need_no_trust(tmp_path):
    plain = "max_model_len: 96, enforce_eager: true, quantization: fp8, trust_remote_code: false, worker_cls: null"
    ours = tmp_path / "ours.yaml"
    ours.write_text(f"rollout: {{engine: vllm, engine_options: {{restarts: 3, engine_args: {{{plain}}}}}}}\n")
    assert "/nowhere" in run_train(str(ours), "model.path=/nowhere", f"run_dir={tmp_path / 'run'}")


def test_a_program_trusts_its_own_configuration(tmp_path, stranger):
    mark, file = stranger
    ours = configuration(tmp_path / "ours.yaml", file, tmp_path / "run")
    with pytest.raises(ValueError, match="cannot be loaded"):
        train(load_config(ours))
    assert mark.exists()
    assert "their_reward" not in sys.modules


def test_null_takes_trust(tmp_path):
    """Its error names the option, which must exist."""
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text("recipe: flow_grpo\nmodel: {family: 'nowhere:Own'}\n")
    command = ["null", "--config", str(theirs), "--output", str(tmp_path / "null.json")]
    refused = CliRunner().invoke(app, command)
    assert (refused.exit_code, "may run code" in refused.output) == (2, True)
    trusted = CliRunner().invoke(app, [*command, "--trust"])
    assert (trusted.exit_code, "may run code" in trusted.output) == (2, False)
    assert "nowhere" in trusted.output
