"""Families of diffusers' models by the class of the network: SD3, Flux, Qwen-Image, Wan and Stable Diffusion 1.

All but Stable Diffusion 1 predict the velocity v = ε − x₀ of x_σ = (1 − σ) x₀ + σ ε.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rollcorr.train.flow_grpo.family import Condition, Family, patch_count
from rollcorr.train.flow_grpo.schedule import DdimSchedule, Schedule

# Flux and Qwen-Image pack 2 × 2 latent pixels into one token.
PACKED = 2

# σ of pure noise, up to rounding.
ALMOST_ONE = 0.9999


class StableDiffusion3(Family):
    """`SD3Transformer2DModel`: latents (C, H, W), timestep up to 1000, pooled vector."""

    def latent_shape(self, config: Mapping[str, Any], height: int, width: int) -> tuple[int, ...]:
        """Return (C, H, W)."""
        shape = super().latent_shape(config, height, width)
        largest = config["pos_embed_max_size"] * config["patch_size"]
        if max(height, width) > largest:
            raise ValueError(
                f"latents of {height} × {width} exceed the {largest} × {largest} of the model's position embedding; "
                "set a smaller model.height and model.width"
            )
        return shape

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

    def encode(self, pipeline: Any, prompt: str, device: str) -> Condition:  # noqa: ANN401
        """Return token embeddings of the three encoders, and the pooled vector."""
        embeds, _, pooled, _ = pipeline.encode_prompt(
            prompt, None, None, do_classifier_free_guidance=False, device=device
        )
        return Condition(embeds.float(), pooled.float())


class PackedFamily(Family):
    """Latents (N, 4 C): each token contains 2 × 2 latent pixels."""

    even_sigmas = True

    def latent_shape(self, config: Mapping[str, Any], height: int, width: int) -> tuple[int, ...]:
        """Return (N, 4 C)."""
        return self.sequence_length(config, height, width), config["in_channels"]

    def sequence_length(self, config: Mapping[str, Any], height: int, width: int) -> int:
        """Return N."""
        return patch_count(height, width, PACKED)

    def unpack(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Return latents in the layout of pictures, (B, C, height, width)."""
        x = latents.unflatten(1, (height // PACKED, width // PACKED)).unflatten(-1, (-1, PACKED, PACKED))
        return x.permute(0, 3, 1, 4, 2, 5).reshape(len(latents), -1, height, width)


class Flux(PackedFamily):
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

    def encode(self, pipeline: Any, prompt: str, device: str) -> Condition:  # noqa: ANN401
        """Return T5's token embeddings and CLIP's pooled vector."""
        embeds, pooled, _ = pipeline.encode_prompt(prompt, None, device=device)
        return Condition(embeds.float(), pooled.float())


class _VideoVae(Family):
    """Latents of a VAE that decodes videos; a picture is a video of one frame."""

    def decode(self, vae: Any, latents: Tensor, height: int, width: int) -> Tensor:  # noqa: ANN401
        """Compute pictures (B, 3, H, W), with the mean and deviation of each latent channel."""
        latents = self.unpack(latents, height, width).to(next(vae.parameters()).dtype)
        config = vae.config
        mean, std = (latents.new_tensor(config[name])[None, :, None, None] for name in ("latents_mean", "latents_std"))
        pictures: Tensor = vae.decode((latents * std + mean).unsqueeze(2)).sample[:, :, 0]
        return pictures


class QwenImage(PackedFamily, _VideoVae):
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

    def encode(self, pipeline: Any, prompt: str, device: str) -> Condition:  # noqa: ANN401
        """Return token embeddings with their mask."""
        embeds, mask = pipeline.encode_prompt([prompt], device=device)
        return Condition(embeds.float(), mask=mask)


class Wan(_VideoVae):
    """`WanTransformer3DModel` of Wan 2.1 and 2.2: latents (C, 1, H, W), one frame; timestep up to 1000.

    UniPC's σ are those of the pipeline; the steps are Euler's, because a multistep solver has no Gaussian steps.
    """

    schedulers = ("FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler")

    def check(self, pipeline: Mapping[str, Any]) -> None:
        """Refuse a pair of transformers (Wan 2.2 A14B)."""
        if pipeline.get("boundary_ratio") is not None:
            raise ValueError(
                f"boundary_ratio={pipeline['boundary_ratio']}: this Wan 2.2 has two transformers, one for each part of "
                "the schedule; take a pipeline with one, such as Wan2.2-TI2V-5B"
            )

    def latent_shape(self, config: Mapping[str, Any], height: int, width: int) -> tuple[int, ...]:
        """Return (C, 1, H, W)."""
        channels, height, width = super().latent_shape(config, height, width)
        return channels, 1, height, width

    def sequence_length(self, config: Mapping[str, Any], height: int, width: int) -> int:
        """Return the number of patches of the frame."""
        return patch_count(height, width, config["patch_size"][1])

    def arguments(
        self, latents: Tensor, timestep: Tensor, condition: Condition, guidance: Tensor | None, height: int, width: int
    ) -> dict[str, Any]:
        """Return the arguments of WanPipeline."""
        return {"hidden_states": latents, "timestep": timestep, "encoder_hidden_states": condition.embeds}

    def encode(self, pipeline: Any, prompt: str, device: str) -> Condition:  # noqa: ANN401
        """Return UMT5's token embeddings, padded with zeros to 512 tokens, which the network reads unmasked."""
        embeds, _ = pipeline.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=512, device=torch.device(device)
        )
        return Condition(embeds.float())

    def unpack(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Return the frame, (B, C, height, width)."""
        return latents[:, :, 0]

    def schedule(
        self,
        scheduler: Any,  # noqa: ANN401
        config: Mapping[str, Any],
        size: tuple[int, int],
        *,
        steps: int,
        noise_level: float,
    ) -> Schedule:
        """Return the σ of the scheduler; UniPC must use those of flow matching."""
        if not scheduler.config.get("use_flow_sigmas", True):
            raise ValueError("use_flow_sigmas of Wan's scheduler must be true: the step is that of flow matching")
        made = super().schedule(scheduler, config, size, steps=steps, noise_level=noise_level)

        # UniPC begins just below 1, where σ / (1 − σ) would be a million; at 1 the step uses σ₁.
        return replace(made, sigmas=torch.where(made.sigmas > ALMOST_ONE, 1.0, made.sigmas))


class StableDiffusion1(Family):
    """`UNet2DConditionModel` of Stable Diffusion 1.5 and 2.1: latents (C, H, W), predicts ε or v, DDIM's schedule."""

    schedulers = ("DDIMScheduler", "PNDMScheduler")

    def sequence_length(self, config: Mapping[str, Any], height: int, width: int) -> int:
        """Return the number of pixels in the innermost block."""
        return patch_count(height, width, 2 ** (len(config["block_out_channels"]) - 1))

    def arguments(
        self, latents: Tensor, timestep: Tensor, condition: Condition, guidance: Tensor | None, height: int, width: int
    ) -> dict[str, Any]:
        """Return the arguments of StableDiffusionPipeline."""
        return {"sample": latents, "timestep": timestep, "encoder_hidden_states": condition.embeds}

    def encode(self, pipeline: Any, prompt: str, device: str) -> Condition:  # noqa: ANN401
        """Return CLIP's token embeddings."""
        embeds, _ = pipeline.encode_prompt(prompt, device, 1, False)
        return Condition(embeds.float())

    def schedule(
        self,
        scheduler: Any,  # noqa: ANN401
        config: Mapping[str, Any],
        size: tuple[int, int],
        *,
        steps: int,
        noise_level: float,
    ) -> DdimSchedule:
        """Return DDIM's schedule from the betas and timesteps of the scheduler's configuration."""
        from diffusers import DDIMScheduler

        ddim = DDIMScheduler.from_config(scheduler.config)
        ddim.set_timesteps(steps)
        options, values = ddim.config, ddim.timesteps

        # DDIM's step ends at t − T // S, which must be where the next step begins.
        following = values - options.num_train_timesteps // steps
        predicts = options.prediction_type
        if options.thresholding or predicts not in ("epsilon", "v_prediction") or (following[:-1] != values[1:]).any():
            raise ValueError(
                f"scheduler with thresholding={options.thresholding}, prediction_type={predicts!r} and "
                f"timestep_spacing={options.timestep_spacing!r} in {steps} steps: DDIM here needs no thresholding, "
                "epsilon or v_prediction, and timesteps a multiple of T // S apart; set rollout.num_steps to a divisor "
                f"of {options.num_train_timesteps} and timestep_spacing to leading"
            )
        alphas = torch.cat([ddim.alphas_cumprod[values], ddim.final_alpha_cumprod[None]]).float()
        return DdimSchedule(
            sigmas=(1 - alphas).sqrt(),
            noise_level=noise_level,
            alphas=alphas,
            values=values.float(),
            predicts=predicts,
            clip=options.clip_sample_range if options.clip_sample else None,
        )


# Family of each class of diffusers.
FAMILIES: dict[str, Family] = {
    "SD3Transformer2DModel": StableDiffusion3(),
    "FluxTransformer2DModel": Flux(),
    "QwenImageTransformer2DModel": QwenImage(),
    "WanTransformer3DModel": Wan(),
    "UNet2DConditionModel": StableDiffusion1(),
}
