"""A diagnosis in words: a few lines for the terminal, a file with the details; and as JSON, for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.diagnosis.examine import Finding
from trainer.diagnosis.remedies import Setting
from trainer.diagnosis.rewrite import Change, Removal
from trainer.diagnosis.trace import Magnitude, Origin
from trainer.errors import join_first

TITLES = {
    "data": "data: the batch is the cause",
    "model": "model: the computation is the cause",
    "forward": "forward pass overflows in 16 bits",
    "backward": "backward pass overflows in 16 bits",
    "underflow": "underflow: small numbers become 0",
    "weights": "weights already not finite",
    "divergence": "divergence",
    "unknown": "unknown cause",
    "none": "none: nothing overflowed",
}


@dataclass
class Diagnosis:
    """Why a training run breaks, and one remedy.

    Attributes:
        kind: "data", "model", "forward", "backward" (of a 16-bit precision), "underflow", "weights" (or buffers,
            not finite when training began), "divergence", "unknown", or "none".
        cause: one sentence.
        remedy: one change, in the caller's syntax.
        finding: the replay that the diagnosis is based on.
        step: ``trainer.global_step`` when the weight update began.
        in_a_row: number of skipped steps in a row up to this step; 0 if it was not skipped.
        tried: the result of trying the remedy on the batch; "" if it cannot be tried.
        alternative: the second most plausible remedy, or "".
        key: identifies the cause, together with ``kind``.
        count: number of times that the cause was seen.
        samples: the indices of the samples that are the cause, by the name of the tensor in the batch.
        figures: numbers without and with the remedy, by name ("loss", "largest_scale", "lost_gradient"). Empty if the
            remedy was not tried, or is a change of the code. "steps": the mean loss at the beginning and at the end of
            the steps of :func:`~trainer.diagnosis.patch.try_steps`.
        changes: the remedy as data; () if it changes no code and no argument.
    """

    kind: str
    cause: str
    remedy: str
    finding: Finding
    step: int
    in_a_row: int = 0
    tried: str = ""
    alternative: str = ""
    key: str = ""
    count: int = 1
    samples: Mapping[str, Sequence[int]] = field(default_factory=dict)
    figures: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    changes: tuple[Change | Removal | Setting, ...] = ()

    @property
    def module(self) -> str | None:
        """The name of the module in which the first number that is not finite was made; None if nothing was found."""
        origin = self.finding.origin
        return None if origin is None else origin.module

    def lines(self) -> list[str]:
        """Return at most five lines for the terminal."""
        finding = self.finding
        batch = f", batch {finding.batch_idx}" if finding.batch_idx >= 0 else ""
        batch += f" of rank {finding.rank}" if batch and finding.rank else ""
        lines = [f"Verdict: {TITLES[self.kind]} (step {self.step}{batch})", f"  {self.cause}"]
        if self.remedy:
            lines.append(f"  Remedy: {self.remedy}" + (f"  [tried: {self.tried}]" if self.tried else ""))
        if self.alternative:
            lines.append(f"  If that does not help: {self.alternative}")
        return lines

    def markdown(self) -> str:
        """Return the report for a file."""
        rows = "\n".join(f"| {label} | {value} |" for label, value in self.rows())
        advice = [f"- {line.strip()}" for line in self.lines()[2:]]
        paragraphs = [f"# Verdict: {TITLES[self.kind]} (step {self.step})", self.cause, "\n".join(advice)]
        return "\n\n".join([paragraph for paragraph in paragraphs if paragraph] + [f"| | |\n|---|---|\n{rows}\n"])

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the JSON file, which ``docs/debugging-overflow.md`` describes."""
        finding, origin = self.finding, self.finding.origin
        place = None
        if origin is not None:
            names = ("operation", "phase", "module", "file", "line", "source")
            place = {name: getattr(origin, name) for name in names} | {"operation": origin.name, "class": origin.kind}
            for name, magnitude in (("inputs", origin.inputs), ("outputs", origin.outputs)):
                place[name] = None if magnitude is None else magnitude._asdict()
        facts = {
            "version": 1,
            "verdict": self.kind,
            "cause": self.cause,
            "step": self.step,
            "skipped_in_a_row": self.in_a_row,
            "seen": self.count,
            "batch_idx": finding.batch_idx if finding.batch_idx >= 0 else None,
            "rank": finding.rank,
            "place": place,
            "samples": self.samples,
            "remedy": self.remedy,
            "tried": self.tried or None,
            "alternative": self.alternative or None,
            "figures": {name: {"before": old, "after": new} for name, (old, new) in self.figures.items()},
            "loss": finding.loss,
            "loss_scale": finding.scale,
            "gradients_not_finite": finding.parameters,
            "weights_not_finite": finding.broken_weights,
            "largest_values": finding.ranges,
            "replay_error": finding.error or None,
        }
        plain: dict[str, Any] = _plain(facts)
        return plain

    def rows(self) -> list[tuple[str, str]]:
        """Return the details, each with a label."""
        finding = self.finding
        window = f", number {finding.position + 1} of {finding.window} in its window" if finding.window > 1 else ""
        rows = [
            ("step", f"{self.step}" + (f", {self.in_a_row} skipped in a row" if self.in_a_row else "")),
            ("batch", f"batch_idx {finding.batch_idx}{window}, rank {finding.rank}"),
            ("seen", "once" if self.count == 1 else f"{self.count} times"),
            ("loss", f"{finding.loss:.6g}"),
            ("loss scale", f"{finding.scale:g}"),
        ]
        if math.isfinite(finding.largest_scale):
            rows.append(("largest scale that fits", f"{finding.largest_scale:g}" if finding.largest_scale else "none"))
        if finding.origin is not None:
            rows += _rows_of(finding.origin)
        for label, names in (
            ("gradients not finite", finding.parameters),
            ("weights not finite before", finding.broken_weights),
            ("batch not finite", [f"{name}: samples {rows}" for name, rows in finding.broken_batch.items()]),
            ("largest values of the batch", [f"{name}: {value:.4g}" for name, value in finding.ranges.items()]),
            ("replay ended by", [finding.error] if finding.error else []),
        ):
            if names:
                rows.append((label, join_first(names, 12)))
        return rows


def _plain(value: Any) -> Any:
    """Return nested mappings and sequences as JSON has them: numbers that are not finite are text."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _rows_of(origin: Origin) -> list[tuple[str, str]]:
    rows = [("first not finite", f"{origin.name}, {origin.phase} pass, in {origin.place}")]
    if origin.file:
        rows.append(("line", f"{origin.file}:{origin.line}: `{origin.source}`"))
    names = ("input", "output") if origin.phase == "forward" else ("incoming gradient", "outgoing gradient")
    pairs = zip(names, (origin.inputs, origin.outputs), strict=True)
    return rows + [(name, _format_magnitude(magnitude)) for name, magnitude in pairs if magnitude is not None]


def _format_magnitude(magnitude: Magnitude) -> str:
    largest, broken, elements, dtype = magnitude
    finite = f"up to {largest:.3g} in {dtype} (maximum: {torch.finfo(getattr(torch, dtype)).max:g})"
    return f"not finite in {broken:,} of {elements:,} elements, the others {finite}" if broken else f"finite, {finite}"
