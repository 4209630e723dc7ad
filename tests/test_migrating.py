"""docs/migrating-from-lightning.md lists all names of the installed Lightning."""

import inspect
import re
from pathlib import Path

from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch import callbacks, loggers, profilers

from tests.parity import lightning, ours

GUIDE = (Path(__file__).parents[1] / "docs" / "migrating-from-lightning.md").read_text()


def named_in(section):
    """Return the names in the first columns of a section's table."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", GUIDE, re.MULTILINE | re.DOTALL)
    firsts = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return {name for first in firsts for name in re.findall(r"`(\w+)`", first)}


def classes_of(module):
    return {name for name, value in vars(module).items() if inspect.isclass(value)}


def test_every_argument():
    assert named_in("Arguments") == inspect.signature(LightningTrainer.__init__).parameters.keys() - {"self"}


def test_every_attribute():
    theirs, mine = lightning(), ours()
    public = {name for name in dir(theirs) if not name.startswith("_")}
    assert named_in("Attributes and methods") == public
    assert not [name for name in public if not hasattr(mine, name)]


def test_every_callback_logger_and_profiler():
    assert named_in("Callbacks") == classes_of(callbacks)
    assert named_in("Loggers and profilers") == classes_of(loggers) | classes_of(profilers)
