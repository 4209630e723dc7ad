"""Names in configs and checkpoints do not lead out of the run's folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.cli.conftest import write
from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer.cli import main
from trainer.cli.arguments import UsageError, read
from trainer.cli.compose import Composer
from trainer.cli.validate import validate
from trainer.errors import ConfigurationError

FIT = ["fit", "+recipe=line"]


@pytest.mark.parametrize(
    "words",
    [
        ["fit", "+recipe=../../elsewhere"], ["fit", "+recipe=/etc/elsewhere"], ["fit", "+recipe=line/../../elsewhere"],
        [*FIT, "data=../model/line"], [*FIT, "-m", "optimizer=sgd,../evil"],
        [*FIT, "logger.csv.name=../../x"], [*FIT, "logger.csv.name=/x"], [*FIT, "logger.csv.version=a/../../x"],
        [*FIT, "callbacks.model_checkpoint.filename=../../../x"],
        [*FIT, "callbacks.model_checkpoint.filename='/x/e'"],
        [*FIT, "+logger.tensorboard.sub_dir=../x"], [*FIT, "+name=../../../x"], [*FIT, "hydra.job.name=../x"],
    ],
)  # fmt: skip
def test_names_on_the_command_line(project, capsys, words):
    around = set(project.parent.rglob("*"))
    assert main(words) == 2
    err = capsys.readouterr().err
    assert "expected" in err or "not in the working directory" in err
    assert set(project.parent.rglob("*")) == around


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("callbacks: {model_checkpoint: {dirpath: FOLDER}}", "callbacks.model_checkpoint.dirpath"),
        (
            "callbacks: {model_checkpoint: {dirpath: '${hydra:runtime.output_dir}/../../../x'}}",
            "model_checkpoint.dirpath",
        ),
        ("callbacks: {model_checkpoint: {dirpath: '~/x'}}", "callbacks.model_checkpoint.dirpath"),
        ("logger: {csv: {save_dir: ../x}}", "logger.csv.save_dir"),
        ("logger: {csv: {name: ../../x}}", "logger.csv.name"),
        ("trainer: {default_root_dir: FOLDER}", "trainer.default_root_dir"),
        (
            "trainer: {profiler: {_target_: lightning.pytorch.profilers.SimpleProfiler, dirpath: ../}}",
            "profiler.dirpath",
        ),
        ("callbacks: {model_checkpoint: {filename: '../{epoch}'}}", "callbacks.model_checkpoint.filename"),
        ("callbacks: {model_checkpoint: {dirpath: 'file://FOLDER'}}", "callbacks.model_checkpoint.dirpath"),
        ("callbacks: {model_checkpoint: {dirpath: 'local://FOLDER'}}", "callbacks.model_checkpoint.dirpath"),
        ("callbacks: {model_checkpoint: {dirpath: 'filecache::file://FOLDER'}}", "callbacks.model_checkpoint.dirpath"),
        ("callbacks: {model_checkpoint: {dirpath: 's3://theirs/x'}}", "callbacks.model_checkpoint.dirpath"),
        ("callbacks: {model_checkpoint: {dirpath: '~nobody-at-all/x'}}", "callbacks.model_checkpoint.dirpath"),
        ('callbacks: {model_checkpoint: {dirpath: "a\\0b"}}', "callbacks.model_checkpoint.dirpath"),
        ('callbacks: {model_checkpoint: {filename: "a\\nb"}}', "callbacks.model_checkpoint.filename"),
        ("logger: {csv: {save_dir: $ELSEWHERE/x}}", "logger.csv.save_dir"),
        ("logger: {csv: {name: $ELSEWHERE}}", "logger.csv.name"),
        (
            "logger: {x: {_target_: lightning.pytorch.loggers.CSVLogger, _args_: [FOLDER]}}",
            "logger.x._args_[0]",
        ),
        ("callbacks: {x: {_target_: trainer.callbacks.Curves, _args_: [../x]}}", "callbacks.x._args_[0]"),
        (
            "callbacks: {x: {_target_: lightning.pytorch.callbacks.SpikeDetection, exclude_batches_path: line_fit.py}}",
            "callbacks.x.exclude_batches_path",
        ),
        (
            "logger: {x: {_target_: lightning.pytorch.loggers.MLFlowLogger, tracking_uri: 'file:FOLDER'}}",
            "logger.x.tracking_uri",
        ),
        (
            "logger: {x: {_target_: lightning.pytorch.loggers.MLFlowLogger, artifact_location: FOLDER}}",
            "logger.x.artifact_location",
        ),
        (
            "hydra: {mode: MULTIRUN, sweeper: {params: {callbacks.model_checkpoint.dirpath: 'x,FOLDER'}}}",
            "hydra.sweeper.params sweeps over callbacks.model_checkpoint.dirpath",
        ),
    ],
)
def test_names_and_folders_in_a_file(project, capsys, tmp_path_factory, monkeypatch, text, key):
    folder = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.setenv("ELSEWHERE", str(folder))
    text = text.replace("FOLDER", str(folder))
    write(project, {"conf/recipe/evil.yaml": f"# @package _global_\ndefaults: [line]\n{text}\n"})
    assert main(["fit", "+recipe=evil"]) == 2
    assert key in capsys.readouterr().err
    assert not (project / "outputs").exists()
    assert list(folder.iterdir()) == []


def test_folders_that_the_user_chooses_are_theirs(project, tmp_path):
    for words in (
        ["callbacks.model_checkpoint.dirpath=/x", "logger.csv.save_dir=../y", "trainer.default_root_dir=/z"],
        ["hydra.run.dir=/somewhere", "callbacks.model_checkpoint.dirpath=s3://bucket/x"],
        ["callbacks.model_checkpoint.filename='{epoch}/{val/loss:.2f}'", "logger.csv.name=a/b", "+name=a.b"],
    ):
        validate(read([*FIT, *words]))
    write(project, {"conf/callbacks/mine.yaml": "defaults: [default, _self_]\nmodel_checkpoint: {dirpath: /x}\n"})
    with pytest.raises(UsageError, match="not in the working directory"):
        validate(read([*FIT, "callbacks=mine"]))  # a choice of a file is none of a folder
    validate(read([*FIT, "callbacks=mine", "callbacks.model_checkpoint.dirpath=/y"]))


def test_what_stays_here_or_is_no_folder_may_be_in_a_file(project):
    write(
        project,
        {
            "mine.py": "import lightning\n\nclass Reads(lightning.Callback):\n    def __init__(self, table): ...\n",
            "conf/recipe/mine.yaml": """
                # @package _global_
                defaults: [line]
                callbacks:
                  model_checkpoint: {dirpath: file:./kept, filename: "{epoch}/{val/loss:.2f}", monitor: val/loss}
                  reads: {_target_: mine.Reads, table: /data/table.csv}
                logger:
                  csv: {save_dir: a/b/../c, name: x$y}
                  mlflow: {_target_: lightning.pytorch.loggers.MLFlowLogger, tracking_uri: "http://localhost:5000"}
                trainer: {max_time: 00:12:00:00, default_root_dir: "${hydra:runtime.output_dir}/x"}
            """,
        },
    )
    validate(read(["fit", "+recipe=mine"]))


@pytest.mark.parametrize("given", ["/../../given/secret@x", "../../../given/secret@x", "/../../given@x: secret"])
@pytest.mark.parametrize("words", [["--cfg", "job"], []])
def test_a_list_of_defaults_reads_no_other_files(project, capsys, tmp_path_factory, given, words):
    """They would be in the dump of the config, and in checkpoints."""
    write(project.parent, {"given/secret.yaml": "token: hunter2\n"})
    write(project, {"conf/recipe/evil.yaml": f"# @package _global_\ndefaults: [line, {given}]\n"})
    assert main(["fit", "+recipe=evil", *words]) == 2
    out, err = capsys.readouterr()
    assert "given/secret, which is outside of the folders of configs" in err
    assert "hunter2" not in out + err


def test_but_those_of_the_folder_of_configs_by_any_path(project):
    write(project, {"conf/recipe/mine.yaml": "# @package _global_\ndefaults: [line, /recipe/../data/points@more]\n"})
    assert Composer(read(["fit"])).compose(["+recipe=mine"]).more.batch_size == 4


def checkpoint_of(folder: Path, change: Any) -> Path:
    """A checkpoint of a fit, after ``change`` was made to the state of its ModelCheckpoint."""
    saver = ModelCheckpoint(folder, save_top_k=1)
    trainer = make_trainer(folder, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(Regression(), loader_of(make_batches(2)))
    checkpoint = torch.load(saver.best_model_path, weights_only=True)
    change(checkpoint["callbacks"][saver.state_key])
    file = folder / "given.ckpt"
    torch.save(checkpoint, file)
    return file


@pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:Checkpoint directory", "ignore:.*without a model")
@pytest.mark.parametrize("same_folder", [True, False])
def test_what_a_checkpoint_calls_the_best_one_is_not_read(tmp_path, same_folder):
    victim = tmp_path / "elsewhere/victim.ckpt"
    file = checkpoint_of(tmp_path / "run", lambda state: state.update(best_model_path=str(victim)))
    victim.parent.mkdir()
    victim.write_bytes(file.read_bytes())
    saver = ModelCheckpoint(tmp_path / ("run" if same_folder else "other"), save_top_k=0)
    trainer = make_trainer(tmp_path, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(Regression(), loader_of(make_batches(2)), ckpt_path=file)
    assert saver.best_model_path == str(victim)
    module = Regression()
    module.validation_step = lambda batch, batch_idx: None
    for given in ({"ckpt_path": "best", "model": module}, {}):
        with pytest.raises(ConfigurationError, match=r"none of this run's folders.*, pass its path"):
            trainer.test(dataloaders=loader_of(make_batches(1)), **given)


@pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore:.*was to be removed")
def test_nor_is_what_it_calls_old_removed(tmp_path):
    victims = [tmp_path / "elsewhere" / name for name in ("a.ckpt", "b.ckpt", "c.ckpt")]

    def change(state: dict[str, Any]) -> None:
        a, b, c = map(str, victims)
        state.update(best_model_path=a, last_model_path=b, kth_best_model_path=c, best_k_models={c: torch.tensor(0.0)})

    file = checkpoint_of(tmp_path / "run", change)
    victims[0].parent.mkdir()
    for victim in victims:
        victim.write_bytes(file.read_bytes())
    saver = ModelCheckpoint(tmp_path / "run", save_top_k=1, save_last=True)
    trainer = make_trainer(tmp_path, callbacks=[saver], enable_checkpointing=True, max_epochs=3)
    trainer.fit(Regression(), loader_of(make_batches(2)), ckpt_path=file)
    assert all(victim.exists() for victim in victims)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_the_best_one_of_the_resumed_run_is_read_as_ever(tmp_path):
    file = checkpoint_of(tmp_path / "run", lambda state: None)
    saver = ModelCheckpoint(tmp_path / "run", save_top_k=1)
    trainer = make_trainer(tmp_path, callbacks=[saver], enable_checkpointing=True)
    module = Regression()
    trainer.fit(module, loader_of(make_batches(2)), ckpt_path=file)
    module.test_step = module.training_step
    trainer.test(module, loader_of(make_batches(1)), ckpt_path="best", verbose=False)
    assert Path(trainer.ckpt_path).parent == tmp_path / "run"
