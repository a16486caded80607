"""A draw depends on what it is for and on nothing else."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from vgrpo.seeds import generator, noise, seed_of


def test_the_seed_is_pinned() -> None:
    """Old runs must be repeatable, so the rule that turns an identity into a seed may not change."""
    digest = hashlib.blake2b(b"(0, 3, 'rollout', 17)", digest_size=8).digest()
    assert seed_of(0, 3, "rollout", 17) == int.from_bytes(digest, "little") // 2


def test_different_identities_have_different_seeds() -> None:
    identities = [(1, "23"), ("1", 23), (12, "3"), (12, 3), (123,), ("123",), (1, 2, 3), ("a",), ("a", "a"), ()]
    seeds = {seed_of(*identity) for identity in identities}
    assert len(seeds) == len(identities)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("part", [np.int64(3), torch.tensor(3), 3.0, True, None, (3,)])
def test_an_identity_that_prints_unlike_its_equal_is_refused(part: object) -> None:
    with pytest.raises(TypeError, match=r"made of int and str, got .* of type"):
        seed_of(0, part)  # type: ignore[arg-type]


def test_noise_depends_on_identity_alone() -> None:
    identities = [(7, step, "group", slot) for step in range(2) for slot in range(3)]
    alone = torch.cat([noise([identity], (2, 3)) for identity in identities])
    torch.manual_seed(1)  # nor on torch's global generator
    together = noise(identities, (2, 3))
    assert together.shape == (6, 2, 3)
    assert together.dtype == torch.float32
    assert torch.equal(together, alone)
    assert torch.equal(noise(identities[::-1], (2, 3)), alone.flip(0))
    assert torch.equal(noise([identities[0]] * 2, (2, 3)), alone[:1].expand(2, 2, 3))
    assert len(together.flatten().unique()) == together.numel()
    assert noise([], (2, 3)).shape == (0, 2, 3)


def test_noise_is_standard_normal() -> None:
    many = noise([(k,) for k in range(2000)], (8,)).flatten()
    assert many.mean().item() == pytest.approx(0, abs=0.03)
    assert many.std().item() == pytest.approx(1, abs=0.03)
    assert (many.abs() < 1).float().mean().item() == pytest.approx(0.6827, abs=0.015)


def test_noise_is_what_its_generator_draws() -> None:
    torch.testing.assert_close(noise([(5, "x")], (4,))[0], torch.randn(4, generator=generator(5, "x")), rtol=0, atol=0)
