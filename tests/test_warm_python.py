"""The Python that runs the tests' programs."""

from __future__ import annotations

from pathlib import Path

from tests.warm_python import WarmPython

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
