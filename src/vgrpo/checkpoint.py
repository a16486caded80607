"""Checkpoints: complete or absent, tensors in safetensors and everything else in JSON, hashes in a manifest.

Random state is not saved, for there is none: every draw is seeded by what it is for (`vgrpo.seeds`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vgrpo.errors import RunError, UserError

PARTS = ("weights", "averaged", "old", "moments")
NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True, kw_only=True)
class State:
    """What a resume needs."""

    step: int
    """Steps done."""
    updates: int
    """Optimizer steps done."""
    weights: Mapping[str, Tensor]
    """The trained weights by name."""
    averaged: Mapping[str, Tensor]
    """Their moving average; empty when there is none."""
    old: Mapping[str, Tensor]
    """θ_old where it follows slowly; empty otherwise."""
    moments: Mapping[str, Tensor]
    """The optimizer's state, `<weight>|<entry>`."""
    facts: Mapping[str, Any]
    """What must be the same on resume, such as the base model's path and the adapter's rank."""


def save(folder: Path, state: State, *, keep: int) -> Path:
    """Writes `folder/step_NNNNN` by way of a temporary folder, then deletes all but the newest `keep`.

    Raises:
        RunError: the disk refused; earlier checkpoints are untouched.
    """
    final = folder / f"step_{state.step:05d}"
    partial = folder / f".{final.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name in PARTS:
            tensors = {k: v.detach().cpu().contiguous() for k, v in getattr(state, name).items()}
            save_file(tensors, partial / f"{name}.safetensors")
        facts = {"step": state.step, "updates": state.updates, "facts": dict(state.facts)}
        (partial / "state.json").write_text(json.dumps(facts, indent=2))
        hashes = {f.name: digest(f) for f in sorted(partial.iterdir())}
        (partial / "manifest.json").write_text(json.dumps(hashes, indent=2))
        for path in (*partial.iterdir(), partial):
            flush(path)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise RunError(f"could not write the checkpoint {final}: {error}; earlier checkpoints are untouched") from error
    for old in complete(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, lowest step first."""
    found = [
        (int(m[1]), p)
        for p in folder.glob("step_*")
        if (m := NAME.fullmatch(p.name)) and (p / "manifest.json").is_file()
    ]
    return [p for _, p in sorted(found)]


def load(folder: Path) -> State:
    """The newest complete checkpoint in `folder`.

    Raises:
        UserError: there is none, or a file of it is not the one that was written.
    """
    found = complete(folder)
    if not found:
        raise UserError(f"nothing to resume: {folder} holds no complete checkpoint")
    newest = found[-1]
    for name, expected in json.loads((newest / "manifest.json").read_text()).items():
        if not (newest / name).is_file() or digest(newest / name) != expected:
            raise UserError(
                f"the checkpoint {newest} is damaged ({name}); delete its folder to resume from the one before"
            )
    facts = json.loads((newest / "state.json").read_text())
    tensors = {name: load_file(newest / f"{name}.safetensors") for name in PARTS}
    return State(step=facts["step"], updates=facts["updates"], facts=facts["facts"], **tensors)


def moments_of(optimizer: torch.optim.Optimizer, weights: Mapping[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """The optimizer's state by the names of the weights."""
    out = {}
    for name, parameter in weights.items():
        for entry, value in optimizer.state.get(parameter, {}).items():
            out[f"{name}|{entry}"] = torch.as_tensor(value)
    return out


def restore_moments(
    optimizer: torch.optim.Optimizer, weights: Mapping[str, torch.nn.Parameter], moments: Mapping[str, Tensor]
) -> None:
    """Puts back what `moments_of` gave."""
    for key, value in moments.items():
        name, entry = key.rsplit("|", 1)
        parameter = weights[name]
        optimizer.state[parameter][entry] = value if entry == "step" else value.to(parameter.device)


def digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Waits until the disk has it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
