"""Trainer arguments from the environment, and the messages of the constructor, as in Lightning."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from lightning.pytorch import Trainer as LightningTrainer

from tests.parity import MAKERS, QUIET, lightnings_noise_ignored, ours
from trainer import Trainer


@pytest.mark.parametrize("kind", [LightningTrainer, Trainer])
def test_environment_variables_are_defaults_of_arguments(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "7")
    monkeypatch.setenv("PL_TRAINER_LIMIT_VAL_BATCHES", "0.5")
    monkeypatch.setenv("PL_TRAINER_PRECISION", "bf16-mixed")
    monkeypatch.setenv("PL_TRAINER_DEVICES", "3")
    monkeypatch.setenv("PL_TRAINER_NO_SUCH_ARGUMENT", "3")
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "")
    with lightnings_noise_ignored():
        trainer = kind(**QUIET)  # which sets `devices`
    assert (trainer.max_steps, trainer.limit_val_batches, trainer.precision) == (7, 0.5, "bf16-mixed")
    assert (trainer.num_devices, trainer.max_epochs) == (1, None)


def test_invalid_environment_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "-7")
    with pytest.raises(ValueError, match="max_steps is -7"):
        ours()


@pytest.mark.parametrize("arguments", [{}, {"fast_dev_run": 2}, {"detect_anomaly": True}], ids=str)
def test_messages_of_the_constructor(arguments: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    said = []
    for make in MAKERS:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            make(**arguments)
        said.append({record.message for record in caplog.records if "Tip" not in record.message})
    assert said[0] == said[1]
    assert "GPU available: False, used: False" in said[1]


def test_gpu_that_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.pytorch.accelerators.CUDAAccelerator.is_available", lambda: True)
    with pytest.warns(UserWarning, match="GPU available but not used"):
        ours()
