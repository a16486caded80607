"""The variance study of V-GRPO's paper on any recipe: how loud the surrogate is with each technique on and off.

The weights stay where they are. One set of pictures is drawn and scored; then, for each variant, the pairs of time and
noise are drawn many times, and what is measured is what those draws alone make of the same pictures:

* coefficient of variation of the surrogate L, its standard deviation over its mean: over all pictures of a draw, and over
  the pictures of one prompt, averaged over prompts and draws (what the group-relative comparison sees);
* noise-to-signal ratio of the gradient, √E‖g − ḡ‖² / ‖ḡ‖, with the bias of a mean over few draws taken out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vgrpo.advantages import combine_rewards
from vgrpo.config import Config, build_rewards
from vgrpo.errors import UserError
from vgrpo.objectives.vgrpo import VGRPO
from vgrpo.policies.pipeline import Pipeline, check
from vgrpo.prompts import batch, read_prompts
from vgrpo.report import plain_style
from vgrpo.rewards import score
from vgrpo.rollout import generate
from vgrpo.run import hardware, versions
from vgrpo.types import Prepared

OFF = {"share": "none", "times": "uniform", "weighting": "none"}
ON = {"share": "group", "times": "stratified", "weighting": "adaptive"}
VARIANTS: dict[str, dict[str, Any]] = {
    "none of the three": OFF,
    "shared pairs alone": OFF | {"share": "group"},
    "stratified times alone": OFF | {"times": "stratified"},
    "adaptive weights alone": OFF | {"weighting": "adaptive"},
    "without shared pairs": ON | {"share": "none"},
    "without stratified times": ON | {"times": "uniform"},
    "without adaptive weights": ON | {"weighting": "none"},
    "all three": ON,
    "all, x0 error unweighted": ON | {"weighting": "x0"},
    "all, eps error": ON | {"weighting": "eps"},
    "all, 1 draw": ON | {"draws": 1},
    "all, 2 draws": ON | {"draws": 2},
    "all, 8 draws": ON | {"draws": 8},
}
"""Changes to the recipe's objective; 4 draws unless said otherwise."""
LARGEST = 8
"""Most draws of a variant."""


def study(config: Config, *, repeats: int, folder: Path) -> list[dict[str, Any]]:
    """Measures every variant with `repeats` draws at the policy's start and writes `ablate.json`, `.md` and `.png`.

    Raises:
        UserError: fewer than 2 repeats, or a recipe of another objective than V-GRPO.
    """
    if repeats < 2:
        raise UserError(f"repeats={repeats}: a spread needs at least 2")
    if config.objective.name != "vgrpo":
        raise UserError(f"ablate studies V-GRPO, the recipe's objective is {config.objective.name}")
    check(config)
    folder.mkdir(parents=True, exist_ok=True)
    policy = Pipeline(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    prepared = pictures(config, policy)
    rows = []
    for name, changes in VARIANTS.items():
        steps = max(config.rollout.steps, LARGEST)  # one schedule for all variants, with room for the most draws
        objective = VGRPO(**{"draws": 4, "clip": None, "schedule_steps": steps, **changes})
        rows.append({"variant": name, **changes, **measure(config, policy, prepared, objective, repeats)})
        about = {"hardware": hardware(), "versions": versions(), "repeats": repeats, "settings": config.dump()}
        (folder / "ablate.json").write_text(json.dumps({"rows": rows, **about}, indent=1))
        (folder / "ablate.md").write_text(table(rows, config, about))
    figure(rows, folder / "ablate.png")
    return rows


def pictures(config: Config, policy: Pipeline) -> Prepared:
    """The rollouts of the recipe's first step and their advantages; no pairs yet."""
    prompts = batch(read_prompts(config.prompts.train, split="train"), config.prompts.per_step, 0, config.run.seed)
    size = config.rollout.group_size
    rollouts = generate(
        policy,
        prompts,
        range(len(prompts)),
        group_size=size,
        micro_batch=config.rollout.micro_batch,
        seed=config.run.seed,
        step=0,
    )
    rows = [prompt for prompt in prompts for _ in range(size)]
    rewards = build_rewards(config.rewards)
    parts = {name: score(name, reward, rollouts.images, rows).view(-1, size) for name, reward in rewards.items()}
    total = combine_rewards(parts, {n: e.weight for n, e in config.rewards.items()}, how=config.advantages.combine)
    valid = torch.ones_like(total, dtype=torch.bool)
    advantages = config.objective.advantages(total, valid, scale=config.advantages.scale, walk=None)
    return Prepared(rollouts=rollouts, draws=None, advantages=advantages)


def measure(config: Config, policy: Pipeline, pictures: Prepared, objective: VGRPO, repeats: int) -> dict[str, float]:
    """The three numbers of one variant."""
    surrogates, gradients = [], []
    for repeat in range(repeats):
        surrogate, gradient = one_draw(config, policy, pictures, objective, repeat)
        surrogates.append(surrogate)
        gradients.append(gradient)
    values = torch.stack(surrogates).double()
    return {
        "overall": variation(values.flatten(1)),
        "within": variation(values.flatten(0, 1)),
        "noise_to_signal": noise_to_signal(torch.stack(gradients)),
    }


def one_draw(
    config: Config, policy: Pipeline, pictures: Prepared, objective: VGRPO, repeat: int
) -> tuple[Tensor, Tensor]:
    """Surrogates L [P, G] and the gradient of the mean loss, flat, for one drawing of pairs."""
    size, slots = config.rollout.group_size, range(len(pictures.rollouts.prompts))
    schedule = policy.schedule(objective.schedule_steps)
    prepared = Prepared(
        rollouts=pictures.rollouts,
        draws=objective.draw(schedule, slots, size, seed=config.run.seed + 1, step=repeat),
        advantages=pictures.advantages,
    )
    items = torch.arange(len(prepared.rollouts.x0))
    weights = list(policy.trainable.values())
    for parameter in weights:
        parameter.grad = None
    errors = []
    for rows in items.split(config.update.micro_batch):
        stats = objective.backward(
            policy, objective.batch(prepared, rows), first=True, joint=False, weight=1 / len(items)
        )
        errors.append(stats.means["error"])
    gradient = torch.cat([p.grad.flatten() for p in weights if p.grad is not None])
    return torch.cat(errors).view(-1, size), gradient


def variation(values: Tensor) -> float:
    """Standard deviation over mean along the last axis, averaged over the first."""
    return (values.std(-1, correction=0) / values.mean(-1)).mean().item()


def noise_to_signal(gradients: Tensor) -> float:
    """√(E‖g − ḡ‖²)/‖E g‖ of gradients [R, weights]; infinite where the noise hides the signal.

    The squared norm of a mean over R draws is too large by a share 1/R of the noise, which is taken off.
    """
    noise = gradients.double().var(0, correction=1).sum()
    signal = gradients.double().mean(0).square().sum() - noise / len(gradients)
    return (noise / signal).sqrt().item() if signal > 0 else float("inf")


def table(rows: list[dict[str, Any]], config: Config, about: Mapping[str, Any]) -> str:
    lines = [
        "# Variance of the surrogate",
        "",
        f"Model `{config.model.path}`, {config.prompts.per_step} prompts × {config.rollout.group_size} pictures, "
        f"{max(config.rollout.steps, LARGEST)}-step schedule, {about['repeats']} draws of pairs, seed {config.run.seed}; "
        f"{about['hardware']['cpu']}, {about['hardware']['threads']} threads, torch {about['versions']['torch']}.",
        "",
        "| variant | variation overall | within a group | gradient noise / signal |",
        "|---|---|---|---|",
    ]
    lines += [f"| {r['variant']} | {r['overall']:.3f} | {r['within']:.3f} | {r['noise_to_signal']:.2f} |" for r in rows]
    return "\n".join(lines) + "\n"


def figure(rows: list[dict[str, Any]], path: Path) -> None:
    with plain_style():
        from matplotlib.figure import Figure

        canvas = Figure(figsize=(11, 4.4), dpi=140, layout="constrained")
        names = [r["variant"] for r in rows][::-1]
        keys = {
            "within": "variation within a group",
            "overall": "variation overall",
            "noise_to_signal": "gradient noise / signal",
        }
        for panel, (key, title) in zip(canvas.subplots(1, 3, sharey=True), keys.items(), strict=True):
            values = [r[key] for r in rows][::-1]
            panel.barh(names, values, color=["#2b62d9" if n == "all three" else "#b9c4dd" for n in names])
            panel.set_title(title, loc="left", fontsize=10)
        canvas.savefig(path, facecolor="white")
