"""Our Trainer has the attributes used by the installed Lightning's callbacks, loggers and tuner.

If this fails after an upgrade of Lightning, add the named attributes to the Trainer (``trainer/compat``), or to
``EXCEPTIONS`` with the reason.
"""

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger

from tests.lightning import contract
from tests.loop.test_hooks import TwoStageData
from tests.parity import Classifier, lightnings_noise_ignored, ours

EXCEPTIONS = {"strategy.zero_stage_3": "asked of DeepSpeed's strategy only, and there"}
"""Attributes that our Trainer lacks, with the reason."""
KNOWN = {"_active_loop._combined_loader": True, "should_stop": True, "callback_metrics.update": False}
"""A few uses that the search has to find, and whether they are written."""


class Moments(Callback):
    """Checks attributes during runs, when all parts of a Trainer exist."""

    def __init__(self, names, written):
        self.missing = dict.fromkeys(names, "never looked for")
        self.written = written

    def look(self, trainer, *_):
        problems = {name: lack(trainer, name, name in self.written) for name in self.missing}
        self.missing = {name: problem for name, problem in problems.items() if problem is not None}

    on_train_batch_end = on_train_epoch_start = on_validation_batch_end = on_predict_batch_end = look


def lack(trainer, name, is_written):
    """Return the problem with ``trainer.name``, or None."""
    parent, owner, path = None, trainer, "trainer"
    for part in name.split("."):
        if owner is None or not hasattr(owner, part):
            return f"{path} is None" if owner is None else f"{path} has no {part}"
        parent, owner, path = owner, getattr(owner, part), f"{path}.{part}"
    attribute = getattr(type(parent), name.rpartition(".")[2], None)
    is_fixed = isinstance(attribute, property) and not attribute.fset
    return f"{path} cannot be set" if is_written and is_fixed else None


def missing_on_our_trainer(uses, written, folder):
    """Return the attributes that our Trainer lacks during a fit, a validation and a prediction, with the reasons."""
    moments = Moments(uses, written)
    callbacks = [moments, ModelCheckpoint(folder), EarlyStopping("loss", strict=False), RichProgressBar()]
    trainer = ours(
        max_epochs=1, limit_train_batches=2, limit_val_batches=1, limit_predict_batches=1, default_root_dir=folder,
        gradient_clip_val=1.0, gradient_clip_algorithm="norm", callbacks=callbacks, logger=CSVLogger(folder),
        enable_checkpointing=True, enable_progress_bar=True,
    )  # fmt: skip
    with lightnings_noise_ignored():
        for function in (trainer.fit, trainer.validate, trainer.predict):
            function(Classifier(), TwoStageData())
    return {f"trainer.{name}, in {', '.join(uses[name])}": why for name, why in moments.missing.items()}


def test_attributes_that_the_installed_lightning_uses_are_on_our_trainer(tmp_path):
    uses, written = contract.installed()
    assert {name: name in written for name in uses if name in KNOWN} == KNOWN
    missing = missing_on_our_trainer(uses, written, tmp_path)
    assert [name.partition(",")[0].removeprefix("trainer.") for name in missing] == list(EXCEPTIONS), missing
