"""The training loop compared to a hand-written loop: every loss and every weight, bit for bit."""

import inspect
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainer as package
from tests.parity import assert_same_weights, lightning, lightnings_noise_ignored, ours
from tests.support import (
    OPTIMIZERS,
    Regression,
    Skipping,
    assert_same,
    fit_and_watch,
    forward_context,
    loader_of,
    loss_of,
    make_batches,
    make_net,
    make_trainer,
    native_fp16,
    norm_of,
    plugin_of,
    scaler_of,
    sgd,
    stream_of,
    train_by_hand,
    value_of,
)
from trainer.callbacks import GradientClipping
from trainer.diagnosis.recording import Evidence

NAN = float("nan")
POISON = {0: 1e30, 9: 1e30, 13: NAN}  # gains of batches with gradients that overflow or are NaN


# --- to the bit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_losses_and_weights_are_those_of_a_hand_written_loop(tmp_path, precision, optimizer):
    """The order of the data and the random numbers of dropout are the same, too."""
    make = OPTIMIZERS[optimizer]
    poison = POISON if precision == "16-mixed" else {}
    if optimizer == "momentum-fused":  # in the hand-written loop torch would start from uninitialised memory
        poison = {i: gain for i, gain in poison.items() if i > 0}
    batches = make_batches(20, gains=poison)
    plugin, scaler = plugin_of(precision), scaler_of(precision)
    ours, theirs = make_net(dropout=0.2), make_net(dropout=0.2)
    data = loader_of(batches, shuffle=optimizer != "momentum-fused")
    torch.manual_seed(5)
    trainer, trace = fit_and_watch(tmp_path, Regression(ours, make), data, precision=plugin, max_epochs=2)
    torch.manual_seed(5)
    expected = train_by_hand(theirs, data, precision=precision, scaler=scaler, optimizer=make, epochs=2)

    assert_same(trace, expected)
    assert len(trace.losses) == trainer.global_step == 40
    assert trainer.skipped_steps == sum(expected.skipped) == 2 * len(poison)
    assert trainer.scaler.get_scale() == scaler.get_scale()


def test_16_mixed_by_name_with_torchs_defaults_and_a_natural_overflow(tmp_path):
    batches = make_batches(8)
    trainer, trace = fit_and_watch(tmp_path, Regression(), batches, precision="16-mixed")
    assert_same(trace, train_by_hand(make_net(), batches, precision="16-mixed"))
    assert trace.scales[0] == 65536.0
    assert trainer.skipped_steps > 0  # this net overflows at 65536, so that a step is skipped without a gain


CLIPPING = {
    "norm": (GradientClipping(max_norm=0.3), norm_of(0.3)),
    "value": (GradientClipping(clip_value=0.02), value_of(0.02)),
    "largest element": (GradientClipping(max_norm=0.05, norm_type=torch.inf), norm_of(0.05, torch.inf)),
}


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "sgd-fused", "adamw", "adamw-fused"])
@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_clipping_and_accumulation(tmp_path, precision, clipping, optimizer, window):
    make, (callback, clip) = OPTIMIZERS[optimizer], CLIPPING[clipping]
    batches = make_batches(20, gains=POISON if precision == "16-mixed" else {})  # windows of 3: the last one has 2
    options = {"precision": plugin_of(precision), "callbacks": [callback], "accumulate_grad_batches": window}
    trainer, trace = fit_and_watch(tmp_path, Regression(optimizer=make), batches, **options)
    options = {"scaler": scaler_of(precision), "optimizer": make, "window": window, "clip": clip}
    assert_same(trace, train_by_hand(make_net(), batches, precision=precision, **options))
    limit = callback.limit
    assert any(norm > limit for norm in trace.norms), "nothing was clipped: the test would not see it missing"
    assert len(trace.norms) == trainer.global_step == (20 if window == 1 else 7)
    if precision == "16-mixed":
        assert all(not norm < torch.inf for norm, skip in zip(trace.norms, trace.skipped, strict=True) if skip)
        assert sum(trace.skipped) == 3


def test_losses_are_not_scaled_without_an_optimizer(tmp_path):
    module, batch = Regression(), make_batches(1)
    module.configure_optimizers = lambda: None
    module.on_after_backward = lambda: norms.append(nn.utils.get_total_norm([p.grad for p in module.parameters()]))
    norms = []
    for precision in ("32-true", "16-mixed"):
        with pytest.warns(UserWarning, match="no optimizer"):
            make_trainer(tmp_path, precision=precision).fit(module, loader_of(batch))
    assert_same_weights(module.net, make_net())
    torch.testing.assert_close(*norms, rtol=1e-2, atol=0)


def test_fit_after_an_interrupted_one_unscales_its_gradients(tmp_path):
    net, norms, batches = make_net(), [], make_batches(1) * 4
    optimizer = sgd(net.parameters())

    def interrupt(_):
        norms.append(nn.utils.get_total_norm([p.grad for p in net.parameters()]).item())
        if len(norms) == 1:
            raise RuntimeError("between unscale_ and step")

    module = Regression(net, lambda _: optimizer)  # the same object again: its entry in the scaler would be found
    module.on_before_optimizer_step = interrupt
    trainer = make_trainer(tmp_path, precision=native_fp16(init_scale=256.0))
    with pytest.raises(RuntimeError, match="between"):
        trainer.fit(module, loader_of(batches))
    trainer.fit(module, loader_of(batches))
    assert norms[1] == norms[0]


# --- the batch path ---------------------------------------------------------------------------------------------------


def test_at_most_four_own_functions_between_fit_and_training_step(tmp_path):
    home, calls = Path(package.__file__).parent, []

    def look(loss, batch_idx):
        calls[:] = [f.function for f in inspect.stack() if home in Path(f.filename).parents]
        return loss

    make_trainer(tmp_path).fit(Regression(change=look), loader_of(make_batches(1)))
    assert calls[::-1] == ["fit", "__call__", "run", "train_batch"]


def test_loop_has_few_attributes(tmp_path):
    """A reader of the loop meets each of them."""
    trainer = make_trainer(tmp_path)
    trainer.fit(Regression(), loader_of(make_batches(1)))
    assert len(vars(trainer.loop)) <= 15


# --- return values of training_step ---------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("none_in", [(0,), (1, 2), (0, 2), (7,), (0, 1, 2)])
def test_none_leaves_a_window_to_its_other_batches(tmp_path, precision, none_in):
    ours, theirs, batches = make_net(), make_net(), make_batches(8)
    module, options = Skipping(ours, none_in=none_in), {"precision": plugin_of(precision)}
    trainer, _ = fit_and_watch(tmp_path, module, batches, accumulate_grad_batches=3, **options)
    scaler = scaler_of(precision)
    for window in ((0, 1, 2), (3, 4, 5), (6, 7)):
        kept = [batches[i] for i in window if i not in none_in]
        train_by_hand(theirs, kept, precision=precision, scaler=scaler, window=3)
    assert trainer.global_step == 3
    tolerance = {"rtol": 0, "atol": 1e-4} if precision == "16-mixed" else {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close([*ours.parameters()], [*theirs.parameters()], **tolerance)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_window_of_none_only_changes_nothing(tmp_path, precision):
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    module = Skipping(none_in=(0, 1, 4, 5), schedule=schedule, interval="step")
    plugin = plugin_of(precision)
    trainer, trace = fit_and_watch(tmp_path, module, make_batches(6), precision=plugin, accumulate_grad_batches=2)
    assert all(map(torch.equal, trace.weights[1], make_net().parameters()))
    assert all(map(torch.equal, trace.weights[3], trace.weights[5]))
    assert len(trace.skipped) == 1
    assert trainer.global_step == 3  # as in Lightning: max_steps ends a training that never learns
    assert trace.rates == pytest.approx([0.1] * 3 + [0.01] * 3)


# --- hooks that a module may override -------------------------------------------------------------------------------


def test_module_may_override_backward_zero_grad_clipping_and_the_schedules_step(tmp_path):
    calls = []

    class Own(Regression):
        def backward(self, loss, *args):
            calls.append("backward")
            assert loss.item() == self.trainer.scaler.get_scale() * self.last.item()
            loss.backward()

        def training_step(self, batch, batch_idx):
            self.last = super().training_step(batch, batch_idx)
            return self.last

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            calls.append(("optimizer_zero_grad", epoch, batch_idx))
            optimizer.zero_grad(set_to_none=False)

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            calls.append(("configure_gradient_clipping", gradient_clip_val, gradient_clip_algorithm))
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

        def lr_scheduler_step(self, scheduler, metric):
            calls.append(("lr_scheduler_step", metric))
            scheduler.step()

    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=2)
    module, batches = Own(schedule=schedule, interval="step"), make_batches(4, gains={0: 1e30})
    options = {"precision": plugin_of("16-mixed"), "callbacks": [GradientClipping(max_norm=0.3)]}
    _, trace = fit_and_watch(tmp_path, module, batches, **options)
    options = {"scaler": scaler_of("16-mixed"), "clip": norm_of(0.3), "schedule": schedule}
    assert_same(trace, train_by_hand(make_net(), batches, precision="16-mixed", **options))
    step = ["backward", ("configure_gradient_clipping", 0.3, "norm"), ("lr_scheduler_step", None)]
    assert calls == [call for i in range(4) for call in (("optimizer_zero_grad", 0, i), *(step if i else step[:2]))]


@pytest.mark.parametrize("by_module", [True, False])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_gradients_clipped_within_a_window_are_added_to_others_of_the_same_scale(tmp_path, precision, by_module):
    ours, theirs, batches = make_net(), make_net(), make_batches(4)
    plugin, scaler, module = plugin_of(precision), scaler_of(precision), Regression(ours)
    module.on_after_backward = lambda: nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    if by_module:
        module.on_after_backward = lambda: module.clip_gradients(module.optimizers(), 0.1, "norm")
    make_trainer(tmp_path, precision=plugin, accumulate_grad_batches=2).fit(module, loader_of(batches))
    optimizer = sgd(theirs.parameters())
    for index, batch in enumerate(batches):
        with forward_context(precision):
            loss = loss_of(theirs, batch) / 2
        scaler.scale(loss).backward()
        for parameter in theirs.parameters():
            parameter.grad /= scaler.get_scale()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        if index % 2 == 0:
            for parameter in theirs.parameters():
                parameter.grad *= scaler.get_scale()
        else:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(ours, theirs)


@pytest.mark.parametrize("optimizer", ["sgd", "sgd-fused"])
def test_overflow_is_skipped_if_on_after_backward_clears_its_gradients(tmp_path, optimizer):
    def clear():
        if not all(p.grad.isfinite().all() for p in module.parameters()):
            module.zero_grad()

    module, batches = Regression(optimizer=OPTIMIZERS[optimizer]), make_batches(6, gains={2: torch.inf, 3: 1e30})
    module.on_after_backward = clear
    _, trace = fit_and_watch(tmp_path, module, batches, precision=plugin_of("16-mixed"))
    options = {"optimizer": OPTIMIZERS[optimizer], "scaler": scaler_of("16-mixed")}
    assert trace.skipped == [False, False, True, True, False, False]
    assert_same(trace, train_by_hand(make_net(), batches, precision="16-mixed", **options))


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_optimizer_step_may_clip_between_closure_and_step(tmp_path, precision, calls):
    class Clips(Regression):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            for _ in range(calls):
                optimizer_closure()
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.3)
            optimizer.step()

    batches, scaler = make_batches(6, gains={2: 1e30} if precision == "16-mixed" else {}), scaler_of(precision)
    _, trace = fit_and_watch(tmp_path, Clips(), batches, precision=plugin_of(precision))
    expected = train_by_hand(make_net(), batches, precision=precision, scaler=scaler, clip=norm_of(0.3))
    trace.norms = expected.norms  # unknown
    assert_same(trace, expected)


def test_hooks_on_scaled_gradients_are_a_warning(tmp_path):
    module = Regression()
    module.net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    module.net[1].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.warns(UserWarning, match=r"hooks on the gradients of net\.0\.weight, net\.1\.bias with .*16-mixed"):
        make_trainer(tmp_path, precision=native_fp16()).fit(module, loader_of(make_batches(1)))
    make_trainer(tmp_path, precision="bf16-mixed").fit(module, loader_of(make_batches(1)))


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_of_modules_on_scaled_gradients_are_a_warning(tmp_path, register):
    module = Regression()
    getattr(module.net[1], register)(lambda *_: None)
    with pytest.warns(UserWarning, match=r"hooks on the gradients of net\.1 with .*16-mixed"):
        make_trainer(tmp_path, precision=native_fp16()).fit(module, loader_of(make_batches(1)))
    make_trainer(tmp_path, precision="bf16-mixed").fit(module, loader_of(make_batches(1)))


# --- end of training --------------------------------------------------------------------------------------------------


class FastGradientSign(Regression):
    """Runs its own backward pass, which leaves gradients in the weights."""

    def training_step(self, batch, batch_idx):
        x, y, gain = batch
        x = x.clone().requires_grad_()
        super().training_step([x, y, gain], batch_idx).backward()
        assert all(p.grad is not None for p in self.parameters())
        return super().training_step([x.detach() + 0.1 * x.grad.sign(), y, gain], batch_idx)


@pytest.mark.parametrize("window", [1, 2])
def test_gradients_left_by_training_step_are_cleared(window):
    """This applies to the first batch of a window, as under Lightning."""
    weights = []
    for make in (ours, lightning):
        module = FastGradientSign(make_net())
        with lightnings_noise_ignored():
            make(max_epochs=1, accumulate_grad_batches=window).fit(module, loader_of(make_batches(6)))
        weights.append(list(module.parameters()))
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize(
    ("overrides_hook", "seen"),
    [(False, [False, True, False, True]), (True, [False, "cleared", True, True, "cleared", True])],
)
def test_gradients_are_freed_before_a_forward_pass_unless_a_hook_runs_at_that_point(tmp_path, overrides_hook, seen):
    found = []
    module = Regression(
        change=lambda loss, _: found.append(any(p.grad is not None for p in module.parameters())) or loss
    )
    if overrides_hook:
        module.on_before_zero_grad = lambda optimizer: found.append("cleared")
    make_trainer(tmp_path, accumulate_grad_batches=2).fit(module, loader_of(make_batches(4)))
    assert found == seen


def test_validation_has_the_memory_of_the_last_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(Evidence, "_record", lambda evidence, scale, loss: scale(loss))  # which keeps some
    alive = []

    class Watches(Regression):
        def training_step(self, batch, batch_idx):
            self.batch = weakref.ref(batch[0])
            return super().training_step([*batch[:2], batch[2].mean()], batch_idx)

        def validation_step(self, batch, batch_idx):
            alive.append(self.batch() is not None)

    loader = DataLoader(TensorDataset(*map(torch.stack, zip(*make_batches(8), strict=True))), batch_size=2)
    make_trainer(tmp_path, val_check_interval=2, num_sanity_val_steps=0).fit(Watches(), loader, loader)
    assert alive == [False] * 8


@pytest.mark.parametrize(("stop_at", "steps"), [(0, 0), (3, 1), (5, 2)])
def test_minus_one_from_on_train_batch_start_ends_the_epoch(tmp_path, stop_at, steps):
    """Inside a window, its batches are averaged, and it counts as a step of schedules and loggers."""
    ours, theirs, batches = make_net(), make_net(), make_batches(8)
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    module = Regression(ours, schedule=schedule, interval="step")
    module.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == stop_at else None
    trainer, trace = fit_and_watch(tmp_path, module, batches, accumulate_grad_batches=3, max_epochs=2)
    assert len(trace.losses) == 2 * stop_at
    assert (trainer.global_step, trainer.progress.updates, trainer.current_epoch) == (2 * steps, 2 * steps, 2)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2 * steps
    if stop_at:
        train_by_hand(theirs, batches[:stop_at], window=3, epochs=2, schedule=schedule)
    torch.testing.assert_close([*ours.parameters()], [*theirs.parameters()], rtol=1e-5, atol=1e-7)


# --- weighted windows -----------------------------------------------------------------------------------------------


class Tokens(Regression):
    """The mean over the unmasked rows of a batch, with their number as weight."""

    def training_step(self, batch, batch_idx):
        x, y, mask = batch
        if not mask.any():
            return None
        return {"loss": F.mse_loss(self.net(x[mask]), y[mask]), "weight": self.weigh(mask.sum())}


@pytest.mark.parametrize("weigh", [int, lambda count: count * 1_000_000])
@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_weighted_window_is_one_big_batch(tmp_path, precision, sized, weigh):
    """Equal up to rounding for unequal and empty micro-batches, and loaders with and without a length."""
    counts = (1, 4, 2, 3, 0, 4, 4)
    batches = [[x, y + n / 4, torch.arange(4) < n] for (x, y, _), n in zip(make_batches(7), counts, strict=True)]
    ours, theirs = make_net(), make_net()
    plugin = native_fp16(init_scale=2.0**12) if precision == "16-mixed" else precision
    loader = loader_of(batches) if sized else stream_of(batches)
    module = Tokens(ours)
    module.weigh = weigh
    trainer, _ = fit_and_watch(tmp_path, module, loader, precision=plugin, accumulate_grad_batches=3)
    assert (trainer.global_step, trainer.skipped_steps) == (3, 0)  # the scaled loss keeps its size
    optimizer = sgd(theirs.parameters())
    for window in (batches[:3], batches[3:6], batches[6:]):
        optimizer.zero_grad()
        mask = torch.cat([mask for *_, mask in window])
        x, y = (torch.cat([batch[i] for batch in window])[mask] for i in range(2))
        with forward_context(precision):
            loss = F.mse_loss(theirs(x), y)
        loss.backward()
        optimizer.step()
    tolerance = {"rtol": 0, "atol": 1e-6 if precision == "32-true" else 1e-3}
    torch.testing.assert_close([*ours.parameters()], [*theirs.parameters()], **tolerance)
