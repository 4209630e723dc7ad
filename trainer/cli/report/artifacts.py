"""Read the files in a run's folder that its page shows: diagnoses, figures and the log. Imports no torch."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from trainer.common import redaction
from trainer.record.run_record import RUN, RunRecord, changed

_PLACES = ("", "*/", "*/*/")
"""Folders below that of a run with files of it, such as ``test/DATE_TIME`` and ``lightning_logs/version_0``."""
_DIAGNOSES = "diagnosis_step_*.md"
_LOG_LINES = 400
_LOG_BYTES = 200_000
_PICTURES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg"}
_MAX_FIGURES = 12
_LARGEST = 2**21  # bytes of a file, because files are embedded in the page
_MOST_CLASSES = 24  # largest number of classes in a table; those with the most mistakes are shown


class Diagnosis(NamedTuple):
    """A diagnosis as `trainer.callbacks.OverflowReport` writes it.

    Args:
        step: the optimizer step.
        title: one line.
        verdict: the cause, and the remedies.
        rows: the measurements, as text.
    """

    step: int
    title: str
    verdict: str
    rows: str


def diagnoses_of(run: RunRecord) -> list[Diagnosis]:
    """Return the diagnoses of a run, sorted by step, without files that are not readable or not diagnoses."""
    diagnoses = []
    for file in (file for place in _PLACES for file in run.folder.glob(f"{place}{_DIAGNOSES}")):
        number = re.fullmatch(r"diagnosis_step_(\d+)\.md", file.name)
        with suppress(OSError):
            title, _, text = run.inside(file).read_text(encoding="utf-8", errors="replace").partition("\n")
            if number is not None and title.startswith("# "):
                verdict, _, rows = text.partition("\n| | |\n|---|---|\n")
                diagnoses.append(Diagnosis(int(number[1]), title[2:], verdict.strip(), rows.strip()))
    return sorted(diagnoses, key=lambda report: report.step)


def log_of(run: RunRecord) -> list[str]:
    """Return the last lines of the log of a run."""
    file = run.inside(run.folder / f"{run.command}.log")
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - _LOG_BYTES))
            text = stream.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [redaction.text(line) for line in text.splitlines()[-_LOG_LINES:]]


def warnings_in(log: Iterable[str]) -> list[str]:
    """Return the warnings and errors in a log, without the time in front."""
    marks = ("[WARNING] - ", "[ERROR] - ", "[CRITICAL] - ")
    texts = dict.fromkeys(line.partition(mark)[2] for line in log for mark in marks if mark in line)
    return [text for text in texts if text != "The run failed."]  # the page shows the error itself


class Picture(NamedTuple):
    """A picture.

    Args:
        name: name of the file, without its suffix.
        address: the picture as a ``data:`` URL.
    """

    name: str
    address: str


class Matrix(NamedTuple):
    """A confusion matrix.

    Args:
        name: name of the file, without its suffix.
        classes: names of the classes that are shown.
        rows: for each true class, counts by predicted class and their shares of the row, from 0 to 1.
        recalls: recall of each true class, from 0 to 1; None for a class without samples.
        total: sum of all counts.
        right: sum of the counts on the diagonal.
        of_all: number of all classes.
    """

    name: str
    classes: Sequence[str]
    rows: Sequence[Sequence[tuple[float, float]]]
    recalls: Sequence[float | None]
    total: float
    right: float
    of_all: int


def figures_of(run: RunRecord) -> tuple[list[Matrix], list[Picture], list[str]]:
    """Return the matrices and the pictures of a run, and messages about files that cannot be shown.

    If folders below the run have results of several tests, only those of the newest test are used.
    """
    drawn = {file for place in _PLACES for file in run.folder.glob(f"{place}figures/*")}
    tests = {file.parents[1] for file in drawn if file.parents[1] != run.folder and (file.parents[1] / RUN).is_file()}
    older = sorted(tests, key=lambda folder: changed(folder / RUN))[:-1]
    files = sorted(file for file in drawn if file.parents[1] not in older)
    matrices, pictures, notes = list[Matrix](), list[Picture](), list[str]()
    for file in files:
        inside, suffix = run.inside(file), file.suffix.lower()
        if suffix not in (*_PICTURES, ".json"):
            continue
        if len(matrices) + len(pictures) == _MAX_FIGURES:
            notes.append(f"The page shows the first {_MAX_FIGURES} figures. The others are in {file.parent}.")
            break
        try:
            if inside.stat().st_size > _LARGEST:
                raise ValueError(f"larger than {_LARGEST >> 20} MiB")
            content = inside.read_bytes()
            if suffix == ".json":
                matrices.append(_matrix(file.stem, json.loads(content)))
            else:
                address = f"data:image/{_PICTURES[suffix]};base64,{base64.b64encode(content).decode()}"
                pictures.append(Picture(file.stem, address))
        except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
            notes.append(f"{file.name} cannot be shown: {redaction.text(f'{type(error).__name__}: {error}')}.")
    return matrices, pictures, notes


def _matrix(name: str, content: Any) -> Matrix:
    if content["kind"] != "confusion matrix":
        raise ValueError(f"kind is {content['kind']!r}, expected 'confusion matrix'")
    counts = [[float(count) for count in row] for row in content["counts"]]
    size = len(counts)
    if {len(row) for row in counts} != {size}:
        raise ValueError("the counts are not a square matrix")
    classes = [redaction.text(str(name)) for name in content.get("classes") or range(size)]
    if len(classes) != size:
        raise ValueError(f"got {len(classes)} names for {size} classes")
    sums, right = [sum(row) for row in counts], [counts[i][i] for i in range(size)]
    wrong = [sums[i] + sum(row[i] for row in counts) - 2 * right[i] for i in range(size)]
    shown = sorted(sorted(range(size), key=lambda i: -wrong[i])[:_MOST_CLASSES])
    rows = [[(counts[i][j], counts[i][j] / sums[i] if sums[i] else 0.0) for j in shown] for i in shown]
    recalls = [right[i] / sums[i] if sums[i] else None for i in shown]
    return Matrix(name, [classes[i] for i in shown], rows, recalls, sum(sums), sum(right), size)
