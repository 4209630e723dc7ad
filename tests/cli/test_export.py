"""``export ckpt=RUN to=FILE``: the file computes the module's ``forward``, or is not written."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.cli.conftest import FILES, train
from trainer.cli import main
from trainer.cli.exported_graphs import inputs_of
from trainer.cli.parsing import UsageError, read

pytestmark = pytest.mark.filterwarnings("default")


FORWARD = {
    "Net": "{'value': self.net(points), 'large': (self.net(points) > 1).float()}",
    "Fixed": "self.net(points).reshape(4, 1)",
    "Random": "self.net(points) + torch.rand(1)",
    "Branches": "self.net(points) if points.sum().item() > 0 else points",
    "Other": "self.net(points[:, :, 0])",
}
"""The results of ``forward`` of some models."""

MODULE = "import line_fit\nimport torch\n\n"
for name, code in FORWARD.items():
    MODULE += f"class {name}(line_fit.Line):\n    def forward(self, points):\n        return {code}\n\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of ``Net``."""
    return train(tmp_path_factory.mktemp("trained"), FILES | {"nets.py": MODULE}, "model._target_=nets.Net")


@pytest.fixture(autouse=True)
def state(project, trained):
    """The weights of the run in the folder ``run``."""
    (project / "nets.py").write_text(MODULE)
    for kind in re.findall(r"class (\w+)", MODULE):  # a checkpoint's config may use names of the project's configs
        (project / "conf" / "model" / f"{kind}.yaml").write_text(f"_target_: nets.{kind}\noptimizer: ${{optimizer}}\n")
    shutil.copytree(trained, project / "run")
    yield torch.load("run/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    sys.modules.pop("nets", None)


def line(state, points):
    return points @ state["net.weight"].T + state["net.bias"]


def export(capfd, *words):
    capfd.readouterr()
    status = main(["export", *words])
    out, err = capfd.readouterr()
    return status, out, " ".join(err.split())


def export_of(kind, capfd):
    return export(capfd, "ckpt=run", f"model._target_=nets.{kind}", "to=out/model.pt2")


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_graph_equals_forward(state, capfd):
    status, out, err = export(capfd, "ckpt=run", "to=out/model.pt2")
    assert (status, err) == (0, "")
    assert re.search(r"out/model.pt2: [\d.]+ MiB, float32, for batches of any size \(checked with 4 and 1\)", out)
    assert "are bitwise equal" in out
    assert files(Path("out")) == ["model.pt2"]
    loaded = torch.export.load("out/model.pt2")
    assert loaded.example_inputs is None  # no data in the file
    for rows in (1, 4, 9):
        points = torch.linspace(-2, 2, rows).unsqueeze(1)
        found = loaded.module()(points)
        torch.testing.assert_close(found["value"], line(state, points))
        assert found["large"].dtype == torch.float32
    status, _, err = export(capfd, "ckpt=run", "to=out/model.pt2")
    assert (status, err) == (2, "trainer: out/model.pt2 exists already. Choose another name, or remove it first.")


def test_checkpoint_with_a_config_and_settings(capfd):
    words = ["+recipe=line", "model._target_=nets.Net", "ckpt_path=run/checkpoints/last.ckpt", "to=a=b.pt2"]
    status, out, _ = export(capfd, *words, "data.batch_size=8")
    assert (status, "checked with 8 and 1" in out) == (0, True)
    assert Path("a=b.pt2").is_file()
    status, out, _ = export(capfd, "ckpt=run", "to=one.pt2", "data.batch_size=1")
    assert "checked with 2 and 1" in out  # a graph for one row would take the number for a constant


def test_weights_of_a_run(state, capfd):
    assert export(capfd, "to=a.safetensors", "ckpt=run")[0] == 0
    torch.testing.assert_close(load_file("a.safetensors"), dict(state), rtol=0, atol=0)


def test_forward_of_one_size(capfd):
    status, out, _ = export_of("Fixed", capfd)
    assert (status, "for batches of 4, no other size." in out) == (0, True)


def test_graph_with_other_results_is_not_kept(capfd):
    status, _, err = export_of("Random", capfd)
    assert status == 1
    assert "out/model.pt2 was not written: its outputs differ from those of forward" in err
    assert "Greatest absolute difference: " in err
    assert "forward must be deterministic" in err
    assert files(Path("out")) == []


def test_modules_without_a_graph(capfd):
    status, _, err = export_of("Branches", capfd)
    assert (status, "torch.export failed for Branches.forward:" in err) == (1, True)
    assert not Path("out").exists()


MISTAKES = [
    (["ckpt=run", "to=a.pth"], "export got a.pth, expected to=FILE with a name that ends in .onnx, .pt2 or"),
    (["ckpt=run", "to=a.pt2", "prefix=net."], "There is no setting 'prefix'."),
    (["ckpt=runs", "to=a.pt2"], "ckpt is runs: there is no such file or folder. Did you mean 'run'?"),
    (["+recipe=line", "to=a.pt2"], "export got no checkpoint, expected ckpt=RUN"),
    (["ckpt=run", "to=a.pt2", "model._target_=os.system"], "model is os.system, which executes, unpickles or writes"),
    (["a.ckpt", "ckpt=run", "to=a.pt2"], "Got the word 'a.ckpt', expected settings, key=value"),
    (["ckpt=run", "to=a.pt2", "weights=run"], "with export, which does not train"),
    (["ckpt=run", "to=a.safetensors", "data.batch_size=8"], "got ckpt=run data.batch_size=8, expected"),
    (["ckpt=run", "to=a.pt2", "model._target_=nets.Other"], "forward(points) of Other cannot be called with a b"),
    (["ckpt=run", "to=a.pt2", "model._target_=line_fit.Line"], "Line has no forward"),
]


def test_mistakes(project, capfd, monkeypatch):
    before = files(project)
    for words, expected in MISTAKES:
        status, _, err = export(capfd, *words)
        assert status == 2, words
        assert expected in err
    assert [name for name in files(project) if name != "__pycache__"] == before
    monkeypatch.setattr("trainer.common.packages.is_installed", lambda name: False)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for kind, packages in (("onnx", "onnx onnxscript onnxruntime"), ("safetensors", "safetensors")):
        status, _, err = export(capfd, "ckpt=run", f"to=model.{kind}")
        assert status == 2
        assert f"export needs {kind}, which is not installed: pip install {packages}" in err


# --- arguments of forward ---------------------------------------------------------------------------------------------


class Taking(nn.Module):
    def forward(self, a, b, c=None):
        return a["x"] if isinstance(a, dict) else a + b


class TakingOne(nn.Module):
    def forward(self, batch):
        return batch["x"] if isinstance(batch, dict) else batch


X, Y = torch.ones(2, 3), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("module", "batch", "positional", "named"),
    [
        (Taking(), (X, Y, X), [X, Y], {}),
        (Taking(), {"b": Y, "a": X, "label": Y}, [], {"a": X, "b": Y}),
        (TakingOne(), X, [X], {}),
        (TakingOne(), {"x": X}, [{"x": X}], {}),
    ],
)
def test_arguments_of_forward(module, batch, positional, named):
    found = inputs_of(module, batch)
    torch.testing.assert_close(list(found[0]), positional)
    assert list(found[1]) == list(named)
    torch.testing.assert_close(found[1], named)


@pytest.mark.parametrize("example", [X, (X,), {"batch": X}])
def test_an_example_of_the_module(example):
    module = TakingOne()
    module.example_input_array = example
    found = inputs_of(module, None)
    torch.testing.assert_close([*found[0], *found[1].values()], [X])


@pytest.mark.parametrize(
    ("module", "batch", "expected"),
    [
        (Taking(), X, "forward(a, b, c) of Taking cannot be called with a batch, a Tensor"),
        (Taking(), [X], "a list of Tensor: TypeError: "),
        (TakingOne(), ["text"], "a list of str, which has no tensor."),
    ],
)
def test_batch_that_forward_does_not_take(module, batch, expected):
    with pytest.raises(UsageError) as caught:
        inputs_of(module, batch)
    assert expected in str(caught.value)


def test_arguments_that_are_settings():
    found = read(["export", "ckpt=epoch=3.ckpt", "to=a=b.pt2", "data.batch_size=3"])
    assert found.overrides == ["ckpt='epoch=3.ckpt'", "to='a=b.pt2'", "data.batch_size=3"]
    assert found.words == []
