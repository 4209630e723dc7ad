"""Run a page: all its blocks, in order, in one shell and one folder."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from tests.docs.commands import AGAIN, NAMES, ROOT
from tests.docs.output import missing_line
from tests.docs.pages import READ, Block
from tests.warm_python import WarmPython

_HERE = Path(__file__).parent


def run(blocks: Sequence[Block], folder: Path, tools: Path, python: WarmPython, timeout: float) -> str:
    """Run a page's blocks.

    Args:
        blocks: blocks of the page.
        folder: an empty folder.
        tools: a folder for the replaced commands.
        python: runs programs.
        timeout: seconds for all of them.

    Returns:
        The whole output.

    Raises:
        AssertionError: a block failed, or succeeded against expectation, or its output differs.
    """
    for block in blocks:
        if block.language in READ and block.is_checked:
            _parse(block)
    make_commands(tools)
    script = tools / "page.sh"
    script.write_text("\n".join(["set -eo pipefail", *_lines(blocks, tools)]) + "\n")
    environment = shell_environment(tools, python)
    if any("scripts/" in block.text for block in blocks):
        shutil.copytree(tools / "scripts", folder / "scripts")
    status, said = _bash(script, folder, environment, timeout)
    parts = re.split(r"^::block (\d+)::\n", said, flags=re.MULTILINE)
    outputs = {int(line): text for line, text in zip(parts[1::2], parts[2::2], strict=True)}
    last = list(outputs)[-1] if outputs else 0
    assert status == 0, f"The block in line {last} ended with status {status}:\n{said[-6000:]}"
    _check_outputs(blocks, outputs)
    return said


def shell_environment(tools: Path, python: WarmPython) -> dict[str, str]:
    """Return the environment of a page's commands. ``tools`` has the files of `make_commands`."""
    dropped = ("PYTEST", "COLUMNS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return environment | {
        "XDG_CONFIG_HOME": str(tools / "config"),
        "PATH": f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "WARM_PYTHON": str(python.socket),
        "WARM_PYTHON_AGAIN": str(tools / "bin" / AGAIN),
    }


def _bash(script: Path, folder: Path, environment: dict[str, str], timeout: float) -> tuple[int, str]:
    with subprocess.Popen(
        ["bash", str(script)], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as shell:  # fmt: skip
        try:
            said, _ = shell.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)
            said, _ = shell.communicate()
            raise AssertionError(f"Not ready after {timeout:.0f} s:\n{said[-6000:]}") from None
    return shell.returncode, said


def _lines(blocks: Sequence[Block], tools: Path) -> Iterator[str]:
    """Return the page as one script."""
    for block in blocks:
        if "not run" in block.markers or "output" in block.markers:
            continue
        written = tools / f"block_{block.line}{'.py' * (block.language == 'python')}"
        written.write_text(block.text, encoding="utf-8")
        source = shlex.quote(str(written))
        yield f"echo '::block {block.line}::'"
        limits = block.markers.get("limits")
        yield "unset DOCS_LIMITS" if limits is None else f"export DOCS_LIMITS={shlex.quote(limits)}"
        if file := block.markers.get("file"):
            yield f"mkdir -p {shlex.quote(str(Path(file).parent))} && cp {source} {shlex.quote(file)}"
        elif block.language in ("bash", "python"):
            lines = [block.text]
            if block.language == "python":
                lines = [f"cp {source} .", f"python {written.name}", f"rm {written.name}"]
            if "fails" in block.markers:
                lines = ["set +e", *lines, "DOCS_STATUS=$?", "set -e"]
                lines.append('[ "$DOCS_STATUS" -ne 0 ] || { echo "It was to fail, and did not."; exit 1; }')
            yield from lines


def make_commands(tools: Path) -> None:
    """Write the replacements of ``python`` and other commands into ``tools / "bin"``, and of the scripts."""
    for folder in ("bin", "scripts"):
        (tools / folder).mkdir(parents=True)
    scripts = [path.name for path in (ROOT / "scripts").iterdir() if path.is_file() and "." not in path.name]
    for name in (*NAMES, AGAIN, *(f"scripts/{script}" for script in scripts)):
        path = tools / name if name.startswith("scripts/") else tools / "bin" / name
        words = shlex.join([sys.executable, "-I", str(_HERE / "commands.py"), name])
        path.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        path.chmod(0o755)


def _parse(block: Block) -> None:
    parse = {"yaml": yaml.safe_load, "toml": tomllib.loads, "json": json.loads}[block.language]
    try:
        parse(block.text)
    except Exception as error:
        raise AssertionError(f"The block in line {block.line} is no {block.language}: {error}") from error


def _check_outputs(blocks: Sequence[Block], outputs: dict[int, str]) -> None:
    said = ""
    for block in blocks:
        if "output" in block.markers:
            line = missing_line(block.text, said)
            assert line is None, f"The output in line {block.line} has {line!r}, which was not printed:\n{said[-4000:]}"
        elif block.line in outputs and block.language in ("bash", "python") and "file" not in block.markers:
            said = outputs[block.line]
