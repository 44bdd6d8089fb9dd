"""`rollcorr train`: its output without training. tests/train/test_run.py trains through it."""

from typer.testing import CliRunner

from rollcorr.cli import app


def run(*arguments: str):
    return CliRunner().invoke(app, ["train", *arguments], env={"COLUMNS": "200"})


def test_help_says_how_to_start_and_how_to_continue():
    result = run("--help")
    assert result.exit_code == 0
    assert "The same command starts a run, continues it" in result.output
    assert "SIGTERM" in result.output


def test_an_unknown_option_is_answered_with_the_nearest_and_exit_code_2():
    result = run("optim.lrr=1e-4")
    assert result.exit_code == 2
    assert "Did you mean 'optim.lr'" in result.output


def test_two_configuration_files_are_refused():
    result = run("a.yaml", "b.yaml")
    assert result.exit_code == 2
    assert "a.yaml, b.yaml" in result.output


def test_without_arguments_it_explains_itself_and_trains_nothing(monkeypatch):
    monkeypatch.setattr("rollcorr.train.recipes.train", lambda config: 1 / 0)
    result = run()
    assert result.exit_code == 2
    assert "recipe=grpo" in result.output
    assert "nothing was trained" in result.stderr


def test_a_gpu_that_is_not_there_is_answered_in_one_line(monkeypatch):
    result = run("device=cuda:99")
    assert result.exit_code == 2
    assert "device='cuda:99' cannot be used here: " in result.stderr
    assert "write cpu, cuda or cuda:N" in result.stderr
    assert result.stderr.count("\n") == 1
