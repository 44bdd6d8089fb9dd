"""The demo: a fault that is found and named, and a training that a correction saves.

    make demo                                      every run that is not done, two at a time; then the page
    python experiments/demo/demo.py --page         the page alone, from the runs that are done

Four trainings of one small policy on one task, which differ in their sampler and in what corrects for it (`RUNS`).
Each runs in ROOT/NAME as `rollcorr train` would run it, and leaves ROOT/results/NAME.json: its accuracy on held-out
problems and some of its responses. The same command goes on where the last one was stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rollcorr.config import SamplingSpec
from rollcorr.diagnostics import null_of_logs
from rollcorr.diagnostics.report import (
    ComparisonData,
    Panel,
    ShownResponse,
    ShownSample,
    comparison_report,
    config_differences,
    write_comparison,
)
from rollcorr.engines import CTranslate2Engine, GenerationSettings, measure_null, score_responses
from rollcorr.rollout_log import RolloutLogWriter
from rollcorr.run_directory import read_metrics, read_run
from rollcorr.run_directory.directory import RunDirectory
from rollcorr.train import GrpoConfig, load_config, train
from rollcorr.train.grpo import Policy, hard_gated_reward, load_policy, make_task

HERE = Path(__file__).resolve().parent
SETTINGS = HERE / "demo.yaml"
POLICY = HERE / "policy"
ROOT = Path("runs") / "demo"

HELD_OUT = 2_000_000
"""The step whose problems no run trains on."""
PROBLEMS = 256
KEPT_RESPONSES = 32
NULL_ROWS = 128
STANDARD_ERRORS = 2.0
"""A change counts from so many standard errors on."""
STOPPED = 130
"""Exit code of a run that was stopped, as that of `rollcorr train`."""


@dataclass(frozen=True)
class DemoRun:
    """One of the trainings.

    Attributes:
        name: of its folder.
        role: what it is, for the page.
        changes: what differs from demo.yaml.
    """

    name: str
    role: str
    changes: tuple[str, ...] = ()

    def config(self, root: Path, overrides: Sequence[str] = ()) -> GrpoConfig:
        """demo.yaml with the changes of this run; `overrides` win."""
        fixed = (f"run_dir={root / self.name}", f"model.path={POLICY}")
        config = load_config(SETTINGS, [*fixed, *self.changes, *overrides])
        assert isinstance(config, GrpoConfig)
        return config


COARSE = (
    "rollout.engine_options={compute_type: int8, weight_bits: 4, threads: 1}",
    "rollout.refresh_every=8",
)
RUNS = (
    DemoRun("healthy", "An int8 sampler that gets the new weights at every step."),
    DemoRun(
        "fault",
        "The same sampler, but it never gets new weights. Nothing fails, and nothing is logged about it.",
        ("rollout.refresh_every=1000",),
    ),
    DemoRun(
        "uncorrected",
        "A sampler that is meant to be cheap: weights of 4 bits, new ones at every 8th step. Nothing corrects for it.",
        COARSE,
    ),
    DemoRun(
        "corrected",
        "The same cheap sampler. Each response is weighted by π / μ of the whole response, truncated at 4 (Seq-TIS).",
        (*COARSE, "algorithm.rollout_correction={rollout_is: sequence, rollout_is_threshold: 4.0}"),
    ),
)


def measure_demo_null(path: Path) -> None:
    """Measure what the int8 sampler and the trainer differ by when both have the weights of the start."""
    policy = load_policy(str(POLICY))
    problems = make_task(RUNS[0].config(ROOT).task).problems(NULL_ROWS, seed=0, step=HELD_OUT + 1)
    batch = measure_null(
        _engine(policy, "int8"),
        [policy.encode(problem.prompt) for problem in problems],
        seed=0,
        score=lambda rollout: score_responses(policy.model, rollout.tokens).log_prob,
    )
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "null.parquet"
        with RolloutLogWriter(log) as writer:
            writer.write(batch)
        path.parent.mkdir(parents=True, exist_ok=True)
        null_of_logs([log], kind="engine").save(path)


def run_here(run: DemoRun, root: Path, overrides: Sequence[str] = (), *, problems: int = PROBLEMS) -> int:
    """Train one run, evaluate its checkpoints and write its result. Returns the exit code of `rollcorr train`."""
    config = run.config(root, overrides)
    summary = train(config)
    if summary.failure:
        return 3 if summary.engine_failed else 1
    if summary.interrupted:
        return STOPPED

    curve: list[tuple[int, float]] = []
    responses: dict[int, list[dict[str, Any]]] = {}
    for checkpoint in sorted(RunDirectory(Path(config.run_dir)).checkpoints.glob("step_*")):
        step = int(checkpoint.name.removeprefix("step_"))
        accuracy, responses[step] = evaluate(load_policy(str(checkpoint)), config, problems)
        curve.append((step, accuracy))
    result = {
        "held_out": curve,
        "problems": problems,
        "before": responses[curve[0][0]],
        "after": responses[curve[-1][0]],
    }
    _write_whole(_result_path(root, run.name), json.dumps(result, ensure_ascii=False, indent=1) + "\n")
    return 0


def evaluate(policy: Policy, config: GrpoConfig, problems: int) -> tuple[float, list[dict[str, Any]]]:
    """Accuracy on held-out problems, sampled in float32 at temperature 1 for every run alike, and some responses."""
    drawn = make_task(config.task).problems(problems, seed=0, step=HELD_OUT)
    engine = _engine(policy, "float32", max_new_tokens=config.rollout.max_new_tokens)
    tokens = engine.generate([policy.encode(problem.prompt) for problem in drawn], seed=0).tokens

    responses, right = [], 0
    for ids, mask, problem in zip(tokens.response_ids, tokens.response_mask, drawn, strict=True):
        response = ids[mask].tolist()
        reward = hard_gated_reward(response, problem.answer, policy.tokenizer, bonus_length=config.task.bonus_length)
        right += reward.correct
        text = policy.tokenizer.decode(response, skip_special_tokens=True)
        responses.append(
            {
                "prompt": problem.prompt.strip(),
                "answer": problem.answer,
                "text": text,
                "right": reward.correct,
                "wrong_from": None if reward.correct else _agreeing(text, problem.solution),
            }
        )
    return right / problems, responses[:KEPT_RESPONSES]


def run_side_by_side(
    commands: Mapping[str, Sequence[str]], root: Path, *, jobs: int, console: Console, steps: int
) -> dict[str, int]:
    """Run commands, some at a time, each with a log ROOT/NAME.log; returns the exit code of each that was started.

    Ctrl-C, SIGTERM and SIGHUP start nothing more and are passed on, so that each run saves before it ends.
    """
    waiting, stop = list(commands), list[int]()
    running: dict[str, subprocess.Popen[bytes]] = {}
    codes: dict[str, int] = {}

    def on_signal(number: int, _frame: object) -> None:
        stop.append(number)
        for process in running.values():
            # A run that is stopped twice stops at once, at its last checkpoint.
            process.send_signal(signal.SIGINT)

    signals = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, on_signal) for number in signals}
    columns = (
        TextColumn("{task.description:12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=console) as progress:
            bars = {name: progress.add_task(name, total=steps, note="", start=False) for name in waiting}
            while running or (waiting and not stop):
                while waiting and len(running) < jobs and not stop:
                    name = waiting.pop(0)
                    running[name] = _started(commands[name], root / f"{name}.log")
                    progress.start_task(bars[name])
                time.sleep(0.2)
                for name, process in list(running.items()):
                    done, note = _progress_of(root / name)
                    progress.update(bars[name], completed=done, note=note)
                    if process.poll() is not None:
                        codes[name] = running.pop(name).returncode
                        progress.stop_task(bars[name])
                        progress.console.print(f"{name}: {_ending(codes[name])}", highlight=False)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if stop:
        codes.setdefault("(stopped)", STOPPED)
    return codes


def page_data(root: Path, chosen: Sequence[DemoRun] = RUNS) -> ComparisonData:
    """What the page shows of the runs that are done."""
    results = {run.name: json.loads(_result_path(root, run.name).read_text(encoding="utf-8")) for run in chosen}
    for run in chosen:
        shutil.copyfile(root / "null.json", RunDirectory(root / run.name).null)
    data = comparison_report(
        [read_run(root / run.name) for run in chosen],
        title="Rollout correction, shown on four short trainings",
        subtitle=_summary(results),
        remarks=(
            "The same small policy learns the same task four times, from the same start: it adds a number 26 times, "
            "line by line, and is paid for a right last line. A separate sampler writes its responses, and only the "
            "sampler and the correction differ. Accuracy is always measured in the same way: on held-out "
            f"problems ({results[chosen[0].name]['problems']}), in float32.",
            _setting(chosen[0].config(root)),
            NULL_REMARK,
        ),
        roles=tuple(run.role for run in chosen),
        extra=((HELD_OUT_PANEL, {name: [tuple(point) for point in one["held_out"]] for name, one in results.items()}),),
        samples=tuple(samples(results)),
    )
    return dataclasses.replace(data, conclusions=tuple(conclusions(data, results)))


NULL_REMARK = (
    "Findings compare the runs with null.json. This file holds what sampler and trainer differ by when both have the "
    f"same weights: the noise that is normal. It was measured before the training, on {NULL_ROWS} responses of the "
    "int8 sampler."
)


def _summary(results: dict[str, Any]) -> str:
    """What the four curves show, in one sentence."""
    start = _percent(_ends(results["healthy"])[0])
    ends = {name: _percent(_ends(one)[1]) for name, one in results.items()}
    return (
        f"Four trainings that start at an accuracy of {start}: a sampler with old weights ends at {ends['fault']}, and "
        f"at {ends['healthy']} with new ones; a sampler of 4 bits ends at {ends['uncorrected']}, and at "
        f"{ends['corrected']} with rollout correction."
    )


def _setting(config: GrpoConfig) -> str:
    """What all runs share, and how to make them again."""
    rows = config.rollout.rows
    return (
        f"Every run: a Llama policy of 0.15 M parameters, {config.steps} steps of {rows} responses with about 270 "
        f"tokens each, GRPO with {rows // config.optim.mini_batch_size} updates per step at a learning rate of "
        f"{config.optim.lr:g}, seed {config.seed}, temperature 1. The command make demo makes the runs and the page "
        "again."
    )


HELD_OUT_PANEL = Panel(
    name="held_out",
    title="Accuracy on held-out problems",
    curves={"held_out": "accuracy"},
    absent="not measured",
    bounds=(0.0, 1.0),
    see=f"Of the policy that is trained, sampled in float32. One standard error is 0.03 at {PROBLEMS} problems.",
)


def samples(results: dict[str, Any]) -> list[ShownSample]:
    """The first problem that the policy solved before the training, and the first that it did not."""
    first = next(iter(results.values()))
    shown = []
    for solved in (True, False):
        number = next((place for place, one in enumerate(first["before"]) if one["right"] is solved), None)
        if number is None:
            continue
        before = first["before"][number]
        answers = {"before": before} | {f"after: {name}": one["after"][number] for name, one in results.items()}
        responses = tuple(
            ShownResponse(title=title, text=one["text"], right=one["right"], wrong_from=one["wrong_from"])
            for title, one in answers.items()
        )
        shown.append(ShownSample(prompt=before["prompt"], answer=before["answer"], responses=responses))
    return shown


def conclusions(data: ComparisonData, results: dict[str, Any]) -> list[str]:
    """What the runs came to, in a sentence each, from the measured numbers alone."""
    reports = dict(zip(results, data.comparison.reports, strict=True))
    texts = {run.path.name: run.config_text for run in data.runs}
    healthy, fault, uncorrected, corrected = (run.name for run in RUNS)

    verdict = f"The verdict is {reports[fault].verdict!r}, and no fault was named."
    named = next((cause.finding for cause in reports[fault].causes if cause.finding.severity != "note"), None)
    if named is not None:
        found = named.evidence.get("found_at_step", named.first_step)
        verdict = f"rollcorr, which reads the run's metrics, can tell at step {found:g}, and says: {named.title!r}."

    # A sampler that keeps the first weights goes on earning what they earn.
    after = _ends(results[fault])[1]
    reward = data.comparison.values.get("reward/mean", (None,) * len(results))[list(results).index(fault)]
    hidden = ""
    if reward is not None and reward > 2 * after + 0.1:
        hidden = (
            f" The reward does not show it: over the last ten steps its median is {reward:.2f}, "
            "for the old weights earn it."
        )

    fix = _differences(texts[healthy], texts[fault])
    repaired = 100 * (_ends(results[healthy])[1] - after)
    gain = 100 * (_ends(results[corrected])[1] - _ends(results[uncorrected])[1])
    return [
        f"A healthy run ({healthy}): the accuracy {_change(results[healthy])}. "
        f"The verdict is {reports[healthy].verdict!r}.",
        f"A fault ({fault}): the sampler never gets new weights. The accuracy {_change(results[fault])}."
        f"{hidden} {verdict}",
        f"Its fix: {fix}. The runs {fault} and {healthy} differ in nothing else. With the fix the accuracy is "
        f"{_percent(_ends(results[healthy])[1])} in the end, not {_percent(after)}: {repaired:+.0f} percentage points.",
        f"A cheap sampler without correction ({uncorrected}): the accuracy {_change(results[uncorrected])}.",
        f"The same cheap sampler with correction ({corrected}): the accuracy {_change(results[corrected])}. "
        f"Its configuration adds {_settings(texts[corrected], texts[uncorrected])}. The correction is worth "
        f"{gain:+.0f} percentage points.",
    ]


def _differences(text: str, other: str) -> str:
    """What one configuration sets otherwise than another."""
    pairs = config_differences([text, other]).items()
    return ", ".join(f"{option}={mine} instead of {theirs}" for option, (mine, theirs) in pairs)


def _settings(text: str, other: str) -> str:
    """What one configuration sets that another does not, without the other's values."""
    return ", ".join(f"{option}={mine}" for option, (mine, _) in config_differences([text, other]).items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not done, write the page, and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="changes to demo.yaml for all runs, name=value")
    parser.add_argument("--root", type=Path, default=ROOT, help="where the runs go")
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="runs at a time, each on one core"
    )
    parser.add_argument("--problems", type=int, default=PROBLEMS, help="held-out problems")
    parser.add_argument("--only", choices=[run.name for run in RUNS], help="one run, in this process, without the page")
    parser.add_argument("--page", action="store_true", help="write the page, and train nothing")
    options = parser.parse_args(arguments)
    console = Console()
    root = options.root

    if options.only:
        (run,) = (run for run in RUNS if run.name == options.only)
        try:
            return run_here(run, root, options.overrides, problems=options.problems)
        except KeyboardInterrupt:
            return STOPPED

    left = [run for run in RUNS if not _result_path(root, run.name).exists()]
    if options.page and left:
        console.print(f"not done: {', '.join(run.name for run in left)}; run `make demo`", highlight=False)
        return 2
    if not (root / "null.json").exists():
        measure_demo_null(root / "null.json")
    if left:
        console.print(f"{len(left)} of {len(RUNS)} runs are left, about 2 minutes each on a core of its own")
        shared = ["--root", str(root), "--problems", str(options.problems), *options.overrides]
        commands = {run.name: [sys.executable, str(Path(__file__)), "--only", run.name, *shared] for run in left}
        steps = RUNS[0].config(root, options.overrides).steps
        codes = run_side_by_side(commands, root, jobs=options.jobs, console=console, steps=steps)
        failed = {name: code for name, code in codes.items() if code}
        if failed:
            return _show_failures(failed, root, console)

    data = page_data(root)
    page = write_comparison(data, root / "page")
    for number, sentence in enumerate(data.conclusions, start=1):
        console.print(f"{number}. {sentence}", highlight=False)
    console.print(f"\npage: {page}", highlight=False, soft_wrap=True)
    return 0


def _show_failures(failed: dict[str, int], root: Path, console: Console) -> int:
    """Say what did not end well, and return the exit code."""
    for name, code in failed.items():
        log = root / f"{name}.log"
        if code != STOPPED and log.exists():
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
            console.print("\n".join([f"{name}, from {log}:", *lines]), highlight=False, markup=False)
    if STOPPED in failed.values():
        console.print("stopped; the same command goes on", highlight=False)
        return STOPPED
    console.print(f"to start again from nothing: rm -rf {root}", highlight=False)
    return max(failed.values())


def _agreeing(text: str, solution: str) -> int:
    """How many characters a text has in common with the solution before the first that differs."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, solution, strict=False)))


def _engine(policy: Policy, compute_type: Any, *, max_new_tokens: int | None = None) -> CTranslate2Engine:  # noqa: ANN401
    settings = GenerationSettings(
        sampling=SamplingSpec(),
        max_new_tokens=max_new_tokens or RUNS[0].config(ROOT).rollout.max_new_tokens,
        eos_token_id=policy.eos_token_id,
        pad_token_id=policy.pad_token_id,
    )
    return CTranslate2Engine(policy.model, settings, compute_type=compute_type, batch_size=64, threads=1)


def _started(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """A process in a session of its own: Ctrl-C reaches it once, through this program, and not a second time."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def _progress_of(run: Path) -> tuple[int, str]:
    """How many steps a run has, and its latest reward."""
    metrics = RunDirectory(run).metrics
    steps = read_metrics(metrics) if metrics.is_file() else []
    if not steps:
        return 0, ""
    return len(steps), f"reward {steps[-1].get('reward/mean', math.nan):.2f}"


def _ending(code: int) -> str:
    return {0: "done", STOPPED: "stopped and saved"}.get(code, f"failed with exit code {code}")


def _result_path(root: Path, name: str) -> Path:
    return root / "results" / f"{name}.json"


def _write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _ends(result: dict[str, Any]) -> tuple[float, float]:
    """Accuracy before and after."""
    return result["held_out"][0][1], result["held_out"][-1][1]


def _change(result: dict[str, Any]) -> str:
    """How the accuracy changed, where `STANDARD_ERRORS` decide whether it did."""
    before, after = _ends(result)
    error = math.sqrt((before * (1 - before) + after * (1 - after)) / result["problems"])
    if abs(after - before) <= STANDARD_ERRORS * error:
        return f"stays at {_percent(before)} (in the end {_percent(after)})"
    return f"{'rises' if after > before else 'falls'} from {_percent(before)} to {_percent(after)}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


if __name__ == "__main__":
    sys.exit(main())
