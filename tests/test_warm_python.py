"""The Python that runs the tests' programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.warm_python import ROOT, WarmPython

AT_ONCE = """
import os, signal, socket, sys
from tests.warm_python import Server

server = Server(sys.argv[1])
asker, connection = socket.socketpair()
program = os.fork()
if program == 0:
    os._exit(3)
server.asked[program] = connection
server.selector.register(connection, 1)
os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT)
asker.close()
key = server.selector.get_key
both = [(key(server.wake_up), 1), (key(connection), 1)]
server.selector.select = lambda: [both.pop(0) for _ in both[:]] or [(key(sys.stdin), 1)]
server.loop()
print(server.asked)
"""


def test_program_and_client_may_end_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", AT_ONCE, str(tmp_path / "socket")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, input="", timeout=60)
    assert done.stdout == "ready\n{}\n", done.stderr


FAMILY = """
import os, subprocess, sys, time
from pathlib import Path

def wait_while(condition):
    deadline = time.monotonic() + 60
    while condition() and time.monotonic() < deadline:
        time.sleep(0.01)

if sys.argv[1:]:
    mother = int(sys.argv[1])
    print(os.getppid() == mother)
    Path("seen").touch()
    wait_while(lambda: os.getppid() == mother)
    print(os.getppid() != mother)
else:
    subprocess.Popen([sys.executable, "family.py", str(os.getpid())])
    wait_while(lambda: not Path("seen").exists())
"""


def test_parent_process_is_the_client_until_it_ends(tmp_path: Path, python: WarmPython) -> None:
    (tmp_path / "family.py").write_text(FAMILY)
    assert python.run("family.py", cwd=tmp_path).stdout == "True\nTrue\n"


def test_loaded_modules_are_in_later_programs(python: WarmPython) -> None:
    python.load("not_installed", "tabnanny")
    assert python.run("-c", "import sys; print('tabnanny' in sys.modules)").stdout == "True\n"
