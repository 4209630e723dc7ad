"""The compact form of rank states, and the bytes of a checkpoint in addition to Lightning's."""

from __future__ import annotations

import random
import zipfile
from collections import OrderedDict
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parity import MAKERS, Classifier, data
from tests.support import assert_identical
from trainer.checkpoint.compact import packed, unpacked
from trainer.state import random_states


def written(value: Any) -> tuple[Any, int]:
    """Return a value read back by torch, and its number of bytes."""
    stream = BytesIO()
    torch.save(value, stream)
    size = stream.tell()
    stream.seek(0)
    return torch.load(stream, weights_only=True), size


def states(seed: int, draws: int) -> dict[str, Any]:
    """The states of one generator of each kind."""
    generators: list[Any] = [
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
def test_random_states_survive(seed: int, draws: int) -> None:
    value = states(seed % 2**32, draws)
    value["torch"] = random_states.state_of(torch.Generator().manual_seed(seed))
    read, _ = written(packed(value, {}))
    assert_identical(unpacked(read), value)


def test_anything_plain_survives() -> None:
    draw = random.Random(3)

    def make(depth: int) -> Any:
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


def test_equal_bytes_and_names_are_written_once() -> None:
    now = states(1, 5)
    _, one = written(packed([now], {}))
    _, three = written(packed([now, states(1, 5), states(1, 6)], {}))
    assert three - one < 3000  # headers and positions, and the words of none
    assert one < 4.5 * 2496 + 3000
    names = {"weight": "weight"}
    tree = packed({"".join(["wei", "ght"]): 1}, names)["tree"]
    assert next(iter(tree)) is names["weight"]


class Accumulating(Classifier):
    """Draws enough random numbers of torch to replace its whole state, and has a name for each gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a_long_name_of_a_layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.rand(1000)
        return super().training_step(batch, batch_idx) + self.a_long_name_of_a_layer(batch[0]).sum()


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_checkpoint_is_little_larger_than_lightnings(tmp_path: Path) -> None:
    sizes = []
    for make in MAKERS:
        trainer = make(max_epochs=1, limit_train_batches=3, accumulate_grad_batches=2)
        module, path = Accumulating(), tmp_path / f"{make.__name__}.ckpt"
        module.on_train_batch_end = lambda *_, trainer=trainer, path=path: trainer.save_checkpoint(path)
        trainer.fit(module, data(16, shuffle=True, num_workers=1), data(4))
        sizes.append(path.stat().st_size)
    assert sizes[1] - sizes[0] < 16_000
    with zipfile.ZipFile(tmp_path / "ours.ckpt") as archive:
        tree = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    assert tree.count(b"a_long_name_of_a_layer.weight") == 1
