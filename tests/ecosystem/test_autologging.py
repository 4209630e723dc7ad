"""MLflow's automatic logging records the same with our Trainer as with Lightning's."""

PROGRAM = """
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

pandas = sys.modules["pandas"] = ModuleType("pandas")  # MLflow imports it for tables, of which there are none here
pandas.__spec__, pandas.DataFrame, pandas.Series = ModuleSpec("pandas", None), ModuleType, ModuleType

import mlflow.pytorch
import pytest
import torch
from lightning.pytorch import Callback

mlflow.set_tracking_uri("sqlite:///runs.db")
settings = {"log_every_n_step": 2, "log_models": False, "checkpoint_monitor": "val_loss"}
mlflow.pytorch.autolog(**settings)  # before our Trainer is imported

from lightning.pytorch import Trainer as LightningTrainer
from tests.parity import Classifier, QUIET, data, lightnings_noise_ignored
from trainer import Trainer
from trainer.loop.overrides import overrides

class Learner(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", super().validation_step(batch, batch_idx))

class Fails(Callback):
    def on_train_batch_end(self, *_):
        raise ZeroDivisionError

def logged(trainer_class):
    module, trainer = Learner(), trainer_class(**QUIET, max_epochs=2)
    with lightnings_noise_ignored():
        trainer.fit(module, data(8), data(4))
    added = [one for one in trainer.callbacks if type(one).__module__.startswith("mlflow")]
    assert len(added) == 2
    assert not overrides(added[0], "on_before_zero_grad") or trainer_class is LightningTrainer
    run, client = mlflow.last_active_run(), mlflow.MlflowClient()
    file, folder = "checkpoints/latest_checkpoint", trainer_class.__module__
    summary, metrics, saved = (
        mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path=path, dst_path=folder)
        for path in ("model_summary.txt", f"{file}_metrics.json", f"{file}.pth")
    )
    history = {name: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
               for name in run.data.metrics}
    assert torch.load(saved, weights_only=True)["global_step"] in (4, 8)
    with lightnings_noise_ignored(), pytest.raises(ZeroDivisionError):
        trainer_class(**QUIET, max_epochs=1, callbacks=[Fails()]).fit(module, data(8), data(4))
    failed = mlflow.last_active_run()
    texts = [open(path).read() for path in (summary, metrics)]
    return [run.info.status, failed.info.status, run.data.params, history, *texts], torch.load(saved, weights_only=True)

(theirs, saved), (own, own_saved) = logged(LightningTrainer), logged(Trainer)
assert own == theirs
assert own[:2] == ["FINISHED", "FAILED"]
assert own[2]["optimizer_name"] == "SGD"
assert len(own[3]["loss_step"]) == 4
for name, value in saved["state_dict"].items():
    assert torch.equal(own_saved["state_dict"][name], value), name
"""


def test_mlflow_logs_the_same(tmp_path, python_without_lightning):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = python_without_lightning.run("program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
