"""Follow the recipes of CONTRIBUTING.md on a copy of the package, and use the result.

A block marked `recipe=NAME` contains lines under headers that name their place:

    # FILE, in TABLE          at the end of the table or function TABLE
    # FILE, above NAME        in front of the definition of NAME
    # FILE, instead of NAME   in place of the line that defines NAME
    # FILE, new file          the whole file
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import run_python

from rollcorr.kernels.correction.cpu.library import status

ROOT = Path(__file__).parents[1]
CPU = Path("rollcorr/kernels/correction/cpu")
COMPILER = shutil.which("gcc")
BLOCK = re.compile(r"^```(py|c) recipe=(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADER = re.compile(r"^(?:#|//) ([\w/.]+), (in|above|instead of|new) (\w+)\n", re.MULTILINE)

BATCH = """
import torch
from rollcorr import RolloutCorrectionConfig, correct
from rollcorr.kernels.correction import implementations

d = torch.tensor([[0.5, -0.1, 0.0], [-2.0, 0.0, 0.0]])
rollout, mask = torch.full((2, 3), -3.0), torch.tensor([[1, 1, 1], [1, 1, 0]])

def metrics(config, impl="auto"):
    return correct(rollout + d, rollout, mask, config, impl=impl).metrics(prefix="")

def refusal(config):
    try:
        correct(rollout + d, rollout, mask, config, impl="cpu")
    except ValueError as error:
        return str(error)
"""


def recipe(name: str, language: str = "py") -> list[tuple[str, str, str, str]]:
    """Return the edits of a recipe: file, kind of edit, name of the place, and lines."""
    blocks = BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    (text,) = [body for found, of, body in blocks if (found, of) == (language, name)]
    parts = HEADER.split(text)
    assert not parts[0], "lines without a header"
    return list(zip(parts[1::4], parts[2::4], parts[3::4], parts[4::4], strict=True))


def apply(edits: list[tuple[str, str, str, str]], source: Path) -> None:
    for name, how, place, lines in edits:
        path = source / "rollcorr" / name
        if how == "new":
            path.write_text(lines, encoding="utf-8")
            continue
        text = path.read_text(encoding="utf-8").splitlines(keepends=True)
        (start,) = [
            i for i, line in enumerate(text) if re.match(rf"(#define |def |static \w+ )?{place}\b(\(| =|:)", line)
        ]
        end = start
        if how == "instead of":
            del text[start]
        elif how == "in":
            # A macro goes on from line to line; a table, or what Python returns, ends with a bracket of its own line.
            macro = text[start].endswith("\\\n")
            ends = (")\n", "}\n", "    )\n") if text[start].startswith("def ") else (")\n", "}\n")
            end = start + 1 if macro else next(i for i in range(start, len(text)) if text[i] in ends)
        path.write_text("".join((*text[:end], lines, *text[end:])), encoding="utf-8")


@pytest.fixture
def source(tmp_path) -> Path:
    """A copy of the package, with the libraries that were built here."""
    copy = tmp_path / "src"
    shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def run(code: str, source: Path) -> None:
    path = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    done = run_python(BATCH + code, env=environment, cwd=source)
    assert done.returncode == 0, done.stderr


def without_libraries(source: Path) -> None:
    for library in (source / CPU).glob("*.so"):
        library.unlink()


with_and_without_the_c_kernel = pytest.mark.parametrize(
    "built",
    [pytest.param(True, marks=pytest.mark.skipif(status()[0] is None, reason="the C kernel was not built")), False],
    ids=["built", "not built"],
)

METRIC = """
for impl in ("auto", "torch", "reference"):
    assert metrics("decoupled_token_is", impl)["long_fraction"] == 0.5
"""


@with_and_without_the_c_kernel
def test_the_recipe_for_a_metric(source, built):
    edits = recipe("metric")
    assert len({name for name, *_ in edits}) <= 3
    apply(edits, source)
    if not built:
        without_libraries(source)
        run(METRIC, source)
        return
    run(
        METRIC
        + """
usable, note = implementations()["cpu"]
assert not usable and "the row 'long_sequences'" in note, note
said = refusal("decoupled_token_is")
assert "does not compute the row 'long_sequences'" in said and "use impl='auto' or 'torch'" in said, said
""",
        source,
    )


def build(source: Path) -> None:
    """Compile the C kernel of the copy, and remove the libraries that were built before."""
    without_libraries(source)
    folder = source / CPU
    flags = ["-std=gnu11", "-O1", "-Wall", "-Werror", "-fvisibility=hidden", "-pthread", "-shared", "-fPIC"]
    command = [COMPILER, *flags, folder / "correction.c", "-o", folder / "correction_portable.so", "-lm"]
    subprocess.run(command, check=True)


TOKEN_SUM = """
from rollcorr.core.metric_registry import METRICS

assert METRICS["k2_kl"].healthy.warn_above == 0.1
generator = torch.Generator().manual_seed(0)
width, spreads = (530, (0.2, 4.0)) if "triton" in IMPLEMENTATIONS else (1100, (1e-3, 0.2, 0.8, 4.0, 1e3))
mask, rollout = torch.ones(2, width).bool(), torch.randn(2, width, generator=generator).sub(3).clamp(max=0)
for spread in spreads:
    for missing in (False, True):
        train = rollout + spread * torch.randn(2, width, generator=generator)
        if missing:
            train[0, 5], train[0, 520], train[1, 7], mask[1, -40:] = -torch.inf, torch.nan, torch.inf, False
        used = mask & train.isfinite()
        wanted = (train.double() - rollout.double())[used].square().mean().item() / 2
        for impl in IMPLEMENTATIONS:
            found = correct(train, rollout, mask, impl=impl, densities=True).metrics(prefix="")["k2_kl"]
            assert abs(found - wanted) <= 2e-6 * wanted, (impl, spread, missing, found, wanted)
"""


@pytest.mark.parametrize(
    "implementations",
    [
        ("reference", "torch"),
        pytest.param(("cpu",), marks=pytest.mark.skipif(COMPILER is None, reason="no gcc")),
        pytest.param(("triton",), marks=pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed")),
    ],
    ids="+".join,
)
def test_the_recipe_for_a_token_sum(source, implementations):
    """Blocks are quiet, regular, any other, or beyond float32 sums; with missing tokens and probability zero."""
    edits = recipe("token_sum") + recipe("token_sum", "c")
    assert len({name for name, *_ in edits}) <= 8
    apply(edits, source)
    code = ""
    if implementations == ("cpu",):
        # One build serves the other recipe of the compiled kernel too.
        apply(recipe("metric") + recipe("metric", "c"), source)
        build(source)
        code = METRIC + 'assert metrics("decoupled_token_is", "cpu")["long_fraction"] == 0.5\n'
    run(f"{code}IMPLEMENTATIONS = {implementations}\n{TOKEN_SUM}", source)


@with_and_without_the_c_kernel
def test_the_recipe_for_a_criterion(source, built):
    """By hand: the means of |d| are 0.2 and 1, the maxima 0.5 and 2."""
    apply(recipe("criterion"), source)
    code = """
for name, impl in ((name, impl) for name in ("seq_mean", "seq_max", "token") for impl in ("auto", "reference")):
    config = RolloutCorrectionConfig(rollout_rs=f"{name}_magnitude", rollout_rs_threshold=0.9)
    found = metrics(config, impl)
    assert found["rollout_rs_seq_masked_fraction"] == 0.5, name
    assert found["rollout_rs_masked_fraction"] == (0.2 if name == "token" else 0.4), name
    value = {"seq_mean": 0.6, "seq_max": 1.25, "token": 2.6 / 5}[name]
    assert abs(found[f"rollout_rs_{name}_magnitude_mean"] - value) < 1e-6, name
"""
    code += """
from rollcorr.simulation.estimators import every_estimator, threshold_sweep
assert "seq_max_magnitude" in every_estimator() and "seq_max_magnitude" in threshold_sweep()
"""
    if built:
        code += "assert \"does not know the criterion 'token_magnitude'\" in refusal(config)\n"
    else:
        without_libraries(source)
    run(code, source)


@with_and_without_the_c_kernel
def test_the_recipe_for_a_preset(source, built):
    apply(recipe("preset"), source)
    if not built:
        without_libraries(source)
    code = """
assert metrics("decoupled_seq_mean_k2_rs")["rollout_rs_masked_fraction"] == 0
narrow = RolloutCorrectionConfig.decoupled_seq_mean_k2_rs(rs_threshold=0.9)
assert metrics(narrow)["rollout_rs_masked_fraction"] == 0.4
"""
    run(code, source)


# One process runs all commands of a recipe: importing torch takes longer than a command.
COMMAND = """
import contextlib, io, json, pathlib, sys
from rollcorr.cli import main

def command(*arguments, codes=(0,)):
    sys.argv, shown, code = ["rollcorr", *map(str, arguments)], io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(shown):
            main()
    except SystemExit as ended:
        code = ended.code or 0
    assert code in codes, shown.getvalue()
    return shown.getvalue()

ONE_STEP = ["recipe=grpo", "model.path=demo", "steps=1", "rollout.prompts_per_step=2", "rollout.group_size=2"]
ONE_STEP += ["rollout.max_new_tokens=4", "log.null=0", "checkpoint.every=1", "run_dir=run"]
"""


def test_the_recipe_for_a_rule(source):
    apply(recipe("rule"), source)
    run(
        """
from rollcorr import health

batch = {"token_count": 5000.0, "sequence_count": 100.0, "kl": 0.5, "k3_kl": 0.5, "engine/staleness": 9.0}
found = {finding.code: finding for finding in health(batch).findings}
assert found["old_weights"].severity == "warning" and found["old_weights"].follows_from is None
assert found["out_of_range"].follows_from == "old_weights"
assert "old_weights" not in {finding.code for finding in health({**batch, "engine/staleness": 4.0}).findings}
""",
        source,
    )


def test_the_recipe_for_a_sink(source):
    apply(recipe("sink"), source)
    code = """
command("train", *ONE_STEP, "log.sinks=[csv]")
assert "1,reward/mean," in open("run/metrics.csv").read()

from rollcorr import Monitor

with Monitor("runs/watched", "tis", sinks=["csv"]) as monitor:
    monitor.correct(rollout + d, rollout, mask)
    monitor.step()
assert "rollout_corr/k3_kl" in open("runs/watched/metrics.csv").read()
"""
    run(COMMAND + code, source)


def test_the_recipe_for_an_engine(source):
    apply(recipe("engine"), source)
    code = """
command("train", *ONE_STEP, "rollout.engine=single_precision")
policy = next(pathlib.Path("run/checkpoints").rglob("config.json")).parent
pathlib.Path("prompts.txt").write_text("1+2=?\\n3+4=?\\n" * 8)
sampling = ["--prompts", "prompts.txt", "--max-new-tokens", 4, "-o", "null.json"]
shown = command("null", "--engine", "single_precision", "--model", policy, *sampling)
assert shown.startswith("null.json: 256 sequences"), shown
"""
    run(COMMAND + code, source)


def test_the_recipe_for_a_dump(source):
    """The two policies differ by 0.01 nats in every second token."""
    apply(recipe("dump"), source)
    code = """
values = {"sampler_logps": [-1.0] * 64, "trainer_logps": [-1.01, -1.0] * 32}
rows = (json.dumps({"step": row // 32, **values}) for row in range(256))
pathlib.Path("steps.jsonl").write_text("\\n".join(rows))

command("null", "steps.jsonl", "-o", "null.json")
command("import", "steps.jsonl", "-o", "log.parquet")
for log in ("steps.jsonl", "log.parquet"):
    # Dumps without sampling settings agree, but nothing tells how their tokens were drawn.
    shown = command("check", log, "--null", "null.json", codes=(3,))
    assert shown.startswith("not judged: log-probs agree;"), shown
command("advise", "steps.jsonl", "--null", "null.json", codes=(0, 1, 3))
command("calibrate", "null.json", codes=(0, 1, 3))
"""
    run(COMMAND + code, source)
