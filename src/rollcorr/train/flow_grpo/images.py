"""Pictures of a run: grids as PNG files for the report, and strips as text for the rollout log."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rollcorr.run_directory.durable_files import atomic_write, make_folder_durably

# White pixels around a picture.
GAP = 2

# Smaller pictures are enlarged to about this size in pixels, without smoothing: a caption needs the width.
SIDE = 96

# Pixels of a picture in a strip.
STRIP_SIDE = 64

# Pixels from one line of a caption to the next.
LINE = 12


def to_pil(image: Tensor) -> Any:  # noqa: ANN401
    """Convert a picture (3, H, W) in [0, 1] to a Pillow image."""
    from PIL import Image

    return Image.fromarray((image.detach().float().cpu().permute(1, 2, 0) * 255).round().byte().numpy())


def save_grid(images: Tensor, captions: Sequence[str], path: Path) -> None:
    """Write pictures side by side on white, each with its caption below, as PNG, atomically.

    The folder is created when missing.

    Args:
        images: (B, 3, H, W) in [0, 1].
        captions: one for each picture, of one line or several; long lines are cut.
        path: the file.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    from PIL import Image, ImageDraw, ImageFont, ImageOps

    zoom = max(1, SIDE // images.shape[-1])
    enlarged = [ImageOps.scale(to_pil(image), zoom, Image.Resampling.NEAREST) for image in images]
    tiles = [ImageOps.expand(picture, GAP, "white") for picture in enlarged]

    # The largest divisor up to √count that is not much smaller, else √count rounded up.
    root = math.isqrt(len(images))
    divisors = (n for n in range(root, max(1, root // 2), -1) if len(images) % n == 0)
    columns = next(divisors, math.ceil(math.sqrt(len(images))))
    rows = math.ceil(len(images) / columns)
    width, height = tiles[0].size
    lines = max(caption.count("\n") + 1 for caption in captions)
    whole = Image.new("RGB", (columns * width, rows * (height + lines * LINE)), "white")
    draw, font = ImageDraw.Draw(whole), ImageFont.load_default()
    for number, (tile, caption) in enumerate(zip(tiles, captions, strict=True)):
        left, top = number % columns * width, number // columns * (height + lines * LINE)
        whole.paste(tile, (left, top))
        for line, text in enumerate(caption.split("\n")):
            # Shorten a caption until it fits its tile.
            shown = text
            while shown and draw.textlength(shown, font=font) > width - 2 * GAP:
                shown = shown.removesuffix("...")[:-1] + "..." if shown.strip(".") else ""
            draw.text((left + GAP, top + height + line * LINE - GAP), shown, fill="black", font=font)

    file = io.BytesIO()
    whole.save(file, format="PNG")
    make_folder_durably(path.parent)
    with atomic_write(path, needed=file.tell()) as partial:
        partial.write_bytes(file.getvalue())


def strip(pictures: Tensor) -> str:
    """Return rows of small pictures side by side, as JPEG in base64.

    Args:
        pictures: (rows, columns, 3, H, W) in [0, 1].
    """
    rows, columns = pictures.shape[:2]
    whole = to_pil(pictures.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2))
    whole.thumbnail((STRIP_SIDE * columns, STRIP_SIDE * rows))
    file = io.BytesIO()
    whole.save(file, format="JPEG", quality=90, subsampling=0)
    return base64.b64encode(file.getvalue()).decode("ascii")
