"""``export ckpt=RUN to=FILE``: the file computes the module's ``forward``, or is not written."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from trainer.cli import main
from trainer.cli.arguments import UsageError, read
from trainer.cli.graphs import inputs_of

pytestmark = pytest.mark.filterwarnings("default")

needs_onnx = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")), reason="needs the extra export"
)

MODULE = """
import line_fit
import torch


class Net(line_fit.Line):
    def forward(self, points):
        return {"value": self.net(points), "large": (self.net(points) > 1).float()}


class Fixed(line_fit.Line):
    def forward(self, points):
        return self.net(points).reshape(4, 1)


class Random(line_fit.Line):
    def forward(self, points):
        return self.net(points) + torch.rand(1)


class Branches(line_fit.Line):
    def forward(self, points):
        return self.net(points) if points.sum().item() > 0 else points


class Two(line_fit.Line):
    def forward(self, points, factors, more=None):
        return self.net(points) * factors


class Other(line_fit.Line):
    def forward(self, points):
        return self.net(points[:, :, 0])


class Given(Other):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.example_input_array = torch.ones(3, 1, 2)
"""


@pytest.fixture(autouse=True)
def run(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a run of ``Net``."""
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    (project / "nets.py").write_text(MODULE)
    for kind in re.findall(r"class (\w+)", MODULE):  # a checkpoint's config may use names of the project's configs
        (project / "conf" / "model" / f"{kind}.yaml").write_text(f"_target_: nets.{kind}\noptimizer: ${{optimizer}}\n")
    yield project / "run"
    sys.modules.pop("nets", None)


def fit(kind: str = "Net") -> Any:
    """Train, and return the weights."""
    assert main(["fit", "+recipe=line", f"model._target_=nets.{kind}", "hydra.run.dir=run", "-q"]) == 0
    return torch.load("run/checkpoints/last.ckpt", weights_only=True)["state_dict"]


def line(state: Any, points: torch.Tensor) -> torch.Tensor:
    return points @ state["net.weight"].T + state["net.bias"]


def export(capfd: Any, *words: str) -> tuple[int, str, str]:
    capfd.readouterr()
    status = main(["export", *words])
    out, err = capfd.readouterr()
    return status, out, " ".join(err.split())


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_graph_equals_forward(project: Path, capfd: Any) -> None:
    state = fit()
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


def test_checkpoint_with_a_config_and_settings(project: Path, capfd: Any) -> None:
    fit()
    last = "run/checkpoints/last.ckpt"
    words = ["+recipe=line", "model._target_=nets.Net", f"ckpt_path={last}", "to=a=b.pt2", "data.batch_size=8"]
    status, out, _ = export(capfd, *words)
    assert status == 0
    assert "checked with 8 and 1" in out
    assert Path("a=b.pt2").is_file()
    status, out, _ = export(capfd, "ckpt=run", "to=one.pt2", "data.batch_size=1")
    assert "checked with 2 and 1" in out  # of one row a graph would take the number for a constant


def test_weights_only(project: Path, capfd: Any) -> None:
    state = fit()
    assert export(capfd, "to=a.safetensors", "ckpt=run")[0] == 0
    found = load_file("a.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    status, _, err = export(capfd, "ckpt=run", "to=b.safetensors", "data.batch_size=8")
    assert status == 2
    assert "got ckpt=run data.batch_size=8, expected" in err


def test_forward_of_one_size(project: Path, capfd: Any) -> None:
    fit("Fixed")
    status, out, _ = export(capfd, "ckpt=run", "to=model.pt2")
    assert status == 0
    assert "for batches of 4, no other size." in out


def test_graph_with_other_results_is_not_kept(project: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fit("Random")
    status, _, err = export(capfd, "ckpt=run", "to=out/model.pt2")
    assert status == 1
    assert "out/model.pt2 was not written: its outputs differ from those of forward" in err
    assert "Greatest absolute difference: " in err
    assert "forward must be deterministic" in err
    assert files(Path("out")) == []


def test_modules_without_a_graph(project: Path, capfd: Any) -> None:
    fit("Branches")
    status, _, err = export(capfd, "ckpt=run", "to=model.pt2")
    assert status == 1
    assert "torch.export failed for Branches.forward:" in err
    assert not Path("model.pt2").exists()


def test_the_example_of_the_module(project: Path, capfd: Any) -> None:
    fit("Given")
    status, out, _ = export(capfd, "ckpt=run", "to=model.pt2")
    assert status == 0
    assert "batches of any size (checked with 3 and 1)" in out
    assert torch.export.load("model.pt2").module()(torch.ones(2, 1, 2)).shape == (2, 1)


MISTAKES = [
    ("Net", ["ckpt=run"], "expected to=FILE with a name that ends in .onnx, .pt2 or .safetensors"),
    (
        "Net",
        ["ckpt=run", "to=model.pth"],
        "export got model.pth, expected the name of a file that ends in .onnx, .pt2 or",
    ),
    ("Net", ["ckpt=runs", "to=model.pt2"], "ckpt is runs: there is no such file or folder. Did you mean 'run'?"),
    ("Net", ["+recipe=line", "to=model.pt2"], "export got no checkpoint, expected ckpt=RUN"),
    ("Net", ["ckpt=run", "to=model.pt2", "-m"], "Got --multirun with export"),
    ("Net", ["ckpt=run", "to=model.pt2", "data.size=3"], "There is no setting 'data.size'."),
    (
        "Net",
        ["ckpt=run", "to=run/model.pt2/a.pt2", "model._target_=os.system"],
        "model is os.system, which executes, unpickles or writes its arguments",
    ),
    ("Net", ["run", "model.pt2"], "the best checkpoint of a run: `python -m trainer export ckpt=run to=model.pt2`"),
    (
        "Net",
        ["run/checkpoints/last.ckpt", "model.pt2"],
        "For a graph, or the best checkpoint of a run: `python -m trainer",
    ),
    ("Net", ["a.ckpt", "ckpt=run", "to=model.pt2"], "export got the word 'a.ckpt' among settings"),
    ("Net", ["ckpt=run", "to=model.pt2", "weights=run"], "with export, expected a command that trains"),
    (
        "Other",
        ["ckpt=run", "to=model.pt2"],
        "forward(points) of Other cannot be called with a batch, a list of Tensor, Tensor: IndexError: ",
    ),
]


@pytest.mark.parametrize(("kind", "words", "expected"), MISTAKES)
def test_mistakes(project: Path, capfd: Any, kind: str, words: list[str], expected: str) -> None:
    fit(kind)
    before = files(project)
    status, _, err = export(capfd, *words)
    assert status == 2
    assert expected in err
    assert files(project) == before


def test_module_without_forward(project: Path, capfd: Any) -> None:
    assert main(["fit", "+recipe=line", "hydra.run.dir=run", "-q"]) == 0
    status, _, err = export(capfd, "ckpt=run", "to=model.pt2")
    assert (status, "and Line has no forward" in err) == (2, True)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, project: Path, capfd: Any) -> None:
    fit()
    monkeypatch.setattr("trainer.packages.is_installed", lambda name: False)
    status, _, err = export(capfd, "ckpt=run", "to=model.onnx")
    assert status == 2
    assert "export needs onnx, which is not installed: pip install onnx onnxscript onnxruntime" in err


@pytest.mark.whole
@needs_onnx
def test_onnx(project: Path, capfd: Any) -> None:
    from onnx.reference import ReferenceEvaluator

    state = fit()
    status, out, err = export(capfd, "ckpt=run", "to=model.onnx")
    assert (status, err) == (0, "")
    assert "batches of any size (checked with 4 and 1)" in out
    points = torch.linspace(-2, 2, 9).unsqueeze(1)
    value, large = ReferenceEvaluator("model.onnx").run(None, {"points": points.numpy()})
    torch.testing.assert_close(torch.from_numpy(value), line(state, points))
    assert large.dtype == "float32"


# --- arguments of forward ---------------------------------------------------------------------------------------------


class Taking(nn.Module):
    def forward(self, a: Any, b: Any, c: Any = None) -> Any:
        return a["x"] if isinstance(a, dict) else a + b


class TakingOne(nn.Module):
    def forward(self, batch: Any) -> Any:
        return batch["x"] if isinstance(batch, dict) else batch


X, Y = torch.ones(2, 3), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("module", "batch", "positional", "named"),
    [
        (Taking(), (X, Y, X), [X, Y], {}),
        (Taking(), [X, Y], [X, Y], {}),
        (Taking(), {"b": Y, "a": X, "label": Y}, [], {"a": X, "b": Y}),
        (TakingOne(), X, [X], {}),
        (TakingOne(), (X, Y), [X], {}),
        (TakingOne(), {"x": X}, [{"x": X}], {}),
    ],
)
def test_arguments_of_forward(module: Any, batch: Any, positional: list[Any], named: dict[str, Any]) -> None:
    found = inputs_of(module, batch)
    torch.testing.assert_close(list(found[0]), positional)
    assert list(found[1]) == list(named)
    torch.testing.assert_close(found[1], named)


@pytest.mark.parametrize("example", [X, (X,), {"batch": X}])
def test_an_example_of_the_module(example: Any) -> None:
    module = TakingOne()
    module.example_input_array = example
    found = inputs_of(module, None)
    torch.testing.assert_close([*found[0], *found[1].values()], [X])


@pytest.mark.parametrize(
    ("module", "batch", "expected"),
    [
        (Taking(), X, "forward(a, b, c) of Taking cannot be called with a batch, a Tensor"),
        (Taking(), [X], "a list of Tensor: TypeError: "),
        (Taking(), {"x": X}, "a dict of Tensor: TypeError: "),
        (TakingOne(), ["text"], "a list of str, which has no tensor."),
        (Taking(), (X, torch.ones(5)), "RuntimeError: The size of tensor a (3) must match"),
    ],
)
def test_batch_that_forward_does_not_take(module: Any, batch: Any, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        inputs_of(module, batch)
    assert expected in str(caught.value)


def test_arguments_that_are_settings() -> None:
    assert read(["export", "epoch=3.ckpt", "a=b.safetensors", "model."]).words == [
        "epoch=3.ckpt", "a=b.safetensors", "model.",
    ]  # fmt: skip
    found = read(["export", "ckpt=epoch=3.ckpt", "to=a=b.pt2", "data.batch_size=3"])
    assert found.overrides == ["ckpt='epoch=3.ckpt'", "to='a=b.pt2'", "data.batch_size=3"]
    assert found.words == []
