"""Manual optimization, compared to hand-written loops."""

from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import nn

from tests.parity import Learner, assert_agree, assert_same_weights, data
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
    manual_step,
    norm_of,
    plugin_of,
    scaler_of,
    sgd,
    stream_of,
    train_by_hand,
    value_of,
)
from trainer.callbacks import GradientAccumulation, GradientClipping
from trainer.errors import ConfigurationError
from trainer.precision import Precision

PRECISIONS = ["32-true", "bf16-mixed", "16-mixed"]


class Outcomes(Callback):
    """Records one outcome per batch."""

    def __init__(self):
        self.outcomes = []

    def on_after_optimizer_step(self, trainer, module, optimizer, outcome):
        if not any(outcome is other for other in self.outcomes):
            self.outcomes.append(outcome)


# --- manual optimization --------------------------------------------------------------------------------------------


class Pair(LightningModule):
    """Two nets, each with its own optimizer. ``plan(batch_idx)`` returns the optimizers to step, in order.

    ``gains[batch_idx, turn]`` multiplies the loss of one turn.
    """

    def __init__(self, plan=lambda batch_idx: (0, 1), optimizer=sgd, gains=None):
        super().__init__()
        self.automatic_optimization = False
        self.nets = nn.ModuleList([make_net(0), make_net(1)])
        self.plan, self.make_optimizer, self.gains = plan, optimizer, gains or {}

    def training_step(self, batch, batch_idx):
        optimizers = self.optimizers()
        for turn, which in enumerate(self.plan(batch_idx)):
            optimizers[which].zero_grad()
            self.manual_backward(loss_of(self.nets[which], batch) * self.gains.get((batch_idx, turn), 1.0))
            optimizers[which].step()

    def configure_optimizers(self):
        return [self.make_optimizer(net.parameters()) for net in self.nets]


def train_pair(batches, precision, plan, optimizer, gains):
    """Train the same with a hand-written loop: one autocast per forward, one ``update`` per batch."""
    nets, scaler = [make_net(0), make_net(1)], scaler_of(precision)
    optimizers = [optimizer(net.parameters()) for net in nets]
    for i, batch in enumerate(batches):
        for turn, which in enumerate(plan(i)):
            optimizers[which].zero_grad()
            with forward_context(precision):
                loss = loss_of(nets[which], batch) * gains.get((i, turn), 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizers[which])
        if scaler.is_enabled() and plan(i):
            scaler.update()
    return nets, scaler


@pytest.mark.parametrize("optimizer", ["sgd", "adam-fused"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_optimizers_one_update_a_batch(tmp_path, late, precision, optimizer):
    """Also if the outcome of a fused optimizer is read late."""
    gains = {(3, 0): 1e30, (6, 1): 1e30, (9, 0): 1e30, (9, 1): float("nan")} if precision == "16-mixed" else {}
    plan, make, batches = (lambda i: (0, 1) if i % 4 else (1,)), OPTIMIZERS[optimizer], make_batches(14)
    module, watch = Pair(plan, make, gains), Outcomes()
    trainer = make_trainer(tmp_path, precision=plugin_of(precision), callbacks=[watch], log_every_n_steps=0)
    trainer.fit(module, loader_of(batches))
    nets, scaler = train_pair(batches, precision, plan, make, gains)
    assert_same_weights(module.nets, nn.ModuleList(nets))
    assert trainer.scaler.get_scale() == trainer.scaler.current_scale == scaler.get_scale()
    assert trainer.scaler._get_growth_tracker() == scaler._get_growth_tracker()
    assert trainer.global_step == sum(len(plan(i)) for i in range(14))
    assert [o.optimizers for o in watch.outcomes] == [(0, 1) if i % 4 else (1,) for i in range(14)]
    skipping = {i: o.skipped_optimizers for i, o in enumerate(watch.outcomes) if o.skipped}
    assert skipping == ({3: (0,), 6: (1,), 9: (0, 1)} if gains else {})
    assert trainer.skipped_steps == (3 if gains else 0)
    if gains:
        scales = [o.scale for o in watch.outcomes]
        assert scales[4] == scales[3] / 2
        assert scales[10] == scales[9] / 2  # both overflowed: backed off once
        assert [o.next_scale for o in watch.outcomes[:-1]] == scales[1:]


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_cleared_after_an_overflow_do_not_skip_the_step(tmp_path, to_none):
    class Critic(Pair):
        def training_step(self, batch, batch_idx):
            generator, critic = self.optimizers()
            generator.zero_grad()
            both = self.nets[1](self.nets[0](batch[0]).repeat(1, 2))
            self.manual_backward(both.square().mean() * (1e30 if batch_idx == 1 else 1.0))
            critic.zero_grad(set_to_none=to_none)
            self.manual_backward(loss_of(self.nets[1], batch))
            critic.step()

    trainer = make_trainer(tmp_path, precision=plugin_of("16-mixed"))
    trainer.fit(module := Critic(), loader_of(batches := make_batches(4)))
    assert trainer.skipped_steps == 0
    nets, _ = train_pair(batches, "16-mixed", lambda _: (1,), sgd, {})
    assert_same_weights(module.nets[1], nets[1])


class Manual(Regression):
    """A Regression with manual optimization; ``around_step`` runs between backward and step."""

    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        self.automatic_optimization = False

    def around_step(self, optimizer): ...

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.around_step(optimizer)
        optimizer.step()
        return loss


class Closing(Manual):
    """Steps with a closure."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = loss_of(self.net, batch)
            self.manual_backward(loss)
            losses.append(loss)
            return loss

        losses = []
        optimizer.step(closure=closure)
        return losses[0]


@pytest.mark.parametrize(
    ("kind", "optimizer"), [(Manual, "momentum"), (Manual, "adamw"), (Manual, "adamw-fused"), (Closing, "adam")]
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_manual_equals_a_hand_written_loop(tmp_path, precision, kind, optimizer):
    make, batches = OPTIMIZERS[optimizer], make_batches(10, gains={4: 1e30} if precision == "16-mixed" else {})
    _, trace = fit_and_watch(tmp_path, kind(optimizer=make), batches, precision=plugin_of(precision), max_epochs=2)
    options = {"optimizer": make, "scaler": scaler_of(precision), "epochs": 2}
    assert_same(trace, train_by_hand(make_net(), batches, precision=precision, **options))


@pytest.mark.parametrize(
    ("algorithm", "optimizer", "how"),
    [
        *[("norm", "sgd", "wrapped"), ("value", "sgd-fused", "bare")],
        *[("norm", "sgd", "torch"), ("value", "sgd", "unscale_")],
    ],
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_manual_clipping_has_unscaled_gradients(tmp_path, precision, optimizer, algorithm, how):
    limit, clip = {"norm": (0.3, norm_of(0.3)), "value": (0.02, value_of(0.02))}[algorithm]

    class Clipping(Manual):
        def around_step(self, optimizer):
            if how == "unscale_":
                self.trainer.scaler.unscale_(optimizer)
            if how in ("torch", "unscale_"):
                clip(self.net.parameters())  # the Trainer does not know this norm
            else:
                optimizer = optimizer if how == "wrapped" else self.optimizers(use_pl_optimizer=False)
                self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm=algorithm)

    make, batches = OPTIMIZERS[optimizer], make_batches(8, gains={3: 1e30} if precision == "16-mixed" else {})
    _, trace = fit_and_watch(tmp_path, Clipping(optimizer=make), batches, precision=plugin_of(precision))
    options = {"optimizer": make, "scaler": scaler_of(precision), "clip": clip}
    expected = train_by_hand(make_net(), batches, precision=precision, **options)
    trace.norms = trace.norms or expected.norms
    assert_same(trace, expected)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_step_on_the_sum_of_the_gradients_of_several_losses(tmp_path, precision):
    """As in PCGrad. The gradients of an overflow are cleared before the step, and set again."""

    class Combines(Manual):
        def training_step(self, batch, batch_idx):
            optimizer, parameters, found = self.optimizers(), list(self.parameters()), []
            losses = [loss_of(self.net, [*batch[:2], gain]) for gain in (batch[2], torch.tensor(0.0))]
            for loss in losses:
                optimizer.zero_grad()
                self.manual_backward(loss)
                found.append([parameter.grad for parameter in parameters])
            for parameter, *gradients in zip(parameters, *found, strict=True):
                parameter.grad = sum(gradients)
            optimizer.step()
            return losses[0]

    batches = make_batches(5, gains={2: 1e30} if precision == "16-mixed" else {})
    _, trace = fit_and_watch(tmp_path, Combines(), batches, precision=plugin_of(precision))
    assert_same(trace, train_by_hand(make_net(), batches, precision=precision, scaler=scaler_of(precision)))


@pytest.mark.parametrize("how", ["backward", "grad"])
def test_only_gradients_of_manual_backward_are_unscaled(tmp_path, how):
    class Other(Manual):
        def manual_backward(self, loss):
            super().manual_backward(torch.ones((), requires_grad=True) * 2)  # another loss, which is scaled
            if how == "backward":
                loss.backward()
            else:
                (self.net[0].bias.grad,) = torch.autograd.grad(loss, self.net[0].bias)

    module, net, batches = Other(), make_net(), make_batches(3)
    if how == "grad":
        net.requires_grad_(False)[0].bias.requires_grad_()
    make_trainer(tmp_path, precision="16-mixed").fit(module, loader_of(batches))
    train_by_hand(net, batches, precision="16-mixed", scaler=scaler_of("32-true"))
    assert_same_weights(module.net, net)


class Guarded(Manual):
    """Steps on finite gradients only."""

    def step_if_finite(self, optimizer, *, clears=False):
        if nn.utils.get_total_norm([parameter.grad for parameter in self.parameters()]).isfinite():
            optimizer.step()
        elif clears:
            optimizer.zero_grad()

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss_of(self.net, batch))
        self.step_if_finite(optimizer, clears=self.how["clears"])

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        closure()
        self.step_if_finite(optimizer)


class GuardedAutomatic(Guarded):
    training_step = Regression.training_step
    automatic_optimization = property(lambda _: True, lambda *_: None)


@pytest.mark.parametrize("make", [partial(Guarded, clears=True), partial(Guarded, clears=False), GuardedAutomatic])
def test_overflow_that_the_module_does_not_step_on_lowers_the_scale(tmp_path, make):
    batches, scaler = make_batches(8, gains={1: 1e30, 2: 1e30, 5: 1e30}), scaler_of("16-mixed")
    trainer, _ = fit_and_watch(tmp_path, module := make(), batches, precision=plugin_of("16-mixed"))
    train_by_hand(net := make_net(), batches, precision="16-mixed", scaler=scaler)
    assert_same_weights(module.net, net)
    assert trainer.scaler.get_scale() == trainer.scaler.current_scale == scaler.get_scale()
    assert trainer.scaler._get_growth_tracker() == scaler._get_growth_tracker()


def test_backward_of_outputs_with_a_given_gradient(tmp_path):
    class Given(Manual):
        def training_step(self, batch, batch_idx):
            self.optimizers().zero_grad()
            outputs, (_, y, _) = self.net(batch[0]), batch
            self.manual_backward(outputs, gradient=2 * (outputs - y).detach() / y.numel())
            self.optimizers().step()
            return loss_of(self.net, batch)

    trainer, _ = fit_and_watch(tmp_path, Given(), make_batches(3))
    weights = train_by_hand(make_net(), make_batches(3)).weights[-1]
    torch.testing.assert_close([*trainer.lightning_module.parameters()], weights)


class Cached(Precision):
    """A custom plugin with autocast's usual cache."""

    def autocast(self):
        return forward_context("bf16-mixed")


@pytest.mark.parametrize("kind", [Manual, Closing])
def test_forward_after_a_step_sees_the_new_weights(tmp_path, kind):
    """``training_step`` runs in one autocast. A step clears its cache of weights, also that of a custom plugin."""
    losses = []

    class StepsFirst(kind):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            losses.append(loss_of(self.net, batch).item())

        def on_train_batch_end(self, outputs, batch, batch_idx):
            with forward_context("bf16-mixed"):
                assert losses[-1] == loss_of(self.net, batch).item()

    for precision in ("bf16-mixed", Cached()):
        fit_and_watch(tmp_path, StepsFirst(), make_batches(2), precision=precision)
    assert len(losses) == 4


def test_autocast_is_off_in_manual_backward_and_step_and_on_again_afterwards(tmp_path):
    seen = []

    class Looking(Manual):
        def look(self, *_):
            seen.append(torch.is_autocast_enabled("cpu"))

        on_before_backward = on_before_optimizer_step = look

        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            self.look()

    fit_and_watch(tmp_path, Looking(), make_batches(1), precision="bf16-mixed")
    assert seen == [False, False, True]


def test_steps_whose_count_a_module_replaces_do_not_count():
    class Halves(Learner):
        automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[2])]

        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            second._on_before_step = second._on_after_step = lambda: None
            for optimizer in (first, second):
                manual_step(self, self.loss(batch), optimizer)

    def scenario(make):
        trainer = make(max_steps=6, max_epochs=-1)
        trainer.fit(Halves(), data(8))
        return trainer.global_step, trainer.current_epoch

    assert assert_agree(scenario) == (6, 2)


@pytest.mark.parametrize("fused", [False, True])
def test_backward_without_manual_backward_is_an_error_with_loss_scaling(tmp_path, fused):
    module = Manual(make_net(), partial(sgd, fused=fused))
    module.manual_backward = torch.Tensor.backward
    with pytest.raises(RuntimeError, match=r"no loss was scaled.*self\.manual_backward\(loss\)"):
        make_trainer(tmp_path, precision="16-mixed").fit(module, loader_of(make_batches(2)))
    assert_same_weights(module.net, make_net())
    make_trainer(tmp_path).fit(module, loader_of(make_batches(2)))  # nothing wrong with it in 32-true


def test_training_step_that_returns_something_else_is_refused(tmp_path):
    module = Manual()
    module.training_step = lambda batch, batch_idx: 3
    with pytest.raises(ConfigurationError, match=r"must either return a Tensor or have no return.*Got int"):
        make_trainer(tmp_path).fit(module, loader_of(make_batches(1)))


# --- an overridden optimizer_step -------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize(("precision", "optimizer"), [*zip(PRECISIONS, ["adam", "adam", "adam-fused"], strict=True)])
def test_own_optimizer_step(tmp_path, precision, optimizer, window):
    """The warm-up of Lightning's documentation, with clipping, a schedule and an overflow."""
    order = []

    class WarmUp(Regression):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            order.append(batch_idx)
            optimizer.step(closure=optimizer_closure)

    schedule = partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.25, total_iters=4)
    make, batches = OPTIMIZERS[optimizer], make_batches(11, gains={4: 1e30} if precision == "16-mixed" else {})
    ours, theirs = make_net(dropout=0.2), make_net(dropout=0.2)
    torch.manual_seed(1)
    options = {"accumulate_grad_batches": window, "callbacks": [GradientClipping(max_norm=0.3)]}
    module, data = WarmUp(ours, make, schedule, interval="step"), loader_of(batches)
    trainer, trace = fit_and_watch(tmp_path, module, data, precision=plugin_of(precision), **options)
    torch.manual_seed(1)
    options = {"optimizer": make, "window": window, "schedule": schedule, "clip": norm_of(0.3)}
    assert_same(trace, train_by_hand(theirs, data, precision=precision, scaler=scaler_of(precision), **options))
    assert order == (list(range(11)) if window == 1 else [2, 5, 8, 10])
    assert trainer.global_step == len(order)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_own_optimizer_step_may_leave_a_step_out(tmp_path, precision):
    """Schedules wait, and `global_step` counts the calls of `optimizer_step`, as in Lightning."""

    class Every(Regression):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    ours, theirs, batches = make_net(), make_net(), make_batches(6)
    module = Every(ours, sgd, schedule, interval="step")
    trainer, trace = fit_and_watch(tmp_path, module, batches, precision=plugin_of(precision))
    train_by_hand(theirs, batches[1::2], precision=precision, scaler=scaler_of(precision), schedule=schedule)
    assert_same_weights(ours, theirs)
    assert trainer.global_step == 6
    assert trace.rates == pytest.approx([0.1, 0.05, 0.05, 0.025, 0.025, 0.0125])


# --- optimizers that evaluate the loss themselves -------------------------------------------------------------------


lbfgs = partial(torch.optim.LBFGS, lr=0.2, max_iter=4, line_search_fn="strong_wolfe")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"gradient_clip_val": 0.5}, "gradient_clip_val"),
        ({"callbacks": [GradientClipping(clip_value=0.5)]}, "gradient_clip_val"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches"),
        ({"callbacks": [GradientAccumulation(schedule={0: 1, 5: 2})]}, "accumulate_grad_batches"),
    ],
)
def test_parts_of_automatic_optimization_are_refused(tmp_path, options, name):
    module = Regression(make_net())
    module.automatic_optimization = False
    with pytest.raises(ConfigurationError, match=f"Got {name}, or .*, with manual optimization"):
        make_trainer(tmp_path, **options).fit(module, loader_of(make_batches(1)))


def train_lbfgs_by_hand(net, windows, precision="32-true", *, make=lbfgs, clip=None, schedule=None):
    """Train on windows of (batch, weight) with a hand-written loop. Returns the number of evaluations of the loss."""
    optimizer, evaluations = make(net.parameters()), 0
    scheduler = None if schedule is None else schedule(optimizer)
    for window in windows:

        def closure(window=window):
            nonlocal evaluations
            evaluations += 1
            optimizer.zero_grad()
            losses = []
            for batch, weight in window:
                with forward_context(precision):
                    loss = loss_of(net, batch)
                losses.append(loss * (weight / sum(weight for _, weight in window)))
                losses[-1].backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            return torch.stack(losses).sum()

        optimizer.step(closure)
        if scheduler is not None:
            scheduler.step()
    return evaluations


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lbfgs_is_exact(tmp_path, precision, clip):
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=2)
    ours, theirs, batches = make_net(), make_net(), make_batches(5)
    module = Regression(ours, lbfgs, schedule, interval="step")
    trainer, trace = fit_and_watch(tmp_path, module, batches, precision=precision, gradient_clip_val=clip, max_epochs=2)
    windows = [[(batch, 1.0)] for batch in batches * 2]
    evaluations = train_lbfgs_by_hand(theirs, windows, precision, clip=clip, schedule=schedule)
    assert_same_weights(ours, theirs)
    assert trainer.global_step == len(trace.skipped) == 10
    assert evaluations > 20, "the closure was hardly repeated: the test would not see a mistake there"


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lbfgs_in_manual_optimization_is_exact(tmp_path, precision):
    """A closure sees the moved weights, also with a custom plugin."""
    ours, theirs, batches = make_net(), make_net(), make_batches(5)
    plugin = Cached() if precision == "bf16-mixed" else precision
    fit_and_watch(tmp_path, Closing(ours, lbfgs), batches, precision=plugin)
    train_lbfgs_by_hand(theirs, [[(batch, 1.0)] for batch in batches], precision)
    assert_same_weights(ours, theirs)


@pytest.mark.parametrize("kind", [Regression, Manual])
def test_lbfgs_with_loss_scaling_is_refused_at_set_up(tmp_path, kind):
    module = kind(make_net(), lbfgs)
    module.on_train_start = lambda: pytest.fail("it has started")
    message = r"Got the optimizer LBFGS with precision='16-mixed'.*Use precision='bf16-mixed' or '32-true'"
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(tmp_path, precision="16-mixed").fit(module, loader_of(make_batches(1)))


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize(
    ("weights", "missing", "sized"),
    [
        (None, (), False),
        ([1.0, 3.0, 2.0, 1.0, 5.0], (), True),
        (None, (1,), True),
        (None, (0, 4), True),
    ],
)
def test_lbfgs_evaluates_whole_windows(tmp_path, weights, missing, sized, search):
    """Each evaluation is the window's mean loss at the same weights, with and without a known size."""
    make = partial(lbfgs, line_search_fn=search, max_iter=6)
    ours, theirs, batches = make_net(), make_net(), make_batches(5)
    module, data = Skipping(ours, make, weights=weights, none_in=missing), loader_of(batches)
    trainer, _ = fit_and_watch(tmp_path, module, data if sized else stream_of(batches), accumulate_grad_batches=2)
    weighed = [*zip(batches, weights or [1.0] * 5, strict=True)]
    windows = [[weighed[i] for i in window if i not in missing] for window in ((0, 1), (2, 3), (4,))]
    evaluations = train_lbfgs_by_hand(theirs, filter(None, windows), make=make)
    torch.testing.assert_close([*ours.parameters()], [*theirs.parameters()], rtol=1e-4, atol=1e-5)
    assert trainer.global_step == 3
    assert evaluations > 10


@pytest.mark.whole
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of the compiler
def test_compiled_module_is_not_compiled_again_at_each_step(tmp_path):
    class Steps(Pair):
        def training_step(self, batch, batch_idx):
            for net, optimizer in zip(self.nets, self.optimizers(), strict=True):
                optimizer.zero_grad()
                self.manual_backward(loss_of(net, batch))
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()

    codes, counter = [], torch._dynamo.utils.counters["frames"]
    for batches in (2, 4):
        before = counter["total"]
        make_trainer(tmp_path).fit(torch.compile(Steps(), backend="eager"), loader_of(make_batches(batches)))
        codes.append(counter["total"] - before)
        torch.compiler.reset()
    assert codes[0] == codes[1] > 0


# --- steps without a wrapper ------------------------------------------------------------------------------------------


class Kept(Manual):
    """Steps an optimizer that it keeps itself (``created``), or the one below its wrapper (``unwrapped``)."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        if where == "created":
            self.own = sgd(self.net.parameters())

    def configure_optimizers(self):
        return None if self.where == "created" else sgd(self.net.parameters())

    def optimizers(self, use_pl_optimizer=True):
        return self.own if self.where == "created" else super().optimizers(use_pl_optimizer=False)


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize("where", ["created", "unwrapped"])
def test_steps_without_a_wrapper_count_as_any_others(tmp_path, where):
    class Hooked(Callback):
        steps = 0

        def on_after_optimizer_step(self, *_):
            self.steps += 1

    watch = Hooked()
    saver, average = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=2), EMAWeightAveraging(decay=0.5)
    options = {"callbacks": [watch, saver, average], "max_steps": 5, "max_epochs": 4, "enable_checkpointing": True}
    trainer = make_trainer(tmp_path, **options)
    trainer.fit(Kept(where), loader_of(make_batches(3)))
    assert (trainer.global_step, trainer.progress.batches, trainer.current_epoch) == (5, 5, 2)
    assert watch.steps == average._average_model.n_averaged == 5
    assert trainer.progress.has_learned
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt"]


def test_kept_optimizers_do_not_count_beside_a_returned_one(tmp_path):
    """Pyro's modules step an optimizer for each parameter, and a returned one that counts these steps."""

    class ForEachParameter(Kept):
        def __init__(self):
            super().__init__("unwrapped")
            self.own = [sgd([parameter]) for parameter in self.net.parameters()]

        def configure_optimizers(self):
            return sgd([torch.zeros(1, requires_grad=True)])

        def training_step(self, batch, batch_idx):
            for optimizer in self.own:
                optimizer.step()
            super().training_step(batch, batch_idx)

    trainer = make_trainer(tmp_path)
    trainer.fit(ForEachParameter(), loader_of(make_batches(3)))
    assert trainer.global_step == 3


def test_optimizer_below_another_one_does_not_count_again(tmp_path):
    class Ahead(torch.optim.Optimizer):
        """Looks ahead: steps another optimizer."""

        def __init__(self, base):
            super().__init__(base.param_groups, {})
            self.base = base

        def step(self, closure=None):
            return self.base.step()

    class Both(Pair):
        def training_step(self, batch, batch_idx):
            wrapped, bare = self.optimizers()[0], self.optimizers(use_pl_optimizer=False)[1]
            for net, optimizer in zip(self.nets, (wrapped, bare), strict=True):
                optimizer.zero_grad()
                self.manual_backward(loss_of(net, batch))
                optimizer.step()

    module = Both(optimizer=lambda parameters: Ahead(sgd(parameters)))
    trainer = make_trainer(tmp_path)
    trainer.fit(module, loader_of(batches := make_batches(3)))
    assert trainer.global_step == 6
    nets, _ = train_pair(batches, "32-true", lambda _: (0, 1), sgd, {})
    assert_same_weights(module.nets, nn.ModuleList(nets))


def test_optimizer_of_other_tensors_is_named_once(tmp_path):
    class Searches(Manual):
        def around_step(self, optimizer):
            torch.optim.Adagrad([torch.zeros(1, requires_grad=True)]).step()

    trainer = make_trainer(tmp_path)
    with pytest.warns(match="Got a step of Adagrad, .*do not count in `trainer.global_step`") as warned:
        trainer.fit(Searches(), loader_of(make_batches(3)))
    assert (len(warned), trainer.global_step) == (1, 3)


def test_kept_optimizer_of_scaled_gradients_is_refused(tmp_path):
    class Half(Pair):
        def configure_optimizers(self):
            returned, self.own = super().configure_optimizers()
            return returned

        def optimizers(self):
            return super().optimizers(), self.own

    with pytest.raises(ConfigurationError, match=r"Got a step of .* SGD with scaled gradients.*`configure_optimizers`"):
        make_trainer(tmp_path, precision="16-mixed").fit(Half(), loader_of(make_batches(1)))
