"""What processes write for each other and read; here threads of one. Real ones are in ``tests/distributed``."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as distributed

from trainer.engine import shared_sums as place
from trainer.engine.shared_sums import SharedSums, shared_sums


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[SharedSums]]:
    """The objects of so many processes, over one file."""

    def make(count: int, timeout: float = 60.0) -> list[SharedSums]:
        monkeypatch.setattr(place, "FOLDER", tmp_path)
        path = place._new_file(count)
        assert path is not None
        return [SharedSums(path, rank, count, timeout) for rank in range(count)]

    return make


def test_each_reads_what_all_have_written(make: Any) -> None:
    processes = make(3)
    for turn in range(5):
        reads = [one.begin([turn, float(rank)]) for rank, one in enumerate(processes)]
        assert [read() for read in reads] == [[3.0 * turn, 3.0]] * 3


def test_a_process_waits_for_one_that_is_late(make: Any) -> None:
    early, late = make(2)
    with ThreadPoolExecutor() as pool:
        for number in range(3):
            waiting = pool.submit(early.begin([1.0, 0.5, number]))
            time.sleep(0.01)
            assert not waiting.done()
            read = late.begin([2.0, 0.25, number])
            assert waiting.result() == read() == [3.0, 0.75, 2.0 * number]


def test_sums_are_right_however_the_processes_take_turns(make: Any) -> None:
    """And whichever of them nobody asks for: an optimizer evaluates a loss again."""
    turns = 300
    given = random.Random(0)
    asked = [given.random() < 0.8 for _ in range(turns)]

    def run(rank: int, sums: SharedSums) -> list[list[float]]:
        pauses, found = random.Random(rank), []
        for turn in range(turns):
            read = sums.begin([turn * 10.0**rank, 1.0])
            if pauses.random() < 0.1:
                time.sleep(pauses.random() / 1000)
            if asked[turn]:
                found.append(read())
        return found

    processes = make(4)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, range(4), processes))
    assert found == [[[turn * 1111.0, 4.0] for turn in range(turns) if asked[turn]]] * 4


def test_a_record_that_is_half_written_is_not_read(make: Any) -> None:
    mine, other = make(2, timeout=0.05)
    read = mine.begin([1.0])
    other.begin([2.0])
    start = other._start(1)
    other._memory[start + 8] ^= 1  # a byte of the number
    with pytest.raises(RuntimeError, match="rank 1"):
        read()


def test_a_process_that_does_not_come_is_named(make: Any) -> None:
    mine, _ = make(2, timeout=0.01)
    message = (
        "Rank 0 waited 0.01 seconds for what rank 1 says of its losses, and rank 1 did not come there. Each process"
        " must train the same number of batches."
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        mine.begin([1.0])()


class Engine(SimpleNamespace):
    """One of two processes: what the first says is the path, and whether the other has no such file."""

    world_size, global_rank, device = 2, 0, torch.device("cpu")
    other_lacks = False

    def broadcast(self, path: str | None) -> str | None:
        self.path = path
        return path

    def any_rank(self, decision: bool) -> bool:
        self.lacks = decision
        return decision or self.other_lacks

    @property
    def timeout(self) -> Any:
        return SimpleNamespace(total_seconds=lambda: 1.0)


@pytest.fixture
def gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "get_backend", lambda: "gloo")
    monkeypatch.setattr(place, "FOLDER", tmp_path)


@pytest.mark.usefixtures("gloo")
def test_no_file_is_left_behind(tmp_path: Path) -> None:
    engine: Any = Engine()
    assert shared_sums(engine) is not None
    assert not engine.lacks
    assert engine.path.startswith(str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("gloo")
def test_none_where_a_process_is_on_another_machine(tmp_path: Path) -> None:
    assert shared_sums(Engine(other_lacks=True)) is None  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    far: Any = Engine(global_rank=1, broadcast=lambda path: str(tmp_path / "of the first machine"))
    assert shared_sums(far) is None
    assert far.lacks


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize(
    "given", [{"world_size": 1}, {"device": torch.device("cuda", 0)}, {"broadcast": lambda path: None}]
)
def test_none_where_there_is_nothing_to_share(given: dict[str, Any]) -> None:
    assert shared_sums(Engine(**given)) is None  # type: ignore[arg-type]


def test_none_on_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "get_backend", lambda: "mpi")
    assert shared_sums(Engine()) is None  # type: ignore[arg-type]


def test_none_without_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "FOLDER", tmp_path / "nowhere")
    assert place._new_file(2) is None
