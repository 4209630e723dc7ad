"""Library Trainers: subclasses, Engines that build one, and custom loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from tests.parity import QUIET, Classifier, Learner, data, run_both
from trainer import Trainer
from trainer.errors import ConfigurationError


def end_of(trainer: Any, module: Any) -> dict[str, Any]:
    """Return the result of a run in a comparable form."""
    return {
        "weights": {name: value.tolist() for name, value in module.state_dict().items()},
        "metrics": {name: value.tolist() for name, value in trainer.callback_metrics.items()},
        "counts": (trainer.global_step, trainer.current_epoch),
        "random": torch.get_rng_state().sum().item(),
    }


# --- a subclass with module, data and additional methods (PINA) -------------------------------------------------------


def physics_trainer(base: type) -> type:
    """A Trainer with its module as argument, which reads its device before a run."""

    class PhysicsTrainer(base):  # type: ignore[misc]
        modes = {"common", "proportional"}

        def __init__(self, solver: Any, batch_size: int | None = None, **kwargs: Any) -> None:
            kwargs["inference_mode"] = False
            kwargs["log_every_n_steps"] = 0 if batch_size is None else kwargs.get("log_every_n_steps", 50)
            super().__init__(**kwargs)
            self.solver = solver
            self.batch_size = batch_size
            self.place = self._accelerator_connector._parallel_devices[0]
            self.logging_kwargs = {"on_epoch": True, "on_step": kwargs["log_every_n_steps"] > 0, "prog_bar": False}

        def train(self, **kwargs: Any) -> None:
            super().fit(self.solver, data(8, batch_size=self.batch_size or 8), data(4), **kwargs)

        def test(self, **kwargs: Any) -> Any:
            return super().test(self.solver, data(4), verbose=False, **kwargs)

        @property
        def solver(self) -> Any:
            return self._solver

        @solver.setter
        def solver(self, solver: Any) -> None:
            self._solver = solver

    return PhysicsTrainer


class Solver(Learner):
    """Logs with settings of its Trainer, and differentiates in evaluations."""

    @torch.enable_grad()
    def residual(self, batch: Any, name: str) -> Any:
        features = batch[0].requires_grad_(True)
        (slope,) = torch.autograd.grad(self(features).sum(), features, create_graph=True)
        loss = slope.square().mean() + self.loss(batch)
        self.log(name, loss.item(), batch_size=len(features), **self.trainer.logging_kwargs)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.residual(batch, "train_loss")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.residual(batch, "val_loss")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.residual(batch, "test_loss")


def test_subclass_with_module_and_data() -> None:
    def scenario(make: Any) -> Any:
        base = type(make())
        trainer = physics_trainer(base)(Solver(), 2, max_epochs=2, **QUIET)
        trainer.train()
        ended = end_of(trainer, trainer.solver)
        return ended, trainer.test(), trainer.place, isinstance(trainer, LightningTrainer)

    theirs, mine = run_both(scenario)
    assert mine == theirs


# --- a subclass with its own loop (torch-uncertainty) -----------------------------------------------------------------


class TableLoop(_EvaluationLoop):
    """Prints logged values of a test in a custom format."""

    @staticmethod
    def _print_results(results: Any, stage: str) -> None:
        print(stage, [sorted((name, f"{value.item():.3%}") for name, value in result.items()) for result in results])


class PoliteLoop(_EvaluationLoop):
    def on_run_end(self) -> Any:
        return super().on_run_end()


class Logging(Classifier):
    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("loss", self.loss(batch))


def with_table(base: type) -> type:
    class TableTrainer(base):  # type: ignore[misc]
        def __init__(self, inference_mode: bool = True, **kwargs: Any) -> None:
            super().__init__(inference_mode=inference_mode, **kwargs)
            self.test_loop = TableLoop(self, TrainerFn.TESTING, RunningStage.TESTING, inference_mode=inference_mode)

    return TableTrainer


def test_loop_with_its_own_table(capsys: pytest.CaptureFixture[str]) -> None:
    def scenario(make: Any) -> Any:
        trainer = with_table(type(make()))(**QUIET)
        results = trainer.test(Logging(), [data(4), data(6, seed=1)])
        return results, capsys.readouterr().out, trainer.test_loop.verbose

    theirs, mine = run_both(scenario)
    assert mine == theirs
    assert "dataloader_idx_1" in mine[1]


@pytest.mark.parametrize("place", ["test_loop", "fit_loop"])
def test_loop_that_would_not_run_is_refused(place: str) -> None:
    class OwnFitLoop(_FitLoop):
        def advance(self) -> None:
            pass

    trainer = Trainer(**QUIET)
    stage = (TrainerFn.TESTING, RunningStage.TESTING)
    loop: Any = OwnFitLoop(trainer) if place == "fit_loop" else PoliteLoop(trainer, *stage)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=rf"for `{place}`, expected .* not (advance|on_run_end): the loops"):
        setattr(trainer, place, loop)


# --- checkpoint callbacks of libraries -------------------------------------------------------------------------------


class CompoundCheckpoint(ModelCheckpoint):
    """Monitors a sum of metrics."""

    def __init__(self, factors: dict[str, float], **kwargs: Any) -> None:
        self.factors = factors
        super().__init__(monitor="compound", **kwargs)

    def _monitor_candidates(self, trainer: Any) -> dict[str, torch.Tensor]:
        candidates = super()._monitor_candidates(trainer)
        candidates["compound"] = sum((k * candidates[name] for name, k in self.factors.items()), torch.tensor(0.0))
        return candidates


class SeveralCheckpoints(Checkpoint):
    """Savers inside a callback, which forwards its hooks."""

    def __init__(self, folder: Path) -> None:
        self.callbacks = {
            name: ModelCheckpoint(folder, monitor=name, filename=f"best-{name}-{{epoch}}") for name in ("loss", "size")
        }

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for callback in self.callbacks.values():
            callback.setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for callback in self.callbacks.values():
            callback.on_train_start(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        for callback in self.callbacks.values():
            callback.on_validation_epoch_end(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        for callback in self.callbacks.values():
            callback.on_validation_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {name: callback.state_dict() for name, callback in self.callbacks.items()}


class Measured(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict({"loss": self.loss(batch), "size": self(batch[0]).abs().mean()})


def test_checkpoint_callbacks_of_libraries_save_the_same_files(tmp_path: Path) -> None:
    def scenario(make: Any) -> Any:
        folder = tmp_path / type(make()).__module__
        compound = CompoundCheckpoint({"loss": 1.0, "size": -0.5}, dirpath=folder, filename="sum-{epoch}", save_top_k=2)
        several = SeveralCheckpoints(folder)
        trainer, module = make(max_epochs=4, callbacks=[compound, several], enable_checkpointing=True), Measured(0.5)
        trainer.fit(module, data(8), data(8, seed=1))
        saved = torch.load(folder / Path(compound.best_model_path).name, weights_only=True)
        kept = str(saved["callbacks"]).replace(str(folder), "FOLDER")
        files = sorted(path.name for path in folder.iterdir())
        return (
            end_of(trainer, module),
            files,
            kept,
            compound.best_model_score.item(),
            trainer.checkpoint_callback is compound,
        )

    theirs, mine = run_both(scenario)
    assert mine == theirs


# --- an Engine that builds the Trainer (anomalib) --------------------------------------------------------------------


class SavesInValidation(ModelCheckpoint):
    """For models without training: saves at the end of a validation without a step."""

    def _should_skip_saving_checkpoint(self, trainer: Any) -> bool:
        return bool(trainer.fast_dev_run) or trainer.state.fn not in {TrainerFn.FITTING, TrainerFn.VALIDATING}

    def _should_save_on_train_epoch_end(self, trainer: Any) -> bool:
        return False


class CountingIO(TorchCheckpointIO):
    """Writes and reads checkpoints, with a list of allowed objects."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[str] = []
        self.allowed: list[type] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.saved.append(Path(path).name)
        super().save_checkpoint(checkpoint, path, storage_options)


class Engine:
    """Keeps the Trainer's arguments until it has the model, which may override them."""

    def __init__(self, make: Any, **kwargs: Any) -> None:
        self.make, self.arguments, self.trainer = make, {"callbacks": [], **kwargs}, None

    def fit(self, module: Any, folder: Path) -> None:
        if self.trainer is None:
            self.io = CountingIO()
            self.saver = SavesInValidation(folder, filename="model", auto_insert_metric_name=False)
            arguments = {**self.arguments, **module.trainer_arguments, "enable_checkpointing": True}
            arguments["callbacks"] = [self.saver, *arguments["callbacks"]]
            self.trainer = self.make(plugins=[self.io], **arguments)
        if module.trains:
            self.trainer.fit(module, data(8), data(4))
        else:
            self.trainer.validate(module, data(4), None, False)


class MemoryBank(Classifier):
    """Learns without an optimizer: stores its batches, and computes its state before the validation."""

    trainer_arguments = {"max_epochs": 1, "num_sanity_val_steps": 0}
    trains = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(4))
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("distance", (batch[0] - self.bank).norm())

    def on_validation_start(self) -> None:
        if self.seen:
            self.bank.copy_(torch.vstack(self.seen).mean(0))
            self.seen.clear()

    @staticmethod
    def configure_optimizers() -> None:
        return None


class ZeroShot(MemoryBank):
    """Is not trained."""

    trains = False


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:.*this fit will run with no optimizer")
@pytest.mark.parametrize("kind", [MemoryBank, ZeroShot])
def test_engine_with_models_that_take_no_step(kind: type, tmp_path: Path) -> None:
    def scenario(make: Any) -> Any:
        folder = tmp_path / type(make()).__module__
        engine, module = Engine(make), kind()
        engine.fit(module, folder)
        engine.fit(module, folder)
        saved = torch.load(engine.saver.best_model_path, weights_only=True)
        return (
            end_of(engine.trainer, module),
            engine.io.saved,
            saved["state_dict"]["bank"].tolist(),
            saved["global_step"],
        )

    theirs, mine = run_both(scenario)
    assert mine == theirs


# --- models that build their own Trainers (neuralforecast) -----------------------------------------------------------


class Forecaster(Classifier):
    """Fits itself with a Trainer from its own arguments, and seeds in a hook."""

    def __init__(self, make: Any, **trainer: Any) -> None:
        super().__init__()
        self.make, self.arguments = make, trainer
        self.losses: list[Any] = []

    def on_fit_start(self) -> None:
        torch.manual_seed(5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss((batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]))
        self.log("train_loss", loss.item(), batch_size=2, on_epoch=True)
        self.losses.append((self.global_step, loss.item()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("valid_loss", self.loss(batch), batch_size=2)

    def fit_itself(self) -> None:
        self.arguments.update(val_check_interval=3, check_val_every_n_epoch=None)
        trainer = self.make(max_steps=8, **self.arguments)
        trainer.fit(self, data(8, shuffle=True), data(4))
        self.metrics = trainer.callback_metrics
        self.__dict__.pop("_trainer", None)

    def predict_itself(self) -> Any:
        if not hasattr(self, "_pred_trainer"):
            self._pred_trainer = self.make(**{k: v for k, v in self.arguments.items() if k == "inference_mode"})
        return torch.vstack(self._pred_trainer.predict(self, data(4))).tolist()


def test_model_that_builds_a_trainer_for_each_fit_and_keeps_one_for_predictions() -> None:
    def scenario(make: Any) -> Any:
        module = Forecaster(make, gradient_clip_val=None)
        seen = []
        for _ in range(2):
            module.fit_itself()
            seen.append(({name: value.item() for name, value in module.metrics.items()}, module.predict_itself()))
        return seen, module.losses, module.predict_itself()

    theirs, mine = run_both(scenario)
    assert mine == theirs
