from __future__ import annotations

import pytest
import torch

from trainer.errors import PrecisionError
from trainer.precision import (
    AutoPrecision,
    DoublePrecision,
    FullPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    resolve_precision,
)
from trainer.precision.registry import PLUGINS


@pytest.mark.parametrize(
    ("given", "kind", "name", "scales"),
    [
        (None, FullPrecision, "32-true", False),
        (32, FullPrecision, "32-true", False),
        ("64", DoublePrecision, "64-true", False),
        ("16", MixedPrecision, "16-mixed", True),
        ("bf16", MixedPrecision, "bf16-mixed", False),
        ("16-true", HalfPrecision, "16-true", False),
        ("bf16-true", HalfPrecision, "bf16-true", False),
        ("auto", AutoPrecision, "auto", False),
    ],
)
def test_name_becomes_a_plugin(given, kind, name, scales):
    plugin = resolve_precision(given)
    assert (type(plugin), plugin.name) == (kind, name)
    assert plugin.build_scaler(torch.device("cpu")).is_enabled() is scales
    assert resolve_precision(given) is not plugin


def test_every_name_has_a_plugin():
    assert [resolve_precision(name).name for name in PLUGINS] == list(PLUGINS)


@pytest.mark.parametrize(
    ("name", "dtype", "is_half", "scales_loss"),
    [
        ("32-true", torch.float32, False, False), ("64-true", torch.float64, False, False),
        ("16-mixed", torch.float16, True, True), ("bf16-mixed", torch.bfloat16, True, False),
        ("16-true", torch.float16, True, False), ("fp8-mixed", torch.bfloat16, True, False),
    ],
)  # fmt: skip
def test_properties(name, dtype, is_half, scales_loss):
    plugin = resolve_precision(name)
    assert (plugin.dtype, plugin.is_half, plugin.scales_loss) == (dtype, is_half, scales_loss)


def test_registered_name_is_refused():
    with pytest.raises(PrecisionError, match="'16-mixed' for Mine, but it is that of MixedPrecision"):
        type("Mine", (Precision,), {"names": {"16-mixed": {}}, "__qualname__": "Mine"})
    assert type(resolve_precision("16-mixed")) is MixedPrecision


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (16.0, r"of type builtins\.float"),
        (MixedPrecision, r"of type builtins\.type"),
        (torch.float16, r"of type torch\.dtype"),
    ],
)
def test_something_else(given, message):
    with pytest.raises(PrecisionError, match=f"Got precision {message}, expected a name such as '16-mixed'") as caught:
        resolve_precision(given)
    assert "Lightning" not in str(caught.value)
