from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest
import torch

from trainer.state import random_states

CPU = torch.device("cpu")


def draw() -> tuple[float, ...]:
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()


@pytest.mark.parametrize("device", [None, CPU])
def test_random_numbers_come_again(device: torch.device | None) -> None:
    draw()  # an odd number of normal numbers: the generators keep the other half
    state = random_states.capture(device)
    first = draw()
    assert draw() != first
    random_states.restore(state, device)
    assert draw() == first


def test_a_state_is_plain_data(tmp_path) -> None:
    state = random_states.capture()
    torch.save(state, tmp_path / "state.pt")
    first = draw()
    random_states.restore(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draw() == first


def test_what_is_drawn_inside_does_not_show_outside() -> None:
    state = random_states.capture()
    expected = draw()
    random_states.restore(state)
    with suppress(KeyError), random_states.isolated():
        draw()
        raise KeyError
    assert draw() == expected


def test_states_for_one_more_process_are_others_and_the_same_each_time() -> None:
    state = random_states.capture()
    before, drawn = random_states.capture(), []
    for number in (2, 3, 2):
        derived = random_states.derived(state, number)
        assert random_states.capture() == before  # nothing is drawn
        random_states.restore(derived)
        drawn.append(draw())
        random_states.restore(before)
    assert drawn[0] == drawn[2] != drawn[1]
    assert draw() not in drawn
