"""Configs that come with a checkpoint from another person: nothing executes, unpickles or starts a program."""

import os
import pickle
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from tests.cli.conftest import build, write
from tests.support import Payload
from trainer.cli import main
from trainer.cli.parsing import UsageError
from trainer.cli.targets import Allowlist


@pytest.fixture
def proof(tmp_path):
    """File that exists if a payload has run."""
    return tmp_path / "pwned"


def allowlist(packages=(), named=()):
    """Return the allowlist for a config that comes with a checkpoint."""
    return Allowlist(packages, "given/last.ckpt", named)


REFUSED = [
    # executes
    "os.system", "posix.system", "builtins.eval", "subprocess.run", "functools.partial", "hydra.utils.instantiate",
    "trainer.cli.main", "trainer.trainer.os.system", "lightning.pytorch.cli.instantiate_class", "torch.os.system",
    "torch.nn.modules.module.torch.os.system", "lightning.pytorch.callbacks.model_checkpoint.os.system",
    "torchvision.datasets.folder.os.system", "torch.utils.collect_env.run", "torch.utils.benchmark.Timer.timeit",
    "torch.nn.modules.linear.torch.utils.collect_env.run", "torch.fx.symbolic_trace",
    "torch.testing.make_tensor", "torch.utils.cpp_extension.load_inline", "torch.distributed.run.main",
    "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler", "line_fit.__builtins__.get",
    "torch.nn.Linear.__init__.__globals__", "torch.nn.Linear.__subclasses__",
    # writes
    "torch.save", "lightning.pytorch.loggers.CSVLogger.save", "torchvision.datasets.utils.extract_archive",
    # unpickles
    "torch.load", "torch.serialization.load", "numpy.load", "joblib.load", "pickle.load", "torch.jit.load",
    "torch.package.PackageImporter", "numpy.read_pickle", "torch.export.load", "line_fit.torch.load",
    "lightning.fabric.utilities.cloud_io._load", "line_fit.Line.load_from_checkpoint", "torch.storage._load_from_bytes",
    "lightning.fabric.plugins.io.torch_io.pl_load", "lightning.pytorch.utilities.upgrade_checkpoint.main",
    "torch.distributed.checkpoint.load", "torch.distributed.checkpoint.filesystem.pickle.load", "numpy.lib.npyio.load",
    "torchvision.datasets.LSUN", "torch.hub.load", "torchvision.models._api.load_state_dict_from_url",
]  # fmt: skip


@pytest.mark.parametrize("target", REFUSED)
def test_dangerous_target_is_refused_even_if_named_and_allowed(project, target):
    """The project may call such a function with its own arguments, but not with those of a checkpoint's config."""
    with pytest.raises(UsageError):
        build({"_target_": target, "_args_": ["no"]}, "model", allowlist())
    with pytest.raises(UsageError, match="executes, unpickles or writes"):
        build({"_target_": target, "_args_": ["no"]}, "model", allowlist((target.partition(".")[0],), (target,)))


SYSTEM = {"_target_": "os.system", "command": "exit 1"}


@pytest.mark.parametrize(
    "node",
    [
        [SYSTEM],
        {"_target_": "torch.nn.Sequential", "_args_": [[SYSTEM]]},
        {"_target_": "torch.nn.Sequential", "_recursive_": False, "x": SYSTEM},
        SYSTEM | {"_partial_": True},
        {"_target_": ["os.system"]},
        {"_target_": "torch.nn.Linear; import os"},
        {"_target_": "${oc.env:HOME}"},
    ],
)
def test_dangerous_target_is_refused_in_any_place_and_form(node):
    with pytest.raises(UsageError):
        build({"deep": node}, "model", allowlist())


CLASSES = [
    "torch.nn.Linear", "torch.optim.SGD", "torch.optim.lr_scheduler.StepLR", "torch.optim.swa_utils.AveragedModel",
    "torchmetrics.Accuracy", "torchvision.models.ResNet", "torchvision.transforms.v2.Resize",
    "torchvision.ops.StochasticDepth", "torchvision.datasets.ImageFolder", "lightning.Trainer",
    "lightning.pytorch.callbacks.EarlyStopping", "lightning.pytorch.loggers.WandbLogger",
    "lightning.pytorch.strategies.DDPStrategy", "lightning.pytorch.profilers.PyTorchProfiler",
    "lightning.pytorch.plugins.environments.SLURMEnvironment", "lightning.fabric.plugins.TorchCheckpointIO",
    "lightning.pytorch.demos.boring_classes.BoringModel", "trainer.Trainer", "trainer.FSDP2Strategy",
    "trainer.callbacks.ScaleMonitor", "trainer.precision.MixedPrecision", "recipes.tabular.TabularMLP",
]  # fmt: skip
OTHERS = [
    "torch.nn.functional.gelu", "torch.nn.Embedding.from_pretrained", "torch.utils.data.DataLoader", "torch.compile",
    "torchvision.models.resnet18", "recipes.schedules.onecycle", "line_fit.Line", "collections.OrderedDict",
    "torch.nn.Module.load_state_dict", "line_fit.Line.to_onnx",
]  # fmt: skip


@pytest.mark.parametrize("target", [*CLASSES, *OTHERS])
def test_config_of_the_user_names_anything(project, target):
    made = build({"_target_": target, "_partial_": True})
    assert isinstance(made, partial)
    assert callable(made.func)


@pytest.mark.parametrize("target", CLASSES)
def test_known_class_is_allowed(project, target):
    assert isinstance(allowlist().locate(target), type)


@pytest.mark.parametrize("target", OTHERS)
def test_other_name_needs_the_project_or_the_user(project, target):
    with pytest.raises(UsageError, match=rf"m is {target}\. .* 'allowed_packages=\[{target}\]'"):
        allowlist().locate(target, "m")
    assert callable(allowlist(named=(target,)).locate(target))
    assert callable(allowlist((target,)).locate(target))


def test_all_refused_names_are_listed_with_those_allowed_already(project):
    node = {
        "a": {"_target_": "line_fit.Line"},
        "b": {"_target_": "torch.compile"},
        "c": {"_target_": "line_fit.Points"},
    }
    with pytest.raises(UsageError, match=r"'allowed_packages=\[torch\.compile,line_fit\.Line,line_fit\.Points\]'"):
        allowlist(("torch.compile",)).check(node)


def test_allowed_package_does_not_lead_to_another(project):
    assert allowlist(("line_fit",)).locate("line_fit.Line").__name__ == "Line"
    with pytest.raises(UsageError, match=r"line_fit\.DataLoader"):
        allowlist(("line_fit",)).locate("line_fit.DataLoader")


def test_resolved_values_are_not_resolved_again(proof):
    """Hydra's instantiate resolves interpolations in its strings again, including escaped ones."""
    text = "${oc.create:{_target_:os.system,command:'touch " + str(proof) + "'}}"
    assert build({"_target_": "torch.utils.data.Subset", "dataset": text, "indices": []}).dataset == text
    assert not proof.exists()


def test_pretrained_weights_are_loaded_as_weights_only(tmp_path, monkeypatch, proof):
    """torchvision loads a file of torch's hub, in a folder that others may write to, with weights_only=False."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    weights = tmp_path / "hub/checkpoints/squeezenet1_1-b8a52dc0.pth"
    weights.parent.mkdir(parents=True)
    torch.save(Payload(proof), weights)
    with pytest.raises(Exception, match="Weights only load failed"):
        build({"_target_": "torchvision.models.squeezenet1_1", "weights": "DEFAULT"})
    assert not proof.exists()
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"


def test_rerunning_a_pickle_is_refused(project, proof, capsys):
    (project / "config.pickle").write_bytes(pickle.dumps(Payload(proof)))
    assert main(["fit", "--experimental-rerun", "config.pickle"]) == 2
    assert "--experimental-rerun, which can run any code" in capsys.readouterr().err
    assert not proof.exists()


THEIRS = """
open({proof!r}, "w").close()
from line_fit import Line
"""


@pytest.fixture
def run_of_a_stranger(project, proof, trained):
    """Return the folder of another person's run, with a module that its config uses as model."""
    folder = Path(shutil.copytree(trained, project / "given/run"))
    config = (folder / ".hydra/config.yaml").read_text()
    (folder / ".hydra/config.yaml").write_text(config.replace("line_fit.Line", "given.theirs.Line"))
    write(project, {"given/theirs.py": THEIRS.format(proof=str(proof))})
    yield folder
    for name in ("given", "given.theirs"):
        sys.modules.pop(name, None)


@pytest.mark.whole
@pytest.mark.parametrize("link", [False, True])
def test_run_brings_no_code_along(project, run_of_a_stranger, proof, capsys, link):
    given = "given/run/checkpoints/last.ckpt"
    if link:
        (project / "linked").symlink_to(project / "given/run")
        given = "linked"
    assert main(["test", f"ckpt={given}"]) == 2
    err = capsys.readouterr().err
    assert "model is given.theirs.Line" in err
    assert "'allowed_packages=[given.theirs.Line]'" in err
    assert not proof.exists()
    assert main(["test", f"ckpt={given}", "allowed_packages=[given.theirs.Line]"]) == 0
    assert proof.exists()


@pytest.mark.parametrize("package", ["recipes", "trainer"])
def test_class_of_a_known_package_is_refused_in_the_folder_of_the_run(project, package):
    with pytest.raises(UsageError, match=f"m is {package}.theirs.Net"):
        Allowlist((), f"{package}/run/last.ckpt").check({"_target_": f"{package}.theirs.Net"}, "m")


def test_config_of_a_run_sets_nothing_of_hydra(given, proof):
    file = given / ".hydra/config.yaml"
    payload = {"_target_": "os.system", "command": f"touch {proof}"}
    hydra = {"callbacks": {"x": payload}, "job": {"env_set": {"LD_PRELOAD": "./evil.so"}}, "launcher": payload}
    more = {"hydra": hydra, "defaults": [{"override hydra/launcher": "evil"}], "allowed_packages": ["os"]}
    file.write_text(file.read_text().replace("allowed_packages: []\n", "") + yaml.safe_dump(more))
    assert main(["test", "ckpt=given", "hydra.run.dir=tested"]) == 0
    assert not proof.exists()
    assert os.environ.get("LD_PRELOAD") is None


WRITTEN = (
    "evil: !!python/object/apply:os.system [touch PROOF]",
    "data: {_target_: '${oc.decode:os}.system', command: touch PROOF}",
    "data: ${oc.decode:'{_target_: os.system, command: touch PROOF}'}",
    "data: ${oc.create:{_target_:os.system,command:'touch PROOF'}}",
)


def test_payload_in_an_interpolation_or_a_tag_is_refused(given, proof):
    file = given / ".hydra/config.yaml"
    config = file.read_text()
    for written in WRITTEN:
        file.write_text(f"{config}\n{written.replace('PROOF', str(proof))}\n")
        assert main(["test", "ckpt=given"]) == 2, written
        assert not proof.exists()


def test_options_of_a_compiler_are_refused_unless_allowed(project):
    callback = {"_target_": "trainer.callbacks.Compile", "options": {"max_autotune": False}}
    for target in ("trainer.callbacks.Compile", "trainer.callbacks.compile.Compile"):
        message = rf"callbacks\.compile\.options is .* can name a compiler .* 'allowed_packages=\[{target}\]'"
        with pytest.raises(UsageError, match=message):
            build(callback | {"_target_": target}, "callbacks.compile", allowlist())
        assert build(callback, "callbacks.compile", allowlist((target, callback["_target_"]))).settings["options"]
    assert build(callback).settings["options"]
    node = {"_target_": "torch.compile", "model": {"_target_": "torch.nn.ReLU"}, "options": {"max_autotune": False}}
    with pytest.raises(UsageError, match="can name a compiler"):
        build(node, "model", allowlist(named=("torch.compile",)))
