"""Whole runs under Lightning's Trainer and ours: the same losses, weights, logs and results.

Each scenario is run twice from the same seed, and all public results are compared. The scenarios have no known
differences, which are in ``docs`` and in other tests.
"""

from collections import UserList

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from tests.parity import CALLBACK_HOOKS, Classifier, Learner, RecordingLogger, data, looks_in, recording, run_both
from tests.support import stream_of


# log_every_n_steps is larger than the epoch in many scenarios, which is meant
class Logging(Classifier):
    """Logs by step and by epoch; tests/lightning/test_logging_parity.py has other options."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("bar", 0.5 * batch_idx, prog_bar=True, logger=False)
        self.log("weighted", loss, on_step=False, on_epoch=True, batch_size=batch_idx + 1)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_both", loss, on_step=True, on_epoch=True)
        return loss

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch), on_step=True)


class SeveralLoaders(Classifier):
    """Logs with several evaluation dataloaders, with and without their index."""

    def validation_step(self, batch, batch_idx, dataloader_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log(f"own_{dataloader_idx}", loss, add_dataloader_idx=False)
        return loss

    test_step = validation_step

    def predict_step(self, batch, batch_idx, dataloader_idx):
        return self(batch[0]) + dataloader_idx

    def on_validation_epoch_end(self):
        self.log("at_the_end", 3.0)


class Dict(Learner):
    """A dict from the training step; a dict as a batch."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch["one"]) + self.loss(batch["two"])
        self.log("loss", loss)
        return {"loss": loss, "extra": batch_idx}


@looks_in("on_train_batch_end", "on_validation_end", "on_train_epoch_end", "on_fit_end")
class MetricsSeen(Callback):
    """Records the metrics dictionaries in callbacks."""

    def __init__(self):
        self.seen = []

    def look(self, hook, trainer):
        place = "sanity check" if trainer.sanity_checking else hook
        self.seen.append((place, numbers(trainer.callback_metrics), numbers(trainer.progress_bar_metrics)))


def numbers(metrics):
    return {name: float(value) for name, value in metrics.items()}


def results_of(make, module, loaders, arguments, folder, *callbacks, **fit):
    """Return all public results of a fit; of one that fails, the hooks and the rows."""
    hooks, logger = recording(Callback, CALLBACK_HOOKS, "callback")(), RecordingLogger()
    metrics, losses = MetricsSeen(), list[float]()
    module.register_forward_hook(lambda *io: losses.append(io[2].sum().item()))
    trainer = make(logger=logger, callbacks=[*callbacks, metrics, hooks], default_root_dir=folder, **arguments)
    try:
        trainer.fit(module, *loaders, **fit)
    except (MisconfigurationException, RuntimeError):  # for settings that conflict
        # without effects of the error: Lightning leaves the module in eval mode if a validation raised
        return {"hooks": [call[:2] for call in hooks.calls], "rows": logger.rows}
    trainer.save_checkpoint(folder / "last.ckpt")
    counters = ("current_epoch", "global_step", "num_training_batches", "is_last_batch", "should_stop")
    return {
        "losses": losses,
        "hooks": hooks.calls,
        "checkpoint": shape(torch.load(folder / "last.ckpt", weights_only=False)),
        "rows": logger.rows,
        "metrics": metrics.seen,
        "after fit": [numbers(trainer.callback_metrics), numbers(trainer.logged_metrics)],
        "weights": [value.flatten().tolist() for value in module.state_dict().values()],
        "counters": [getattr(trainer, counter) for counter in counters],
        "files": sorted(path.name for path in folder.glob("kept/*")),
    }


def shape(checkpoint):
    """Return the keys of a checkpoint at every depth, with the counts under ``loops``, except our own form."""
    keys = {key: sorted(value) if isinstance(value, dict) else len(value) if isinstance(value, list) else value
            for key, value in checkpoint.items()}  # fmt: skip
    keys["loops"] = {key: value for key, value in checkpoint["loops"].items() if key != "amp_trainer"}
    return keys


def assert_close(theirs, ours, place=""):
    """Compare keys exactly, and numbers approximately."""
    assert type(theirs) is type(ours), place
    if isinstance(theirs, dict):
        assert sorted(theirs) == sorted(ours), place
        for key in theirs:
            assert_close(theirs[key], ours[key], f"{place}.{key}")
    elif isinstance(theirs, (list, tuple)):
        assert len(theirs) == len(ours), (place, theirs, ours)
        for index, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            assert_close(a, b, f"{place}[{index}]")
    elif isinstance(theirs, (float, Tensor)):
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-6, msg=lambda text: f"{place}: {text}")
    else:
        assert theirs == ours, place


BATCHES, VAL, OTHERS = data(8), data(6, seed=1), data(4, seed=2)
TWO = {"one": BATCHES, "two": OTHERS}
SCENARIOS = {
    "logging, overfit": (Logging, (BATCHES, VAL), {"overfit_batches": 2}),
    "several dataloaders": (SeveralLoaders, (BATCHES, [VAL, OTHERS]), {}),
    "clipping by value":
        (Logging, (BATCHES, VAL), {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "dict of dataloaders": (Dict, (TWO,), {}),
    "combined loader": (Dict, (CombinedLoader(TWO, "min_size"),), {}),
    "stream, limited": (Learner, (stream_of(data(10)),), {"limit_train_batches": 3}),
    "bare iterable": (Learner, (UserList(data(6)),), {}),
    "bf16-mixed": (Logging, (BATCHES, VAL), {"precision": "bf16-mixed"}),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_same_run(name, tmp_path):
    module, loaders, arguments = SCENARIOS[name]

    def scenario(make):
        usual, model = {"max_epochs": 2, "log_every_n_steps": 1}, module()
        seen = results_of(make, model, loaders, usual | arguments, tmp_path)
        for evaluate in ("validate", "test")[: 2 * (len(loaders) > 1)]:
            seen[evaluate] = getattr(model.trainer, evaluate)(model, loaders[1], verbose=False)
        return seen

    theirs, mine = run_both(scenario)
    assert_same_metrics(theirs, mine)
    assert_close(theirs, mine)


def assert_same_metrics(theirs, mine):
    """Compare the metrics in hooks; remove the norm logged by GradientClipping, which Lightning does not have."""
    places = [row for _, row in mine["rows"]] + mine.get("after fit", [])
    places += [metrics for _, *both in mine.get("metrics", ()) for metrics in both]
    for place in places:
        for name in [name for name in place if name.startswith("grad_norm")]:
            del place[name]
    mine["rows"] = [(step, row) for step, row in mine["rows"] if row.keys() - {"epoch"}]
    for (place, *a), (_, *b) in zip(theirs.pop("metrics", ()), mine.pop("metrics", ()), strict=True):
        # in a sanity check Lightning has the metrics of the last dataloader alone
        assert_close(a, common(a, b) if place == "sanity check" else b, "metrics")


def common(theirs, mine):
    """Return the metrics of ``mine`` that are also in ``theirs``."""
    return [{k: v for k, v in b.items() if k in a} for a, b in zip(theirs, mine, strict=True)]
