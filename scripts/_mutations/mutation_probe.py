"""Record in a file which test reaches which fault, in any process. The probes in a copy of the source call `reach`."""

from __future__ import annotations

import os

_seen: set[tuple[str, int]] = set()


def context() -> str:
    """Return the fixture that is being set up, or the running test, also in processes that they start."""
    return os.environ.get("MUTATION_FIXTURE") or os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]


def reach(number: int) -> None:
    """Record immediately that the fault with this number is reached, because the process may be killed."""
    pair = (context(), number)
    if pair not in _seen and "MUTATION_RECORD" in os.environ:
        _seen.add(pair)
        write("reached", *pair)


def write(*words: object) -> None:
    """Append a line to the record."""
    line = "\t".join(map(str, words)) + "\n"
    file = os.open(os.environ["MUTATION_RECORD"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)
