"""The compact form of rank states, and the bytes of a checkpoint in addition to Lightning's."""

import random
from collections import OrderedDict
from io import BytesIO

import numpy as np
import pytest
import torch

from tests.support import assert_identical
from trainer.checkpoint.compact import packed, unpacked
from trainer.state import random_states


def written(value):
    """Return a value read back by torch, and its number of bytes."""
    stream = BytesIO()
    torch.save(value, stream)
    size = stream.tell()
    stream.seek(0)
    return torch.load(stream, weights_only=True), size


def states(seed, draws):
    """The states of one generator of each kind."""
    generators = [
        random.Random(seed), np.random.RandomState(seed), np.random.default_rng(seed),
        np.random.Generator(np.random.MT19937(seed)), np.random.Generator(np.random.Philox(seed)),
        torch.Generator().manual_seed(seed),
    ]  # fmt: skip
    for _ in range(draws):
        for generator in generators[:-1]:
            generator.random()
        torch.randn(3, generator=generators[-1])
        generators[0].gauss(0, 1)
        generators[1].randn()
    return {str(index): random_states.state_of(generator) for index, generator in enumerate(generators)}


@pytest.mark.parametrize(("seed", "draws"), [(0, 1), (2**40 - 1, 700)])
def test_random_states_survive(seed, draws):
    value = states(seed % 2**32, draws)
    value["torch"] = random_states.state_of(torch.Generator().manual_seed(seed))
    read, _ = written(packed(value, {}))
    assert_identical(unpacked(read), value)


def test_anything_plain_survives():
    draw = random.Random(3)

    def make(depth):
        leaves = [
            None, True, 2, 0.5, "text", "", b"", b"short", draw.randbytes(63), draw.randbytes(64), draw.randbytes(2496),
            draw.randbytes(2500), draw.randbytes(5056), bytes(5056), bytes(3000), torch.arange(3, dtype=torch.uint8),
            ("bytes of amp_trainer", 1), (), [], {},
        ]  # fmt: skip
        if depth == 0:
            return draw.choice(leaves)
        kind = draw.choice(["dict", "list", "tuple", "leaf"])
        children = [make(depth - 1) for _ in range(4)]
        if kind == "dict":
            return {draw.choice(["a", "b", 3, (1, "c"), f"{index}"]): one for index, one in enumerate(children)}
        return children if kind == "list" else tuple(children) if kind == "tuple" else draw.choice(leaves)

    for _ in range(60):
        value = make(4)
        read, _ = written(packed(value, {}))
        assert_identical(unpacked(read), value)
    assert_identical(unpacked({"an": "older form"}), {"an": "older form"})
    kept = OrderedDict(a=b"x" * 100)
    assert unpacked(packed([kept], {})) == [kept]


def test_equal_bytes_and_names_are_written_once():
    now = states(1, 5)
    _, one = written(packed([now], {}))
    _, three = written(packed([now, states(1, 5), states(1, 6)], {}))
    assert three - one < 3000  # headers and positions, and the words of none
    assert one < 4.5 * 2496 + 3000
    names = {"weight": "weight"}
    assert next(iter(packed({"".join(["wei", "ght"]): 1}, names)["tree"])) is names["weight"]
