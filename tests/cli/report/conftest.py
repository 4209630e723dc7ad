"""Run folders written by hand, and parsed pages."""

import json
import os
import re
import socket
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from trainer.cli import main

VOID = {"meta", "link", "br", "img", "input"}


class Page(HTMLParser):
    """The elements of a page, with the text of each section and of the whole page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.titles: list[str] = []  # of the charts
        self.data: list[dict[str, Any]] = []
        self.scripts: list[str] = []  # that a browser runs
        self.text = ""
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, str] = {}
        self.feed(html)
        self.close()
        assert self._open == []
        self.text = squeezed(self.text)
        self.sections = {name: squeezed(text) for name, text in self.sections.items()}

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append((tag, dict(attrs)))
        if tag in ("td", "th", "dd", "dt", "li", "p", "div", "span", "b", "h3", "h4", "pre"):
            self._add(" ")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        tags = [tag for tag, _ in self._open]
        if "style" in tags:
            return
        if "script" in tags:
            if self._open[-1][1].get("type") == "application/json":
                self.data.append(json.loads(data))
            elif data.strip():
                self.scripts.append(data)
            return
        if tags[-2:] == ["figcaption", "h4"]:
            self.titles.append(data)
        self._add(data)

    def _add(self, data):
        self.text += data
        for tag, attributes in self._open:
            if tag in ("section", "article") and attributes.get("id"):
                name = str(attributes["id"])
                self.sections[name] = self.sections.get(name, "") + data

    def lines(self, title: str) -> dict[str, dict[str, Any]]:
        """Return the lines of a chart by name."""
        return {line["name"]: line for line in self.data[self.titles.index(title)]["lines"]}

    def having(self, tag: str, attribute: str) -> list[str]:
        return [str(found[attribute]) for name, found in self.elements if name == tag and attribute in found]


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def report(folder: Path | str, *more: str) -> Page:
    """Return the page that the command writes."""
    assert main(["report", str(folder), *more]) == 0
    return Page(Path(more[0] if more else Path(folder) / "report.html").read_text(encoding="utf-8"))


def series(values: list[float], steps: list[int] | None = None) -> dict[str, Any]:
    return {"steps": steps or [*range(1, len(values) + 1)], "values": values, "stride": 1}


ENVIRONMENT = {
    "started": 1.0,
    "host": socket.gethostname(),
    "pid": os.getpid(),
    "command": ["python", "-m", "trainer", "fit", "+recipe=a"],
    "python": "3.11.7",
    "versions": {"torch": "2.15.0"},
    "cpu": "Zuse Z4",
    "cores": 2,
    "memory": 2**34,
    "git": {"commit": "0123456789abcdef", "branch": "trunk", "modified": True},
    "variables": {"OMP_NUM_THREADS": "1"},
}

CURVES = {
    "losses": series([4.0, 3.0, 2.0, 1.0]),
    "scales": series([65536.0, 32768.0], [1, 3]),
    "skipped": series([1], [2]),
    "metrics": {"val": {"val_loss": series([2.5, 1.5], [2, 4])}, "train": {}},
    "seconds": series([1.0, 2.0, 3.0, 5.0]),
    "memory": series([2**20, 2**21], [1, 4]),
}

ROWS = """\
amp/scale,amp/skip_rate,amp/skipped_steps,epoch,grad_norm_step,lr-SGD,step,train_loss,val_acc,val_loss
,,,,,0.1,0,,,
65536.0,0.0,0.0,0,9.5,,0,4.0,,
32768.0,0.5,1.0,0,7.5,,1,3.0,,
,,,0,,,1,,0.25,2.5
,,,,,0.05,3,,,
32768.0,0.25,1.0,1,3.5,,3,1.0,,
,,,1,,,3,,0.75,1.5
"""

CONFIG = """\
seed: 42
trainer: {_target_: trainer.Trainer, max_epochs: 2}
optimizer: {lr: 0.1}
logger: {csv: {_target_: lightning.pytorch.loggers.CSVLogger}}
callbacks: {model_checkpoint: {_target_: lightning.pytorch.callbacks.ModelCheckpoint, monitor: val_acc, mode: max}}
"""

DIAGNOSIS = """\
# Verdict: backward pass overflows in 16 bits (step 2)

No loss scale fits: the gradients of net.fc.weight overflow in 'net.fc' (Linear) at every scale.

- Remedy: precision.fp32_modules=[net.fc]  [tried: finite forward and backward, scales up to 131072 fit]
- If that does not help: precision=bf16-mixed

| | |
|---|---|
| step | 2, 3 skipped in a row |
| loss scale | 4.1943e+06 |
"""


def facts(**more: Any) -> dict[str, Any]:
    """Return the content of ``run.json``."""
    usual = {
        "environment": ENVIRONMENT,
        "curves": CURVES,
        "samples_per_step": 8,
        "command": "fit",
        "recipe": "digits",
        "precision": "16-mixed",
        "seed": 42,
        "devices": "1 x CPU",
        "overrides": ["+recipe=digits", "precision=16-mixed", "command=fit"],
        "status": "completed",
        "seconds": 61.5,
        "epochs": 2,
        "steps": 4,
        "skipped_steps": 1,
        "scale": 32768.0,
        "metrics": {"train_loss": 1.0, "val_loss": 1.5, "val_acc": 0.75},
        "peak_memory": {"process": 3 * 2**30},
        "monitor": {"metric": "val_acc", "mode": "max"},
        "best_score": 0.75,
        "throughput": {"samples_per_second": 123.4, "measured_batches": 20},
        "samples_per_second": 123.4,
    }
    return usual | more


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write the folder of a run. A file that is None is left out."""
    monkeypatch.chdir(tmp_path)

    def make(name: str = "outputs/digits/one", record: dict[str, Any] | None = None, **files: Any) -> Path:
        usual: dict[str, Any] = {
            "run.json": record if record is not None else facts(),
            "csv/metrics.csv": ROWS,
            ".hydra/config.yaml": CONFIG,
            ".hydra/overrides.yaml": "- +recipe=digits\n- precision=16-mixed\n- command=fit\n",
            "fit.log": "[2026-01-01 00:00:00,0][a][INFO] - hello\n[2026-01-01 00:00:01,0][b][WARNING] - take care\n",
            "csv/diagnosis_step_2.md": DIAGNOSIS,
        }
        usual |= files.pop("files", {})
        assert not files
        for place, content in usual.items():
            if content is not None:
                file = Path(name) / place
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return Path(name)

    return make
