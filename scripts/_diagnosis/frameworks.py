"""Run the broken programs of ``programs.py`` in other trainers, and record the messages that their users see.

Run as a process, ``python frameworks.py FRAMEWORK PROGRAM ...`` prints the results as JSON.

Two things differ from a user's program. A float16 scaler is passed to each trainer, because on a CPU, Lightning would
replace ``16-mixed`` by bfloat16, and Accelerate and Transformers would replace it by float32. And operations follow
CUDA's autocast lists, so that the same operations run in 16 bits as on a GPU.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import torch
from lightning.pytorch import Callback
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from _diagnosis.bench import run
from _diagnosis.programs import EPOCHS, PROGRAMS, Program
from trainer.precision import cuda_autocast_ops

PACKAGES = {"PyTorch": "torch", "Lightning": "lightning", "Accelerate": "accelerate", "Transformers": "transformers"}

CHOSEN = (
    "NanSampleBf16", "WhereNan", "UnscaledAttention", "RawTargets", "VanishingLoss", "BrokenFile16", "RateTooHigh16",
    "Settling",
)  # fmt: skip
"""The programs to compare by default, one for each `Program.verdict`."""

LOG_EVERY_N_STEPS = 10


@dataclass
class Outcome:
    """The outcome of one program in one trainer.

    Attributes:
        lines: the lines of the output, without repetitions.
        losses: the loss of each batch.
        skipped: number of skipped optimizer steps.
        is_finite: whether all weights are finite at the end.
        error: type and message of the exception that ended the run, or None.
    """

    lines: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    skipped: int = 0
    is_finite: bool = True
    error: str | None = None


class Scaler(torch.amp.GradScaler):
    """Count the skipped steps."""

    skipped = 0

    def update(self, new_scale: Any = None) -> None:
        before = self.get_scale()
        super().update(new_scale)
        self.skipped += self.get_scale() < before


class Forward(nn.Module):
    """Return the loss of a batch as the output of the model, and record it."""

    def __init__(self, program: Program, losses: list[float]) -> None:
        super().__init__()
        self.program, self.losses = program, losses

    def forward(self, batch: Any) -> dict[str, Any]:
        loss = self.program.training_step(batch, 0)
        self.losses.append(float(loss.detach()))
        return {"loss": loss}


class Losses(Callback):
    def __init__(self, losses: list[float]) -> None:
        self.losses = losses

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def run_pytorch(program: Program, scaler: Scaler, loader: DataLoader[Any], outcome: Outcome) -> None:
    optimizer: Any = program.configure_optimizers()
    dtype = torch.bfloat16 if program.precision == "bf16-mixed" else torch.float16
    model, step = Forward(program, outcome.losses), 0
    for epoch in range(EPOCHS):
        for batch in loader:
            with torch.autocast("cpu", dtype=dtype, enabled=program.precision != "32-true"):
                loss = model(batch)["loss"]
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            step += 1
            if step % LOG_EVERY_N_STEPS == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")


def run_lightning(program: Program, scaler: Scaler, loader: DataLoader[Any], outcome: Outcome) -> None:
    if program.precision == "16-mixed":
        precision: Any = {"plugins": [MixedPrecision("16-mixed", device="cpu", scaler=scaler)]}
    else:
        precision = {"precision": program.precision}
    LightningTrainer(
        accelerator="cpu", max_epochs=EPOCHS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=LOG_EVERY_N_STEPS, callbacks=[Losses(outcome.losses)],
        detect_anomaly=torch.is_anomaly_enabled(), **precision,
    ).fit(program, loader)  # fmt: skip


def _use(accelerator: Any, scaler: Scaler) -> None:
    """Enable float16 with ``scaler``: on a CPU, Accelerate would use float32 for fp16."""
    if scaler.is_enabled():
        accelerator.native_amp, accelerator.scaler = True, scaler


NAMES = {"16-mixed": "fp16", "bf16-mixed": "bf16", "32-true": "no"}


def run_accelerate(program: Program, scaler: Scaler, loader: DataLoader[Any], outcome: Outcome) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision=NAMES[program.precision])
    _use(accelerator, scaler)
    optimizer: Any = program.configure_optimizers()
    model, optimizer, loader = accelerator.prepare(Forward(program, outcome.losses), optimizer, loader)
    step = 0
    for epoch in range(EPOCHS):
        for batch in loader:
            loss = model(batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % LOG_EVERY_N_STEPS == 0:
                accelerator.print(f"epoch {epoch} step {step} loss {loss.item():.4f}")


def run_transformers(program: Program, scaler: Scaler, loader: DataLoader[Any], outcome: Outcome) -> None:
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    class OfLoader(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            _use(self.accelerator, scaler)

        def get_train_dataloader(self) -> DataLoader[Any]:
            return DataLoader([{"batch": batch} for batch in loader], batch_size=None)  # type: ignore[arg-type]

    AcceleratorState._reset_state(reset_partial_state=True)
    optimizer: Any = program.configure_optimizers()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, num_train_epochs=EPOCHS, logging_steps=LOG_EVERY_N_STEPS, save_strategy="no",
            report_to="none", disable_tqdm=True, use_cpu=True, fp16=program.precision == "16-mixed",
            bf16=program.precision == "bf16-mixed", max_grad_norm=1e30, remove_unused_columns=False,
        )  # fmt: skip
        trainer = OfLoader(
            Forward(program, outcome.losses), arguments, train_dataset=list(loader),  # type: ignore[arg-type]
            optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
        )  # fmt: skip
        trainer.train()


RUNNERS: dict[str, Callable[[Program, Scaler, DataLoader[Any], Outcome], None]] = {
    "PyTorch": run_pytorch,
    "Lightning": run_lightning,
    "Accelerate": run_accelerate,
    "Transformers": run_transformers,
}


@contextmanager
def captured(lines: list[str]) -> Iterator[None]:
    """Record the process's output and warnings."""
    with tempfile.TemporaryFile() as file, warnings.catch_warnings():
        warnings.simplefilter("always")
        sys.stdout.flush(), sys.stderr.flush()
        kept = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
        file.seek(0)
        text = re.sub(r"^\S+:\d+: (\w*Warning: .*)(\n  .*)?", r"\1", file.read().decode(), flags=re.MULTILINE)
        lines += dict.fromkeys(line.strip() for line in text.splitlines() if line.strip())


def run_in(framework: str, kind: type[Program]) -> Outcome:
    """Train a program in one framework, in this process."""
    outcome, precision = Outcome(), kind.precision
    scaler = Scaler("cpu", enabled=precision == "16-mixed", **kind.scaling)
    with captured(outcome.lines), cuda_autocast_ops() if precision == "16-mixed" else nullcontext():
        program = kind()
        try:
            RUNNERS[framework](program, scaler, DataLoader(kind.batches(), batch_size=None), outcome)  # type: ignore[arg-type]
        except Exception as error:
            outcome.error = "".join(traceback.format_exception_only(error)).strip()
    outcome.skipped = scaler.skipped
    outcome.is_finite = all(bool(weight.isfinite().all()) for weight in program.parameters())
    return outcome


def _normalized(line: str) -> str:
    return re.sub(r"\b(nan|inf)\b|[-+]?\d[\d.e+-]*", "#", line)


def messages(outcome: Outcome, healthy: Outcome) -> list[str]:
    """Return the lines of ``outcome`` that ``healthy``, the run of the base `Program` in the same precision, lacks."""
    known = set(map(_normalized, healthy.lines))
    return [line for line in outcome.lines if _normalized(line) not in known]


def report(outcome: Outcome, ordinary: Outcome) -> str:
    """Return the first message of a run."""
    if outcome.error is not None:
        return f"`{_short(outcome.error.splitlines()[0])}`"
    found = messages(outcome, ordinary)
    return f"`{_short(found[0])}`" if found else "no message"


def course(outcome: Outcome, in_float32: Outcome) -> str:
    """Return the course of a run: its losses, skipped steps, and weights at the end."""
    if outcome.error is not None:
        return f"ends at step {len(outcome.losses)}"
    bad = [step for step, loss in enumerate(outcome.losses) if not math.isfinite(loss)]
    parts = ["completes"]
    if bad:
        kind = "nan" if any(math.isnan(loss) for loss in outcome.losses) else "inf"
        is_last = len(bad) == len(outcome.losses) - bad[0]
        parts.append(f"loss {kind} from step {bad[0]} on" if is_last else f"{len(bad)} losses {kind}")
    else:
        parts.append(f"loss {_end(outcome):.2g} (float32: {_end(in_float32):.2g})")
    if outcome.skipped:
        parts.append(f"{outcome.skipped} of {len(outcome.losses)} steps skipped")
    if not outcome.is_finite:
        parts.append("weights not finite")
    return "; ".join(parts)


def _end(outcome: Outcome) -> float:
    return sum(outcome.losses[-12:]) / 12


def _short(text: str) -> str:
    text = text.replace("|", "/").replace("`", "'")
    return text if len(text) <= 90 else text[:87] + "..."


def our_report(kind: type[Program]) -> str:
    """Return the verdict of this project's Trainer."""
    with tempfile.TemporaryDirectory() as folder:
        text = run(kind, Path(folder)).text
    verdict = re.search(r"^ *Verdict: (.+)$", text, re.MULTILINE)
    return verdict[1] if verdict else "no report"


def outcomes(framework: str, names: list[str]) -> tuple[dict[str, Outcome], dict[str, Outcome]]:
    """Run programs in a process with this framework.

    Returns:
        The outcomes by the names of the programs, and the outcomes of the healthy base `Program` by precision.
    """
    command = [sys.executable, str(Path(__file__)), framework, *names]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = {name: Outcome(**values) for name, values in json.loads(done.stdout).items()}
    return {name: found[name] for name in names}, {name: found[name] for name in NAMES if name in found}


def table(names: list[str]) -> str:
    """Return a Markdown table: a row for each program, a column for each framework that is installed.

    Frameworks with the same reports for all programs share a column.
    """
    installed = [name for name, package in PACKAGES.items() if find_spec(package)]
    results = {framework: outcomes(framework, names) for framework in installed}
    runs, columns = [], dict[tuple[str, ...], list[str]]()
    for name in names:
        in_float32 = run_in("PyTorch", type(name, (PROGRAMS[name],), {"precision": "32-true", "scaling": {}}))
        runs.append({framework: course(found[name], in_float32) for framework, (found, _) in results.items()})
    for framework, (found, ordinary) in results.items():
        reports = tuple(
            report(found[name], ordinary[PROGRAMS[name].precision])
            + (f"; {courses[framework]}" if courses[framework] != courses["PyTorch"] else "")
            for name, courses in zip(names, runs, strict=True)
        )
        columns.setdefault(reports, []).append(f"{framework} {version(PACKAGES[framework])}")
    heads = ["program", "the run", *(", ".join(shared) for shared in columns.values()), "this Trainer"]
    rows = [
        [f"{kind.__doc__} ({kind.precision})", runs[index]["PyTorch"], *(c[index] for c in columns), our_report(kind)]
        for index, kind in enumerate(PROGRAMS[name] for name in names)
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [heads, ["---"] * len(heads), *rows])


def main() -> None:
    framework, *names = sys.argv[1:]
    logging.captureWarnings(False)
    found: dict[str, Any] = {}
    for precision in sorted({PROGRAMS[name].precision for name in names}):
        found[precision] = asdict(run_in(framework, type("Ordinary", (Program,), {"precision": precision})))
    for name in names:
        found[name] = asdict(run_in(framework, PROGRAMS[name]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
