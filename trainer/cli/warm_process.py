"""Run programs in forks of one process that has imported torch, Lightning and the libraries of a config.

The jobs of a sweep and the attempts of ``tune`` are programs: ``python -m WORDS...``. Most of the time of a short one
are its imports. Inside `warm_processes`, on Linux, each program runs in a fork of a *server*, which imports once. On
other systems, and outside of the context, each program starts a new Python.

A program that runs in a fork inherits, in addition to the things that every child process inherits:

- the modules of this framework, of Python, and of the installed packages that its config names, with the exit
  functions, warning filters and loggers of their import, but without their finalizers at exit, because their objects
  belong to all programs. The fork itself imports the user's files, and the packages that only these import;
- Python's hash seed.

Everything else is as in a new Python (`Server._become`):

- buffers of Python's and C's output streams are empty: the server flushes them before each fork;
- environment, working directory, standard streams, session, arguments and ``sys.path`` are those of the request;
- no other file of the server is open;
- signals have their default handlers, or are ignored if the process that asked for the program ignores them;
- NumPy's global generator has a new random state, as Python gives its own in each fork;
- torch uses ``OMP_NUM_THREADS`` threads, which its libraries read from the environment only when they are imported;
- garbage collection is enabled, and does not traverse the objects of the server.

Threads and the state of a GPU do not survive a fork. The server therefore starts a new Python for each program if an
import has started a thread or opened a GPU, and never uses CUDA itself.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import marshal
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import IO, Any, NoReturn

from trainer.cli.folders import is_users, merge_recipes
from trainer.cli.processes import PARENT

MAX_DESCRIPTORS = 100
"""Maximum number of open files that a program inherits."""

_THREADS = "OMP_NUM_THREADS"
_GPUS = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
"""Prefixes of the device files of GPUs."""


def start_process(
    words: Sequence[str],
    *,
    folder: str,
    environment: Mapping[str, str],
    output: IO[bytes],
    own_session: bool = False,
    names: Iterable[str] = (),
) -> Process:
    """Start the program ``python -m WORDS...``. It gets SIGTERM when this process ends.

    Args:
        words: module and arguments.
        folder: working directory.
        environment: environment variables.
        output: file for its output and its errors.
        own_session: whether it runs in a new session, so that Ctrl-C does not reach it.
        names: modules, classes and functions that the server imports before, unless they are in the user's files.
    """
    environment = {**environment, PARENT: str(os.getpid())}
    if _server is not None:
        request = {
            "words": ["-m", *words],
            "folder": folder,
            "environment": environment,
            "descriptors": [0, 1, 2],
            "own_session": own_session,
            "ignored": [int(each) for each in signal.valid_signals() if signal.getsignal(each) is signal.SIG_IGN],
            "names": list(names),
        }
        with suppress(OSError):  # the server cannot be started
            return _server.start(request, output.fileno())
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=own_session,
    )


@contextmanager
def warm_processes() -> Iterator[None]:
    """Inside the context, `start_process` uses a server on Linux. The server starts with the first program."""
    global _server
    if sys.platform != "linux" or _server is not None:
        yield
        return
    _server = _ServerHandle()
    try:
        yield
    finally:
        _server.close()
        _server = None


class _ServerHandle:
    """Starts programs through a server, which it starts when it is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self, request: dict[str, Any], output: int) -> _WarmProcess:
        with self._lock:
            if self._control is None or self._process is None or self._process.poll() is not None:
                self.close()
                self._control, theirs = socket.socketpair()
                with theirs:
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", __name__],
                        cwd=request["folder"],
                        env=request["environment"],
                        stdin=theirs.fileno(),
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
        ours, theirs = socket.socketpair()
        with theirs, open(os.devnull, "rb") as nothing:
            socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
            text = marshal.dumps(request)
            socket.send_fds(ours, [struct.pack("!I", len(text))], [nothing.fileno(), output, output])
            ours.sendall(text)
        return _WarmProcess(ours, self._process)

    def close(self) -> None:
        """End the server."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.wait()


_server: _ServerHandle | None = None


class _WarmProcess:
    """A program that a server runs. It has the methods of `subprocess.Popen` that are used."""

    def __init__(self, connection: socket.socket, server: subprocess.Popen[bytes]) -> None:
        self.returncode: int | None = None
        self._connection, self._server = connection, server

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                status = self._connection.recv(4)
            except TimeoutError:
                raise subprocess.TimeoutExpired("python", timeout or 0.0) from None
            except ConnectionError:
                status = b""
            # without a status, the server has ended; if it did not crash, the program gets SIGTERM
            self.returncode = struct.unpack("!i", status)[0] if status else self._server.wait() or -signal.SIGTERM
            self._connection.close()
        return self.returncode

    def send_signal(self, sig: int) -> None:
        with suppress(OSError):  # the program has ended
            self._connection.send(bytes([sig]))


Process = subprocess.Popen[bytes] | _WarmProcess


class Server:
    """Forks programs, passes signals on to them, and reports their exit status.

    Args:
        control: each message on it has the connection of a program. The server ends when it is closed.
    """

    def __init__(self, control: socket.socket) -> None:
        self.is_running = True
        self.connections: dict[int, socket.socket] = {}  # by the process of the program
        self.selector = selectors.DefaultSelector()
        self._python, self._threads = sys.executable, os.environ.get(_THREADS)
        self._is_forkable = True
        self._null = os.open(os.devnull, os.O_RDWR)
        self._woken, self._wake_up = socket.socketpair()
        self._wake_up.setblocking(False)
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):  # they are for the programs
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake_up.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self.listen(control, self.accept)
        self.listen(self._woken, self._reap)

    def listen(self, source: Any, handle: Callable[[Any], None]) -> None:
        """Call ``handle(source)`` when ``source`` can be read."""
        self.selector.register(source, selectors.EVENT_READ, handle)

    def loop(self) -> None:
        """Run until the other end of ``control`` is closed."""
        while self.is_running:
            for key, _ in self.selector.select():
                if self.selector.get_map().get(key.fd) is key:  # no earlier event has removed it
                    key.data(key.fileobj)

    def accept(self, control: socket.socket) -> None:
        """Receive the connection of a program, and start the program."""
        message, (*descriptors,), _, _ = socket.recv_fds(control, 1, 1)
        self.is_running = bool(message)
        for descriptor in descriptors:
            self.start(socket.socket(fileno=descriptor))

    def start(self, connection: socket.socket) -> None:
        """Receive a request, and start its program."""
        streams: list[int] = []
        try:
            head, streams, _, _ = socket.recv_fds(connection, 4, MAX_DESCRIPTORS)
            (size,), text = struct.unpack("!I", head), b""
            while len(text) < size and (chunk := connection.recv(size - len(text))):  # without the signals that follow
                text += chunk
            request = marshal.loads(text)
            if request.get("names"):
                self._import(request["names"], streams)
            flush()
            self._is_forkable = is_forkable()
            unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of the threads of libraries
                process = os.fork()  # which keeps signals until it has its own handlers
        except (OSError, ValueError, EOFError, struct.error):  # the client was killed, or there are no resources
            connection.close()
        else:
            if process == 0:
                connection.close()
                self._become(request, streams, unblocked)
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            self.connections[process] = connection
            self.listen(connection, self._pass_on)
        for stream in streams:
            os.close(stream)

    def _import(self, names: Iterable[str], streams: Sequence[int]) -> None:
        """Import the libraries of a program. The imports write to the program's output."""
        for number in (1, 2):
            os.dup2(streams[number], number)
        with shared_imports():
            for name in names:
                import_library(name)
        flush()
        for number in (1, 2):
            os.dup2(self._null, number)

    def _pass_on(self, connection: socket.socket) -> None:
        """Send the received signals to the program."""
        (process,) = [process for process, other in self.connections.items() if other is connection]
        try:
            numbers = connection.recv(16)
        except ConnectionError:
            numbers = b""
        for number in numbers:
            os.kill(process, number)
        if not numbers:
            self.selector.unregister(connection)
            self.abandon(process)

    def abandon(self, process: int) -> None:
        """Handle the end of the client of a program. The program ends with the server."""

    def _reap(self, woken: socket.socket) -> None:
        """Report the exit status of the programs that have ended."""
        woken.recv(4096)
        for process in list(self.connections):
            ended, status = os.waitpid(process, os.WNOHANG)
            if not ended:
                continue
            connection = self.connections.pop(process)
            with suppress(KeyError):
                self.selector.unregister(connection)
            with suppress(OSError):  # the client was killed
                connection.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))
            connection.close()

    def _become(self, request: dict[str, Any], streams: Sequence[int], unblocked: Iterable[int]) -> NoReturn:
        """Run the requested program in a fork, and end the process."""
        try:
            sources = [key.fileobj for key in self.selector.get_map().values()]
            self.selector.close()
            for source in (*sources, self._wake_up, *self.connections.values()):
                if isinstance(source, socket.socket):
                    source.close()
            os.close(self._null)
            if request["own_session"]:
                os.setsid()
            reset_signals(request["ignored"])
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            # first above all descriptors of the program, so that none is overwritten before its turn
            copies = [os.dup2(stream, 2 * MAX_DESCRIPTORS + place) for place, stream in enumerate(streams)]
            for stream in streams:
                os.close(stream)
            for number, copy in zip(request["descriptors"], copies, strict=True):
                os.dup2(copy, number)
                os.close(copy)
            self.enter(request)
            if PARENT in os.environ:
                os.environ[PARENT] = str(os.getppid())
            if not self._is_forkable:
                os.execve(self._python, [self._python, *request["words"]], os.environ)
            if "numpy.random" in sys.modules:
                sys.modules["numpy.random"].seed()
            threads = os.environ.get(_THREADS, "")
            if "torch" in sys.modules and threads != self._threads and threads.isdigit():
                sys.modules["torch"].set_num_threads(int(threads))
        except BaseException:
            sys.excepthook(*sys.exc_info())
            flush()
            os._exit(1)
        run_and_exit(self.execute, request)

    def enter(self, request: dict[str, Any]) -> None:
        """Set the working directory and the environment of a program."""
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])

    def execute(self, request: dict[str, Any]) -> None:
        """Run the program of a request."""
        words = request["words"]
        sys.orig_argv = [sys.executable, *words]
        sys.argv = words[1:]
        if not sys.flags.safe_path:
            sys.path[0] = request["folder"]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)


@contextmanager
def shared_imports() -> Iterator[None]:
    """Exempt the objects of the imports inside the context from garbage collection and finalizers in all forks."""
    gc.disable()
    yield
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.freeze()  # otherwise, a collection would copy their memory in each fork
    gc.enable()


def import_library(name: str) -> None:
    """Import the modules of a module, class or function, up to the first module that is a file of the user."""
    value: Any = None
    parts = name.split(".")
    with suppress(Exception, SystemExit):  # the program raises the error itself
        for end, word in enumerate(parts, start=1):
            module = ".".join(parts[:end])
            spec = find_spec(module) if value is None or isinstance(value, ModuleType) else None
            if spec is None:
                value = getattr(value, word)  # some are imported at their first use
                continue
            if spec.origin is None or is_users(spec.origin):
                return
            value = import_module(module)
            if module == "recipes":
                merge_recipes()


def is_forkable() -> bool:
    """Return whether this process has no other Python thread and no open GPU."""
    if threading.active_count() > 1:
        return False
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the folder
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(_GPUS):
                return False
    return True


def reset_signals(ignored: Iterable[int]) -> None:
    """Set the handlers of a new Python whose parent process ignores ``ignored``."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        is_ignored = number in ignored or number in (signal.SIGPIPE, signal.SIGXFSZ)
        handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if is_ignored else handler)


def flush() -> None:
    """Write the buffers of Python's and C's output streams."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)


def run_and_exit(function: Callable[..., None], *arguments: Any) -> NoReturn:
    """Call a function, and end the process as Python ends, but without freeing all objects, which takes a second."""
    status = 0
    try:
        function(*arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for file in gc.get_objects():
            if isinstance(file, (io.BufferedWriter, io.TextIOWrapper)) and not file.closed:
                file.flush()
        flush()
    finally:
        if status == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(status & 0xFF)


if __name__ == "__main__":
    Server(socket.socket(fileno=sys.stdin.fileno())).loop()
    os._exit(0)
