"""A finding in words: a verdict, what to do, a table for the terminal and a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainer.errors import some
from trainer.module_tree import plain_name
from trainer.postmortem.examine import Finding
from trainer.postmortem.probe import Call, Magnitude, Origin
from trainer.terminal import Table

_LIMITS = {"float16": 65504.0, "bfloat16": 3.39e38, "float32": 3.40e38}
_LOW = 100.0
"""A scale below this is suspect; as in ``ScaleMonitor(alarm=100)``."""
_SHOWN = 6
"""Names in a list before the rest is only counted."""


@dataclass(frozen=True)
class Report:
    """What became of one weight update, and why.

    Attributes:
        step: ``trainer.global_step`` when the update began.
        skipped_in_a_row: updates skipped until then, this one included; 0 where it was not skipped.
        precision: its name.
        min_scale: the scaler's floor.
        world_size: the number of processes.
        finding: what the replay has shown.
    """

    step: int
    skipped_in_a_row: int
    precision: str
    min_scale: float
    world_size: int
    finding: Finding

    @property
    def module(self) -> str | None:
        """The name of the module to look at: where the first number that is not finite was made.

        "" is the LightningModule itself: its ``training_step``, or other code of its own. None where nothing
        was found.
        """
        culprit = self._culprit()
        return None if culprit is None else culprit.call.name

    @property
    def place(self) -> str | None:
        """Where :attr:`module` made it, in words; None where nothing was found."""
        culprit = self._culprit()
        return None if culprit is None else culprit.where

    @property
    def phase(self) -> str | None:
        """``"forward"`` or ``"backward"``: where :attr:`module` made it. None where nothing was found."""
        finding = self.finding
        if not finding.fails:
            return None
        return "forward" if self._is_forward else "backward"

    @property
    def verdict(self) -> str:
        """What happened, in a sentence or two."""
        finding = self.finding
        if not finding.fails:
            if finding.error:
                return f"The replay broke off: {finding.error}"
            if self.skipped_in_a_row:
                return (
                    "The replay has found no gradient that is not finite. What overflowed may be a sum over the window"
                    " or the processes, a hook that changes gradients, or something that differs from run to run."
                )
            return "Nothing overflowed."
        if finding.broken_weights:
            return (
                "The weights were not finite before this step: an earlier one broke them. No loss scale helps;"
                " gradients are nan from now on."
            )
        if self._is_forward and finding.broken_batch:
            return f"The batch was not finite when it came: {names_of(finding.broken_batch)}."
        culprit = self._culprit()
        assert culprit is not None
        where = culprit.where
        if self._is_forward:
            return f"The forward overflows in {where}; no loss scale helps."
        if not finding.largest_scale:
            return (
                f"The backward makes inf or nan in {where}, at every loss scale at which it makes anything but zeros."
            )
        if finding.largest_scale < self.min_scale:
            return (
                f"The backward overflows in {where}. It would take a loss scale of {_power(finding.largest_scale)},"
                f" which is below min_scale={self.min_scale:g}: the scaler never gets there."
            )
        verdict = f"The backward overflows in {where}. A loss scale of {_power(finding.largest_scale)} fits: "
        if self.is_harmless:
            return f"{verdict}the scaler gets there by itself."
        return f"{verdict}so low a one that small gradients vanish in float16."

    @property
    def advice(self) -> list[str]:
        """What to try, most promising first."""
        finding, culprit = self.finding, self._culprit()
        if culprit is None:
            return []
        if finding.broken_weights:
            return ["Resume from an older checkpoint, with a lower learning rate or with gradient clipping."]
        if self._is_forward and finding.broken_batch:
            return ["Mend or leave out the samples of this batch; check the transforms that made it."]
        advice = []
        if finding.in_float32_on_cuda:
            advice.append(
                f"A GPU would not overflow here: CUDA's autocast computes {names_of(finding.in_float32_on_cuda)} in"
                " float32. precision.autocast_ops=cuda does so on a CPU."
            )
        if self.is_harmless:
            scale = f"{finding.largest_scale:.0f}"
            advice.append(
                f"Nothing, if this is rare. At the start of a run, init_scale={scale} spares it the skipped steps."
            )
        computed_in = culprit.dtype
        if computed_in in ("float16", None):
            advice += _in_float32(culprit.call)
            advice.append("precision=bf16-mixed, which has the range of float32, where the device has it.")
        if computed_in != "float16" and not self.is_harmless:
            advice.append(
                "Look for a division by zero, a logarithm or root of zero, an exponential: float32 does not help"
                " against these. detect_anomaly=True names the line."
            )
        if not self.is_harmless:
            advice.append("A lower learning rate, if the numbers have grown over the last steps.")
        return advice

    def rows(self) -> list[tuple[str, str]]:
        """The rows of the table, each a label and a value."""
        finding = self.finding
        batch = f"batch_idx {finding.batch_idx}"
        if finding.window > 1:
            batch += f", number {finding.position + 1} of the {finding.window} in its window"
        if self.world_size > 1:
            batch += f", on rank {finding.rank} of {self.world_size}"
        fits = "not looked for" if finding.largest_scale == math.inf else _power(finding.largest_scale)
        rows = [
            ("precision", self.precision),
            ("batch", batch),
            ("loss", f"{finding.loss:.6g}"),
            ("loss scale", f"{finding.scale:g}"),
            ("largest scale that fits", fits if finding.largest_scale else "none"),
            ("first output not finite", _described(finding.first_output, "inputs", "outputs")),
            ("first gradient not finite", _described(finding.first_gradient, "gradient_in", "outputs")),
        ]
        if finding.origin is not None:
            call = finding.origin.call
            rows.append(("gradient overflows in", _described(call, "gradient_in", "gradient_out", "inputs", "outputs")))
        rows.append(("gradients not finite", names_of(finding.parameters) or "none"))
        for label, names in (
            ("weights not finite before", finding.broken_weights),
            ("buffers not finite before", finding.broken_buffers),
            ("batch not finite", finding.broken_batch),
        ):
            if names:
                rows.append((label, names_of(names)))
        if finding.error and finding.fails:
            rows.append(("replay broke off", finding.error))
        return rows

    @property
    def title(self) -> str:
        """One line."""
        skipped = f"skipped, {self.skipped_in_a_row} in a row" if self.skipped_in_a_row else "not skipped"
        return f"Overflow report: optimizer step {self.step} ({skipped})"

    @property
    def is_harmless(self) -> bool:
        """Whether the scaler will reach a scale that fits, without going so low that small gradients vanish."""
        finding = self.finding
        fits = finding.largest_scale >= max(self.min_scale, _LOW)
        return self.phase == "backward" and fits and not finding.broken_weights

    def table(self) -> Table:
        """For the terminal; without the numbers where the overflow is harmless."""
        advice = [("" if index else "what to try", line) for index, line in enumerate(self.advice)]
        numbers = [] if self.is_harmless else self.rows()
        return Table(self.title, (), [("verdict", self.verdict), *advice, (), *numbers])

    def markdown(self) -> str:
        """For a file."""
        lines = [f"# {self.title}", "", self.verdict, ""]
        lines += [f"- {line}" for line in self.advice]
        lines += ["", "| | |", "|---|---|"]
        lines += [f"| {label} | {value} |" for label, value in self.rows()]
        return "\n".join(lines) + "\n"

    @property
    def _is_forward(self) -> bool:
        """Whether the gradients are not finite because the loss is not, or because what it is made of is not."""
        finding = self.finding
        made_in_forward = not finding.largest_scale and finding.first_output is not None
        return finding.fails and (not math.isfinite(finding.loss) or made_in_forward)

    def _culprit(self) -> _Culprit | None:
        finding = self.finding
        if not finding.fails:
            return None
        if not self._is_forward:
            return None if finding.origin is None else _of_backward(finding.origin)
        first = finding.first_output
        if first is None:  # every module's output was finite
            call = Call("", "training_step", number=0)
            return _Culprit(call, "training_step itself, after the last module", call)
        call = first
        while call.caller is not None and call.inputs is not None and call.inputs.not_finite:
            call = call.caller  # it came in as it is
        where = _called(call) if call is first else f"{_own_code(call)}, before {_called(first)}"
        return _Culprit(call, where, first)


class _Culprit(NamedTuple):
    """What made the first number that is not finite.

    Attributes:
        call: the call in which it was made.
        where: this, and which part of it, in words.
        computed: the call whose numbers tell in which dtype.
    """

    call: Call
    where: str
    computed: Call

    @property
    def dtype(self) -> str | None:
        """What it computes in, as far as its results tell."""
        halves = (self.computed.outputs, self.computed.gradient_in, self.computed.inputs)
        dtypes = [magnitude.dtype for magnitude in halves if magnitude is not None]
        return "float16" if "float16" in dtypes else dtypes[0] if dtypes else None


def _of_backward(origin: Origin) -> _Culprit:
    call, after, parameter = origin
    where = _called(call)
    if parameter is not None:
        where = f"{where}, in the gradient of {parameter}"
    elif after is not None:
        where = f"{_own_code(call)}, which uses the output of {_called(after)}"
    return _Culprit(call, where, call if after is None else after)


def _in_float32(call: Call) -> list[str]:
    if not call.name:
        return [
            "Compute the loss in float32: `with torch.autocast(self.device.type, enabled=False):` around it, on"
            " `.float()` inputs."
        ]
    name = plain_name(call.name)
    advice = f"precision.fp32_modules=[{name!r}]: this module in float32, the others as they are."
    pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
    if pattern != name and not pattern.endswith("*"):
        advice += f" Its likes in all layers: [{pattern!r}]."
    return [advice]


def _called(call: Call) -> str:
    if not call.number:
        return "training_step"
    name = plain_name(call.name)
    again = f", call {call.number}" if call.number > 1 else ""
    return f"{name!r} ({call.kind}{again})" if name else f"{call.kind}.forward"


def _own_code(call: Call) -> str:
    return f"the code of {_called(call)}" if call.number else "training_step"


def _described(call: Call | None, *magnitudes: str) -> str:
    if call is None:
        return "none: all are finite"
    labels = {
        "inputs": "input", "outputs": "output", "gradient_in": "incoming gradient",
        "gradient_out": "gradient handed on",
    }  # fmt: skip
    described = ((labels[name], getattr(call, name)) for name in magnitudes)
    parts = [f"{label} {_measured(magnitude)}" for label, magnitude in described if magnitude is not None]
    return "; ".join([_called(call), *parts])


def _measured(magnitude: Magnitude) -> str:
    largest, broken, elements, dtype = magnitude
    limit = f" (ends at {_LIMITS[dtype]:g})" if dtype == "float16" else ""
    if not broken:
        return f"finite, up to {largest:.3g} in {dtype}"
    return f"not finite in {broken:,} of {elements:,} elements, the others up to {largest:.3g} in {dtype}{limit}"


def names_of(names: Sequence[str]) -> str:
    """The first few of them, and how many more there are."""
    return some(map(plain_name, names), _SHOWN)


def _power(scale: float) -> str:
    """A power of two, written so that one can read it."""
    if scale == 0.0:
        return "none"
    return f"{scale:.0f}" if 1.0 <= scale <= 2.0**24 else f"2^{round(math.log2(scale))}"
