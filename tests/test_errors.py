from __future__ import annotations

import pytest

from trainer.errors import (
    CheckpointError,
    ConfigurationError,
    PrecisionError,
    TrainerError,
    UnsupportedError,
    did_you_mean,
)


@pytest.mark.parametrize("kind", [ConfigurationError, UnsupportedError, PrecisionError, CheckpointError])
def test_one_base_class_catches_them_all(kind):
    assert issubclass(kind, TrainerError)


def test_they_are_what_callers_expect_of_python():
    assert issubclass(ConfigurationError, ValueError)
    assert issubclass(PrecisionError, ConfigurationError)
    assert issubclass(UnsupportedError, ConfigurationError)
    assert issubclass(UnsupportedError, NotImplementedError)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("16-mixd", " Did you mean '16-mixed'?"), ("bf16-mixed", " Did you mean 'bf16-mixed'?"), ("zebra", "")],
)
def test_did_you_mean(given, expected):
    assert did_you_mean(given, iter(["16-mixed", "bf16-mixed"])) == expected


def test_did_you_mean_among_nothing():
    assert did_you_mean("x", []) == ""
