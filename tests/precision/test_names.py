import subprocess
import sys

import pytest

from trainer.errors import PrecisionError
from trainer.precision.names import canonical, match
from trainer.precision.registry import PLUGINS


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (16, "16-mixed"), ("16", "16-mixed"), ("16-mixed", "16-mixed"), ("fp16-mixed", "16-mixed"),
        (32, "32-true"), ("32", "32-true"), ("fp32", "32-true"), ("32-true", "32-true"),
        (64, "64-true"), ("64", "64-true"), ("64-true", "64-true"),
        ("bf16", "bf16-mixed"), ("bf16-mixed", "bf16-mixed"), (" BF16-Mixed ", "bf16-mixed"),
        ("16-true", "16-true"), ("fp16-true", "16-true"), ("bf16-true", "bf16-true"), ("Auto", "auto"),
    ],
)  # fmt: skip
def test_canonical(given, name):
    assert canonical(given, PLUGINS) == match(given, PLUGINS) == name


@pytest.mark.parametrize(("given", "near"), [("16-mixd", "16-mixed"), ("b16", "bf16"), ("atuo", "auto")])
def test_typo_raises_with_the_nearest_name(given, near):
    with pytest.raises(PrecisionError, match=f"Got precision='{given}'.*Did you mean '{near}'"):
        canonical(given, PLUGINS)


def test_names_need_no_torch():
    code = "import sys, trainer.precision.names; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
