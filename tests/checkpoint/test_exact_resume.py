"""Random set-ups, interrupted at random points, often more than once: bitwise equal to the uninterrupted run.

The set-ups are the same each time. ``EXACT_RESUME_EXAMPLES=1000`` draws others, and more of them.
"""

import os
import random
import warnings
from collections import UserDict
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from _faults import training
from _faults.training import Setup
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Checkpoint

from tests.parity import RecordingLogger, looks_in
from tests.support import make_trainer
from trainer.callbacks import OverflowReport

EXAMPLES = int(os.environ.get("EXACT_RESUME_EXAMPLES", "0"))


@st.composite
def setups(draw):
    """Draw any valid set-up."""
    batches, epochs = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    precision = draw(st.sampled_from(["32-true", "16-mixed", "bf16-mixed"]))
    overflows = st.lists(st.integers(0, batches * epochs - 1), max_size=4, unique=True).map(sorted).map(tuple)
    manual, metrics = draw(st.booleans()), draw(st.booleans())
    validate_every = draw(st.sampled_from([0, *range(1, batches + 3)]))
    loader = draw(st.sampled_from(["map", "map", "stateful", "iterable"]))
    # a plateau schedule uses the validation loss if there was a validation in the first epoch
    watches = not manual and validate_every <= batches and (metrics or (validate_every > 0 and loader != "iterable"))
    return Setup(
        batches=batches,
        epochs=epochs,
        batch_size=2,
        loader=loader,
        shuffle=draw(st.booleans()),
        augment=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.3])),
        accumulate=1 if manual else draw(st.integers(1, 4)),
        precision=precision,
        overflows=draw(overflows) if precision == "16-mixed" else (),
        optimizers=draw(st.integers(1, 2)),
        manual=manual,
        schedule=draw(st.sampled_from(["", "step", "epoch", *(["plateau"] if watches else [])])),
        average=draw(st.sampled_from(["", "ema", "mean"])),
        metrics=metrics,
        validate_every=validate_every,
    )


@looks_in("on_train_batch_end", "on_validation_end", "on_train_epoch_end")
class Saver(Checkpoint):
    """Writes a checkpoint after each batch, validation and epoch.

    ``places`` are these points in order, with the number of rows that the loggers had received.
    """

    def __init__(self, folder, logger):
        self.folder, self.logger, self.places = folder, logger, UserDict()

    def look(self, hook, trainer):
        if not trainer.sanity_checking:
            place = f"{hook} {trainer.progress.batches}"
            self.places[place] = len(self.logger.rows)
            trainer.save_checkpoint(self.folder / f"{place}.ckpt")


def train(setup, folder, seed, start):
    """Return the results of a run."""
    folder.mkdir()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    batches = []
    module = training.Classifier(setup, lambda *line: batches.append((*line[:3], line[3].hex())))
    rows = RecordingLogger()
    saver = Saver(folder, rows)
    callbacks = [*training.Averaging.callbacks(setup), OverflowReport(after=None), saver]  # it would step again
    arguments = {"log_every_n_steps": 1, **training.arguments_of(setup)}
    trainer = make_trainer(folder, logger=rows, enable_checkpointing=True, callbacks=callbacks, **arguments)
    trainer.fit(module, training.training_data(setup), training.validation_data(setup), ckpt_path=start)
    state = training.state_of(trainer, module)
    return SimpleNamespace(state=state, rows=rows.rows, places=saver.places, batches=batches)


def check(setup, interruptions):
    """Train, then resume from a checkpoint of the first run, then from one of the second, and so on."""
    with TemporaryDirectory() as name, warnings.catch_warnings(action="ignore"):
        whole = last = train(setup, Path(name) / "whole", 0, None)
        folder = Path(name) / "whole"
        for i, interruption in enumerate(interruptions, 1):
            if not last.places:
                break
            places = list(last.places)
            place = places[interruption % len(places)]
            rows = last.rows[last.places[place] :]  # rows that a killed run had not sent yet
            note(f"interrupted after {place}")
            start, folder = folder / f"{place}.ckpt", Path(name) / f"resumed {i}"
            last = train(setup, folder, i, start)  # with another seed, because the checkpoint has all random states
            assert last.batches == whole.batches[len(whole.batches) - len(last.batches) :]
            assert int(place.split()[1]) + len(last.batches) == len(whole.batches)
            assert training.differences(last.state, whole.state) == []
            assert training.differences(last.rows, rows) == []
            assert list(last.places) == places[places.index(place) + 1 :]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.whole
@settings(
    max_examples=EXAMPLES or 14,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    phases=(Phase.generate, Phase.shrink) if EXAMPLES else (Phase.generate,),  # shrinking takes minutes
    suppress_health_check=list(HealthCheck),
)
@given(setups(), st.lists(st.integers(0, 30), min_size=1, max_size=3))
def test_interrupted_run_is_the_one_that_was_not(setup, interruptions):
    check(setup, interruptions)
