"""Pictures of a run: grids as PNG files, for the report."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollcorr.run_directory.durable_files import atomic_write, make_folder_durably

GAP = 2
LEAST = 64
"""Smaller pictures are enlarged to this many pixels, without smoothing."""
CAPTIONED = 96
"""The same for those with a caption, which needs the width."""
LINE = 12
"""Pixels from one line of a caption to the next."""


def to_pil(image: Tensor) -> Any:  # noqa: ANN401
    """A picture (3, H, W) in [0, 1] as a Pillow image."""
    from PIL import Image

    return Image.fromarray((image.detach().float().cpu().permute(1, 2, 0) * 255).round().byte().numpy())


def image_grid(images: Tensor, *, columns: int | None = None, least: int = LEAST) -> Tensor:
    """Pictures (B, 3, H, W) side by side on white: (3, rows, columns), in [0, 1].

    Args:
        images: in [0, 1].
        columns: of the grid; None makes it about square, and full where the number allows.
        least: smaller pictures are enlarged to about this many pixels.
    """
    images = images.detach().float().cpu()
    zoom = max(1, least // images.shape[-1])
    images = images.repeat_interleave(zoom, -1).repeat_interleave(zoom, -2)
    columns = columns or _columns(len(images))
    rows = math.ceil(len(images) / columns)
    blank = images.new_ones(rows * columns - len(images), *images.shape[1:])
    framed = torch.nn.functional.pad(torch.cat([images, blank]), (GAP, GAP, GAP, GAP), value=1.0)
    _, channels, height, width = framed.shape
    return (
        framed.view(rows, columns, channels, height, width)
        .permute(2, 0, 3, 1, 4)
        .reshape(channels, rows * height, columns * width)
    )


def captioned_grid(images: Tensor, captions: Sequence[str], *, columns: int | None = None) -> Any:  # noqa: ANN401
    """The pictures of `image_grid`, each with its caption below it, as a Pillow image; long lines are cut."""
    from PIL import Image, ImageDraw, ImageFont

    columns = columns or _columns(len(images))
    rows = math.ceil(len(images) / columns)
    tiles = [to_pil(image_grid(image[None], columns=1, least=CAPTIONED)) for image in images]
    width, height = tiles[0].size
    lines = max(caption.count("\n") + 1 for caption in captions)
    whole = Image.new("RGB", (columns * width, rows * (height + lines * LINE)), "white")
    draw, font = ImageDraw.Draw(whole), ImageFont.load_default()
    for number, (tile, caption) in enumerate(zip(tiles, captions, strict=True)):
        left, top = number % columns * width, number // columns * (height + lines * LINE)
        whole.paste(tile, (left, top))
        for line, text in enumerate(caption.split("\n")):
            shown = text
            while shown and draw.textlength(shown, font=font) > width - 2 * GAP:
                shown = shown.removesuffix("...")[:-1] + "..." if shown.strip(".") else ""
            draw.text((left + GAP, top + height + line * LINE - GAP), shown, fill="black", font=font)
    return whole


def save_grid(images: Tensor, path: Path, *, columns: int | None = None, captions: Sequence[str] | None = None) -> None:
    """Write a grid of pictures as PNG, whole or not at all; the folder is made when missing.

    Args:
        images: (B, 3, H, W) in [0, 1].
        path: the file.
        columns: of the grid; None makes it about square.
        captions: one for each picture, of one line or several.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    file = io.BytesIO()
    if captions is None:
        grid = to_pil(image_grid(images, columns=columns))
    else:
        grid = captioned_grid(images, captions, columns=columns)
    grid.save(file, format="PNG")
    content = file.getvalue()
    make_folder_durably(path.parent)
    with atomic_write(path, needed=len(content)) as partial:
        partial.write_bytes(content)


def _columns(count: int) -> int:
    """The largest divisor up to √count that is not much smaller, else √count rounded up."""
    root = math.isqrt(count)
    return next((n for n in range(root, max(1, root // 2), -1) if count % n == 0), math.ceil(math.sqrt(count)))
