import itertools
import logging
import os
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT, covering, is_whole, logging_restored, shuffle, values_of
from tests.support import seeds, tiered
from tests.warm_python import WarmPython, start_server


def test_covering_keeps_every_value_and_every_pair_of_values():
    columns = (1, 2, 3), ("x", "y"), (True, False)
    rows = {row: row for row in itertools.product(*columns)}
    values = covering(rows, 1, kept=[(2, "y", True)])
    pairs = covering(rows, 2, kept=values)
    assert (len(values), len(pairs)) == (3, 6)
    assert (2, "y", True) in values <= pairs
    for column, given in enumerate(columns):
        assert {row[column] for row in values} == set(given)
    for first, second in itertools.combinations(range(3), 2):
        found = {(row[first], row[second]) for row in pairs}
        assert found == set(itertools.product(columns[first], columns[second]))


@pytest.mark.parametrize(("a", "b"), [(1, 2), (3, 4)])
@pytest.mark.parametrize("c", [5])
def test_values_of_one_decorator_are_combined_as_one(a, b, c, request):
    assert set(values_of(request.node)) == {(id(a), id(b)), (id(c),)}


def test_seeds_and_values_are_sorted_into_tiers():
    found = [(*one.values, *(mark.name for mark in one.marks)) for one in seeds(3, quick=1, nightly=1)]
    assert found == [(0,), (1, "whole"), (2, "whole"), (3, "nightly")]
    found = [(*one.values, *(mark.name for mark in one.marks)) for one in tiered("ab", quick="b")]
    assert found == [("a", "whole"), ("b", "representative")]


@pytest.mark.parametrize(
    ("path", "fixtures", "whole"),
    [
        ("tests/loop/test_fit.py", ["tmp_path"], False),
        ("tests/test_trainer.py", ["python", "tmp_path"], True),
        ("tests/distributed/test_ddp.py", [], True),
    ],
)
def test_tests_that_start_processes_are_not_those_of_scripts_test(path, fixtures, whole):
    assert is_whole(SimpleNamespace(path=ROOT / path, fixturenames=fixtures)) is whole


def test_ci_runs_all_tests():
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "exec scripts/test --all"


def test_order_depends_on_the_seed_and_keeps_modules_together():
    tests = [SimpleNamespace(path=path, name=name) for path in "abc" for name in range(5)]
    orders = []
    for seed in ("1", "1", "2"):
        shuffle(order := list(tests), seed)
        orders.append(order)
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2], key=tests.index) == tests
    for order in orders:
        assert len(list(itertools.groupby(order, lambda test: test.path))) == 3


@pytest.mark.parametrize("name", [None, "lightning.pytorch", "lightning.pytorch.advice"])
def test_loggers_that_a_command_configures_are_restored(name):
    logger = logging.getLogger(name)
    before = list(logger.handlers), logger.level, logger.propagate, logger.isEnabledFor(logging.ERROR)
    with logging_restored():
        logger.handlers[:] = [logging.NullHandler()]
        logger.propagate = not logger.propagate
        logger.setLevel(logging.CRITICAL)
        assert not logger.isEnabledFor(logging.ERROR)
    assert (logger.handlers, logger.level, logger.propagate, logger.isEnabledFor(logging.ERROR)) == before


@pytest.mark.whole
def test_programs_do_not_inherit_the_output_of_imports(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    alive, owner = os.pipe()
    server = start_server(tmp_path, tmp_path, alive, imported=("this",))  # prints a poem
    python = WarmPython(tmp_path)
    outputs = [python.run("-c", "import this; print('program')").stdout for _ in range(2)]
    os.close(owner)
    server.communicate()
    os.close(alive)
    assert outputs == ["program\n"] * 2


def test_programs_have_only_the_files_that_their_client_has(python, tmp_path):
    program = "import os; print(*sorted({*map(int, os.listdir('/proc/self/fd'))} - {3}))"  # 3 is that of the listing
    with (tmp_path / "file").open("w") as file:
        found = [python.run("-c", program, pass_fds=numbers).stdout for numbers in ((), (file.fileno(),))]
        assert found == ["0 1 2\n", f"0 1 2 {file.fileno()}\n"]
