"""How a flow transformer of diffusers is called: Stable Diffusion 3, Flux and Qwen-Image, by its class name.

All three predict the velocity v = ε − x₀ of x_σ = (1 − σ) x₀ + σ ε. They differ in the shape of a latent, in the scale
of the timestep and in how the prompt goes in; a `Family` is that difference and nothing else.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Flux and Qwen-Image pack 2 × 2 latent pixels into one token.
PACKED = 2


@dataclass(frozen=True, eq=False)
class Condition:
    """What the transformer reads of the prompts, one row each.

    Attributes:
        embeds: token embeddings, (B, L, E).
        pooled: one vector per prompt, (B, P); None where the family has none.
        mask: (B, L), 1 on real tokens; None when all are.
    """

    embeds: Tensor
    pooled: Tensor | None = None
    mask: Tensor | None = None

    def select(self, rows: Tensor) -> Condition:
        """The condition of some rows."""
        pooled, mask = (None if x is None else x[rows] for x in (self.pooled, self.mask))
        return Condition(self.embeds[rows], pooled, mask)

    def to(self, dtype: torch.dtype) -> Condition:
        """The same condition in another floating dtype; the mask keeps its own."""
        pooled = None if self.pooled is None else self.pooled.to(dtype)
        return Condition(self.embeds.to(dtype), pooled, self.mask)


@dataclass(frozen=True, eq=False)
class Prompts:
    """Prompts as the transformer reads them.

    Attributes:
        condition: B rows.
        unconditional: the empty prompt, B rows; None without guidance.
        guidance: γ of classifier-free guidance, 1 for none.
    """

    condition: Condition
    unconditional: Condition | None = None
    guidance: float = 1.0

    def __len__(self) -> int:
        return len(self.condition.embeds)

    def select(self, rows: Tensor) -> Prompts:
        """Some rows."""
        empty = None if self.unconditional is None else self.unconditional.select(rows)
        return Prompts(self.condition.select(rows), empty, self.guidance)


class Family(abc.ABC):
    """What one kind of transformer needs. Heights and widths are in latent pixels.

    Latents are packed, (N, 4 C): each token holds 2 × 2 latent pixels.

    Attributes:
        even_sigmas: the pipeline gives its scheduler σ = 1, 1 − 1/S, …, 1/S, instead of leaving the choice to it.
        guidance_keeps_norm: a guided velocity is scaled back to the norm of v(prompt), token by token.
    """

    even_sigmas = True
    guidance_keeps_norm = False

    def latent_shape(self, config: Mapping[str, Any], height: int, width: int) -> tuple[int, ...]:
        """The shape of one latent."""
        return self.sequence_length(config, height, width), config["in_channels"]

    def sequence_length(self, config: Mapping[str, Any], height: int, width: int) -> int:
        """Image tokens, which dynamic shifting of the schedule depends on."""
        return _patches(height, width, PACKED)

    @abc.abstractmethod
    def arguments(
        self, latents: Tensor, timestep: Tensor, condition: Condition, guidance: Tensor | None, height: int, width: int
    ) -> dict[str, Any]:
        """Keyword arguments of the transformer's `forward`; `timestep` is σ × 1000, (B,)."""

    def unpack(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Latents as pictures, (B, C, height, width)."""
        x = latents.unflatten(1, (height // PACKED, width // PACKED)).unflatten(-1, (-1, PACKED, PACKED))
        return x.permute(0, 3, 1, 4, 2, 5).reshape(len(latents), -1, height, width)


class StableDiffusion3(Family):
    """`SD3Transformer2DModel`: latents (C, H, W), which are pictures already; timestep up to 1000, pooled vector."""

    even_sigmas = False

    def latent_shape(self, config: Mapping[str, Any], height: int, width: int) -> tuple[int, ...]:
        """(C, H, W)."""
        _patches(height, width, config["patch_size"])
        largest = config["pos_embed_max_size"] * config["patch_size"]
        if max(height, width) > largest:
            raise ValueError(
                f"latents of {height} × {width} exceed the {largest} × {largest} of the model's position embedding; "
                "set a smaller model.height and model.width"
            )
        return config["in_channels"], height, width

    def sequence_length(self, config: Mapping[str, Any], height: int, width: int) -> int:
        """Patches of the picture."""
        return _patches(height, width, config["patch_size"])

    def arguments(
        self, latents: Tensor, timestep: Tensor, condition: Condition, guidance: Tensor | None, height: int, width: int
    ) -> dict[str, Any]:
        """As StableDiffusion3Pipeline calls it."""
        return {
            "hidden_states": latents,
            "timestep": timestep,
            "encoder_hidden_states": condition.embeds,
            "pooled_projections": condition.pooled,
        }

    def unpack(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Return the latents."""
        return latents


class Flux(Family):
    """`FluxTransformer2DModel`: packed latents, timestep up to 1, pooled vector, ids of text and image tokens."""

    def arguments(
        self, latents: Tensor, timestep: Tensor, condition: Condition, guidance: Tensor | None, height: int, width: int
    ) -> dict[str, Any]:
        """As FluxPipeline calls it."""
        rows, columns = (torch.arange(n // PACKED, device=latents.device) for n in (height, width))
        image_ids = torch.cartesian_prod(torch.zeros_like(rows[:1]), rows, columns).to(latents.dtype)
        return {
            "hidden_states": latents,
            "timestep": timestep / 1000,
            "guidance": guidance,
            "encoder_hidden_states": condition.embeds,
            "pooled_projections": condition.pooled,
            "txt_ids": latents.new_zeros(condition.embeds.shape[1], 3),
            "img_ids": image_ids,
        }


class QwenImage(Family):
    """`QwenImageTransformer2DModel`: packed latents, timestep up to 1, masked token embeddings."""

    guidance_keeps_norm = True

    def arguments(
        self, latents: Tensor, timestep: Tensor, condition: Condition, guidance: Tensor | None, height: int, width: int
    ) -> dict[str, Any]:
        """As QwenImagePipeline calls it."""
        return {
            "hidden_states": latents,
            "timestep": timestep / 1000,
            "guidance": guidance,
            "encoder_hidden_states": condition.embeds,
            "encoder_hidden_states_mask": condition.mask,
            "img_shapes": [[(1, height // PACKED, width // PACKED)]] * len(latents),
        }


FAMILIES: dict[str, Family] = {
    "SD3Transformer2DModel": StableDiffusion3(),
    "FluxTransformer2DModel": Flux(),
    "QwenImageTransformer2DModel": QwenImage(),
}


def velocity(
    model: Any,  # noqa: ANN401
    family: Family,
    latents: Tensor,
    sigma: Tensor,
    prompts: Prompts,
    *,
    size: tuple[int, int],
) -> Tensor:
    """v_θ(x_σ, σ, prompt) in float32, in the shape of the latents; with guidance γ, v(∅) + γ (v(prompt) − v(∅)).

    Args:
        model: the transformer, in any dtype; inputs are rounded to it.
        family: how it is called.
        latents: (B, …).
        sigma: (B,) float32.
        prompts: B rows. A guidance-distilled model reads γ as an input; another one runs on the empty prompt too.
        size: height and width in latent pixels.
    """
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    distilled = model.config.get("guidance_embeds", False)
    scale = latents.new_full((len(latents),), prompts.guidance, dtype=torch.float32) if distilled else None

    def run(condition: Condition) -> Tensor:
        arguments = family.arguments(latents.to(dtype), sigma * 1000, condition.to(dtype), scale, *size)
        predicted: Tensor = model(**arguments, return_dict=False)[0]
        return predicted.float()

    predicted = run(prompts.condition)
    if distilled or prompts.unconditional is None:
        return predicted

    empty = run(prompts.unconditional)
    guided = empty + prompts.guidance * (predicted - empty)

    # Qwen-Image's pipeline scales the guided velocity back, and its trained models expect that.
    if not family.guidance_keeps_norm:
        return guided
    return guided * (predicted.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))


def stack_conditions(conditions: Sequence[Condition]) -> Condition:
    """Conditions of several prompts as one, padded on the right to the longest; a mask appears when lengths differ."""
    lengths = [condition.embeds.shape[1] for condition in conditions]
    longest = max(lengths)

    def padded(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(len(x), longest - x.shape[1], *x.shape[2:])], dim=1)

    # Padding must be masked, so prompts of different lengths need a mask even if their encoder gave none.
    masks = [
        torch.ones(c.embeds.shape[:2], dtype=torch.long, device=c.embeds.device) if c.mask is None else c.mask
        for c in conditions
    ]
    whole = all(c.mask is None for c in conditions) and len(set(lengths)) == 1
    pooled = [c.pooled for c in conditions if c.pooled is not None]
    return Condition(
        torch.cat([padded(c.embeds) for c in conditions]),
        torch.cat(pooled) if pooled else None,
        None if whole else torch.cat([padded(mask) for mask in masks]),
    )


def _patches(height: int, width: int, patch: int) -> int:
    """Patches of a picture, whose sides they must divide."""
    if height % patch or width % patch:
        raise ValueError(f"latents of {height} × {width} are not divisible by the patch size {patch}")
    return (height // patch) * (width // patch)
