"""Train on rollouts drawn with temperature 0.7, top-p 0.9 and top-k 20, three ways, three seeds each.

    python experiments/training_runs/truncated_sampling.py [--seeds 0,1,2] [--arms uncorrected,replay] [name=value…]

    uncorrected   the trainer divides by the temperature and scores over the whole vocabulary; nothing is corrected
    token-TIS     the same log-probs, with token weights min(π_old/μ, 2)
    replay        the trainer scores over the engine's kept sets, with the same weights

Runs that are finished already are only read. Writes the curves and what came out as JSON and as a figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from rollcorr import SamplingSpec
from rollcorr.engines import GenerationSettings, TransformersEngine
from rollcorr.run_directory import read_metrics
from rollcorr.train import latest_checkpoint, load_config, train
from rollcorr.train.grpo import evaluate, load_policy, make_task

DEMO = Path(__file__).parents[2] / "examples" / "train" / "demo.yaml"
WHOLE = ("actor.sampling=full", "actor.allow_incompatible=true")
ARMS: Mapping[str, Sequence[str]] = {
    "uncorrected": (*WHOLE, "algorithm.rollout_correction={rollout_is: token, apply_is: false}"),
    "token-TIS": (*WHOLE, "algorithm.rollout_correction=decoupled_token_is"),
    "replay": ("actor.sampling=replay", "algorithm.rollout_correction=decoupled_token_is"),
}
SETTINGS = (
    "rollout.sampling={temperature: 0.7, top_p: 0.9, top_k: 20, logprobs: processed}",
    "steps=40",
    "rollout.prompts_per_step=8",
    "optim.mini_batch_size=32",
    "log.evaluate=256",
    "checkpoint.every=0",
    "log.tensorboard=false",
    "log.rollouts=false",
)
CURVES = {
    "reward": "reward/mean",
    "k3": "rollout_corr/k3_kl",
    "mean_ratio": "rollout_corr/rollout_is_mean",
    "entropy": "actor/entropy",
}
WINDOW = 10


def run(arm: str, seed: int, root: Path, overrides: Sequence[str], console: Console) -> dict[str, Any]:
    """Train one arm with one seed, from where it stopped if it did, and read what came out."""
    run_dir = root / arm / f"seed_{seed}"
    config = load_config(DEMO, [*SETTINGS, *ARMS[arm], *overrides, f"seed={seed}", f"run_dir={run_dir}"])
    console.print(f"{arm}, seed {seed}")
    if train(config, console=console).interrupted:
        sys.exit(130)
    rows = read_metrics(run_dir / "metrics.jsonl")
    curves = {name: [row[metric] for row in rows] for name, metric in CURVES.items()}
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    untruncated = run_dir / "untruncated.json"
    if not untruncated.is_file():
        untruncated.write_text(json.dumps(accuracy_at_one(config, run_dir)) + "\n", encoding="utf-8")
    return {
        "arm": arm,
        "seed": seed,
        "accuracy_before": summary["before"]["accuracy"],
        "accuracy_after": summary["after"]["accuracy"],
        "accuracy_after_untruncated": json.loads(untruncated.read_text(encoding="utf-8")),
        "reward_first": statistics.fmean(curves["reward"][:WINDOW]),
        "reward_last": statistics.fmean(curves["reward"][-WINDOW:]),
        "k3": statistics.fmean(curves["k3"]),
        "mean_ratio": statistics.fmean(curves["mean_ratio"]),
        "curves": curves,
    }


def accuracy_at_one(config: Any, run_dir: Path) -> float:
    """Share of right answers when the trained policy is sampled at temperature 1 from its whole vocabulary."""
    torch.set_num_threads(config.threads or 1)
    policy = load_policy(str(latest_checkpoint(run_dir / "checkpoints")))
    engine = TransformersEngine(
        policy.model,
        GenerationSettings(
            sampling=SamplingSpec(),
            max_new_tokens=config.rollout.max_new_tokens,
            eos_token_id=policy.eos_token_id,
            pad_token_id=policy.pad_token_id,
        ),
        dtype=torch.float32,
    )
    bonus, problems = config.task.bonus_length, config.log.evaluate
    found = evaluate(engine, policy, make_task(config.task), problems=problems, bonus_length=bonus, seed=0)
    return found["accuracy"]


def spread(values: Sequence[float]) -> str:
    """Mean ± sample standard deviation over the seeds."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.3g} ± {deviation:.2g}"


def show(results: Sequence[Mapping[str, Any]], console: Console) -> None:
    """One row an arm."""
    names = ("accuracy_after", "accuracy_after_untruncated", "reward_first", "reward_last", "k3", "mean_ratio")
    table = Table("arm", "seeds", *(name.replace("_", " ") for name in names), box=None, padding=(0, 2, 0, 0))
    for arm in ARMS:
        found = [result for result in results if result["arm"] == arm]
        if found:
            table.add_row(arm, str(len(found)), *(spread([result[name] for result in found]) for name in names))
    console.print(table)


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Reward, k3 and mean ratio over the steps: mean of the seeds, and their range."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    titles = {"reward": "reward, mean of 5 steps", "k3": "k3(μ‖π_old), nats", "mean_ratio": "mean ratio π_old / μ"}
    for axes, (name, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        for color, arm in zip(("#b45309", "#7c3aed", "#2563c9"), ARMS, strict=True):
            runs = [smooth(r["curves"][name], 5 if name == "reward" else 1) for r in results if r["arm"] == arm]
            if not runs:
                continue
            columns = list(zip(*runs, strict=True))
            steps = range(1, len(columns) + 1)
            axes.plot(steps, [statistics.fmean(column) for column in columns], color=color, label=arm, linewidth=1.5)
            axes.fill_between(steps, list(map(min, columns)), list(map(max, columns)), color=color, alpha=0.15)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.set_yscale("log" if name == "k3" else "linear")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=9)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values at each step."""
    return [statistics.fmean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]


def main() -> int:
    """Train what is missing, then show, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="0,1,2", help="seeds, with commas")
    parser.add_argument("--arms", default=",".join(ARMS), help="arms, with commas")
    parser.add_argument("--root", type=Path, default=Path("runs/truncated"), help="where the runs go")
    parser.add_argument("--output", type=Path, help="write truncated_sampling.json and .png into this folder")
    parser.add_argument("overrides", nargs="*", help="changes to the runs")
    options = parser.parse_args()

    console = Console()
    results = [
        run(arm, seed, options.root, options.overrides, console)
        for seed in map(int, options.seeds.split(","))
        for arm in options.arms.split(",")
    ]
    show(results, console)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        numbers = {"settings": [*SETTINGS, *options.overrides], "arms": dict(ARMS), "runs": results}
        text = json.dumps(numbers, indent=1)
        (options.output / "truncated_sampling.json").write_text(text + "\n", encoding="utf-8")
        draw(results, options.output / "truncated_sampling.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
