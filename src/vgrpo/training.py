"""The loop, the only file that knows the order of things.

    rollout → rewards → advantages → draws → score θ_old → updates

`step` below is that line; the rest of the file is what surrounds it: setting up, splitting rows among updates,
micro-batches and processes, and refusing to go on when something is not what it should be.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from vgrpo import checkpoint
from vgrpo.advantages import combine_rewards, group_advantages, hard_clip, soft_clip, zero_spread
from vgrpo.config import Config, build_rewards
from vgrpo.errors import RunError, UserError
from vgrpo.evaluation import evaluate
from vgrpo.policies.pipeline import Pipeline, check, chunks
from vgrpo.progress import Progress
from vgrpo.prompts import batch as prompt_batch
from vgrpo.prompts import keep, read_prompts, spread
from vgrpo.report import write_report
from vgrpo.rewards import probe, score
from vgrpo.rollout import Clock, generate, repeat
from vgrpo.run import Run, create, save_grid
from vgrpo.seeds import generator, noise
from vgrpo.types import Batch, Draws, Prompt, Reward, Rewards, Rollouts, Stats

log = logging.getLogger(__name__)


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
    steps: int = 0
    updates: int = 0

    @property
    def tuned(self) -> Mapping[str, Tensor] | None:
        """The weights that are evaluated and exported: the average where there is one; None for the present ones."""
        return self.averaged or None


def train(
    config: Config,
    *,
    rewards: Mapping[str, Reward] | Sequence[Callable] | None = None,
    prompts: Sequence[Prompt | str] | None = None,
    resume: Path | None = None,
) -> Run:
    """Trains a policy and returns its run folder.

    Args:
        config: the settings, from `load_recipe`.
        rewards: functions `(images uint8 [N, 3, H, W], prompts) -> scores [N]` that take the place of the recipe's
            rewards, by name or as a list (each then has its own name, and weight 1).
        prompts: training prompts that take the place of `config.prompts.train`.
        resume: a run folder to go on with; `config` is then its own.

    Raises:
        UserError: a mistake in settings, files, model or rewards; found before any weight is loaded where possible.
        RunError: the run had to stop; what was saved before is intact.
    """
    job = prepare(config, rewards, prompts, resume)
    with Progress(total=config.run.steps, enabled=job.accelerator.is_main_process) as progress:
        progress.show(header(job))
        if job.steps == 0:
            assess(job, progress, weights="base")
        while job.steps < config.run.steps:
            row = step(job, progress)
            job.steps += 1
            record(job, row, progress)
        finish(job)
        progress.show(footer(job))
    return job.run


def step(job: Job, progress: Progress) -> dict[str, float]:
    """One step of the method; returns its metrics."""
    config, objective, policy = job.config, job.config.objective, job.policy
    clock, begin, calls = Clock(), perf_counter(), policy.calls
    progress.part("rollout", config.images_per_step)
    prompts = prompt_batch(job.train_prompts, config.prompts.per_step, job.steps, config.run.seed)
    slots = range(job.accelerator.process_index, len(prompts), job.accelerator.num_processes)

    rollouts = generate(
        policy,
        [prompts[s] for s in slots],
        slots,
        group_size=config.rollout.group_size,
        micro_batch=config.rollout.micro_batch,
        seed=config.run.seed,
        step=job.steps,
        clock=clock,
        advance=progress.advance,
    )
    refuse_non_finite(rollouts)
    with clock("reward"):
        rewards = judge(job, rollouts, prompts)
    advantages = advantages_of(config, rewards)
    draws = objective.draw(job.schedule, slots, config.rollout.group_size, seed=config.run.seed, step=job.steps)
    scored = Scored(rollouts=rollouts, draws=draws, advantages=advantages)
    if config.update.total > 1:
        with clock("old"):
            scored = score_old(job, scored)
    with clock("update"):
        metrics = update(job, scored, progress)

    if job.accelerator.is_main_process and job.steps % config.run.sample_every == 0:
        save_samples(job, rollouts, rewards)
    seconds = perf_counter() - begin
    timing = {
        f"time/{k}": clock.seconds.get(k, 0.0) for k in ("encode", "rollout", "decode", "reward", "old", "update")
    }
    return (
        reward_metrics(rewards)
        | metrics
        | timing
        | {
            "images": config.images_per_step,
            "network_calls": (policy.calls - calls) * job.accelerator.num_processes,
            "seconds": seconds,
            "time/rest": seconds - sum(timing.values()),
        }
    )


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


def advantages_of(config: Config, rewards: Rewards) -> Tensor:
    """[P, G] float64. Rewards that were normalised each in its group are not scaled a second time."""
    settings = config.advantages
    scale = settings.scale if settings.combine == "sum" else "none"
    advantages = group_advantages(rewards.total, scale=scale, valid=rewards.valid)
    if settings.hard_clip:
        advantages = hard_clip(advantages, settings.hard_clip)
    if settings.soft_clip:
        advantages = soft_clip(advantages, settings.soft_clip)
    return advantages


@dataclass(frozen=True, kw_only=True)
class Scored:
    """All that the updates of a step learn from."""

    rollouts: Rollouts
    draws: Draws
    advantages: Tensor
    """[P, G] of all processes, on the CPU."""
    error_old: Tensor | None = None
    """[M, N] errors of θ_old on this process's rows; None when there is one update and they are not needed."""
    x0_old: Tensor | None = None
    """[M, N, *latent] its x-predictions, only when a KL will be taken."""

    def batch(self, rows: Tensor) -> Batch:
        """The given rows of this process; their noise is made again from its identity."""
        rollouts, draws, device = self.rollouts, self.draws, self.rollouts.x0.device
        sets, place = draws.set_of_row[rows].unique(return_inverse=True)
        shape = rollouts.x0.shape[1:]
        eps = [noise([(*draws.identities[s], "noise", j) for s in sets.tolist()], shape) for j in range(len(draws.t))]
        own, there = self.advantages[list(rollouts.slots)].flatten(), rows.to(device)
        return Batch(
            x0=rollouts.x0[there],
            cond=repeat(rollouts.cond, rows // rollouts.group_size),
            t=draws.t[:, draws.set_of_row[rows]].to(device),
            eps=torch.stack(eps)[:, place].to(device),
            advantages=own[rows].float().to(device),
            error_old=None if self.error_old is None else self.error_old[:, there],
            x0_old=None if self.x0_old is None else self.x0_old[:, there],
        )


def score_old(job: Job, scored: Scored) -> Scored:
    """Scores θ_old on every pair right after the rollout, in the same micro-batch shape in which θ will be."""
    settings, objective, errors, predictions = job.config.update, job.config.objective, [], []
    for rows in torch.arange(len(scored.rollouts.x0)).split(settings.micro_batch):
        with torch.no_grad():
            error, x0 = objective.score(job.policy, scored.batch(rows), joint=settings.joint_draws)
        errors.append(error)
        if objective.kl_weight:
            predictions.append(x0)
    return replace(scored, error_old=torch.cat(errors, 1), x0_old=torch.cat(predictions, 1) if predictions else None)


def update(job: Job, scored: Scored, progress: Progress) -> dict[str, float]:
    """All optimizer steps on one rollout: each pass goes over its groups once, in an order of its own."""
    config, settings = job.config, job.config.update
    progress.part("update", config.images_per_step * settings.passes)
    done: list[dict[str, float]] = []
    for number in range(settings.passes):
        order = torch.randperm(
            len(scored.advantages), generator=generator(config.run.seed, job.steps, "order", number)
        ).tolist()
        for slots in chunks(order, len(order) // settings.per_rollout):
            if not config.objective.kl_weight and not scored.advantages[slots].any():
                continue  # no group has a spread: there is nothing to learn from, and weight decay must not act alone
            stats = accumulate(job, scored, slots, first=not done)
            progress.advance(len(slots) * config.rollout.group_size)
            if not done:
                refuse_ratio(job, stats)
            done.append(summarise(stats) | descend(job, scored.rollouts))
    if not done:
        log.warning("step %d: no group has a spread in its rewards, so nothing was learnt", job.steps + 1)
        return {"updates": 0.0, "weight_change": 0.0}
    means = {
        k: sum(d[k] for d in done) / len(done) for k in ("clip_fraction", "kl", "error", "grad_norm", "weight_change")
    }
    last = {k: done[-1][k] for k in ("ratio/mean", "ratio/std", "lr")}
    return {"updates": float(len(done)), "ratio/first": done[0]["ratio/worst"], **last, **means}


def accumulate(job: Job, scored: Scored, slots: Sequence[int], *, first: bool) -> list[Stats]:
    """Adds the gradient of the mean loss over the groups in `slots`, as far as they are this process's, in micro-batches.

    Rows of groups without spread have advantage 0 and hence no gradient; without a KL they cost no network call.
    """
    settings, objective, size = job.config.update, job.config.objective, job.config.rollout.group_size
    place = {slot: i for i, slot in enumerate(scored.rollouts.slots)}
    learnt = [
        place[slot] * size + member
        for slot in slots
        if slot in place
        for member in range(size)
        if objective.kl_weight or scored.advantages[slot, member] != 0
    ]
    out: list[Stats] = []
    for rows in chunks(learnt, settings.micro_batch):
        batch = scored.batch(torch.tensor(rows))
        if first and not out and batch.error_old is None:  # one look at the ratio, which the gradient does not need
            with torch.no_grad():
                error, _ = objective.score(job.policy, batch.first_draw(), joint=settings.joint_draws)
            batch = replace(batch, error_old=error)
        weight = 1 / (len(slots) * size)
        out.append(objective.backward(job.policy, batch, first=first, joint=settings.joint_draws, weight=weight))
    return out


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
    rate = learning_rate(job.config, job.updates)
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


def learning_rate(config: Config, update: int) -> float:
    """Rate of optimizer step `update`, counted from 0; a function of nothing else, so that a resume cannot change it."""
    settings = config.optimizer
    done = update / config.updates
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
    off = max((s.log_ratio.expm1().abs().max().item() for s in stats), default=0.0)
    clip = job.config.objective.clip
    if not off <= tolerance:
        raise RunError(
            f"step {job.steps + 1}: before any update the ratio of new to old policy is off 1 by {off:.2e}, "
            f"more than {tolerance:.0e}: "
            f"old and new scores disagree (precision, mode, micro-batch or schedule). Nothing was trained on this step"
        )
    if clip and job.config.update.total > 1 and off > clip:
        log.warning("step %d: the ratio's numerical noise %.1e exceeds objective.clip=%g", job.steps + 1, off, clip)


def summarise(stats: Sequence[Stats]) -> dict[str, float]:
    """Means over the rows of all processes, and the largest |ratio − 1|."""
    sums, worst = torch.zeros(6, dtype=torch.float64), 0.0
    if stats:
        ratio = torch.cat([s.log_ratio for s in stats]).double().exp().cpu()
        parts = [torch.cat([getattr(s, key) for s in stats]).double().cpu() for key in ("clipped", "kl", "error")]
        sums = torch.stack([torch.ones_like(ratio).sum(), ratio.sum(), (ratio**2).sum(), *[p.sum() for p in parts]])
        worst = (ratio - 1).abs().max().item()
    everyone = gather_object([(sums, worst)])
    count, total, squares, clipped, kl, error = torch.stack([s for s, _ in everyone]).sum(0).tolist()
    return {
        "ratio/mean": total / count,
        "ratio/std": math.sqrt(max(squares / count - (total / count) ** 2, 0.0)),
        "ratio/worst": max(w for _, w in everyone),
        "clip_fraction": clipped / count,
        "kl": kl / count,
        "error": error / count,
    }


def reward_metrics(rewards: Rewards) -> dict[str, float]:
    """Mean and spread over the step of the total and of each reward, and the share of groups that teach nothing."""
    out = {"reward/mean": rewards.total.mean().item(), "reward/std": rewards.total.std(correction=0).item()}
    for name, part in rewards.parts.items():
        out[f"reward/{name}/mean"] = part.mean().item()
        out[f"reward/{name}/std"] = part.std(correction=0).item()
    out["zero_std_fraction"] = zero_spread(rewards.total, rewards.valid).double().mean().item()
    return out


# ------------------------------------------------------------------------------------------------------- around the loop


def prepare(config: Config, rewards: Any, prompts: Any, resume: Path | None) -> Job:
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
    accelerator = Accelerator(log_with=trackers or None, project_dir=str(Path(config.run.folder)))
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
    averaged = {name: p.detach().clone() for name, p in policy.trainable.items()} if config.run.ema else {}
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
        schedule=policy.schedule(config.objective.schedule_steps),
        averaged=averaged,
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


def shared(accelerator: Accelerator, make: Callable[[], Run]) -> Run:
    """What the main process makes, for all."""
    box = [make() if accelerator.is_main_process else None]
    return broadcast_object_list(box)[0]


def facts(config: Config) -> dict[str, Any]:
    """What a resume may not change."""
    return {"model.path": config.model.path, "adapter.kind": config.adapter.kind, "adapter.rank": config.adapter.rank}


def restore(job: Job, state: checkpoint.State) -> None:
    job.policy.load(state.weights)
    checkpoint.restore_moments(job.optimizer, job.policy.trainable, state.moments)
    for name, mean in job.averaged.items():
        mean.copy_(state.averaged[name])
    job.steps, job.updates = state.step, state.updates
    if job.accelerator.is_main_process:
        job.run.forget_after(state.step)


def record(job: Job, row: dict[str, float], progress: Progress) -> None:
    """Writes a step down; saves and evaluates when it is time."""
    settings, last = job.config.run, job.steps == job.config.run.steps
    if job.accelerator.is_main_process:
        job.run.log({"step": job.steps, **row})
        progress.line(job.steps, row)
    if settings.trackers:
        job.accelerator.log(row, step=job.steps)
    if last or job.steps % settings.save_every == 0:
        save(job)
    if last or job.steps % job.config.evaluation.every == 0:
        assess(job, progress, weights="tuned")


def save(job: Job) -> None:
    if job.accelerator.is_main_process:
        weights = job.policy.trainable
        state = checkpoint.State(
            step=job.steps,
            updates=job.updates,
            weights=weights,
            averaged=job.averaged,
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
    with job.policy.using(job.tuned):
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
        job.run.log({"step": job.steps, "weights": weights, **row}, "evaluations.jsonl")
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
