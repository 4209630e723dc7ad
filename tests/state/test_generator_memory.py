"""What is read from memory is what the generators say themselves."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainer.state import generator_memory, random_states


def said_by(generator: Any) -> Any:
    """The state, by the public way."""
    if isinstance(generator, random.Random):
        version, numbers, gauss = generator.getstate()
        return [version, array("I", numbers).tobytes(), gauss]
    state = generator.get_state(legacy=False)
    numbers = {name: value.tobytes() if name == "key" else value for name, value in state["state"].items()}
    return {**state, "state": numbers}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", [random.Random, np.random.RandomState])
def test_a_state_is_the_one_that_the_generator_gives(kind: Any, seed: int) -> None:
    read = {random.Random: generator_memory.python_state, np.random.RandomState: generator_memory.numpy_state}[kind]
    generator, choices = kind(seed), random.Random(seed)
    assert read(generator) == said_by(generator)
    draws = [generator.random, generator.gauss] if kind is random.Random else [generator.rand, generator.randn]
    for _ in range(400):
        choice, count = choices.choice(draws), choices.randrange(20)
        for _ in range(count):
            choice(0, 1) if choice.__name__ == "gauss" else choice()
        assert read(generator) == said_by(generator)
    generator.seed(seed)
    assert read(generator) == said_by(generator)


def test_the_generators_of_the_process_are_read() -> None:
    random.gauss(0, 1)
    np.random.randn()
    python, numpy = random_states._GLOBAL["python"], random_states._GLOBAL["numpy"]
    assert generator_memory.python_state(python) == said_by(python)
    assert generator_memory.numpy_state(numpy) == said_by(numpy)


class Own(random.Random):
    def getstate(self) -> Any:
        version, numbers, _ = super().getstate()
        return version, numbers, "of its own"


@pytest.mark.parametrize(
    "generator", [Own(1), np.random.RandomState(np.random.PCG64(1)), type("Sub", (np.random.RandomState,), {})(1)]
)
def test_another_kind_is_asked(generator: Any) -> None:
    is_python = isinstance(generator, random.Random)
    read = generator_memory.python_state if is_python else generator_memory.numpy_state
    assert read(generator) is None
    assert random_states.state_of(generator) == said_by(generator)


@pytest.mark.parametrize("generator", [random.Random(1), np.random.RandomState(1)])
def test_where_nothing_is_found_the_generator_is_asked(generator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state = random_states.state_of(generator)
    monkeypatch.setattr(generator_memory, "_PYTHON", None)
    monkeypatch.setattr(generator_memory, "_NUMPY", None)
    assert generator_memory.python_state(random.Random(1)) is None
    assert random_states.state_of(generator) == state == said_by(generator)


def test_what_lies_elsewhere_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert generator_memory._find(random.Random(1), b"not in there") is None
    monkeypatch.setattr(generator_memory, "sys", SimpleNamespace(implementation=SimpleNamespace(name="pypy")))
    assert generator_memory._find_in_python() is generator_memory._find_in_numpy() is None


@pytest.mark.parametrize("kind", [random.Random, np.random.RandomState])
def test_a_mark_changes_with_the_state_and_not_without(kind: Any) -> None:
    generator, choices = kind(1), random.Random(1)
    is_python = kind is random.Random
    normal = (lambda: generator.gauss(0, 1)) if is_python else generator.randn
    word = (lambda: generator.getrandbits(32)) if is_python else (lambda: generator.randint(2**32, dtype=np.uint32))
    mark = generator_memory.mark_of(generator)
    assert mark is not None
    marks, states = [mark()], [said_by(generator)]
    for draws in ([], [normal], [normal], [], [word] * 624, [word] * 1248, [word], *([normal] * n for n in range(9))):
        choices.shuffle(draws)
        for draw in draws:
            draw()
        marks.append(mark())
        states.append(said_by(generator))
        assert (marks[-1] == marks[-2]) == (states[-1] == states[-2]) == (not draws)
    before = random_states.state_of(generator)
    generator.seed(2)
    assert mark() != marks[-1]
    random_states.set_state(generator, before)
    assert mark() == marks[-1]


def test_a_generator_with_another_source_of_bits_has_always_changed() -> None:
    generator = np.random.RandomState(1)
    mark = generator_memory.mark_of(generator)
    assert mark is not None
    before = mark()
    np.random.RandomState.__init__(generator, np.random.PCG64(1))
    assert before != mark() != mark()


def test_another_kind_has_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        generator_memory.mark_of(Own(1)) is generator_memory.mark_of(np.random.RandomState(np.random.PCG64(1))) is None
    )
    monkeypatch.setattr(generator_memory, "_PYTHON", None)
    monkeypatch.setattr(generator_memory, "_NUMPY", None)
    assert generator_memory.mark_of(random.Random(1)) is generator_memory.mark_of(np.random.RandomState(1)) is None
