"""The errors of a first port have the messages of the page. `test_pages` runs its programs."""

import re

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.docs.pages import ROOT
from tests.support import Regression, loader_of, make_batches, make_trainer

BATCHES = make_batches(3)
PORTS = [
    (Regression(change=lambda loss, _: loss.backward() or loss), loader_of(BATCHES)),
    (nn.Linear(6, 3), loader_of(BATCHES)),
    (Regression(), TensorDataset(*(torch.stack([tensor] * 2) for tensor in BATCHES[0]))),
    (Regression(change=lambda *_: None), loader_of(BATCHES)),
]
"""The module and the data of each row of the table."""


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("number", range(len(PORTS)))
def test_messages_of_a_first_port(number, recwarn, caplog):
    page = (ROOT / "docs" / "from-a-plain-loop.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| (.*) \| .* \|$", page.partition("|---")[2], re.MULTILINE)
    assert len(rows) == len(PORTS)
    messages = []
    try:
        make_trainer(None).fit(*PORTS[number])
    except (RuntimeError, TypeError) as error:
        messages = [str(error), *error.__notes__]
    messages += [*(str(warning.message) for warning in recwarn), *caplog.messages]
    assert re.search(r"(`+) ?(.*?) ?\1(?!`)", rows[number])[2] in "\n".join(messages)
