"""One training of the trained study and of the training bench: its settings, its warm-up, its result.

A cell is a column (what is wrong with the sampler), a correction and a seed. It starts from the warm-up policy of its
seed, runs in runs/trained/CELL, and leaves CELL.json. Every cell samples and trains on the same number of responses.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from rollcorr.config import SamplingSpec
from rollcorr.engines import CTranslate2Engine, GenerationSettings
from rollcorr.run_directory import read_metrics
from rollcorr.run_directory.directory import RunDirectory
from rollcorr.train import GrpoConfig, load_config, train
from rollcorr.train.grpo import Policy, ScratchpadTask, evaluate, load_policy, make_task, save_policy, warm_up

HERE = Path(__file__).resolve().parent
SETTINGS = HERE / "trained.yaml"
RUNS = Path("runs") / "trained"

COLUMNS: dict[str, tuple[str, ...]] = {
    "clean": ("rollout.engine=ctranslate2", "rollout.engine_options={compute_type: float32, threads: 1}"),
    "stale_quantized": (
        "rollout.engine=ctranslate2",
        "rollout.engine_options={compute_type: int8, weight_bits: 4, threads: 1}",
        "rollout.refresh_every=8",
    ),
    "stale": (
        "rollout.engine=ctranslate2",
        "rollout.engine_options={compute_type: float32, threads: 1}",
        "rollout.refresh_every=8",
    ),
    "quantized": (
        "rollout.engine=ctranslate2",
        "rollout.engine_options={compute_type: int8, weight_bits: 4, threads: 1}",
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
    "token_tis_20": ("algorithm.rollout_correction={rollout_is: token, rollout_is_threshold: 20.0}",),
    "seq_tis": ("algorithm.rollout_correction={rollout_is: sequence, rollout_is_threshold: 4.0}",),
    "horizon": (
        "algorithm.rollout_correction={rollout_is: horizon, rollout_is_horizon: 0.9, rollout_is_threshold: 4.0}",
    ),
    "geo_rs": ("algorithm.rollout_correction=decoupled_geo_rs",),
    "geo_rs_token_tis": ("algorithm.rollout_correction=decoupled_geo_rs_token_tis",),
    "seq_mis": (
        "algorithm.rollout_correction={rollout_is: sequence, rollout_is_threshold: 2.0, rollout_rs: seq_sum_k1, "
        "rollout_rs_threshold: '0.5_2.0'}",
    ),
    **dict.fromkeys(
        ("prefix", "min_prefix", "ess_cap"),
        (
            "algorithm.rollout_correction={rollout_is: horizon, rollout_is_horizon: 1.0, rollout_is_threshold: 4.0, "
            "impl: torch}",
        ),
    ),
    "replay": ("actor.sampling=replay", "actor.allow_incompatible=false"),
}
"""What is done about it, as changes of trained.yaml. `replay` scores the tokens over the sampler's kept sets. The rules
of experiments/bench/rivals.py take the place of the horizon's sums, so the bench alone trains them."""

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

    def path(self, folder: Path) -> Path:
        """Return the path of its result."""
        return folder / f"{self.name}.json"

    def config(self, *overrides: str) -> GrpoConfig:
        """trained.yaml with what this cell changes; `overrides` win."""
        own = (f"run_dir={RUNS / self.name}", f"seed={self.seed}", f"model.path={warm_up_folder(self.seed)}")
        config = load_config(SETTINGS, (*own, *COLUMNS[self.column], *CORRECTIONS[self.correction], *overrides))
        assert isinstance(config, GrpoConfig)
        return config


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
    """Train a cell, evaluate its checkpoints, and return the content of its file; None if it was stopped.

    Raises:
        RuntimeError: the training failed, so that it has no result.
    """
    commit = _commit()  # before anything is trained, for the checkout may move on meanwhile
    make_warm_up(cell.seed, console)
    config = cell.config(*overrides)
    directory = RunDirectory(Path(config.run_dir))
    times = directory.path.with_name(f"{directory.path.name}.processor_time.jsonl")
    times.parent.mkdir(parents=True, exist_ok=True)
    summary = train(config, console=console, sinks=[ProcessorTime(times)])
    if summary.failure:
        raise RuntimeError(f"{cell.name}: {summary.failure}")
    if summary.interrupted:
        return None

    curve = []
    task = make_task(config.task)
    for checkpoint in sorted(directory.checkpoints.glob("step_*")):
        step = int(checkpoint.name.removeprefix("step_"))
        # A run that was stopped has a checkpoint more, of the step where it stopped.
        if step % config.checkpoint.every:
            continue
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


def write_cell(path: Path, result: Mapping[str, Any]) -> None:
    """Write the result of a cell atomically; a list or a metric is one line."""
    metrics = ",\n".join(f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in result["metrics"].items())
    lines = [
        f" {json.dumps(name)}: " + (f"{{\n{metrics}\n }}" if name == "metrics" else json.dumps(value))
        for name, value in result.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    os.replace(partial, path)


def read_cells(chosen: Sequence[Cell], *folders: Path) -> list[dict[str, Any]]:
    """Return the results of the finished cells, in the order of `chosen`; the first folder that has a cell counts."""
    paths = [next(filter(Path.exists, map(cell.path, folders)), None) for cell in chosen]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path is not None]


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
