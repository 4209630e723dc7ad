"""Buffers with ``persistent=False``: a resumed run has those of the uninterrupted run."""

from collections import OrderedDict

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.nn import functional as F

from tests.support import Regression, SavesAt, assert_identical, loader_of, make_batches, make_trainer, momentum
from trainer import CheckpointFiles
from trainer.errors import ResumeError

BATCHES = make_batches(6)


class Cache(nn.Module):
    """Buffers that change in many ways, most of them with an effect on the loss."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.register_buffer("grows", torch.zeros(0, 3), persistent=False)
        self.register_buffer("later", None, persistent=False)
        self.register_buffer("goes", torch.ones(1), persistent=False)
        self.register_buffer("constant", torch.randn(3), persistent=False)  # another one in each process
        self.register_buffer("expanded", torch.ones(1).expand(3), persistent=False)
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("shared", torch.ones(1), persistent=False)
        self.again = nn.Module()
        self.again.register_buffer("shared", self.shared, persistent=False)
        self.becomes_one = 0

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.3)
                self.grows = torch.cat([self.grows, x.detach()[:1].to(self.grows.dtype)])
                self.kept += 0.5
                if int(self.count) == 2:
                    self.later = x.detach()[0].clone()
                    self.goes = None
                    self.register_buffer("lazy", x.detach().mean().reshape(1), persistent=False)
                    vars(self).pop("becomes_one", None)
                    self.register_buffer("becomes_one", torch.ones(2), persistent=False)
                if int(self.count) == 3:
                    self.shared = self.again.shared = torch.full((2,), 0.5)
        value = x + self.mean + self.grows.mean(0) * self.count / 10 + self.constant
        for extra in (self.later, self.goes, getattr(self, "lazy", None), self.shared.sum()):
            if extra is not None:
                value = value + extra
        return value.to(x.dtype)


class Caching(Regression):
    def __init__(self):
        super().__init__(optimizer=momentum)
        self.cache = Cache()

    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        dtype = self.net[0].weight.dtype
        return F.mse_loss(self.cache(self.net(x.to(dtype))), y.to(dtype))


class Compiled(Caching):
    """Its parts have the names that ``torch.compile`` gives them."""

    def __init__(self):
        super().__init__()
        self.cache = nn.Sequential(OrderedDict(_orig_mod=self.cache))


def values_of(module):
    return {
        f"{path}.{name}": None if value is None else value.clone()
        for path, part in module.named_modules()
        for name, value in [*part._buffers.items(), *part._parameters.items()]
    }


def fit(folder, seed, *callbacks, ckpt=None, kind=Caching, **arguments):
    torch.manual_seed(seed)
    module = kind()
    trainer = make_trainer(folder, callbacks=list(callbacks), **{"enable_checkpointing": bool(callbacks)} | arguments)
    trainer.fit(module, loader_of(BATCHES), ckpt_path=ckpt)
    return trainer, module


@pytest.mark.parametrize(
    ("steps", "arguments", "kind"),
    [
        (1, {}, Caching),
        (2, {"precision": "bf16-true", "plugins": CheckpointFiles(sharded=True)}, Caching),
        (5, {"plugins": CheckpointFiles(asynchronous=True)}, Caching),
        (3, {}, Compiled),
    ],
)
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, steps, arguments, kind):
    path = tmp_path / "a.ckpt"
    _, whole = fit(tmp_path, 1, SavesAt(path, steps), kind=kind, **arguments)
    _, resumed = fit(tmp_path, 2, kind=kind, ckpt=path, **arguments)
    assert_identical(values_of(resumed), values_of(whole))
    cache, whole_cache = (getattr(one.cache, "_orig_mod", one.cache) for one in (resumed, whole))
    assert cache.expanded.stride() == whole_cache.expanded.stride()
    assert "cache.mean" not in resumed.state_dict()
    assert cache.lazy is not None


def test_run_that_is_rolled_back_has_the_buffers_of_then(tmp_path):
    class RollsBack(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 0:
                self.then = values_of(module)
            if batch_idx == 4:
                assert trainer.roll_back(1) is not None
                self.now = values_of(module)

    rolls = RollsBack()
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    fit(tmp_path, 1, rolls, saver, enable_checkpointing=True)
    new = {"cache.lazy", "cache.becomes_one"}  # registered in between
    assert_identical({name: value for name, value in rolls.now.items() if name not in new}, rolls.then)


def test_buffers_follow_another_precision(tmp_path):
    fit(tmp_path, 1)[0].save_checkpoint(tmp_path / "a.ckpt")
    _, module = fit(tmp_path, 2, precision="bf16-true", ckpt=tmp_path / "a.ckpt", max_epochs=2)
    assert (module.cache.mean.dtype, module.cache.count.dtype) == (torch.bfloat16, torch.int64)
    assert int(module.cache.count) == 12


class Averaged(Regression):
    def __init__(self):
        super().__init__(nn.Linear(6, 3))
        self.register_buffer("noise", torch.randn(3), persistent=False)

    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        self.noise.add_(x.mean())
        return F.mse_loss(self.net(x) + self.noise, y)


def test_averages_have_buffers_too(tmp_path):
    """They are averaged like weights, so that the average has its own buffers."""

    class Last(EMAWeightAveraging):
        def on_train_end(self, trainer, pl_module):
            self.last = values_of(self._average_model)

    averages = [Last(decay=0.5, use_buffers=True) for _ in range(2)]
    path = tmp_path / "a.ckpt"
    fit(tmp_path, 1, averages[0], SavesAt(path, 3), kind=Averaged)
    fit(tmp_path, 2, averages[1], kind=Averaged, ckpt=path)
    assert_identical(averages[1].last, averages[0].last)


class MakesMore(Averaged):
    """Creates a module in its third step."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.more = nn.Module()
            self.more.register_buffer("seen", torch.ones(1), persistent=False)
        return super().training_step(batch, batch_idx)


def test_buffer_of_a_missing_module_is_refused(tmp_path):
    path = tmp_path / "a.ckpt"
    fit(tmp_path, 1, SavesAt(path, 3), kind=MakesMore)
    with pytest.raises(ResumeError, match=r"Module\.seen cannot be .*configure_model.*exact_resume=False"):
        fit(tmp_path, 1, kind=MakesMore, ckpt=path)
    with pytest.warns(UserWarning, match=r"Module\.seen"):
        fit(tmp_path, 1, kind=MakesMore, ckpt=path, exact_resume=False)

    class Makes(MakesMore):
        def configure_model(self):
            self.more = nn.Module()

    _, module = fit(tmp_path, 1, kind=Makes, ckpt=path)
    assert module.more.seen == 1


class Outside(Regression):
    """Trains a module in a plain list and a tensor, which are not in its state dict."""

    def __init__(self):
        super().__init__(nn.Linear(6, 6))
        self.heads = [nn.Linear(6, 3)]
        self.gain = torch.ones(1, requires_grad=True)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.heads[0](self.net(batch[0])) * self.gain, batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam([*self.parameters(), *self.heads[0].parameters(), self.gain], 0.05)


@pytest.mark.parametrize("batches_per_step", [1, 4])
def test_trained_parameters_outside_the_module_are_restored(tmp_path, batches_per_step):
    path, arguments = tmp_path / "a.ckpt", {"accumulate_grad_batches": batches_per_step}
    _, whole = fit(tmp_path, 1, SavesAt(path, 1), kind=Outside, **arguments)  # inside a window, if it has 4 batches
    _, resumed = fit(tmp_path, 2, ckpt=path, kind=Outside, **arguments)
    assert_identical(values_of(resumed.heads[0]), values_of(whole.heads[0]))
    assert_identical(values_of(resumed.net), values_of(whole.net))
    assert resumed.gain.equal(whole.gain)
    assert not whole.gain.equal(torch.ones(1))


def test_other_trained_tensors_are_named(tmp_path):
    """They are not restored if their shape has changed, and not saved if they are in a container."""

    class Other(Outside):
        def configure_optimizers(self):
            self.gain = torch.ones(3, requires_grad=True)
            return super().configure_optimizers()

    class Listed(Outside):
        def configure_optimizers(self):
            self.gains = [self.gain.detach()]  # of the same memory
            return super().configure_optimizers()

    path = tmp_path / "a.ckpt"
    fit(tmp_path, 1, SavesAt(path, 2), kind=Outside)
    with (
        pytest.warns(UserWarning, match=r"not restored: Outside\.gain\. All others"),
        pytest.raises(RuntimeError, match="shape"),  # Adam's states have the other shape
    ):
        fit(tmp_path, 2, ckpt=path, kind=Other)
    with pytest.warns(UserWarning, match=r"lacks values .*Listed\.gains\. If"):
        fit(tmp_path, 2, SavesAt(tmp_path / "b.ckpt", 2), kind=Listed)
