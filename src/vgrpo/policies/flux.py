"""FLUX.1, dev and schnell: linear path, velocity target, times 0..1, resolution-dependent shift, packed latents.

Outside this file latents are pictures, [N, 16, h, w]; the network and the pipeline see them packed, 2×2 to a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vgrpo.paths import LinearPath
from vgrpo.types import Cond


class Flux:
    """What `policies.pipeline.Pipeline` has to know of the family."""

    network = "transformer"
    path_kind = "linear"
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
        *("proj_mlp", "proj_out"),
    )
    """Attention and feed-forward of both kinds of blocks, as flow_grpo adapts FLUX."""

    def guidance_kind(self, pipe: Any) -> str:
        """dev was distilled with guidance as an input; schnell without."""
        return "input" if pipe.transformer.config.guidance_embeds else "none"

    def unfit(self, scheduler: Any) -> tuple[str, ...]:
        """Samplers that this pipeline's call cannot run: it gives all of them sigmas or mu."""
        return ("heun",) if scheduler.config.get("use_dynamic_shifting") else ("heun", "dpmpp")

    def path(self, pipe: Any) -> LinearPath:
        return LinearPath()

    def latent_shape(self, config: dict[str, Any], height: int, width: int) -> tuple[int, int, int]:
        scale = self.size_step(config) // 2
        return config["transformer"]["in_channels"] // 4, height // scale, width // scale

    def size_step(self, config: dict[str, Any]) -> int:
        """Height and width must be multiples of this: the VAE's scale times the packing."""
        return 2 ** (len(config["vae"]["block_out_channels"]) - 1) * 2

    def encode(self, pipe: Any, texts: Sequence[str], max_sequence_length: int) -> Cond:
        tokens, pooled, _ = pipe.encode_prompt(list(texts), None, max_sequence_length=max_sequence_length)
        return {"encoder_hidden_states": tokens, "pooled_projections": pooled}

    def call(self, cond: Cond, negative: Cond | None) -> dict[str, Tensor]:
        """Arguments of the stock pipeline call that stand for the prompt."""
        return {"prompt_embeds": cond["encoder_hidden_states"], "pooled_prompt_embeds": cond["pooled_projections"]}

    def predict(self, net: Any, x_t: Tensor, t: Tensor, cond: Cond, guidance: float) -> Tensor:
        rows, columns = x_t.shape[2] // 2, x_t.shape[3] // 2
        place = x_t.new_zeros(rows, columns, 3)
        place[..., 1] = torch.arange(rows, device=x_t.device)[:, None]
        place[..., 2] = torch.arange(columns, device=x_t.device)[None]
        text = cond["encoder_hidden_states"]
        out = net(
            hidden_states=self.pack(x_t),
            timestep=t.to(x_t.dtype),
            guidance=torch.full_like(t, guidance, dtype=torch.float32) if net.config.guidance_embeds else None,
            txt_ids=text.new_zeros(text.shape[1], 3),
            img_ids=place.reshape(-1, 3),
            return_dict=False,
            **cond,
        )[0]
        return self.unpack(out, x_t.shape[1:])

    def pack(self, x: Tensor) -> Tensor:
        """[N, C, h, w] as the pipeline has it: [N, h/2·w/2, 4C], a token for 2×2 latents."""
        count, channels, height, width = x.shape
        return (
            x.view(count, channels, height // 2, 2, width // 2, 2)
            .permute(0, 2, 4, 1, 3, 5)
            .reshape(count, height // 2 * (width // 2), 4 * channels)
        )

    def unpack(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        channels, height, width = shape
        return (
            x.view(len(x), height // 2, width // 2, channels, 2, 2)
            .permute(0, 3, 1, 4, 2, 5)
            .reshape(len(x), channels, height, width)
        )

    def schedule_arguments(
        self, pipe: Any, scheduler: Any, steps: int, latent_shape: tuple[int, ...]
    ) -> dict[str, Any]:
        """What the pipeline gives `set_timesteps` beside the number of steps."""
        from diffusers.pipelines.flux.pipeline_flux import calculate_shift

        config = scheduler.config
        tokens = latent_shape[1] // 2 * (latent_shape[2] // 2)
        ends = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}
        out: dict[str, Any] = {"mu": calculate_shift(tokens, *[config.get(k, default) for k, default in ends.items()])}
        if not config.get("use_flow_sigmas"):
            out["sigmas"] = np.linspace(1.0, 1 / steps, steps)
        return out

    def unscale(self, pipe: Any, x0: Tensor) -> Tensor:
        """Latents as the VAE's decoder takes them."""
        return x0 / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor
