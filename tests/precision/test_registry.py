import pytest
import torch

from trainer.errors import PrecisionError
from trainer.precision import MixedPrecision, Precision, resolve_precision
from trainer.precision.registry import PLUGINS


def test_every_name_has_a_plugin():
    assert [resolve_precision(name).name for name in PLUGINS] == list(PLUGINS)


@pytest.mark.parametrize(
    ("given", "name", "dtype", "is_half", "scales_loss"),
    [
        (None, "32-true", torch.float32, False, False), ("64", "64-true", torch.float64, False, False),
        (16, "16-mixed", torch.float16, True, True), ("bf16", "bf16-mixed", torch.bfloat16, True, False),
        ("16-true", "16-true", torch.float16, True, False), ("fp8-mixed", "fp8-mixed", torch.bfloat16, True, False),
    ],
)  # fmt: skip
def test_properties(given, name, dtype, is_half, scales_loss):
    plugin = resolve_precision(given)
    assert (plugin.name, plugin.dtype, plugin.is_half, plugin.scales_loss) == (name, dtype, is_half, scales_loss)
    if name != "fp8-mixed":  # needs torchao
        assert plugin.build_scaler(torch.device("cpu")).is_enabled() is scales_loss
    assert resolve_precision(given) is not plugin


def test_registered_name_is_refused():
    with pytest.raises(PrecisionError, match="'16-mixed' for Mine, but it is that of MixedPrecision"):
        type("Mine", (Precision,), {"names": {"16-mixed": {}}, "__qualname__": "Mine"})
    assert type(resolve_precision("16-mixed")) is MixedPrecision


@pytest.mark.parametrize(("given", "kind"), [(MixedPrecision, r"builtins\.type"), (torch.float16, r"torch\.dtype")])
def test_something_else(given, kind):
    with pytest.raises(
        PrecisionError, match=f"Got precision of type {kind}, expected a name such as '16-mixed'"
    ) as caught:
        resolve_precision(given)
    assert "Lightning" not in str(caught.value)
