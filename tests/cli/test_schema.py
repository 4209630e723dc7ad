"""A mistake in an argument of the Trainer gets the same sentence in a config and in Python."""

import re

import pytest

from trainer import Trainer
from trainer.arguments import describe
from trainer.cli.parsing import UsageError
from trainer.cli.schema import ACCEPTED, check_settings
from trainer.errors import ConfigurationError

# Invalid values of each argument (wrong type, out of range, misspelled word), and the expected text.
MISTAKES = {
    "accelerator": {"gpuu": "Did you mean 'gpu'?", 3: "auto, cpu, gpu, cuda, mps or tpu."},
    "devices": {0: "a number of devices of at least 1", "two": "-1 for all or auto.", 1.5: "devices is 1.5,"},
    "fast_dev_run": {-1: "at least 0.", "ture": "true, false, a whole number or null. Did you mean 'true'?"},
    "max_epochs": {-2: "at least 0, or -1 for no limit.", "ten": "a whole number or null."},
    "limit_train_batches": {-1: "at least 0.", 1.5: "of at most 1.0, or a whole number of batches, such as 2."},
    "limit_test_batches": {float("nan"): "at least 0.", True: "a whole number of batches, a fraction of the"},
    "val_check_interval": {0: "more than 0. To disable validation, set limit_val_batches to 0.", "10:00": "a time"},
    "barebones": {"ture": "true or false. Did you mean 'true'?"},
    "dataloader_timeout": {-1.0: "at least 0.", float("inf"): "at most 1000000000.", "1h": "a number."},
}
IN_PYTHON = {r"\bnull\b": "None", r"\btrue\b": "True", r"\bfalse\b": "False", r"'\{hours: 12\}'": "{'hours': 12}"}


@pytest.mark.parametrize("name", MISTAKES)
def test_one_mistake_one_sentence(name):
    """In a config, and in Python with its spellings of null, true and false."""
    for value, message in MISTAKES[name].items():
        with pytest.raises(UsageError) as in_config:
            check_settings("trainer", {name: value}, ACCEPTED)
        start = f"trainer.{name} is {describe(value)}, expected "
        text = str(in_config.value)
        assert text.startswith(start)
        assert message in text
        with pytest.raises(ConfigurationError) as error:
            Trainer(**{name: value})
        expected = text.removeprefix(start)
        for word, in_python in IN_PYTHON.items():
            expected = re.sub(word, in_python, expected)
        assert str(error.value) == f"{name} is {value!r}, expected {expected}"
