"""Randomness by identity: a draw depends on what it is for, never on the process, the micro-batch or what came before."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def seed_of(*identity: int | str) -> int:
    """A seed in [0, 2⁶³) that depends on nothing but `identity`, such as (seed, step, "rollout", slot, member).

    Raises:
        TypeError: a part that is not a plain int or str. numpy's 3 prints unlike Python's, so it would be another seed.
    """
    odd = [part for part in identity if type(part) not in (int, str)]
    if odd:
        raise TypeError(f"an identity is made of int and str, got {odd[0]!r} of type {type(odd[0]).__name__}")
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*identity: int | str) -> torch.Generator:
    """A CPU generator seeded by `identity`; on the CPU because its stream is the same on every device."""
    return torch.Generator().manual_seed(seed_of(*identity))


def noise(identities: Sequence[tuple], shape: Sequence[int]) -> Tensor:
    """Standard normal [len(identities), *shape] float32; each entry depends on its own identity alone."""
    if not identities:
        return torch.zeros(0, *shape)
    return torch.stack([torch.randn(tuple(shape), generator=generator(*identity)) for identity in identities])
