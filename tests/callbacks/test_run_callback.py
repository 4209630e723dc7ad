from __future__ import annotations

import pytest

from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer.callbacks import NonFiniteGuard, OverflowReport


class Report(OverflowReport):
    calls = 0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.calls += 1
        super().on_before_optimizer_step(trainer, pl_module, optimizer)


class Guard(NonFiniteGuard):
    calls = 0

    def on_after_optimizer_step(self, trainer, pl_module, optimizer, outcome):
        self.calls += 1


@pytest.mark.parametrize("callback", [Report(), Guard(every_step=False)])
def test_hooks_that_subclasses_override_are_called(tmp_path, callback):
    make_trainer(tmp_path, callbacks=[callback], max_epochs=1).fit(Regression(), loader_of(make_batches(3)))
    assert callback.calls == 3


def test_unused_hooks_are_omitted():
    assert OverflowReport().on_before_optimizer_step is None
    assert OverflowReport(at_step=1).on_before_optimizer_step is not None
    assert NonFiniteGuard(every_step=False).on_after_optimizer_step is None
    assert NonFiniteGuard().on_after_optimizer_step is not None
