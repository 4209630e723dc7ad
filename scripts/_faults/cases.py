"""The cases: a fault, and the outcome of the run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _faults import bench as tools
from _faults import project, strangers
from _faults.bench import Bench, HungError, Run
from _faults.scoreboard import Outcome
from _faults.training import EVERYTHING, Setup, read_diary

Body = Callable[[Bench, str], Outcome]

END = 90.0
"""Seconds that a run may take to end."""

MOST = 20
"""Maximum number of kills in a case with torchrun, over all its jobs. Each takes seconds."""

SMALL = replace(EVERYTHING, batches=20, epochs=2, overflows=(1, 7, 25), validate_every=8, pace=0.01)


@dataclass(frozen=True)
class Case:
    """One row of the scoreboard.

    Attributes:
        name: for ``--only``.
        title: description of the fault.
        body: function that causes it.
        compares: whether it also runs with Lightning's Trainer.
    """

    name: str
    title: str
    body: Body
    compares: bool = True


CASES: dict[str, Case] = {}


def case(name: str, title: str, *, compares: bool = True) -> Callable[[Body], Body]:
    """Register a function in ``CASES``."""

    def enter(body: Body) -> Body:
        CASES[name] = Case(name, title, body, compares)
        return body

    return enter


def run_case(one: Case, bench: Bench, who: str) -> Outcome:
    """Return the outcome of a case. A run that hangs, or that fails without a fault, is an outcome, too."""
    try:
        outcome = one.body(bench, who)
        outcome.detail = outcome.detail.replace(f"{bench.folder}/", "")
        return outcome
    except HungError as error:
        return Outcome("hung", str(error))
    except tools.RefusedError as error:
        return Outcome("not possible", str(error)[:160], good=False)


def of(who: str, setup: Setup) -> Setup:
    """Return the set-up for this Trainer."""
    return setup if who == "ours" else setup.for_lightning()


def resume(
    bench: Bench, who: str, folder: Path, setup: Setup, detail: str = "", without: int = -1, **options: Any
) -> Outcome:
    """Run the same command again, and compare its result with the undisturbed run."""
    reference = bench.reference(who, setup=setup, **options)
    before = len(read_diary(folder / "batches_0.jsonl"))
    again = bench.train(who, folder, setup=setup, **options)
    status = again.wait(END)
    if status != 0:
        return Outcome("lost", f"the next start fails: {tools.last_line(again.log)[:90]}")
    if starts_over(folder, before):
        return Outcome("lost", "starts over from the first batch")
    return bench.verdict(folder, reference, detail, without=without)


def starts_over(folder: Path, before: int) -> bool:
    """Return whether the last process started with the first batch, although it had old checkpoints."""
    later = read_diary(folder / "batches_0.jsonl")[before:]
    return before > 12 and bool(later) and later[0][:2] == (0, 0)


def after_batches(run: Run, folder: Path, number: int, rank: int = 0) -> None:
    """Wait until the diary has this number of batches."""
    diary = folder / f"batches_{rank}.jsonl"
    tools.wait_until(lambda: run.status is not None or len(read_diary(diary)) >= number, END)


def killed_half_way(bench: Bench, who: str, setup: Setup, batches: int = 20) -> Path:
    """Return the folder of a run that was killed after some checkpoints."""
    folder = bench.new_folder("killed")
    run = bench.train(who, folder, setup=setup)
    after_batches(run, folder, batches)
    run.kill()
    return folder


# --- killed -----------------------------------------------------------------------------------------------------------


@case("sigkill", "SIGKILL at {kills} random instants")
def sigkill(bench: Bench, who: str) -> Outcome:
    setup = of(who, replace(EVERYTHING, pace=0.005))
    reference = bench.reference(who, setup=setup)
    kills = lives = inside = 0
    wrong: list[Outcome] = []
    while kills < bench.kills:
        folder, life, before = bench.new_folder("life"), 0, 0
        lives += 1
        while True:
            run = bench.train(who, folder, setup=setup)
            if life == 6 or ended_before_a_random_instant(bench, run, folder, setup):
                run.wait(END)
                break
            run.kill()
            before = len(read_diary(folder / "batches_0.jsonl"))
            inside += bool(unfinished(folder))
            life, kills = life + 1, kills + 1
        outcome = bench.verdict(folder, reference)
        if run.status != 0:
            outcome = Outcome("lost", f"the next start fails: {tools.last_line(run.log)[:90]}")
        elif starts_over(folder, before):
            outcome = Outcome("lost", "starts over from the first batch")
        if outcome.word != "exact":
            wrong.append(outcome)
    if not wrong:
        return Outcome(
            "exact", f"{kills} kills in {lives} runs" + (f", {inside} of them inside a save" if inside else "")
        )
    lost = [outcome for outcome in wrong if outcome.word == "lost"]
    message = f"{len(wrong)} of {lives} runs ({kills} kills), such as: {worst(lost or wrong)}"
    return Outcome("lost" if lost else "inexact", message)


def ended_before_a_random_instant(bench: Bench, run: Run, folder: Path, setup: Setup) -> bool:
    """Wait for a random instant: some milliseconds after the start, or after one of the remaining batches.

    Returns whether the run ended before it.
    """
    diary = read_diary(folder / "batches_0.jsonl")
    left = setup.batches * setup.epochs - len({line[:2] for line in diary})
    after_batches(run, folder, len(diary) + bench.random.randint(0, max(left, 1)))
    return run.ends_within(bench.random.uniform(0.0, 0.15))


def worst(outcomes: list[Outcome]) -> str:
    """Return the longest detail, which usually lists the most differences."""
    return max((outcome.detail for outcome in outcomes), key=len)


@case("kill-in-save", "SIGKILL inside of a save, the temporary folder on another file system")
def kill_in_save(bench: Bench, who: str) -> Outcome:
    setup = of(who, replace(SMALL, ballast=16, epochs=1, pace=0.0))
    elsewhere = {"TMPDIR": other_file_system(bench.folder)}
    reference = bench.reference(who, setup=setup)
    wrong, delays = [], [0.002 * 1.6**i for i in range(12)]  # up to 0.35 s
    for i, delay in enumerate(delays):
        folder = bench.new_folder("in save")
        fault = {"kind": "signal in save", "at": 2 + i % 3, "delay": delay, "signals": ["SIGKILL"]}
        bench.train(who, folder, setup=setup, fault=fault, environment=elsewhere).wait(END)
        run = bench.train(who, folder, setup=setup, environment=elsewhere)
        if run.wait(END) != 0:
            wrong.append(Outcome("lost", f"the next start fails: {tools.last_line(run.log)[:90]}"))
        elif (outcome := bench.verdict(folder, reference)).word != "exact":
            wrong.append(outcome)
    if not wrong:
        return Outcome(
            "exact", f"{len(delays)} kills, {delays[0] * 1000:.0f} to {delays[-1] * 1000:.0f} ms into a save"
        )
    lost = [outcome for outcome in wrong if outcome.word == "lost"]
    message = f"{len(lost or wrong)} of {len(delays)} runs, such as: {worst(lost or wrong)}"
    return Outcome("lost" if lost else "inexact", message)


def other_file_system(folder: Path) -> str:
    """Return a folder on another file system than ``folder``."""
    for other in ("/dev/shm", "/tmp", "/var/tmp", str(Path.home())):
        if Path(other).is_dir() and Path(other).stat().st_dev != folder.stat().st_dev:
            return other
    raise tools.RefusedError("there is one file system only")


# --- files ------------------------------------------------------------------------------------------------------------


@case("disk-full", "The disk is full when a checkpoint is written")
def disk_full(bench: Bench, who: str) -> Outcome:
    setup = of(who, replace(SMALL, ballast=4))
    folder = bench.new_folder("disk")
    with tools.small_disk(100, folder) as mounted:
        if not mounted:
            return file_limit(bench, who)
        fault = {"kind": "signal", "at": 10, "signals": ["SIGKILL"]}
        bench.train(who, folder, setup=setup, fault=fault).wait(END)
        filler = folder / "filler"
        with filler.open("wb") as file, tools.suppress(OSError):
            while True:
                file.write(b"0" * (1 << 20))
                file.flush()
        tools.os.truncate(filler, filler.stat().st_size - (2 << 20))  # room for the loggers, not for a checkpoint
        status = (run := bench.train(who, folder, setup=setup)).wait(END)
        filler.unlink()
        return after_a_full_disk(bench, who, folder, setup, run, status)


def file_limit(bench: Bench, who: str) -> Outcome:
    """Limit files to one megabyte, as a replacement for a full disk if none can be mounted."""
    setup = of(who, replace(SMALL, ballast=8))
    folder = bench.new_folder("limit")
    fault = {"kind": "file limit", "at": 3, "bytes": 1 << 20}
    status = (run := bench.train(who, folder, setup=setup, fault=fault)).wait(END)
    return after_a_full_disk(bench, who, folder, setup, run, status)


def after_a_full_disk(bench: Bench, who: str, folder: Path, setup: Setup, run: Run, status: int) -> Outcome:
    """Check that the run raised an error, and that the earlier checkpoints still exist."""
    if status == 0:
        return Outcome("silent", "the run ends well, without its checkpoints")
    message = tools.last_line(run.log)
    outcome = resume(bench, who, folder, setup)
    if outcome.word != "exact":
        return outcome
    if str(folder) in message and any(word.isdigit() for word in message.replace(",", "").split()):
        return Outcome("exact", "after an error with path and bytes")
    return Outcome("exact", f"but the error is: {message[:120]}", good=who != "ours")


@case("unwritable", "The folder cannot be written")
def unwritable(bench: Bench, who: str) -> Outcome:
    base = bench.new_folder("unwritable")
    (base / "file").write_text("in the way")
    folder = base / "file" / "run"
    run = bench.train(
        who, base, setup=of(who, replace(SMALL, workers=0)), trainer={"default_root_dir": str(folder)}, into=str(folder)
    )
    status = run.wait(END)
    batches = len(read_diary(base / "batches_0.jsonl"))
    if status == 0:
        return Outcome("silent", f"trains {batches} batches and keeps nothing")
    if batches:
        return Outcome("late", f"an error after {batches} batches", good=False)
    message = tools.last_line(run.log)
    return Outcome(
        "refused",
        f"before the first batch{'' if str(base) in message else ', without naming it: ' + message[:100]}",
        good=str(base) in message,
    )


@case("truncated", "The newest checkpoint is cut short")
def truncated(bench: Bench, who: str) -> Outcome:
    return damaged(bench, who, tools.cut_short)


@case("bit-flip", "One bit of the newest checkpoint is flipped")
def bit_flip(bench: Bench, who: str) -> Outcome:
    return damaged(bench, who, tools.flip_bit)


def damaged(bench: Bench, who: str, damage: Callable[[Path], None]) -> Outcome:
    """Kill a run, damage its last checkpoint, and start it again."""
    setup = of(who, replace(SMALL, ballast=1))
    folder = killed_half_way(bench, who, setup)
    newest = tools.checkpoints(folder)[0]
    moment = newest.stat().st_mtime_ns
    files = [
        file for file in tools.checkpoints(folder) if file.name == "last.ckpt" or file.stat().st_mtime_ns == moment
    ]
    for file in dict.fromkeys([newest, *files]):
        damage(file)
    outcome = resume(bench, who, folder, setup, "from the one before")
    if who == "ours" and outcome.word == "exact":
        log = bench.runs[-1].log
        if not any(file.name in log for file in files):
            return Outcome("exact", "but the damaged file is not named", good=False)
    return outcome


# --- signals ----------------------------------------------------------------------------------------------------------


def interrupted(name: str, expected: tuple[int, ...]) -> Body:
    """Send a signal to one process in a batch inside an accumulation window."""

    def body(bench: Bench, who: str) -> Outcome:
        setup, folder = of(who, replace(SMALL, pace=0.0)), bench.new_folder(name)
        run = bench.train(who, folder, setup=setup, fault={"kind": "signal", "at": 15, "signals": [name]})
        status = run.wait(END)
        outcome = resume(bench, who, folder, setup)
        if outcome.word != "exact":
            return replace_detail(outcome, f"ends with {status}; {outcome.detail}")
        return exact_if_expected(bench, folder, status, expected)

    return body


def exact_if_expected(bench: Bench, folder: Path, status: int, expected: tuple[int, ...]) -> Outcome:
    """Return ``exact`` if the exit status is as expected and no batch was trained twice."""
    diary = [line[:2] for line in read_diary(folder / "batches_0.jsonl")]
    again = len(diary) - len(set(diary))
    if status not in expected:
        return Outcome("exact", f"but it ended with {status}, expected {' or '.join(map(str, expected))}", good=False)
    if again:
        return Outcome("exact", f"exit status {status}; but {again} batches were trained again", good=False)
    return Outcome("exact", f"exit status {status}, no batch trained twice")


def replace_detail(outcome: Outcome, detail: str) -> Outcome:
    """Return the same outcome with another description."""
    return Outcome(outcome.word, detail, outcome.good)


case("sigterm", "SIGTERM")(interrupted("SIGTERM", (143, -15)))
case("sigusr1", "SIGUSR1")(interrupted("SIGUSR1", (138, -10)))
case("ctrl-c", "Ctrl-C")(interrupted("SIGINT", (130, -2, 1)))


@case("second-signal", "A second SIGTERM, and a Ctrl-C, during the save that the first one asked for")
def second_signal(bench: Bench, who: str) -> Outcome:
    setup, folder = of(who, replace(SMALL, ballast=40, pace=0.02)), bench.new_folder("second")
    run = bench.train(who, folder, setup=setup)
    after_batches(run, folder, 15)
    run.send("SIGTERM")
    for name in ("SIGTERM", "SIGTERM", "SIGINT", "SIGTERM"):
        if run.ends_within(0.02):
            break
        run.send(name)
    status = run.wait(END)
    outcome = resume(bench, who, folder, setup)
    if outcome.word != "exact":
        return replace_detail(outcome, f"ends with {status}; {outcome.detail}")
    return exact_if_expected(bench, folder, status, (143, -15))


TWO = Setup(
    batches=16, epochs=2, workers=2, augment=True, dropout=0.2, accumulate=3, schedule="step", metrics=True,
    validate_every=6, pace=0.01,
)  # fmt: skip


def ranks_resume(bench: Bench, who: str, folder: Path, setup: Setup, **options: Any) -> Outcome:
    """Run the same command again on two ranks."""
    reference = bench.reference(who, setup=setup, ranks=2, **options)
    before = len(read_diary(folder / "batches_0.jsonl"))
    for run in (runs := bench.ranks(who, folder, setup=setup, **options)):
        if run.wait(END) != 0:
            return Outcome("lost", f"the next start fails: {tools.last_line(runs[0].log)[:90]}")
    if starts_over(folder, before):
        return Outcome("lost", "starts over from the first batch")
    return bench.verdict(folder, reference)


@case("sigterm-group", "SIGTERM to the process and its dataloader workers (Slurm)")
def sigterm_group(bench: Bench, who: str) -> Outcome:
    setup, folder = of(who, SMALL), bench.new_folder("group")
    run = bench.train(who, folder, setup=setup)
    after_batches(run, folder, 15)
    with tools.suppress(ProcessLookupError):
        tools.os.killpg(run.pid, tools.signal.SIGTERM)
    status = run.wait(END)
    outcome = resume(bench, who, folder, setup)
    if outcome.word != "exact":
        return replace_detail(outcome, f"ends with {status}; {outcome.detail}")
    return exact_if_expected(bench, folder, status, (143, -15))


def sigterm_one_rank(setup: Setup, **options: Any) -> Body:
    """Send the signal to one of two ranks in a batch."""

    def body(bench: Bench, who: str) -> Outcome:
        folder = bench.new_folder("ranks")
        fault = {"kind": "signal", "at": setup.batches // 2 + 2, "signals": ["SIGTERM"], "rank": 1}
        runs = bench.ranks(who, folder, setup=setup, fault=fault, **options)
        statuses = [run.wait(END) for run in runs]
        outcome = ranks_resume(bench, who, folder, setup, **options)
        if outcome.word != "exact":
            return replace_detail(outcome, f"ranks end with {statuses}; {outcome.detail}")
        return exact_if_expected(bench, folder, statuses[1], (143, -15))

    return body


case("sigterm-one-rank", "SIGTERM to one rank of two")(sigterm_one_rank(TWO))
case("sigterm-one-rank-fsdp", "SIGTERM to one rank of two: FSDP", compares=False)(
    sigterm_one_rank(TWO, trainer={"strategy": "fsdp"})
)


@case("kill-ranks", "SIGKILL of both ranks of two")
def kill_ranks(bench: Bench, who: str) -> Outcome:
    setup, folder = of(who, TWO), bench.new_folder("ranks")
    runs = bench.ranks(who, folder, setup=setup)
    after_batches(runs[0], folder, 22)
    for run in runs:
        run.kill()
    return ranks_resume(bench, who, folder, setup)


def torchrun_kills(**options: Any) -> Body:
    """Start a training run on two ranks with torchrun, and kill one of them repeatedly; torchrun restarts both.

    Kills occur at random instants after the start of Python, and during saves. Before one restart, the newest
    checkpoint is damaged.
    """

    def body(bench: Bench, who: str) -> Outcome:
        setup, total = replace(TWO, pace=0.04, ballast=2), min(bench.kills, MOST)
        reference = bench.reference(who, setup=setup, ranks=2, **options)
        kills = inside = damaged = jobs = 0
        while kills < total:
            (run,) = bench.torchrun(who, bench.new_folder("torchrun"), setup=setup, **options)
            folder, spoilt = run.results, None
            jobs += 1
            for _ in range(min(6, total - kills)):
                before = unfinished(folder)
                if not killed_at_a_random_instant(bench, run, folder, setup):
                    break
                kills += 1
                inside += bool(unfinished(folder) - before)
                spoilt = spoilt or damage_newest(folder)
            if run.wait(4 * END) != 0:
                return Outcome("lost", f"torchrun ends with {run.status}: {tools.last_line(run.log)[:90]}")
            if (outcome := bench.verdict(folder, reference)).word != "exact":
                return replace_detail(outcome, f"job {jobs}, after {kills} kills: {outcome.detail}")
            if spoilt:
                damaged += 1
                if spoilt.name not in run.log:
                    return Outcome("exact", "but the damaged checkpoint is not named", good=False)
        message = f"{kills} kills in {jobs} jobs, {inside} of them inside a save"
        return Outcome("exact", f"{message}; {damaged} damaged checkpoints were passed over")

    return body


def unfinished(folder: Path) -> set[Path]:
    """Return the unfinished checkpoints."""
    return set(folder.glob("*/.*part"))


def killed_at_a_random_instant(bench: Bench, run: Run, folder: Path, setup: Setup) -> bool:
    """Kill one of torchrun's processes: at any time, after one of the remaining batches, or during a save.

    Returns whether a process was killed.
    """
    diary = folder / "batches_0.jsonl"
    if not tools.wait_until(lambda: run.status is not None or len(run.children) == 2, END, fails=False):
        raise HungError("torchrun did not start its processes again")
    before, parts = len(read_diary(diary)), unfinished(folder)
    when = bench.random.choice(("at any time", "after a batch", "in a save"))
    if when == "at any time":
        run.ends_within(bench.random.uniform(0.0, 4.0))
    elif when == "after a batch":
        left = setup.batches * setup.epochs - len({line[:2] for line in read_diary(diary)})
        after_batches(run, folder, before + bench.random.randint(1, max(left // 2, 1)))
        run.ends_within(bench.random.uniform(0.0, 0.15))
    else:
        tools.wait_until(lambda: run.status is not None or bool(unfinished(folder) - parts), END)
    children = run.children
    if run.status is not None or len(children) < 2:
        return False
    with tools.suppress(ProcessLookupError):
        tools.os.kill(bench.random.choice(children), tools.signal.SIGKILL)
    tools.wait_until(lambda: run.status is not None or not set(children) & set(run.children), END)
    return True


def damage_newest(folder: Path) -> Path | None:
    """Flip a bit in the newest checkpoint and its copies. Returns None if there is no older one to resume from."""
    files = tools.checkpoints(folder)
    copies = [file for file in files if tools.contents(file) == tools.contents(files[0])]
    if len(copies) == len(files):
        return None
    for file in copies:
        tools.flip_bit(tools.largest(file))
    return files[0]


def node_killed(setup: Setup, **options: Any) -> Body:
    """Run two torchruns, as on two nodes, and kill the process of the second. The job continues."""

    def body(bench: Bench, who: str) -> Outcome:
        reference = bench.reference(who, setup=setup, ranks=2, **options)
        folder, at = bench.new_folder("nodes"), setup.batches // 2 + 1
        fault = {"kind": "signal", "at": at, "lives": 1, "signals": ["SIGKILL"], "rank": 1}
        runs = bench.torchrun(who, folder, nodes=2, setup=setup, fault=fault, **options)
        if [run.wait(END) for run in runs] != [0, 0]:
            return Outcome("lost", f"torchrun ends with {[run.status for run in runs]}: {tools.last_line(runs[0].log)}")
        if not starts_again(folder):
            return Outcome("lost", "nothing was killed", good=False)
        return bench.verdict(folder, reference)

    return body


def starts_again(folder: Path) -> bool:
    """Return whether two processes, one after the other, have trained as rank 0."""
    return len({line[4] for line in read_diary(folder / "batches_0.jsonl")}) == 2


_KILLED = "`torchrun --max-restarts`: one rank of two is killed, again and again:"
case("torchrun-kills", f"{_KILLED} DDP", compares=False)(torchrun_kills())
case("torchrun-kills-fsdp", f"{_KILLED} FSDP", compares=False)(torchrun_kills(trainer={"strategy": "fsdp"}))
case("torchrun-kills-sharded", f"{_KILLED} FSDP, sharded checkpoints, in the background", compares=False)(
    torchrun_kills(trainer={"strategy": "fsdp"}, files={"sharded": True, "asynchronous": True})
)
_NODES = "torchrun on two nodes, the process of one is killed:"
case("torchrun-nodes", f"{_NODES} DDP", compares=False)(node_killed(TWO))
case("torchrun-nodes-fsdp", f"{_NODES} FSDP", compares=False)(node_killed(TWO, trainer={"strategy": "fsdp"}))


ELASTIC = Setup(batches=24, epochs=4, schedule="step", metrics=True, validate_every=6, pace=0.05, batch_norm=False)
"""No random numbers and no batch norm: both depend on the split of samples into batches, so on the number of ranks."""

NO_SHARED_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without this, torch (2.10 to 2.15) does not connect a node that joins later, and stops all nodes after a minute."""


def node_lost(setup: Setup, *, times: int = 3, comes_back: bool = True, patience: int = 10, **options: Any) -> Body:
    """Run torchrun on one node or two: the second node is lost with all its processes and returns, repeatedly.

    At each start, the first node waits at most ``patience`` seconds for the second. The run begins on both: if it began
    on one, it could not continue on two, because each update would get other samples.
    """

    def body(bench: Bench, who: str) -> Outcome:
        reference, folder = bench.reference(who, setup=setup, ranks=2, **options), bench.new_folder("elastic")
        words = [
            "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=100",
            f"--rdzv-endpoint=localhost:{tools.free_port()}",
            f"--rdzv-conf=last_call_timeout={patience},keep_alive_interval=1,keep_alive_max_attempt=3",
        ]  # fmt: skip
        given = {**options, "trainer": {**options.get("trainer", {}), "devices": 1, "num_nodes": "auto"}}
        given["first_ranks"] = 2

        def node() -> Run:
            return bench.agent(who, folder, *words, environment=NO_SHARED_STORE, setup=setup, **given)

        def trains(rank: int) -> None:
            """Wait until a new process has trained some batches as this rank.

            The first process trains one batch, so that it is lost when only ``start.ckpt`` exists.
            """
            diary = folder / f"batches_{rank}.jsonl"
            before = {line[4] for line in read_diary(diary)}
            some = bench.random.randint(1, 6) if before else 1

            def has() -> bool:
                return sum(line[4] not in before for line in read_diary(diary)) >= some

            if not tools.wait_until(lambda: has() or first.status is not None, END, fails=False):
                error = HungError(f"rank {rank} did not continue; the first torchrun's status is {first.status}")
                error.add_note(
                    f"Its output ends with:\n{first.log[-3000:]}\nand the second's with:\n{second.log[-3000:]}"
                )
                raise error

        first = node()
        # the first node must host the rendezvous
        tools.wait_until(lambda: "rdzv" in first.log or time.monotonic() > first.started + 2, END)
        second = node()
        trains(1)
        for number in range(times):
            for process in [*second.children, second.pid]:
                os.kill(process, signal.SIGKILL)
            second.kill()
            trains(0)
            if comes_back or number < times - 1:
                second = node()
                trains(1)
        ends = [run.wait(2 * END) for run in ((first, second) if comes_back else (first,))]
        if any(ends):
            return Outcome("lost", f"torchrun ends with {ends}: {tools.last_line(first.log)}")
        starts = len({line[4] for line in read_diary(folder / "batches_0.jsonl")})
        return bench.close_to(folder, reference, f"lost {times} times, {starts} starts")

    return body


_ELASTIC = "`torchrun --nnodes=1:2`: a node of two is lost and comes back:"
case("torchrun-elastic", f"{_ELASTIC} DDP", compares=False)(node_lost(ELASTIC))
case("torchrun-elastic-sharded", f"{_ELASTIC} FSDP, sharded checkpoints", compares=False)(
    node_lost(ELASTIC, trainer={"strategy": "fsdp"}, files={"sharded": True})
)


@case("rank-raises", "One rank of two raises")
def rank_raises(bench: Bench, who: str) -> Outcome:
    setup, folder = of(who, TWO), bench.new_folder("ranks")
    runs = bench.ranks(who, folder, setup=setup, fault={"kind": "raise", "at": 10, "rank": 1})
    after_batches(runs[1], folder, 10, rank=1)
    for run in runs:
        if not run.ends_within(60):
            for one in runs:
                one.kill()
            return Outcome("hung", "the other rank is still there after 60 s")
    if 0 in [run.status for run in runs]:
        return Outcome("silent", f"ranks end with {[run.status for run in runs]}")
    if "the fault suite raises this" not in runs[1].log:
        return Outcome("down", "without the original traceback", good=False)
    return Outcome("stopped", "all ranks within 60 s, with the traceback", good=True)


# --- workers, numbers, memory -----------------------------------------------------------------------------------------


@case("worker-killed", "A dataloader worker is killed")
def worker_killed(bench: Bench, who: str) -> Outcome:
    return broken_worker(bench, who, ["SIGKILL"])


@case("worker-hung", "A dataloader worker hangs")
def worker_hung(bench: Bench, who: str) -> Outcome:
    return broken_worker(bench, who, [])


def broken_worker(bench: Bench, who: str, signals: list[str]) -> Outcome:
    """Break a worker in the middle of the first epoch, then run the same command again."""
    setup, folder = of(who, SMALL), bench.new_folder("worker")
    more = {"dataloader_timeout": 5} if who == "ours" and not signals else {}
    run = bench.train(who, folder, setup=setup, fault={"kind": "worker", "at": 36, "signals": signals}, trainer=more)
    if not run.ends_within(30):
        run.kill()
        return Outcome("hung", "waits forever")
    status, message = run.status, tools.last_line(run.log)
    outcome = resume(bench, who, folder, setup)
    if status == 0 or outcome.word != "exact":
        return replace_detail(outcome, f"ends with {status}; {outcome.detail}")
    if who == "ours" and "DataLoaderError" not in message:
        return Outcome("exact", f"but the error is: {message[:110]}", good=False)
    return Outcome("exact", f"after an error: {message.partition('.errors.')[2] or message:.90}")


NAN = replace(SMALL, precision="32-true", overflows=())


@case("nan", "A batch is NaN, in float32: the effect on the checkpoints")
def nan(bench: Bench, who: str) -> Outcome:
    folder = bench.new_folder("nan")
    run = bench.train(who, folder, setup=NAN, fault={"kind": "nan", "at": 14})
    status, message = run.wait(END), tools.last_line(run.log)
    if status == 0:
        return Outcome("silent", "trains on; all weights, and all checkpoints but the first ones, are NaN")
    outcome = resume(bench, who, folder, NAN, without=run.pid)
    if outcome.word != "exact":
        return outcome
    return Outcome("stopped", f"before a checkpoint is spoilt: {message[:110]}; then exact", good=True)


@case("nan-stop", "The same with the policy to stop", compares=False)
def nan_stop(bench: Bench, who: str) -> Outcome:
    folder, guard = bench.new_folder("nan"), {"NonFiniteGuard": {"policy": "stop"}}
    run = bench.train(who, folder, setup=NAN, fault={"kind": "nan", "at": 14}, callbacks=guard)
    status = run.wait(END)
    message = "\n".join(run.log.splitlines()[-12:])
    if status == 0:
        return Outcome("silent")
    if "14" not in message:
        return Outcome("stopped", f"without the batch's index: {tools.last_line(message)[:110]}", good=False)
    outcome = resume(bench, who, folder, NAN, without=run.pid, callbacks=guard)
    return Outcome("stopped", "the error names the batch; then exact", good=True) if outcome.good else outcome


@case("nan-skip", "The same with the policy to skip", compares=False)
def nan_skip(bench: Bench, who: str) -> Outcome:
    folder, guard = bench.new_folder("nan"), {"NonFiniteGuard": {"policy": "skip"}}
    run = bench.train(who, folder, setup=NAN, fault={"kind": "nan", "at": 14}, callbacks=guard)
    if run.wait(END) != 0:
        return Outcome("stopped", tools.last_line(run.log)[:110], good=False)
    import torch

    weights = torch.load(folder / "final_0.pt", weights_only=True)["weights"].values()
    spoilt = [value for value in weights if not value.isfinite().all()]
    return (
        Outcome("inexact", "weights or buffers are NaN")
        if spoilt
        else Outcome("skipped", "all weights are finite", True)
    )


@case("memory", "Out of memory")
def memory(bench: Bench, who: str) -> Outcome:
    setup, folder = of(who, SMALL), bench.new_folder("memory")
    run = bench.train(who, folder, setup=setup, fault={"kind": "memory", "at": 14})
    status, message = run.wait(END), run.log
    outcome = resume(bench, who, folder, setup)
    if status == 0 or outcome.word != "exact":
        return outcome
    if who == "ours" and "which has 4 samples" not in message:
        return Outcome("exact", f"but the error is: {tools.last_line(message)[:90]}", good=False)
    return Outcome("exact", "after an error with the size of the batch" if who == "ours" else "after an error")


# --- two runs ---------------------------------------------------------------------------------------------------------


@case("two-runs", "A second run is started in the same folder")
def two_runs(bench: Bench, who: str) -> Outcome:
    setup, folder = of(who, SMALL), bench.new_folder("two")
    reference = bench.reference(who, setup=setup)
    first = bench.train(who, folder, setup=setup)
    after_batches(first, folder, 12)
    second = bench.train(who, folder, setup=setup, final="second")
    status, message = second.wait(END), tools.last_line(second.log)
    if first.wait(END) != 0:
        return Outcome("lost", f"the first one fails: {tools.last_line(first.log)[:120]}")
    outcome = bench.verdict(folder, reference)
    if status == 0:
        return Outcome("both ran", f"into the same files; the first is {outcome}", good=False)
    if outcome.word != "exact":
        return outcome
    return Outcome("refused", message[:110], good=True)


# --- exact at every batch ---------------------------------------------------------------------------------------------

EACH = Setup(batches=7, epochs=2, augment=True, dropout=0.2, metrics=True)
SETUPS: dict[str, tuple[str, Setup]] = {
    "shuffle": ("shuffled, augmented data, dropout", EACH),
    "workers": ("the same with 2 workers", replace(EACH, workers=2)),
    "accumulation": ("inside accumulation windows", replace(EACH, accumulate=4)),
    "fp16": ("fp16 with skipped steps", replace(EACH, precision="16-mixed", overflows=(0, 4, 11), accumulate=2)),
    "two-optimizers": ("two optimizers", replace(EACH, optimizers=2, accumulate=2, schedule="epoch")),
    "manual": ("two optimizers, by hand", replace(EACH, optimizers=2, manual=True, schedule="step")),
    "schedule": ("a schedule by steps", replace(EACH, schedule="step", accumulate=2)),
    "plateau": ("a schedule that watches the validation", replace(EACH, schedule="plateau", validate_every=3)),
    "ema": ("an average of the weights (EMA)", replace(EACH, average="ema", accumulate=2, validate_every=3)),
    "metrics": ("metrics of the epoch, and validations inside of it", replace(EACH, validate_every=3)),
    "stateful": ("a StatefulDataLoader", replace(EACH, loader="stateful")),
    "stateful-workers": ("a StatefulDataLoader with 2 workers", replace(EACH, loader="stateful", workers=2)),
    "iterable": ("data without a length or a state", replace(EACH, loader="iterable")),
    "everything": (
        "all of it, with 2 workers",
        replace(EVERYTHING, batches=8, epochs=2, overflows=(1, 3, 11), validate_every=3),
    ),
}


def at_each(name: str, setup: Setup, *, every: int = 1, ranks: int = 1) -> Body:
    """Run once with a checkpoint after every batch, validation and epoch, then resume from each of them."""

    def body(bench: Bench, who: str) -> Outcome:
        mine = of(who, setup)
        reference = bench.reference(who, setup=mine, saves="each", ranks=ranks)
        files = sorted((reference.folder / "each").glob("*.ckpt"))[::every]
        wrong: dict[str, Outcome] = {}
        for pair in in_pairs(files):
            started = []
            for file in pair:
                folder = bench.new_folder(f"each {name}")
                how: dict[str, Any] = {"setup": mine, "saves": "none", "start": str(file), "final": "resumed"}
                runs = [bench.train(who, folder, **how)] if ranks == 1 else bench.ranks(who, folder, ranks, **how)
                started.append((file, folder, runs))
            for file, folder, runs in started:
                if any([run.wait(END) != 0 for run in runs]):  # noqa: C419  # wait for all of them
                    wrong[file.stem] = Outcome("lost", tools.last_line(runs[0].log)[:90])
                elif (outcome := continued(bench, folder, reference)).word != "exact":
                    wrong[file.stem] = outcome
        if not wrong:
            return Outcome("exact", f"from each of {len(files)} checkpoints")
        first = next(iter(wrong))
        lost = any(outcome.word == "lost" for outcome in wrong.values())
        message = f"{len(wrong)} of {len(files)}, such as {first}: {wrong[first].detail}"
        return Outcome("lost" if lost else "inexact", message)

    return body


def in_pairs(things: list[Any]) -> Iterator[list[Any]]:
    """Yield the things in lists of two."""
    for i in range(0, len(things), 2):
        yield things[i : i + 2]


def continued(bench: Bench, folder: Path, reference: tools.Reference) -> Outcome:
    """Compare a resumed run: its final state, and each batch that it trained."""
    found = bench.differences(folder, reference, final="resumed")
    for file in sorted(folder.glob("batches_*.jsonl")):
        wanted = [line[:4] for line in read_diary(reference.folder / file.name)]
        seen = [line[:4] for line in read_diary(file)]
        for mine, other in zip(seen, wanted[len(wanted) - len(seen) :], strict=True):
            if mine != other:
                found.append("losses" if mine[2] == other[2] else "samples")
                break
    theirs = tools.read_rows(reference.folder)
    if any(theirs.get(key) != row for key, row in tools.read_rows(folder).items()):
        found.append("rows of metrics.csv")
    return Outcome("inexact", "other " + tools.summary(found)) if found else Outcome("exact")


for _name, (_title, _setup) in SETUPS.items():
    case(f"each-{_name}", f"Resumed at every batch: {_title}")(at_each(_name, _setup))
case("each-ranks", "Resumed at every third batch: two processes (DDP)")(
    at_each("ranks", replace(TWO, batches=8, validate_every=3, pace=0.0), every=3, ranks=2)
)


# --- the command line -------------------------------------------------------------------------------------------------


def cli_interrupted(name: str, expected: int) -> Body:
    """Send a signal to ``python -m trainer fit ... resume=auto``, then run the same command again."""

    def body(bench: Bench, who: str) -> Outcome:
        words = ("fit", "+recipe=faulty", "resume=auto")
        whole, cut = (project.write(bench.new_folder("project")) for _ in range(2))
        if (run := bench.command(whole, *words)).wait(END) != 0:
            return Outcome("not possible", tools.last_line(run.log), good=False)
        run = bench.command(cut, *words)
        after_batches(run, cut, 16)
        run.send(name)
        status = run.wait(END)
        if (run := bench.command(cut, *words)).wait(END) != 0:
            return Outcome("lost", f"ends with {status}; the next start fails: {tools.last_line(run.log)[:90]}")
        if starts_over(cut, 16):
            return Outcome("lost", f"ends with {status}; starts over from the first batch")
        found = last_states_differ(whole, cut)
        if found:
            return Outcome("inexact", tools.summary(found))
        if name == "SIGKILL":
            return Outcome("exact")
        return exact_if_expected(bench, cut, status, (expected,))

    return body


def last_states_differ(whole: Path, cut: Path) -> list[str]:
    """Return the differences between two projects: in their last checkpoints, batches, and rows of metrics.csv."""
    import torch

    from _faults.training import differences

    found = []
    states = []
    for folder in (whole, cut):
        files = sorted(folder.glob("outputs/**/last.ckpt"))
        if len(files) != 1:
            return [f"{len(files)} run folders"]
        checkpoint = torch.load(files[0], weights_only=True)
        states.append(
            {key: checkpoint[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "MixedPrecision")}
        )
    found = differences(*states)
    wanted = {line[:2]: line[2:4] for line in read_diary(whole / "batches_0.jsonl")}
    if any(wanted.get(line[:2]) != line[2:4] for line in read_diary(cut / "batches_0.jsonl")):
        found.append("samples or losses")
    if tools.read_rows(whole) != tools.read_rows(cut):
        found.append("rows of metrics.csv")
    return found


case("cli-sigkill", "`python -m trainer fit resume=auto`: SIGKILL", compares=False)(cli_interrupted("SIGKILL", -9))
case("cli-sigterm", "`python -m trainer fit resume=auto`: SIGTERM", compares=False)(cli_interrupted("SIGTERM", 143))
case("cli-sigusr1", "`python -m trainer fit resume=auto`: SIGUSR1", compares=False)(cli_interrupted("SIGUSR1", 138))
case("cli-ctrl-c", "`python -m trainer fit resume=auto`: Ctrl-C", compares=False)(cli_interrupted("SIGINT", 130))


def requeued(*resume: str) -> Body:
    """Run ``srun python -m trainer fit`` on two simulated nodes, and send Slurm's signal before a time limit."""

    def body(bench: Bench, who: str) -> Outcome:
        words = ("fit", "+recipe=faulty", "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=1",
                 "trainer.num_nodes=2", "trainer.val_check_interval=4", *resume)  # fmt: skip
        whole, cut = (project.write(bench.new_folder("project")) for _ in range(2))
        runs = bench.srun(whole, *words)
        if [run.wait(END) for run in runs] != [0, 0]:
            return Outcome("not possible", tools.last_line(runs[0].log), good=False)
        runs = bench.srun(cut, *words)
        after_batches(runs[0], cut, 8)
        for run in runs:
            run.send("SIGUSR1")
        statuses = [run.wait(END) for run in runs]
        asked = (cut / "scontrol").read_text() if (cut / "scontrol").exists() else "nothing"
        if statuses != [143, 143] or asked != "requeue 4711\n":
            return Outcome("lost", f"scontrol was called with: {asked.strip()}; the tasks end with {statuses}")
        runs = bench.srun(cut, *words, again=1)
        if [run.wait(END) for run in runs] != [0, 0]:
            return Outcome("lost", f"the next start fails: {tools.last_line(runs[0].log)[:90]}")
        if found := last_states_differ(whole, cut):
            return Outcome("inexact", tools.summary(found))
        if (records := len(list(cut.glob("outputs/**/run.json")))) != 1:
            return Outcome("exact", f"but there are {records} run.json", good=False)
        return exact_if_expected(bench, cut, statuses[0], (143,))

    return body


_REQUEUED = "Slurm, two nodes (stand-ins for srun and scontrol): SIGUSR1, the job is put back into the queue"
case("slurm-requeue", _REQUEUED, compares=False)(requeued())
case("slurm-auto", f"{_REQUEUED}, `resume=auto`", compares=False)(requeued("resume=auto"))


# --- strangers --------------------------------------------------------------------------------------------------------


@case("pickle", "A malicious pickle in each place that is read")
def malicious_pickle(bench: Bench, who: str) -> Outcome:
    setup = of(who, replace(SMALL, workers=0))
    source = killed_half_way(bench, who, setup)
    good = next(file for file in tools.checkpoints(source) if file.name == "last.ckpt")
    ran, other_end = [], []
    for name, spoil in (strangers.CHECKPOINTS | strangers.PASSED_OVER).items():
        folder = bench.new_folder("stranger")
        bad, owned = folder / "bad.ckpt", folder / "owned"
        spoil(good, bad, owned)
        run = bench.train(who, folder, setup=setup, start=str(bad), saves="none")
        if (run.wait(END) == 0) != (name in strangers.PASSED_OVER):
            other_end.append(name)
        if owned.exists():
            ran.append(name)
    folder = strangers.copy_of(source, bench.new_folder("stranger in the run"))
    for file in tools.checkpoints(folder):
        moment = file.stat().st_mtime_ns
        strangers.poisoned_archive(file, file.with_suffix(".bad"), folder / "owned")
        file.with_suffix(".bad").replace(file)
        tools.os.utime(file, ns=(moment, moment))
    bench.train(who, folder, setup=setup).wait(END)
    if (folder / "owned").exists():
        ran.append("every checkpoint of the run")
    number = len(strangers.CHECKPOINTS) + len(strangers.PASSED_OVER) + 1
    if ran:
        return Outcome("code ran", f"in {len(ran)} of {number} places: {', '.join(ran)}")
    if other_end:
        return Outcome(
            "nothing ran",
            f"but some were loaded instead of refused, or the reverse: {', '.join(other_end)}",
            good=False,
        )
    return Outcome("nothing ran", f"in {number} places, from bare pickles to random states", good=True)


@case("target", "A malicious `_target_` in the config of a checkpoint", compares=False)
def malicious_target(bench: Bench, who: str) -> Outcome:
    ran, accepted = [], []
    for target in strangers.TARGETS:
        folder = project.write(bench.new_folder("target"))
        owned = folder / "owned"
        given = strangers.write_run(target, folder, owned)
        run = bench.command(folder, "fit", f"ckpt={given}")
        if run.wait(END) != 2 or target not in " ".join(run.log.split()):
            accepted.append(f"{target} ({tools.last_line(run.log)[:60]})")
        if owned.exists():
            ran.append(target)
    number = len(strangers.TARGETS)
    if ran:
        return Outcome("code ran", f"{len(ran)} of {number}: {', '.join(ran)}")
    if accepted:
        return Outcome("nothing ran", f"but not refused: {', '.join(accepted)}", good=False)
    return Outcome("refused", f"all {number}", good=True)


@case("malformed", "Malformed configs: types, values, combinations, names", compares=False)
def malformed_configs(bench: Bench, who: str) -> Outcome:
    from tests.cli.conftest import write
    from tests.cli.malformed import CASES as TABLE
    from tests.cli.malformed import PROJECT

    folder, wrong = bench.new_folder("malformed"), []
    write(folder, PROJECT)
    for part in in_pairs(TABLE):
        started = [(entry, bench.command(folder, *entry[0])) for entry in part]
        for (words, expected), run in started:
            if run.wait(END) != 2 or expected not in run.log or "data was loaded" in run.log:
                wrong.append(f"{' '.join(words)} ({run.status}: {tools.last_line(run.log)[:60]})")
    if wrong:
        return Outcome("accepted", f"{len(wrong)} of {len(TABLE)}: {', '.join(wrong[:4])}", good=False)
    return Outcome(
        "refused", f"all {len(TABLE)}, before data is loaded, with the expected value in the error", good=True
    )
