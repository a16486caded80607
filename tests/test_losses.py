"""Per-sample maths against hand computation, and what must hold whatever the numbers are."""

from __future__ import annotations

import math

import pytest
import torch

from vgrpo.losses import (
    clipped_surrogate,
    matching_error,
    self_normalised_error,
    surrogate_gradient,
    vgrpo_loss,
    x0_divergence,
)
from vgrpo.sde import flow_step, log_density


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_self_normalised_error_by_hand() -> None:
    pred, x0 = torch.tensor([[3.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    # residuals (3, -1): mean square 5, mean size 2; then (0, 0), held by the floor
    torch.testing.assert_close(self_normalised_error(pred, x0), torch.tensor([2.5, 0.0]))


def test_the_normaliser_is_a_constant_for_the_gradient() -> None:
    x0, pred = randn(2, 5), randn(2, 5, seed=1).requires_grad_()
    self_normalised_error(pred, x0).sum().backward()
    residual = (pred - x0).detach()
    torch.testing.assert_close(pred.grad, 2 * residual / 5 / residual.abs().mean(1, keepdim=True))


def test_errors_are_means_over_latent_dimensions() -> None:
    a, b = randn(3, 4), randn(3, 4, seed=1)
    tiled = [x[:, :, None].expand(3, 4, 6) for x in (a, b)]
    for error in (matching_error, self_normalised_error, x0_divergence):
        torch.testing.assert_close(error(a, b), error(*tiled))
        assert (error(a, b) > 0).all()
        with pytest.raises(ValueError, match="shapes must be equal"):
            error(a, b[:1])


def test_half_precision_is_computed_in_float32() -> None:
    a, b = torch.full((1, 4), 1e-4, dtype=torch.float16), torch.zeros(1, 4, dtype=torch.float16)
    assert matching_error(a, b).item() == pytest.approx(float(a[0, 0]) ** 2, rel=1e-6)  # 1e-8 is 0 in float16


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.5, 2.0, -2.2, True),  # too good already: held at 1 + ε
        (0.5, 2.0, -1.0, False),  # has got worse though it is good: pull it back
        (1.5, -2.0, 3.0, False),  # has got likelier though it is bad: push it down
        (0.5, -2.0, 1.8, True),  # bad and rare already: held at 1 - ε
        (1.05, 2.0, -2.1, False),
        (1.0, 0.0, 0.0, False),
    ],
)
def test_clipped_surrogate_by_hand(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    log_ratio = torch.tensor([math.log(ratio)], dtype=torch.float64)
    ours, held = clipped_surrogate(log_ratio, torch.tensor([advantage], dtype=torch.float64), clip=0.1)
    assert ours.item() == pytest.approx(loss)
    assert held.item() is clipped
    free, held = clipped_surrogate(log_ratio, torch.tensor([advantage]), clip=None)
    assert free.item() == pytest.approx(-ratio * advantage)
    assert not held.any()


@pytest.mark.parametrize("clip", [None, 0.05])
def test_surrogate_gradient_is_autograds(clip: float | None) -> None:
    error_old, error_new, advantages = randn(4, 9), randn(4, 9, seed=1), randn(9, seed=2)
    error_new = (error_old + 0.1 * error_new).requires_grad_()
    vgrpo_loss(error_new, error_old, advantages, clip=clip).sum().backward()
    slope, clipped = surrogate_gradient((error_old - error_new).mean(0).detach(), advantages, clip=clip)
    torch.testing.assert_close(error_new.grad, (slope / 4).expand(4, 9))
    assert clipped.any() == (clip is not None)
    assert (error_new.grad[:, clipped] == 0).all()


def test_the_mean_over_draws_is_inside_the_exp() -> None:
    error_old, error_new = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [0.0]])
    loss = vgrpo_loss(error_new, error_old, torch.ones(1), clip=None)
    assert loss.item() == pytest.approx(-math.exp(0.5))  # and not -(e + 1)/2


def test_antisymmetry_at_the_old_policy() -> None:
    error, advantages = randn(4, 6).abs(), randn(6, seed=1)
    plus = vgrpo_loss(error, error, advantages, clip=0.01)
    torch.testing.assert_close(plus, -advantages, rtol=0, atol=0)
    torch.testing.assert_close(plus, -vgrpo_loss(error, error, -advantages, clip=0.01), rtol=0, atol=0)


def test_density_integrates_to_one_and_refuses_determinism() -> None:
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)[:, None]
    density = log_density(x, torch.full_like(x, 0.3), torch.tensor(0.7)).exp()
    assert torch.trapezoid(density, x[:, 0]).item() == pytest.approx(1, abs=1e-6)
    with pytest.raises(ValueError, match="no density"):
        log_density(x, x, 0.0)


@pytest.mark.parametrize("t", [1.0, math.nextafter(1, 0), 1 - 1e-7, 1 - 1e-5])
def test_flow_step_is_finite_at_the_noise_end(t: float) -> None:
    x, v = randn(2, 3), randn(2, 3, seed=1)
    mean, std = flow_step(x, v, t, 0.9, a=0.7)
    assert mean.isfinite().all()
    assert 0 < std.item() < math.inf
