"""nequip: forces by autograd also in validation, averaged weights swapped by hooks, a loss weighted by callbacks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nequip
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from nequip.scripts.train import main as command_line
from nequip.train import EMALightningModule
from nequip.train.callbacks import LossCoefficientMonitor, SoftAdapt
from nequip.utils.global_state import set_global_state

REQUIRES = ("nequip==0.19.1", "torch==2.15.0", "lightning==2.6.6")
VARIES = (r"generator_state$",)  # Lightning restores the datamodule after it has created its generators

EXAMPLE = Path(nequip.__file__).parent / "utils" / "unittests" / "minimal_toy_emt.yaml"
TRANSFORMS = "nequip.data.transforms."


def datamodule() -> Any:
    """Return a datamodule with frames of copper atoms."""
    transforms = [
        {"_target_": TRANSFORMS + "ChemicalSpeciesToAtomTypeMapper", "model_type_names": ["Cu"]},
        {"_target_": TRANSFORMS + "NeighborListTransform", "r_max": 4.0},
    ]
    frames = {"_target_": "nequip.data.dataset.EMTTestDataset", "supercell": [2, 2, 2], "seed": 1, "num_frames": 30}
    split = {"dataset": {**frames, "element": "Cu", "transforms": transforms}, "train": 18, "val": 6, "test": 6}
    loader = {"_target_": "torch.utils.data.DataLoader", "batch_size": 3}
    config = {f"{stage}_dataloader": loader for stage in ("train", "val", "test")} | {"seed": 1, "split_dataset": split}
    return instantiate({"_target_": "nequip.data.datamodule.NequIPDataModule", **config}, _recursive_=False)


def module(num_datasets: dict[str, int]) -> Any:
    parts = ("total_energy", "forces", "stress")
    metrics = {"_target_": "nequip.train.EnergyForceStressMetrics", "coeffs": {f"{part}_mae": 1.0 for part in parts}}
    sizes = {"l_max": 1, "num_layers": 2, "num_features": 4, "radial_mlp_depth": 1, "radial_mlp_width": 4}
    model = {"_target_": "nequip.model.NequIPGNNModel", "type_names": ["Cu"], "r_max": 4.0, "parity": True, **sizes}
    return EMALightningModule(
        model={**model, "seed": 1, "model_dtype": "float32", "avg_num_neighbors": 18.0},
        loss={"_target_": "nequip.train.EnergyForceStressLoss", "coeffs": dict.fromkeys(parts, 1.0)},
        train_metrics=metrics,
        val_metrics=metrics,
        test_metrics=metrics,
        optimizer={"_target_": "torch.optim.Adam", "lr": 0.01},
        num_datasets=num_datasets,
    )


def case_ema(run: Any) -> None:
    """Averaged weights, accumulation, clipping, adaptive weights of the loss; test, reload, resume"""
    set_global_state()
    options = {"max_epochs": 4, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "inference_mode": False}

    def callbacks() -> list[Any]:
        saver = ModelCheckpoint(run.folder / "checkpoints", monitor="val0_epoch/weighted_sum", save_top_k=-1)
        softly = SoftAdapt(beta=1.1, interval="epoch", frequency=2)
        return [saver, softly, LossCoefficientMonitor("batch", frequency=2)]

    data = datamodule()
    trainer = run.Trainer(callbacks=callbacks(), **options)
    trainer.fit(module(data.num_datasets), datamodule=data)
    run.keep("test", trainer.test(datamodule=data, ckpt_path="best", weights_only=False, verbose=False))
    again = run.reload(EMALightningModule, trainer.checkpoint_callback.best_model_path)
    run.weights("for evaluation", again.evaluation_model)
    with run.resume():
        further, data = run.Trainer(callbacks=callbacks(), **options), datamodule()
        first = next((run.folder / "checkpoints").glob("epoch=0-*.ckpt"))
        further.fit(module(data.num_datasets), datamodule=data, ckpt_path=first, weights_only=False)


def case_command_line(run: Any) -> None:
    """`nequip-train` with its own small example, and the file that it writes in the test"""
    text = EXAMPLE.read_text()
    for old, new in ("s: 50", "s: 30"), ("train: 30", "train: 10"), ("[4, 4, 4]", "[2, 2, 2]"):
        text = text.replace(old, new)
    (run.folder / "config.yaml").write_text(text)
    before, os.environ["TEST_VAL_TWO"] = sys.argv, "2"
    sys.argv = ["nequip-train", "-cp", str(run.folder), "-cn", "config", f"hydra.run.dir={run.folder}/out"]
    try:
        command_line()
    finally:
        sys.argv = before
    for path in sorted(run.folder.rglob("*.xyz")):
        run.keep(path.name, path.read_text())
