"""How well the shapes reward reads scenes whose truth is known.

    python bench/shapes.py                  # writes bench/results/shapes.md, about a minute on one core

Renders scenes of `tools/scenes.py` for captions of all six tags, true to them or false by one change, clean and after a
blur and noise, and counts how often `strict` accepts them; then which shape it sees where which was drawn.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tools"), str(HERE.parent / "tests")]

import scenes  # noqa: E402
from rewards_scenes import CHANGES, TAGS, can_change, captions, changed, drawn, softened  # noqa: E402

from vgrpo.rewards.shapes import Shapes, detect  # noqa: E402
from vgrpo.types import Prompt  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-tag", type=int, default=200, help="captions of each tag")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "shapes.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(args.seed)
    true = [c for tag in TAGS for c in captions(tag, args.per_tag, rng)]

    acceptance = []
    for change in ("none", *CHANGES):
        these = [c for c in true if change == "none" or can_change(c, change)]
        things = [scenes.realise(c, rng) for c in these]
        pictures = drawn(things if change == "none" else [changed(t, change, rng) for t in things], rng)
        for look, seen in (("clean", pictures), ("soft", softened(pictures, rng))):
            strict, graded = (score(seen, these, mode) for mode in ("strict", "graded"))
            acceptance.append([change, look, len(these), int(strict.sum()), f"{graded.mean():.3f}"])

    confusion = []
    for shape in scenes.SHAPES:
        one = [scenes.place([(shape, str(rng.choice(list(scenes.COLOURS))))], rng) for _ in range(args.per_tag)]
        found = detect(softened(drawn(one, rng), rng))
        seen_as = Counter(things[0].shape if len(things) == 1 else f"{len(things)} objects" for things in found)
        confusion.append([shape, ", ".join(f"{name} {count}" for name, count in seen_as.most_common())])

    text = [
        "# What the shapes reward sees",
        f"`python bench/shapes.py --seed {args.seed} --per-tag {args.per_tag}`",
        "Scenes that `strict` accepts, true to their captions (none) or false by one change. Soft: Gaussian blur of 0.7 "
        "pixels and noise of standard deviation 4.",
        table(["change", "picture", "scenes", "accepted", "mean graded"], acceptance),
        "Single objects, soft, and what they were seen as:",
        table(["drawn", "seen as"], confusion),
        f"{rate(true, rng):,.0f} pictures of 64×64 per second of CPU time, one thread, batches of 512.",
    ]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("\n\n".join(text) + "\n")
    print(args.out.read_text())


def score(pictures: Any, these: list[dict], mode: Any) -> torch.Tensor:
    prompts = [Prompt(text=c["text"], id=str(i), meta=c["meta"]) for i, c in enumerate(these)]
    return Shapes(mode=mode)(torch.from_numpy(pictures).permute(0, 3, 1, 2), prompts)


def rate(true: list[dict], rng: np.random.Generator, repeats: int = 5) -> float:
    """Pictures per second, the best of some repeats: others may be working on the machine."""
    these = [true[i] for i in rng.integers(len(true), size=512)]
    pictures = drawn([scenes.realise(c, rng) for c in these], rng)
    seconds = []
    for _ in range(repeats):
        start = process_time()
        score(pictures, these, "strict")
        seconds.append(process_time() - start)
    return len(these) / min(seconds)


def table(head: list[str], rows: list[list[Any]]) -> str:
    return "\n".join("| " + " | ".join(str(v) for v in row) + " |" for row in [head, ["---"] * len(head), *rows])


if __name__ == "__main__":
    main()
