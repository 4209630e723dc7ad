"""chemprop: message passing on molecules; its command line trains, reads its checkpoints, predicts."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from chemprop import data, models, nn
from chemprop.cli.main import main as command_line
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

REQUIRES = ("chemprop==2.3.1", "rdkit==2026.3.6", "torch==2.15.0", "lightning==2.6.6")

BEGIN = ("C", "O", "N", "c1ccccc1", "N#C", "F", "C=C", "CS")
END = ("C", "CO", "N", "C(=O)O", "c1ccccc1", "C#N", "Cl", "C(C)C", "OC", "C(F)F")
MOLECULES = [f"{begin}C{end}" for begin in BEGIN for end in END]


def targets() -> np.ndarray:
    """Return one number per molecule: a tenth of the length of its SMILES, plus the number of O in it."""
    return np.array([[len(smiles) / 10 + smiles.count("O")] for smiles in MOLECULES], dtype=np.float32)


def loaders() -> tuple[Any, Any, Any, Any]:
    """Return dataloaders for training, validation and test, and the scaler of the targets."""
    points = [data.MoleculeDatapoint.from_smi(one, target) for one, target in zip(MOLECULES, targets(), strict=True)]
    train, val, test = (data.MoleculeDataset(points[part]) for part in (slice(0, 56), slice(56, 68), slice(68, 80)))
    scaler = train.normalize_targets()
    val.normalize_targets(scaler)
    make = data.build_dataloader  # without `seed`: its sampler would have a generator, which Lightning does not restore
    return make(train, batch_size=8), make(val, shuffle=False), make(test, shuffle=False), scaler


def case_api(run: Any) -> None:
    """The Python API: MPNN with metrics, output transform, early stopping, clipping; test, predict, reload, resume"""
    train, val, test, scaler = loaders()

    def model() -> Any:
        transform = nn.UnscaleTransform.from_standard_scaler(scaler)
        head = nn.RegressionFFN(input_dim=32, hidden_dim=16, output_transform=transform)
        passing = nn.BondMessagePassing(d_h=32, depth=2, dropout=0.1)
        metrics = [nn.metrics.RMSE(), nn.metrics.MAE()]
        return models.MPNN(passing, nn.MeanAggregation(), head, batch_norm=True, metrics=metrics, warmup_epochs=1)

    def callbacks() -> list[Any]:
        saver = ModelCheckpoint(run.folder / "checkpoints", monitor="val_loss", save_last=True, save_top_k=-1)
        return [saver, EarlyStopping("val_loss", patience=3)]

    mpnn = model()
    trainer = run.Trainer(max_epochs=3, callbacks=callbacks(), gradient_clip_val=1.0)
    trainer.fit(mpnn, train, val)
    run.keep("test", trainer.test(mpnn, test, weights_only=False, verbose=False))
    run.keep("predicted", trainer.predict(mpnn, test))
    run.keep("best", trainer.predict(dataloaders=test, ckpt_path="best", weights_only=False))
    path = trainer.checkpoint_callback.best_model_path
    again = models.MPNN.load_from_checkpoint(path)
    run.note("reload", "MPNN", {"weights": again.state_dict(), "hyper-parameters": dict(again.hparams)})
    run.weights("from its file", models.MPNN.load_from_file(path))
    models.save_model(run.folder / "saved.pt", again)
    run.weights("saved", models.load_model(run.folder / "saved.pt"))
    with run.resume():
        further = run.Trainer(max_epochs=3, callbacks=callbacks(), gradient_clip_val=1.0)
        first = next((run.folder / "checkpoints").glob("epoch=0-*.ckpt"))
        further.fit(model(), train, val, ckpt_path=first, weights_only=False)


def case_command_line(run: Any) -> None:
    """`chemprop train` on a CSV with two targets, `predict` and `fingerprint` from its checkpoint"""
    csv = run.folder / "molecules.csv"
    rows = [f"{one},{target[0]:.3f},{target[0] * 2 - 1:.3f}" for one, target in zip(MOLECULES, targets(), strict=True)]
    csv.write_text("\n".join(["smiles,size,other", *rows]) + "\n")
    small = "--message-hidden-dim 32 --ffn-hidden-dim 16 --epochs 3 --batch-size 8 --warmup-epochs 1 --grad-clip 1"
    here = "--accelerator cpu --devices 1 --num-workers 0"
    chemprop(f"train -i {csv} -o {run.folder}/model --data-seed 2 --pytorch-seed 3 {small} {here}")
    chemprop(f"predict -i {csv} -o {run.folder}/predicted.csv --model-paths {run.folder}/model/model_0/best.pt {here}")
    from_checkpoint = next((run.folder / "model" / "model_0" / "checkpoints").glob("best*.ckpt"))
    chemprop(f"predict -i {csv} -o {run.folder}/again.csv --model-paths {from_checkpoint} {here}")
    prints = f"{run.folder}/prints.csv --ffn-block-index 0"
    chemprop(f"fingerprint -i {csv} -o {prints} --model-paths {from_checkpoint} {here}")
    for path in sorted(run.folder.rglob("*.csv")):
        run.keep(str(path.relative_to(run.folder)), path.read_text())


def case_foundation(run: Any) -> None:
    """`chemprop train` from a pretrained checkpoint with its encoder frozen, several replicates"""
    csv = run.folder / "molecules.csv"
    rows = [f"{one},{int(target[0] > 1)}" for one, target in zip(MOLECULES, targets(), strict=True)]
    csv.write_text("\n".join(["smiles,oxygen", *rows]) + "\n")
    small = "--message-hidden-dim 32 --ffn-hidden-dim 16 --epochs 2 --batch-size 8 --warmup-epochs 1"
    here = "--accelerator cpu --devices 1 --num-workers 0 -t classification"
    chemprop(f"train -i {csv} -o {run.folder}/first --data-seed 2 --pytorch-seed 3 {small} {here} --class-balance")
    pretrained = next((run.folder / "first").rglob("best*.ckpt"))
    frozen = f"--checkpoint {pretrained} --freeze-encoder --frzn-ffn-layers 1 --num-replicates 2"
    chemprop(f"train -i {csv} -o {run.folder}/second --data-seed 2 --pytorch-seed 3 {small} {here} {frozen}")
    for path in sorted(run.folder.rglob("test_predictions*.csv")):
        run.keep(str(path.relative_to(run.folder)), path.read_text())


def chemprop(words: str) -> None:
    """Run chemprop's command line in this process."""
    before = sys.argv
    sys.argv = ["chemprop", *words.split()]
    try:
        command_line()
    finally:
        sys.argv = before
