"""Rewards: known scenes, hand computations, and a contract that all of them keep."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scenes
import torch
from rewards_scenes import CHANGES, TAGS, Array, can_change, captions, changed, drawn, softened
from scipy.ndimage import gaussian_filter

from vgrpo.errors import RunError, UserError
from vgrpo.rewards import REWARDS, ids, load, ocr, on_pil, probe, score
from vgrpo.rewards.ocr import edit_distance, likeness, plain, quoted, reader, recognised
from vgrpo.rewards.shapes import MUDDY, NOTHING, Shapes, Thing, colour_of, detect, relations, requirements
from vgrpo.types import Prompt


def as_images(pictures: Array) -> torch.Tensor:
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous()


def as_prompts(these: list[dict]) -> list[Prompt]:
    return [Prompt(text=c["text"], id=str(i), meta=c["meta"]) for i, c in enumerate(these)]


@pytest.fixture(scope="module")
def known() -> tuple[Array, list[dict]]:
    """110 rendered scenes of each of the six tags, with the captions that are true of them."""
    rng = np.random.default_rng(5)
    these = [c for tag in TAGS for c in captions(tag, 110, rng)]
    return drawn([scenes.realise(c, rng) for c in these], rng), these


def scored(pictures: Array, these: list[dict], mode: Any = "strict") -> Array:
    return Shapes(mode=mode)(as_images(pictures), as_prompts(these)).numpy()


def test_true_captions_are_accepted(known: Any) -> None:
    pictures, these = known
    assert scored(pictures, these).mean() >= 0.99
    assert scored(pictures, these, "graded").mean() >= 0.995


def test_soft_and_noisy_pictures_are_read_too(known: Any) -> None:
    pictures, these = known
    rng = np.random.default_rng(6)
    assert scored(softened(pictures, rng), these).mean() >= 0.97


@pytest.mark.parametrize("look", ["clean", "soft"])
@pytest.mark.parametrize("change", CHANGES)
def test_false_captions_are_refused(change: str, look: str) -> None:
    rng = np.random.default_rng(11)
    these = [
        c for tag in TAGS for c in captions(tag, 60 if change != "mirrored" else 200, rng) if can_change(c, change)
    ]
    pictures = drawn([changed(scenes.realise(c, rng), change, rng) for c in these], rng)
    pictures = softened(pictures, rng) if look == "soft" else pictures
    assert len(these) >= 150
    assert scored(pictures, these).mean() <= (0.01 if look == "clean" else 0.03)
    graded = scored(pictures, these, "graded")
    assert (graded == 1).mean() <= 0.03
    assert graded.mean() > 0.5  # a near miss is worth more than nothing


def test_graded_is_one_exactly_where_strict_is(known: Any) -> None:
    pictures, these = known
    rng = np.random.default_rng(6)
    for claims in (these, [these[i] for i in rng.permutation(len(these))]):
        strict, graded, mixed = (scored(pictures, claims, mode) for mode in ("strict", "graded", "mixed"))
        assert 0 < strict.sum() and set(strict) <= {0, 1}
        assert np.array_equal(graded == 1, strict == 1)
        assert graded.min() >= 0 and np.allclose(mixed, (strict + graded) / 2, rtol=0, atol=1e-12)


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
        (  # each of two circles must stand left of the star
            [A, thing("circle", "red", 70, 12), B],
            [{"class": "star", "count": 1}, {"class": "circle", "count": 2, "position": ["left of", 0]}],
            [],
            [1, 1, 0.5],
        ),
        (  # and one circle left of both stars
            [A, B, thing("star", "blue", 12, 60)],
            [{"class": "star", "count": 2}, {"class": "circle", "count": 1, "position": ["left of", 0]}],
            [],
            [1, 1, 0],
        ),
        ([A], [{"class": "circle", "count": 1}], [{"class": "circle", "count": 1, "color": "blue"}], [1, 1]),
        ([A], [{"class": "circle", "count": 1}], [{"class": "circle", "count": 1, "color": "red"}], [1, 0.5]),
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
        (-6, 6, set()),  # GenEval divides by the whole distance: (6 - 2) / 8.5 is less than a half
    ],
)
def test_relations(dx: float, dy: float, expected: set[str]) -> None:
    assert relations(thing("circle", "red", 40 + dx, 40 + dy), thing("star", "red", 40, 40)) == expected


def test_colours_are_those_of_the_data() -> None:
    swatches = np.array(list(scenes.COLOURS.values()), dtype=np.uint8)
    assert colour_of(swatches).tolist() == list(range(len(scenes.COLOURS)))
    pale, shadow = (246, 241, 232), (183, 178, 170)
    assert colour_of(np.array([pale, shadow], dtype=np.uint8)).tolist() == [NOTHING] * 2
    assert colour_of(np.array([(120, 110, 100), (0, 0, 0)], dtype=np.uint8)).tolist() == [MUDDY] * 2


@pytest.mark.parametrize("factor", [2, 3])
def test_size_of_the_picture_does_not_matter(known: Any, factor: int) -> None:
    pictures, these = known
    larger = pictures[::20].repeat(factor, 1).repeat(factor, 2)
    assert scored(larger, these[::20]).mean() >= 0.97
    wide = np.concatenate([pictures[::20], np.full_like(pictures[::20], 245)], 2)
    assert detect(wide) == detect(pictures[::20]) != []


def test_objects_are_where_they_were_drawn() -> None:
    picture = scenes.draw(
        [scenes.Thing("circle", "red", 20, 15, 10, 0), scenes.Thing("star", "blue", 44, 40, 11, 0.1)],
        np.random.default_rng(0),
    )
    circle, star = sorted(detect(picture[None])[0], key=lambda t: t.x)
    assert (circle.shape, circle.colour, star.shape, star.colour) == ("circle", "red", "star", "blue")
    assert (circle.x, circle.y, circle.width, star.x, star.y) == pytest.approx((20, 15, 19, 44, 40), abs=1.2)


def test_what_touches_in_another_colour_is_another_object() -> None:
    picture = np.full((1, 64, 64, 3), 240, np.uint8)
    picture[0, 10:30, 10:30], picture[0, 10:30, 30:50] = scenes.COLOURS["red"], scenes.COLOURS["green"]
    assert detect(picture) == [[Thing("square", "red", 20, 20, 20, 20), Thing("square", "green", 40, 20, 20, 20)]]


def test_no_pictures_and_empty_pictures() -> None:
    assert detect(np.zeros((0, 64, 64, 3), np.uint8)) == []
    assert detect(np.full((2, 64, 64, 3), 240, np.uint8)) == [[], []]


def test_an_object_between_two_hues_is_one() -> None:
    picture = np.full((1, 64, 64, 3), 240, np.uint8)
    picture[0, 10:30, 10:30], picture[0, 10:22, 10:30] = scenes.COLOURS["purple"], scenes.COLOURS["blue"]
    assert detect(picture) == [[Thing("square", "blue", 20, 20, 20, 20)]]


def test_an_object_without_a_hue_is_one_too() -> None:
    picture = np.full((1, 64, 64, 3), 240, np.uint8)
    picture[0, 10:30, 10:30] = 110, 95, 90
    assert detect(picture) == [[Thing("square", "unknown", 20, 20, 20, 20)]]


def test_most_random_blobs_have_no_shape() -> None:
    noise = gaussian_filter(np.random.default_rng(0).normal(size=(200, 64, 64)), (0, 5, 5))
    pictures = np.full((200, 64, 64, 3), 240, np.uint8)
    pictures[noise > 1.2 * noise.std()] = scenes.COLOURS["red"]
    seen = [t.shape for things in detect(pictures) for t in things]
    assert len(seen) > 400
    assert seen.count("unknown") / len(seen) >= 0.8


def test_a_blob_is_a_stray_of_no_shape() -> None:
    picture = np.full((64, 64, 3), 240, np.uint8)
    picture[20:26, 10:50], picture[26:44, 10:16] = scenes.COLOURS["blue"], scenes.COLOURS["blue"]
    assert [t.shape for t in detect(picture[None])[0]] == ["unknown"]
    meta = {"include": [{"class": "any", "count": 1}], "exclude": [{"class": "any", "count": 2}]}
    assert scored(picture[None], [{"text": "", "meta": meta}]).tolist() == [1]
    meta = {"include": [{"class": "any", "count": 1}], "exclude": [{"class": "any", "count": 1}]}
    assert scored(picture[None], [{"text": "", "meta": meta}]).tolist() == [0]


ENTRY = {"class": "circle", "count": 1}


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({}, "no GenEval metadata"),
        ({"include": [ENTRY | {"class": "dog"}]}, "class 'dog' is not in .*circle"),
        ({"include": [ENTRY | {"color": "pink"}]}, "color 'pink' is not in .*purple"),
        ({"include": [ENTRY | {"position": ["near", 0]}]}, "position 'near' is not in .*left of"),
        ({"include": [ENTRY | {"position": ["above", 3]}]}, "position of entry 3 is not in"),
        ({"include": [ENTRY | {"count": 0}]}, "count 0 is not in"),
        ({"include": [ENTRY], "exclude": [{"class": "cat", "count": 1}]}, "class 'cat'"),
    ],
)
def test_what_no_picture_could_fulfil_is_refused(meta: dict, words: str) -> None:
    with pytest.raises(RunError, match=f"cannot verify prompt '7': {words}"):
        Shapes()(torch.zeros(1, 3, 64, 64, dtype=torch.uint8), [Prompt(text="a circle", id="7", meta=meta)])


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
    assert one("sharpness", stripes) == pytest.approx(0.5**0.5)
    checkers = stripes.clone()
    checkers[:, 1::2] = 255 - checkers[:, 1::2]
    assert one("sharpness", checkers) == pytest.approx(1)


@pytest.mark.parametrize("kind", ["brightness", "colourfulness"])
def test_taste_does_not_depend_on_resolution(kind: str) -> None:
    picture = torch.randint(0, 256, (3, 16, 24), generator=torch.Generator().manual_seed(1)).byte()
    larger = picture.repeat_interleave(3, 1).repeat_interleave(3, 2)
    assert one(kind, larger) == pytest.approx(one(kind, picture), rel=1e-9) != 0


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
        ("the dog’s bone isn’t here", ""),
        ("a shirt with ‘don’t panic’ on it", "don’t panic"),
        ("the boys' sign 'OPEN'", "OPEN"),
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
    assert plain("Don’t") == "don't"


class Result:
    """What rapidocr gives."""

    def __init__(self, txts: Any) -> None:
        self.txts = txts


@pytest.mark.parametrize(
    "nothing",
    [None, [], (), [None], [[]], (None, None), ([], 0.1), np.array([]), *(Result(t) for t in (None, (), np.array([])))],
)
def test_nothing_recognised_is_no_text(nothing: Any) -> None:
    assert recognised(nothing) == ""


def test_recognised_parts_are_joined() -> None:
    assert recognised(Result(("HELLO", "WORLD"))) == "HELLO WORLD"
    assert recognised(Result(np.array(["a", "b"]))) == "a b"


def test_ocr_without_an_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    reader.cache_clear()
    with pytest.raises(UserError, match=r"pip install 'vgrpo\[ocr\]'"):
        probe("ocr", load("ocr")(), [Prompt(text='a sign "A"', id="1")])


def test_ocr_compares_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = iter([Result(("OPEN", "24h")), Result(None), Result(("opem24 h",)), Result(("日本語",))])
    monkeypatch.setattr(ocr, "reader", lambda: lambda picture: next(read))
    prompts = [Prompt(text=t, id=t) for t in ('"Open" and "24H"', '"open"', '"open 24h"', "「日本語」")]
    scores = score("ocr", ocr.Ocr(), torch.zeros(4, 3, 8, 8, dtype=torch.uint8), prompts)
    assert scores.tolist() == pytest.approx([1, 0, 1 - 1 / 7, 1])


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
    ("shapes", {"mode": "mixed"}),
    ("jpeg", {"mode": "incompressible"}),
]


@pytest.mark.parametrize(("kind", "settings"), CONTRACT)
def test_contract(kind: str, settings: dict[str, Any], known: Any) -> None:
    pictures, these = known
    images = as_images(pictures[::60])
    claims = these[:330:60] + these[::-1][: len(images) - len(these[:330:60])]  # the first half of them is true
    prompts = as_prompts(claims)
    reward = load(kind)(**settings)
    together = score(kind, reward, images, prompts)
    assert together.dtype == torch.float64
    assert together.std() > 0
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
        (lambda i, p: 1 / 0, r"reward 'mine' raised ZeroDivisionError: .* for prompts \['p1', 'p2'\]"),
    ],
)
def test_what_is_no_score_stops(reward: Any, words: str) -> None:
    with pytest.raises(RunError, match=words):
        score("mine", reward, IMAGES, PROMPTS)
    with pytest.raises(UserError, match="first try"):
        probe("mine", reward, PROMPTS)


def test_an_error_names_a_few_prompts_and_counts_the_rest() -> None:
    assert ids([Prompt(text="", id=str(i // 2)) for i in range(4)]) == "['0', '1']"
    assert ids([Prompt(text="", id=str(i)) for i in range(30)], most=2) == "['0', '1'] and 28 more"


def test_numbers_in_any_form_are_scores() -> None:
    for value in ([1, 2], (1.0, 2.0), np.array([1, 2]), torch.tensor([1, 2], dtype=torch.bfloat16)):
        assert score("mine", lambda i, p, v=value: v, IMAGES, PROMPTS).tolist() == [1, 2]


def test_a_function_of_pil_pictures() -> None:
    reward = on_pil(lambda pictures, texts: [p.size[0] + len(t) for p, t in zip(pictures, texts, strict=True)])
    assert score("mine", reward, IMAGES, PROMPTS).tolist() == [5, 5]


def test_own_functions_are_found_by_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
        "@dataclass\nclass Taste:\n    weight: float = 1.0\n\n"
        "def good(images, prompts):\n    return images.float().mean((1, 2, 3))\n\nnumber = 3\n"
    )
    (tmp_path / "broken.py").write_text("def good(:\n")
    (tmp_path / "needy.py").write_text("import nowhere\n")
    assert score("good", load(f"{tmp_path}/mine.py:good"), IMAGES, PROMPTS).tolist() == [0, 0]
    assert load(f"{tmp_path}/mine.py:good") is load(f"{tmp_path}/mine.py:good")
    assert load("vgrpo.rewards.preference:Brightness") is load("brightness")
    for wrong, words in (
        ("brightnes", "did you mean 'brightness'"),
        (f"{tmp_path}/mine.py:goood", "has no 'goood', did you mean 'good'"),
        (f"{tmp_path}/mine.py:number", "number is no function but int"),
        (f"{tmp_path}/other.py:bad", "no file .*other.py, in which to look for 'bad'"),
        (f"{tmp_path}/broken.py:good", "cannot import .*broken.py': SyntaxError"),
        (f"{tmp_path}/needy.py:good", "cannot import .*needy.py: there is no module 'nowhere'"),
        (":good", "cannot import '': ValueError"),
        ("nowhere.at_all:bad", "there is no module 'nowhere'"),
    ):
        with pytest.raises(UserError, match=words):
            load(wrong)


def test_importing_rewards_imports_nothing_heavy() -> None:
    import subprocess

    code = "import sys, vgrpo.rewards; print([m for m in ('torch', 'scipy', 'cv2', 'rapidocr', 'PIL') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
