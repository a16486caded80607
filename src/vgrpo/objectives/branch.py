"""BranchGRPO (arXiv 2509.06040): the rollouts of a prompt are a tree, whose common trunk is walked once.

All members start from one noise. Every step is noisy; at the steps in `splits` each state gets `branches` successors with
noise of their own, elsewhere one. The reward of an edge is the mean over the leaves below it, its advantage is relative to
the edges of the same depth: so an early step is credited with what all its descendants became.

Differences from the paper and its code: leaf rewards are averaged evenly, without path probabilities; pruning leaves items
out of the gradient alone, by leaf ("width") or by depth; siblings call the network each for themselves when they are trained;
the noise at a split is that of any step, where the authors' script multiplies it by four.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from vgrpo.objectives.policy_gradient import PolicyGradient
from vgrpo.seeds import generator
from vgrpo.types import Plan, Scale, Walk


class BranchGRPO(PolicyGradient):
    """Settings of the tree; group_size must be branches to the power of the number of splits."""

    name: Literal["branch_grpo"] = "branch_grpo"
    noise: Literal["flow", "dance", "cps", "ddim"] = "dance"
    level: Annotated[float, Field(gt=0, le=1)] = 0.3
    clip: Annotated[float, Field(gt=0, lt=1)] | None = 1e-3
    shared_noise: bool = True
    splits: tuple[Annotated[int, Field(ge=0)], ...] = (0, 3, 6, 9)
    """Steps at which each state branches, rising."""
    branches: Annotated[int, Field(ge=2)] = 2
    keep_leaves: Annotated[int, Field(ge=2)] | None = None
    """Width pruning: train only on edges that lead to one of the best or worst leaves, half of this number each; of an odd
    number one more of the worst."""
    keep_depths: Annotated[int, Field(ge=1)] | None = None
    """Depth pruning: train on so many of the depths, drawn anew in each step of training."""

    def problems(self, *, steps: int, updates: int, group_size: int) -> list[str]:
        out = super().problems(steps=steps, updates=updates, group_size=group_size)
        if self.window or self.flash or self.fraction != 1:
            out.append("objective.window, flash and fraction do not apply to a tree; use keep_depths")
        if list(self.splits) != sorted(set(self.splits)) or not self.splits:
            out.append(f"objective.splits={list(self.splits)} must be different steps, rising")
        elif self.splits[-1] > steps - 2:
            out.append(
                f"objective.splits={list(self.splits)}: the last noisy step of rollout.steps={steps} is {steps - 2}"
            )
        if self.branches ** len(self.splits) != group_size:
            out.append(
                f"rollout.group_size={group_size} must be the tree's leaves, "
                f"{self.branches}^{len(self.splits)} = {self.branches ** len(self.splits)}"
            )
        if self.keep_depths and self.keep_depths > steps - 1:
            out.append(f"objective.keep_depths={self.keep_depths} are more than the {steps - 1} noisy steps")
        if self.keep_leaves and self.keep_leaves > group_size:
            out.append(f"objective.keep_leaves={self.keep_leaves} are more than rollout.group_size={group_size}")
        return out

    def plan(self, schedule: Tensor, *, group_size: int, seed: int, step: int) -> Plan:
        """The edges of the tree, depth by depth."""
        nodes = [self.branches ** sum(s < k for s in self.splits) for k in range(len(schedule))]
        depths = torch.arange(len(schedule) - 1)
        if self.keep_depths:
            order = torch.randperm(len(depths), generator=generator(seed, step, "depths"))
            depths = order[: self.keep_depths].sort().values
        depth, share = [], []
        for k in depths.tolist():
            edges = nodes[k + 1]
            depth.append(torch.full((edges,), k))
            leaves = group_size // edges
            share.append(torch.eye(edges, dtype=torch.float64).repeat_interleave(leaves, 1) / leaves)
        times = torch.cat([schedule, schedule.new_zeros(1)])
        return Plan(times=times, depth=torch.cat(depth), share=torch.cat(share), nodes=nodes)

    def advantages(self, rewards: Tensor, valid: Tensor, *, scale: Scale, walk: Walk | None) -> Tensor:
        assert walk is not None
        out = super().advantages(rewards, valid, scale=scale, walk=walk)
        if self.keep_leaves:
            order = torch.where(valid, rewards.double(), rewards.double().mean(1, keepdim=True)).argsort(1)
            half = self.keep_leaves // 2
            extreme = torch.zeros_like(rewards, dtype=torch.float64)
            extreme.scatter_(
                1, torch.cat([order[:, : self.keep_leaves - half], order[:, order.shape[1] - half :]], 1), 1.0
            )
            out = torch.where(extreme @ walk.plan.share.T > 0, out, 0.0)
        return out
