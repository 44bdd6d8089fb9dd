"""Measure the correction's share of a training step: `python benchmarks/step_share.py [--save] [name=value …]`.

A step of the reference trainer samples, scores, corrects, takes advantages and updates. CPU seconds are those of all
threads, so other programs on the machine disturb them little. Memory is the most that tensors hold at a time, counted
where torch dispatches operations; a step also holds weights, gradients and both moments of AdamW. A small model makes
the share large. `--save` writes benchmarks/results/step_share_cpu.json, from which `make docs` takes the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from counting import Counts
from peers import provenance

RESULT = Path(__file__).parent / "results" / "step_share_cpu.json"
STATES = 4
"""Weights, gradients, and the two moments of AdamW."""
DEFAULTS = (
    "algorithm.rollout_correction=decoupled_k3_rs_token_tis",
    "rollout.prompts_per_step=4",
    "rollout.group_size=8",
    "rollout.max_new_tokens=128",
    "model.path=null",  # random weights rarely end a response, so that all of them are long
    "model.config={model_type: llama, hidden_size: 128, intermediate_size: 384, num_hidden_layers: 4, "
    "num_attention_heads: 4}",
    "log.null=0",
)


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="name=value", help="options of the run")
    parser.add_argument("--steps", type=int, default=5, help="measured steps, after one that warms up")
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    arguments = parser.parse_args()

    import torch

    from rollcorr.run_directory.directory import RunDirectory
    from rollcorr.train import load_config
    from rollcorr.train.grpo import grpo_trainer
    from rollcorr.train.grpo.grpo_recipe import GrpoRecipe

    config = load_config(None, [*DEFAULTS, *arguments.overrides])
    torch.set_num_threads(config.threads or 1)
    with TemporaryDirectory() as folder:
        trainer = GrpoRecipe.build(config, RunDirectory(Path(folder)), None).trainer

    # The correction of a batch, and its metrics as numbers.
    seconds: list[float] = []
    peaks: list[int] = []
    counting = False

    def measured(function):
        def call(*args, **kwargs):
            start = time.process_time()
            if counting:
                with Counts() as counts:
                    result = function(*args, **kwargs)
                peaks.append(counts.peak_bytes)
            else:
                result = function(*args, **kwargs)
            seconds.append(time.process_time() - start)
            return result

        return call

    grpo_trainer.correct = measured(grpo_trainer.correct)
    grpo_trainer.finalize = measured(grpo_trainer.finalize)

    trainer.step(1)
    shares, steps, tokens = [], [], 0
    for step in range(2, 2 + arguments.steps):
        seconds.clear()
        start = time.process_time()
        result = trainer.step(step)
        steps.append(time.process_time() - start)
        shares.append(sum(seconds) / steps[-1])
        tokens = int(result.batch.response_mask.sum())

    # Counting costs time, so memory has a step of its own.
    counting = True
    with Counts() as counts:
        trainer.step(2 + arguments.steps)
    model = STATES * sum(4 * parameter.numel() for parameter in trainer.model.parameters())
    figures = {
        **provenance(__file__, "cpu", torch.get_num_threads()),
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "tokens": tokens,
        "rows": config.rollout.rows,
        "step_cpu_ms": round(1e3 * statistics.median(steps), 1),
        "correction_cpu_ms": round(1e3 * statistics.median(shares) * statistics.median(steps), 2),
        "time_share": round(statistics.median(shares), 5),
        "time_shares": [round(share, 5) for share in shares],
        "step_bytes": counts.peak_bytes + model,
        "correction_bytes": max(peaks),
        "memory_share": round(max(peaks) / (counts.peak_bytes + model), 6),
    }
    text = json.dumps(figures, indent=1)
    print(text)
    if arguments.save:
        RESULT.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
