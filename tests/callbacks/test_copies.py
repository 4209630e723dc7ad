"""Every callback can be copied and pickled: before, during and after a run, and after one that failed."""

import copy
import inspect
import pickle
from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import Callback

import trainer.callbacks
from tests.parity import Classifier, data, ours

ARGUMENTS = {
    "ActivationCheckpointing": {"modules": ["net.0"]},
    "GradientAccumulation": {"batches": 1},
    "GradientClipping": {"max_norm": 1.0},
    "NonFiniteGuard": {"every_step": True},
    "OptunaPruning": {"storage": "sqlite:///study.db", "study_name": "s", "trial": 0, "metric": "val"},
    "OverflowReport": {"at_step": 2},
}
OURS = {name: getattr(trainer.callbacks, name) for name in trainer.callbacks.__all__}
CALLBACKS = [name for name, cls in OURS.items() if inspect.isclass(cls) and issubclass(cls, Callback)]
NOT_RUN = {"OptunaPruning", "GradientCheck", "BestCheckpoint", "RollBackOnLossSpike"}
"""These need a study, float64, or to write checkpoints."""


class Copies(Callback):
    """Copies the other callbacks at several hooks."""

    def __init__(self):
        self.copies = []

    def copy(self, trainer, *args):
        for callback in trainer.callbacks:
            if callback is not self:
                self.copies += [(callback, duplicate(callback)) for duplicate in DUPLICATES]

    on_fit_start = on_train_start = on_train_batch_end = on_validation_end = on_train_end = on_exception = copy


DUPLICATES = (copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback)))


class Overflows(Classifier):
    """Skips its first steps if the loss is scaled, and raises if configured."""

    breaks = False

    def training_step(self, batch, batch_idx):
        if self.breaks and batch_idx == 3:
            raise RuntimeError("broken off")
        return self.loss(batch) * (1e8 if batch_idx < 2 and self.trainer.scaler.is_enabled() else 1.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "breaks"), [(None, False), (None, True), *((name, False) for name in CALLBACKS)])
def test_copies(name, breaks, tmp_path):
    """None stands for the default callbacks of a Trainer."""
    copies, module = Copies(), Overflows()
    module.breaks, own = breaks, [] if name is None else [OURS[name](**ARGUMENTS.get(name, {}))]
    for callback in own:
        assert [type(duplicate(callback)) for duplicate in DUPLICATES] == [type(callback)] * 2
    if name in NOT_RUN:
        return
    defaults = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    arguments = {"max_epochs": 1, "precision": "16-mixed", "default_root_dir": tmp_path}
    arguments |= dict.fromkeys(defaults if name is None else ["enable_progress_bar"])
    run = ours(callbacks=[*own, copies], **arguments)
    with pytest.raises(RuntimeError, match="broken off") if breaks else nullcontext():
        run.fit(module, data(10), data(4))
    assert copies.copies
    copies.copy(run)  # after it
    assert all(type(duplicate) is type(callback) for callback, duplicate in copies.copies)
    if name is not None and not breaks:  # a copy is as good as a new one
        again = ours(callbacks=next(two for one, two in reversed(copies.copies) if one is own[0]), **arguments)
        again.fit(Classifier(), data(4), data(4))
        assert again.global_step == 2
        assert torch.isfinite(again.model.net[0].weight).all()
