"""Rewards: known scenes, hand computations, and a contract that all of them keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scenes
import torch
from scipy.ndimage import gaussian_filter

from vgrpo.errors import RunError, UserError
from vgrpo.rewards import REWARDS, load, on_pil, probe, score
from vgrpo.rewards.ocr import edit_distance, likeness, plain, quoted, recognised
from vgrpo.rewards.shapes import Shapes, Thing, colour_of, detect, relations, requirements
from vgrpo.types import Prompt

SIGN = {"include": [{"class": "circle", "count": 1}], "exclude": [{"class": "any", "count": 2}]}


def as_images(pictures: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous()


@pytest.fixture(scope="module")
def known() -> tuple[np.ndarray, list[dict], np.random.Generator]:
    """110 rendered scenes of each of the six tags, with the captions that are true of them."""
    rng = np.random.default_rng(5)
    by_tag: dict[str, list[dict]] = {}
    for caption in scenes.captions():
        by_tag.setdefault(caption["meta"]["tag"], []).append(caption)
    captions = [tag[rng.integers(len(tag))] for tag in by_tag.values() for _ in range(110)]
    return np.stack([scenes.draw(scenes.realise(c, rng), rng) for c in captions]), captions, rng


def strict(pictures: np.ndarray, captions: list[dict], mode: Any = "strict") -> np.ndarray:
    prompts = [Prompt(text=c["text"], id=str(i), meta=c["meta"]) for i, c in enumerate(captions)]
    return Shapes(mode=mode)(as_images(pictures), prompts).numpy()


def test_true_captions_are_accepted(known: Any) -> None:
    pictures, captions, _ = known
    assert strict(pictures, captions).mean() >= 0.99
    assert strict(pictures, captions, "graded").mean() >= 0.995


def test_soft_and_noisy_pictures_are_read_too(known: Any) -> None:
    pictures, captions, rng = known
    worse = gaussian_filter(pictures.astype(float), (0, 0.7, 0.7, 0)) + rng.normal(0, 4, pictures.shape)
    assert strict(np.clip(worse, 0, 255).astype(np.uint8), captions).mean() >= 0.97


def corrupted(caption: dict, how: str, rng: np.random.Generator) -> np.ndarray:
    """A picture of which the caption is not true, by one change."""
    things = scenes.realise(caption, rng)
    one = things[0]
    if how == "colour":
        things[0] = scenes.Thing(one.shape, other(one.colour, scenes.COLOURS, rng), one.x, one.y, one.radius, one.angle)
    elif how == "shape":
        things[0] = scenes.Thing(other(one.shape, scenes.SHAPES, rng), one.colour, one.x, one.y, one.radius, one.angle)
    elif how == "missing":
        things = things[1:]
    elif how == "extra":
        free = [(x, y) for x in (16, 48) for y in (16, 48) if all(abs(t.x - x) + abs(t.y - y) > 16 for t in things)]
        x, y = free[0]
        things.append(scenes.Thing(one.shape, one.colour, x, y, 10.0, 0.0))
    elif how == "mirrored":
        a, b = things
        things = [
            scenes.Thing(a.shape, a.colour, b.x, b.y, a.radius, a.angle),
            scenes.Thing(b.shape, b.colour, a.x, a.y, b.radius, b.angle),
        ]
    return scenes.draw(things, rng)


def other(value: str, values: Any, rng: np.random.Generator) -> str:
    return str(rng.choice([v for v in values if v != value]))


@pytest.mark.parametrize(
    ("how", "tags"),
    [
        ("colour", ("colors", "color_attr")),
        ("shape", ("single_object", "colors", "counting", "two_object", "color_attr", "position")),
        ("missing", ("single_object", "colors", "counting", "two_object", "color_attr", "position")),
        ("extra", ("single_object", "colors", "two_object", "color_attr", "position")),
        ("mirrored", ("position",)),
    ],
)
def test_false_captions_are_refused(how: str, tags: tuple[str, ...]) -> None:
    rng = np.random.default_rng(11)
    captions = [c for c in scenes.captions() if c["meta"]["tag"] in tags]
    captions = [captions[i] for i in rng.integers(len(captions), size=150)]
    pictures = np.stack([corrupted(c, how, rng) for c in captions])
    assert strict(pictures, captions).mean() <= 0.01
    graded = strict(pictures, captions, "graded")
    assert graded.max() < 1 or (graded == 1).mean() <= 0.01
    assert graded.mean() > 0.3  # a near miss is worth more than nothing


def test_graded_is_one_exactly_where_strict_is(known: Any) -> None:
    pictures, captions, rng = known
    shuffled = [captions[i] for i in rng.permutation(len(captions))]
    for these in (captions, shuffled):
        assert np.array_equal(strict(pictures, these, "graded") == 1, strict(pictures, these) == 1)


def thing(shape: str, colour: str, x: float, y: float, size: float = 10) -> Thing:
    return Thing(shape, colour, x, y, size, size)


A, B = thing("circle", "red", 10, 10), thing("star", "blue", 50, 12)


@pytest.mark.parametrize(
    ("things", "include", "exclude", "expected"),
    [
        ([A], [{"class": "circle", "count": 1}], [], [1]),
        ([], [{"class": "circle", "count": 1}], [], [0]),
        ([A], [{"class": "circle", "count": 2}], [], [0.5]),
        ([A, A, A], [{"class": "circle", "count": 2}], [], [1]),
        ([A, A, A], [{"class": "circle", "count": 2}], [{"class": "circle", "count": 3}], [1, 0.5]),
        ([A], [{"class": "circle", "count": 1, "color": "blue"}], [], [1, 0]),
        (
            [A, B],
            [{"class": "star", "count": 1}, {"class": "circle", "count": 1, "position": ["left of", 0]}],
            [],
            [1, 1, 1],
        ),
        (
            [A, B],
            [{"class": "star", "count": 1}, {"class": "circle", "count": 1, "position": ["above", 0]}],
            [],
            [1, 1, 0],
        ),
        ([A, B], [{"class": "circle", "count": 1}], [{"class": "any", "count": 2}], [1, 0.5]),
        ([thing("unknown", "red", 5, 5)], [{"class": "circle", "count": 1}], [{"class": "any", "count": 2}], [0, 1]),
    ],
)
def test_rules_on_made_up_detections(things: Any, include: Any, exclude: Any, expected: list[float]) -> None:
    assert requirements(things, {"include": include, "exclude": exclude}) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("dx", "dy", "expected"),
    [
        (-30, 0, {"left of"}),
        (30, 0, {"right of"}),
        (0, -30, {"above"}),
        (0, 30, {"below"}),
        (-30, 30, {"left of", "below"}),
        (1.9, 0, set()),  # within a tenth of the summed widths
        (-30, 10, {"left of"}),
        (0, 0, set()),
    ],
)
def test_relations(dx: float, dy: float, expected: set[str]) -> None:
    assert relations(thing("circle", "red", 40 + dx, 40 + dy), thing("star", "red", 40, 40)) == expected


def test_colours_are_those_of_the_data() -> None:
    swatches = np.array(list(scenes.COLOURS.values()), dtype=np.uint8)
    assert colour_of(swatches).tolist() == list(range(len(scenes.COLOURS)))
    assert colour_of(np.array([[246, 241, 232], [120, 120, 120], [0, 0, 0]], dtype=np.uint8)).tolist() == [-1] * 3


@pytest.mark.parametrize("factor", [2, 3])
def test_size_of_the_picture_does_not_matter(known: Any, factor: int) -> None:
    pictures, captions, _ = known
    larger = pictures[::20].repeat(factor, 1).repeat(factor, 2)
    assert strict(larger, captions[::20]).mean() >= 0.97
    wide = np.concatenate([pictures[::20], np.full_like(pictures[::20], 245)], 2)
    assert [len(t) for t in detect(wide)] == [len(t) for t in detect(pictures[::20])]


def test_shapes_needs_metadata() -> None:
    with pytest.raises(RunError, match=r"\['7'\] have none"):
        Shapes()(torch.zeros(1, 3, 64, 64, dtype=torch.uint8), [Prompt(text="a circle", id="7")])


# -------------------------------------------------------------------------------------------------------------- pictures


def one(kind: str, picture: torch.Tensor, **settings: Any) -> float:
    return score(kind, load(kind)(**settings), picture[None], [Prompt(text="x", id="0")]).item()


def flat(r: int, g: int, b: int, size: int = 16) -> torch.Tensor:
    return torch.tensor([r, g, b], dtype=torch.uint8)[:, None, None].expand(3, size, size).contiguous()


def test_brightness_by_hand() -> None:
    assert one("brightness", flat(255, 255, 255)) == pytest.approx(1)
    assert one("brightness", flat(255, 0, 0)) == pytest.approx(0.299)
    assert one("brightness", flat(0, 0, 0)) == 0


def test_colourfulness_by_hand() -> None:
    assert one("colourfulness", flat(90, 90, 90)) == 0
    half = torch.cat([flat(255, 0, 0), flat(0, 255, 0)], 2)  # R-G is ±255, (R+G)/2-B is 127.5 throughout
    assert one("colourfulness", half) == pytest.approx((255 + 0.3 * 127.5) / 100)


def test_sharpness_by_hand() -> None:
    assert one("sharpness", flat(7, 8, 9)) == 0
    stripes = torch.zeros(3, 8, 8, dtype=torch.uint8)
    stripes[:, :, ::2] = 255
    assert one("sharpness", stripes) == pytest.approx(1)


def test_jpeg_is_the_size_of_a_file() -> None:
    noisy = torch.randint(0, 256, (3, 64, 64), generator=torch.Generator().manual_seed(0)).byte()
    large, small = (one("jpeg", p, mode="incompressible") for p in (noisy, flat(9, 9, 9, 64)))
    assert large > 5 * small > 0
    assert one("jpeg", noisy) == -large


# ------------------------------------------------------------------------------------------------------------------- ocr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('a sign that says "OPEN"', "OPEN"),
        ("a sign that says “OPEN”", "OPEN"),
        ("a sign that says 'OPEN'", "OPEN"),
        ("a sign that says ‘OPEN’", "OPEN"),
        ("ein Schild „AUF“", "AUF"),
        ("une enseigne «OUVERT»", "OUVERT"),
        ('"HELLO" above "WORLD"', "HELLO WORLD"),
        ("the dog's bone isn't here", ""),
        ("a shirt with 'don't panic' on it", "don't panic"),
        ('empty ""', ""),
        ("no quotes", ""),
        ('"日本語"', "日本語"),
    ],
)
def test_quoted_text(text: str, expected: str) -> None:
    assert quoted(text) == expected


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("", "", 0), ("abc", "abc", 0), ("", "abc", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2)],
)
def test_edit_distance(a: str, b: str, distance: int) -> None:
    assert edit_distance(a, b) == edit_distance(b, a) == distance


def test_likeness_is_capped() -> None:
    assert likeness("open", "open") == 1
    assert likeness("opn", "open") == 0.75
    assert likeness("something else entirely", "open") == 0
    assert plain(" O P\ten ") == "open"


@pytest.mark.parametrize(
    "nothing", [None, [], (), [None], [[]], type("R", (), {"txts": None})(), type("R", (), {"txts": ()})()]
)
def test_nothing_recognised_is_no_text(nothing: Any) -> None:
    assert recognised(nothing) == ""


def test_recognised_parts_are_joined() -> None:
    assert recognised(type("R", (), {"txts": ("HELLO", "WORLD")})()) == "HELLO WORLD"


def test_ocr_reads_a_real_picture() -> None:
    pytest.importorskip("rapidocr")
    from PIL import Image, ImageDraw, ImageFont

    def page(text: str) -> torch.Tensor:
        picture = Image.new("RGB", (192, 96), "white")
        ImageDraw.Draw(picture).text((12, 24), text, fill="black", font=ImageFont.load_default(40))
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1)

    images = torch.stack([page("HELLO"), page(""), page("SALE")])
    prompts = [Prompt(text=f'a sign "{w}"', id=w) for w in ("HELLO", "HELLO", "HELLO")]
    scores = score("ocr", load("ocr")(), images, prompts).tolist()
    assert scores[0] == 1
    assert scores[1] == 0
    assert scores[2] < 0.6
    assert score("ocr", load("ocr")(mode="contains"), images, prompts).tolist() == [1, 0, 0]
    with pytest.raises(RunError, match="quoted text"):
        score("ocr", load("ocr")(), images[:1], [Prompt(text="a sign", id="3")])


# -------------------------------------------------------------------------------------------------------------- contract

CONTRACT = [(kind, {}) for kind in REWARDS if kind != "ocr"] + [
    ("shapes", {"mode": "strict"}),
    ("jpeg", {"mode": "incompressible"}),
]


@pytest.mark.parametrize(("kind", "settings"), CONTRACT)
def test_contract(kind: str, settings: dict[str, Any], known: Any) -> None:
    pictures, captions, _ = known
    images = as_images(pictures[::60])
    prompts = [Prompt(text=c["text"], id=str(i), meta=c["meta"]) for i, c in enumerate(captions[::60])]
    reward = load(kind)(**settings)
    together = score(kind, reward, images, prompts)
    assert together.dtype == torch.float64
    assert together.std() > 0 or settings == {"mode": "strict"} or kind == "shapes"
    alone = torch.cat([score(kind, reward, images[i : i + 1], prompts[i : i + 1]) for i in range(len(images))])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-9)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    moved = score(kind, reward, images[order], [prompts[i] for i in order])
    torch.testing.assert_close(together[order], moved, rtol=0, atol=1e-9)
    assert score(kind, reward, images[:0], []).shape == (0,)
    for bad in (images.float(), images[:, :1], images[:-1]):
        with pytest.raises(RunError, match="uint8 pictures"):
            score(kind, reward, bad, prompts)


IMAGES, PROMPTS = torch.zeros(2, 3, 4, 4, dtype=torch.uint8), [Prompt(text="a", id="p1"), Prompt(text="b", id="p2")]


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda i, p: torch.zeros(3), r"shape \(2,\), got \(3,\)"),
        (lambda i, p: torch.zeros(2, 1), r"got \(2, 1\)"),
        (lambda i, p: torch.tensor([0.0, float("nan")]), r"no finite score for prompts \['p2'\]"),
        (lambda i, p: [0.0, float("inf")], r"\['p2'\]"),
        (lambda i, p: [0.0, None], "must give 2 numbers"),
        (lambda i, p: None, "must give 2 numbers"),
        (lambda i, p: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_what_is_no_score_stops(reward: Any, words: str) -> None:
    with pytest.raises(RunError, match=words):
        score("mine", reward, IMAGES, PROMPTS)
    with pytest.raises(UserError, match="first try"):
        probe("mine", reward, PROMPTS)


def test_numbers_in_any_form_are_scores() -> None:
    for value in ([1, 2], (1.0, 2.0), np.array([1, 2]), torch.tensor([1, 2], dtype=torch.bfloat16)):
        assert score("mine", lambda i, p, v=value: v, IMAGES, PROMPTS).tolist() == [1, 2]


def test_a_function_of_pil_pictures() -> None:
    reward = on_pil(lambda pictures, texts: [p.size[0] + len(t) for p, t in zip(pictures, texts, strict=True)])
    assert score("mine", reward, IMAGES, PROMPTS).tolist() == [5, 5]


def test_own_functions_are_found_by_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def good(images, prompts):\n    return images.float().mean((1, 2, 3))\n")
    assert score("good", load(f"{tmp_path}/mine.py:good"), IMAGES, PROMPTS).tolist() == [0, 0]
    assert load("vgrpo.rewards.preference:Brightness") is load("brightness")
    for wrong, words in (
        ("brightnes", "did you mean 'brightness'"),
        (f"{tmp_path}/mine.py:bad", "has no function 'bad'"),
        (f"{tmp_path}/other.py:bad", "no file"),
        ("nowhere.at_all:bad", "there is no module 'nowhere'"),
    ):
        with pytest.raises(UserError, match=words):
            load(wrong)


def test_importing_rewards_imports_nothing_heavy() -> None:
    import subprocess
    import sys

    code = "import sys, vgrpo.rewards; print([m for m in ('torch', 'scipy', 'cv2', 'rapidocr', 'PIL') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
