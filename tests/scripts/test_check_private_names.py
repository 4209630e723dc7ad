"""Uses of Lightning's private names that ``scripts/check_private_names`` recognizes."""

import ast
import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "check_private_names"))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("from lightning.pytorch.loops import _FitLoop", ["_FitLoop"]),
        ("from lightning.pytorch._graveyard import x", ["_graveyard"]),
        ("from torch.utils import _pytree", []),
        ("strategy._launcher", ["_launcher"]),
        ("getattr(strategy, '_launcher')", ["_launcher"]),
        ("self._launcher", []),
        ("tensor._version", []),
    ],
)
def test_uses_of_private_names(code, expected):
    assert list(SCRIPT["used_in"](list(ast.walk(ast.parse(code))), {"_launcher"})) == expected


def test_names_are_those_of_functions_classes_and_attributes(tmp_path):
    code = "class _A:\n    def _b(self):\n        self._c = self._d\n        self.e = 1\n"
    (tmp_path / "module.py").write_text(code)
    assert SCRIPT["names_of"](tmp_path) == {"_A", "_b", "_c"}
