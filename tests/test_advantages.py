"""Group statistics by hand, and the traps of equal and missing rewards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vgrpo.advantages import combine_rewards, group_advantages, hard_clip, soft_clip, zero_spread


def test_by_hand() -> None:
    rewards = torch.tensor([[1.0, 3.0], [5.0, 5.0]])
    torch.testing.assert_close(group_advantages(rewards), torch.tensor([[-1.0, 1.0], [0.0, 0.0]]).double())
    torch.testing.assert_close(group_advantages(rewards, scale="none"), torch.tensor([[-1.0, 1], [0, 0]]).double())
    spread = torch.tensor([1.0, 3, 5, 5]).double().std(correction=0)
    torch.testing.assert_close(group_advantages(rewards, scale="batch")[0, 1], 1 / spread)


def test_a_sample_without_a_reward_leaves_its_group() -> None:
    rewards = torch.tensor([[1.0, 2.0, float("nan"), 3.0]])
    valid = torch.tensor([[True, True, False, True]])
    expected = torch.tensor([[-1.0, 0.0, 0.0, 1.0]]).double() * (3 / 2) ** 0.5  # mean 2, population variance 2/3
    torch.testing.assert_close(group_advantages(rewards, valid=valid), expected)
    with pytest.raises(ValueError, match="1 rewards are not finite"):
        group_advantages(rewards)


def test_missing_samples_leave_the_spread_of_the_batch_too() -> None:
    rewards = torch.tensor([[1.0, 3.0, 1e6], [5.0, 5.0, float("inf")], [9.0, 9.0, 9.0]])
    valid = torch.tensor([[True, True, False], [True, True, False], [False, False, False]])
    spread = (1 + 9 + 25 + 25 - 4 * 3.5**2) ** 0.5 / 2  # of 1, 3, 5, 5 around 3.5
    expected = torch.tensor([[-1 / spread, 1 / spread, 0], [0, 0, 0], [0, 0, 0]]).double()
    torch.testing.assert_close(group_advantages(rewards, scale="batch", valid=valid), expected)
    nothing = torch.zeros(3, 3, dtype=torch.bool)
    assert (group_advantages(rewards, scale="batch", valid=nothing) == 0).all()
    assert zero_spread(rewards, valid).tolist() == [False, True, True]
    assert zero_spread(torch.tensor([[1.0, 2.0]]), torch.tensor([[True, False]])).item()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_float32_rounding_is_no_difference(scale: str) -> None:
    """In float32 the mean of 24 equal rewards is not the reward, and dividing by that spread gives |A| up to 0.91."""
    for value in (0.1, 0.35, 1 / 3, 0.2051, 3.37):
        equal = torch.full((1, 24), value)
        assert (group_advantages(equal, scale=scale) == 0).all()
    offset = torch.tensor([[1e6 + 0.0, 1e6 + 0.5, 1e6 + 1.0]])
    expected = torch.tensor([[-1.0, 0, 1]]).double() * (1 if scale == "none" else 1.5**0.5)
    expected = expected / 2 if scale == "none" else expected
    torch.testing.assert_close(group_advantages(offset, scale=scale), expected, rtol=0, atol=1e-9)


@settings(derandomize=True, deadline=None, database=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12))
def test_a_group_is_standardised_or_nothing(rewards: list[float]) -> None:
    """However small the differences are, down to the smallest that float64 has in its full precision."""
    values = torch.tensor([rewards], dtype=torch.float64)
    advantages = group_advantages(values)[0]
    if len(set(rewards)) == 1:
        assert (advantages == 0).all()
    elif max(rewards) - min(rewards) > 1e-300:
        assert advantages.mean().item() == pytest.approx(0, abs=1e-9)
        assert advantages.pow(2).mean().item() == pytest.approx(1, abs=1e-9)
        assert (advantages[values[0].argsort()].diff() >= 0).all()


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match='"group", "batch" or "none", got \'std\''):
        group_advantages(torch.ones(2, 2), scale="std")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\[prompts, group\], got shape \(4,\)"):
        group_advantages(torch.ones(4))
    with pytest.raises(ValueError, match=r"shape of the rewards, \(2, 2\), got \(2,\)"):
        group_advantages(torch.ones(2, 2), valid=torch.ones(2, dtype=torch.bool))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_nothing(scale: str) -> None:
    rewards = torch.tensor([[0.1] * 7, [0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.31]])
    advantages = group_advantages(rewards, scale=scale)
    assert (advantages[0] == 0).all()
    assert (advantages[1] != 0).all()
    assert zero_spread(rewards).tolist() == [True, False]


def test_level_of_a_group_does_not_matter_but_its_order_does() -> None:
    a = group_advantages(torch.tensor([[0.0, 0, 1, 1], [10, 10, 11, 11]]))
    assert torch.equal(a[0], a[1])
    b = group_advantages(torch.tensor([[0.0, 1, 0, 1]]))
    assert torch.equal(a[0][[0, 2, 1, 3]], b[0])


def test_affine_changes_of_a_reward_do_not_matter() -> None:
    rewards = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for scale in ("group", "batch"):
        torch.testing.assert_close(
            group_advantages(rewards, scale=scale), group_advantages(5 * rewards + 3, scale=scale)
        )
    torch.testing.assert_close(group_advantages(rewards).pow(2).mean(1), torch.ones(3).double())


def test_rewards_of_other_units_are_mirrored_by_their_weights() -> None:
    a = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    b = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    one = combine_rewards({"a": a, "b": 1000 * b}, {"a": 3, "b": 1}, how="normalised")
    other = combine_rewards({"a": 1000 * a, "b": b}, {"a": 3, "b": 1}, how="normalised")
    torch.testing.assert_close(one, other)
    constant = combine_rewards({"a": a, "b": torch.ones(2, 6)}, {"a": 1, "b": 1}, how="normalised")
    torch.testing.assert_close(constant, group_advantages(a) / 2)


def test_combined_by_hand() -> None:
    parts = {"a": torch.tensor([[0.0, 2.0]]), "b": torch.tensor([[30.0, 10.0]])}
    total = combine_rewards(parts, {"a": 3.0, "b": 1.0}, how="sum")
    assert total.tolist() == [[30.0, 16.0]]
    assert total.dtype == torch.float64
    assert combine_rewards(parts, {"a": 3.0, "b": 1.0}, how="normalised").tolist() == [[-0.5, 0.5]]  # (∓3 ± 1)/4


def test_a_missing_reward_is_left_out_of_a_combination() -> None:
    parts = {"a": torch.tensor([[1.0, 2, float("nan"), 3]])}
    valid = torch.tensor([[True, True, False, True]])
    assert combine_rewards(parts, {"a": 2.0}, how="sum", valid=valid).tolist() == [[2, 4, 0, 6]]
    normalised = combine_rewards(parts, {"a": 2.0}, how="normalised", valid=valid)
    torch.testing.assert_close(normalised, torch.tensor([[-1.0, 0, 0, 1]]).double() * 1.5**0.5)
    for how in ("sum", "normalised"):
        with pytest.raises(ValueError, match="1 rewards are not finite"):
            combine_rewards(parts, {"a": 2.0}, how=how)


@pytest.mark.parametrize(
    ("weights", "how", "complaint"),
    [
        ({"a": 1.0}, "sum", "no weights for b$"),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, "sum", "no rewards for c$"),
        ({"a": 1.0, "c": 1.0}, "normalised", "no weights for b; no rewards for c$"),
        ({"a": 0.0, "b": 0.0}, "normalised", "at least one weight must differ from 0"),
        ({"a": 1.0, "b": 1.0}, "mean", '"sum" or "normalised", got \'mean\''),
    ],
)
def test_combinations_that_are_refused(weights: dict[str, float], how: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        combine_rewards({"a": torch.ones(1, 2), "b": torch.ones(1, 2)}, weights, how=how)  # type: ignore[arg-type]


def test_rewards_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="rewards must have one shape"):
        combine_rewards({"a": torch.ones(1, 2), "b": torch.ones(2, 2)}, {"a": 1.0, "b": 1.0})
    with pytest.raises(ValueError, match="there are none"):
        combine_rewards({}, {})


def test_a_negative_weight_turns_a_reward_round() -> None:
    a = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    for how in ("sum", "normalised"):
        torch.testing.assert_close(
            combine_rewards({"a": a}, {"a": -1.0}, how=how), -combine_rewards({"a": a}, {"a": 1.0}, how=how)
        )


def test_clips() -> None:
    a = torch.tensor([-10.0, -0.01, 0.0, 0.01, 10.0], dtype=torch.float64)
    soft = soft_clip(a, 3)
    assert soft.abs().max() < 3
    torch.testing.assert_close(soft[1:4], a[1:4], rtol=0, atol=1e-7)
    assert (soft.diff() > 0).all()
    assert hard_clip(a, 5).tolist() == [-5, -0.01, 0, 0.01, 5]
