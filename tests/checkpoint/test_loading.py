"""Contents of checkpoints, resuming, and conversion between Lightning and us in both directions."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from tests.parity import Classifier, Learner, assert_same_weights, data, lightning, lightnings_noise_ignored, ours
from tests.support import OPTIMIZERS, Regression, assert_identical, loader_of, make_batches, make_trainer, native_fp16
from trainer import Trainer
from trainer.checkpoint import loading as state
from trainer.checkpoint.loading import _keep_implementation
from trainer.errors import CheckpointError
from trainer.precision import MixedPrecision


class Fitted(Classifier):
    """A module with momentum, two schedules, a buffer, random numbers, and optional overflows."""

    def __init__(self, overflow_at: tuple[int, ...] = ()) -> None:
        super().__init__(momentum=0.9)
        self.overflow_at = overflow_at
        self.drop = torch.nn.Dropout(0.3)
        self.register_buffer("batches_seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches_seen += 1
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss * float("inf") if int(self.batches_seen) in self.overflow_at else loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.parameters(), lr=0.01)
        lr = torch.optim.lr_scheduler
        return [first], [
            {"scheduler": lr.StepLR(first, 3, 0.5), "interval": "step"},
            {"scheduler": lr.ReduceLROnPlateau(first, patience=0), "monitor": "val_loss"},
        ]


class Counting(Callback):
    """A callback with state."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


class Shuffles(LightningDataModule):
    """A dataset with a seed that is incremented in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs = 0

    def train_dataloader(self) -> Any:
        return data(12)

    def val_dataloader(self) -> Any:
        return data(4, seed=1)

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs + 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = state_dict["epochs"]


def saved(folder: Path, *, make: Any = ours, module: Any = None, **arguments: Any) -> tuple[Path, Any]:
    """Return the path of a checkpoint written by a fit of ``arguments``, and its Trainer."""
    trainer = make(**{"max_epochs": 1, "callbacks": [Counting()], **arguments})
    trainer.fit(module if module is not None else Fitted(), datamodule=Shuffles())
    path = folder / f"{make.__name__}.ckpt"
    trainer.save_checkpoint(path)
    return path, trainer


def read(path: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    return checkpoint


# --- contents ---------------------------------------------------------------------------------------------------------


def keys(value: Any, depth: int = 6) -> Any:
    """Return the keys of nested dicts."""
    if not isinstance(value, dict) or depth == 0:
        return None
    return {str(key): keys(item, depth - 1) for key, item in value.items()}


def test_keys_are_lightnings_and_one_own(tmp_path: Path) -> None:
    with lightnings_noise_ignored():
        theirs = read(saved(tmp_path, make=lightning)[0])
    mine = read(saved(tmp_path)[0])
    assert mine["loops"].pop(state.OUR_KEY).keys() == {
        "format", "progress", "awaited", "callbacks", "processes", "order", "parameters", "dtypes", "rows",
    }  # fmt: skip
    loops = theirs["loops"]
    # Lightning's dataloader states; we write none, and Lightning does not need them
    loops["fit_loop"]["state_dict"].clear()
    for where in (loops["fit_loop"], loops["validate_loop"], loops["test_loop"], loops["predict_loop"]):
        for name in [name for name in where if name.endswith("state_dict")]:
            where[name] = {k: v for k, v in where[name].items() if k == "_batches_that_stepped"}
    assert keys(mine) == keys(theirs)
    assert mine["pytorch-lightning_version"] == theirs["pytorch-lightning_version"]
    assert (mine["epoch"], mine["global_step"]) == (theirs["epoch"], theirs["global_step"])
    assert mine["hyper_parameters"] == theirs["hyper_parameters"]


def test_counters_are_those_lightning_writes(tmp_path: Path) -> None:
    with lightnings_noise_ignored():
        theirs = read(saved(tmp_path, make=lightning, max_epochs=2)[0])["loops"]["fit_loop"]
    mine = read(saved(tmp_path, max_epochs=2)[0])["loops"]["fit_loop"]
    assert mine["epoch_loop.batch_progress"]["total"] == theirs["epoch_loop.batch_progress"]["total"]
    assert mine["epoch_progress"]["total"]["completed"] == theirs["epoch_progress"]["total"]["completed"] == 2
    step = "epoch_loop.automatic_optimization.optim_progress"
    assert mine[step]["optimizer"]["step"]["total"] == theirs[step]["optimizer"]["step"]["total"]
    stepped = "_batches_that_stepped"
    assert mine["epoch_loop.state_dict"][stepped] == theirs["epoch_loop.state_dict"][stepped] == 12


def test_save_weights_only_omits_the_training_state(tmp_path: Path) -> None:
    _, trainer = saved(tmp_path)
    trainer.save_checkpoint(tmp_path / "w.ckpt", weights_only=True)
    checkpoint = read(tmp_path / "w.ckpt")
    assert not checkpoint.keys() & {"optimizer_states", "lr_schedulers", "callbacks", "MixedPrecision"}
    assert checkpoint["state_dict"].keys() == Fitted().state_dict().keys()


def test_scaler_is_under_lightnings_key(tmp_path: Path) -> None:
    path, trainer = saved(tmp_path, precision=MixedPrecision("float16", init_scale=512.0))
    assert read(path)["MixedPrecision"]["scale"] == 512.0
    assert read(path)["MixedPrecision"]["_growth_tracker"] == 6
    assert trainer.scaler.get_scale() == 512.0


def test_checkpoint_without_loss_scaling_has_no_scaler_state(tmp_path: Path) -> None:
    assert "MixedPrecision" not in read(saved(tmp_path, precision="bf16-mixed")[0])


def test_hooks_may_add_to_a_checkpoint_and_read_it_back(tmp_path: Path) -> None:
    class Module(Fitted):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = 5

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.loaded = checkpoint["mine"]

    class Adds(Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["callback's"] = trainer.global_step

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            self.loaded = checkpoint["callback's"]

    path, _ = saved(tmp_path, module=Module(), callbacks=[Adds()])
    module, callback = Module(), Adds()
    ours(max_epochs=2, callbacks=[callback]).fit(module, datamodule=Shuffles(), ckpt_path=path)
    assert (module.loaded, callback.loaded) == (5, 6)


def test_saving_before_a_run_raises(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="only possible if a model is attached"):
        ours().save_checkpoint(tmp_path / "x.ckpt")


# --- resuming -----------------------------------------------------------------------------------------------------


def state_of(trainer: Any) -> dict[str, Any]:
    """Return all state of a run, except times."""
    checkpoint = copy.deepcopy(trainer._checkpoint_connector.dump_checkpoint())
    checkpoint.pop("loops")
    return checkpoint


class SeededEpochs(Callback):
    """Dropout with a seed per epoch."""

    def on_train_epoch_start(self, trainer: Any, *args: Any) -> None:
        torch.manual_seed(trainer.current_epoch)


PRECISIONS = {
    "32-true": "32-true",
    "bf16-mixed": "bf16-mixed",
    "16-mixed": lambda: MixedPrecision("float16", init_scale=4096.0, growth_interval=4),
    "64-true": "64-true",
}


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_resumed_run_ends_bit_identical_to_an_uninterrupted_one(
    tmp_path: Path, precision: str, accumulate: int
) -> None:
    def make(epochs: int) -> Trainer:
        given = PRECISIONS[precision]
        return ours(
            max_epochs=epochs,
            precision=given() if callable(given) else given,
            callbacks=[Counting(), SeededEpochs(), EarlyStopping("val_loss", patience=10)],
            accumulate_grad_batches=accumulate,
            gradient_clip_val=0.5,
        )

    overflow_at = (2, 6, 14) if precision == "16-mixed" else ()
    whole, module = make(4), Fitted(overflow_at)
    whole.fit(module, datamodule=Shuffles())

    first = make(2)
    first.fit(Fitted(overflow_at), datamodule=Shuffles())
    first.save_checkpoint(tmp_path / "half.ckpt")
    second, resumed = make(4), Fitted(overflow_at)
    datamodule = Shuffles()
    second.fit(resumed, datamodule=datamodule, ckpt_path=tmp_path / "half.ckpt")

    assert_same_weights(module, resumed)
    one, other = state_of(whole), state_of(second)
    assert one.pop("Shuffles") == {"epochs": 1}  # counts resumes
    assert other.pop("Shuffles") == {"epochs": 2}
    assert_identical(one, other)
    assert second.skipped_steps == whole.skipped_steps == {"16-mixed": 3}.get(precision, 0)
    assert second.scaler.get_scale() == whole.scaler.get_scale()
    assert second.global_step == whole.global_step == 4 * (6 if accumulate == 1 else 2)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("interval", [2, 6])
def test_checkpoint_that_modelcheckpoint_wrote_resumes_as_well(tmp_path: Path, interval: int) -> None:
    """ModelCheckpoint writes in ``on_train_epoch_end`` or ``on_validation_end``, when counters are partly updated."""

    def make(epochs: int, *callbacks: Any) -> Trainer:
        kinds = [Counting(), SeededEpochs()]
        return ours(
            max_epochs=epochs, callbacks=[*kinds, *callbacks], enable_checkpointing=None, default_root_dir=tmp_path
        )

    saver = ModelCheckpoint(tmp_path / "kept", save_top_k=-1, filename="{epoch}", save_on_train_epoch_end=interval == 6)
    whole, module = make(3, saver), Fitted()
    whole.fit(module, datamodule=Shuffles())
    for epoch in (0, 1):
        again, resumed = make(3, ModelCheckpoint(tmp_path / "other", save_top_k=0)), Fitted()
        again.fit(resumed, datamodule=Shuffles(), ckpt_path=tmp_path / "kept" / f"epoch={epoch}.ckpt")
        assert_same_weights(module, resumed)
        assert again.global_step == whole.global_step
        assert again.callbacks[0].batches == 18


def test_scaler_object_stays_the_same_over_a_resume(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, precision=MixedPrecision("float16", init_scale=128.0))
    trainer = ours(max_epochs=2, precision="16-mixed", callbacks=[Counting()])
    scaler = trainer.scaler
    seen: list[Any] = []

    class Look(Callback):
        def on_train_start(self, trainer: Any, *args: Any) -> None:
            seen.append((trainer.scaler is scaler, trainer.scaler.get_scale()))

    trainer.callbacks.append(Look())
    trainer.fit(Fitted(), datamodule=Shuffles(), ckpt_path=path)
    assert seen == [(True, 128.0)]


def test_counters_of_a_resumed_run_continue(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, max_epochs=2)
    seen: list[Any] = []

    class Look(Callback):
        def on_train_start(self, trainer: Any, *args: Any) -> None:
            seen.append((trainer.current_epoch, trainer.global_step))

    trainer = ours(max_epochs=3, callbacks=[Look(), Counting()])
    trainer.fit(Fitted(), datamodule=Shuffles(), ckpt_path=path)
    assert seen == [(2, 12)]
    assert (trainer.current_epoch, trainer.global_step) == (3, 18)


def test_validate_and_test_load_the_weights_of_a_checkpoint(tmp_path: Path) -> None:
    path, trainer = saved(tmp_path)
    expected = trainer.validate(datamodule=Shuffles(), ckpt_path=path, verbose=False)
    fresh = ours()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*callbacks used to create the checkpoint")
        assert fresh.validate(Fitted(), datamodule=Shuffles(), ckpt_path=path, verbose=False) == expected
    assert fresh.validate(Fitted(), datamodule=Shuffles(), verbose=False) != expected
    assert fresh.global_step == 0  # an evaluation does not move the counters


def test_callback_that_is_missing_is_named(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    with pytest.warns(UserWarning, match=r"add the following callbacks: \['Counting'\]"):
        ours(max_epochs=2).fit(Fitted(), datamodule=Shuffles(), ckpt_path=path)


# --- both directions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("makers", [(ours, lightning), (lightning, ours)], ids=["ours to theirs", "theirs to ours"])
def test_either_side_resumes_the_others_checkpoint(tmp_path: Path, makers: Any, accumulate: int) -> None:
    def make(maker: Any, epochs: int) -> Any:
        return maker(max_epochs=epochs, callbacks=[Counting(), SeededEpochs()], accumulate_grad_batches=accumulate)

    with lightnings_noise_ignored():
        one, other = makers
        whole, module = make(other, 4), Fitted()
        whole.fit(module, datamodule=Shuffles())
        first = make(one, 2)
        first.fit(Fitted(), datamodule=Shuffles())
        path = tmp_path / "half.ckpt"
        first.save_checkpoint(path)
        second, resumed = make(other, 4), Fitted()
        second.fit(resumed, datamodule=Shuffles(), ckpt_path=path)
    for (name, a), b in zip(module.state_dict().items(), resumed.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")
    assert (second.current_epoch, second.global_step) == (whole.current_epoch, whole.global_step)
    assert second.callbacks[0].batches == 24
    steps = second.fit_loop.epoch_loop._batches_that_stepped
    assert steps == whole.fit_loop.epoch_loop._batches_that_stepped == whole.global_step


class Manual(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@pytest.mark.parametrize("makers", [(ours, lightning), (lightning, ours)], ids=["ours to theirs", "theirs to ours"])
def test_manual_optimization_keeps_its_count_on_the_other_side(tmp_path: Path, makers: Any) -> None:
    with lightnings_noise_ignored():
        first = makers[0](max_epochs=1)
        first.fit(Manual(), data(6))
        first.save_checkpoint(tmp_path / "x.ckpt")
        second = makers[1](max_epochs=2)
        second.fit(Manual(), data(6), ckpt_path=tmp_path / "x.ckpt")
    assert (second.current_epoch, second.global_step) == (2, 6)


def test_lightning_reads_our_scaler_and_we_read_its(tmp_path: Path) -> None:
    """Lightning's plugin needs a GPU to run, but its state dict does not."""
    path, trainer = saved(tmp_path, precision=MixedPrecision("float16", init_scale=256.0))
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(read(path)["MixedPrecision"])
    theirs.scale(torch.ones(()))  # torch makes its tensors at the first use
    assert theirs.get_scale() == 256.0
    checkpoint = read(path)
    checkpoint["MixedPrecision"] = {
        "scale": 64.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 3,
    }  # fmt: skip
    del checkpoint["loops"][state.OUR_KEY]
    torch.save(checkpoint, tmp_path / "theirs.ckpt")
    trainer = ours(max_epochs=2, limit_train_batches=1, precision="16-mixed", callbacks=[Counting()])
    trainer.fit(Fitted(), datamodule=Shuffles(), ckpt_path=tmp_path / "theirs.ckpt")
    assert trainer.scaler.get_scale() == 64.0
    assert trainer.scaler.state_dict()["_growth_tracker"] == 4


def test_load_from_checkpoint_reads_our_files(tmp_path: Path) -> None:
    path, trainer = saved(tmp_path, module=Classifier(learning_rate=0.25))
    module = Classifier.load_from_checkpoint(path)
    assert module.learning_rate == 0.25
    assert_same_weights(module, trainer.lightning_module)


# --- stock callbacks and loggers ----------------------------------------------------------------------------------


class Improves(Classifier):
    """Has a validation loss that falls and rises again."""

    SEQUENCE = [5.0, 3.0, 2.0, 4.0, 6.0, 1.0, 7.0, 8.0]

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.SEQUENCE[self.current_epoch])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("at_the_end", self.SEQUENCE[self.current_epoch])


STOCK: dict[str, tuple[Any, dict[str, Any]]] = {
    "default": (lambda folder: [ModelCheckpoint(folder)], {"max_epochs": 2}),
    "monitor": (lambda folder: [ModelCheckpoint(folder, monitor="val_loss", save_top_k=2)], {"max_epochs": 5}),
    "names, last": (
        lambda folder: [
            ModelCheckpoint(folder, monitor="val_loss", save_last=True, filename="{epoch}-{val_loss:.1f}-{loss:.2f}")
        ],
        {"max_epochs": 4},
    ),
    "link to last": (lambda folder: [ModelCheckpoint(folder, save_last="link")], {"max_epochs": 3}),
    "steps": (lambda folder: [ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)], {"max_epochs": 2}),
    "steps, accumulation": (
        lambda folder: [ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)],
        {"max_epochs": 2, "accumulate_grad_batches": 2},
    ),
    "steps, monitoring training": (
        lambda folder: [ModelCheckpoint(folder, monitor="loss_step", every_n_train_steps=1, save_top_k=2)],
        {"max_epochs": 2},
    ),
    "epochs": (lambda folder: [ModelCheckpoint(folder, every_n_epochs=2, save_top_k=-1)], {"max_epochs": 4}),
    "at the end of training epochs": (
        lambda folder: [ModelCheckpoint(folder, monitor="loss_epoch", save_on_train_epoch_end=True, save_top_k=1)],
        {"max_epochs": 3},
    ),
    "validation in the middle": (
        lambda folder: [ModelCheckpoint(folder, monitor="val_loss", save_top_k=-1)],
        {"max_epochs": 2, "val_check_interval": 2},
    ),
    "early stopping": (
        lambda folder: [ModelCheckpoint(folder), EarlyStopping("val_loss", patience=2)],
        {"max_epochs": 8},
    ),
    "early stopping on training": (
        lambda folder: [ModelCheckpoint(folder), EarlyStopping("loss_epoch", stopping_threshold=10.0)],
        {"max_epochs": 8, "min_epochs": 3},
    ),
    "a metric of the module's on_train_epoch_end": (
        lambda folder: [
            EarlyStopping("at_the_end", patience=1, check_on_train_epoch_end=True),
            ModelCheckpoint(folder, monitor="at_the_end", save_on_train_epoch_end=True),
        ],
        {"max_epochs": 8},
    ),
    "weights only": (lambda folder: [ModelCheckpoint(folder, save_weights_only=True)], {"max_epochs": 2}),
    "two": (
        lambda folder: [
            ModelCheckpoint(folder / "a", monitor="val_loss"), ModelCheckpoint(folder / "b", every_n_train_steps=3)
        ],
        {"max_epochs": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STOCK)
def test_stock_callbacks_write_the_same_files_and_stop_in_the_same_epoch(tmp_path: Path, name: str) -> None:
    make_callbacks, arguments = STOCK[name]
    seen = []
    for make in (lightning, ours):
        folder = tmp_path / make.__name__
        callbacks = make_callbacks(folder)
        with lightnings_noise_ignored():
            trainer = make(callbacks=callbacks, enable_checkpointing=True, default_root_dir=folder, **arguments)
            trainer.fit(Improves(), data(8), data(2, seed=1))
        first = trainer.checkpoint_callback
        seen.append({
            "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()),
            "best": Path(first.best_model_path).name,
            "score": None if first.best_model_score is None else round(float(first.best_model_score), 5),
            "epochs": trainer.current_epoch,
            "steps": trainer.global_step,
            "stopped": getattr(trainer.early_stopping_callback, "stopped_epoch", None),
            "should_stop": trainer.should_stop,
        })  # fmt: skip
    assert seen[0] == seen[1]
    assert seen[1]["files"]


def test_learning_rate_monitor_logs_the_values_of_lightning(tmp_path: Path) -> None:
    from tests.parity import RecordingLogger

    rows = []
    for make in (lightning, ours):
        logger = RecordingLogger()
        with lightnings_noise_ignored():
            trainer = make(
                max_epochs=2,
                callbacks=[LearningRateMonitor()],
                logger=logger,
                log_every_n_steps=1,
                num_sanity_val_steps=0,
            )
            trainer.fit(Fitted(), datamodule=Shuffles())
        rows.append([row for row in logger.rows if "lr-Adam" in row[1]])
    assert rows[0] == rows[1]
    assert len(rows[1]) == 12


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_best_and_last_find_their_files(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True, filename="{epoch}")
    trainer = ours(max_epochs=4, callbacks=[saver], enable_checkpointing=True, default_root_dir=tmp_path)
    module = Improves()
    trainer.fit(module, data(8), data(2, seed=1))
    assert Path(saver.best_model_path).name == "epoch=2.ckpt"
    best = read(Path(saver.best_model_path))["state_dict"]
    trainer.validate(module, data(2), ckpt_path="best", verbose=False)
    assert_identical(dict(module.state_dict()), dict(best))
    with pytest.warns(UserWarning, match="The best model of the previous `fit` call will be used"):
        trainer.validate(dataloaders=data(2), verbose=False)
    trainer.validate(module, data(2), ckpt_path="last", verbose=False)
    assert_identical(dict(module.state_dict()), dict(read(tmp_path / "last.ckpt")["state_dict"]))
    resumed = ours(max_epochs=5, callbacks=[saver], enable_checkpointing=True, default_root_dir=tmp_path)
    resumed.fit(Improves(), data(8), data(2, seed=1), ckpt_path="last")
    assert resumed.global_step == 20


def test_loggers_get_each_row_and_the_hyperparameters(tmp_path: Path) -> None:
    class Tuned(Fitted):
        pass

    trainer = Trainer(
        accelerator="cpu", max_epochs=2, logger=CSVLogger(tmp_path), log_every_n_steps=2,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Tuned(), datamodule=Shuffles())
    folder = tmp_path / "lightning_logs" / "version_0"
    rows = (folder / "metrics.csv").read_text().splitlines()
    assert rows[0].split(",") == ["epoch", "loss_epoch", "loss_step", "step", "val_loss"]
    assert [row.split(",")[3] for row in rows[1:]] == ["1", "3", "5", "5", "5", "7", "9", "11", "11", "11"]
    assert "learning_rate: 0.1" in (folder / "hparams.yaml").read_text()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["epoch=1-step=12.ckpt"]


# --- errors -----------------------------------------------------------------------------------------------------------


def resume(path: Any, module: Any = None, **arguments: Any) -> None:
    trainer = ours(**{"max_epochs": 3, "callbacks": [Counting()], **arguments})
    trainer.fit(module if module is not None else Fitted(), datamodule=Shuffles(), ckpt_path=path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"Checkpoint file not found: .*nothing.ckpt"):
        resume(tmp_path / "nothing.ckpt")


@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, 0.99])
def test_truncated_file(tmp_path: Path, kept: float) -> None:
    path, _ = saved(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with pytest.raises(CheckpointError, match=str(path)):
        resume(path)


def test_file_that_is_not_a_checkpoint(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="is not a checkpoint: it has no 'state_dict'"):
        resume(tmp_path / "a.ckpt")
    (tmp_path / "text.ckpt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"text\.ckpt"):
        resume(tmp_path / "text.ckpt")
    with pytest.raises(CheckpointError, match="is no checkpoint, or was not written to its end: a folder without"):
        resume(tmp_path)


def test_file_of_weights_only(tmp_path: Path) -> None:
    _, trainer = saved(tmp_path)
    trainer.save_checkpoint(tmp_path / "w.ckpt", weights_only=True)
    with pytest.raises(CheckpointError, match="contains only the model"):
        resume(tmp_path / "w.ckpt")


def test_run_that_is_over_already(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, max_epochs=2)
    with pytest.raises(ValueError, match=r"current_epoch=2, but you have set Trainer\(max_epochs=1\)"):
        resume(path, max_epochs=1)
    resume(path, max_epochs=2)  # nothing left to do is no error


def test_another_number_of_optimizers(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)

    class Fewer(Fitted):
        def configure_optimizers(self) -> Any:
            optimizers, schedules = super().configure_optimizers()
            return optimizers, schedules[:1]

    with pytest.raises(CheckpointError, match="has 2 lr_schedulers, but configure_optimizers returned 1"):
        resume(path, Fewer())


def test_another_optimizer(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)

    class Other(Fitted):
        def configure_optimizers(self) -> Any:
            _, schedules = super().configure_optimizers()
            other = torch.optim.Rprop(self.parameters(), lr=0.1)
            for schedule in schedules:
                schedule["scheduler"].optimizer = other
            return [other], schedules

    with pytest.raises(CheckpointError, match=r"is not a Rprop: .* not etas, step_sizes\. Return the same"):
        resume(path, Other())


def test_another_architecture_names_the_keys(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)

    class Wider(Fitted):
        def __init__(self) -> None:
            super().__init__()
            self.extra = torch.nn.Linear(2, 2)

    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict.*extra\.weight"):
        resume(path, Wider())


class Payload:
    """Pickles as a call."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


def test_file_with_code_is_refused_without_running_it(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    checkpoint = read(path)
    checkpoint["payload"] = Payload(tmp_path / "ran")
    torch.save(checkpoint, path)
    with pytest.raises(CheckpointError, match=r"If you created the file yourself.*weights_only=False"):
        resume(path)
    assert not (tmp_path / "ran").exists()
    trainer = ours(max_epochs=2, callbacks=[Counting()])
    with pytest.warns(UserWarning, match="can run any code"):
        trainer.fit(Fitted(), datamodule=Shuffles(), ckpt_path=path, weights_only=False)
    assert (tmp_path / "ran").exists()


def test_best_without_a_best(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`ModelCheckpoint` is not configured"):
        ours().validate(Classifier(), data(2), ckpt_path="best")


def test_last_without_a_last_warns(tmp_path: Path) -> None:
    trainer = ours(
        max_epochs=1, callbacks=[ModelCheckpoint(tmp_path)], enable_checkpointing=True, default_root_dir=tmp_path
    )
    with pytest.warns(UserWarning, match="there is no last checkpoint available"):
        trainer.fit(Fitted(), datamodule=Shuffles(), ckpt_path="last")
    assert trainer.global_step == 6


@pytest.mark.parametrize(("before", "after"), [("adamw", "adamw-fused"), ("adamw-fused", "adamw")])
def test_how_a_step_is_computed_is_the_choice_of_the_run_that_resumes(tmp_path, before, after):
    batches = make_batches(4, gains={2: float("inf")})
    first = make_trainer(tmp_path, precision=native_fp16(init_scale=1024.0), max_steps=1)
    first.fit(Regression(optimizer=OPTIMIZERS[before]), loader_of(batches))
    first.save_checkpoint(tmp_path / "one.ckpt")
    module = Regression(optimizer=OPTIMIZERS[after])
    second = make_trainer(tmp_path, precision=native_fp16(init_scale=1024.0), max_epochs=2)
    second.fit(module, loader_of(batches), ckpt_path=tmp_path / "one.ckpt")
    assert bool(second.optimizers[0].param_groups[0]["fused"]) is after.endswith("fused")
    assert (second.global_step, second.skipped_steps) == (5, 1)
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_device_of_the_learning_rate_and_capturable_are_set_by_the_run() -> None:
    optimizer = torch.optim.Adam([torch.zeros(1)], capturable=True)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    saved = {"param_groups": [{**optimizer.param_groups[0], "lr": torch.tensor(0.2), "capturable": False}]}
    _keep_implementation(optimizer, saved)
    assert saved["param_groups"][0]["lr"].is_meta
    assert saved["param_groups"][0]["capturable"]
