"""Objects come from the packages that are allowed, and from nothing in them that runs what it reads."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.cli.conftest import write
from trainer.cli.arguments import UsageError
from trainer.cli.build import build
from trainer.cli.folders import search_here
from trainer.cli.targets import Allowlist, targets


def test_nested_nodes_become_objects_with_plain_containers():
    node = {
        "_target_": "torch.nn.Sequential",
        "_args_": [{"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}, {"_target_": "torch.nn.ReLU"}],
    }
    module = build(node)
    assert [type(layer) for layer in module] == [torch.nn.Linear, torch.nn.ReLU]
    assert module[0].weight.shape == (3, 2)


def test_a_partial_waits_for_the_rest():
    make = build({"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.5, "momentum": 0.9})
    optimizer = make([torch.nn.Parameter(torch.zeros(1))])
    assert isinstance(optimizer, torch.optim.SGD)
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.5, 0.9)


def test_containers_reach_the_constructor_as_dict_and_list():
    made = build({"_target_": "torch.utils.data.Subset", "dataset": {"a": [1, 2]}, "indices": [0, {"b": 1}]})
    assert type(made.dataset) is dict
    assert type(made.dataset["a"]) is list
    assert type(made.indices) is list
    assert type(made.indices[1]) is dict


@pytest.mark.parametrize("value", [None, 3, "text"])
def test_a_scalar_is_itself(value):
    assert build(value) is value


def test_targets_are_found_at_any_depth():
    node = {"a": {"_target_": "x.A", "b": [{"_target_": "y.B"}]}, "_target_": "z.C"}
    assert sorted(targets(node, "k")) == [("k", "z.C"), ("k.a", "x.A"), ("k.a.b[0]", "y.B")]


@pytest.mark.parametrize(
    "target",
    [
        "os.system", "builtins.eval", "subprocess.run", "numpy.load", "pickle.loads", "functools.partial",
        "hydra.utils.get_object", "torch.load", "torch.hub.load", "torch.jit.load", "torch.serialization.load",
        "torch.ops.load_library",
        "torch.utils.cpp_extension.load", "torch._C._jit_set_profiling_mode", "torch.package.PackageImporter",
        "lightning.LightningModule.load_from_checkpoint", "trainer.cli.main", "torch.multiprocessing.spawn",
    ],
)  # fmt: skip
def test_refused_by_name(target):
    with pytest.raises(UsageError, match=r"allow|may not"):
        Allowlist().check({"a": {"_target_": target}})
    with pytest.raises(UsageError):
        build({"a": [{"_target_": target}]})


@pytest.mark.parametrize(
    "target",
    [
        "torch.optim.optimizer.functools.partial",
        "torch.nn.modules.module.warnings.warn",
        "torch.nn.modules.linear.torch.load_state_dict_from_url",
    ],
)
def test_refused_because_the_name_is_a_detour(target):
    Allowlist().check({"_target_": target})
    with pytest.raises(UsageError):
        build({"_target_": target})


def test_detours_to_refused_functions_are_refused_too(tmp_path, monkeypatch):
    write(tmp_path, {"detour.py": "from torch import load as fetch\nfrom os import system\n"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(UsageError, match="unpickles what it reads"):
        Allowlist().locate("detour.fetch")
    with pytest.raises(UsageError, match=r"asks for detour\.system, which runs or unpickles"):
        Allowlist().locate("detour.system")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("far_modul.Thing", "m asks for far_modul.Thing, and there is no module 'far_modul': no far_modul.py in this"),
        ("torch.nn.Linaer", "m: there is no torch.nn.Linaer: torch.nn has no 'Linaer'. Did you mean 'Linear'?"),
        ("torch.nnn.Linear", "not among what a config may use of torch. Did you mean 'torch.nn'?"),
        ("torch.nn.Linear.wieght", "torch.nn.Linear has no 'wieght'."),
        ("torch.nn.functional.math", "m: torch.nn.functional.math"),
        ("torch.pi", "m asks for torch.pi, which is not among what a config may use of torch."),
        ("recipes.nothing.Here", "recipes has no 'nothing'."),
    ],
)
def test_a_target_that_does_not_exist(target, message):
    with pytest.raises(UsageError) as caught:
        build({"_target_": target}, "m")
    assert message in str(caught.value)


def test_a_module_of_the_working_directory_is_allowed_and_no_other(tmp_path, monkeypatch):
    write(
        tmp_path, {"here/own_module.py": "class Thing:\n    pass\n", "away/far_module.py": "class Thing:\n    pass\n"}
    )
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "away"), *sys.path])
    search_here()
    assert type(build({"_target_": "own_module.Thing"})).__name__ == "Thing"
    with pytest.raises(UsageError, match="python -m trainer trust far_module"):
        build({"_target_": "far_module.Thing"})
    assert type(build({"_target_": "far_module.Thing"}, allowlist=Allowlist(["far_module"]))).__name__ == "Thing"


def test_a_module_that_fails_to_import_says_why(tmp_path, monkeypatch):
    write(tmp_path, {"broken_module.py": "import a_package_nobody_has\n"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(UsageError, match="a_package_nobody_has"):
        build({"_target_": "broken_module.Thing"})
