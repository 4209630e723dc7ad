"""``model_registry``: ignored without its package, and supported with it."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.parity import Classifier, Learner, data, ours
from trainer.errors import CheckpointError
from trainer.lightning import defaults as registry


def test_without_the_package(tmp_path):
    trainer = ours(model_registry="team/model:v2", enable_checkpointing=True, default_root_dir=tmp_path)
    assert [type(callback) for callback in trainer.checkpoint_callbacks] == [ModelCheckpoint]
    with pytest.raises(CheckpointError, match="registry"):
        trainer.validate(Classifier(), data(4), ckpt_path="registry")


def test_with_the_package(tmp_path, monkeypatch):
    class Uploads(ModelCheckpoint):
        def __init__(self, model_registry):
            super().__init__()
            self.model_registry = model_registry

    def download_model(name, download_dir):
        asked.append(name)
        source.save_checkpoint(Path(download_dir) / "model.ckpt")
        return ["model.ckpt"]

    asked = []
    package, checkpoints = ModuleType("litmodels"), ModuleType("litmodels.integrations.checkpoints")
    vars(package)["download_model"], vars(checkpoints)["LightningModelCheckpoint"] = download_model, Uploads
    for module in (package, ModuleType("litmodels.integrations"), checkpoints):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    connector = "lightning.pytorch.trainer.connectors.checkpoint_connector"
    for place in ("trainer.lightning.checkpoint_connector", connector, "lightning.pytorch.utilities.model_registry"):
        monkeypatch.setattr(f"{place}.module_available", lambda name: True)
    monkeypatch.setattr(registry, "RequirementCache", lambda requirement: True)

    source = ours(max_steps=1, default_root_dir=tmp_path)
    source.fit(Learner(), data(4))
    trainer = ours(model_registry="team/model:v2", enable_checkpointing=True, default_root_dir=tmp_path)
    saver = trainer.checkpoint_callback
    assert (type(saver), saver.model_registry) == (Uploads, "team/model")
    trainer.validate(Classifier(), data(4), ckpt_path="registry", verbose=False)
    assert asked == ["team/model"]
    assert trainer.ckpt_path == str(tmp_path / "team_model" / "model.ckpt")
