"""Mixing and splitting are inverse to each other, at both ends of time too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vgrpo.paths import LinearPath, VPPath

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
    assert torch.equal(path.noisy(x0, eps, 0.0), x0)
    assert torch.equal(path.split(x0, 0.0, path.target(x0, eps, 0.0))[0], x0)
    if name == "linear":
        assert torch.equal(path.noisy(x0, eps, 1.0), eps)
        assert torch.equal(path.split(eps, 1.0, path.target(x0, eps, 1.0))[1], eps)
    else:
        torch.testing.assert_close(path.noisy(x0, eps, 1.0), ALPHAS[-1].sqrt() * x0 + (1 - ALPHAS[-1]).sqrt() * eps)


def test_by_hand() -> None:
    x0, eps, v = torch.tensor([[2.0]]), torch.tensor([[10.0]]), torch.tensor([[4.0]])
    assert PATHS["linear"].noisy(x0, eps, 0.25).item() == 4
    assert PATHS["linear"].target(x0, eps, 0.25).item() == 8
    assert [x.item() for x in PATHS["linear"].split(x0, 0.25, v)] == [1, 5]
    # √ᾱ = 0.6, √(1−ᾱ) = 0.8
    assert PATHS["eps"].noisy_at(x0, eps, 0.36).item() == pytest.approx(9.2)
    assert [x.item() for x in PATHS["eps"].split_at(x0, 0.36, v)] == pytest.approx([-2, 4])
    assert [x.item() for x in PATHS["v"].split_at(x0, 0.36, v)] == pytest.approx([-2, 4])


def test_an_eps_prediction_is_the_target_itself() -> None:
    eps = randn(2, 3)
    assert torch.equal(PATHS["eps"].target(randn(2, 3, seed=1), eps, 0.3), eps)


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


def test_alpha_bar_between_timesteps_and_at_the_clean_end() -> None:
    path = VPPath(torch.tensor([0.8, 0.2], dtype=torch.float64))
    t = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
    torch.testing.assert_close(path.alpha_bar(t), torch.tensor([1.0, 0.9, 0.8, 0.5, 0.2], dtype=torch.float64))
    assert path.alpha_bar(0.75).item() == pytest.approx(0.5, abs=1e-12)


@settings(derandomize=True, deadline=None, database=None)
@given(t=st.floats(0, 1), later=st.floats(0, 1))
def test_alpha_bar_falls_with_time(t: float, later: float) -> None:
    t, later = min(t, later), max(t, later)
    assert 0 < PATHS["eps"].alpha_bar(later) <= PATHS["eps"].alpha_bar(t) <= 1


@pytest.mark.parametrize("t", [-0.01, 1.01, 500, float("nan")])
def test_a_time_out_of_range_has_no_alpha(t: float) -> None:
    with pytest.raises(ValueError, match=r"time must be in \[0, 1\], got"):
        PATHS["eps"].alpha_bar(t)


def test_an_unknown_prediction_is_refused() -> None:
    with pytest.raises(ValueError, match='"eps" or "v", got \'x0\''):
        VPPath(ALPHAS, "x0")  # type: ignore[arg-type]


@pytest.mark.parametrize("alpha_bar", [0.0, 1.0])
def test_v_prediction_is_finite_at_both_ends(alpha_bar: float) -> None:
    x_t, v = randn(2, 3), randn(2, 3, seed=1)
    x0, eps = PATHS["v"].split_at(x_t, alpha_bar, v)
    expected = (x_t, v) if alpha_bar else (-v, x_t)
    assert torch.equal(x0, expected[0])
    assert torch.equal(eps, expected[1])
    assert not PATHS["eps"].split_at(x_t, 0.0, v)[0].isfinite().any()  # as documented


@pytest.mark.parametrize("name", PATHS)
def test_a_time_of_another_length_is_refused(name: str) -> None:
    square = randn(3, 3)
    for wrong in (torch.tensor([0.5]), torch.full((3, 1), 0.5), torch.full((2,), 0.5)):
        for call in (PATHS[name].noisy, PATHS[name].split):
            arguments = (square, square, wrong) if call == PATHS[name].noisy else (square, wrong, square)
            with pytest.raises(ValueError, match=r"one time.* per row, shape \(3,\), got"):
                call(*arguments)


@pytest.mark.parametrize("name", PATHS)
def test_rows_keep_their_own_times(name: str) -> None:
    """On a square latent, where a time along the wrong axis would fit as well."""
    path: Any = PATHS[name]
    x0, eps, t = randn(3, 3), randn(3, 3, seed=1), torch.tensor([0.1, 0.5, 0.9])
    one_by_one = torch.cat([path.noisy(x0[i : i + 1], eps[i : i + 1], t[i].item()) for i in range(3)])
    torch.testing.assert_close(path.noisy(x0, eps, t), one_by_one, rtol=0, atol=1e-12)
    order = torch.tensor([2, 0, 1])
    for ours, permuted in zip(path.split(x0, t, eps), path.split(x0[order], t[order], eps[order]), strict=True):
        assert torch.equal(ours[order], permuted)


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    path: Any = PATHS[name]
    x0, eps, t = randn(2, 3).to(dtype), randn(2, 3, seed=1).to(dtype), torch.tensor([0.0123, 0.877])
    for low, high in (
        (path.noisy(x0, eps, t), path.noisy(x0.float(), eps.float(), t)),
        (path.target(x0, eps, t), path.target(x0.float(), eps.float(), t)),
        (path.split(x0, t, eps)[0], path.split(x0.float(), t, eps.float())[0]),
        (path.split(x0, t, eps)[1], path.split(x0.float(), t, eps.float())[1]),
    ):
        assert low.dtype == torch.float32
        assert torch.equal(low, high)
