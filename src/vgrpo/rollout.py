"""Prompts and a policy in, finished pictures out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import torch
from torch import Tensor

from vgrpo.seeds import seed_of
from vgrpo.types import Cond, Policy, Prompt, Rollouts


class Clock:
    """Seconds spent per kind of work: `with clock("decode"): ...`; an inner kind is not counted in the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = 0.0

    @contextmanager
    def __call__(self, kind: str) -> Iterator[None]:
        start, outer, self._inner = perf_counter(), self._inner, 0.0
        try:
            yield
        finally:
            whole = perf_counter() - start
            self.seconds[kind] += whole - self._inner
            self._inner = outer + whole


def repeat(cond: Cond, rows: Sequence[int] | Tensor) -> Cond:
    """The conditioning of `rows`, indices into its first axis."""
    index = torch.as_tensor(rows)
    return {k: v[index.to(v.device)] for k, v in cond.items()}


def generate(
    policy: Policy,
    prompts: Sequence[Prompt],
    slots: Sequence[int],
    *,
    group_size: int,
    micro_batch: int,
    seed: int,
    step: int,
    clock: Clock | None = None,
    advance: Callable[[int], None] = lambda images: None,
) -> Rollouts:
    """Samples `group_size` pictures of each prompt, `micro_batch` at a time.

    The initial noise of a picture is seeded by (seed, step, slot, member), so a picture is the same in any micro-batch
    and on any number of processes. `advance` is told how many pictures are done.
    """
    clock = clock or Clock()
    with clock("encode"):
        cond = policy.encode(prompts)
    seeds = [seed_of(seed, "rollout", step, slot, member) for slot in slots for member in range(group_size)]
    x0, images = [], []
    for start in range(0, len(seeds), micro_batch):
        rows = range(start, min(start + micro_batch, len(seeds)))
        with clock("rollout"):
            latents = policy.sample(policy.noise(seeds[r] for r in rows), repeat(cond, [r // group_size for r in rows]))
        with clock("decode"):
            images.append(policy.decode(latents))
        x0.append(latents)
        advance(len(rows))
    return Rollouts(
        prompts=prompts,
        slots=slots,
        x0=torch.cat(x0),
        images=torch.cat(images),
        cond=cond,
        seeds=seeds,
        group_size=group_size,
        step=step,
    )
