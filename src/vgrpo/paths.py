"""How data and noise are mixed, and what a network's prediction says about both. Time is in [0, 1], 0 = data.

`x0`, `eps`, `x_t` are [N, *latent]. A time or ᾱ is one number per row, [N], or one for all rows. float64 stays float64;
anything lower is computed, and returned, in float32: in bfloat16 a time has three digits and 1 − ᾱ near the data none.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vgrpo.losses import precise


def per_row(value: Tensor | float, like: Tensor, what: str = "time") -> Tensor:
    """`value` ready to multiply `like` [N, *latent], in its dtype.

    Raises:
        ValueError: neither a number nor one per row, which would broadcast along another axis without a word.
    """
    value = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    if value.ndim and value.shape != like.shape[:1]:
        raise ValueError(f"need one {what} per row, shape {tuple(like.shape[:1])}, got {tuple(value.shape)}")
    return value.reshape(-1, *[1] * (like.ndim - 1))


class LinearPath:
    """Flow matching's straight line (arXiv 2210.02747), as in SD 3 and FLUX: x_t = (1−t)·x0 + t·eps, target v = eps − x0.

    Every method works at both ends of time: at t = 0 x0 is x_t itself, at t = 1 eps is.
    """

    def noisy(self, x0: Tensor, eps: Tensor, t: Tensor | float) -> Tensor:
        """x_t [N, *latent]; exactly `x0` at t = 0 and `eps` at t = 1."""
        x0, eps = precise(x0), precise(eps)
        t = per_row(t, x0)
        return (1 - t) * x0 + t * eps

    def target(self, x0: Tensor, eps: Tensor, t: Tensor | float) -> Tensor:
        """What a velocity network is trained to output, [N, *latent]; the same at every `t`."""
        return precise(eps) - precise(x0)

    def split(self, x_t: Tensor, t: Tensor | float, prediction: Tensor) -> tuple[Tensor, Tensor]:
        """(x0, eps) that the velocity `prediction` [N, *latent] stands for."""
        x_t, prediction = precise(x_t), precise(prediction)
        t = per_row(t, x_t)
        return x_t - t * prediction, x_t + (1 - t) * prediction


class VPPath:
    """The variance-preserving path of DDPM (arXiv 2006.11239), SD 1.5 and SDXL: x_t = √ᾱ·x0 + √(1−ᾱ)·eps.

    Args:
        alphas_cumprod: [T] ᾱ of the scheduler, falling.
        prediction: what the network predicts: "eps", or "v" = √ᾱ·eps − √(1−ᾱ)·x0 (Salimans & Ho 2022, arXiv 2202.00512).

    Raises:
        ValueError: another prediction.
    """

    def __init__(self, alphas_cumprod: Tensor, prediction: Literal["eps", "v"] = "eps") -> None:
        if prediction not in ("eps", "v"):
            raise ValueError(f'prediction must be "eps" or "v", got {prediction!r}')
        self.prediction = prediction
        alphas = torch.as_tensor(alphas_cumprod)
        self.alphas = torch.cat([alphas.new_ones(1), alphas])
        """[T+1] ᾱ at t = 0, 1/T, …, 1: the scheduler's entry i stands at t = (i+1)/T, clean data at t = 0."""

    def alpha_bar(self, t: Tensor | float) -> Tensor:
        """ᾱ at `t` in [0, 1], of t's shape: the scheduler's own numbers at its timesteps, linear in between.

        Raises:
            ValueError: a time outside [0, 1], such as the scheduler's 0..999.
        """
        t = torch.as_tensor(t, dtype=torch.float64)
        alphas = self.alphas.to(t.device)
        position = t * (len(alphas) - 1)
        if not ((position > -1e-4) & (position < len(alphas) - 1 + 1e-4)).all():
            raise ValueError(f"time must be in [0, 1], got {t.min().item():g} to {t.max().item():g}")
        below = position.floor().long().clamp(0, len(alphas) - 2)
        # 1000·(k/1000) is not always k in binary: what is nearer than any schedule needs counts as the entry itself
        share = torch.where((position - position.round()).abs() < 1e-4, position.round() - below, position - below)
        return torch.lerp(alphas[below].double(), alphas[below + 1].double(), share).to(alphas.dtype)

    def noisy(self, x0: Tensor, eps: Tensor, t: Tensor | float) -> Tensor:
        """x_t [N, *latent]; exactly `x0` at t = 0, at t = 1 what the scheduler's last ᾱ leaves of it."""
        return self.noisy_at(x0, eps, self.alpha_bar(t))

    def target(self, x0: Tensor, eps: Tensor, t: Tensor | float) -> Tensor:
        """What the network is trained to output, [N, *latent]: `eps` or v."""
        x0, eps = precise(x0), precise(eps)
        if self.prediction == "eps":
            return eps
        alpha_bar = per_row(self.alpha_bar(t), x0)
        return alpha_bar.sqrt() * eps - (1 - alpha_bar).sqrt() * x0

    def split(self, x_t: Tensor, t: Tensor | float, prediction: Tensor) -> tuple[Tensor, Tensor]:
        """(x0, eps) of the network's `prediction` [N, *latent], of the kind named at construction; see `split_at`."""
        return self.split_at(x_t, self.alpha_bar(t), prediction)

    def noisy_at(self, x0: Tensor, eps: Tensor, alpha_bar: Tensor | float) -> Tensor:
        """x_t [N, *latent] at ᾱ in [0, 1], for who knows ᾱ and not the time."""
        x0, eps = precise(x0), precise(eps)
        alpha_bar = per_row(alpha_bar, x0, "time or alpha_bar")
        return alpha_bar.sqrt() * x0 + (1 - alpha_bar).sqrt() * eps

    def split_at(self, x_t: Tensor, alpha_bar: Tensor | float, prediction: Tensor) -> tuple[Tensor, Tensor]:
        """(x0, eps) of the network's `prediction` [N, *latent], of the kind named at construction.

        A v-prediction works at every ᾱ in [0, 1]. An eps-prediction says nothing of x0 at ᾱ = 0, where a schedule of
        zero terminal SNR ends: x0 is infinite or NaN there, and loses digits as 1/√ᾱ on the way.
        """
        x_t, prediction = precise(x_t), precise(prediction)
        alpha_bar = per_row(alpha_bar, x_t, "time or alpha_bar")
        signal, noise = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
        if self.prediction == "eps":
            return (x_t - noise * prediction) / signal, prediction
        return signal * x_t - noise * prediction, noise * x_t + signal * prediction
