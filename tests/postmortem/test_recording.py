from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import nn

from trainer.loops.accumulation import AccumulationWindow
from trainer.loops.batch_path import NO_PATH
from trainer.loops.fit import FitLoop
from trainer.postmortem.recording import Recorder
from trainer.state import random_states


class Fit:
    """The parts of a fit that a recorder uses, with outcomes on request."""

    def __init__(self, size=1, automatic=True):
        self.window, self.ran = AccumulationWindow(size), []
        self.progress = SimpleNamespace(optimizer_steps=0)
        self.module = nn.BatchNorm1d(2)
        self.module.automatic_optimization = automatic
        self.loop = FitLoop.__new__(FitLoop)
        usual = replace(NO_PATH, step=self.step)
        vars(self.loop).update(progress=self.progress, window=self.window, wrappers=(), base_path=usual, path=usual)
        engine = SimpleNamespace(device=torch.device("cpu"))
        self.trainer = SimpleNamespace(lightning_module=self.module, loop=self.loop, engine=engine)

    def step(self, batch, batch_idx):
        self.ran.append(batch)
        self.module(torch.randn(4, 2))
        return None if batch == "None" else batch

    def batch(self, name, updates=None):
        """Train one batch; the last one of a window updates the weights by default."""
        self.window.advance(100, False)
        self.loop.path.step(name, len(self.ran))
        if self.window.is_last if updates is None else updates:
            self.progress.optimizer_steps += 1


def names(batches):
    return [recorded.batch for recorded in batches]


def test_outcomes_after_the_next_forward():
    fit = Fit()
    recorder = Recorder(fit.trainer)
    fit.batch("a")
    for name, before in ("ba", "cb", "dc"):
        fit.window.advance(100, False)
        fit.loop.path.step(name, 0)
        assert names(recorder.take()) == [before]
        fit.progress.optimizer_steps += 1
    assert names(recorder.take()) == ["d"]


def test_windows():
    fit = Fit(size=3)
    recorder = Recorder(fit.trainer)
    for name in "abcdef":
        fit.batch(name)
    assert names(recorder.take()) == ["a", "b", "c"]
    assert [recorded.window.is_first for recorded in recorder.take()] == [True, False, False]
    for name in ("g", "None", "h"):  # without a loss
        fit.batch(name)
    assert names(recorder.take()) == ["g", "h"]


def test_manual_optimization_has_no_windows():
    fit = Fit(automatic=False)
    recorder = Recorder(fit.trainer)
    fit.batch("a", updates=False)
    fit.batch("b")
    assert names(recorder.take()) == ["a", "b"]


def test_how_things_stood():
    fit = Fit()
    recorder = Recorder(fit.trainer)
    torch.manual_seed(0)
    mean = fit.module.running_mean.clone()
    fit.batch("a")
    (recorded,) = recorder.take()
    after = torch.rand(3)
    recorded.buffers.restore()
    random_states.restore(recorded.random_state)
    assert torch.equal(fit.module.running_mean, mean)
    torch.randn(4, 2)  # the random numbers of the step
    assert torch.equal(torch.rand(3), after)
    assert (recorded.batch_idx, recorded.step, recorded.window.is_first) == (0, 0, True)


def test_buffers_before_each_window():
    fit = Fit(size=2)
    recorder = Recorder(fit.trainer, keeps_batches=False)
    for _ in range(2):
        mean = fit.module.running_mean.clone()
        fit.batch("a")
        fit.batch("b")
        first, second = recorder.take()
        assert (first.batch, first.random_state, second.buffers) == (None, {}, None)
        fit.module.running_mean[0] = torch.nan
        kept = fit.module.running_mean[1].clone()
        first.buffers.restore_nonfinite()
        assert fit.module.running_mean.tolist() == [mean[0], kept]
