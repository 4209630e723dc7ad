"""A stranger's config asks for code, in every way that is known; none of it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import write
from trainer.cli import main
from trainer.cli.arguments import UsageError
from trainer.cli.build import build
from trainer.cli.targets import Allowlist

RECIPE = "# @package _global_\ndefaults: [line]\n"


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    """Is there when a payload has run."""
    return tmp_path / "pwned"


def payloads(proof: Path) -> dict[str, Any]:
    """Nodes that make the file ``proof`` when they are built."""
    shell, code = f"touch {proof}", f"open({str(proof)!r}, 'w')"
    make = {"_target_": "os.system", "command": shell}
    timer = {"_target_": "torch.utils.benchmark.Timer", "stmt": code}
    return {
        "os": make,
        "list": {"_target_": "torch.nn.Sequential", "_args_": [[make]]},
        "args": {"_target_": "torch.nn.Sequential", "_args_": [make]},
        "not recursive": {"_target_": "torch.nn.Sequential", "_recursive_": False, "x": make},
        "partial": {**make, "_partial_": True},
        "eval": {"_target_": "builtins.eval", "_args_": [code]},
        "exec": {"_target_": "builtins.exec", "_args_": [code]},
        "posix": {"_target_": "posix.system", "_args_": [shell]},
        "subprocess": {"_target_": "subprocess.run", "args": shell, "shell": True},
        "functools": {"_target_": "functools.partial", "_args_": [make]},
        "through torch": {"_target_": "torch.os.system", "command": shell},
        "through a submodule": {"_target_": "torch.nn.modules.module.torch.os.system", "command": shell},
        "through lightning": {"_target_": "lightning.pytorch.callbacks.model_checkpoint.os.system", "command": shell},
        "through recipes": {"_target_": "recipes.data.loading.Path.touch", "self": str(proof)},
        "through trainer": {"_target_": "trainer.trainer.os.system", "command": shell},
        "through torchmetrics": {"_target_": "torchmetrics.metric.torch.os.system", "command": shell},
        "through torchvision": {"_target_": "torchvision.datasets.folder.os.system", "command": shell},
        "collect_env": {"_target_": "torch.utils.collect_env.run", "command": shell},
        "collect_env, a detour": {"_target_": "torch.nn.modules.linear.torch.utils.collect_env.run", "command": shell},
        "Timer": {"_target_": "torch.utils.benchmark.Timer.timeit", "self": timer, "number": 1},
        "fx": {"_target_": "torch.fx.graph_module._exec_with_source", "src": code, "globals": {}},
        "testing": {"_target_": "torch.testing._internal.common_utils.shell", "command": ["touch", str(proof)]},
        "elastic": {"_target_": "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler"},
        "cpp": {"_target_": "torch.utils.cpp_extension.load_inline", "name": "x", "cpp_sources": "int x;"},
        "distributed.run": {"_target_": "torch.distributed.run.main", "args": ["--no-python", "touch", str(proof)]},
        "hydra": {"_target_": "hydra.utils.instantiate", "config": make},
        "hydra.call": {"_target_": "hydra.utils.call", "config": make},
        "get_method": {"_target_": "hydra.utils.get_method", "path": "os.system"},
        "get_object": {"_target_": "hydra.utils.get_object", "path": "os.system"},
        "cli": {"_target_": "trainer.cli.main", "argv": ["fit"]},
        "build": {"_target_": "trainer.cli.build.build", "node": make},
        "instantiator": {"_target_": "lightning.pytorch.cli.instantiate_class", "args": [], "init": {}},
        "a method": {"_target_": "torch.nn.Module.load_state_dict", "self": {"_target_": "torch.nn.ReLU"}},
        "saves": {"_target_": "torch.save", "obj": 1, "f": str(proof)},
        "a logger's method": {"_target_": "lightning.pytorch.loggers.CSVLogger.save", "self": None},
        "exports": {"_target_": "line_fit.Line.to_onnx", "self": None, "file_path": str(proof)},
        "to_torchscript": {"_target_": "line_fit.L.LightningModule.to_torchscript", "file_path": str(proof)},
        "download": {"_target_": "torchvision.datasets.utils.download_url", "url": "http://localhost", "root": "x"},
        "extract": {"_target_": "torchvision.datasets.utils.extract_archive", "from_path": "x"},
        "extract, a detour": {"_target_": "torchvision.datasets.cifar.download_and_extract_archive", "url": "x"},
        "hub": {"_target_": "torch.hub.load", "repo_or_dir": "x", "model": "y"},
        "hub, a detour": {"_target_": "torchvision.models._api.load_state_dict_from_url", "url": "x"},
        "lsun": {"_target_": "torchvision.datasets.LSUN", "root": "x"},
        "dcp": {"_target_": "torch.distributed.checkpoint.load", "state_dict": {}},
        "globals": {"_target_": "torch.nn.Linear.__init__.__globals__", "x": 1},
        "builtins of the user's": {"_target_": "line_fit.__builtins__.get", "_args_": ["eval"]},
        "subclasses": {"_target_": "torch.nn.Linear.__subclasses__"},
        "a name of two parts": {"_target_": "torch.nn.Linear; import os"},
        "no text": {"_target_": ["os.system"], "command": shell},
        "interpolated again": {"_target_": "${oc.env:HOME}"},
        "a compiler": {"_target_": "torch.compile", "model": {"_target_": "torch.nn.ReLU"},
                       "options": {"cpp.cxx": [None, str(proof)]}},
        "from_": {"_target_": "lightning.pytorch.strategies.ddp.log.from_nothing"},
    }  # fmt: skip


@pytest.mark.parametrize("name", payloads(Path()))
def test_a_payload_is_refused(project, proof, name):
    with pytest.raises(UsageError):
        build({"deep": [payloads(proof)[name]]}, "model")
    assert not proof.exists()


def saved_bytes(proof: Path) -> bytes:
    import pickle

    class Payload:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {proof}",)

    return pickle.dumps(Payload())


@pytest.mark.parametrize(
    ("target", "argument"),
    [
        ("torch.load", "f"), ("torch.serialization.load", "f"), ("numpy.load", "file"), ("joblib.load", "filename"),
        ("pickle.load", "file"), ("torch.jit.load", "f"), ("torch.package.PackageImporter", "file_or_buffer"),
        ("pandas.read_pickle", "filepath_or_buffer"), ("torch.export.load", "f"),
        ("lightning.fabric.utilities.cloud_io._load", "path_or_url"), ("line_fit.torch.load", "f"),
        ("line_fit.Line.load_from_checkpoint", "checkpoint_path"),
        ("lightning.fabric.plugins.io.torch_io.pl_load", "path_or_url"),
        ("lightning.pytorch.utilities.upgrade_checkpoint.main", "args"), ("torch.storage._load_from_bytes", "b"),
        ("torch.distributed.checkpoint.filesystem.pickle.load", "file"), ("numpy.lib.npyio.load", "file"),
        ("lightning.LightningModule.load_from_checkpoint", "checkpoint_path"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("allowed", [(), ("numpy", "joblib", "pandas", "pickle", "torch", "lightning")])
def test_nothing_is_unpickled_not_even_from_packages_that_are_allowed(project, proof, target, argument, allowed):
    file = project / "file.pkl"
    file.write_bytes(saved_bytes(proof))
    with pytest.raises(UsageError):
        build(
            {"_target_": target, argument: str(file), "weights_only": False, "allow_pickle": True},
            "m",
            Allowlist(allowed),
        )
    assert not proof.exists()


@pytest.mark.parametrize(
    "target",
    [
        "torch.nn.functional.gelu", "torch.nn.functional.conv2d", "torch.nn.functional.max_pool2d",
        "torch.nn.init.ones_", "torch.nn.Embedding.from_pretrained",
        "torch.optim.lr_scheduler.StepLR", "torch.utils.data.random_split",
        "torch.utils.data.default_collate", "torch.utils.data.DataLoader", "torch.tensor", "torch.device",
        "torch.compile", "torch.distributions.Normal", "torchmetrics.Accuracy", "torchmetrics.functional.accuracy",
        "torchvision.models.resnet18", "torchvision.models.get_model", "torchvision.transforms.v2.Compose",
        "torchvision.transforms.v2.functional.hflip", "torchvision.ops.StochasticDepth",
        "torchvision.datasets.ImageFolder", "lightning.Trainer", "lightning.pytorch.callbacks.EarlyStopping",
        "lightning.pytorch.loggers.WandbLogger", "lightning.LightningDataModule", "lightning.pytorch.LightningModule",
        "lightning.pytorch.strategies.DDPStrategy", "lightning.pytorch.profilers.PyTorchProfiler",
        "lightning.pytorch.utilities.combined_loader.CombinedLoader", "lightning.fabric.plugins.TorchCheckpointIO",
        "torch.profiler.schedule", "lightning.pytorch.demos.boring_classes.BoringModel", "recipes.schedules.onecycle",
        "lightning.pytorch.plugins.environments.SLURMEnvironment",
        "lightning.pytorch.LightningDataModule.from_datasets",
        "trainer.Trainer", "trainer.callbacks.ScaleMonitor", "trainer.precision.MixedPrecision", "line_fit.Line",
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook",
        "torch.optim.swa_utils.AveragedModel",
    ],
)  # fmt: skip
def test_what_experiments_are_made_of_is_there(project, target):
    made = build({"_target_": target, "_partial_": True})
    assert isinstance(made, partial)
    assert callable(made.func)


def test_a_second_reading_of_what_was_resolved_does_not_happen(proof):
    """Hydra's instantiate resolves interpolations in the strings that it gets: escaped ones come to life there."""
    text = "${oc.create:{_target_:os.system,command:'touch " + str(proof) + "'}}"
    assert build({"_target_": "torch.utils.data.Subset", "dataset": text, "indices": []}).dataset == text
    assert not proof.exists()


def test_pretrained_weights_are_loaded_as_weights_only(tmp_path, monkeypatch, proof):
    """torchvision loads a file of torch's hub, whose folder others may write to, with weights_only=False."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")

    class Payload:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {proof}",)

    weights = tmp_path / "hub/checkpoints/squeezenet1_1-b8a52dc0.pth"
    weights.parent.mkdir(parents=True)
    torch.save(Payload(), weights)
    with pytest.raises(Exception, match="Weights only load failed"):
        build({"_target_": "torchvision.models.squeezenet1_1", "weights": "DEFAULT"})
    assert not proof.exists()
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"


def recipe(project: Path, text: str) -> None:
    write(project, {"conf/recipe/evil.yaml": f"{RECIPE}{text}"})


STREAM = "class: logging.StreamHandler\n        "
RUN = "_target_: os.system\n      command: touch {proof}"
JOB_LOGGING = "hydra:\n  job_logging:\n"
HYDRA = {
    "a callback": f"hydra:\n  callbacks:\n    x:\n      {RUN}\n",
    "a nested callback": (
        "hydra:\n  callbacks:\n    x:\n      _target_: hydra.experimental.callbacks.LogJobReturnCallback\n"
        "      y: {{_target_: os.system, command: touch {proof}}}\n"
    ),
    "a callback that is filled in": "evil: os.system\nhydra:\n  callbacks:\n    x:\n      _target_: ${{evil}}\n"
    "      command: touch {proof}\n",
    "a callback made of text": "hydra:\n  callbacks:\n    x: ${{oc.create:'{{_target_: os.system, command: touch "
    "{proof}}}'}}\n",
    "a callback by way of the user's module": (
        "hydra:\n  callbacks:\n    x:\n      _target_: line_fit.torch.os.system\n      command: touch {proof}\n"
    ),
    "all callbacks": "evil: {{x: {{_target_: os.system, command: touch {proof}}}}}\nhydra:\n  callbacks: ${{evil}}\n",
    "a launcher": f"hydra:\n  launcher:\n      {RUN}\n",
    "a launcher's setting": (
        "hydra:\n  launcher:\n    _target_: hydra._internal.core_plugins.basic_launcher.BasicLauncher\n"
        "    x:\n      _target_: os.system\n      command: touch {proof}\n"
    ),
    "a sweeper's setting": (
        "hydra:\n  mode: MULTIRUN\n  sweeper:\n    max_batch_size: {{_target_: os.system, command: touch {proof}}}\n"
    ),
    "a sweeper from afar": "hydra:\n  sweeper:\n    _target_: hydra_plugins.evil.Sweeper\n",
    "a logging factory": (
        "hydra:\n  job_logging:\n    handlers:\n      x:\n        (): os.system\n        command: touch {proof}\n"
    ),
    "a formatter": JOB_LOGGING + "    formatters:\n      x:\n        (): os.system\n        command: touch {proof}\n",
    "a filter": JOB_LOGGING + "    filters:\n      x:\n        (): os.system\n        command: touch {proof}\n",
    "a handler's class": (
        "hydra:\n  hydra_logging:\n    handlers:\n      x:\n"
        "        class: subprocess.Popen\n        args: [touch, {proof}]\n"
    ),
    "something outside": f"hydra:\n  job_logging:\n    handlers:\n      x:\n        {STREAM}stream: ext://os.environ\n",
    "something inside": f"hydra:\n  job_logging:\n    handlers:\n      x:\n        {STREAM}stream: cfg://x\n",
    "a log elsewhere": "hydra:\n  job_logging:\n    handlers:\n      file:\n        filename: {proof}\n",
    "a log in the place of a module": (
        "hydra:\n  job_logging:\n    handlers:\n      file:\n        filename: line_fit.py\n        mode: w\n"
    ),
    "a log in the place of a module, in the run's folder": (
        "resume: auto\nhydra:\n  run:\n    dir: .\n  job_logging:\n    handlers:\n      file:\n"
        "        filename: ${{hydra.runtime.output_dir}}/line_fit.py\n        mode: w\n"
    ),
    "the run in the working directory": "resume: auto\nhydra:\n  run:\n    dir: .\n",
    "the run in git's folder": "resume: auto\nhydra:\n  run:\n    dir: .git\n",
    "a sweep in git's folder": "hydra:\n  sweep:\n    dir: .git/hooks\n",
    "a log's line that reads attributes": (
        JOB_LOGGING + "    formatters:\n      file:\n        style: '{{'\n        format: '{{msg.__class__}}'\n"
    ),
    "a line break in the run's folder": 'name: "a\\nb"\n',
    "a zero byte in the run's folder": 'name: "a\\0b"\n',
    "another working directory": "hydra:\n  job:\n    chdir: true\n",
    "a log above": (
        "hydra:\n  job_logging:\n    handlers:\n      file:\n        filename: ${{hydra.runtime.output_dir}}/../../x\n"
    ),
    "the environment": "hydra:\n  job:\n    env_set:\n      LD_PRELOAD: ./evil.so\n",
    "packages": "allowed_packages: [os]\nevil: {{_target_: os.system}}\n",
    "packages by a sweep": "hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      allowed_packages: '[os],[sys]'\n",
    "Hydra by a sweep": (
        "hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      +hydra.job.env_set.LD_PRELOAD: a.so,b.so\n"
    ),
    "the run's folder": "hydra:\n  run:\n    dir: {proof}\n",
    "the run's name": "hydra:\n  job:\n    name: ../../pwned\n",
    "the name in the run's folder": "name: ../../../../pwned\n",
    "the configs' folder": "hydra:\n  output_subdir: ../../../pwned\n",
    "a job's folder": "evil: ../../../..\nhydra:\n  sweep:\n    subdir: ${{evil}}/pwned${{hydra.job.num}}\n",
    "a target made of two": "a: os\nmodel:\n  net:\n    _target_: ${{a}}.system\n    command: touch {proof}\n",
    "a target in text": "evil: ${{oc.decode:'{{_target_: os.system, command: touch {proof}}}'}}\n",
    "a python tag": "evil: !!python/object/apply:os.system [touch {proof}]\n",
}


@pytest.mark.parametrize("name", HYDRA)
def test_hydras_own_node_runs_nothing(tmp_path_factory, project, capsys, name):
    proof = tmp_path_factory.mktemp("elsewhere") / "pwned"
    recipe(project, HYDRA[name].format(proof=proof))
    before = set(project.parent.glob("*/pwned*"))
    status = main(["fit", "+recipe=evil"])
    err = capsys.readouterr().err
    assert status == 2, err
    assert err.startswith("trainer: ")
    assert err.count("\n") == 1
    assert not proof.exists()
    assert not (project / "outputs").exists()
    assert set(project.parent.glob("*/pwned*")) == before
    assert os.environ.get("LD_PRELOAD") is None


@pytest.mark.parametrize("words", [["-m"], ["--cfg", "job"], ["--info"], ["--hydra-help"]])
def test_nor_when_something_is_only_shown(project, proof, capsys, words):
    recipe(project, HYDRA["a logging factory"].replace("job_logging", "hydra_logging").format(proof=proof))
    assert main(["fit", "+recipe=evil", *words]) == 2
    assert "handlers.x.() is os.system in a config file" in capsys.readouterr().err
    assert not proof.exists()


def test_what_runs_nothing_may_be_in_a_file(project):
    from trainer.cli.arguments import read
    from trainer.cli.validate import validate

    recipe(project, JOB_LOGGING + "    formatters: {file: {format: '%(message)s'}}\n    root: {level: DEBUG}\n")
    assert validate(read(["fit", "+recipe=evil"])).hydra.job_logging.root.level == "DEBUG"


def test_what_is_refused_in_a_file_may_be_said_on_the_command_line(project, tmp_path_factory):
    from trainer.cli.arguments import read
    from trainer.cli.validate import validate

    folder = tmp_path_factory.mktemp("elsewhere")
    config = validate(
        read(
            [
                *("fit", "+recipe=line", "allowed_packages=[timm]", f"hydra.run.dir={folder}"),
                *("+hydra.job.env_set.A=1", f"hydra.job_logging.handlers.file.filename={folder}/a.log"),
            ]
        )
    )
    assert config.allowed_packages == ["timm"]


def test_rerunning_a_pickle_is_refused(project, proof, capsys):
    (project / "config.pickle").write_bytes(saved_bytes(proof))
    assert main(["fit", "--experimental-rerun", "config.pickle"]) == 2
    assert "reads a pickle, which may run any code" in capsys.readouterr().err
    assert not proof.exists()


THEIRS = """
open({proof!r}, "w").close()
from line_fit import Line
"""


@pytest.fixture
def run_of_a_stranger(project: Path, proof: Path) -> Iterator[Path]:
    """A run's folder that was given to the user, with a module in it, which its config names as its model."""
    folder = project / "given/run"
    assert main(["fit", "+recipe=line", f"hydra.run.dir={folder}"]) == 0
    config = (folder / ".hydra/config.yaml").read_text()
    (folder / ".hydra/config.yaml").write_text(config.replace("line_fit.Line", "given.theirs.Line"))
    write(project, {"given/theirs.py": THEIRS.format(proof=str(proof))})
    yield folder
    for name in ("given", "given.theirs"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("link", [False, True])
def test_a_run_brings_no_code_along(project, run_of_a_stranger, proof, capsys, link):
    given = "given/run/checkpoints/last.ckpt"
    if link:
        (project / "linked").symlink_to(project / "given/run")
        given = "linked"
    capsys.readouterr()
    assert main(["test", f"ckpt={given}"]) == 2
    err = capsys.readouterr().err
    assert "model asks for given.theirs.Line, which is in the folder of the run that ckpt names" in err
    assert "'allowed_packages=[given]'" in err
    assert not proof.exists()
    assert main(["test", f"ckpt={given}", "allowed_packages=[given]"]) == 0
    assert proof.exists()


def test_options_of_a_compiler_are_the_users_to_allow(project):
    node = {"_target_": "torch.compile", "model": {"_target_": "torch.nn.ReLU"}, "options": {"max_autotune": False}}
    assert build(node, "model", Allowlist(["torch.compile"]))._orig_mod.__class__ is torch.nn.ReLU
    with pytest.raises(
        UsageError, match=r"model\.options is .* can name a compiler.*allowed_packages=\[torch\.compile\]"
    ):
        build(node, "model")
    compile_it = {"_target_": "trainer.callbacks.Compile", "options": {"max_autotune": False}}
    assert build(compile_it, "callbacks.compile", Allowlist(["trainer.callbacks.Compile"])).settings["options"]
    for target in ("trainer.callbacks.Compile", "trainer.callbacks.compile.Compile"):
        with pytest.raises(UsageError, match=r"callbacks\.compile\.options is .* can name a compiler"):
            build(compile_it | {"_target_": target}, "callbacks.compile")
