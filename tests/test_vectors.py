"""Every formula against float64 values that were computed from the formulas alone (tests/vectors)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vgrpo.advantages import combine_rewards, group_advantages, hard_clip, soft_clip
from vgrpo.losses import (
    awm_log_likelihood,
    awm_loss,
    fpo_loss,
    nft_loss,
    nft_optimality,
    self_normalised_error,
    surrogate_gradient,
    velocity_error,
    vgrpo_loss,
    x0_divergence,
)
from vgrpo.paths import LinearPath, VPPath
from vgrpo.sde import cps_step, dance_step, ddim_step, flow_step, log_density


def vectors(name: str) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    stored = json.loads((Path(__file__).parent / f"vectors/{name}.json").read_text())
    inputs = {k: torch.tensor(v, dtype=torch.float64) for k, v in stored["inputs"].items()}
    return inputs, stored["settings"], stored["expected"]


def assert_same(ours: Tensor, expected: Any) -> None:
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)


def rows(x: Tensor, group: int) -> Tensor:
    """[M, P, ...] to [M, P·G, ...]: what a group shares, once for each member."""
    return x.repeat_interleave(group, 1)


def x0_predictions(i: dict[str, Tensor], v: Tensor) -> tuple[Tensor, Tensor]:
    """(x_t, x0_pred) [M, N, *latent] of the vgrpo vectors."""
    path, group = LinearPath(), i["rewards"].shape[1]
    t, eps = rows(i["t"], group), rows(i["eps"], group)
    x_t = torch.stack([path.noisy(i["x0"], e, s) for e, s in zip(eps, t, strict=True)])
    return x_t, torch.stack([path.split(x, s, p)[0] for x, s, p in zip(x_t, t, v, strict=True)])


def errors(x0_pred: Tensor, x0: Tensor, floor: float) -> Tensor:
    return torch.stack([self_normalised_error(p, x0, floor=floor) for p in x0_pred])


def test_vgrpo_pieces() -> None:
    i, s, e = vectors("vgrpo")
    x_t, new = x0_predictions(i, i["v_new"])
    _, old = x0_predictions(i, i["v_old"])
    assert_same(x_t, e["x_t"])
    assert_same(new, e["x0_new"])
    error_new, error_old = errors(new, i["x0"], s["floor"]), errors(old, i["x0"], s["floor"])
    assert_same(error_new, e["error_new"])
    assert_same(error_old, e["error_old"])
    assert_same((error_old - error_new).mean(0), e["log_ratio"])
    assert_same((error_old - error_new).mean(0).exp(), e["ratio"])
    assert_same(torch.stack([x0_divergence(a, b) for a, b in zip(new, old, strict=True)]).mean(0), e["kl"])
    advantages = group_advantages(i["rewards"]).flatten()
    assert_same(advantages, e["advantages"])
    assert_same(soft_clip(advantages, s["eta"]), e["soft_advantages"])


@pytest.mark.parametrize("case", ["clip", "kl", "soft", "all"])
def test_vgrpo_loss_and_gradient(case: str) -> None:
    i, s, e = vectors("vgrpo")
    advantages = group_advantages(i["rewards"]).flatten()
    advantages = soft_clip(advantages, s["eta"]) if case in ("soft", "all") else advantages
    clip = s["clip"] if case in ("clip", "all") else None
    beta = s["beta"] if case in ("kl", "all") else 0.0
    v = i["v_new"].clone().requires_grad_()
    _, new = x0_predictions(i, v)
    _, old = x0_predictions(i, i["v_old"])
    error_new, error_old = errors(new, i["x0"], s["floor"]), errors(old, i["x0"], s["floor"])
    kl = torch.stack([x0_divergence(a, b) for a, b in zip(new, old, strict=True)]).mean(0)
    loss = vgrpo_loss(error_new, error_old, advantages, clip=clip, kl=kl, kl_weight=beta)
    assert_same(loss.detach(), e[f"per_sample_loss_{case}"])
    (gradient,) = torch.autograd.grad(loss.mean(), v, retain_graph=True)
    assert_same(gradient, e[f"grad_v_new_{case}"])

    # the same gradient by the factor that lets each draw go backward alone
    slope, clipped = surrogate_gradient((error_old - error_new).mean(0).detach(), advantages, clip=clip)
    by_draw = torch.zeros_like(v)
    for j in range(len(error_new)):
        part = (slope * error_new[j] + beta * x0_divergence(new[j], old[j])).sum() / (len(error_new) * len(loss))
        by_draw += torch.autograd.grad(part, v, retain_graph=True)[0]
    assert_same(by_draw, e[f"grad_v_new_{case}"])
    assert not clipped.any()  # these ratios are inside the clip range; test_losses.py has ratios outside


def test_vgrpo_on_the_variance_preserving_path() -> None:
    i, s, e = vectors("vgrpo_vp")
    path, group = VPPath(torch.linspace(0.99, 0.01, 10, dtype=torch.float64)), 3
    alpha_bar, eps = rows(i["alpha_bar"], group), rows(i["eps"], group)
    x_t = torch.stack([path.noisy_at(i["x0"], n, a) for n, a in zip(eps, alpha_bar, strict=True)])
    assert_same(x_t, e["x_t"])
    x0_pred = torch.stack([path.split_at(x, a, p)[0] for x, a, p in zip(x_t, alpha_bar, i["eps_pred"], strict=True)])
    assert_same(x0_pred, e["x0_pred"])
    assert_same(errors(x0_pred, i["x0"], s["floor"]), e["error"])


@pytest.mark.parametrize(
    ("name", "loss", "settings"),
    [("nft", nft_loss, ("beta", "floor")), ("awm", awm_loss, ("power",)), ("fpo", fpo_loss, ("clip",))],
)
def test_other_objectives(name: str, loss: Any, settings: tuple[str, ...]) -> None:
    i, s, e = vectors(name)
    i["v_new"].requires_grad_()
    per_sample = loss(**i, **{key: s[key] for key in settings})
    assert_same(per_sample.detach(), e["per_sample_loss"])
    per_sample.mean().backward()
    assert_same(i["v_new"].grad, e["grad_v_new"])


def test_pieces_of_other_objectives() -> None:
    i, s, e = vectors("awm")
    new, old = (
        awm_log_likelihood(velocity_error(i[v], i["x0"], i["eps"]), i["t"], power=s["power"])
        for v in ("v_new", "v_old")
    )
    assert_same(new, e["logp_new"])
    assert_same(new - old, e["log_ratio"])
    i, _, e = vectors("fpo")
    new, old = (velocity_error(i[v], i["x0"], i["eps"]) for v in ("v_new", "v_old"))
    assert_same((old - new).mean(0), e["log_ratio"])
    assert_same((old - new).mean(0).exp(), e["ratio"])
    i, _, e = vectors("nft")
    assert_same(nft_optimality(i["advantages"]), e["optimality"])


@pytest.mark.parametrize(
    ("name", "step", "prediction", "times"),
    [
        ("flow_sde", flow_step, "v", ("t", "t_next")),
        ("dance_sde", dance_step, "v", ("t", "t_next")),
        ("cps", cps_step, "v", ("t", "t_next")),
        ("ddim_sde", ddim_step, "eps_pred", ("alpha_bar", "alpha_bar_next")),
    ],
)
@pytest.mark.parametrize("per_row", [False, True])
def test_stochastic_steps(name: str, step: Any, prediction: str, times: tuple[str, str], per_row: bool) -> None:
    i, s, e = vectors(name)
    now, after = (torch.tensor(s[k], dtype=torch.float64) for k in times)
    if per_row:
        now, after = now.expand(len(i["x"])), after.expand(len(i["x"]))
    level = {k: v for k, v in s.items() if k in ("a", "eta")}
    mean, std = step(i["x"], i[prediction], now, after, **level)
    assert_same(mean, e["mean"])
    assert std.shape == (now.shape if per_row else ())
    torch.testing.assert_close(std, torch.full_like(std, e["step_std"]), rtol=0, atol=1e-9)
    x_next = mean + std.view(-1, 1, 1, 1) * i["noise"]
    assert_same(x_next, e["x_next"])
    if "logp" in e:
        assert_same(log_density(x_next, mean, std), e["logp"])


def test_advantages() -> None:
    i, s, e = vectors("advantages")
    assert_same(group_advantages(i["rewards"]), e["group"])
    assert_same(group_advantages(i["rewards"], scale="batch"), e["global_std"])
    assert_same(soft_clip(group_advantages(i["rewards"]), s["eta"]), e["group_soft"])
    assert_same(hard_clip(group_advantages(i["rewards"]), s["bound"]), e["group_hard"])


@pytest.mark.parametrize("how", ["sum", "normalised"])
def test_combined_rewards(how: Any) -> None:
    i, s, e = vectors("combine")
    assert_same(combine_rewards(i, s["weights"], how=how), e[how])


def rollout(order: int, steps: int, advance: Any) -> Tensor:
    """diffusers' DPM-Solver++ on a flow whose velocity is known, at the vectors' own times from 1 to 0."""
    from diffusers import DPMSolverMultistepScheduler

    i, s, _ = vectors("dpmpp")
    scheduler = DPMSolverMultistepScheduler(
        solver_order=order, use_flow_sigmas=True, prediction_type="flow_prediction", algorithm_type="dpmsolver++"
    )
    scheduler.set_timesteps(steps)
    scheduler.sigmas = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    x, variance = i["x1"], s["s0"] ** 2
    for k in range(steps):
        t = 1 - k / steps
        x0 = i["m"] + (1 - t) * variance / ((1 - t) ** 2 * variance + t**2) * (x - (1 - t) * i["m"])
        x = advance(scheduler, k, (x - x0) / t, x)
    return x.double()


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("steps", [5, 10, 20, 40])
def test_the_rollout_solver(order: int, steps: int) -> None:
    def step(scheduler: Any, k: int, v: Tensor, x: Tensor) -> Tensor:
        return scheduler.step(v, scheduler.timesteps[k], x, return_dict=False)[0]

    expected = torch.tensor(vectors("dpmpp")[2][f"order{order}_{steps}"], dtype=torch.float64)
    # `step`, which our rollouts use, casts to float32; the next test has its formulas in float64
    torch.testing.assert_close(rollout(order, steps, step), expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("steps", [5, 10, 20, 40])
def test_the_rollout_solver_in_float64(order: int, steps: int) -> None:
    """The updates out of which diffusers' `step` is made, in the vectors' order and without its cast to float32."""
    predictions = []

    def update(scheduler: Any, k: int, v: Tensor, x: Tensor) -> Tensor:
        scheduler._step_index = k
        predictions.append(scheduler.convert_model_output(v, sample=x))
        if order == 1 or k in (0, 1, steps - 1):
            return scheduler.dpm_solver_first_order_update(predictions[-1], sample=x)
        return scheduler.multistep_dpm_solver_second_order_update(predictions[-2:], sample=x)

    assert_same(rollout(order, steps, update), vectors("dpmpp")[2][f"order{order}_{steps}"])


def test_the_exact_solution_of_the_rollout() -> None:
    """The probability flow of N(m, s0²) carries noise x1 to m + s0·x1; the stored solutions come near it."""
    i, s, e = vectors("dpmpp")
    exact = i["m"] + s["s0"] * i["x1"]
    assert_same(exact, e["exact"])
    miss = {
        (order, steps): (torch.tensor(e[f"order{order}_{steps}"], dtype=torch.float64) - exact).abs().max().item()
        for order in (1, 2)
        for steps in (20, 40)
    }
    assert miss[1, 20] / miss[1, 40] == pytest.approx(2, rel=0.1)
    assert miss[2, 40] < miss[1, 40] / 8
