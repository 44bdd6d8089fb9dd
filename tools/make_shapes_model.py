"""Make the picture model that the Flow-GRPO demo starts from: `python tools/make_shapes_model.py` (minutes on a core).

A random SD3-type transformer learns colored shapes by supervised flow matching, and is written to
`src/rollcorr_demo_models/shapes` (1.2 MB):

    x_σ = (1 − σ) x₀ + σ ε,   loss = mean ‖v_θ(x_σ, σ, prompt) − (ε − x₀)‖²,   σ ~ U(0, 1), ε ~ N(0, 1)

Half of the prompts are swapped for others in training, so the model mostly but not always draws what its prompt says.
Reinforcement learning has something left to do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from rollcorr.train.flow_grpo.diffusion_policy import SMALL_MODEL
from rollcorr.train.flow_grpo.families import StableDiffusion3
from rollcorr.train.flow_grpo.family import Prompts, predict
from rollcorr.train.flow_grpo.prompts import WORD_TABLE, WordTable
from rollcorr.train.flow_grpo.shapes import CLASSES, COLORS, PROMPTS, SHAPES, SIZE, render
from rollcorr.train.model_files import demo_model_directory
from rollcorr.train.steps import derived_generator, fit

STEPS = 5000
EMBEDDING = 32
WORDS = ("a", *COLORS, *SHAPES)


def make_small_transformer(*, seed: int = 0, **changes: Any) -> Any:  # noqa: ANN401
    """An `SD3Transformer2DModel` for 3 × 16 × 16 pixels with random weights; `changes` go to its configuration."""
    from diffusers import SD3Transformer2DModel

    config: dict[str, Any] = {
        "sample_size": SIZE,
        "patch_size": 4,
        "in_channels": 3,
        "out_channels": 3,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "joint_attention_dim": EMBEDDING,
        "caption_projection_dim": 64,
        "pooled_projection_dim": EMBEDDING,
        "pos_embed_max_size": SIZE // 4,
        **changes,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SD3Transformer2DModel(**config)


def make_word_table(*, seed: int = 0) -> WordTable:
    """Standard normal vectors for the words of the shapes' prompts, from a seed."""
    generator = derived_generator(seed, "word table")
    return WordTable(WORDS, torch.randn(len(WORDS), EMBEDDING, generator=generator, device="cpu"), length=3)


def pretrain(
    model: Any,  # noqa: ANN401
    table: WordTable,
    *,
    steps: int,
    batch_size: int = 128,
    learning_rate: float = 2e-3,
    swapped: float = 0.5,
    seed: int = 0,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> float:
    """Train in place with AdamW, along a cosine to 0; returns the last loss.

    Args:
        model: SD3-type transformer.
        table: what prompts are.
        steps: optimizer steps.
        batch_size: pictures per step.
        learning_rate: its peak, after 100 steps.
        swapped: share of pictures whose prompt is replaced by a random one.
        seed: decides everything.
        on_step: called with the number of steps done and the loss.
    """
    return fit(
        model,
        lambda step: flow_matching_loss(model, table, batch_size, swapped, derived_generator(seed, "pretrain", step)),
        steps=steps,
        learning_rate=learning_rate,
        rise=100,
        after_step=on_step,
    )


def flow_matching_loss(model: Any, table: WordTable, count: int, swapped: float, generator: torch.Generator) -> Tensor:  # noqa: ANN401
    """mean ‖v_θ − (ε − x₀)‖² over freshly drawn pictures, 0-d."""
    classes = torch.randint(len(CLASSES), (count,), generator=generator, device="cpu")
    pictures = draw_shapes(classes, generator=generator)
    others = torch.randint(len(CLASSES), (count,), generator=generator, device="cpu")
    keep = torch.rand(count, generator=generator, device="cpu") >= swapped
    prompts = [PROMPTS[i] for i in torch.where(keep, classes, others).tolist()]
    sigma = torch.rand(count, generator=generator, device="cpu")
    noise = torch.randn(pictures.shape, generator=generator, device="cpu")
    mixed = (1 - sigma)[:, None, None, None] * pictures + sigma[:, None, None, None] * noise
    read = Prompts(table.encode(prompts))
    predicted = predict(model, StableDiffusion3(), mixed, sigma * 1000, read, size=(SIZE, SIZE))
    return (predicted - (noise - pictures)).square().mean()


def draw_shapes(classes: Tensor, *, generator: torch.Generator) -> Tensor:
    """One picture of each class, at a random place and size: (B, 3, 16, 16) in [−1, 1].

    Args:
        classes: (B,) integers that index `CLASSES`.
        generator: decides places (± 2 pixels around the middle) and radii (4 to 6 pixels).
    """
    count = len(classes)
    center = SIZE / 2 + 4 * torch.rand(count, 2, generator=generator, device="cpu") - 2
    radius = 4 + 2 * torch.rand(count, generator=generator, device="cpu")
    return render(classes, center, radius)


def save_small_model(model: Any, table: WordTable, directory: Path) -> None:  # noqa: ANN401
    """Write a directory that `load_policy` reads."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from safetensors.torch import save_file

    model.save_pretrained(directory / "transformer")
    FlowMatchEulerDiscreteScheduler().save_pretrained(directory / "scheduler")
    metadata = {"words": json.dumps(list(table.words)), "length": str(table.length)}
    save_file({"vectors": table.vectors.cpu().contiguous()}, directory / WORD_TABLE, metadata=metadata)


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
