"""Captioned pictures of simple scenes: the data on which the embedded model is pretrained.

A scene is one to four solid shapes on a light, softly tinted background, 64×64 pixels. `draw` renders a batch with
numpy; `Scene.prompts` of a scene are the captions that are true of it, each with a GenEval-style `meta` record that the
`shapes` reward can verify. Everything depends on the generator that is passed in and on nothing else.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass

import numpy as np
from scipy.ndimage import map_coordinates

from vgrpo.rewards.shapes import CIRCLE, SHAPES, polygon

COLOURS = {
    "red": (222, 52, 52),
    "orange": (245, 140, 30),
    "yellow": (243, 208, 40),
    "green": (50, 165, 75),
    "blue": (45, 105, 220),
    "purple": (145, 65, 190),
}
NUMBERS = ("zero", "a", "two", "three", "four")
RELATIONS = ("left of", "right of", "above", "below")
SIZE = 64
TEMPLATE, REACH = 96, 1.6  # a signed distance field of each unit shape over [-REACH, REACH]², TEMPLATE² samples


@dataclass(frozen=True)
class Thing:
    """One object; `x`, `y`, `radius` in pixels, `angle` in radians."""

    shape: str
    colour: str
    x: float
    y: float
    radius: float
    angle: float


def distance_field(shape: str) -> np.ndarray:
    """Signed distance [TEMPLATE, TEMPLATE] to the unit shape, negative inside."""
    axis = np.linspace(-REACH, REACH, TEMPLATE)
    p = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    if shape == "circle":
        return (np.hypot(*p.T) - CIRCLE).reshape(TEMPLATE, TEMPLATE)
    a = polygon(shape)
    b = np.roll(a, -1, 0)
    edge, to_point = b - a, p[:, None] - a
    along = np.clip((to_point * edge).sum(-1) / (edge**2).sum(-1), 0, 1)
    distance = np.linalg.norm(to_point - along[..., None] * edge, axis=-1).min(1)
    crosses = (a[:, 1] > p[:, None, 1]) != (b[:, 1] > p[:, None, 1])
    with np.errstate(divide="ignore", invalid="ignore"):
        at = a[:, 0] + (p[:, None, 1] - a[:, 1]) / (b[:, 1] - a[:, 1]) * edge[:, 0]
    inside = (crosses & (p[:, None, 0] < at)).sum(1) % 2 == 1
    return np.where(inside, -distance, distance).reshape(TEMPLATE, TEMPLATE)


FIELDS = {shape: distance_field(shape) for shape in SHAPES}


def coverage(thing: Thing, soft: float = 1.0, shift: tuple[float, float] = (0.0, 0.0)) -> tuple[np.ndarray, np.ndarray]:
    """Opacity [SIZE, SIZE] in [0, 1] of one object with an edge `soft` pixels wide, and its signed distance in pixels."""
    ys, xs = np.mgrid[:SIZE, :SIZE] + 0.5
    dx, dy = xs - thing.x - shift[0], ys - thing.y - shift[1]
    c, s = np.cos(thing.angle), np.sin(thing.angle)
    u, v = (c * dx + s * dy) / thing.radius, (-s * dx + c * dy) / thing.radius
    scale = (TEMPLATE - 1) / (2 * REACH)
    d = map_coordinates(FIELDS[thing.shape], [(v + REACH) * scale, (u + REACH) * scale], order=1, mode="nearest")
    return np.clip(0.5 - d * thing.radius / soft, 0, 1), d * thing.radius


def draw(things: list[Thing], rng: np.random.Generator) -> np.ndarray:
    """One scene, uint8 [SIZE, SIZE, 3]: pale graded background, soft shadows, shaded shapes with antialiased edges."""
    ys, xs = np.mgrid[:SIZE, :SIZE] / SIZE
    pale = np.array([246, 241, 232]) + rng.uniform(-7, 7, 3)
    slope = rng.uniform(-9, 9, 2)
    picture = pale + (slope[0] * (xs - 0.5) + slope[1] * (ys - 0.5))[..., None]
    for thing in things:
        shadow, _ = coverage(thing, soft=4.0, shift=(1.6, 2.2))
        picture = picture * (1 - 0.24 * shadow[..., None])
    for thing in things:
        alpha, depth = coverage(thing)
        light = 1.06 - 0.16 * (ys * SIZE - thing.y) / thing.radius * 0.5 - 0.10 * np.clip(depth + 2, 0, 2) / 2
        colour = np.clip(np.array(COLOURS[thing.colour]) * light[..., None], 0, 255)
        picture = picture * (1 - alpha[..., None]) + colour * alpha[..., None]
    return np.clip(picture + 0.5, 0, 255).astype(np.uint8)


def place(kinds: list[tuple[str, str]], rng: np.random.Generator, corners: list[int] | None = None) -> list[Thing]:
    """Objects of the given (shape, colour) in different quarters of the picture, jittered; `corners` fixes the quarters."""
    quarters = list(rng.permutation(4))[: len(kinds)] if corners is None else corners
    things = []
    for (shape, colour), quarter in zip(kinds, quarters, strict=True):
        x, y = 16 + 32 * (quarter % 2), 16 + 32 * (quarter // 2)
        jx, jy = rng.uniform(-3.2, 3.2, 2)
        things.append(Thing(shape, colour, x + jx, y + jy, rng.uniform(9.0, 11.5), rng.uniform(-0.2, 0.2)))
    return things


def plural(shape: str, count: int) -> str:
    return shape if count == 1 else shape + "s"


def phrase(shape: str, colour: str | None, count: int = 1) -> str:
    article = "an" if count == 1 and colour == "orange" else NUMBERS[count]
    return " ".join(w for w in (article, colour, plural(shape, count)) if w)


def record(tag: str, text: str, include: list[dict], total: int) -> dict:
    """A prompt with GenEval metadata. `exclude` refuses one object too many of any kind, hence also stray objects."""
    exclude = [{"class": i["class"], "count": i["count"] + 1} for i in include if i["count"] > 1]
    return {
        "text": text,
        "meta": {"tag": tag, "include": include, "exclude": [*exclude, {"class": "any", "count": total + 1}]},
    }


def item(shape: str, count: int = 1, colour: str | None = None, position: list | None = None) -> dict:
    out: dict = {"class": shape, "count": count}
    return out | ({"color": colour} if colour else {}) | ({"position": position} if position else {})


def captions() -> list[dict]:
    """Every caption of the little language, about 3,600, in a fixed order; tags are GenEval's six."""
    out = [record("single_object", phrase(s, None), [item(s)], 1) for s in SHAPES]
    out += [record("colors", phrase(s, c), [item(s, 1, c)], 1) for s in SHAPES for c in COLOURS]
    for s, n, c in itertools.product(SHAPES, (2, 3, 4), (None, *COLOURS)):
        out.append(record("counting", phrase(s, c, n), [item(s, n, c)], n))
    for a, b in itertools.permutations(SHAPES, 2):
        out.append(record("two_object", f"{phrase(a, None)} and {phrase(b, None)}", [item(a), item(b)], 2))
    for (a, b), ca, cb in itertools.product(itertools.permutations(SHAPES, 2), COLOURS, COLOURS):
        out.append(record("color_attr", f"{phrase(a, ca)} and {phrase(b, cb)}", [item(a, 1, ca), item(b, 1, cb)], 2))
        if ca != cb:
            text = f"{phrase(a, ca, 2)} and {phrase(b, cb)}"
            out.append(record("color_attr", text, [item(a, 2, ca), item(b, 1, cb)], 3))
    for (a, b), r in itertools.product(itertools.permutations(SHAPES, 2), RELATIONS):
        pair = [item(b), item(a, position=[r, 0])]
        out.append(record("position", f"{phrase(a, None)} {r} {phrase(b, None)}", pair, 2))
        for ca, cb in itertools.product(COLOURS, COLOURS):
            if ca != cb:
                pair = [item(b, 1, cb), item(a, 1, ca, [r, 0])]
                out.append(record("position", f"{phrase(a, ca)} {r} {phrase(b, cb)}", pair, 2))
    return out


def hashed(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") / 2**32


def is_held_out(text: str, share: float = 0.15) -> bool:
    """Whether a caption is kept from all training."""
    return hashed(text) < share


CORNERS = {"left of": ([0, 1], [2, 3], [0, 3], [2, 1]), "above": ([0, 2], [1, 3], [0, 3], [1, 2])}


def realise(caption: dict, rng: np.random.Generator) -> list[Thing]:
    """A random arrangement of objects of which `caption` is true; what it leaves open is drawn at random."""
    kinds, corners = [], None
    for part in caption["meta"]["include"]:
        colours = [part.get("color") or str(rng.choice(list(COLOURS)))] * part["count"]
        kinds += [(part["class"], c) for c in colours]
        if "position" in part:  # the last part stands in this relation to the first
            relation = part["position"][0]
            base = CORNERS["left of" if relation in ("left of", "right of") else "above"]
            first, second = base[rng.integers(len(base))]
            corners = [second, first] if relation in ("left of", "above") else [first, second]
    return place(kinds, rng, corners)
