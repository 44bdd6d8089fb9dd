"""The trained study: which correction saves a training, and from what.

    python experiments/mismatch_in_practice/trained.py                    every cell that is not done; then the page
    python experiments/mismatch_in_practice/trained.py stale_quantized-none-0 clean-seq_tis-1     these cells alone
    python experiments/mismatch_in_practice/trained.py --list             what is done, and what the rest costs
    python experiments/mismatch_in_practice/trained.py --page             the page and its figures, from the cells

A cell is one training: a column (what is wrong with the sampler), a correction and a seed. It starts from the warm-up
policy of its seed, runs in runs/trained/CELL, and leaves trained/cells/CELL.json. The same command goes on with a cell
that was stopped. Every cell samples and trains on the same number of responses. The grid is that of Fang & Khazi
(2025), "Mismatch Praxis", section 5, https://www.llmdata.com/blog/mismatch-praxis/.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from rollcorr.config import SamplingSpec
from rollcorr.engines import CTranslate2Engine, GenerationSettings
from rollcorr.run_directory import read_metrics
from rollcorr.run_directory.directory import RunDirectory
from rollcorr.train import GrpoConfig, load_config, train
from rollcorr.train.grpo import Policy, ScratchpadTask, evaluate, load_policy, make_task, save_policy, warm_up

HERE = Path(__file__).resolve().parent
SETTINGS = HERE / "trained.yaml"
CELLS = HERE / "trained" / "cells"
RUNS = Path("runs") / "trained"

COLUMNS: dict[str, tuple[str, ...]] = {
    "clean": ("rollout.engine=ctranslate2", "rollout.engine_options={compute_type: float32, threads: 1}"),
    "stale_quantized": (
        "rollout.engine=ctranslate2",
        "rollout.engine_options={compute_type: int8, weight_bits: 4, threads: 1}",
        "rollout.refresh_every=8",
    ),
    "truncated": (
        "rollout.engine=transformers",
        "rollout.dtype=float32",
        "rollout.sampling={temperature: 0.7, top_p: 0.8, top_k: 20, logprobs: processed}",
        "actor.sampling=full",
        "actor.allow_incompatible=true",
    ),
}
"""What is wrong with the sampler, as changes of trained.yaml."""

CORRECTIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    "token_tis": ("algorithm.rollout_correction={rollout_is: token, rollout_is_threshold: 2.0}",),
    "seq_tis": ("algorithm.rollout_correction={rollout_is: sequence, rollout_is_threshold: 4.0}",),
    "geo_rs_token_tis": ("algorithm.rollout_correction=decoupled_geo_rs_token_tis",),
    "seq_mis": (
        "algorithm.rollout_correction={rollout_is: sequence, rollout_is_threshold: 2.0, rollout_rs: seq_sum_k1, "
        "rollout_rs_threshold: '0.5_2.0'}",
    ),
    "replay": ("actor.sampling=replay", "actor.allow_incompatible=false"),
}
"""What is done about it, as changes of trained.yaml. `replay` scores the tokens over the sampler's kept sets."""

GRID = ("none", "token_tis", "seq_tis")
MORE: dict[str, tuple[str, ...]] = {"stale_quantized": ("geo_rs_token_tis", "seq_mis"), "truncated": ("replay",)}
"""What is tried in a column besides the grid."""

BREAKS = ("stale_quantized",)
"""Columns where training breaks: they have three seeds, the others two."""

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rope_theta": 100.0,
    "initializer_range": 0.08,
    "tie_word_embeddings": True,
}
WARM_UP = ((8, 300, 32, 4e-3), (26, 600, 16, 3e-3))
"""Additions, steps, problems per step and learning rate: short pads first, because they cost less."""
WARM_UP_EVALUATE = 20
WARM_UP_LOSS = 0.02
TARGET_ACCURACY = 0.5
HELD_OUT_PROBLEMS = 256
WARM_UP_MINUTES = 1.5
CORE_MINUTES = {"clean": 1.5, "stale_quantized": 1.5, "truncated": 2.5}
"""What a cell costs on a core of an AMD EPYC with AVX-512; the time of a finished cell is in its file."""

KEPT_METRICS = {
    "reward": "reward/mean",
    "length": "response/length_mean",
    "entropy": "actor/entropy",
    "grad_norm": "actor/grad_norm",
    "staleness": "engine/staleness",
    "kl": "rollout_corr/kl",
    "k3": "rollout_corr/k3_kl",
    "t_times_kl": "rollout_corr/t_times_kl",
    "chi2_token": "rollout_corr/chi2_token",
    "chi2_seq": "rollout_corr/chi2_seq",
    "log_ratio_min": "rollout_corr/log_ratio_min",
    "log_ratio_max": "rollout_corr/log_ratio_max",
    "training_log_ppl": "rollout_corr/training_log_ppl",
    "rollout_log_ppl": "rollout_corr/rollout_log_ppl",
    "mean_weight": "rollout_corr/rollout_is_mean",
    "ess": "rollout_corr/rollout_is_eff_sample_size",
    "low_weight": "rollout_corr/rollout_is_low_weight_fraction",
    "saturated_low": "rollout_corr/saturated_low_fraction",
    "rejected": "rollout_corr/rollout_rs_masked_fraction",
    "skipped_steps": "actor/skipped_steps",
}
"""Name in a cell's file → metric of the trainer. A cell has those that its correction measures."""


@dataclass(frozen=True)
class Cell:
    """One training of the study."""

    column: str
    correction: str
    seed: int

    @property
    def name(self) -> str:
        """What its file and its run are called."""
        return f"{self.column}-{self.correction}-{self.seed}"

    @property
    def path(self) -> Path:
        """Where its result goes."""
        return CELLS / f"{self.name}.json"

    def config(self, *overrides: str) -> GrpoConfig:
        """trained.yaml with what this cell changes; `overrides` win."""
        own = (f"run_dir={RUNS / self.name}", f"seed={self.seed}", f"model.path={warm_up_folder(self.seed)}")
        config = load_config(SETTINGS, (*own, *COLUMNS[self.column], *CORRECTIONS[self.correction], *overrides))
        assert isinstance(config, GrpoConfig)
        return config


def cells() -> list[Cell]:
    """Every cell: all columns and corrections of one seed, then those of the next."""
    found = []
    for seed in range(3):
        for column in COLUMNS:
            if seed < (3 if column in BREAKS else 2):
                found += [Cell(column, correction, seed) for correction in (*GRID, *MORE.get(column, ()))]
    return found


def warm_up_folder(seed: int) -> Path:
    """Where the policy is that all cells of a seed start from."""
    return RUNS / "warm_up" / f"seed_{seed}"


def make_warm_up(seed: int, console: Console) -> Path:
    """Imitate solutions until half of the sampled answers are right; what exists already is kept."""
    folder = warm_up_folder(seed)
    if (folder / "done.json").exists():
        return folder

    policy = load_policy(None, config=MODEL, seed=seed)
    final = ScratchpadTask(additions=WARM_UP[-1][0])
    reached: dict[str, float] = {}

    def good_enough(step: int, loss: float) -> bool:
        if step % WARM_UP_EVALUATE or loss > WARM_UP_LOSS:
            return False
        policy.model.eval()
        reached.update(held_out(policy, final, problems=128, seed=seed), step=step)
        policy.model.train()
        console.print(f"warm-up of seed {seed}, step {step}: loss {loss:.4f} nats, accuracy {reached['accuracy']:.2f}")
        return reached["accuracy"] >= TARGET_ACCURACY

    for additions, steps, batch_size, rate in WARM_UP:
        loss = warm_up(
            policy,
            ScratchpadTask(additions=additions),
            steps=steps,
            batch_size=batch_size,
            learning_rate=rate,
            seed=seed,
            good_enough=good_enough if additions == final.additions else lambda step, loss: False,
        )
        console.print(f"warm-up of seed {seed}, {additions} additions: loss {loss:.4f} nats")
    save_policy(policy, folder)
    (folder / "done.json").write_text(json.dumps(reached) + "\n", encoding="utf-8")
    return folder


def held_out(policy: Policy, task: Any, *, problems: int, seed: int) -> dict[str, float]:  # noqa: ANN401
    """Accuracy on held-out problems and its standard error, sampled in float32 at temperature 1 whatever the column."""
    settings = GenerationSettings(
        sampling=SamplingSpec(),
        max_new_tokens=275,
        eos_token_id=policy.eos_token_id,
        pad_token_id=policy.pad_token_id,
    )
    engine = CTranslate2Engine(policy.model, settings, compute_type="float32", batch_size=64, threads=1)
    accuracy = evaluate(engine, policy, task, problems=problems, bonus_length=0, seed=seed)["accuracy"]
    return {"accuracy": accuracy, "standard_error": math.sqrt(accuracy * (1 - accuracy) / problems)}


class ProcessorTime:
    """A sink that keeps the processor time of each step, so that a run which was stopped has its sum."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last = time.process_time()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the seconds since the step before."""
        now = time.process_time()
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "seconds": round(now - self.last, 3)}) + "\n")
        self.last = now

    def close(self) -> None:
        """Nothing is held open."""

    @staticmethod
    def total(path: Path) -> float:
        """Seconds of all steps; of a step that was repeated, those of its last time."""
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return sum({line["step"]: line["seconds"] for line in lines}.values())


def run_cell(cell: Cell, console: Console, *overrides: str, problems: int = HELD_OUT_PROBLEMS) -> dict[str, Any] | None:
    """Train a cell, evaluate its checkpoints, and return what its file holds; None if it was stopped."""
    commit = _commit()  # before anything is trained, for the checkout may move on meanwhile
    make_warm_up(cell.seed, console)
    config = cell.config(*overrides)
    directory = RunDirectory(Path(config.run_dir))
    times = directory.path.with_name(f"{directory.path.name}.processor_time.jsonl")
    times.parent.mkdir(parents=True, exist_ok=True)
    summary = train(config, console=console, sinks=[ProcessorTime(times)])
    if summary.interrupted or summary.failure:
        return None

    curve = []
    task = make_task(config.task)
    for checkpoint in sorted(directory.checkpoints.glob("step_*")):
        step = int(checkpoint.name.removeprefix("step_"))
        policy = load_policy(str(checkpoint))
        curve.append({"step": step, **held_out(policy, task, problems=problems, seed=cell.seed)})
        console.print(f"{cell.name}: held-out accuracy after {step} steps {curve[-1]['accuracy']:.3f}")

    steps = read_metrics(directory.metrics)
    responses = config.steps * config.rollout.rows
    lengths = [step["response/length_mean"] for step in steps]
    return {
        "cell": cell.name,
        "column": cell.column,
        "correction": cell.correction,
        "seed": cell.seed,
        "steps": config.steps,
        "responses": responses,
        "tokens": round(sum(lengths) * config.rollout.rows),
        "held_out_problems": problems,
        "held_out": curve,
        "metrics": {
            name: [_short(step[metric]) for step in steps]
            for name, metric in KEPT_METRICS.items()
            if all(metric in step for step in steps)
        },
        "core_seconds": round(ProcessorTime.total(times), 1),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


def write_cell(cell: Cell, result: Mapping[str, Any]) -> None:
    """Keep what a cell came to, whole or not at all; a list or a metric is one line."""
    metrics = ",\n".join(f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in result["metrics"].items())
    lines = [
        f" {json.dumps(name)}: " + (f"{{\n{metrics}\n }}" if name == "metrics" else json.dumps(value))
        for name, value in result.items()
    ]
    CELLS.mkdir(parents=True, exist_ok=True)
    partial = cell.path.with_suffix(".part")
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    os.replace(partial, cell.path)


def read_cells() -> list[dict[str, Any]]:
    """The results of the cells that are done, in the order of the study."""
    return [json.loads(cell.path.read_text(encoding="utf-8")) for cell in cells() if cell.path.exists()]


def facts() -> dict[str, str]:
    """What the page says of the settings."""
    stale = Cell("stale_quantized", "none", 0).config().rollout
    return {
        "problems": str(HELD_OUT_PROBLEMS),
        "stale": f"CTranslate2 in {stale.engine_options['compute_type']} from weights rounded to "
        f"{stale.engine_options['weight_bits']} bits, with new weights at every {stale.refresh_every}th step",
    }


def budget_lines(chosen: Sequence[Cell]) -> list[str]:
    """What is done, and what the rest costs."""
    open_cells = [cell for cell in chosen if not cell.path.exists()]
    minutes = sum(CORE_MINUTES[cell.column] for cell in open_cells)
    seeds = {cell.seed for cell in open_cells if not (warm_up_folder(cell.seed) / "done.json").exists()}
    lines = [
        f"{len(chosen) - len(open_cells)} of {len(chosen)} cells are done",
        f"{len(open_cells)} cells are left: about {minutes:.0f} core-minutes",
    ]
    if seeds:
        lines.append(f"{len(seeds)} warm-ups come before: about {len(seeds) * WARM_UP_MINUTES:.1f} core-minutes")
    return lines


def run_here(left: Sequence[Cell], console: Console, options: argparse.Namespace) -> list[str]:
    """Run cells one after another, until one is stopped or the time is over; returns what was stopped."""
    started = time.monotonic()
    for cell in left:
        if options.minutes is not None and time.monotonic() - started > 60 * options.minutes:
            break
        result = run_cell(cell, console)
        if result is None:
            return [cell.name]
        write_cell(cell, result)
        console.print(f"wrote {cell.path}", highlight=False)
    return []


def run_side_by_side(left: Sequence[Cell], console: Console, options: argparse.Namespace) -> list[str]:
    """Run several cells at a time, each in a process of its own with a log beside its run; returns what was stopped."""
    for seed in sorted({cell.seed for cell in left}):
        make_warm_up(seed, console)
    started, stopped = time.monotonic(), []

    def run(cell: Cell) -> int | None:
        if stopped or (options.minutes is not None and time.monotonic() - started > 60 * options.minutes):
            return None
        command = [sys.executable, str(Path(__file__).resolve()), cell.name, "--no-page"]
        with (RUNS / f"{cell.name}.log").open("w", encoding="utf-8") as log:
            return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode

    with Progress(console=console) as progress, ThreadPoolExecutor(options.jobs) as pool:
        bar = progress.add_task("core-minutes", total=sum(CORE_MINUTES[cell.column] for cell in left))
        running = {pool.submit(run, cell): cell for cell in left}
        for done in as_completed(running):
            cell, code = running[done], done.result()
            progress.advance(bar, CORE_MINUTES[cell.column])
            if code:
                stopped.append(cell.name)
            if code is not None:
                progress.console.print(f"{cell.name}: exit code {code}", highlight=False)
    return stopped


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells that are asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", help="names of cells; none for all")
    parser.add_argument("--list", action="store_true", help="show which cells are done, and what the rest costs")
    parser.add_argument("--no-page", action="store_true", help="leave the page as it is")
    parser.add_argument("--page", action="store_true", help="write the page and its figures, and train nothing")
    parser.add_argument("--jobs", type=int, default=1, help="cells that run at a time, each on one core")
    parser.add_argument("--minutes", type=float, help="start no cell after so many minutes")
    options = parser.parse_args(arguments)
    console = Console()
    by_name = {cell.name: cell for cell in cells()}
    unknown = [name for name in options.cells if name not in by_name]
    if unknown:
        console.print(f"no cell is called {', '.join(unknown)}; --list shows all")
        return 2

    chosen = [by_name[name] for name in options.cells] or list(by_name.values())
    if options.list:
        for cell in chosen:
            console.print(f"{'done' if cell.path.exists() else 'open'}  {cell.name}", highlight=False)
    for line in budget_lines(chosen):
        console.print(line, highlight=False)
    if options.list:
        return 0

    left = [] if options.page else [cell for cell in chosen if not cell.path.exists()]
    run = run_here if options.jobs == 1 else run_side_by_side
    stopped = run(left, console, options)
    if stopped:
        console.print(f"stopped: {', '.join(stopped)}; the same command goes on with them", highlight=False)
        return 130

    if options.no_page:
        return 0

    from claims_page import write_claims_page
    from trained_page import write_page

    write_page(read_cells(), [cell.name for cell in cells()], facts())
    write_claims_page()
    return 0


def _short(value: float | None) -> float | None:
    """Four digits, which is more than a seed repeats; a metric that is not finite is null in the run's file too."""
    return None if value is None else float(f"{value:.4g}")


def _processor() -> str:
    """The processor's own name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """The commit that trained, as git names it; "unknown" outside a checkout."""
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=HERE, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
