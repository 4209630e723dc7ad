"""FastSettings: enabled settings, unchanged results of `channels_last`, and restoring after a run."""

import os
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.nn import functional as F

from tests.support import FakeTrainer, Regression, loader_of, make_batches, make_trainer
from trainer.callbacks import FastSettings
from trainer.callbacks.fast_settings import missing_settings

LAST = torch.channels_last


def in_force():
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    before = in_force()
    yield
    assert in_force() == before


def convnet():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.MaxPool2d(2),
        nn.ConvTranspose2d(8, 4, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def images(number):
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(4, 3, 8, 8, generator=generator), torch.arange(4) % 3] for _ in range(number)]


class Classifier(LightningModule):
    def __init__(self, lazily=False, **how):
        super().__init__()
        self.how = {"lr": 0.05, "momentum": 0.9} | how
        self.layouts = []
        if not lazily:
            self.net = convnet()

    def configure_model(self):
        if not hasattr(self, "net"):
            self.net = convnet()

    def training_step(self, batch, batch_idx):
        first = self.net[0](batch[0])
        self.layouts.append(first.is_contiguous(memory_format=LAST))
        return F.cross_entropy(self.net[1:](first), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), **self.how)


# --- channels_last ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "lazily"), [("32-true", True), ("bf16-mixed", False)])
def test_weights_equal_those_of_a_hand_written_loop(tmp_path, precision, lazily):
    module, net = Classifier(lazily), convnet().to(memory_format=LAST)
    fast = FastSettings()
    make_trainer(tmp_path, callbacks=[fast], precision=precision, max_epochs=2).fit(module, loader_of(images(4)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for x, y in images(4) * 2:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = F.cross_entropy(net(x.to(memory_format=LAST)), y)
        loss.backward()
        optimizer.step()
    assert fast.on == ["channels_last"]
    assert module.layouts == [True] * 8
    for mine, theirs in zip(module.net.state_dict().values(), net.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.is_contiguous()  # as before


@pytest.mark.parametrize("first", [True, False])
def test_checkpoints_equal_those_of_any_run(tmp_path, first):
    """Resumed with the other layout. A fused optimizer requires states with the layout of their weights."""

    def assert_same_layouts(trainer):
        for weight, state in trainer.optimizers[0].state.items():
            assert state["momentum_buffer"].stride() == weight.stride()

    def save(trainer, module, outputs, batch, batch_idx):
        assert_same_layouts(trainer)
        if batch_idx == 2:
            trainer.save_checkpoint(tmp_path / "inside a window.ckpt")
            trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)

    def fit(module, fast, epochs, ckpt=None, **hooks):
        callbacks = [LambdaCallback(**hooks), *[FastSettings()] * fast]
        trainer = make_trainer(tmp_path, callbacks=callbacks, max_epochs=epochs, accumulate_grad_batches=2)
        trainer.fit(module, loader_of(images(4)), ckpt_path=ckpt)
        return trainer

    trainer = fit(Classifier(fused=True), first, 1, on_train_batch_end=save)
    assert_same_layouts(trainer)
    trainer.save_checkpoint(tmp_path / "after the run.ckpt")
    fit(whole := Classifier(fused=True), False, 2)
    for file in tmp_path.glob("*.ckpt"):
        saved = torch.load(file, weights_only=True)
        assert all(value.is_contiguous() for value in saved["state_dict"].values())
        if file.stem != "weights":
            states = saved["optimizer_states"][0]["state"].values()
            assert all(one["momentum_buffer"].is_contiguous() for one in states)
            fit(resumed := Classifier(fused=True), not first, 2, file)
            for mine, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_module_without_convolutions_has_nothing_on(tmp_path):
    fast = FastSettings()
    make_trainer(tmp_path, callbacks=[fast]).fit(Regression(), loader_of(make_batches(2)))
    assert fast.run_facts() == {"fast_settings": []}


# --- on CUDA ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def has_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr("sys.platform", "linux")


ALL = ["TF32", "cudnn.benchmark", "expandable segments", "channels_last"]


@contextmanager
def on_cuda(engine=None, **arguments):
    """Return a context with the settings of a run, which lists those that are on."""
    fast, module = FastSettings(**arguments), Classifier()
    trainer = FakeTrainer(fast, device="cuda", optimizers=[], **({} if engine is None else {"engine": engine}))
    fast.setup(trainer, module, "fit")
    assert (torch.get_float32_matmul_precision() != "highest") is ("TF32" in fast.on)
    assert torch.backends.cudnn.benchmark is ("cudnn.benchmark" in fast.on)
    assert (os.environ.get("PYTORCH_ALLOC_CONF") == "expandable_segments:True") is ("expandable segments" in fast.on)
    yield fast.on
    fast.teardown(trainer, module, "fit")


@pytest.mark.parametrize("disabled", [None, *ALL])
def test_each_setting_is_on_for_the_run_unless_it_is_disabled(has_cuda, disabled):
    arguments = {} if disabled is None else {disabled.lower().replace(".", "_").replace(" ", "_"): False}
    with on_cuda(**arguments) as on:
        assert on == [one for one in ALL if one != disabled]
    assert in_force() == ("highest", False)
    assert "PYTORCH_ALLOC_CONF" not in os.environ


def test_settings_of_the_user_are_kept(has_cuda, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", own := "max_split_size_mb:128")
    torch.set_float32_matmul_precision("medium")
    try:
        with on_cuda() as on:
            assert on == ["TF32", "cudnn.benchmark", "channels_last"]
            assert torch.get_float32_matmul_precision() == "medium"
        assert torch.get_float32_matmul_precision() == "medium"
        assert (os.environ["PYTORCH_CUDA_ALLOC_CONF"], os.environ.get("PYTORCH_ALLOC_CONF")) == (own, None)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_settings_that_do_not_fit_the_run_are_off(has_cuda, monkeypatch):
    with on_cuda(SimpleNamespace(precision=SimpleNamespace(fp32_modules=("head",)), gradients=None)) as on:
        assert "TF32" not in on
    torch.use_deterministic_algorithms(True)
    try:
        with on_cuda() as on:
            assert "cudnn.benchmark" not in on
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with on_cuda() as on:
        assert "expandable segments" not in on


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    fast, module, seen = FastSettings(), Classifier(), []
    module.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    module.on_train_batch_end = lambda *_: seen.append(in_force())
    make_trainer(tmp_path, callbacks=[fast], accelerator="gpu", devices=1).fit(module, loader_of(images(2)))
    assert {"TF32", "cudnn.benchmark", "channels_last"} <= set(fast.on)
    assert seen == [("high", True)] * 2


# --- settings that are not used ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "fast", "precision", "expected"),
    [
        (Classifier, None, "32-true", {"TF32", "cudnn.benchmark", "channels_last", "expandable segments"}),
        (Regression, None, "16-mixed", {"expandable segments"}),
        (Classifier, FastSettings(), "32-true", set()),
        (Classifier, FastSettings(tf32=False, channels_last=False), "32-true", {"TF32", "channels_last"}),
    ],
)
def test_unused_settings_are_reported(module, fast, precision, expected):
    assert missing_settings(module(), fast, precision=precision).keys() == expected
