"""``tune``: its arguments and settings, and the requests to its processes."""

from pathlib import Path

from tests.cli.conftest import write
from trainer.cli import main, tune
from trainer.cli.parsing import read
from trainer.cli.tune import Settings, bytes_in

LINE = ["+recipe=line"]


def test_sizes():
    sizes = {"3GiB": 3 * 2**30, "1.5 GB": 1_500_000_000, "64kib": 2**16, 4096: 4096, "3g": 3 * 2**30}
    assert {given: bytes_in(given) for given in sizes} == sizes
    assert [bytes_in(given) for given in ("much", "3GiBs", 0, True)] == [None] * 4


def test_torchrun_is_refused(project, capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert main(["tune", "lr", *LINE]) == 2
    assert "Got tune under torchrun" in capsys.readouterr().err


def test_defaults_are_those_of_the_config(project):
    _, settings = tune.composed(read(["tune", "lr", *LINE]))
    assert settings == Settings()


def test_configs_of_the_processes(project):
    callback = "x: {_target_: line_fit.Line, dirpath: '${hydra:runtime.output_dir}/y'}"
    write(Path("conf"), {"callbacks/mine.yaml": callback})
    arguments = read(
        [
            *["tune", "batch_size", *LINE, "callbacks=mine", "trainer.devices=4", "trainer.strategy=ddp"],
            *["trainer.max_epochs=3", "trainer.max_steps=7", "trainer.accumulate_grad_batches=4", "logger=csv"],
            *["+model.copy=${data.batch_size}", "trainer.gradient_clip_val=1.0", "trainer.max_time=00:01:00:00"],
        ]
    )
    config, _ = tune.composed(arguments)
    settings = tune.plain(config, Path("/runs/x"), **{"data.batch_size": 7})
    assert (settings["data"]["batch_size"], settings["model"]["copy"]) == (7, 7)
    assert settings["callbacks"]["x"]["dirpath"] == "/runs/x/y"
    assert (settings["command"], settings["logger"], settings["ckpt_path"]) == ("fit", {}, None)
    trainer = settings["trainer"]
    assert (trainer["devices"], trainer["strategy"], trainer["limit_val_batches"]) == (1, "auto", 0)
    assert (trainer["max_epochs"], trainer["max_steps"], trainer["max_time"]) == (1000, 100_000, None)
    assert (trainer["accumulate_grad_batches"], trainer["gradient_clip_val"]) == (4, 1.0)
    assert trainer["enable_checkpointing"] is trainer["enable_progress_bar"] is False
    assert "hydra" not in settings
    assert config.data.batch_size == 4  # as it was
    config.trainer.max_epochs = config.trainer.max_steps = -1  # without an end
    trainer = tune.plain(config, Path("x"))["trainer"]
    assert (trainer["max_epochs"], trainer["max_steps"]) == (-1, -1)
