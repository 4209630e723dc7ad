"""Library Trainers: subclasses, Engines that build one, and custom loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from tests.parity import QUIET, Classifier, data, run_both
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
