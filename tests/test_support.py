import itertools
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT, covering, is_whole, values_of
from tests.support import seeds, tiered


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
        ("tests/loops/test_fit.py", ["tmp_path"], False),
        ("tests/test_trainer.py", ["python", "tmp_path"], True),
        ("tests/distributed/test_ddp.py", [], True),
    ],
)
def test_tests_that_start_processes_are_not_those_of_scripts_test(path, fixtures, whole):
    assert is_whole(SimpleNamespace(path=ROOT / path, fixturenames=fixtures)) is whole


def test_ci_runs_all_tests():
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "exec scripts/test --all"


def test_loaded_modules_are_in_later_programs(python):
    python.load("not_installed", "tabnanny")
    assert python.run("-c", "import sys; print('tabnanny' in sys.modules)").stdout == "True\n"
