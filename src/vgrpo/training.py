"""The loop, the only file that knows the order of things.

    rollout → rewards → draws → advantages → scores under θ_old → updates

`step` below is that line; the rest of the file is what surrounds it: setting up, splitting rows among updates,
micro-batches and processes, and refusing to go on when something is not what it should be.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from vgrpo import checkpoint
from vgrpo.advantages import combine_rewards, hard_clip, soft_clip, zero_spread
from vgrpo.config import Config, build_rewards
from vgrpo.errors import RunError, UserError
from vgrpo.evaluation import evaluate
from vgrpo.policies.pipeline import Pipeline, check, chunks
from vgrpo.progress import Progress
from vgrpo.prompts import batch as prompt_batch
from vgrpo.prompts import keep, read_prompts, spread
from vgrpo.report import write_report
from vgrpo.rewards import probe, score
from vgrpo.rollout import Clock, generate
from vgrpo.run import Run, create, save_grid
from vgrpo.seeds import generator
from vgrpo.types import Pairs, Prepared, Prompt, Reward, Rewards, Rollouts, Scores, Stats, Walk

log = logging.getLogger(__name__)
Made = TypeVar("Made")


@dataclass(kw_only=True)
class Job:
    """Everything that lives as long as a run."""

    config: Config
    accelerator: Accelerator
    policy: Pipeline
    rewards: dict[str, Reward]
    evaluated: dict[str, Reward]
    train_prompts: Sequence[Prompt]
    test_prompts: Sequence[Prompt]
    optimizer: torch.optim.Optimizer
    run: Run
    schedule: Tensor
    """[K] times at which likelihoods are estimated."""
    averaged: dict[str, Tensor]
    """Moving average of the trained weights; empty when there is none."""
    old: dict[str, Tensor]
    """θ_old where it follows θ slowly; empty where it is θ at the time of the rollout."""
    start: dict[str, Tensor]
    """The weights before training; empty when no loss needs them."""
    steps: int = 0
    updates: int = 0
    calls: float = 0.0
    seconds: float = 0.0

    @property
    def tuned(self) -> Mapping[str, Tensor] | None:
        """The weights that are evaluated and exported: the average where there is one; None for the present ones."""
        return self.averaged or None

    @property
    def done(self) -> float:
        """Share of the run that is behind, from 0; at least 1 at its end."""
        budget = self.config.run.budget
        steps = self.steps / self.config.run.steps
        if budget is None:
            return steps
        share = getattr(self, budget.unit) / getattr(budget, budget.unit)
        return share if steps < 1 else max(share, 1.0)

    def weights_of(self, whose: str) -> Mapping[str, Tensor] | None:
        """The weights that an anchor of an objective names; None for the present ones."""
        return {"old": self.old, "start": self.start, "average": self.averaged}[whose] or None


def train(
    config: Config,
    *,
    rewards: Mapping[str, Reward] | Sequence[Callable] | None = None,
    prompts: Sequence[Prompt | str] | None = None,
    resume: Path | None = None,
    processes: int | None = None,
) -> Run:
    """Trains a policy and returns its run folder.

    Args:
        config: the settings, from `load_recipe`.
        rewards: functions `(images uint8 [N, 3, H, W], prompts) -> scores [N]` that take the place of the recipe's
            rewards, by name or as a list (each then has its own name, and weight 1).
        prompts: training prompts that take the place of `config.prompts.train`.
        resume: a run folder to go on with; `config` is then its own.
        processes: how many processes were asked for; the run is refused when another number share it.

    Raises:
        UserError: a mistake in settings, files, model or rewards; found before any weight is loaded where possible.
        RunError: the run had to stop; what was saved before is intact.
    """
    job = prepare(config, rewards, prompts, resume, processes)
    with Progress(total=config.run.steps, enabled=job.accelerator.is_main_process) as progress:
        progress.show(header(job))
        if job.steps == 0:
            assess(job, progress, weights="base")
        while job.done < 1:
            before = job.done
            row = step(job, progress)
            job.steps += 1
            job.calls += row["network_calls"]
            job.seconds += row["seconds"]
            record(job, row, progress, before)
        finish(job)
        progress.show(footer(job))
    return job.run


def step(job: Job, progress: Progress) -> dict[str, float]:
    """One step of the method; returns its metrics."""
    config, objective, policy = job.config, job.config.objective, job.policy
    clock, begin, calls = Clock(), perf_counter(), Calls(policy)
    progress.part("rollout", config.images_per_step)
    prompts = prompt_batch(job.train_prompts, config.prompts.per_step, job.steps, config.run.seed)
    slots = range(job.accelerator.process_index, len(prompts), job.accelerator.num_processes)

    with policy.using(job.weights_of("old")):
        rollouts = generate(
            policy,
            [prompts[s] for s in slots],
            slots,
            group_size=config.rollout.group_size,
            micro_batch=config.rollout.micro_batch,
            seed=config.run.seed,
            step=job.steps,
            objective=objective,
            clock=clock,
            advance=progress.advance,
        )
    calls.book("rollout")
    refuse_non_finite(rollouts)
    with clock("reward"):
        rewards = judge(job, rollouts, prompts)
    draws = objective.draw(job.schedule, slots, config.rollout.group_size, seed=config.run.seed, step=job.steps)
    prepared = Prepared(rollouts=rollouts, draws=draws, advantages=advantages_of(config, rewards, rollouts.walk))
    for whose in objective.anchors(updates=config.update.total):
        with clock("old"), policy.using(job.weights_of(whose)):
            scores = score_all(job, prepared, whose)
        prepared = replace(prepared, anchors={**prepared.anchors, whose: scores})
        calls.book("old" if whose == "old" else "reference")
    with clock("update"):
        metrics = update(job, prepared, progress)
    calls.book("update")

    if job.accelerator.is_main_process and job.steps % config.run.sample_every == 0:
        save_samples(job, rollouts, rewards)
    seconds = shared(job.accelerator, lambda: perf_counter() - begin)  # or processes would end at different steps
    timing = {
        f"time/{k}": clock.seconds.get(k, 0.0) for k in ("encode", "rollout", "decode", "reward", "old", "update")
    }
    return (
        reward_metrics(rewards)
        | metrics
        | timing
        | calls.counts(job.accelerator.num_processes)
        | {"images": config.images_per_step, "seconds": seconds, "time/rest": seconds - sum(timing.values())}
    )


class Calls:
    """Counts a policy's network calls by what they were for."""

    def __init__(self, policy: Pipeline) -> None:
        self.policy, self.seen = policy, policy.calls
        self.booked: dict[str, float] = dict.fromkeys(("rollout", "old", "reference", "update"), 0.0)

    def book(self, kind: str) -> None:
        """Books what was called since the last booking."""
        self.booked[kind] += self.policy.calls - self.seen
        self.seen = self.policy.calls

    def counts(self, processes: int) -> dict[str, float]:
        out = {f"calls/{kind}": n * processes for kind, n in self.booked.items()}
        return {"network_calls": sum(out.values()), **out}


def judge(job: Job, rollouts: Rollouts, prompts: Sequence[Prompt]) -> Rewards:
    """Scores of all P·G pictures of the step, those of other processes too."""
    size = rollouts.group_size
    rows = [prompt for prompt in rollouts.prompts for _ in range(size)]
    mine = {name: score(name, reward, rollouts.images, rows).view(-1, size) for name, reward in job.rewards.items()}
    gathered = gather_object(
        [(slot, {name: v[i] for name, v in mine.items()}) for i, slot in enumerate(rollouts.slots)]
    )
    by_slot = dict(gathered)
    parts = {name: torch.stack([by_slot[s][name] for s in range(len(prompts))]) for name in job.rewards}
    weights = {name: entry.weight for name, entry in job.config.rewards.items()}
    total = combine_rewards(parts, weights, how=job.config.advantages.combine)
    return Rewards(parts=parts, total=total, valid=torch.ones_like(total, dtype=torch.bool))


def advantages_of(config: Config, rewards: Rewards, walk: Walk | None) -> Tensor:
    """[P, I] float64. Rewards that were normalised each in its group are not scaled a second time."""
    settings = config.advantages
    scale = settings.scale if settings.combine == "sum" else "none"
    advantages = config.objective.advantages(rewards.total, rewards.valid, scale=scale, walk=walk)
    if settings.hard_clip:
        advantages = hard_clip(advantages, settings.hard_clip)
    if settings.soft_clip:
        advantages = soft_clip(advantages, settings.soft_clip)
    return torch.where(advantages == 0, 0.0, advantages + settings.offset)


def score_all(job: Job, prepared: Prepared, whose: str) -> Scores:
    """Scores of this process's items, in the same micro-batch shape in which θ will be scored.

    Where θ_old is θ itself, the first update's items need none, for their ratio is 1: with one pass they are left out,
    and stand as NaN, which no loss could take by mistake.
    """
    settings, objective, each = job.config.update, job.config.objective, prepared.advantages.shape[1]
    slots = set(range(len(prepared.advantages)))
    if whose == "old" and not job.old and settings.passes == 1:
        slots -= set(next(parts_of_pass(job, 0, len(slots))))
    rows = torch.tensor([i for i, slot in enumerate(prepared.rollouts.slots) if slot in slots], dtype=torch.long)
    items = (rows[:, None] * each + torch.arange(each)).flatten()
    out: dict[str, Tensor] = {}
    for chosen in items.split(settings.micro_batch) if len(items) else ():
        with torch.no_grad():
            scores = objective.score(job.policy, objective.batch(prepared, chosen), joint=settings.joint_draws)
        for name, values in scores.items():
            if name not in out:
                whole = len(prepared.rollouts.slots) * each
                out[name] = values.new_full((len(values), whole, *values.shape[2:]), math.nan)
            out[name][:, chosen.to(values.device)] = values
    return out


def parts_of_pass(job: Job, number: int, prompts: int) -> Iterator[Sequence[int]]:
    """The slots of each update of a pass over the rollout, in an order of the pass's own."""
    order = torch.randperm(prompts, generator=generator(job.config.run.seed, job.steps, "order", number)).tolist()
    return chunks(order, prompts // job.config.update.per_rollout)


def update(job: Job, prepared: Prepared, progress: Progress) -> dict[str, float]:
    """All optimizer steps on one rollout: each pass goes over its groups once, in an order of its own."""
    config, settings = job.config, job.config.update
    progress.part("update", config.images_per_step * settings.passes)
    done: list[dict[str, float]] = []
    for number in range(settings.passes):
        for slots in parts_of_pass(job, number, len(prepared.advantages)):
            if not config.objective.learns_from_all and not prepared.advantages[slots].any():
                continue  # no group has a spread: there is nothing to learn from, and weight decay must not act alone
            stats = accumulate(job, prepared, slots, first=not done)
            progress.advance(len(slots) * config.rollout.group_size)
            if not done:
                refuse_ratio(job, stats)
            done.append(summarise(stats) | descend(job, prepared.rollouts))
    if not done:
        log.warning("step %d: no group has a spread in its rewards, so nothing was learnt", job.steps + 1)
        return {"updates": 0.0, "weight_change": 0.0}
    follow(job)
    last: dict[str, float] = {k: done[-1][k] for k in ("ratio/mean", "ratio/std", "lr") if k in done[-1]}
    first = {"ratio/first": done[0]["ratio/worst"]} if "ratio/worst" in done[0] else {}
    means = {k: sum(d[k] for d in done) / len(done) for k in done[0] if k not in {*last, "ratio/worst"}}
    return {"updates": float(len(done)), **first, **last, **means}


def follow(job: Job) -> None:
    """Lets θ_old follow θ, for objectives in which it does so slowly."""
    decay = job.config.objective.old_decay(job.steps)
    for name, old in job.old.items():
        old.lerp_(job.policy.trainable[name].detach(), 1 - decay)


def accumulate(job: Job, prepared: Prepared, slots: Sequence[int], *, first: bool) -> list[Stats]:
    """Adds the gradient of the mean loss over the items of `slots`, as far as they are this process's, in micro-batches.

    Items of advantage 0, such as those of groups without spread, have no gradient unless the objective says otherwise;
    they cost no network call.
    """
    settings, objective, size = job.config.update, job.config.objective, prepared.advantages.shape[1]
    place = {slot: i for i, slot in enumerate(prepared.rollouts.slots)}
    learnt = [
        place[slot] * size + item
        for slot in slots
        if slot in place
        for item in range(size)
        if objective.learns_from_all or prepared.advantages[slot, item] != 0
    ]
    out: list[Stats] = []
    for items in chunks(learnt, settings.micro_batch):
        batch = objective.batch(prepared, torch.tensor(items))
        if first and not job.old:  # θ_old is θ: its scores are what θ's will be
            batch = replace(batch, anchors={k: v for k, v in batch.anchors.items() if k != "old"})
        if first and not out and looks_at_ratio(objective, batch):
            with torch.no_grad():  # one look at the ratio, which the gradient does not need
                scores = objective.score(job.policy, batch.first_draw(), joint=settings.joint_draws)
            batch = replace(batch, anchors={**batch.anchors, "old": scores})
        weight = 1 / (len(slots) * size)
        out.append(objective.backward(job.policy, batch, first=first, joint=settings.joint_draws, weight=weight))
    return out


def looks_at_ratio(objective: Any, batch: Any) -> bool:
    """Whether θ_old was not scored though the objective has a way to."""
    return isinstance(batch, Pairs) and "old" not in batch.anchors and hasattr(objective, "score")


def descend(job: Job, rollouts: Rollouts) -> dict[str, float]:
    """One optimizer step on the gradient that lies in the weights, summed over processes first."""
    config = job.config.optimizer
    weights = list(job.policy.trainable.values())
    sum_gradients(job.accelerator, weights)
    norm = torch.nn.utils.clip_grad_norm_(weights, config.max_grad_norm)
    if not norm.isfinite():
        ids = [p.id for p in rollouts.prompts]
        raise RunError(
            f"step {job.steps + 1}: the gradient is not finite; no update was made. Prompts of the step: {ids}"
        )
    rate = learning_rate(job.config, job.updates, job.done)
    for group in job.optimizer.param_groups:
        group["lr"] = rate
    before = fingerprint(weights)
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.updates += 1
    for name, mean in job.averaged.items():
        decay = min(job.config.run.ema or 0.0, (1 + job.updates) / (10 + job.updates))
        mean.lerp_(job.policy.trainable[name].detach(), 1 - decay)
    change = ((fingerprint(weights) - before).norm() / before.norm().clamp(min=1e-12)).item()
    return {"grad_norm": norm.item(), "weight_change": change, "lr": rate}


def sum_gradients(accelerator: Accelerator, weights: Sequence[torch.nn.Parameter]) -> None:
    """Adds up the gradients of all processes in one message."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in weights]
    if accelerator.num_processes > 1:
        flat = accelerator.reduce(torch.cat([g.flatten() for g in gradients]), reduction="sum")
        parts = flat.split([g.numel() for g in gradients])
        gradients = [part.view_as(g) for part, g in zip(parts, gradients, strict=True)]
    for p, g in zip(weights, gradients, strict=True):
        p.grad = g


def learning_rate(config: Config, update: int, done: float = 0.0) -> float:
    """Rate of optimizer step `update`, counted from 0; a function of nothing else, so that a resume cannot change it.

    With a budget the rate falls over the share of it that is spent, `done`, in place of the number of updates.
    """
    settings = config.optimizer
    done = update / config.updates if config.run.budget is None else min(done, 1.0)
    fall = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 + 0.5 * math.cos(math.pi * done)}[settings.schedule]
    return settings.lr * fall * min(1.0, (update + 1) / max(settings.warmup, 1))


def fingerprint(weights: Sequence[Tensor], each: int = 4096) -> Tensor:
    """The first `each` numbers of every trained tensor: enough to see a change, at no memory."""
    return torch.cat([p.detach().flatten()[:each].clone() for p in weights])


def refuse_non_finite(rollouts: Rollouts) -> None:
    bad = ~rollouts.x0.isfinite().flatten(1).all(1)
    if bad.any():
        ids = sorted({rollouts.prompts[r // rollouts.group_size].id for r in bad.nonzero().flatten().tolist()})
        raise RunError(
            f"step {rollouts.step + 1}: sampled latents are not finite for prompts {ids}; nothing was trained on"
        )


def refuse_ratio(job: Job, stats: Sequence[Stats]) -> None:
    """Before the first update of a rollout θ is θ_old and every ratio must be 1; if not, the two were scored differently."""
    tolerance = job.config.update.ratio_tolerance or (1e-4 if job.policy.dtype == torch.float32 else 5e-2)
    off = max((s.log_ratio.expm1().abs().max().item() for s in stats if s.log_ratio is not None), default=0.0)
    clip = getattr(job.config.objective, "clip", None)
    if not off <= tolerance:
        raise RunError(
            f"step {job.steps + 1}: before any update the ratio of new to old policy is off 1 by {off:.2e}, "
            f"more than {tolerance:.0e}: "
            f"old and new scores disagree (precision, mode, micro-batch or schedule). Nothing was trained on this step"
        )
    if clip and job.config.update.total > 1 and off > clip:
        log.warning("step %d: the ratio's numerical noise %.1e exceeds objective.clip=%g", job.steps + 1, off, clip)


def summarise(stats: Sequence[Stats]) -> dict[str, float]:
    """Means over the items of all processes, and the largest |ratio − 1| where there are ratios."""
    parts: dict[str, Tensor] = {}
    if stats:
        parts["clip_fraction"] = torch.cat([s.clipped for s in stats])
        for name in stats[0].means:
            parts[name] = torch.cat([s.means[name] for s in stats])
        ratios = [s.log_ratio.double().exp() for s in stats if s.log_ratio is not None]
        if ratios:
            parts["ratio/mean"] = torch.cat([r if r.ndim == 1 else r.mean(0) for r in ratios])
            parts["ratio/square"] = torch.cat([r**2 if r.ndim == 1 else (r**2).mean(0) for r in ratios])
            parts["ratio/worst"] = torch.stack([(r - 1).abs().max() for r in ratios])
    mine = {k: (v.double().sum().item(), len(v), v.double().max().item()) for k, v in parts.items()}
    everyone = [m for m in gather_object([mine]) if m]
    out = {}
    for name in everyone[0]:
        out[name] = sum(m[name][0] for m in everyone) / sum(m[name][1] for m in everyone)
    if "ratio/worst" in out:
        out["ratio/worst"] = max(m["ratio/worst"][2] for m in everyone)
        out["ratio/std"] = math.sqrt(max(out.pop("ratio/square") - out["ratio/mean"] ** 2, 0.0))
    return out


def reward_metrics(rewards: Rewards) -> dict[str, float]:
    """Mean and spread over the step of the total and of each reward, and the share of groups that teach nothing."""
    out = {"reward/mean": rewards.total.mean().item(), "reward/std": rewards.total.std(correction=0).item()}
    for name, part in rewards.parts.items():
        out[f"reward/{name}/mean"] = part.mean().item()
        out[f"reward/{name}/std"] = part.std(correction=0).item()
    out["zero_std_fraction"] = zero_spread(rewards.total, rewards.valid).double().mean().item()
    return out


# ------------------------------------------------------------------------------------------------------- around the loop


def prepare(config: Config, rewards: Any, prompts: Any, resume: Path | None, processes: int | None = None) -> Job:
    """Checks everything that can be checked without weights, then loads the model."""
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    config, functions = with_functions(config, rewards)
    functions = functions or build_rewards(config.rewards)
    evaluated = build_rewards(config.evaluation.rewards) if config.evaluation.rewards else functions
    check(config)
    train_prompts = as_prompts(prompts) if prompts is not None else read_prompts(config.prompts.train, split="train")
    if config.prompts.tags:
        train_prompts = keep(train_prompts, config.prompts.tags)
    test_prompts = (
        spread(read_prompts(config.prompts.test, split="test"), config.evaluation.prompts)
        if config.prompts.test
        else ()
    )
    for name, reward in {**evaluated, **functions}.items():
        probe(name, reward, train_prompts[:2])

    trackers = list(config.run.trackers)
    # without `cpu` accelerate starts no process group on a machine without accelerator: each process would train alone
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(), log_with=trackers or None, project_dir=config.run.folder
    )
    if processes and accelerator.num_processes != processes:
        raise UserError(
            f"{processes} processes were started but only {accelerator.num_processes} found each other; "
            f"start them with torchrun or accelerate launch, each with the same command"
        )
    if accelerator.num_processes > config.prompts.per_step:
        raise UserError(
            f"{accelerator.num_processes} processes but prompts.per_step={config.prompts.per_step}: each process needs a prompt"
        )
    run = Run(resume) if resume else shared(accelerator, lambda: create(config))
    state = checkpoint.load(run.checkpoints) if resume else None
    if state and (changed := {k for k, v in facts(config).items() if state.facts.get(k) != v}):
        raise UserError(f"cannot resume: {', '.join(sorted(changed))} differ from the checkpoint's")
    policy = Pipeline(config, accelerator.device)
    s = config.optimizer
    optimizer = torch.optim.AdamW(policy.trainable.values(), lr=s.lr, betas=s.betas, weight_decay=s.weight_decay)
    copies = {
        "averaged": config.run.ema is not None,
        "old": config.objective.old_decay(0) is not None,
        "start": "start" in config.objective.anchors(updates=config.update.total),
    }
    kept = {k: {n: p.detach().clone() for n, p in policy.trainable.items()} if on else {} for k, on in copies.items()}
    job = Job(
        config=config,
        accelerator=accelerator,
        policy=policy,
        rewards=functions,
        evaluated=evaluated,
        train_prompts=train_prompts,
        test_prompts=test_prompts,
        optimizer=optimizer,
        run=run,
        schedule=policy.schedule(getattr(config.objective, "schedule_steps", None)),
        averaged=kept["averaged"],
        old=kept["old"],
        start=kept["start"],
    )
    if state:
        restore(job, state)
    if trackers:
        accelerator.init_trackers(run.folder.name, config=None)
    return job


def with_functions(config: Config, rewards: Any) -> tuple[Config, dict[str, Reward]]:
    """Settings and reward objects when functions were passed to `train`."""
    if rewards is None:
        if not config.rewards:
            raise UserError(
                "rewards: the recipe has none and train() was given none; add one such as rewards.shapes.weight=1"
            )
        return config, {}
    named = (
        dict(rewards)
        if isinstance(rewards, Mapping)
        else {getattr(r, "__name__", type(r).__name__): r for r in rewards}
    )
    unknown = [n for n, r in named.items() if not callable(r)]
    if unknown or not named:
        raise UserError(f"rewards: expected functions of (images, prompts), got {unknown or 'none'}")
    from vgrpo.config import RewardEntry

    entries = {name: config.rewards.get(name, RewardEntry()) for name in named}
    evaluation = (
        config.evaluation if config.evaluation.main in named else config.evaluation.model_copy(update={"main": None})
    )
    return config.model_copy(update={"rewards": entries, "evaluation": evaluation}), named


def as_prompts(prompts: Sequence[Prompt | str]) -> tuple[Prompt, ...]:
    if not prompts:
        raise UserError("prompts: train() was given an empty list")
    return tuple(p if isinstance(p, Prompt) else Prompt(text=p, id=str(i)) for i, p in enumerate(prompts, 1))


def shared(accelerator: Accelerator, make: Callable[[], Made]) -> Made:
    """What the main process makes, for all."""
    if accelerator.num_processes == 1:
        return make()
    box = [make() if accelerator.is_main_process else None]
    return broadcast_object_list(box)[0]


def facts(config: Config) -> dict[str, Any]:
    """What a resume may not change."""
    return {"model.path": config.model.path, "adapter.kind": config.adapter.kind, "adapter.rank": config.adapter.rank}


def restore(job: Job, state: checkpoint.State) -> None:
    job.policy.load(state.weights)
    checkpoint.restore_moments(job.optimizer, job.policy.trainable, state.moments)
    for kept, saved in ((job.averaged, state.averaged), (job.old, state.old)):
        for name, copy in kept.items():
            copy.copy_(saved[name])
    job.steps, job.updates = state.step, state.updates
    if job.accelerator.is_main_process:
        job.run.forget_after(state.step)
    job.accelerator.wait_for_everyone()
    rows = [row for row in job.run.metrics() if row["step"] <= state.step]
    job.calls, job.seconds = (sum(row[key] for row in rows) for key in ("network_calls", "seconds"))


def record(job: Job, row: dict[str, float], progress: Progress, before: float) -> None:
    """Writes a step down; saves and evaluates when it is time. `before` is the share done before the step."""
    settings, last, points = job.config.run, job.done >= 1, job.config.evaluation.points
    if job.accelerator.is_main_process:
        job.run.log({"step": job.steps, **row})
        progress.line(job.steps, row)
    if settings.trackers:
        job.accelerator.log(row, step=job.steps)
    if last or job.steps % settings.save_every == 0:
        save(job)
    due = int(job.done * points) > int(before * points) if points else job.steps % job.config.evaluation.every == 0
    if last or due:
        assess(job, progress, weights="tuned")


def save(job: Job) -> None:
    if job.accelerator.is_main_process:
        weights = job.policy.trainable
        state = checkpoint.State(
            step=job.steps,
            updates=job.updates,
            weights=weights,
            averaged=job.averaged,
            old=job.old,
            moments=checkpoint.moments_of(job.optimizer, weights),
            facts=facts(job.config),
        )
        checkpoint.save(job.run.checkpoints, state, keep=job.config.run.keep)
    job.accelerator.wait_for_everyone()


def assess(job: Job, progress: Progress, *, weights: str) -> None:
    """Evaluates the tuned weights on held-out prompts, shared among the processes."""
    if not job.test_prompts:
        return
    settings = job.config.evaluation
    progress.part("evaluation", len(job.test_prompts) * settings.images_per_prompt)
    with job.policy.using(job.tuned), job.policy.evaluating():
        row = evaluate(
            job.policy,
            job.test_prompts,
            job.evaluated,
            images_per_prompt=settings.images_per_prompt,
            micro_batch=job.config.rollout.micro_batch,
            seed=settings.seed,
            pictures=settings.pictures,
            folder=job.run.folder / "evaluations" / f"step_{job.steps:05d}",
            share=(job.accelerator.process_index, job.accelerator.num_processes),
            gather=gather_object,
            advance=progress.advance,
        )
    if job.accelerator.is_main_process:
        spent = {"calls": job.calls, "seconds": job.seconds, "updates": job.updates}
        job.run.log({"step": job.steps, "weights": weights, **spent, **row}, "evaluations.jsonl")
        progress.evaluated(job.steps, row)


def save_samples(job: Job, rollouts: Rollouts, rewards: Rewards, groups: int = 8) -> None:
    """The first groups of the step as a grid, a row each, and what belongs to each picture."""
    folder, size = job.run.folder / "samples", rollouts.group_size
    shown = min(groups, len(rollouts.prompts))
    save_grid(rollouts.images[: shown * size], folder / f"step_{job.steps + 1:05d}.png", columns=size)
    rows = [
        {
            "step": job.steps + 1,
            "prompt": rollouts.prompts[g].text,
            "seeds": list(rollouts.seeds[g * size : (g + 1) * size]),
            "rewards": {name: part[rollouts.slots[g]].tolist() for name, part in rewards.parts.items()},
        }
        for g in range(shown)
    ]
    for row in rows:
        job.run.log(row, "samples/samples.jsonl")


def finish(job: Job) -> None:
    """Exports the adapter and writes the report."""
    if job.accelerator.is_main_process:
        with job.policy.using(job.tuned):
            job.policy.export(job.run.adapter)
        if job.config.run.trackers:
            job.accelerator.end_training()
        job.run.describe(steps=job.steps, updates=job.updates, finished=True)
        write_report(job.run.folder)
    job.accelerator.wait_for_everyone()


def header(job: Job) -> str:
    c, total = job.config, sum(p.numel() for p in job.policy.trainable.values())
    adapted = f"{job.policy.adapted} modules adapted, " if job.policy.adapted else ""
    lines = [
        f"run       {job.run.folder}" + (f", resumed after step {job.steps}" if job.steps else ""),
        f"model     {c.model.path}, {adapted}{total:,} weights trained in {c.adapter.kind} mode",
        f"step      {c.prompts.per_step} prompts × {c.rollout.group_size} pictures, {c.update.total} updates, "
        f"{job.accelerator.num_processes} process(es)",
        f"advantage scale {c.advantages.scale}, {c.advantages.combine} of {', '.join(job.rewards)}",
        f"prompts   {len(job.train_prompts)} for training, {len(job.test_prompts)} held out",
    ]
    return "\n".join([*lines, *[f"inactive  {note}" for note in c.inactive()]])


def footer(job: Job) -> str:
    changes = [row.get("weight_change", 0.0) for row in job.run.metrics()]
    if changes and not any(changes):
        log.warning("this run has learnt nothing: no weight changed in any step")
    return f"adapter   {job.run.adapter}\nreport    {job.run.report}"
