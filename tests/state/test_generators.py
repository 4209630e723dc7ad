import io
import random
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support import Irrep
from trainer.state import random_states as generators
from trainer.state.generators import is_random

KINDS = {
    "torch": lambda: torch.Generator().manual_seed(1),
    "python": lambda: random.Random(2),
    "legacy numpy": lambda: np.random.RandomState(3),
    "legacy numpy, of another kind": lambda: np.random.RandomState(np.random.PCG64(3)),
}
for kind in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"):
    KINDS[kind] = lambda kind=kind: np.random.Generator(getattr(np.random, kind)(4))


def draw(generator, count):
    if isinstance(generator, torch.Generator):
        return torch.rand(count, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1) for _ in range(count)]
    return [float(generator.standard_normal()) for _ in range(count)]


@pytest.mark.parametrize("drawn", [0, 1, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_generator_continues_from_a_saved_state(kind, drawn):
    generator, other = KINDS[kind](), KINDS[kind]()
    draw(generator, drawn)
    file = io.BytesIO()
    torch.save(generators.states_of([generator]), file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    assert states == generators.states_of([generator])
    following = draw(generator, 3)
    assert states != generators.states_of([generator])
    generators.set_states([other], states)
    assert draw(other, 3) == following


def found_in(*roots, **options):
    """Return the random generators among the objects of a dataloader."""
    objects = [one for found in generators.find(*roots, **options) for one in found.objects.values()]
    return list(filter(is_random, objects))


def test_generators_are_found_in_attributes_and_containers_once():
    first, second, third, fourth, hidden = (random.Random(i) for i in range(5))
    pair = Irrep([SimpleNamespace(rng=third)])
    pair.rng = second
    inner = SimpleNamespace(rng=first, transforms=[pair, deque([{"rng": fourth}])])
    others = [torch.default_generator, np.random.mtrand._rand, random, np.random]  # those of the process
    outer = SimpleNamespace(inner=inner, again=first, data=[hidden] * 1001, name="x", others=others)
    inner.outer = outer
    assert found_in(outer, None) == [first, second, third, fourth]
    assert found_in(outer, except_in=inner) == [first]


class Mixes:
    def __init__(self, rng):
        self.rng = rng

    def collate(self, samples, strength):
        return samples

    def __getattr__(self, name):
        raise RuntimeError("a proxy that is not ready")


def test_generators_are_found_in_bound_functions():
    generator = random.Random(1)
    assert found_in(partial(Mixes(generator).collate, strength=SimpleNamespace())) == [generator]
    assert generators.find(Mixes.collate, random.SystemRandom()) == []


OF_THE_MODULE = random.Random(1)


class Slotted:
    __slots__ = ("rng",)


class OfTheClass:
    rng = random.Random(2)

    def __getitem__(self, index):
        return [OF_THE_MODULE.random() for _ in range(index)]


def test_generators_in_globals_classes_closures_and_slots_are_not_searched():
    slotted, enclosed = Slotted(), random.Random(3)
    slotted.rng = random.Random(5)
    assert found_in(OfTheClass(), slotted, lambda: enclosed.random()) == []
    assert generators.find(random.shuffle) == []


def test_generators_that_do_not_exist_any_more_are_named():
    one, two = random.Random(1), random.Random(2)
    states = generators.states_of(generators.find([one, two]))
    kept = random.Random(3)
    assert generators.differences(generators.find([kept]), states) == [
        "Random of the data had changed, and the data has another number of these objects now"
    ]
    generators.set_states(generators.find([kept]), states)
    assert kept.random() == random.Random(1).random()
