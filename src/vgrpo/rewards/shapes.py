"""Captions of simple scenes, verified by image analysis: which shapes, how many, what colour, where.

A caption's `meta` is in GenEval's format (arXiv 2310.11513): `include` lists what must be there (`class`, `count`,
optionally `color` and `position` = [relation, index of another entry]), `exclude` what must not be there so often. The
class "any" stands for every object, also one whose shape is not known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from vgrpo.errors import RunError
from vgrpo.types import Prompt

Array = NDArray[Any]
SHAPES = ("circle", "square", "triangle", "star", "heart")
HUES = {"red": 0.0, "orange": 31.0, "yellow": 50.0, "green": 133.0, "blue": 220.0, "purple": 279.0}
"""Degrees on the colour circle; a pixel belongs to the nearest."""
RELATIONS = ("left of", "right of", "above", "below")
UNKNOWN = "unknown"
MUDDY, NOTHING = len(HUES), -1
"""Pixels of an object without a hue, and of no object."""
LEAST_CHROMA = 48
"""Largest minus smallest channel of a pixel that belongs to an object; backgrounds and shadows are paler."""
LEAST_LIGHT = 150
"""Largest channel of a pixel below which it belongs to an object even without chroma; shadows are lighter."""
LEAST_AREA = 0.013
"""Share of the picture below which a patch is noise."""
LEAST_MATCH = {"circle": 0.85, "square": 0.85, "triangle": 0.82, "star": 0.75, "heart": 0.85}
"""Overlap (intersection over union) with the best template below which an object's shape is unknown; a little under
what blurred and noisy drawings reach. Most random blobs stay below."""
GRID, REACH = 48, 1.0
"""Objects are compared with templates on GRID² points over ±REACH·√area around their centre."""
AREA = (GRID / REACH / 2) ** 2
"""Points that an object covers."""
MARGIN = 0.1
"""GenEval's: how much of two objects' summed sizes their centres must be apart before one stands beside or above."""


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
            RunError: a prompt has no `include`, or asks for what cannot be seen here.
        """
        problems = {p.id: words for p in prompts if (words := problem(p.meta))}
        if problems:
            raise RunError(f"shapes cannot verify {', '.join(f'prompt {i!r}: {w}' for i, w in problems.items())}")
        found = detect(images.permute(0, 2, 3, 1).cpu().numpy())
        grades = [requirements(things, p.meta) for things, p in zip(found, prompts, strict=True)]
        strict = torch.tensor([min(g) == 1.0 for g in grades], dtype=torch.float64)
        graded = torch.tensor([sum(g) / len(g) for g in grades], dtype=torch.float64)
        return {"strict": strict, "graded": graded, "mixed": (strict + graded) / 2}[self.mode]


# ------------------------------------------------------------------------------------------------------------- the rules


def problem(meta: Mapping[str, Any]) -> str:
    """What in `meta` no picture could ever be seen to fulfil, in words; empty if there is nothing."""
    include = meta.get("include") or ()
    if not include:
        return "no GenEval metadata (`include`)"
    for entry in (*include, *meta.get("exclude", ())):
        relation, other = entry.get("position", (RELATIONS[0], 0))
        asked = (
            ("class", entry.get("class"), (*SHAPES, "any")),
            ("color", entry.get("color", "red"), tuple(HUES)),
            ("position", relation, RELATIONS),
            ("position of entry", other, range(len(include))),
            ("count", entry.get("count", 1), range(1, 100)),
        )
        for what, value, known in asked:
            if value not in known:
                return f"{what} {value!r} is not in {known}"
    return ""


def requirements(things: Sequence[Thing], meta: Mapping[str, Any]) -> list[float]:
    """How far each requirement of `meta` is met, in [0, 1] each.

    One for the number of objects of an entry, one for their colour, one for their place, and one for each exclusion,
    which falls as 1/(1 + objects too many). GenEval looks at its detector's most confident objects alone; here all count,
    in any order: `count` of the entry's objects must each be placed right towards as many as the other entry asks for.
    """
    out, entries = [], meta["include"]
    chosen = [[t for t in things if is_class(t, e) and is_colour(t, e)] for e in entries]
    for entry, right in zip(entries, chosen, strict=True):
        count = entry.get("count", 1)
        out.append(min(sum(is_class(t, entry) for t in things), count) / count)
        if "color" in entry:
            out.append(min(len(right), count) / count)
        if "position" in entry:
            relation, other = entry["position"]
            enough = entries[other].get("count", 1)
            placed = sum(sum(relation in relations(a, b) for b in chosen[other]) >= enough for a in right)
            out.append(min(placed, count) / count)
    for entry in meta.get("exclude", ()):
        surplus = sum(is_class(t, entry) and is_colour(t, entry) for t in things) - (entry.get("count", 1) - 1)
        out.append(1 / (1 + max(surplus, 0)))
    return out


def is_class(thing: Thing, entry: Mapping[str, Any]) -> bool:
    return entry["class"] in ("any", thing.shape)


def is_colour(thing: Thing, entry: Mapping[str, Any]) -> bool:
    return thing.colour == entry.get("color", thing.colour)


def relations(a: Thing, b: Thing) -> set[str]:
    """Where `a` stands as seen from `b`, by GenEval's rule: `a` lies in a direction when its offset that way, less MARGIN
    of both objects' sizes, is more than half of the distance between the centres. Diagonal neighbours lie in two."""
    dx, dy = a.x - b.x, a.y - b.y
    across = abs(dx) - MARGIN * (a.width + b.width)
    along = abs(dy) - MARGIN * (a.height + b.height)
    half = math.hypot(dx, dy) / 2
    sides = {"left of" if dx < 0 else "right of": across, "above" if dy < 0 else "below": along}
    return {name for name, way in sides.items() if way > half}


# ---------------------------------------------------------------------------------------------------------------- seeing


def detect(images: Array) -> list[list[Thing]]:
    """The objects in each of `images` uint8 [N, H, W, 3], in no particular order.

    A connected patch of a known shape is one object, of the colour that most of its pixels have. Any other patch falls
    apart into its colours: objects that touch, or blobs.
    """
    out: list[list[Thing]] = [[] for _ in images]
    colours = colour_of(images)
    shapeless = np.full_like(colours, NOTHING)
    for box, mask, shape in shaped(colours != NOTHING):
        if shape == UNKNOWN:
            shapeless[box][mask] = colours[box][mask]
        else:
            out[box[0].start].append(thing_of(box, mask, shape, colours[box][mask]))
    for colour in np.unique(shapeless[shapeless != NOTHING]):
        for box, mask, shape in shaped(shapeless == colour):
            out[box[0].start].append(thing_of(box, mask, shape, colours[box][mask]))
    return out


def shaped(foreground: Array) -> list[tuple[tuple[slice, slice, slice], Array, str]]:
    """The connected patches of bool [N, H, W]: the box of each, which of its pixels [1, h, w] belong to it, its shape."""
    from scipy import ndimage

    if not foreground.any():
        return []
    flat = np.zeros((3, 3, 3), dtype=int)
    flat[1] = 1  # pixels touch within a picture, diagonally too, and never across pictures
    labels, _ = ndimage.label(foreground, structure=flat)
    areas = np.bincount(labels.ravel())[1:]
    boxes = ndimage.find_objects(labels)
    kept = np.flatnonzero(areas >= LEAST_AREA * math.prod(foreground.shape[1:]))
    masks = [labels[boxes[k]] == k + 1 for k in kept]
    return list(zip([boxes[k] for k in kept], masks, shape_of(masks), strict=True))


def thing_of(box: tuple[slice, slice, slice], mask: Array, shape: str, colours: Array) -> Thing:
    """An object with the pixels `mask` [1, h, w] of its box; its colour is that of at least half of `colours`, or unknown."""
    _, top, left = (side.start for side in box)
    _, ys, xs = np.nonzero(mask)
    votes = np.bincount(colours, minlength=len(HUES) + 1)
    colour = (*HUES, UNKNOWN)[votes.argmax() if 2 * votes.max() >= len(colours) else MUDDY]
    _, height, width = mask.shape
    return Thing(shape, colour, float(left + xs.mean() + 0.5), float(top + ys.mean() + 0.5), width, height)


def colour_of(images: Array) -> Array:
    """Index into HUES of each pixel [..., 3], int8; MUDDY for what is dark without a hue, NOTHING for the pale rest."""
    channels = [images[..., k].astype(np.int16) for k in range(3)]
    largest, smallest = np.maximum.reduce(channels), np.minimum.reduce(channels)
    coloured = largest - smallest >= LEAST_CHROMA
    r, g, b, high, low = (c[coloured].astype(np.float32) for c in (*channels, largest, smallest))
    chroma = high - low
    hue = (
        np.where(high == r, (g - b) / chroma % 6, np.where(high == g, (b - r) / chroma + 2, (r - g) / chroma + 4)) * 60
    )
    hues = np.array([*HUES.values(), 360.0], dtype=np.float32)
    out = np.where(largest < LEAST_LIGHT, np.int8(MUDDY), np.int8(NOTHING))
    out[coloured] = np.searchsorted((hues[1:] + hues[:-1]) / 2, hue) % len(HUES)
    return out


def shape_of(masks: Sequence[Array]) -> list[str]:
    """The shape of each mask [1, h, w], by its best overlap with any template in any rotation."""
    if not masks:
        return []
    names, stack = templates()
    common = np.stack([normalised(m[0]) for m in masks]) @ stack.T  # [D, K] grid points
    overlap = common / (2 * AREA - common)
    best = overlap.argmax(1)
    return [names[b] if o[b] >= LEAST_MATCH[names[b]] else UNKNOWN for b, o in zip(best, overlap, strict=True)]


def normalised(mask: Array) -> Array:
    """A mask [h, w] on the GRID² points around its centre, in units of √area, float32 flat; no size or place is left.

    Every mask covers AREA points, but for rounding and for what a long one has beyond REACH.
    """
    ys, xs = np.nonzero(mask)
    scale = np.sqrt(len(ys)) * REACH
    axis = (np.arange(GRID) + 0.5) / GRID * 2 - 1
    rows = np.floor(ys.mean() + 0.5 + axis * scale).astype(int)
    columns = np.floor(xs.mean() + 0.5 + axis * scale).astype(int)
    h, w = mask.shape
    inside = ((rows >= 0) & (rows < h))[:, None] & ((columns >= 0) & (columns < w))
    return (mask[rows.clip(0, h - 1)][:, columns.clip(0, w - 1)] & inside).ravel().astype(np.float32)


@cache
def templates(step: float = 6.0, size: int = 128) -> tuple[list[str], Array]:
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
