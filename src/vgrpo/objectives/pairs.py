"""What the objectives share that score a finished sample at pairs of time and noise: V-GRPO, FPO, AWM, DiffusionNFT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from vgrpo.advantages import group_advantages
from vgrpo.errors import UserError
from vgrpo.losses import precise
from vgrpo.seeds import generator, noise
from vgrpo.times import TIMES
from vgrpo.types import Cond, Draws, Pairs, Policy, Prepared, Scale, Walk, repeat


class PairObjective(BaseModel):
    """The settings of the pairs, and how they are drawn. The rollout is any ODE solver's; nothing of its way is kept."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    draws: Annotated[int, Field(ge=1)] | None = 4
    """M, pairs of time and noise per sample; null for as many as the schedule has times, with stratified times one at each."""
    times: Literal["stratified", "uniform", "logit_normal"] = "stratified"
    """How the M times are drawn on the schedule."""
    schedule_steps: Annotated[int, Field(ge=1)] | None = None
    """Length of the schedule on which times are drawn; the rollout's own when absent."""
    time_range: tuple[float, float] = (0.0, 1.0)
    """Only times of the schedule in this range are drawn; 0 is data. What is composed is decided at high times, near the
    data an error says how a picture is drawn and little of what."""
    share: Literal["group", "batch", "none"] = "group"
    """Who uses the same pairs: the pictures of one prompt, all pictures of the step, or nobody."""

    shared_noise: ClassVar[bool] = False
    whole_groups: ClassVar[bool] = False
    needs_path: ClassVar[str | None] = None

    def problems(self, *, steps: int, updates: int, group_size: int) -> list[str]:
        if self.times == "stratified" and self.draws and self.draws > (self.schedule_steps or steps):
            return [
                f"objective.draws={self.draws} strata need a schedule of as many steps, rollout.steps={steps}; "
                f"use fewer draws or set objective.schedule_steps"
            ]
        return []

    def inactive(self, *, updates: int) -> list[str]:
        return []

    def anchors(self, *, updates: int) -> Sequence[str]:
        return ()

    def old_decay(self, step: int) -> float | None:
        return None

    @property
    def learns_from_all(self) -> bool:
        return False

    def sample(
        self,
        policy: Policy,
        schedule: Tensor,
        noise: Tensor,
        cond: Cond,
        rows: Sequence[tuple],
        *,
        group_size: int,
        step: int,
    ) -> tuple[Tensor, Walk | None]:
        return policy.sample(noise, cond), None

    def draw(self, schedule: Tensor, slots: Sequence[int], group_size: int, *, seed: int, step: int) -> Draws:
        """The pairs of one step for the prompts in `slots`, on the times `schedule` [K], 0 = data."""
        schedule = self.within(schedule)
        rows = len(slots) * group_size
        sets: list[tuple]
        if self.share == "batch":
            sets, set_of_row = [("batch",)], torch.zeros(rows, dtype=torch.long)
        elif self.share == "group":
            sets, set_of_row = [("group", s) for s in slots], torch.arange(rows) // group_size
        else:
            sets, set_of_row = [("row", s, m) for s in slots for m in range(group_size)], torch.arange(rows)
        identities = [(seed, step, *s) for s in sets]
        draws = self.draws or len(schedule)
        indices = [TIMES[self.times](schedule, draws, generator=generator(*i, "times")) for i in identities]
        return Draws(t=schedule[torch.stack(indices, 1)], set_of_row=set_of_row, identities=identities)

    def within(self, schedule: Tensor) -> Tensor:
        """The times of `schedule` [K] that may be drawn. Raises UserError when they are fewer than the strata."""
        low, high = self.time_range
        kept = schedule[(schedule >= low) & (schedule <= high)]
        if len(kept) < (self.draws or 1 if self.times == "stratified" else 1):
            raise UserError(
                f"objective.time_range={list(self.time_range)} leaves {len(kept)} of the schedule's times "
                f"{[round(t, 3) for t in schedule.tolist()]}, fewer than objective.draws={self.draws}; "
                f"widen it, use fewer draws or set objective.schedule_steps"
            )
        return kept

    def advantages(self, rewards: Tensor, valid: Tensor, *, scale: Scale, walk: Walk | None) -> Tensor:
        return group_advantages(rewards, scale=scale, valid=valid)

    def batch(self, prepared: Prepared, items: Tensor) -> Pairs:
        """The given rows of this process; their noise is made again from its identity."""
        rollouts, draws, device = prepared.rollouts, prepared.draws, prepared.rollouts.x0.device
        assert draws is not None
        sets, place = draws.set_of_row[items].unique(return_inverse=True)
        shape = rollouts.x0.shape[1:]
        eps = [noise([(*draws.identities[s], "noise", j) for s in sets.tolist()], shape) for j in range(len(draws.t))]
        own, there = prepared.advantages[list(rollouts.slots)].flatten(), items.to(device)
        return Pairs(
            x0=rollouts.x0[there],
            cond=repeat(rollouts.cond, items // rollouts.group_size),
            t=draws.t[:, draws.set_of_row[items]].to(device),
            eps=torch.stack(eps)[:, place].to(device),
            advantages=own[items].float().to(device),
            anchors={whose: {k: v[:, there] for k, v in s.items()} for whose, s in prepared.anchors.items()},
        )


def each_pair(batch: Pairs) -> Iterator[tuple[Tensor, Tensor, Tensor, Cond]]:
    """(x0, ε, t, conditioning) of the M network calls of a batch, one per draw."""
    return ((batch.x0, eps, t, batch.cond) for t, eps in zip(batch.t, batch.eps, strict=True))


def all_pairs(batch: Pairs) -> tuple[Tensor, Tensor, Tensor, Cond]:
    """The same for one network call of M·B rows, draw-major."""
    draws, rows = batch.t.shape
    x0 = batch.x0.expand(draws, *batch.x0.shape).flatten(0, 1)
    return x0, batch.eps.flatten(0, 1), batch.t.flatten(), repeat(batch.cond, torch.arange(rows).repeat(draws))


def predict_pair(policy: Policy, x0: Tensor, eps: Tensor, t: Tensor, cond: Cond) -> tuple[Tensor, Tensor]:
    """The noisy sample x_t [B, *latent] of one pair per row, and what the network says of it."""
    x_t = policy.path.noisy(x0, eps, t)
    return x_t, precise(policy.predict(x_t, t, cond))


def predictions(policy: Policy, batch: Pairs, *, joint: bool) -> Tensor:
    """The network's outputs [M, B, *latent] at all pairs, without gradient where the caller has none."""
    if joint:
        return predict_pair(policy, *all_pairs(batch))[1].unflatten(0, batch.t.shape)
    return torch.stack([predict_pair(policy, *pair)[1] for pair in each_pair(batch)])
