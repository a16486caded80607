"""What pictures look like beside their reward, so that a reward which is bought with something else is seen.

All are measured on the pictures of an evaluation, on the same prompts and seeds before and during training; a figure means
something only beside its value for the base model.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

MEANINGS = {
    "brightness": "Mean luma, 0 to 1.",
    "contrast": "Standard deviation of luma in a picture, 0 to 0.5.",
    "edges": "Share of pixels whose luma differs from a neighbour's by more than 0.1.",
    "pitch_8": "Share of the variation of luma at a pitch of 8 pixels, where an autoencoder leaves a grid.",
    "pitch_16": "The same at 16 pixels.",
    "colour_entropy": "Bits of the histogram of a picture over 64 colours, 0 to 6.",
    "diversity": "Mean difference between two pictures of one prompt at 8×8 pixels, 0 to 1; 0 when they are all alike.",
    "near_duplicates": "Share of pictures with a sibling closer than 0.02 by the same measure.",
    "degenerate": "Share of pictures that are of one colour or like noise.",
}
Floats = NDArray[np.float64]


def guards(images: Tensor, images_per_prompt: int) -> dict[str, float]:
    """The figures of MEANINGS for `images` uint8 [N, 3, H, W], those of one prompt beside each other.

    `diversity` and `near_duplicates` need at least two pictures of a prompt and are left out otherwise.
    """
    if not len(images):
        return {}
    pixels = images.numpy().astype(np.float64) / 255
    luma = np.einsum("nchw,c->nhw", pixels, (0.299, 0.587, 0.114))
    spread = luma.std((1, 2))
    steps = edge_share(luma)
    out = {
        "brightness": luma.mean(),
        "contrast": spread.mean(),
        "edges": steps.mean(),
        "pitch_8": pitch_share(luma, 8).mean(),
        "pitch_16": pitch_share(luma, 16).mean(),
        "colour_entropy": colour_entropy(pixels).mean(),
        "degenerate": ((spread < 0.01) | (steps > 0.6)).mean(),
    }
    if images_per_prompt > 1:
        apart = distances(pixels, images_per_prompt)
        out["diversity"] = apart[apart < np.inf].mean()
        out["near_duplicates"] = (apart.min(2) < 0.02).mean()
    return {name: float(out[name]) for name in MEANINGS if name in out}


def edge_share(luma: Floats) -> Floats:
    """Share [N] of pixels of `luma` [N, H, W] that differ from the one to the right or below by more than 0.1."""
    across = np.abs(np.diff(luma, axis=2))[:, :-1] > 0.1
    down = np.abs(np.diff(luma, axis=1))[:, :, :-1] > 0.1
    return (across | down).mean((1, 2))


def pitch_share(luma: Floats, pitch: int) -> Floats:
    """Share [N] of the variation of `luma` [N, H, W] that repeats every `pitch` pixels along a row or a column."""
    centred = luma - luma.mean((1, 2), keepdims=True)
    power = np.abs(np.fft.fft2(centred)) ** 2
    whole = np.maximum(power.sum((1, 2)), 1e-12)
    rows, columns = round(luma.shape[1] / pitch), round(luma.shape[2] / pitch)
    # a wave along one axis alone has frequency 0 along the other, and shows at both signs of its own
    return 2 * (power[:, rows, 0] + power[:, 0, columns]) / whole


def colour_entropy(pixels: Floats) -> Floats:
    """Bits [N] of the histogram of each picture [N, 3, H, W] over 4×4×4 colours."""
    levels = np.minimum((pixels * 4).astype(np.int64), 3)
    index = levels[:, 0] * 16 + levels[:, 1] * 4 + levels[:, 2]
    count = len(pixels)
    index = index.reshape(count, -1) + 64 * np.arange(count)[:, None]
    share = np.bincount(index.ravel(), minlength=64 * count).reshape(count, 64) / index.shape[1]
    return -(share * np.log2(np.where(share > 0, share, 1))).sum(1)


def distances(pixels: Floats, size: int) -> Floats:
    """Mean absolute difference [P, size, size] between the pictures of each prompt at 8×8 pixels; inf with itself."""
    height, width = (n // 8 * 8 for n in pixels.shape[2:])
    small = pixels[:, :, :height, :width].reshape(len(pixels), 3, 8, height // 8, 8, width // 8).mean((3, 5))
    groups = small.reshape(-1, size, small[0].size)
    apart = np.abs(groups[:, :, None] - groups[:, None]).mean(3)
    apart[:, np.arange(size), np.arange(size)] = np.inf
    return apart
