from __future__ import annotations

import pytest

from trainer.state.outcome import StepOutcome


def test_outcome_is_a_value():
    outcome = StepOutcome(True, 8.0, 4.0, None, (0,))
    assert outcome == StepOutcome(
        skipped=True,
        scale=8.0,
        next_scale=4.0,
        grad_norm=None,
        optimizers=(0,),
        skipped_optimizers=(),
        nonfinite_loss=False,
    )
    with pytest.raises(AttributeError):
        outcome.skipped = False
