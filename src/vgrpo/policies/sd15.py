"""Stable Diffusion 1.x and 2.x: variance-preserving path, ε- or v-prediction, timesteps 0..999, one CLIP text encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vgrpo.paths import VPPath
from vgrpo.types import Cond


class StableDiffusion:
    """What `policies.pipeline.Pipeline` has to know of the family."""

    network = "unet"
    path_kind = "vp"
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    """All attention, as DDPO adapts SD 1.5."""

    def guidance_kind(self, pipe: Any) -> str:
        return "cfg"

    def unfit(self, scheduler: Any) -> tuple[str, ...]:
        return ()

    def path(self, pipe: Any) -> VPPath:
        kinds = {"epsilon": "eps", "v_prediction": "v"}
        return VPPath(pipe.scheduler.alphas_cumprod, kinds[pipe.scheduler.config.prediction_type])  # type: ignore[arg-type]

    def latent_shape(self, config: dict[str, Any], height: int, width: int) -> tuple[int, int, int]:
        scale = 2 ** (len(config["vae"]["block_out_channels"]) - 1)
        return config["unet"]["in_channels"], height // scale, width // scale

    def size_step(self, config: dict[str, Any]) -> int:
        """Height and width must be multiples of this, as the stock pipeline asks."""
        return 8

    def encode(self, pipe: Any, texts: Sequence[str], max_sequence_length: int) -> Cond:
        tokens, _ = pipe.encode_prompt(list(texts), pipe.device, 1, False)
        return {"encoder_hidden_states": tokens}

    def call(self, cond: Cond, negative: Cond | None) -> dict[str, Tensor]:
        """Arguments of the stock pipeline call that stand for the prompt."""
        out = {"prompt_embeds": cond["encoder_hidden_states"]}
        if negative is not None:
            out["negative_prompt_embeds"] = negative["encoder_hidden_states"]
        return out

    def predict(self, net: torch.nn.Module, x_t: Tensor, t: Tensor, cond: Cond, guidance: float) -> Tensor:
        # entry i of the scheduler stands at t = (i+1)/1000, see VPPath; in float32 that comes back a little off i
        index = t * 1000 - 1
        index = torch.where((index - index.round()).abs() < 1e-3, index.round(), index)
        return net(x_t, index, **cond, return_dict=False)[0]

    def pack(self, x: Tensor) -> Tensor:
        return x

    def unpack(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return x

    def schedule_arguments(
        self, pipe: Any, scheduler: Any, steps: int, latent_shape: tuple[int, ...]
    ) -> dict[str, Any]:
        return {}

    def unscale(self, pipe: Any, x0: Tensor) -> Tensor:
        """Latents as the VAE's decoder takes them."""
        return x0 / pipe.vae.config.scaling_factor
