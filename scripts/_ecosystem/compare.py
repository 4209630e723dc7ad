"""Compare the records of a case: ``python -m _ecosystem.compare FOLDER ... -- [VARIES ...]``."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

COLUMNS = ("weights", "metrics", "hooks", "checkpoint", "reload", "resume", "results")


@dataclass
class Known:
    """A difference that docs/migrating-from-lightning.md names.

    Attributes:
        column: regular expression for the column.
        where: regular expression for the place in the record.
        section: the guide's section.
        quote: the guide's sentence, word for word.
        kind: ``"more"`` if only our record has it, ``"less"`` if only Lightning's does, ``"plain"`` if a NumPy scalar
            is a Python number in ours, ``"plateau"`` if values in the state of a plateau schedule differ, ``"digits"``
            if ours is a number with more digits than in float32, ``"other"`` if other values differ.
    """

    column: str
    where: str
    section: str
    quote: str
    kind: str = "more"


AFTER_HOOK = "each file has the states of all of them after the hook"
GO_ON = "metrics, and the number of logged evaluation batches, after a resume"
KNOWN = [
    Known(
        "checkpoint", r"/loops/amp_trainer$", "Checkpoints", "The same keys, and one more inside `loops`, `amp_trainer`"
    ),
    Known(".*", r"/grad_norm(_step|_epoch)?(/|$)", "Arguments", "the norm before clipping is logged as `grad_norm`"),
    Known(
        "checkpoint|reload",
        r"hyper[_-]parameters/|\.ckpt/",
        "Different on purpose",
        "numbers of numpy become plain ones",
        "plain",
    ),
    Known("resume", r"^metrics: [^/]*: (callback_metrics|seen/\d+/2)/", "Different on purpose", GO_ON),
    Known(
        "resume|checkpoint",
        r"scheduler?s/\d+/(last_epoch|best|num_bad_epochs)$",
        "Different on purpose",
        "Lightning resumes from the end of an epoch without the step of a plateau schedule",
        "plateau",
    ),
    Known("resume", r"^metrics: [^/]*: rows/\d+/1/without epoch$", "Different on purpose", GO_ON, "other"),
    Known(
        "metrics|resume|results|checkpoint|reload",
        r"",
        "Different on purpose",
        "are float64 (integer tensors on MPS: float32) in `callback_metrics`, loggers and progress bars",
        "digits",
    ),
    Known(
        "checkpoint|resume",
        r"/callbacks/ModelCheckpoint.*/(last_model_path|best_|kth_|current_score)",
        "Different on purpose",
        AFTER_HOOK,
        "other",
    ),
    *(
        Known("checkpoint", r"last-v1\.ckpt$|/last\.ckpt/callbacks/ModelCheckpoint.*/best_k_models/", *place)
        for place in (("Different on purpose", AFTER_HOOK, "less"), ("Different on purpose", AFTER_HOOK, "more"))
    ),
]


@dataclass
class Difference:
    """One place at which two records differ."""

    column: str
    where: str
    theirs: str
    ours: str
    kind: str
    known: str = ""


def differences(theirs: dict[str, Any], ours: dict[str, Any], varies: tuple[str, ...] = ()) -> list[Difference]:
    """Return all differences in the order of the columns, except at places that match one of ``varies``."""
    found: list[Difference] = []
    for column in COLUMNS:
        before = len(found)
        one, other = theirs.get(column, {}), ours.get(column, {})
        walk(column, "", one, without_known_metrics(column, one, other, found), found)
        for difference in found[before:]:
            known = next((known for known in KNOWN if fits(known, difference)), None)
            difference.known = f"{known.section}: {known.quote}" if known else ""
    return [one for one in found if not any(re.search(place, one.where) for place in varies)]


def without_known_metrics(column: str, theirs: Any, ours: Any, found: list[Difference]) -> Any:
    """Remove from our records the metrics that only we log, as the guide documents."""
    ours = dict(ours)
    for name, rows in ours.items():
        if not name.endswith("rows"):
            continue
        logged = {key for _, _, metrics in theirs.get(name, []) for key in metrics}
        more = {key for _, _, metrics in rows for key in metrics} - logged
        more = {
            key for key in more if any(fits(known, Difference(column, f"/{key}", "", "", "more")) for known in KNOWN)
        }
        found += [Difference(column, f"{name}/{key}", "nothing", "logged", "more") for key in sorted(more)]
        kept = [[who, step, {k: v for k, v in metrics.items() if k not in more}] for who, step, metrics in rows]
        ours[name] = [
            row
            for row, (_, _, all_of_it) in zip(kept, rows, strict=True)
            if row[2].keys() - {"epoch"} or row[2] == all_of_it
        ]
    return ours


def fits(known: Known, one: Difference) -> bool:
    return (
        known.kind == one.kind
        and re.fullmatch(known.column, one.column) is not None
        and re.search(known.where, one.where) is not None
    )


def walk(column: str, where: str, theirs: Any, ours: Any, found: list[Difference]) -> None:
    """Add each place at which ``theirs`` and ``ours`` differ to ``found``."""

    def add(one: str, other: str, kind: str = "other") -> None:
        found.append(Difference(column, where, one, other, kind))

    if isinstance(theirs, dict) and isinstance(ours, dict):
        before = len(found)
        for key in [*theirs, *(key for key in ours if key not in theirs)]:
            place = f"{where}/{key}" if where else key
            if key not in ours:
                found.append(Difference(column, place, show(theirs[key]), "nothing", "less"))
            elif key not in theirs:
                found.append(Difference(column, place, "nothing", show(ours[key]), "more"))
            else:
                walk(column, place, theirs[key], ours[key], found)
        if {"best", "num_bad_epochs"} <= theirs.keys():
            for one in found[before:]:
                one.kind = "plateau" if one.kind == "other" else one.kind
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for index, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            walk(column, f"{where}/{index}", one, other, found)
    elif isinstance(theirs, Tensor) and isinstance(ours, Tensor):
        if (theirs.dtype, ours.dtype) == (torch.float32, torch.float64) and are_close(theirs, ours):
            add(show(theirs), show(ours), "digits")
        elif theirs.dtype != ours.dtype or theirs.shape != ours.shape:
            add(show(theirs), show(ours))
        elif not same_bits(theirs, ours):
            distance = largest_difference(theirs, ours)
            add(show(theirs), f"{distance} apart" if theirs.numel() > 1 else show(ours))
    elif isinstance(theirs, dict) and theirs.keys() == {"class", "value"} and same_value(theirs["value"], ours):
        add(show(theirs), show(ours), "plain" if str(theirs["class"]).startswith("numpy.") else "other")
    elif isinstance(theirs, float) and isinstance(ours, float) and theirs != ours and are_close(theirs, ours):
        add(show(theirs), show(ours), "digits")
    elif type(theirs) is not type(ours) or not same_value(theirs, ours):
        add(show(theirs), show(ours))


def are_close(one: Any, other: Any) -> bool:
    """Return whether numbers differ by no more than rounding in float32."""
    return torch.allclose(torch.as_tensor(one).double(), torch.as_tensor(other).double(), rtol=1e-6, atol=0)


def same_bits(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    return one.dtype.is_floating_point and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def same_value(one: Any, other: Any) -> bool:
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


def largest_difference(one: Tensor, other: Tensor) -> str:
    if one.is_complex() or one.dtype is torch.bool:
        return f"{int((one != other).sum())} elements"
    apart = (one.double() - other.double()).abs()
    return f"{apart[~(one.isnan() & other.isnan())].max().item():.3g}"


def show(value: Any) -> str:
    """Format ``value`` in a few words."""
    if isinstance(value, Tensor):
        return repr(value.item()) if value.numel() == 1 else f"{value.dtype} of {tuple(value.shape)}"
    if isinstance(value, dict) and "class" in value:
        return str(value["class"])
    if isinstance(value, (dict, list)):
        return f"{type(value).__name__} of {len(value)}" if len(repr(value)) > 80 else repr(value)
    return repr(value) if len(repr(value)) < 200 else repr(value)[:200] + "..."


def main(folders: list[Path], varies: tuple[str, ...]) -> None:
    """Write ``comparison.json`` into each folder: the differences, and the columns with records."""
    for folder in folders:
        theirs, ours = (torch.load(folder / who / "record.pt", weights_only=False) for who in ("lightning", "ours"))
        report = {
            "columns": [column for column in COLUMNS if column in theirs or column in ours],
            "differences": [asdict(difference) for difference in differences(theirs, ours, varies)],
        }
        (folder / "comparison.json").write_text(json.dumps(report))


if __name__ == "__main__":
    split = sys.argv.index("--")
    main([Path(one) for one in sys.argv[1:split]], tuple(sys.argv[split + 1 :]))
