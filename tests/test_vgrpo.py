"""V-GRPO on a network of a few weights in float64, where gradients can be checked by differences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from vgrpo.errors import UserError
from vgrpo.losses import vgrpo_loss, x0_divergence
from vgrpo.objectives.vgrpo import VGRPO
from vgrpo.paths import LinearPath, VPPath
from vgrpo.seeds import generator, noise
from vgrpo.types import Pairs

M, B = 4, 16
PATHS = {"linear": LinearPath(), "vp": VPPath(torch.linspace(0.999, 0.01, 50, dtype=torch.float64), "v")}


class Small:
    """A policy that is one matrix."""

    def __init__(self, path: Any, seed: int = 0) -> None:
        self.path = path
        self.weight = (0.5 * torch.randn(9, 9, generator=generator("w", seed), dtype=torch.float64)).requires_grad_()

    def predict(self, x_t: Tensor, t: Tensor, cond: Any) -> Tensor:
        return torch.tanh(x_t.flatten(1) @ self.weight * (1 + t[:, None])).view_as(x_t) + cond["c"]


def batch(objective: VGRPO, policy: Small, moved: float) -> Pairs:
    """A batch scored under the policy's weights, which are then moved."""
    x0, eps = (noise([(n, i) for i in range(k)], (1, 3, 3)).double() for n, k in (("x", B), ("e", M * B)))
    t = torch.rand(M, B, generator=generator("t"), dtype=torch.float64) * 0.98 + 0.01
    advantages = torch.randn(B, generator=generator("a"), dtype=torch.float64)
    one = Pairs(x0=x0, cond={"c": 0.1 * x0}, t=t, eps=eps.unflatten(0, (M, B)), advantages=advantages)
    with torch.no_grad():
        error, x0_old = objective.errors(policy, one, joint=True)
        policy.weight += moved * torch.randn(9, 9, generator=generator("move"), dtype=torch.float64)
    start = x0_old + 0.1 * torch.randn(x0_old.shape, generator=generator("start"), dtype=torch.float64)
    return replace(one, anchors={"old": {"error": error, "x0": x0_old}, "start": {"x0": start}})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("weighting", ["adaptive", "none", "x0", "eps"])
@pytest.mark.parametrize(
    "settings", [{"clip": None}, {"clip": 1e-3}, {"clip": 1e-3, "kl_weight": 0.3}, {"clip": 1e-3, "kl_start": 0.2}]
)
def test_one_draw_at_a_time_has_the_gradient_of_the_loss(path: str, weighting: Any, settings: dict[str, Any]) -> None:
    objective, policy = VGRPO(weighting=weighting, **settings), Small(PATHS[path])
    rows = batch(objective, policy, moved=0.02)
    error, x0_pred = objective.errors(policy, rows, joint=True)
    kl = torch.stack([x0_divergence(a, b) for a, b in zip(x0_pred, rows.anchors["old"]["x0"], strict=True)]).mean(0)
    loss = vgrpo_loss(
        error, rows.anchors["old"]["error"], rows.advantages, clip=objective.clip, kl=kl, kl_weight=objective.kl_weight
    )
    to_start = (x0_pred - rows.anchors["start"]["x0"]).square().mean((0, 2, 3, 4))
    (expected,) = torch.autograd.grad((loss + objective.kl_start * to_start).sum() / B, policy.weight)
    assert expected.abs().max() > 1e-3
    for joint in (True, False):
        policy.weight.grad = None
        stats = objective.backward(policy, rows, first=False, joint=joint, weight=1 / B)
        torch.testing.assert_close(policy.weight.grad, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(stats.log_ratio, (rows.anchors["old"]["error"] - error).mean(0).detach())
        torch.testing.assert_close(stats.means["kl"], kl.detach())
        if objective.kl_start:
            torch.testing.assert_close(stats.means["kl_start"], to_start.detach())
        assert 0 < stats.clipped.mean() < 1 or objective.clip is None
        assert stats.log_ratio.abs().max() > 1e-3


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_gradient_by_finite_differences(path: str, joint: bool) -> None:
    # the adaptive weight is a constant for the gradient, hence no difference quotient of the loss: take the plain error
    objective, policy = VGRPO(weighting="x0", clip=0.2, kl_weight=0.3), Small(PATHS[path])
    rows = batch(objective, policy, moved=0.02)
    objective.backward(policy, rows, first=False, joint=joint, weight=1.0)

    def loss() -> float:
        with torch.no_grad():
            error, x0_pred = objective.errors(policy, rows, joint=True)
            kl = torch.stack(
                [x0_divergence(a, b) for a, b in zip(x0_pred, rows.anchors["old"]["x0"], strict=True)]
            ).mean(0)
            return (
                vgrpo_loss(error, rows.anchors["old"]["error"], rows.advantages, clip=0.2, kl=kl, kl_weight=0.3)
                .sum()
                .item()
            )

    for i, j in ((0, 0), (3, 5), (8, 2)):
        values = []
        for step in (1e-6, -2e-6):
            with torch.no_grad():
                policy.weight[i, j] += step
            values.append(loss())
        with torch.no_grad():
            policy.weight[i, j] += 1e-6
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(policy.weight.grad[i, j].item(), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("joint", [True, False])
def test_while_theta_is_old_the_stored_scores_are_not_needed(joint: bool) -> None:
    objective, policy = VGRPO(), Small(PATHS["linear"])
    rows = batch(objective, policy, moved=0.0)
    objective.backward(policy, rows, first=False, joint=joint, weight=1.0)
    stored = policy.weight.grad.clone()
    policy.weight.grad = None
    bare = replace(rows, anchors={})
    stats = objective.backward(policy, bare, first=True, joint=joint, weight=1.0)
    torch.testing.assert_close(policy.weight.grad, stored, rtol=1e-12, atol=1e-14)
    assert (stats.log_ratio == 0).all()
    # antisymmetry: turning the rewards round turns the step round
    policy.weight.grad = None
    turned = replace(bare, advantages=-bare.advantages)
    objective.backward(policy, turned, first=True, joint=joint, weight=1.0)
    torch.testing.assert_close(policy.weight.grad, -stored, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("share", "sets"), [("group", 3), ("batch", 1), ("none", 12)])
def test_who_shares_pairs(share: Any, sets: int) -> None:
    schedule = torch.linspace(1, 0.1, 8)
    draws = VGRPO(share=share).draw(schedule, [0, 2, 5], 4, seed=1, step=2)
    assert draws.t.shape == (4, sets)
    assert len(set(draws.identities)) == sets
    assert draws.set_of_row.bincount(minlength=sets).tolist() == [12 // sets] * sets
    assert all(t in schedule for t in draws.t.flatten())
    strata = draws.t.sort(0, descending=True).values
    assert torch.equal(strata, draws.t)  # one time in each quarter, from noise to data
    again = VGRPO(share=share).draw(schedule, [2], 4, seed=1, step=2)
    which = {"group": [1], "batch": [0], "none": [4, 5, 6, 7]}[share]
    assert torch.equal(again.t, draws.t[:, which])  # the same on a process that has that prompt alone
    later = VGRPO(share=share).draw(schedule, [0, 2, 5], 4, seed=1, step=3)
    assert set(later.identities).isdisjoint(draws.identities)


def test_times_may_be_held_to_a_range() -> None:
    schedule = torch.tensor([1.0, 0.8, 0.6, 0.4, 0.2])
    draws = VGRPO(draws=2, time_range=(0.5, 0.9)).draw(schedule, list(range(40)), 2, seed=0, step=0)
    assert torch.equal(draws.t, torch.tensor([[0.8], [0.6]]).expand(2, 40))
    uniform = VGRPO(draws=4, times="uniform", time_range=(0.3, 1.0)).draw(schedule, list(range(40)), 2, seed=0, step=0)
    assert set(uniform.t.flatten().tolist()) == set(schedule[:4].tolist())
    with pytest.raises(UserError, match=r"time_range=\[0.5, 0.9\] leaves 2 of the schedule's times.*draws=3"):
        VGRPO(draws=3, time_range=(0.5, 0.9)).draw(schedule, [0], 2, seed=0, step=0)
