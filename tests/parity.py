"""Run the same module under Lightning's Trainer and ours: helpers of the parity tests.

This file has no tests. Each recorder stores the public state of a Trainer in a form that compares with ``==``.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.core import module as core_module
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainer import Trainer

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Arguments of both Trainers that disable everything except the loop."""

FEATURES, CLASSES = 4, 3


def data(samples: int, *, batch_size: int = 2, seed: int = 0, **options: Any) -> DataLoader[Any]:
    """Return batches of (features, label), always the same."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(samples, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    return DataLoader(TensorDataset(features, labels), batch_size=batch_size, **options)


class Learner(LightningModule):
    """A minimal classifier."""

    def __init__(self, learning_rate: float = 0.1, momentum: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.momentum = momentum
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features)

    def loss(self, batch: Any) -> Tensor:
        features, labels = batch
        return nn.functional.cross_entropy(self(features), labels)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=self.momentum)


class Classifier(Learner):
    """A classifier with fit, validate, test and predict."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


class Logs(Classifier):
    """A classifier that logs its losses."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", loss := super().validation_step(batch, batch_idx))
        return loss

    test_step = validation_step


@contextmanager
def lightnings_noise_ignored() -> Iterator[None]:
    """Ignore the warnings of Lightning's own Trainer that are not compared (including a new one on torch 2.15)."""
    with warnings.catch_warnings(action="ignore"):
        yield


def lightning(**arguments: Any) -> LightningTrainer:
    """Lightning's Trainer."""
    with lightnings_noise_ignored():
        return LightningTrainer(**{**QUIET, **arguments})


def ours(**arguments: Any) -> Trainer:
    """Our Trainer."""
    return Trainer(**{**QUIET, **arguments})


MAKERS: tuple[Callable[..., Any], Callable[..., Any]] = (lightning, ours)


def run_both(scenario: Callable[[Callable[..., Any]], Any]) -> tuple[Any, Any]:
    """Return the results of ``scenario(make_trainer)`` with Lightning's Trainer and with ours, from the same seed."""
    torch.manual_seed(0)
    # our Trainer keeps the digits of logged Python numbers
    as_ours = mock.patch.object(core_module, "_get_default_dtype", return_value=torch.float64)
    with lightnings_noise_ignored(), as_ours:
        theirs = scenario(lightning)
    torch.manual_seed(0)
    return theirs, scenario(ours)


def assert_agree(scenario: Callable[[Callable[..., Any]], Any]) -> Any:
    """Return the result of ``scenario``, which is the same with both Trainers."""
    theirs, mine = run_both(scenario)
    assert mine == theirs, (mine, theirs)
    return mine


OURS_ALONE = ("LeafSpec", "workers", "lr_scheduler.step()", "loss-scaler")
"""Parts of warnings that are not compared."""


def outcome(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
    """Return the result of a call, or the type of its error that is closest to Lightning's; and its warnings."""
    kinds = (NotImplementedError, RuntimeError, MisconfigurationException, TypeError, SystemExit, Exception)
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            result = call(*args, **kwargs)
        except (Exception, SystemExit) as error:
            result = next(kind.__name__ for kind in kinds if isinstance(error, kind))
    messages = {(one.category.__name__, str(one.message)) for one in caught}
    shown = [(kind, text[:40]) for kind, text in messages if not any(part in text for part in OURS_ALONE)]
    return result, sorted(set(shown))


# --- recorders ----------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Return ``value`` in a comparable form: numbers rounded, tensors as numbers, objects as their type."""
    if isinstance(value, Tensor):
        return round(value.item(), 5) if value.numel() == 1 else tuple(value.shape)
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return type(value).__name__.removeprefix("Lightning")  # LightningSGD is SGD


UNRECORDED_ARGUMENTS = {"self", "trainer", "pl_module", "optimizer_closure", "checkpoint", "state_dict", "exception"}


def recording(base: type, names: list[str], owner: str) -> type:
    """Return a subclass of ``base`` with methods that append their call to ``calls``, and call the original.

    An entry is (owner and name, arguments, the state of the Trainer).
    """

    def make(name: str) -> Callable[..., Any]:
        original = getattr(base, name, None)
        signature = inspect.signature(original) if original is not None else None

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            arguments: dict[str, Any] = {}
            if signature is not None:
                bound = signature.bind(self, *args, **kwargs)
                bound.apply_defaults()
                arguments = {k: plain(v) for k, v in bound.arguments.items() if k not in UNRECORDED_ARGUMENTS}
            trainer = args[0] if owner == "callback" and args and hasattr(args[0], "fit_loop") else None
            if trainer is None:
                trainer = getattr(self, "_trainer", None) or getattr(self, "trainer", None)
            self.calls.append((f"{owner}.{name}", arguments, situation(trainer)))
            return original(self, *args, **kwargs) if original is not None else None

        return method

    methods = {name: make(name) for name in names}
    for name, method in methods.items():
        method.__name__ = name
        if hasattr(base, name):
            method.__signature__ = inspect.signature(getattr(base, name))  # type: ignore[attr-defined]
    return type(f"Recording{base.__name__}", (base,), {**methods, "calls": []})


def looks_in(*hooks: str) -> Callable[[type], type]:
    """Return a decorator of a callback class: these hooks call ``look`` with their name and the Trainer."""

    def decorate(cls: type) -> type:
        for hook in hooks:
            setattr(cls, hook, lambda self, trainer, *_, hook=hook: self.look(hook, trainer))
        return cls

    return decorate


def situation(trainer: Any) -> dict[str, Any]:
    """Return the state of a Trainer."""
    if trainer is None:
        return {}
    module = trainer.lightning_module
    return {
        "fn": str(trainer.state.fn),
        "stage": str(trainer.state.stage),
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "mode": None if module is None else module.training,
        "grad": torch.is_grad_enabled(),
    }


def public_hooks(cls: type, *, besides: tuple[str, ...] = ()) -> list[str]:
    """Return the names of the hooks of ``cls``: ``on_*``, set-up and tear-down, and the given names."""
    names = [name for name in dir(cls) if name.startswith("on_") and callable(getattr(cls, name))]
    return sorted({*names, *besides, *({"setup", "teardown"} & set(dir(cls)))})


CALLBACK_HOOKS = public_hooks(Callback, besides=("state_dict", "load_state_dict"))
MODULE_HOOKS = public_hooks(
    LightningModule,
    besides=(
        "prepare_data",
        "configure_model",
        "configure_optimizers",
        "configure_callbacks",
        "configure_gradient_clipping",
        "training_step",
        "validation_step",
        "test_step",
        "predict_step",
        "backward",
        "optimizer_zero_grad",
        "lr_scheduler_step",
        "transfer_batch_to_device",
    ),
)
DATAMODULE_HOOKS = public_hooks(
    LightningDataModule,
    besides=(
        "prepare_data",
        "train_dataloader",
        "val_dataloader",
        "test_dataloader",
        "predict_dataloader",
        "transfer_batch_to_device",
        "state_dict",
        "load_state_dict",
    ),
)


class RecordingLogger(Logger):
    """Keeps its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.hyper_parameters: dict[str, Any] = {}
        self.status: list[str] = []

    @property
    def name(self) -> str:
        return "recorder"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.hyper_parameters.update(params if isinstance(params, dict) else vars(params))

    def finalize(self, status: str) -> None:
        self.status.append(status)


def weights(module: nn.Module) -> list[Tensor]:
    """Return a copy of all parameters and buffers."""
    return [value.detach().clone() for value in module.state_dict().values()]


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    """Compare weights bit for bit."""
    assert one.state_dict().keys() == other.state_dict().keys()
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
