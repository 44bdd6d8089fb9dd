"""`rollcorr null --engine`: an active null of a small real model, and errors that name the fix."""

import json

import pytest
import torch
from stories import STORIES
from typer.testing import CliRunner

from rollcorr.cli import app
from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """A rollout log with prompts only."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    with RolloutLogWriter(path) as log:
        log.write(RolloutBatch.from_rows([{"prompt_ids": [1, 300 + i, 400 + i]} for i in range(20)]))
    return path


def invoke(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})


def measure(prompts, output, *arguments):
    model = ("--engine", "transformers", "--model", STORIES, "--prompts", prompts)
    return invoke("null", *model, "--max-new-tokens", 48, "--rows", 40, "-o", output, *arguments)


def k3_of(path):
    return json.loads(path.read_text(encoding="utf-8"))["summary"]["k3"]


def test_an_engine_that_rounds_is_measured_against_its_trainer(prompts, tmp_path):
    run = measure(prompts, tmp_path / "run.json")
    assert run.exit_code == 0, run.output
    assert "40 sequences" in run.output
    document = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert (document["kind"], document["sides"]) == ("engine", "run")
    assert document["origin"]["engine"] == ["transformers"]
    assert document["origin"]["model"] == [str(STORIES)]

    # The same weights scored twice: prefill against decode, and the trainer twice. Both differ less.
    for sides in ("engine", "trainer"):
        assert measure(prompts, tmp_path / f"{sides}.json", "--sides", sides).exit_code == 0
    assert 1e-9 < k3_of(tmp_path / "engine.json") < k3_of(tmp_path / "run.json")
    assert k3_of(tmp_path / "trainer.json") < 1e-9

    # So neither is a null for a run.
    one = torch.full((1, 4), -1.0)
    with RolloutLogWriter(tmp_path / "log.parquet") as log:
        log.write(RolloutBatch.from_padded(torch.ones(1, 4), rollout_log_prob=one, old_log_prob=one))
    refused = invoke("check", tmp_path / "log.parquet", "--null", tmp_path / "engine.json")
    assert refused.exit_code == 2
    assert "measured with --sides engine" in " ".join(refused.output.split())


def test_a_truncated_sampler_is_scored_over_what_it_kept(prompts, tmp_path):
    settings = ("--temperature", 0.7, "--top-k", 8, "--dtype", "float32")
    shown = measure(prompts, tmp_path / "null.json", *settings)
    assert shown.exit_code == 0, shown.output
    assert k3_of(tmp_path / "null.json") < 1e-6


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        ((), "give rollout logs, or --engine NAME --model DIR --prompts FILE"),
        (("--model", STORIES), "--model belongs to --engine NAME"),
        (("--engine", "transformers"), "--engine transformers needs --model DIR"),
        (("--engine", "transformers", "--model", STORIES), "needs --prompts FILE (a rollout log with prompt_ids"),
        (("log.parquet", "--engine", "transformers"), "exclude each other; give one"),
        (("--engine", "hf", "--model", STORIES, "--prompts", "P"), "'hf' is none of transformers, ctranslate2"),
        (("--engine", "transformers", "--model", "nowhere", "--prompts", "P"), "--model 'nowhere' does not exist"),
        (
            ("--engine", "transformers", "--model", STORIES, "--prompts", "T"),
            "has a model but no tokenizer: save one beside it",
        ),
        (
            ("--engine", "transformers", "--model", STORIES, "--prompts", "P", "--engine-option", "batchsize=3"),
            "--engine-option batchsize is no option of the engine 'transformers'",
        ),
        (
            ("--engine", "transformers", "--model", STORIES, "--prompts", "P", "--engine-option", "x"),
            "not of the form NAME=VALUE",
        ),
        (("--engine", "vllm_server", "--model", STORIES, "--prompts", "P"), "needs --engine-option "),
        (("--engine", "transformers", "--model", STORIES, "--prompts", "P", "--rows", 0), "--rows must be at least 1"),
    ],
)
def test_what_is_missing_or_wrong_is_named_with_its_fix(arguments, fix, prompts, tmp_path):
    text = tmp_path / "prompts.txt"
    text.write_text("Once upon a time\n", encoding="utf-8")
    arguments = [{"P": prompts, "T": text}.get(argument, argument) for argument in arguments]
    shown = invoke("null", *arguments, "-o", tmp_path / "null.json")
    assert shown.exit_code == 2, shown.output
    assert fix in shown.output
    assert not (tmp_path / "null.json").exists()


def test_help_teaches_both_ways():
    shown = invoke("null", "--help").output
    assert "rollcorr null --engine transformers --model DIR" in shown
    assert "--steps 1:3" in shown
