"""Run cases of a program with one Trainer, each in a separate process.

``python -m _ecosystem.child PROGRAM ours|lightning FOLDER TIMEOUT pytorch_lightning|lightning CASE ...``. The record of
a case is ``FOLDER/CASE/ours/record.pt``; the files of the run are next to it in ``run``.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from _ecosystem.describe import Describer

SEED = 1


class Run:
    """The argument of a program's case.

    Attributes:
        folder: output folder of the run and working directory.
        lightning: Lightning's package as the library imports it, ``lightning.pytorch`` or ``pytorch_lightning``.
        who: ``"ours"`` or ``"lightning"``. Programs do not need it.
    """

    def __init__(self, who: str, folder: Path, lightning: ModuleType) -> None:
        self.who, self.folder, self.lightning = who, folder, lightning
        self.describe = Describer(str(folder))
        self.columns: dict[str, dict[str, Any]] = {}
        self.calls: Counter[str] = Counter()
        self.rows: list[Any] = []
        """The rows that loggers received."""
        self.seen: list[Any] = []
        """The metrics that callbacks read at the ends of epochs, validations and tests."""
        self.entry = ""
        self.entries = 0
        self.part: str | None = None
        self.random: dict[Any, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return nothing, because the records of a run are not part of its checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the records of this run."""

    def Trainer(self, **arguments: Any) -> Any:  # noqa: N802
        """Return a quiet Trainer on the CPU that writes into the folder."""
        quiet = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "enable_model_summary": False}
        return self.lightning.Trainer(**{**quiet, "default_root_dir": self.folder, "log_every_n_steps": 1, **arguments})

    def keep(self, name: str, value: Any) -> None:
        """Record ``value`` (of any type) to compare it between the Trainers."""
        self.note("results", name, value)

    def weights(self, name: str, module: Any) -> None:
        """Record a module's weights to compare them between the Trainers."""
        self.note("weights", name, module.state_dict())

    def reload(self, cls: Any, path: Any, **options: Any) -> Any:
        """Load ``cls.load_from_checkpoint(path)`` and record its weights and hyperparameters. Returns the module."""
        module = cls.load_from_checkpoint(path, **{"map_location": "cpu", "weights_only": False, **options})
        name = f"{cls.__name__} of {Path(path).name}"
        self.note("reload", name, {"weights": module.state_dict(), "hyper-parameters": dict(module.hparams)})
        return module

    @contextmanager
    def resume(self) -> Iterator[None]:
        """Record the Trainers in this context as resumed runs."""
        self.part = "resume"
        try:
            yield
        finally:
            self.part = None

    def seed(self, seed: int = SEED) -> None:
        """Seed all generators."""
        self.lightning.seed_everything(seed, workers=True, verbose=False)

    # methods that only the harness calls

    def note(self, column: str, name: str, value: Any) -> None:
        """Keep a description of ``value``."""
        if self.entry:
            name = f"{self.entry}: {name}"
        if self.part and column in ("weights", "metrics", "hooks"):
            column, name = self.part, f"{column}: {name}"
        self.columns.setdefault(column, {})[name] = self.describe(value)

    def begin(self, entry: str) -> None:
        """Start the record of a Trainer's ``fit``, ``validate``, ``test`` or ``predict``."""
        self.entries += 1
        self.entry = f"{self.entries}. {entry}"

    def end(self) -> None:
        """End the record of a run, and keep it."""
        self.note("metrics", "rows", self.rows)
        self.note("metrics", "seen", self.seen)
        self.note("hooks", "calls", dict(sorted(self.calls.items())))
        self.rows, self.seen, self.calls = [], [], Counter()
        self.entry = ""

    def files(self) -> None:
        """Record the names of the run's files, and the contents of checkpoints."""
        import torch

        found = sorted(path for path in self.folder.rglob("*") if path.is_file())
        names = [re.sub(r"(events\.out\.tfevents).*", r"\1", str(path.relative_to(self.folder))) for path in found]
        self.note("checkpoint", "files", dict.fromkeys(names, True))
        for path in found:
            if path.suffix in (".ckpt", ".pt", ".pth"):
                contents = torch.load(path, map_location="cpu", weights_only=False)
                self.note("checkpoint", str(path.relative_to(self.folder)), contents)


def install(who: str, old_name: bool) -> ModuleType:
    """Import Lightning's package under the library's name for it. With ``who="ours"`` its Trainer is replaced by ours.

    Call this before importing the library, so that its imports and subclasses use our Trainer.
    """
    if who == "ours" and old_name:
        importlib.import_module("trainer.pytorch_lightning")
    package = importlib.import_module("pytorch_lightning" if old_name else "lightning.pytorch")
    if who == "ours":
        from trainer import Trainer

        theirs = package.Trainer
        for name, module in list(sys.modules.items()):
            if name.startswith(("lightning.", "pytorch_lightning")) or name == "lightning":
                for attribute in ("Trainer", "_Trainer"):
                    if module.__dict__.get(attribute) is theirs:
                        setattr(module, attribute, Trainer)
    return package


def main(program: str, who: str, folder: Path, timeout: int, old_name: bool, cases: list[str]) -> None:
    """Import the program once, because imports take the longest, and run each case in a fork of this process."""
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.filterwarnings("ignore", ".*use_deterministic_algorithms.*")
    package = install(who, old_name)
    package.seed_everything(SEED, workers=True, verbose=False)
    spec = importlib.util.spec_from_file_location(f"program_{Path(program).stem}", program)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for case in cases:
        place = folder / case.removeprefix("case_") / who
        (place / "run").mkdir(parents=True)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            signal.alarm(timeout)
            log = os.open(place / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for stream in (1, 2):
                os.dup2(log, stream)
            try:
                run_case(getattr(module, case), Run(who, place / "run", package), place)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)  # the parent reads the files
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if ended:
            how = f"not done after {timeout} seconds" if ended == -signal.SIGALRM else f"ended with status {ended}"
            (place / "outcome.json").write_text(json.dumps({"error": how, "seconds": timeout}))


def run_case(case: Callable[[Run], None], run: Run, folder: Path) -> None:
    """Run a case in the new process, and write ``record.pt`` and ``outcome.json``."""
    import torch

    from _ecosystem import recorder

    os.chdir(run.folder)
    recorder.instrument(run, run.lightning.Trainer, run.lightning.Callback, run.lightning.LightningModule)
    run.seed()
    started, error = time.monotonic(), ""
    try:
        case(run)
    except (Exception, SystemExit) as failure:
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
    seconds = time.monotonic() - started
    run.part = None
    if run.entry:
        run.end()
    if not error:
        run.files()
    torch.save(run.columns, folder / "record.pt")
    (folder / "outcome.json").write_text(json.dumps({"error": error, "seconds": seconds}))


if __name__ == "__main__":
    words = sys.argv[1:]
    main(words[0], words[1], Path(words[2]), int(words[3]), words[4] == "pytorch_lightning", words[5:])
