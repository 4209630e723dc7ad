import math
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanSquaredError

from tests import census
from tests.diagnosis.layers import Amplifier, sequential
from tests.diagnosis.test_recording import Recording
from tests.support import (
    Regression,
    Skipping,
    loader_of,
    loss_of,
    make_batches,
    make_trainer,
    manual_step,
    native_fp16,
    sgd,
)
from trainer import Trainer
from trainer.callbacks import GradientCheck, OverflowReport
from trainer.diagnosis.examine import examine
from trainer.diagnosis.recording import RecordedBatch
from trainer.diagnosis.replay import FLOAT32, rewind, run_batch, undisturbed
from trainer.errors import ConfigurationError


class Everything(LightningModule):
    """Has state of every kind, and draws random numbers from every generator; automatic optimization."""

    fused = False

    def __init__(self):
        super().__init__()
        self.net = sequential()
        self.error = MeanSquaredError()
        self.hidden = {"error": MeanSquaredError()}
        self.losses = []
        self.steps = 0
        self.register_buffer("total", torch.zeros(()))
        self.generator = torch.Generator().manual_seed(5)
        self.target = nn.Linear(3, 3).requires_grad_(False)

    def loss(self, batch):
        x, y, gain = batch
        prediction = self.net(x + torch.rand(x.shape, generator=self.generator))
        loss = F.mse_loss(prediction, y) * gain
        self.steps += 1
        self.total += loss.detach().nan_to_num()
        self.losses.append(loss.detach())
        self.error(prediction.detach().float(), y)
        self.hidden["error"](prediction.detach().float(), y)
        with torch.no_grad():  # a teacher that follows
            self.target.weight.mul_(0.9).add_(0.1 * torch.rand(3, 3))
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=len(x))
        self.log_dict({"error": self.error, "steps": float(self.steps)})
        if self.logger is not None:
            self.logger.log_metrics({"by hand": float(self.steps)}, step=self.steps)
            self.logger.experiment.log_metrics({"by hand too": 1.0}, step=self.steps)
        return loss

    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch), "more": 1}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9, fused=self.fused)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


class ByHand(Everything):
    """The same in manual optimization, with two optimizers and calls between them."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        schedules = self.lr_schedulers()
        for optimizer, schedule in zip(self.optimizers(), schedules, strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad(set_to_none=False)
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, 1.0, "norm")
            optimizer.step()
            schedule.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        make = partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=self.fused)
        optimizers = [make(part.parameters()) for part in (self.net[:4], self.net[4:])]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]


class Replays(Recording):
    """Replays every batch after its optimizer step, and checks that no state changed."""

    def __init__(self):
        super().__init__()
        self.findings = []

    def on_after_optimizer_step(self, trainer, pl_module, optimizer, outcome):
        if optimizer is trainer.optimizers[0]:
            gradients = [p.grad for p in pl_module.parameters()]
            values = [None if g is None else g.clone() for g in gradients]
            self.findings.append(examine(trainer.run_state, self.recorder.closed, outcome.scale))
            for p, gradient, value in zip(pl_module.parameters(), gradients, values, strict=True):
                assert p.grad is gradient
                assert gradient is None or torch.equal(gradient.nan_to_num(), value.nan_to_num())


def everything(folder, module, callback, **arguments):
    """Fit with overflows, and return the whole state."""
    torch.manual_seed(11)
    callbacks = [callback, OverflowReport(after=None, collapse_after=None, at_floor=None)]  # not the default one
    batches = make_batches(9, gains={2: 1e30, 3: 1e30, 4: 1e30, 5: 1e30})
    given = {"precision": native_fp16(init_scale=256.0), "logger": CSVLogger(folder), "log_every_n_steps": 4}
    trainer = make_trainer(folder, callbacks=callbacks, **given, **arguments)
    trainer.fit(module, loader_of(batches))
    state = {
        "module": module,
        "states": [one.state_dict() for one in (*trainer.optimizers, trainer.scaler)],
        "schedules": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "metrics": dict(trainer.callback_metrics),
        "progress": trainer.progress,
        "rows": (folder / "lightning_logs/version_0/metrics.csv").read_text(),
        "modes": (torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()),
    }
    return census.take(state, without=(Trainer,))


@pytest.mark.parametrize(("kind", "window", "arrives"), [(Everything, 2, "at once"), (ByHand, 1, "late")])
def test_run_with_replays_is_the_run_without(tmp_path, kind, window, arrives, request, monkeypatch):
    """Also with late outcomes as on a GPU: after the gradients of the next batch, or inside its step."""
    if arrives == "late":
        request.getfixturevalue("late")
        monkeypatch.setattr(Everything, "fused", True)
    seen, replays = [], Replays()
    for name, callback in (("without", Callback()), ("with", replays)):
        torch.manual_seed(3)
        seen.append(everything(tmp_path / name, kind(), callback, accumulate_grad_batches=window))
    assert census.differences(*seen) == []
    assert len(replays.findings) >= 5
    assert not any(finding.error for finding in replays.findings)
    assert {finding.fails for finding in replays.findings} == {True, False}


def recorded_fit(folder, module, look, batches=None, **arguments):
    """Run a fit that calls ``look(trainer, recorded)`` before its only step."""

    class Look(Recording):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            if optimizer is trainer.optimizers[0]:
                super().on_before_optimizer_step(trainer, pl_module, optimizer)
                look(trainer, self.recorder.closed[0])

    given = {"precision": native_fp16(init_scale=256.0)} | arguments
    trainer = make_trainer(folder, limit_train_batches=1, callbacks=[Look()], **given)
    trainer.fit(module, loader_of(batches or make_batches(1)))


def test_forward_is_bitwise_equal(tmp_path):
    """With dropout and a buffer, from their states before the batch, and with hooks that draw random numbers."""
    losses = []

    class Module(Regression):
        def __init__(self):
            super().__init__(sequential())
            self.register_buffer("gain", torch.ones(()))

        def on_train_batch_start(self, batch, batch_idx):
            torch.rand(7)

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx) * self.gain.item()
            self.gain *= 1.5
            losses.append(loss.item())
            return loss

    def look(trainer, recorded):
        torch.rand(5)
        with undisturbed(trainer.run_state) as now:
            for _ in range(2):
                rewind(trainer.run_state, now, recorded)
                run_batch(trainer.run_state, recorded, lambda loss: losses.append(loss.item()))

    recorded_fit(tmp_path, Module(), look)
    assert len(losses) == 5
    assert len(set(losses)) == 1


def test_gradients_outside_the_module_are_preserved(tmp_path):
    gain = torch.ones(1, requires_grad=True)

    def look(trainer, recorded):
        before = gain.grad.clone()
        with undisturbed(trainer.run_state) as now:
            rewind(trainer.run_state, now, recorded)
            run_batch(trainer.run_state, recorded, lambda loss: loss.backward())
        assert gain.grad.equal(before)

    def optimizer(parameters):
        return sgd([*parameters, gain])

    def change(loss, batch_idx):
        return loss * gain.sum()

    recorded_fit(tmp_path, Regression(sequential(), optimizer, change=change), look)


def test_error_leaves_no_trace_either(tmp_path):
    module = Everything()

    def fail(batch):
        Everything.loss(module, batch)
        module.net.eval()
        raise RuntimeError("in the replay")

    def look(trainer, recorded):
        module.loss = fail
        rng = torch.get_rng_state()
        loggers, calls = trainer.loggers, trainer.engine.module_calls
        assert examine(trainer.run_state, [recorded], 1.0).error == "RuntimeError: in the replay"
        assert torch.equal(torch.get_rng_state(), rng)
        assert module.net.training
        assert module.steps == 1
        assert trainer.loggers == loggers
        assert trainer.engine.module_calls is calls
        assert not any(part._forward_hooks for part in module.modules())

    recorded_fit(tmp_path, module, look)


def test_each_backward_of_a_manual_step_is_examined(tmp_path):
    class Gan(Regression):
        """The second loss overflows; the optimizer of the first steps, that of the second does not."""

        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            x, y, _ = batch
            for net, optimizer in zip(self.net, self.optimizers(), strict=True):
                manual_step(self, F.mse_loss(net(x), y), optimizer)

        def configure_optimizers(self):
            return [torch.optim.SGD(net.parameters(), lr=0.1) for net in self.net]

    findings = []
    gan = Gan(nn.ModuleList([nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 3), Amplifier())]))
    recorded_fit(
        tmp_path, gan, lambda trainer, recorded: findings.append(examine(trainer.run_state, [recorded], 1024.0))
    )
    (finding,) = findings
    assert (finding.fails, finding.error) == (True, "")
    assert finding.parameters[0].startswith("net.1.0.")
    assert finding.origin.module == "net.1.1"


def test_closures_run_once(tmp_path):
    class Closure(Regression):
        automatic_optimization, evaluated = False, 0

        def training_step(self, batch):
            def closure():
                self.evaluated += 1
                loss = super(Closure, self).training_step(batch, 0)
                self.manual_backward(loss)
                return loss

            self.optimizers().step(closure)

    findings, module = [], Closure()
    recorded_fit(
        tmp_path, module, lambda trainer, recorded: findings.append(examine(trainer.run_state, [recorded], 1.0))
    )
    assert module.evaluated == 1
    assert math.isfinite(findings[0].loss)
    assert not findings[0].error


def test_batch_without_a_loss_is_not_a_failure(tmp_path):
    module, findings = Skipping(), []

    def look(trainer, recorded):
        module.none_in = (0,)
        findings.append(examine(trainer.run_state, [recorded], 1.0))

    recorded_fit(tmp_path, module, look)
    assert not findings[0].fails
    assert math.isnan(findings[0].loss)


def test_float32_replaces_16_bits_of_the_batch_and_of_the_code(tmp_path):
    class Casts(Regression):
        def training_step(self, batch, batch_idx):
            x, y, _ = batch
            mean = x.to(torch.float16).half().mean() + torch.zeros((), dtype=torch.float16)
            dtypes.append({x.dtype, mean.dtype, torch.empty(1, dtype=torch.bfloat16).dtype})
            return F.mse_loss(self.net(x.to(mean.dtype) if x.dtype == torch.float32 else x), y)

    class Replays(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            batch = RecordedBatch(trainer.loop.metrics.batch, 0, 0, trainer.loop.mean, {})
            finding = examine(trainer.run_state, [batch], 1.0, FLOAT32)
            assert (finding.error, finding.fails) == ("", False)

    dtypes = []
    batches = [[x.half(), y, gain] for x, y, gain in make_batches(1)]
    make_trainer(tmp_path, precision=native_fp16(), callbacks=[Replays()]).fit(Casts(), loader_of(batches))
    assert dtypes[0] == {torch.float16, torch.bfloat16}
    assert dtypes[1] == {torch.float32}


@pytest.mark.whole
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated", "ignore:The .grad attribute")  # torch 2.10's dynamo
@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_modules_run_eagerly(tmp_path, in_place):
    module, findings = Regression(sequential(Amplifier(), 4)), []
    if in_place:
        module.net.compile(backend="eager")
    else:
        module.net = torch.compile(module.net, backend="eager")
    recorded_fit(
        tmp_path, module, lambda trainer, recorded: findings.append(examine(trainer.run_state, [recorded], 1024.0))
    )
    assert findings[0].origin.module == "net.4"


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
@pytest.mark.parametrize(
    ("subject", "arguments"),
    [
        ("detect_anomaly=True with loss scaling", {"precision": native_fp16(), "detect_anomaly": True}),
        ("GradientCheck", {"precision": "64-true", "callbacks": [GradientCheck()]}),
    ],
)
def test_features_that_repeat_steps_refuse_one_that_draws_its_batches(tmp_path, subject, arguments):
    class Draws(Regression):
        def training_step(self, dataloader_iter):
            return loss_of(self.net, next(dataloader_iter)[0])

    with pytest.raises(ConfigurationError, match=f"{subject} repeats steps, .* draws its own batches"):
        make_trainer(tmp_path, **arguments).fit(Draws(), loader_of(make_batches(2)))
