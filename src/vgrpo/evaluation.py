"""Held-out prompts, fixed seeds: the same pictures before and after, scored and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vgrpo.guards import guards
from vgrpo.rewards import score
from vgrpo.rollout import generate
from vgrpo.run import save_grid
from vgrpo.statistics import by_tag
from vgrpo.types import Policy, Prompt, Reward


def evaluate(
    policy: Policy,
    prompts: Sequence[Prompt],
    rewards: Mapping[str, Reward],
    *,
    images_per_prompt: int,
    micro_batch: int,
    seed: int,
    pictures: int,
    folder: Path,
    share: tuple[int, int] = (0, 1),
    gather: Callable[[list], list] = list,
    advance: Callable[[int], None] = lambda images: None,
) -> dict[str, Any]:
    """Scores `images_per_prompt` pictures of each prompt and writes `folder/scores.json` with the first `pictures`.

    The seed of a picture depends on `seed`, the prompt's place and the picture's number alone, so two calls with other
    weights can be compared picture by picture. `share` = (process, processes) and `gather` spread the prompts.

    Returns:
        {"scores": {reward: mean}, "by_tag": {reward: {tag: [mean, low, high, n]}}, "guards": {figure: mean}}; intervals
        hold 95 %. Guards, see `vgrpo.guards`, are those of this process's pictures, weighed by their number.
    """
    slots = range(share[0], len(prompts), share[1])
    mine = [prompts[s] for s in slots]
    rollouts = generate(
        policy, mine, slots, group_size=images_per_prompt, micro_batch=micro_batch, seed=seed, step=0, advance=advance
    )
    rows_of = [p for p in mine for _ in range(images_per_prompt)]
    scores = {name: score(name, reward, rollouts.images, rows_of).tolist() for name, reward in rewards.items()}
    every = -(-len(prompts) // pictures) if pictures else 0
    folder.mkdir(parents=True, exist_ok=True)
    own = []
    for i, prompt in enumerate(rows_of):
        slot, member = slots[i // images_per_prompt], i % images_per_prompt
        place = slot * images_per_prompt + member
        picture = f"{place:05d}.png" if every and member == 0 and slot % every == 0 else None
        if picture:
            save_grid(rollouts.images[i : i + 1], folder / picture, columns=1)
        row = {"place": place, "prompt_id": prompt.id, "text": prompt.text, "tag": prompt.meta.get("tag")}
        row |= {
            "seed": rollouts.seeds[i],
            "scores": {name: values[i] for name, values in scores.items()},
            "image": picture,
        }
        own.append(row)
    rows = sorted(gather(own), key=lambda row: row["place"])
    looks = gather([(len(rows_of), guards(rollouts.images, images_per_prompt))])
    if share[0] == 0:
        (folder / "scores.json").write_text(json.dumps({"rows": rows}))
    scored = {name: scores_of(rows, name, images_per_prompt) for name in rewards}
    tags = [p.meta.get("tag") for p in prompts]
    return {
        "scores": {name: float(values.mean()) for name, values in scored.items()},
        "by_tag": {name: by_tag(values, tags) for name, values in scored.items()} if all(tags) else {},
        "guards": {
            name: sum(n * look[name] for n, look in looks if n) / sum(n for n, _ in looks)
            for name in next(look for n, look in looks if n)
        },
    }


def scores_of(rows: Sequence[Mapping[str, Any]], name: str, images_per_prompt: int = 1) -> NDArray[np.float64]:
    """One reward of the rows of a `scores.json` as [K, images_per_prompt], first axis = prompt."""
    return np.array([r["scores"][name] for r in rows], dtype=np.float64).reshape(-1, images_per_prompt)
