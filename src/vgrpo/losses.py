"""Per-sample maths of the objectives: tensors in, one number per sample out. No network is called and no mean over
samples is taken here.

N samples, M draws, `*latent` the model's latent shape. Errors are means over latent dimensions, so that a clip range
does not depend on the resolution. float64 stays float64; anything lower is computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def precise(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def mean_rows(x: Tensor) -> Tensor:
    """[N, *latent] averaged over all but the first axis, [N]."""
    return x.flatten(1).mean(1)


def difference(a: Tensor, b: Tensor) -> Tensor:
    """a − b; refuses shapes that would broadcast."""
    if a.shape != b.shape:
        raise ValueError(f"shapes must be equal, got {tuple(a.shape)} and {tuple(b.shape)}")
    return precise(a) - precise(b)


def matching_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean square [N] of `prediction` − `target`, both [N, *latent]: the plain pretraining loss."""
    return mean_rows(difference(prediction, target) ** 2)


def self_normalised_error(x0_pred: Tensor, x0: Tensor, *, floor: float = 1e-5) -> Tensor:
    """V-GRPO's Eq. 14, [N]: mean(r²) / sg(max(mean|r|, floor)), r = x0_pred − x0 [N, *latent].

    The divisor is a constant for the gradient. It takes the scale of time out of the error: every pair weighs alike.
    """
    residual = difference(x0_pred, x0)
    size = mean_rows(residual.abs()).detach().clamp(min=floor)
    return mean_rows(residual**2) / size


def x0_divergence(x0_new: Tensor, x0_old: Tensor) -> Tensor:
    """V-GRPO's Eq. 16, [N]: mean((x0_new − x0_old)²), the KL to the behaviour policy at one pair, up to a factor."""
    return mean_rows(difference(x0_new, x0_old) ** 2)


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, *, clip: float | None) -> tuple[Tensor, Tensor]:
    """PPO's surrogate as a loss, [N], and whether the clip holds a sample's gradient at 0, bool [N].

    Args:
        log_ratio: [N] log of new to old likelihood; for V-GRPO L_old − L, the mean over the draws already taken.
        advantages: [N].
        clip: ε, so that a ratio counts in [1−ε, 1+ε]; None or 0 for no clip.
    """
    ratio = torch.exp(log_ratio)
    free = ratio * advantages
    if not clip:
        return -free, torch.zeros_like(free, dtype=torch.bool)
    held = ratio.clamp(1 - clip, 1 + clip) * advantages
    return -torch.minimum(free, held), held < free


def surrogate_gradient(log_ratio: Tensor, advantages: Tensor, *, clip: float | None) -> tuple[Tensor, Tensor]:
    """The factor [N] by which the clipped surrogate's gradient is that of L, and where the clip holds it at 0.

    d loss/dθ = ρ·Â·dL/dθ for ρ = exp(L_old − L). With it the mean L over the draws can go backward one draw at a time:
    the same gradient, the memory of one draw.
    """
    _, clipped = clipped_surrogate(log_ratio, advantages, clip=clip)
    return torch.where(clipped, 0.0, torch.exp(log_ratio) * advantages), clipped


def vgrpo_loss(
    error_new: Tensor,
    error_old: Tensor,
    advantages: Tensor,
    *,
    clip: float | None,
    kl: Tensor | None = None,
    kl_weight: float = 0.0,
) -> Tensor:
    """V-GRPO's loss [N]: one ratio per sample, with the mean over its draws inside the exp.

    Args:
        error_new, error_old: [M, N] errors under θ and θ_old on the same pairs.
        advantages: [N].
        clip: ε of the ratio clip, None or 0 for none.
        kl: [N] divergence from the behaviour policy, weighted by `kl_weight` (β).
    """
    log_ratio = (precise(error_old) - precise(error_new)).mean(0)
    loss, _ = clipped_surrogate(log_ratio, advantages, clip=clip)
    return loss if kl is None else loss + kl_weight * kl


def fpo_loss(
    x0: Tensor, t: Tensor, eps: Tensor, v_old: Tensor, v_new: Tensor, advantages: Tensor, *, clip: float | None = 0.05
) -> Tensor:
    """FPO's loss [N] (arXiv 2507.21053): V-GRPO's ratio with the unweighted velocity error.

    x0 [N, *latent]; t [M, N] is not used, for the error is not weighted; eps, v_old, v_new [M, N, *latent].
    """
    log_ratio = (velocity_error(v_old, x0, eps) - velocity_error(v_new, x0, eps)).mean(0)
    return clipped_surrogate(log_ratio, advantages, clip=clip)[0]


def awm_loss(
    x0: Tensor, t: Tensor, eps: Tensor, v_old: Tensor, v_new: Tensor, advantages: Tensor, *, power: float = 0.25
) -> Tensor:
    """AWM's loss [N] (arXiv 2509.25050): a ratio per pair and no clip, log-likelihood −t·(mse^p − 1e-10^p)/p.

    x0 [N, *latent]; t [M, N] in [0, 1]; eps, v_old, v_new [M, N, *latent]; advantages [N].
    """
    new, old = (awm_log_likelihood(velocity_error(v, x0, eps), t, power=power) for v in (v_new, v_old))
    return -(torch.exp(new - old) * advantages).mean(0)


def awm_log_likelihood(error: Tensor, t: Tensor, *, power: float = 0.25) -> Tensor:
    """AWM's generalised-Huber log-likelihood of velocity errors, elementwise; `error` and `t` have one shape."""
    return -t * (error**power - 1e-10**power) / power


def nft_loss(
    x0: Tensor,
    t: Tensor,
    eps: Tensor,
    v_old: Tensor,
    v_new: Tensor,
    advantages: Tensor,
    *,
    beta: float = 1.0,
    floor: float = 1e-5,
) -> Tensor:
    """DiffusionNFT's loss [N] (arXiv 2509.16117): the implicit better and worse policies matched to the same sample.

    x0 [N, *latent]; t [M, N] in [0, 1]; eps, v_old, v_new [M, N, *latent]; advantages [N]. Not divided by `beta`.
    """
    optimality = nft_optimality(advantages)
    better = (1 - beta) * v_old + beta * v_new
    worse = (1 + beta) * v_old - beta * v_new
    times = t.view(*t.shape, *[1] * (x0.ndim - 1))
    x_t = (1 - times) * x0 + times * eps
    errors = []
    for v in (better, worse):
        x0_pred = (x_t - times * v).flatten(0, 1)
        errors.append(self_normalised_error(x0_pred, x0.expand_as(x_t).flatten(0, 1), floor=floor).view(t.shape))
    return (optimality * errors[0] + (1 - optimality) * errors[1]).mean(0)


def nft_optimality(advantages: Tensor) -> Tensor:
    """r in [0, 1]: ½ + ½·clip(A, −1, 1)."""
    return 0.5 + 0.5 * advantages.clamp(-1, 1)


def velocity_error(v: Tensor, x0: Tensor, eps: Tensor) -> Tensor:
    """Mean square [M, N] of velocities [M, N, *latent] against eps − x0."""
    target = eps - x0
    return matching_error(v.flatten(0, 1), target.expand_as(v).flatten(0, 1)).view(v.shape[:2])
