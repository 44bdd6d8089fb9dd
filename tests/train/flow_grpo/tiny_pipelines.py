"""Complete diffusers pipelines with random weights, a few thousand parameters each: transformer, VAE, text encoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

WORDS = ["a", "red", "green", "circle", "square"]


def clip_tokenizer(directory: Path) -> Any:
    """A CLIP tokenizer over letters."""
    from transformers import CLIPTokenizer

    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    vocabulary = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocabulary)}))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer.from_pretrained(directory, model_max_length=16, pad_token="<|endoftext|>")


def word_tokenizer(**special: str) -> Any:
    """A fast tokenizer over words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=16,
        **special,
    )


def clip_encoder(dim: int, *, projection: bool) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=54, hidden_size=dim, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, projection_dim=dim, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config)


def t5_encoder(dim: int) -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(vocab_size=16, d_model=dim, d_kv=4, d_ff=8, num_layers=1, num_heads=2, pad_token_id=0, eos_token_id=1)
    )


def small_vae(channels: int, shift_factor: float | None = 0.1) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        in_channels=3, out_channels=3, block_out_channels=(4, 4), layers_per_block=1, latent_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=2,
        scaling_factor=1.5, shift_factor=shift_factor, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip


def save_sd3(directory: Path) -> None:
    """Stable Diffusion 3: two CLIP encoders and a T5."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=8, caption_projection_dim=16, pooled_projection_dim=8,
        pos_embed_max_size=8,
    )  # fmt: skip
    StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=small_vae(4),
        text_encoder=clip_encoder(4, projection=True),
        tokenizer=clip_tokenizer(directory / "tokenizer"),
        text_encoder_2=clip_encoder(4, projection=True),
        tokenizer_2=clip_tokenizer(directory / "tokenizer_2"),
        text_encoder_3=t5_encoder(8),
        tokenizer_3=word_tokenizer(),
    ).save_pretrained(directory)


def save_flux(directory: Path) -> None:
    """Flux, guidance-distilled: a CLIP encoder and a T5, dynamic shifting."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    torch.manual_seed(0)
    FluxPipeline(
        transformer=FluxTransformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
            joint_attention_dim=8, pooled_projection_dim=4, guidance_embeds=True, axes_dims_rope=(2, 4, 2),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=small_vae(4),
        text_encoder=clip_encoder(4, projection=False),
        tokenizer=clip_tokenizer(directory / "tokenizer"),
        text_encoder_2=t5_encoder(8),
        tokenizer_2=word_tokenizer(),
    ).save_pretrained(directory)  # fmt: skip


def save_qwen(directory: Path) -> None:
    """Qwen-Image: a Qwen2.5-VL text encoder and a video VAE."""
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    text = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 64, "rope_scaling": {"mrope_section": [1, 1, 2], "type": "default"},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, hidden_size=16, vocab_size=64)
    QwenImagePipeline(
        transformer=QwenImageTransformer2DModel(
            in_channels=16, out_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
            joint_attention_dim=16, axes_dims_rope=(2, 4, 2),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.02),
        vae=AutoencoderKLQwenImage(
            base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False],
            latents_mean=[0.1] * 4, latents_std=[1.5] * 4,
        ),
        text_encoder=Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=word_tokenizer(),
    ).save_pretrained(directory)  # fmt: skip


def save_wan(directory: Path) -> None:
    """Wan 2.2 with one transformer (TI2V): a UMT5 and a video VAE."""
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    torch.manual_seed(0)
    text = UMT5Config(
        vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, pad_token_id=0, eos_token_id=1
    )
    WanPipeline(
        transformer=WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
            text_dim=8, freq_dim=16, ffn_dim=16, num_layers=1, rope_max_seq_len=16,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=AutoencoderKLWan(
            base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False],
            latents_mean=[0.1] * 4, latents_std=[1.5] * 4, scale_factor_spatial=2, scale_factor_temporal=1,
        ),
        text_encoder=UMT5EncoderModel(text),
        tokenizer=word_tokenizer(),
        expand_timesteps=True,
    ).save_pretrained(directory)  # fmt: skip


def save_sd15(directory: Path) -> None:
    """Stable Diffusion 1.5: a UNet that predicts ε, a CLIP encoder, DDIM."""
    from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    torch.manual_seed(0)
    StableDiffusionPipeline(
        unet=UNet2DConditionModel(
            sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 8), layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=8, attention_head_dim=2, norm_num_groups=2,
        ),
        scheduler=DDIMScheduler(
            beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, clip_sample=False,
            set_alpha_to_one=False, steps_offset=1,
        ),
        vae=small_vae(4, shift_factor=None),
        text_encoder=clip_encoder(8, projection=False),
        tokenizer=clip_tokenizer(directory / "tokenizer"),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(directory)  # fmt: skip


PIPELINES = {"sd3": save_sd3, "flux": save_flux, "qwen": save_qwen, "wan": save_wan, "sd15": save_sd15}
