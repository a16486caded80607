"""AWM, advantage-weighted matching (arXiv 2509.25050): the pretraining loss of a sample, weighted by its advantage.

The log-likelihood of a pair is −t·(mse^p − 1e-10^p)/p, mse that of the velocity; each pair has a ratio of its own, where
V-GRPO has one per picture. Two KLs hold the policy: a weak one to the start, a strong one to its own moving average.

Differences from the authors' code: times are drawn on the rollout's schedule; the moving average of the KL is the one that is
evaluated, where theirs keeps two. A KL is the mean square of the difference of predictions, without a weight in t.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from vgrpo.losses import awm_log_likelihood, clipped_surrogate, matching_error, precise
from vgrpo.objectives.pairs import PairObjective, all_pairs, each_pair, predict_pair, predictions
from vgrpo.types import Cond, Pairs, Policy, Scores, Stats


class AWM(PairObjective):
    """Settings of AWM with its paper's defaults; made for one update per rollout."""

    name: Literal["awm"] = "awm"
    draws: Annotated[int, Field(ge=1)] | None = 6
    share: Literal["group", "batch", "none"] = "none"
    power: Annotated[float, Field(gt=0)] = 0.25
    """p of the generalised Huber error; 1 is the plain mean square."""
    advantage_scale: Annotated[float, Field(gt=0)] = 5.0
    """Advantages are divided by this after `advantages.hard_clip`."""
    clip: Annotated[float, Field(gt=0, lt=1)] | None = None
    """ε of a clip of each pair's ratio; acts from the second update of a rollout on."""
    kl_start: Annotated[float, Field(ge=0)] = 1e-3
    """Weight of the KL to the policy before training."""
    kl_average: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the KL to the moving average of the policy; needs `run.ema`."""

    def inactive(self, *, updates: int) -> list[str]:
        if updates == 1 and self.clip:
            return ["objective.clip: with one update per rollout the ratio is always 1"]
        return []

    def anchors(self, *, updates: int) -> Sequence[str]:
        wanted = {"old": updates > 1, "start": self.kl_start > 0, "average": self.kl_average > 0}
        return [whose for whose, needed in wanted.items() if needed]

    @property
    def learns_from_all(self) -> bool:
        return self.kl_start > 0 or self.kl_average > 0

    def score(self, policy: Policy, batch: Pairs, *, joint: bool) -> Scores:
        """Predictions [M, B, *latent] of the present weights."""
        return {"prediction": predictions(policy, batch, joint=joint)}

    def backward(self, policy: Policy, batch: Pairs, *, first: bool, joint: bool, weight: float) -> Stats:
        """Each pair has its own ratio and goes backward alone; `joint` sends all through the network at once."""
        if joint:
            draws = len(batch.t)
            known = {whose: scores["prediction"].flatten(0, 1) for whose, scores in batch.anchors.items()}
            loss, part = self.pair_loss(policy, *all_pairs(batch), batch.advantages.repeat(draws), known, first=first)
            (weight / draws * loss.sum()).backward()
            parts = [{k: v.unflatten(0, (draws, -1)) for k, v in part.items()}]
        else:
            parts = []
            for j, pair in enumerate(each_pair(batch)):
                given = {whose: scores["prediction"] for whose, scores in batch.anchors.items()}
                known = {whose: prediction[j] for whose, prediction in given.items() if j < len(prediction)}
                loss, part = self.pair_loss(policy, *pair, batch.advantages, known, first=first)
                (weight / len(batch.t) * loss.sum()).backward()
                parts.append({k: v[None] for k, v in part.items()})
        all_parts = {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
        log_ratio, clipped = all_parts.pop("log_ratio"), all_parts.pop("clipped")
        return Stats(log_ratio=log_ratio, clipped=clipped.mean(0), means={k: v.mean(0) for k, v in all_parts.items()})

    def pair_loss(
        self,
        policy: Policy,
        x0: Tensor,
        eps: Tensor,
        t: Tensor,
        cond: Cond,
        advantages: Tensor,
        known: Scores,
        *,
        first: bool,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [B] of one pair per row, and what is logged of it; `known` are predictions under other weights."""
        _, prediction = predict_pair(policy, x0, eps, t, cond)
        target = policy.path.target(x0, eps, t)
        error = matching_error(prediction, target)
        likelihood = awm_log_likelihood(error, precise(t), power=self.power)
        measured = torch.zeros_like(likelihood.detach())
        if "old" in known:
            scored = len(known["old"])  # fewer than all when the ratio is only looked at
            old_error = matching_error(known["old"], target[:scored])
            old = awm_log_likelihood(old_error, precise(t[:scored]), power=self.power)
            measured[:scored] = likelihood.detach()[:scored] - old
        log_ratio = likelihood - likelihood.detach() + (0 if first else measured)
        loss, clipped = clipped_surrogate(log_ratio, advantages / self.advantage_scale, clip=self.clip)
        logged = {"log_ratio": measured, "clipped": clipped.float(), "error": error.detach()}
        for whose, weight in (("start", self.kl_start), ("average", self.kl_average)):
            if whose in known:
                kl = matching_error(prediction, known[whose])
                loss = loss + weight * kl
                logged[f"kl_{whose}"] = kl.detach()
        return loss, logged
