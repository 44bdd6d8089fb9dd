"""Call conventions of diffusers' flow transformers by class name: Stable Diffusion 3, Flux and Qwen-Image.

All three predict the velocity v = ε − x₀ of x_σ = (1 − σ) x₀ + σ ε. They differ in the shape of a latent, in the scale
of the timestep and in the prompt inputs. A `Family` contains exactly these differences.
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
    """Prompt inputs of the transformer, one row each.

    Attributes:
        embeds: token embeddings, (B, L, E).
        pooled: one vector per prompt, (B, P); optional. None if the family has no such input.
        mask: (B, L), 1 on real tokens; optional. Without it, every token is real.
    """

    embeds: Tensor
    pooled: Tensor | None = None
    mask: Tensor | None = None

    def select(self, rows: Tensor) -> Condition:
        """Return the condition of some rows."""
        pooled, mask = (None if x is None else x[rows] for x in (self.pooled, self.mask))
        return Condition(self.embeds[rows], pooled, mask)

    def to(self, dtype: torch.dtype) -> Condition:
        """Return the condition in a floating dtype; the mask keeps its own."""
        pooled = None if self.pooled is None else self.pooled.to(dtype)
        return Condition(self.embeds.to(dtype), pooled, self.mask)


@dataclass(frozen=True, eq=False)
class Prompts:
    """Prompt inputs with classifier-free guidance.

    Attributes:
        condition: B rows.
        unconditional: the empty prompt, B rows; optional, only for guidance.
        guidance: γ of classifier-free guidance; 1 disables it.
    """

    condition: Condition
    unconditional: Condition | None = None
    guidance: float = 1.0

    def __len__(self) -> int:
        return len(self.condition.embeds)

    def select(self, rows: Tensor) -> Prompts:
        """Return the prompts of some rows."""
        empty = None if self.unconditional is None else self.unconditional.select(rows)
        return Prompts(self.condition.select(rows), empty, self.guidance)


class Family(abc.ABC):
    """Interface to one kind of transformer. Heights and widths are in latent pixels.

    Latents are packed, (N, 4 C): each token contains 2 × 2 latent pixels.

    Attributes:
        even_sigmas: the pipeline passes σ = 1, 1 − 1/S, …, 1/S to its scheduler, instead of the scheduler's default.
        guidance_keeps_norm: a guided velocity is scaled back to the norm of v(prompt), token by token.
    """

    even_sigmas = True
    guidance_keeps_norm = False

    def latent_shape(self, config: Mapping[str, Any], height: int, width: int) -> tuple[int, ...]:
        """Return the shape of one latent."""
        return self.sequence_length(config, height, width), config["in_channels"]

    def sequence_length(self, config: Mapping[str, Any], height: int, width: int) -> int:
        """Return the number of image tokens, an input of the schedule's dynamic shifting."""
        return _patch_count(height, width, PACKED)

    @abc.abstractmethod
    def arguments(
        self, latents: Tensor, timestep: Tensor, condition: Condition, guidance: Tensor | None, height: int, width: int
    ) -> dict[str, Any]:
        """Return keyword arguments of the transformer's `forward`; `timestep` is σ × 1000, (B,)."""

    def unpack(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Return latents in the layout of pictures, (B, C, height, width)."""
        x = latents.unflatten(1, (height // PACKED, width // PACKED)).unflatten(-1, (-1, PACKED, PACKED))
        return x.permute(0, 3, 1, 4, 2, 5).reshape(len(latents), -1, height, width)


class StableDiffusion3(Family):
    """`SD3Transformer2DModel`: latents (C, H, W), which are pictures already; timestep up to 1000, pooled vector."""

    even_sigmas = False

    def latent_shape(self, config: Mapping[str, Any], height: int, width: int) -> tuple[int, ...]:
        """Return (C, H, W)."""
        _patch_count(height, width, config["patch_size"])
        largest = config["pos_embed_max_size"] * config["patch_size"]
        if max(height, width) > largest:
            raise ValueError(
                f"latents of {height} × {width} exceed the {largest} × {largest} of the model's position embedding; "
                "set a smaller model.height and model.width"
            )
        return config["in_channels"], height, width

    def sequence_length(self, config: Mapping[str, Any], height: int, width: int) -> int:
        """Return the number of patches of the picture."""
        return _patch_count(height, width, config["patch_size"])

    def arguments(
        self, latents: Tensor, timestep: Tensor, condition: Condition, guidance: Tensor | None, height: int, width: int
    ) -> dict[str, Any]:
        """Return the arguments of StableDiffusion3Pipeline."""
        return {
            "hidden_states": latents,
            "timestep": timestep,
            "encoder_hidden_states": condition.embeds,
            "pooled_projections": condition.pooled,
        }

    def unpack(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Return the latents unchanged."""
        return latents


class Flux(Family):
    """`FluxTransformer2DModel`: packed latents, timestep up to 1, pooled vector, ids of text and image tokens."""

    def arguments(
        self, latents: Tensor, timestep: Tensor, condition: Condition, guidance: Tensor | None, height: int, width: int
    ) -> dict[str, Any]:
        """Return the arguments of FluxPipeline."""
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
        """Return the arguments of QwenImagePipeline."""
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
    """Compute v_θ(x_σ, σ, prompt) in float32, shaped like the latents; with guidance γ, v(∅) + γ (v(prompt) − v(∅)).

    Args:
        model: the transformer, in any dtype; inputs are rounded to it.
        family: its call convention.
        latents: (B, …).
        sigma: (B,) float32.
        prompts: B rows. A guidance-distilled model reads γ as an input; any other model also runs on the empty prompt.
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
    """Stack conditions of several prompts, padded on the right to the longest; differing lengths add a mask."""
    lengths = [condition.embeds.shape[1] for condition in conditions]
    longest = max(lengths)

    def padded(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(len(x), longest - x.shape[1], *x.shape[2:])], dim=1)

    # Padding must be masked, so prompts of different lengths need a mask even if their encoder returns no mask.
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


def _patch_count(height: int, width: int, patch: int) -> int:
    """Return the number of patches of a picture; `patch` must divide both sides."""
    if height % patch or width % patch:
        raise ValueError(f"latents of {height} × {width} are not divisible by the patch size {patch}")
    return (height // patch) * (width // patch)
