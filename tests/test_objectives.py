"""Every objective beside the others: ratio, gradient and cost, each against an answer of this file's own.

The mathematics runs on a float64 network of one matrix, the loop on a small real pipeline.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from vgrpo import checkpoint
from vgrpo.config import build_objective, parse, put
from vgrpo.errors import UserError
from vgrpo.losses import awm_loss, nft_loss
from vgrpo.objectives import OBJECTIVES
from vgrpo.objectives.nft import NFT
from vgrpo.paths import LinearPath, VPPath
from vgrpo.rollout import generate
from vgrpo.run import Run
from vgrpo.seeds import generator, noise
from vgrpo.training import train
from vgrpo.types import Cond, Pairs, Prepared, Prompt, Transitions

PAIRS = ("vgrpo", "elbo", "fpo", "awm", "nft")
WALKS = ("ddpo", "flow_grpo", "flow_grpo_fast", "dance_grpo", "mix_grpo", "branch_grpo")
P, G, K = 3, 4, 5
ALPHAS = torch.linspace(0.97, 0.02, 40, dtype=torch.float64)
SMALL: dict[str, dict[str, Any]] = {
    "nft": {"draws": 3},
    "awm": {"draws": 3},
    "mix_grpo": {"window": 2},
    "branch_grpo": {"splits": (0, 2)},
}
"""What makes an objective run on 4 members and 4 or 5 steps."""
NO_KL = {"flow_grpo": {"kl_weight": 0.0}, "nft": {"kl_start": 0.0}, "awm": {"kl_start": 0.0, "kl_average": 0.0}}


def test_no_objective_is_left_out() -> None:
    assert set(OBJECTIVES) == {*PAIRS, *WALKS}


class Toy:
    """A whole policy whose network is one matrix, in float64."""

    shape = (1, 3, 3)

    def __init__(self, path: Any) -> None:
        self.path = path
        self.weight = (0.3 * torch.randn(9, 9, generator=generator("w"), dtype=torch.float64)).requires_grad_()

    def encode(self, prompts: Sequence[Prompt]) -> Cond:
        return {"c": 0.2 * noise([("c", p.id) for p in prompts], self.shape).double()}

    def noise(self, seeds: Iterable[int]) -> Tensor:
        return noise([(s,) for s in seeds], self.shape).double()

    def schedule(self, steps: int | None = None) -> Tensor:
        ends = (0.95, 0.2) if isinstance(self.path, VPPath) else (1.0, 0.2)
        return torch.linspace(*ends, steps or K, dtype=torch.float64)

    def sample(self, x: Tensor, cond: Cond) -> Tensor:
        return 0.7 * x + cond["c"]

    def finish(self, x: Tensor, cond: Cond, t: float, steps: int) -> Tensor:
        raise AssertionError("no objective here asks for it")

    def decode(self, x0: Tensor) -> Tensor:
        return torch.zeros(len(x0), 3, 1, 1, dtype=torch.uint8)

    def predict(self, x_t: Tensor, t: Tensor, cond: Cond) -> Tensor:
        assert t.dtype == torch.float64
        return torch.tanh(x_t.flatten(1) @ self.weight * (1 + t[:, None])).view_as(x_t) + cond["c"]

    guided = predict

    @torch.no_grad()
    def shifted(self, name: str, size: float) -> Tensor:
        """Other weights than the present ones."""
        return self.weight + size * torch.randn(9, 9, generator=generator("shift", name), dtype=torch.float64)

    @torch.no_grad()
    def set(self, weight: Tensor) -> None:
        self.weight.copy_(weight)


def path_for(name: str, path: str | None = None) -> Any:
    path = path or ("vp-eps" if name == "ddpo" else "linear")
    return LinearPath() if path == "linear" else VPPath(ALPHAS, path.removeprefix("vp-"))  # type: ignore[arg-type]


def objective_of(name: str, **settings: Any) -> Any:
    return build_objective({"name": name, **SMALL.get(name, {}), **settings})


def scene(objective: Any, policy: Toy, *, moved: float, joint: bool = True, advantages: Tensor | None = None) -> Any:
    """All items of a step, sampled and scored under the policy's weights as θ_old; θ is then moved by `moved`.

    "start" and "average" have weights of their own.
    """
    prompts = [Prompt(text=str(i), id=str(i)) for i in range(P)]
    rollouts = generate(policy, prompts, range(P), group_size=G, micro_batch=64, seed=1, step=2, objective=objective)
    items = G if rollouts.walk is None else len(rollouts.walk.plan.depth)
    if advantages is None:
        advantages = torch.randn(P, items, generator=generator("a"), dtype=torch.float64)
    draws = objective.draw(policy.schedule(), range(P), G, seed=1, step=2)
    prepared = Prepared(rollouts=rollouts, draws=draws, advantages=advantages)
    batch = objective.batch(prepared, torch.arange(P * items))
    if isinstance(batch, Pairs):
        batch = replace(batch, eps=batch.eps.double(), advantages=advantages.flatten())
    old, anchors = policy.weight.detach().clone(), {}
    for whose in objective.anchors(updates=2):
        policy.set(
            {"old": old, "start": policy.shifted("start", 0.1), "average": policy.shifted("average", 0.05)}[whose]
        )
        with torch.no_grad():
            anchors[whose] = objective.score(policy, batch, joint=joint)
        policy.set(old)
    policy.set(policy.shifted("move", moved))
    return replace(batch, anchors=anchors)


def gradient(objective: Any, policy: Toy, batch: Any, *, first: bool = False, joint: bool = True) -> tuple[Tensor, Any]:
    policy.weight.grad = None
    stats = objective.backward(policy, batch, first=first, joint=joint, weight=1 / 7)
    assert policy.weight.grad is not None
    return policy.weight.grad.clone(), stats


# ----------------------------------------------------------------------------------------------------- while θ is θ_old


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_before_the_first_update_the_ratio_is_one_and_the_gradient_turns_with_the_advantages(
    name: str, joint: bool
) -> None:
    objective, policy = objective_of(name, **NO_KL.get(name, {})), Toy(path_for(name))
    batch = scene(objective, policy, moved=0.0, joint=joint)
    inside = replace(batch, advantages=batch.advantages.clamp(-1, 1))  # beyond, NFT's optimality is flat
    plus, stats = gradient(objective, policy, inside, joint=joint)
    assert plus.abs().max() > 1e-3
    if name == "nft":
        assert stats.log_ratio is None
    else:
        assert stats.log_ratio.shape == ((3, P * G) if name == "awm" else inside.advantages.shape)
        # exactly, but for walks, whose steps were made in other batches, and matrix products may round otherwise
        assert stats.log_ratio.abs().max() <= (1e-11 if name in WALKS else 0)
    minus, _ = gradient(objective, policy, replace(inside, advantages=-inside.advantages), joint=joint)
    torch.testing.assert_close(plus, -minus, rtol=1e-9, atol=1e-12)
    # and the loop may say so in place of old scores; NFT needs its θ_old in any case
    bare = inside if name == "nft" else replace(inside, anchors={})
    first, stats = gradient(objective, policy, bare, first=True, joint=joint)
    torch.testing.assert_close(first, plus, rtol=1e-9, atol=1e-12)
    assert not stats.clipped.any()


def test_away_from_theta_old_the_ratio_is_not_one() -> None:
    """So the test above can fail."""
    for name in OBJECTIVES:
        objective, policy = objective_of(name), Toy(path_for(name))
        _, stats = gradient(objective, policy, scene(objective, policy, moved=0.02))
        assert name == "nft" or stats.log_ratio.abs().max() > 1e-3, name


# ---------------------------------------------------------------------------------------------- losses, written down anew


def spread(t: Tensor, like: Tensor) -> Tensor:
    return t.view(-1, *[1] * (like.ndim - 1)).to(like)


def coefficients(path: Any, t: Tensor) -> tuple[Tensor, Tensor]:
    """(a, b) of x_t = a·x0 + b·eps."""
    if isinstance(path, LinearPath):
        return 1 - t, t
    table = torch.cat([torch.ones(1, dtype=torch.float64), ALPHAS])  # at t = 0, 1/40, … 1, and linear in between
    below = (t * 40).floor().clamp(0, 39).long()
    alpha = table[below] + (t * 40 - below) * (table[below + 1] - table[below])
    return alpha**0.5, (1 - alpha) ** 0.5


def mixed(path: Any, x0: Tensor, eps: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """x_t and the network's target, from the definitions of the paths."""
    a, b = coefficients(path, spread(t, x0))
    x_t = a * x0 + b * eps
    if isinstance(path, LinearPath):
        return x_t, eps - x0
    return x_t, eps if path.prediction == "eps" else a * eps - b * x0


def split(path: Any, x_t: Tensor, t: Tensor, prediction: Tensor) -> tuple[Tensor, Tensor]:
    """(x0, eps) of a prediction: the two equations of `mixed`, solved."""
    a, b = coefficients(path, spread(t, x_t))
    if isinstance(path, LinearPath):
        return x_t - b * prediction, x_t + a * prediction
    if path.prediction == "eps":
        return (x_t - b * prediction) / a, prediction
    return a * x_t - b * prediction, b * x_t + a * prediction


def mean(x: Tensor) -> Tensor:
    return x.flatten(1).mean(1)


def clipped(ratio: Tensor, advantages: Tensor, clip: float | None) -> Tensor:
    """PPO's −min(ρA, clip(ρ)A)."""
    bounds = (1 - clip, 1 + clip) if clip else (0.0, math.inf)
    return -torch.minimum(ratio * advantages, ratio.clip(*bounds) * advantages)


def pair_loss(objective: Any, policy: Toy, batch: Pairs) -> Callable[[], Tensor]:
    """Loss [B] at the policy's weights, as a function that can be called again after moving them.

    Divisors that are constants for the gradient are those of the weights at which this function is called.
    """
    frozen: list[Tensor] = []

    def normalised(x0_pred: Tensor, x0: Tensor, number: int) -> Tensor:
        if len(frozen) <= number:
            frozen.append(mean((x0_pred - x0).abs()).detach().clamp(min=1e-5))
        return mean((x0_pred - x0) ** 2) / frozen[number]

    def predict(j: int) -> tuple[Tensor, Tensor, Tensor]:
        x_t, target = mixed(policy.path, batch.x0, batch.eps[j], batch.t[j])
        return policy.predict(x_t, batch.t[j], batch.cond), target, x_t

    draws, a = range(len(batch.t)), batch.advantages
    old, start, average = (batch.anchors.get(whose, {}) for whose in ("old", "start", "average"))

    def of_vgrpo() -> Tensor:
        errors, kls = [], []
        for j in draws:
            prediction, target, x_t = predict(j)
            x0_pred, eps_pred = split(policy.path, x_t, batch.t[j], prediction)
            errors.append(
                normalised(x0_pred, batch.x0, j)
                if objective.weighting == "adaptive"
                else mean((x0_pred - batch.x0) ** 2)
                if objective.weighting == "x0"
                else mean((eps_pred - batch.eps[j]) ** 2)
                if objective.weighting == "eps"
                else mean((prediction - target) ** 2)
            )
            kls.append(objective.kl_weight * mean((x0_pred - old["x0"][j]) ** 2) if objective.kl_weight else 0 * a)
            if start:
                kls[-1] = kls[-1] + objective.kl_start * mean((x0_pred - start["x0"][j]) ** 2)
        ratio = (old["error"].mean(0) - torch.stack(errors).mean(0)).exp()
        return clipped(ratio, a, objective.clip) + torch.stack(kls).mean(0)

    def of_awm() -> Tensor:
        total = torch.zeros_like(a)
        for j in draws:
            prediction, target, _ = predict(j)
            now, then = (mean((v - target) ** 2) ** objective.power for v in (prediction, old["prediction"][j]))
            ratio = (batch.t[j] * (then - now) / objective.power).exp()  # 1e-10^p is in both
            total += clipped(ratio, a / 5, objective.clip)
            if start:
                total += objective.kl_start * mean((prediction - start["prediction"][j]) ** 2)
            if average:
                total += objective.kl_average * mean((prediction - average["prediction"][j]) ** 2)
        return total / len(draws)

    def of_nft() -> Tensor:
        if objective.scaling == "paper":
            r, scale = 0.5 + 0.5 * a.clamp(-1, 1), 1.0
        else:
            r, scale = a.clamp(-5, 5) / 10 + 0.5, 5 / objective.beta
        total = torch.zeros_like(a)
        for j in draws:
            v, _, x_t = predict(j)
            v_old, beta = old["prediction"][j], objective.beta
            implicit = ((1 - beta) * v_old + beta * v, (1 + beta) * v_old - beta * v)
            clean = [split(policy.path, x_t, batch.t[j], each)[0] for each in implicit]
            better, worse = (normalised(each, batch.x0, 2 * j + i) for i, each in enumerate(clean))
            total += scale * (r * better + (1 - r) * worse)
            if start:
                total += objective.kl_start * mean((v - start["prediction"][j]) ** 2)
        return total / len(draws)

    return {"awm": of_awm, "nft": of_nft}.get(objective.name, of_vgrpo)


def step_density(objective: Any, policy: Toy, batch: Transitions) -> Normal:
    """The normal distribution of every step, by the papers' formulas."""
    prediction = policy.predict(batch.x, batch.t, batch.cond)
    x, t, after, level = batch.x, spread(batch.t, batch.x), spread(batch.t_next, batch.x), objective.level
    x0, x1 = split(policy.path, x, batch.t, prediction)
    if objective.noise == "ddim":
        now, then = (coefficients(policy.path, each)[0] ** 2 for each in (t, after))
        std = level * ((1 - then) / (1 - now) * (1 - now / then)) ** 0.5
        return Normal(then**0.5 * x0 + (1 - then - std**2) ** 0.5 * x1, std.expand_as(x))
    if objective.noise == "cps":
        std = after * math.sin(level * math.pi / 2)
        return Normal((1 - after) * x0 + (after**2 - std**2) ** 0.5 * x1, std.expand_as(x))
    # dx = (v − ½σ²·score)dt + σ dw, where the score of the path is −x1/t
    square = level**2 * (t / (1 - torch.where(t == 1, after, t)) if objective.noise == "flow" else torch.ones_like(t))
    return Normal(x - (t - after) * (prediction + square * x1 / (2 * t)), (square * (t - after)).sqrt().expand_as(x))


def walk_loss(objective: Any, policy: Toy, batch: Transitions, start: Tensor | None) -> Callable[[], Tensor]:
    def loss() -> Tensor:
        here = step_density(objective, policy, batch)
        out = clipped(
            (mean(here.log_prob(batch.x_next)) - batch.log_density_old).exp(), batch.advantages, objective.clip
        )
        if start is not None:  # the KL of two normal distributions of one spread, per dimension
            present = policy.weight.detach().clone()
            policy.set(start)
            with torch.no_grad():
                there = step_density(objective, policy, batch)
            policy.set(present)
            out = out + objective.kl_weight * mean(kl_divergence(here, there))
        return out

    return loss


CASES: list[tuple[str, str | None, dict[str, Any]]] = [
    *[("vgrpo", path, {"clip": 0.005, "kl_weight": 0.3}) for path in ("linear", "vp-eps", "vp-v")],
    ("vgrpo", None, {"clip": None}),
    ("vgrpo", None, {"clip": None, "kl_start": 0.4}),
    ("vgrpo", "vp-v", {"clip": 0.02, "kl_start": 0.4, "kl_weight": 0.3}),
    *[("vgrpo", "vp-v", {"weighting": w, "clip": 0.02, "kl_weight": 0.3}) for w in ("none", "x0", "eps")],
    ("elbo", None, {}),
    ("elbo", "vp-v", {}),
    ("fpo", None, {}),
    ("fpo", None, {"kl_weight": 0.3, "clip": None}),
    ("awm", None, {}),
    ("awm", "vp-eps", {"clip": 0.02}),
    ("awm", None, {"clip": 0.02, "kl_start": 0.4, "kl_average": 0.0, "power": 1.0}),
    ("awm", None, {"kl_start": 0.0, "kl_average": 0.4}),
    ("awm", None, {"kl_start": 0.0, "kl_average": 0.0}),
    ("nft", None, {}),
    ("nft", "vp-v", {"beta": 0.1, "kl_start": 0.4}),
    ("nft", None, {"beta": 0.3, "kl_start": 0.0, "scaling": "code"}),
    ("ddpo", None, {}),
    ("ddpo", "vp-v", {"clip": None, "kl_weight": 0.4, "level": 0.6}),
    ("flow_grpo", None, {}),
    ("flow_grpo", None, {"clip": None}),
    ("flow_grpo", None, {"noise": "cps", "clip": 0.05, "kl_weight": 0.4}),
    ("flow_grpo_fast", None, {"clip": 0.02}),
    ("dance_grpo", None, {"clip": 0.05, "kl_weight": 0.4}),
    ("mix_grpo", None, {"clip": None}),
    ("mix_grpo", None, {"clip": 0.02, "window_start": 2}),
    ("branch_grpo", None, {"clip": 0.05, "kl_weight": 0.1}),
    ("branch_grpo", None, {"clip": None, "noise": "flow"}),
]  # fmt: skip


def named(case: Any) -> str | None:
    if isinstance(case, dict):
        return ",".join(f"{k}={v}" for k, v in case.items()) or "defaults"
    return str(case) if case else "own path"


@pytest.mark.parametrize(("name", "path", "settings"), CASES, ids=named)
def test_the_gradient_is_that_of_the_loss_by_differences(name: str, path: str | None, settings: dict[str, Any]) -> None:
    policy = Toy(path_for(name, path))
    objective = objective_of(name, **settings)
    start = policy.shifted("start", 0.1)
    batch = scene(objective, policy, moved=0.04)
    found, stats = gradient(objective, policy, batch)
    loss = (
        pair_loss(objective, policy, batch)
        if isinstance(batch, Pairs)
        else walk_loss(objective, policy, batch, start if objective.kl_weight else None)
    )
    with torch.no_grad():
        at = policy.weight.clone()
        loss()  # fixes the divisors
        for i in range(3):
            direction = torch.randn(9, 9, generator=generator("direction", i), dtype=torch.float64)
            direction /= direction.norm()
            values = []
            for sign in (1, -1):
                policy.set(at + sign * 1e-6 * direction)
                values.append(loss().sum().item() / 7)
            policy.set(at)
            difference = (values[0] - values[1]) / 2e-6
            assert difference == pytest.approx((found * direction).sum().item(), rel=2e-5, abs=1e-7)
    assert found.norm() > 1e-3
    if name != "nft":
        assert stats.log_ratio.abs().max() > 1e-3  # away from θ_old
        clip = objective.clip
        assert (0 < stats.clipped.mean() < 1) if clip else not stats.clipped.any()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("vgrpo", {"clip": 0.005, "kl_weight": 0.3, "kl_start": 0.4}),
        ("elbo", {}),
        ("fpo", {"clip": 0.02}),
        ("awm", {}),
        ("awm", {"clip": 0.02}),
        ("awm", {"kl_start": 0.0, "kl_average": 0.0}),
        ("nft", {}),
        ("nft", {"beta": 0.1, "scaling": "code"}),
        ("nft", {"kl_start": 0.0}),
    ],
    ids=named,
)
def test_one_pair_at_a_time_is_all_at_once(name: str, settings: dict[str, Any]) -> None:
    objective, policy = objective_of(name, **settings), Toy(LinearPath())
    batch = scene(objective, policy, moved=0.04)
    (at_once, one), (by_draw, other) = (gradient(objective, policy, batch, joint=joint) for joint in (True, False))
    assert at_once.abs().max() > 1e-3
    torch.testing.assert_close(by_draw, at_once, rtol=1e-10, atol=1e-10)
    assert one.means.keys() == other.means.keys() and one.means
    for name in one.means:
        torch.testing.assert_close(one.means[name], other.means[name], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(one.clipped, other.clipped)
    if one.log_ratio is not None:
        assert one.log_ratio.abs().max() > 1e-3
        torch.testing.assert_close(one.log_ratio, other.log_ratio, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["awm", "nft"])
def test_awm_and_nft_have_the_gradient_of_the_published_loss(name: str) -> None:
    """The functions whose values are published as vectors, differentiated by torch: their defaults, without a KL."""
    objective, policy = objective_of(name, **NO_KL[name]), Toy(LinearPath())
    batch = scene(objective, policy, moved=0.04)
    found, stats = gradient(objective, policy, batch)
    x_t = [mixed(policy.path, batch.x0, e, t)[0] for e, t in zip(batch.eps, batch.t, strict=True)]
    v = torch.stack([policy.predict(x, t, batch.cond) for x, t in zip(x_t, batch.t, strict=True)])
    v_old = batch.anchors["old"]["prediction"]
    if name == "awm":
        loss = awm_loss(batch.x0, batch.t, batch.eps, v_old, v, batch.advantages / 5)
    else:
        loss = nft_loss(batch.x0, batch.t, batch.eps, v_old, v, batch.advantages)
    (expected,) = torch.autograd.grad(loss.sum() / 7, policy.weight)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    target = batch.eps - batch.x0
    if name == "awm":
        then, now = (((u - target) ** 2).flatten(2).mean(2) ** 0.25 for u in (v_old, v.detach()))
        torch.testing.assert_close(stats.log_ratio, batch.t * (then - now) / 0.25)
        torch.testing.assert_close(stats.means["error"], ((v.detach() - target) ** 2).flatten(2).mean((0, 2)))
    else:
        torch.testing.assert_close(stats.means["kl_old"], ((v.detach() - v_old) ** 2).flatten(2).mean((0, 2)))


def test_optimality_and_scale_of_diffusion_nft() -> None:
    advantages = torch.tensor([-9.0, -5.0, -1.0, -0.5, 0.0, 0.5, 1.0, 5.0, 9.0], dtype=torch.float64)
    r, scale = NFT().optimality(advantages)
    assert (r.tolist(), scale) == ([0, 0, 0, 0.25, 0.5, 0.75, 1, 1, 1], 1)
    r, scale = NFT(scaling="code", beta=0.1).optimality(advantages)
    assert scale == pytest.approx(50)
    torch.testing.assert_close(r, torch.tensor([0, 0, 0.4, 0.45, 0.5, 0.55, 0.6, 1, 1], dtype=torch.float64))


def test_at_theta_old_the_two_scalings_of_nft_pull_alike() -> None:
    """∇ = scale·(2r − 1)·β·∇ℓ: A·β for the paper's, A/5·5 for the code's, |A| ≤ 1; so β is gone from the code's."""
    advantages = 2 * torch.rand(P, G, generator=generator("a"), dtype=torch.float64) - 1
    found = {}
    for scaling in ("paper", "code"):
        for beta in (1.0, 0.1):
            objective, policy = objective_of("nft", kl_start=0.0, scaling=scaling, beta=beta), Toy(LinearPath())
            batch = scene(objective, policy, moved=0.0, advantages=advantages)
            found[scaling, beta] = gradient(objective, policy, batch)[0]
    torch.testing.assert_close(found["code", 0.1], found["code", 1.0])
    torch.testing.assert_close(found["code", 1.0], found["paper", 1.0])
    torch.testing.assert_close(found["paper", 0.1], 0.1 * found["paper", 1.0])


def test_theta_old_of_nft_follows_as_published() -> None:
    """η_i = min(0.001·i, 0.5)."""
    assert [NFT().old_decay(i) for i in (0, 1, 100, 500, 9999)] == pytest.approx([0, 0.001, 0.1, 0.5, 0.5])
    assert all(objective_of(name).old_decay(3) is None for name in OBJECTIVES if name != "nft")


# ---------------------------------------------------------------------------------------------------- which pairs, when


def test_nft_scores_every_time_of_the_rollout_with_noise_of_each_pictures_own() -> None:
    policy, objective = Toy(LinearPath()), NFT()
    batch = scene(objective, policy, moved=0.0)
    torch.testing.assert_close(batch.t, policy.schedule()[:, None].expand(K, P * G))
    assert len({tuple(e.flatten().tolist()) for e in batch.eps.flatten(0, 1)}) == K * P * G


@pytest.mark.parametrize(("name", "draws"), [("fpo", 4), ("elbo", 4), ("awm", 6)])
def test_whose_pairs_are_nobody_elses(name: str, draws: int) -> None:
    schedule = torch.linspace(1, 0.1, 12)
    made = build_objective({"name": name}).draw(schedule, range(50), 4, seed=1, step=2)
    assert made.t.shape == (draws, 200)
    assert made.set_of_row.tolist() == list(range(200)) and len(set(made.identities)) == 200
    index = (made.t[..., None] - schedule).abs().argmin(-1)
    assert index.flatten().bincount(minlength=12).min() > 0.6 * draws * 200 / 12
    strata = (index // (12 // draws)).sort(0).values
    stratified = bool((strata == torch.arange(draws)[:, None]).all())
    assert stratified == (name == "awm")  # FPO's times are independent, AWM's one in each part


def test_the_elbo_is_fpo_without_its_clip() -> None:
    fpo, elbo = (build_objective({"name": name}).model_dump(exclude={"name"}) for name in ("fpo", "elbo"))
    assert fpo | {"clip": None} == elbo
    assert (fpo["clip"], fpo["weighting"], fpo["kl_weight"]) == (0.05, "none", 0)


# ------------------------------------------------------------------------------------------------------- in the real loop

LOOP: dict[str, dict[str, Any]] = {
    **{name: {"draws": 2} for name in PAIRS},
    "awm": {"draws": 2, "kl_start": 0.1, "kl_average": 0.1},
    **{name: SMALL.get(name, {}) for name in WALKS},
}
"""Settings for 4 members and 4 steps, of which 3 are noisy."""


def run_with(settings: dict[str, Any], name: str, objective: dict[str, Any] | None = None, **changes: Any) -> Run:
    settings = copy.deepcopy(settings)
    settings["objective"] = {"name": name, **LOOP[name], **(objective or {})}
    settings["prompts"]["test"] = None
    if name == "awm":
        settings["run"]["ema"] = 0.9
    for key, value in changes.items():
        put(settings, key.replace("__", "."), value)
    return train(parse(settings))


def weights(run: Run) -> dict[str, Tensor]:
    return dict(checkpoint.load(run.checkpoints).weights)


@pytest.fixture
def real(settings: dict[str, Any], mini_vp: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings for the objective that the test is about."""
    if request.getfixturevalue("name") == "ddpo":
        settings["model"]["path"] = str(mini_vp)
    return settings


@pytest.fixture(scope="session")
def mini_vp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vgrpo.testing import build_mini

    return build_mini("sd15", tmp_path_factory.mktemp("models") / "sd15")


# 4 prompts of 4 pictures, 4 steps of the sampler, 2 pairs, 2 updates of 8 pictures.
# A ratio inside exp needs its 2 pairs before the gradient: the second update calls 8·2 twice; and the first update looks
# at the ratio of one pair of its first micro-batch, 8 pictures or 1.
CALLS = {
    "vgrpo": (64, 8 * 2, 0, 16 + 32, 8),
    "elbo": (64, 8 * 2, 0, 16 + 32, 8),
    "fpo": (64, 8 * 2, 0, 16 + 32, 8),
    "awm": (64, 8 * 2, 16 * 2 * 2, 16 * 2, 8),  # both KLs, on all pictures
    "nft": (64, 16 * 2, 16 * 2, 16 * 2, 0),  # θ_old is another network from the second step on
    "ddpo": (64, 0, 0, 16 * 3, 0),
    "flow_grpo": (64, 0, 16 * 3, 16 * 3, 0),  # with a KL to the start
    "flow_grpo_fast": (64, 0, 0, 16 * 2, 0),
    "dance_grpo": (64, 0, 0, 16 * 2, 0),  # 60 % of 3
    "mix_grpo": (64, 0, 0, 16 * 2, 0),
    "branch_grpo": (4 * (1 + 2 + 2 + 4), 0, 0, 4 * (2 + 2 + 4), 0),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_two_updates_in_the_real_loop_cost_what_they_must_in_any_micro_batch(name: str, real: dict[str, Any]) -> None:
    found = []
    for micro_batch, looked in ((16, 8), (1, 1)):
        run = run_with(real, name, update__per_rollout=2, update__micro_batch=micro_batch, run__steps=1)
        (row,) = run.metrics()
        rollout, old, reference, update, look = CALLS[name]
        expected = (rollout, old, reference, update + (looked if look else 0))
        assert tuple(row[f"calls/{kind}"] for kind in ("rollout", "old", "reference", "update")) == expected
        assert row["network_calls"] == sum(expected)
        assert row["updates"] == 2 and row["weight_change"] > 1e-5
        if name == "nft":
            assert "ratio/first" not in row
        else:
            assert row["ratio/first"] < 1e-5
            assert row["ratio/std"] > 1e-6  # of the last update
        found.append(weights(run))
    assert max(w.abs().max() for n, w in found[0].items() if "lora_B" in n) > 5e-3
    for key in found[0]:
        torch.testing.assert_close(found[0][key], found[1][key], rtol=0, atol=2e-4)


def test_flash_is_cheaper_in_the_real_loop(settings: dict[str, Any]) -> None:
    run = run_with(settings, "mix_grpo", {"window": 1, "flash": 0.5}, run__steps=1)
    row = run.metrics()[0]
    assert row["calls/rollout"] == 16 * (1 + 2)  # one step, and half of the three that remain
    assert row["calls/update"] == 16


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("nft", {"old_rate": 0.3, "kl_start": 0.1}),  # η = 0, 0.3, 0.5, 0.5
        ("mix_grpo", {"window": 1, "window_every": 1, "kl_weight": 0.1}),
        ("awm", {}),
        ("branch_grpo", {"keep_depths": 2}),
    ],
)
def test_a_resumed_run_is_the_straight_one(
    name: str, objective: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    changes = {"run__steps": 4, "run__save_every": 2, "update__per_rollout": 2}
    straight = run_with(settings, name, objective, **changes)
    shutil.copytree(straight.folder, tmp_path / "broken")
    broken = Run(tmp_path / "broken")
    assert [path.name[-1] for path in checkpoint.complete(broken.checkpoints)] == ["2", "4"]
    shutil.rmtree(checkpoint.complete(broken.checkpoints)[1])
    resumed = train(parse(broken.settings()), resume=broken.folder)
    a, b = checkpoint.load(straight.checkpoints), checkpoint.load(resumed.checkpoints)
    assert (a.step, a.updates) == (b.step, b.updates) == (4, 8)
    for part in ("weights", "old", "averaged", "moments"):
        ours, theirs = getattr(a, part), getattr(b, part)
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert torch.equal(ours[key], theirs[key]), (part, key)
    timeless = [
        [{k: v for k, v in row.items() if "time" not in k and k != "seconds"} for row in run.metrics()]
        for run in (straight, resumed)
    ]
    assert timeless[0] == timeless[1] and len(timeless[0]) == 4
    assert bool(a.old) == (name == "nft")
    if name == "nft":
        away = max((a.old[key] - a.weights[key]).abs().max().item() for key in a.old)
        assert away > 1e-4  # θ_old is a network of its own, so it had to be kept


def test_theta_old_of_nft_makes_the_samples_and_follows_once_a_step(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vgrpo import training

    sampled: list[dict[str, Tensor]] = []

    def watched(policy: Any, *args: Any, **more: Any) -> Any:
        sampled.append({name: p.detach().clone() for name, p in policy.trainable.items()})
        return generate(policy, *args, **more)

    monkeypatch.setattr(training, "generate", watched)
    changes = {"run__steps": 3, "run__save_every": 1, "run__keep": 3, "update__per_rollout": 2}
    run = run_with(settings, "nft", {"old_rate": 0.3}, **changes)
    folders = checkpoint.complete(run.checkpoints)
    weights, old = ([load_file(f / f"{part}.safetensors") for f in folders] for part in ("weights", "old"))
    for name in old[0]:
        assert torch.equal(old[0][name], weights[0][name])  # η = 0 after the first step
        torch.testing.assert_close(old[1][name], 0.3 * old[0][name] + 0.7 * weights[1][name])
        torch.testing.assert_close(old[2][name], 0.5 * old[1][name] + 0.5 * weights[2][name])
        assert torch.equal(sampled[1][name], old[0][name]) and torch.equal(sampled[2][name], old[1][name])
    assert max((old[1][name] - weights[1][name]).abs().max().item() for name in old[1]) > 1e-4


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("vgrpo", {"kl_start": 0.5}),
        ("flow_grpo", {"kl_weight": 0.5}),
        ("branch_grpo", {"kl_weight": 0.5}),
        ("awm", {"kl_start": 0.5, "kl_average": 0.0}),
        ("nft", {"kl_start": 0.5}),
    ],
)
def test_the_kl_to_the_start_is_to_the_policy_before_training(
    name: str, objective: dict[str, Any], settings: dict[str, Any]
) -> None:
    rows = run_with(settings, name, objective, run__steps=3).metrics()
    # with one update a step, a KL to θ_old would be 0 in all of them
    assert rows[0]["kl_start"] == 0 < min(rows[1]["kl_start"], rows[2]["kl_start"])


def test_the_kl_to_the_average_is_to_the_moving_average(settings: dict[str, Any]) -> None:
    """By its weights: nothing else changes between an average that stays at the start and one that moves at once."""
    rows = {
        ema: run_with(settings, "awm", {"kl_start": 1e-9, "kl_average": 1e-9}, run__ema=ema, run__steps=2).metrics()
        for ema in (0.0, 0.9)
    }
    assert rows[0.0][0]["kl_average"] == rows[0.9][0]["kl_average"] == 0
    assert rows[0.0][1]["kl_average"] == 0  # an average of decay 0 is the policy itself
    assert 0 < rows[0.9][1]["kl_average"] < rows[0.9][1]["kl_start"]


def test_a_kl_to_an_average_needs_one(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="objective awm has a KL to the moving average: set run.ema"):
        parse(settings | {"objective": {"name": "awm", "draws": 2}})
    parse(settings | {"objective": {"name": "awm", "draws": 2, "kl_average": 0}})


@pytest.mark.parametrize(
    ("name", "objective"),
    [("vgrpo", {}), ("nft", {}), ("flow_grpo", {"kl_weight": 0})],
)
def test_it_makes_pictures_brighter(name: str, objective: dict[str, Any], settings: dict[str, Any]) -> None:
    settings["evaluation"] |= {"images_per_prompt": 4}
    run = run_with(
        settings, name, objective, run__steps=8, optimizer__lr=0.05, rollout__group_size=8,
        prompts__test=settings["prompts"]["train"],
    )  # fmt: skip
    before, after = (row["scores"]["brightness"] for row in run.evaluations())
    assert after > before + 0.003, (before, after)  # on the same seeds
