"""Stochastic rollouts: their marginals in closed form, their windows and trees by hand, their ends against stock pipelines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from vgrpo.config import parse
from vgrpo.errors import UserError
from vgrpo.objectives import policy_gradient
from vgrpo.objectives.branch import BranchGRPO
from vgrpo.objectives.policy_gradient import DDPO, DanceGRPO, FlowGRPO, FlowGRPOFast, MixGRPO, PolicyGradient
from vgrpo.paths import LinearPath, VPPath, per_row
from vgrpo.policies.pipeline import Pipeline
from vgrpo.rollout import generate
from vgrpo.sde import cps_step, dance_step, ddim_step, flow_step
from vgrpo.seeds import generator, noise
from vgrpo.types import Cond, Prompt, Walk

PROMPTS = [Prompt(text=text, id=text) for text in ("a", "b", "c")]
SD15 = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64).square().neg().add(1).cumprod(0)
"""ᾱ of Stable Diffusion 1.5: its betas are linear in their roots."""


class Field:
    """A policy whose network is a function of (x, t); it solves nothing itself and counts its calls."""

    def __init__(
        self, path: Any, times: Tensor, field: Callable[[Tensor, Tensor], Tensor], shape: Sequence[int]
    ) -> None:
        self.path, self.times, self.field, self.shape, self.calls = path, times, field, tuple(shape), 0
        self.finished: list[tuple[float, int]] = []

    def encode(self, prompts: Sequence[Prompt]) -> Cond:
        return {"number": torch.arange(len(prompts), dtype=torch.float64)}

    def noise(self, seeds: Iterable[int]) -> Tensor:
        return noise([(s,) for s in seeds], self.shape).double()

    def schedule(self, steps: int | None = None) -> Tensor:
        return self.times

    def sample(self, x: Tensor, cond: Cond) -> Tensor:
        raise AssertionError("a stochastic objective walks by itself")

    def finish(self, x: Tensor, cond: Cond, t: float, steps: int) -> Tensor:
        self.calls += steps * len(x)
        self.finished.append((t, steps))
        return x - t * self.field(x, torch.full((len(x),), t, dtype=torch.float64))

    def decode(self, x0: Tensor) -> Tensor:
        return torch.zeros(len(x0), 3, 1, 1, dtype=torch.uint8)

    def predict(self, x_t: Tensor, t: Tensor, cond: Cond) -> Tensor:
        assert len(x_t) == len(t) == len(cond["number"])
        self.calls += len(x_t)
        return self.field(x_t, t.to(x_t.dtype))

    guided = predict


def rows_of(groups: int, size: int, step: int = 0, seed: int = 0) -> list[tuple]:
    return [(seed, step, slot, member) for slot in range(groups) for member in range(size)]


def falling(steps: int, start: float = 1.0) -> Tensor:
    """`steps` equal steps from `start` to 0, without the 0."""
    return start * torch.arange(steps, 0, -1, dtype=torch.float64) / steps


def rollout(policy: Field, objective: PolicyGradient, groups: int, size: int, *, step: int = 0) -> tuple[Tensor, Walk]:
    policy.calls = 0
    made = generate(
        policy, PROMPTS[:groups], range(groups), group_size=size, micro_batch=64, seed=0, step=step, objective=objective
    )
    assert made.walk is not None
    return made.x0, made.walk


# ----------------------------------------------------------------------------------------------- marginals in closed form


class Gauss:
    """Data N(m, s²) in each dimension, and what a perfect network says of it.

    x_t is a·x0 + b·eps, so E[x0|x_t] = m + a·s²/var·(x_t − a·m) and E[eps|x_t] = b/var·(x_t − a·m), var = a²s² + b².
    """

    def __init__(self, m: float, s: float) -> None:
        self.m, self.s = m, s

    def marginal(self, a: Any, b: Any) -> tuple[Any, Any]:
        """Mean and variance of x_t."""
        return a * self.m, a**2 * self.s**2 + b**2

    def velocity(self, x: Tensor, t: Any) -> Tensor:
        t = torch.as_tensor(t, dtype=x.dtype).view(-1, *[1] * (x.ndim - 1))
        mean, var = self.marginal(1 - t, t)
        return t / var * (x - mean) - (self.m + (1 - t) * self.s**2 / var * (x - mean))

    def eps(self, x: Tensor, alpha_bar: Any) -> Tensor:
        alpha_bar = torch.as_tensor(alpha_bar, dtype=x.dtype).view(-1, *[1] * (x.ndim - 1))
        mean, var = self.marginal(alpha_bar.sqrt(), (1 - alpha_bar).sqrt())
        return (1 - alpha_bar).sqrt() / var * (x - mean)


def entry(t: Any) -> Tensor:
    """ᾱ at the scheduler's own times: the entry i at (i+1)/1000, 1 at 0."""
    index = (torch.as_tensor(t, dtype=torch.float64) * 1000).round().long()
    return torch.cat([torch.ones(1, dtype=torch.float64), SD15])[index]


STEPS = {
    "flow": lambda data, x, t, after, level: flow_step(x, data.velocity(x, t), t, after, a=level),
    "dance": lambda data, x, t, after, level: dance_step(x, data.velocity(x, t), t, after, eta=level),
    "cps": lambda data, x, t, after, level: cps_step(x, data.velocity(x, t), t, after, a=level),
    "ddim": lambda data, x, t, after, level: ddim_step(x, data.eps(x, entry(t)), entry(t), entry(after), eta=level),
}
LEVELS = {"flow": 0.7, "dance": 0.3, "cps": 0.8, "ddim": 1.0}


def policy_of(name: str, data: Gauss, times: Tensor, shape: Sequence[int]) -> Field:
    if name == "ddim":
        return Field(VPPath(SD15), times, lambda x, t: data.eps(x, entry(t)), shape)
    return Field(LinearPath(), times, data.velocity, shape)


def first_marginal(name: str, data: Gauss, t: float) -> tuple[float, float]:
    if name == "ddim":
        alpha_bar = entry(t).item()
        return data.marginal(math.sqrt(alpha_bar), math.sqrt(1 - alpha_bar))
    return data.marginal(1 - t, t)


def propagated(name: str, data: Gauss, times: Tensor) -> tuple[float, float]:
    """Mean and variance at the end of a walk over `times`, without a sample: every step is affine in x."""
    mean, var = first_marginal(name, data, times[0].item())
    probe = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    for k, t in enumerate(times.tolist()):
        last = k + 1 == len(times)
        moved, std = STEPS[name](data, probe, t, 0.0 if last else times[k + 1].item(), 0.0 if last else LEVELS[name])
        slope = (moved[1] - moved[0]).item()
        mean, var = slope * mean + moved[0].item(), slope**2 * var + std.item() ** 2
    return mean, var


# DDPM starts at its last ᾱ. Flow-GRPO's first steps from t = 1 are equally noisy on any grid, σ²·dt = a²/k in step k:
# they miss the marginal by an amount that falls slower than the step, so the order is measured from below 1.
EXACT = {
    "flow": (FlowGRPO(), 0.9, 200, 0.008),
    "dance": (DanceGRPO(), 1.0, 200, 0.013),
    "ddim": (DDPO(), 1.0, 250, 0.05),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_fine_walk_ends_in_the_data(name: str) -> None:
    """Mean exactly, variance up to a bias that about halves with the step and 5 standard errors of 32,000 samples."""
    objective, start, steps, bias = EXACT[name]
    data = Gauss(0.7, 0.6)
    times = falling(steps, start)
    coarse, fine = (propagated(name, data, t)[1] for t in (times[1::2], times))
    assert fine / 0.36 - 1 == pytest.approx(0, abs=bias)
    assert (coarse - 0.36) / (fine - 0.36) == pytest.approx(2, rel=0.2)

    policy = policy_of(name, data, times, (2, 2000))
    mean, var = first_marginal(name, data, times[0].item())
    begin = mean + math.sqrt(var) * noise([("start", i) for i in range(8)], policy.shape).double()
    cond = policy.encode([PROMPTS[0]] * 8)
    x, walk = objective.sample(policy, times, begin, cond, rows_of(2, 4), group_size=4, step=0)
    samples = x.flatten()
    assert len(samples) == 32_000
    expected_mean, expected_var = propagated(name, data, times)
    assert expected_mean == pytest.approx(0.7, abs=1e-12)
    assert samples.mean().item() == pytest.approx(0.7, abs=5 * 0.6 / math.sqrt(32_000))
    assert samples.var().item() == pytest.approx(expected_var, rel=5 * math.sqrt(2 / 32_000))
    assert samples.var().item() == pytest.approx(0.36, rel=bias + 5 * math.sqrt(2 / 32_000))
    # a density with the right spread: the mean of −½z² is −½
    z2 = [-2 * (d + math.log(s) + 0.5 * math.log(2 * math.pi)) for d, s in densities(walk, name)]
    assert sum(z2) / len(z2) == pytest.approx(1, abs=5 * math.sqrt(2 / (4000 * len(z2))))


def densities(walk: Walk, name: str) -> list[tuple[float, float]]:
    """Log density of every kept step, and the standard deviation that it should have by the papers' formulas."""
    depth = walk.plan.depth.repeat(len(walk.x) // len(walk.plan.depth))
    t, after = walk.plan.times[depth], walk.plan.times[depth + 1]
    if name == "flow":
        std = 0.7 * (t / (1 - t)).sqrt() * (t - after).sqrt()
    elif name == "dance":
        std = 0.3 * (t - after).sqrt()
    else:
        now, then = entry(t), entry(after)
        std = ((1 - then) / (1 - now) * (1 - now / then)).sqrt()
    return list(zip(walk.log_density.tolist(), std.tolist(), strict=True))


def test_flow_grpo_from_pure_noise() -> None:
    for steps in (80, 320, 640):
        assert propagated("flow", Gauss(0.7, 0.6), falling(steps))[1] == pytest.approx(0.36, rel=0.01)


@pytest.mark.parametrize("name", LEVELS)
def test_a_point_mass_is_exact_in_any_number_of_steps_where_the_step_keeps_coefficients(name: str) -> None:
    """s = 0: x_t ~ N(a·m, b²) at every time of a CPS or DDIM walk, however few its steps are; not so of an Euler step."""
    data, times = Gauss(-1.2, 0.0), falling(4)
    shape, objective = (4, 2000), PolicyGradient(name="any", noise=name, level=LEVELS[name])
    policy = policy_of(name, data, times, shape)
    mean, var = first_marginal(name, data, 1.0)
    begin = mean + math.sqrt(var) * noise([("start", i) for i in range(4)], shape).double()
    x, walk = objective.sample(
        policy, times, begin, policy.encode([PROMPTS[0]] * 4), rows_of(1, 4), group_size=4, step=0
    )
    torch.testing.assert_close(
        x, torch.full_like(x, -1.2), rtol=0, atol=1e-12
    )  # the last step lands on m whatever comes
    misses = []
    for k in range(3):
        here = walk.x_next[walk.plan.depth == k].flatten()
        mean, var = first_marginal(name, data, times[k + 1].item())
        assert here.mean().item() == pytest.approx(mean, abs=5 * math.sqrt(1.3 * var / 32_000))
        misses.append(abs(here.var().item() / var - 1))
    assert (max(misses) < 5 * math.sqrt(2 / 32_000)) == (name in ("cps", "ddim")), misses


# ------------------------------------------------------------------------------------------------ ends, stock pictures


@pytest.mark.parametrize("name", ["flow", "dance", "cps"])
@pytest.mark.parametrize("below", range(4))
def test_a_walk_may_begin_at_one_or_at_the_nearest_floats_below(name: str, below: int) -> None:
    first = torch.ones((), dtype=torch.float32)
    for _ in range(below):
        first = torch.nextafter(first, torch.zeros(()))
    assert (first == 1) == (below == 0)
    times = torch.cat([first[None], torch.tensor([0.75, 0.5, 0.25])])
    policy = policy_of(name, Gauss(0.7, 0.6), times, (2, 8))
    objective = PolicyGradient(name="any", noise=name, level=LEVELS[name])
    x, walk = rollout(policy, objective, 1, 2)
    assert x.dtype == walk.x.dtype == torch.float32
    assert x.isfinite().all() and walk.log_density.isfinite().all()
    exact = rollout(policy_of(name, Gauss(0.7, 0.6), falling(4).float(), (2, 8)), objective, 1, 2)
    torch.testing.assert_close(x, exact[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(walk.log_density, exact[1].log_density, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("name", ["flow", "dance", "cps"])
def test_without_noise_a_walk_draws_the_stock_euler_picture(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str, guidance: float
) -> None:
    settings["rollout"] |= {"guidance": guidance, "sampler": "euler"}
    policy = Pipeline(parse(settings), torch.device("cpu"))
    objective = FlowGRPO(noise=name).model_copy(update={"level": 0.0})
    monkeypatch.setattr(policy_gradient, "log_density", lambda x, mean, std: x.new_zeros(len(x)))  # there is none
    begin, cond = policy.noise([3, 4]), policy.encode(PROMPTS[:2])
    mine, walk = objective.sample(policy, policy.schedule(), begin, cond, rows_of(2, 1), group_size=1, step=0)
    assert policy.calls == 2 * 4 * (1 if guidance == 1 else 2)
    pictures = []
    for latents in (mine, policy.sample(begin, cond)):
        unscaled = policy.family.unscale(policy.pipe, latents)
        with torch.no_grad():
            pictures.append(policy.pipe.vae.decode(unscaled, return_dict=False)[0])
    assert (begin - mine).abs().max() > 0.1
    torch.testing.assert_close(pictures[0], pictures[1], rtol=0, atol=1e-4)
    assert torch.equal(walk.x_next[:2], walk.x[1:3])  # the steps of the first picture hang together


class Elsewhere(Field):
    """A policy whose network is on another device, one that holds no numbers but cannot be mixed with the CPU."""

    def encode(self, prompts: Sequence[Prompt]) -> Cond:
        return {k: v.to("meta") for k, v in super().encode(prompts).items()}

    def guided(self, x_t: Tensor, t: Tensor, cond: Cond) -> Tensor:
        return self.predict(x_t.to("meta"), t.to("meta"), cond)

    def decode(self, x0: Tensor) -> Tensor:
        assert x0.device.type == "meta"
        return super().decode(x0)


@pytest.mark.parametrize(
    "objective",
    [FlowGRPO(), DanceGRPO(), FlowGRPO(noise="cps"), MixGRPO(window=1, window_start=1), BranchGRPO(splits=(0, 2))],
    ids=lambda o: f"{o.name} {o.noise}",
)
def test_a_walk_goes_where_the_network_is(objective: PolicyGradient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise is drawn on the CPU. Checks that look at numbers are left out, for here are none."""
    monkeypatch.setattr("vgrpo.sde.falling", lambda t, after, x: (per_row(t, x), per_row(after, x)))
    monkeypatch.setattr(policy_gradient, "log_density", lambda x, mean, std: ((x - mean) / std).flatten(1).mean(1))
    policy = Elsewhere(LinearPath(), falling(4), lambda x, t: x * t.view(-1, 1, 1), (1, 3))
    x, walk = rollout(policy, objective, 2, 4)
    assert {z.device.type for z in (x, walk.x, walk.x_next, walk.log_density)} == {"meta"}


# -------------------------------------------------------------------------------------------------------------- flash


def constant(times: Tensor) -> Field:
    """A straight flow: any solver is exact."""
    return Field(LinearPath(), times, lambda x, t: torch.full_like(x, 0.8), (1, 3))


@pytest.mark.parametrize(
    ("start", "window", "flash", "calls", "finish"),
    [
        (0, 2, 0.4, 2 + 2, (0.75, 2)),  # of 6 steps that remain, 2.4
        (3, 2, 0.7, 5 + 2, (0.375, 2)),  # of 3, 2.1
        (5, 2, 0.4, 7 + 1, (0.125, 1)),  # the one at the end, and never none
        (3, 2, None, 8, None),
    ],
)
def test_flash_calls_the_network_less_often(
    start: int, window: int, flash: float | None, calls: int, finish: Any
) -> None:
    policy = constant(falling(8))
    objective = MixGRPO(window=window, window_start=start, window_moves="never", flash=flash)
    x, walk = rollout(policy, objective, 2, 3)
    assert policy.calls == 6 * calls
    assert policy.finished == ([finish] if finish else [])
    assert walk.plan.depth.tolist() == [k for k in range(start, start + window) for _ in range(3)]
    t = walk.plan.times[start + window].item()
    last = walk.x_next.unflatten(0, (2, window, 3))[:, -1].flatten(0, 1)
    torch.testing.assert_close(x, last - t * 0.8)
    torch.testing.assert_close(x, rollout(policy, objective.model_copy(update={"flash": None}), 2, 3)[0])


def test_the_pipelines_finish_is_a_second_order_solver(settings: dict[str, Any], monkeypatch: Any) -> None:
    policy = Pipeline(parse(settings), torch.device("cpu"))
    x = policy.noise([1, 2])
    monkeypatch.setattr(policy, "guided", lambda x, t, cond: torch.full_like(x, 0.8))
    for t in (0.9, 0.4):
        for steps in (1, 2, 5):
            torch.testing.assert_close(policy.finish(x, {}, t, steps), x - 0.8 * t)
    data = Gauss(0.7, 1.0)
    monkeypatch.setattr(policy, "guided", lambda x, t, cond: data.velocity(x, t))
    mean, var = data.marginal(1 - 0.8, 0.8)
    exact = 0.7 + 1.0 * (x - mean) / math.sqrt(var)  # the flow keeps everyone's number of standard deviations

    def miss(steps: int) -> float:
        return (policy.finish(x, {}, 0.8, steps) - exact).abs().max().item()

    def euler(steps: int) -> float:
        z = x
        for k in range(steps):
            z = z - 0.8 / steps * data.velocity(z, 0.8 * (1 - k / steps))
        return (z - exact).abs().max().item()

    assert euler(32) / euler(64) == pytest.approx(2, rel=0.05)
    assert miss(32) / miss(64) > 3  # 4 in the limit, from which its steps in log t/(1−t) near the data keep it
    assert miss(16) < euler(16) / 6


def test_mix_grpo_with_flash_on_a_real_pipeline(settings: dict[str, Any]) -> None:
    settings["rollout"] |= {"steps": 8, "guidance": 2.0}
    policy = Pipeline(parse(settings), torch.device("cpu"))
    objective = MixGRPO(window=2, window_start=1, flash=0.4)
    made = generate(policy, PROMPTS, range(3), group_size=2, micro_batch=4, seed=0, step=0, objective=objective)
    assert policy.calls == 6 * (3 + 2) * 2  # three steps, two of the five that remain, guidance
    assert made.x0.isfinite().all()
    whole = generate(
        policy, PROMPTS, range(3), group_size=2, micro_batch=4, seed=0, step=0,
        objective=objective.model_copy(update={"flash": None}),
    )  # fmt: skip
    assert torch.equal(made.walk.x_next, whole.walk.x_next)
    assert 0 < (made.x0 - whole.x0).abs().max() < 0.1 * whole.x0.abs().max()  # a little off by the solver alone


# ------------------------------------------------------------------------------------------------------------- windows


def positions(steps: int, until: int, seed: int = 0, **settings: Any) -> list[int]:
    """Start of the window in each step of training, asked for backwards: it may not depend on what came before."""
    objective = MixGRPO(**settings)
    found = {step: objective.noisy(steps, step, seed) for step in reversed(range(until))}
    assert all(len(window) == objective.window for window in found.values())
    return [found[step].start for step in range(until)]


def runs(values: Sequence[int]) -> list[tuple[int, int]]:
    """Values with how often each follows itself."""
    out: list[tuple[int, int]] = []
    for value in values:
        if out and out[-1][0] == value:
            out[-1] = (value, out[-1][1] + 1)
        else:
            out.append((value, 1))
    return out


def test_a_window_that_never_moves() -> None:
    assert positions(8, 60, window=2, window_start=3, window_moves="never") == [3] * 60


def test_a_progressive_window_by_hand() -> None:
    settings = {"window": 2, "window_start": 1, "window_every": 3, "window_stride": 2}  # of 8 steps the last start is 5
    assert positions(8, 15, **settings) == [1, 1, 1, 3, 3, 3, 5, 5, 5, 1, 1, 1, 3, 3, 3]
    assert positions(8, 15, **settings, window_wraps=False) == [1, 1, 1, 3, 3, 3, *[5] * 9]
    # a stride that does not fit ends with the window at the end
    assert positions(7, 14, **settings)[6:] == [4, 4, 4, 1, 1, 1, 3, 3]
    paper = positions(25, 25 * 22, window=4)  # w = 4 of 25, one further every 25 iterations
    assert paper == [i // 25 % 21 for i in range(25 * 22)]


def test_a_decaying_stay_by_hand() -> None:
    """Starts 0 … 4 of 8 steps: the stay of 16 falls to a quarter in equal parts."""
    settings = {"window": 3, "window_moves": "decay", "window_every": 16}
    stays = [(0, 16), (1, 13), (2, 10), (3, 7), (4, 4)]
    assert runs(positions(8, 100, **settings)) == [*stays, *stays]
    assert runs(positions(8, 100, **settings, window_wraps=False)) == [*stays[:4], (4, 54)]


def test_an_exponential_stay_by_hand() -> None:
    """Starts 0 … 6 of 8 steps: past 4 the stay is 100·e^(−0.1), 100·e^(−0.2)."""
    settings = {"window": 1, "window_moves": "exp_decay", "window_every": 100}
    expected = [*[(k, 100) for k in range(5)], (5, 90), (6, 82), (0, 8)]
    assert runs(positions(8, 680, **settings)) == expected


def test_a_stay_is_never_shorter_than_a_step() -> None:
    assert positions(8, 7, window=1, window_moves="decay", window_every=1) == [0, 1, 2, 3, 4, 5, 6]


def test_a_random_window_goes_everywhere() -> None:
    chosen = positions(8, 600, window=2, window_moves="random")
    counts = [chosen.count(k) for k in range(6)]
    assert sum(counts) == 600
    assert all(60 < n < 140 for n in counts), counts  # 100 each, ± 4.4 standard deviations
    assert positions(8, 600, window=2, window_moves="random") == chosen
    assert positions(8, 600, seed=1, window=2, window_moves="random") != chosen
    assert {FlowGRPOFast().noisy(8, step, 0).start for step in range(99)} == set(range(6))


@pytest.mark.parametrize("start", [0, 2])
def test_windows_at_both_ends_walk_and_keep_only_themselves(start: int) -> None:
    policy = policy_of("flow", Gauss(0.7, 0.6), falling(5), (1, 3))
    objective = MixGRPO(window=2, window_start=start, window_moves="never")
    x, walk = rollout(policy, objective, 2, 3)
    assert policy.calls == 6 * 5
    assert walk.plan.depth.tolist() == [start] * 3 + [start + 1] * 3
    steps = walk.x.unflatten(0, (2, 2, 3))
    expected = made_noise(2, 3, shared=True)
    for k in range(start):  # the group is one until its first noise
        expected = expected - 0.2 * policy.field(expected, torch.full((6,), 1 - 0.2 * k, dtype=torch.float64))
    torch.testing.assert_close(steps[:, 0].flatten(0, 1), expected)
    after = walk.x_next.unflatten(0, (2, 2, 3))
    torch.testing.assert_close(after[:, 0], steps[:, 1], rtol=0, atol=0)
    end = after[:, 1].flatten(0, 1)
    for k in range(start + 2, 5):
        end = end - 0.2 * policy.field(end, torch.full((6,), 1 - 0.2 * k, dtype=torch.float64))
    torch.testing.assert_close(x, end)
    assert (x[0] - x[1]).abs().max() > 1e-2


def made_noise(groups: int, size: int, *, shared: bool) -> Tensor:
    """The initial noise of step 0, by the identities that `Field.noise` gets from the rollout."""
    from vgrpo.seeds import seed_of

    seeds = [seed_of(0, "rollout", 0, slot, 0 if shared else m) for slot in range(groups) for m in range(size)]
    return noise([(s,) for s in seeds], (1, 3)).double()


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ({"name": "mix_grpo", "window": 0}, "objective.window: .*greater than or equal to 1, got 0"),
        ({"name": "mix_grpo", "window": 4}, "objective.window=4 is longer than the 3 noisy steps of rollout.steps=4"),
        (
            {"name": "mix_grpo", "window": 2, "window_start": 2},
            "objective.window_start=2 leaves no room for the window; at most 1 here",
        ),
        (
            {"name": "flow_grpo_fast", "window_start": 9, "window_moves": "never"},
            "objective.window_start=9 leaves no room for the window; at most 1 here",
        ),
        ({"name": "mix_grpo", "window": 2, "window_every": 0}, "objective.window_every: .*got 0"),
        ({"name": "mix_grpo", "window": 2, "window_stride": 0}, "objective.window_stride: .*got 0"),
        ({"name": "mix_grpo", "window": 2, "window_moves": "back"}, "objective.window_moves: .*got 'back'"),
        ({"name": "flow_grpo", "flash": 0.5}, "objective.flash: there is no step after the noisy ones unless"),
        ({"name": "mix_grpo", "window": 2, "flash": 1.0}, "objective.flash: .*got 1.0"),
        ({"name": "ddpo", "window": 2, "flash": 0.5}, "objective.flash: only for the linear path"),
        ({"name": "flow_grpo", "level": 0.0}, "objective.level: .*greater than 0, got 0.0"),
        ({"name": "dance_grpo", "fraction": 0.0}, "objective.fraction: .*got 0.0"),
        ({"name": "branch_grpo", "splits": [0, 2, 1]}, r"objective.splits=\[0, 2, 1\] must be different steps, rising"),
        ({"name": "branch_grpo", "splits": [0, 0]}, "must be different steps, rising"),
        ({"name": "branch_grpo", "splits": []}, "must be different steps, rising"),
        ({"name": "branch_grpo", "splits": [0, 3]}, "the last noisy step of rollout.steps=4 is 2"),
        (
            {"name": "branch_grpo", "splits": [0, 1, 2]},
            r"rollout.group_size=4 must be the tree's leaves, 2\^3 = 8",
        ),
        (
            {"name": "branch_grpo", "splits": [0, 1], "branches": 3},
            r"rollout.group_size=4 must be the tree's leaves, 3\^2 = 9",
        ),
        ({"name": "branch_grpo", "splits": [0, 2], "keep_leaves": 5}, "objective.keep_leaves=5 are more than"),
        ({"name": "branch_grpo", "splits": [0, 2], "keep_depths": 0}, "objective.keep_depths: .*got 0"),
        ({"name": "branch_grpo", "splits": [0, 2], "window": 1}, "window, flash and fraction do not apply to a tree"),
        ({"name": "branch_grpo", "splits": [0, 2], "fraction": 0.5}, "window, flash and fraction do not apply to a tree"),
    ],
)  # fmt: skip
def test_settings_that_cannot_run_are_named(settings: dict[str, Any], objective: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse(settings | {"objective": objective})


def test_one_step_has_no_noise(settings: dict[str, Any]) -> None:
    settings["rollout"]["steps"] = 1
    with pytest.raises(UserError, match="rollout.steps=1: the last step has no noise, so flow_grpo needs at least 2"):
        parse(settings | {"objective": {"name": "flow_grpo"}})


# ------------------------------------------------------------------------------------------------------ chains of a group


@pytest.mark.parametrize("objective", [FlowGRPO(), DanceGRPO(fraction=1.0)], ids=["own noise", "shared noise"])
def test_a_chain_of_each_member(objective: PolicyGradient) -> None:
    policy = policy_of(objective.noise, Gauss(0.7, 0.6), falling(4), (1, 3))
    x, walk = rollout(policy, objective, 2, 3)
    assert policy.calls == 6 * 4
    steps, after = (z.unflatten(0, (2, 3, 3)) for z in (walk.x, walk.x_next))  # prompt, depth, member
    torch.testing.assert_close(steps[:, 0].flatten(0, 1), made_noise(2, 3, shared=objective.shared_noise))
    assert torch.equal(steps[0, 0, 0], steps[0, 0, 1]) == objective.shared_noise
    assert not torch.equal(steps[0, 0, 0], steps[1, 0, 0])
    torch.testing.assert_close(after[:, :-1], steps[:, 1:], rtol=0, atol=0)
    assert len({tuple(z.flatten().tolist()) for z in after.flatten(0, 2)}) == 18  # no two steps have the same noise
    end = after[:, -1].flatten(0, 1)
    torch.testing.assert_close(x, end - 0.25 * policy.field(end, torch.full((6,), 0.25, dtype=torch.float64)))


@pytest.mark.parametrize("objective", [FlowGRPO(), DanceGRPO(), BranchGRPO(splits=(0, 2))], ids=lambda o: o.name)
def test_a_walk_does_not_depend_on_who_walks_beside_it(objective: PolicyGradient) -> None:
    def walked(slots: Sequence[int], micro_batch: int, step: int = 5) -> Any:
        policy = policy_of(objective.noise, Gauss(0.7, 0.6), falling(4), (1, 3))
        prompts = [PROMPTS[s] for s in slots]
        return generate(
            policy, prompts, slots, group_size=4, micro_batch=micro_batch, seed=3, step=step, objective=objective
        )

    together, alone, small = walked([0, 1, 2], 64), walked([1], 64), walked([0, 1, 2], 3)
    each = len(together.walk.plan.depth)
    torch.testing.assert_close(together.x0[4:8], alone.x0)
    for name in ("x", "x_next", "log_density"):
        whole = getattr(together.walk, name)
        torch.testing.assert_close(whole[each : 2 * each], getattr(alone.walk, name))
        torch.testing.assert_close(whole, getattr(small.walk, name))
    later = walked([1], 64, step=6)
    assert (later.walk.x_next - alone.walk.x_next).abs().min() > 1e-6


def test_dance_trains_sixty_percent_of_the_steps_and_others_next_time() -> None:
    seen, policy = set(), policy_of("dance", Gauss(0.7, 0.6), falling(11), (1, 3))
    for step in range(20):
        _, walk = rollout(policy, DanceGRPO(), 1, 2, step=step)
        depth = walk.plan.depth.tolist()
        assert policy.calls == 2 * 11
        assert depth == sorted(depth) and len(set(depth)) == 6 and len(depth) == 12  # of 10 noisy steps, both members
        seen.add(tuple(depth))
        assert torch.equal(walk.x.unflatten(0, (6, 2))[1, 0], walk.x_next.unflatten(0, (6, 2))[0, 0]) == (
            depth[2] == depth[0] + 1
        )
    assert len(seen) > 10
    assert {k for depth in seen for k in depth} == set(range(10))


def test_every_step_of_a_member_has_its_advantage() -> None:
    rewards = torch.tensor([[1.0, 3.0], [5.0, 5.0]])
    walk = rollout(policy_of("flow", Gauss(0.7, 0.6), falling(4), (1, 3)), FlowGRPO(), 2, 2)[1]
    valid = torch.ones(2, 2, dtype=torch.bool)
    found = FlowGRPO().advantages(rewards, valid, scale="group", walk=walk)
    assert found.tolist() == [[-1, 1, -1, 1, -1, 1], [0] * 6]
    valid[0, 0] = False
    assert not FlowGRPO().advantages(rewards, valid, scale="group", walk=walk).any()  # one alone has no group


# --------------------------------------------------------------------------------------------------------------- trees

TREE = BranchGRPO(splits=(0, 2))
"""On 4 steps, of which 3 are noisy: 2 edges, 2, then 4.  a ─ c ┬ e
                                                        ● ┤     └ f
                                                          └ b ─ d ┬ g
                                                                  └ h      of depth 0, 1 and 2."""
LEAVES = torch.tensor([[1.0, 3.0, 4.0, 8.0]])
ALL = torch.ones(1, 4, dtype=torch.bool)


def tree_walk(objective: BranchGRPO = TREE, groups: int = 1, step: int = 0) -> tuple[Field, Tensor, Walk]:
    policy = policy_of(objective.noise, Gauss(0.7, 0.6), falling(4), (1, 3))
    return policy, *rollout(policy, objective, groups, 4, step=step)


def test_the_plan_of_a_tree() -> None:
    plan = TREE.plan(falling(4), group_size=4, seed=0, step=0)
    assert plan.nodes == [1, 2, 2, 4]
    assert plan.depth.tolist() == [0, 0, 1, 1, 2, 2, 2, 2]
    left, right = [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]
    assert plan.share.tolist() == [left, right, left, right, *torch.eye(4).tolist()]
    paper = BranchGRPO().plan(falling(20), group_size=16, seed=0, step=0)
    assert paper.nodes == [1, 2, 2, 2, 4, 4, 4, 8, 8, 8, *[16] * 10]
    assert torch.equal(paper.share.sum(1), torch.ones(2 * 3 + 4 * 3 + 8 * 3 + 16 * 10, dtype=torch.float64))
    wide = BranchGRPO(splits=(1,), branches=3).plan(falling(3), group_size=3, seed=0, step=0)
    assert wide.nodes == [1, 1, 3] and wide.depth.tolist() == [0, 1, 1, 1]  # a trunk of one edge
    torch.testing.assert_close(wide.share[0], torch.full((3,), 1 / 3, dtype=torch.float64))


def test_siblings_share_their_start_and_leaves_are_in_group_order() -> None:
    policy, x, walk = tree_walk(groups=3)
    assert policy.calls == 3 * (1 + 2 + 2 + 4)  # against 3·4·4 for chains
    assert x.shape == (12, 1, 3)
    for p, (before, after) in enumerate(
        zip(walk.x.unflatten(0, (3, 8)), walk.x_next.unflatten(0, (3, 8)), strict=True)
    ):
        a, b, c, d, e, f, g, h = range(8)
        for one, other in ((a, b), (e, f), (g, h)):
            assert torch.equal(before[one], before[other])
            assert (after[one] - after[other]).abs().min() > 1e-4
        for parent, child in ((a, c), (b, d), (c, e), (c, f), (d, g), (d, h)):
            assert torch.equal(after[parent], before[child])
        leaves = after[[e, f, g, h]]
        last = leaves - 0.25 * policy.field(leaves, torch.full((4,), 0.25, dtype=torch.float64))
        torch.testing.assert_close(x[4 * p : 4 * p + 4], last)
    roots = walk.x.unflatten(0, (3, 8))[:, 0]
    assert len({tuple(r.flatten().tolist()) for r in roots}) == 3


def test_ancestors_are_the_edges_whose_share_covers_a_leaf() -> None:
    """On a deeper tree, by the walk alone: from each leaf back to the root."""
    objective = BranchGRPO(splits=(0, 1, 3))
    policy = policy_of("dance", Gauss(0.7, 0.6), falling(5), (1, 3))
    x, walk = rollout(policy, objective, 1, 8)
    assert policy.calls == 1 + 2 + 4 + 4 + 8
    for leaf in range(8):
        behind = (walk.plan.share[:, leaf] > 0).nonzero().flatten()
        assert walk.plan.depth[behind].tolist() == [0, 1, 2, 3]
        for parent, child in zip(behind, behind[1:], strict=False):
            assert torch.equal(walk.x_next[parent], walk.x[child])
        end = walk.x_next[behind[-1:]]
        torch.testing.assert_close(x[leaf : leaf + 1], end - 0.2 * policy.field(end, end.new_full((1,), 0.2)))


def test_advantages_of_a_tree_by_hand() -> None:
    """Edges earn 2, 6; 2, 6; 1, 3, 4, 8 (mean 4, variance 26/4), each set compared within itself."""
    walk = tree_walk()[2]
    spread = math.sqrt(6.5)
    expected = [-1, 1, -1, 1, -3 / spread, -1 / spread, 0, 4 / spread]
    found = TREE.advantages(LEAVES, ALL, scale="group", walk=walk)
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64))
    found = TREE.advantages(LEAVES, ALL, scale="none", walk=walk)
    assert found.tolist() == [[-2, 2, -2, 2, -3, -1, 0, 4]]


def test_advantages_of_trees_by_the_spread_of_the_step_by_hand() -> None:
    """A second tree earns 0, 0, 2, 2: edges 0, 2. Spread of 2, 6, 0, 2 is √4.75; of all leaves (mean 2.5) √6."""
    rewards = torch.cat([LEAVES, torch.tensor([[0.0, 0.0, 2.0, 2.0]])])
    walk = tree_walk(groups=2)[2]
    found = TREE.advantages(rewards, ALL.repeat(2, 1), scale="batch", walk=walk)
    early, late = math.sqrt(4.75), math.sqrt((1.5**2 + 0.5**2 + 1.5**2 + 5.5**2 + 2 * 2.5**2 + 2 * 0.5**2) / 8)
    expected = [
        [-2 / early, 2 / early, -2 / early, 2 / early, -3 / late, -1 / late, 0, 4 / late],
        [-1 / early, 1 / early, -1 / early, 1 / early, -1 / late, -1 / late, 1 / late, 1 / late],
    ]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_a_leaf_without_reward_leaves_the_means_of_its_edges() -> None:
    """Without the 3: edges earn 1, 6; leaves 1, 4, 8, mean 13/3."""
    valid = torch.tensor([[True, False, True, True]])
    rewards = torch.tensor([[1.0, math.nan, 4.0, 8.0]])
    found = TREE.advantages(rewards, valid, scale="none", walk=tree_walk()[2])
    expected = [-2.5, 2.5, -2.5, 2.5, 1 - 13 / 3, 0, 4 - 13 / 3, 8 - 13 / 3]
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64))
    valid = torch.tensor([[False, False, True, True]])  # a whole branch
    found = TREE.advantages(rewards, valid, scale="none", walk=tree_walk()[2])
    torch.testing.assert_close(found, torch.tensor([[0, 0, 0, 0, 0, 0, -2, 2]], dtype=torch.float64))


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        # best and worst in different branches: their whole ways, none of the leaves between
        ([1.0, 3.0, 4.0, 8.0], [1, 1, 1, 1, 1, 0, 0, 1]),
        # both in the left branch: its edges alone
        ([9.0, 1.0, 4.0, 6.0], [1, 0, 1, 0, 1, 1, 0, 0]),
    ],
)
def test_width_pruning_keeps_the_ways_to_the_extreme_leaves(rewards: list[float], kept: list[int]) -> None:
    objective = BranchGRPO(splits=(0, 2), keep_leaves=2)
    walk = tree_walk(objective)[2]
    all_of_them = TREE.advantages(torch.tensor([rewards]), ALL, scale="group", walk=walk)
    found = objective.advantages(torch.tensor([rewards]), ALL, scale="group", walk=walk)
    torch.testing.assert_close(found, all_of_them * torch.tensor([kept]))
    whole = BranchGRPO(splits=(0, 2), keep_leaves=4).advantages(torch.tensor([rewards]), ALL, scale="group", walk=walk)
    assert torch.equal(whole, all_of_them)


def test_depth_pruning_keeps_other_depths_each_step_and_the_same_walk() -> None:
    seen = set()
    for step in range(20):
        objective = BranchGRPO(splits=(0, 2), keep_depths=2)
        _, x, walk = tree_walk(objective, step=step)
        _, whole, full = tree_walk(step=step)
        assert torch.equal(x, whole)
        depths = tuple(walk.plan.depth.unique().tolist())
        seen.add(depths)
        here = torch.isin(full.plan.depth, torch.tensor(depths))
        assert torch.equal(walk.plan.depth, full.plan.depth[here])
        for name in ("x", "x_next", "log_density"):
            assert torch.equal(getattr(walk, name), getattr(full, name)[here])
        rewards = torch.randn(1, 4, generator=generator(step))
        found = objective.advantages(rewards, ALL, scale="group", walk=walk)
        assert torch.equal(found, TREE.advantages(rewards, ALL, scale="group", walk=full)[:, here])
        assert found.all()
    assert seen == {(0, 1), (0, 2), (1, 2)}
