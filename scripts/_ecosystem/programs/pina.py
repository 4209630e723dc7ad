"""PINA: physics-informed networks; its Trainer is a subclass that reads private attributes."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from pina import Trainer
from pina.callback import MetricTracker, R3Refinement, SwitchOptimizer, SwitchScheduler
from pina.model import FeedForward
from pina.optim import TorchOptimizer, TorchScheduler
from pina.problem.zoo import Poisson2DSquareProblem
from pina.solver import (
    CompetitivePhysicsInformedSolver,
    PhysicsInformedSingleModelSolver,
    SelfAdaptivePhysicsInformedSolver,
)

REQUIRES = ("pina-mathlab==0.3.2.post2610", "torch==2.15.0", "lightning==2.6.6")


def case_single(run: Any) -> None:
    """One network: points resampled, optimizer and schedule replaced by callbacks, clipping; test, resume"""
    switch = SwitchOptimizer(TorchOptimizer(torch.optim.Adam, lr=0.002), epoch_switch=4)
    schedule = SwitchScheduler(TorchScheduler(torch.optim.lr_scheduler.StepLR, step_size=2), epoch_switch=2)
    callbacks = [R3Refinement(sample_every=2), schedule, switch]
    train(
        run,
        PhysicsInformedSingleModelSolver,
        callbacks,
        batch_size=16,
        train_size=0.75,
        test_size=0.25,
        gradient_clip_val=0.1,
    )


def case_lbfgs(run: Any) -> None:
    """One network: Adam, then LBFGS; all points in one batch, nothing logged in steps"""
    switch = SwitchOptimizer(TorchOptimizer(torch.optim.LBFGS, lr=0.1, max_iter=4), epoch_switch=3)
    train(run, PhysicsInformedSingleModelSolver, [switch], resumed=False)


def case_competitive(run: Any) -> None:
    """A network and its discriminator: manual optimization that steps plain optimizers and the loop's counters"""
    train(run, CompetitivePhysicsInformedSolver, [], batch_size=20, train_size=0.8, val_size=0.2)


def case_self_adaptive(run: Any) -> None:
    """A network and weights of points: manual optimization, two optimizers and schedules"""
    optimizers = {name: TorchOptimizer(torch.optim.Adam, lr=0.01) for name in ("optimizer_model", "optimizer_weights")}
    steps = {"step_size": 3, "gamma": 0.5}
    schedulers = {
        name: TorchScheduler(torch.optim.lr_scheduler.StepLR, **steps)
        for name in ("scheduler_model", "scheduler_weights")
    }
    train(run, SelfAdaptivePhysicsInformedSolver, [], solver_options={**optimizers, **schedulers})


def train(
    run: Any, cls: Any, callbacks: list[Any], *, solver_options: Any = None, resumed: bool = True, **options: Any
) -> None:
    """Train, test, resume."""
    run.seed()
    solver = cls(problem=problem(), model=network(), **(solver_options or {}))
    saver = ModelCheckpoint(run.folder / "saved", save_last=True)
    tracker = MetricTracker()
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    logger = CSVLogger(run.folder / "logs")
    common = {**quiet, "logger": logger, "default_root_dir": run.folder, **options}
    trainer = Trainer(solver, callbacks=[*callbacks, saver, tracker], max_epochs=6, **common)
    trainer.train()
    run.keep("tracked", tracker.metrics)
    if options.get("test_size"):
        run.keep("test", trainer.test())
    if resumed:
        run.seed()
        again = cls(problem=problem(), model=network(), **fresh(solver_options))
        with run.resume():
            Trainer(again, max_epochs=8, **common).train(ckpt_path=saver.best_model_path, weights_only=False)


def fresh(options: Any) -> dict[str, Any]:
    """Return a copy of the options, because PINA's optimizers stay bound to the model that used them first."""
    import copy

    return copy.deepcopy(options or {})


def problem() -> Any:
    square = Poisson2DSquareProblem()
    square.discretise_domain(40, "random", domains=["D"])
    square.discretise_domain(20, "random", domains=["boundary"])
    return square


def network() -> Any:
    return FeedForward(input_dimensions=2, output_dimensions=1, layers=[8, 8])
