"""Prompts and a policy in, finished pictures out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import torch

from vgrpo.seeds import seed_of
from vgrpo.types import Objective, Policy, Prompt, Rollouts, Walk, repeat


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


def generate(
    policy: Policy,
    prompts: Sequence[Prompt],
    slots: Sequence[int],
    *,
    group_size: int,
    micro_batch: int,
    seed: int,
    step: int,
    objective: Objective | None = None,
    clock: Clock | None = None,
    advance: Callable[[int], None] = lambda images: None,
) -> Rollouts:
    """Samples `group_size` pictures of each prompt, `micro_batch` at a time.

    The initial noise of a picture is seeded by (seed, step, slot, member), so a picture is the same in any micro-batch
    and on any number of processes. `objective` may have its own way from noise to picture; without one it is the
    policy's ODE sampler. `advance` is told how many pictures are done.
    """
    clock = clock or Clock()
    with clock("encode"):
        cond = policy.encode(prompts)
    members = [(slot, member) for slot in slots for member in range(group_size)]
    shared = objective is not None and objective.shared_noise
    seeds = [seed_of(seed, "rollout", step, slot, 0 if shared else member) for slot, member in members]
    if objective is not None and objective.whole_groups:
        micro_batch = max(micro_batch // group_size, 1) * group_size
    schedule = policy.schedule()
    x0, images, walks = [], [], []
    for start in range(0, len(seeds), micro_batch):
        rows = range(start, min(start + micro_batch, len(seeds)))
        with clock("rollout"):
            noise, told = policy.noise(seeds[r] for r in rows), repeat(cond, [r // group_size for r in rows])
            if objective is None:
                latents, walk = policy.sample(noise, told), None
            else:
                names = [(seed, step, *members[r]) for r in rows]
                latents, walk = objective.sample(policy, schedule, noise, told, names, group_size=group_size, step=step)
        with clock("decode"):
            images.append(policy.decode(latents))
        x0.append(latents)
        walks.append(walk)
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
        walk=joined(walks),
    )


def joined(walks: Sequence[Walk | None]) -> Walk | None:
    """The walks of several micro-batches as one; None where none was kept."""
    kept = [walk for walk in walks if walk is not None]
    if not kept:
        return None
    return Walk(
        plan=kept[0].plan,
        x=torch.cat([w.x for w in kept]),
        x_next=torch.cat([w.x_next for w in kept]),
        log_density=torch.cat([w.log_density for w in kept]),
    )
