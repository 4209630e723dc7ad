"""LightningCLI builds our Trainer from its command line and its config files, as it builds Lightning's."""

from pathlib import Path

import pytest
import yaml
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy

from tests.lightning.test_defaults import OPTIONS
from trainer import Trainer
from trainer.callbacks import GradientClipping
from trainer.precision import MixedPrecision

pytest.importorskip("jsonargparse", reason="LightningCLI stands on it")
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback

QUIET = OPTIONS | {"enable_progress_bar": False, "max_epochs": 1}


class Model(BoringModel):  # Lightning's demos have no types
    """Logs the metric that EarlyStopping monitors."""

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        self.log("train_loss", output["loss"])
        return output


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Call the command line with arguments and a file with the Trainer's settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # for a method that LightningCLI calls
    monkeypatch.setattr("sys.argv", ["train.py"])  # LightningCLI warns about a command line in addition to `args`

    def call(*argv, trainer_class=Trainer, run=True, **settings):
        Path("settings.yaml").write_text(yaml.safe_dump({"trainer": QUIET | settings}))
        command, arguments = argv[:1] if run else (), argv[1:] if run else argv
        return LightningCLI(
            Model,
            BoringDataModule,
            trainer_class=trainer_class,
            run=run,
            seed_everything_default=1,
            args=[*command, "--config=settings.yaml", *arguments],
        )

    return call


@pytest.mark.filterwarnings(
    "ignore:.*will be overridden by .LightningCLI", "ignore:.*isinstance.treespec", "ignore:The dirpath"
)
def test_fit_then_validate_from_the_checkpoint(call):
    early = {"class_path": "EarlyStopping", "init_args": {"monitor": "train_loss", "check_on_train_epoch_end": True}}
    clipping = {"class_path": "trainer.callbacks.GradientClipping", "init_args": {"max_norm": 1.0}}
    trainer = call(
        "fit", "--trainer.callbacks+=LearningRateMonitor", "--trainer.callbacks.logging_interval=step",
        "--trainer.precision=16-mixed", "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs",
        "--optimizer=Adam", "--optimizer.lr=0.25", callbacks=[early, clipping],
    ).trainer  # fmt: skip
    assert (type(trainer), trainer.precision, trainer.global_step) == (Trainer, "16-mixed", 2)
    wanted = {EarlyStopping, GradientClipping, LearningRateMonitor, SaveConfigCallback}
    assert wanted <= {*map(type, trainer.callbacks)}
    assert isinstance(trainer.logger, CSVLogger)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25
    saved = Path(trainer.log_dir) / "config.yaml"
    assert yaml.safe_load(saved.read_text())["trainer"]["precision"] == "16-mixed"
    again = call("validate", f"--config={saved}", f"--ckpt_path={trainer.checkpoint_callback.best_model_path}").trainer
    assert (again.state.fn, again.precision) == ("validate", "16-mixed")


def test_objects_are_built_from_class_names(call):
    trainer = call(
        "--trainer.profiler=SimpleProfiler", "--trainer.profiler.filename=times",
        "--trainer.strategy=SingleDeviceStrategy", "--trainer.strategy.device=cpu",
        "--trainer.plugins=AsyncCheckpointIO", "--trainer.logger=false",
        "--trainer.precision=trainer.precision.MixedPrecision", "--trainer.precision.dtype=float16",
        "--trainer.precision.init_scale=1024",
        run=False,
    ).trainer  # fmt: skip
    built = (trainer.profiler, trainer.strategy, trainer.strategy.checkpoint_io, trainer.precision_plugin.plugin)
    assert all(map(isinstance, built, (SimpleProfiler, SingleDeviceStrategy, AsyncCheckpointIO, MixedPrecision)))
    assert (trainer.precision, trainer.scaler.get_scale()) == ("16-mixed", 1024)


def test_times_are_written_as_text_or_as_nodes(call):
    for argv, settings in ((), {"minutes": 10}), (("--trainer.val_check_interval=00:00:10:00",), None):
        trainer = call(*argv, run=False, val_check_interval=settings, max_time="00:01:00:00", logger=False).trainer
        assert trainer.loop.limits.val_check_seconds == 600


def test_config_is_printed_as_for_lightnings_trainer(call, capsys):
    printed = []
    for trainer_class in (LightningTrainer, Trainer):
        with pytest.raises(SystemExit) as end:
            call("fit", "--print_config", trainer_class=trainer_class)
        assert end.value.code == 0
        printed.append(yaml.safe_load(capsys.readouterr().out))
    ours = {"resume": None, "exact_resume": True, "dataloader_timeout": 1800.0, "pad_evaluation": False}
    ours |= {"prefetch_batches": 1}
    assert {name: printed[1]["trainer"].pop(name) for name in ours} == ours
    assert printed[0] == printed[1]
