"""Where draws fall on a schedule, and with which frequencies."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vgrpo.seeds import generator
from vgrpo.times import TIMES, logit_normal, stratified, uniform


@settings(derandomize=True, deadline=None, database=None)
@given(length=st.integers(1, 60), share=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_each_chunk_is_drawn_from_once(length: int, share: float, seed: int) -> None:
    draws = 1 + round(share * (length - 1))
    taken = stratified(torch.linspace(1, 0.1, length), draws, generator=torch.Generator().manual_seed(seed))
    assert taken.dtype == torch.int64
    assert taken.shape == (draws,)
    for j, index in enumerate(taken.tolist()):
        assert math.floor(j * length / draws) <= index < math.floor((j + 1) * length / draws)


def test_strata_cover_the_schedule_evenly() -> None:
    schedule = torch.linspace(1, 0.1, 12)
    for draws in (1, 3, 4, 12):
        taken = torch.stack([stratified(schedule, draws, generator=generator("s", k)) for k in range(1200)])
        counts = taken.flatten().bincount(minlength=12).double() / (1200 * draws)
        torch.testing.assert_close(counts, torch.full((12,), 1 / 12).double(), rtol=0, atol=0.03)
    # K not a multiple of M: chunks of 3, 3 and 4
    taken = torch.stack([stratified(schedule[:10], 3, generator=generator("s", k)) for k in range(300)])
    assert [sorted(set(taken[:, j].tolist())) for j in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]


def test_strata_narrow_the_mean_time() -> None:
    """The reason for them: the mean of M times varies M² times less, not M times, as with independent draws."""
    schedule = torch.linspace(1, 0.01, 100, dtype=torch.float64)
    spread = {}
    for name in ("stratified", "uniform"):
        means = [schedule[TIMES[name](schedule, 4, generator=generator(name, k))].mean() for k in range(2000)]
        spread[name] = torch.stack(means).std().item()
    assert spread["uniform"] / spread["stratified"] == pytest.approx(4, rel=0.1)  # √(1/48) against √(1/48)/4


@pytest.mark.parametrize("draws", [0, -1, 11])
def test_impossible_strata_are_refused(draws: int) -> None:
    with pytest.raises(ValueError, match=rf"1 <= draws <= 10, the length of the schedule, got {draws}"):
        stratified(torch.linspace(1, 0.1, 10), draws, generator=generator("s"))


@pytest.mark.parametrize("law", [uniform, logit_normal])
def test_no_draw_at_all_is_refused(law: Any) -> None:
    with pytest.raises(ValueError, match="at least one draw, got 0"):
        law(torch.linspace(1, 0.1, 10), 0, generator=generator("s"))


def test_uniform_has_its_law() -> None:
    taken = uniform(torch.linspace(1, 0.01, 50), 20_000, generator=generator("u"))
    counts = taken.bincount(minlength=50)
    assert ((counts - 400) ** 2 / 400).sum().item() < 86  # χ² with 49 degrees of freedom, 99.9th percentile 85.4
    assert uniform(torch.ones(2), 5, generator=generator("u")).shape == (5,)  # with replacement


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (-0.5, 0.6)])
def test_logit_normal_has_its_law(mean: float, std: float) -> None:
    schedule = torch.linspace(1, 0.001, 1000)
    t = schedule[logit_normal(schedule, 20_000, generator=generator("n"), mean=mean, std=std)].double()
    logits = torch.logit(t.clamp(5e-4, 1 - 5e-4))
    assert logits.mean().item() == pytest.approx(mean, abs=0.03)
    assert logits.std().item() == pytest.approx(std, rel=0.03)


def test_logit_normal_takes_the_nearest_time() -> None:
    schedule = torch.tensor([1.0, 0.52, 0.5, 0.4, 0.0])
    taken = logit_normal(schedule, 50, generator=generator("n"), std=1e-6)  # t = 0.5 but for 1e-6
    assert taken.tolist() == [2] * 50
    taken = logit_normal(schedule, 50, generator=generator("n"), mean=math.log(0.44 / 0.56), std=1e-6)
    assert taken.tolist() == [3] * 50


@pytest.mark.parametrize("name", TIMES)
def test_draws_depend_on_their_generator_alone(name: str) -> None:
    schedule = torch.linspace(1, 0.01, 100)
    a, b, c = (TIMES[name](schedule, 4, generator=generator("x", k)) for k in (1, 1, 2))
    assert a.dtype == torch.int64
    assert torch.equal(a, b)
    assert a.tolist() != c.tolist()
