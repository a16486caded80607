"""Stochastic steps against closed forms, and their density against torch's own normal distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from vgrpo.paths import LinearPath, VPPath
from vgrpo.sde import cps_step, dance_step, ddim_step, flow_step, log_density

STEPS = {
    "flow": (flow_step, {"a": 0.7}, (0.8, 0.65)),
    "dance": (dance_step, {"eta": 0.3}, (0.8, 0.65)),
    "cps": (cps_step, {"a": 0.8}, (0.8, 0.65)),
    "ddim": (ddim_step, {"eta": 1.0}, (0.4, 0.6)),
}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize(("step", "level"), [(flow_step, "a"), (dance_step, "eta")])
def test_without_noise_a_flow_step_is_eulers(step: Any, level: str) -> None:
    x, v = randn(2, 3), randn(2, 3, seed=1)
    mean, std = step(x, v, 0.8, 0.65, **{level: 0.0})
    torch.testing.assert_close(mean, x - 0.15 * v)
    assert std == 0


def test_without_noise_cps_and_ddim_move_along_the_path() -> None:
    """From x_t to x_t_next of the same x0 and eps."""
    x0, eps = randn(2, 3), randn(2, 3, seed=1)
    path, vp = LinearPath(), VPPath(torch.tensor([0.6, 0.4]).double())
    mean, std = cps_step(path.noisy(x0, eps, 0.8), eps - x0, 0.8, 0.65, a=0.0)
    torch.testing.assert_close(mean, path.noisy(x0, eps, 0.65))
    assert std == 0
    mean, std = ddim_step(vp.noisy_at(x0, eps, 0.4), eps, 0.4, 0.6, eta=0.0)
    torch.testing.assert_close(mean, vp.noisy_at(x0, eps, 0.6))
    assert std == 0


@pytest.mark.parametrize("a", [0.3, 1.0])
def test_cps_keeps_the_noise_of_the_path(a: float) -> None:
    """Coefficient preserving: fresh and predicted noise have together the variance t_next²."""
    x0, eps = torch.zeros(1, 1).double(), torch.ones(1, 1).double()
    mean, std = cps_step(LinearPath().noisy(x0, eps, 0.8), eps - x0, 0.8, 0.65, a=a)
    assert mean.item() ** 2 + std.item() ** 2 == pytest.approx(0.65**2)
    assert std.item() == pytest.approx(0.65 * math.sin(a * math.pi / 2))


@pytest.mark.parametrize("eta", [0.4, 1.0])
def test_ddim_keeps_the_noise_of_the_path(eta: float) -> None:
    x0, eps = torch.zeros(1, 1).double(), torch.ones(1, 1).double()
    mean, std = ddim_step(VPPath(torch.ones(1)).noisy_at(x0, eps, 0.4), eps, 0.4, 0.6, eta=eta)
    assert mean.item() ** 2 + std.item() ** 2 == pytest.approx(1 - 0.6)
    assert std.item() == pytest.approx(eta * math.sqrt(0.4 / 0.6 * (1 - 0.4 / 0.6)))


def test_ddim_with_full_noise_is_ddpms_posterior() -> None:
    """DDPM's q(x_{t−1} | x_t, x0), arXiv 2006.11239, Eq. 7."""
    x, eps, now, after = randn(2, 3), randn(2, 3, seed=1), 0.4, 0.6
    beta = 1 - now / after
    x0 = (x - math.sqrt(1 - now) * eps) / math.sqrt(now)
    expected = math.sqrt(after) * beta / (1 - now) * x0 + math.sqrt(now / after) * (1 - after) / (1 - now) * x
    mean, std = ddim_step(x, eps, now, after, eta=1.0)
    torch.testing.assert_close(mean, expected)
    assert std.item() == pytest.approx(math.sqrt((1 - after) / (1 - now) * beta))


@pytest.mark.parametrize("step", ["flow", "dance"])
def test_small_sde_steps_keep_the_marginals(step: str) -> None:
    """One step of data N(m, s²): mean and variance of x_t_next are those of the path, to first order in the step."""
    m, s, t = 0.7, 0.6, 0.5
    move, level, _ = STEPS[step]

    def after(t_next: float) -> tuple[float, float]:
        variance = (1 - t) ** 2 * s**2 + t**2
        x = torch.tensor([[(1 - t) * m], [(1 - t) * m + math.sqrt(variance)]], dtype=torch.float64)  # mean, mean + 1σ
        x0 = m + (1 - t) * s**2 / variance * (x - (1 - t) * m)
        mean, std = move(x, (x - x0) / t, t, t_next, **level)
        return mean[0].item(), (mean[1] - mean[0]).item() ** 2 + std.item() ** 2

    def miss(dt: float) -> tuple[float, float]:
        mean, variance = after(t - dt)
        return abs(mean - (1 - t + dt) * m), abs(variance - ((1 - t + dt) ** 2 * s**2 + (t - dt) ** 2))

    assert miss(0.01)[0] < 1e-12  # the mean is linear in time: exact
    assert miss(0.01)[1] / miss(0.005)[1] == pytest.approx(4, rel=0.1)  # so the error of the variance is O(dt²)


@pytest.mark.parametrize("name", STEPS)
def test_rows_keep_their_own_times(name: str) -> None:
    step, level, (now, after) = STEPS[name]
    x, v = randn(2, 2), randn(2, 2, seed=1)  # square: a time along the wrong axis would fit as well
    nows = torch.tensor([now, now + 0.05 if name != "ddim" else now - 0.05], dtype=torch.float64)
    mean, std = step(x, v, nows, after, **level)
    assert mean.shape == (2, 2)
    assert std.shape == (2,)
    for i in range(2):
        one, one_std = step(x[i : i + 1], v[i : i + 1], nows[i : i + 1], scalar(after), **level)
        torch.testing.assert_close(one[0], mean[i])
        assert one_std.shape == (1,)  # one row, but a time per row was asked for
        torch.testing.assert_close(one_std[0], std[i])
    assert step(x, v, now, after, **level)[1].shape == ()
    assert step(x, v, scalar(now), torch.full((2,), after), **level)[1].shape == (2,)
    with pytest.raises(ValueError, match="per row"):
        step(x, v, torch.full((2, 1), now), after, **level)


@pytest.mark.parametrize("name", ["flow", "dance", "cps"])
@pytest.mark.parametrize("t_next", [0.8, 0.9, float("nan")])
def test_time_must_fall(name: str, t_next: float) -> None:
    step, level, _ = STEPS[name]
    with pytest.raises(ValueError, match=r"time must fall from 0\.8 to the next, got"):
        step(randn(2, 3), randn(2, 3), 0.8, t_next, **level)


def test_impossible_ddim_steps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"alpha_bar must not fall, got 0\.6 and next 0\.4"):
        ddim_step(randn(2, 3), randn(2, 3), 0.6, 0.4, eta=1.0)
    with pytest.raises(ValueError, match=r"eta must be in \[0, 1\], got 1\.5"):
        ddim_step(randn(2, 3), randn(2, 3), 0.4, 0.6, eta=1.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_flow_step_at_the_noise_end(dtype: torch.dtype) -> None:
    """At t = 1 the next time stands in the denominator of the noise level, and the nearest floats are no exception."""
    x, v = randn(2, 3).to(dtype), randn(2, 3, seed=1).to(dtype)
    mean, std = flow_step(x, v, 1.0, 0.9, a=0.7)
    level2 = 0.49 / (1 - 0.9)  # σ² = a²·t/(1 − t_next)
    torch.testing.assert_close(std.item(), math.sqrt(level2 * 0.1), rtol=1e-6, atol=0)
    torch.testing.assert_close(mean, x * (1 - level2 / 2 * 0.1) - 0.1 * v)
    just_below = torch.nextafter(torch.ones((), dtype=dtype), torch.zeros((), dtype=dtype))
    near, near_std = flow_step(x, v, just_below, 0.9, a=0.7)
    torch.testing.assert_close(near, mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(near_std, std, rtol=1e-5, atol=0)
    for t in (1 - 1e-5, 1 - 1e-3):
        assert flow_step(x, v, t, 0.9, a=0.7)[1].isfinite()


@pytest.mark.parametrize("name", ["flow", "dance", "cps"])
def test_the_step_to_the_data_end(name: str) -> None:
    step, level, _ = STEPS[name]
    x, v = randn(2, 3), randn(2, 3, seed=1)
    mean, std = step(x, v, 0.1, 0.0, **level)
    assert mean.isfinite().all()
    if name == "cps":  # ends without noise on the predicted sample
        torch.testing.assert_close(mean, x - 0.1 * v)
        assert std == 0


def test_ddim_ends_on_the_predicted_sample() -> None:
    x, eps = randn(2, 3), randn(2, 3, seed=1)
    mean, std = ddim_step(x, eps, 0.9, 1.0, eta=1.0)
    torch.testing.assert_close(mean, (x - math.sqrt(0.1) * eps) / math.sqrt(0.9))
    assert std == 0


@pytest.mark.parametrize("name", STEPS)
def test_low_precision_is_computed_in_float32(name: str) -> None:
    step, level, (now, after) = STEPS[name]
    x, v = randn(2, 3).bfloat16(), randn(2, 3, seed=1).bfloat16()
    low, high = step(x, v, now, after, **level), step(x.float(), v.float(), now, after, **level)
    assert low[0].dtype == low[1].dtype == torch.float32
    assert torch.equal(low[0], high[0])
    assert torch.equal(low[1], high[1])


@pytest.mark.parametrize("std", [0.3, scalar(0.3), torch.tensor([0.3, 1.7, 0.01], dtype=torch.float64)])
def test_log_density_is_torchs(std: Any) -> None:
    mean, x_next = randn(3, 2, 4), randn(3, 2, 4, seed=1)
    sigma = torch.as_tensor(std, dtype=torch.float64).expand(3).view(3, 1, 1)
    expected = torch.distributions.Normal(mean, sigma).log_prob(x_next).mean((1, 2))
    torch.testing.assert_close(log_density(x_next, mean, std), expected, rtol=0, atol=1e-12)


def test_log_density_does_not_depend_on_resolution() -> None:
    mean, x_next = randn(3, 4), randn(3, 4, seed=1)
    tiled = [x[:, :, None].expand(3, 4, 16) for x in (x_next, mean)]
    torch.testing.assert_close(log_density(*tiled, 0.3), log_density(x_next, mean, 0.3))


@pytest.mark.parametrize("std", [0.0, -0.1, float("nan"), torch.tensor([0.1, 0.0])])
def test_a_step_without_noise_has_no_density(std: Any) -> None:
    with pytest.raises(ValueError, match="no density: std must be positive, got a least"):
        log_density(randn(2, 3), randn(2, 3), std)


def test_log_density_refuses_shapes_that_would_broadcast() -> None:
    with pytest.raises(ValueError, match="shapes must be equal"):
        log_density(randn(2, 2), randn(1, 2), 0.3)
    with pytest.raises(ValueError, match="one standard deviation per row"):
        log_density(randn(2, 2), randn(2, 2), torch.ones(1, 2))
