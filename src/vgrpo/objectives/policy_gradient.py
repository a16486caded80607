"""The methods that optimise every step of a stochastic sampler: DDPO, Flow-GRPO, Flow-GRPO-Fast, DanceGRPO, MixGRPO.

A sampler step with noise is a Gaussian whose density is known, so each step is an action with a ratio of its own and PPO's
clipped surrogate over it. The five differ in the noise they add, in which steps are noisy and trained, in whether a group
starts from one noise, and in their clip and KL; so they are one file, and five tables of defaults at its end. BranchGRPO,
whose steps form a tree, is `branch.py`.

Differences from their papers and codes, for all: the last step of a walk has no noise and is not trained (DDPO's and CPS's
have none anyway; elsewhere it would stay in the picture that is scored); θ_old's densities are those of the rollout itself,
so no second pass is made; the KL is that of the two Gaussians, with the step's whole variance; a walk on the
variance-preserving path ends at clean data; evaluation is by the ODE sampler. Log-densities are means over latent
dimensions, as in the codes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from vgrpo.advantages import group_advantages
from vgrpo.losses import clipped_surrogate, matching_error, precise
from vgrpo.paths import VPPath
from vgrpo.sde import cps_step, dance_step, ddim_step, flow_step, log_density
from vgrpo.seeds import generator, noise
from vgrpo.types import Cond, Plan, Policy, Prepared, Scale, Scores, Stats, Transitions, Walk, repeat


class PolicyGradient(BaseModel):
    """Settings that the methods share. A step without noise is Euler's, or DDIM's on the variance-preserving path."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    noise: Literal["flow", "dance", "cps", "ddim"] = "flow"
    """Whose stochastic step; see `vgrpo.sde`. "ddim" is for the variance-preserving path, the others for the linear."""
    level: Annotated[float, Field(gt=0, le=1)] = 0.7
    """How much noise: a of "flow" and "cps", η of "dance" and "ddim"."""
    window: Annotated[int, Field(ge=1)] | None = None
    """How many consecutive steps are noisy and trained, the others being deterministic; null for all but the last."""
    window_start: Annotated[int, Field(ge=0)] = 0
    """First step of the window, where it begins when it moves."""
    window_moves: Literal["never", "progressive", "decay", "exp_decay", "random"] = "never"
    """How the window moves: by `window_stride` every `window_every` steps of training; the same with a stay that shrinks
    as it goes, linearly to a quarter or by exp(−0.1·(start − half the steps)) past the half; or anywhere, each step."""
    window_every: Annotated[int, Field(ge=1)] = 25
    window_stride: Annotated[int, Field(ge=1)] = 1
    window_wraps: bool = True
    """Whether a window at the end begins again; else it stays."""
    flash: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the steps after the window that are kept, by a second-order solver; null for all, by Euler."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the noisy steps that are trained on, drawn anew in each step of training."""
    clip: Annotated[float, Field(gt=0, lt=1)] | None = 1e-4
    """ε of the clip of each step's ratio."""
    kl_weight: Annotated[float, Field(ge=0)] = 0.0
    """β of ‖μ − μ_start‖²/(2·std²), the KL to the policy before training, a mean over latent dimensions."""
    shared_noise: bool = False
    """Whether the members of a group start from the same noise."""

    @property
    def whole_groups(self) -> bool:
        return True

    @property
    def needs_path(self) -> str:
        return "vp" if self.noise == "ddim" else "linear"

    @property
    def learns_from_all(self) -> bool:
        return self.kl_weight > 0

    def problems(self, *, steps: int, updates: int, group_size: int) -> list[str]:
        if steps < 2:
            return [f"rollout.steps={steps}: the last step has no noise, so {self.name} needs at least 2"]
        last = steps - 1 - (self.window or 1)
        if last < 0:
            return [
                f"objective.window={self.window} is longer than the {steps - 1} noisy steps of rollout.steps={steps}"
            ]
        if self.window_start > last:
            return [f"objective.window_start={self.window_start} leaves no room for the window; at most {last} here"]
        if self.flash and not self.window:
            return ["objective.flash: there is no step after the noisy ones unless objective.window is set"]
        if self.flash and self.noise == "ddim":
            return ["objective.flash: only for the linear path"]
        return []

    def inactive(self, *, updates: int) -> list[str]:
        return (
            ["objective.clip: with one update per rollout the ratio is always 1"] if updates == 1 and self.clip else []
        )

    def anchors(self, *, updates: int) -> Sequence[str]:
        return ("start",) if self.kl_weight else ()

    def old_decay(self, step: int) -> None:
        return None

    def draw(self, schedule: Tensor, slots: Sequence[int], group_size: int, *, seed: int, step: int) -> None:
        return None

    def noisy(self, steps: int, step: int, seed: int) -> range:
        """The noisy steps of a walk of `steps` in training step `step`."""
        if not self.window:
            return range(steps - 1)
        last = steps - 1 - self.window
        start = self.window_start
        if self.window_moves == "random":
            start = int(torch.randint(last + 1, (1,), generator=generator(seed, step, "window")))
        elif self.window_moves != "never":
            start = self.position(last, steps, step)
        return range(start, start + self.window)

    def position(self, last: int, steps: int, step: int) -> int:
        """Where a moving window stands: it is walked there from the beginning, for a resume has no other memory."""
        start = self.window_start
        while step >= (stay := self.stay(start, last, steps)):
            step -= stay
            if start >= last:
                if not self.window_wraps:
                    return last
                start = self.window_start
            else:
                start = min(start + self.window_stride, last)
        return start

    def stay(self, start: int, last: int, steps: int) -> int:
        """For how many steps of training the window stays at `start`."""
        share = 1.0
        if self.window_moves == "decay":
            share = 1 - 0.75 * start / max(last, 1)
        elif self.window_moves == "exp_decay":
            share = math.exp(-0.1 * max(start - steps / 2, 0))
        return max(round(self.window_every * share), 1)

    def plan(self, schedule: Tensor, *, group_size: int, seed: int, step: int) -> Plan:
        """The trained items of a chain: each trained step of each member."""
        steps = self.noisy(len(schedule), step, seed)
        kept = max(round(self.fraction * len(steps)), 1)
        chosen = torch.randperm(len(steps), generator=generator(seed, step, "fraction"))[:kept].sort().values
        depth = torch.as_tensor(steps)[chosen].repeat_interleave(group_size)
        share = torch.eye(group_size, dtype=torch.float64).repeat(kept, 1)
        times = torch.cat([schedule, schedule.new_zeros(1)])
        return Plan(times=times, depth=depth, share=share, nodes=[group_size] * len(schedule))

    @torch.no_grad()
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
    ) -> tuple[Tensor, Walk]:
        """Walks from `noise` [P·G, *latent] to finished latents, noisy where `noisy` says, and keeps the trained steps."""
        seed, steps = rows[0][0], len(schedule)
        plan = self.plan(schedule, group_size=group_size, seed=seed, step=step)
        noisy, trained = self.noisy(steps, step, seed), set(plan.depth.tolist())
        groups = len(noise) // group_size
        x = precise(noise).unflatten(0, (groups, group_size))[:, : plan.nodes[0]].flatten(0, 1).to(plan.times.dtype)
        kept: list[tuple[Tensor, Tensor, Tensor]] = []
        for k in range(steps):
            told = repeat(cond, torch.arange(groups).repeat_interleave(plan.nodes[k]) * group_size)
            t, t_next = plan.times[k].item(), plan.times[k + 1].item()
            prediction = precise(policy.guided(x, torch.full((len(x),), t, dtype=plan.times.dtype), told))
            x = x.to(prediction.device)  # the noise is drawn on the CPU
            if k not in noisy:
                x = self.transition(policy, x, prediction, t, t_next, level=0.0)[0]
            else:
                mean, std = self.transition(policy, x, prediction, t, t_next, level=self.level)
                children = (plan.nodes[k + 1] if k + 1 < steps else group_size) // plan.nodes[k]
                x, mean = (z.repeat_interleave(children, 0) for z in (x, mean))
                edges = len(x) // groups
                names = [(*rows[p * group_size + e], "walk", k) for p in range(groups) for e in range(edges)]
                after = mean + std * self.noise_like(names, mean)
                if k in trained:
                    kept.append((x, after, log_density(after, mean, std)))
                x = after
            if self.flash and k == noisy[-1]:
                rest = max(round(self.flash * (steps - 1 - k)), 1)
                x = policy.finish(x, repeat(cond, torch.arange(groups * group_size)), t_next, rest)
                break
        before, after, density = (
            torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)
            for parts in zip(*kept, strict=True)
        )
        return x, Walk(plan=plan, x=before, x_next=after, log_density=density)

    def noise_like(self, names: Sequence[tuple], like: Tensor) -> Tensor:
        return noise(names, like.shape[1:]).to(like)

    def transition(
        self, policy: Policy, x: Tensor, prediction: Tensor, t: Tensor | float, t_next: Tensor | float, *, level: float
    ) -> tuple[Tensor, Tensor]:
        """(mean, std) of the step from `t` to `t_next`; std 0 at level 0."""
        match self.noise:
            case "flow":
                return flow_step(x, prediction, t, t_next, a=level)
            case "dance":
                return dance_step(x, prediction, t, t_next, eta=level)
            case "cps":
                return cps_step(x, prediction, t, t_next, a=level)
            case "ddim":
                assert isinstance(policy.path, VPPath)
                now, after = policy.path.alpha_bar(t), policy.path.alpha_bar(t_next)
                _, eps = policy.path.split_at(x, now, prediction)
                return ddim_step(x, eps, now, after, eta=level)

    def advantages(self, rewards: Tensor, valid: Tensor, *, scale: Scale, walk: Walk | None) -> Tensor:
        """[P, I]: the mean reward of the members behind an item, relative to the items of its depth."""
        assert walk is not None
        plan, known = walk.plan, valid.double()
        behind = known @ plan.share.T
        fused = (torch.where(valid, rewards.double(), 0.0) @ plan.share.T) / behind.clamp(min=1e-300)
        out = torch.zeros_like(fused)
        for k in plan.depth.unique():
            here = plan.depth == k
            out[:, here] = group_advantages(fused[:, here], scale=scale, valid=behind[:, here] > 0)
        return out

    def batch(self, prepared: Prepared, items: Tensor) -> Transitions:
        """The given items of this process."""
        rollouts, walk = prepared.rollouts, prepared.rollouts.walk
        assert walk is not None
        each, there = len(walk.plan.depth), items.to(walk.x.device)
        k = walk.plan.depth[items % each]
        own = prepared.advantages[list(rollouts.slots)].flatten()
        return Transitions(
            x=walk.x[there],
            x_next=walk.x_next[there],
            cond=repeat(rollouts.cond, items // each),
            t=walk.plan.times[k].to(walk.x.device),
            t_next=walk.plan.times[k + 1].to(walk.x.device),
            log_density_old=walk.log_density[there],
            advantages=own[items].to(walk.x),
            anchors={whose: {n: v[:, there] for n, v in s.items()} for whose, s in prepared.anchors.items()},
        )

    def score(self, policy: Policy, batch: Transitions, *, joint: bool) -> Scores:
        """Means [1, B, *latent] of the steps under the present weights."""
        return {"mean": self.means(policy, batch)[0][None]}

    def means(self, policy: Policy, batch: Transitions) -> tuple[Tensor, Tensor]:
        prediction = precise(policy.guided(batch.x, batch.t, batch.cond))
        return self.transition(policy, batch.x, prediction, batch.t, batch.t_next, level=self.level)

    def backward(self, policy: Policy, batch: Transitions, *, first: bool, joint: bool, weight: float) -> Stats:
        """One network call with gradient for all items of the batch."""
        mean, std = self.means(policy, batch)
        log_ratio = log_density(batch.x_next, mean, std) - batch.log_density_old
        loss, clipped = clipped_surrogate(log_ratio, batch.advantages, clip=self.clip)
        means = {}
        if "start" in batch.anchors:
            kl = matching_error(mean, batch.anchors["start"]["mean"][0]) / (2 * std**2)
            loss = loss + self.kl_weight * kl
            means["kl_start"] = kl.detach()
        (weight * loss.sum()).backward()
        return Stats(log_ratio=log_ratio.detach(), clipped=clipped.float(), means=means)


class DDPO(PolicyGradient):
    """DDPO (arXiv 2305.13301) for the variance-preserving path: DDIM with η = 1, every step trained."""

    name: Literal["ddpo"] = "ddpo"
    noise: Literal["flow", "dance", "cps", "ddim"] = "ddim"
    level: Annotated[float, Field(gt=0, le=1)] = 1.0


class FlowGRPO(PolicyGradient):
    """Flow-GRPO (arXiv 2505.05470): every step noisy and trained, a KL to the start. `noise: cps` is Flow-CPS (2509.05952)."""

    name: Literal["flow_grpo"] = "flow_grpo"
    kl_weight: Annotated[float, Field(ge=0)] = 0.04


class FlowGRPOFast(PolicyGradient):
    """Flow-GRPO-Fast: two noisy steps at a random place, the others deterministic and not trained.

    flow_grpo's code draws the window within a range, and its first form branched one deterministic walk per prompt.
    """

    name: Literal["flow_grpo_fast"] = "flow_grpo_fast"
    window: Annotated[int, Field(ge=1)] | None = 2
    window_moves: Literal["never", "progressive", "decay", "exp_decay", "random"] = "random"


class DanceGRPO(PolicyGradient):
    """DanceGRPO (arXiv 2505.07818): constant noise, one start per group, 60 % of the steps trained."""

    name: Literal["dance_grpo"] = "dance_grpo"
    noise: Literal["flow", "dance", "cps", "ddim"] = "dance"
    level: Annotated[float, Field(gt=0, le=1)] = 0.3
    fraction: Annotated[float, Field(gt=0, le=1)] = 0.6
    shared_noise: bool = True


class MixGRPO(PolicyGradient):
    """MixGRPO (arXiv 2507.21802): a window of four noisy, trained steps slides from noise to data. `flash` is MixGRPO-Flash.

    How the stays of "decay" and "exp_decay" shrink is ours.
    """

    name: Literal["mix_grpo"] = "mix_grpo"
    window: Annotated[int, Field(ge=1)] | None = 4
    window_moves: Literal["never", "progressive", "decay", "exp_decay", "random"] = "progressive"
    shared_noise: bool = True
