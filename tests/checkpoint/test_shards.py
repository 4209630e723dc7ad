"""Sharded checkpoints: contents, integrity, and safe loading of malicious files."""

import errno
import math
import os
import pickle
import random
import shutil
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from tests.support import Bucket, Killed, Payload, Regression, assert_identical, loader_of, make_batches, make_trainer
from trainer import CheckpointFiles
from trainer.checkpoint import conversion, sharded_files, shards
from trainer.checkpoint import reading as files
from trainer.checkpoint.checkpoint_io import files_of
from trainer.checkpoint.folder_locks import lock_folder
from trainer.checkpoint.loading import TRAINER_KEY
from trainer.checkpoint.resuming import loops_in
from trainer.errors import CheckpointError, CheckpointWriteError, ConfigurationError

BATCHES = make_batches(4)


def checkpoint(value=1.0):
    module = nn.Linear(3, 2)
    nn.init.constant_(module.weight, value)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    ours = {"parameters": [["weight", "bias"]], "progress": {}, "processes": [{"rng": 1}]}
    return {
        "epoch": 0,
        "global_step": 1,
        "state_dict": {**module.state_dict(), "half": torch.ones(3, dtype=torch.bfloat16), "empty": torch.empty(0, 2)},
        "optimizer_states": [optimizer.state_dict()],
        "loops": {TRAINER_KEY: ours},
        "hyper_parameters": {"width": 3},
    }


def write(path, value=1.0, process=None):
    made = checkpoint(value)
    tree, tensors, own = shards.split_for_write(made)
    own = own if process is None else {0: process}
    shards.write(path, tree, tensors, own, {"epoch": 0, "weights_only": False}, None)
    return made


def fit(folder, *callbacks, module=None, ckpt_path=None, **arguments):
    options = {"enable_checkpointing": None, "max_epochs": 2, "plugins": CheckpointFiles(sharded=True), **arguments}
    fitted = make_trainer(folder, callbacks=list(callbacks), **options)
    torch.manual_seed(0)
    fitted.fit(module or Regression(optimizer=torch.optim.AdamW), loader_of(BATCHES), ckpt_path=ckpt_path)
    return fitted


def names(folder):
    return sorted(os.listdir(folder))


# --- contents ---------------------------------------------------------------------------------------------------------


def test_values_are_restored_in_order(tmp_path):
    made = write(tmp_path / "a.ckpt")
    assert names(tmp_path / "a.ckpt") == [".metadata", "__0_0.distcp", "manifest.json", "state.ckpt"]
    read = shards.read_whole(tmp_path / "a.ckpt")
    assert_identical(read, made)
    assert [list(read), list(read["state_dict"])] == [list(made), list(made["state_dict"])]
    tree, processes = shards.read(tmp_path / "a.ckpt")
    (state,) = tree["optimizer_states"]
    assert list(state["state"]) == state["param_groups"][0]["params"] == ["weight", "bias"]
    assert processes == [{"rng": 1}]
    tree, _ = shards.read(tmp_path / "a.ckpt", only="state_dict")
    assert tree["optimizer_states"][0]["state"]["weight"]["exp_avg"].is_meta  # not read
    assert torch.equal(tree["state_dict"]["half"], torch.ones(3, dtype=torch.bfloat16))


def test_tensor_without_values_is_refused_by_its_name(tmp_path):
    """It could be taken for one of another file, and the checkpoint could not be read."""
    module = Regression(optimizer=torch.optim.AdamW)
    module.on_save_checkpoint = lambda made: made.update(extra={"later": torch.empty(2, device="meta")})
    with pytest.raises(CheckpointError, match=r"Got extra\.later on the meta device .*sharded=False"):
        fit(tmp_path, module=module)


def test_file_of_lightning_becomes_a_folder(tmp_path):
    """Its names of parameters are not known."""
    made = checkpoint()
    del made["loops"]
    made["state_dict"] |= {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)}
    torch.save(made, tmp_path / "a.ckpt")
    conversion.split(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    assert_identical(shards.read_whole(tmp_path / "b.ckpt"), made)


# --- atomic writes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "manifest.json", "state.ckpt"])
def test_damage_is_found(tmp_path, file):
    write(tmp_path / "a.ckpt")
    path = tmp_path / "a.ckpt" / file
    data = path.read_bytes()
    damaged = [None, data[: len(data) // 2], data + b" "]
    for place in random.Random(0).sample(range(len(data)), 20):
        damaged.append(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
    for content in damaged:
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"a\.ckpt is (damaged|not a checkpoint)"):
            files.verify(tmp_path / "a.ckpt")
    if file != "manifest.json":
        path.unlink()
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match=r"a\.ckpt is damaged: .* is not a file"):
            files.verify(tmp_path / "a.ckpt")


def test_damaged_folder_is_named_and_skipped(tmp_path):
    for name in ("a", "b", "c"):
        write(tmp_path / f"{name}.ckpt")
    (tmp_path / "b.ckpt" / "__0_0.distcp").write_bytes(b"")
    (tmp_path / "c.ckpt" / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="It is passed over") as caught:
        assert files.newest_valid([tmp_path]) == tmp_path / "a.ckpt"
    warned = " ".join(str(warning.message) for warning in caught)
    assert "b.ckpt is damaged: __0_0.distcp has 0 bytes, and was written with" in warned
    assert "c.ckpt is not a checkpoint, or is incomplete: it has no manifest.json" in warned


class Full(shards._Stream):
    """A file on a full disk."""

    def write(self, data):
        self.error = OSError(errno.ENOSPC, "No space left on device")
        return len(data)


@pytest.mark.parametrize("renames", range(3))
def test_kill_at_any_rename_keeps_the_old_or_the_new_checkpoint(tmp_path, monkeypatch, renames):
    """Renames of DCP's metadata, of the old checkpoint, and of the new one."""
    write(tmp_path / "c" / "a.ckpt")
    rename, done = Path.rename, []

    def may_be_killed(self, target):
        if len(done) == renames:
            raise Killed
        done.append(self)
        return rename(self, target)

    with monkeypatch.context() as killing:
        killing.setattr(Path, "rename", may_be_killed)
        killing.setattr(sharded_files, "discard", lambda part: None)
        with pytest.raises(Killed):
            write(tmp_path / "c" / "a.ckpt", 2.0)
    with lock_folder(tmp_path / "c"):  # as the next run does
        assert names(tmp_path / "c") == ["a.ckpt"]
    files.verify(tmp_path / "c" / "a.ckpt")
    weight = shards.read_whole(tmp_path / "c" / "a.ckpt")["state_dict"]["weight"]
    assert weight[0, 0].item() == pytest.approx({0: 0.9, 1: 0.9, 2: 1.9}[renames], abs=1e-3)
    with monkeypatch.context() as killing:
        killing.setattr(sharded_files, "discard", lambda part: None)  # killed right after it was renamed
        sharded_files.remove(tmp_path / "c" / "a.ckpt")
    with lock_folder(tmp_path / "c"):
        assert names(tmp_path / "c") == []


def test_file_takes_a_folders_place_and_the_other_way_round(tmp_path):
    write(tmp_path / "a.ckpt")
    files.write(lambda stream: torch.save(checkpoint(), stream), tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").is_file()
    write(tmp_path / "a.ckpt")
    assert names(tmp_path) == ["a.ckpt"]

    with pytest.raises(CheckpointWriteError):
        files.write(Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")), tmp_path / "a.ckpt")
    assert names(tmp_path) == ["a.ckpt"]
    assert files.verify(tmp_path / "a.ckpt")


# --- malicious files --------------------------------------------------------------------------------------------------


def sealed_again(folder):
    """Write a matching manifest for a modified folder, as an attacker would."""
    facts = dict(sharded_files.read_manifest(folder).facts)
    (folder / "manifest.json").unlink()
    sums = {one.name: (one.stat().st_size, sha256(one.read_bytes()).hexdigest()) for one in folder.iterdir()}
    sharded_files.seal(folder, facts.pop("name"), sums, facts)


UNUSUAL = {
    "a file elsewhere": lambda tensors, info: setattr(info, "relative_path", "../../secret"),
    "an extension": lambda tensors, info: setattr(info, "transform_descriptors", ["stream.zstd"]),
    "a part missing": lambda tensors, info: tensors["state_dict.weight"].chunks.clear(),
    "a tensor missing": lambda tensors, info: tensors.pop("state_dict.weight"),
    "another size": lambda tensors, info: setattr(tensors["state_dict.weight"], "size", torch.Size([3, 2])),
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("file", [".metadata", "state.ckpt", "process 0", "__0_0.distcp", "__0.metadata"])
def test_strangers_pickle_is_not_run(tmp_path, file):
    folder, mark = tmp_path / "a.ckpt", tmp_path / "ran"
    write(folder, process=Payload(mark) if file == "process 0" else None)
    if file == "__0.metadata":  # torch reads it if there is no other
        (folder / ".metadata").unlink()
    if file.endswith(".ckpt"):
        torch.save({"state_dict": {}, "loops": {}, "evil": Payload(mark)}, folder / file)
    elif file != "process 0":
        (folder / file).write_bytes(pickle.dumps(Payload(mark)))
    sealed_again(folder)
    files.verify(folder)
    with pytest.raises((CheckpointError, pickle.UnpicklingError, FileNotFoundError, RuntimeError)):
        shards.read_whole(folder)
    with pytest.raises(CheckpointError):
        fit(tmp_path, ckpt_path=folder)
    assert not mark.exists()


def test_entries_that_are_not_tensors_are_refused(tmp_path):
    """DCP reads these with `torch.load(weights_only=False)`."""
    import torch.distributed.checkpoint as dcp

    folder, mark = tmp_path / "a.ckpt", tmp_path / "ran"
    write(folder)
    with pytest.warns(UserWarning, match="single process|existing checkpoint"):
        dcp.save({"state_dict.weight": Payload(mark)}, checkpoint_id=folder, no_dist=True)
    sealed_again(folder)
    with pytest.raises(pickle.UnpicklingError, match=r"refers to .*BytesStorageMetadata, which is not allowed there"):
        shards.read(folder)
    assert not mark.exists()


@pytest.mark.parametrize("what", UNUSUAL)
def test_unusual_metadata_are_refused(tmp_path, what):
    write(tmp_path / "a.ckpt")
    path = tmp_path / "a.ckpt" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    UNUSUAL[what](metadata.state_dict_metadata, next(iter(metadata.storage_data.values())))
    path.write_bytes(pickle.dumps(metadata))
    sealed_again(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"a\.ckpt (is damaged|cannot be read)"):
        fit(tmp_path, ckpt_path=tmp_path / "a.ckpt")


def test_metadata_change_no_class(tmp_path):
    """A pickle may set attributes of a class that it names, here ``PosixPath.stem``."""
    write(tmp_path / "a.ckpt")
    path = tmp_path / "a.ckpt" / ".metadata"
    poison = b"cpathlib\nPosixPath\nN}(X\x04\x00\x00\x00stemX\x05\x00\x00\x00ownedu\x86b0"
    path.write_bytes(b"\x80\x04" + poison + path.read_bytes()[2:])
    sealed_again(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"its \.metadata changes an object outside of it"):
        fit(tmp_path, ckpt_path=tmp_path / "a.ckpt")
    assert Path("x/y.txt").stem == "y"


@pytest.mark.parametrize("sharded", [False, True])
def test_folder_that_is_not_a_checkpoint_is_kept(tmp_path, sharded):
    """A save to a wrong path would remove its files."""
    (tmp_path / "runs" / "of mine").mkdir(parents=True)
    trainer = make_trainer(tmp_path, plugins=CheckpointFiles(sharded=sharded))
    trainer.fit(Regression(), loader_of(make_batches(2)))
    with pytest.raises(CheckpointWriteError, match="it is a folder, but not a checkpoint"):
        trainer.save_checkpoint(tmp_path / "runs")
    assert [one.name for one in (tmp_path / "runs").iterdir()] == ["of mine"]


def test_file_names_outside_the_folder_are_refused(tmp_path):
    write(tmp_path / "a.ckpt")
    manifest = tmp_path / "a.ckpt" / "manifest.json"
    sealed = sharded_files.read_manifest(tmp_path / "a.ckpt")
    manifest.unlink()
    (tmp_path / "x").write_bytes(b"")
    sharded_files.seal(tmp_path / "a.ckpt", "a.ckpt", {**sealed.files, "../x": (0, "")}, {})
    with pytest.raises(CheckpointError, match=r"its manifest\.json was changed"):
        files.verify(tmp_path / "a.ckpt")


# --- in a run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_run_saves_removes_links_and_is_resumed(tmp_path, asynchronous):
    how = {"every_n_train_steps": 2, "save_last": "link", "save_top_k": 2, "monitor": "step", "mode": "max"}
    saver = partial(ModelCheckpoint, filename="{step}", **how)
    io = partial(CheckpointFiles, sharded=True, asynchronous=asynchronous)
    whole, first, second = (Regression(optimizer=torch.optim.AdamW) for _ in range(3))
    fitted = fit(tmp_path, one := saver(tmp_path / "whole"), plugins=io(), module=whole)
    assert names(tmp_path / "whole") == ["last.ckpt", "step=6.ckpt", "step=8.ckpt"]
    assert os.path.islink(one.last_model_path)
    assert one.best_model_path == str(tmp_path / "whole" / "step=8.ckpt")
    assert files_of(fitted.strategy)._writer is None
    fit(tmp_path, saver(tmp_path / "c"), plugins=io(), module=first, max_epochs=1, resume="auto")
    fit(tmp_path, saver(tmp_path / "c"), plugins=io(), module=second, resume="auto")
    assert names(tmp_path / "c") == ["last.ckpt", "step=6.ckpt", "step=8.ckpt"]
    assert all(map(torch.equal, second.parameters(), whole.parameters()))
    shutil.rmtree(tmp_path / "c" / "step=8.ckpt")
    for path in ("best", "last", one.best_model_path):
        module = Regression()
        module.test_step = module.training_step
        fitted.test(module, loader_of(BATCHES), ckpt_path=path)
        assert all(map(torch.equal, module.parameters(), whole.parameters()))


def test_run_is_stopped_by_a_full_disk_also_later(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_Stream", Full)
    saver = ModelCheckpoint(tmp_path / "c", filename="{epoch}")
    for asynchronous in (False, True):
        io = CheckpointFiles(sharded=True, asynchronous=asynchronous)
        with pytest.raises(CheckpointWriteError, match=r"epoch=0.ckpt was not written: No sp.* It needs .* bytes free"):
            fit(tmp_path, saver, plugins=io)
        assert not (tmp_path / "c").exists() or names(tmp_path / "c") == []
    with pytest.warns(UserWarning, match="Training continues without it"):
        assert fit(tmp_path, saver, plugins=CheckpointFiles(sharded=True, when_full="continue")).global_step == 8


def test_parts_are_refused(tmp_path):
    write(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"state.ckpt is a part of a checkpoint. Expected the folder: .*a\.ckpt"):
        fit(tmp_path, ckpt_path=tmp_path / "a.ckpt" / "state.ckpt")


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_parameters_in_another_order_get_their_own_states(tmp_path):
    class Turned(Regression):
        def configure_optimizers(self):
            return torch.optim.AdamW(list(self.parameters())[::-1])

        def on_train_start(self):
            (optimizer,) = self.trainer.optimizers
            self.start = {name: optimizer.state[p]["exp_avg"].clone() for name, p in self.named_parameters()}

    saver, module, turned = ModelCheckpoint(tmp_path / "c"), Regression(optimizer=torch.optim.AdamW), Turned()
    first = fit(tmp_path, saver, module=module)
    fit(tmp_path, module=turned, ckpt_path=saver.best_model_path, max_epochs=3)
    (optimizer,) = first.optimizers
    assert_identical(turned.start, {name: optimizer.state[p]["exp_avg"] for name, p in module.named_parameters()})


def test_error_after_the_replacement_is_raised_and_keeps_the_new_checkpoint(tmp_path, monkeypatch):
    """Without a second error, because the older checkpoint cannot be renamed back."""
    part, place = tmp_path / "part", tmp_path / "last.ckpt"
    for folder, content in ((part, "new"), (place, "old")):
        folder.mkdir()
        (folder / sharded_files.MANIFEST).write_text(content)

    monkeypatch.setattr(sharded_files, "sync_folder", Mock(side_effect=OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        sharded_files.move_into_place(part, place)
    assert (place / sharded_files.MANIFEST).read_text() == "new"


# --- in object storage ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "bucket"])
def storage(request, tmp_path):
    """Return the URL of an empty folder."""
    url = f"{request.param}:/{tmp_path}/storage"
    yield url
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def listed(url):
    """Return the names in a folder, without dots."""
    system, place = url_to_fs(url)
    return sorted(one.rpartition("/")[2] for one in system.ls(place, detail=False))


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_run_in_object_storage_removes_and_is_resumed(tmp_path, storage, asynchronous):
    how = {"every_n_train_steps": 2, "save_last": True, "save_top_k": 2, "monitor": "step", "mode": "max"}
    saver = partial(ModelCheckpoint, storage, filename="{step}", **how)
    io = partial(CheckpointFiles, sharded=True, asynchronous=asynchronous)
    whole, first, second, tested = (Regression(optimizer=torch.optim.AdamW) for _ in range(4))
    fit(tmp_path, module=whole, enable_checkpointing=False, plugins=None)
    fit(tmp_path, one := saver(), plugins=io(), module=first, max_epochs=1)
    assert listed(storage) == ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
    assert len(listed(f"{storage}/last.ckpt")) == 2  # the manifest, and the files of the second save
    fitted = fit(tmp_path, two := saver(), plugins=io(), module=second, ckpt_path=one.last_model_path)
    assert listed(storage) == ["last.ckpt", "step=6.ckpt", "step=8.ckpt"]
    assert all(map(torch.equal, second.parameters(), whole.parameters()))
    tested.test_step = tested.training_step
    for path in ("best", two.last_model_path):
        torch.nn.init.zeros_(tested.net[0].weight)
        fitted.test(tested, loader_of(BATCHES), ckpt_path=path)
        assert all(map(torch.equal, tested.parameters(), whole.parameters()))


def test_kill_at_any_change_of_object_storage_keeps_the_old_or_the_new_checkpoint(tmp_path, monkeypatch):
    values = {"first": [], "replacing": []}
    for kill_at in range(1, 40):
        for case, found in values.items():
            url = f"bucket:/{tmp_path}/{case}{kill_at}.ckpt"
            if case == "replacing":
                write(url, 1.0)
            monkeypatch.setattr(Bucket, "changes", 0)
            monkeypatch.setattr(Bucket, "kill_at", kill_at)
            with suppress(Killed):
                write(url, 2.0)
            is_done = Bucket.changes < kill_at
            monkeypatch.setattr(Bucket, "kill_at", math.inf)
            value = 0.0
            if case == "replacing" or sharded_files.MANIFEST in listed(url):
                sharded_files.verify(url)
                value = shards.read_whole(url)["state_dict"]["weight"][0, 0].item() + 0.1
            else:
                with pytest.raises(CheckpointError, match="is not a checkpoint, or is incomplete: it has no manifest"):
                    shards.read_whole(url)
            found.append(round(value))
            write(url, 3.0)
            assert len(listed(url)) == 2  # nothing is left of the killed ones
        if is_done:
            break
    assert is_done
    assert values["first"] == sorted(values["first"])
    assert values["replacing"] == sorted(values["replacing"])
    assert set(values["first"]) == {0, 2}
    assert set(values["replacing"]) == {1, 2}


def test_damage_and_other_files_in_object_storage_are_found(storage):
    made, url = write(f"{storage}/a.ckpt"), f"{storage}/a.ckpt"
    assert_identical(shards.read_whole(url)["state_dict"], made["state_dict"])
    system, place = url_to_fs(url)
    folder = f"{place}/{next(name for name in listed(url) if name != 'manifest.json')}"
    system.pipe_file(f"{folder}/__0_0.distcp", b"")
    with pytest.raises(CheckpointError, match=r"is damaged: __0_0\.distcp has 0 bytes, and was written with"):
        sharded_files.verify(url)
    system.pipe_file(f"{place}/mine.txt", b"")
    with pytest.raises(FileExistsError, match="is not a sharded checkpoint"):
        write(url)
    with pytest.raises(CheckpointWriteError, match="not written: it exists and is not a sharded checkpoint"):
        CheckpointFiles(sharded=True).save_shards(made, f"{url}/mine.txt", None)


def test_copy_of_a_remote_checkpoint_is_read_on_this_machine(tmp_path):
    made = write(url := f"bucket:/{tmp_path}/a.ckpt")
    shutil.copytree(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    assert files.verify(tmp_path / "b.ckpt")
    for one in (url, tmp_path / "b.ckpt"):
        assert loops_in(one)[TRAINER_KEY]["parameters"] == [["weight", "bias"]]
    assert_identical(shards.read_whole(tmp_path / "b.ckpt")["state_dict"], made["state_dict"])


def test_deepspeeds_files_are_refused_in_object_storage():
    with pytest.raises(ConfigurationError, match="expected a folder of this machine's file systems"):
        CheckpointFiles(sharded=True).save_shards(checkpoint(), "memory://a.ckpt", None, Mock())
