"""Manual optimization with steps in hooks after ``training_step``, compared to hand-written loops.

A step in any hook is completed (scale, outcome, averages) before the next backward pass, before a read or save, and at
the end of the run.
"""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, EMAWeightAveraging
from torch import nn

from tests import census
from tests.loop.test_manual_optimization import PRECISIONS, Manual, Outcomes, Pair
from tests.parity import assert_same_weights
from tests.support import (
    OPTIMIZERS,
    Regression,
    SavesEverywhere,
    adam,
    forward_context,
    loader_of,
    loss_of,
    make_batches,
    make_net,
    make_trainer,
    manual_step,
    norm_of,
    plugin_of,
    scaler_of,
    train_by_hand,
)
from trainer import Trainer

BATCHES, EPOCHS = 5, 2  # an epoch ends inside an accumulation window
POISON = {2: 1e30, 7: 1e30, 9: 1e30}  # of all batches; the last one overflows

AFTER_BATCH = ["module.on_train_batch_end", "callback.on_train_batch_end"]
HOOKS = [
    *AFTER_BATCH,
    "module.on_train_batch_start",
    "callback.on_train_batch_start",
    "module.on_train_epoch_end",
    "callback.on_train_epoch_end",
    "module.on_train_epoch_start",
    "module.on_validation_start",
    "module.on_validation_epoch_end",
    "module.on_validation_end",
    "callback.on_validation_end",
    "module.on_train_end",
    "callback.on_train_end",
    "module.on_fit_end",
]


class StepsIn(Regression):
    """Runs backward passes in ``training_step``, and steps in a hook of the module or of a callback."""

    def __init__(self, hook, *args, gains=None, **how):
        super().__init__(*args, **how)
        self.automatic_optimization = False
        self.hook, self.gains = hook, gains or {}
        self.moments = []  # numbers of batches after which it has stepped
        owner, name = hook.split(".")
        if owner == "module":
            setattr(self, name, self.step_if_due)

    def training_step(self, batch, batch_idx):
        self.manual_backward(loss_of(self.net, batch) * self.gains.get(self.trainer.progress.batches, 1.0) / 2)

    def validation_step(self, batch, batch_idx): ...

    def step_if_due(self, *_):
        batches = self.trainer.progress.batches
        if batches and not ("batch" in self.hook and batches % 2):  # hooks of batches do so every second time
            self.optimizers().step()
            self.optimizers().zero_grad()
            self.moments.append(batches)

    def configure_callbacks(self):
        owner, name = self.hook.split(".")
        if owner == "module":
            return []
        return [type("Steps", (Callback,), {name: lambda _, trainer, module, *more: module.step_if_due()})()]


def train_in_moments(moments, precision, optimizer, gains):
    """Train with a hand-written loop and one ``update`` per step. Return the net, the scaler and the skipped steps."""
    net, scaler, batches = make_net(), scaler_of(precision), make_batches(BATCHES)
    stepper, skips = optimizer(net.parameters()), 0
    for index in range(BATCHES * EPOCHS):
        with forward_context(precision):
            loss = loss_of(net, batches[index % BATCHES]) * gains.get(index, 1.0) / 2
        scaler.scale(loss).backward()
        if index + 1 in moments:
            scale = scaler.get_scale()
            scaler.step(stepper)
            scaler.update()
            stepper.zero_grad()
            skips += scaler.get_scale() < scale
    return net, scaler, skips


def fit(folder, hook, *callbacks, optimizer, precision="16-mixed", ckpt_path=None, **arguments):
    """Fit with validations every second batch, and with three overflows in 16-mixed."""
    module = StepsIn(hook, make_net(), optimizer, gains=POISON if precision == "16-mixed" else {})
    options = {"max_epochs": EPOCHS, "val_check_interval": 2, "num_sanity_val_steps": 0}
    options["enable_checkpointing"] = any(isinstance(callback, Checkpoint) for callback in callbacks)
    trainer = make_trainer(folder, precision=plugin_of(precision), callbacks=list(callbacks), **(options | arguments))
    trainer.fit(module, loader_of(make_batches(BATCHES)), loader_of(make_batches(1)), ckpt_path=ckpt_path)
    return trainer, module


@pytest.mark.parametrize("optimizer", ["sgd", "adam-fused"])
@pytest.mark.parametrize(("precision", "hook"), [
    *(("16-mixed", hook) for hook in HOOKS),
    *((precision, hook) for precision in PRECISIONS[:2] for hook in HOOKS[::4]),
])  # fmt: skip
def test_step_in_any_hook_equals_a_hand_written_loop(tmp_path, precision, hook, optimizer):
    make, outcomes = OPTIMIZERS[optimizer], Outcomes()
    trainer, module = fit(tmp_path, hook, outcomes, optimizer=make, precision=precision, num_sanity_val_steps=1)
    net, scaler, skips = train_in_moments(module.moments, precision, make, module.gains)
    assert_same_weights(module.net, net)
    assert trainer.scaler.get_scale() == trainer.scaler.current_scale == scaler.get_scale()
    if scaler.is_enabled():
        assert trainer.scaler._get_growth_tracker() == scaler._get_growth_tracker()
    assert trainer.skipped_steps == trainer.progress.skipped_steps == skips
    assert trainer.global_step == len(outcomes.outcomes) == len(module.moments) > 0


# --- averages, checkpoints, readers ---------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize("hook", [
    *AFTER_BATCH, "module.on_train_batch_start", "module.on_train_epoch_end", "callback.on_train_epoch_end",
    "module.on_validation_epoch_end", "callback.on_validation_end",
])  # fmt: skip
def test_each_checkpoint_resumes_exactly(tmp_path, hook):
    """Also after an overflow, and inside an accumulation window. The average is compared, too."""

    def run(*callbacks, **arguments):
        average = EMAWeightAveraging(decay=0.5)
        trainer, module = fit(tmp_path, hook, average, *callbacks, optimizer=adam, **arguments)
        states = [one.state_dict() for one in (*trainer.optimizers, trainer.scaler)]
        return census.take({"module": module, "states": states, "progress": trainer.progress}, without=(Trainer,))

    saver = SavesEverywhere(tmp_path / "saved")
    expected = run(saver)
    assert len(saver.files) >= BATCHES * EPOCHS + EPOCHS
    for path in saver.files[::3] if hook in AFTER_BATCH[:1] else saver.files[1::6]:
        assert census.differences(run(ckpt_path=path), expected) == [], path.name


# --- several optimizers, one scale ----------------------------------------------------------------------------------


def true_gradients(net, batch, scale, gain):
    """Return the unscaled gradients of one loss."""
    with forward_context("16-mixed"):
        loss = loss_of(net, batch) * gain
    gradients = torch.autograd.grad(loss * scale, list(net.parameters()))
    return [gradient / scale for gradient in gradients]


class Accumulates(Pair):
    """The first net accumulates over three batches, the second one steps at each, in the hook ``where``."""

    def __init__(self, where, clips, optimizer, gains):
        super().__init__(optimizer=optimizer, gains=gains)
        self.where, self.clips = where, clips

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        if batch_idx % 3 == 0:
            first.zero_grad()
        second.zero_grad()
        for which, optimizer in enumerate((first, second)):
            self.manual_backward(loss_of(self.nets[which], batch) * self.gains.get((batch_idx, which), 1.0))
            if self.clips:
                self.clip_gradients(optimizer, 0.7, "value")
        if self.where == "training_step":
            self.steps(batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.where == "on_train_batch_end":
            self.steps(batch_idx)

    def steps(self, batch_idx):
        first, second = self.optimizers()
        second.step()
        if batch_idx % 3 == 2:
            first.step()


@pytest.mark.whole
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("where", ["training_step", "on_train_batch_end"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam-fused"])
def test_gradients_that_accumulate_follow_the_scale(tmp_path, late, optimizer, where, clips):
    """The other optimizer's steps change the scale meanwhile."""
    gains, make, batches = {(1, 1): 1e30, (4, 0): 1e30, (9, 1): 1e30}, OPTIMIZERS[optimizer], make_batches(12)
    module = Accumulates(where, clips, make, gains)
    trainer = make_trainer(tmp_path, precision=plugin_of("16-mixed", growth_interval=2))
    trainer.fit(module, loader_of(batches))

    nets, scale, tracker, skips = [make_net(0), make_net(1)], 2.0**9, 0, 0
    steppers, kept = [make(net.parameters()) for net in nets], [None, None]
    for i, batch in enumerate(batches):
        for which, net in enumerate(nets):
            new = true_gradients(net, batch, scale, gains.get((i, which), 1.0))
            old = None if which or i % 3 == 0 else kept[0]
            kept[which] = new if old is None else [a + b for a, b in zip(old, new, strict=True)]
            if clips:
                kept[which] = [torch.where(g.isfinite(), g.clamp(-0.7, 0.7), torch.nan) for g in kept[which]]
        overflowed = False
        for which in (1, 0) if i % 3 == 2 else (1,):
            if not all(g.isfinite().all() for g in kept[which]):
                overflowed = True
                continue
            for parameter, gradient in zip(nets[which].parameters(), kept[which], strict=True):
                parameter.grad = gradient
            steppers[which].step()
        skips += overflowed
        tracker = 0 if overflowed else tracker + 1
        scale = scale / 2 if overflowed else scale
        if tracker == 2:
            scale, tracker = scale * 2, 0
    assert_same_weights(module.nets, nn.ModuleList(nets))
    assert trainer.scaler.get_scale() == scale
    assert trainer.skipped_steps == skips == 3


@pytest.mark.parametrize("precision", PRECISIONS)
def test_clipped_gradient_without_a_step_is_unscaled_again(tmp_path, precision):
    """The module skips steps with a large norm. The next gradients must be unscaled again."""

    class LeavesOut(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss_of(self.net, batch))
            self.clip_gradients(optimizer, 0.3, "norm")
            if batch_idx % 2:
                optimizer.step()

    ours, theirs, batches = make_net(), make_net(), make_batches(6)
    make_trainer(tmp_path, precision=plugin_of(precision)).fit(LeavesOut(ours), loader_of(batches))
    train_by_hand(theirs, batches[1::2], precision=precision, scaler=scaler_of(precision), clip=norm_of(0.3))
    assert_same_weights(ours, theirs)


@pytest.mark.whole
@pytest.mark.parametrize("optimizer", ["sgd", "sgd-fused"])
def test_backward_pass_in_a_hook_has_the_scale_of_after_the_step(tmp_path, optimizer):
    """The hook ``on_train_batch_end`` of a GAN trains its second net after the first one's step."""

    class TrainsInHook(Pair):
        def training_step(self, batch, batch_idx):
            self.train_one(0, batch, batch_idx)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            for _ in range(2):
                self.train_one(1, batch, batch_idx)

        def train_one(self, which, batch, batch_idx):
            optimizer = self.optimizers()[which]
            manual_step(self, loss_of(self.nets[which], batch) * self.gains.get((batch_idx, which), 1.0), optimizer)

    gains, batches = {(1, 0): 1e30, (4, 1): 1e30}, make_batches(6)
    module = TrainsInHook(optimizer=OPTIMIZERS[optimizer], gains=gains)
    trainer = make_trainer(tmp_path, precision=plugin_of("16-mixed"))
    trainer.fit(module, loader_of(batches))
    nets, scaler, skips = [make_net(0), make_net(1)], scaler_of("16-mixed"), 0
    steppers = [OPTIMIZERS[optimizer](net.parameters()) for net in nets]
    for i, batch in enumerate(batches):
        for which in (0, 1, 1):
            steppers[which].zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=which == 0):  # hooks run without autocast
                loss = loss_of(nets[which], batch) * gains.get((i, which), 1.0)
            scale = scaler.get_scale()
            scaler.scale(loss).backward()
            scaler.step(steppers[which])
            scaler.update()
            skips += scaler.get_scale() < scale
    assert_same_weights(module.nets, nn.ModuleList(nets))
    assert trainer.scaler.get_scale() == scaler.get_scale()
    assert trainer.skipped_steps == skips
