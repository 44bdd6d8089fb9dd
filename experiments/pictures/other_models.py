"""Two small models of other families, trained shortly on pictures of their own prompts.

    sd15    a UNet that predicts ε, DDIM's schedule, 3 × 20 × 20 pixels (D = 1,200)
    wan     a transformer of Wan, flow matching with shift 3, 3 × 1 × 24 × 24 pixels (D = 1,728)

A prompt is a color and a place. Its pictures are a bright spot of this color, with some noise in position and width.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollcorr.train.flow_grpo.families import FAMILIES
from rollcorr.train.flow_grpo.family import Prompts, predict
from rollcorr.train.flow_grpo.prompts import WORD_TABLE, WordTable

COLORS = {"orange": (0.9, 0.5, -0.8), "teal": (-0.7, 0.5, 0.5), "pink": (0.9, -0.2, 0.4), "lime": (0.2, 0.9, -0.6)}
PLACES = {"left": (-0.5, 0.0), "right": (0.5, 0.0), "above": (0.0, -0.5), "below": (0.0, 0.5)}
PROMPTS = tuple(f"{color} {place}" for color in COLORS for place in PLACES)
EMBEDDING, TRAINING_STEPS, BATCH = 16, 250, 16


@dataclass(frozen=True)
class Setting:
    """What differs between the runs of two models.

    Attributes:
        size: pixels of a side.
        steps: numbers of denoising steps to choose from.
        level: the noise level, and wrong ones.
        rates: learning rate → steps with weights that are not sent.
        guidance: the guidance, and wrong ones.
    """

    size: int
    steps: tuple[int, ...]
    level: tuple[float, ...]
    rates: dict[str, int]
    guidance: tuple[float, ...]


SETTINGS = {
    "sd15": Setting(20, (10, 8, 20), (0.8, 0.5, 0.65, 1.0), {"1e-4": 14, "3e-4": 10, "1e-3": 7}, (2.5, 1.5, 4.0)),
    "wan": Setting(24, (8, 12, 6), (0.6, 0.4, 0.5, 0.8), {"5e-5": 14, "2e-4": 10, "1e-3": 7}, (2.0, 1.5, 5.0)),
}


def make_network(name: str, seed: int) -> tuple[Any, Any]:
    """The network with random weights, and diffusers' scheduler."""
    from diffusers import (
        DDIMScheduler,
        FlowMatchEulerDiscreteScheduler,
        UNet2DConditionModel,
        WanTransformer3DModel,
    )

    torch.manual_seed(seed)
    if name == "sd15":
        network = UNet2DConditionModel(
            sample_size=20,
            in_channels=3,
            out_channels=3,
            block_out_channels=(8, 16),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=EMBEDDING,
            attention_head_dim=4,
            norm_num_groups=4,
        )
        scheduler = DDIMScheduler(
            beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, clip_sample=False,
            set_alpha_to_one=False, steps_offset=1,
        )  # fmt: skip
        return network, scheduler
    network = WanTransformer3DModel(
        patch_size=(1, 4, 4),
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=3,
        out_channels=3,
        text_dim=EMBEDDING,
        freq_dim=32,
        ffn_dim=96,
        num_layers=2,
        rope_max_seq_len=16,
    )
    return network, FlowMatchEulerDiscreteScheduler(shift=3.0)


def draw_pictures(rows: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """One picture of each prompt, (B, 3, size, size)."""
    colors = torch.tensor(list(COLORS.values()))[rows // len(PLACES)]
    centers = torch.tensor(list(PLACES.values()))[rows % len(PLACES)]
    centers = centers + 0.1 * torch.randn(centers.shape, generator=generator)
    width = 0.3 + 0.1 * torch.rand(len(rows), 1, 1, generator=generator)

    axis = torch.linspace(-1, 1, size)
    dx, dy = axis[None, None, :] - centers[:, 0, None, None], axis[None, :, None] - centers[:, 1, None, None]
    spot = (-(dx**2 + dy**2) / (2 * width**2)).exp()
    return -0.8 + (colors[:, :, None, None] + 0.8) * spot[:, None]


def make_model(name: str, seed: int, directory: Path) -> Path:
    """Train a model and write it, with its prompts, as a directory that `load_policy` reads."""
    from safetensors.torch import save_file

    network, scheduler = make_network(name, seed)
    generator, size = torch.Generator().manual_seed(seed), SETTINGS[name].size
    words = (*COLORS, *PLACES)
    table = WordTable(words, torch.randn(len(words), EMBEDDING, generator=generator), length=2)
    family = FAMILIES[type(network).__name__]

    optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3)
    for step in range(TRAINING_STEPS):
        rows = torch.randint(len(PROMPTS), (BATCH,), generator=generator)
        clean = draw_pictures(rows, size, generator)
        clean = clean[:, :, None] if name == "wan" else clean
        noise = torch.randn(clean.shape, generator=generator)
        wide = (-1, *[1] * (clean.dim() - 1))

        # ε of a noisy picture, or the velocity.
        if name == "sd15":
            time = torch.randint(1000, (BATCH,), generator=generator)
            alpha = scheduler.alphas_cumprod[time].view(wide)
            noisy, target = alpha.sqrt() * clean + (1 - alpha).sqrt() * noise, noise
        else:
            time = 1000 * torch.rand(BATCH, generator=generator)
            sigma = (time / 1000).view(wide)
            noisy, target = (1 - sigma) * clean + sigma * noise, noise - clean

        # Every tenth prompt is empty, as guidance needs.
        texts = ["" if i % 10 == 0 else PROMPTS[row] for i, row in enumerate(rows.tolist())]
        predicted = predict(network, family, noisy, time.float(), Prompts(table.encode(texts)), size=(size, size))
        loss = (predicted - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1.0, (TRAINING_STEPS - step) / 100)
        optimizer.step()

    network.save_pretrained(directory / ("unet" if name == "sd15" else "transformer"))
    scheduler.save_pretrained(directory / "scheduler")
    metadata = {"words": json.dumps(list(words)), "length": "2"}
    save_file({"vectors": table.vectors.contiguous()}, directory / WORD_TABLE, metadata=metadata)
    (directory / "prompts.txt").write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    return directory
