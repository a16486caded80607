"""A run folder as one HTML page that needs nothing else, and the two figures of it that a README shows.

Everything on the page comes from files of the run folder, which are named beside it. What a run has not written yet, or
never will, is left out; a run that stopped after its first step has a page too.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vgrpo.errors import UserError
from vgrpo.guards import MEANINGS
from vgrpo.statistics import Interval, interval, paired_bootstrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
PAIRS_SHOWN = 24
SMALL = 128  # pixels; pictures up to this width are enlarged with hard edges and embedded as they are
LARGEST = 512  # pixels; larger pictures are embedded at this size
# Colours of a chart stand for those of the page, which differ between light, dark and print.
INK, MUTED, LINE, BEFORE, AFTER = "#010101", "#020202", "#030303", "#040404", "#050505"
VARIABLES = {INK: "--ink", MUTED: "--muted", LINE: "--line", BEFORE: "--before", AFTER: "--after"}
ON_WHITE = {INK: "#1d1b18", MUTED: "#6f6a61", LINE: "#e4dfd5", BEFORE: "#b5762a", AFTER: "#2b62d9"}

DIAGNOSTICS = {
    "ratio/mean": "Likelihood ratio of new to old policy in the last update of a step, before its weights move, mean over images.",
    "ratio/std": "Its spread over images.",
    "ratio/first": "Largest |ratio − 1| before the first update of a step: rounding, and nothing else.",
    "clip_fraction": "Share of images, or of sampler steps, whose gradient the ratio clip stopped.",
    "kl": "Squared distance of the x0-predictions from the policy that drew the pictures.",
    "kl_old": "Squared distance of the predictions from the policy that drew the pictures.",
    "kl_start": "KL to the policy before training, as the objective defines it.",
    "kl_average": "Squared distance of the predictions from the moving average of the policy.",
    "error": "Denoising error of the sampled pictures, the negative of the log-likelihood's stand-in.",
    "grad_norm": "Norm of the gradient before clipping.",
    "weight_change": "Relative change of the trained weights per update.",
    "zero_std_fraction": "Share of groups whose images all scored the same; they teach nothing.",
    "lr": "Learning rate.",
}
METHODS = {
    "vgrpo": ("V-GRPO", "2604.23380"),
    "elbo": ("The plain ELBO surrogate", "2604.23380"),
    "fpo": ("FPO", "2507.21053"),
    "awm": ("AWM", "2509.25050"),
    "nft": ("DiffusionNFT", "2509.16117"),
    "ddpo": ("DDPO", "2305.13301"),
    "flow_grpo": ("Flow-GRPO", "2505.05470"),
    "flow_grpo_fast": ("Flow-GRPO-Fast", "2505.05470"),
    "dance_grpo": ("DanceGRPO", "2505.07818"),
    "mix_grpo": ("MixGRPO", "2507.21802"),
    "branch_grpo": ("BranchGRPO", "2509.06040"),
}
"""Name and arXiv number of what a run's objective is."""
TIMES = {
    "rollout": "sampling",
    "decode": "decoding pictures",
    "reward": "rewards",
    "old": "scoring other policies",
    "update": "training",
    "encode": "encoding text",
    "rest": "everything else",
}


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One evaluated image; a row of an evaluation's `scores.json`."""

    prompt_id: str
    text: str
    tag: str | None
    seed: int
    scores: Mapping[str, float]
    file: Path | None

    @property
    def key(self) -> tuple[str, int]:
        """What makes two pictures of two policies a pair."""
        return self.prompt_id, self.seed


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What a run folder holds."""

    folder: Path
    settings: Mapping[str, Any]
    settings_text: str
    facts: Mapping[str, Any]
    """`run.json`"""
    metrics: Sequence[Row]
    """One row per step, in order."""
    evaluations: Sequence[Row]
    """Rows of `evaluations.jsonl`, in the order of steps."""
    pictures: Mapping[int, Sequence[Picture]]
    """By step, in order; a row per evaluated image, whether or not its picture was kept."""

    @property
    def last(self) -> int | None:
        """The step of the last evaluation, None before the second."""
        return max(self.pictures) if len(self.pictures) > 1 else None

    @property
    def main(self) -> str | None:
        """The reward of the headline."""
        chosen = section(self.settings, "evaluation").get("main")
        return str(chosen) if chosen else next(iter(score_names(self)), None)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A reward on held-out prompts, base against tuned, on the same prompts and seeds."""

    name: str
    base: float
    tuned: float
    interval: Interval
    """Of the difference, paired."""
    prompts: int
    share: bool
    """Whether every score is 0 or 1, so that the mean is a share of correct images."""

    @property
    def verdict(self) -> str:
        if self.interval.low > 0:
            return "rose"
        return "fell" if self.interval.high < 0 else "did not clearly change"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points of one chart; `low` and `high` bound its band. All of one length, nan where there is nothing."""

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = field(default=())
    high: Sequence[float] = field(default=())
    marks: bool = False
    share: bool = False


def write_report(folder: Path) -> Path:
    """Writes `report.html` into a run folder and returns its path.

    Raises:
        UserError: `folder` is no run folder.
    """
    run = recorded(Path(folder))
    path = run.folder / "report.html"
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(page(run), encoding="utf-8")
    os.replace(temporary, path)
    return path


def curve_figure(folder: Path, out_png: Path) -> Path:
    """Writes the main reward on held-out prompts and two rewards in training as one PNG.

    Raises:
        UserError: the run has written nothing to draw.
    """
    run = recorded(Path(folder))
    parts = [(f"{run.main} on held-out prompts", held_out_curve(run))]
    parts += [(f"{name} in training", curve) for name, curve in reward_curves(run).items() if name != "total"][:2]
    drawn = [(title, curve) for title, curve in parts if curve is not None]
    if not drawn:
        raise UserError(f"{folder} has neither evaluations nor metrics, so there is no curve to draw")
    with plain_style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.2 * len(drawn), 2.9), dpi=160, layout="constrained")
        for (title, curve), axes in zip(drawn, figure.subplots(1, len(drawn), squeeze=False)[0], strict=True):
            draw(axes, curve, ON_WHITE)
            axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=ON_WHITE[INK])
            axes.set_xlabel("step", color=ON_WHITE[MUTED])
        figure.savefig(out_png, facecolor="white")
    return Path(out_png)


def before_after_figure(folder: Path, out_png: Path, rows: int, *, columns: int = 6) -> Path:
    """Writes `rows` × `columns` pairs of pictures as one PNG, spread evenly over the held-out prompts.

    Raises:
        UserError: the run has no pairs of pictures.
    """
    run = recorded(Path(folder))
    everything = pairs(run)
    if not everything:
        raise UserError(f"{folder} has no held-out pictures from before and after training")
    count = min(rows * columns, len(everything))
    chosen = [everything[i * len(everything) // count] for i in range(count)]
    columns = min(columns, count)
    with plain_style():
        from matplotlib.figure import Figure

        side, gap, head, left = 1.6, 0.12, 0.42, 0.3  # inches; 1.6 at 120 dpi is three times 64 pixels
        band = head + 2 * side + 0.05 + gap
        width, height = left + columns * (side + gap), band * math.ceil(count / columns)
        figure = Figure(figsize=(width, height), dpi=120)
        for i, pair in enumerate(chosen):
            x, top = left + i % columns * (side + gap), height - i // columns * band - head
            for line, picture in enumerate(pair):
                y = top - side * (line + 1) - 0.05 * line
                axes = figure.add_axes((x / width, y / height, side / width, side / height))
                draw_picture(axes, picture, run.main, caption="" if line else picture.text)
                if i % columns == 0:
                    label, colour = ("after", AFTER) if line else ("before", BEFORE)
                    axes.set_ylabel(label, color=ON_WHITE[colour], fontweight="bold")
        figure.savefig(out_png, facecolor="white")
    return Path(out_png)


# ------------------------------------------------------------------------------------------------------------ reading


def recorded(folder: Path) -> Recorded:
    """Reads a run folder. Raises UserError if it is none."""
    import yaml

    config = folder / "config.yaml"
    if not config.is_file() and not (folder / "metrics.jsonl").is_file():
        raise UserError(f"{folder} is no run folder: it has neither config.yaml nor metrics.jsonl")
    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    facts = folder / "run.json"
    evaluated = {step_of(path): pictures_of(path) for path in sorted(folder.glob("evaluations/step_*/scores.json"))}
    return Recorded(
        folder=folder,
        settings=yaml.safe_load(text) or {},
        settings_text=text,
        facts=json.loads(facts.read_text(encoding="utf-8")) if facts.is_file() else {},
        metrics=by_step(read_rows(folder / "metrics.jsonl")),
        evaluations=sorted(read_rows(folder / "evaluations.jsonl"), key=lambda row: row["step"]),
        pictures={step: rows for step, rows in sorted(evaluated.items()) if rows},
    )


def read_rows(path: Path) -> list[Row]:
    """The objects of a .jsonl file. A last line without its end, left by a killed run, is not read."""
    if not path.is_file():
        return []
    *lines, unfinished = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line.strip()] + (
        [] if not unfinished.strip() else complete(unfinished)
    )


def complete(line: str) -> list[Row]:
    try:
        return [json.loads(line)]
    except json.JSONDecodeError:
        return []


def by_step(rows: Sequence[Row]) -> list[Row]:
    """Rows in the order of steps; of two for one step, as after a resume, the later one."""
    return [row for _, row in sorted({int(row["step"]): row for row in rows if "step" in row}.items())]


def step_of(scores: Path) -> int:
    return int(scores.parent.name.removeprefix("step_"))


def pictures_of(scores: Path) -> list[Picture]:
    rows = json.loads(scores.read_text(encoding="utf-8"))["rows"]
    return [
        Picture(
            prompt_id=str(row["prompt_id"]),
            text=str(row["text"]),
            tag=row.get("tag"),
            seed=int(row["seed"]),
            scores=row["scores"],
            file=scores.parent / row["image"] if row.get("image") else None,
        )
        for row in rows
    ]


def section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = settings.get(name)
    return found if isinstance(found, Mapping) else {}


def score_names(run: Recorded) -> list[str]:
    """Every reward that was evaluated, in the order of the files."""
    names = [name for row in run.evaluations for name in row.get("scores", {})]
    names += [name for rows in run.pictures.values() for picture in rows for name in picture.scores]
    return list(dict.fromkeys(names))


# ------------------------------------------------------------------------------------------------------------ numbers


def changes(run: Recorded) -> list[Change]:
    """Each held-out reward before and after, the main one first; empty before the second evaluation."""
    if run.last is None:
        return []
    base, tuned = run.pictures[min(run.pictures)], run.pictures[run.last]
    found = [change(name, base, tuned) for name in score_names(run)]
    return sorted((c for c in found if c is not None), key=lambda c: c.name != run.main)


def change(name: str, base: Sequence[Picture], tuned: Sequence[Picture]) -> Change | None:
    """`name` on the pictures that both have; None if there are none."""
    first = {p.key: p.scores[name] for p in base if name in p.scores}
    last = {p.key: p.scores[name] for p in tuned if name in p.scores and p.key in first}
    if not last:
        return None
    before, after = by_prompt({key: first[key] for key in last}), by_prompt(last)
    texts = {p.prompt_id: p.text for p in tuned if p.key in last}  # in the order of by_prompt
    return Change(
        name=name,
        base=sum(before) / len(before),
        tuned=sum(after) / len(after),
        interval=paired_bootstrap(before, after, units=list(texts.values())),
        prompts=len(before),
        share=all(first[key] in (0, 1) and value in (0, 1) for key, value in last.items()),
    )


def by_prompt(scores: Mapping[tuple[str, int], float]) -> list[float]:
    """The mean score of each prompt over its seeds, in the order of the prompts."""
    groups: dict[str, list[float]] = {}
    for (prompt, _), value in scores.items():
        groups.setdefault(prompt, []).append(value)
    return [sum(values) / len(values) for values in groups.values()]


def is_share(run: Recorded, name: str | None) -> bool:
    """Whether every held-out score of `name` is 0 or 1."""
    scores = [p.scores[name] for rows in run.pictures.values() for p in rows if name is not None and name in p.scores]
    return bool(scores) and all(score in (0, 1) for score in scores)


def pairs(run: Recorded) -> list[tuple[Picture, Picture]]:
    """Pictures of the first and the last evaluation with the same prompt and seed, in the order of the prompts."""
    if run.last is None:
        return []
    after = {p.key: p for p in run.pictures[run.last] if p.file and p.file.is_file()}
    return [
        (p, after[p.key]) for p in run.pictures[min(run.pictures)] if p.file and p.file.is_file() and p.key in after
    ]


def categories(run: Recorded) -> list[dict[str, Any]]:
    """Per tag: the main reward's base and tuned [mean, low, high, n] from `evaluations.jsonl`."""
    base = next((r for r in run.evaluations if r.get("weights") == "base"), None)
    tuned = next((r for r in reversed(run.evaluations) if r.get("weights") == "tuned"), None)
    first, last = tags_in(base, run.main), tags_in(tuned, run.main)
    return [{"tag": tag, "base": first.get(tag), "tuned": last.get(tag)} for tag in dict.fromkeys([*first, *last])]


def tags_in(row: Row | None, name: str | None) -> Mapping[str, Sequence[float]]:
    return ((row or {}).get("by_tag") or {}).get(name) or {}


def timing(run: Recorded) -> list[dict[str, Any]]:
    """Seconds and share of each kind of work over all steps, largest first, without those that took no time."""
    totals = {name: sum(finite(row.get(f"time/{name}")) or 0.0 for row in run.metrics) for name in TIMES}
    whole = sum(totals.values())
    parts = [
        {"name": name, "words": TIMES[name], "seconds": s, "share": s / whole} for name, s in totals.items() if s > 0
    ]
    return sorted(parts, key=lambda part: -part["seconds"])


def total(run: Recorded, key: str) -> float:
    return sum(finite(row.get(key)) or 0.0 for row in run.metrics)


def seconds(run: Recorded) -> float:
    """Wall time of the run, or of its steps while it has not ended."""
    return finite(run.facts.get("seconds")) or total(run, "seconds")


def finite(value: Any) -> float | None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number and math.isfinite(value) else None


# -------------------------------------------------------------------------------------------------------------- words


def score(value: float | None, share: bool = False) -> str:
    """A score for a person: a share in percent, else three significant digits."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{100 * value:.1f} %" if share else digits(value)


def digits(value: float, sign: str = "") -> str:
    return f"{value:{sign}#.3g}".removesuffix(".").replace("-", "−")


def difference(value: float, share: bool = False, *, unit: bool = True) -> str:
    if not math.isfinite(value):
        return "–"
    return f"{100 * value:+.1f}".replace("-", "−") + (" points" if unit else "") if share else digits(value, "+")


def bounds(found: Interval, share: bool = False) -> str:
    return f"[{difference(found.low, share, unit=False)}, {difference(found.high, share, unit=False)}]"


def duration(value: float) -> str:
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{value:.3g} s"


def count(value: float) -> str:
    """A whole number with thin spaces between thousands."""
    return f"{value:,.0f}".replace(",", "\u202f")


def day(text: Any) -> str:
    try:
        return f"{datetime.fromisoformat(str(text)):%-d %B %Y, %H:%M}"
    except ValueError:
        return str(text or "")


def machine(facts: Mapping[str, Any]) -> str:
    """Where it ran. Example: "2 CPU cores", "4 × NVIDIA H200" """
    hardware = facts.get("hardware")
    if not isinstance(hardware, Mapping):
        return str(hardware or "")
    gpus = hardware.get("gpus") or []
    if gpus:
        return str(gpus[0]) if len(gpus) == 1 else f"{len(gpus)} × {gpus[0]}"
    cores = hardware.get("cores")
    return "" if not cores else "one CPU core" if cores == 1 else f"{cores} CPU cores"


def model(run: Recorded) -> str:
    """The model's name as its settings have it."""
    named = run.facts.get("model")
    named = named.get("path") or named.get("id") if isinstance(named, Mapping) else named
    return str(section(run.settings, "model").get("path") or named or "the model").removeprefix("asset:")


def flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested facts as one table: {"hardware cores": "2"}."""
    out: dict[str, str] = {}
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            out |= flat(value, f"{name} ")
        else:
            out[name] = ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
    return out


# ------------------------------------------------------------------------------------------------------------- curves


def held_out_curve(run: Recorded) -> Curve | None:
    """The main reward at each evaluation with its 95 % interval over prompts."""
    name = run.main
    found = {step: held_out(rows, name) for step, rows in run.pictures.items() if name is not None}
    known = {step: i for step, i in found.items() if i is not None}
    for row in run.evaluations:  # evaluations whose scores.json is gone still have a mean
        mean = finite(row.get("scores", {}).get(name))
        if row["step"] not in known and mean is not None:
            known[row["step"]] = Interval(mean, math.nan, math.nan)
    if not known:
        return None
    steps = sorted(known)
    means, low, high = zip(*(known[s] for s in steps), strict=True)
    return Curve(x=steps, y=means, low=low, high=high, marks=True, share=is_share(run, name))


def held_out(rows: Sequence[Picture], name: str) -> Interval | None:
    means = by_prompt({p.key: p.scores[name] for p in rows if name in p.scores})
    return interval(means) if means else None


def reward_curves(run: Recorded) -> dict[str, Curve]:
    """Mean ± spread over the images of a step, of the total and of each reward."""
    names = [m[1] for row in run.metrics for key in row if (m := re.fullmatch(r"reward/(.+)/mean", key))]
    keys = {"total": "reward", **{name: f"reward/{name}" for name in dict.fromkeys(names)}}
    curves = {name: metric(run, f"{key}/mean", f"{key}/std") for name, key in keys.items()}
    drawn = {name: curve for name, curve in curves.items() if curve is not None}
    if len(drawn) == 2 and "total" in drawn:
        del drawn["total"]  # one reward and the total are the same curve but for a weight
    return drawn


def metric(run: Recorded, key: str, spread: str | None = None) -> Curve | None:
    """A column of `metrics.jsonl` over the steps; None if it never is a number."""
    rows = [row for row in run.metrics if finite(row.get(key)) is not None]
    if not rows:
        return None
    x, y = [row["step"] for row in rows], [float(row[key]) for row in rows]
    half = [finite(row.get(spread)) or 0.0 for row in rows] if spread else []
    low, high = [a - b for a, b in zip(y, half, strict=False)], [a + b for a, b in zip(y, half, strict=False)]
    return Curve(x=x, y=y, low=low, high=high, marks=len(x) == 1)


def plain_style() -> Any:
    """matplotlib's settings for all figures. Text stays text, and ids depend on nothing but the drawing."""
    import matplotlib

    return matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "vgrpo",
            "font.family": "sans-serif",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.spines.left": False,
            "xtick.major.size": 0,
            "ytick.major.size": 0,
        }
    )


def draw(axes: Axes, curve: Curve, colours: Mapping[str, str]) -> None:
    """One curve with its band, a horizontal grid and nothing that is not needed to read it."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.grid(axis="y", color=colours[LINE], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines["bottom"].set_color(colours[LINE])
    axes.tick_params(colors=colours[MUTED], labelsize=9, pad=5)
    if curve.low:
        axes.fill_between(curve.x, curve.low, curve.high, color=colours[AFTER], alpha=0.16, linewidth=0)
    axes.plot(curve.x, curve.y, color=colours[AFTER], linewidth=1.8, marker="o" if curve.marks else "", markersize=4.5)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4, min_n_ticks=3))
    if curve.share:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.0f} %"))
    axes.margins(x=0.02)


def draw_picture(axes: Axes, picture: Picture, main: str | None, caption: str) -> None:
    import textwrap

    from PIL import Image

    assert picture.file is not None
    image = Image.open(picture.file).convert("RGB")
    axes.imshow(image, interpolation="nearest" if image.width <= SMALL else "antialiased")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    if caption:
        axes.set_title(textwrap.fill(caption, 24), fontsize=8.5, color=ON_WHITE[INK], pad=4)
    correct = picture.scores.get(main or "")
    if correct in (0, 1):
        mark, colour = ("✓", "#23803f") if correct else ("✗", "#bf3a2b")
        box = {"boxstyle": "circle,pad=0.22", "facecolor": "white", "edgecolor": "none", "alpha": 0.9}
        place: dict[str, Any] = {"transform": axes.transAxes, "ha": "center", "va": "center"}
        axes.text(0.5, 0.08, mark, color=colour, fontsize=9, fontweight="bold", bbox=box, **place)


def svg(curve: Curve, *, width: float = 3.7, height: float = 2.1) -> str:
    """An inline SVG of a curve, in the page's colours and font; width and height in inches."""
    with plain_style():
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot(facecolor="none")
        draw(axes, curve, {name: name for name in VARIABLES})
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return inline(out.getvalue())


def inline(text: str) -> str:
    """A matplotlib SVG made fit for an HTML page: no header, no metadata, no address of a namespace, ids of its own."""
    import hashlib

    mark = "c" + hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 aria-hidden="true"', text)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text)
    text = re.sub(r'\bid="', f'id="{mark}-', text)
    text = text.replace("url(#", f"url(#{mark}-").replace('href="#', f'href="#{mark}-')
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text


# --------------------------------------------------------------------------------------------------------------- page


def page(run: Recorded) -> str:
    """The whole HTML page. The template escapes every text; only our own SVG and CSS pass as they are."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("vgrpo", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"score": score, "difference": difference, "bounds": bounds, "duration": duration}
    curve = held_out_curve(run)
    shown = changes(run)
    rewards = reward_curves(run)
    tags = categories(run)
    ends = scale(tags)
    health = {key: (words, found) for key, words in DIAGNOSTICS.items() if (found := metric(run, key)) is not None}
    return environment.get_template("report.html.j2").render(
        name=run.facts.get("name") or run.folder.name,
        started=day(run.facts.get("started")),
        story=story(run),
        main=run.main,
        changes=shown,
        headline=shown[0] if shown and shown[0].name == run.main else None,
        last=run.last,
        share=is_share(run, run.main),
        tiles=tiles(run),
        hero=Markup(svg(curve, width=4.7, height=3.7)) if curve else None,
        pairs=[pair_card(pair, run.main) for pair in pairs(run)[:PAIRS_SHOWN]],
        method=method(run),
        guards=guard_rows(run),
        categories=[category_row(row, ends) for row in tags],
        ends=ends,
        rewards=[(name, Markup(svg(c)), c.y[0], c.y[-1]) for name, c in rewards.items()],
        health=[(key, words, Markup(svg(c, height=1.75)), c.y[-1]) for key, (words, c) in health.items()],
        timing=timing(run),
        seconds=total(run, "seconds"),
        settings=run.settings_text,
        facts=flat(run.facts),
        steps=len(run.metrics),
    )


def story(run: Recorded) -> str:
    """What was trained, how and for how long, in one or two sentences."""
    rollout, rewards = section(run.settings, "rollout"), section(run.settings, "rewards")
    size = section(run.settings, "prompts").get("per_step"), rollout.get("group_size")
    each = f" of {size[0]} prompts × {size[1]} images" if all(size) else ""
    where = f" on {machine(run.facts)}" if machine(run.facts) else ""
    aim = f", rewarding {listed(list(rewards))}" if rewards else ""
    done, planned = len(run.metrics), section(run.settings, "run").get("steps") or 0
    budget = section(run.settings, "run").get("budget")
    steps = f"{done} of {planned} steps" if done < planned and not budget else f"{done} step{'' if done == 1 else 's'}"
    name = method(run)[0]
    if not run.metrics:
        return f"{name} on {model(run)}{aim}. No step was finished."
    return f"{name} trained {model(run)} for {steps}{each}, {duration(seconds(run))}{where}{aim}."


def method(run: Recorded) -> tuple[str, str]:
    """Name and arXiv number of the run's objective; a user's own has its name and no number."""
    name = str(section(run.settings, "objective").get("name", "vgrpo"))
    return METHODS.get(name, (name, ""))


def guard_rows(run: Recorded) -> list[tuple[str, str, float, float]]:
    """(figure, what it is, before, now) of every guard that the first and the last evaluation have."""
    if len(run.evaluations) < 2:
        return []
    first, last = (run.evaluations[i].get("guards") or {} for i in (0, -1))
    return [
        (k.replace("_", " "), words, first[k], last[k]) for k, words in MEANINGS.items() if k in first and k in last
    ]


def listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def tiles(run: Recorded) -> list[tuple[str, str]]:
    """A few facts in large figures."""
    took, images, calls = total(run, "seconds"), total(run, "images"), total(run, "network_calls")
    out = [("wall time", duration(seconds(run)))] if seconds(run) else []
    out += [("pictures drawn", count(images))] if images else []
    out += [("pictures per second", f"{images / took:.3g}")] if images and took else []
    out += [("network calls", count(calls))] if calls else []
    out += [("network calls per second", count(calls / took))] if calls and took else []
    return out


def pair_card(pair: tuple[Picture, Picture], main: str | None) -> dict[str, Any]:
    before, after = pair
    sides = [pair_side("before", before, main), pair_side("after", after, main)]
    return {"text": after.text, "tag": after.tag, "seed": after.seed, "id": after.prompt_id, "sides": sides}


def pair_side(label: str, picture: Picture, main: str | None) -> dict[str, Any]:
    assert picture.file is not None
    return {"label": label, "uri": data_uri(picture.file), "mark": mark(picture, main)}


def mark(picture: Picture, main: str | None) -> dict[str, str]:
    """✓ or ✗ for a score of 1 or 0, else the number."""
    value = picture.scores.get(main or "")
    if value in (0, 1):
        kind = "right" if value else "wrong"
        return {"text": "✓" if value else "✗", "kind": kind, "words": kind}
    return {"text": score(value), "kind": "graded", "words": f"{main} {score(value)}"}


def data_uri(file: Path) -> dict[str, Any]:
    """The picture itself as a URI, with its size in pixels; a large one is made smaller first."""
    from PIL import Image

    raw = file.read_bytes()
    image = Image.open(io.BytesIO(raw))
    if max(image.size) > LARGEST:
        image.thumbnail((LARGEST, LARGEST))
        out = io.BytesIO()
        image.save(out, "PNG", optimize=True)
        raw = out.getvalue()
    text = f"data:image/png;base64,{base64.b64encode(raw).decode()}"
    return {"text": text, "width": image.width, "height": image.height, "crisp": image.width <= SMALL}


def scale(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """What the ends of the categories' bars stand for: 0 and 1 if all fits, else the range of the numbers."""
    numbers = [v for row in rows for side in ("base", "tuned") for v in (row[side] or [])[:3] if finite(v) is not None]
    if not numbers or (min(numbers) >= 0 and max(numbers) <= 1):
        return 0.0, 1.0
    return min(numbers), max(max(numbers), min(numbers) + 1e-9)


def category_row(row: Mapping[str, Any], ends: tuple[float, float]) -> dict[str, Any]:
    """A tag with its means, and where dots and whiskers stand, in percent of the bar."""

    def at(value: float) -> float:
        return round(100 * (value - ends[0]) / (ends[1] - ends[0]), 2)

    def side(found: Sequence[float] | None) -> dict[str, Any] | None:
        if not found or finite(found[0]) is None:
            return None
        mean, low, high = (finite(v) for v in found[:3])
        assert mean is not None
        whisker = (at(low), at(high)) if low is not None and high is not None else (at(mean), at(mean))
        place = {"at": at(mean), "from": whisker[0], "to": whisker[1]}
        return {"mean": mean, "low": low, "high": high, "n": int(found[3]), **place}

    base, tuned = side(row["base"]), side(row["tuned"])
    return {"tag": str(row["tag"]).replace("_", " "), "base": base, "tuned": tuned, "n": (tuned or base or {}).get("n")}
