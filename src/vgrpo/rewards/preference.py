"""Rewards that look at the picture alone: simple stand-ins for taste, and DDPO's two compressibility tasks."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from torch import Tensor

    from vgrpo.types import Prompt


class Brightness(BaseModel):
    """Mean luma (ITU-R BT.601) in [0, 1]: 0 for black, 1 for white."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        return luma(images).mean((1, 2))


class Colourfulness(BaseModel):
    """Hasler and Süsstrunk's M3 (2003) divided by 100: 0 for grey, about 0.6 for colourful photographs, always below 3."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        r, g, b = images.double().unbind(1)
        red_green, yellow_blue = (r - g).flatten(1), ((r + g) / 2 - b).flatten(1)
        spread = (red_green.var(1, correction=0) + yellow_blue.var(1, correction=0)).sqrt()
        level = (red_green.mean(1) ** 2 + yellow_blue.mean(1) ** 2).sqrt()
        return (spread + 0.3 * level) / 100


class Sharpness(BaseModel):
    """Mean size of the luma's gradient between neighbours, in [0, 1]: 0 for a flat picture, 1 for a checkerboard of pixels.

    Grows with noise, too, and falls when the same picture is drawn with more pixels.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        y = luma(images)
        down, right = y[:, 1:, :-1] - y[:, :-1, :-1], y[:, :-1, 1:] - y[:, :-1, :-1]
        return ((down**2 + right**2) / 2).sqrt().mean((1, 2))


class Jpeg(BaseModel):
    """Kilobytes of the picture as a JPEG of quality 95 (DDPO, arXiv 2305.13301), negative for `compressible`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    mode: Literal["compressible", "incompressible"] = "compressible"

    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        import torch
        from PIL import Image

        sizes = []
        for image in images.cpu():
            buffer = io.BytesIO()
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(buffer, format="JPEG", quality=95)
            sizes.append(buffer.tell() / 1000)
        kilobytes = torch.tensor(sizes, dtype=torch.float64)
        return kilobytes if self.mode == "incompressible" else -kilobytes


def luma(images: Tensor) -> Tensor:
    """[N, H, W] float64 in [0, 1] of uint8 [N, 3, H, W]."""
    r, g, b = images.double().unbind(1)
    return (0.299 * r + 0.587 * g + 0.114 * b) / 255
