"""Hyper-parameters reach checkpoints as plain containers, and come back through Lightning."""

from __future__ import annotations

import enum
import warnings
from argparse import Namespace
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from omegaconf import OmegaConf

from tests.parity import Classifier, data
from tests.support import make_trainer
from trainer import redaction
from trainer.compat.hparams import plain


class Colour(enum.Enum):
    RED = "red"
    ODD = object()


class Level(enum.IntEnum):
    HIGH = 3


@dataclass
class Sizes:
    width: int = 3
    more: list[Path] = field(default_factory=lambda: [Path("a/b")])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None), (True, True), (3, 3), ("a", "a"), (b"a", b"a"), (1j, 1j),
        (np.float64(0.1), 0.1), (np.float32(0.5), 0.5), (np.int64(7), 7), (np.bool_(True), True), (np.str_("a"), "a"),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]), (Path("a/b"), "a/b"), (Colour.RED, "red"), (Colour.ODD, "ODD"),
        (Level.HIGH, 3), (Namespace(lr=np.float64(1)), {"lr": 1.0}), (Sizes(), {"width": 3, "more": ["a/b"]}),
        (timedelta(minutes=2), 120.0), (date(2026, 1, 2), "2026-01-02"), (range(3), [0, 1, 2]),
        ((1, Path("a")), (1, "a")),
        (torch.float16, torch.float16), (torch.device("cpu"), torch.device("cpu")),
        (OmegaConf.create({"a": [1, {"b": "${c}"}], "c": 2}), {"a": [1, {"b": 2}], "c": 2}),
        ({"a": OmegaConf.create([1]), Path("k"): {2}}, {"a": [1], "k": [2]}),
        (OmegaConf.create({"a": "${nowhere}"}), {"a": "${nowhere}"}),
    ],
)  # fmt: skip
def test_what_can_be_made_plain_is(value, expected, tmp_path):
    left_out: list[str] = []
    made = plain(value, "", left_out)
    assert (made, left_out) == (expected, [])
    assert type(made) is type(expected)
    torch.save(made, tmp_path / "x")
    assert torch.load(tmp_path / "x", weights_only=True) == expected


def test_what_cannot_is_left_out_and_named():
    left_out: list[str] = []
    given = {"a": {"b": torch.nn.ReLU(), "c": 1}, "f": print, "g": [partial(print), 2], "k": Sizes}
    assert plain(given, "", left_out) == {"a": {"c": 1}, "g": [None, 2]}
    assert left_out == [
        "a.b (torch.nn.modules.activation.ReLU)",
        "f (builtin_function_or_method)",
        "g[0] (functools.partial)",
        "k (type)",
    ]


class Own:
    pass


def test_what_the_user_has_declared_safe_is_kept():
    own = Own()
    with torch.serialization.safe_globals([Own]):
        assert plain({"own": own}, "", []) == {"own": own}


pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")


class Many(Classifier):
    def __init__(self, lr: Any, root: Any, colour: Any, make: Any = None, sizes: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


class Batches(LightningDataModule):
    def __init__(self, root: Any) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return data(2)


def test_lightning_loads_what_we_save(tmp_path):
    module = Many(np.float64(0.5), tmp_path / "data", Colour.RED, make=print, sizes=OmegaConf.create({"a": {"b": 1}}))
    datamodule = Batches(Path("x/y"))
    trainer = make_trainer(tmp_path)
    trainer.fit(module, datamodule=datamodule)
    with pytest.warns(UserWarning, match=r"do not hold these hyper-parameters of Many.*make \(builtin_function"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.save_checkpoint(tmp_path / "a.ckpt")  # said once
    loaded = Many.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert dict(loaded.hparams) == {
        "learning_rate": 0.1,
        "momentum": 0.0,
        "lr": 0.5,
        "root": str(tmp_path / "data"),
        "colour": "red",
        "make": None,
        "sizes": {"a": {"b": 1}},
    }
    assert Batches.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True).hparams["root"] == "x/y"


class ByConfig(Classifier):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self._hparams = OmegaConf.create({})
        self._set_hparams(config)
        self._hparams_name = "config"
        self.width = config.width


def test_a_config_of_omegaconf_comes_back_with_access_by_attribute(tmp_path, monkeypatch):
    monkeypatch.setenv("A_TOKEN", "very-secret")
    config = OmegaConf.create({"width": "${more.size}", "more": {"size": 8}, "token": "${oc.env:A_TOKEN}"})
    config.url = "${token}"
    trainer = make_trainer(tmp_path)
    trainer.fit(ByConfig(config), data(2))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    token = "${oc.env:A_TOKEN}"
    assert saved["hyper_parameters"] == {"width": 8, "more": {"size": 8}, "token": token, "url": token}
    assert b"very-secret" not in (tmp_path / "a.ckpt").read_bytes()
    assert config.url == "very-secret"  # the run itself has it
    assert ByConfig.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True).width == 8
    redaction.forget()
