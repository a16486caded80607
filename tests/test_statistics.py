"""Intervals against closed forms and normal theory."""

import numpy as np
import pytest

from vgrpo.statistics import Interval, bootstrap, by_tag, interval, paired_bootstrap, wilson


def test_paired_bootstrap_agrees_with_normal_theory():
    rng = np.random.default_rng(3)
    base = rng.normal(0, 5, 400)  # a spread that only pairing removes
    tuned = base + rng.normal(0.5, 1, 400)
    mean, low, high = paired_bootstrap(base, tuned)
    difference = tuned - base
    half = 1.959964 * difference.std() / 20  # z · population std / sqrt(400)
    assert mean == pytest.approx(difference.mean(), abs=1e-12)
    assert low == pytest.approx(mean - half, abs=0.1 * half)
    assert high == pytest.approx(mean + half, abs=0.1 * half)


def test_level_narrows_by_the_ratio_of_normal_quantiles():
    scores = np.random.default_rng(0).normal(size=500)
    wide, narrow = bootstrap(scores, level=0.95), bootstrap(scores, level=0.5)
    ratio = (wide.high - wide.low) / (narrow.high - narrow.low)
    assert ratio == pytest.approx(1.959964 / 0.674490, rel=0.05)


def test_images_of_a_prompt_are_resampled_together():
    """Ten copies of a prompt's score carry no information: the bounds are those of one copy, not sqrt(10) tighter."""
    one = np.random.default_rng(1).normal(size=60)
    copies = np.repeat(one[:, None], 10, axis=1)
    assert paired_bootstrap(np.zeros((60, 10)), copies) == pytest.approx(paired_bootstrap(np.zeros(60), one), abs=1e-12)


def test_prompts_of_one_text_are_resampled_together():
    """A file that repeats each of 60 texts four times knows no more than one with each once."""
    one = np.random.default_rng(1).normal(size=60)
    once = bootstrap(one)
    repeated = bootstrap(np.tile(one, 4), units=[f"text {i}" for i in range(60)] * 4)
    assert repeated == pytest.approx(once, abs=1e-12)
    blind = bootstrap(np.tile(one, 4))
    assert (blind.high - blind.low) / (once.high - once.low) == pytest.approx(0.5, rel=0.05)
    # texts that come unequally often weigh as often as they come: (3·1 + 1·0)/4
    assert bootstrap([1.0, 1.0, 1.0, 0.0], units="aaab").mean == 0.75
    assert np.isnan(bootstrap([1.0, 0.0], units="aa").low)


def test_coverage_of_the_95_percent_interval():
    rng = np.random.default_rng(5)
    hits = 0
    for trial in range(300):
        _, low, high = bootstrap(rng.normal(1.0, 1.0, 80), resamples=500, seed=trial)
        hits += low <= 1.0 <= high
    assert 0.91 <= hits / 300 <= 0.98


def test_same_seed_same_interval_and_other_seed_another():
    scores = np.random.default_rng(2).normal(size=30)
    assert bootstrap(scores, seed=1) == bootstrap(scores, seed=1)
    assert bootstrap(scores, seed=1) != bootstrap(scores, seed=2)


def test_many_prompts_in_chunks_give_all_resamples(monkeypatch):
    scores = np.random.default_rng(2).normal(size=50)
    whole = bootstrap(scores, resamples=1000)
    monkeypatch.setattr("vgrpo.statistics.CHUNK", 50 * 7)
    assert bootstrap(scores, resamples=1000) == whole  # the generator's stream does not depend on the chunk


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),  # z² / (n + z²) = 3.8415 / 13.8415
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (15, 148, 0.0624, 0.1605),
    ],
)
def test_wilson_published_values(successes, n, low, high):
    got = wilson(successes, n)
    assert got.mean == successes / n
    assert (got.low, got.high) == pytest.approx((low, high), abs=6e-5)


def test_by_tag_uses_wilson_for_shares_and_bootstrap_else():
    tags = ["a", "b", "a", "b", None, "a"]
    shares = by_tag([1, 0, 0, 0, 1, 1], tags)
    assert list(shares) == ["a", "b"]
    assert shares["a"] == (*wilson(2, 3), 3)
    assert shares["b"] == (*wilson(0, 2), 2)
    graded = by_tag([0.5, 0.0, 0.25, 0.5, 1.0, 0.75], tags)
    assert graded["a"] == (*bootstrap([0.5, 0.25, 0.75]), 3)


def test_several_images_per_prompt_are_not_independent_trials():
    same = np.repeat([[1.0], [0.0]], 8, axis=1)
    assert interval(same) == bootstrap([1.0, 0.0])
    assert interval(same) != wilson(8, 16)


def test_one_prompt_has_no_bounds():
    mean, low, high = paired_bootstrap([0.25], [0.75])
    assert mean == 0.5
    assert np.isnan(low) and np.isnan(high)


@pytest.mark.parametrize(
    "call",
    [
        lambda: paired_bootstrap([1, 2], [1, 2, 3]),
        lambda: paired_bootstrap([], []),
        lambda: bootstrap([1.0, 2.0], units="a"),
        lambda: bootstrap([1.0, float("nan")]),
        lambda: wilson(3, 2),
        lambda: wilson(0, 0),
        lambda: by_tag([1, 2], ["a"]),
    ],
)
def test_impossible_input_is_refused(call):
    with pytest.raises(ValueError):
        call()


def test_interval_is_a_plain_tuple():
    assert Interval(1.0, 0.0, 2.0) == (1.0, 0.0, 2.0)
