"""Lightning's own callbacks have the same effect under our Trainer and Lightning's."""

import itertools
from collections import UserList
from datetime import timedelta
from unittest import mock

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    EarlyStopping,
    LambdaCallback,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
)
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from tests.parity import FEATURES, Classifier, RecordingLogger, assert_agree, data, looks_in, ours, plain, run_both
from tests.support import Stream
from trainer.errors import ResumeError

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of these callbacks are not tested


class Net(Classifier):
    """A module with a backbone, a batch norm, a schedule, and its own data."""

    def __init__(self, norm=True, crashes_at=None):
        super().__init__()
        self.crashes_at = crashes_at
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.backbone = nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5) if norm else nn.Tanh(), nn.ReLU())
            self.net = nn.Linear(5, 3)

    def forward(self, features):
        return self.net(self.backbone(features))

    def training_step(self, batch, batch_idx):
        if self.trainer.current_epoch == self.crashes_at:
            raise ValueError("crash")
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.5)
        return [optimizer], [lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def train_dataloader(self):
        return data(8)

    def val_dataloader(self):
        return data(4)

    test_dataloader = predict_dataloader = val_dataloader

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0])


def unsized(samples):
    """Return batches of two, without a length; ``samples`` may be None for endless data."""
    sample = torch.ones(FEATURES), torch.tensor(1)
    return DataLoader(Stream(itertools.repeat(sample) if samples is None else [sample] * samples), batch_size=2)


def state_of(module):
    return plain([value.float().sum() for value in module.state_dict().values()])


def last_file(folder):
    return max(folder.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)


# --- averaging ------------------------------------------------------------------------------------------------------


@looks_in("on_train_epoch_start", "on_train_epoch_end", "on_train_end")
class Looks(Callback):
    """Records the changes of the Trainer by stochastic weight averaging."""

    def __init__(self, swa):
        self.swa, self.seen = swa, UserList()  # not restored by a resume

    def look(self, hook, trainer):
        loop, schedules = trainer.fit_loop, trainer.lr_scheduler_configs
        self.seen.append((
            trainer.current_epoch, trainer.max_epochs, trainer.num_training_batches, loop.max_batches,
            trainer.accumulate_grad_batches, loop._skip_backward, [type(one.scheduler).__name__ for one in schedules],
            plain([group["lr"] for group in trainer.optimizers[0].param_groups]), plain(self.swa.n_averaged),
        ))  # fmt: skip


@pytest.mark.parametrize(
    ("norm", "endless", "crashes_at"), [(True, False, None), (False, True, None), (False, False, 2)]
)
def test_stochastic_weight_averaging(tmp_path, norm, endless, crashes_at):
    def scenario(make):
        folder, loader = tmp_path / make.__name__, unsized(None) if endless else None

        def run(module, path=None):
            looks = Looks(swa := StochasticWeightAveraging(swa_epoch_start=1, swa_lrs=0.05))
            trainer = make(
                callbacks=[swa, looks], max_epochs=4, limit_train_batches=4, limit_val_batches=0,
                accumulate_grad_batches=2, enable_checkpointing=True, default_root_dir=folder,
            )  # fmt: skip
            trainer.fit(module, loader, ckpt_path=path)
            # Lightning steps once more in the extra epoch for the batch norm, on the gradients of the epoch before
            return [looks.seen, trainer.max_epochs, trainer.current_epoch, None if norm else state_of(module)]

        if crashes_at is None:
            return run(Net(norm))
        with pytest.raises(ValueError, match="crash"):
            run(Net(norm, crashes_at))
        return run(Net(norm), last_file(folder))

    assert_agree(scenario)


def test_extra_epoch_for_batch_norm_changes_no_weight():
    def start(trainer, module):
        before[:] = [p.detach().clone() for p in module.parameters()], trainer.global_step

    def end(trainer, module):
        changed = not all(map(torch.equal, before[0], module.parameters()))
        assert changed == (before[1] != trainer.global_step) == (trainer.current_epoch < 3)

    module, before = Net(), []
    watch = LambdaCallback(on_train_epoch_start=start, on_train_epoch_end=end)
    ours(max_epochs=3, callbacks=[StochasticWeightAveraging(0.05, swa_epoch_start=1), watch]).fit(module)
    assert module.backbone[1].num_batches_tracked == 4


# --- watching -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("fit", {"max_steps": 3, "val_check_interval": 1}),
        ("fit", {"max_epochs": 2, "accumulate_grad_batches": 2, "limit_train_batches": 3}),
        ("validate", {}),
        ("predict", {}),
    ],
    ids=str,
)
def test_throughput_monitor(function, arguments):
    def scenario(make):
        monitor = ThroughputMonitor(lambda batch: 2, length_fn=lambda batch: 6, window_size=3)
        logger, module = RecordingLogger(), Net()
        trainer = make(logger=logger, callbacks=[monitor], **{"log_every_n_steps": 1, **arguments})
        module.flops_per_batch = 10
        flops = mock.patch("lightning.pytorch.callbacks.throughput_monitor.get_available_flops", return_value=100)
        with flops, mock.patch("time.perf_counter", side_effect=range(100)):
            for _ in range(2):
                getattr(trainer, function)(module)
        return [row for row in logger.rows if any("/" in name for name in row[1])]

    assert_agree(scenario)


# --- changing the module --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resumes_after", [1, 3])
def test_backbone_finetuning(tmp_path, resumes_after):
    resumes = True

    def scenario(make):
        folder, groups = tmp_path / make.__name__, []

        def watch(trainer, module):
            groups.append(plain([(group["lr"], len(group["params"])) for group in trainer.optimizers[0].param_groups]))

        def fit(epochs, path=None):
            saver, module = ModelCheckpoint(folder, save_top_k=-1), Net()
            callbacks = [BackboneFinetuning(2), LambdaCallback(on_train_epoch_end=watch), saver]
            make(max_epochs=epochs, callbacks=callbacks, enable_checkpointing=True).fit(module, ckpt_path=path)
            return module

        if resumes:
            fit(resumes_after)
        module = fit(4, last_file(folder) if resumes else None)
        return [groups, state_of(module), [p.requires_grad for p in module.parameters()]]

    theirs, mine = run_both(scenario)
    if resumes_after == 3:  # Lightning freezes the backbone again; ours continues as the uninterrupted run
        assert theirs[1:] != mine[1:]
        resumes = False
        assert mine[1:] == scenario(ours)[1:]
    else:
        assert theirs == mine


def test_model_pruning(tmp_path):
    def scenario(make):
        module, folder = Net(), tmp_path / make.__name__
        to_prune = [(module.backbone[0], "weight"), (module.net, "weight")]
        pruning = ModelPruning("l1_unstructured", amount=0.3, parameters_to_prune=to_prune)
        trainer = make(max_epochs=2, callbacks=[pruning, ModelCheckpoint(folder)], enable_checkpointing=True)
        trainer.fit(module)
        trainer.test(module)
        saved = torch.load(last_file(folder), weights_only=False)["state_dict"]
        return [state_of(module), sorted(saved), [int((value == 0).sum()) for value in saved.values()]]

    assert_agree(scenario)


def test_inexact_resume_with_pruning_is_refused(tmp_path):
    path = tmp_path / "saved.ckpt"

    def fit(max_epochs, start=path, **arguments):
        module = Net()
        pruning = ModelPruning("l1_unstructured", amount=0.5, parameters_to_prune=[(module.net, "weight")])
        trainer = ours(max_epochs=max_epochs, callbacks=[pruning], **arguments)
        trainer.fit(module, ckpt_path=start)
        return trainer

    fit(1, None).save_checkpoint(path)
    fit(1)
    with pytest.raises(ResumeError, match=r"pruned weights, but not the masks.* Trainer\(exact_resume=False\)"):
        fit(2)
    with pytest.warns(UserWarning, match="pruned weights, but not the masks"):
        assert fit(2, exact_resume=False).current_epoch == 2


# --- writing --------------------------------------------------------------------------------------------------------


class Writer(BasePredictionWriter):
    def __init__(self, interval):
        super().__init__(interval)
        self.written = []

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, *where):
        self.written.append((plain(prediction), indices, where))

    def write_on_epoch_end(self, trainer, module, predictions, indices):
        self.written.append((plain(predictions), indices))


@pytest.mark.parametrize(
    ("interval", "returns", "make_loader"),
    [
        ("batch", None, lambda: [data(2), data(8)]),
        ("epoch", False, lambda: data(8)),
        ("batch_and_epoch", None, lambda: unsized(None)),
    ],
)
def test_prediction_writer(interval, returns, make_loader):
    def scenario(make):
        writer, module = Writer(interval), Net()
        trainer = make(callbacks=[writer], limit_predict_batches=3)
        loop = trainer.predict_loop
        module.on_predict_epoch_end = lambda: writer.written.append((loop.epoch_batch_indices, plain(loop.predictions)))
        return writer.written, plain(trainer.predict(module, make_loader(), return_predictions=returns))

    assert_agree(scenario)


def test_indices_of_a_batch_are_those_of_its_dataloader():
    writer, unknown = Writer("batch_and_epoch"), unsized(3)
    ours(callbacks=[writer]).predict(Net(), [unknown, data(3), unknown])
    *batches, (_, at_the_end) = writer.written
    assert [indices for _, indices, _ in batches] == [[], [], [0, 1], [2], [], []]
    assert at_the_end == [[], [[0, 1], [2]], []]


@pytest.mark.parametrize("what", ["no module", "another kind", "dataloaders and a datamodule"])
def test_on_exception_is_not_called_without_a_module(what):
    def scenario(make):
        module, heard = Net(), []
        trainer = make(callbacks=[LambdaCallback(on_exception=lambda _, given, error: heard.append(given is module))])
        start = {
            "no module": lambda: trainer.test(dataloaders=[1]),
            "another kind": lambda: trainer.fit(torch.nn.Linear(2, 2)),
            "dataloaders and a datamodule": lambda: trainer.fit(module, [1], datamodule=LightningDataModule()),
        }
        with pytest.raises((TypeError, MisconfigurationException)) as failed:
            start[what]()
        return heard, failed.type is TypeError

    assert_agree(scenario)


# --- evaluation after a validation -----------------------------------------------------------------------------------

INTERVALS = [
    ("00:00:00:01", 1), ({"seconds": 1}, None), (timedelta(0, 1), 2), (1, 2), (2, 1), (4, None), (None, 2), (0.5, 2),
]  # fmt: skip
"""Values of ``val_check_interval`` and ``check_val_every_n_epoch``."""


@pytest.mark.parametrize(("interval", "every"), INTERVALS)
def test_stock_callbacks_run_once_per_validation(tmp_path, interval, every):
    """Stock callbacks read attributes of the Trainer to run after validations or at the ends of epochs."""
    module, sanity, seconds = Net(), [], itertools.count(step=0.4)
    module.validation_step = lambda batch, batch_idx: module.log("val_loss", -float(module.global_step))
    module.on_validation_end = lambda: sanity.append(module.trainer.sanity_checking)
    stopping = EarlyStopping("val_loss", patience=1)
    saver = ModelCheckpoint(tmp_path / "kept", monitor="val_loss", save_top_k=-1, filename="{step}")
    looks = mock.patch.object(stopping, "_run_early_stopping_check", wraps=stopping._run_early_stopping_check)
    with looks as look, mock.patch("time.monotonic", side_effect=lambda: next(seconds)):
        trainer = ours(
            callbacks=[stopping, saver], enable_checkpointing=True, default_root_dir=tmp_path, max_epochs=4,
            val_check_interval=interval, check_val_every_n_epoch=every,
        )  # fmt: skip
        trainer.fit(module)
    assert trainer.current_epoch == 4
    assert look.call_count == len(saver.best_k_models) == sanity.count(False) > 1


class Scored(Net):
    """Logs one score per epoch, from ``scores``; the last one again and again. Some code may set ``should_stop``."""

    def __init__(self, scores, asks_in=None):
        super().__init__()
        self.scores, self.asks_in = scores, asks_in

    def score(self, epoch):
        return float(self.scores[min(epoch, len(self.scores) - 1)])

    def validation_step(self, batch, batch_idx):
        self.log("score", self.score(self.current_epoch))
        self.log("other", self.score(self.current_epoch) if self.current_epoch < 3 else 9.0)

    def training_step(self, batch, batch_idx):
        self.trainer.should_stop |= self.current_epoch == self.asks_in
        return super().training_step(batch, batch_idx)


RECOVERS, WORSENS = [5, 9, 9, 4, 3, 2, 1, 0, -1, -2, -3, -4], [5, 9]
EARLY_STOPS = {
    "recovers": (RECOVERS, {"min_epochs": 6}, {}, 12),
    "recovers, min_steps": (RECOVERS, {"min_steps": 22}, {}, 12),
    "recovers at the last moment": ([5, 9, 9, 9, 9, 4, 3, 2, 1, 0, -1, -2], {"min_epochs": 6}, {}, 12),
    "recovers too late": ([5, 9, 9, 9, 9, 9, 4, 3], {"min_epochs": 6}, {}, 6),
    "recovers, after validations": (RECOVERS, {"min_epochs": 6}, {"check_on_train_epoch_end": False}, 12),
    "never recovers": (WORSENS, {"min_epochs": 6}, {}, 6),
    "never recovers, min_steps": (WORSENS, {"min_steps": 22}, {}, 6),
    "recovers from NaN": ([5, float("nan"), *RECOVERS[2:]], {"min_epochs": 6}, {}, 12),
    "no minimum": (RECOVERS, {}, {}, 3),
}


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("case", EARLY_STOPS)
def test_early_stop_is_withdrawn_if_the_metric_recovers_in_time(tmp_path, case, resumes):
    """With another callback that keeps a stop, as ``Timer`` does, and after a resume in the meantime."""
    scores, minimum, options, epochs = EARLY_STOPS[case]

    def fit(until, ckpt_path=None):
        stopping, logger = EarlyStopping("score", patience=2, **options), RecordingLogger()
        timer = Timer(timedelta(days=1))
        trainer = ours(
            max_epochs=until, callbacks=[stopping, timer], logger=logger, log_every_n_steps=1000,
            num_sanity_val_steps=0, **minimum
        )  # fmt: skip
        trainer.fit(Scored(scores), ckpt_path=ckpt_path)
        return trainer, stopping, logger

    if resumes:
        fit(4)[0].save_checkpoint(tmp_path / "x.ckpt")
    trainer, stopping, logger = fit(12, tmp_path / "x.ckpt" if resumes else None)
    if resumes and case == "no minimum":  # a run that has stopped, and is resumed with more epochs, goes on
        return
    assert trainer.current_epoch == epochs
    assert trainer.should_stop == (epochs < 12)
    assert (stopping.stopped_epoch > 0, stopping.stopping_reason.value > 0) == (epochs < 12,) * 2
    rows = [names for _, row in logger.rows if (names := set(row) & {"score", "lr"})]
    assert len(logger.rows) == len(rows) == epochs - 4 * resumes, "more than one row per epoch"


@pytest.mark.parametrize("other", ["code", "callback"])
def test_early_stop_stays_if_something_else_requests_it(other):
    stoppings = [EarlyStopping(name, patience=2) for name in ("score", "other")]
    trainer = ours(max_epochs=12, min_epochs=6, callbacks=stoppings[: 1 + (other == "callback")])
    trainer.fit(Scored(RECOVERS, asks_in=1 if other == "code" else None))
    assert (trainer.current_epoch, trainer.should_stop) == (6, True)
