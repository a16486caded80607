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
    """Rewards [P, G] minus their group's mean, divided by a population standard deviation (GRPO, arXiv 2402.03300).

    Args:
        rewards: [P, G], any type, any unit.
        scale: divide by the spread of the group (FLUX lineage), of all rewards of the step around their common mean
            (SD 3.5 lineage), or by 1.
        valid: bool [P, G]; what is not valid leaves mean and spread and gets 0.

    Returns [P, G] float64, in standard deviations; in the reward's unit for "none". A group whose rewards are all equal
    gets exactly 0. There is no floor under the spread: it would turn small differences into small advantages.

    Raises:
        ValueError: not [P, G], a valid reward that is not finite, or an unknown scale.
    """
    if scale not in ("group", "batch", "none"):
        raise ValueError(f'scale must be "group", "batch" or "none", got {scale!r}')
    values, mask = prepared(rewards, valid)
    centred = deviations(values, mask)
    level = zero_spread(rewards, valid)[:, None]
    if scale == "none":
        return torch.where(level, 0.0, centred)
    if scale == "batch":
        values, mask = values.reshape(1, -1), mask.reshape(1, -1)
    spread = standard_deviation(deviations(values, mask), mask)
    return torch.where(level, 0.0, centred / torch.where(level, 1.0, spread))


def deviations(values: Tensor, mask: Tensor) -> Tensor:
    """Each row's values minus their mean over `mask`; 0 outside it."""
    lowest = torch.where(mask, values, torch.inf).amin(1, keepdim=True)
    above = torch.where(mask, values - lowest, 0.0)  # the mean of what is near 0 keeps digits that a large level loses
    return torch.where(mask, above - above.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1), 0.0)


def standard_deviation(centred: Tensor, mask: Tensor) -> Tensor:
    """Root of the mean square of each row of `centred` over `mask`, [rows, 1]."""
    unit = centred.abs().amax(1, keepdim=True)  # without it the square of 1e-200 is 0, and of 1e200 infinite
    relative = centred / torch.where(unit > 0, unit, 1.0)
    return unit * ((relative**2).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).sqrt()


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
    """bound·tanh(a/bound), elementwise, bound > 0: V-GRPO's Eq. 17, with slope 1 at 0 and values in [−bound, bound]."""
    return bound * torch.tanh(a / bound)


def hard_clip(a: Tensor, bound: float) -> Tensor:
    """`a` limited to [−bound, bound], elementwise, bound ≥ 0."""
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
        weights: one per name; a negative one turns its reward round.
        how: "sum" of weight times raw value, in which the reward with the largest spread rules; or the weighted mean of
            each reward's group advantages, in which the units of a reward do not matter and a constant one adds 0. Its
            weights are divided by the sum of their sizes; its result is an advantage already, not to be scaled again.
        valid: bool [P, G]; what is not valid counts in no mean or spread and gives 0.

    Raises:
        ValueError: names differ, shapes differ, a valid reward that is not finite, weights that are all 0 under
            "normalised", or an unknown `how`.
    """
    without = {"weights": sorted(parts.keys() - weights.keys()), "rewards": sorted(weights.keys() - parts.keys())}
    if any(without.values()) or not parts:
        lacking = "; ".join(f"no {what} for {', '.join(names)}" for what, names in without.items() if names)
        raise ValueError(f"rewards and weights must have the same names: {lacking or 'there are none'}")
    shapes = {name: tuple(part.shape) for name, part in parts.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"rewards must have one shape, got {shapes}")
    if how == "sum":
        return torch.stack([weights[name] * prepared(part, valid)[0] for name, part in parts.items()]).sum(0)
    if how != "normalised":
        raise ValueError(f'how must be "sum" or "normalised", got {how!r}')
    total = sum(abs(w) for w in weights.values())
    if not total:
        raise ValueError("at least one weight must differ from 0")
    scaled = [weights[name] / total * group_advantages(part, valid=valid) for name, part in parts.items()]
    return torch.stack(scaled).sum(0)
