"""A Python process with all imports that forks for each program, which starts within milliseconds.

Imports of torch and Lightning take most of the time of a short program; tests and documentation run hundreds of them.
:class:`WarmPython` runs them; ``tests/conftest.py`` has one for all tests: the fixture ``python``.

As a script: ``warm_python.py SOCKET CONFIGS MODULES...`` imports, and waits for programs from ``warm_client.py``.
"""

import contextlib
import hashlib
import importlib
import importlib.metadata
import logging
import multiprocessing.util
import os
import pickle
import runpy
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

from trainer.cli.warm_process import Server, shared_imports

ROOT = Path(__file__).parents[1]

IMPORTED = (
    "torch", "torchvision", "torchmetrics", "sklearn.datasets", "sklearn.model_selection", "lightning.pytorch",
    "lightning.pytorch.loggers", "torch.utils.tensorboard", "matplotlib.figure", "matplotlib.backends.backend_agg",
    "PIL.PngImagePlugin", "PIL.JpegImagePlugin", "hydra.main", "hydra._internal.hydra", "rich.table", "rich.progress",
    "trainer.trainer", "trainer.callbacks", "trainer.cli.execution", "recipes.image_classification", "recipes.data",
)  # fmt: skip
"""Modules that programs are likely to import. Programs import the others."""

BELOW_LIGHTNING = tuple(name for name in IMPORTED if not name.startswith(("lightning", "trainer", "recipes")))
"""Modules for programs that depend on the order of the imports of Lightning and the project."""


class WarmPython:
    """Runs programs as ``python WORDS...`` would.

    The programs inherit only the environment, the working folder and the open files. Processes that they start
    with ``sys.executable`` are warm, too. Their pictures are empty. Tests of imports need a new Python.

    Args:
        folder: folder of a server that :func:`start_server` started.
    """

    def __init__(self, folder: Path) -> None:
        self.socket, self.executable = folder / "socket", folder / "python"

    def start(self, *words: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
        """Start the program, and return its process.

        Args:
            *words: arguments of ``python``.
            env: the environment; by default that of this process.
            **options: arguments of ``subprocess.Popen``.
        """
        environment = dict(os.environ if env is None else env)
        environment["WARM_PYTHON_AGAIN"] = str(self.executable)
        return subprocess.Popen([str(self.executable), *words], env=environment, **options)

    def run(self, *words: str, timeout: float = 200.0, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program to its end. Returns its status, and the output of each stream."""
        pipe = subprocess.PIPE
        with self.start(*words, stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL, text=True, **options) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def trainer(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run the command line: ``python -m trainer WORDS...``."""
        return self.run("-m", "trainer", *words, **options)


def start_server(
    folder: Path, configs: Path, stdin: Any, imported: tuple[str, ...] = IMPORTED
) -> subprocess.Popen[str]:
    """Start a server, and wait until it has imported.

    Args:
        folder: folder of the socket, with a short path.
        configs: folder of the merged configs, which several servers may share.
        stdin: standard input of the server. The server and its programs end when it ends.
        imported: modules to import before.
    """
    client = Path(__file__).resolve().with_name("warm_client.py")
    run = shlex.join([sys.executable, "-I", "-S", str(client), sys.executable, str(folder / "socket")])
    executable = folder / "python"
    executable.write_text(f'#!/bin/sh\nexec {run} "$@"\n')
    executable.chmod(0o755)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), str(folder / "socket"), str(configs), *imported]
    server = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout.readline() == "ready\n", "the server did not start"
    return server


def save_empty_pictures(save: Callable[..., None]) -> Callable[..., None]:
    """Replace ``Figure.savefig`` with one that does not draw, except SVG, because drawing dominates a short fit."""

    def savefig(figure: Any, fname: Any, **options: Any) -> None:
        if options.get("format") == "svg":
            save(figure, fname, **options)
        elif isinstance(fname, (str, os.PathLike)):
            Path(fname).touch()

    return savefig


def write_without_waiting() -> None:
    """Have files and databases of SQLite not wait for the disk: tests end processes, but not the machine."""
    connect = sqlite3.dbapi2.connect

    def connect_without_waiting(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.execute("PRAGMA synchronous=OFF")
        return connection

    os.fsync = lambda handle: None
    sqlite3.dbapi2.connect = connect_without_waiting


def cache_configs(folder: Path) -> None:
    """Read and merge each config once, because this takes most of the time of a short command.

    Args:
        folder: the merged configs of all processes that share them.
    """
    import omegaconf._utils
    import omegaconf.base
    import omegaconf.resolvers.oc
    from omegaconf import OmegaConf, grammar_parser

    load = OmegaConf.load
    configs = dict[str, bytes]()

    def load_once(file: Any) -> Any:
        text = file.read() if hasattr(file, "read") else Path(file).read_text(encoding="utf-8")
        if text not in configs:
            if hasattr(file, "read"):
                file.seek(0)
            configs[text] = pickle.dumps(load(file))
        return pickle.loads(configs[text])

    OmegaConf.load = staticmethod(load_once)  # type: ignore[method-assign]
    parse = cache(grammar_parser.parse)
    for module in (omegaconf.base, omegaconf._utils, omegaconf.resolvers.oc):
        module.parse = parse
    cache_compositions(folder)


def cache_compositions(folder: Path) -> None:
    """Merge the files of a config once in all processes, if the contents of all config files are equal.

    Settings are applied after. Omitted: copies of the registered configs, which are not changed, and the choices for
    interpolations in a default list that has no interpolations. These are functions of Hydra 1.3; a no-op with others.
    """
    import hydra
    from hydra._internal import config_loader_impl, defaults_list
    from hydra._internal.defaults_list import Overrides
    from hydra.core.config_store import ConfigStore

    if not hydra.__version__.startswith("1.3."):
        return
    class_of_loader = config_loader_impl.ConfigLoaderImpl
    choose, merge = config_loader_impl.create_defaults_list, class_of_loader._compose_config_from_defaults_list
    choices_of = defaults_list._create_interpolation_map
    results = dict[Path, bytes]()

    def once(repo: Any, key: Any, make: Callable[[], Any]) -> Any:
        store = ConfigStore.instance().repo
        files: list[Any] = [store["amp_trainer_restored.yaml"].node] if "amp_trainer_restored.yaml" in store else []
        for source in repo.get_sources():
            configs = Path(source.path)
            if source.scheme() != "file" or configs == ROOT / "conf":
                files.append(source.path)
            else:
                files += [(file.relative_to(configs), file.read_bytes()) for file in configs.rglob("*.yaml")]
        path = folder / hashlib.sha256(repr((key, files)).encode()).hexdigest()
        if path not in results and path.exists():
            results[path] = path.read_bytes()
        elif path not in results:
            results[path] = pickle.dumps(make())
            with contextlib.suppress(OSError):  # in a test of a full disk
                part = path.with_suffix(f".{os.getpid()}")
                part.write_bytes(results[path])
                part.replace(path)
        return pickle.loads(results[path])

    def choose_once(repo: Any, config_name: Any, overrides_list: list[Any], **options: Any) -> Any:
        groups = [one for one in overrides_list if repo.group_exists(one.key_or_group)]
        key = (config_name, options, [one.input_line for one in groups])
        chosen = once(repo, key, lambda: choose(repo, config_name, groups, **options))
        chosen.config_overrides = Overrides(repo, overrides_list).config_overrides
        return chosen

    def merge_once(loader: Any, defaults: Any, repo: Any) -> Any:
        return once(repo, defaults, lambda: merge(loader, defaults, repo))

    def choices_if_used(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
        is_used = any(default.is_interpolation() for default in defaults)
        return choices_of(overrides, defaults, self_added) if is_used else None

    config_loader_impl.create_defaults_list = choose_once
    class_of_loader._compose_config_from_defaults_list = merge_once
    defaults_list._create_interpolation_map = choices_if_used
    ConfigStore.__deepcopy__ = lambda store, memo: store


def serve(socket_path: str, configs: Path, imported: list[str]) -> None:
    """Import, listen, and run programs until standard input ends."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    owner = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # imports may print
    with shared_imports():
        prepare(configs, imported)
    server = WarmServer(socket_path)
    os.write(owner, b"ready\n")
    os.close(owner)
    server.loop()


def prepare(configs: Path, imported: list[str]) -> None:
    """Import, and cache the results of functions that many programs call."""
    cache_entry_points()
    for name in imported:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for module in [module for name, module in sys.modules.items() if name.startswith(("trainer.", "recipes."))]:
        for public in getattr(module, "__all__", ()):
            with contextlib.suppress(ImportError):  # of a package that is not installed
                getattr(module, public, None)  # those that are imported when they are used
    if "hydra.main" in sys.modules:
        cache_configs(configs)
        for config in (ROOT / "conf").rglob("*.yaml"):
            sys.modules["omegaconf"].OmegaConf.load(config)
        parser = importlib.import_module("hydra.core.override_parser.overrides_parser").OverridesParser.create()
        parser.parse_overrides(["+a/b@c=d", "~a.b", "a=[1,b]", "a={b:2.5,c:'d e'}", "a=1e-3,null", "a=${b}"])
    importlib.metadata.entry_points()
    write_without_waiting()
    figure = importlib.import_module("matplotlib.figure").Figure
    figure.savefig = save_empty_pictures(figure.savefig)


def cache_entry_points() -> None:
    """Read the entry points of each installed package once."""
    read = importlib.metadata.PathDistribution.entry_points.fget  # type: ignore[attr-defined]
    found = dict[Path, Any]()

    def entry_points(package: Any) -> Any:
        if package._path not in found:
            found[package._path] = read(package)
        return found[package._path]

    importlib.metadata.PathDistribution.entry_points = property(entry_points)  # type: ignore[method-assign,assignment]


class WarmServer(Server):
    """Forks programs for the clients that connect to a socket, until standard input ends."""

    def __init__(self, socket_path: str) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(socket_path)
        listener.listen(16)
        super().__init__(listener)
        self.listen(sys.stdin, self._end)

    def accept(self, listener: socket.socket) -> None:
        """Accept a client, and start its program."""
        self.start(listener.accept()[0])

    def _end(self, stdin: Any) -> None:
        for process in self.connections:
            self.abandon(process)
        self.is_running = False

    def abandon(self, process: int) -> None:
        """Kill the program, because its client was killed."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)

    def enter(self, request: dict[str, Any]) -> None:
        """Make the program a child of the client's parent, with warm child processes."""
        super().enter(request)
        os.getppid = partial(_parent, request["parent"])
        sys.executable = os.environ.get("WARM_PYTHON_AGAIN", sys.executable)
        fork_fork_servers()
        named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.path[:0] = [entry for entry in named if entry not in sys.path]
        if "lightning" not in sys.modules:  # the program may import another copy of the project
            for name in [name for name in sys.modules if name.partition(".")[0] == "trainer"]:
                del sys.modules[name]

    def execute(self, request: dict[str, Any]) -> None:
        """Run ``-m MODULE ...``, ``-c CODE ...`` or ``FILE ...``."""
        words = request["words"]
        sys.argv = words
        if words[0] == "-m":
            _log_to_the_root()
            sys.path.insert(0, "")  # replaced
            super().execute(request)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            sys.path.insert(0, "")
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
        else:
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")


def _parent(process: int) -> int:
    """Return ``os.getppid`` for a program: the client, as long as it is alive."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return 1
    return process


def fork_fork_servers() -> None:
    """Fork the servers of `multiprocessing`, which otherwise import torch in a new Python."""
    start = multiprocessing.util.spawnv_passfds

    def fork(path: Any, args: list[Any], descriptors: Iterable[int]) -> int:
        if not args[-1].startswith("from multiprocessing.forkserver import main"):
            return start(path, args, descriptors)
        if process := os.fork():
            return process
        try:
            for descriptor in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, *descriptors}:
                with contextlib.suppress(OSError):  # that of the folder
                    os.close(descriptor)
            exec(args[-1], {})
        finally:
            os._exit(1)

    multiprocessing.util.spawnv_passfds = fork


def _log_to_the_root() -> None:
    """Leave logging to a program that configures it before it imports Lightning, as Lightning does."""
    for name in ("lightning", "lightning.fabric", "lightning.pytorch"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    os._exit(0)  # destroying all these modules takes seconds
