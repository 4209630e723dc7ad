"""Random runs under Lightning's Trainer and ours: the same hooks, losses, weights, logs and checkpoints.

A seed is a set-up. Known differences (docs/migrating-from-lightning.md) are not drawn: short accumulation
windows, stops inside of one, data without a length that ends before its limit, and resuming an epoch ended by
``max_steps``.
"""

import random

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from tests.parity import Classifier, data, lightning, run_both
from tests.support import seeds, stream_of
from tests.test_lightning_parity import assert_close, assert_same_metrics, common, results_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning's CombinedLoader on torch 2.15
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),  # nothing was learned in that epoch
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:You called `self.log.*no logger"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]


class Drawn(Classifier):
    """Stops, skips, schedules and logs as configured."""

    def __init__(self, how):
        super().__init__(momentum=0.9)
        self.how = how

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.how["skips"] == (self.current_epoch, batch_idx) else None

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=self.how["on_step"], on_epoch=True, prog_bar=True)
        self.log("index", float(batch_idx))
        if self.how["stops"] == (self.current_epoch, batch_idx):
            self.trainer.should_stop = True
        return {"loss": loss, "more": 1} if self.how["returns_dict"] else loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = self.loss(batch)
        self.log("val", loss, prog_bar=True)
        self.log("val_both", loss, on_step=True, on_epoch=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        interval = self.how["schedule"]
        if interval is None:
            return optimizer
        if interval == "plateau":
            schedule = {"scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": self.how["monitor"]}
        else:
            # with interval="step", Lightning counts batches of the epoch, not updates
            frequency = self.how["frequency"] if interval == "epoch" else 1
            schedule = {"scheduler": StepLR(optimizer, 1, 0.9), "interval": interval, "frequency": frequency}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def draw(seed):
    """Draw a set-up."""
    pick = random.Random(seed)

    def maybe(share, *values, otherwise=None):
        return pick.choice(values) if pick.random() < share else otherwise

    window = pick.choice([1, 1, 1, 2, 3])
    batches = window * pick.randint(1, 3) if window > 1 else pick.randint(1, 7)
    sized = pick.random() < 0.8
    on_step = pick.random() < 0.5
    monitor = "loss_epoch" if on_step else "loss"
    skips = maybe(0.15, (pick.randint(0, 2), pick.randint(0, batches - 1))) if window == 1 else None
    how = {
        "monitor": monitor, "on_step": on_step, "skips": skips, "returns_dict": pick.random() < 0.3,
        "stops": maybe(0.15, (pick.randint(0, 2), pick.randint(0, batches - 1))) if window == 1 else None,
        "schedule": pick.choice([None, "epoch", "plateau", *(["step"] if skips is None else [])]),
        "frequency": pick.choice([1, 1, 2]),
    }  # fmt: skip
    interval = maybe(0.3, pick.randint(1, batches), *([0.25, 0.5, 0.75] if sized else []))
    arguments = {
        "max_epochs": pick.randint(1, 3),
        "max_steps": maybe(0.2, pick.randint(1, 8), otherwise=-1),
        "min_epochs": maybe(0.1, 2, 3),
        "min_steps": maybe(0.1, pick.randint(1, 6)),
        "accumulate_grad_batches": window,
        "limit_train_batches": maybe(0.2, 1, 2) if window == 1 and sized else None,
        "limit_val_batches": maybe(0.2, 1, 0.5, 0),
        "val_check_interval": interval,
        "check_val_every_n_epoch": maybe(0.3, None, 2, otherwise=1)
        if isinstance(interval, int)
        else maybe(0.2, 2) or 1,
        "reload_dataloaders_every_n_epochs": maybe(0.15, 1, 2, otherwise=0),
        "num_sanity_val_steps": pick.choice([0, 2, -1]),
        "log_every_n_steps": pick.choice([1, 2, 50]),
    }
    if isinstance(interval, int) and (arguments["limit_train_batches"] or batches) < interval:
        arguments["val_check_interval"], arguments["check_val_every_n_epoch"] = None, 1
    saving = maybe(
        0.4, {"save_top_k": -1}, {"monitor": monitor, "save_top_k": 2, "save_last": True},
        {"every_n_train_steps": 2, "save_top_k": -1}, {"save_last": True, "every_n_epochs": 2},
        {"save_top_k": -1, "save_on_train_epoch_end": True},
    )  # fmt: skip
    callbacks = [(ModelCheckpoint, saving)] if saving is not None else []
    callbacks += maybe(0.2, [(EarlyStopping, {"monitor": monitor, "patience": pick.randint(0, 1)})], otherwise=[])
    callbacks += maybe(0.15, [(LearningRateMonitor, {})], otherwise=[])
    if isinstance(interval, int) and interval == 1 and any("monitor" in options for _, options in callbacks):
        # Lightning's callbacks interpret it as 1.0, an epoch; ours look after each validation
        arguments["val_check_interval"], arguments["check_val_every_n_epoch"] = None, 1
    setup = {
        "how": how, "arguments": arguments, "callbacks": callbacks, "batches": batches, "sized": sized,
        "val": pick.choice([None, [3], [2], [2, 1], "stream"]),
        "resumes": pick.random() < 0.4 and arguments["max_steps"] == -1,
    }  # fmt: skip
    # our resumed run restores the random states of the first run
    setup["shuffles"] = not setup["resumes"] and pick.random() < 0.5
    arguments["gradient_clip_val"] = maybe(0.4, 0.1)
    return setup


def loaders(setup):
    def stream(batches):
        return stream_of(data(2 * batches))

    train = data(2 * setup["batches"], shuffle=setup["shuffles"]) if setup["sized"] else stream(setup["batches"])
    if not isinstance(setup["val"], list):
        return train, stream(2) if setup["val"] else None
    val = [data(2 * batches, seed=5 + i) for i, batches in enumerate(setup["val"])]
    return train, val[0] if len(val) == 1 else val


def everything_of(make, setup, folder):
    """Return the public results of a run, and of a resumed run if the set-up has one."""
    seen = []
    saves = any(kind is ModelCheckpoint for kind, _ in setup["callbacks"])
    for resuming in (False, True)[: 1 + setup["resumes"]]:
        torch.manual_seed(1)
        callbacks = [
            kind(dirpath=folder / "kept", **options) if kind is ModelCheckpoint else kind(**options)
            for kind, options in setup["callbacks"]
        ]
        arguments = {**setup["arguments"], "enable_checkpointing": saves}
        arguments["max_epochs"] += resuming
        fit = {"ckpt_path": folder / "last.ckpt"} if resuming else {}
        if resuming and make is lightning:  # ours passes objects over by itself
            fit["weights_only"] = False
        seen.append(results_of(make, Drawn(setup["how"]), loaders(setup), arguments, folder, *callbacks, **fit))
        if "losses" not in seen[-1]:
            break
        if setup["how"]["skips"]:  # a skipped batch counts as started with us, in Lightning not yet
            del seen[-1]["checkpoint"]
    return seen


@pytest.mark.parametrize("seed", seeds(20, quick=8, nightly=200))
def test_run_drawn_at_random(seed, tmp_path):
    setup = draw(seed)
    folders = iter([tmp_path / "theirs", tmp_path / "ours"])
    theirs, mine = run_both(lambda make: everything_of(make, setup, next(folders)))
    for run, (a, b) in enumerate(zip(theirs, mine, strict=True)):
        if run and not forget_what_came_before(a, b):
            return
        assert_same_metrics(a, b)
        for key in a.keys() - (SAVED if run and saves_again(setup) else set()):
            assert_close(a[key], b[key], f"run {run}, {key}")


SAVED = {"hooks", "files", "checkpoint"}


def saves_again(setup):
    """Return whether Lightning's resumed run may save the last step again: after a batch, inside a window."""
    by_steps = any(options.get("every_n_train_steps") for _, options in setup["callbacks"])
    after_batches = by_steps or setup["arguments"]["val_check_interval"] is not None
    return after_batches and setup["arguments"]["accumulate_grad_batches"] > 1


def forget_what_came_before(theirs, mine):
    """Remove the values that only our resumed run restores.

    These are earlier metrics, and the number of logged evaluation batches. Returns whether there is anything to
    compare: Lightning's run may end because a callback's metric is missing.
    """
    if "losses" in mine and "losses" not in theirs:
        return False
    if "losses" in theirs:
        del theirs["metrics"], mine["metrics"]
        mine["after fit"] = common(theirs["after fit"], mine["after fit"])
    for rows in (theirs["rows"], mine["rows"]):
        rows[:] = [(None, *row[1:]) if "val_both_step" in str(row) else row for row in rows]
    return True
