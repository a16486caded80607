"""DiffusionNFT (arXiv 2509.16117): good samples pull the policy, bad ones push it, by matching two implicit policies.

With v_old the prediction of the policy that made the samples, v± = (1 ∓ β)·v_old ± β·v are an implicitly better and a
worse policy. The loss is r·ℓ(v₊) + (1−r)·ℓ(v₋), r in [0, 1] the sample's optimality and ℓ the self-normalised error of the
x-prediction. There is no ratio and no clip; what holds it is θ_old, which follows θ slowly and makes the samples.

The paper's loss and its code's differ by a scale, both are here: `scaling`. Differences from both: times are those of the
rollout's schedule; θ_old follows θ once per step of the loop, however many updates it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from vgrpo.losses import matching_error, nft_optimality, self_normalised_error
from vgrpo.objectives.pairs import PairObjective, all_pairs, each_pair, predict_pair, predictions
from vgrpo.types import Cond, Pairs, Policy, Scores, Stats


class NFT(PairObjective):
    """Settings of DiffusionNFT with its defaults for one reward."""

    name: Literal["nft"] = "nft"
    draws: Annotated[int, Field(ge=1)] | None = None
    """Pairs per sample; null, as in the paper, for one at each time of the rollout."""
    share: Literal["group", "batch", "none"] = "none"
    beta: Annotated[float, Field(gt=0, le=1)] = 1.0
    """How far v± lie from v_old; 1 for one reward, 0.1 for several (paper)."""
    scaling: Literal["paper", "code"] = "paper"
    """"paper": r = ½ + ½·clip(A, −1, 1). "code": r = ½ + A/10 with A in [−5, 5], the loss times 5/β."""
    kl_start: Annotated[float, Field(ge=0)] = 1e-4
    """Weight of the mean square distance of predictions to those of the policy before training."""
    old_rate: Annotated[float, Field(ge=0)] = 1e-3
    """θ_old ← η·θ_old + (1−η)·θ after step i, η = min(old_rate·i, old_limit)."""
    old_limit: Annotated[float, Field(ge=0, lt=1)] = 0.5

    def anchors(self, *, updates: int) -> Sequence[str]:
        return ("old", "start") if self.kl_start else ("old",)

    def old_decay(self, step: int) -> float:
        return min(self.old_rate * step, self.old_limit)

    @property
    def learns_from_all(self) -> bool:
        return True  # at A = 0 the two halves cancel only where θ = θ_old

    def score(self, policy: Policy, batch: Pairs, *, joint: bool) -> Scores:
        """Predictions [M, B, *latent] of the present weights."""
        return {"prediction": predictions(policy, batch, joint=joint)}

    def backward(self, policy: Policy, batch: Pairs, *, first: bool, joint: bool, weight: float) -> Stats:
        """Each pair goes backward alone; `joint` sends all through the network at once."""
        if joint:
            draws = len(batch.t)
            known = {whose: scores["prediction"].flatten(0, 1) for whose, scores in batch.anchors.items()}
            loss, part = self.pair_loss(policy, *all_pairs(batch), batch.advantages.repeat(draws), known)
            (weight / draws * loss.sum()).backward()
            parts = [{k: v.unflatten(0, (draws, -1)).mean(0) for k, v in part.items()}]
        else:
            parts = []
            for j, pair in enumerate(each_pair(batch)):
                known = {whose: scores["prediction"][j] for whose, scores in batch.anchors.items()}
                loss, part = self.pair_loss(policy, *pair, batch.advantages, known)
                (weight / len(batch.t) * loss.sum()).backward()
                parts.append(part)
        means = {k: torch.stack([p[k] for p in parts]).mean(0) for k in parts[0]}
        return Stats(log_ratio=None, clipped=torch.zeros_like(batch.advantages), means=means)

    def pair_loss(
        self, policy: Policy, x0: Tensor, eps: Tensor, t: Tensor, cond: Cond, advantages: Tensor, known: Scores
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [B] of one pair per row, and what is logged of it; `known` are predictions under other weights."""
        x_t, prediction = predict_pair(policy, x0, eps, t, cond)
        moved = self.beta * (prediction - known["old"])
        better, worse = (
            self_normalised_error(policy.path.split(x_t, t, known["old"] + sign * moved)[0], x0) for sign in (1, -1)
        )
        optimality, scale = self.optimality(advantages)
        loss = scale * (optimality * better + (1 - optimality) * worse)
        logged = {"error": better.detach(), "kl_old": matching_error(prediction, known["old"]).detach()}
        if "start" in known:
            kl = matching_error(prediction, known["start"])
            loss = loss + self.kl_start * kl
            logged["kl_start"] = kl.detach()
        return loss, logged

    def optimality(self, advantages: Tensor) -> tuple[Tensor, float]:
        """r in [0, 1] of each advantage, and the factor of the loss."""
        if self.scaling == "paper":
            return nft_optimality(advantages), 1.0
        return nft_optimality(advantages / 5), 5.0 / self.beta
