"""Run a program in a warm Python: ``python -I -S warm_client.py SOCKET WORDS...``.

The program gets the arguments, folder, environment and open files of this process, which exits with the status
of the program. A kill of this process kills the program and its child processes. Separate from ``warm_python.py``,
because importing that file takes longer than starting the program. For the same reason, it imports only modules
written in C, which the modules ``socket`` and ``signal`` are based on.
"""

import _signal as signal
import _socket as socket
import marshal
import os
import sys

MAX_DESCRIPTORS = 100
"""A program inherits the open files with a lower number; `multiprocessing` passes some to the processes it spawns."""

_PASSED_ON = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP")


def run(socket_path: str, words: list[str]) -> int:
    """Send a program to the server, and wait for it.

    Args:
        socket_path: socket of the server.
        words: arguments of ``python``: ``-m MODULE ...``, ``-c CODE ...`` or ``FILE ...``.

    Returns:
        The exit status. If a signal killed the program, that signal kills this process, too.
    """
    descriptors = [number for number in range(MAX_DESCRIPTORS) if number < 3 or _is_open(number)]
    given = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ), "parent": os.getppid()}
    ignored = [int(number) for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]
    request = marshal.dumps({**given, "descriptors": descriptors, "own_session": True, "ignored": ignored})
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(socket_path)
    streams = b"".join(number.to_bytes(4, sys.byteorder) for number in descriptors)
    connection.sendmsg([len(request).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    connection.sendall(request)
    for name in _PASSED_ON:
        signal.signal(getattr(signal, name), lambda number, _: connection.send(bytes([number])))
    sent = connection.recv(4)
    if not sent:
        raise ConnectionError("The warm Python is gone.")
    status = int.from_bytes(sent, "big", signed=True)
    connection.close()
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def main(python: str, socket_path: str, words: list[str]) -> int:
    """Run a program. Other uses of Python, and a program that names files after its process, get a normal one."""
    while words[:1] in (["-u"], ["-B"]):
        words = words[1:]
    is_option = not words or (words[0].startswith("-") and words[0] not in ("-m", "-c"))
    if is_option or words[:2] == ["-m", "submitit.local._local"]:
        os.execv(python, [python, *words])
    return run(socket_path, words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
