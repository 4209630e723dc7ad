from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest
import torch

from trainer import rng

CPU = torch.device("cpu")


def draw() -> tuple[float, ...]:
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()


@pytest.mark.parametrize("device", [None, CPU])
def test_random_numbers_come_again(device: torch.device | None) -> None:
    draw()  # an odd number of normal numbers: the generators keep the other half
    state = rng.capture(device)
    first = draw()
    assert draw() != first
    rng.restore(state, device)
    assert draw() == first


def test_a_state_is_plain_data(tmp_path) -> None:
    state = rng.capture()
    torch.save(state, tmp_path / "state.pt")
    first = draw()
    rng.restore(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draw() == first


def test_what_is_drawn_inside_does_not_show_outside() -> None:
    state = rng.capture()
    expected = draw()
    rng.restore(state)
    with suppress(KeyError), rng.isolated():
        draw()
        raise KeyError
    assert draw() == expected
