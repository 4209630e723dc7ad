"""The Trainer as Lightning's own parts see it: the attributes they read exist, and say what Lightning's say."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from tests.parity import Classifier, RecordingLogger, data, ours, run_both
from trainer import Trainer

NOT_YET = {"init_module": "makes weights on the device and in the precision's dtype; a later issue's"}
"""Public attributes of Lightning's Trainer that ours lacks, with the reason."""


ATTRIBUTES = [
    "accumulate_grad_batches", "barebones", "callback_metrics", "check_val_every_n_epoch", "ckpt_path", "current_epoch",
    "default_root_dir", "device_ids", "distributed_sampler_kwargs", "enable_autolog_hparams", "enable_validation",
    "estimated_stepping_batches", "evaluating", "fast_dev_run", "global_rank", "global_step", "gradient_clip_val",
    "interrupted", "is_global_zero", "is_last_batch", "limit_predict_batches", "limit_test_batches",
    "limit_train_batches", "limit_val_batches", "local_rank", "log_dir", "log_every_n_steps", "logged_metrics",
    "max_epochs", "max_steps", "min_epochs", "min_steps", "node_rank", "num_devices", "num_nodes",
    "num_predict_batches", "num_sanity_val_batches", "num_sanity_val_steps", "num_test_batches", "num_training_batches",
    "num_val_batches", "overfit_batches", "precision", "predicting", "progress_bar_metrics", "received_sigterm",
    "reload_dataloaders_every_n_epochs", "sanity_checking", "should_stop", "testing", "training", "val_check_batch",
    "val_check_interval", "validating", "world_size",
]  # fmt: skip


def test_every_public_attribute_of_lightnings_trainer_exists() -> None:
    mine, theirs = ours(), LightningTrainer.__dict__
    missing = {
        name
        for name, value in theirs.items()
        if not name.startswith("_") and not hasattr(type(mine), name) and not hasattr(mine, name)
    }
    assert missing == NOT_YET.keys()


OUR_OWN_WAY = {
    "min_steps": "0 where nobody said; Lightning keeps the None",
    "val_check_batch": "set when training begins; Lightning: when the training data is first asked for",
}
WHERE = {
    "min_steps": ("",),
    "val_check_batch": ("validation batch True",),
}


def on_purpose(where: str, name: str) -> bool:
    return name in OUR_OWN_WAY and where.startswith(WHERE[name])


class Reads(Callback):
    """Reads every attribute at every interesting moment."""

    def __init__(self) -> None:
        self.read: dict[str, dict[str, Any]] = {}

    def look(self, where: str, trainer: Any) -> None:
        values: dict[str, Any] = {}
        for name in ATTRIBUTES:
            if name == "estimated_stepping_batches" and where in ("fit start", "test", "predict", "after"):
                continue  # reading it makes Lightning ask for the training data, even where there is none
            value = getattr(trainer, name)
            values[name] = {k: round(float(v), 5) for k, v in value.items()} if name.endswith("_metrics") else value
        self.read[where] = values

    def on_fit_start(self, trainer: Any, *args: Any) -> None:
        self.look("fit start", trainer)

    def on_train_start(self, trainer: Any, *args: Any) -> None:
        self.look("train start", trainer)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.look(f"batch start {trainer.global_step}", trainer)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.look(f"batch end {trainer.global_step}", trainer)

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        self.look(f"validation batch {trainer.sanity_checking} {trainer.global_step}", trainer)

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        self.look(f"epoch end {trainer.current_epoch}", trainer)

    def on_fit_end(self, trainer: Any, *args: Any) -> None:
        self.look("fit end", trainer)

    def on_test_batch_end(self, trainer: Any, *args: Any) -> None:
        self.look("test", trainer)

    def on_predict_batch_end(self, trainer: Any, *args: Any) -> None:
        self.look("predict", trainer)


class Logs(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    test_step = validation_step


@pytest.mark.parametrize(
    "arguments",
    [{}, {"accumulate_grad_batches": 2, "val_check_interval": 2}, {"limit_val_batches": 1, "num_sanity_val_steps": 5}],
    ids=str,
)
def test_attributes_say_what_lightnings_say(arguments: dict[str, Any], tmp_path: Any) -> None:
    def scenario(make: Any) -> Any:
        reads = Reads()
        trainer = make(
            max_epochs=2, callbacks=[reads], default_root_dir=tmp_path, logger=RecordingLogger(), log_every_n_steps=1,
            **arguments,
        )  # fmt: skip
        trainer.fit(Logs(), data(8), data(4))
        trainer.test(Logs(), data(4), verbose=False)
        trainer.predict(Logs(), data(4))
        reads.look("after", trainer)
        return reads.read

    theirs, mine = run_both(scenario)
    assert theirs.keys() == mine.keys()
    different = {
        f"{where}: {name}": (theirs[where][name], mine[where][name])
        for where in theirs
        for name in theirs[where]
        if theirs[where][name] != mine[where][name] and not on_purpose(where, name)
    }
    assert not different


def test_callbacks_are_found_by_kind() -> None:
    early, saver = EarlyStopping("x"), ModelCheckpoint()
    trainer = ours(callbacks=[early, saver], enable_checkpointing=True)
    assert (trainer.early_stopping_callback, trainer.checkpoint_callback) == (early, saver)
    assert (trainer.early_stopping_callbacks, trainer.checkpoint_callbacks) == ([early], [saver])
    assert trainer.progress_bar_callback is None


def test_loggers_may_be_exchanged() -> None:
    trainer, logger = ours(), RecordingLogger()
    assert (trainer.logger, trainer.loggers) == (None, [])
    trainer.logger = logger
    assert (trainer.logger, trainer.loggers) == (logger, [logger])
    trainer.loggers = [logger, RecordingLogger()]
    assert trainer.logger is logger
    trainer.logger = None
    assert trainer.loggers == []


def test_only_rank_zero_prints(capsys: pytest.CaptureFixture[str]) -> None:
    ours().print("hello", end="!")
    assert capsys.readouterr().out == "hello!"


def test_the_base_class_assigns_nothing_itself() -> None:
    """Each attribute that it declares is there after construction."""
    trainer = ours()
    declared = {name for kind in Trainer.__mro__[1:-1] for name in vars(kind).get("__annotations__", {})}
    missing = {name for name in declared if not hasattr(trainer, name)}
    assert not missing
