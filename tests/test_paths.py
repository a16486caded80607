"""Mixing and splitting are inverse to each other, at both ends of time too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vgrpo.paths import LinearPath, VPPath
from vgrpo.seeds import generator, noise, seed_of
from vgrpo.times import TIMES, logit_normal, stratified, uniform

BETAS = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2  # SD 1.5
ALPHAS = (1 - BETAS).cumprod(0)
PATHS = {"linear": LinearPath(), "eps": VPPath(ALPHAS, "eps"), "v": VPPath(ALPHAS, "v")}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", PATHS)
def test_split_undoes_noisy(name: str) -> None:
    path: Any = PATHS[name]
    x0, eps, t = randn(5, 2, 3), randn(5, 2, 3, seed=1), torch.tensor([1e-3, 0.1, 0.5, 0.999, 1.0], dtype=torch.float64)
    x_t = path.noisy(x0, eps, t)
    back = path.split(x_t, t, path.target(x0, eps, t))
    torch.testing.assert_close(back[0], x0, rtol=0, atol=1e-12)
    torch.testing.assert_close(back[1], eps, rtol=0, atol=1e-12)
    one = path.noisy(x0[2:3], eps[2:3], 0.5)
    torch.testing.assert_close(one, x_t[2:3])


@pytest.mark.parametrize("name", PATHS)
def test_ends_of_time(name: str) -> None:
    path: Any = PATHS[name]
    x0, eps = randn(2, 3), randn(2, 3, seed=1)
    torch.testing.assert_close(path.noisy(x0, eps, 0.0), x0)
    if name == "linear":
        torch.testing.assert_close(path.noisy(x0, eps, 1.0), eps)
    else:
        assert path.noisy(x0, eps, 1.0).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_scheduler_timestep_has_the_schedulers_alpha(dtype: torch.dtype) -> None:
    index = torch.arange(1000)
    t = ((index + 1).double() / 1000).to(dtype)
    tolerance = {torch.float32: 1e-7, torch.bfloat16: 5e-3, torch.float64: 0}[dtype]
    torch.testing.assert_close(PATHS["eps"].alpha_bar(t), ALPHAS, rtol=0, atol=tolerance)


def test_v_prediction_is_the_derivative_of_the_path() -> None:
    x0, eps = randn(1, 4), randn(1, 4, seed=1)
    path = PATHS["v"]
    angle = path.alpha_bar(0.3).sqrt().acos()
    rate = -angle.sin() * x0 + angle.cos() * eps  # d x_t / d angle
    torch.testing.assert_close(path.target(x0, eps, 0.3), rate)


@pytest.mark.parametrize("name", PATHS)
def test_a_time_of_another_length_is_refused(name: str) -> None:
    square = randn(3, 3)
    with pytest.raises(ValueError, match="one time per row"):
        PATHS[name].noisy(square, square, torch.tensor([0.5]))
    with pytest.raises(ValueError, match="one time per row"):
        PATHS[name].noisy(square, square, torch.full((3, 1), 0.5))


def test_strata_cover_the_schedule() -> None:
    schedule = torch.linspace(1, 0.1, 10)
    for draws in (1, 3, 4, 10):
        taken = torch.stack([stratified(schedule, draws, generator=generator("s", k)) for k in range(300)])
        edges = [j * 10 // draws for j in range(draws + 1)]
        for j in range(draws):
            assert set(taken[:, j].tolist()) == set(range(edges[j], edges[j + 1]))
    for wrong in (0, 11):
        with pytest.raises(ValueError, match="10"):
            stratified(schedule, wrong, generator=generator("s"))


def test_uniform_and_logit_normal_have_their_laws() -> None:
    schedule = torch.linspace(1, 0.01, 100)
    flat = uniform(schedule, 20_000, generator=generator("u"))
    assert flat.float().mean().item() == pytest.approx(49.5, abs=1)
    assert flat.float().var().item() == pytest.approx((100**2 - 1) / 12, rel=0.05)
    t = schedule[logit_normal(schedule, 20_000, generator=generator("n"))]
    logits = torch.logit(t.double().clamp(0.005, 0.995))
    assert logits.mean().item() == pytest.approx(0, abs=0.05)
    assert logits.std().item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("name", TIMES)
def test_draws_depend_on_their_generator_alone(name: str) -> None:
    schedule = torch.linspace(1, 0.1, 12)
    a, b, c = (TIMES[name](schedule, 4, generator=generator("x", k)) for k in (1, 1, 2))
    assert torch.equal(a, b)
    assert a.tolist() != c.tolist()


def test_noise_depends_on_identity_alone() -> None:
    both = noise([(1, "a"), (1, "b")], (2, 3))
    assert torch.equal(both[1:], noise([(1, "b")], (2, 3)))
    assert not torch.equal(both[0], both[1])
    assert seed_of(1, "23") != seed_of("1", 23) != seed_of(12, "3")
    assert 0 <= seed_of("x") < 2**63
    many = noise([(k,) for k in range(2000)], (8,))
    assert many.mean().item() == pytest.approx(0, abs=0.03)
    assert many.std().item() == pytest.approx(1, abs=0.03)
