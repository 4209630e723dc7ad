"""Required methods of a module, compiled modules, and the mode of evaluation, as under Lightning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity import Classifier, data, ours, run_both
from trainer.errors import ConfigurationError

SET_ONCE = ("training_step", "validation_step", "automatic_optimization", "backward", "transfer_batch_to_device")
pytestmark = pytest.mark.filterwarnings("ignore:.*`val_dataloader`", "ignore:.*no `validation_step`")


@pytest.mark.parametrize(
    ("fn", "method"),
    [
        ("fit", "training_step"),
        ("fit", "configure_optimizers"),
        ("fit", "validation_step"),
        ("validate", "validation_step"),
        ("predict", "predict_step"),
        ("predict", "forward"),
    ],
)
def test_required_methods_equal_lightnings(method: str, fn: str) -> None:
    def scenario(make: Any) -> Any:
        module = Classifier()
        setattr(module, method, None)
        try:
            getattr(make(max_steps=1), fn)(module, data(4))
        except (TypeError, ValueError, RuntimeError) as error:
            return isinstance(error, TypeError), str(error)[:40]
        except Exception as error:  # MisconfigurationException is nothing else
            return type(error), str(error)
        return "fine"

    theirs, mine = run_both(scenario)
    assert theirs == mine


def test_in_fit_validation_tracks_no_gradients_but_may_train_on() -> None:
    class Notes(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    seen: list[Any] = []
    ours(max_epochs=1, inference_mode=True).fit(Notes(), data(4), data(2))
    assert set(seen) == {(False, False)}


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
