"""Stable Diffusion 3 and 3.5: linear path, velocity target, timesteps 0..1000, three text encoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vgrpo.paths import LinearPath
from vgrpo.types import Cond


class StableDiffusion3:
    """What `policies.pipeline.Pipeline` has to know of the family."""

    network = "transformer"
    path_kind = "linear"
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    )
    """The attention of both streams, as flow_grpo and the paper adapt it."""

    def guidance_kind(self, pipe: Any) -> str:
        return "cfg"

    def unfit(self, scheduler: Any) -> tuple[str, ...]:
        return ("heun",) if scheduler.config.get("use_dynamic_shifting") else ()

    def path(self, pipe: Any) -> LinearPath:
        return LinearPath()

    def latent_shape(self, config: dict[str, Any], height: int, width: int) -> tuple[int, int, int]:
        scale = self.size_step(config) // config["transformer"]["patch_size"]
        return config["transformer"]["in_channels"], height // scale, width // scale

    def size_step(self, config: dict[str, Any]) -> int:
        """Height and width must be multiples of this: the VAE's scale times the patch size."""
        return 2 ** (len(config["vae"]["block_out_channels"]) - 1) * config["transformer"]["patch_size"]

    def encode(self, pipe: Any, texts: Sequence[str], max_sequence_length: int) -> Cond:
        tokens, _, pooled, _ = pipe.encode_prompt(
            prompt=list(texts),
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
        )
        return {"encoder_hidden_states": tokens, "pooled_projections": pooled}

    def call(self, cond: Cond, negative: Cond | None) -> dict[str, Tensor]:
        """Arguments of the stock pipeline call that stand for the prompt."""
        out = {"prompt_embeds": cond["encoder_hidden_states"], "pooled_prompt_embeds": cond["pooled_projections"]}
        if negative is not None:
            out["negative_prompt_embeds"] = negative["encoder_hidden_states"]
            out["negative_pooled_prompt_embeds"] = negative["pooled_projections"]
        return out

    def predict(self, net: torch.nn.Module, x_t: Tensor, t: Tensor, cond: Cond, guidance: float) -> Tensor:
        return net(x_t, timestep=t * 1000, **cond, return_dict=False)[0]

    def pack(self, x: Tensor) -> Tensor:
        return x

    def unpack(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return x

    def schedule_arguments(
        self, pipe: Any, scheduler: Any, steps: int, latent_shape: tuple[int, ...]
    ) -> dict[str, Any]:
        """What the pipeline gives `set_timesteps` beside the number of steps: mu where the shift is dynamic."""
        from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

        if not scheduler.config.get("use_dynamic_shifting"):
            return {}
        patch, config = pipe.transformer.config.patch_size, scheduler.config
        tokens = (latent_shape[1] // patch) * (latent_shape[2] // patch)
        ends = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.16}
        return {"mu": calculate_shift(tokens, *[config.get(name, default) for name, default in ends.items()])}

    def unscale(self, pipe: Any, x0: Tensor) -> Tensor:
        """Latents as the VAE's decoder takes them."""
        return x0 / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor
