"""Sharded and unsharded checkpoints of two ranks: each strategy resumes from each of them bit for bit."""

import os
import warnings
from functools import cache, partialmethod
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from tests.distributed.worker import BATCH, Shard, Uneven, precision_of, samples
from tests.mixed_states import MixedStates
from tests.support import SavesAt, assert_identical, make_trainer, needs_fsdp2
from trainer import CheckpointFiles, FSDP2Strategy
from trainer.checkpoint import conversion
from trainer.checkpoint import reading as files
from trainer.distributed.sharding import state_dicts

pytestmark = needs_fsdp2

FORMS = {
    "folder": {"sharded": True},
    "folder later": {"sharded": True, "asynchronous": True},
    "bucket": {"sharded": True},
    "file": {},
}
"""How a checkpoint is written."""

OPTIMIZERS = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    "mixed states": MixedStates,
}


class Net(Uneven):
    """Has a buffer, and two groups of parameters. Records whole weights and optimizer states."""

    def __init__(self, optimizer="AdamW fused", none_at=()):
        super().__init__(none_at)
        self.register_buffer("calls", torch.zeros(2))
        self.optimizer = optimizer
        self.at = {}

    def record(self, moment):
        states = {"weights": self.state_dict(), "optimizers": [one.state_dict() for one in self.trainer.optimizers]}
        clone = lambda one: one.clone() if isinstance(one, Tensor) else one  # noqa: E731
        self.at[moment] = torch.utils._pytree.tree_map(clone, state_dicts.gathered(states, keep=True))

    on_train_start = partialmethod(record, "start")
    on_train_end = partialmethod(record, "end")

    def training_step(self, batch, batch_idx):
        self.calls += 1
        return super().training_step(batch, batch_idx) if self.trainer.training else self.loss(batch)

    def test_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self):
        groups = [{"params": list(self.net.parameters())}, {"params": [self.gain], "lr": 0.02}]
        return OPTIMIZERS[self.optimizer](groups)


def fit(folder, engine, form, module, ckpt=None, arguments=(), devices=2):
    """Fit, save every second step, and test the best checkpoint. ``arguments`` may have an ``FSDP2Strategy``."""
    place = f"bucket:/{folder}" if form == "bucket" else folder  # the first is a remote file system for fsspec
    saver = ModelCheckpoint(place, filename="{step}", every_n_train_steps=2, save_top_k=2, monitor="step", mode="max")
    arguments = {"strategy": engine, "max_epochs": 2, **dict(arguments)}
    arguments["precision"] = precision_of(arguments.get("precision", "32-true"))
    with warnings.catch_warnings(action="ignore"):
        trainer = make_trainer(
            folder, devices=devices, limit_train_batches=5, limit_val_batches=0, use_distributed_sampler=False,
            enable_checkpointing=True, plugins=CheckpointFiles(**FORMS[form]),
            **arguments | {"callbacks": [saver, *arguments.get("callbacks", ())]},
        )  # fmt: skip
        loader = DataLoader(samples(), batch_size=BATCH // devices, sampler=Shard(devices))
        trainer.fit(module, loader, ckpt_path=ckpt)
        (tested,) = trainer.test(module, loader, ckpt_path=saver.best_model_path, verbose=False)
    return {**module.at, "best": saver.best_model_path, "tested": tested}


THREE_EPOCHS = {"max_epochs": 3, "exact_resume": False}


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Return the results of each rank for an engine and a form, such as ``"fsdp folder"``, which are run once."""

    def run(name):
        engine, _, form = name.partition(" ")
        folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
        if engine == "single":
            return [fit(folder, "auto", form, Net(), devices=1)]
        return ranks.call(fit, folder, engine, form, Net())

    return cache(run)


def assert_equal(found, expected):
    """Compare weights and optimizer states bit for bit."""
    for key in ("weights", "optimizers"):
        assert_identical(found[key], expected[key])


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("fsdp folder", "fsdp"), ("fsdp folder", "ddp"), ("fsdp folder later", "fsdp"), ("fsdp file", "ddp"),
        ("fsdp bucket", "fsdp"),
        ("ddp folder", "fsdp"), ("ddp file", "fsdp"), ("single folder", "ddp"), ("single file", "fsdp"),
    ],
)  # fmt: skip
def test_two_processes_resume_from_any_checkpoint(ranks, saved, tmp_path, name, engine):
    expected = saved(name)[0]
    for rank in ranks.call(fit, tmp_path, engine, "file", Net(), expected["best"], THREE_EPOCHS):
        assert_equal(rank["start"], expected["end"])
    assert expected["tested"]["loss"] == pytest.approx(saved("single file")[0]["tested"]["loss"], rel=1e-5)


@pytest.mark.parametrize("name", ["fsdp folder", "fsdp file", "ddp folder"])
def test_one_process_resumes_from_any_checkpoint(saved, tmp_path, name):
    expected = saved(name)[0]
    found = fit(tmp_path, "auto", "file", Net(), expected["best"], THREE_EPOCHS, devices=1)
    assert_equal(found["start"], expected["end"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_all_optimizers(ranks, tmp_path, name):
    whole = ranks.call(fit, tmp_path / "w", "fsdp", "folder", Net(name), None, {"max_steps": 2})
    resumed = ranks.call(fit, tmp_path / "r", "fsdp", "file", Net(name), whole[0]["best"], {"max_steps": 3})
    for found, expected in zip(resumed, whole, strict=True):
        assert_equal(found["start"], expected["end"])
        assert not torch.equal(found["end"]["weights"]["gain"], expected["end"]["weights"]["gain"])


def test_sharded_checkpoint_is_a_folder_of_all_ranks(saved):
    path = Path(saved("fsdp folder later")[0]["best"])
    manifest = files.read_manifest(path)
    assert sorted(manifest.files) == [".metadata", "__0_0.distcp", "__1_0.distcp", "state.ckpt"]
    assert {"epoch": 1, "step": 10, "weights_only": False}.items() <= manifest.facts.items()
    assert sorted(os.listdir(path.parent)) == ["step=10.ckpt", "step=8.ckpt"]
    assert files.verify(path.parent / "step=8.ckpt")


def test_checkpoint_in_object_storage_has_the_parts_of_all_ranks(saved):
    url = saved("fsdp bucket")[0]["best"]
    assert url.startswith("bucket://")
    path = Path(url.removeprefix("bucket:/"))
    manifest = files.read_manifest(path)
    assert sorted(manifest.files) == [".metadata", "__0_0.distcp", "__1_0.distcp", "state.ckpt"]
    assert sorted(os.listdir(path.parent)) == ["step=10.ckpt", "step=8.ckpt"]
    assert files.verify(path)


LATE = {(1, 0), (1, 1)}


@pytest.mark.parametrize(
    ("form", "none_at", "sync_each_batch"), [("folder later", (), True), ("folder", (), False), ("file", LATE, False)]
)
def test_open_window_is_resumed(ranks, tmp_path, form, none_at, sync_each_batch):
    """Saved after batch 1 of the second epoch. With ``none_at``, rank 1 had no loss in the window."""
    path, window = tmp_path / "a.ckpt", {"accumulate_grad_batches": 3, "precision": "16-mixed"}

    def run(name, ckpt, **arguments):
        arguments["strategy"] = FSDP2Strategy(sync_each_batch=sync_each_batch)
        return ranks.call(fit, tmp_path / name, "fsdp", form, Net(none_at=none_at), ckpt, window | arguments)

    whole, resumed = run("w", None, callbacks=[SavesAt(path, batches=7)]), run("r", path)
    for found, expected in zip(resumed, whole, strict=True):
        assert_equal(found["end"], expected["end"])
        assert not torch.equal(found["end"]["weights"]["gain"], found["start"]["weights"]["gain"])


def test_conversions_of_a_folder_are_resumed(ranks, saved, tmp_path):
    """All continue as the folder and as an asynchronously written one do."""
    expected = saved("fsdp folder")
    conversion.consolidate(Path(expected[0]["best"]), tmp_path / "a.ckpt")
    conversion.split(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    paths = (expected[0]["best"], saved("fsdp folder later")[0]["best"], tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    ends = []
    for path in paths:
        found = ranks.call(fit, tmp_path / "resumed", "fsdp", "file", Net(), path, {"max_epochs": 3})
        for rank in range(2):
            assert_equal(found[rank]["start"], expected[rank]["end"])
        ends.append(found[0]["end"])
    for end in ends[1:]:
        assert_equal(end, ends[0])
