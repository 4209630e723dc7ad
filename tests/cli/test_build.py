"""Objects from the nodes of a config."""

import sys

import pytest
import torch

from tests.cli.conftest import build, write
from trainer.cli.folders import search_here
from trainer.cli.parsing import UsageError
from trainer.cli.schema import targets


def test_partial_waits_for_the_rest():
    make = build({"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.5, "momentum": 0.9})
    optimizer = make([torch.nn.Parameter(torch.zeros(1))])
    assert isinstance(optimizer, torch.optim.SGD)
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.5, 0.9)


def test_nested_nodes_become_objects_with_plain_containers():
    layers = [{"_target_": "torch.nn.Linear", "_args_": [2, 3]}, {"_target_": "torch.nn.ReLU"}]
    data = {"a": [{"_target_": "torch.nn.Sequential", "_args_": layers}]}
    made = build({"_target_": "torch.utils.data.Subset", "dataset": data, "indices": [0, {"b": 1}]})
    assert (type(made.dataset), type(made.dataset["a"]), made.indices) == (dict, list, [0, {"b": 1}])
    assert type(made.indices[1]) is dict
    ((linear, relu),) = made.dataset["a"]
    assert (linear.weight.shape, type(relu)) == ((3, 2), torch.nn.ReLU)


def test_targets_are_found_at_any_depth():
    node = {"a": {"_target_": "x.A", "b": [{"_target_": "y.B"}]}, "_target_": "z.C"}
    assert sorted(targets(node, "k")) == [("k", "z.C"), ("k.a", "x.A"), ("k.a.b[0]", "y.B")]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("far_modul.Thing", "m is far_modul.Thing, and there is no module 'far_modul' in /"),
        ("torch.nn.Linaer", "m: there is no torch.nn.Linaer: torch.nn has no 'Linaer'. Did you mean 'Linear'?"),
        ("torch.nnn.Linear", "torch has no 'nnn'. Did you mean 'nn'?"),
        ("torch.nn.functional.math", "m: torch.nn.functional.math"),
        ("torch.pi", "m: torch.pi is a float, expected a class or a function."),
    ],
)
def test_target_that_does_not_exist(target, message):
    with pytest.raises(UsageError) as caught:
        build({"_target_": target}, "m")
    assert message in str(caught.value)


def test_module_of_the_working_directory_and_any_other_is_found(tmp_path, monkeypatch):
    write(tmp_path, dict.fromkeys(["here/own_module.py", "away/far_module.py"], "class Thing:\n    pass\n"))
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "away"), *sys.path])
    search_here()
    for module in ("own_module", "far_module"):
        assert type(build({"_target_": f"{module}.Thing"})).__name__ == "Thing"


def test_error_of_a_failed_import_is_printed(tmp_path, monkeypatch):
    write(tmp_path, {"broken_module.py": "import a_package_nobody_has\n"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(UsageError, match="a_package_nobody_has"):
        build({"_target_": "broken_module.Thing"})
