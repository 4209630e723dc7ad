"""Required methods of a module, compiled modules, and the mode of evaluation, as under Lightning."""

from contextlib import nullcontext

import pytest

from tests.parity import Classifier, data, ours
from trainer.errors import ConfigurationError

SET_ONCE = ("training_step", "validation_step", "automatic_optimization", "backward", "transfer_batch_to_device")


@pytest.mark.parametrize(
    ("what", "when"),
    [
        ("training_step", "on_fit_start"),
        ("validation_step", "on_fit_start"),
        *zip(SET_ONCE, ["on_train_start", "on_train_epoch_start"] * 3, strict=False),
    ],
)
def test_step_that_is_set_during_a_fit_is_used_or_refused(what, when):
    module, ran = Classifier(), []

    def other(batch, batch_idx):
        ran.append(what)
        return module.loss(batch)

    setattr(module, when, lambda: setattr(module, what, False if what == "automatic_optimization" else other))
    is_used, refusal = when == "on_fit_start", f"Classifier.{what} was set during the fit"
    with nullcontext() if is_used else pytest.raises(ConfigurationError, match=refusal):
        ours(max_epochs=1, num_sanity_val_steps=0).fit(module, data(4), data(4))
    assert bool(ran) is is_used
