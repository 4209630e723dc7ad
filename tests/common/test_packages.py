"""Optional packages: the table agrees with pyproject.toml, and each ``pip install`` in the project names them."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from trainer.common import packages

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OF_OTHERS = {"datasets", "mlflow", "timm"}
"""Packages that a page names and the project does not use."""


def name_of(requirement):
    return re.split(r"[<>=~! ]", requirement)[0]


def test_code_is_the_users_unless_it_is_installed_or_a_dependency(tmp_path):
    installed = [tmp_path / folder / "package" / "code.py" for folder in ("site-packages", "dist-packages")]
    dependencies = [Path(str(find_spec(name).origin)) for name in ("torch", "hydra", "json", "trainer")]
    assert not any(packages.is_users_file(str(file)) for file in (*installed, *dependencies))
    assert packages.is_users_file(str(tmp_path / "code.py"))
    assert packages.is_users_module(__name__)
    assert not any(map(packages.is_users_module, ("json", "torch.nn", "trainer.cli")))


def test_table_agrees_with_pyproject():
    extras = {name: {name_of(one) for one in needed} for name, needed in PROJECT["optional-dependencies"].items()}
    del extras["dev"]
    assert {extra: set(modules.values()) for extra, modules in packages.EXTRAS.items()} == extras


def test_imported_packages_are_declared():
    """Those of pyproject.toml; the model registry does without its package (`trainer/model_registry.py`)."""
    trees = [ast.parse(file.read_text()) for file in (ROOT / "trainer").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {one.name for node in nodes if isinstance(node, ast.Import) for one in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    roots = {name.partition(".")[0] for name in names} - {"trainer", "litmodels", *sys.stdlib_module_names}
    needed = {Requirement(one).name for one in PROJECT["dependencies"]}
    extras = {module for extra in packages.EXTRAS.values() for module in extra}
    distributions = metadata.packages_distributions()
    undeclared = {root for root in roots - extras if needed.isdisjoint(distributions.get(root, ()))}
    assert undeclared == set()


@pytest.mark.parametrize(
    ("name", "extras"), [("run", ("recipes", "report", "plots", "tensorboard")), ("test", ("dev",))]
)
def test_locks_have_the_pinned_versions_and_all_requirements(name, extras):
    """After a change of a version or a requirement, run scripts/lock."""
    text = (ROOT / "scripts" / "_locks" / f"{name}.txt").read_text()
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.M))
    assert all(re.search(rf"^{package}==.*\\\n    --hash=sha256:", text, re.M) for package in locked)
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
    pinned = {package.lower().replace("_", "-"): version for package, version in pinned.items()}
    assert {package: pinned.get(package, version) for package, version in locked.items()} == locked
    (own,) = (Requirement(one) for one in PROJECT["optional-dependencies"]["dev"] if one.startswith("amp-trainer["))
    extras = (*extras, *own.extras) if "dev" in extras else extras
    wanted = [*PROJECT["dependencies"], *(one for extra in extras for one in PROJECT["optional-dependencies"][extra])]
    assert {Requirement(one).name.lower() for one in wanted} - {"amp-trainer"} <= locked.keys()


def test_modules_of_the_table_are_those_that_the_packages_install():
    modules = {module for extra in packages.EXTRAS.values() for module in extra}
    assert {module for module in modules if not packages.is_installed(module)} <= {"ray"}  # not in dev


def test_pip_install_in_texts_names_known_packages():
    known = {name for extra in packages.EXTRAS.values() for name in extra.values()} | OF_OTHERS
    files = ["*.py", "*.md", "*.yaml", "*.toml", "*.jinja", ":!tests", ":!CHANGELOG.md"]
    command = ["git", "grep", "-hoP", r"pip install \K[a-z'.][\w.'\[\],-]*\w\]?", "--", *files]
    found = {name.strip("'") for name in subprocess.check_output(command, cwd=ROOT, text=True).split()}
    assert {name for name in found if not name.startswith(".[")} <= known


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("ray",), "ray, which is not installed: pip install 'ray[train,tune]'"),
        (("mlflow", "alembic"), "alembic, which is not installed: pip install mlflow-skinny sqlalchemy alembic "),
        (("slurm",), "hydra_plugins, which is not installed: pip install hydra-submitit-launcher submitit"),
    ],
)
def test_missing_package_error_has_the_install_command(monkeypatch, arguments, expected):
    monkeypatch.setattr(packages, "is_installed", lambda module: False)
    assert expected in str(packages.missing(*arguments))
    monkeypatch.setattr(packages, "is_installed", lambda module: True)
    assert packages.missing(*arguments) is None


def closure(names):
    """Names of the distributions that installing ``names`` installs, in this environment."""
    found = set()
    queue = [(Requirement(name).name, Requirement(name).extras) for name in names]
    while queue:
        name, extras = queue.pop()
        found.add(name)
        for text in metadata.requires(name) or ():
            needed = Requirement(text)
            is_needed = needed.marker is None or any(needed.marker.evaluate({"extra": one}) for one in ("", *extras))
            if is_needed and needed.name not in found:
                queue.append((needed.name, needed.extras))
    return found


@pytest.fixture
def bare(tmp_path):
    """A folder with links to the required dependencies and theirs; nothing else can be imported from it."""
    folder = tmp_path / "site"
    folder.mkdir()
    link(folder, PROJECT["dependencies"])
    for name in ("trainer", "recipes", "conf"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def link(folder, names):
    for name in closure(names):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(distribution.locate_file(top))


PROGRAM = """
import importlib.util, sys
from lightning.pytorch.demos.boring_classes import BoringModel

from trainer import Trainer
from trainer.callbacks import Curves, RunRecorder, RunSummary
from trainer.errors import ConfigurationError

options = {"accelerator": "cpu", "limit_train_batches": 2, "limit_val_batches": 1, "precision": "16-mixed"}
first = Trainer(max_epochs=1, callbacks=[RunRecorder(), RunSummary()], **options)
first.fit(BoringModel())
second = Trainer(max_epochs=2, **options)
second.fit(model := BoringModel(), ckpt_path=first.checkpoint_callback.best_model_path)
assert second.global_step == 4
second.test(model, verbose=False)
try:
    Curves()
except ConfigurationError as error:
    assert str(error).endswith("matplotlib, which is not installed: pip install matplotlib"), error
else:
    raise AssertionError
for name in ("matplotlib", "torchvision", "tensorboard", "pandas", "sklearn"):
    assert importlib.util.find_spec(name) is None, name
from trainer.cli import main
small = ["data.in_features=8", "data.out_features=8", "data.batch_size=4", "data.num_batches=2"]
run = ["trainer.log_every_n_steps=1", "trainer.max_epochs=1", "hydra.run.dir=run"]
assert main(["fit", "+recipe=mlp", *small, *run]) == 0
assert main(["report", "run"]) == 2

import recipes.mlp, recipes.tabular
from recipes.data import ByteText, RandomVectors
sys.path.append(sys.argv[1])
from recipes.data import Digits, DigitScans, Tabular
"""


@pytest.mark.whole
def test_hard_dependencies_train_resume_test_and_run_a_recipe(bare, tmp_path):
    """A recipe imports its own packages only: without scikit-learn, all but those with data of scikit-learn."""
    (tmp_path / "more").mkdir()
    link(tmp_path / "more", ["scikit-learn"])
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(bare), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-S", "-W", "ignore", "-c", PROGRAM, str(tmp_path / "more")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "needs tensorboard, which is not installed: pip install tensorboard" in done.stderr + done.stdout
    assert (tmp_path / "run" / "csv" / "metrics.csv").is_file()
    expected = "trainer: report needs matplotlib, which is not installed: pip install jinja2 matplotlib\n"
    assert expected in done.stderr
