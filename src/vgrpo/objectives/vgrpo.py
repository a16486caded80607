"""V-GRPO (arXiv 2604.23380): GRPO in which the pretraining loss of the finished sample stands for its likelihood.

A generation is one action. Its log-likelihood is −L(θ), L the mean over M pairs (t, ε) of the network's error on the
finished sample noised with that pair; so the ratio of new to old policy is ρ = exp(L_old − L), one number per picture,
and everything after it is PPO's clipped surrogate. Three things keep the estimate quiet enough to learn from: the
pictures of a group share their pairs, the times are stratified, and each error is normalised by its own size (Eq. 14).

Differences from the paper: times are drawn on the rollout's own sigma schedule unless `schedule_steps` asks for a finer
one; with one update per rollout the pass that scores θ_old is left out, for ρ = exp(sg(L) − L) has the same value and
gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from vgrpo.losses import (
    clipped_surrogate,
    matching_error,
    precise,
    self_normalised_error,
    surrogate_gradient,
    vgrpo_loss,
    x0_divergence,
)
from vgrpo.seeds import generator
from vgrpo.times import TIMES
from vgrpo.types import Batch, Cond, Draws, Policy, Stats


class VGRPO(BaseModel):
    """Settings of V-GRPO and the two things a step does with them: score θ_old, add the gradient of a batch."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: Literal["vgrpo"] = "vgrpo"
    draws: Annotated[int, Field(ge=1)] = 4
    """M, pairs of time and noise per sample. 2 is too few, 8 a marginal gain over 4 (paper)."""
    times: Literal["stratified", "uniform", "logit_normal"] = "stratified"
    """How the M times are drawn on the schedule."""
    schedule_steps: Annotated[int, Field(ge=1)] | None = None
    """Length of the schedule on which times are drawn; the rollout's own when absent."""
    share: Literal["group", "batch", "none"] = "group"
    """Who uses the same pairs: the pictures of one prompt, all pictures of the step, or nobody."""
    weighting: Literal["adaptive", "none", "x0", "eps"] = "adaptive"
    """Error of a pair: self-normalised x-prediction (Eq. 14), or the plain mean square of the network's own target, of
    x0 or of ε."""
    clip: Annotated[float, Field(gt=0, lt=1)] | None = 1e-2
    """ε of the ratio clip, 6e-3 to 1e-2 in the paper; acts from the second update of a rollout on."""
    kl_weight: Annotated[float, Field(ge=0)] = 0.0
    """β of the KL to the behaviour policy (Eq. 16), 0.3 in the paper's last stage; acts from the second update on."""

    def draw(self, schedule: Tensor, slots: Sequence[int], group_size: int, *, seed: int, step: int) -> Draws:
        """The pairs of one step for the prompts in `slots`, on the times `schedule` [K], 0 = data."""
        rows = len(slots) * group_size
        sets: list[tuple]
        if self.share == "batch":
            sets, set_of_row = [("batch",)], torch.zeros(rows, dtype=torch.long)
        elif self.share == "group":
            sets, set_of_row = [("group", s) for s in slots], torch.arange(rows) // group_size
        else:
            sets, set_of_row = [("row", s, m) for s in slots for m in range(group_size)], torch.arange(rows)
        identities = [(seed, step, *s) for s in sets]
        indices = [TIMES[self.times](schedule, self.draws, generator=generator(*i, "times")) for i in identities]
        return Draws(t=schedule[torch.stack(indices, 1)], set_of_row=set_of_row, identities=identities)

    def score(self, policy: Policy, batch: Batch, *, joint: bool) -> tuple[Tensor, Tensor]:
        """Errors [M, B] and x-predictions [M, B, *latent] of the present weights: M calls of B rows, or one of M·B."""
        if not joint:
            error, x0_pred = zip(*[self.pair_error(policy, *pair) for pair in pairs(batch)], strict=True)
            return torch.stack(error), torch.stack(x0_pred)
        draws = len(batch.t)
        x0, eps = batch.x0.repeat(draws, *[1] * (batch.x0.ndim - 1)), batch.eps.flatten(0, 1)
        cond = {k: v.repeat(draws, *[1] * (v.ndim - 1)) for k, v in batch.cond.items()}
        one_error, one_x0 = self.pair_error(policy, x0, eps, batch.t.flatten(), cond)
        return one_error.unflatten(0, (draws, -1)), one_x0.unflatten(0, (draws, -1))

    def pair_error(self, policy: Policy, x0: Tensor, eps: Tensor, t: Tensor, cond: Cond) -> tuple[Tensor, Tensor]:
        """Error [B] of one pair (t, ε) per row, and the x-prediction [B, *latent] behind it."""
        x_t = policy.path.noisy(x0, eps, t)
        prediction = precise(policy.predict(x_t, t, cond))
        x0_pred, eps_pred = policy.path.split(x_t, t, prediction)
        match self.weighting:
            case "adaptive":
                return self_normalised_error(x0_pred, x0), x0_pred
            case "x0":
                return matching_error(x0_pred, x0), x0_pred
            case "eps":
                return matching_error(eps_pred, eps), x0_pred
            case "none":
                return matching_error(prediction, policy.path.target(x0, eps, t)), x0_pred

    def backward(self, policy: Policy, batch: Batch, *, first: bool, joint: bool, weight: float) -> Stats:
        """Adds the gradient of `weight`·Σ_rows loss to the policy's weights.

        `first` says that θ is still θ_old, so that every ratio is 1 and its forward passes can be saved. `joint` holds
        the graph of all M draws; otherwise the ratio, which needs their mean inside the exp, is found first and each
        draw then goes backward alone with its exact share of the gradient (`losses.surrogate_gradient`).
        """
        return (self.backward_joint if joint else self.backward_by_draw)(policy, batch, first=first, weight=weight)

    def backward_joint(self, policy: Policy, batch: Batch, *, first: bool, weight: float) -> Stats:
        error, x0_pred = self.score(policy, batch, joint=True)
        error_old = error.detach() if batch.error_old is None or first else batch.error_old
        kl = mean_kl(x0_pred, batch.x0_old)
        loss = vgrpo_loss(error, error_old, batch.advantages, clip=self.clip, kl=kl, kl_weight=self.kl_weight)
        (weight * loss.sum()).backward()
        measured = self.measured_log_ratio(error.detach(), batch)
        _, clipped = clipped_surrogate((error_old - error.detach()).mean(0), batch.advantages, clip=self.clip)
        return Stats(log_ratio=measured, clipped=clipped.float(), kl=kl.detach(), error=error.detach().mean(0))

    def backward_by_draw(self, policy: Policy, batch: Batch, *, first: bool, weight: float) -> Stats:
        log_ratio = torch.zeros_like(batch.advantages)
        if not first:
            assert batch.error_old is not None, "a later update needs the stored scores of the old policy"
            with torch.no_grad():
                error_now, _ = self.score(policy, batch, joint=False)
            log_ratio = (batch.error_old - error_now).mean(0)
        slope, clipped = surrogate_gradient(log_ratio, batch.advantages, clip=self.clip)
        errors, kls = [], []
        for j, pair in enumerate(pairs(batch)):
            error, x0_pred = self.pair_error(policy, *pair)
            kl = x0_pred.new_zeros(len(error)) if batch.x0_old is None else x0_divergence(x0_pred, batch.x0_old[j])
            loss = slope * error + self.kl_weight * kl
            (weight / len(batch.t) * loss.sum()).backward()
            errors.append(error.detach())
            kls.append(kl.detach())
        error = torch.stack(errors)
        return Stats(
            log_ratio=self.measured_log_ratio(error, batch),
            clipped=clipped.float(),
            kl=torch.stack(kls).mean(0),
            error=error.mean(0),
        )

    def measured_log_ratio(self, error: Tensor, batch: Batch) -> Tensor:
        """L_old − L [B] over the draws for which θ_old was scored; 0 where it was not."""
        if batch.error_old is None:
            return error.new_zeros(error.shape[1])
        return (batch.error_old - error[: len(batch.error_old)]).mean(0)


def pairs(batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor, Cond]]:
    """The arguments of the M network calls of a batch, one per draw."""
    return ((batch.x0, eps, t, batch.cond) for t, eps in zip(batch.t, batch.eps, strict=True))


def mean_kl(x0_pred: Tensor, x0_old: Tensor | None) -> Tensor:
    """KL of Eq. 16 [B]: the mean over M draws of the squared distance of x-predictions [M, B, *latent]; 0 without θ_old."""
    if x0_old is None:
        return x0_pred.new_zeros(x0_pred.shape[1])
    return x0_divergence(x0_pred.flatten(0, 1), x0_old.flatten(0, 1)).view(x0_pred.shape[:2]).mean(0)
