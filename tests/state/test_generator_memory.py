"""States read from memory equal those of the public API."""

import random
from array import array

import numpy as np
import pytest

from trainer.state import generator_memory, random_states


def said_by(generator):
    """Return the state by the public API."""
    if isinstance(generator, random.Random):
        version, numbers, gauss = generator.getstate()
        return [version, array("I", numbers).tobytes(), gauss]
    state = generator.get_state(legacy=False)
    numbers = {name: value.tobytes() if name == "key" else value for name, value in state["state"].items()}
    return {**state, "state": numbers}


def read(generator):
    """Return the state from memory."""
    reader = generator_memory.reader_of(generator)
    return generator_memory.decoded(reader())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", [random.Random, np.random.RandomState])
def test_state_equals_that_of_the_public_api(kind, seed):
    generator, choices = kind(seed), random.Random(seed)
    reader = generator_memory.reader_of(generator)
    is_python = kind is random.Random
    draws = [generator.random, lambda: generator.gauss(0, 1)] if is_python else [generator.rand, generator.randn]
    last = reader()
    for _ in range(400):
        draw, count = choices.choice(draws), choices.randrange(20)
        for _ in range(count):
            draw()
        assert read(generator) == generator_memory.decoded(reader()) == said_by(generator)
        assert (last == reader()) == (count == 0)
        last = reader()
    generator.seed(seed)
    assert read(generator) == said_by(generator)
    random_states.set_state(generator, generator_memory.decoded(last))
    assert reader() == last


class Own(random.Random):
    def getstate(self):
        version, numbers, _ = super().getstate()
        return version, numbers, "of its own"


@pytest.mark.parametrize(
    "generator", [Own(1), np.random.RandomState(np.random.PCG64(1)), type("Sub", (np.random.RandomState,), {})(1)]
)
def test_other_generators_use_the_public_api(generator):
    assert generator_memory.reader_of(generator) is None
    assert random_states.state_of(generator) == said_by(generator)


@pytest.mark.parametrize("generator", [random.Random(1), np.random.RandomState(1)])
def test_public_api_is_used_if_the_address_is_unknown(generator, monkeypatch):
    state = random_states.state_of(generator)
    monkeypatch.setattr(generator_memory, "_PYTHON", None)
    monkeypatch.setattr(generator_memory, "_NUMPY", None)
    assert generator_memory.reader_of(generator) is None
    assert random_states.state_of(generator) == state == said_by(generator)


def test_generator_with_a_replaced_bit_generator_uses_the_public_api():
    generator = np.random.RandomState(1)
    reader = generator_memory.reader_of(generator)
    np.random.RandomState.__init__(generator, np.random.PCG64(1))  # as np.random.set_bit_generator does
    assert generator_memory.decoded(reader()) == said_by(generator)
    generator.rand()
    assert generator_memory.decoded(reader()) == said_by(generator)
