"""Checkpoints, and their configs, use no paths outside the working directory."""

import re

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import OmegaConf

from tests.cli.conftest import write
from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer.cli import main
from trainer.cli.config_checks import validate
from trainer.cli.parsing import read
from trainer.errors import ConfigurationError

FIT = ["fit", "+recipe=line"]


ELSEWHERE = [
    ("callbacks: {model_checkpoint: {dirpath: FOLDER}}", "callbacks.model_checkpoint.dirpath"),
    ("callbacks: {model_checkpoint: {dirpath: '${hydra:runtime.output_dir}/../../../x'}}", "checkpoint.dirpath"),
    ("callbacks: {model_checkpoint: {dirpath: '~/x'}}", "callbacks.model_checkpoint.dirpath"),
    ("callbacks: {model_checkpoint: {dirpath: 'file://FOLDER'}}", "callbacks.model_checkpoint.dirpath"),
    ("callbacks: {model_checkpoint: {dirpath: 's3://theirs/x'}}", "callbacks.model_checkpoint.dirpath"),
    ('callbacks: {model_checkpoint: {dirpath: "a\\0b"}}', "callbacks.model_checkpoint.dirpath"),
    ("callbacks: {model_checkpoint: {filename: '../../{epoch}'}}", "callbacks.model_checkpoint.filename"),
    ("logger: {csv: {save_dir: $ELSEWHERE/x}}", "logger.csv.save_dir"),
    ("logger: {csv: {_target_: lightning.pytorch.loggers.CSVLogger, _args_: [FOLDER]}}", "logger.csv._args_[0]"),
    ("trainer: {default_root_dir: FOLDER}", "trainer.default_root_dir"),
    ("name: ../../x", "name"),
    *(
        (
            f"logger: {{m: {{_target_: lightning.pytorch.loggers.MLFlowLogger, tracking_uri: '{uri}'}}}}",
            "logger.m.tracking_uri",
        )
        for uri in ("sqlite:///../x.db", "sqlite:///file:%2Fx?uri=true")
    ),
]


def test_folder_elsewhere_in_the_config_of_a_checkpoint(given, capsys, tmp_path_factory, monkeypatch):
    folder, file = tmp_path_factory.mktemp("elsewhere"), given / ".hydra/config.yaml"
    monkeypatch.setenv("ELSEWHERE", str(folder))
    written = OmegaConf.load(file)
    for text, key in ELSEWHERE:
        OmegaConf.save(OmegaConf.merge(written, OmegaConf.create(text.replace("FOLDER", str(folder)))), file)
        assert main(["test", "ckpt=given"]) == 2, text
        assert f"{key} is " in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_folder_elsewhere_is_allowed_on_the_command_line(given, capsys, tmp_path_factory):
    """The message has the words to add."""
    folder = tmp_path_factory.mktemp("elsewhere")
    file = given / ".hydra/config.yaml"
    OmegaConf.save(
        OmegaConf.merge(OmegaConf.load(file), {"callbacks": {"model_checkpoint": {"dirpath": str(folder)}}}), file
    )
    assert main(["test", "ckpt=given"]) == 2
    word = re.search(r"add it to the command: '(.*)'", capsys.readouterr().err)
    assert main(["test", "ckpt=given", word[1]]) == 0


def test_run_in_a_folder_elsewhere_is_used_and_continued(project, tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere")
    assert main(["fit", "+recipe=line", "+name=a", f"hydra.run.dir={folder}/1"]) == 0
    assert main(["test", f"ckpt={folder}/1"]) == 0
    assert main(["fit", f"ckpt={folder}/1", "trainer.max_epochs=3", f"hydra.run.dir={folder}/2"]) == 0
    assert len(list(folder.glob("1/test/*/run.json"))) == len(list(folder.glob("2/checkpoints/last.ckpt"))) == 1


def test_config_of_the_user_writes_anywhere(project, tmp_path):
    write(project, {"conf/callbacks/mine.yaml": "defaults: [default, _self_]\nmodel_checkpoint: {dirpath: /x}\n"})
    config = validate(read([*FIT, "callbacks=mine", "logger.csv.save_dir=../y", "hydra.run.dir=/somewhere"]))
    assert config.callbacks.model_checkpoint.dirpath == "/x"


def checkpoint_of(folder, change):
    """Return a checkpoint of a fit with the state of its ModelCheckpoint changed by ``change``."""
    saver = ModelCheckpoint(folder, save_top_k=1)
    trainer = make_trainer(folder, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(Regression(), loader_of(make_batches(2)))
    checkpoint = torch.load(saver.best_model_path, weights_only=True)
    change(checkpoint["callbacks"][saver.state_key])
    file = folder / "given.ckpt"
    torch.save(checkpoint, file)
    return file


@pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:Checkpoint directory", "ignore:.*without a model")
def test_best_model_path_of_a_checkpoint_is_not_read(tmp_path):
    victim = tmp_path / "elsewhere/victim.ckpt"
    file = checkpoint_of(tmp_path / "run", lambda state: state.update(best_model_path=str(victim)))
    victim.parent.mkdir()
    victim.write_bytes(file.read_bytes())
    saver = ModelCheckpoint(tmp_path / "run", save_top_k=0)
    trainer = make_trainer(tmp_path, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(Regression(), loader_of(make_batches(2)), ckpt_path=file)
    assert saver.best_model_path == str(victim)
    module = Regression()
    module.validation_step = lambda batch, batch_idx: None
    for given in ({"ckpt_path": "best", "model": module}, {}):
        with pytest.raises(ConfigurationError, match=r"not in a folder of this run.* pass its path"):
            trainer.test(dataloaders=loader_of(make_batches(1)), **given)


@pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore:.*was to be removed")
def test_old_paths_of_a_checkpoint_are_not_removed(tmp_path):
    victims = [tmp_path / "elsewhere" / name for name in ("a.ckpt", "b.ckpt", "c.ckpt")]

    def change(state):
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
