"""From rewards [P, G] to advantages [P, G]: how much better a sample is than its group. All maths in float64.

float32 would do harm here: with equal rewards its rounding alone gives a spread to divide by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor


def group_advantages(
    rewards: Tensor, *, scale: Literal["group", "batch", "none"] = "group", valid: Tensor | None = None
) -> Tensor:
    """Rewards [P, G] minus their group's mean, divided by a population standard deviation; float64.

    Args:
        scale: divide by the spread of the group (FLUX lineage), of all rewards of the step (SD 3.5 lineage), or by 1.
        valid: bool [P, G]; what is not valid leaves mean and spread and gets 0.

    A group whose rewards are all equal gets exactly 0.

    Raises:
        ValueError: not [P, G], a valid reward that is not finite, or an unknown scale.
    """
    values, mask = prepared(rewards, valid)
    count = mask.sum(1, keepdim=True).clamp(min=1)
    centred = torch.where(mask, values - values.sum(1, keepdim=True) / count, 0.0)
    if scale == "group":
        spread = ((centred**2).sum(1, keepdim=True) / count).sqrt()
    elif scale == "batch":
        everyone = rewards.double()[mask]
        spread = (everyone.std(correction=0) if len(everyone) else everyone.new_zeros(())).expand(len(values), 1)
    elif scale == "none":
        spread = torch.ones_like(count, dtype=torch.float64)
    else:
        raise ValueError(f'scale must be "group", "batch" or "none", got {scale!r}')
    level = zero_spread(rewards, valid)[:, None]
    return torch.where(level | ~mask, 0.0, centred / torch.where(level, 1.0, spread))


def zero_spread(rewards: Tensor, valid: Tensor | None = None) -> Tensor:
    """bool [P]: groups whose valid rewards are all equal, or of which at most one is valid; they teach nothing."""
    values, mask = prepared(rewards, valid)
    highest = torch.where(mask, values, -torch.inf).amax(1)
    lowest = torch.where(mask, values, torch.inf).amin(1)
    return highest <= lowest


def prepared(rewards: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rewards in float64, 0 where they are not valid, and the mask."""
    if rewards.ndim != 2:
        raise ValueError(f"rewards must be [prompts, group], got shape {tuple(rewards.shape)}")
    mask = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
    if mask.shape != rewards.shape:
        raise ValueError(f"valid must have the shape of the rewards, {tuple(rewards.shape)}, got {tuple(mask.shape)}")
    values = torch.where(mask, rewards.double(), 0.0)
    if not values.isfinite().all():
        raise ValueError(f"{int((~values.isfinite()).sum())} rewards are not finite; mark them in `valid` or stop")
    return values, mask


def soft_clip(a: Tensor, bound: float) -> Tensor:
    """bound·tanh(a/bound): V-GRPO's Eq. 17, order kept, slope 1 at 0, values in (−bound, bound)."""
    return bound * torch.tanh(a / bound)


def hard_clip(a: Tensor, bound: float) -> Tensor:
    """`a` limited to [−bound, bound]."""
    return a.clamp(-bound, bound)


def combine_rewards(
    parts: Mapping[str, Tensor],
    weights: Mapping[str, float],
    *,
    how: Literal["sum", "normalised"] = "sum",
    valid: Tensor | None = None,
) -> Tensor:
    """One reward [P, G] out of several, float64.

    Args:
        parts: rewards [P, G] by name.
        weights: one per name.
        how: "sum" of weight times raw value, in which the reward with the largest spread rules; or the weighted mean of
            each reward's group advantages, in which the units of a reward do not matter and a constant one adds 0.

    Raises:
        ValueError: names differ, weights that sum to 0 under "normalised", or an unknown `how`.
    """
    if set(parts) != set(weights):
        raise ValueError(f"rewards {sorted(parts)} and weights {sorted(weights)} must have the same names")
    if how == "sum":
        return torch.stack([weights[name] * part.double() for name, part in parts.items()]).sum(0)
    if how != "normalised":
        raise ValueError(f'how must be "sum" or "normalised", got {how!r}')
    total = sum(abs(w) for w in weights.values())
    if not total:
        raise ValueError("at least one weight must differ from 0")
    scaled = [weights[name] / total * group_advantages(part, valid=valid) for name, part in parts.items()]
    return torch.stack(scaled).sum(0)
