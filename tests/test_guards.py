"""Guard figures of pictures whose figures are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vgrpo.guards import MEANINGS, guards


def picture(luma: np.ndarray) -> torch.Tensor:
    """A grey picture uint8 [1, 3, H, W] of luma [H, W] in [0, 1]."""
    return torch.from_numpy(np.broadcast_to((luma * 255).round().astype(np.uint8), (1, 3, *luma.shape)).copy())


def waves(pitch: int, size: int = 64) -> np.ndarray:
    return np.broadcast_to(0.5 + 0.4 * np.sin(2 * np.pi * np.arange(size) / pitch), (size, size))


def test_one_colour() -> None:
    found = guards(picture(np.full((64, 64), 0.2)), 1)
    assert found["brightness"] == pytest.approx(0.2)
    assert (found["contrast"], found["edges"]) == (pytest.approx(0, abs=1e-12), 0)
    assert found["colour_entropy"] == 0
    assert found["degenerate"] == 1
    assert "diversity" not in found


def test_halves_of_black_and_white() -> None:
    luma = np.zeros((64, 64))
    luma[:, 32:] = 1
    found = guards(picture(luma), 1)
    assert (found["brightness"], found["contrast"]) == (pytest.approx(0.5), pytest.approx(0.5))
    assert found["edges"] == pytest.approx(1 / 63)  # one column of 63 pairs
    assert found["colour_entropy"] == pytest.approx(1)
    assert found["degenerate"] == 0


@pytest.mark.parametrize("turned", [False, True])
def test_a_wave_shows_at_its_own_pitch(turned: bool) -> None:
    for pitch, other in ((8, 16), (16, 8)):
        luma = waves(pitch).T if turned else waves(pitch)
        found = guards(picture(luma), 1)
        assert found[f"pitch_{pitch}"] == pytest.approx(1, abs=1e-3)
        assert found[f"pitch_{other}"] == pytest.approx(0, abs=1e-3)


def test_noise_is_degenerate() -> None:
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, 3, 64, 64), dtype=np.uint8))
    assert guards(noise, 1)["degenerate"] == 1


def test_siblings() -> None:
    black, white, grey = (picture(np.full((32, 32), v)) for v in (0.0, 1.0, 0.2))
    found = guards(torch.cat([black, white, black, grey, black, black]), 2)
    assert found["diversity"] == pytest.approx((1 + 0.2 + 0) / 3)
    assert found["near_duplicates"] == pytest.approx(2 / 6)
    assert list(found) == list(MEANINGS)
    assert guards(black[:0], 2) == {}
