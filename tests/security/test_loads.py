"""A malicious pickle in each place that is loaded: its code does not run."""

import pickle
import tarfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.connectors import checkpoint_connector
from lightning.pytorch.tuner import Tuner

from tests.parity import Classifier, data
from tests.support import Payload, make_trainer
from trainer import Trainer
from trainer.errors import CheckpointError, UnsafeCheckpointError
from trainer.lightning import checkpoint_connector as checkpoints

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")


@pytest.fixture(autouse=True)
def careless(monkeypatch):
    """Set the variable that changes torch's default to weights_only=False, so that each call must pass True."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")


@pytest.fixture
def proof(tmp_path):
    return tmp_path / "pwned"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Write a good checkpoint."""
    trainer = make_trainer(tmp_path_factory.mktemp("good"))
    trainer.fit(Classifier(), data(2), data(2))
    return trainer._checkpoint_connector.dump_checkpoint()


def with_payload(checkpoint, place, payload):
    if not place:
        return payload
    name, *inner = place
    return checkpoint | {name: with_payload(checkpoint.get(name, {}), inner, payload)}


ENTRIES = ["state_dict", "optimizer_states", "loops", "pytorch-lightning_version", "hyper_parameters", "hparams_type"]


@pytest.mark.parametrize("place", ["", *ENTRIES, "rng", "loops amp_trainer", "callbacks ModelCheckpoint"])
def test_every_place_in_a_checkpoint(tmp_path, checkpoint, proof, place):
    file = tmp_path / "evil.ckpt"
    torch.save(with_payload(checkpoint, place.split(), Payload(proof)), file)
    with pytest.raises(UnsafeCheckpointError, match=r"more than tensors and plain containers.*weights_only=False"):
        make_trainer(tmp_path).fit(Classifier(), data(2), data(2), ckpt_path=file)
    with pytest.raises(pickle.UnpicklingError):
        Classifier.load_from_checkpoint(file, weights_only=True)
    assert not proof.exists()


def oldest_format(file, content):
    names = ["storages", "tensors", "pickle"]
    for name in names:
        (file.parent / name).write_bytes(pickle.dumps(content))
    with tarfile.open(file, "w") as archive:
        for name in names:
            archive.add(file.parent / name, name)


@pytest.mark.parametrize(
    "write",
    [
        lambda file, content: torch.save(content, file, _use_new_zipfile_serialization=False),
        lambda file, content: file.write_bytes(pickle.dumps(content)),
        oldest_format,
    ],
)
def test_every_kind_of_file(tmp_path, checkpoint, proof, write):
    file = tmp_path / "evil.ckpt"
    write(file, {**checkpoint, "state_dict": Payload(proof)})
    with pytest.raises(CheckpointError):
        make_trainer(tmp_path).validate(Classifier(), data(2), ckpt_path=file)
    assert not proof.exists()


@pytest.fixture
def evil(tmp_path, checkpoint, proof):
    file = tmp_path / "hpc_ckpt_1.ckpt"
    torch.save({**checkpoint, "more": Payload(proof)}, file)
    return file


@pytest.mark.parametrize("function", ["test", "predict"])
def test_every_loader(tmp_path, evil, proof, function):
    with pytest.raises(UnsafeCheckpointError):
        getattr(make_trainer(tmp_path), function)(Classifier(), data(2), ckpt_path=str(evil))
    assert not proof.exists()


@pytest.fixture
def served(tmp_path):
    """Serve ``tmp_path`` on this machine, and return its address."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *message):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_every_name(tmp_path, served, evil, proof, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))  # torch's cache of downloads
    for module in (checkpoints, checkpoint_connector):
        monkeypatch.setattr(module, "_is_registry", lambda path: str(path).startswith("registry"))
        monkeypatch.setattr(module, "module_available", lambda name: True)
    monkeypatch.setattr(checkpoints, "download_model_from_registry", lambda path, trainer: None)
    monkeypatch.setattr(checkpoint_connector, "find_model_local_ckpt_path", lambda *given, **named: str(evil))
    for name in (f"file://{evil}", f"{served}/{evil.name}", "hpc", "registry:model"):
        with pytest.raises(UnsafeCheckpointError):
            make_trainer(tmp_path).validate(Classifier(), data(2), ckpt_path=name)
    saver = ModelCheckpoint(tmp_path / "c")
    saver.best_model_path = str(evil)
    (tmp_path / "c").mkdir()
    (tmp_path / "c/last.ckpt").write_bytes(evil.read_bytes())
    for name in ("best", "last"):
        trainer = make_trainer(tmp_path, callbacks=[saver], enable_checkpointing=True)
        with pytest.raises(UnsafeCheckpointError):
            trainer.validate(Classifier(), data(2), ckpt_path=name)
    (tmp_path / "on_exception.ckpt").write_bytes(evil.read_bytes())
    trainer = make_trainer(tmp_path, callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)
    with pytest.warns(UserWarning, match="The last model"), pytest.raises(UnsafeCheckpointError):
        trainer.fit(Classifier(), data(2), data(2))
    trainer = make_trainer(tmp_path)
    trainer.ckpt_path = evil
    with pytest.raises(UnsafeCheckpointError):
        trainer.validate(Classifier(), data(2))
    assert not proof.exists()


class Tuned(Classifier):
    lr = 0.1


class Batches(LightningDataModule):
    def train_dataloader(self):
        return data(2)


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore")
def test_files_of_the_tuner(tmp_path, evil, proof, monkeypatch):
    """The file is replaced meanwhile."""
    save = Trainer.save_checkpoint

    def swapped(self, filepath, *more, **options):
        save(self, filepath, *more, **options)
        Path(filepath).write_bytes(evil.read_bytes())

    monkeypatch.setattr(Trainer, "save_checkpoint", swapped)
    tuner = Tuner(make_trainer(tmp_path, max_steps=2))
    with pytest.raises(UnsafeCheckpointError):
        tuner.lr_find(Tuned(), datamodule=Batches(), num_training=2, update_attr=False)
    assert not proof.exists()


def test_files_of_a_launcher(tmp_path, evil, proof):
    """Spawned processes save the weights to a file, which the launcher reads with the default of torch."""
    checkpoint_io = make_trainer(tmp_path).strategy.checkpoint_io
    with pytest.raises(pickle.UnpicklingError):
        checkpoint_io.load_checkpoint(evil)
    with pytest.raises(pickle.UnpicklingError):
        make_trainer(tmp_path).strategy.load_checkpoint(evil)
    assert not proof.exists()


def test_hyper_parameters_in_yaml(tmp_path, checkpoint, proof):
    file, hparams = tmp_path / "good.ckpt", tmp_path / "hparams.yaml"
    torch.save(checkpoint, file)
    hparams.write_text(f"x: !!python/object/apply:os.system ['touch {proof}']\n")
    with pytest.raises(Exception, match="could not determine a constructor"):
        Classifier.load_from_checkpoint(file, hparams_file=hparams, weights_only=True)
    torch.save({**checkpoint, "hyper_parameters": {"_instantiator": "os.system"}}, file)
    with pytest.raises(ValueError, match="not in the allowlist"):
        Classifier.load_from_checkpoint(file, weights_only=True)
    assert not proof.exists()


class Own:
    """A trusted class of the user."""

    def __eq__(self, other):
        return isinstance(other, Own)

    __hash__ = object.__hash__


class Reads(Classifier):
    def on_load_checkpoint(self, checkpoint):
        self.read = checkpoint["own"]


def test_safe_globals_of_the_user_are_loaded(tmp_path, checkpoint):
    file = tmp_path / "own.ckpt"
    torch.save({**checkpoint, "own": Own()}, file)
    with pytest.raises(UnsafeCheckpointError, match="Own"):
        make_trainer(tmp_path).validate(Reads(), data(2), ckpt_path=file)
    module = Reads()
    with torch.serialization.safe_globals([Own]):
        make_trainer(tmp_path).validate(module, data(2), ckpt_path=file, verbose=False)
    assert module.read == Own()


def test_callers_word_runs_it_with_a_warning(tmp_path, checkpoint, evil, proof):
    with pytest.warns(UserWarning, match="can run any code"):
        make_trainer(tmp_path).validate(Classifier(), data(2), ckpt_path=evil, weights_only=False, verbose=False)
    assert proof.exists()
