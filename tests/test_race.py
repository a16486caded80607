"""Races and the variance study on the mini pipeline, and their arithmetic by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from vgrpo import checkpoint
from vgrpo.ablate import VARIANTS, noise_to_signal, study, variation
from vgrpo.config import parse
from vgrpo.errors import UserError
from vgrpo.race import Result, against, hold, load_race, mean_curve, reached
from vgrpo.run import Run
from vgrpo.training import learning_rate


def curve(reward: list[float], calls: list[float], seed: int = 0) -> Result:
    spent = {axis: np.array(calls) for axis in ("calls", "seconds", "step")}
    return Result(entry="a", seed=seed, reward=np.array(reward), spent=spent, calls={})


def test_reached_is_linear_between_evaluations() -> None:
    reward, spent = np.array([0.2, 0.4, 0.3, 0.8]), np.array([0.0, 100.0, 200.0, 300.0])
    assert reached(reward, spent, 0.1) == 0
    assert reached(reward, spent, 0.3) == pytest.approx(50)
    assert reached(reward, spent, 0.55) == pytest.approx(250)
    assert reached(reward, spent, 0.9) == float("inf")


def test_mean_curve_and_who_needs_what() -> None:
    first = [curve([0.0, 0.5, 1.0], [0, 10, 20]), curve([0.0, 0.7, 1.2], [0, 30, 40], 1)]
    spent, mean, spread = mean_curve(first, "calls")
    np.testing.assert_allclose(spent, [0, 20, 30])
    np.testing.assert_allclose(mean, [0, 0.6, 1.1])
    np.testing.assert_allclose(spread, [0, 0.1 * 2**0.5, 0.1 * 2**0.5])
    other = [curve([0.0, 0.3, 0.2], [0, 50, 100])]  # best 0.3 after 50, which the first has after 10
    assert against(first, other, "calls") == (50, pytest.approx(10))


@pytest.fixture
def recipe(settings: dict[str, Any], tmp_path: Path) -> Path:
    settings["run"] = {"name": "x", "folder": "x"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "recipe.yaml"


def race_of(recipe: Path, **changes: Any) -> Any:
    own = {"objectives": ["vgrpo", "mix_grpo"], "budget": "600 calls", "seeds": [0, 1], "points": 3}
    own |= {"folder": str(recipe.parent / "races"), "update.per_rollout": 2, "target": 0.5}
    return {**own, **changes}


def test_a_race_is_fair_complete_and_goes_on(recipe: Path) -> None:
    entries = {
        "vgrpo": {"objective": {"name": "vgrpo", "draws": 2}},
        "mix_grpo": {"objective": {"name": "mix_grpo", "window": 2}},
    }
    changes = race_of(recipe, entries=entries, search={"optimizer.lr": [0.01, 0.001]}, search_budget="200 calls")
    changes.pop("objectives")
    changes["search_budget"] = {"calls": 200}
    folder = hold(load_race(str(recipe), changes))
    numbers = json.loads((folder / "race.json").read_text())
    runs = {(r["entry"], r["seed"]): r for r in numbers["runs"]}
    assert set(runs) == {(e, s) for e in entries for s in (0, 1)}
    for (_, _), run in runs.items():
        assert run["calls"][-2] < 600 <= run["calls"][-1] == sum(run["calls by kind"].values())
        assert len(run["reward"]) >= 3
    # same start, same evaluation: the base's score is the same number for all
    assert len({r["reward"][0] for r in numbers["runs"]}) == 1
    # 4 prompts of 4 pictures, 4 steps of the sampler; V-GRPO scores θ_old for the later half, MixGRPO trains on a window of 2
    steps = {k: runs[k, 0]["step"][-1] for k in entries}
    assert runs["vgrpo", 0]["calls by kind"] == {
        "rollout": steps["vgrpo"] * 64,
        "old": steps["vgrpo"] * 16,
        "reference": 0,
        "update": pytest.approx(steps["vgrpo"] * (32 + 2 * 8), abs=steps["vgrpo"] * 16),
    }
    assert runs["mix_grpo", 0]["calls by kind"] == {
        "rollout": steps["mix_grpo"] * 64,
        "old": 0,
        "reference": 0,
        "update": steps["mix_grpo"] * 32,
    }
    assert len(numbers["search"]) == 4
    assert (folder / "race.png").stat().st_size > 10_000
    assert "ratio" in (folder / "race.md").read_text()

    # a second call makes nothing again; a run that was broken off goes on and ends the same
    before = {p: p.stat().st_mtime_ns for p in folder.glob("*/metrics.jsonl")}
    broken = Run(folder / "vgrpo-seed1")
    whole = broken.evaluations()[-1]["scores"]
    broken.describe(finished=False)
    hold(load_race(str(recipe), changes))
    after = {p: p.stat().st_mtime_ns for p in folder.glob("*/metrics.jsonl")}
    assert [p.parent.name for p in before if before[p] != after[p]] == ["vgrpo-seed1"]
    assert Run(folder / "vgrpo-seed1").evaluations()[-1]["scores"] == whole
    assert checkpoint.complete(broken.checkpoints)

    with pytest.raises(UserError, match="other settings"):
        hold(load_race(str(recipe), changes | {"budget": "700 calls"}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objectives": ["vgrpo", "mixgrpo"]}, "entry mixgrpo.*no objective 'mixgrpo'.*did you mean 'mix_grpo'"),
        ({"budget": "600 bananas"}, "bananas"),
        ({"objectives": []}, "no entries"),
        ({"objectives": ["branch_grpo"]}, "splits"),
        ({"optimizer.lrr": 1}, "optimizer.lrr: no such setting"),
    ],
)
def test_mistakes_are_found_before_any_run(recipe: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"(?s){words}"):
        load_race(str(recipe), race_of(recipe, **changes))
    assert not (recipe.parent / "races").exists()


def test_a_budget_ends_a_run_and_the_rate_falls_over_it(settings: dict[str, Any]) -> None:
    settings["run"] |= {"budget": {"updates": 5}}
    settings["optimizer"] |= {"schedule": "linear"}
    config = parse(settings)
    assert [learning_rate(config, 0, done) for done in (0.0, 0.5, 1.0)] == pytest.approx([0.01, 0.005, 0])
    with pytest.raises(UserError, match="one of calls, seconds and updates"):
        parse(settings | {"run": settings["run"] | {"budget": {"updates": 5, "calls": 7}}})
    with pytest.raises(UserError, match="evaluation.points"):
        parse(settings | {"run": {"steps": 3}, "evaluation": {"points": 3}})


def test_variation_and_noise_by_hand() -> None:
    assert variation(torch.tensor([[1.0, 3.0], [2.0, 2.0]])) == pytest.approx(0.25)
    torch.manual_seed(0)
    signal, noise = torch.full((50,), 0.3), 0.5
    drawn = signal + noise * torch.randn(4000, 50)
    assert noise_to_signal(drawn) == pytest.approx(noise / 0.3, rel=0.02)
    few = [noise_to_signal(drawn[i : i + 4]) for i in range(0, 4000, 4)]
    assert np.median(few) == pytest.approx(noise / 0.3, rel=0.1)  # without the correction it would be 11 % lower
    assert noise_to_signal(torch.randn(2, 50) - torch.randn(2, 50).mean(0)) > 0


def test_study_measures_every_variant(settings: dict[str, Any], tmp_path: Path) -> None:
    rows = study(parse(settings), repeats=3, folder=tmp_path / "ablate")
    assert [r["variant"] for r in rows] == list(VARIANTS)
    assert all(r["within"] > 0 and r["noise_to_signal"] > 0 for r in rows)
    named = {r["variant"]: r for r in rows}
    # sharing the pairs takes their spread out of the comparison inside a group, and leaves that over the batch
    assert named["shared pairs alone"]["within"] < named["none of the three"]["within"]
    assert {f.name for f in (tmp_path / "ablate").iterdir()} == {"ablate.json", "ablate.md", "ablate.png"}
    with pytest.raises(UserError, match="at least 2"):
        study(parse(settings), repeats=1, folder=tmp_path)
