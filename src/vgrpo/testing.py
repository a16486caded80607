"""Whole pipelines of known families with random weights, built from config in a second, for tests that need no download."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vgrpo.errors import UserError


def build_mini(family: str, folder: str | Path, *, seed: int = 0) -> Path:
    """Writes a small pipeline of `family` to `folder` in the format of diffusers and returns the folder.

    `sd3`: StableDiffusion3Pipeline with qk-norm as in SD 3.5, all three text encoders, schedule shift 3, 32×32 pictures.
    `flux1-dev`, `flux1-schnell`: FluxPipeline with and without guidance as an input, resolution-dependent shift for dev,
    32×32 pictures. `sd15`, `sd21`: StableDiffusionPipeline with DDIM, predicting ε and v, 32×32 pictures.

    Raises:
        UserError: no such family.
    """
    if family not in MINIS:
        raise UserError(f"no mini pipeline {family!r}; there are: {', '.join(MINIS)}")
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        MINIS[family]().save_pretrained(folder)
    return Path(folder)


def clip_tokenizer(length: int = 16) -> Any:
    """A CLIP tokenizer of single bytes; eos has the highest id, for CLIP's pooling looks there."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *[a + "</w>" for a in letters], "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=[], model_max_length=length)


def t5_tokenizer(length: int = 32) -> Any:
    from transformers import T5Tokenizer

    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    letters = [(chr(i), -3.0) for i in range(33, 127)]
    extra = [(f"<extra_id_{i}>", 0.0) for i in range(99, -1, -1)]
    return T5Tokenizer(vocab=special + letters + extra, model_max_length=length)


def clip_text_encoder(tokenizer: Any, width: int) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    ends = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.eos_token_id,
    }
    size = {"hidden_size": width, "intermediate_size": 2 * width, "projection_dim": width}
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=tokenizer.model_max_length,
        num_hidden_layers=2,
        num_attention_heads=2,
        **size,
        **ends,
    )
    return CLIPTextModelWithProjection(config)


def mini_sd3() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import T5Config, T5EncoderModel

    clip, t5 = clip_tokenizer(), t5_tokenizer()
    t5_config = T5Config(vocab_size=len(t5), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, dropout_rate=0.0)
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=16,
            pooled_projection_dim=32,
            pos_embed_max_size=16,
            qk_norm="rms_norm",
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=mini_vae(shift_factor=0.06, scaling_factor=1.5),
        text_encoder=clip_text_encoder(clip, 16),
        tokenizer=clip,
        text_encoder_2=clip_text_encoder(clip, 16),
        tokenizer_2=clip,
        text_encoder_3=T5EncoderModel(t5_config),
        tokenizer_3=t5,
    )


def mini_flux(guidance: bool) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextModel, T5Config, T5EncoderModel

    clip, t5 = clip_tokenizer(), t5_tokenizer()
    t5_config = T5Config(vocab_size=len(t5), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, dropout_rate=0.0)
    return FluxPipeline(
        transformer=FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=16,
            guidance_embeds=guidance,
            axes_dims_rope=(4, 4, 8),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=guidance, base_image_seq_len=4, max_image_seq_len=128, shift=3.0 if guidance else 1.0
        ),
        vae=mini_vae(shift_factor=0.06, scaling_factor=1.5),
        text_encoder=CLIPTextModel(clip_text_encoder(clip, 16).config),
        tokenizer=clip,
        text_encoder_2=T5EncoderModel(t5_config),
        tokenizer_2=t5,
    )


def mini_sd(prediction: str) -> Any:
    from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextModel

    clip = clip_tokenizer()
    return StableDiffusionPipeline(
        unet=UNet2DConditionModel(
            sample_size=16,
            in_channels=4,
            out_channels=4,
            layers_per_block=1,
            block_out_channels=(8, 16),
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=16,
            attention_head_dim=8,
        ),
        # the noise schedule and offset of SD 1.5 and 2.1
        scheduler=DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
            prediction_type=prediction,
        ),
        vae=mini_vae(scaling_factor=0.18215),
        text_encoder=CLIPTextModel(clip_text_encoder(clip, 16).config),
        tokenizer=clip,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def mini_vae(**factors: float) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        latent_channels=4,
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        norm_num_groups=4,
        sample_size=32,
        use_quant_conv=False,
        use_post_quant_conv=False,
        **factors,
    )


MINIS: dict[str, Callable[[], Any]] = {
    "sd3": mini_sd3,
    "flux1-dev": partial(mini_flux, guidance=True),
    "flux1-schnell": partial(mini_flux, guidance=False),
    "sd15": partial(mini_sd, prediction="epsilon"),
    "sd21": partial(mini_sd, prediction="v_prediction"),
}
