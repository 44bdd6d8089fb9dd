"""Make the picture model that the Flow-GRPO demo starts from: `python tools/make_shapes_model.py` (minutes on a core).

A random SD3-type transformer learns colored shapes by flow matching, with half of the prompts swapped, and is written
to `src/rollcorr_demo_models/shapes` (1.2 MB).
"""

from __future__ import annotations

import sys

import torch
from rich.console import Console

from rollcorr.train.flow_grpo.diffusion_policy import SMALL_MODEL
from rollcorr.train.flow_grpo.pretrain import make_small_transformer, make_word_table, pretrain, save_small_model
from rollcorr.train.model_files import demo_model_directory

STEPS = 5000


def main(steps: int = STEPS) -> None:
    """Pretrain and save."""
    torch.set_num_threads(1)
    console = Console()
    model, table = make_small_transformer(), make_word_table()
    console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters")

    def show(step: int, loss: float) -> None:
        if step % 200 == 0:
            console.print(f"step {step}: loss {loss:.4f}")

    pretrain(model, table, steps=steps, on_step=show)
    folder = demo_model_directory(SMALL_MODEL)
    save_small_model(model, table, folder)
    console.print(f"wrote {folder}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
