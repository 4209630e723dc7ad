"""Runs resumed with another number of ranks end within 1e-5 of uninterrupted runs.

Two and three ranks are started once for all tests; runs of one process run here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import elastic_worker as worker
from tests.support import needs_fsdp2
from tests.warm_python import WarmPython

TIMEOUT = 150  # seconds
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]
Ranks = dict[str, list[dict[str, Any]]]
GOES_ON = [run for run in worker.RUNS if run.start is not None]


def start(python: WarmPython, folder: Path, processes: int) -> Ranks:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT")}
    with python.start(
        *torchrun, str(Path(worker.__file__)), str(folder), env={**environment, "OMP_NUM_THREADS": "1"}, cwd=folder,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, output[-4000:]
    ranks = [torch.load(folder / f"{processes}_rank_{rank}.pt", weights_only=True) for rank in range(processes)]
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elastic")


@pytest.fixture(scope="module")
def ranks(python: WarmPython, folder: Path) -> Iterator[Ranks]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {name: [one] for name, one in worker.train_all(folder, 1).items()}
        found |= start(python, folder, 2) | start(python, folder, 3)
        yield found | {name: [one] for name, one in worker.train_all(folder, 1, second=True).items()}


def origin(run: worker.Run) -> worker.Run:
    """Return the run that ``run`` resumes."""
    while run.start is not None:
        run = next(one for one in worker.RUNS if one.name == run.start[0])
    return run


def updates(ranks: list[dict[str, Any]]) -> dict[int, Counter[int]]:
    """Return the samples of each optimizer step over all ranks."""
    found: dict[int, Counter[int]] = {}
    for rank in ranks:
        for update, numbers, weight in rank["seen"]:
            if weight != 0:
                found.setdefault(update, Counter()).update(numbers)
    return found


@pytest.mark.parametrize("run", GOES_ON, ids=lambda run: run.name)
def test_each_update_gets_the_samples_that_it_would_have_got(ranks: Ranks, run: worker.Run) -> None:
    assert run.start is not None
    whole, found = (updates(ranks[one.name][:: one.sharing]) for one in (origin(run), run))
    assert found == {update: samples for update, samples in whole.items() if update >= run.start[1]}
    assert len(whole) == (12 if run.drop_last else 15)


@pytest.mark.parametrize("run", GOES_ON, ids=lambda run: run.name)
def test_resumed_run_equals_the_uninterrupted_run(ranks: Ranks, run: worker.Run) -> None:
    (whole, *_), found = ranks[origin(run).name], ranks[run.name]
    for rank in found:
        for name, value in whole["weights"].items():
            torch.testing.assert_close(rank["weights"][name], value, rtol=0, atol=1e-5)
            assert torch.equal(rank["weights"][name], found[0]["weights"][name])
        assert rank["global_step"] == whole["global_step"]
        assert rank["lr"] == pytest.approx(whole["lr"])
        assert {rank["progress"][name] for name in ("windows", "schedule_steps", "epoch")} == {
            whole["progress"][name] for name in ("windows", "schedule_steps", "epoch")
        }


@pytest.mark.parametrize("run", GOES_ON, ids=lambda run: run.name)
def test_metrics_of_the_running_epoch_include_the_saved_batches(ranks: Ranks, run: worker.Run) -> None:
    (whole, *_), (found, *_) = ranks[origin(run).name], ranks[run.name]
    for epoch, values in found["epochs"].items():
        assert values.keys() == whole["epochs"][epoch].keys()
        assert values == pytest.approx(whole["epochs"][epoch], abs=1e-5)
        assert values["loss"] == pytest.approx(values["mean"], abs=1e-5)
    assert 2 in found["epochs"]


@pytest.mark.parametrize("run", [run for run in GOES_ON if "val_check_interval" in run.arguments], ids=lambda r: r.name)
def test_validations_follow_the_same_updates(ranks: Ranks, run: worker.Run) -> None:
    (whole, *_), (found, *_) = ranks[origin(run).name], ranks[run.name]
    assert run.start is not None
    assert found["validated"] == [step for step in whole["validated"] if step >= run.start[1]]
    assert whole["validated"] == [2, 4, 7, 9, 12, 14]


@pytest.mark.parametrize("run", GOES_ON, ids=lambda run: run.name)
def test_accumulation_is_converted_for_the_run_only(ranks: Ranks, run: worker.Run) -> None:
    for rank in ranks[run.name]:
        batches = Counter(update for update, *_ in rank["seen"])
        full = 11 if run.drop_last else 13  # the last update of 12 samples
        assert batches[full] == 12 // (run.processes // run.sharing * run.batch_size)
        assert rank["accumulate"] == run.arguments.get("accumulate_grad_batches", 1)  # as it was given


@needs_fsdp2
def test_processes_that_share_their_samples_count_them_once(ranks: Ranks) -> None:
    shared, whole = ranks["two that share"], ranks["two"][0]
    assert updates(shared[:1]) == updates(shared[1:])
    for rank in shared:
        for epoch, values in whole["epochs"].items():
            assert rank["epochs"][epoch].keys() == values.keys()
            assert rank["epochs"][epoch] == pytest.approx(values, abs=1e-5)
