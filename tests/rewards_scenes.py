"""Scenes with known truth for the shapes reward: true to their captions, false by one change, soft and noisy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import scenes
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

Array = NDArray[Any]
TAGS = ("single_object", "colors", "counting", "two_object", "color_attr", "position")
CHANGES = ("colour", "shape", "missing", "extra", "mirrored")


def captions(tag: str, count: int, rng: np.random.Generator) -> list[dict]:
    """`count` captions of a tag, drawn with replacement."""
    pool = [c for c in scenes.captions() if c["meta"]["tag"] == tag]
    return [pool[i] for i in rng.integers(len(pool), size=count)]


def can_change(caption: dict, change: str) -> bool:
    """Whether `change` makes `caption` false."""
    include = caption["meta"]["include"]
    if change == "colour":
        return "color" in include[0]
    if change == "extra":
        return sum(i["count"] for i in include) < 4  # four objects leave no quarter free
    return change != "mirrored" or caption["meta"]["tag"] == "position"


def changed(things: list[scenes.Thing], change: str, rng: np.random.Generator) -> list[scenes.Thing]:
    """The scene with the first object of another colour or shape, or gone, or one more, or two that trade places."""
    first, *rest = things
    if change == "colour":
        return [replace(first, colour=other(first.colour, scenes.COLOURS, rng)), *rest]
    if change == "shape":
        return [replace(first, shape=other(first.shape, scenes.SHAPES, rng)), *rest]
    if change == "missing":
        return rest
    if change == "mirrored":
        (second,) = rest
        return [replace(first, x=second.x, y=second.y), replace(second, x=first.x, y=first.y)]
    quarters = ((x, y) for y in (16, 48) for x in (16, 48))
    x, y = next(q for q in quarters if all(abs(t.x - q[0]) + abs(t.y - q[1]) > 16 for t in things))
    return [*things, replace(first, x=x, y=y, radius=10.0, angle=0.0)]


def other(value: str, values: Any, rng: np.random.Generator) -> str:
    return str(rng.choice([v for v in values if v != value]))


def drawn(scene: list[list[scenes.Thing]], rng: np.random.Generator) -> Array:
    """Pictures uint8 [N, 64, 64, 3]."""
    return np.stack([scenes.draw(things, rng) for things in scene])


def softened(pictures: Array, rng: np.random.Generator, sigma: float = 0.7, noise: float = 4.0) -> Array:
    """Pictures after a Gaussian blur of `sigma` pixels and noise of standard deviation `noise`, as a VAE leaves them."""
    soft = gaussian_filter(pictures.astype(float), (0, sigma, sigma, 0)) + rng.normal(0, noise, pictures.shape)
    return soft.clip(0, 255).astype(np.uint8)
