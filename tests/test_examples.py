"""The examples do what their docstrings say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vgrpo import checkpoint
from vgrpo.config import parse
from vgrpo.errors import UserError
from vgrpo.training import train

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_an_objective_of_ones_own(settings: dict[str, Any]) -> None:
    own = {"name": f"{EXAMPLES / 'best_of_group.py'}:BestOfGroup", "draws": 2}
    run = train(parse(settings | {"objective": own}))
    row = run.metrics()[-1]
    assert row["weight_change"] > 0 and row["error"] > 0 and "ratio/mean" not in row
    # 4 prompts of 4 pictures; only pictures better than their group's mean have a gradient, but all with A ≠ 0 are called
    assert (row["calls/rollout"], row["calls/old"], row["calls/update"]) == (64, 0, 32)
    assert run.settings()["objective"]["name"] == own["name"]  # so that a resume finds it again
    weights = checkpoint.load(run.checkpoints).weights
    assert max(w.abs().max().item() for n, w in weights.items() if "lora_B" in n) > 0
    with pytest.raises(UserError, match="objective.drawss: no such setting, did you mean 'draws'"):
        parse(settings | {"objective": own | {"drawss": 2}})
    with pytest.raises(UserError, match="has no 'BestOfGrou', did you mean 'BestOfGroup'"):
        parse(settings | {"objective": {"name": own["name"][:-1]}})
