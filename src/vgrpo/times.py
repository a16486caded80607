"""Where on a schedule likelihoods are estimated. A schedule [K] holds the sampler's times in [0, 1], 0 = data;
a draw is an index into it. Indices are on the CPU, as their generator is."""

from __future__ import annotations

import torch
from torch import Tensor


def stratified(schedule: Tensor, draws: int, *, generator: torch.Generator) -> Tensor:
    """Indices [draws] int64: the schedule cut into `draws` contiguous chunks of nearly equal length, one index in each.

    Every index is as likely as with uniform draws when K is a multiple of `draws` (V-GRPO, technique 2).

    Raises:
        ValueError: fewer than one draw, or more draws than times.
    """
    if not 1 <= draws <= len(schedule):
        raise ValueError(f"need 1 <= draws <= {len(schedule)}, the length of the schedule, got {draws}")
    edges = [i * len(schedule) // draws for i in range(draws + 1)]
    chunks = zip(edges, edges[1:], strict=False)
    return torch.cat([torch.randint(low, high, (1,), generator=generator) for low, high in chunks])


def uniform(schedule: Tensor, draws: int, *, generator: torch.Generator) -> Tensor:
    """Indices [draws] int64, independent and each equally likely; what FPO does (arXiv 2507.21053).

    Raises:
        ValueError: fewer than one draw.
    """
    if draws < 1:
        raise ValueError(f"need at least one draw, got {draws}")
    return torch.randint(len(schedule), (draws,), generator=generator)


def logit_normal(
    schedule: Tensor, draws: int, *, generator: torch.Generator, mean: float = 0.0, std: float = 1.0
) -> Tensor:
    """Indices [draws] int64 of the times nearest to sigmoid(N(mean, std²)), SD 3's training density (arXiv 2403.03206).

    Raises:
        ValueError: fewer than one draw.
    """
    if draws < 1:
        raise ValueError(f"need at least one draw, got {draws}")
    t = torch.sigmoid(mean + std * torch.randn(draws, generator=generator, dtype=torch.float64))
    return (schedule.cpu().double()[None] - t[:, None]).abs().argmin(1)


TIMES = {"stratified": stratified, "uniform": uniform, "logit_normal": logit_normal}
