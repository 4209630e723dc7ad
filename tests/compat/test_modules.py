"""Required methods of a module, compiled modules, and the mode of evaluation, as under Lightning."""

from __future__ import annotations

from typing import Any

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
def test_step_that_is_set_during_a_fit_is_used_or_refused(what: str, when: str) -> None:
    class Phases(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.ran: list[str] = []

        def other(self, batch: Any, batch_idx: int) -> Any:
            self.ran.append("other")
            return self.loss(batch)

        def begin(self) -> None:
            setattr(self, what, False if what == "automatic_optimization" else self.other)

    module = Phases()
    setattr(module, when, module.begin)
    if when == "on_fit_start":
        ours(max_epochs=1, num_sanity_val_steps=0).fit(module, data(4), data(4))
        assert "other" in module.ran
    else:
        with pytest.raises(ConfigurationError, match=f"Phases.{what} was set during the fit"):
            ours(max_epochs=1, num_sanity_val_steps=0).fit(module, data(4), data(4))
        assert not module.ran
