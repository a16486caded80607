"""Stochastic sampler steps that have a density, as the objectives that optimise every step need.

Each step returns the mean [N, *latent] and the standard deviation of the next state, one number per row or one for all.
Times are in [0, 1], 0 = data, and fall: t_next < t. float64 stays float64; anything lower is computed in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vgrpo.losses import difference, mean_rows, precise
from vgrpo.paths import per_row


def flow_step(x: Tensor, v: Tensor, t: Tensor | float, t_next: Tensor | float, *, a: float) -> tuple[Tensor, Tensor]:
    """Flow-GRPO's step (arXiv 2505.05470) on the linear path: noise level a·√(t/(1−t)).

    mean = x·(1 + σ²/(2t)·dt) + v·(1 + σ²(1−t)/(2t))·dt, std = σ√(−dt), σ the noise level, dt = t_next − t.

    At t = 1, where σ is infinite, the next time stands in its denominator; so it does within 1e-6 of 1, that the nearest
    floats below behave alike.

    Raises:
        ValueError: time does not fall.
    """
    x, v = precise(x), precise(v)
    time, next_time = falling(t, t_next, x)
    dt = next_time - time
    room = torch.where(1 - time < 1e-6, 1 - next_time, 1 - time)
    level = a * (time / room).sqrt()
    mean = x * (1 + level**2 / (2 * time) * dt) + v * (1 + level**2 * (1 - time) / (2 * time)) * dt
    return mean, like_times(level * (-dt).sqrt(), t, t_next)


def dance_step(x: Tensor, v: Tensor, t: Tensor | float, t_next: Tensor | float, *, eta: float) -> tuple[Tensor, Tensor]:
    """DanceGRPO's step (arXiv 2505.07818) on the linear path: constant noise level `eta`, score −(x − (1−t)·x̂0)/t².

    mean = x + v·dt − ½η²·score·dt, std = η√(−dt), dt = t_next − t.

    Raises:
        ValueError: time does not fall.
    """
    x, v = precise(x), precise(v)
    time, next_time = falling(t, t_next, x)
    dt = next_time - time
    score = -(x - (1 - time) * (x - time * v)) / time**2
    return x + v * dt - 0.5 * eta**2 * score * dt, like_times(eta * (-dt).sqrt(), t, t_next)


def cps_step(x: Tensor, v: Tensor, t: Tensor | float, t_next: Tensor | float, *, a: float) -> tuple[Tensor, Tensor]:
    """Flow-CPS's step (arXiv 2509.05952): noise t_next·sin(aπ/2), taken from the coefficient of the predicted noise.

    mean = (1−t_next)·x̂0 + √(t_next² − std²)·x̂1, so that the noise of the next state is t_next as the path asks. The last
    step, to 0, has std 0 and no density.

    Raises:
        ValueError: time does not fall.
    """
    x, v = precise(x), precise(v)
    time, next_time = falling(t, t_next, x)
    std = next_time * math.sin(a * math.pi / 2)
    x0, x1 = x - time * v, x + (1 - time) * v
    return (1 - next_time) * x0 + (next_time**2 - std**2).sqrt() * x1, like_times(std, t, t_next)


def ddim_step(
    x: Tensor, eps_pred: Tensor, abar: Tensor | float, abar_next: Tensor | float, *, eta: float
) -> tuple[Tensor, Tensor]:
    """DDIM with noise (arXiv 2010.02502, Eq. 12 and 16) on the variance-preserving path; eta = 1 is DDPO's and DDPM's.

    std = η√((1−ᾱ')/(1−ᾱ)·(1−ᾱ/ᾱ')), mean = √ᾱ'·x̂0 + √(1−ᾱ'−std²)·eps_pred, with 0 < ᾱ ≤ ᾱ' ≤ 1 (`abar`, `abar_next`).
    The last step, to ᾱ' = 1, has std 0 and no density.

    Raises:
        ValueError: ᾱ falls, or eta is outside [0, 1].
    """
    if not 0 <= eta <= 1:
        raise ValueError(f"eta must be in [0, 1], got {eta:g}")
    x, eps_pred = precise(x), precise(eps_pred)
    now, after = per_row(abar, x, "alpha_bar"), per_row(abar_next, x, "alpha_bar")
    if not (now <= after).all():
        raise ValueError(f"alpha_bar must not fall, got {now.max().item():g} and next {after.min().item():g}")
    std = eta * ((1 - after) / (1 - now) * (1 - now / after)).sqrt()
    x0 = (x - (1 - now).sqrt() * eps_pred) / now.sqrt()
    rest = (1 - after - std**2).clamp(min=0)  # never negative but for rounding, as eta ≤ 1
    return after.sqrt() * x0 + rest.sqrt() * eps_pred, like_times(std, abar, abar_next)


def log_density(x_next: Tensor, mean: Tensor, std: Tensor | float) -> Tensor:
    """Log of N(x_next; mean, std²), averaged over latent dimensions, [N]: nats per dimension.

    `x_next` and `mean` are [N, *latent], `std` [N], 0-dim or a number. Averaging keeps clip ranges independent of
    the resolution; multiply by the latent size for the joint density.

    Raises:
        ValueError: shapes do not fit, or `std` is not positive everywhere: a deterministic step has no density.
    """
    residual = difference(x_next, mean)
    sigma = per_row(std, residual, "standard deviation")
    if not (sigma > 0).all():
        raise ValueError(
            f"a step without noise has no density: std must be positive, got a least {sigma.min().item():g}"
        )
    return -0.5 * mean_rows((residual / sigma) ** 2) - sigma.flatten().log() - 0.5 * math.log(2 * math.pi)


def falling(t: Tensor | float, t_next: Tensor | float, x: Tensor) -> tuple[Tensor, Tensor]:
    """Both times ready to multiply `x`, of one shape; refuses a time that does not fall, whose noise would be NaN."""
    time, next_time = torch.broadcast_tensors(per_row(t, x), per_row(t_next, x))
    if not (next_time < time).all():
        raise ValueError(f"time must fall from {time.min().item():g} to the next, got {next_time.max().item():g}")
    return time, next_time


def like_times(std: Tensor, *times: Tensor | float) -> Tensor:
    """`std` as [N] where a time was given per row, 0-dim where each was one for all."""
    per_row_given = any(isinstance(t, Tensor) and t.ndim for t in times)
    return std.flatten() if per_row_given else std.reshape(())
