"""Objectives against each other: one recipe, the same start, prompts, seeds, evaluation and machine, one after another.

A race is a folder of ordinary runs, `<entry>-seed<N>`, and what is computed from their `evaluations.jsonl`: reward against
steps, network calls and seconds. A run that is finished is not made again, one that was broken off is resumed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vgrpo import checkpoint
from vgrpo.config import Budget, Config, describe, load_recipe, parse
from vgrpo.errors import RunError, UserError
from vgrpo.report import ON_WHITE, plain_style
from vgrpo.run import Run, hardware, versions
from vgrpo.training import train

log = logging.getLogger(__name__)
AXES = {"calls": "network calls", "seconds": "seconds of training", "step": "steps"}
COLOURS = ("#2b62d9", "#b5762a", "#2c8a57", "#b03a48", "#7a4fb0", "#3a8fa3", "#8a7a2c", "#555555")


class Race(BaseModel):
    """Settings of a race. Recipe settings for all go into `common`, for one entry into `entries`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    recipe: str
    """Name or file of the recipe that all entries start from."""
    entries: dict[str, dict[str, Any]]
    """Name of each entry to its settings by dotted key, such as {"nft": {"objective": {"name": "nft"}}}. The first is
    the one that the others are compared with."""
    common: dict[str, Any] = {}
    """Settings of all entries, by dotted key."""
    budget: Budget
    """What each run may spend."""
    points: Annotated[int, Field(ge=2)] = 10
    """Evaluations of each run, spread over the budget."""
    seeds: tuple[int, ...] = (0, 1, 2)
    target: float | None = None
    """A reward of which the table says when it was reached."""
    search: dict[str, list[Any]] = {}
    """Settings to choose per entry before the race, one after another: dotted key to the values tried. An entry's own
    list, under `search` in its settings, goes before."""
    search_seed: int = 1000
    search_budget: Budget | None = None
    """What a run of the search may spend; the race's budget when absent."""
    search_prompts: str | None = None
    """Held-out prompts by which the search chooses; the recipe's own when absent."""
    folder: str = "races"
    name: str = "race"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one run of the race recorded, one number per evaluation."""

    entry: str
    seed: int
    reward: NDArray[np.float64]
    spent: Mapping[str, NDArray[np.float64]]
    """Of each axis in AXES."""
    calls: Mapping[str, float]
    """Network calls of the whole run by what they were for."""
    note: str = ""
    """Why the run ended early, if it did."""


def load_race(path: str, overrides: Mapping[str, Any]) -> Race:
    """A race from a YAML file, or from a recipe and `objectives=[...]`, with `overrides` on top.

    Raises:
        UserError: any mistake in its settings, or in those of one of its runs, before any run starts.
    """
    settings: dict[str, Any] = {}
    if path.endswith((".yaml", ".yml")) and Path(path).is_file():
        settings = yaml.safe_load(Path(path).read_text())
        if not isinstance(settings, dict):
            raise UserError(f"{path} must hold the settings of a race, it holds {type(settings).__name__}")
    if "entries" not in settings:
        settings = {"recipe": path}
    rest = dict(overrides)
    names = rest.pop("objectives", None)
    if names is not None:
        known = settings.get("entries", {})
        settings["entries"] = {n: known.get(n, {"objective": {"name": n}}) for n in names}
    if isinstance(rest.get("budget"), str):
        amount, _, unit = rest["budget"].partition(" ")
        rest["budget"] = {unit or "calls": amount.replace(",", "").replace("_", "")}
    own = {k: rest.pop(k) for k in list(rest) if k in Race.model_fields}
    settings |= own
    settings["common"] = {**settings.get("common", {}), **rest}
    try:
        race = Race.model_validate(settings)
    except ValidationError as error:
        lines = [describe(e, list(Race.model_fields)) for e in error.errors()]
        raise UserError("the race has mistakes:\n" + "\n".join(f"  {line}" for line in lines)) from None
    if not race.entries:
        raise UserError("the race has no entries: give objectives=[vgrpo, mix_grpo] or entries in a file")
    for entry in race.entries:
        settings_of(race, entry, seed=race.seeds[0])
    return race


def settings_of(race: Race, entry: str, *, seed: int, **changes: Any) -> Config:
    """The settings of one run. Raises UserError that names the entry."""
    own = {k: v for k, v in race.entries[entry].items() if k != "search"}
    budget = changes.pop("budget", race.budget)
    run = {
        "run.budget": budget.model_dump(exclude_none=True),
        "run.steps": 1_000_000,
        "run.seed": seed,
        "run.folder": str(Path(race.folder) / race.name),
        "run.name": f"{entry}-seed{seed}",
        "run.save_every": 10,
        "run.keep": 1,
        "evaluation.points": race.points,
        "evaluation.pictures": 0,
    }
    try:
        return load_recipe(race.recipe, **{**race.common, **own, **run, **changes})
    except UserError as error:
        raise UserError(f"entry {entry}: {error}") from None


def hold(race: Race) -> Path:
    """Runs the search and the race as far as they are not done, and writes `race.json`, `race.md` and `race.png`."""
    folder = Path(race.folder) / race.name
    folder.mkdir(parents=True, exist_ok=True)
    same_settings(folder / "race.yaml", race)
    chosen: dict[str, dict[str, Any]] = {}
    searched: list[dict[str, Any]] = []
    for entry in race.entries:
        chosen[entry], rows = choose(race, entry)
        searched += rows
    results = []
    for seed in race.seeds:  # seed by seed, so that what is there at any time compares all entries
        for entry in race.entries:
            results.append(one_run(settings_of(race, entry, seed=seed, **chosen[entry]), entry))
            write(folder, race, chosen, searched, results)
    return folder


def same_settings(path: Path, race: Race) -> None:
    """Keeps the settings beside the runs, and refuses to mix runs of different ones. More seeds may be added."""
    mine = race.model_dump(mode="json", exclude={"seeds", "target"})
    if path.is_file() and (theirs := yaml.safe_load(path.read_text())) != mine:
        different = sorted(k for k in mine if theirs.get(k) != mine[k])
        raise UserError(
            f"{path.parent} holds a race with other settings ({', '.join(different)}); give it another name"
        )
    path.write_text(yaml.safe_dump(mine, sort_keys=False))


def choose(race: Race, entry: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The best value of each searched setting, by the mean reward over a run, and all that was tried."""
    chosen: dict[str, Any] = {}
    rows = []
    for key, values in {**race.search, **race.entries[entry].get("search", {})}.items():
        tried = []
        for value in values:
            changes = {**chosen, key: value, "budget": race.search_budget or race.budget}
            changes["run.name"] = f"search-{entry}-" + "-".join(
                f"{k.split('.')[-1]}={v}" for k, v in {**chosen, key: value}.items()
            )
            if race.search_prompts:
                changes["prompts.test"] = race.search_prompts
            result = one_run(settings_of(race, entry, seed=race.search_seed, **changes), entry)
            tried.append((score_of(result), value))
            rows.append(
                {
                    "entry": entry,
                    key: value,
                    "mean": tried[-1][0],
                    "last": float(result.reward[-1]),
                    "note": result.note,
                }
            )
        chosen[key] = max(tried, key=lambda pair: pair[0])[1]
    return chosen, rows


def score_of(result: Result) -> float:
    """Mean reward over the evaluations after the first: high for what rises early and stays."""
    return float(result.reward[1:].mean()) if len(result.reward) > 1 else float("-inf")


def one_run(config: Config, entry: str) -> Result:
    """Trains, resumes or only reads a run. A run that breaks off counts with what it reached."""
    run, note = Run(Path(config.run.folder) / config.run.name), ""
    facts = run.folder / "run.json"
    described = json.loads(facts.read_text()) if facts.is_file() else {}
    if not described.get("finished") and not described.get("stopped"):
        try:
            if checkpoint.complete(run.checkpoints):
                train(parse(run.settings()), resume=run.folder)
            else:
                clear(run.folder)
                train(config)
        except RunError as error:
            note = str(error).splitlines()[0]
            run.describe(stopped=note)
    return read(run, entry, described.get("stopped", note))


def clear(folder: Path) -> None:
    """Removes what a run left that had not yet saved anything."""
    import shutil

    if folder.is_dir():
        shutil.rmtree(folder)


def read(run: Run, entry: str, note: str) -> Result:
    evaluations, settings = run.evaluations(), run.settings()
    main = settings["evaluation"]["main"] or next(iter(evaluations[0]["scores"]))
    kinds = ("rollout", "old", "reference", "update")
    metrics = run.metrics()
    return Result(
        entry=entry,
        seed=settings["run"]["seed"],
        reward=np.array([e["scores"][main] for e in evaluations]),
        spent={axis: np.array([float(e[axis]) for e in evaluations]) for axis in AXES},
        calls={kind: sum(m[f"calls/{kind}"] for m in metrics) for kind in kinds},
        note=note,
    )


# ------------------------------------------------------------------------------------------------------------ comparing


def reached(reward: NDArray[np.float64], spent: NDArray[np.float64], target: float) -> float:
    """Where a curve first reaches `target`, linear between evaluations; infinite if it never does."""
    above = np.flatnonzero(reward >= target)
    if not len(above):
        return float("inf")
    i = int(above[0])
    if i == 0:
        return float(spent[0])
    share = (target - reward[i - 1]) / (reward[i] - reward[i - 1])
    return float(spent[i - 1] + share * (spent[i] - spent[i - 1]))


def mean_curve(
    results: Sequence[Result], axis: str
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """(spent, mean, spread) over seeds, each evaluation at the mean of what the seeds had spent by then.

    Only as many evaluations as the shortest run has; the spread is the sample standard deviation, 0 for one seed.
    """
    points = min(len(r.reward) for r in results)
    rewards = np.stack([r.reward[:points] for r in results])
    spent = np.stack([r.spent[axis][:points] for r in results]).mean(0)
    return spent, rewards.mean(0), rewards.std(0, ddof=1) if len(results) > 1 else np.zeros(points)


def against(first: Sequence[Result], other: Sequence[Result], axis: str) -> tuple[float, float]:
    """(what the other spent when its mean curve was best, what the first had spent when it reached that reward)."""
    spent, mean, _ = mean_curve(other, axis)
    best = int(mean.argmax())
    mine, curve, _ = mean_curve(first, axis)
    return float(spent[best]), reached(curve, mine, float(mean[best]))


def write(
    folder: Path, race: Race, chosen: Mapping[str, Any], searched: list[dict[str, Any]], results: list[Result]
) -> None:
    """All numbers, the table and the figure."""
    rows = [
        {"entry": r.entry, "seed": r.seed, "reward": r.reward.tolist(), "calls by kind": dict(r.calls), "note": r.note}
        | {axis: values.tolist() for axis, values in r.spent.items()}
        for r in results
    ]
    about = {"hardware": hardware(), "versions": versions()}
    everything = {"race": race.model_dump(mode="json"), "chosen": chosen, "search": searched, "runs": rows, **about}
    (folder / "race.json").write_text(json.dumps(everything, indent=1))
    (folder / "race.md").write_text(table(race, chosen, searched, results, about))
    figure(race, results, folder / "race.png")


def table(
    race: Race,
    chosen: Mapping[str, Any],
    searched: list[dict[str, Any]],
    results: list[Result],
    about: Mapping[str, Any],
) -> str:
    entries = {e: [r for r in results if r.entry == e] for e in race.entries if any(r.entry == e for r in results)}
    budget = getattr(race.budget, race.budget.unit)
    hard = about["hardware"]
    lines = [
        f"# Race `{race.name}`",
        "",
        f"Recipe `{race.recipe}`, {budget:,} {race.budget.unit} a run, seeds {', '.join(map(str, race.seeds))}; "
        f"{hard['cpu']}, {hard['cores']} cores, {hard['threads']} threads, torch {about['versions']['torch']}. "
        "Every number is from `race.json` in the same folder.",
        "",
        "| entry | chosen | start | last | best | area | calls per picture: rollout, old, reference, update | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry, rows in entries.items():
        _, mean, spread = mean_curve(rows, "calls")
        total = sum(sum(r.calls.values()) for r in rows)
        pictures = sum(pictures_of(race, entry) * r.spent["step"][-1] for r in rows)
        kinds = ", ".join(
            f"{sum(r.calls[k] for r in rows) / pictures:.1f}" for k in ("rollout", "old", "reference", "update")
        )
        seconds = np.mean([r.spent["seconds"][-1] for r in rows])
        picked = ", ".join(f"{k}={v}" for k, v in chosen[entry].items()) or "—"
        area = np.mean([score_of(r) for r in rows])
        lines.append(
            f"| {entry} | {picked} | {mean[0]:.3f} | {mean[-1]:.3f} ± {spread[-1]:.3f} | {mean.max():.3f} | {area:.3f} | "
            f"{total / pictures:.1f}: {kinds} | {seconds:.0f} |"
        )
    lines += ["", "± is the standard deviation over seeds; area the mean of all evaluations after the first.", ""]
    if race.target is not None:
        lines += [f"Spent when {race.target:g} was first reached, by seed (∞: not within the budget):", ""]
        lines += ["| entry | network calls | seconds |", "|---|---|---|"]
        for entry, rows in entries.items():
            cells = [
                ", ".join(number(reached(r.reward, r.spent[axis], race.target)) for r in rows)
                for axis in ("calls", "seconds")
            ]
            lines.append(f"| {entry} | {cells[0]} | {cells[1]} |")
        lines.append("")
    first = next(iter(entries))
    others = [e for e in entries if e != first]
    if others:
        lines += [
            f"What `{first}` had spent when its mean curve reached the best of another's, and that other's spending:",
            "",
        ]
        lines += [
            "| other | its best | its calls | ours | ratio | its seconds | ours | ratio |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for other in others:
            cells = []
            for axis in ("calls", "seconds"):
                theirs, ours = against(entries[first], entries[other], axis)
                cells += [number(theirs), number(ours), f"{theirs / ours:.2f}" if 0 < ours < float("inf") else "—"]
            best = mean_curve(entries[other], "calls")[1].max()
            lines.append(f"| {other} | {best:.3f} | " + " | ".join(cells) + " |")
        lines.append("")
    notes = [f"* {r.entry}, seed {r.seed}: {r.note}" for r in results if r.note]
    if notes:
        lines += ["Runs that broke off:", "", *notes, ""]
    if searched:
        lines += [
            f"Search, seed {race.search_seed}, by the mean reward over the run:",
            "",
            "| entry | tried | mean | last |",
            "|---|---|---|---|",
        ]
        for row in searched:
            tried = ", ".join(f"{k}={v}" for k, v in row.items() if k not in ("entry", "mean", "last", "note"))
            lines.append(
                f"| {row['entry']} | {tried} | {row['mean']:.3f} | {row['last']:.3f}{' (broke off)' if row['note'] else ''} |"
            )
        lines.append("")
    return "\n".join(lines)


def pictures_of(race: Race, entry: str) -> int:
    """Pictures of one training step."""
    return settings_of(race, entry, seed=race.seeds[0]).images_per_step


def number(value: float) -> str:
    return "∞" if value == float("inf") else f"{value:,.0f}"


def figure(race: Race, results: Sequence[Result], path: Path) -> None:
    """Mean and spread over seeds against steps, network calls and seconds."""
    with plain_style():
        from matplotlib.figure import Figure

        canvas = Figure(figsize=(13, 4.2), dpi=140, layout="constrained")
        panels = canvas.subplots(1, len(AXES), sharey=True)
        for panel, (axis, label) in zip(panels, AXES.items(), strict=True):
            for i, entry in enumerate(race.entries):
                rows = [r for r in results if r.entry == entry]
                if not rows:
                    continue
                colour = COLOURS[i % len(COLOURS)]
                spent, mean, spread = mean_curve(rows, axis)
                panel.plot(spent, mean, color=colour, label=entry, linewidth=2 if i == 0 else 1.3)
                panel.fill_between(spent, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)
            panel.set_xlabel(label, color=ON_WHITE["#020202"])
            if race.target is not None:
                panel.axhline(race.target, color=ON_WHITE["#020202"], linewidth=0.8, linestyle=":")
        panels[0].set_ylabel("held-out reward")
        panels[0].legend(frameon=False, fontsize=8)
        canvas.savefig(path, facecolor="white")
