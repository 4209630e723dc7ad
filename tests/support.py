"""Shared parts of tests: a quiet Trainer, a small module, a hand-written loop, and a fake Trainer."""

import io
import math
import os
import warnings
from collections import UserList
from dataclasses import dataclass, field
from functools import partial, partialmethod
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from trainer import Trainer
from trainer.precision import MixedPrecision, cpu_fp16

HAS_FSDP2 = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
needs_fsdp2 = pytest.mark.skipif(not HAS_FSDP2, reason="of torch 2.13")
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
TORCH = Version(torch.__version__).release[:2]
"""The version of torch, such as (2, 15)."""
AUTOCAST_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


class Irrep(tuple):
    """A tuple without a length, such as that of e3nn."""

    def __len__(self):
        raise NotImplementedError


sgd = partial(torch.optim.SGD, lr=0.1)
momentum = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)
adam = partial(torch.optim.Adam, lr=0.01)
adamw = partial(torch.optim.AdamW, lr=0.01)
OPTIMIZERS = {"sgd": sgd, "momentum": momentum, "adam": adam, "adamw": adamw}
OPTIMIZERS |= {f"{name}-fused": partial(make, fused=True) for name, make in OPTIMIZERS.items()}


def warned_by(*versions, message):
    """Expect a warning of torch about itself in these versions, and an error in others."""
    return pytest.mark.filterwarnings(*([f"ignore:{message}"] if TORCH in versions else []))


def seeds(number, *, quick=None, nightly=0):
    """Return seeds for random set-ups, sorted into tiers.

    Args:
        number: Seeds of ``scripts/test --all``.
        quick: How many of these ``scripts/test`` runs, too. Default: all.
        nightly: How many more ``scripts/test --nightly`` runs.
    """
    quick = number if quick is None else quick
    marks = {False: pytest.mark.whole, True: pytest.mark.nightly}
    return [pytest.param(seed, marks=() if seed < quick else marks[seed >= number]) for seed in range(number + nightly)]


def tiered(values, *, quick):
    """Return parameters: ``scripts/test`` runs those in ``quick``, and ``scripts/test --all`` the others, too."""
    marks = {True: pytest.mark.representative, False: pytest.mark.whole}
    return [pytest.param(value, marks=marks[value in quick]) for value in values]


imports_inductor = warned_by((2, 10), (2, 11), message="`torch.jit.script_method` is deprecated")


def make_trainer(folder, kind=Trainer, **arguments):
    """Return a Trainer on the CPU without output, for one epoch by default; with another ``kind``, Lightning's."""
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": folder,
        "max_epochs": 1,
    }
    return kind(**(quiet | arguments))


BOTH_TRAINERS = pytest.mark.parametrize(
    "trainer_class", [Trainer, pytest.param(LightningTrainer, marks=pytest.mark.filterwarnings("ignore"))]
)


def make_net(seed=0, dropout=0.0):
    """Return a small regression net with a normalization; with ``dropout``, one that draws random numbers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


def make_batches(number, seed=1, gains=None):
    """Return batches (x, y, gain). A loss is multiplied by its gain, which is 1 unless ``gains`` has its index."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator)
    return [[draw(4, 6), draw(4, 3), torch.tensor((gains or {}).get(i, 1.0))] for i in range(number)]


def loader_of(batches, **options):
    """Return a dataloader that yields the batches unchanged."""
    return DataLoader(list(batches), batch_size=None, **options)


class Stream(IterableDataset[Any]):
    """A dataset without a length."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


def nested_tensor():
    """Return a nested tensor of the strided layout, which has neither a shape nor a length."""
    with warnings.catch_warnings(action="ignore"):  # a prototype
        return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])


def through_a_file(state):
    """Return a state after it was written and read by torch."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def stream_of(batches):
    """Return a dataloader without a length that yields the batches unchanged."""
    return DataLoader(Stream(batches), batch_size=None)


def loss_of(net, batch):
    """Return the loss of one batch."""
    x, y, gain = batch
    return F.mse_loss(net(x), y) * gain


def manual_step(module, loss, optimizer=None):
    """Take one step of manual optimization, with the only optimizer by default."""
    optimizer = module.optimizers() if optimizer is None else optimizer
    optimizer.zero_grad()
    module.manual_backward(loss)
    optimizer.step()


class Regression(LightningModule):
    """Fits ``make_net`` with automatic optimization.

    Args:
        net: the trained net; by default that of ``make_net``.
        optimizer: creates the optimizer from the parameters.
        schedule: creates a learning-rate schedule from the optimizer, or None.
        change: returns the output of a training step from its loss and ``batch_idx``.
        **how: further keys of the schedule (interval, frequency, monitor).
    """

    def __init__(self, net=None, optimizer=sgd, schedule=None, change=None, **how):
        super().__init__()
        self.net = make_net() if net is None else net
        self.make_optimizer, self.make_schedule, self.how, self.change = optimizer, schedule, how, change

    def training_step(self, batch, batch_idx):
        loss = loss_of(self.net, batch)
        return loss if self.change is None else self.change(loss, batch_idx)

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.net.parameters())
        if self.make_schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.make_schedule(optimizer), **self.how}}


class Skipping(Regression):
    """Returns None in the batches ``none_in``, and otherwise its loss, with the ``weights`` of all batches if given."""

    def __init__(self, *args, none_in=(), weights=None, **options):
        super().__init__(*args, **options)
        self.none_in, self.weights = none_in, weights

    def training_step(self, batch, batch_idx):
        if batch_idx in self.none_in:
            return None
        loss = super().training_step(batch, batch_idx)
        return loss if self.weights is None else {"loss": loss, "weight": self.weights[batch_idx]}


@dataclass
class Trace:
    """Values of a training, one per batch (or, from ``skipped`` on, one per optimizer step)."""

    losses: list[float] = field(default_factory=list)
    weights: list[list[Tensor]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    next_scales: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def after_batch(self, loss, net, optimizer):
        self.losses.append(loss.item())
        self.weights.append([p.detach().clone() for p in net.parameters()])
        self.rates.append(optimizer.param_groups[0]["lr"])


class Watch(Callback):
    """Records a :class:`Trace` of a fit of a :class:`Regression`."""

    def __init__(self):
        self.trace = Trace()

    def on_after_optimizer_step(self, trainer, module, optimizer, outcome):
        assert outcome is trainer.step_outcome
        self.trace.skipped.append(outcome.skipped)
        self.trace.scales.append(outcome.scale)
        self.trace.next_scales.append(outcome.next_scale)
        if outcome.grad_norm is not None:
            self.trace.norms.append(outcome.grad_norm.item())

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.trace.after_batch(outputs.get("loss", torch.tensor(torch.nan)), module.net, trainer.optimizers[0])


class SavesEverywhere(Checkpoint):
    """Writes a checkpoint after each batch, validation batch, validation and epoch.

    Their paths are in ``files``, and in ``rows`` how many rows a ``RecordingLogger`` had then.
    """

    def __init__(self, folder):
        self.folder, self.files, self.rows = folder, UserList[Path](), UserList[int]()  # not restored by a resume

    def save(self, trainer, *_):
        if not trainer.sanity_checking:
            self.files.append(self.folder / f"{len(self.files):02}.ckpt")
            trainer.save_checkpoint(self.files[-1])
            self.rows.append(len(getattr(trainer.logger, "rows", ())))

    on_train_batch_end = on_validation_batch_end = on_validation_end = on_train_epoch_end = save


class SavesAt(Checkpoint):
    """Writes a checkpoint after the batch with this number of optimizer steps, or of trained batches."""

    def __init__(self, path, steps=-1, *, batches=-1):
        self.path, self.steps, self.batches = path, steps, batches

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.steps or trainer.progress.batches == self.batches:
            trainer.save_checkpoint(self.path)


class Bucket(DirFileSystem):
    """The local files under ``bucket://PATH``, as a remote file system for fsspec. ``kill_at`` ends a program there.

    Attributes:
        kill_at: the change of the file system at which :class:`Killed` is raised, instead of this and later ones.
    """

    protocol, cachable = "bucket", False
    kill_at: ClassVar[float] = math.inf
    changes: ClassVar[int] = 0

    def __init__(self, **_):
        super().__init__(path="/", fs=LocalFileSystem(auto_mkdir=True))

    def _change(self, name, *args, **kwargs):
        if Bucket.changes >= Bucket.kill_at:
            raise Killed
        Bucket.changes += 1
        return getattr(super(), name)(*args, **kwargs)

    pipe_file = partialmethod(_change, "pipe_file")
    mv = partialmethod(_change, "mv")
    rm = partialmethod(_change, "rm")
    rm_file = partialmethod(_change, "rm_file")

    def open(self, path, mode="rb", **kwargs):
        return self._change("open", path, mode, **kwargs) if "w" in mode else super().open(path, mode, **kwargs)


fsspec.register_implementation("bucket", Bucket, clobber=True)


class Killed(BaseException):
    """Raised as a simulated kill: no callback saves for it."""


class KilledAt(Callback):
    """Raises :class:`Killed` after this number of trained batches."""

    def __init__(self, batches):
        self.batches = batches

    def on_train_batch_start(self, trainer, *_):
        if trainer.progress.batches == self.batches:
            raise Killed


def train_by_hand(
    net,
    batches,
    *,
    precision="32-true",
    optimizer=sgd,
    scaler=None,
    epochs=1,
    window=1,
    clip=None,
    schedule=None,
    interval="step",
    before_step=lambda optimizer: None,
):
    """Train with the reference loop, written by hand with ``torch.amp``. Returns its trace.

    It runs on the device of ``net`` and ``batches``.
    """
    trace, dtype, kind = Trace(), AUTOCAST_DTYPES.get(precision), next(net.parameters()).device.type
    if scaler is None:
        scaler = torch.amp.GradScaler(kind, enabled=precision == "16-mixed")
    stepper = optimizer(net.parameters())
    scheduler = None if schedule is None else schedule(stepper)
    for _ in range(epochs):
        number = len(batches)
        for i, batch in enumerate(batches):
            if i % window == 0:
                stepper.zero_grad()
            size = min(window, number - i + i % window)
            with torch.autocast(kind, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = loss_of(net, batch)
            if size > 1:
                loss = loss / size
            scaler.scale(loss).backward()
            if i % window == size - 1:
                scaler.unscale_(stepper)
                before_step(stepper)
                norm = None if clip is None else clip(net.parameters())
                scale = scaler.get_scale()
                scaler.step(stepper)
                scaler.update()
                skipped = scaler.get_scale() < scale
                trace.skipped.append(skipped)
                trace.scales.append(scale)
                trace.next_scales.append(scaler.get_scale())
                if norm is not None:
                    trace.norms.append(norm.item())
                if scheduler is not None and interval == "step" and not skipped:
                    scheduler.step()
            if scheduler is not None and interval == "epoch" and i + 1 == number:
                scheduler.step()
            trace.after_batch(loss, net, stepper)
    return trace


def fit_and_watch(folder, module, batches, **arguments):
    """Fit ``module`` on ``batches`` (a list or a dataloader). Returns the Trainer and the trace."""
    watch = Watch()
    trainer = make_trainer(folder, **arguments | {"callbacks": [*arguments.get("callbacks", ()), watch]})
    trainer.fit(module, loader_of(batches) if isinstance(batches, list) else batches)
    return trainer, watch.trace


def assert_same(ours, theirs):
    """Compare bit for bit, with NaN equal to NaN."""
    for name in ("losses", "rates", "skipped", "scales", "next_scales", "norms"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert len(mine) == len(other), name
        assert all(a == b or (a != a and b != b) for a, b in zip(mine, other, strict=True)), (name, mine, other)
    assert len(ours.weights) == len(theirs.weights)
    for step, (mine, other) in enumerate(zip(ours.weights, theirs.weights, strict=True)):
        for a, b in zip(mine, other, strict=True):
            assert torch.equal(a, b), f"weights differ after batch {step}"


def assert_identical(found, expected, place=""):
    """Check that nested containers are equal: types, dtypes, and values bit for bit.

    Args:
        found: The containers.
        expected: The expected containers.
        place: Path of the containers, for the message.
    """
    if isinstance(expected, dict) and isinstance(found, dict):
        assert found.keys() == expected.keys(), place
        for key, value in expected.items():
            assert_identical(found[key], value, f"{place}[{key!r}]")
    elif isinstance(expected, Tensor) and isinstance(found, Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), place
        assert torch.equal(found, expected), place
    else:
        assert type(found) is type(expected), (place, found, expected)
        if isinstance(expected, (list, tuple)):
            assert len(found) == len(expected), place
            for index, pair in enumerate(zip(found, expected, strict=True)):
                assert_identical(*pair, f"{place}[{index}]")
        else:
            assert found == expected, place


def native_fp16(**options):
    """Return 16-mixed on torch's own CPU kernels for models of any size."""
    return MixedPrecision("float16", cpu_kernels="native", **options)


def on_machine(monkeypatch, ratios, other=1.0):
    """Replace the measured ratios of torch's float16 kernels on a CPU. Returns the list of measured families."""
    measured = []
    monkeypatch.setattr(cpu_fp16, "measured_ratio", lambda family: measured.append(family) or ratios.get(family, other))
    return measured


def replaced_kernels():
    """Return the families of float16 operations that our kernels compute on a CPU now."""
    return [family for family, replacement in cpu_fp16._replacements.items() if replacement.users]


SMALL = {"init_scale": 2.0**9, "growth_interval": 5}
"""Options of a scaler with a scale that does not overflow by itself, and grows soon."""


def plugin_of(precision, **options):
    """Return ``precision``, or its plugin with a small scale if it scales losses."""
    return native_fp16(**SMALL | options) if precision == "16-mixed" else precision


def scaler_of(precision, **options):
    """Return the scaler of a hand-written loop with the settings of :func:`plugin_of`."""
    return torch.amp.GradScaler("cpu", enabled=precision == "16-mixed", **SMALL | options)


def forward_context(precision):
    """Return the context of the forward passes of a hand-written loop."""
    return torch.autocast("cpu", AUTOCAST_DTYPES.get(precision, torch.bfloat16), enabled=precision in AUTOCAST_DTYPES)


def norm_of(limit, kind=2.0):
    """Return a function that clips gradients by their norm, and returns the norm."""
    return lambda parameters: nn.utils.clip_grad_norm_(parameters, limit, kind)


def value_of(limit):
    """Return a function that clips gradients by value, and returns their norm before."""

    def clip(parameters):
        parameters = list(parameters)
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        nn.utils.clip_grad_value_(parameters, limit)
        return norm

    return clip


class OnMPS(Tensor):
    """A tensor that reports an MPS device, and has no double precision, as on MPS."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function == Tensor.device.__get__:  # created at each access
            return torch.device("mps", 0)
        given = (*args, *(kwargs or {}).values())
        if function is Tensor.double or any(one is torch.float64 for one in given):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype.")
        return super().__torch_function__(function, types, args, kwargs or {})


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


class Clock:
    """A clock that advances on request. A call returns its seconds."""

    def __init__(self, now=100.0):
        self.now = now

    def __call__(self):
        return self.now


class FakeTrainer:
    """The attributes of a Trainer that callbacks read, and the hooks of a run in their order, without training.

    :meth:`hook` calls one hook; :meth:`train_batch`, :meth:`train_epoch`, :meth:`evaluate` and :meth:`fit` those of a
    part of a run. Time passes by ``clock`` alone; the fixture of that name makes it the time that callbacks see.

    Args:
        *callbacks: callbacks to call.
        folder: the ``default_root_dir``.
        clock: the clock.
        seconds: duration of each batch.
        batches: batches per training epoch, and of each other dataloader.
        max_epochs: epochs of a fit.
        scale: the loss scale, or None without loss scaling.
        device: the root device.
        **values: values of other attributes.
    """

    def __init__(
        self,
        *callbacks,
        folder=None,
        clock=None,
        seconds=1.0,
        batches=4,
        max_epochs=2,
        scale=65536.0,
        device="cpu",
        **values,
    ):
        self.callbacks, self.default_root_dir = list(callbacks), folder
        self.clock, self.seconds, self.scale = clock or Clock(), seconds, scale
        self.num_training_batches, self.num_sanity_val_batches = batches, [1]
        self.num_val_batches = self.num_test_batches = self.num_predict_batches = [batches]
        self.max_epochs, self.max_steps, self.accumulate_grad_batches = max_epochs, -1, 1
        self.current_epoch = self.global_step = self.skipped_steps = 0
        self.precision = "32-true" if scale is None else "16-mixed"
        self.scaler = SimpleNamespace(is_enabled=lambda: self.scale is not None, get_scale=lambda: self.scale)
        self.strategy, self.world_size = SimpleNamespace(root_device=torch.device(device), broadcast=bool), 1
        self.is_global_zero, self.sanity_checking = True, False
        self.loggers = []
        self.checkpoint_callback = self.lightning_module = self.settled_outcome = None
        self.callback_metrics, self.progress_bar_metrics = {}, {}
        self.progress = SimpleNamespace(skipped_steps=0, nonfinite_losses=0, has_learned=True)
        self.state = SimpleNamespace(fn=TrainerFn.FITTING)
        self.run_state = self
        vars(self).update(values)

    def hook(self, name, *arguments):
        """Call a hook of all callbacks."""
        for callback in self.callbacks:
            getattr(callback, name, lambda *_: None)(self, self.lightning_module, *arguments)

    def log(self, **metrics):
        """Log a metric like the module, and on the progress bar."""
        tensors = {name: torch.tensor(value) for name, value in metrics.items()}
        self.callback_metrics |= tensors
        self.progress_bar_metrics |= tensors

    def train_batch(self, batch_idx=0, batch=None, outputs=None, seconds=None, skipped=False, optimizers=(None,)):
        """Run the hooks of a batch with its optimizer step; a ``skipped`` step halves the scale."""
        self.hook("on_train_batch_start", batch, batch_idx)
        self.clock.now += self.seconds if seconds is None else seconds
        self.global_step += 1
        scale = self.scale or 1.0
        if skipped:
            self.scale, self.skipped_steps = scale / 2, self.skipped_steps + 1
            self.progress.skipped_steps += 1
        self.settled_outcome = SimpleNamespace(skipped=skipped, scale=scale, next_scale=self.scale or 1.0)
        for optimizer in optimizers:
            self.hook("on_after_optimizer_step", optimizer, self.settled_outcome)
        self.hook("on_train_batch_end", {} if outputs is None else outputs, batch, batch_idx)

    def train_epoch(self, first=0, last=None, **options):
        """Run the batches from ``first`` to ``last``. Call :meth:`end_epoch` for the end of the epoch."""
        self.hook("on_train_epoch_start")
        for batch_idx in range(first, int(self.num_training_batches) if last is None else last):
            self.train_batch(batch_idx, **options)

    def end_epoch(self, **metrics):
        """Log, and end the epoch."""
        self.log(**metrics)
        self.hook("on_train_epoch_end")
        self.current_epoch += 1

    def evaluate(self, stage="validation", batches=4, dataloader_idx=0, seconds=None, ends=True, **metrics):
        """Run a validation, test or predict over one dataloader; the last hook is left out unless it ``ends``."""
        self.hook(f"on_{stage}_start")
        for batch_idx in range(batches):
            self.hook(f"on_{stage}_batch_start", None, batch_idx, dataloader_idx)
            self.clock.now += self.seconds if seconds is None else seconds
            self.hook(f"on_{stage}_batch_end", None, None, batch_idx, dataloader_idx)
        self.log(**metrics)
        if ends:
            self.hook(f"on_{stage}_end")

    def fit(self, error=None, **metrics):
        """Run all epochs, each with a validation that logs ``metrics``. ``error`` is raised before the first one."""
        self.hook("on_fit_start")
        self.sanity_checking = True
        self.evaluate(batches=1)
        self.sanity_checking = False
        self.hook("on_train_start")
        for _ in range(self.max_epochs):
            self.train_epoch()
            if error is not None:
                self.hook("on_exception", error)
                return
            self.evaluate(**metrics)
            self.end_epoch()
        self.hook("on_train_end")
        self.hook("on_fit_end")
