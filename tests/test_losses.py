"""Per-sample maths against hand computation, and what must hold whatever the numbers are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vgrpo.losses import (
    awm_log_likelihood,
    awm_loss,
    clipped_surrogate,
    fpo_loss,
    matching_error,
    nft_loss,
    nft_optimality,
    self_normalised_error,
    surrogate_gradient,
    velocity_error,
    vgrpo_loss,
    x0_divergence,
)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_self_normalised_error_by_hand() -> None:
    pred, x0 = torch.tensor([[3.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    # residuals (3, -1): mean square 5, mean size 2; then (0, 0), held by the floor
    torch.testing.assert_close(self_normalised_error(pred, x0), torch.tensor([2.5, 0.0]))


def test_the_normaliser_is_a_constant_for_the_gradient() -> None:
    x0, pred = randn(2, 5), randn(2, 5, seed=1).requires_grad_()
    self_normalised_error(pred, x0).sum().backward()
    residual = (pred - x0).detach()
    torch.testing.assert_close(pred.grad, 2 * residual / 5 / residual.abs().mean(1, keepdim=True))


def test_errors_are_means_over_latent_dimensions() -> None:
    a, b = randn(3, 4), randn(3, 4, seed=1)
    tiled = [x[:, :, None].expand(3, 4, 6) for x in (a, b)]
    for error in (matching_error, self_normalised_error, x0_divergence):
        torch.testing.assert_close(error(a, b), error(*tiled))
        assert (error(a, b) > 0).all()
        with pytest.raises(ValueError, match="shapes must be equal"):
            error(a, b[:1])


def test_half_precision_is_computed_in_float32() -> None:
    a, b = torch.full((1, 4), 1e-4, dtype=torch.float16), torch.zeros(1, 4, dtype=torch.float16)
    assert matching_error(a, b).item() == pytest.approx(float(a[0, 0]) ** 2, rel=1e-6)  # 1e-8 is 0 in float16
    assert self_normalised_error(a, b).item() == pytest.approx(float(a[0, 0]), rel=1e-6)
    # a log-ratio of 1e-3 is lost beside 1 in bfloat16
    log_ratio, one = torch.tensor([1e-3], dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)
    expected = math.exp(float(log_ratio))
    assert clipped_surrogate(log_ratio, one, clip=None)[0].item() == pytest.approx(-expected, rel=1e-6)
    assert surrogate_gradient(log_ratio, one, clip=None)[0].item() == pytest.approx(expected, rel=1e-6)
    assert vgrpo_loss(log_ratio[None] * 0, log_ratio[None], one, clip=None).item() == pytest.approx(-expected, rel=1e-6)


def test_float64_stays_float64() -> None:
    a, b = randn(2, 3), randn(2, 3, seed=1)
    for error in (matching_error, self_normalised_error, x0_divergence):
        assert error(a, b).dtype == torch.float64
        assert error(a.float(), b.float()).dtype == torch.float32


def test_matching_error_and_divergence_by_hand() -> None:
    a, b = torch.tensor([[3.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    assert matching_error(a, b).tolist() == [5, 0]  # (9 + 1)/2
    assert x0_divergence(a, b).tolist() == [5, 0]


def test_the_floor_holds_a_tiny_residual() -> None:
    pred, x0 = torch.tensor([[2e-6, -2e-6]], dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64)
    assert self_normalised_error(pred, x0).item() == pytest.approx(4e-12 / 1e-5)
    assert self_normalised_error(pred, x0, floor=1e-6).item() == pytest.approx(2e-6)  # mean size 2e-6 is above it


def test_the_normalised_error_grows_with_the_residual_not_with_its_square() -> None:
    pred, x0 = randn(3, 4), torch.zeros(3, 4, dtype=torch.float64)
    torch.testing.assert_close(self_normalised_error(7 * pred, x0), 7 * self_normalised_error(pred, x0))
    torch.testing.assert_close(matching_error(7 * pred, x0), 49 * matching_error(pred, x0))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.5, 2.0, -2.2, True),  # too good already: held at 1 + ε
        (0.5, 2.0, -1.0, False),  # has got worse though it is good: pull it back
        (1.5, -2.0, 3.0, False),  # has got likelier though it is bad: push it down
        (0.5, -2.0, 1.8, True),  # bad and rare already: held at 1 - ε
        (1.05, 2.0, -2.1, False),
        (1.0, 0.0, 0.0, False),
    ],
)
def test_clipped_surrogate_by_hand(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    log_ratio = torch.tensor([math.log(ratio)], dtype=torch.float64)
    ours, held = clipped_surrogate(log_ratio, torch.tensor([advantage], dtype=torch.float64), clip=0.1)
    assert ours.item() == pytest.approx(loss)
    assert held.item() is clipped
    for none in (None, 0.0):
        free, held = clipped_surrogate(log_ratio, torch.tensor([advantage]), clip=none)
        assert free.item() == pytest.approx(-ratio * advantage)
        assert not held.any()


@settings(derandomize=True, deadline=None, database=None)
@given(log_ratio=st.floats(-1, 1), advantage=st.floats(-5, 5), clip=st.floats(1e-3, 0.5))
def test_a_clip_only_ever_makes_the_loss_worse(log_ratio: float, advantage: float, clip: float) -> None:
    """It takes rewards for going far away and never adds one; and where it is active the gradient is 0, else ρÂ."""
    x = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([advantage], dtype=torch.float64)
    loss, clipped = clipped_surrogate(x, a, clip=clip)
    assert loss.item() >= clipped_surrogate(x, a, clip=None)[0].item()
    loss.sum().backward()
    assert x.grad is not None
    if clipped:
        assert x.grad.item() == 0
        assert abs(math.exp(log_ratio) - 1) > clip
    else:
        assert x.grad.item() == pytest.approx(-math.exp(log_ratio) * advantage)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_surrogate_gradient_is_autograds(clip: float | None) -> None:
    """Across draws, rows and signs; some ratios are beyond the clip on the side where it holds, some on the other."""
    error_old, error_new, advantages = randn(4, 9), randn(4, 9, seed=1), randn(9, seed=2)
    error_new = (error_old + 0.1 * error_new).requires_grad_()
    vgrpo_loss(error_new, error_old, advantages, clip=clip).sum().backward()
    slope, clipped = surrogate_gradient((error_old - error_new).mean(0).detach(), advantages, clip=clip)
    torch.testing.assert_close(error_new.grad, (slope / 4).expand(4, 9))
    assert clipped.any() == (clip is not None)
    assert (error_new.grad[:, clipped] == 0).all()
    assert (error_new.grad[:, ~clipped] != 0).all()


def test_surrogate_gradient_by_hand() -> None:
    log_ratio = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.05]).double().log()
    slope, clipped = surrogate_gradient(log_ratio, torch.tensor([2.0, 2, -2, -2, 2]).double(), clip=0.1)
    torch.testing.assert_close(slope, torch.tensor([0.0, 1.0, -3.0, 0.0, 2.1]).double())
    assert clipped.tolist() == [True, False, False, True, False]


def test_the_mean_over_draws_is_inside_the_exp() -> None:
    error_old, error_new = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [0.0]])
    loss = vgrpo_loss(error_new, error_old, torch.ones(1), clip=None)
    assert loss.item() == pytest.approx(-math.exp(0.5))  # and not -(e + 1)/2


def test_antisymmetry_at_the_old_policy() -> None:
    error, advantages = randn(4, 6).abs(), randn(6, seed=1)
    plus = vgrpo_loss(error, error, advantages, clip=0.01)
    torch.testing.assert_close(plus, -advantages, rtol=0, atol=0)
    torch.testing.assert_close(plus, -vgrpo_loss(error, error, -advantages, clip=0.01), rtol=0, atol=0)


def test_the_gradient_turns_with_the_advantage() -> None:
    """A good sample's error goes down, a bad one's up; at θ_old by the same amount."""
    error_old, grads = randn(4, 6).abs(), []
    for sign in (1, -1):
        error = error_old.clone().requires_grad_()
        vgrpo_loss(error, error_old, sign * torch.ones(6).double(), clip=0.01).sum().backward()
        grads.append(error.grad)
    torch.testing.assert_close(grads[0], torch.full((4, 6), 1 / 4).double())
    torch.testing.assert_close(grads[0], -grads[1])


def test_a_likelier_good_sample_has_a_lower_loss_until_the_clip() -> None:
    error_old, falling = torch.zeros(1, 200).double(), torch.linspace(0.02, -0.02, 200).double()[None]
    loss = vgrpo_loss(falling, error_old, torch.ones(200).double(), clip=0.01)
    inside = -falling[0] < math.log(1.01)
    assert (loss[inside].diff() < 0).all()
    torch.testing.assert_close(loss[~inside], torch.full_like(loss[~inside], -1.01))
    bad = vgrpo_loss(falling, error_old, -torch.ones(200).double(), clip=0.01)
    assert (bad[-falling[0] > math.log(0.99)].diff() > 0).all()


def test_rows_and_draws_have_no_order() -> None:
    error_new, error_old, advantages = randn(4, 6), randn(4, 6, seed=1), randn(6, seed=2)
    loss = vgrpo_loss(error_new, error_old, advantages, clip=0.1)
    rows, draws = torch.tensor([3, 1, 5, 0, 2, 4]), torch.tensor([2, 0, 3, 1])
    permuted = vgrpo_loss(error_new[:, rows], error_old[:, rows], advantages[rows], clip=0.1)
    assert torch.equal(permuted, loss[rows])
    torch.testing.assert_close(vgrpo_loss(error_new[draws], error_old[draws], advantages, clip=0.1), loss)
    # group-major: prompt 1 of 2, members 0..2, is rows 3..5
    groups = [vgrpo_loss(error_new[:, g], error_old[:, g], advantages[g], clip=0.1) for g in (slice(0, 3), slice(3, 6))]
    assert torch.equal(torch.stack(groups), loss.view(2, 3))


def test_the_kl_is_added_by_its_weight() -> None:
    error, advantages, kl = randn(4, 6).abs(), randn(6, seed=1), randn(6, seed=2).abs()
    loss = vgrpo_loss(error, error, advantages, clip=0.01, kl=kl, kl_weight=0.3)
    torch.testing.assert_close(loss, -advantages + 0.3 * kl)
    torch.testing.assert_close(vgrpo_loss(error, error, advantages, clip=0.01, kl=kl), -advantages)
    with pytest.raises(ValueError, match=r"kl_weight 0\.3 has no kl"):
        vgrpo_loss(error, error, advantages, clip=0.01, kl_weight=0.3)


def test_shapes_that_would_broadcast_are_refused() -> None:
    two, square = randn(2), randn(2, 2)
    for wrong in (
        lambda: clipped_surrogate(two, square, clip=None),
        lambda: vgrpo_loss(square, square[:1], two, clip=None),
        lambda: vgrpo_loss(square, square, two[:, None], clip=None),
        lambda: vgrpo_loss(square, square, two, clip=None, kl=square, kl_weight=0.1),
        lambda: velocity_error(randn(2, 2, 2), two[:, None], randn(2, 2, 2)),
        lambda: velocity_error(randn(2, 2, 2), square, randn(1, 2, 2)),
        lambda: awm_log_likelihood(square, two),
    ):
        with pytest.raises(ValueError, match="shapes must be equal, got"):
            wrong()


def others(seed: int = 0) -> dict[str, torch.Tensor]:
    """Inputs of FPO, AWM and NFT: 3 draws of 4 rows, and a θ that has just left θ_old."""
    v_old = randn(3, 4, 2, 5, seed=seed + 3)
    return {
        "x0": randn(4, 2, 5, seed=seed),
        "t": torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)),
        "eps": randn(3, 4, 2, 5, seed=seed + 1),
        "v_old": v_old,
        "v_new": v_old.clone().requires_grad_(),
        "advantages": randn(4, seed=seed + 2),
    }


@pytest.mark.parametrize("loss", [fpo_loss, awm_loss])
def test_other_ratios_are_one_at_the_old_policy(loss: Any) -> None:
    i = others()
    torch.testing.assert_close(loss(**i), -i["advantages"], rtol=0, atol=0)


@pytest.mark.parametrize("loss", [fpo_loss, awm_loss, nft_loss])
def test_other_objectives_descend_towards_good_samples(loss: Any) -> None:
    """A small step against the gradient brings good samples nearer, in the error each objective measures."""
    i = others()
    i["advantages"] = torch.tensor([1.0, 1, -1, -1]).double()
    loss(**i).sum().backward()
    step = i["v_new"].grad
    assert step is not None
    before = velocity_error(i["v_new"].detach(), i["x0"], i["eps"]).mean(0)
    after = velocity_error(i["v_new"].detach() - 1e-3 * step, i["x0"], i["eps"]).mean(0)
    assert ((after < before) == (i["advantages"] > 0)).all()


@pytest.mark.parametrize("loss", [fpo_loss, awm_loss, nft_loss])
def test_other_objectives_keep_rows_apart_and_refuse_what_does_not_fit(loss: Any) -> None:
    i = {k: v.detach() for k, v in others().items()}
    i["v_new"] = i["v_new"] + 0.1
    order = torch.tensor([2, 0, 3, 1])
    permuted = {k: v[order] if k in ("x0", "advantages") else v[:, order] for k, v in i.items()}
    torch.testing.assert_close(loss(**permuted), loss(**i)[order])
    for wrong in ({"eps": i["eps"][:1]}, {"advantages": i["advantages"][:, None]}, {"x0": i["x0"][:1]}):
        with pytest.raises(ValueError, match="shapes must be equal"):
            loss(**{**i, **wrong})
    half = {k: v.bfloat16() for k, v in i.items()}
    assert torch.equal(loss(**half), loss(**{k: v.float() for k, v in half.items()}))


def test_awm_likelihood_by_hand() -> None:
    error, t = torch.tensor([16.0]).double(), torch.tensor([0.5]).double()
    assert awm_log_likelihood(error, t, power=0.25).item() == pytest.approx(-0.5 * (2 - 10**-2.5) / 0.25)
    assert awm_log_likelihood(error, t, power=1.0).item() == pytest.approx(-0.5 * (16 - 1e-10))


def test_nft_by_hand() -> None:
    a = torch.tensor([-5.0, -1, -0.5, 0, 0.5, 1, 5])
    assert nft_optimality(a).tolist() == [0, 0, 0.25, 0.5, 0.75, 1, 1]
    # x0 = 0, eps = 1, v_old = 1, v_new = 3, beta = 0.5: v+ = 2, v- = 0; at t = 0.5 x_t = 0.5, so x̂0 = -0.5 and 0.5
    one = torch.ones(1, 1, 1).double()
    inputs = {"x0": 0 * one[0], "t": 0.5 * one[0], "eps": one, "v_old": one, "v_new": 3 * one}
    loss = nft_loss(**inputs, advantages=torch.tensor([0.5]).double(), beta=0.5)
    assert loss.item() == pytest.approx(0.75 * 0.5 + 0.25 * 0.5)
    # beta = 1: v+ = 3, v- = -1, x̂0 = -1 and 1
    assert nft_loss(**inputs, advantages=torch.tensor([0.5]).double()).item() == pytest.approx(1)
    inputs["v_new"] = one * 2  # v+ = 1.5, v- = 0.5 at beta 0.5: x̂0 = -0.25 and 0.25, below a floor of 1
    loss = nft_loss(**inputs, advantages=torch.tensor([1.0]).double(), beta=0.5, floor=1.0)
    assert loss.item() == pytest.approx(0.25**2)


def test_fpo_clips() -> None:
    i = others()
    i["v_new"] = (i["eps"] - i["x0"]).clone().requires_grad_()  # a perfect prediction: ratios far above 1
    i["advantages"] = torch.ones(4).double()
    torch.testing.assert_close(fpo_loss(**i, clip=0.05), torch.full((4,), -1.05).double())
    assert (fpo_loss(**i, clip=None) < -1.5).all()
