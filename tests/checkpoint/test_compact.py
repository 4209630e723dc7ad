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
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from torch import nn
from torch.utils.data import DataLoader

from tests.parity import QUIET, Classifier, data
from tests.support import assert_identical
from trainer import Trainer
from trainer.checkpoint.compact import packed, unpacked
from trainer.state import random_states

MOST = 16_000
"""Bytes by which a checkpoint of one process may exceed Lightning's."""


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


@pytest.mark.parametrize("draws", [0, 1, 700])
@pytest.mark.parametrize("seed", [0, 2**40 - 1])
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


LOADERS: dict[str, Any] = {
    "plain": lambda: data(16),
    "shuffled": lambda: data(16, shuffle=True),
    "workers": lambda: data(16, shuffle=True, num_workers=1),
    "a generator": lambda: data(16, shuffle=True, generator=torch.Generator().manual_seed(1)),
}


def size_of(kind: Any, path: Path, make: Any, module: Any, stop: int) -> int:
    trainer = kind(**QUIET, max_epochs=2, max_steps=stop, num_sanity_val_steps=0)
    trainer.fit(module, make(), data(4))
    trainer.save_checkpoint(path)
    return path.stat().st_size


class Draws(Classifier):
    """Draws enough random numbers of torch to replace its whole state."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.rand(1000)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize(
    ("name", "stop", "module"),
    [("plain", 8, Classifier), ("shuffled", 3, Draws), ("workers", 11, Classifier), ("a generator", 5, Draws)],
)
def test_checkpoint_is_little_larger_than_lightnings(tmp_path: Path, name: str, stop: int, module: Any) -> None:
    theirs = size_of(LightningTrainer, tmp_path / "theirs.ckpt", LOADERS[name], module(), stop)
    ours = size_of(Trainer, tmp_path / "ours.ckpt", LOADERS[name], module(), stop)
    own = 2 * 2600 if name == "a generator" else 0  # its state at the start of the epoch and now
    assert ours - theirs < MOST + own


class Deep(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.a_long_name_of_layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(50))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for layer in self.a_long_name_of_layers:
            batch = layer(batch)
        return batch.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


def test_names_of_parameters_are_not_repeated(tmp_path: Path) -> None:
    """Inside an accumulation window, which also has a name for each gradient."""
    trainer = Trainer(**QUIET, max_epochs=1, accumulate_grad_batches=4, limit_train_batches=4)

    def save(*_: Any) -> None:
        trainer.save_checkpoint(tmp_path / "a.ckpt")

    module = Deep()
    module.on_train_batch_end = save  # type: ignore[method-assign]
    trainer.fit(module, DataLoader(torch.ones(3, 2)))
    with zipfile.ZipFile(tmp_path / "a.ckpt") as archive:
        tree = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    assert tree.count(b"a_long_name_of_layers.49.weight") == 1
