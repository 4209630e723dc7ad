import random
from contextlib import suppress

import numpy as np
import pytest
import torch

from trainer.state import random_states

CPU = torch.device("cpu")


def draw():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()


@pytest.mark.parametrize("device", [None, CPU])
def test_random_states_are_restored(device):
    draw()  # an odd number of normal numbers: the generators keep the other half
    state = random_states.capture(device)
    first = draw()
    assert draw() != first
    random_states.restore(state, device)
    assert draw() == first


def test_random_numbers_inside_the_context_do_not_change_the_state():
    state = random_states.capture()
    expected = draw()
    random_states.restore(state)
    with suppress(KeyError), random_states.isolated():
        draw()
        raise KeyError
    assert draw() == expected


def test_states_for_one_more_process_are_others_and_the_same_each_time():
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


def test_watch_reports_used_generators():
    own = [np.random.default_rng(1), random.Random(2), torch.Generator().manual_seed(3), np.random.RandomState(4)]
    draws = {
        "python": [random.random, lambda: random.gauss(0, 1), lambda: random.gauss(0, 1)],
        "numpy": [np.random.rand, np.random.randn, np.random.randn],
        "torch": [lambda: torch.rand(1), lambda: torch.randn(1)],
        "own": [own[0].random, own[1].random, lambda: torch.rand(1, generator=own[2]), own[3].randn, own[3].randn],
    }
    watch = random_states.Watch(own)
    assert watch.changes() == {}
    for name, functions in draws.items():
        for function in functions:
            function()
            assert watch.changes() == {name: random_states.capture(objects=own)[name]}
            assert watch.changes() == {}
    draw()
    state = random_states.capture(objects=own)
    assert watch.changes() == {name: state[name] for name in ("python", "numpy", "torch")}
