import pickle

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import trainer.compat.base  # noqa: F401 - with the Trainer come Lightning's exceptions
from trainer.errors import ConfigurationError, PrecisionError, UnsupportedError


@pytest.mark.parametrize("kind", [ConfigurationError, PrecisionError, UnsupportedError])
@pytest.mark.parametrize("caught_as", [MisconfigurationException, ValueError])
def test_configuration_error_is_caught_as_lightnings_and_as_pythons(
    kind: type[Exception], caught_as: type[Exception]
) -> None:
    with pytest.raises(caught_as, match="given"):
        raise kind("given")


def test_error_still_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(PrecisionError("given")))
    assert type(error) is PrecisionError
    assert error.args == ("given",)
