"""Program of ``test_ray.py`` that runs Ray: ``python ray_worker.py FOLDER`` writes ``result.json``."""

import json
import os
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import lightning
import ray
import torch
from lightning.pytorch import Callback, LightningModule
from ray import train, tune
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import (
    RayDDPStrategy,
    RayFSDPStrategy,
    RayLightningEnvironment,
    RayTrainReportCallback,
    prepare_trainer,
)
from ray.train.torch import TorchTrainer
from ray.tune.integration.pytorch_lightning import TuneReportCallback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainer import Trainer
from trainer.precision import MixedPrecision

QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 2,
}  # fmt: skip


class Regression(LightningModule):
    """Two layers; with ``overflows``, in the third step of the second rank."""

    def __init__(self, lr=0.1, overflows=False):
        super().__init__()
        self.lr, self.overflows = lr, overflows
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        overflows = self.overflows and self.global_rank == 1 and self.global_step == 2 and batch_idx == 2
        return loss * (1e30 if overflows else 1.0)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


def data():
    features = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=4)


class Die(Callback):
    """Ends the second worker after the first epoch of the first attempt."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1 and train.get_checkpoint() is None and trainer.global_rank == 1:
            os._exit(1)


def of_ray(kind=None, **arguments):
    """Return a Trainer as in a worker of Ray Train."""
    trainer = (kind or Trainer)(
        strategy=RayDDPStrategy(), plugins=RayLightningEnvironment(), devices="auto", **QUIET, **arguments
    )
    return prepare_trainer(trainer)


def weights_after(trainer, overflows=False):
    module = Regression(overflows=overflows)
    trainer.fit(module, data(), data())
    return {name: value.clone() for name, value in module.state_dict().items()}


def told(**arguments):
    try:
        Trainer(**QUIET, **arguments).fit(Regression(), data(), data())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def work(config):
    """Run in a worker of Ray Train."""
    warnings.simplefilter("ignore")
    environment = RayLightningEnvironment()
    result = {
        "told": [told(), told(plugins=environment, devices=1), told(plugins=environment, strategy=RayFSDPStrategy())]
    }
    weights = {
        "lightning": weights_after(of_ray(lightning.Trainer)),
        "ours": weights_after(of_ray()),
        "fsdp": weights_after(Trainer(strategy="fsdp", plugins=environment, devices=2, **QUIET)),
    }
    if find_spec("deepspeed") is not None:
        arguments = QUIET | {"strategy": "deepspeed_stage_2", "devices": 2, "enable_checkpointing": False}
        weights["deepspeed"] = weights_after(Trainer(plugins=environment, **arguments))
    trainer = of_ray(precision=MixedPrecision(init_scale=256), callbacks=RayTrainReportCallback())
    weights["reported"] = weights_after(trainer, overflows=True)
    result |= {"world_size": trainer.world_size, "skipped": trainer.skipped_steps}
    rank = train.get_context().get_world_rank()
    Path(config["folder"], f"worker_{rank}.json").write_text(json.dumps(result))
    torch.save(weights, Path(config["folder"], f"worker_{rank}.pt"))


def work_on(config):
    """Run in a worker that fails and is restarted."""
    warnings.simplefilter("ignore")
    trainer = of_ray(precision=MixedPrecision(init_scale=256), callbacks=[RayTrainReportCallback(), Die()])
    module = Regression(overflows=True)
    if (checkpoint := train.get_checkpoint()) is None:
        trainer.fit(module, data(), data())
    else:
        with checkpoint.as_directory() as folder:
            trainer.fit(module, data(), data(), ckpt_path=str(Path(folder, "checkpoint.ckpt")))
    if trainer.is_global_zero:
        torch.save(module.state_dict(), Path(config["folder"], "resumed.pt"))


def trial(config):
    """Run a trial of Ray Tune."""
    warnings.simplefilter("ignore")
    Trainer(**QUIET, callbacks=TuneReportCallback({"val_loss": "val_loss"}, on="validation_end")).fit(
        Regression(config["lr"]), data(), data()
    )


def main(folder):
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    arguments = {
        "train_loop_config": {"folder": folder}, "scaling_config": ScalingConfig(num_workers=2),
    }  # fmt: skip
    storage = f"{folder}/ray"  # file names contain the process id: Ray's callback writes to /tmp
    trained = TorchTrainer(
        work, run_config=RunConfig(storage_path=storage, name=f"train-{os.getpid()}"), **arguments
    ).fit()
    again = RunConfig(storage_path=storage, name=f"resume-{os.getpid()}", failure_config=FailureConfig(max_failures=1))
    TorchTrainer(work_on, run_config=again, **arguments).fit()
    with trained.checkpoint.as_directory() as place:
        checkpoint = torch.load(Path(place, "checkpoint.ckpt"), weights_only=True)
    torch.save(checkpoint, Path(folder, "reported.ckpt"))
    trials = tune.Tuner(
        trial, param_space={"lr": tune.grid_search([0.1, 0.0])},
        run_config=tune.RunConfig(storage_path=storage, name=f"tune-{os.getpid()}"),
    ).fit()  # fmt: skip
    best = trials.get_best_result("val_loss", "min")
    result = {"metrics": trained.metrics, "best": best.config, "trials": len(trials)}
    Path(folder, "result.json").write_text(json.dumps(result, default=str))


if __name__ == "__main__":
    main(sys.argv[1])
