"""The page of a run: what is said of it, in which order, and the template that says it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainer.cli.help import versions
from trainer.cli.keys import flatten
from trainer.cli.report.charts import Section, sections_of
from trainer.cli.report.drawing import Drawn, draw, told
from trainer.cli.report.record import Run
from trainer.cli.sweep import worth_showing
from trainer.machine import readable

_TEMPLATE = Path(__file__).parent / "template"
SAYS = {
    "completed": "Completed",
    "running": "Running",
    "interrupted": "Interrupted",
    "failed": "Failed",
    "killed": "Killed",
    "pruned": "Pruned",
    "unfinished": "Not finished",
}
_METRICS = 3


@dataclass(frozen=True)
class Tile:
    """A number that one looks for first."""

    label: str
    value: str
    note: str = ""
    strong: bool = False


def run_page(folder: Path, out: Path) -> str:
    """The HTML of the report on a run.

    Args:
        folder: of it.
        out: where the page is going to be: links to files lead from there.
    """
    run = Run(folder)
    return render(
        "run.html.jinja",
        out,
        run=run,
        title=run.name,
        tiles=tiles_of(run),
        facts=_facts(run),
        sections=drawn(sections_of(run), run.step or 0),
        settings=_settings(run.config, run.overrides),
        environment=environment_of(run),
        files=[(str(file.relative_to(folder)), readable(size), _link(file, out)) for file, size in run.files],
        note=note_of(run),
    )


def render(template: str, out: Path, **context: Any) -> str:
    """A template with what it is to say; style, script and policy of the page go along."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"told": told, "when": _when}
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    script = (_TEMPLATE / "page.js").read_text(encoding="utf-8").strip()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        style=(_TEMPLATE / "page.css").read_text(encoding="utf-8").strip(),
        script=script,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}';"
        " base-uri 'none'; form-action 'none'",
        says=SAYS,
        now=time.time(),
        versions=versions().splitlines()[0],
        link=lambda file: _link(Path(file), out),
        **context,
    )


def tiles_of(run: Run) -> list[Tile]:
    """The numbers above a run's curves."""
    tiles = [*_metric_tiles(run)]
    total = run.config.get("trainer", {}).get("max_epochs") if isinstance(run.config.get("trainer"), dict) else None
    record = run.record
    is_fit = run.command == "fit"
    if run.step is not None and is_fit:
        wanted = f" of {total}" if isinstance(total, int) and total > 0 else ""
        of_all = f"of {total} epochs in all" if wanted else ""
        note = f"{record.epochs}{wanted} epochs" if record.epochs is not None else of_all
        tiles.append(Tile("Optimizer steps", f"{run.step:,}", note))
    skipped = record.skipped_steps
    if skipped is not None and is_fit and (record.scale is not None or skipped):
        share = f"{skipped / run.step:.1%} of all" if run.step and skipped else ""
        tiles.append(Tile("Skipped steps", f"{skipped:,}", share))
    if record.scale is not None and is_fit:
        tiles.append(Tile("Loss scale", told(record.scale), "at the end"))
    if run.duration is not None:
        train = record.train_seconds
        tiles.append(Tile("Time", duration(run.duration), f"{duration(train)} of training" if train else ""))
    if record.samples_per_second is not None:
        mfu = record.throughput.get("mfu")
        note = "samples per second" if mfu is None else f"samples per second, MFU {mfu:.1%}"
        tiles.append(Tile("Throughput", told(float(f"{record.samples_per_second:.4g}")), note))
    if record.peak_memory is not None:
        what = "on the GPU" if record.memory_is_the_gpus else "of the process"
        tiles.append(Tile("Peak memory", readable(record.peak_memory), what))
    return tiles


def _metric_tiles(run: Run) -> list[Tile]:
    """The objective with its best value, and the metrics of validation and test."""
    tiles = []
    objective = run.record.objective
    chosen = objective if objective and objective[0] in run.metrics else None
    if chosen:
        name, last = chosen[0], told(run.metrics[chosen[0]])
        value, step = best_point(run, *chosen)
        if step is None:
            tiles.append(Tile(name, last, "", strong=True))
        else:
            note = f"at step {step:,.0f}" + (f", last {last}" if last != told(value) else "")
            tiles.append(Tile(f"Best {name}", told(value), note, strong=True))
    for name in worth_showing(run.metrics)[:_METRICS]:
        if (not chosen or name != chosen[0]) and len(tiles) < _METRICS:
            tiles.append(Tile(name, told(run.metrics[name]), "last", strong=not tiles))
    return tiles


def best_point(run: Run, name: str, mode: str) -> tuple[float | None, float | None]:
    """The best value of a metric and its step; of one without a curve the last value, and None. None without any.

    Args:
        run: whose.
        name: of the metric.
        mode: ``"min"`` or ``"max"``.
    """
    curve = run.record.rows.get(name) or run.record.metric_curve(name)
    points = [(v, s) for s, v in zip(curve.steps, curve.values, strict=True) if math.isfinite(v)]
    if not points:
        last = run.metrics.get(name)
        return (last if last is not None and math.isfinite(last) else None), None
    best = (max if mode == "max" else min)(value for value, _ in points)
    return best, next(step for value, step in points if value == best)


def _facts(run: Run) -> list[tuple[str, str]]:
    facts = [
        ("Precision", run.precision),
        ("Devices", run.record.devices or ""),
        ("Seed", run.record.seed or ""),
        ("Started", _when(run.record.started) if run.record.started else ""),
    ]
    return [(label, value) for label, value in facts if value and value != "None"]


def note_of(run: Run) -> str:
    """What there is to say of a run that has not said how it ended."""
    at = f"step {run.step:,}" if run.step is not None else "no step yet"
    seen = f"{at}, written {duration(max(0.0, time.time() - run.changed))} ago"
    match run.record.status:
        case "running":
            return f"The run goes on: {seen}. Make the page again, and reload it, for what has come since."
        case "killed":
            return f"The process is gone and has not said why: killed, or the machine went down. Last seen: {seen}."
        case "unfinished":
            return f"The run has not said that it ended, and its process cannot be seen from here. Last seen: {seen}."
    return ""


def _settings(config: Mapping[str, Any], overrides: Sequence[str]) -> list[tuple[str, list[tuple[str, str, bool]]]]:
    """Groups of settings: key, value, and whether the command line set it."""
    said = {word.lstrip("+~").partition("=")[0] for word in overrides}
    plain = [(str(key), value) for key, value in config.items() if not isinstance(value, dict)]
    groups = [("run", dict(plain)), *((str(k), v) for k, v in config.items() if isinstance(v, dict) and v)]
    found = []
    for group, settings in groups:
        prefix = "" if group == "run" else f"{group}."
        rows = [
            (key, value, f"{prefix}{key}" in said or (key == "_target_" and group in said))
            for key, value in flat(settings)
        ]
        found.append((group, rows))
    return [(group, rows) for group, rows in found if rows]


def flat(settings: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Keys with dots in them, and what they are set to, as text."""
    for name, value in flatten(dict(settings)):
        if not (isinstance(value, dict) and value):
            yield name, value if isinstance(value, str) else json.dumps(value)


def environment_of(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """Groups of labels and values."""
    found = run.record.environment
    if not found:
        return []
    git, cores, memory = found.get("git") or {}, found.get("cores"), found.get("memory")
    commit = str(git.get("commit", ""))[:12]
    groups = {
        "Run": [
            ("command", " ".join(run.command_line)),
            ("directory", found.get("directory")),
            ("commit", " ".join(filter(None, (commit, "with changes" if git.get("modified") else "")))),
            ("branch", git.get("branch")),
            *(found.get("variables") or {}).items(),
        ],
        "Machine": [
            ("host", found.get("host")),
            ("devices", run.record.devices),
            ("CPU", found.get("cpu")),
            ("cores", cores),
            ("memory", readable(memory) if memory else ""),
            ("system", found.get("platform")),
        ],
        "Versions": [
            ("Python", found.get("python")),
            *(found.get("versions") or {}).items(),
            ("CUDA", found.get("cuda")),
        ],
    }
    told_of = {group: [(str(label), str(value)) for label, value in rows if value] for group, rows in groups.items()}
    return [(group, rows) for group, rows in told_of.items() if rows]


def drawn(sections: Sequence[Section], last_step: float) -> list[tuple[str, list[Drawn], Sequence[str]]]:
    """The sections with their charts as pictures."""
    return [
        (section.title, [draw(chart, last_step) for chart in section.charts], section.notes) for section in sections
    ]


def _link(file: Path, out: Path) -> str:
    """From the page to a file, as an address relative to the page."""
    try:
        relative = os.path.relpath(file.resolve(), out.resolve().parent)
    except ValueError:  # on another drive of Windows
        return file.resolve().as_uri()
    return "./" + quote(Path(relative).as_posix())


def _when(moment: float) -> str:
    return datetime.fromtimestamp(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z").strip()


def duration(seconds: float) -> str:
    """A time as text."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
