"""``consolidate``, ``shard`` and ``export``: bitwise conversion of checkpoints, or an error."""

import pickle
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from _faults.training import differences
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig
from safetensors import SafetensorError
from torch import nn

from tests.checkpoint.test_checkpoint_io import flip
from tests.checkpoint.test_shards import sealed_again, write
from tests.support import Payload, Regression, adamw, assert_identical, loader_of, make_batches, make_net, make_trainer
from trainer import CheckpointFiles
from trainer.checkpoint import conversion, shards
from trainer.checkpoint import reading as files
from trainer.cli import main

BATCHES = make_batches(4)


class Activation:
    """An object."""


class Tied(Regression):
    """Two layers share one weight; the hyperparameters contain an object."""

    def __init__(self, width=6, activation=None):
        super().__init__(make_net(), optimizer=adamw)
        self.save_hyperparameters()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def training_step(self, batch, batch_idx):
        return super().training_step([self.second(self.first(batch[0])), *batch[1:]], batch_idx)

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())


def fit(folder, *, sharded, epochs=2, ckpt=None, module=None):
    """Save in the middle of each epoch. Returns the newest checkpoint and the module. All runs have the same paths."""
    run = folder.parent / "run"
    saver = ModelCheckpoint(run, every_n_train_steps=3, filename="{epoch}-{step}", save_top_k=-1)
    plugins = CheckpointFiles(sharded=sharded)
    trainer = make_trainer(run, callbacks=[saver], enable_checkpointing=True, max_epochs=epochs, plugins=plugins)
    if module is None:
        torch.manual_seed(0)
        module = Tied(activation=Activation())
    trainer.fit(module, loader_of(BATCHES), ckpt_path=ckpt)
    return run.rename(folder) / Path(saver.best_model_path).name, module


def status_and_error(capsys, words):
    """Return the exit status, and the error without the path of the traceback."""
    status = main([str(word) for word in words])
    return status, " ".join(capsys.readouterr().err.replace("--debug prints the full traceback.", "").split())


def tree(folder):
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


def load(file):
    return torch.load(file, weights_only=True)


# --- round trips ------------------------------------------------------------------------------------------------------


def test_folder_of_a_run_is_the_file_of_that_run(tmp_path, capsys):
    folder, _ = fit(tmp_path / "folder", sharded=True)
    assert folder.name == "epoch=1-step=6.ckpt"  # an = in a name makes it no setting
    assert main(["consolidate", str(folder), str(tmp_path / "new" / "whole.ckpt")]) == 0
    whole = tmp_path / "new" / "whole.ckpt"
    out = capsys.readouterr().out
    assert out.startswith(f"Wrote {whole}: 0.0 MiB in ")
    assert "Left out, because objects are not constructed" in out
    assert out.endswith(": hyper_parameters.activation.\n")
    file, _ = fit(tmp_path / "file", sharded=False)
    made, direct = load(whole), with_object(file)
    assert differences({name: made[name] for name in SAME}, {name: direct[name] for name in SAME}) == []
    assert made["hyper_parameters"] == {"width": 6}
    assert files.read_manifest(whole).facts == files.read_manifest(file).facts
    assert Tied.load_from_checkpoint(whole).hparams == {"width": 6, "activation": None}
    _, left_alone = fit(tmp_path / "alone", sharded=True, epochs=3)
    for ckpt in (folder, whole):
        _, again = fit(tmp_path / f"from {ckpt.name}", sharded=False, epochs=3, ckpt=ckpt, module=Tied())
        assert_identical(dict(again.state_dict()), dict(left_alone.state_dict()))


SAME = ("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers", "loops")


def with_object(file):
    """Return a file with an object among its hyperparameters."""
    with torch.serialization.safe_globals([Activation]):
        return load(file)


@pytest.mark.parametrize("weights_only", [False, True])
def test_to_a_folder_and_back(tmp_path, weights_only):
    saved, _ = fit(tmp_path / "saved", sharded=True, epochs=1)
    first, folder, second = tmp_path / "first.ckpt", tmp_path / "folder.ckpt", tmp_path / "second.ckpt"
    if weights_only:
        state = {"state_dict": shards.read_whole(saved)["state_dict"]}
        torch.save(state, first, _use_new_zipfile_serialization=False)  # of an old torch, without a manifest
    else:
        assert main(["consolidate", str(saved), str(first)]) == 0
    assert main(["shard", str(first), str(folder)]) == 0
    assert files.verify(folder)
    assert main(["consolidate", str(folder), str(second)]) == 0
    assert files.verify(second)
    assert_identical(load(second), load(first))
    for one in (folder, second):
        assert files.read_manifest(one).resumable is not weights_only
    assert torch.equal(load(second)["state_dict"]["second.weight"], load(second)["state_dict"]["first.weight"])


# --- safetensors ------------------------------------------------------------------------------------------------------


def test_safetensors_are_the_state_dict(tmp_path, capsys):
    load_file = pytest.importorskip("safetensors.torch").load_file
    saved, module = fit(tmp_path / "saved", sharded=True, epochs=1)
    fitted = shards.read_whole(saved)["state_dict"]
    out = tmp_path / "all.safetensors"
    assert main(["export", f"ckpt={saved}", f"to={out}"]) == 0
    assert capsys.readouterr().out.endswith(f" {len(module.state_dict())} tensors.\n")
    found = load_file(out)
    assert_identical(dict(sorted(found.items())), dict(sorted(fitted.items())))
    fresh = Tied()
    fresh.load_state_dict(found)  # strict, tied weights under both names
    assert fresh.second.weight is fresh.first.weight
    assert torch.equal(fresh.first.weight, fitted["second.weight"])
    assert main(["export", f"ckpt={saved}", f"to={tmp_path}/net.safetensors", "prefix=net."]) == 0
    net = make_net(seed=1)
    net.load_state_dict(load_file(tmp_path / "net.safetensors"))
    expected = {n.removeprefix("net."): v for n, v in fitted.items() if n.startswith("net.")}
    assert_identical(dict(net.state_dict()), expected)


def test_views_are_exported_with_their_values(tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    complex_, other = (torch.tensor([1 + 2j, 3 - 1j]) for _ in range(2))
    weights = {
        "conj": complex_.conj(), "neg": other.conj().imag, "rows": torch.arange(8.0).view(4, 2)[1:3],
        "columns": torch.arange(8.0).view(4, 2)[:, 1], "empty": torch.empty(0, 2), "number": torch.tensor(3),
        "half": torch.ones(2, dtype=torch.bfloat16),
    }  # fmt: skip
    torch.save({"state_dict": {**weights, "_extra_state": {"a": 1}}}, tmp_path / "w.ckpt")
    assert main(["export", f"ckpt={tmp_path}/w.ckpt", f"to={tmp_path}/w.safetensors"]) == 0
    assert_identical(dict(sorted(load_file(tmp_path / "w.safetensors").items())), dict(sorted(weights.items())))


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with valid and invalid checkpoints."""
    monkeypatch.chdir(tmp_path)
    write(Path("good.ckpt"))
    assert main(["consolidate", "good.ckpt", "file.ckpt"]) == 0
    for name in ("torn", "flipped", "evil", "pickle"):
        shutil.copytree("good.ckpt", f"{name}.ckpt")
    Path("torn.ckpt/manifest.json").unlink()
    shutil.copy("file.ckpt", "bit.ckpt")
    for damaged in ("bit.ckpt", "flipped.ckpt/__0_0.distcp"):
        flip(damaged)
    torch.save({"state_dict": {}, "loops": {}, "evil": Payload(tmp_path / "ran")}, "evil.ckpt/state.ckpt")
    Path("pickle.ckpt/.metadata").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    sealed_again(Path("evil.ckpt"))
    sealed_again(Path("pickle.ckpt"))
    torch.save({"state_dict": {"a": torch.ones(1)}, "evil": Payload(tmp_path / "ran")}, "stranger.ckpt")
    torch.save({"state_dict": {"wide": torch.ones(2, dtype=torch.complex128)}}, "wide.ckpt")
    Path("text.ckpt").write_text("a text")
    Path("run").mkdir()
    return tmp_path


REFUSED = [
    ("consolidate", "expected a sharded checkpoint and the file to write"),
    ("consolidate god.ckpt new", "consolidate got god.ckpt, expected a sharded checkpoint"),
    ("consolidate torn.ckpt new", "consolidate got torn.ckpt, expected .*, a folder with a manifest.json."),
    ("consolidate evil.ckpt new", r"evil.ckpt contains more than tensors .* torch.load\(..., weights_only=False\)"),
    ("consolidate pickle.ckpt new", "pickle.ckpt contains more .*: its .metadata refers to posix.system, which is"),
    ("consolidate good.ckpt file.ckpt", "file.ckpt exists already. Choose another name, or remove it first."),
    ("consolidate good.ckpt text.ckpt/new", "text.ckpt/new cannot be written: text.ckpt is a file, expected a folder."),
    ("consolidate good.ckpt new more", "Got the word 'more'"),
    ("shard", "expected a checkpoint and the folder to write: .* shard --help"),
    ("shard good.ckpt new", "shard got good.ckpt, which is a folder or missing, expected a checkpoint"),
    ("shard text.ckpt new", "text.ckpt is not a checkpoint: torch.save did not write this file"),
    ("shard stranger.ckpt new", "stranger.ckpt contains more than tensors and plain containers, "),
    ("export ckpt=run to=new.safetensors", "ckpt is run, a folder without checkpoints."),
    ("export ckpt=flipped.ckpt to=new.safetensors", "flipped.ckpt is damaged: the bytes of __0_0.distcp"),
    ("export ckpt=bit.ckpt to=new.safetensors", r"bit.ckpt is damaged: .* bytes .*are not those that were written"),
    ("export ckpt=wide.ckpt to=new.safetensors", r"does not support wide \(complex128, strided\). Leave it out"),
    ("export ckpt=good.ckpt to=new.safetensors prefix=net.", "good.ckpt has no weights .* start with 'net.'; it has w"),
]  # fmt: skip


def test_mistakes_print_one_sentence_and_change_nothing(here, capsys):
    before = tree(here)
    for line, complaint in REFUSED:
        status, error = status_and_error(capsys, line.split())
        assert status == 2, line
        assert re.search(complaint, error), error
        assert "Traceback" not in error
        assert tree(here) == before
        assert not (here / "ran").exists()


def test_failed_write_leaves_no_file(here, capsys, monkeypatch):
    full = "No space left on device"
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(28, full)))
    monkeypatch.setattr("safetensors.torch.save_file", Mock(side_effect=SafetensorError(full)))  # it is not an OSError
    before = tree(here)
    for line in ("consolidate good.ckpt new", "shard file.ckpt new", "export ckpt=good.ckpt to=new.safetensors"):
        status, error = status_and_error(capsys, line.split())
        assert (status, "new" in error, "was not written: No space left on device" in error) == (1, True, True), error
        assert tree(here) == before


def test_hyperparameters_that_are_one_object_are_left_out(tmp_path):
    """As those of a module that saves a DictConfig."""

    class Configured(Regression):
        def __init__(self, config=None):
            super().__init__()
            self.save_hyperparameters(config)

    trainer = make_trainer(tmp_path)
    trainer.fit(Configured(DictConfig({"width": 6})), loader_of(BATCHES))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert sorted(conversion.split(tmp_path / "a.ckpt", tmp_path / "b.ckpt")) == ["hparams_type", "hyper_parameters"]
    assert "hyper_parameters" not in shards.read_whole(tmp_path / "b.ckpt")
