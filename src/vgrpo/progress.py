"""What a person at a terminal sees of a run; where there is no terminal, one line per step and nothing else."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich import progress as rich_progress
from rich.console import Console


class Progress:
    """A bar for the run and one for the part in hand, with rates and time left.

    `enabled` is False on all processes but one, which then say nothing.
    """

    def __init__(self, total: int, *, enabled: bool = True) -> None:
        self.console = Console(stderr=True, quiet=not enabled, highlight=False, soft_wrap=True)
        self.bars = rich_progress.Progress(
            rich_progress.TextColumn("{task.description:<10}"),
            rich_progress.BarColumn(bar_width=30),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TextColumn("{task.fields[unit]}"),
            rich_progress.TimeElapsedColumn(),
            rich_progress.TextColumn("left"),
            rich_progress.TimeRemainingColumn(elapsed_when_finished=False),
            console=self.console,
            transient=True,
            disable=not (enabled and self.console.is_terminal),
        )
        self.run = self.bars.add_task("steps", total=total, unit="steps")
        self.now = self.bars.add_task("", total=None, unit="pictures")

    def __enter__(self) -> Progress:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def part(self, name: str, pictures: int) -> None:
        """A new part of a step begins, over so many pictures."""
        self.bars.reset(self.now, description=name, total=pictures)

    def advance(self, pictures: int) -> None:
        self.bars.advance(self.now, pictures)

    def show(self, text: str) -> None:
        self.console.print(text, markup=False)

    def line(self, step: int, row: dict[str, float]) -> None:
        """The summary of a finished step."""
        self.bars.update(self.run, completed=step)
        parts = [
            f"{k.split('/')[1]} {v:.3f}"
            for k, v in row.items()
            if k.startswith("reward/") and k.count("/") == 2 and k.endswith("mean")
        ]
        ratio = (
            f", ratio {row['ratio/mean']:.4f}±{row['ratio/std']:.4f}, clipped {row['clip_fraction']:.0%}"
            if "ratio/mean" in row
            else ""
        )
        self.show(
            f"step {step:>4}  reward {row['reward/mean']:.4f} ({', '.join(parts)}){ratio}, "
            f"|grad| {row.get('grad_norm', 0):.3f}, {row['images'] / row['seconds']:.0f} pictures/s"
        )

    def evaluated(self, step: int, row: dict[str, Any]) -> None:
        """The summary of an evaluation."""
        self.show(
            f"held out after step {step}: " + ", ".join(f"{name} {mean:.4f}" for name, mean in row["scores"].items())
        )
