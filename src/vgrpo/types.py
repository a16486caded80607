"""The records that travel through a training step, and the three things that a user may write: policy, reward, objective.

P prompts, G members per group (the images of one prompt), N = P·G rows in group-major order (row = prompt · G + member),
M draws, `*latent` whatever shape the model's latents have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

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


Cond = Mapping[str, Tensor]
"""What the network is told beside latents and time: name to tensor, first axis = prompts or rows. Example for SD 3:
`{"encoder_hidden_states": [P, 13, 128], "pooled_projections": [P, 128]}`."""


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
class Batch:
    """B rows of a step as one update sees them, with what is known of them under θ_old (None: not scored)."""

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
    error_old: Tensor | None = None
    """[≤M, B] stored errors of θ_old on the first draws."""
    x0_old: Tensor | None = None
    """[M, B, *latent] stored x-predictions of θ_old, which only a KL needs."""

    def first_draw(self) -> Batch:
        """The same rows with the first of their pairs alone."""
        return replace(self, t=self.t[:1], eps=self.eps[:1])


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What an update did with B rows; every field is [B] and detached."""

    log_ratio: Tensor
    clipped: Tensor
    kl: Tensor
    error: Tensor


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

    def sample(self, noise: Tensor, cond: Cond) -> Tensor:
        """Finished latents [N, *latent] from `noise` [N, *latent] by the rollout's ODE sampler, without gradient."""
        ...

    def decode(self, x0: Tensor) -> Tensor:
        """Pictures uint8 [N, 3, H, W] of latents [N, *latent]."""
        ...

    def predict(self, x_t: Tensor, t: Tensor, cond: Cond) -> Tensor:
        """What the network outputs at `t` [N] in [0, 1], 0 = data, [N, *latent], in the units of `path.target`."""
        ...


class Objective(Protocol):
    """What is optimised. One file per family in `vgrpo.objectives`."""

    def draw(self, schedule: Tensor, slots: Sequence[int], group_size: int, *, seed: int, step: int) -> Draws:
        """The pairs of one step on `schedule` [K], the sampler's times."""
        ...

    def score(self, policy: Policy, batch: Batch, *, joint: bool) -> tuple[Tensor, Tensor]:
        """Errors [M, B] and x-predictions [M, B, *latent] under the policy's present weights."""
        ...

    def backward(self, policy: Policy, batch: Batch, *, first: bool, joint: bool, weight: float) -> Stats:
        """Adds the gradient of `weight` times the sum of the rows' losses to the policy's weights."""
        ...
