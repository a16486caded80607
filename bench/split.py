"""Where the time of a training step goes: the share inside the network, the VAE and the rewards.

    python bench/split.py tiny              # writes bench/results/split.md

Runs three steps of a recipe (the first is a warm-up) with timers around exactly these: the rollout's network calls and
solver, VAE decoding, reward functions, text encoding, and in training each network call and each backward pass. What is
left is ours: noise, indexing, advantages, the optimizer, logging.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from vgrpo import training
from vgrpo.config import load_recipe, parse_overrides
from vgrpo.policies.pipeline import Pipeline
from vgrpo.run import hardware, versions

SECONDS: dict[str, float] = defaultdict(float)


def timed(kind: str, function: Callable) -> Callable:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            SECONDS[kind] += perf_counter() - start

    return wrapper


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="tiny")
    parser.add_argument("overrides", nargs="*", help="key.path=value")
    args = parser.parse_args()
    for kind, method in (("rollout", "sample"), ("decode", "decode"), ("encode", "encode"), ("forward", "predict")):
        setattr(Pipeline, method, timed(kind, getattr(Pipeline, method)))
    torch.Tensor.backward = timed("backward", torch.Tensor.backward)  # type: ignore[method-assign]
    training.score = timed("reward", training.score)  # type: ignore[assignment]
    whole: list[dict[str, float]] = []
    step = training.step

    def measured(*a: Any) -> dict[str, float]:
        SECONDS.clear()
        start = perf_counter()
        row = step(*a)
        whole.append({**SECONDS, "whole": perf_counter() - start})
        return row

    training.step = measured
    with tempfile.TemporaryDirectory() as folder:
        fixed = {"run.steps": 3, "run.folder": folder, "evaluation.every": 1000, "evaluation.prompts": 1}
        training.train(load_recipe(args.recipe, **{**parse_overrides(args.overrides), **fixed}))
    rows = whole[1:]
    total = sum(r["whole"] for r in rows)
    parts = {
        k: sum(r.get(k, 0.0) for r in rows) for k in ("encode", "rollout", "decode", "reward", "forward", "backward")
    }
    h, v = hardware(), versions()
    lines = [
        f"# Time of a step of `{args.recipe}`",
        "",
        f"`python bench/split.py {' '.join([args.recipe, *args.overrides])}`, {h['cpu']}, {h['cores']} cores, "
        f"{h['threads']} threads, torch {v['torch']}; mean of {len(rows)} steps after a warm-up, {total / len(rows):.2f} s a step.",
        "",
        "| part | seconds a step | share |",
        "|---|---|---|",
        *[f"| {k} | {s / len(rows):.3f} | {s / total:.1%} |" for k, s in parts.items()],
        f"| the rest | {(total - sum(parts.values())) / len(rows):.3f} | {1 - sum(parts.values()) / total:.1%} |",
        "",
        f"Inside network, VAE and rewards: **{sum(parts.values()) / total:.1%}**.",
    ]
    out = Path(__file__).parent / "results/split.md"
    out.parent.mkdir(exist_ok=True)
    out.write_text("\n".join(lines) + "\n")
    print(out.read_text())


if __name__ == "__main__":
    main()
