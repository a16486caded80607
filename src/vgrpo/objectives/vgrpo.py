"""V-GRPO (arXiv 2604.23380): GRPO in which the pretraining loss of the finished sample stands for its likelihood.

A generation is one action. Its log-likelihood is −L(θ), L the mean over M pairs (t, ε) of the network's error on the
finished sample noised with that pair; so the ratio of new to old policy is ρ = exp(L_old − L), one number per picture,
and everything after it is PPO's clipped surrogate. Three things keep the estimate quiet enough to learn from: the
pictures of a group share their pairs, the times are stratified, and each error is normalised by its own size (Eq. 14).

Differences from the paper: times are drawn on the rollout's own sigma schedule unless `schedule_steps` asks for a finer
one; θ_old is not scored where θ still is θ_old, which is everywhere with one update per rollout and for the first update's
pictures with several, for ρ = exp(sg(L) − L) has the same value and gradient; `kl_start` is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from vgrpo.losses import (
    clipped_surrogate,
    matching_error,
    self_normalised_error,
    surrogate_gradient,
    vgrpo_loss,
    x0_divergence,
)
from vgrpo.objectives.pairs import PairObjective, all_pairs, each_pair, predict_pair
from vgrpo.types import Cond, Pairs, Policy, Scores, Stats


class VGRPO(PairObjective):
    """Settings of V-GRPO and the two things a step does with them: score θ_old, add the gradient of a batch."""

    name: Literal["vgrpo"] = "vgrpo"
    draws: Annotated[int, Field(ge=1)] | None = 4
    """M, pairs of time and noise per sample. 2 is too few, 8 a marginal gain over 4 (paper)."""
    weighting: Literal["adaptive", "none", "x0", "eps"] = "adaptive"
    """Error of a pair: self-normalised x-prediction (Eq. 14), or the plain mean square of the network's own target, of
    x0 or of ε."""
    clip: Annotated[float, Field(gt=0, lt=1)] | None = 1e-2
    """ε of the ratio clip, 6e-3 to 1e-2 in the paper; acts from the second update of a rollout on."""
    kl_weight: Annotated[float, Field(ge=0)] = 0.0
    """β of the KL to the behaviour policy (Eq. 16), 0.3 in the paper's last stage; acts from the second update on."""
    kl_start: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the same distance to the policy before training, on the same pairs; costs M calls a picture. Ours: it
    holds a long run, in which pushing bad pictures away would otherwise lead the network astray."""

    def inactive(self, *, updates: int) -> list[str]:
        out = []
        if updates == 1 and self.clip:
            out.append("objective.clip: with one update per rollout the ratio is always 1")
        if updates == 1 and self.kl_weight:
            out.append("objective.kl_weight: with one update per rollout the policy is its own behaviour policy")
        return out

    def anchors(self, *, updates: int) -> Sequence[str]:
        wanted = {"old": updates > 1, "start": self.kl_start > 0}
        return [whose for whose, needed in wanted.items() if needed]

    @property
    def learns_from_all(self) -> bool:
        return self.kl_weight > 0 or self.kl_start > 0

    def score(self, policy: Policy, batch: Pairs, *, joint: bool) -> Scores:
        """Errors [M, B] of the present weights, and their x-predictions when a KL will be taken."""
        error, x0_pred = self.errors(policy, batch, joint=joint)
        return {"error": error, "x0": x0_pred} if self.learns_from_all else {"error": error}

    def errors(self, policy: Policy, batch: Pairs, *, joint: bool) -> tuple[Tensor, Tensor]:
        """Errors [M, B] and x-predictions [M, B, *latent]: M network calls of B rows, or one of M·B."""
        if joint:
            error, x0_pred = self.pair_error(policy, *all_pairs(batch))
            return error.unflatten(0, batch.t.shape), x0_pred.unflatten(0, batch.t.shape)
        pairs = [self.pair_error(policy, *pair) for pair in each_pair(batch)]
        return torch.stack([error for error, _ in pairs]), torch.stack([x0_pred for _, x0_pred in pairs])

    def pair_error(self, policy: Policy, x0: Tensor, eps: Tensor, t: Tensor, cond: Cond) -> tuple[Tensor, Tensor]:
        """Error [B] of one pair (t, ε) per row, and the x-prediction [B, *latent] behind it."""
        x_t, prediction = predict_pair(policy, x0, eps, t, cond)
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

    def backward(self, policy: Policy, batch: Pairs, *, first: bool, joint: bool, weight: float) -> Stats:
        """Adds the gradient of `weight`·Σ_rows loss to the policy's weights.

        `first` says that θ is still θ_old, so that every ratio is 1 and its forward passes can be saved. `joint` holds
        the graph of all M draws; otherwise the ratio, which needs their mean inside the exp, is found first and each
        draw then goes backward alone with its exact share of the gradient (`losses.surrogate_gradient`).
        """
        return (self.backward_joint if joint else self.backward_by_draw)(policy, batch, first=first, weight=weight)

    def backward_joint(self, policy: Policy, batch: Pairs, *, first: bool, weight: float) -> Stats:
        error, x0_pred = self.errors(policy, batch, joint=True)
        old = batch.anchors.get("old", {})
        error_old = error.detach() if first else old["error"]
        kl = mean_kl(x0_pred, None if first else old.get("x0"))  # 0, and its gradient too, while θ is θ_old
        kl_start = mean_kl(x0_pred, batch.anchors.get("start", {}).get("x0"))
        loss = vgrpo_loss(error, error_old, batch.advantages, clip=self.clip, kl=kl, kl_weight=self.kl_weight)
        (weight * (loss + self.kl_start * kl_start).sum()).backward()
        _, clipped = clipped_surrogate((error_old - error.detach()).mean(0), batch.advantages, clip=self.clip)
        return self.stats(error.detach(), old.get("error"), clipped, kl.detach(), kl_start.detach())

    def backward_by_draw(self, policy: Policy, batch: Pairs, *, first: bool, weight: float) -> Stats:
        old = batch.anchors.get("old", {})
        log_ratio = torch.zeros_like(batch.advantages)
        if not first:
            with torch.no_grad():
                error_now, _ = self.errors(policy, batch, joint=False)
            log_ratio = (old["error"] - error_now).mean(0)
        slope, clipped = surrogate_gradient(log_ratio, batch.advantages, clip=self.clip)
        start = batch.anchors.get("start", {})
        errors, kls, starts = [], [], []
        for j, pair in enumerate(each_pair(batch)):
            error, x0_pred = self.pair_error(policy, *pair)
            kl = kl_start = x0_pred.new_zeros(len(error))
            if "x0" in old and not first:
                kl = x0_divergence(x0_pred, old["x0"][j])
            if "x0" in start:
                kl_start = x0_divergence(x0_pred, start["x0"][j])
            loss = slope * error + self.kl_weight * kl + self.kl_start * kl_start
            (weight / len(batch.t) * loss.sum()).backward()
            errors.append(error.detach())
            kls.append(kl.detach())
            starts.append(kl_start.detach())
        means = torch.stack(kls).mean(0), torch.stack(starts).mean(0)
        return self.stats(torch.stack(errors), old.get("error"), clipped, *means)

    def stats(self, error: Tensor, error_old: Tensor | None, clipped: Tensor, kl: Tensor, kl_start: Tensor) -> Stats:
        """The ratio is over the draws for which θ_old was scored: all of them, or one that is looked at, or none."""
        known = 0 if error_old is None else len(error_old)
        log_ratio = (error_old - error[:known]).mean(0) if error_old is not None else torch.zeros_like(kl)
        means = {"kl": kl, "error": error.mean(0)} | ({"kl_start": kl_start} if self.kl_start else {})
        return Stats(log_ratio=log_ratio, clipped=clipped.float(), means=means)


def mean_kl(x0_pred: Tensor, x0_old: Tensor | None) -> Tensor:
    """KL of Eq. 16 [B]: the mean over M draws of the squared distance of x-predictions [M, B, *latent]; 0 without θ_old."""
    if x0_old is None:
        return x0_pred.new_zeros(x0_pred.shape[1])
    return x0_divergence(x0_pred.flatten(0, 1), x0_old.flatten(0, 1)).view(x0_pred.shape[:2]).mean(0)
