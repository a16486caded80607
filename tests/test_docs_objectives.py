"""The pages of `docs/objectives` against the code: names, defaults, links, commands and metrics.

The pages are written by hand, so each is an answer that the code did not produce.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from vgrpo.config import load_recipe, parse, parse_overrides
from vgrpo.lookup import find_object
from vgrpo.objectives import OBJECTIVES
from vgrpo.report import DIAGNOSTICS, METHODS, TIMES
from vgrpo.testing import build_mini
from vgrpo.training import train

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "objectives"
PAGES = sorted(FOLDER.glob("*.md"))
SECTIONS = [
    "What it is",
    "What it needs from a rollout",
    "Formula",
    "Defaults",
    "What differs from the paper and its code",
    "Metrics",
    "When to choose it, and which control acts when",
    "Recipe",
    "Its curve",
]
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
SMALL: dict[str, dict[str, Any]] = {
    "nft": {"draws": 3},
    "awm": {"draws": 3},
    "mix_grpo": {"window": 2},
    "branch_grpo": {"splits": (0, 2)},
}
"""What makes an objective run on 4 members and 4 steps."""


def page(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def cells(text: str) -> list[list[str]]:
    """The rows of the first Markdown table in `text`, its head first; `\\|` inside a cell is no border."""
    lines = text[text.index("\n|") :].strip().splitlines()
    rows: list[list[str]] = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([c.strip() for c in re.split(r"(?<!\\)\|", line.strip().strip("|"))])
    assert set("".join(rows.pop(1))) <= set("-:"), "the second line of a table is its rule"
    return rows


def value(cell: str) -> Any:
    """What a cell such as `1e-2`, `null` or `group` stands for."""
    assert cell.startswith("`") and cell.endswith("`"), f"{cell} must stand in backticks"
    try:
        return json.loads(cell[1:-1])
    except json.JSONDecodeError:
        return cell[1:-1]


def anchors(text: str) -> set[str]:
    """The names under which GitHub links to headings."""
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


def metrics_named(text: str) -> set[str]:
    """What stands in backticks in the first cells of tables of metrics."""
    rows = re.findall(r"^\| (`[^|]*`) \|", text, re.M)
    return {name for row in rows for name in re.findall(r"`([^`]*)`", row)}


def test_every_objective_has_a_page_and_every_page_an_objective() -> None:
    assert {p.stem for p in PAGES} == {*OBJECTIVES, "index"}
    listed = re.findall(r"^\| \[[^|]*\]\((\w+)\.md\)[^|]* \| `(\w+)` \|", page("index"), re.M)
    assert listed == [(name, name) for name in OBJECTIVES]


def test_the_index_compares_all() -> None:
    rows = cells(section(page("index"), "Side by side"))
    assert [value(row[0]) for row in rows[1:]] == list(OBJECTIVES)
    calls = page("index").split("### Network calls per picture", 1)[1]
    assert {n for row in cells(calls)[1:] for n in re.findall(r"`(\w+)`", row[0])} >= set(OBJECTIVES)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_pages_have_the_same_sections(name: str) -> None:
    text = page(name)
    assert re.findall(r"^## (.*)$", text, re.M) == SECTIONS
    assert f"`objective.name: {name}`" in text and METHODS[name][1] in text
    assert section(text, "Its curve").strip() == "The curve comes from `vgrpo race` and is not measured yet."


@pytest.mark.parametrize("name", OBJECTIVES)
def test_defaults_are_those_of_the_code(name: str) -> None:
    head, *rows = cells(section(page(name), "Defaults"))
    assert head == ["setting", "default", "source"]
    stated = {value(setting): value(default) for setting, default, _ in rows}
    model = find_object(OBJECTIVES[name])
    settings = {k: v for k, v in model().model_dump(mode="json").items() if k != "name"}
    assert stated == settings and list(stated) == list(settings)
    assert {k: type(v) for k, v in stated.items()} == {k: type(v) for k, v in settings.items()}, "true is not 1"
    for setting, _, source in rows:
        assert source.startswith("ours") or "](https://" in source, f"{setting} has no source"


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_links_resolve(path: Path) -> None:
    """Links to files and headings exist; a link from a name in code to a file leads to where that name is defined."""
    text = path.read_text(encoding="utf-8")
    local = [(words, target) for words, target in LINK.findall(text) if not target.startswith("https://")]
    assert local
    for words, target in local:
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.is_file() and there.is_relative_to(ROOT), f"{path.name}: {target} leads nowhere"
        if anchor:
            assert anchor in anchors(there.read_text(encoding="utf-8")), f"{path.name}: no heading {target}"
        if there.suffix == ".py" and not words.strip("`").endswith(".py"):
            source = there.read_text(encoding="utf-8")
            for part in words.strip("`").removeprefix("training.").split("."):
                assert re.search(rf"^\s*(def|class) {part}\b|^{part} = ", source, re.M), f"{part} is not in {file}"


@pytest.mark.parametrize("name", OBJECTIVES)
def test_commands_are_valid(name: str) -> None:
    text = section(page(name), "Recipe")
    block = text.split("```")[1].replace("\\\n", " ")
    commands = [shlex.split(line) for line in block.strip().splitlines()]
    assert commands
    for command, action, recipe, *overrides in commands:
        assert (command, action) == ("vgrpo", "train")
        assert load_recipe(recipe, **parse_overrides(overrides)).objective.name == name


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_logged_metric_is_explained(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    own = {"name": name, **SMALL.get(name, {})}
    model = settings["model"]
    if name == "ddpo":
        model = {**model, "path": str(build_mini("sd15", tmp_path / "sd15"))}
    run = {**settings["run"], "steps": 1, "ema": 0.9}
    folder = train(parse(settings | {"objective": own, "model": model, "run": run}))
    explained = metrics_named(section(page(name), "Metrics")) | metrics_named(
        section(page("index"), "Metrics that all log")
    )
    logged = {re.sub(r"^reward/brightness/", "reward/NAME/", key) for key in folder.metrics()[-1]}
    if name == "nft":
        assert not any(key.startswith("ratio/") for key in logged)
    assert "updates" in logged and logged <= explained, sorted(logged - explained)


def test_metrics_of_the_report_are_explained() -> None:
    every = set().union(*(metrics_named(page(p.stem)) for p in PAGES))
    assert every >= {*DIAGNOSTICS, *(f"time/{part}" for part in TIMES)}
