"""A trained run, opened again: its policy with base and tuned weights, and the comparison of the two."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vgrpo import checkpoint
from vgrpo.config import Config, build_rewards, parse
from vgrpo.errors import UserError
from vgrpo.evaluation import evaluate, scores_of
from vgrpo.policies.pipeline import Pipeline, check
from vgrpo.prompts import read_prompts, spread
from vgrpo.run import Run
from vgrpo.statistics import paired_bootstrap


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A run's policy as it was before training, and the tuned weights to use with `policy.using`."""

    config: Config
    policy: Pipeline
    weights: Mapping[str, Tensor]


def open_run(folder: Path) -> Trained:
    """Loads the base model of a run and its newest checkpoint, averaged weights where there are any.

    Raises:
        UserError: no run folder, no checkpoint, or another model than the run's.
    """
    run = Run(folder)
    config = parse(run.settings())
    check(config)
    state = checkpoint.load(run.checkpoints)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    policy = Pipeline(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return Trained(config=config, policy=policy, weights=state.averaged or state.weights)


def compare(
    trained: Trained, *, prompts_file: str | None, limit: int | None, images: int, out: Path
) -> list[dict[str, Any]]:
    """Base against tuned on the same prompts and seeds; one row per reward with the paired 95 % interval."""
    config = trained.config
    source = prompts_file or config.prompts.test
    if source is None:
        raise UserError("the run has no held-out prompts (prompts.test); name a file with --prompts")
    prompts = spread(read_prompts(source, split="test"), limit or config.evaluation.prompts)
    rewards = build_rewards(config.evaluation.rewards or config.rewards)
    for name, weights in (("base", None), ("tuned", trained.weights)):
        with trained.policy.using(weights), trained.policy.evaluating():
            evaluate(
                trained.policy,
                prompts,
                rewards,
                images_per_prompt=images,
                micro_batch=config.rollout.micro_batch,
                seed=config.evaluation.seed,
                pictures=config.evaluation.pictures,
                folder=out / name,
            )
    base, tuned = (json.loads((out / name / "scores.json").read_text())["rows"] for name in ("base", "tuned"))
    rows = []
    for name in rewards:
        before, after = scores_of(base, name, images), scores_of(tuned, name, images)
        gain = paired_bootstrap(before, after, units=[p.text for p in prompts])
        rows.append(
            {"reward": name, "base": float(before.mean()), "tuned": float(after.mean()), "gain": gain._asdict()}
        )
    (out / "comparison.json").write_text(
        json.dumps({"prompts": len(prompts), "images": images, "rows": rows}, indent=2)
    )
    return rows


def table(rows: list[dict[str, Any]]) -> None:
    """Prints what `compare` found."""
    from rich.console import Console
    from rich.table import Table

    out = Table("reward", "base", "tuned", "gain", "95 % interval")
    for row in rows:
        gain = row["gain"]
        out.add_row(
            row["reward"],
            f"{row['base']:.4f}",
            f"{row['tuned']:.4f}",
            f"{gain['mean']:+.4f}",
            f"{gain['low']:+.4f} … {gain['high']:+.4f}",
        )
    Console(width=100).print(out)
