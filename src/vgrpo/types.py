"""The records that travel through a training step, and the three things that a user may write: policy, reward, objective.

P prompts, G members per group (the images of one prompt), N = P·G rows in group-major order (row = prompt · G + member),
M draws, `*latent` whatever shape the model's latents have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One line of a prompt file.

    Example: `Prompt(text="two red circles", id="7", meta={"tag": "counting", "include": [...]})`
    """

    text: str
    id: str
    """Unique in its file; names the prompt in seeds, logs and errors. Two equal texts are two prompts."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """What a reward needs to know, such as GenEval's `include` and `exclude`."""


Scale = Literal["group", "batch", "none"]
"""What advantages are divided by: the spread of the group, of the step, or nothing."""
Cond = Mapping[str, Tensor]
"""What the network is told beside latents and time: name to tensor, first axis = prompts or rows. Example for SD 3:
`{"encoder_hidden_states": [P, 13, 128], "pooled_projections": [P, 128]}`."""


def repeat(cond: Cond, rows: Sequence[int] | Tensor) -> Cond:
    """The conditioning of `rows`, indices into its first axis."""
    index = torch.as_tensor(rows)
    return {k: v[index.to(v.device)] for k, v in cond.items()}


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """The finished samples of one step. Example: 32 prompts, 16 members, N = 512."""

    prompts: Sequence[Prompt]
    """P prompts; the slot of a prompt, not its text, is the identity of its group."""
    slots: Sequence[int]
    """P positions in the step's list of prompts over all processes; what this process holds when there are several."""
    x0: Tensor
    """[N, *latent] float32, in the latent units in which the network was trained."""
    images: Tensor
    """uint8 [N, 3, H, W]."""
    cond: Cond
    """[P, ...]: one row per prompt; `rows(cond, groups)` repeats it where a network call needs it."""
    seeds: Sequence[int]
    """N seeds of the initial noise: `torch.Generator().manual_seed(seed)` makes that picture again."""
    group_size: int
    step: int
    walk: Walk | None = None
    """The stochastic steps on the way, for objectives that train on them."""


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """Scores of one step; every field is [P, G]."""

    parts: Mapping[str, Tensor]
    """Each reward by name, float64, raw. Example: `{"graded": [32, 16], "colourfulness": [32, 16]}`."""
    total: Tensor
    valid: Tensor
    """bool; False where a reward could not be had. Such a sample leaves its group's mean and gets advantage 0."""


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Pairs of time and noise at which likelihoods are estimated: M per set, and each row belongs to one of S sets.

    S is P when a group shares its pairs, 1 when the batch does, N when nobody does. The noise is not kept: it is made
    again from its identity whenever it is needed (`vgrpo.seeds.noise`).
    """

    t: Tensor
    """[M, S] in [0, 1], 0 = data."""
    set_of_row: Tensor
    """[N] int64: which set each row uses."""
    identities: Sequence[tuple]
    """S identities, from which the noise of each set is seeded."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which steps of a rollout are stochastic and trained on: I items per prompt, the same for every prompt of a step.

    On a chain an item is one step of one member; on a tree it is an edge, which several members share.
    """

    times: Tensor
    """[K+1] of the whole walk, falling to 0."""
    depth: Tensor
    """[I] int64 in [0, K): the step that the item is."""
    share: Tensor
    """[I, G] float64, rows sum to 1: how the rewards of the members that go through an item are averaged for it."""
    nodes: Sequence[int]
    """K numbers: how many states of a prompt there are before each step."""


@dataclass(frozen=True, kw_only=True)
class Walk:
    """The trained steps of stochastic rollouts; item i of the p-th prompt is row p·I + i."""

    plan: Plan
    x: Tensor
    """[P·I, *latent] state before the step, float32."""
    x_next: Tensor
    """[P·I, *latent] state after it."""
    log_density: Tensor
    """[P·I] of the step under the policy that made it, a mean over latent dimensions."""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """B rows of a step as one update sees them, for objectives that score finished samples at M pairs (t, ε)."""

    x0: Tensor
    """[B, *latent] finished samples."""
    cond: Cond
    """[B, ...]."""
    t: Tensor
    """[M, B] in [0, 1]."""
    eps: Tensor
    """[M, B, *latent]."""
    advantages: Tensor
    """[B]."""
    anchors: Mapping[str, Scores] = field(default_factory=dict)
    """What `Objective.score` gave under other weights, by whose they were; see `Objective.anchors`."""

    def first_draw(self) -> Pairs:
        """The same rows with the first of their pairs alone."""
        return replace(self, t=self.t[:1], eps=self.eps[:1])


@dataclass(frozen=True, kw_only=True)
class Transitions:
    """B stochastic steps as one update sees them, for objectives that optimise the sampling path."""

    x: Tensor
    """[B, *latent]."""
    x_next: Tensor
    """[B, *latent]."""
    cond: Cond
    """[B, ...]."""
    t: Tensor
    """[B] time before the step."""
    t_next: Tensor
    """[B] time after it."""
    log_density_old: Tensor
    """[B]."""
    advantages: Tensor
    """[B]."""
    anchors: Mapping[str, Scores] = field(default_factory=dict)


Scores = Mapping[str, Tensor]
"""What an objective keeps of a network's answers, by name, each [M, B, ...]. Example: `{"error": [4, 64]}`."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """All that the updates of a step learn from, item by item: rows for pairs, steps of rows for walks."""

    rollouts: Rollouts
    draws: Draws | None
    advantages: Tensor
    """[P, I] of all processes, float64 on the CPU; I = G for pairs."""
    anchors: Mapping[str, Scores] = field(default_factory=dict)
    """Scores of this process's items under other weights, each [M, P_here·I, ...]."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What an update did with B items; every tensor is detached, its last axis B."""

    log_ratio: Tensor | None
    """[B] or [M, B]; None for an objective without a ratio."""
    clipped: Tensor
    """[B] in [0, 1]: whether the clip held the item's gradient at 0."""
    means: Mapping[str, Tensor] = field(default_factory=dict)
    """Further quantities [B] to be logged by name as means over items. Example: `{"kl": ..., "error": ...}`."""


class Reward(Protocol):
    """Any callable that scores pictures, one number each, a higher one being better.

    Example: `lambda images, prompts: images.float().mean((1, 2, 3)) / 255`
    """

    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [N] of `images` uint8 [N, 3, H, W]; `prompts` has N entries, row by row."""
        ...


class Path(Protocol):
    """How data and noise are mixed at time `t` [N] in [0, 1], and what the network predicts of it."""

    def noisy(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor: ...

    def target(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor: ...

    def split(self, x_t: Tensor, t: Tensor, prediction: Tensor) -> tuple[Tensor, Tensor]:
        """(x0, eps) that the network's `prediction` stands for."""
        ...


class Policy(Protocol):
    """A generator that can be sampled from and trained. Everything that knows the model's family is behind it."""

    path: Path
    """How data and noise are mixed: `vgrpo.paths.LinearPath` or `VPPath`."""

    def encode(self, prompts: Sequence[Prompt]) -> Cond:
        """[P, ...] conditioning, kept for prompts seen before."""
        ...

    def noise(self, seeds: Iterable[int]) -> Tensor:
        """Initial noise [N, *latent], each row from its own seed."""
        ...

    def schedule(self, steps: int | None = None) -> Tensor:
        """Times [K] in (0, 1] at which a rollout of `steps` calls the network, falling."""
        ...

    def sample(self, noise: Tensor, cond: Cond) -> Tensor:
        """Finished latents [N, *latent] from `noise` [N, *latent] by the rollout's ODE sampler, without gradient."""
        ...

    def finish(self, x: Tensor, cond: Cond, t: float, steps: int) -> Tensor:
        """Finished latents [N, *latent] from states `x` at time `t`, by a second-order ODE solver in `steps` steps."""
        ...

    def decode(self, x0: Tensor) -> Tensor:
        """Pictures uint8 [N, 3, H, W] of latents [N, *latent]."""
        ...

    def predict(self, x_t: Tensor, t: Tensor, cond: Cond) -> Tensor:
        """What the network outputs at `t` [N] in [0, 1], 0 = data, [N, *latent], in the units of `path.target`."""
        ...

    def guided(self, x_t: Tensor, t: Tensor, cond: Cond) -> Tensor:
        """`predict` with the rollout's classifier-free guidance; the same call where there is none."""
        ...


class Objective(Protocol):
    """What is optimised, as settings and the few things that the loop asks of it. One file per family.

    The loop's order is: `sample` for each micro-batch of a rollout, `advantages` of its rewards, `draw`, `score` under the
    weights that `anchors` names, and then `batch` and `backward` for each micro-batch of each update.
    """

    name: str
    shared_noise: bool
    """Whether the members of a group start from the same noise, as stochastic samplers may."""
    whole_groups: bool
    """Whether `sample` must see the members of a group together."""
    learns_from_all: bool
    """Whether an item whose advantage is 0 has a gradient all the same, as with a KL."""
    needs_path: str | None
    """"linear" or "vp" where it is for models of one path alone."""

    def problems(self, *, steps: int, updates: int, group_size: int) -> list[str]:
        """Why it cannot run with `steps` of the sampler and `updates` per rollout, in words for the user."""
        ...

    def inactive(self, *, updates: int) -> list[str]:
        """Its settings that are on but cannot act, in words."""
        ...

    def anchors(self, *, updates: int) -> Sequence[str]:
        """Under which weights `score` is called after the rollout: of "old" (θ_old), "start" (the policy before
        training) and "average" (the moving average), those that a loss needs."""
        ...

    def old_decay(self, step: int) -> float | None:
        """η of θ_old ← η·θ_old + (1−η)·θ after step `step`, counted from 0; None where θ_old is θ itself."""
        ...

    def sample(
        self,
        policy: Policy,
        schedule: Tensor,
        noise: Tensor,
        cond: Cond,
        rows: Sequence[tuple],
        *,
        group_size: int,
        step: int,
    ) -> tuple[Tensor, Walk | None]:
        """Finished latents [N, *latent] and what it needs of the way; `rows` are N identities to seed noise with."""
        ...

    def draw(self, schedule: Tensor, slots: Sequence[int], group_size: int, *, seed: int, step: int) -> Draws | None:
        """The pairs of one step on `schedule` [K], the sampler's times; None where none are needed."""
        ...

    def advantages(self, rewards: Tensor, valid: Tensor, *, scale: Scale, walk: Walk | None) -> Tensor:
        """[P, I] float64 of rewards [P, G]: one per item."""
        ...

    def batch(self, prepared: Prepared, items: Tensor) -> Any:
        """The given items of this process."""
        ...

    def score(self, policy: Policy, batch: Any, *, joint: bool) -> Scores:
        """What a loss has to know of the policy's present weights, without gradient."""
        ...

    def backward(self, policy: Policy, batch: Any, *, first: bool, joint: bool, weight: float) -> Stats:
        """Adds the gradient of `weight` times the sum of the items' losses to the policy's weights.

        `first` says that θ is still the θ_old of the rollout; `joint` that the graph of all draws may be held at once.
        """
        ...
