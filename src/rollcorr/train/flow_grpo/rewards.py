"""Rewards of pictures: a function of pictures (B, 3, H, W) in [0, 1] and their prompts, one number each.

prompt_match             similarity of the picture to the shape in its prompt, [0, 1]
color_and_shape          prompt_match, and how clearly the picture shows this shape instead of the rest, [0, 1]
color                    mean of one color's channels minus the rest, [−1, 1]
jpeg_compressibility     minus the size as JPEG, kB
ocr                      readable share of the text in the prompt's quotation marks, [0, 1]
function                 your own: `package.module:name` or `file.py:name`
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollcorr.config.functions import load_function
from rollcorr.train.flow_grpo.images import to_pil
from rollcorr.train.flow_grpo.shapes import class_of, likeness, shape_share

RewardFunction = Callable[[Tensor, Sequence[str]], Sequence[float] | Tensor]
COLORS = {
    "red": (1.0, 0.0, 0.0),
    "green": (0.0, 1.0, 0.0),
    "blue": (0.0, 0.0, 1.0),
    "yellow": (1.0, 1.0, 0.0),
    "purple": (1.0, 0.0, 1.0),
    "cyan": (0.0, 1.0, 1.0),
}
QUOTED = re.compile(r'"([^"]+)"|“([^”]+)”|\'([^\']+)\'')


def prompt_match(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Compute 1 − squared distance to the nearest picture of the prompt's class, relative to a blank one's, (B,).

    The prompt names a color and a shape; see `rollcorr.train.flow_grpo.shapes.likeness`.
    """
    return likeness(images, torch.tensor([class_of(prompt) for prompt in prompts], device="cpu"))


def color_and_shape(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Compute half of `prompt_match` plus half of the share of the prompt's shape, (B,).

    `prompt_match` is high for a blob of the prompt's color, which is close to every shape;
    `rollcorr.train.flow_grpo.shapes.shape_share` is not.
    """
    classes = torch.tensor([class_of(prompt) for prompt in prompts], device="cpu")
    return (likeness(images, classes) + shape_share(images, classes)) / 2


def color(images: Tensor, _: Sequence[str], *, name: str = "red") -> Tensor:
    """Compute the mean of a color's channels minus the mean of the rest: 1 is pure, 0 is gray, (B,)."""
    wanted = torch.tensor(COLORS[name], device="cpu").bool()
    means = images.detach().float().cpu().mean((-2, -1))
    return means[:, wanted].mean(1) - means[:, ~wanted].mean(1)


def jpeg_compressibility(images: Tensor, _: Sequence[str]) -> list[float]:
    """Compute minus the size as JPEG of quality 95, in kB (1000 bytes).

    Source: Black et al. (2023), "Training Diffusion Models with Reinforcement Learning", arXiv:2305.13301.
    """
    return [-_jpeg_bytes(image) / 1000 for image in images]


def ocr(images: Tensor, prompts: Sequence[str]) -> list[float]:
    """Compute 1 − min(edit distance, n) / n of the OCR text and the n characters in the prompt's quotation marks.

    Case and spaces are ignored; text that contains the expected one scores 1.

    Raises:
        ImportError: the extra is missing.
        ValueError: a prompt has no text in quotation marks.

    Source: Liu et al. (2025), "Flow-GRPO", arXiv:2505.05470; Gong et al. (2025), "Seedream 2.0", arXiv:2503.07703.
    """
    reader = _ocr_reader()
    return [
        text_score(_read_text(reader, image), quoted_text(prompt))
        for image, prompt in zip(images, prompts, strict=True)
    ]


def quoted_text(prompt: str) -> str:
    """Return the text in the first quotation marks of a prompt."""
    found = QUOTED.search(prompt)
    if found is None:
        raise ValueError(f"prompt {prompt!r} has no text in quotation marks for the ocr reward to look for")
    return next(group for group in found.groups() if group)


def text_score(read: str, wanted: str) -> float:
    """Compute 1 − min(edit distance, n) / n, n = characters of `wanted`; 1 when `read` contains it."""
    read, wanted = ("".join(text.lower().split()) for text in (read, wanted))
    if wanted in read:
        return 1.0
    return 1.0 - min(edit_distance(read, wanted), len(wanted)) / len(wanted)


def edit_distance(a: str, b: str) -> int:
    """Count the insertions, deletions and substitutions that turn one text into the other (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def make_reward(name: str, *, color_name: str = "red", function: str | None = None) -> Callable[..., Tensor]:
    """Return a configuration's reward in a wrapper that checks for one finite number per picture.

    Args:
        name: one of the table above.
        color_name: of the color reward.
        function: reference to the function, only for "function"; optional.
    """
    rewards: dict[str, RewardFunction] = {
        "prompt_match": prompt_match,
        "color_and_shape": color_and_shape,
        "color": partial(color, name=color_name),
        "jpeg_compressibility": jpeg_compressibility,
        "ocr": ocr,
    }
    if function is None:
        return partial(_compute_reward, rewards[name], name)
    return partial(_compute_reward, load_function(function, option="reward.function"), function)


def _compute_reward(reward: RewardFunction, name: str, images: Tensor, prompts: Sequence[str]) -> Tensor:
    values = torch.as_tensor(reward(images, prompts), dtype=torch.float32, device="cpu").cpu()
    if values.shape != (len(prompts),):
        raise ValueError(f"reward {name} returned {tuple(values.shape)} for {len(prompts)} pictures; return one each")
    if not values.isfinite().all():
        row = int((~values.isfinite()).nonzero()[0])
        raise ValueError(f"reward {name} of {prompts[row]!r} is {float(values[row])}; return a finite number")
    return values


def _jpeg_bytes(image: Tensor) -> int:
    buffer = io.BytesIO()
    to_pil(image).save(buffer, format="JPEG", quality=95)
    return buffer.tell()


@cache
def _ocr_reader() -> Any:  # noqa: ANN401
    try:
        from rapidocr_onnxruntime import RapidOCR
    except ImportError as error:
        raise ImportError("the ocr reward needs pip install 'rollcorr[ocr]'") from error
    return RapidOCR()


def _read_text(reader: Any, image: Tensor) -> str:  # noqa: ANN401
    lines, _ = reader(np.asarray(to_pil(image))[:, :, ::-1])
    return "".join(line[1] for line in lines or [])
