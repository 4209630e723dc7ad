"""A fit accepts batches of all kinds, whatever its default callbacks do with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.support import loader_of, make_trainer, nested_tensor
from trainer.callbacks import RunRecorder, SyncDetector, Throughput


class Graph:
    """A batch of a class that cannot be looked into."""

    def __init__(self) -> None:
        self.edges = torch.eye(3)


class Constant(LightningModule):
    """Ignores its batches. If it breaks, its loss is NaN in batch 1, so that the batches are examined."""

    def __init__(self, breaks: bool = True) -> None:
        super().__init__()
        self.net, self.batches, self.breaks = nn.Linear(4, 1), [], breaks

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches.append(batch)
        return self.net(torch.ones(2, 4)).mean() * (float("nan") if self.breaks and batch_idx == 1 else 1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


KINDS = {
    "sparse": torch.eye(3).to_sparse(), "nested": nested_tensor(), "text": ["a", None],
    "graph": [Graph(), torch.ones(2)], "array": {"a": np.ones(3), "b": np.array([object()])},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "precision"), [*((kind, "16-mixed") for kind in KINDS), ("sparse", "32-true"), ("graph", "bf16-true")]
)
def test_batches_reach_the_module(tmp_path, kind, precision):
    module, batch = Constant(), KINDS[kind]
    make_trainer(tmp_path, precision=precision, log_every_n_steps=2).fit(module, loader_of([batch] * 4))
    assert [type(one) for one in module.batches] == [type(batch)] * 4


@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_callbacks_that_read_batches_accept_them(tmp_path, kind):
    callbacks = [RunRecorder(), SyncDetector(batches=2, after=1), Throughput(warmup_batches=1)]
    trainer = make_trainer(tmp_path, precision="bf16-true", callbacks=callbacks, enable_model_summary=True)
    trainer.fit(Constant(breaks=False), loader_of([KINDS[kind]] * 4))
    assert trainer.global_step == 4
