"""Changes of statements that a diagnosis tries."""

from pathlib import Path

import pytest
import torch

from trainer.diagnosis.rewrite import propose, widen
from trainer.diagnosis.trace import Origin

CODE = """def choose(kind, a, b):
    a = a.half()
    b = b.half()
    match kind:
        case 0:
            return a / b
        case 1:
            return b / a
    a = a.bfloat16()
    return b.half()
"""


class Cast:
    def first(self, value):
        return value.half() * 2

    def second(self, value):
        return value.half() * 3


def origin_in(file: Path | str, line: int) -> Origin:
    return Origin("div", "forward", "", "", file=str(file), line=line)


@pytest.fixture
def file(tmp_path):
    (tmp_path / "code.py").write_text(CODE)
    return tmp_path / "code.py"


def test_only_the_statement_of_the_operation_is_guarded(file):
    changes = list(map(str, propose(origin_in(file, 6))))
    assert changes
    assert changes
    assert all(change.startswith("in code.py:6 write: return a / ") for change in changes)


def test_nearest_casts_come_first(file):
    assert [change.edits[0][0] for change in widen(origin_in(file, 6))] == [3, 2, 9, 10]


def test_change_is_applied_only_as_a_whole():
    """A remedy with two edits must not be tried, and reported, with one of them."""
    first, second = list(widen(origin_in(__file__, 0)))[:2]
    both = first.also(second)
    value = torch.tensor(70_000.0)
    with both.applied([Cast]) as is_whole:
        assert is_whole
        assert Cast().first(value) + Cast().second(value) == 350_000
    own = Cast.second
    del Cast.second
    with both.applied([Cast]) as is_whole:
        assert not is_whole
    Cast.second = own
    assert Cast().first(value).isinf()
