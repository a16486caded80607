"""Trains a recipe with several seeds, one after another, and writes what each gained on held-out prompts.

    python bench/seeds.py tiny --seeds 0 1 2            # writes bench/results/tiny.{json,md}

Each run is its own process, as `vgrpo train` starts it. Reported per seed: the main score of the base and of the tuned
model on several pictures of each held-out prompt with seeds of their own (`vgrpo eval`), their paired difference with its
95 % bootstrap interval over captions, the best and the last evaluation during the run, wall time of the whole command and
peak memory. A file that exists is replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vgrpo.config import load_recipe, parse_overrides
from vgrpo.evaluation import scores_of
from vgrpo.inference import compare, open_run
from vgrpo.run import Run, hardware, versions
from vgrpo.statistics import by_tag

RESULTS = Path(__file__).parent / "results"
HELD_OUT: dict[str, Any] = {"prompts_file": None, "limit": None, "images": 4}


def train(recipe: str, seed: int, overrides: list[str], folder: Path) -> dict[str, Any]:
    name = f"{recipe}-seed{seed}"
    command = [
        sys.executable,
        "-m",
        "vgrpo",
        "train",
        recipe,
        *overrides,
        f"run.seed={seed}",
        f"run.name={name}",
        f"run.folder={folder}",
    ]
    start = time.time()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    newest = max(folder.glob(f"{name}*"), key=lambda p: p.stat().st_mtime)
    return {"seed": seed, "wall_seconds": time.time() - start, "peak_mib": peak_mib(usage), **gains(Run(newest))}


def peak_mib(usage: resource.struct_rusage) -> float:
    return usage.ru_maxrss / (1024 if sys.platform != "darwin" else 1024**2)


def gains(run: Run) -> dict[str, Any]:
    """Base against tuned, for every evaluated reward, and what the run logged."""
    evaluations, metrics = run.evaluations(), run.metrics()
    main = run.settings()["evaluation"]["main"] or next(iter(evaluations[0]["scores"]))
    compared = {row["reward"]: row for row in compare(open_run(run.folder), **HELD_OUT, out=run.folder / "eval")}
    rows = {w: json.loads((run.folder / "eval" / w / "scores.json").read_text())["rows"] for w in ("base", "tuned")}
    tags = {w: by_tag(scores_of(r, main), [x["tag"] for x in r]) for w, r in rows.items()}
    last = evaluations[-1]
    return {
        "main": main,
        "base": {name: row["base"] for name, row in compared.items()},
        "tuned": {name: row["tuned"] for name, row in compared.items()},
        "gain": compared[main]["gain"],
        "last": last["scores"][main],
        "best": max(e["scores"][main] for e in evaluations),
        "curve": [[e["step"], e["scores"][main]] for e in evaluations],
        "by_tag": {w: {tag: list(s) for tag, s in found.items()} for w, found in tags.items()},
        "guards": {"base": evaluations[0]["guards"], "tuned": last["guards"]},
        "training_seconds": sum(m["seconds"] for m in metrics),
        "images": sum(m["images"] for m in metrics),
        "network_calls": sum(m["network_calls"] for m in metrics),
        "worst_first_ratio": max(m.get("ratio/first", 0.0) for m in metrics),
    }


def table(recipe: str, rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    main = rows[0]["main"]
    lines = [
        f"# `{recipe}`, {len(rows)} seeds",
        "",
        f"Command: `{about['command']}`. Machine: {about['hardware']['cpu']}, {about['hardware']['cores']} cores. "
        f"torch {about['versions']['torch']}, diffusers {about['versions']['diffusers']}. Made {about['date']}.",
        "",
        f"| seed | {main}: base | tuned | gain (paired 95 %) | in the run: best | last | wall s | pictures | peak MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        g, wall = r["gain"], r["wall_seconds"]
        lines.append(
            f"| {r['seed']} | {r['base'][main]:.3f} | {r['tuned'][main]:.3f} | "
            f"{g['mean']:+.3f} ({g['low']:+.3f} … {g['high']:+.3f}) | {r['best']:.3f} | {r['last']:.3f} | {wall:.0f} | "
            f"{r['images']} | {r['peak_mib']:.0f} |"
        )
    mean = sum(r["tuned"][main] for r in rows) / len(rows)
    spread = (sum((r["tuned"][main] - mean) ** 2 for r in rows) / max(len(rows) - 1, 1)) ** 0.5
    lines += [
        "",
        f"Base and tuned: {HELD_OUT['images']} pictures of each held-out prompt; captions are resampled as a whole.",
    ]
    lines += [f"Tuned {main} over seeds: mean {mean:.3f}, standard deviation {spread:.3f}.", ""]
    tags = list(rows[0]["by_tag"]["base"] or {})
    if tags:
        lines += [f"| {main} by category, mean of seeds | base | tuned |", "|---|---|---|"]
        for tag in tags:
            base, tuned = (sum(r["by_tag"][w][tag][0] for r in rows) / len(rows) for w in ("base", "tuned"))
            lines.append(f"| {tag} | {base:.3f} | {tuned:.3f} |")
    lines += ["", "| guard figure, mean of seeds | base | tuned |", "|---|---|---|"]
    for name in rows[0]["guards"]["base"]:
        base, tuned = (sum(r["guards"][w][name] for r in rows) / len(rows) for w in ("base", "tuned"))
        lines.append(f"| {name} | {base:.4f} | {tuned:.4f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument("--name", help="of the result files; the recipe's when absent")
    parser.add_argument("overrides", nargs="*", help="key.path=value")
    args = parser.parse_intermixed_args()
    load_recipe(args.recipe, **parse_overrides(args.overrides))
    rows = [train(args.recipe, seed, args.overrides, args.folder) for seed in args.seeds]
    command = " ".join(["python bench/seeds.py", args.recipe, "--seeds", *map(str, args.seeds), *args.overrides])
    about = {"command": command, "hardware": hardware(), "versions": versions(), "date": time.strftime("%Y-%m-%d")}
    RESULTS.mkdir(exist_ok=True)
    name = args.name or args.recipe
    (RESULTS / f"{name}.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1))
    (RESULTS / f"{name}.md").write_text(table(args.recipe, rows, about))
    print((RESULTS / f"{name}.md").read_text())


if __name__ == "__main__":
    main()
