"""Captions of simple scenes, verified by image analysis: which shapes, how many, what colour, where.

A caption's `meta` is in GenEval's format (arXiv 2310.11513): `include` lists what must be there (`class`, `count`,
optionally `color` and `position` = [relation, index of another entry]), `exclude` what must not be there so often. The
class "any" stands for every object, also one whose shape is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from vgrpo.errors import RunError
from vgrpo.types import Prompt

Array = NDArray[Any]
SHAPES = ("circle", "square", "triangle", "star", "heart")
HUES = {"red": 0.0, "orange": 31.0, "yellow": 50.0, "green": 133.0, "blue": 220.0, "purple": 279.0}
"""Degrees on the colour circle; a pixel belongs to the nearest."""
UNKNOWN = "unknown"
LEAST_CHROMA = 48
"""Largest minus smallest channel of a pixel that belongs to an object; backgrounds and shadows are paler."""
LEAST_AREA = 0.013
"""Share of the picture below which a patch is noise."""
LEAST_MATCH = 0.74
"""Overlap (intersection over union) with the best template below which an object's shape is unknown."""
GRID, REACH = 24, 1.1
"""Objects are compared with templates on GRID² points over ±REACH·√area around their centre."""
MARGIN = 0.1
"""GenEval's: two boxes must be further apart than this share of their summed sizes to stand left, right, above, below."""


@dataclass(frozen=True, slots=True)
class Thing:
    """One object found in a picture; lengths in pixels, y downwards."""

    shape: str
    colour: str
    x: float
    y: float
    width: float
    height: float


class Shapes(BaseModel):
    """Scores pictures against the `include` and `exclude` of their prompts, in [0, 1].

    `strict` is 1 where all of it holds and else 0. `graded` is the mean over the single requirements, each with partial
    credit; it is 1 exactly where `strict` is. `mixed` is the mean of both: partial credit and a prize for the whole.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    mode: Literal["strict", "graded", "mixed"] = "graded"

    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [N] float64 of `images` uint8 [N, 3, H, W].

        Raises:
            RunError: a prompt has no `include`.
        """
        import torch

        blind = [p.id for p in prompts if not p.meta.get("include")]
        if blind:
            raise RunError(f"shapes needs GenEval metadata (`include`) with each prompt; prompts {blind} have none")
        found = detect(images.permute(0, 2, 3, 1).numpy())
        grades = [requirements(things, p.meta) for things, p in zip(found, prompts, strict=True)]
        strict = torch.tensor([min(g) == 1.0 for g in grades], dtype=torch.float64)
        graded = torch.tensor([sum(g) / len(g) for g in grades], dtype=torch.float64)
        return {"strict": strict, "graded": graded, "mixed": (strict + graded) / 2}[self.mode]


# ------------------------------------------------------------------------------------------------------------- the rules


def requirements(things: Sequence[Thing], meta: Mapping[str, Any]) -> list[float]:
    """How far each requirement of `meta` is met, in [0, 1] each.

    One for the number of objects of an entry, one for their colour, one for their place, and one for each exclusion,
    which falls as 1/(1 + objects too many).
    """
    out, entries = [], meta["include"]
    chosen = [[t for t in things if is_class(t, e) and t.colour == e.get("color", t.colour)] for e in entries]
    for entry, right in zip(entries, chosen, strict=True):
        count = entry.get("count", 1)
        out.append(min(sum(is_class(t, entry) for t in things), count) / count)
        if "color" in entry:
            out.append(min(len(right), count) / count)
        if "position" in entry:
            relation, other = entry["position"]
            out.append(float(any(relation in relations(a, b) for a in right for b in chosen[other])))
    for entry in meta.get("exclude", ()):
        surplus = sum(is_class(t, entry) for t in things) - (entry["count"] - 1)
        out.append(1 / (1 + max(surplus, 0)))
    return out


def is_class(thing: Thing, entry: Mapping[str, Any]) -> bool:
    return entry["class"] in ("any", thing.shape)


def relations(a: Thing, b: Thing) -> set[str]:
    """Where `a` stands as seen from `b`, by GenEval's rule: the offset of the centres, less MARGIN of the boxes' summed
    sizes, counts in a direction when that is at least half of its length."""
    dx, dy = a.x - b.x, a.y - b.y
    dx = np.sign(dx) * max(abs(dx) - MARGIN * (a.width + b.width), 0)
    dy = np.sign(dy) * max(abs(dy) - MARGIN * (a.height + b.height), 0)
    length = float(np.hypot(dx, dy))
    if not length:
        return set()
    sides = {"left of": -dx, "right of": dx, "above": -dy, "below": dy}
    return {name for name, way in sides.items() if way / length > 0.5}


# ---------------------------------------------------------------------------------------------------------------- seeing


def detect(images: Array) -> list[list[Thing]]:
    """The objects in each of `images` uint8 [N, H, W, 3], in no particular order.

    An object is a connected patch of one colour; what touches in another colour is another object.
    """
    from scipy import ndimage

    n, height, width, _ = images.shape
    out: list[list[Thing]] = [[] for _ in range(n)]
    colours = colour_of(images)
    flat_only = np.zeros((3, 3, 3), dtype=int)
    flat_only[1] = 1  # pixels touch within a picture, diagonally too, and never across pictures
    for index, colour in enumerate(HUES):
        labels, count = ndimage.label(colours == index, structure=flat_only)
        areas = np.bincount(labels.ravel())[1:]
        kept = np.flatnonzero(areas >= LEAST_AREA * height * width)
        if not len(kept):
            continue
        boxes = ndimage.find_objects(labels)
        masks, facts = [], []
        for k in kept:
            box = boxes[k]
            patch = labels[box][0] == k + 1
            masks.append(normalised(patch))
            ys, xs = np.nonzero(patch)
            facts.append(
                (box[0].start, box[2].start + xs.mean() + 0.5, box[1].start + ys.mean() + 0.5, *patch.shape[::-1])
            )
        for shape, (image, x, y, w, h) in zip(shape_of(np.stack(masks)), facts, strict=True):
            out[image].append(Thing(shape, colour, x, y, w, h))
    return out


def colour_of(images: Array) -> Array:
    """Index into HUES of each pixel [..., 3], int8; −1 for what is too pale to belong to an object."""
    channels = [images[..., k].astype(np.int16) for k in range(3)]
    largest, smallest = np.maximum.reduce(channels), np.minimum.reduce(channels)
    coloured = largest - smallest >= LEAST_CHROMA
    r, g, b, high, low = (c[coloured].astype(np.float32) for c in (*channels, largest, smallest))
    chroma = high - low
    hue = (
        np.where(high == r, (g - b) / chroma % 6, np.where(high == g, (b - r) / chroma + 2, (r - g) / chroma + 4)) * 60
    )
    hues = np.array([*HUES.values(), 360.0], dtype=np.float32)
    out = np.full(coloured.shape, -1, dtype=np.int8)
    out[coloured] = np.searchsorted((hues[1:] + hues[:-1]) / 2, hue) % len(HUES)
    return out


def normalised(patch: Array) -> Array:
    """A mask [h, w] on the GRID² points around its centre, in units of √area, float32 flat; no size or place is left."""
    ys, xs = np.nonzero(patch)
    scale = np.sqrt(len(ys)) * REACH
    axis = (np.arange(GRID) + 0.5) / GRID * 2 - 1
    rows = np.floor(ys.mean() + 0.5 + axis * scale).astype(int)
    columns = np.floor(xs.mean() + 0.5 + axis * scale).astype(int)
    h, w = patch.shape
    inside = ((rows >= 0) & (rows < h))[:, None] & ((columns >= 0) & (columns < w))
    return (patch[rows.clip(0, h - 1)][:, columns.clip(0, w - 1)] & inside).ravel().astype(np.float32)


def shape_of(masks: Array) -> list[str]:
    """The shape of each mask [D, GRID²], by its best overlap with any template in any rotation."""
    names, stack = templates()
    common = masks @ stack.T
    overlap = common / (masks.sum(1, keepdims=True) + stack.sum(1) - common)
    best = overlap.argmax(1)
    return [names[b] if o[b] >= LEAST_MATCH else UNKNOWN for b, o in zip(best, overlap, strict=True)]


@cache
def templates(step: float = 6.0, size: int = 48) -> tuple[list[str], Array]:
    """Each shape in rotations `step` degrees apart, as `normalised` would give it: names [K] and masks [K, GRID²]."""
    turns = {"circle": step, "square": 90.0, "triangle": 120.0, "star": 72.0, "heart": 360.0}
    axis = (np.arange(size) + 0.5) / size * 3.2 - 1.6
    x, y = np.meshgrid(axis, axis)
    names, masks = [], []
    for shape in SHAPES:
        for degrees in np.arange(0, turns[shape], step):
            c, s = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
            names.append(shape)
            masks.append(normalised(inside(shape, c * x + s * y, -s * x + c * y)))
    return names, np.stack(masks)


def inside(shape: str, x: Array, y: Array) -> Array:
    """Whether points lie in the unit shape, y downwards; bool, of the shape of `x`."""
    if shape == "circle":
        return np.hypot(x, y) < CIRCLE
    corners = polygon(shape)
    out = np.zeros(x.shape, dtype=bool)
    for (ax, ay), (bx, by) in zip(corners, np.roll(corners, -1, 0), strict=True):
        crosses = (ay > y) != (by > y)
        with np.errstate(divide="ignore", invalid="ignore"):
            out ^= crosses & (x < ax + (y - ay) / (by - ay) * (bx - ax))
    return out


CIRCLE = 0.95
"""Radius of the unit circle shape."""


def polygon(shape: str) -> Array:
    """Corners [K, 2] of a unit shape that is no circle, y downwards; the outlines fill about the same area."""
    if shape == "square":
        return 0.82 * np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]], dtype=float)
    if shape == "triangle":
        angle = np.linspace(0, 2 * np.pi, 3, endpoint=False) - np.pi / 2
        return 1.12 * np.stack([np.cos(angle), np.sin(angle)], 1) + [0, 0.22]
    if shape == "star":
        angle = np.linspace(0, 2 * np.pi, 10, endpoint=False) - np.pi / 2
        return np.where(np.arange(10) % 2, 0.50, 1.15)[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1)
    s = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    x, y = 16 * np.sin(s) ** 3, 13 * np.cos(s) - 5 * np.cos(2 * s) - 2 * np.cos(3 * s) - np.cos(4 * s)
    return np.stack([x, -y - 2.5], 1) / 15.0
