from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ROOT, is_whole
from tests.support import pairwise, seeds, tiered


def kept(parameters: Any) -> list[Any]:
    return [one.values for one in parameters if not one.marks]


def test_pairwise_keeps_every_pair_of_values_and_marks_the_rest_nightly() -> None:
    values = {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False)}
    names, parameters = pairwise(**values).args
    assert names == "a,b,c"
    assert [one.values for one in parameters] == list(itertools.product(*values.values()))
    assert {mark.name for one in parameters for mark in one.marks} == {"nightly"}
    assert len(kept(parameters)) == 6
    for first, second in itertools.combinations(range(3), 2):
        found = {(row[first], row[second]) for row in kept(parameters)}
        assert found == set(itertools.product(list(values.values())[first], list(values.values())[second]))


def test_seeds_are_sorted_into_tiers() -> None:
    found = [(one.values, *(mark.name for mark in one.marks)) for one in seeds(3, quick=1, nightly=1)]
    assert found == [((0,),), ((1,), "whole"), ((2,), "whole"), ((3,), "nightly")]


def test_values_are_sorted_into_tiers() -> None:
    found = [(one.values, *(mark.name for mark in one.marks)) for one in tiered("ab", quick="b")]
    assert found == [(("a",), "whole"), (("b",), "representative")]


@pytest.mark.parametrize(
    ("path", "fixtures", "whole"),
    [
        ("tests/loops/test_fit.py", ["tmp_path"], False),
        ("tests/test_trainer.py", ["python", "tmp_path"], True),
        ("tests/distributed/test_ddp.py", [], True),
    ],
)
def test_tests_that_start_processes_are_not_those_of_scripts_test(path: str, fixtures: list[str], whole: bool) -> None:
    assert is_whole(SimpleNamespace(path=ROOT / path, fixturenames=fixtures)) is whole


def test_ci_runs_all_tests() -> None:
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "exec scripts/test --all"
