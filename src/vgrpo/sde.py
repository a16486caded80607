"""Stochastic sampler steps that have a density, as the objectives that optimise every step need.

Each step returns the mean [N, *latent] and the standard deviation of the next state, one number per row or one for all.
Times are in [0, 1], 0 = data, and fall: t_next < t.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vgrpo.losses import mean_rows, precise
from vgrpo.paths import per_row


def flow_step(x: Tensor, v: Tensor, t: Tensor | float, t_next: Tensor | float, *, a: float) -> tuple[Tensor, Tensor]:
    """Flow-GRPO's step (arXiv 2505.05470) on the linear path: noise level a·√(t/(1−t)).

    At t = 1, where that is infinite, the next time stands in the denominator; so it does within 1e-6 of 1, that the
    nearest floats below behave alike.
    """
    time, next_time = per_row(t, x), per_row(t_next, x)
    dt = next_time - time
    room = torch.where(1 - time < 1e-6, 1 - next_time, 1 - time)
    level = a * (time / room).sqrt()
    mean = x * (1 + level**2 / (2 * time) * dt) + v * (1 + level**2 * (1 - time) / (2 * time)) * dt
    return mean, like_time(level * (-dt).sqrt())


def dance_step(x: Tensor, v: Tensor, t: Tensor | float, t_next: Tensor | float, *, eta: float) -> tuple[Tensor, Tensor]:
    """DanceGRPO's step (arXiv 2505.07818) on the linear path: constant noise level `eta`, score −(x − (1−t)·x̂0)/t²."""
    time, next_time = per_row(t, x), per_row(t_next, x)
    dt = next_time - time
    score = -(x - (1 - time) * (x - time * v)) / time**2
    return x + v * dt - 0.5 * eta**2 * score * dt, like_time(eta * (-dt).sqrt())


def cps_step(x: Tensor, v: Tensor, t: Tensor | float, t_next: Tensor | float, *, a: float) -> tuple[Tensor, Tensor]:
    """Flow-CPS's step (arXiv 2509.05952): noise t_next·sin(aπ/2), taken from the coefficient of the predicted noise."""
    time, next_time = per_row(t, x), per_row(t_next, x)
    std = next_time * math.sin(a * math.pi / 2)
    x0, x1 = x - time * v, x + (1 - time) * v
    return (1 - next_time) * x0 + (next_time**2 - std**2).sqrt() * x1, like_time(std)


def ddim_step(
    x: Tensor, eps_pred: Tensor, abar: Tensor | float, abar_next: Tensor | float, *, eta: float
) -> tuple[Tensor, Tensor]:
    """DDIM with noise (arXiv 2010.02502, Eq. 12 and 16) on the variance-preserving path; eta = 1 is DDPO's and DDPM's."""
    now, after = per_row(abar, x), per_row(abar_next, x)
    std = eta * ((1 - after) / (1 - now) * (1 - now / after)).sqrt()
    x0 = (x - (1 - now).sqrt() * eps_pred) / now.sqrt()
    return after.sqrt() * x0 + (1 - after - std**2).clamp(min=0).sqrt() * eps_pred, like_time(std)


def log_density(x_next: Tensor, mean: Tensor, std: Tensor | float) -> Tensor:
    """Log of N(x_next; mean, std²), averaged over latent dimensions, [N]: nats per dimension.

    Averaging keeps clip ranges independent of the resolution; multiply by the latent size for the joint density.

    Raises:
        ValueError: `std` is not positive everywhere: a deterministic step has no density.
    """
    sigma = precise(torch.as_tensor(std, device=x_next.device))
    if not (sigma > 0).all():
        raise ValueError(
            f"a step without noise has no density: std must be positive, got a least {sigma.min().item():g}"
        )
    scaled = (precise(x_next) - precise(mean)) / per_row(sigma, precise(x_next))
    return -0.5 * mean_rows(scaled**2) - sigma.log() - 0.5 * math.log(2 * math.pi)


def like_time(std: Tensor) -> Tensor:
    """[N] where times were given per row, 0-dim where there was one for all."""
    return std.flatten() if std.numel() > 1 else std.reshape(())
