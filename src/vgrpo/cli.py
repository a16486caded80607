"""The command line. The only file that reads arguments and the environment."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from vgrpo import __version__
from vgrpo.errors import RunError, UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Align an image or video generator with your reward, by V-GRPO.",
)
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings on top of the recipe's.")
]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def train(
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name or YAML file.")] = None,
    overrides: Overrides = None,
    resume: Annotated[Path | None, typer.Option(help="A run folder to go on with.")] = None,
) -> None:
    """Train a policy. Example: [bold]vgrpo train tiny run.steps=10 objective.draws=8[/bold]"""
    from vgrpo.config import load_recipe, parse, parse_overrides, put
    from vgrpo.training import train as train_policy

    if resume is None and recipe is None:
        raise UserError("which recipe? `vgrpo recipes` lists them; or go on with a run: vgrpo train --resume runs/NAME")
    if resume is None:
        config = load_recipe(recipe or "", **parse_overrides(overrides or []))
    else:
        from vgrpo.run import Run

        settings = Run(resume).settings()
        changes = parse_overrides([*([recipe] if recipe else []), *(overrides or [])])
        for key, value in changes.items():
            put(settings, key, value)
        config = parse(settings)
    train_policy(config, resume=resume, processes=int(os.environ.get("WORLD_SIZE", "1")))


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    prompt: Annotated[list[str], typer.Option(help="What to draw; give it again for more prompts.")],
    images: Annotated[int, typer.Option(min=1, help="Pictures per prompt.")] = 4,
    seed: Annotated[int, typer.Option(help="The same seed gives the same pictures.")] = 0,
    base: Annotated[
        bool, typer.Option("--base", help="Put the base model's pictures beside, on the same seeds.")
    ] = False,
    out: Annotated[Path, typer.Option(help="The PNG to write.")] = Path("samples.png"),
) -> None:
    """Draw pictures with a trained policy. Example: [bold]vgrpo sample runs/tiny --prompt "two red stars" --base[/bold]"""
    import torch

    from vgrpo.inference import open_run
    from vgrpo.rollout import generate
    from vgrpo.run import save_grid
    from vgrpo.types import Prompt

    trained = open_run(run)
    prompts = [Prompt(text=text, id=str(i)) for i, text in enumerate(prompt)]
    rows = []
    for weights in ([None] if base else []) + [trained.weights]:
        with trained.policy.using(weights), trained.policy.evaluating():
            rows.append(
                generate(
                    trained.policy, prompts, range(len(prompts)), group_size=images, micro_batch=64, seed=seed, step=0
                ).images
            )
    side_by_side = torch.cat([r.unflatten(0, (len(prompts), images)) for r in rows], 1).flatten(0, 1)
    save_grid(side_by_side, out, columns=images * len(rows))
    typer.echo(
        f"{out}: one row per prompt" + (f", {images} by the base model, then {images} by the tuned one" if base else "")
    )


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    prompts: Annotated[str | None, typer.Option(help="A prompt file; the run's held-out prompts when absent.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="How many prompts, spread over the file.")] = None,
    images: Annotated[int, typer.Option(min=1, help="Pictures per prompt.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder for scores and pictures; RUN/eval when absent.")] = None,
) -> None:
    """Compare base and tuned model on held-out prompts and fixed seeds. Example: [bold]vgrpo eval runs/tiny --images 4[/bold]"""
    from vgrpo.inference import compare, open_run, table

    trained = open_run(run)
    rows = compare(trained, prompts_file=prompts, limit=limit, images=images, out=out or run / "eval")
    table(rows)


@app.command()
def race(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or YAML file, or the YAML file of a race.")],
    overrides: Overrides = None,
) -> None:
    """Objectives against each other on equal terms.

    Example: [bold]vgrpo race tiny objectives=\\[vgrpo,nft] budget="60000 calls"[/bold]

    The recipe's settings are those of all; objectives, budget, seeds, points, target, search, folder and name are the race's.
    The same command again goes on where it stopped.
    """
    from vgrpo.config import parse_overrides
    from vgrpo.race import hold, load_race

    folder = hold(load_race(recipe, parse_overrides(overrides or [])))
    typer.echo((folder / "race.md").read_text())
    typer.echo(f"figure    {folder / 'race.png'}\nnumbers   {folder / 'race.json'}")


@app.command()
def ablate(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or YAML file, with V-GRPO as its objective.")],
    overrides: Overrides = None,
    repeats: Annotated[int, typer.Option(help="How often the pairs of time and noise are drawn.")] = 8,
    out: Annotated[Path, typer.Option(help="Folder for ablate.json, ablate.md and ablate.png.")] = Path("ablate"),
) -> None:
    """How loud the surrogate is with each technique on and off. Example: [bold]vgrpo ablate tiny --repeats 16[/bold]"""
    from vgrpo.ablate import study
    from vgrpo.config import load_recipe, parse_overrides

    study(load_recipe(recipe, **parse_overrides(overrides or [])), repeats=repeats, folder=out)
    typer.echo((out / "ablate.md").read_text())


@app.command()
def recipes() -> None:
    """List the recipes in the package. Example: [bold]vgrpo recipes[/bold]"""
    from vgrpo.config import recipes as names

    for name in names():
        typer.echo(name)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    figures: Annotated[Path | None, typer.Option(help="Folder for curve.png and before_after.png.")] = None,
) -> None:
    """Write a run's report.html again. Example: [bold]vgrpo report runs/tiny --figures figures[/bold]"""
    from vgrpo.report import before_after_figure, curve_figure, write_report
    from vgrpo.run import Run

    Run(run).settings()
    typer.echo(write_report(run))
    if figures is not None:
        figures.mkdir(parents=True, exist_ok=True)
        typer.echo(curve_figure(run, figures / "curve.png"))
        typer.echo(before_after_figure(run, figures / "before_after.png", rows=2))


def quiet() -> None:
    """Third parties may warn, not chatter: their notes about optional parts hide ours."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def main(arguments: list[str] | None = None) -> Any:
    """Runs a command. A user's mistake is one message and exit code 2, a run that had to stop one message and 1."""
    quiet()
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        return app(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except RunError as error:
        print(f"stopped: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted; go on with: vgrpo train --resume RUN", file=sys.stderr)
        sys.exit(130)
