"""Per-sample maths of the objectives: tensors in, one number per sample out. No network is called and no mean over
samples is taken here.

N samples, M draws, `*latent` the model's latent shape. Errors are means over latent dimensions, so that a clip range
does not depend on the resolution. float64 stays float64; anything lower is computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def precise(x: Tensor) -> Tensor:
    """`x` itself in float64, else in float32."""
    return x if x.dtype == torch.float64 else x.float()


def mean_rows(x: Tensor) -> Tensor:
    """[N, *latent] averaged over all but the first axis, [N]."""
    return x.flatten(1).mean(1)


def require_equal_shapes(*tensors: Tensor) -> None:
    """ValueError where arithmetic would broadcast by accident."""
    if len({x.shape for x in tensors}) > 1:
        raise ValueError(f"shapes must be equal, got {' and '.join(str(tuple(x.shape)) for x in tensors)}")


def difference(a: Tensor, b: Tensor) -> Tensor:
    """a − b; refuses shapes that would broadcast."""
    require_equal_shapes(a, b)
    return precise(a) - precise(b)


def matching_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean square [N] of `prediction` − `target`, both [N, *latent]: the plain pretraining loss.

    Raises:
        ValueError: shapes differ.
    """
    return mean_rows(difference(prediction, target) ** 2)


def self_normalised_error(x0_pred: Tensor, x0: Tensor, *, floor: float = 1e-5) -> Tensor:
    """V-GRPO's Eq. 14, [N]: mean(r²) / sg(max(mean|r|, floor)), r = x0_pred − x0 [N, *latent].

    The divisor is a constant for the gradient. It takes the scale of time out of the error: every pair weighs alike.
    The unit is that of the latents, where `matching_error` has its square.

    Raises:
        ValueError: shapes differ.
    """
    residual = difference(x0_pred, x0)
    size = mean_rows(residual.abs()).detach().clamp(min=floor)
    return mean_rows(residual**2) / size


def x0_divergence(x0_new: Tensor, x0_old: Tensor) -> Tensor:
    """V-GRPO's Eq. 16, [N]: mean((x0_new − x0_old)²), the KL to the behaviour policy at one pair, up to a factor.

    Raises:
        ValueError: shapes differ.
    """
    return mean_rows(difference(x0_new, x0_old) ** 2)


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, *, clip: float | None) -> tuple[Tensor, Tensor]:
    """PPO's surrogate (arXiv 1707.06347, Eq. 7) as a loss, [N], and whether the clip holds its gradient at 0, bool [N].

    loss = −min(ρ·Â, clip(ρ, 1−ε, 1+ε)·Â), ρ = exp(log_ratio). It holds a sample only on the side to which its advantage
    pushes: Â > 0 and ρ > 1+ε, or Â < 0 and ρ < 1−ε.

    Args:
        log_ratio: [N] log of new to old likelihood; for V-GRPO L_old − L, the mean over the draws already taken.
        advantages: [N].
        clip: ε > 0, so that a ratio counts in [1−ε, 1+ε]; None or 0 for no clip.

    Raises:
        ValueError: shapes differ.
    """
    require_equal_shapes(log_ratio, advantages)
    ratio = torch.exp(precise(log_ratio))
    free = ratio * precise(advantages)
    if not clip:
        return -free, torch.zeros_like(free, dtype=torch.bool)
    held = ratio.clamp(1 - clip, 1 + clip) * precise(advantages)
    return -torch.minimum(free, held), held < free


def surrogate_gradient(log_ratio: Tensor, advantages: Tensor, *, clip: float | None) -> tuple[Tensor, Tensor]:
    """The factor [N] by which the clipped surrogate's gradient is that of L, and where the clip holds it at 0.

    d loss/dθ = ρ·Â·dL/dθ for ρ = exp(L_old − L). With it the mean L over the draws can go backward one draw at a time:
    the same gradient, the memory of one draw. Arguments as for `clipped_surrogate`.
    """
    _, clipped = clipped_surrogate(log_ratio, advantages, clip=clip)
    return torch.where(clipped, 0.0, torch.exp(precise(log_ratio)) * precise(advantages)), clipped


def vgrpo_loss(
    error_new: Tensor,
    error_old: Tensor,
    advantages: Tensor,
    *,
    clip: float | None,
    kl: Tensor | None = None,
    kl_weight: float = 0.0,
) -> Tensor:
    """V-GRPO's loss [N] (arXiv 2604.23380): one ratio per sample, with the mean over its draws inside the exp.

    loss = −min(ρ·Â, clip(ρ, 1−ε, 1+ε)·Â) + β·D, ρ = exp(mean_j(error_old − error_new)).

    Args:
        error_new, error_old: [M, N] errors under θ and θ_old on the same pairs.
        advantages: [N].
        clip: ε of the ratio clip, None or 0 for none.
        kl: D, [N], the divergence from the behaviour policy, a mean over draws of `x0_divergence`.
        kl_weight: β.

    Raises:
        ValueError: shapes do not fit, or a weight without a `kl`.
    """
    loss, _ = clipped_surrogate(difference(error_old, error_new).mean(0), advantages, clip=clip)
    if kl is None:
        if kl_weight:
            raise ValueError(f"kl_weight {kl_weight:g} has no kl to weigh")
        return loss
    require_equal_shapes(kl, loss)
    return loss + kl_weight * precise(kl)


def fpo_loss(
    x0: Tensor, t: Tensor, eps: Tensor, v_old: Tensor, v_new: Tensor, advantages: Tensor, *, clip: float | None = 0.05
) -> Tensor:
    """FPO's loss [N] (arXiv 2507.21053): V-GRPO's ratio with the unweighted velocity error.

    x0 [N, *latent]; t [M, N] is not used, for the error is not weighted; eps, v_old, v_new [M, N, *latent]; advantages
    [N]. v is the velocity, with target eps − x0, of the linear path; `clip` as for `clipped_surrogate`.

    Raises:
        ValueError: shapes do not fit.
    """
    log_ratio = (velocity_error(v_old, x0, eps) - velocity_error(v_new, x0, eps)).mean(0)
    return clipped_surrogate(log_ratio, advantages, clip=clip)[0]


def awm_loss(
    x0: Tensor, t: Tensor, eps: Tensor, v_old: Tensor, v_new: Tensor, advantages: Tensor, *, power: float = 0.25
) -> Tensor:
    """AWM's loss [N] (arXiv 2509.25050): a ratio per pair and no clip, log-likelihood −t·(mse^p − 1e-10^p)/p.

    loss = −mean_j(ρ_j)·Â, ρ_j the ratio of pair j; mse is that of the velocity.
    x0 [N, *latent]; t [M, N] in [0, 1]; eps, v_old, v_new [M, N, *latent]; advantages [N].

    Raises:
        ValueError: shapes do not fit.
    """
    new, old = (awm_log_likelihood(velocity_error(v, x0, eps), t, power=power) for v in (v_new, v_old))
    require_equal_shapes(advantages, new[0])
    return -(torch.exp(new - old) * precise(advantages)).mean(0)


def awm_log_likelihood(error: Tensor, t: Tensor, *, power: float = 0.25) -> Tensor:
    """AWM's generalised-Huber log-likelihood of velocity errors, elementwise; `error` and `t` have one shape.

    For power < 1 its slope is infinite at an error of exactly 0.
    """
    require_equal_shapes(error, t)
    return -precise(t) * (error**power - 1e-10**power) / power


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

    loss = mean_j(r·ℓ(v₊) + (1−r)·ℓ(v₋)), v± = (1∓β)·v_old ± β·v_new, ℓ = `self_normalised_error` of the x-prediction.

    Args:
        x0: [N, *latent].
        t: [M, N] in [0, 1].
        eps, v_old, v_new: [M, N, *latent]; velocities of the linear path.
        advantages: [N].
        beta: how far the implicit policies lie from v_old, in (0, 1]; the loss is not divided by it, so the gradient
            grows with it.
        floor: of ℓ.

    Raises:
        ValueError: shapes do not fit.
    """
    require_equal_shapes(eps, v_old, v_new)
    require_equal_shapes(x0, eps[0])
    require_equal_shapes(advantages, t[0])
    x0, t, eps, v_old, v_new = (precise(x) for x in (x0, t, eps, v_old, v_new))
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
    """r in [0, 1], elementwise: ½ + ½·clip(A, −1, 1)."""
    return 0.5 + 0.5 * precise(advantages).clamp(-1, 1)


def velocity_error(v: Tensor, x0: Tensor, eps: Tensor) -> Tensor:
    """Mean square [M, N] of velocities `v` [M, N, *latent] against `eps` [M, N, *latent] − `x0` [N, *latent]."""
    require_equal_shapes(v, eps)
    require_equal_shapes(v[0], x0)
    target = precise(eps) - precise(x0)
    return matching_error(v.flatten(0, 1), target.flatten(0, 1)).view(v.shape[:2])
