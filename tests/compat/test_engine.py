"""The engine over Lightning's strategies: what it accepts, and what it shows of a single device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.parity import Learner, data, ours
from trainer.compat.engine import LightningEngine
from trainer.errors import PrecisionError, UnsupportedError


def engine_of(**options: Any) -> LightningEngine:
    return ours(**options).engine


def test_one_device() -> None:
    engine = engine_of()
    assert engine.device == torch.device("cpu")
    assert (engine.world_size, engine.global_rank) == (1, 0)
    assert engine.launch(lambda a, b: (a, b), 1, 2) == (1, 2)
    assert engine.any_rank(True) is True
    assert engine.any_rank(False) is False
    assert engine.broadcast("x") == "x"
    assert engine.reduce(torch.tensor(2.0), "sum") == 2.0
    with engine.gradient_sync(False):
        pass


@pytest.mark.parametrize("strategy", ["ddp", "ddp_find_unused_parameters_true", DDPStrategy()], ids=str)
def test_ddp_by_name_and_by_object(strategy: Any) -> None:
    engine = engine_of(strategy=strategy, devices=2)
    assert isinstance(engine.strategy, DDPStrategy)
    assert engine.world_size == 2
    if isinstance(strategy, DDPStrategy):
        assert engine.strategy is strategy


def test_a_strategy_object_keeps_its_settings() -> None:
    strategy = DDPStrategy(find_unused_parameters=True, gradient_as_bucket_view=True)
    assert engine_of(strategy=strategy, devices=2).strategy._ddp_kwargs == {
        "find_unused_parameters": True,
        "gradient_as_bucket_view": True,
    }


@pytest.mark.parametrize(
    "options",
    [
        {"plugins": MixedPrecision("bf16-mixed", "cpu")},
        {"plugins": [MixedPrecision("bf16-mixed", "cpu")]},
        {"strategy": SingleDeviceStrategy(torch.device("cpu"), precision_plugin=MixedPrecision("bf16-mixed", "cpu"))},
        {"precision": MixedPrecision("bf16-mixed", "cpu")},
    ],
    ids=["plugin", "plugins", "strategy", "precision"],
)
def test_lightnings_precision_is_refused_wherever_it_comes_from(options: dict[str, Any]) -> None:
    with pytest.raises(PrecisionError, match=r"trainer\.precision"):
        ours(**options)


def test_sharded_strategies_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"becomes ModelParallelStrategy.*use strategy='ddp'"):
        ours(strategy=ModelParallelStrategy(), devices=2)
    with pytest.raises((UnsupportedError, MisconfigurationException, ValueError), match="FSDP"):
        ours(strategy=FSDPStrategy(), devices=2)


def test_checkpoint_io_plugins_are_used(tmp_path: Path) -> None:
    class Notes(TorchCheckpointIO):
        written: list[str] = []

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            self.written.append(Path(path).name)
            super().save_checkpoint(checkpoint, path, storage_options)

    trainer = ours(max_epochs=1, plugins=[Notes()])
    trainer.fit(Learner(), data(4))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert Notes.written == ["a.ckpt"]
    assert (tmp_path / "a.ckpt").exists()


def test_an_asynchronous_checkpoint_io_works(tmp_path: Path) -> None:
    trainer = ours(max_epochs=1, plugins=AsyncCheckpointIO())
    trainer.fit(Learner(), data(4))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.strategy.checkpoint_io.teardown()
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["global_step"] == 2


def test_a_step_that_takes_no_batch_idx_gets_none() -> None:
    class Bare(Learner):
        def training_step(self, batch: Any) -> Any:
            return self.loss(batch)

    trainer = ours(max_epochs=1)
    trainer.fit(Bare(), data(4))
    assert trainer.global_step == 2


def test_the_optimizers_are_bare_and_live() -> None:
    trainer = ours(max_epochs=1)
    assert trainer.optimizers == []

    class Look(Learner):
        def on_train_start(self) -> None:
            assert type(self.trainer.optimizers[0]) is torch.optim.SGD
            assert self.trainer.optimizers is self.trainer.strategy.optimizers
            assert self.optimizers().optimizer is self.trainer.optimizers[0]

    trainer.fit(Look(), data(4))
