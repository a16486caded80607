"""A synthetic run folder and the page made of it. Expected numbers are worked out by hand in the comments."""

import json
import math
import re
from html.parser import HTMLParser
from io import BytesIO

import numpy as np
import pytest
import yaml
from PIL import Image

from vgrpo.errors import UserError
from vgrpo.report import before_after_figure, curve_figure, duration, score, write_report

HOSTILE = "<script>alert(1)</script> & \"two\" 'red' {{ circles }}"
CONFIG = {
    "model": {"path": "asset:tiny-sd3"},
    "prompts": {"per_step": 2},
    "rollout": {"group_size": 4},
    "rewards": {"graded": {}, "col<b>our": {}},
    "evaluation": {"main": "strict"},
    "run": {"steps": 3},
}


def metrics(step):
    return {
        "step": step,
        "reward/mean": 0.25 * step,
        "reward/std": 0.5,
        "reward/graded/mean": 0.125 * step,
        "reward/graded/std": 0.1,
        "reward/col<b>our/mean": 3.0,
        "reward/col<b>our/std": 0.0,
        "ratio/mean": 1.0,
        "clip_fraction": 0.375,
        "kl": 1e-5,
        "grad_norm": 0.7,
        "zero_std_fraction": 0.0,
        "weight_change": 1e-3,
        "lr": 3e-4,
        "images": 1000,
        "network_calls": 5000,
        "seconds": 10.0,
        "time/rollout": 5.0,
        "time/update": 4.0,
        "time/rest": 1.0,
    }


def evaluation(folder, step, strict, *, size=64):
    """One picture per prompt; `strict` gives each its score."""
    where = folder / "evaluations" / f"step_{step:05d}"
    where.mkdir(parents=True)
    rows = []
    for i, value in enumerate(strict):
        image = None
        if i < 3:
            image = f"{i:04d}.png"
            Image.fromarray(np.full((size, size, 3), 40 * i + step, dtype=np.uint8)).save(where / image)
        text = HOSTILE if i == 0 else f"prompt {i}"
        scores = {"strict": value, "graded": 0.5 * value + 0.25}
        rows.append({"prompt_id": str(i), "text": text, "tag": "<i>", "seed": 7 + i, "scores": scores, "image": image})
    (where / "scores.json").write_text(json.dumps({"rows": rows}))
    mean = sum(strict) / len(strict)
    return {
        "step": step,
        "weights": "tuned" if step else "base",
        "scores": {"strict": mean, "graded": 0.5 * mean + 0.25},
        "by_tag": {"strict": {"<i>": [mean, mean - 0.125, mean + 0.125, len(strict)]}},
        "guards": {"brightness": 0.25 + 0.0625 * step, "near_duplicates": 0.0},
    }


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def run(tmp_path):
    """25 % before, 75 % after on 8 prompts; 3 steps of 1,000 pictures in 10 s."""
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "config.yaml").write_text("# <b>mine</b>\n" + yaml.safe_dump(CONFIG, sort_keys=False))
    facts = {"name": "demo", "started": "2026-12-01T12:00:00", "hardware": {"cores": 2, "gpus": []}, "seconds": 192.4}
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "metrics.jsonl").write_text(lines(metrics(step) for step in (1, 2, 3)))
    rows = [evaluation(folder, 0, [1, 0, 0, 0, 1, 0, 0, 0]), evaluation(folder, 3, [1, 1, 0, 1, 1, 1, 1, 0])]
    (folder / "evaluations.jsonl").write_text(lines(rows))
    return folder


class Page(HTMLParser):
    """What a browser would see: the texts, the tags, and every address it would go to."""

    VOID = {"meta", "img", "br", "link", "input", "hr"}

    def __init__(self, text):
        super().__init__()
        self.texts, self.tags, self.addresses, self.open = [], [], [], []
        self.images = []
        self.feed(text)
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "srcset", "action", "poster", "data"):
                self.addresses.append(value)
        if tag == "img":
            self.images.append(dict(attributes))

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.texts)).replace(" ,", ",").replace(" .", ".")


def read(path):
    return path.read_text(encoding="utf-8")


def test_the_story_has_the_numbers(run):
    page = Page(read(write_report(run))).text
    assert "strict rose from 25.0 % to 75.0 %" in page
    # four of 8 paired differences are 1, the others 0, so a resample's sum is binomial(8, 1/2), which is 0 with chance
    # 1/256 < 2.5 % and at most 1 with 9/256 > 2.5 %: the bounds are exactly 1/8 and 7/8
    assert "On 8 held-out prompts" in page and "the difference is +50.0 points, 95 % interval [+12.5, +87.5]" in page
    assert "V-GRPO trained tiny-sd3 for 3 steps of 2 prompts × 4 images, 3 min 12 s on 2 CPU cores" in page
    assert "rewarding graded and col<b>our" in page
    assert "pictures drawn 3 000" in page and "pictures per second 100" in page  # 3,000 pictures in 30 s of steps


def test_tables_curves_and_timing_have_the_numbers(run):
    page = Page(read(write_report(run)))
    assert "25.0 % 12.5 % – 37.5 %" in page.text and "75.0 % 62.5 % – 87.5 %" in page.text and "8 prompts" in page.text
    assert "graded 0.375 0.625 +0.250" in page.text  # 0.25 + 0.5 · share
    assert "0.250 → 0.750" in page.text and "0.125 → 0.375" in page.text  # total and graded, first and last step
    assert "sampling 50.0 % · 15 s" in page.text and "training 40.0 % · 12 s" in page.text
    assert page.tags.count("svg") == 1 + 3 + 7, "held-out curve, total and two rewards, seven diagnostics"


def test_a_fall_and_no_change_are_called_so(run):
    for step, strict, words in ((4, [0] * 8, "did not clearly change: 25.0 % → 0.0 %"), (5, [1] * 8, "rose from")):
        evaluation(run, step, strict)
        assert f"strict {words}" in Page(read(write_report(run))).text
    evaluation(run, 6, [-1] * 8)
    assert "strict fell from 0.250 to −1.00" in Page(read(write_report(run))).text


def test_pictures_are_pairs_on_the_same_seeds_with_marks(run):
    page = Page(read(write_report(run)))
    assert len(page.images) == 6
    marks = [image["alt"] for image in page.images]
    sides = [
        ("before", "right"),
        ("after", "right"),
        ("before", "wrong"),
        ("after", "right"),
        ("before", "wrong"),
        ("after", "wrong"),
    ]
    assert marks == [f"{side} training, {mark}" for side, mark in sides]
    assert all(image["src"].startswith("data:image/png;base64,") and image["class"] == "crisp" for image in page.images)
    assert "prompt 1, seed 8" in page.text


def test_other_seeds_make_no_pairs(run):
    path = run / "evaluations" / "step_00003" / "scores.json"
    rows = json.loads(path.read_text())["rows"]
    path.write_text(json.dumps({"rows": [row | {"seed": row["seed"] + 100} for row in rows]}))
    page = Page(read(write_report(run)))
    assert page.images == [] and "rose" not in page.text


def test_large_pictures_are_made_smaller(run):
    for folder in (run / "evaluations").iterdir():
        for file in folder.glob("*.png"):
            Image.fromarray(np.zeros((1024, 2048, 3), dtype=np.uint8)).save(file)
    image = Page(read(write_report(run))).images[0]
    import base64

    assert Image.open(BytesIO(base64.b64decode(image["src"].split(",", 1)[1]))).size == (512, 256)
    assert (image["width"], image["height"]) == ("512", "256") and "class" not in image


def test_everything_from_outside_is_escaped(run):
    raw = read(write_report(run))
    page = Page(raw)
    assert "<script" not in raw and "script" not in page.tags
    assert HOSTILE in page.text, "a reader sees the prompt as it is"
    assert "b" in page.tags and "<b>mine</b>" in page.text and "col<b>our" in page.text
    assert "<i>" in page.text


def test_no_reference_leaves_the_page(run):
    raw = read(write_report(run))
    outside = [a for a in Page(raw).addresses if not a.startswith(("data:image/png;base64,", "#"))]
    assert outside == ["https://arxiv.org/abs/2604.23380"]
    assert re.findall(r"https?://[^\s\"'<]+", raw) == outside
    assert "@import" not in raw and set(re.findall(r"url\((.)", raw)) <= {"#"}


def test_ids_of_the_charts_do_not_collide(run):
    raw = read(write_report(run))
    ids = re.findall(r'\bid="([^"]+)"', raw)
    assert len(ids) == len(set(ids)) > 0
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', raw)) <= set(ids)


def test_settings_are_word_for_word(run):
    page = read(write_report(run))
    block = re.search(r"<pre>(.*?)</pre>", page, re.S)[1]
    import html

    assert html.unescape(block) == (run / "config.yaml").read_text()


def test_writing_it_again_gives_the_same_page(run):
    first = read(write_report(run))
    assert read(write_report(run)) == first
    assert not list(run.glob("*.tmp"))


@pytest.mark.parametrize(
    "without",
    [
        ["metrics.jsonl"],
        ["run.json"],
        ["evaluations.jsonl"],
        ["config.yaml"],
        ["run.json", "evaluations.jsonl", "evaluations"],
        ["metrics.jsonl", "run.json", "evaluations.jsonl", "evaluations"],
        ["evaluations/step_00003"],
    ],
    ids=" ".join,
)
def test_missing_pieces_are_left_out(run, without):
    import shutil

    for name in without:
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
    page = Page(read(write_report(run)))
    assert "nan" not in page.text.lower().split()
    assert ("rose from 25.0 % to 75.0 %" in page.text) == (
        not any(name.startswith("evaluations/") or name == "evaluations" for name in without)
    )


def test_an_empty_metrics_file(run):
    (run / "metrics.jsonl").write_text("")
    page = Page(read(write_report(run))).text
    assert "No step was finished" in page and "Where the time went" not in page


def test_a_run_that_stopped_after_one_step(run):
    (run / "metrics.jsonl").write_text(lines([metrics(1)]) + '{"step": 2, "rew')
    page = Page(read(write_report(run))).text
    assert "1 of 3 steps" in page


def test_a_broken_line_in_the_middle_is_no_unfinished_one(run):
    (run / "metrics.jsonl").write_text('{"step": 1, "rew\n' + lines([metrics(2)]))
    with pytest.raises(json.JSONDecodeError):
        write_report(run)


def test_of_two_rows_for_a_step_the_later_counts(run):
    (run / "metrics.jsonl").write_text(lines([metrics(1), metrics(2), metrics(2) | {"reward/mean": 9.5}]))
    assert "0.250 → 9.50" in Page(read(write_report(run))).text


def test_numbers_that_are_not_finite_leave_gaps(run):
    rows = [metrics(1) | {"kl": math.nan}, metrics(2) | {"kl": None}, metrics(3)]
    (run / "metrics.jsonl").write_text(lines(rows))
    row = json.loads((run / "evaluations.jsonl").read_text().splitlines()[1])
    row["by_tag"]["strict"]["<i>"] = [0.75, math.nan, math.nan, 1]
    (run / "evaluations.jsonl").write_text(lines([row]))
    assert "nan" not in Page(read(write_report(run))).text.lower().split()


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(UserError, match="no run folder"):
        write_report(tmp_path)


def test_figures_are_pictures_of_the_run(run, tmp_path):
    before = np.asarray(Image.open(before_after_figure(run, tmp_path / "pairs.png", 1)).convert("RGB"))
    greys = {tuple(c) for c in before.reshape(-1, 3).tolist()}
    assert {(40 * i + step,) * 3 for i in range(3) for step in (0, 3)} <= greys, "each picture's own colour, unblended"
    curve = np.asarray(Image.open(curve_figure(run, tmp_path / "curve.png")).convert("RGB"))
    assert (curve == (0x2B, 0x62, 0xD9)).all(-1).any() and curve.shape[1] > curve.shape[0]


def test_figures_without_data_are_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(UserError, match="no curve"):
        curve_figure(tmp_path, tmp_path / "x.png")
    with pytest.raises(UserError, match="no held-out pictures"):
        before_after_figure(tmp_path, tmp_path / "x.png", 1)
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.25, "0.25 s"), (59.4, "59.4 s"), (59.9, "1 min 00 s"), (272.3, "4 min 32 s"), (7325, "2 h 02 min")],
)
def test_durations(value, words):
    assert duration(value) == words


@pytest.mark.parametrize(
    ("value", "share", "words"),
    [
        (0.3, False, "0.300"),
        (-1.0, False, "−1.00"),
        (123.4, False, "123"),
        (0.3, True, "30.0 %"),
        (math.nan, True, "–"),
    ],
)
def test_scores(value, share, words):
    assert score(value, share) == words


def test_guards_and_the_method_of_the_run(run):
    text = " ".join(Page(write_report(run).read_text()).texts)
    assert "brightness" in text and "0.250" in text and "0.438" in text and "near duplicates" in text
    assert "V-GRPO trained" in text and "The objective of this run" not in text
    (run / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"objective": {"name": "nft"}}))
    text = " ".join(Page(write_report(run).read_text()).texts)
    assert "DiffusionNFT trained" in text and "arXiv:2509.16117" in text
