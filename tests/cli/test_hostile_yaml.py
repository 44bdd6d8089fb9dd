"""YAML files of strangers: whatever is in them, a command ends with exit code 2 and one line, or does its work."""

import random
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from rollcorr.cli import app
from rollcorr.diagnostics.log_check import choose_config
from rollcorr.run_directory.stored_run import read_run
from rollcorr.train import recipes

pytest.importorskip("omegaconf", reason="needs rollcorr[train]")


def alias_bomb(levels, width):
    lines = ["a0: &a0 x"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join([*lines, f"optim: *a{levels - 1}"])


def merge_bomb(levels):
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}, *a{n - 1}, *a{n - 1}], k{n}: 1}}" for n in range(1, levels)]
    return "\n".join(lines)


def chain_of_depth(links):
    """Each block is shallow, and repeats the one before it twenty levels down."""
    lines = ["a0: &a0 [x]"]
    lines += [f"a{n}: &a{n} {'[' * 20}*a{n - 1}{']' * 20}" for n in range(1, links)]
    return "\n".join(lines)


# (document, expected line)
HOSTILE = {
    # Larger or deeper than it looks.
    "ten to the ninth by aliases": (alias_bomb(10, 10), "values, with aliases written out; the limit is 20,000"),
    "two to the sixtieth by aliases": (alias_bomb(61, 2), "the limit is 20,000"),
    "four to the thirtieth by merge keys": (merge_bomb(31), "the limit is 20,000"),
    "a long text repeated by aliases": (f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 900)}]", "20,000"),
    "a list in itself": ("optim: &a [*a]", "line 1, column 12: alias *a stands for a block that contains it"),
    "a block in itself": ("optim: &a {lr: {x: *a}}", "stands for a block that contains it"),
    "a merge of itself": ("optim: &a {<<: *a}", "stands for a block that contains it"),
    "lists 20,000 deep": ("[" * 20_000, "nested 65 levels deep; the limit is 64"),
    "blocks 5,000 deep": ("{a: " * 5_000 + "1" + "}" * 5_000, "the limit is 64"),
    "65 lists": ("a: " + "[" * 64 + "]" * 64, "the limit is 64"),
    "lines 900 deep": ("\n".join(" " * n + "a:" for n in range(900)), "the limit is 64"),
    "a depth that aliases add up to": (chain_of_depth(40), "the limit is 64"),
    "more than a megabyte": ("# " + "x" * (1 << 20), "more than 1,048,576 bytes, the limit of a YAML file"),
    "21,000 values": ("steps: [" + "1," * 21_000 + "]", "the limit is 20,000"),
    # Invalid documents.
    "a flipped byte": (b"steps: 1\noptim: {lr: \xff}\n", "line 2: byte 0xff is not UTF-8; save the file as UTF-8"),
    "a cut-off character": (b"run_dir: caf\xc3", "line 1: byte 0xc3 is not UTF-8"),
    "UTF-16": ("steps: 1\n".encode("utf-16"), "line 1: byte 0xff is not UTF-8"),
    "a zero byte": ("steps: \0", "character 8 is U+0000"),
    "a control character": ("steps: \x1b[31m1", "character 8 is U+001B"),
    "a compressed file": (b"\x1f\x8b\x08\x00\x00", "line 1: byte 0x8b is not UTF-8"),
    "a list": ("- steps", "expected a block of options, got list"),
    "a text": ("steps", "expected a block of options, got str"),
    "false": ("false", "expected a block of options, got bool"),
    "a number": ("17", "expected a block of options, got int"),
    "two documents": ("steps: 1\n---\nsteps: 2\n", "line 2, column 1: but found another document"),
    "an open list": ("steps: [1", "not a YAML document: line 1, column 10"),
    "an open quote": ('run_dir: "x', "not a YAML document: line 1"),
    "a tab": ("optim:\n\tlr: 1", "not a YAML document: line 2, column 1"),
    "a wrong indent": ("optim:\n  lr: 1\n seed: 2", "not a YAML document: line 3"),
    "an unknown anchor": ("steps: *nothing", "found undefined alias 'nothing'"),
    "an anchor alone": ("steps: &", "not a YAML document: line 1"),
    "a directive": ("%YAML 9.9\n---\nsteps: 1", "not a YAML document"),
    "a key twice": ("steps: 1\nsteps: 2", "line 2, column 1: key 'steps' is written twice"),
    "a key twice, further in": ("optim:\n  lr: 1\n  lr: 2", "line 3, column 3: key 'lr' is written twice"),
    "a list as a key": ("? [1, 2]\n: x", "found unhashable key"),
    "a block as a key": ("{a: 1}: x", "found unhashable key"),
    # Tags.
    "a Python object": ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
    "a Python name": ("a: !!python/name:os.system x", "could not determine a constructor"),
    "a tag of their own": ("steps: !mine 1", "could not determine a constructor"),
    "an integer that is none": ("steps: !!int x", "line 1, column 8: 'x' is no int"),
    "an integer of nothing": ("steps: !!int", "'' is no int"),
    "a number that is none": ("steps: !!float x", "'x' is no float"),
    "a switch that is none": ("steps: !!bool maybe", "'maybe' is no bool"),
    "a time that is none": ("steps: !!timestamp soon", "'soon' is no timestamp"),
    "a day that is none": ("steps: 2026-13-45", "'2026-13-45' is no timestamp"),
    "bytes that are none": ("steps: !!binary é", "not a YAML document"),
    "pairs of one": ("steps: !!pairs [a]", "not a YAML document"),
    "a set": ("steps: !!set {1, 2}", "steps must be text, a number, true, false, null, a list or a block"),
    "a day": ("steps: 2026-01-01", "steps must be text, a number"),
    "bytes": ("run_dir: !!binary aGk=", "run_dir must be text, a number"),
    # Numbers.
    "an integer of 5,000 digits": ("steps: 1" + "0" * 5_000, "an integer of 5,001 characters; the limit is 1,000"),
    "an integer of 401 digits": ("steps: 1" + "0" * 400, "steps must be below 2^63, got an integer of 1329 bits"),
    "two to the 63rd": ("seed: 9223372036854775808", "seed must be below 2^63"),
    "a long hexadecimal": ("steps: 0x" + "f" * 5_000, "the limit is 1,000"),
    "a number to the base 60 that overflows": ("steps: " + "59:" * 300 + "1.5", "is no float"),
    "infinity": ("optim: {lr: .inf}", "optim.lr must be a finite number, got inf"),
    "minus infinity": ("optim: {weight_decay: -.inf}", "optim.weight_decay must be a finite number, got -inf"),
    "not a number": ("optim: {lr: .nan}", "optim.lr must be a finite number, got nan"),
    "a number that overflows": ("optim: {lr: 1e400}", "optim.lr must be a finite number, got inf"),
    "infinity in a list": ("optim: {betas: [0.9, .inf]}", "optim.betas[1] must be a finite number, got inf"),
    "infinity in a free block": (
        "model: {path: null, config: {dropout: .nan}}",
        "model.config.dropout must be a finite",
    ),
    "a threshold without end": (
        "algorithm: {rollout_correction: {rollout_is: token, rollout_is_threshold: .inf}}",
        "must be a finite number, got inf",
    ),
    # Placeholders to fill in.
    "a missing value": ("steps: ???", "steps is ???, which means that it is still to be given; give it: steps=VALUE"),
    "a missing recipe": ("recipe: ???", "recipe is ???"),
    "a missing value in a free block": (
        "model: {path: null, config: {vocab_size: '???'}}",
        "model.config.vocab_size is ???",
    ),
    "an environment variable": ("run_dir: ${oc.env:HOME}/runs", "nothing is filled in for ${…} here"),
    "another option": ("seed: ${steps}", "seed is '${steps}', but nothing is filled in"),
    "itself": ("steps: ${steps}", "nothing is filled in"),
    "a resolver": ("model: {path: '${oc.create:{a: 1}}'}", "nothing is filled in"),
    "half an interpolation": ("run_dir: '${'", "nothing is filled in"),
    "a recipe by interpolation": ("recipe: ${oc.env:RECIPE}", "nothing is filled in"),
    "an interpolation in a list": ("optim: {betas: ['${a}', 1]}", "optim.betas[0] is '${a}'"),
    # Devices, names and types.
    "a vegetable as the device": ("device: potato", "device='potato' cannot be used here: "),
    "a GPU that is not there": ("device: cuda", "device='cuda' cannot be used here: "),
    "the eighth GPU": ("device: cuda:7", "device='cuda:7' cannot be used here: "),
    "a device without numbers": ("device: meta", "device='meta' cannot be used here"),
    "no device": ("device: ''", "device='' cannot be used here"),
    "an unknown option": ("optm: {lr: 1}", "unknown option 'optm.lr'"),
    "an option of 10,000 characters": ("? " + "x" * 10_000 + "\n: 1", "unknown option 'xxxxxxxxxxxx...xxxxxxxxxxxxx'"),
    "a value in place of a block": ("optim: [1, 2]", "optim is a block of options, got [1, 2]"),
    "a value in place of the correction's block": ("algorithm: 3", "algorithm is a block of options, got 3"),
    "a number in place of the correction": ("algorithm: {rollout_correction: 3}", "expected a RolloutCorrectionConfig"),
    "a list in place of the engine's options": ("rollout: {engine_options: [1]}", "rollout.engine_options is a block"),
    "null in place of steps": ("steps: null", "steps: "),
    "a block in place of steps": ("steps: {a: 1}", "unknown option 'steps.a'"),
    "a list in place of steps": ("steps: [1]", "steps: "),
    "a list in place of the recipe": ("recipe: [grpo]", "recipe="),
    "a number as an option": ("1: 2", "unknown option '1'"),
    "null as an option": ("null: 2", "unknown option 'None'"),
}


@pytest.fixture
def command(monkeypatch):
    """Run a command in this process; an exception that it raises is the test's."""

    def no_training(*_, **__):
        raise AssertionError("the configuration was accepted")

    monkeypatch.setattr(recipes, "run_recipe", no_training)
    monkeypatch.setenv("COLUMNS", "10000")
    runner = CliRunner()

    def run(*arguments):
        result = runner.invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


def document(tmp_path, content):
    path = tmp_path / "stranger.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("name", HOSTILE)
def test_train_answers_a_hostile_file_with_one_line(tmp_path, command, monkeypatch, name):
    content, message = HOSTILE[name]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = command("train", document(tmp_path, content))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("rollcorr train: ")
    assert message in line
    assert len(line) < 2000
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", HOSTILE)
def test_convert_config_converts_a_hostile_file_or_answers_with_one_line(tmp_path, command, name):
    path = document(tmp_path, HOSTILE[name][0])
    result = command("convert-config", path)
    assert result.exit_code in (0, 2)
    if result.exit_code == 2:
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"{path}: ")
        assert len(line) < 2000
        assert result.stdout == ""


def message_of(function, *arguments, **options):
    """Return the error of a function that rejects its input; None if it accepts."""
    try:
        function(*arguments, **options)
    except (ValueError, TypeError) as error:
        return str(error)
    return None


def test_check_and_report_read_a_hostile_configuration_or_say_in_one_line_why_not(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rollout_corr/kl": 0.1}\n', encoding="utf-8")
    path = tmp_path / "config.yaml"
    refused = 0
    for name, (content, _) in HOSTILE.items():
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        remarks = read_run(tmp_path).remarks
        message = message_of(choose_config, settings=[str(path)])
        if message is None:
            assert remarks == (), name
            continue
        refused += 1
        assert message.startswith(f"{path}: "), name
        assert all(len(text.splitlines()) == 1 and len(text) < 2000 for text in (message, *remarks)), name
    assert refused > 60


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=???", "steps is ???"),
        ("run_dir=${oc.env:HOME}", "nothing is filled in"),
        ("optim.lr=.inf", "optim.lr must be a finite number, got inf"),
        ("optim.lr=.nan", "optim.lr must be a finite number, got nan"),
        ("optim.lr=1e999", "optim.lr must be a finite number, got inf"),
        ("steps=1" + "0" * 400, "steps must be below 2^63"),
        ("steps=1" + "0" * 5000, "an integer of 5,001 characters"),
        ("steps=" + "[" * 20_000, "the limit is 64"),
        ("optim.betas=[&a [1], *a, *b]", "found undefined alias 'b'"),
        ("optim.betas=&a [*a]", "stands for a block that contains it"),
        ("steps=!!int x", "'x' is no int"),
        ("steps=2\nseed: 3", "it sets more than one option"),
        ("steps: 3\nx=2", "is not of the form dotted.name=value"),
        ("a b=2", "is not of the form dotted.name=value"),
        ("device=potato", "device='potato' cannot be used here: "),
        ("device=cuda", "device='cuda' cannot be used here: "),
        ("device=cuda:7", "device='cuda:7' cannot be used here: "),
        ("recipe=???", "recipe is ???"),
        ("model.config={x: '${y}'}", "model.config.x is '${y}'"),
    ],
)
def test_train_answers_a_hostile_override_with_one_line(command, monkeypatch, override, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = command("train", override)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line
    assert len(line) < 2000


def test_what_is_filled_in_for_an_engine_passes_through_untouched(monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    given = ["rollout.engine_options.key=${env:SECRET}", "rollout.engine_options.half='${oc.env:'"]
    options = recipes.load_config(None, given).rollout.engine_options
    assert options == {"key": "${env:SECRET}", "half": "${oc.env:"}


VALID = """\
run_dir: runs/x
steps: 7
optim: {lr: 1e-4, betas: [0.8, 0.9]}
algorithm:
  rollout_correction: {rollout_is: token, rollout_is_threshold: 2.0}
rollout: {engine_options: {a: [1, "x"]}, sampling: {temperature: 1.0}}
"""


def test_a_flipped_bit_gives_one_line_or_a_configuration(tmp_path):
    refused = 0
    for seed in range(120):
        chance = random.Random(seed)
        content = bytearray(VALID.encode())
        for _ in range(chance.choice((1, 1, 4))):
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path = document(tmp_path, bytes(content))
        message = message_of(recipes.load_config, path)
        if message is not None:
            refused += 1
            assert len(message.splitlines()) == 1
            assert len(message) < 2000
    assert 60 < refused < 120


def test_the_command_runs_as_a_module(tmp_path):
    path = document(tmp_path, "steps: &a [*a]")
    program = [sys.executable, "-m", "rollcorr", "convert-config", str(path)]
    ended = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "stands for a block that contains it" in ended.stderr
