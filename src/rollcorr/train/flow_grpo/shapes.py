"""Pictures of colored shapes: pretraining data of the small model, and templates for its rewards.

A picture is 16 × 16 RGB in [−1, 1]: one shape in one color on a dark ground, at any position inside.
Its prompt names both: `a red circle`.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

SIZE = 16
GROUND = 0.1
COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.8, 0.1),
    "blue": (0.15, 0.25, 0.95),
    "yellow": (0.95, 0.9, 0.1),
    "purple": (0.7, 0.1, 0.8),
    "white": (0.95, 0.95, 0.95),
}
SHAPES = ("circle", "square", "triangle", "cross")
CLASSES: tuple[tuple[str, str], ...] = tuple((color, shape) for color in COLORS for shape in SHAPES)
PROMPTS: tuple[str, ...] = tuple(f"a {color} {shape}" for color, shape in CLASSES)

# Held-out prompts of the demo: each of their colors and shapes appears in training prompts.
HELD_OUT_PROMPTS = ("a red circle", "a green square", "a blue triangle", "a yellow cross")

TRAINED_PROMPTS = tuple(prompt for prompt in PROMPTS if prompt not in HELD_OUT_PROMPTS)

# Squared distance, in pixel values of [−1, 1], by which one shape must be nearer to be e times as likely.
SHAPE_EVIDENCE = 8.0


def render(classes: Tensor, center: Tensor, radius: Tensor) -> Tensor:
    """Render pictures of given classes (B,), centers (B, 2: y, x, pixels) and radii (B,): (B, 3, 16, 16) in [−1, 1]."""
    # Position of each pixel relative to the center, in radii.
    axis = torch.arange(SIZE, device="cpu") + 0.5
    y = (axis[None, :, None] - center[:, 0, None, None]) / radius[:, None, None]
    x = (axis[None, None, :] - center[:, 1, None, None]) / radius[:, None, None]
    x, y = torch.broadcast_tensors(x, y)

    # The outline of each shape, as a distance: circle, square, triangle, cross.
    larger = torch.maximum(x.abs(), y.abs())
    distance = torch.stack(  # below 1 inside, one pixel wide around 1
        [
            (x * x + y * y).sqrt(),
            larger / 0.85,
            torch.maximum(y / 0.8, (y + 1).mul(-0.5).add(x.abs()).add(1.0)),
            torch.maximum(larger, torch.minimum(x.abs(), y.abs()) / 0.3),
        ]
    )
    shape = distance[classes % len(SHAPES), torch.arange(len(classes), device="cpu")]

    # Pixels on the edge are partly covered, so that the picture is smooth in position and size.
    cover = ((1 - shape) * radius[:, None, None] + 0.5).clamp(0, 1)[:, None]
    color = torch.tensor(list(COLORS.values()), device="cpu")[classes // len(SHAPES)][:, :, None, None]
    return (GROUND + (color - GROUND) * cover) * 2 - 1


def classes_in(prompt: str) -> list[int]:
    """Return the classes whose color and shape are words of a prompt."""
    words = prompt.lower().replace(",", " ").replace(".", " ").split()
    return [i for i, (color, shape) in enumerate(CLASSES) if color in words and shape in words]


def class_of(prompt: str) -> int:
    """Return the class that a prompt names.

    Raises:
        ValueError: it does not name exactly one color and one shape.
    """
    found = classes_in(prompt)
    if len(found) != 1:
        raise ValueError(
            f"prompt {prompt!r} must name one color ({', '.join(COLORS)}) and one shape ({', '.join(SHAPES)})"
        )
    return found[0]


def likeness(images: Tensor, classes: Tensor) -> Tensor:
    """Compute 1 − ‖x − t‖² / ‖blank − t‖², t the class's picture nearest to x: 1 is perfect, 0 equals blank.

    Args:
        images: (B, 3, H, W) in [0, 1]; averaged down to 16 × 16 when larger.
        classes: (B,) integers that index `CLASSES`.

    Returns:
        (B,), float32, on the CPU; negative for a different color.
    """
    # Use the nearest picture, because a prompt does not specify position and size.
    templates = _render_templates()[classes.cpu()]
    flat = (_downscale(images) * 2 - 1).flatten(1)[:, None]
    distance = (flat - templates).square().sum(-1)
    blank = (templates - (GROUND * 2 - 1)).square().sum(-1)
    best = distance.argmin(1, keepdim=True)
    return (1 - distance.gather(1, best) / blank.gather(1, best)).squeeze(1)


def shape_share(images: Tensor, classes: Tensor) -> Tensor:
    """Compute the probability of a class's shape: softmax over the shapes of −‖x − t‖² / 8.

    t is the nearest picture of a shape in any color. The shares of a picture sum to 1, so the same picture for all
    shapes scores 1/4 on average: drawing the average of the shapes has no advantage.

    Args:
        images: (B, 3, H, W) in [0, 1].
        classes: (B,) integers that index `CLASSES`.

    Returns:
        (B,) in [0, 1], float32, on the CPU.
    """
    by_shape = _class_distances(images).view(-1, len(COLORS), len(SHAPES)).amin(1)
    return (-by_shape / SHAPE_EVIDENCE).softmax(1).gather(1, (classes.cpu() % len(SHAPES))[:, None]).squeeze(1)


def recognized(images: Tensor) -> Tensor:
    """Return the class with the nearest picture for each picture, (B,) integers on the CPU."""
    return _class_distances(images).argmin(1)


def background_noise(images: Tensor) -> float:
    """Compute the RMS deviation of the outermost pixels, which no shape reaches by more than its edge, from ground."""
    pictures = _downscale(images)
    ring = torch.ones(SIZE, SIZE, dtype=torch.bool, device="cpu")
    ring[1:-1, 1:-1] = False
    return float((pictures[:, :, ring] - GROUND).double().square().mean().sqrt())


def _downscale(images: Tensor) -> Tensor:
    """Average pictures down to 16 × 16, float32, on the CPU."""
    pictures = images.detach().float().cpu()
    if pictures.shape[-2:] != (SIZE, SIZE):
        pictures = torch.nn.functional.interpolate(pictures, size=(SIZE, SIZE), mode="area")
    return pictures


def _class_distances(images: Tensor) -> Tensor:
    """Compute the squared distance of each picture to the nearest picture of each class, (B, classes)."""
    templates = _render_templates()
    flat = (_downscale(images) * 2 - 1).flatten(1)
    # Avoid the matmul form of `cdist`, which loses digits: these distances are compared with each other.
    found = torch.cdist(flat, templates.flatten(0, 1), compute_mode="donot_use_mm_for_euclid_dist")
    return found.view(len(flat), *templates.shape[:2]).amin(2).square()


@cache
def _render_templates() -> Tensor:
    """Return every class at every position and size of a grid: (classes, templates, D)."""
    offsets, radii = torch.linspace(-2, 2, 5, device="cpu"), torch.linspace(4, 6, 3, device="cpu")
    grid = torch.cartesian_prod(offsets, offsets, radii)
    pictures = [
        render(torch.full((len(grid),), i, device="cpu"), SIZE / 2 + grid[:, :2], grid[:, 2]).flatten(1)
        for i in range(len(CLASSES))
    ]
    return torch.stack(pictures)
