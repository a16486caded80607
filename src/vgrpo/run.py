"""The run folder: the whole truth about a run, and the object that `train` returns."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from vgrpo.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from vgrpo.config import Config

LIBRARIES = ("vgrpo", "torch", "diffusers", "transformers", "peft", "accelerate", "numpy")


@dataclass(frozen=True)
class Run:
    """A run folder. `Run(Path("runs/tiny"))` reads one; nothing is cached, so it is always what the disk says."""

    folder: Path

    @property
    def adapter(self) -> Path:
        """The exported LoRA, for `pipe.load_lora_weights`; the whole pipeline after full fine-tuning."""
        return self.folder / "adapter"

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def settings(self) -> dict[str, Any]:
        """The resolved settings, as `vgrpo.config.parse` takes them."""
        path = self.folder / "config.yaml"
        if not path.is_file():
            raise UserError(f"{self.folder} is no run folder: it has no config.yaml")
        return yaml.safe_load(path.read_text())

    def metrics(self) -> list[dict[str, Any]]:
        """One dict per step, in order."""
        return read_rows(self.folder / "metrics.jsonl")

    def evaluations(self) -> list[dict[str, Any]]:
        """One dict per evaluation: step, weights ("base" or "tuned"), scores, by_tag."""
        return read_rows(self.folder / "evaluations.jsonl")

    def log(self, row: Mapping[str, Any], file: str = "metrics.jsonl") -> None:
        """Appends one row."""
        with (self.folder / file).open("a") as f:
            f.write(json.dumps({k: rounded(v) for k, v in row.items()}) + "\n")

    def forget_after(self, step: int) -> None:
        """Drops rows of later steps, which a resume will make again."""
        for file in ("metrics.jsonl", "evaluations.jsonl"):
            rows = [r for r in read_rows(self.folder / file) if r["step"] <= step]
            replace_text(self.folder / file, "".join(json.dumps(r) + "\n" for r in rows))

    def describe(self, **facts: Any) -> None:
        """Adds facts to `run.json`."""
        path = self.folder / "run.json"
        known = json.loads(path.read_text()) if path.is_file() else {}
        replace_text(path, json.dumps(known | facts, indent=2))


def create(config: Config) -> Run:
    """Makes the run folder, with a number appended when its name is taken, and writes settings and surroundings into it.

    Raises:
        UserError: the folder cannot be written.
    """
    base = Path(config.run.folder)
    try:
        base.mkdir(parents=True, exist_ok=True)
        for number in range(1, 10_000):
            folder = base / (config.run.name if number == 1 else f"{config.run.name}-{number}")
            try:
                folder.mkdir()
                break
            except FileExistsError:
                continue
        run = Run(folder)
        (folder / "config.yaml").write_text(yaml.safe_dump(config.dump(), sort_keys=False, allow_unicode=True))
    except OSError as error:
        raise UserError(
            f"run.folder: cannot write {base}: {error.strerror}; choose another with run.folder=..."
        ) from error
    run.describe(
        name=folder.name,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        hardware=hardware(),
    )
    return run


def versions() -> dict[str, str]:
    out = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            out[library] = version(library)
        except PackageNotFoundError:
            out[library] = "not installed as a package"
    return out


def hardware() -> dict[str, Any]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "gpus": gpus,
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def save_grid(images: Tensor, path: Path, columns: int) -> None:
    """Writes pictures uint8 [N, 3, H, W] as one PNG, row by row."""
    from PIL import Image

    tiles = images.unflatten(0, (-1, columns)).permute(0, 3, 1, 4, 2)  # row, y, column, x, channel
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(tiles.flatten(2, 3).flatten(0, 1).numpy()).save(path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.is_file() else []


def replace_text(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old or the new one, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def rounded(value: Any) -> Any:
    """Seven digits are more than any metric has."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, Mapping):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [rounded(v) for v in value]
    return value
