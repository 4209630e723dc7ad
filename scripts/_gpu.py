"""The parts of ``scripts/verify_gpu``, each run as a process: ``_gpu.py PART --rows FILE``.

A part writes one JSON line for each row as soon as the row is measured, so that the rows of a part that is ended at its
time limit are kept. With ``--simulate`` sizes are small, and the device is the simulated one of
``tests/simulated_cuda``, or the CPU; times are then not compared with targets.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import lightning as L
import torch
import torch.nn.functional as F
from _benchmark import spread
from torch import Tensor, nn

AGREES, DIFFERS, MET, MISSED, MEASURED, NOT_RUN = "agrees", "differs", "met", "missed", "measured", "not run"
NOT_JUDGED = "not compared (simulated)"

DTYPES = {"32-true": None, "16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}


class NotRunError(Exception):
    """Raised if a package, a version or a device that a part or a row needs is missing."""


class Part:
    """One part of the verification: its device, its time budget, and its file of rows.

    Args:
        name: the name of the part.
        rows: the file that gets a JSON line for each row.
        simulate: use small sizes, and the simulated device.
        seconds: the time that the part should take at most.
    """

    def __init__(self, name: str, rows: Path, simulate: bool, seconds: float) -> None:
        self.name, self.simulate, self.seconds = name, simulate, seconds
        self._rows = rows
        self._began = time.monotonic()

    @property
    def time_is_up(self) -> bool:
        return time.monotonic() - self._began > self.seconds

    def row(self, name: str, measured: str, verdict: str, expected: str = "", command: str = "") -> None:
        """Write one row.

        Args:
            name: the measured quantity.
            measured: the result, with its unit.
            verdict: the comparison with ``expected``.
            expected: the prediction or target, or an empty string.
            command: repeats the row; empty for the command of the part.
        """
        if self.simulate and verdict in (MET, MISSED, "inconclusive"):
            verdict = NOT_JUDGED
        command = command or f"scripts/verify_gpu --only {self.name}"
        row = {"name": name, "measured": measured, "expected": expected, "verdict": verdict, "command": command}
        self._write(row)
        print(f"  {name}: {measured} ({verdict}{', expected ' + expected if expected else ''})", flush=True)

    def table(self, marker: str, text: str) -> None:
        """Write a table for the page of results, and for ``docs/benchmarks.md`` between the markers ``marker``."""
        self._write({"marker": marker, "table": text})

    def _write(self, entry: dict[str, str]) -> None:
        with self._rows.open("a") as file:
            print(json.dumps(entry), file=file)

    @contextmanager
    def cuda(self) -> Iterator[Any]:
        """Enter the simulated device, if it is to be used. Yields it, or None for a GPU."""
        if not self.simulate:
            yield None
            return
        from tests.simulated_cuda import device

        if not device.is_prepared():
            device.prepare()
            device.probe()
        torch.backends.cudnn.enabled = False  # batch normalization would call cuDNN's operator, which the CPU lacks
        with device.simulated_cuda() as simulated:
            yield simulated


def within(seconds: float, base: float, share: float) -> str:
    return MET if seconds <= base * (1 + share) else MISSED


def script(name: str) -> Any:
    """Import one of the scripts as a module."""
    os.environ["AMP_BENCH"] = "1"  # stay in this process
    loader = SourceFileLoader(name, str(ROOT / "scripts" / name))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


def make_trainer(folder: str, **options: Any) -> Any:
    from trainer import Trainer

    return Trainer(**QUIET | {"accelerator": "gpu", "devices": 1, "default_root_dir": folder} | options)


class Repeated:
    """An iterable that yields one batch ``count`` times."""

    def __init__(self, batch: Any, count: int) -> None:
        self.batch, self.count = batch, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return iter([self.batch] * self.count)


class Timing(L.Callback):
    """Record an event at the start of each batch.

    There is one event per batch, so the duration of the last batch is not measured.
    """

    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_train_batch_start(self, *_: Any) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append(event)

    on_predict_batch_start = on_train_batch_start

    def seconds(self, warmup: int) -> float:
        """Return the median time from the start of a batch to the start of the next, after ``warmup`` batches."""
        torch.cuda.synchronize()
        pairs = zip(self.events[warmup:], self.events[warmup + 1 :], strict=False)
        return statistics.median(start.elapsed_time(end) / 1e3 for start, end in pairs)


class Module(L.LightningModule):
    """Train ``net`` on (inputs, targets) with ``loss``."""

    def __init__(self, net: nn.Module, optimizer: Callable[..., Any], loss: Callable[..., Tensor] = F.mse_loss) -> None:
        super().__init__()
        self.net, self.make_optimizer, self.loss = net, optimizer, loss
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = self.loss(self.net(inputs), targets)
        self.losses.append(loss.detach())
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.net.parameters())


def mlp(width: int, layers: int) -> nn.Sequential:
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


adamw = partial(torch.optim.AdamW, lr=1e-4, fused=True)


# --- the parts ----------------------------------------------------------------------------------------------


def tests(part: Part) -> None:
    """Run the tests that are marked ``gpu``."""
    needed = {"pytest": "pytest", "pytest_timeout": "pytest-timeout", "matplotlib": "matplotlib"}
    missing = [package for name, package in needed.items() if find_spec(name) is None]
    if missing:
        raise NotRunError(f"needs `pip install {' '.join(missing)}`")
    files = sorted(
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if "mark.gpu" in file.read_text() or "marks=pytest.mark.gpu" in file.read_text()
    )
    if part.simulate:
        files = ["tests/gpu/test_no_stall.py", "tests/diagnosis/test_sync_detector.py"]
    words = [
        "-v", "--color=no", "-m", "gpu", "-p", "no:cacheprovider", "--timeout=60", "-W", "ignore::DeprecationWarning",
        "-W", "ignore::FutureWarning", "-W", "ignore:TypedStorage is deprecated:UserWarning", *files,
    ]  # fmt: skip
    command = [sys.executable, "-m", "pytest", *words]
    limit = max(part.seconds - 5, 30)
    try:
        done = subprocess.run(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit
        )
        output, ended = done.stdout, True
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or ""  # bytes, also with text=True
        output, ended = printed.decode(errors="replace") if isinstance(printed, bytes) else printed, False
    found = re.findall(r"^(tests/\S+\.py)::(.*?) (PASSED|FAILED|ERROR|SKIPPED)", output, re.MULTILINE)
    if not found:
        raise NotRunError(f"pytest ran no test:\n{output[-1500:]}")
    ends = [end for *_, end in found]
    bad = [f"{file}::{name}" for file, name, end in found if end in ("FAILED", "ERROR")]
    skipped = f", {ends.count('SKIPPED')} skipped" * ("SKIPPED" in ends)
    measured = f"{ends.count('PASSED')} passed, {len(bad)} failed{skipped}"
    tested = f"{len({file for file, *_ in found})} files"
    part.row(tested, measured, DIFFERS if bad else AGREES, "no failure", "python -m pytest -m gpu")
    for name in bad:
        part.row(name, "failed", DIFFERS, "passes", f"python -m pytest '{name}'")
    if not ended:
        part.row("all tests", f"{len(found)} in {limit:.0f} s, then stopped", NOT_RUN)
    print(output[-3000:] if bad else output[-200:])


def diagnosis(part: Part) -> None:
    """Diagnose the programs of ``benchmark_diagnosis``, apply the remedies, and train again."""
    from _diagnosis import bench
    from _diagnosis.programs import PROGRAMS
    from _diagnosis.remedy import Execution, remedy_in

    os.environ["OMP_NUM_THREADS"] = "1"
    bench.accelerator = "cpu" if part.simulate else "gpu"
    names = ["NanSample16", "EmptyMask32"] if part.simulate else list(PROGRAMS)
    causes = {name: bench.cause(name) for name in names}
    before = _run_programs([(name, "") for name in names], bench.accelerator)
    right = {name for name in names if before[name].verdict == causes[name]}
    remedies = {name: remedy_in(before[name].text) for name in names if name in right and causes[name] != "healthy"}
    after = _run_programs(list(remedies.items()), bench.accelerator)
    cured = {name for name in after if Execution(remedies[name], before[name], after[name]).is_cured}
    for name in names:
        command = f"scripts/benchmark_diagnosis --accelerator gpu --only {name}"
        if name not in right:
            part.row(name, before[name].verdict, DIFFERS, causes[name], command)
            print(before[name].text)
        elif name in remedies and name not in cured:
            part.row(f"remedy of {name}", remedies[name], DIFFERS, "the loss falls", f"{command} --remedies")
            print(before[name].text, after[name].text, after[name].losses)
    command = "scripts/benchmark_diagnosis --accelerator gpu"
    alarms = sum(causes[name] == "healthy" for name in names if name not in right)
    is_good = len(right) >= 0.95 * len(names) and not alarms
    text = f"{len(right)} of {len(names)} right, {alarms} false alarms"
    part.row("verdicts", text, AGREES if is_good else DIFFERS, "95% right, no false alarm", command)
    text = f"{len(cured)} of {len(remedies)} programs learn with the remedy of their report"
    part.row("remedies", text, AGREES if len(cured) == len(remedies) else DIFFERS, "all learn", f"{command} --remedies")


def _run_programs(runs: list[tuple[str, str]], accelerator: str) -> dict[str, Any]:
    """Run programs, each with its remedy if that is not empty, in several processes. Returns the results by name."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["_diagnosis.remedy"])
    run, results = partial(_run_program, accelerator), {}
    while left := [one for one in runs if one[0] not in results]:
        with context.Pool(min(os.cpu_count() or 1, 16)) as pool:
            found = pool.imap_unordered(run, left)
            results |= {name: result for name, result in found if result is not None}
    return results


def _run_program(accelerator: str, given: tuple[str, str]) -> tuple[str, Any]:
    """Return the name and the result.

    The result is None if an earlier program has ended CUDA's context, for example by an index out of range.
    """
    from _diagnosis import bench, remedy
    from _diagnosis.programs import PROGRAMS

    bench.accelerator, (name, text) = accelerator, given
    try:
        torch.cuda.synchronize() if accelerator == "gpu" else None
    except RuntimeError:
        return name, None
    with tempfile.TemporaryDirectory() as folder:
        program, path = PROGRAMS[name], Path(folder)
        result = remedy.apply(program, text, path) if text else bench.run(program, path)
    if result.error is not None:
        result.error = RuntimeError(str(result.error))  # others may not be picklable
    return name, result


def amp(part: Part, *, compiles: bool = False) -> None:
    """Run ``benchmark_amp``: by hand and with the Trainer, in each precision, with plain and fused optimizers."""
    words = ["--device", "cuda"]
    if compiles:
        words += ["--compile", "--fused", "yes", "--precision", "32-true", "16-mixed", "bf16-mixed"]
    on_cpu = part.simulate and compiles  # the simulated device cannot compile
    with nullcontext() if on_cpu else part.cuda():
        bench = script("benchmark_amp")
        small = ["--batch", "8", "--width", "16", "--batches", "3", "--epochs", "1", "--rounds", "2", "--square", "32"]
        words += small if part.simulate else ["--seconds", f"{part.seconds * 0.6:.0f}", "--no-alignment"]
        if on_cpu:
            words = ["--compile", "eager", "--fused", "yes", "--device", "cpu", *small]
            words += ["--precision", "32-true", "bf16-mixed"]
        given = bench.parse(words)
        torch.set_float32_matmul_precision("highest")
        device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
        sizes = bench.Sizes(given.batch, given.width, given.layers, given.batches, given.epochs)
        loops = (bench.BY_HAND, bench.OURS)
        variants = [
            bench.Variant(precision, fused, sizes.batch, loop)
            for precision in given.precision for fused in given.fused for loop in loops
        ]  # fmt: skip
        given.alignment = False
        results = bench.measure(variants, sizes, given, device)
        command = "scripts/benchmark_amp" + " --compile --fused yes" * compiles
        for name, target, measured, verdict in bench.targets(results, sizes, given):
            precision = name.rpartition(", ")[2]
            precisions = precision if precision in given.precision else "16-unscaled 16-mixed"
            part.row(name, measured, verdict, f"at most {target}", f"{command} --precision {precisions}")
        same = bench.same_weights(results)
        part.row("weights of both loops", same, AGREES if same.startswith("Ours") else DIFFERS, "equal to the bit")
        if not compiles:
            for precision in ("16-mixed", "bf16-mixed"):
                hand = [bench.Variant(one, True, sizes.batch, bench.OURS) for one in ("32-true", precision)]
                gain = statistics.median(results.ratios(*hand))
                part.row(f"speed-up of {precision} over 32-true, fused", f"{gain:.2f}", MEASURED, command=command)
        part.table(f"benchmark_amp cuda{' compiled' * compiles}", bench.report(results, sizes, given, device))


def overhead(part: Part) -> None:
    """Time the step of a tiny model with CUDA events, and the time that the Trainer adds to the loop by hand."""
    with part.cuda():
        bench = script("benchmark_overhead")
        bench.device = torch.device("cuda")
        torch.set_num_threads(1)
        steps, warmup, repeats = (4, 2, 1) if part.simulate else (150, 50, 6)
        names = ["hand-written", "ours"] if part.simulate else ["hand-written", "ours", "Lightning"]
        batches = bench.Batches(warmup + steps + 1)
        for mode, precision, target in (
            ("plain", "16-mixed", 20),
            ("plain", "32-true", 20),
            ("plain", "bf16-mixed", 20),
            ("one self.log", "32-true", 35),
        ):
            times = bench.measure(precision, mode, batches, steps, warmup, repeats, names)
            added = {
                name: [a - b for a, b in zip(times[name], times["hand-written"], strict=True)] for name in names[1:]
            }
            hand = statistics.median(times["hand-written"])
            measured = ", ".join(f"{n} {statistics.median(a):+.0f} ± {spread(a):.0f} us" for n, a in added.items())
            middle, half = statistics.median(added["ours"]), spread(added["ours"])
            verdict = "inconclusive" if abs(middle - target) < half else MET if middle <= target else MISSED
            command = f'scripts/benchmark_overhead --device cuda --precision {precision} --mode "{mode}"'
            expected = f"ours at most +{target} us"
            part.row(f"a step, {mode}, {precision}", f"by hand {hand:.0f} us, {measured}", verdict, expected, command)


FIRST, LAST = 10, 20
"""Kernels and synchronizations are counted from the start of batch ``FIRST`` to the start of batch ``LAST``."""


class Counter:
    """Count the kernels and the synchronizations between :meth:`start` and :meth:`stop`."""

    def __init__(self, simulated: Any) -> None:
        self._simulated = simulated
        self._profiler: Any = None
        self._warnings: Any = None
        self.kernels = self.waits = 0.0

    def start(self) -> None:
        if self._simulated is not None:
            from tests.simulated_cuda.device import Seen

            self._simulated.seen = Seen()
            return
        torch.cuda.synchronize()
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profiler.start()
        self._warnings = warnings.catch_warnings(record=True)
        self._caught = self._warnings.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def stop(self, steps: int = LAST - FIRST) -> None:
        """Stop counting, and divide by ``steps``."""
        if self._simulated is not None:
            seen, self._simulated.seen = self._simulated.seen, None
            self.kernels = len(seen.kernels) / steps
            self.waits = sum(wait.what != "an event" for wait in seen.waits) / steps
            return
        torch.cuda.set_sync_debug_mode("default")
        self._warnings.__exit__(None, None, None)
        self.waits = sum("called a synchronizing" in str(one.message) for one in self._caught) / steps
        torch.cuda.synchronize()
        self._profiler.stop()
        on_device = [
            event.name
            for event in self._profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        ]
        if not on_device:
            raise NotRunError("torch.profiler recorded no kernel; CUPTI is not usable on this machine")
        to_or_from_host = ("Memcpy HtoD", "Memcpy DtoH")
        self.kernels = sum(not name.startswith(to_or_from_host) for name in on_device) / steps


class Counting(L.Callback):
    def __init__(self, counter: Counter) -> None:
        self.counter = counter

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == FIRST:
            self.counter.start()
        if batch_idx == LAST:
            self.counter.stop()


class ByHand:
    """The shortest correct loop: torch's scaler, except that the inverse scale is not computed in each step."""

    def __init__(self, net: nn.Module, optimizer: Any, precision: str) -> None:
        self.net, self.optimizer, self.dtype = net, optimizer, DTYPES[precision]
        self.scales = precision == "16-mixed"
        if self.scales:
            self.scale, self.tracker = torch.tensor(2.0**10).cuda(), torch.zeros((), dtype=torch.int32).cuda()
            self.inverse = self.scale.reciprocal()

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            loss = F.mse_loss(self.net(inputs), targets)
        if not self.scales:
            loss.backward()
            self.optimizer.step()
            return
        (loss * self.scale).backward()
        gradients = [parameter.grad for parameter in self.net.parameters()]
        found_inf = torch.zeros((), device="cuda")
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, self.inverse)
        if self.optimizer.defaults["fused"]:
            self.optimizer.grad_scale, self.optimizer.found_inf = None, found_inf
            self.optimizer.step()
        elif not found_inf.item():  # as torch's scaler does
            self.optimizer.step()
        torch._amp_update_scale_(self.scale, self.tracker, found_inf, 2.0, 0.5, 2000)


CASES = [("32-true", True), ("bf16-mixed", True), ("16-mixed", True), ("32-true", None), ("16-mixed", None)]
"""Precisions, and whether the optimizer is fused; None for the default of AdamW, which is foreach on a GPU."""


def counts(simulated: Any) -> dict[str, tuple[float, float, float, float]]:
    """Count the kernels and synchronizations of a step of each case, by hand and with the Trainer."""
    from trainer.precision import MixedPrecision

    found = {}
    inputs, targets = torch.randn(8, 16).cuda(), torch.randn(8, 16).cuda()
    for precision, fused in CASES:
        optimizer = partial(torch.optim.AdamW, lr=1e-3, fused=fused)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16))
        hand, by_hand = Counter(simulated), None
        for number in range(LAST + 1):
            if by_hand is None:
                by_hand = ByHand(net.cuda(), optimizer(net.parameters()), precision)
            if number == FIRST:
                hand.start()
            if number == LAST:
                hand.stop()
            by_hand.step(inputs, targets)
        ours = Counter(simulated)
        plugin = MixedPrecision("float16", init_scale=2.0**10) if precision == "16-mixed" else precision
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(folder, precision=plugin, max_epochs=1, callbacks=[Counting(ours)])
            trainer.fit(Module(net, optimizer, F.mse_loss), Repeated((inputs, targets), LAST + 1))
        name = f"{precision}, {'fused' if fused else 'foreach'} AdamW"
        found[name] = (hand.kernels, ours.kernels, hand.waits, ours.waits)
    return found


def kernels(part: Part) -> None:
    """Compare kernels and synchronizations of a step with those on the simulated device."""
    command = [sys.executable, __file__, "predict_kernels", "--simulate", "--rows", os.devnull]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    predicted = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    if not predicted:
        print(f"the simulated device does not run here:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
    with part.cuda() as simulated:
        measured = counts(simulated)
    for name, (hand, ours, waits_by_hand, waits) in measured.items():
        text = (
            f"by hand {hand:.1f} kernels, ours {ours - hand:+.1f};"
            f" synchronizations {waits:.1f}, by hand {waits_by_hand:.1f}"
        )
        if name not in predicted:
            part.row(f"a step, {name}", text, MEASURED, "no prediction: the simulated device does not run here")
            continue
        hand_there, ours_there, _, waits_there = predicted[name]
        agrees = abs((ours - hand) - (ours_there - hand_there)) < 0.05 and abs(waits - waits_there) < 0.05
        expected = f"ours {ours_there - hand_there:+.1f} kernels, {waits_there:.1f} synchronizations"
        part.row(f"a step, {name}", text, AGREES if agrees else DIFFERS, expected)


def predict_kernels(part: Part) -> None:
    """Print the counts of the simulated device as JSON; :func:`kernels` runs this in a process without a GPU."""
    with part.cuda() as simulated:
        print(json.dumps(counts(simulated)))


def memory(part: Part) -> None:
    """Compare the peak memory of a step with the prediction of ``benchmark_memory``."""
    bench = script("benchmark_memory")
    if part.simulate:
        given = SimpleNamespace(width=64, heads=2, layers=2, vocabulary=256, context=64)
    else:
        given = SimpleNamespace(width=1024, heads=16, layers=12, vocabulary=32_000, context=1024)
    sequences = 2 if part.simulate else 4
    predicted = {way: bench.peak_of(way, given, sequences)[0] for way in ("by hand", "ours")}
    with part.cuda() as simulated:
        for way, expected in predicted.items():
            living = _living() if simulated else nullcontext()
            with living as counted:
                peak = peak_on_gpu(way, given, sequences, counted, bench)
            agrees = abs(peak / expected - 1) <= (0.15 if part.simulate else 0.1)
            part.row(
                f"peak memory of a step of a GPT, bf16-mixed, {way}", f"{peak / 2**20:.1f} MiB",
                AGREES if agrees else DIFFERS, f"{expected / 2**20:.1f} MiB ± {'15' if part.simulate else '10'}%",
            )  # fmt: skip


def _living() -> Any:
    """Count the bytes of the tensors on the simulated device."""
    from tests.simulated_cuda.device import Simulated
    from trainer.cli.checks.fake_step import LiveMemory

    class OnDevice(LiveMemory):
        def storage_of(self, tensor: Tensor) -> torch.UntypedStorage | None:
            return tensor.held.untyped_storage() if isinstance(tensor, Simulated) else None

    return OnDevice()


class PeakOf(L.Callback):
    """Reset the peak at the start of the last batch, and read it at the end."""

    def __init__(self, living: Any, steps: int) -> None:
        self.living, self.steps = living, steps
        self.bytes = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.steps - 1:
            self.reset()

    def on_train_batch_end(self, *_: Any) -> None:
        self.read()

    def reset(self) -> None:
        if self.living is not None:
            self.living.peak = self.living.current
        else:
            torch.cuda.reset_peak_memory_stats()

    def read(self) -> None:
        self.bytes = self.living.peak if self.living is not None else torch.cuda.max_memory_allocated()


def peak_on_gpu(way: str, given: Any, sequences: int, living: Any, bench: Any) -> int:
    """Return the peak of the third step in bytes, of a loop by hand or of a fit."""
    from recipes.language_model import LanguageModel

    gc.collect()  # otherwise an earlier model counts
    steps = bench.STEPS
    torch.manual_seed(0)
    module = LanguageModel(
        partial(torch.optim.AdamW, lr=1e-3, fused=True), context=given.context, vocabulary=given.vocabulary,
        tokenizer="none is needed", width=given.width, heads=given.heads, layers=given.layers,
    )  # fmt: skip
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    batch = tuple(torch.zeros(sequences, given.context, dtype=torch.int64, device="cuda") for _ in range(2))
    peak = PeakOf(living, steps)
    if way == "ours":
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(folder, precision="bf16-mixed", max_epochs=1, callbacks=[peak])
            trainer.fit(module, Repeated(batch, steps))
        return peak.bytes
    module.configure_model()
    module = module.cuda()
    optimizer = module.configure_optimizers()
    for number in range(steps):
        if number == steps - 1:
            peak.reset()
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = module.training_step(batch, number)["loss"]
        loss.backward()
        del loss
        optimizer.step()
    peak.read()
    return peak.bytes


def prefetching(part: Part) -> None:
    """Time steps on batches of 1, 16 and 150 MB from pinned memory, with prefetching on and off."""
    with part.cuda():
        bench = script("benchmark_overhead")
        bench.device = torch.device("cuda")
        for megabytes in (1, 16, 150):
            if part.time_is_up:
                raise NotRunError(f"the time was up before batches of {megabytes} MB")
            bench.host_rows = 1 + megabytes // 8 if part.simulate else 256 * megabytes
            steps, warmup, repeats = (3, 2, 1) if part.simulate else (60, 20, 6)
            batches = bench.Batches(warmup + steps + 1, bench.PREFETCHED)
            rounds: dict[str, dict[str, list[float]]] = {
                mode: {"hand-written": [], "ours": []} for mode in bench.FROM_HOST
            }
            for _ in range(repeats):
                for mode, seen in rounds.items():
                    for name, found in bench.measure("bf16-mixed", mode, batches, steps, warmup, 1, list(seen)).items():
                        seen[name] += found
            on, off = (statistics.median(rounds[mode]["ours"]) for mode in bench.FROM_HOST)
            pairs = zip(*(rounds[mode]["ours"] for mode in bench.FROM_HOST), strict=True)
            longer = [a / b - 1 for a, b in pairs]
            middle = statistics.median(longer)
            verdict = MET if middle <= 0.02 else MISSED
            if abs(middle - 0.02) < spread(longer):
                verdict = "inconclusive"
            hand = statistics.median(rounds[bench.PREFETCHED]["hand-written"])
            measured = f"on {on:.0f} us a step, off {off:.0f} us ({middle:+.1%} ± {spread(longer):.1%})"
            measured += f"; by hand, on {hand:.0f} us"
            command = (
                f"scripts/benchmark_overhead --device cuda --host-rows {bench.host_rows} --precision bf16-mixed --mode"
                f' "{bench.PREFETCHED}" "{bench.NOT_PREFETCHED}"'
            )
            expected = "with prefetching at most 2% slower than without"
            part.row(f"batches of {megabytes} MB", measured, verdict, expected, command)


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.residual(x))


def make_resnet50(blocks: Iterable[int] = (3, 4, 6, 3), width: int = 64) -> nn.Sequential:
    """Return a ResNet-50 (He et al. 2015, strides in the 3x3 convolutions). torchvision is not needed."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    channels = width
    for level, number in enumerate(blocks):
        for index in range(number):
            wide = width * 2**level
            layers.append(Bottleneck(channels, wide, 2 if level and not index else 1))
            channels = 4 * wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def resnet50(part: Part) -> None:
    """Measure images per second of ResNet-50 at 224 pixels, by hand and with the Trainer."""
    with part.cuda():
        torch.backends.cudnn.benchmark = True
        batch, pixels, warmup, steps = (2, 32, 1, 2) if part.simulate else (256, 224, 4, 8)
        shape = {"blocks": (1, 1, 1, 1), "width": 4} if part.simulate else {}
        kinds = {"fp16": "16-mixed", "bf16": "bf16-mixed", "TF32": "32-true", "fp32": "32-true"}
        layouts = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
        for (label, precision), (name, layout) in product(kinds.items(), layouts.items()):
            if part.time_is_up:
                part.row(f"{label}, {name}", "the time was up", NOT_RUN)
                continue
            tf32 = label != "fp32"
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = tf32
            images = torch.randn(batch, 3, pixels, pixels).to("cuda").contiguous(memory_format=layout)
            data = (images, torch.randint(0, 1000, (batch,)).to("cuda"))
            ways = resnet_by_hand, resnet_by_trainer
            rounds = [[way(_make_net(shape, layout), data, precision, warmup, steps) for way in ways] for _ in range(2)]
            hand, ours = map(min, zip(*rounds, strict=True))
            rates = f"ours {batch / ours:.0f} images/s, by hand {batch / hand:.0f} ({ours / hand - 1:+.1%} time)"
            part.row(f"{label}, {name}", rates, within(ours, hand, 0.02), "ours at most +2% time")


def _make_net(shape: dict[str, Any], layout: torch.memory_format) -> nn.Module:
    torch.manual_seed(0)
    return make_resnet50(**shape).to(memory_format=layout)


sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True)


def resnet_by_hand(net: nn.Module, batch: Any, precision: str, warmup: int, steps: int) -> float:
    net.cuda()
    optimizer, timing, dtype = sgd(net.parameters()), Timing(), DTYPES[precision]
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "16-mixed")
    for _ in range(warmup + steps + 1):
        timing.on_train_batch_start()
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = F.cross_entropy(net(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return timing.seconds(warmup)


def resnet_by_trainer(net: nn.Module, batch: Any, precision: str, warmup: int, steps: int) -> float:
    timing = Timing()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, precision=precision, max_epochs=1, callbacks=[timing])
        trainer.fit(Module(net, sgd, F.cross_entropy), Repeated(batch, warmup + steps + 1))
    return timing.seconds(warmup)


def unet(part: Part) -> None:
    """Compare inference of a UNet in float32 and in float16. In an article of torch for R, float16 was 50% faster."""
    try:
        from recipes.segmentation import UNet
    except ImportError as error:
        raise NotRunError(f"recipes.segmentation: {error}") from error
    with part.cuda():
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = True
        batch, pixels, warmup, steps = (1, 16, 1, 2) if part.simulate else (16, 256, 5, 20)
        images = torch.randn(batch, 3, pixels, pixels).to("cuda")
        seconds = {}
        for precision in ("32-true", "16-mixed"):
            torch.manual_seed(0)
            net = UNet(3, width=4 if part.simulate else 64, depth=2 if part.simulate else 4)
            timing = Timing()
            with tempfile.TemporaryDirectory() as folder:
                trainer = make_trainer(folder, precision=precision, callbacks=[timing])
                data = Repeated(images, warmup + steps + 1)
                trainer.predict(Module(net, sgd), data, return_predictions=False)
            seconds[precision] = timing.seconds(warmup)
        gain = seconds["32-true"] / seconds["16-mixed"]
        rates = ", ".join(f"{precision} {batch / took:.0f} images/s" for precision, took in seconds.items())
        part.row(
            "UNet, predict, float16 over float32", f"{gain - 1:+.0%} ({rates})", MET if gain >= 1.5 else MISSED,
            "+50%, as in the article",
        )  # fmt: skip


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that ``work`` takes on the host and on the device."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


class Saves(L.Callback):
    """Save with the Trainer and with ``torch.save`` at the end of the first step, with the weights on the device."""

    def __init__(self, ours: Path, by_hand: Path) -> None:
        self.ours, self.by_hand = ours, by_hand
        self.seconds = self.seconds_by_hand = 0.0
        self.weights: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seconds_by_hand = timed(lambda: torch.save(pl_module.state_dict(), self.by_hand))
        self.seconds = timed(lambda: trainer.save_checkpoint(self.ours))
        self.weights = {name: value.cpu().clone() for name, value in pl_module.state_dict().items()}


class Loads(L.Callback):
    """Keep the weights and the time at the start of a fit."""

    def __init__(self) -> None:
        self.at = 0.0
        self.weights: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        torch.cuda.synchronize()
        self.at = time.perf_counter()
        self.weights = {name: value.cpu().clone() for name, value in pl_module.state_dict().items()}


def checkpoint(part: Part) -> None:
    """Time saving and loading a checkpoint of 1 GB, and compare the weights bit by bit."""
    width = 64 if part.simulate else 11_180  # two layers; 4 bytes for each of 2 * width ** 2 weights
    optimizer = partial(torch.optim.SGD, lr=1e-3)
    with part.cuda(), tempfile.TemporaryDirectory() as folder:
        path, by_hand = Path(folder) / "ours.ckpt", Path(folder) / "by_hand.pt"
        batch = tuple(torch.randn(2, width).to("cuda") for _ in range(2))
        saves, loads = Saves(path, by_hand), Loads()
        trainer = make_trainer(folder, precision="bf16-mixed", max_epochs=1, callbacks=[saves])
        trainer.fit(Module(mlp(width, 2), optimizer), Repeated(batch, 1))
        gigabytes = path.stat().st_size / 1e9
        times = f"{saves.seconds:.2f} s; torch.save {saves.seconds_by_hand:.2f} s"
        part.row(
            f"save {gigabytes:.2f} GB", times, within(saves.seconds, saves.seconds_by_hand, 0.25), "torch.save + 25%"
        )
        again = Module(mlp(width, 2), optimizer)

        def load_by_hand() -> None:
            loaded = torch.load(by_hand, weights_only=True, map_location="cpu")
            again.load_state_dict({name: value.to("cuda") for name, value in loaded.items()})

        loaded_by_hand = timed(load_by_hand)
        again = Module(mlp(width, 2), optimizer)
        began = time.perf_counter()
        resumed = make_trainer(folder, precision="bf16-mixed", max_epochs=2, callbacks=[loads])
        resumed.fit(again, Repeated(batch, 1), ckpt_path=path)
        times = f"{loads.at - began:.2f} s with the start of the fit; torch.load {loaded_by_hand:.2f} s"
        part.row(f"load {gigabytes:.2f} GB", times, MEASURED)
        same = saves.weights.keys() == loads.weights.keys()
        same = same and all(torch.equal(value, loads.weights[name]) for name, value in saves.weights.items())
        part.row("weights after loading", "equal" if same else "not equal", AGREES if same else DIFFERS, "equal")


def fsdp(part: Part) -> None:
    """Train with FSDP2 on one device, and compare the losses with those without sharding."""
    from trainer import FSDP2Strategy
    from trainer.errors import UnsupportedError

    try:
        FSDP2Strategy()
    except UnsupportedError as error:
        raise NotRunError(str(error)) from error
    accelerator, device = ("cpu", "cpu") if part.simulate else ("gpu", "cuda")
    width, rows, steps = (16, 4, 4) if part.simulate else (2048, 256, 60)
    losses, seconds = {}, {}
    draw = torch.Generator().manual_seed(1)
    batch = tuple(torch.randn(rows, width, generator=draw).to(device) for _ in range(2))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    for strategy in ("auto", "fsdp"):
        torch.manual_seed(0)
        module = Module(mlp(width, 4), torch.optim.AdamW)
        timing = Timing()
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(
                folder, accelerator=accelerator, strategy=strategy, precision="bf16-mixed", max_epochs=1,
                callbacks=[] if part.simulate else [timing],
            )  # fmt: skip
            trainer.fit(module, Repeated(batch, steps))
        losses[strategy] = torch.stack([loss.float().cpu() for loss in module.losses])
        seconds[strategy] = 0.0 if part.simulate else timing.seconds(steps // 2)
    difference = float((losses["fsdp"] - losses["auto"]).abs().max())
    part.row(
        "losses with FSDP2, bf16-mixed", f"differ by at most {difference:.1e} over {steps} steps",
        AGREES if difference <= 1e-3 * float(losses["auto"].abs().max()) else DIFFERS, "0.1% of the loss",
    )  # fmt: skip
    if not part.simulate:
        times = f"{seconds['fsdp'] * 1e3:.2f} ms, without sharding {seconds['auto'] * 1e3:.2f} ms"
        part.row("a step with FSDP2", times, MEASURED)


def fp8(part: Part) -> None:
    """Compare a compiled MLP in fp8-mixed with bf16-mixed."""
    if find_spec("torchao") is None:
        raise NotRunError("needs `pip install torchao`")
    if not part.simulate and torch.cuda.get_device_capability() < (8, 9):
        raise NotRunError("needs a GPU with float8 products: compute capability 8.9 or newer")
    accelerator, device = ("cpu", "cpu") if part.simulate else ("gpu", "cuda")
    width, rows, warmup, steps = (32, 16, 1, 3) if part.simulate else (4096, 8192, 8, 20)
    draw = torch.Generator().manual_seed(1)
    batch = tuple(torch.randn(rows, width, generator=draw).to(device) for _ in range(2))
    seconds, last = {}, {}
    for precision in ("bf16-mixed", "fp8-mixed"):
        torch.manual_seed(0)
        net, timing = mlp(width, 3), Timing()
        if not part.simulate:
            torch.compiler.reset()
            net.compile()
        module = Module(net, partial(torch.optim.SGD, lr=0.1))
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(
                folder, accelerator=accelerator, precision=precision, max_epochs=1,
                callbacks=[] if part.simulate else [timing],
            )  # fmt: skip
            trainer.fit(module, Repeated(batch, warmup + steps + 1))
        last[precision] = float(module.losses[-1])
        seconds[precision] = 1.0 if part.simulate else timing.seconds(warmup)
    off = abs(last["fp8-mixed"] / last["bf16-mixed"] - 1)
    part.row("the last loss in fp8-mixed", f"{off:.2%} off bf16-mixed", AGREES if off <= 0.05 else DIFFERS, "within 5%")
    if not part.simulate:
        gain = seconds["bf16-mixed"] / seconds["fp8-mixed"]
        times = ", ".join(f"{name} {took * 1e3:.2f} ms" for name, took in seconds.items())
        part.row("fp8-mixed over bf16-mixed, compiled", f"{gain:.2f}x ({times})", MET if gain > 1 else MISSED, "faster")


class Planted(Module):
    """Synchronize with the device on the lines that are marked."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        out = self.net(inputs)
        if (out > 0).any():  # planted
            out = out * 1.0
        loss = F.mse_loss(out, targets)
        self.number = loss.item()  # planted
        self.kept = loss.detach().cpu()  # planted
        out[out > 0]  # planted
        torch.tensor([1.0, 2.0], device=self.device)  # planted
        return loss


def sync_detector(part: Part) -> None:
    """Compare the lines that ``SyncDetector`` reports with the lines that synchronize."""
    from trainer.callbacks import SyncDetector

    text = Path(__file__).read_text().splitlines()
    planted = {number for number, line in enumerate(text, 1) if line.endswith("  # planted")}
    device = "cpu" if part.simulate else "cuda"
    detector = SyncDetector(batches=4, after=1)
    batch = tuple(torch.randn(8, 16).to(device) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            folder, accelerator="cpu" if part.simulate else "gpu", max_epochs=1, callbacks=[detector]
        )
        trainer.fit(Planted(mlp(16, 2), partial(torch.optim.SGD, lr=0.1)), Repeated(batch, 8))
    found = {one.line for one in detector.synchronizations}
    text_of = f"{len(found & planted)} of {len(planted)} planted, {len(found - planted)} others: {sorted(found)}"
    part.row("lines that synchronize", text_of, AGREES if found == planted else DIFFERS, f"{sorted(planted)}")


PARTS: dict[str, Callable[[Part], None]] = {
    "tests": tests,
    "diagnosis": diagnosis,
    "amp": amp,
    "amp-compiled": partial(amp, compiles=True),
    "overhead": overhead,
    "kernels": kernels,
    "memory": memory,
    "prefetching": prefetching,
    "resnet50": resnet50,
    "unet": unet,
    "checkpoint": checkpoint,
    "fsdp": fsdp,
    "fp8": fp8,
    "sync_detector": sync_detector,
    "predict_kernels": predict_kernels,
}


def main() -> int:
    """Run one part. Returns 1 if it raised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--seconds", type=float, default=600.0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    part = Part(given.part, given.rows, given.simulate, given.seconds)
    status = 0
    try:
        PARTS[given.part](part)
    except NotRunError as error:
        part.row(given.part, str(error), NOT_RUN)
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if given.simulate:
        os._exit(status)  # the replaced table of CUDA's hooks may crash the destructors of torch
    return status


if __name__ == "__main__":
    sys.exit(main())
