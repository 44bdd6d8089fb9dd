"""Judge a run of the demo after each step, while its null is measured again.

    python experiments/fresh_nulls/demo_runs.py [--seeds 0,1,2,3,4] [--steps 60] [--every 10]
    python experiments/fresh_nulls/demo_runs.py --stop 20 --steps 32

Without `--stop` a run passes if its entropy halves and no verdict is "unhealthy". With `--stop N` the engine accepts
weights after step N and keeps its own; then a run passes if a verdict becomes "unhealthy" within ten
steps after that, and none before. Exit code 0 if every seed passes.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

from rich.console import Console

from rollcorr import read_run
from rollcorr.diagnostics.run_verdict import run_health
from rollcorr.run_directory import read_metrics
from rollcorr.train import load_config, train
from rollcorr.train.grpo.grpo_recipe import GrpoRecipe

DEMO = Path(__file__).parents[2] / "examples" / "train" / "demo.yaml"
OPTIONS = ("log.evaluate=0", "checkpoint.every=0", "log.tensorboard=false", "log.rollouts=false")


def judged_run(folder: Path, seed: int, steps: int, every: int, stop: int | None) -> tuple[list[float], dict[int, str]]:
    """Train, and return the entropy of each step, and step → codes of each unhealthy verdict."""
    found: dict[int, str] = {}
    write_extras = GrpoRecipe.write_extras

    def judge(recipe: GrpoRecipe, step: int) -> None:
        # The metrics of this step are not yet written, so the steps before it are judged.
        write_extras(recipe, step)
        if step > 1:
            health = run_health(read_run(folder))
            if health.verdict == "unhealthy":
                found[step - 1] = "+".join(finding.code for finding in health.warnings)
        if step == stop:
            engine = recipe.trainer.engine
            engine.update_weights = lambda model, *, version: setattr(  # type: ignore[method-assign]
                engine, "sampling", dataclasses.replace(engine.sampling, policy_version=version)
            )

    options = (f"run_dir={folder}", f"seed={seed}", f"steps={steps}", f"log.null_every={every}", *OPTIONS)
    with patch.object(GrpoRecipe, "write_extras", judge):
        train(load_config(DEMO, options), console=Console(file=io.StringIO()))
    return [
        metrics["actor/entropy"] for metrics in read_metrics(folder / "metrics.jsonl") if "actor/entropy" in metrics
    ], found


def main() -> int:
    """Return 1 if a seed fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2,3,4", help="seeds, separated by commas")
    parser.add_argument("--steps", type=int, default=60, help="steps (default 60)")
    parser.add_argument("--every", type=int, default=10, help="steps between measurements of the null (default 10)")
    parser.add_argument("--stop", type=int, help="step after which the engine keeps its weights")
    arguments = parser.parse_args()
    failed = 0
    for seed in map(int, arguments.seeds.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            given = (seed, arguments.steps, arguments.every, arguments.stop)
            entropies, found = judged_run(Path(folder) / "run", *given)
        first, last = sum(entropies[:3]) / 3, sum(entropies[-3:]) / 3
        at = min(found, default=None)
        if arguments.stop is None:
            passed = at is None and last <= first / 2
        else:
            passed = at is not None and 0 < at - arguments.stop <= 10
        failed += not passed
        unhealthy = "never unhealthy" if at is None else f"unhealthy at step {at}: {found[at]}"
        sys.stdout.write(f"seed {seed}: entropy {first:.3f} → {last:.3f} ({last / first:.0%}), {unhealthy}\n")
        sys.stdout.flush()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
