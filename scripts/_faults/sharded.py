"""Cases of sharded checkpoints, written asynchronously by two ranks under FSDP."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from _faults import bench as tools
from _faults import cases, strangers
from _faults.bench import Bench, Run
from _faults.cases import END, TWO, after_batches, case, starts_over, unfinished
from _faults.scoreboard import Outcome
from _faults.training import Setup, read_diary

OPTIONS: dict[str, Any] = {"trainer": {"strategy": "fsdp"}, "files": {"sharded": True, "asynchronous": True}}
SETUP = replace(TWO, ballast=2)


def resume(bench: Bench, who: str, folder: Path, setup: Setup, detail: str = "") -> Outcome:
    """Start the same command again on two ranks, and compare its result with the undisturbed run."""
    reference = bench.reference(who, setup=setup, ranks=2, **OPTIONS)
    before = len(read_diary(folder / "batches_0.jsonl"))
    runs = bench.ranks(who, folder, setup=setup, **OPTIONS)
    for run in runs:
        if run.wait(END) != 0:
            return Outcome("lost", f"the next start fails: {tools.last_line(runs[0].log)[:90]}")
    if starts_over(folder, before):
        return Outcome("lost", "starts over from the first batch")
    return bench.verdict(folder, reference, detail)


def ended(runs: list[Run]) -> None:
    """Wait until one process has ended, and end the others, as torchrun does."""
    tools.wait_until(lambda: any(run.status is not None for run in runs), END)
    for run in runs:
        run.kill()


def killed(bench: Bench, who: str, setup: Setup, name: str) -> Path:
    """Return the folder of a run that was killed after some checkpoints."""
    folder = bench.new_folder(name)
    runs = bench.ranks(who, folder, setup=setup, **OPTIONS)
    after_batches(runs[0], folder, 22)
    for run in runs:
        run.kill()
    return folder


@case("sharded-kill", "Sharded checkpoints (FSDP): SIGKILL of one rank inside of a save", compares=False)
def kill_in_save(bench: Bench, who: str) -> Outcome:
    setup, delays = replace(SETUP, pace=0.0), [0.002 * 1.5**i for i in range(12)]  # up to 0.17 s
    parts = 0
    for i, delay in enumerate(delays):
        folder = bench.new_folder("in save")
        signal = {"kind": "signal in save", "at": 3 + i % 3, "delay": delay, "signals": ["SIGKILL"], "rank": i % 2}
        ended(bench.ranks(who, folder, setup=setup, fault=signal, **OPTIONS))
        parts += bool(unfinished(folder))
        if (outcome := resume(bench, who, folder, setup)).word != "exact":
            return Outcome(outcome.word, f"kill {i + 1}, {delay * 1000:.0f} ms into a save: {outcome.detail}")
    message = f"{len(delays)} kills, {delays[0] * 1000:.0f} to {delays[-1] * 1000:.0f} ms into a save"
    return Outcome("exact", f"{message}; {parts} left an unfinished folder")


def newest(folder: Path) -> list[Path]:
    """Return the newest checkpoint, and others of that step."""
    files = sorted(tools.checkpoints(folder), key=_step, reverse=True)
    return [file for file in files if _step(file) == _step(files[0])]


def _step(checkpoint: Path) -> int:
    import json

    return int(json.loads((checkpoint / "manifest.json").read_text())["step"]) if checkpoint.is_dir() else 0


def damaged(damage: Callable[[Path], None]) -> cases.Body:
    """Damage each file of the newest checkpoint in turn."""

    def body(bench: Bench, who: str) -> Outcome:
        source = killed(bench, who, SETUP, "killed")
        files = sorted(file.name for file in newest(source)[0].iterdir())
        for name in files:
            folder = strangers.copy_of(source, bench.new_folder("damaged"))
            for file in tools.checkpoints(folder):
                if file.is_dir() and not (file / "manifest.json").exists():
                    return Outcome("lost", f"{file} has no manifest")
            spoilt = newest(folder)
            for checkpoint in spoilt:
                damage(checkpoint / name)
            outcome = resume(bench, who, folder, SETUP)
            if outcome.word != "exact":
                return Outcome(outcome.word, f"{name}: {outcome.detail}")
            logs = "".join(run.log for run in bench.runs[-2:])
            if not any(checkpoint.name in logs for checkpoint in spoilt):
                return Outcome("exact", f"but the checkpoint with a damaged {name} is not named", good=False)
        return Outcome("exact", f"from the one before, for each of {len(files)} files")

    return body


_IN = "Sharded checkpoints (FSDP): in the newest,"
case("sharded-bit-flip", f"{_IN} a bit of a file is flipped", compares=False)(damaged(tools.flip_bit))
case("sharded-truncated", f"{_IN} a file is cut short", compares=False)(damaged(tools.cut_short))
case("sharded-missing", f"{_IN} a file is missing", compares=False)(damaged(Path.unlink))


@case("sharded-disk-full", "Sharded checkpoints (FSDP): the disk is full", compares=False)
def disk_full(bench: Bench, who: str) -> Outcome:
    folder, setup = bench.new_folder("disk"), replace(SETUP, ballast=4)
    with tools.small_disk(100, folder) as mounted:
        if not mounted:
            return Outcome("not possible", "no disk of 100 MB can be mounted here", good=False)
        fault = {"kind": "signal", "at": 10, "signals": ["SIGKILL"], "rank": 0}
        ended(bench.ranks(who, folder, setup=setup, fault=fault, **OPTIONS))
        filler = folder / "filler"
        with filler.open("wb") as file, tools.suppress(OSError):
            while True:
                file.write(b"0" * (1 << 20))
                file.flush()
        tools.os.truncate(filler, filler.stat().st_size - (2 << 20))
        runs = bench.ranks(who, folder, setup=setup, **OPTIONS)
        statuses = [run.wait(END) for run in runs]
        filler.unlink()
        if 0 in statuses:
            return Outcome("silent", f"ranks end with {statuses}, without their checkpoints")
        message = tools.last_line(runs[0].log)
        outcome = resume(bench, who, folder, setup)
        if outcome.word == "exact" and not (str(folder) in message and "bytes" in message):
            return Outcome("exact", f"but the error is: {message[:120]}", good=False)
        return Outcome(outcome.word, outcome.detail or "after an error with path and bytes, on both ranks")


# --- strangers --------------------------------------------------------------------------------------------------------


def _evil(folder: Path, name: str, owned: Path) -> None:
    if name.endswith(".ckpt"):
        import torch

        torch.save({"state_dict": {}, "loops": {}, "evil": strangers.Payload(owned)}, folder / name)
    else:
        (folder / name).write_bytes(pickle.dumps(strangers.Payload(owned)))


def _process(folder: Path, name: str, owned: Path) -> None:
    """Replace a rank's own objects, which are stored as an entry among the tensors."""
    from trainer.checkpoint import sharded_files, shards

    facts = dict(sharded_files.read_manifest(folder).facts)
    tree, tensors, own = shards.split_for_write(shards.read_whole(folder))
    own[int(name.split()[1])] = strangers.Payload(owned)
    shards.write(folder, tree, tensors, own, {key: facts[key] for key in facts if key != "name"}, None)


def _entries(folder: Path, name: str, owned: Path) -> None:
    """Let torch write a checkpoint with entries that are not tensors, because torch reads these without restriction."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader

    keys = FileSystemReader(folder).read_metadata().state_dict_metadata
    for file in (*folder.glob("*.distcp"), folder / ".metadata"):
        file.unlink()
    dcp.save({key: strangers.Payload(owned) for key in keys}, checkpoint_id=folder, no_dist=True)


def _per_rank(folder: Path, name: str, owned: Path) -> None:
    """Write metadata for each rank, which torch 2.15 reads if there is no common metadata file."""
    (folder / ".metadata").unlink()
    for rank in range(2):
        _evil(folder, f"__{rank}.metadata", owned)


POISONS: dict[str, Callable[[Path, str, Path], None]] = {
    ".metadata": _evil,
    "state.ckpt": _evil,
    "process 0": _process,
    "process 1": _process,
    "__0_0.distcp": _evil,
    "__1_0.distcp": _evil,
    "entries that are not tensors": _entries,
    "metadata of each rank": _per_rank,
}


def sealed(folder: Path) -> None:
    """Write a manifest that matches the current files."""
    from trainer.checkpoint import sharded_files

    facts = dict(sharded_files.read_manifest(folder).facts)
    (folder / "manifest.json").unlink()
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    sums = {name: (len(contents), sha256(contents).hexdigest()) for name, contents in files.items()}
    sharded_files.seal(folder, facts.pop("name"), sums, facts)


@case("sharded-stranger", "A malicious sharded checkpoint with correct checksums", compares=False)
def stranger(bench: Bench, who: str) -> Outcome:
    source = killed(bench, who, SETUP, "killed")
    good = next(file for file in tools.checkpoints(source) if file.name == "last.ckpt")
    ran, read = [], []
    for name, spoil in POISONS.items():
        folder = bench.new_folder("stranger")
        bad, owned = strangers.copy_of(good, folder / "bad.ckpt"), folder / "owned"
        spoil(bad, name, owned)
        sealed(bad)
        runs = bench.ranks(who, folder, setup=SETUP, start=str(bad), saves="none", **OPTIONS)
        if 0 in [run.wait(END) for run in runs]:
            read.append(name)
        alone = bench.train(who, folder, setup=SETUP, start=str(bad), saves="none", trainer={"exact_resume": False})
        if alone.wait(END) == 0:
            read.append(f"{name}, on one process")
        if owned.exists():
            ran.append(name)
    if ran:
        return Outcome("code ran", f"in {len(ran)} of {len(POISONS)} places: {', '.join(ran)}")
    if read:
        return Outcome("nothing ran", f"but read, against the rule: {', '.join(read)}", good=False)
    return Outcome("nothing ran", f"in {len(POISONS)} places, on two processes and on one", good=True)
