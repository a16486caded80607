"""Online reinforcement learning for image and video generators: V-GRPO (arXiv 2604.23380) and any reward.

import vgrpo

config = vgrpo.load_recipe("tiny", **{"run.steps": 20})
run = vgrpo.train(config, rewards=[my_reward])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vgrpo.config import Config as Config
    from vgrpo.config import load_recipe as load_recipe
    from vgrpo.run import Run as Run
    from vgrpo.training import train as train
    from vgrpo.types import Prompt as Prompt

__version__ = "0.1.0"
_WHERE = {
    "Config": "vgrpo.config",
    "load_recipe": "vgrpo.config",
    "train": "vgrpo.training",
    "Run": "vgrpo.run",
    "Prompt": "vgrpo.types",
    "UserError": "vgrpo.errors",
    "RunError": "vgrpo.errors",
}
__all__ = ["Config", "Prompt", "Run", "RunError", "UserError", "load_recipe", "train"]


def __getattr__(name: str) -> Any:
    """Imports on first use, so that `vgrpo --help` does not wait for torch."""
    if name not in _WHERE:
        raise AttributeError(f"module 'vgrpo' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
