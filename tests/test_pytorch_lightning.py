"""``pytorch_lightning`` and ``lightning.pytorch`` as one package, and errors if they are two.

The order of imports matters, so that everything runs in separate processes: in a Python that has imported torch but not
Lightning, or in a new one if it starts others.
"""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tests.test_lightning_parity import assert_close
from tests.test_programs import PROGRAMS

ROOT = Path(__file__).parent.parent
LINE = "write `import trainer.pytorch_lightning` as the first import of the program"


def check(code, folder, python=None):
    """Run ``code`` without a file, by default in a new Python."""
    words = ["-c", textwrap.dedent(code)]
    if python is not None:
        done = python.run(*words, cwd=folder)
    else:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


OURS = "import trainer.pytorch_lightning\nfrom trainer import Trainer"


def test_program_has_the_same_result(tmp_path, python_without_lightning):
    source = re.sub(r"from lightning(.pytorch)?", "from pytorch_lightning", (PROGRAMS / "gan.py").read_text())
    results = []
    for whose, line in (("theirs", ""), ("ours", OURS)):
        program = f"{source}\n{line}\nimport sys\ntorch.save(main(sys.argv[1]), sys.argv[1] + '.pt')\n"
        (tmp_path / "program.py").write_text(program)
        done = python_without_lightning.run("program.py", whose, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        results.append(torch.load(tmp_path / f"{whose}.pt", weights_only=True))
    assert_close(*results, "gan")


NAMES = """
    import importlib, importlib.util, inspect, logging, pickle, pkgutil, pytest, sys

    first, second, line_first = {first!r}, {second!r}, {line_first}
    if line_first:
        import trainer.pytorch_lightning
        spec = importlib.util.find_spec(second)  # as those do who ask whether it is installed
        assert spec.origin.endswith("__init__.py")
        assert spec.submodule_search_locations
        assert not {{"lightning", "pytorch_lightning"}} & sys.modules.keys()
    else:
        import pytorch_lightning
        import trainer.pytorch_lightning
    logging.getLogger(second).setLevel(logging.ERROR)
    assert logging.getLogger(first).level == logging.ERROR

    import lightning.pytorch as new
    import pytorch_lightning as old
    assert old is new
    assert old.__name__ == old.__spec__.name == first
    assert old.__version__ == "2.6.6"

    import lightning.fabric.plugins
    import lightning_fabric
    assert lightning_fabric is lightning.fabric
    from pytorch_lightning.callbacks.early_stopping import EarlyStopping
    assert "class EarlyStopping" in inspect.getsource(EarlyStopping)
    assert pickle.loads(pickle.dumps(EarlyStopping)) is EarlyStopping
    named = f"c{{second}}.callbacks.timer\\nTimer\\n.".encode()
    assert pickle.loads(named) is old.callbacks.Timer

    modules = [found.name for found in pkgutil.walk_packages(old.__path__, second + ".")]
    assert len(modules) > 150
    for name in modules:
        module = importlib.import_module(name)
        known_as = first + name[len(second):]
        assert module is sys.modules[known_as], name
        assert module.__name__ == module.__spec__.name == known_as, name
    assert importlib.reload(old) is new
    for missing in (second + ".nothing", first + ".nothing"):
        with pytest.raises(ModuleNotFoundError) as error:
            importlib.import_module(missing)
        assert error.value.name == missing

    from trainer import Trainer
    assert issubclass(Trainer, old.Trainer)
    importlib.reload(trainer.pytorch_lightning)
    assert importlib.import_module(second) is new
"""


@pytest.mark.parametrize(
    ("first", "second", "line_first"),
    [("lightning.pytorch", "pytorch_lightning", True), ("pytorch_lightning", "lightning.pytorch", False)],
)
def test_both_names_import_one_package(first, second, line_first, tmp_path, python_without_lightning):
    check(NAMES.format(first=first, second=second, line_first=line_first), tmp_path, python_without_lightning)


MODULE = """
    import trainer.pytorch_lightning  # isort: skip

    import pytorch_lightning as pl
    from pytorch_lightning.demos.boring_classes import BoringModel


    class Net(BoringModel):
        pass


    class Watch(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            print("trained", type(pl_module).__name__, isinstance(trainer, pl.Trainer))
"""


@pytest.mark.whole
def test_import_does_not_import_torch(tmp_path):
    check('import sys, trainer.pytorch_lightning; assert "torch" not in sys.modules', tmp_path)


@pytest.mark.whole
def test_spawned_processes_train(tmp_path, python_without_lightning):
    # only the program, which has no file, imports the alias; the spawned process imports net.py
    (tmp_path / "net.py").write_text(textwrap.dedent(MODULE.split("\n\n", 1)[1]))
    program = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import trainer.pytorch_lightning
        import net
        from multiprocessing import resource_tracker, spawn
        from trainer import Trainer

        resource_tracker.ensure_running()  # by a Python that is not warm, because it must not end before this process
        spawn.set_executable(sys.executable)
        from tests.parity import QUIET
        fit = Trainer(strategy="ddp_spawn", max_steps=2, callbacks=net.Watch(), **QUIET)
        model = net.Net()
        before = model.layer.weight.sum().item()
        fit.fit(model)
        assert model.layer.weight.sum().item() != before
    """
    check(program, tmp_path, python_without_lightning)


def test_command_line_runs_classes_of_either_package(tmp_path, python_without_lightning):
    (tmp_path / "net.py").write_text(textwrap.dedent(MODULE))
    data = "+data._target_=lightning.pytorch.demos.boring_classes.BoringDataModule"
    settings = ["+model._target_=net.Net", "+callbacks.watch._target_=net.Watch", data, "logger=none", "trainer=cpu"]
    done = python_without_lightning.trainer("fit", *settings, "+debug=limit", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "trained Net True" in done.stdout


@pytest.mark.representative
def test_classes_of_the_other_package_are_refused_without_the_import(tmp_path, python_without_lightning):
    program = rf"""
        import sys
        from trainer import Trainer
        assert not [name for name in sys.modules if "pytorch_lightning" in name or "lightning_fabric" in name]

        import pytest, torch
        from lightning.pytorch import LightningModule
        from lightning.pytorch.demos.boring_classes import BoringModel as Accepted
        from pytorch_lightning.accelerators import CPUAccelerator
        from pytorch_lightning.callbacks import EarlyStopping
        from pytorch_lightning.demos.boring_classes import BoringDataModule, BoringModel
        from pytorch_lightning.loggers import CSVLogger
        from pytorch_lightning.plugins.environments import LightningEnvironment
        from pytorch_lightning.profilers import SimpleProfiler
        from pytorch_lightning.strategies import DDPStrategy
        from pytorch_lightning.utilities import CombinedLoader
        from tests.parity import QUIET
        from trainer.cli import execution as run
        from trainer.errors import ConfigurationError

        quiet = {{**QUIET, "max_steps": 1}}
        class Brings(Accepted):
            def configure_callbacks(self):
                return EarlyStopping("loss")

        class Own(BoringModel):
            pass

        def refuses(what, call, **arguments):
            with pytest.raises(ConfigurationError, match=rf"Got {{what}}\(...\), which is built on .*{LINE}"):
                call(**arguments)

        for name, given in {{
            "strategy": DDPStrategy(), "plugins": LightningEnvironment(), "accelerator": CPUAccelerator(),
            "logger": CSVLogger("."), "profiler": SimpleProfiler(), "callbacks": EarlyStopping("loss"),
        }}.items():
            refuses(f"{{name}}={{type(given).__name__}}", Trainer, **(quiet | {{name: given}}))
            if name in ("plugins", "logger", "callbacks"):
                refuses(f"{{name}}={{type(given).__name__}}", Trainer, **(quiet | {{name: [given]}}))
        trainer = Trainer(**quiet)
        refuses("model=Own", trainer.fit, model=Own())
        refuses("model=Own", trainer.test, model=torch.compile(Own()))
        refuses("datamodule=BoringDataModule", trainer.validate, model=Accepted(), datamodule=BoringDataModule())
        refuses("dataloaders=BoringDataModule", trainer.predict, model=Accepted(), dataloaders=BoringDataModule())
        refuses("dataloaders=CombinedLoader", trainer.fit, model=Accepted(), train_dataloaders=CombinedLoader([]))
        refuses("configure_callbacks=EarlyStopping", trainer.fit, model=Brings())
        refuses("model=Own", run._check_class, name="model", built=Own(), expected=LightningModule, settings={{}})
        trainer.fit(Accepted())
        assert trainer.global_step == 1

        with pytest.raises(ImportError, match="_lightning and lightning.pytorch are both loaded already.*{LINE}"):
            import trainer.pytorch_lightning
    """
    check(program, tmp_path, python_without_lightning)


def test_another_version_that_is_loaded_already_is_refused(tmp_path, python_without_lightning):
    program = f"""
        import pytest, sys, types
        sys.modules["pytorch_lightning"] = loaded = types.ModuleType("pytorch_lightning")
        loaded.__version__ = "2.5.0"
        finders = list(sys.meta_path)
        with pytest.raises(ImportError, match="^pytorch_lightning 2.5.0 is loaded already, and lightning .*{LINE}"):
            import trainer.pytorch_lightning
        assert sys.meta_path == finders
    """
    check(program, tmp_path, python_without_lightning)
