from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import itertools
import logging
import multiprocessing.resource_tracker
import multiprocessing.spawn
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from matplotlib.figure import Figure

from tests.distributed.ranks import Ranks
from tests.simulated_cuda import device
from tests.simulated_cuda.child import Child
from tests.warm_python import (
    BELOW_LIGHTNING,
    IMPORTED,
    WarmPython,
    cache_configs,
    cache_entry_points,
    save_empty_pictures,
    start_server,
    write_without_waiting,
)
from trainer.common import redaction
from trainer.precision.readback import Readback

if TYPE_CHECKING:
    from tests.support import Clock

ROOT = Path(__file__).parent.parent

ORDER = "TEST_ORDER"
"""Environment variable with a seed, of any text, for the order of tests: ``TEST_ORDER=1 scripts/test --all``."""


SHARED = pytest.StashKey[Path]()
"""A folder for all parallel processes: merged configs, warm Pythons, an installed wheel, and a database."""


def pytest_configure(config: pytest.Config) -> None:
    """Create or find the shared folder, and restore Ctrl-C if a shell started the tests in the background with ``&``.

    Warm Pythons read the pipe ``alive`` of the folder, which ends with the first process of the tests.
    """
    if hasattr(config, "workerinput"):
        folder = Path(config.workerinput["shared"])
    else:
        folder = Path(tempfile.mkdtemp(prefix="tests"))
        os.mkfifo(folder / "alive")
        alive = os.open(folder / "alive", os.O_RDWR)
        config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))
        config.add_cleanup(partial(os.close, alive))
    config.stash[SHARED] = folder
    cache_configs(folder)
    cache_entry_points()
    write_without_waiting()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Share the folder with a parallel process."""
    node.workerinput["shared"] = str(node.config.stash[SHARED])


def shared(config: pytest.Config, name: str, fill: Callable[[Path], object]) -> Path:
    """Return a folder that the first of the parallel processes to need it fills; the others wait for it."""
    folder = config.stash[SHARED] / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            try:
                fill(folder)
            except BaseException:
                shutil.rmtree(folder)
                raise
    return folder


def shared_python(config: pytest.Config, name: str, imported: tuple[str, ...] = IMPORTED) -> WarmPython:
    """Return a warm Python of all parallel processes."""

    def fill(folder: Path) -> None:
        with (config.stash[SHARED] / "alive").open() as alive:
            server = start_server(folder, config.stash[SHARED], alive, imported)
        server.stdout.close()
        server.returncode = 0  # it runs longer than the process that started it, which is no mistake

    return WarmPython(shared(config, name, fill))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Disable garbage collection during the collection, and exclude the collected objects from later ones."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # objects left by extensions would raise warnings when they are collected
        gc.enable()


WHOLE = ("distributed/", "security/test_network.py", "test_start_up.py")
"""Folders and modules that ``scripts/test`` leaves out, relative to ``tests``."""

PROCESSES = {"python", "python_without_lightning", "python_with_deepspeed", "wheel", "installed"}
"""Fixtures that start processes: a test that uses one is left out, too."""


def is_whole(item: pytest.Item) -> bool:
    """Return whether the test belongs to the tier ``whole`` by its folder or fixtures."""
    folder = item.path.relative_to(ROOT / "tests").as_posix()
    return folder.startswith(WHOLE) or not PROCESSES.isdisjoint(getattr(item, "fixturenames", ()))


def covering(rows: dict[Any, tuple[Any, ...]], strength: int, kept: Iterable[Any] = ()) -> set[Any]:
    """Return rows such that each combination of values that occurs in ``strength`` columns occurs in one of them.

    Args:
        rows: the values of each row, by its key.
        strength: 1 for each value, 2 for each pair of values.
        kept: keys of rows to return in any case.
    """
    parts = {key: set(itertools.combinations(enumerate(row), strength)) or {row} for key, row in rows.items()}
    chosen = set(kept)
    left = set[Any]().union(*parts.values()).difference(*(parts[key] for key in chosen))
    while left:
        best = max(parts, key=lambda key: len(parts[key] & left))  # the first of several
        chosen.add(best)
        left -= parts[best]
    return chosen


def values_of(item: pytest.Function) -> tuple[Any, ...]:
    """Return the identities of the values that a test has from each of its ``parametrize`` decorators and fixtures."""
    params = dict(item.callspec.params)
    rows = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        rows.append(tuple(id(params.pop(name)) for name in names))
    return (*rows, *map(id, params.values()))


def sort_combinations(items: list[pytest.Item]) -> None:
    """Leave combinations of the values of several ``parametrize`` decorators to later tiers.

    ``scripts/test`` runs each value once, ``scripts/test --all`` each pair of values, and ``--nightly`` the others.
    """
    tests = defaultdict[str, dict[pytest.Item, tuple[Any, ...]]](dict)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("nightly"):
            tests[item.nodeid.partition("[")[0]][item] = values_of(item)
    for rows in tests.values():
        quick = {item: row for item, row in rows.items() if not item.get_closest_marker("whole")}
        chosen = {item for item in rows if item.get_closest_marker("representative")}
        chosen |= covering(quick, 1, chosen & quick.keys())
        for item in quick.keys() - chosen:
            item.add_marker(pytest.mark.whole)
        for item in rows.keys() - covering(rows, 2, chosen):
            item.add_marker(pytest.mark.nightly)


def shuffle(items: list[pytest.Item], seed: str) -> None:
    """Shuffle the modules, and the tests of each module."""
    generator = random.Random(seed)
    modules = defaultdict[Path, list[pytest.Item]](list)
    for item in items:
        modules[item.path].append(item)
    groups = list(modules.values())
    generator.shuffle(groups)
    for group in groups:
        generator.shuffle(group)
    items[:] = itertools.chain.from_iterable(groups)


def pytest_report_header() -> str | None:
    """Print the seed of the order of tests, if there is one."""
    return f"order: {ORDER}={os.environ[ORDER]}" if ORDER in os.environ else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests into tiers, shuffle them on request, and skip those that need a GPU if there is none.

    Tests marked ``forks`` run first, also in a shuffled order.
    ``scripts/test`` runs tests without ``nightly`` and ``whole``, and those marked ``representative``;
    ``scripts/test --all`` runs all that are not marked ``nightly``.
    """
    if ORDER in os.environ:
        shuffle(items, os.environ[ORDER])
    items.sort(key=lambda item: item.get_closest_marker("forks") is None)
    for item in items:
        if is_whole(item):
            item.add_marker(pytest.mark.whole)
    sort_combinations(items)
    if torch.cuda.is_available():
        return
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is not None and not marker.kwargs.get("simulated", True):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def is_simulated(item: pytest.Item) -> bool:
    """Return whether the test runs on a simulated GPU: it uses ``cuda``, or needs a GPU and there is no real one."""
    wants_gpu = item.get_closest_marker("gpu") is not None
    return "cuda" in getattr(item, "fixturenames", ()) or (wants_gpu and not torch.cuda.is_available())


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Have tests on the simulated GPU run in the process that has it."""
    if device.is_prepared() or not is_simulated(pyfuncitem):
        return None
    result, text = pyfuncitem._request.getfixturevalue("simulation").run(pyfuncitem.nodeid)
    if result == "skipped":
        pytest.skip(text)
    if result == "failed":
        pytest.fail(text, pytrace=False)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Hide GPUs and skip drawing, unless the test is marked ``gpu`` or ``draws``.

    ``accelerator="auto"`` would use a GPU, and Lightning would warn about each Trainer that does not use it. Drawing
    curves would take most of the time of a short fit.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not item.get_closest_marker("draws"):
            patch.setattr(Figure, "savefig", save_empty_pictures(Figure.savefig))
        if device.is_prepared() and is_simulated(item):
            with device.simulated_cuda():
                return (yield)
        if item.get_closest_marker("gpu"):
            return (yield)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        patch.setattr(torch.accelerator, "is_available", lambda: False)
        patch.setattr(torch.backends.mps, "is_available", cache(lambda: False))  # Dynamo reads `__wrapped__`
        return (yield)


LOGGERS = (None, "lightning", "lightning.fabric", "lightning.pytorch", "lightning.pytorch.advice")


@contextlib.contextmanager
def logging_restored() -> Iterator[None]:
    """Restore the logging configuration, because a command configures the root logger and Lightning's loggers."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagates) in zip(loggers, before, strict=True):
        for handler in set(logger.handlers) - set(handlers):
            handler.close()
        logger.handlers[:], logger.propagate = handlers, propagates
        logger.setLevel(level)  # an assignment would not clear the caches of `isEnabledFor`


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    with logging_restored():
        yield


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """Undo changes of the environment: a launch of DDP in this process leaves ``MASTER_PORT``, ``LOCAL_RANK``, ...

    Values of variables that a config has used are forgotten: they would be redacted in other tests.
    """
    before = dict(os.environ)
    yield
    redaction.forget()
    after = dict(os.environ)
    for name in after.keys() - before.keys():
        if name != "PYTEST_CURRENT_TEST":
            del os.environ[name]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Simulated time that changes with ``clock.now`` only, for all uses of ``time`` in the test."""
    from tests.support import Clock  # not above: Lightning's loggers are to find those of pytest when it is imported

    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Disable garbage collection: objects must be freed by reference counts."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Have ``torch.compile`` forget the functions of other tests, and those of this one afterwards."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(scope="session")
def python(pytestconfig: pytest.Config) -> WarmPython:
    """Run programs and commands like ``python`` without the time for imports: ``python.trainer("fit", ...)``."""
    return shared_python(pytestconfig, "python")


@pytest.fixture(scope="session")
def python_without_lightning(pytestconfig: pytest.Config) -> WarmPython:
    """Like ``python``, with torch imported, but not Lightning and the project."""
    return shared_python(pytestconfig, "python_without_lightning", imported=BELOW_LIGHTNING)


@pytest.fixture(scope="session")
def ranks(python: WarmPython) -> Iterator[Ranks]:
    """A process group of two ranks: ``ranks.call("module:function", ...)``. It is restarted after a failed call."""
    with Ranks(python, 2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def python_with_deepspeed(pytestconfig: pytest.Config) -> WarmPython:
    """Like ``python``, with DeepSpeed imported, too, because this takes seconds in each process."""
    return shared_python(pytestconfig, "python_with_deepspeed", imported=(*IMPORTED, "deepspeed"))


@pytest.fixture(scope="session")
def ranks_with_deepspeed(python_with_deepspeed: WarmPython) -> Iterator[Ranks]:
    """Like ``ranks``, with DeepSpeed imported."""
    with Ranks(python_with_deepspeed, 2, timeout=120.0) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def mlflow_database(pytestconfig: pytest.Config) -> Path:
    """A database of MLflow without runs, to copy: MLflow takes ten seconds to create one."""

    def fill(folder: Path) -> None:
        from mlflow.tracking import MlflowClient

        with warnings.catch_warnings(action="ignore"):  # of SQLAlchemy
            MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()

    return shared(pytestconfig, "mlflow", fill) / "mlflow.db"


@pytest.fixture
def spawn_is_warm(python: WarmPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start processes of multiprocessing's methods "spawn" and "forkserver" by the warm Python."""
    multiprocessing.resource_tracker.ensure_running()  # by a normal Python, because it must not end before this process
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(python.executable))


@pytest.fixture
def executable_is_warm(python: WarmPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start processes that use `sys.executable`, such as jobs of sweeps and attempts of ``tune``, warm."""
    monkeypatch.setattr(sys, "executable", str(python.executable))


@pytest.fixture(scope="session")
def simulation(python: WarmPython, request: pytest.FixtureRequest) -> Iterator[Child]:
    """Run tests on the simulated GPU in another process."""
    files = {item.path for item in request.session.items if is_simulated(item)}
    with contextlib.closing(Child(python, files)) as child:
        yield child


@pytest.fixture
def cuda() -> device.Device:
    """The simulated GPU: ``cuda.watch()`` lists synchronizations and kernels. The test runs in another process."""
    return device.DEVICE


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Emulate a GPU with late results of the device. Returns the record of readers that synchronize."""
    account: list[str] = []
    arrives = Readback.__init__

    def init(self: Readback, device: str) -> None:
        arrives(self, device)
        self.arrives_at_once = False

    def wait(self: Readback, original: Any = Readback.wait) -> list[float]:
        account.append("wait")
        numbers: list[float] = original(self)
        return numbers

    monkeypatch.setattr(Readback, "__init__", init)
    monkeypatch.setattr(Readback, "wait", wait)
    return account


@pytest.fixture(scope="session")
def wheel(pytestconfig: pytest.Config) -> Path:
    """Return the wheel that `pip wheel` builds from the checkout."""

    def fill(folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
        subprocess.run(pip, check=True, timeout=240)

    (file,) = shared(pytestconfig, "wheel", fill).glob("*.whl")
    return file


@pytest.fixture(scope="session")
def installed(wheel: Path, pytestconfig: pytest.Config) -> Path:
    """Return a folder that contains only the installed wheel; dependencies are those of this environment."""

    return shared(pytestconfig, "installed", lambda folder: zipfile.ZipFile(wheel).extractall(folder))
