"""The interface to a family of diffusion models, and the call of its network.

A `Family` contains what differs between models: the shape of a latent, the call of the network, the encoding of a
prompt, the decoding of a latent, and the schedule. `rollcorr.train.flow_grpo.families` lists the built-in ones.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollcorr.train.flow_grpo.schedule import Schedule


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
        """Return the condition of some rows, (B,) integers."""
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
    """Interface to one kind of model; `model.family` names a subclass of your own. Sizes are in latent pixels.

    The defaults are those of a flow-matching model whose latents have the layout of pictures, (C, height, width).

    Attributes:
        schedulers: diffusers' scheduler classes that `schedule` reads.
        even_sigmas: the pipeline passes σ = 1, 1 − 1/S, …, 1/S to its scheduler, instead of the scheduler's default.
        guidance_keeps_norm: a guided prediction is scaled back to the norm of the unguided one, token by token.
    """

    schedulers: tuple[str, ...] = ("FlowMatchEulerDiscreteScheduler",)
    even_sigmas = False
    guidance_keeps_norm = False

    def check(self, pipeline: Mapping[str, Any]) -> None:  # noqa: B027 (most families accept every option)
        """Check the options in a pipeline's `model_index.json`; raise `ValueError` for an unsupported one.

        Args:
            pipeline: content of the file; empty if there is none.
        """

    def latent_shape(self, config: Mapping[str, Any], height: int, width: int) -> tuple[int, ...]:
        """Return the shape of one latent.

        Args:
            config: of the network, like every `config` here.
            height: in latent pixels.
            width: in latent pixels.

        Raises:
            ValueError: the network cannot compute this size.
        """
        self.sequence_length(config, height, width)
        return config["in_channels"], height, width

    def sequence_length(self, config: Mapping[str, Any], height: int, width: int) -> int:
        """Return the number of image tokens, an input of the schedule's dynamic shifting.

        Args:
            config: the network's configuration.
            height: in latent pixels.
            width: in latent pixels.
        """
        return patch_count(height, width, config["patch_size"])

    @abc.abstractmethod
    def arguments(
        self, latents: Tensor, timestep: Tensor, condition: Condition, guidance: Tensor | None, height: int, width: int
    ) -> dict[str, Any]:
        """Return keyword arguments of the network's `forward`.

        Args:
            latents: (B, …), in the network's dtype.
            timestep: the schedule's timestep values, (B,).
            condition: B rows.
            guidance: γ of a guidance-distilled network, (B,); None for any other.
            height: in latent pixels.
            width: in latent pixels.
        """

    @abc.abstractmethod
    def encode(self, pipeline: Any, prompt: str, device: str) -> Condition:  # noqa: ANN401
        """Return the condition of one prompt, one row.

        Args:
            pipeline: diffusers' pipeline, with its text encoders but without network and VAE.
            prompt: the text.
            device: device of the encoders.
        """

    def unpack(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Return latents in the layout of pictures, (B, C, height, width)."""
        return latents

    def decode(self, vae: Any, latents: Tensor, height: int, width: int) -> Tensor:  # noqa: ANN401
        """Compute pictures (B, 3, H, W) in [−1, 1] from latents at σ = 0, scaled as the pipeline scales them.

        Args:
            vae: the pipeline's.
            latents: (B, …).
            height: in latent pixels.
            width: in latent pixels.
        """
        latents = self.unpack(latents, height, width).to(next(vae.parameters()).dtype)
        pictures: Tensor = vae.decode(latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)).sample
        return pictures

    def schedule(
        self,
        scheduler: Any,  # noqa: ANN401
        config: Mapping[str, Any],
        size: tuple[int, int],
        *,
        steps: int,
        noise_level: float,
    ) -> Schedule:
        """Return the schedule that the pipeline uses.

        Args:
            scheduler: diffusers' scheduler, which this method may change.
            config: the network's configuration.
            size: height and width in latent pixels.
            steps: number of denoising steps, S.
            noise_level: a.

        Raises:
            ValueError: the scheduler has an option that this family does not support.
        """
        # μ of dynamic shifting is linear in the number of image tokens, as in the pipelines of diffusers.
        shift = {}
        options = scheduler.config
        if options.get("use_dynamic_shifting"):
            slope = (options.max_shift - options.base_shift) / (options.max_image_seq_len - options.base_image_seq_len)
            tokens = self.sequence_length(config, *size)
            shift["mu"] = options.base_shift + slope * (tokens - options.base_image_seq_len)

        if self.even_sigmas:
            scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), **shift)
        else:
            scheduler.set_timesteps(steps, **shift)
        sigmas, values = (tensor.float().cpu() for tensor in (scheduler.sigmas, scheduler.timesteps))
        return Schedule(sigmas=sigmas, noise_level=noise_level, values=values)


def predict(
    model: Any,  # noqa: ANN401
    family: Family,
    latents: Tensor,
    timestep: Tensor,
    prompts: Prompts,
    *,
    size: tuple[int, int],
) -> Tensor:
    """Compute v = v_θ(x, t, prompt) in float32, shaped like the latents; with guidance γ, v(∅) + γ (v(prompt) − v(∅)).

    v is what the network predicts: the velocity of a flow-matching model, or ε.

    Args:
        model: the network, in any dtype; inputs are rounded to it.
        family: its call convention.
        latents: (B, …).
        timestep: timestep values of the schedule, (B,) float32.
        prompts: B rows. A guidance-distilled model reads γ as an input; any other model also runs on the empty prompt.
        size: height and width in latent pixels.
    """
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    distilled = model.config.get("guidance_embeds", False)
    scale = latents.new_full((len(latents),), prompts.guidance, dtype=torch.float32) if distilled else None

    def run(condition: Condition) -> Tensor:
        arguments = family.arguments(latents.to(dtype), timestep, condition.to(dtype), scale, *size)
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


def patch_count(height: int, width: int, patch: int) -> int:
    """Return the number of patches of a picture; `patch` must divide both sides."""
    if height % patch or width % patch:
        raise ValueError(f"latents of {height} × {width} are not divisible by the patch size {patch}")
    return (height // patch) * (width // patch)
