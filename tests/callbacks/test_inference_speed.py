from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.support import loader_of, make_trainer
from trainer.callbacks import InferenceSpeed
from trainer.callbacks.inference_speed import in_words
from trainer.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore:precision='16-true' keeps weights")

HALF = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16, "16-true": torch.float16}


class Watched(LightningModule):
    """Notes in which dtype it computes, in which mode, and on which batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.register_buffer("offset", torch.full((4,), 1 / 3))
        self.dtypes: list[torch.dtype] = []
        self.weights: list[torch.dtype] = []
        self.seen: list[tuple[Any, ...]] = []
        self.modes: set[tuple[bool, bool]] = set()

    def predict_step(self, batch: Tensor, batch_idx: int, *where: int) -> Tensor:
        out = self.net(batch)
        self.dtypes.append(out.dtype)
        self.weights.append(self.net.weight.dtype)
        self.seen.append((float(batch[0, 0]), batch_idx, *where))
        self.modes.add((self.training, torch.is_inference_mode_enabled()))
        return out


class Clock:
    """Each call is a second later; and later still where the module computes in float32."""

    def __init__(self, module: Watched) -> None:
        self.module = module

    def __call__(self) -> float:
        return sum(3.0 if dtype is torch.float32 else 2.0 for dtype in self.module.dtypes)


def batches(count: int, size: int = 8) -> list[Tensor]:
    return [torch.full((size, 4), float(number)) for number in range(count)]


def measure(folder: Path, precision: str, count: int = 5, **options: Any) -> tuple[Watched, InferenceSpeed, Any]:
    module = Watched()
    speed = InferenceSpeed(dirpath=folder, **options)
    speed._clock = Clock(module)
    trainer = make_trainer(folder, precision=precision, callbacks=[speed])
    predictions = trainer.predict(module, loader_of(batches(count)))
    return module, speed, predictions


@pytest.mark.parametrize("precision", HALF)
def test_the_same_batches_run_in_turn_in_both_precisions(precision: str, tmp_path: Path):
    module, speed, predictions = measure(tmp_path, precision, batches=2, rounds=3, warmup=1)
    own = HALF[precision]
    assert len(predictions) == 5
    assert module.dtypes[:5] == [own] * 5
    assert module.dtypes[5:] == ([own] * 2 + [torch.float32] * 2) * 4  # one round to warm up
    assert [batch_idx for _, batch_idx in module.seen[5:]] == [0, 1] * 8
    assert [value for value, _ in module.seen[5:]] == [0.0, 1.0] * 8
    assert module.modes == {(False, True)}
    assert speed.result == {
        "precision": precision,
        "seconds": 4.0,
        "seconds_float32": 6.0,
        "samples": 16,
        "samples_per_second": 4.0,
        "samples_per_second_float32": pytest.approx(16 / 6),
        "speed_up": 1.5,
        "batches": 2,
        "rounds": 3,
        "inference_mode": True,
    }
    assert json.loads((tmp_path / "inference_speed.json").read_text()) == speed.result


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_weights_of_sixteen_bits_are_put_back(precision: str, tmp_path: Path):
    module = Watched()
    trainer = make_trainer(tmp_path, precision=precision, callbacks=[InferenceSpeed(1, 1, 0, tmp_path)])
    before = {name: value.to(HALF[precision]) for name, value in module.state_dict().items()}
    trainer.predict(module, loader_of(batches(1)))
    assert module.weights == [HALF[precision]] * 2 + [torch.float32]
    after = module.state_dict()
    assert {name: value.dtype for name, value in after.items()} == dict.fromkeys(before, HALF[precision])
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not any(parameter.is_inference() for parameter in module.parameters())


def test_in_float32_there_is_nothing_to_compare(tmp_path: Path):
    module, speed, _ = measure(tmp_path, "32-true")
    assert len(module.dtypes) == 5
    assert speed.result is None
    assert not (tmp_path / "inference_speed.json").exists()


def test_fewer_batches_than_asked_for_will_do(tmp_path: Path):
    _, speed, _ = measure(tmp_path, "bf16-mixed", count=1, batches=4, rounds=1, warmup=0)
    assert speed.result["batches"] == 1
    assert speed.result["samples"] == 8


def test_batches_of_several_dataloaders_know_theirs(tmp_path: Path):
    module = Watched()
    speed = InferenceSpeed(batches=3, rounds=1, warmup=0, dirpath=tmp_path)
    trainer = make_trainer(tmp_path, precision="bf16-mixed", callbacks=[speed])
    trainer.predict(module, [loader_of(batches(2)), loader_of(batches(2))])
    assert module.seen[4:] == [(0.0, 0, 0), (1.0, 1, 0), (0.0, 0, 1)] * 2


def test_the_inference_mode_is_the_trainers(tmp_path: Path):
    speed = InferenceSpeed(batches=1, rounds=1, warmup=0, dirpath=tmp_path)
    trainer = make_trainer(tmp_path, precision="bf16-mixed", callbacks=[speed], inference_mode=False)
    trainer.predict(Watched(), loader_of(batches(1)))
    assert speed.result["inference_mode"] is False


def test_a_second_prediction_starts_afresh(tmp_path: Path):
    speed = InferenceSpeed(batches=2, rounds=1, warmup=0, dirpath=tmp_path)
    trainer = make_trainer(tmp_path, precision="bf16-mixed", callbacks=[speed])
    trainer.predict(Watched(), loader_of(batches(2)))
    trainer.predict(Watched(), loader_of(batches(1)))
    assert speed.result["batches"] == 1


def test_it_is_said_in_words():
    result = {"precision": "bf16-mixed", "samples_per_second": 1234.56, "samples_per_second_float32": 617.28}
    assert in_words({**result, "speed_up": 2.0, "rounds": 7, "batches": 4}) == (
        "Inference in bf16-mixed: 1,234.6 samples/s; in float32: 617.3; 2.00 times as fast"
        " (medians of 7 rounds of 4 batches)"
    )


@pytest.mark.parametrize("options", [{"batches": 0}, {"rounds": 0}, {"warmup": -1}])
def test_impossible_numbers_are_refused(options: dict[str, int]):
    with pytest.raises(ConfigurationError, match="expected at least 1, 1 and 0"):
        InferenceSpeed(**options)
