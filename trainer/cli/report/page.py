"""The page: what is said of a run or a sweep, in which order, and the template that says it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainer import redaction
from trainer.cli.help import versions
from trainer.cli.objective import best
from trainer.cli.report.charts import Section, overlay, sections_of
from trainer.cli.report.drawing import PALETTE, Drawn, draw, told
from trainer.cli.report.folders import jobs_of
from trainer.cli.report.record import Run
from trainer.cli.sweep import worth_showing

_TEMPLATE = Path(__file__).parent / "template"
_SAYS = {
    "completed": "Completed",
    "running": "Running",
    "interrupted": "Interrupted",
    "failed": "Failed",
    "killed": "Killed",
    "pruned": "Pruned",
    "unfinished": "Not finished",
}
_LONG = re.compile(r"(?<![\w.])\d+\.\d{5,}(?:e[+-]?\d+)?(?![\w.])")  # numbers that a sweeper has drawn
_METRICS = 3
_SWEEP_METRICS = 4


@dataclass(frozen=True)
class Tile:
    """A number that one looks for first."""

    label: str
    value: str
    note: str = ""
    strong: bool = False


@dataclass(frozen=True)
class Job:
    """A run among those of a sweep."""

    anchor: str
    label: str
    number: str
    run: Run
    color: int | None
    is_best: bool
    cells: Sequence[str]
    tiles: Sequence[Tile]
    verdict: Mapping[str, Any] = field(default_factory=dict)


def page(folder: Path, out: Path, is_sweep: bool) -> str:
    """The HTML of the report on a run, or on a sweep.

    Args:
        folder: of it.
        out: where the page is going to be: links to files lead from there.
        is_sweep: whether it is one.
    """
    return _sweep(folder, out) if is_sweep else _run(folder, out)


def _run(folder: Path, out: Path) -> str:
    run = Run(folder)
    return _render(
        "run.html.jinja",
        out,
        run=run,
        title=run.name,
        tiles=_tiles(run),
        facts=_facts(run),
        sections=_drawn(sections_of(run), run.step or 0),
        settings=_settings(run.config, run.overrides),
        environment=_environment(run),
        files=[(str(file.relative_to(folder)), _size(size), _link(file, out)) for file, size in run.files],
        note=_note(run),
    )


def _sweep(folder: Path, out: Path) -> str:
    runs = sorted(map(Run, jobs_of(folder)), key=_order)
    comparison = _comparison(folder)
    jobs, header = _jobs(runs, comparison)
    colors = [job.color for job in jobs]
    winner = next((job for job in jobs if job.is_best), None)
    sections = overlay([(job.label, job.run) for job in jobs], colors, winner.run if winner else None)
    counts = {status: sum(job.run.record.status == status for job in jobs) for status in _SAYS}
    names = list(dict.fromkeys(run.name for run in runs))
    return _render(
        "sweep.html.jinja",
        out,
        folder=folder,
        title=", ".join(names[:3]) or folder.resolve().name,
        kind="Comparison" if comparison else "Sweep",
        jobs=jobs,
        header=header,
        counts=[(_SAYS[status], count, status) for status, count in counts.items() if count],
        tiles=_sweep_tiles(jobs, winner),
        common=_common(runs),
        conditions=[str(line) for line in comparison.get("conditions", [])],
        sections=_drawn(sections, max((run.step or 0 for run in runs), default=0)),
        environment=_environment(runs[0]) if runs else [],
        colored=sum(color is not None for color in colors),
    )


def _render(template: str, out: Path, **context: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "told": told,
        "when": _when,
        "ago": _ago,
        "data": _data,
        "size": _size,
        "duration": _duration,
    }
    script = (_TEMPLATE / "page.js").read_text(encoding="utf-8").strip()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        style=Markup((_TEMPLATE / "page.css").read_text(encoding="utf-8").strip()),
        script=Markup(script),
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}';"
        " base-uri 'none'; form-action 'none'",
        says=_SAYS,
        now=time.time(),
        versions=versions().splitlines()[0],
        link=lambda file: _link(Path(file), out),
        markup=Markup,
        **context,
    )


def _tiles(run: Run) -> list[Tile]:
    tiles = [*_metric_tiles(run)]
    total = run.config.get("trainer", {}).get("max_epochs") if isinstance(run.config.get("trainer"), dict) else None
    record = run.record
    if run.step is not None:
        wanted = f" of {total}" if isinstance(total, int) and total > 0 else ""
        of_all = f"of {total} epochs in all" if wanted else ""
        note = f"{record.epochs}{wanted} epochs" if record.epochs is not None else of_all
        tiles.append(Tile("Optimizer steps", f"{run.step:,}", note))
    skipped = record.skipped_steps
    if skipped is not None and (record.scale is not None or skipped):
        share = f"{skipped / run.step:.1%} of all" if run.step and skipped else ""
        tiles.append(Tile("Skipped steps", f"{skipped:,}", share))
    if record.scale is not None:
        tiles.append(Tile("Loss scale", told(record.scale), "at the end"))
    if run.duration is not None:
        train = record.train_seconds
        tiles.append(Tile("Time", _duration(run.duration), f"{_duration(train)} of training" if train else ""))
    if record.samples_per_second is not None:
        mfu = record.throughput.get("mfu")
        note = "samples per second" if mfu is None else f"samples per second, MFU {mfu:.1%}"
        tiles.append(Tile("Throughput", told(float(f"{record.samples_per_second:.4g}")), note))
    if record.peak_memory is not None:
        what = "on the GPU" if record.memory_is_the_gpus else "of the process"
        tiles.append(Tile("Peak memory", _size(record.peak_memory), what))
    return tiles


def _metric_tiles(run: Run) -> list[Tile]:
    """The objective with its best value, and the metrics of validation and test."""
    tiles = []
    objective = run.record.objective
    chosen = objective if objective and objective[0] in run.metrics else None
    if chosen:
        name, mode = chosen
        curve = run.record.rows.get(name) or run.record.metric_curve(name)
        points = [(v, s) for s, v in zip(curve.steps, curve.values, strict=True) if math.isfinite(v)] if curve else []
        if points:
            better = max if mode == "max" else min
            value = better(v for v, _ in points)
            step = next(s for v, s in points if v == value)
            last = f", last {told(run.metrics[name])}" if told(run.metrics[name]) != told(value) else ""
            tiles.append(Tile(f"Best {name}", told(value), f"at step {step:,.0f}{last}", strong=True))
        else:
            tiles.append(Tile(name, told(run.metrics[name]), "", strong=True))
    for name in worth_showing(run.metrics)[:_METRICS]:
        if (not chosen or name != chosen[0]) and len(tiles) < _METRICS:
            tiles.append(Tile(name, told(run.metrics[name]), "last", strong=not tiles))
    return tiles


def _facts(run: Run) -> list[tuple[str, str]]:
    facts = [
        ("Precision", run.precision),
        ("Devices", run.record.devices or ""),
        ("Seed", run.record.seed or ""),
        ("Started", _when(run.record.started) if run.record.started else ""),
    ]
    return [(label, value) for label, value in facts if value and value != "None"]


def _note(run: Run) -> str:
    """What there is to say of a run that has not said how it ended."""
    at = f"step {run.step:,}" if run.step is not None else "no step yet"
    seen = f"{at}, written {_ago(time.time() - run.changed)} ago"
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
            for key, value in _flat(settings)
        ]
        found.append((group, rows))
    return [(group, rows) for group, rows in found if rows]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _value(value)


def _value(value: Any) -> str:
    if value is None:
        return "null"
    return value if isinstance(value, str) else json.dumps(value)


def _environment(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
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
            ("memory", _size(memory) if memory else ""),
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


def _jobs(runs: Sequence[Run], comparison: Mapping[str, Any]) -> tuple[list[Job], list[str]]:
    shared = set(_common(runs)) if len(runs) > 1 else set()
    labels = [_label(run, shared) for run in runs]
    short = [_LONG.sub(lambda found: f"{float(found[0]):.4g}", label) for label in labels]
    labels = short if len(set(short)) == len(set(labels)) else labels
    winner = _best(runs)
    colors = _colors(runs, winner)
    objectives = [run.record.objective[0] for run in runs if run.record.objective]
    metrics = worth_showing({name for run in runs for name in run.metrics}, objectives)[:_SWEEP_METRICS]
    verdicts = {
        Path(str(told_of.get("run_dir", ""))).name: told_of
        for told_of in comparison.get("runs", [])
        if isinstance(told_of, dict)
    }
    jobs = []
    for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
        record, verdict = run.record, verdicts.get(run.folder.name, {}).get("verdict")
        cells = [
            *(told(run.metrics.get(name)) for name in metrics),
            "-" if run.duration is None else _duration(run.duration),
            "-" if record.samples_per_second is None else told(float(f"{record.samples_per_second:.4g}")),
            "-" if record.peak_memory is None else _size(record.peak_memory),
            "-" if record.skipped_steps is None else f"{record.skipped_steps:,}",
        ]
        number = str(run.folder.name if record.job is None else record.job)
        jobs.append(
            Job(
                f"job-{index}", label, number, run, colors[index], run is winner, cells, _tiles(run),
                verdict if isinstance(verdict, dict) else {},
            )
        )  # fmt: skip
    return jobs, [*metrics, "Time", "Samples/s", "Memory", "Skipped"]


def _label(run: Run, shared: set[str]) -> str:
    own = [word.removeprefix("precision=") for word in run.overrides if word not in shared]
    return " ".join(own) or run.precision or run.folder.name


def _common(runs: Sequence[Run]) -> list[str]:
    """The overrides that all of them have."""
    if not runs:
        return []
    return [word for word in runs[0].overrides if all(word in run.overrides for run in runs)]


def _best(runs: Sequence[Run]) -> Run | None:
    """The best of them, as a sweep's own table says it."""
    found = best([run.record for run in runs]) if len(runs) > 1 else None
    return next((run for run in runs if run.record is found), None)


def _colors(runs: Sequence[Run], winner: Run | None) -> list[int | None]:
    """A colour for each run, or for the best of them where there are too many to tell apart."""
    order = list(range(len(runs)))
    if len(runs) > PALETTE and winner is not None and (goal := winner.record.objective) is not None:
        sign = -1.0 if goal[1] == "max" else 1.0
        values = [run.record.objective_value for run in runs]
        order.sort(key=lambda i: sign * v if (v := values[i]) is not None and math.isfinite(v) else math.inf)
    chosen = sorted(order[:PALETTE])
    return [chosen.index(index) if index in chosen else None for index in range(len(runs))]


def _sweep_tiles(jobs: Sequence[Job], winner: Job | None) -> list[Tile]:
    tiles = []
    if winner is not None and winner.run.record.objective is not None:
        (metric, mode), value = winner.run.record.objective, told(winner.run.record.objective_value)
        way = "Lowest" if mode == "min" else "Highest"  # of the last values: a job may have been better before
        tiles.append(Tile(f"{way} {metric} at the end", value, winner.label, strong=True))
    ended = sum(job.run.record.status in ("completed", "pruned") for job in jobs)
    tiles.append(Tile("Jobs", f"{len(jobs)}", f"{ended} ended well"))
    times = [job.run.duration for job in jobs if job.run.duration is not None]
    if times:
        tiles.append(Tile("Time", _duration(sum(times)), "of all jobs together"))
    skipped = [job.run.record.skipped_steps or 0 for job in jobs]
    if any(skipped):
        tiles.append(Tile("Skipped steps", f"{sum(skipped):,}", "in all jobs"))
    return tiles


def _comparison(folder: Path) -> dict[str, Any]:
    """``compare.json``; {} where there is none."""
    try:
        found = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return dict(redaction.containers(found)) if isinstance(found, dict) else {}


def _order(run: Run) -> tuple[float, str]:
    return (math.inf, str(run.folder)) if run.record.job is None else (run.record.job, "")


def _drawn(sections: Sequence[Section], last_step: float) -> list[tuple[str, list[Drawn], Sequence[str]]]:
    return [
        (section.title, [draw(chart, last_step) for chart in section.charts], section.notes) for section in sections
    ]


def _data(drawn: Drawn) -> str:
    """For a script element, which a ``<`` in a text could end."""
    written = json.dumps(drawn.data, separators=(",", ":"), allow_nan=False)
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _link(file: Path, out: Path) -> str:
    """From the page to a file, as an address relative to the page."""
    try:
        relative = os.path.relpath(file.resolve(), out.resolve().parent)
    except ValueError:  # on another drive of Windows
        return file.resolve().as_uri()
    return "./" + quote(Path(relative).as_posix())


def _when(moment: float) -> str:
    return datetime.fromtimestamp(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z").strip()


def _ago(seconds: float) -> str:
    return _duration(max(0.0, seconds))


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit in ("B", "KiB") or size >= 100 else f"{size:.1f} {unit}"
