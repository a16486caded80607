"""One small real pipeline for all tests, and settings that run on it in a second or two."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Two threads sum in another order; equalities below are exact."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A StableDiffusion3Pipeline folder with random weights and schedule shift 3."""
    from vgrpo.testing import build_mini

    return build_mini("sd3", tmp_path_factory.mktemp("models") / "sd3")


@pytest.fixture
def settings(mini: Path, tmp_path: Path) -> dict[str, Any]:
    """Settings of a run on the mini pipeline, as `vgrpo.config.parse` takes them."""
    (tmp_path / "prompts.txt").write_text("a red fox\na blue house\ntwo green cups\nan old tree\n")
    return {
        "model": {"path": str(mini), "height": 32, "width": 32, "max_sequence_length": 8},
        "adapter": {"rank": 4, "alpha": 16},
        "prompts": {"train": str(tmp_path / "prompts.txt"), "test": str(tmp_path / "prompts.txt"), "per_step": 4},
        "rollout": {"group_size": 4, "steps": 4, "micro_batch": 8},
        "rewards": {"brightness": {}},
        "objective": {"draws": 2},
        "update": {"micro_batch": 8},
        "optimizer": {"lr": 0.01},
        "evaluation": {"every": 100, "prompts": 4, "pictures": 2},
        "run": {"name": "test", "folder": str(tmp_path / "runs"), "steps": 2, "save_every": 100},
    }
