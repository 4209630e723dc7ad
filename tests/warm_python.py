"""A Python process with all imports that forks for each program, which starts within milliseconds.

Imports of torch and Lightning take most of the time of a short program; tests and documentation run hundreds of them.
:class:`WarmPython` runs them; ``tests/conftest.py`` has one for all tests: the fixture ``python``.

As a script: ``warm_python.py SOCKET CONFIGS MODULES...`` imports, and waits for programs from ``warm_client.py``.
"""

import array
import contextlib
import fcntl
import gc
import hashlib
import importlib
import importlib.metadata
import logging
import marshal
import multiprocessing.util
import os
import pickle
import runpy
import selectors
import shlex
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

IMPORTED = (
    "torch", "torchvision", "torchmetrics", "sklearn.datasets", "sklearn.model_selection", "lightning.pytorch",
    "lightning.pytorch.loggers", "torch.utils.tensorboard", "matplotlib.figure", "matplotlib.backends.backend_agg",
    "PIL.PngImagePlugin", "PIL.JpegImagePlugin", "hydra.main", "hydra._internal.hydra", "rich.table", "rich.progress",
    "trainer.trainer", "trainer.callbacks", "trainer.cli.run", "recipes.image_classification", "recipes.data",
)  # fmt: skip
"""Modules that programs are likely to import. Programs import the others."""

BELOW_LIGHTNING = tuple(name for name in IMPORTED if not name.startswith(("lightning", "trainer", "recipes")))
"""Modules for programs that depend on the order of the imports of Lightning and the project."""


MAX_DESCRIPTORS = 100
"""Maximum number of open files of a program when it starts; the same as in ``warm_client.py``."""


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

    def load(self, *modules: str) -> None:
        """Import further modules, if they are installed, for all programs that start later."""
        subprocess.run([str(self.executable), "--import", *modules], check=True)


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
    interpolations in a default list that has no interpolations.
    """
    from hydra._internal import config_loader_impl, defaults_list
    from hydra._internal.defaults_list import Overrides
    from hydra.core.config_store import ConfigStore

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
    gc.disable()  # imported modules stay
    cache_entry_points()
    for name in imported:
        import_if_installed(name)
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
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch would remove each of its operators at the end of each program
    write_without_waiting()
    figure = importlib.import_module("matplotlib.figure").Figure
    figure.savefig = save_empty_pictures(figure.savefig)
    gc.freeze()
    gc.enable()
    Server(socket_path).loop()


def import_if_installed(name: str) -> None:
    """Import a module, and exempt it from garbage collection, which would copy its memory in each program."""
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
    gc.freeze()


def cache_entry_points() -> None:
    """Read the entry points of each installed package once."""
    read = importlib.metadata.PathDistribution.entry_points.fget  # type: ignore[attr-defined]
    found = dict[Path, Any]()

    def entry_points(package: Any) -> Any:
        if package._path not in found:
            found[package._path] = read(package)
        return found[package._path]

    importlib.metadata.PathDistribution.entry_points = property(entry_points)  # type: ignore[method-assign,assignment]


class Server:
    """Forks programs, and reports their exit status to the clients."""

    def __init__(self, socket_path: str) -> None:
        self.selector = selectors.DefaultSelector()
        self.asked: dict[int, socket.socket] = {}  # by the program's process
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(socket_path)
        self.listener.listen(16)
        self.wake_up, woken = socket.socketpair()
        woken.setblocking(False)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.woken = woken
        for source in (self.listener, self.wake_up, sys.stdin):
            self.selector.register(source, selectors.EVENT_READ)
        print("ready", flush=True)

    def loop(self) -> None:
        """Run until the owner has ended."""
        while True:
            for key, _ in self.selector.select():
                source: Any = key.fileobj
                if source is sys.stdin:
                    for process in list(self.asked):
                        self._kill(process)
                    return
                if source is self.listener:
                    self._start()
                elif source is self.wake_up:
                    self.wake_up.recv(4096)
                    self._reap()
                else:  # a client sends no data: it was killed, unless the program has just ended
                    for process in [process for process, asker in self.asked.items() if asker is source]:
                        self.selector.unregister(source)
                        self._kill(process)

    def _start(self) -> None:
        connection, _ = self.listener.accept()
        streams = array.array("i")
        try:
            head, ancillary, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(MAX_DESCRIPTORS * streams.itemsize))
            for _, _, numbers in ancillary:
                streams.frombytes(numbers)
            with connection.makefile("rb") as sent:
                request = marshal.loads(sent.read(*struct.unpack("!I", head)))
            if request["words"][:1] == ["--import"]:
                for name in request["words"][1:]:
                    import_if_installed(name)
                connection.sendall(struct.pack("!ii", 0, 0))
                raise ValueError("no program")
            process = os.fork()
        # the client was killed during the request; or there is no program, or no resources for another process
        except (OSError, ValueError, EOFError, struct.error):
            for stream in streams:
                os.close(stream)
            connection.close()
            return
        if process == 0:
            self.listener.close()
            _become(request, list(streams))
        for stream in streams:
            os.close(stream)
        self.asked[process] = connection
        self.selector.register(connection, selectors.EVENT_READ)
        with contextlib.suppress(OSError):  # the client was killed, as the selector will report
            connection.sendall(struct.pack("!i", process))

    def _reap(self) -> None:
        for process in list(self.asked):
            ended, status = os.waitpid(process, os.WNOHANG)
            if not ended:
                continue
            connection = self.asked.pop(process)
            with contextlib.suppress(KeyError):
                self.selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))
            connection.close()

    @staticmethod
    def _kill(process: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)


def _parent(process: int) -> int:
    """Return ``os.getppid`` for a program: the client, as long as it is alive."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return 1
    return process


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Run the requested program. Does not return."""
    status = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # above all descriptors of the program, so that none is overwritten before its turn
        streams = [fcntl.fcntl(stream, fcntl.F_DUPFD, 2 * MAX_DESCRIPTORS) for stream in streams]
        for number, stream in zip(request["descriptors"], streams, strict=True):
            os.dup2(stream, number)
            os.close(stream)
        os.getppid = partial(_parent, request["parent"])
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.executable = os.environ.get("WARM_PYTHON_AGAIN", sys.executable)
        fork_fork_servers()
        named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.path[:0] = [entry for entry in named if entry not in sys.path]
        status = _execute(request["words"])
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            import atexit
            import threading

            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


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


def _execute(words: list[str]) -> int:
    if words[0] == "-m":
        sys.argv = words[1:]
        _log_to_the_root()
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
    return 0


def _log_to_the_root() -> None:
    """Leave logging to a program that configures it before it imports Lightning, as Lightning does."""
    for name in ("lightning", "lightning.fabric", "lightning.pytorch"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    os._exit(0)  # destroying all these modules takes seconds
