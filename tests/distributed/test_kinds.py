"""Modules with weights and buffers of all kinds on two ranks: trained as by torch's DDP and resumed, or refused."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed import get_rank
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.setups import Saves
from tests.support import loader_of, make_trainer, needs_fsdp2
from trainer.errors import ResumeError, UnsupportedError


class Core(nn.Module):
    """A net with a part that :attr:`make` returns, and :attr:`use` applies to the features."""

    make: Callable[[], Any] = staticmethod(lambda: 1.0)
    use: Callable[[Any, Tensor], Tensor] = staticmethod(lambda part, x: x * part)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 4)
        self.part = self.make()

    def forward(self, x):
        return type(self).use(self.part, self.net(x).tanh()).abs().square().mean()

    def make_optimizer(self):
        groups = {True: [], False: []}
        for parameter in self.parameters():
            groups[getattr(parameter, "decays", True)].append(parameter)
        return torch.optim.AdamW(
            [{"params": groups[True], "weight_decay": 0.9}, {"params": groups[False], "weight_decay": 0.0}], lr=0.1
        )


class FrozenIntegers(Core):
    make = staticmethod(lambda: nn.Parameter(torch.arange(4), requires_grad=False))


class Marked(Core):
    """Has a parameter with an attribute that selects its group."""

    def __init__(self):
        super().__init__()
        self.part = nn.Parameter(torch.ones(4))
        self.part.decays = False


class Running(Core):
    """Updates a non-persistent buffer by the data of each rank."""

    make = staticmethod(lambda: nn.Buffer(torch.ones(4), persistent=False))

    def forward(self, x):
        self.part.mul_(0.9).add_(x.mean(0) * 0.1)
        return super().forward(x)


class Scripted(Core):
    use = staticmethod(lambda part, x: part(x) * torch.arange(4))

    def make(self):
        with warnings.catch_warnings(action="ignore"):  # deprecated
            return torch.jit.script(nn.BatchNorm1d(4))


class Complex(Core):
    make = staticmethod(lambda: nn.Parameter(torch.complex(torch.ones(4), torch.full((4,), 0.5))))


class Normalizing(Core):
    """Normalizes rows of its weight in each forward pass: other rows on each rank."""

    make = staticmethod(lambda: nn.Embedding(3, 4, max_norm=0.5))
    use = staticmethod(lambda part, x: x * part((x[:, 0] > 0).long() + get_rank()))


class Flattening(Core):
    """Has an optimizer with states of all parameters together."""

    def make_optimizer(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class SparseBuffer(Core):
    make = staticmethod(lambda: nn.Buffer(torch.eye(4).to_sparse()))


class FromBefore(Core):
    """Has its parameters in a list from before the fit."""

    def __init__(self):
        super().__init__()
        self.all = (list(self.net.parameters()),)

    def make_optimizer(self):
        return torch.optim.SGD([{"params": self.all[0]}], lr=0.1)


class Outside(Core):
    """Trains a layer in a plain list."""

    make = staticmethod(lambda: [nn.Linear(4, 4)])
    use = staticmethod(lambda part, x: part[0](x))

    def make_optimizer(self):
        return torch.optim.SGD([*self.parameters(), *self.part[0].parameters()], lr=0.1)


class ChangesWeights(Core):
    """Moves the weights of a frozen copy in ``training_step``."""

    make = staticmethod(lambda: nn.Linear(4, 4).requires_grad_(False))
    use = staticmethod(lambda part, x: x * part(x))

    def forward(self, x):
        self.part.weight.data.lerp_(self.net.weight.data, 0.5)
        return super().forward(x)


class Penalized(Core):
    """Has a penalty on the weights of a block."""

    make = staticmethod(lambda: nn.Sequential(nn.Linear(4, 4)))
    use = staticmethod(lambda part, x: part(x).square().mean() + part[0].weight.square().sum())


class Fitted(LightningModule):
    def __init__(self, kind):
        super().__init__()
        self.core = kind()

    def training_step(self, batch, batch_idx):
        return self.core(batch)

    def configure_optimizers(self):
        return self.core.make_optimizer()


def batches():
    return list(torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(get_rank())))


def tensors(core):
    return {name: one.detach().clone() for name, one in (*core.named_parameters(), *core.named_buffers())}


def fit(kind, strategy, folder, resume=False):
    """Return the tensors after a fit, with the default callbacks of a Trainer."""
    module = Fitted(kind)
    trainer = make_trainer(
        folder, devices=2, strategy=strategy, max_epochs=2, use_distributed_sampler=False,
        enable_checkpointing=True, callbacks=[Saves(str(folder), [3])],
    )  # fmt: skip
    trainer.fit(module, loader_of(batches()), ckpt_path=folder / "batch_3.ckpt" if resume else None)
    return tensors(module.core)


def refusal(kind, strategy, folder, resume=False):
    """Return the message of the error that refuses a fit."""
    with pytest.raises((UnsupportedError, ResumeError, RuntimeError)) as caught:
        fit(kind, strategy, folder, resume)
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def fit_by_hand(kind):
    core = kind()
    model, optimizer = DistributedDataParallel(core), core.make_optimizer()
    for batch in batches() * 2:

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            return loss

        optimizer.step(closure)
    return tensors(core)


TRAINED = [
    *((kind, "ddp") for kind in (FrozenIntegers, Scripted, Complex, Running)),
    *(pytest.param(kind, "fsdp", marks=needs_fsdp2) for kind in (FrozenIntegers, Marked, Running, Flattening)),
]


@pytest.mark.parametrize(("kind", "strategy"), TRAINED)
def test_fit_and_resumed_fit_equal_the_hand_written_loop(ranks, tmp_path, kind, strategy):
    expected = ranks.call(fit_by_hand, kind)
    for resume in (False, True):
        for found, tensors_by_hand in zip(ranks.call(fit, kind, strategy, tmp_path, resume), expected, strict=True):
            torch.testing.assert_close(found, tensors_by_hand, rtol=0, atol=1e-6)


def test_resumed_fit_is_refused_if_the_processes_have_different_weights(ranks, tmp_path):
    for found, by_hand in zip(
        ranks.call(fit, Normalizing, "ddp", tmp_path), ranks.call(fit_by_hand, Normalizing), strict=True
    ):
        torch.testing.assert_close(found, by_hand, rtol=0, atol=1e-6)
    for message in ranks.call(refusal, Normalizing, "ddp", tmp_path, True):
        assert re.search("the weights of each process cannot be restored.*Normalize the rows", message)


REFUSED = {
    (SparseBuffer, "ddp"): r"values of core\.part \(float32, sparse_coo\) cannot be sent",
    (SparseBuffer, "fsdp"): r"values of core\.part \(float32, sparse_coo\) cannot be sent",
    (Outside, "ddp"): r"not the module's, with the shapes \(4, 4\), \(4,\): .*averaged.*nn\.ModuleList",
    (Outside, "fsdp"): r"not the module's, with the shapes",
    (FromBefore, "fsdp"): r"replaced by shards",
    (Penalized, "fsdp"): r"penalty on the weights.*full_tensor",
    (ChangesWeights, "fsdp"): r"changed core\.part\.weight in place",
}


@needs_fsdp2
@pytest.mark.parametrize(("kind", "strategy"), REFUSED)
def test_fit_is_refused(ranks, tmp_path, kind, strategy):
    for message in ranks.call(refusal, kind, strategy, tmp_path):
        assert re.search(REFUSED[kind, strategy], message)
