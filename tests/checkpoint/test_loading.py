"""Contents of checkpoints, resuming, and conversion between Lightning and us in both directions."""

from zipfile import ZipFile

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, Timer

from tests.parity import Classifier, data, ours
from trainer.checkpoint.loading import _keep_implementation
from trainer.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class Fitted(Classifier):
    """Has two schedules."""

    def configure_optimizers(self):
        first = torch.optim.Adam(self.parameters(), lr=0.01)
        lr = torch.optim.lr_scheduler
        return [first], [lr.StepLR(first, 3, 0.5), lr.ExponentialLR(first, 0.9)]


class Counting(Callback):
    """A callback with state."""

    def __init__(self, batches=12):
        self.batches = batches

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state_dict):
        self.batches = state_dict["batches"]


def saved(folder, max_epochs=1):
    """Return the path of a checkpoint written by a fit, and its Trainer."""
    trainer = ours(max_epochs=max_epochs, callbacks=[Counting()])
    trainer.fit(Fitted(), data(12))
    trainer.save_checkpoint(folder / "ours.ckpt")
    return folder / "ours.ckpt", trainer


# --- resuming -----------------------------------------------------------------------------------------------------


def test_callback_that_is_missing_is_named(tmp_path):
    path, _ = saved(tmp_path)
    with pytest.warns(UserWarning, match=r"add the following callbacks: \['Counting'\]"):
        ours(max_epochs=2).fit(Fitted(), data(12), ckpt_path=path)


@pytest.mark.filterwarnings("ignore:.*can run any code")
def test_state_with_the_class_as_its_key_is_restored(tmp_path):
    """As in files from before Lightning 1.5."""
    path, _ = saved(tmp_path)
    checkpoint, callback = torch.load(path), Counting(0)
    state = checkpoint["callbacks"]["Counting"]
    torch.save({**checkpoint, "callbacks": {Counting: state, Timer: {}, EarlyStopping: {}}}, path)
    trainer = ours(max_epochs=1, callbacks=[callback])
    with pytest.warns(UserWarning, match=r"add the following callbacks: .*EarlyStopping.*Timer'>\"\]"):
        trainer.fit(Fitted(), data(12), ckpt_path=path, weights_only=False)
    assert callback.batches == 12


# --- errors -----------------------------------------------------------------------------------------------------------


def resume(path, module=None, **arguments):
    trainer = ours(**{"max_epochs": 3, "callbacks": [Counting()], **arguments})
    trainer.fit(module if module is not None else Fitted(), data(12), ckpt_path=path)


def test_file_that_is_not_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"Checkpoint file not found: .*nothing.ckpt"):
        resume(tmp_path / "nothing.ckpt")
    torch.save({"a": 1}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"it has no 'state_dict', but .* keys a\. .*fit\(weights=\.\.\.\)"):
        resume(tmp_path / "a.ckpt")
    with ZipFile(tmp_path / "archive.ckpt", "w") as archive:
        archive.writestr("a.txt", "hello")
    for name, content in {"text": b"hello", "run": b'{"a": 1}', "bytes": bytes(range(256))}.items():
        (tmp_path / f"{name}.ckpt").write_bytes(content)
    for name in ("archive", "text", "run", "bytes"):
        with pytest.raises(CheckpointError, match=rf"{name}\.ckpt is not a checkpoint: torch\.save.* last\.ckpt"):
            resume(tmp_path / f"{name}.ckpt")
    path, trainer = saved(tmp_path)
    content = path.read_bytes()
    for kept in (0, 1, len(content) // 2):
        path.write_bytes(content[:kept])
        with pytest.raises(CheckpointError, match=str(path)):
            resume(path)
    trainer.save_checkpoint(tmp_path / "w.ckpt", weights_only=True)
    with pytest.raises(CheckpointError, match="contains only the model"):
        resume(tmp_path / "w.ckpt")
    with pytest.raises(CheckpointError, match="is not a checkpoint, or is incomplete: it has no manifest"):
        resume(tmp_path)


def test_run_that_is_over_already(tmp_path):
    path, _ = saved(tmp_path, max_epochs=2)
    with pytest.raises(ValueError, match=r"current_epoch=2, but you have set Trainer\(max_epochs=1\)"):
        resume(path, max_epochs=1)
    resume(path, max_epochs=2)  # nothing left to do is no error


def test_another_module_or_optimizer(tmp_path):
    path, _ = saved(tmp_path)
    fewer, other, wider = Fitted(), Fitted(), Fitted()
    optimizers, schedules = fewer.configure_optimizers()
    for number in (0, 1):
        fewer.configure_optimizers = lambda number=number: (optimizers, schedules[:number])
        with pytest.raises(CheckpointError, match=f"has 2 lr_schedulers, but configure_optimizers returned {number}"):
            resume(path, fewer)
    other.configure_optimizers = lambda: torch.optim.Rprop(other.parameters(), lr=0.1)
    checkpoint = torch.load(path)
    del checkpoint["loops"]["amp_trainer"]["kinds"]  # as in files of Lightning
    torch.save(checkpoint, tmp_path / "old.ckpt")
    with pytest.raises(CheckpointError, match=r"is not of the class Rprop.* expected etas, step_sizes"):
        resume(tmp_path / "old.ckpt", other)
    other.configure_optimizers = lambda: torch.optim.Adam([{"params": [one]} for one in other.parameters()])
    with pytest.raises(CheckpointError, match=r"groups of \[\d+\] parameters, but Adam .* has \[1, 1.*BaseFinetuning"):
        resume(path, other)
    wider.extra = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict.*extra\.weight"):
        resume(path, wider)


def test_implementation_and_device_of_a_step_are_set_by_the_run():
    optimizer = torch.optim.Adam([torch.zeros(1)], capturable=True)
    optimizer.param_groups[0] |= {"lr": torch.tensor(0.1, device="meta"), "fused": True}
    saved = {"param_groups": [{**optimizer.param_groups[0], "lr": torch.tensor(0.2), "capturable": False}]}
    saved["param_groups"][0]["fused"] = None
    _keep_implementation(optimizer, saved)
    (group,) = saved["param_groups"]
    assert group["lr"].is_meta
    assert (group["capturable"], group["fused"]) == (True, True)
