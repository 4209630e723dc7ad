"""The evaluation loop in isolation with stand-ins. Whole runs are compared with Lightning in the parity suite."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.parity import RecordingLogger
from trainer.data.unpadded import Span
from trainer.loops.batch_path import BatchPath
from trainer.loops.evaluation import EvalLoop
from trainer.loops.hooks import CALLBACK_HOOKS, Hooks
from trainer.precision import FullPrecision
from trainer.state.metrics import LoggedValue, LogOptions, PublishedMetrics, Recorder
from trainer.state.progress import FitProgress


class Loaders:
    """Dataloaders of the given lengths, one after the other; a batch is (dataloader, number)."""

    def __init__(self, *lengths: int) -> None:
        self.limits = [float(length) for length in lengths]
        self.spans: list[Span] = []
        self.is_sequential = True
        self.epochs: list[int] = []

    def num_batches(self) -> float:
        return sum(self.limits)

    def start_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def batches(self, limit: float = float("inf")) -> Iterator[tuple[Any, int, int]]:
        for dataloader, length in enumerate(self.limits):
            for number in range(int(min(length, limit))):
                yield torch.tensor([float(dataloader), float(number)]), number, dataloader

    def only(self) -> None:
        return None


class Scope:
    def enter(self, name: str | None) -> str | None:
        return None


class Module(nn.Module):
    """Records the called hooks."""

    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self.part = nn.Dropout()
        for name in (*CALLBACK_HOOKS, "on_validation_model_train"):
            vars(self)[name] = lambda *_, name=name: calls.append((name,))
        vars(self)["on_validation_model_eval"] = self.eval


def loop_of(calls: list[Any], loaders: Any, *, step: Any = None, own: Any = (), loggers: Any = ()) -> EvalLoop:
    module = Module(calls)
    published = PublishedMetrics()
    recorder = Recorder(published, FitProgress(epoch=3))
    recorder.loggers = list(loggers)
    engine = SimpleNamespace(world_size=1)
    loop = EvalLoop(
        "validation",
        engine=engine,  # type: ignore[arg-type]
        precision=FullPrecision(),
        published=published,
        recorder=recorder,
        fit_progress=FitProgress(updates=11, epochs_trained=2),
    )
    loop_hooks = Hooks(None, module, [], Scope(), lambda o, n: n in CALLBACK_HOOKS or n in own, lambda callback: False)
    path = BatchPath(
        transfer=lambda batch, dataloader_idx: batch,
        on_batch_start=loop_hooks.of("on_validation_batch_start"),
        forward_context=loop.precision.autocast,
        step=step or (lambda batch, *where: calls.append(("validation_step", *where))),
        on_batch_end=loop_hooks.of("on_validation_batch_end"),
    )
    loop.prepare(hooks=loop_hooks, module=module, path=path, loaders=loaders, inference_mode=False)
    return loop


def log(loop: EvalLoop, name: str, value: float, **options: Any) -> None:
    """Do the same as ``self.log`` in a step."""
    store = loop.metrics
    key = ("step", name, store.dataloader_idx)
    if key not in store.entries:
        store.entries[key] = LoggedValue("step", name, LogOptions(**options), store.dataloader_idx, lambda t, *_: t)
    store.entries[key].update(torch.tensor(value), 1)


@pytest.mark.parametrize("loaders", [None, Loaders(), Loaders(0), Loaders(0, 0)])
def test_without_data_nothing_happens(loaders: Any) -> None:
    calls: list[Any] = []
    assert loop_of(calls, loaders).run() == []
    assert calls == []


def test_single_batches_are_logged_at_their_number_in_the_run_and_those_of_a_sanity_check_not_at_all() -> None:
    loop: EvalLoop

    def step(batch: Any, batch_idx: int) -> None:
        log(loop, "x", float(batch_idx), on_step=True, on_epoch=False)

    logger = RecordingLogger()
    loop = loop_of([], Loaders(2), step=step, loggers=[logger])
    loop.sanity_checking = True
    loop.run()
    assert (loop.progress.has_run, loop.progress.total_batches) == (False, 0)
    loop.sanity_checking = False
    loop.run()
    loop.run()
    assert (loop.progress.has_run, loop.progress.total_batches) == (True, 4)
    assert logger.rows == [(0, {"x": 0.0}), (1, {"x": 1.0}), (2, {"x": 0.0}), (3, {"x": 1.0})]


def test_modes_are_put_back_part_by_part() -> None:
    loop = loop_of([], Loaders(1), step=lambda *args: modes.append(loop.module.part.training))  # type: ignore
    modes: list[bool] = []
    loop.module.train()
    loop.module.part.eval()  # type: ignore[union-attr]
    loop.run()
    assert (loop.module.training, loop.module.part.training) == (True, False)  # type: ignore[union-attr]
    loop.module.part.train()  # type: ignore[union-attr]
    loop.run()
    assert modes == [False, False]
    assert loop.module.part.training  # type: ignore[union-attr]


def test_module_may_put_its_modes_back_itself() -> None:
    calls: list[Any] = []
    loop = loop_of(calls, Loaders(1), own=("on_validation_model_train",))
    loop.run()
    assert calls[-1] == ("on_validation_model_train",)
    assert not loop.module.training
