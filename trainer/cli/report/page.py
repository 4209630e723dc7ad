"""Build the page of a run: collect its content and fill the template."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from trainer.cli.help import versions
from trainer.cli.report.artifacts import diagnoses_of, figures_of, log_of, warnings_in
from trainer.cli.report.svg_charts import DrawnChart, draw
from trainer.cli.schema import walk
from trainer.common import redaction
from trainer.common.machine import readable
from trainer.common.terminal import format_number, format_seconds, four_digits
from trainer.record.charts import Section, sections_of
from trainer.record.run_record import RunRecord, load_run
from trainer.record.sweep_record import worth_showing

_TEMPLATE = Path(__file__).parent / "template"
_METRICS = 3


class Tile(NamedTuple):
    """An important number, shown at the top of the page."""

    label: str
    value: str
    note: str = ""
    strong: bool = False


def run_page(folder: Path) -> str:
    """Return the HTML of the report on the run in a folder."""
    run = load_run(folder)
    log = log_of(run)
    started = _format_time(run.started) if run.started else None
    facts = [("Precision", run.precision), ("Devices", run.devices), ("Seed", run.seed), ("Started", started)]
    return render(
        "run.html.jinja",
        run=run,
        title=run.name,
        tiles=tiles_of(run, run.objective),
        facts=[fact for fact in facts if fact[1]],
        sections=draw_sections(sections_of(run), run.step or 0),
        settings=_settings(run),
        environment=environment_of(run),
        figures=figures_of(run),
        diagnoses=diagnoses_of(run),
        log=log,
        warnings=warnings_in(log),
        note=note_of(run),
    )


def render(template: str, **context: Any) -> str:
    """Render a template, with the style, the script and the content security policy of the page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    options: dict[str, Any] = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=FileSystemLoader(_TEMPLATE), undefined=StrictUndefined, **options)
    environment.filters |= {"number": format_number, "when": _format_time}
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    script = (_TEMPLATE / "page.js").read_text(encoding="utf-8").strip()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        style=(_TEMPLATE / "page.css").read_text(encoding="utf-8").strip(),
        script=script,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}';"
        " base-uri 'none'; form-action 'none'",
        now=time.time(),
        versions=versions().splitlines()[0],
        **context,
    )


def tiles_of(run: RunRecord, goal: tuple[str, str] | None) -> list[Tile]:
    """Return the tiles above the curves of a run: its metrics, counters, time and memory.

    Args:
        run: the run.
        goal: metric and mode (``"min"`` or ``"max"``) of the first tile.
    """
    trainer = run.config.get("trainer")
    total = trainer.get("max_epochs") if isinstance(trainer, dict) else None
    tiles = _metric_tiles(run, goal)
    if run.step is not None and run.command == "fit":
        of_total = f" of {total}" if isinstance(total, int) and total > 0 else ""
        epochs = "" if run.epochs is None else f"{run.epochs}{of_total} epochs"
        tiles.append(Tile("Optimizer steps", f"{run.step:,}", epochs))
        if run.skipped_steps is not None and (run.scale is not None or run.skipped_steps):
            share = f"{run.skipped_steps / run.step:.1%} of all steps" if run.step and run.skipped_steps else ""
            tiles.append(Tile("Skipped steps", f"{run.skipped_steps:,}", share))
        if run.scale is not None:
            tiles.append(Tile("Loss scale", format_number(run.scale), "last"))
    if run.duration is not None:
        train = run.train_seconds
        tiles.append(Tile("Time", format_seconds(run.duration), f"{format_seconds(train)} training" if train else ""))
    if run.samples_per_second is not None:
        mfu = run.throughput.get("mfu")
        note = "samples per second" if mfu is None else f"samples per second, MFU {mfu:.1%}"
        tiles.append(Tile("Throughput", four_digits(run.samples_per_second), note))
    if run.peak_memory is not None:
        kind = "on the GPU" if run.memory_is_the_gpus else "of the process"
        tiles.append(Tile("Peak memory", readable(run.peak_memory), kind))
    return tiles


def _metric_tiles(run: RunRecord, goal: tuple[str, str] | None) -> list[Tile]:
    """Return the tile of the objective, and those of the metrics that are worth showing."""
    tiles, metrics, reached = list[Tile](), run.latest, run.reached(goal)
    if goal is not None and goal[0] in metrics:
        last = format_number(metrics[goal[0]])
        value = format_number(reached.value) if reached.is_best else last
        at = "" if reached.step is None else f"at step {reached.step:,.0f}"
        note = ", ".join(filter(None, (at or "at the best checkpoint", f"last {last}" if last != value else "")))
        label = f"Best {goal[0]}" if reached.is_best else goal[0]
        tiles.append(Tile(label, value, note if reached.is_best else "last", strong=True))
    for name in worth_showing(metrics)[:_METRICS]:
        if (not tiles or name != (goal or ("",))[0]) and len(tiles) < _METRICS:
            tiles.append(Tile(name, format_number(metrics[name]), "last", strong=not tiles))
    return tiles


def note_of(run: RunRecord) -> str:
    """Return a sentence about a run without a final status; "" for other runs."""
    at = f"step {run.step:,}" if run.step is not None else "no step yet"
    seen = f"{at}, written {format_seconds(max(0.0, time.time() - run.changed))} ago"
    notes = {
        "running": f"The run is in progress: {seen}. To update the page, run the command again and reload.",
        "killed": f"The process exited without writing a status: it was killed, or the machine failed. Last: {seen}.",
        "unfinished": f"The run has no final status, and its process is on another machine. Last: {seen}.",
    }
    return notes.get(run.status, "")


def _settings(run: RunRecord) -> list[tuple[str, str, bool]]:
    """Return key, value, and whether the command line set it, for each setting."""
    chosen = {word.lstrip("+~").partition("=")[0] for word in run.chosen}
    return [(key, value, key in chosen or key.removesuffix("._target_") in chosen) for key, value in flat(run.config)]


def flat(settings: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Iterate over dotted keys and their values as text."""
    for key, _, value, _ in walk(dict(settings), into_lists=False):
        if key and not (isinstance(value, dict) and value):
            yield key, value if isinstance(value, str) else json.dumps(value)


def environment_of(run: RunRecord) -> list[tuple[str, str]]:
    """Return labels and values: the command, the machine and the versions."""
    if not (environment := run.environment):
        return []
    git, memory, command = environment.get("git") or {}, environment.get("memory"), environment.get("command")
    commit = f"{str(git.get('commit', ''))[:12]}{' with changes' if git.get('modified') else ''}".strip()
    facts = {
        "command": " ".join(redaction.word(str(word)) for word in command) if isinstance(command, list) else "",
        "directory": environment.get("directory"),
        "commit": commit,
        "branch": git.get("branch"),
        **(environment.get("variables") or {}),
        "host": environment.get("host"),
        "devices": run.devices,
        "CPU": environment.get("cpu"),
        "cores": environment.get("cores"),
        "memory": readable(memory) if memory else "",
        "system": environment.get("platform"),
        "Python": environment.get("python"),
        **(environment.get("versions") or {}),
        "CUDA": environment.get("cuda"),
    }
    return [(str(label), str(value)) for label, value in facts.items() if value]


def draw_sections(sections: Sequence[Section], last_step: float) -> list[tuple[str, list[DrawnChart], Sequence[str]]]:
    """Return the sections with their charts as pictures."""
    return [
        (section.title, [draw(chart, last_step) for chart in section.charts], section.notes) for section in sections
    ]


def _format_time(moment: float) -> str:
    return datetime.fromtimestamp(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z").strip()
