"""Optimizers, schedules and steps under Lightning's Trainer and ours: results, warnings, errors and counters."""

import itertools
from unittest.mock import patch

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import optim
from torch.optim import lr_scheduler

from tests.parity import Classifier, Learner, assert_agree, data, ours, outcome
from tests.support import manual_step, stream_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
    pytest.mark.filterwarnings("ignore:Attribute '.*' removed from hparams"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]


class Configured(Classifier):
    """``configure(module)`` returns the value of ``configure_optimizers``."""

    def __init__(self, configure=None, automatic=True):
        super().__init__()
        self.configure = configure
        self.automatic_optimization = automatic

    def configure_optimizers(self):
        return super().configure_optimizers() if self.configure is None else self.configure(self)


def assert_same_outcome(scenario):
    """Compare results or errors, and warnings. Returns the result."""
    return assert_agree(lambda make: outcome(scenario, make))[0]


def fitted(make, module, loader=None, **arguments):
    trainer = make(**{"max_epochs": 1, **arguments})
    trainer.fit(module, data(8) if loader is None else loader)
    return trainer


def state_of(trainer):
    """Return counters, rates, and the schedules with their states."""
    configs = trainer.lr_scheduler_configs
    about = [(c.interval, c.frequency, c.reduce_on_plateau, c.monitor, c.strict, c.name) for c in configs]
    stand = [getattr(c.scheduler, "last_epoch", None) for c in configs]
    rates = [group["lr"] for o in trainer.optimizers for group in getattr(o, "param_groups", [])]
    return trainer.global_step, trainer.current_epoch, about, stand, rates


# --- return values of configure_optimizers ----------------------------------------------------------------------------


def sgd(module):
    return optim.SGD(module.parameters(), lr=0.1)


def scheduled(make, **how):
    def configure(module):
        optimizer = sgd(module)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **how}}

    return configure


def form(shape):
    def configure(module):
        optimizer = sgd(module)
        return shape(optimizer, lr_scheduler.StepLR(optimizer, 1))

    return configure


class Foreign:
    """A schedule that is not torch's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.epochs = []

    def step(self, epoch):
        self.epochs.append(epoch)

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


class Stateless:
    def __init__(self, optimizer): ...


def step_lr(optimizer):
    return lr_scheduler.StepLR(optimizer, 1)


CONFIGURATIONS = {
    "one": form(lambda o, s: o),
    "two lists": form(lambda o, s: ([o], [s])),
    "list of dicts": form(lambda o, s: [{"optimizer": o, "lr_scheduler": s}]),
    "none": lambda module: None,
    "a number": lambda module: 1,
    "two of the same parameters": form(lambda o, s: [o, optim.SGD(o.param_groups[0]["params"], lr=0.1)]),
    "unknown key": form(lambda o, s: {"optimizer": o, "lr_scheduler": s, "foo": 1}),
    "another optimizer's schedule": lambda module: ([sgd(module)], [step_lr(sgd(module))]),
    "unknown interval": scheduled(step_lr, interval="week"),
    "named": scheduled(step_lr, name="mine", interval="step", frequency=3),
    "cycle by epochs": scheduled(lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9)),
    "bare plateau without monitor": form(lambda o, s: ([o], [lr_scheduler.ReduceLROnPlateau(o)])),
    "plateau": form(
        lambda o, s: {"optimizer": o, "lr_scheduler": lr_scheduler.ReduceLROnPlateau(o), "monitor": "loss"}
    ),
    "plateau, never logged": scheduled(lr_scheduler.ReduceLROnPlateau, monitor="giraffe"),
    "plateau, not strict": scheduled(lr_scheduler.ReduceLROnPlateau, monitor="giraffe", strict=False),
    "not torch's": scheduled(Foreign),
    "without a state": scheduled(Stateless),
}


class Logs(Configured):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configure_optimizers(name):
    assert_same_outcome(lambda make: state_of(fitted(make, Logs(CONFIGURATIONS[name]))))


@pytest.mark.parametrize(
    "configure",
    [
        form(lambda o, s: ([o], [{"scheduler": s, "interval": "step", "monitor": "loss", "strict": False}])),
        scheduled(Foreign),
        form(lambda o, s: (o, optim.Adam(o.param_groups[0]["params"]))),
        form(
            lambda o, s: [{"optimizer": o, "lr_scheduler": s}, {"optimizer": optim.Adam(o.param_groups[0]["params"])}]
        ),
        lambda module: None,
    ],
)
def test_configure_optimizers_for_manual_optimization(configure):
    """The module steps its schedules, of any type."""
    assert_same_outcome(lambda make: state_of(fitted(make, Configured(configure, automatic=False), max_epochs=0)))


# --- schedules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "strict"), [({"max_steps": 2}, True), ({"max_steps": 4}, False), ({"max_steps": 6}, True)]
)
def test_plateau_schedule_steps_after_complete_epochs_only(arguments, strict):
    configure = scheduled(lr_scheduler.ReduceLROnPlateau, monitor="giraffe", strict=strict)
    assert_same_outcome(lambda make: state_of(fitted(make, Configured(configure), **arguments)))


class OwnScheduleStep(Configured):
    """Has two schedules, one of them with a custom step."""

    def configure_optimizers(self):
        optimizer = sgd(self)
        self.foreign = Foreign(optimizer)
        return [optimizer], [{"scheduler": step_lr(optimizer), "interval": "step"}, self.foreign]

    def lr_scheduler_step(self, scheduler, metric):
        if scheduler is self.foreign:
            scheduler.step(epoch=self.current_epoch)
        else:
            super().lr_scheduler_step(scheduler, metric)


def test_module_steps_schedules_that_are_not_torchs():
    def scenario(make):
        module = OwnScheduleStep()
        return state_of(fitted(make, module, max_epochs=3)), module.foreign.epochs

    assert assert_same_outcome(scenario)[1] == [0, 1, 2]


# --- optimizer_step --------------------------------------------------------------------------------------------------


class OwnStep(Configured):
    """``plan(closure, optimizer, batch_idx)`` replaces its ``optimizer_step``."""

    def __init__(self, plan, configure=None):
        super().__init__(configure)
        self.plan = plan
        self.seen = []

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        kinds = isinstance(optimizer_closure, Closure), isinstance(optimizer, (LightningOptimizer, optim.SGD))
        loss = self.plan(optimizer_closure, optimizer, batch_idx)
        self.seen.append((kinds, None if loss is None else (round(loss.item(), 5), loss.requires_grad)))


PLANS = {
    "hands it over": lambda closure, optimizer, i: optimizer.step(closure=closure),
    "calls it first": lambda closure, optimizer, i: (closure(), optimizer.step())[0],
    "steps now and then": lambda closure, optimizer, i: (closure(), optimizer.step() if i % 2 else None)[0],
    "forgets it": lambda closure, optimizer, i: None,
    "steps without": lambda closure, optimizer, i: optimizer.step(),
}


@pytest.mark.parametrize(
    ("plan", "window"),
    [("calls it first", 1), ("hands it over", 3), ("steps now and then", 3), ("forgets it", 1), ("steps without", 3)],
)
def test_closure_of_optimizer_step(plan, window):
    def scenario(make):
        module = OwnStep(PLANS[plan])
        return fitted(make, module, data(12), accumulate_grad_batches=window).global_step, module.seen

    assert_same_outcome(scenario)


# --- manual optimization ---------------------------------------------------------------------------------------------


def two(module):
    return optim.SGD(module.parameters(), lr=0.1), optim.Adam(module.parameters())


class ByHand(Configured):
    """``turn(module, optimizers, batch)`` replaces its ``training_step``; it has two optimizers by default.

    Records the values in its hooks.
    """

    def __init__(self, turn, configure=two):
        super().__init__(configure, automatic=False)
        self.turn = turn
        self.seen = []

    def training_step(self, batch, batch_idx):
        return self.turn(self, self.optimizers(), batch)

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(type(optimizer).__name__)

    def on_before_zero_grad(self, optimizer):
        self.seen.append("zero_grad")

    def on_after_backward(self):
        self.seen.append("backward")


def both_in_turn(module, optimizers, batch):
    for optimizer in optimizers:
        manual_step(module, module.loss(batch), optimizer)


def with_closure(module, optimizers, batch):
    def closure():
        optimizers[0].zero_grad()
        loss = module.loss(batch)
        module.manual_backward(loss, retain_graph=True)
        module.manual_backward(loss)
        return loss

    module.seen.append(round(optimizers[0].step(closure=closure).item(), 5))


def toggled(module, optimizers, batch):
    frozen = module.net[2].weight
    optimizers[1].param_groups[0]["params"] = [p for p in module.parameters() if p is not frozen]
    for sync in (True, False):
        with optimizers[1].toggle_model(sync_grad=sync):
            module.seen.append([p.requires_grad for p in module.parameters()])
    module.toggle_optimizer(optimizers[1])
    module.seen.append(frozen.requires_grad)
    module.untoggle_optimizer(optimizers[1])
    module.seen.append(frozen.requires_grad)


def unwrapped(module, optimizers, batch):
    bare = module.optimizers(use_pl_optimizer=False)
    module.seen.append(
        [(type(a).__name__, a.optimizer is b, str(a).split()[0]) for a, b in zip(optimizers, bare, strict=True)]
    )
    both_in_turn(module, bare, batch)  # no hook is called for these steps


def not_callable(module, optimizers, batch):
    optimizers[0].step("closure")


@pytest.mark.parametrize("turn", [both_in_turn, with_closure, toggled, unwrapped, not_callable])
def test_by_hand(turn):
    steps = []

    def scenario(make):
        module = ByHand(turn)
        trainer = make(max_epochs=1)
        with patch.object(Strategy, "backward", wraps=trainer.strategy.backward) as backward:
            trainer.fit(module, data(4))
        steps.append(trainer.global_step)
        return backward.call_count, module.seen, [type(o) for o in trainer.optimizers]

    assert_same_outcome(scenario)
    assert sorted(steps) == ([0, 4] if turn is unwrapped else steps[:1] * 2)  # Lightning does not count these steps


def test_manual_step_forwards_its_arguments():
    def scenario(make):
        module = ByHand(lambda module, two, batch: module.seen.append(two[0].step(closure=print, extra="mine")))
        with patch("torch.optim.SGD.step", return_value="result") as step:
            module.on_train_start = step.reset_mock
            fitted(make, module, data(2))
        return [sorted(call.kwargs) for call in step.mock_calls], module.seen

    assert assert_same_outcome(scenario) == ([["closure", "extra"]], ["result"])


# --- exchanged in the middle of a run --------------------------------------------------------------------------------


def another(module):
    return [optim.Adam(module.parameters(), lr=0.03)]


def by_the_trainer(trainer, module):
    trainer.optimizers = another(module)


def by_the_strategy(trainer, module):
    trainer.strategy.optimizers = another(module)


def by_one_that_evaluates_the_loss(trainer, module):
    trainer.strategy.optimizers = [optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)]


def made_anew(trainer, module):
    trainer.strategy.setup_optimizers(trainer)


def schedules_alone(trainer, module):
    schedule = lr_scheduler.StepLR(trainer.optimizers[0], 1, gamma=0.5)
    trainer.strategy.lr_scheduler_configs = [LRSchedulerConfig(schedule, interval="step")]


def falling(module):
    optimizer = optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return [optimizer], [{"scheduler": lr_scheduler.StepLR(optimizer, 1, gamma=0.7), "interval": "step"}]


KINDS = {
    "automatic": lambda: Configured(falling),
    "closures": lambda: Configured(lambda module: optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)),
    "own step": lambda: OwnStep(PLANS["hands it over"], falling),
    "by hand": lambda: ByHand(lambda module, one, batch: both_in_turn(module, [one], batch), falling),
}


@pytest.mark.parametrize(
    ("exchange", "kind", "hook"),
    [
        (by_the_trainer, "automatic", "on_train_start"),
        (by_the_trainer, "by hand", "on_validation_end"),
        (by_the_strategy, "own step", "on_train_batch_start"),
        (by_the_strategy, "automatic", "on_validation_end"),
        (by_the_strategy, "closures", "on_train_epoch_start"),
        (by_one_that_evaluates_the_loss, "automatic", "on_train_epoch_start"),
        (made_anew, "own step", "on_validation_end"),
        (made_anew, "by hand", "on_train_batch_start"),
        (schedules_alone, "automatic", "on_train_batch_start"),
    ],
)
def test_optimizers_that_are_exchanged_in_the_middle_of_a_run(exchange, kind, hook):
    turn = 1 if hook == "on_train_start" else 2

    def scenario(make):
        module, calls, callback = KINDS[kind](), itertools.count(1), Callback()
        setattr(callback, hook, lambda *given: next(calls) == turn and exchange(*given[:2]))
        trainer = make(max_epochs=3, callbacks=callback, num_sanity_val_steps=0)
        trainer.fit(module, data(8), data(4, seed=5))
        return [p.tolist() for p in module.parameters()], trainer.optimizers[0].param_groups[0]["lr"]

    assert_agree(scenario)


# --- GradientAccumulationScheduler -----------------------------------------------------------------------------------


class OwnZeroGrad(Configured):
    def optimizer_zero_grad(self, *args):
        super().optimizer_zero_grad(*args)


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (Learner, {}),
        (Learner, {"accumulate_grad_batches": 2}),
        (OwnZeroGrad, {}),
        (lambda: ByHand(both_in_turn), {}),
    ],
)
def test_gradient_accumulation_scheduler(module, arguments):
    def scenario(make):
        trainer = make(max_epochs=4, callbacks=GradientAccumulationScheduler({1: 2, 3: 4}), **arguments)
        first = trainer.accumulate_grad_batches
        trainer.fit(module(), data(8))
        return first, trainer.accumulate_grad_batches, trainer.global_step

    assert_same_outcome(scenario)


# --- estimated_stepping_batches --------------------------------------------------------------------------------------


class Asks(Configured):
    def setup(self, stage):
        self.seen = [self.trainer.estimated_stepping_batches]

    def configure_optimizers(self):
        self.seen.append(self.trainer.estimated_stepping_batches)
        return super().configure_optimizers()


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_epochs": 0},
        {"max_epochs": -1, "max_steps": 3},
        {"max_epochs": 2, "limit_train_batches": 0.5},
        {"max_epochs": 2, "overfit_batches": 3},
        {"max_epochs": 2, "max_steps": 3},
        {"fast_dev_run": 2},
        {"max_epochs": 2, "max_steps": 3, "stream": True},
    ],
)
def test_estimated_stepping_batches(arguments):
    def scenario(make):
        module, options = Asks(), dict(arguments)
        loader = stream_of(data(10)) if options.pop("stream", False) else None
        trainer = fitted(make, module, loader, **options)
        return [*module.seen, trainer.estimated_stepping_batches]

    assert_same_outcome(scenario)


def test_estimated_stepping_batches_follow_an_accumulation_schedule():
    """Lightning ignores the callback before the first epoch, so that a schedule would be too long."""
    module = Asks()
    trainer = fitted(ours, module, max_epochs=2, callbacks=GradientAccumulationScheduler({0: 2}))
    assert [*module.seen, trainer.estimated_stepping_batches, trainer.global_step] == [4, 4, 4, 4]
