"""An objective of one's own: imitate the pictures that are better than their group, ignore the others.

vgrpo train tiny objective='{name: "examples/best_of_group.py:BestOfGroup"}' update.per_rollout=1
"""

import torch

from vgrpo.losses import matching_error
from vgrpo.objectives.pairs import PairObjective, each_pair, predict_pair
from vgrpo.types import Pairs, Policy, Stats


class BestOfGroup(PairObjective):
    """Pretraining loss of finished samples, weighted by max(Â, 0)."""

    name: str = "best_of_group"

    def backward(self, policy: Policy, batch: Pairs, *, first: bool, joint: bool, weight: float) -> Stats:
        weights, errors = batch.advantages.clamp(min=0), []
        for x0, eps, t, cond in each_pair(batch):
            _, prediction = predict_pair(policy, x0, eps, t, cond)
            error = matching_error(prediction, policy.path.target(x0, eps, t))
            (weight / len(batch.t) * (weights * error).sum()).backward()
            errors.append(error.detach())
        means = {"error": torch.stack(errors).mean(0)}
        return Stats(log_ratio=None, clipped=torch.zeros_like(weights), means=means)
