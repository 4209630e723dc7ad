"""A fit accepts parameters, buffers and batches of all kinds, whatever its default callbacks do with them."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from tests.support import Regression, loader_of, make_trainer, nested_tensor, sgd
from trainer.callbacks import RunRecorder, SyncDetector, Throughput
from trainer.errors import NonFiniteError


def quantized():
    with warnings.catch_warnings(action="ignore"):  # deprecated
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


KINDS = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": nested_tensor,
    "quantized": quantized,
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "infinite": lambda: torch.full((3,), float("-inf")),
    "empty": lambda: torch.ones(0),
    "conjugate": lambda: torch.tensor([1j]).conj(),
    "uninitialized": lambda: nn.LazyBatchNorm1d(),
    "scripted": lambda: torch.jit.script(nn.BatchNorm1d(4)),
    "frozen_sparse": lambda: nn.ParameterList([nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)]),
    "frozen_integers": lambda: nn.ParameterList([nn.Parameter(torch.arange(3), requires_grad=False)]),
}


class Unusual(Regression):
    """Has a part that it does not use. Its loss is NaN in batch 1, if ``breaks``."""

    def __init__(self, part, breaks):
        super().__init__(nn.Linear(4, 1))
        self.breaks = breaks
        if isinstance(part, nn.Module):
            self.part = part
        else:
            self.register_buffer("part", part)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).mean() * (float("nan") if self.breaks and batch_idx == 1 else 1.0)


LAZY, SPARSE = ("uninitialized",), ("sparse", "frozen_sparse")


@pytest.mark.parametrize(
    ("precision", "kind"),
    [
        *(("16-mixed", kind) for kind in KINDS),
        *(("32-true", kind) for kind in (*LAZY, *SPARSE)),
        *(("bf16-true", kind) for kind in (*LAZY, *SPARSE, "quantized", "scripted", "frozen_integers")),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature", "ignore:This checkpoint can only be read with")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_module_is_trained_and_saved(tmp_path, kind, precision):
    module = Unusual(KINDS[kind](), breaks=precision == "16-mixed")
    trainer = make_trainer(tmp_path, precision=precision, log_every_n_steps=2, enable_checkpointing=True)
    before = module.net.weight.detach().clone()
    trainer.fit(module, loader_of([[torch.ones(2, 4)]] * 4))
    assert trainer.global_step == 4
    assert not module.net.weight.equal(before.to(module.dtype))


def test_broken_weights_are_found_beside_a_sparse_buffer(tmp_path):
    module = Unusual(KINDS["sparse"](), breaks=True)
    trainer = make_trainer(tmp_path, log_every_n_steps=2, enable_checkpointing=True)
    with pytest.raises(NonFiniteError, match=r"net\.weight"):
        trainer.fit(module, loader_of([[torch.ones(2, 4)]] * 4))


def test_module_without_parameters_is_trained(tmp_path):
    """Its optimizer updates the parameters of an object that it does not own."""
    net = nn.Linear(4, 1)
    module = Regression(nn.Identity(), lambda _: sgd(net.parameters()))
    module.training_step = lambda batch, batch_idx: net(batch[0]).mean() * (float("nan") if batch_idx == 1 else 1.0)
    trainer = make_trainer(tmp_path, precision="16-mixed", log_every_n_steps=2)
    before = net.weight.detach().clone()
    trainer.fit(module, loader_of([[torch.ones(2, 4)]] * 8))
    assert (trainer.global_step, trainer.skipped_steps) == (8, 2)
    torch.testing.assert_close(net.weight, before - 0.6)


class Graph:
    """A batch of a class that cannot be looked into."""

    def __init__(self):
        self.edges = torch.eye(3)


class Constant(Unusual):
    """Ignores its batches. If it breaks, its loss is NaN in batch 1, so that the batches are examined."""

    def __init__(self, breaks=True):
        super().__init__(torch.ones(1), breaks)
        self.batches = []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch)
        return super().training_step([torch.ones(2, 4)], batch_idx)


BATCHES = {
    "sparse": torch.eye(3).to_sparse(), "nested": nested_tensor(), "text": ["a", None],
    "graph": [Graph(), torch.ones(2)], "array": {"a": np.ones(3), "b": np.array([object()])},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "precision"), [*((kind, "16-mixed") for kind in BATCHES), ("sparse", "32-true"), ("graph", "bf16-true")]
)
def test_batches_reach_the_module(tmp_path, kind, precision):
    module, batch = Constant(), BATCHES[kind]
    make_trainer(tmp_path, precision=precision, log_every_n_steps=2).fit(module, loader_of([batch] * 4))
    assert [type(one) for one in module.batches] == [type(batch)] * 4


@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_callbacks_that_read_batches_accept_them(tmp_path, kind):
    callbacks = [RunRecorder(), SyncDetector(batches=2, after=1), Throughput(warmup_batches=1)]
    trainer = make_trainer(tmp_path, precision="bf16-true", callbacks=callbacks, enable_model_summary=True)
    trainer.fit(Constant(breaks=False), loader_of([BATCHES[kind]] * 4))
    assert trainer.global_step == 4
