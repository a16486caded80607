"""How sure a mean over prompts is. The prompt is the unit: its images are not independent of each other."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
CHUNK = 4_000_000  # indices drawn at once, 32 MB


class Interval(NamedTuple):
    """A mean and its confidence bounds, in the unit of the scores. Bounds are nan when one prompt is all there is."""

    mean: float
    low: float
    high: float


class TagScore(NamedTuple):
    """An `Interval` and the number of prompts behind it. Example: `TagScore(0.5, 0.09, 0.91, 2)`"""

    mean: float
    low: float
    high: float
    n: int


def paired_bootstrap(
    base: ArrayLike,
    tuned: ArrayLike,
    *,
    units: Sequence[Hashable] | None = None,
    resamples: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Mean of `tuned - base` over the same prompts and seeds, with percentile bounds from resampling whole prompts.

    `base` and `tuned` have one shape, [K] or [K, images], first axis = prompt; `units` as for `bootstrap`.

    Raises:
        ValueError: shapes differ, no prompt, or a score that is not finite.
    """
    a, b = np.asarray(base, dtype=np.float64), np.asarray(tuned, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"base and tuned need the same prompts and images, got shapes {a.shape} and {b.shape}")
    return bootstrap(b - a, units=units, resamples=resamples, level=level, seed=seed)


def bootstrap(
    scores: ArrayLike,
    *,
    units: Sequence[Hashable] | None = None,
    resamples: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Mean of `scores` [K] or [K, images] with percentile bounds from resampling whole prompts.

    `units`, K of them, says which prompts are resampled together, such as those of one text in a file that repeats it:
    they are not independent of each other. Each is one of its own when absent.

    Raises:
        ValueError: no prompt, a score that is not finite, or another number of units.
    """
    per_prompt = prompt_means(scores)
    totals, sizes = unit_totals(per_prompt, units)
    if len(totals) == 1:
        return Interval(float(per_prompt.mean()), float("nan"), float("nan"))
    rng = np.random.default_rng(seed)
    rows = max(1, CHUNK // len(totals))
    counts = [min(rows, resamples - start) for start in range(0, resamples, rows)]
    drawn = (rng.integers(len(totals), size=(n, len(totals))) for n in counts)
    means = np.concatenate([totals[d].sum(1) / sizes[d].sum(1) for d in drawn])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(per_prompt.mean()), float(low), float(high))


def unit_totals(values: Floats, units: Sequence[Hashable] | None) -> tuple[Floats, Floats]:
    """Sum and number of the values of each unit, in the order of first appearance."""
    if units is None:
        return values, np.ones_like(values)
    if len(units) != len(values):
        raise ValueError(f"need one unit per prompt, got {len(units)} for {len(values)} prompts")
    places: dict[Hashable, int] = {}
    index = np.array([places.setdefault(unit, len(places)) for unit in units])
    return np.bincount(index, weights=values).astype(np.float64), np.bincount(index).astype(np.float64)


def prompt_means(scores: ArrayLike) -> Floats:
    """`scores` [K, ...] averaged over all but the first axis, [K]."""
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim == 0 or values.size == 0:
        raise ValueError(f"need scores of at least one prompt, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"{int((~np.isfinite(values)).sum())} of {values.size} scores are not finite")
    means: Floats = values.reshape(len(values), -1).mean(1)
    return means


def wilson(successes: float, n: int, level: float = 0.95) -> Interval:
    """Wilson's score interval of a share, `successes` of `n` independent trials (Wilson, JASA 1927)."""
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"need 0 <= successes <= n and n >= 1, got {successes} of {n}")
    z = NormalDist().inv_cdf((1 + level) / 2)
    p = successes / n
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * float(np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)))
    return Interval(p, max(0.0, centre - half), min(1.0, centre + half))


def interval(scores: ArrayLike, *, level: float = 0.95, seed: int = 0) -> Interval:
    """Mean of `scores` [K] or [K, images]: Wilson's bounds for zeros and ones, one per prompt, else bootstrap."""
    values = np.asarray(scores, dtype=np.float64)
    if values.size and values.size == len(values) and np.isin(values, (0, 1)).all():
        return wilson(float(values.sum()), values.size, level)
    return bootstrap(values, level=level, seed=seed)


def by_tag(scores: ArrayLike, tags: Sequence[str | None], *, level: float = 0.95, seed: int = 0) -> dict[str, TagScore]:
    """`interval` of the prompts of each tag, in the order of first appearance; `scores` [K] or [K, images], `tags` K.

    Prompts whose tag is None are left out.
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.shape[:1] != (len(tags),):
        raise ValueError(f"need one tag per prompt, got {len(tags)} tags for scores of shape {values.shape}")
    members = {tag: [i for i, other in enumerate(tags) if other == tag] for tag in tags if tag is not None}
    return {tag: TagScore(*interval(values[rows], level=level, seed=seed), len(rows)) for tag, rows in members.items()}
