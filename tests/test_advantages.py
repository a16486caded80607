"""Group statistics by hand, and the traps of equal and missing rewards."""

from __future__ import annotations

import pytest
import torch

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
    with pytest.raises(ValueError, match="same names"):
        combine_rewards({"a": a}, {"b": 1.0})


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
