"""Objects that cannot be loaded again are reported at the save instead of at the load."""

import io
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.support import Regression, fit_and_watch, make_batches
from trainer.checkpoint.plain import require_loadable
from trainer.errors import CheckpointError

Pair = namedtuple("Pair", "a b")


def read_back(checkpoint):
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_plain_values_are_kept():
    checkpoint = {
        "state_dict": OrderedDict(w=torch.zeros(2)), "n": [1, (2.0, None), {"a": "b", 3: True}], "set": {1, "a"},
        "dtype": torch.float16, "device": torch.device("cpu"), "size": torch.Size([1]), "counter": Counter("aab"),
        "bytes": b"x", "array": bytearray(b"x"), "parameter": torch.nn.Parameter(torch.zeros(1)), "complex": 1j,
    }  # fmt: skip
    assert require_loadable(checkpoint, strict=True, warn=True) is checkpoint
    read_back(checkpoint)


def test_numpys_scalars_become_numbers_and_nothing_else_is_copied():
    weights = OrderedDict(w=torch.zeros(2))
    given = {"state_dict": weights, "s": [{"best": np.float64(0.1)}, (np.int64(3), np.bool_(True))], np.str_("k"): 1}
    made = require_loadable(given, strict=True, warn=True)
    assert made == {"state_dict": weights, "s": [{"best": 0.1}, (3, True)], "k": 1}
    assert [type(made["s"][0]["best"]), type(made["s"][1][0]), type(made["s"][1][1])] == [float, int, bool]
    assert {type(key) for key in made} == {str}
    assert made["state_dict"] is weights
    assert type(given["s"][0]["best"]) is np.float64
    assert read_back(made)["s"] == made["s"]
    of_a_set = require_loadable({"seen": {np.float64(0.5)}}, strict=True, warn=True)
    assert [type(value) for value in read_back(of_a_set)["seen"]] == [float]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Path("a"), r"checkpoint\['x'\]\[0\]\['y'\] is a pathlib.*Path"),
        (np.zeros(2), "is a numpy.ndarray"),
        (Pair(1, 2), r"is a .*Pair"),
        ({Path("a")}, r"checkpoint\['x'\]\[0\]\['y'\]\{\} is a pathlib"),
        ({Path("a"): 1}, r"a key of checkpoint\['x'\]\[0\]\['y'\] is a pathlib"),
        (lambda: 0, "is a function"),
    ],
)
def test_unreadable_values_are_named(value, expected):
    checkpoint = {"x": [{"y": value}]}
    with pytest.warns(UserWarning, match=rf"(?s)weights_only=False.*{expected}.*add_safe_globals"):
        assert require_loadable(checkpoint, strict=False, warn=True) is checkpoint
    with pytest.raises(CheckpointError, match=r"resume='auto'"):
        require_loadable(checkpoint, strict=True, warn=False)
    require_loadable(checkpoint, strict=False, warn=False)


def test_safe_globals_are_accepted():
    with torch.serialization.safe_globals([Adds]):
        require_loadable({"own": Adds(1)}, strict=True, warn=True)


class Adds(Callback):
    def __init__(self, value):
        self.value = value

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["own"] = {"best": self.value}


class Watches(Regression):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("score", 1.0, on_epoch=True, batch_size=4)
        return loss

    def on_train_epoch_end(self):
        schedule = self.lr_schedulers()
        schedule.best = np.float64(schedule.best)  # left by a metric of numpy


@pytest.mark.filterwarnings("ignore:The checkpoint lacks values")
def test_fit_saves_loadable_values(tmp_path):
    module = Watches(schedule=ReduceLROnPlateau, monitor="score")
    trainer, _ = fit_and_watch(tmp_path, module, make_batches(3), callbacks=[Adds(np.float64(0.25))])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert saved["own"] == {"best": 0.25}
    assert type(saved["lr_schedulers"][0]["best"]) is float
    next(c for c in trainer.callbacks if isinstance(c, Adds)).value = Path("a")
    with pytest.warns(UserWarning, match=r"checkpoint\['own'\]\['best'\] is a pathlib"):
        trainer.save_checkpoint(tmp_path / "b.ckpt")
    trainer.resume = "auto"
    with pytest.raises(CheckpointError, match=r"checkpoint\['own'\]\['best'\]"):
        trainer.save_checkpoint(tmp_path / "c.ckpt")
    assert not (tmp_path / "c.ckpt").exists()
