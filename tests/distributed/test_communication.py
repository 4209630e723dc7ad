"""DDP's communication hooks: their state is restored in each process, or an exact resume is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import communication_worker as worker
from tests.distributed.test_ddp import load, run
from tests.support import assert_identical
from tests.warm_python import WarmPython
from trainer.checkpoint.loading import process_states_in


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("communication")


@pytest.fixture(scope="module")
def ranks(python: WarmPython, folder: Path) -> list[dict[str, Any]]:
    run(python, folder, "torchrun", script=Path(worker.__file__))
    return load(folder)


@pytest.mark.parametrize("name", worker.EXACT)
def test_resumed_run_equals_an_uninterrupted_one(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        assert_identical(rank[name]["resumed"], rank[name]["whole"])


@pytest.mark.parametrize("name", ["post-local", "local"])
def test_weights_of_processes_that_differ_are_saved(ranks: list[dict[str, Any]], folder: Path, name: str) -> None:
    processes = process_states_in(torch.load(folder / f"{name}.ckpt", weights_only=True), exact=True)
    assert ["weights" in one["communication"] for one in processes] == [False, True]


def test_equal_weights_are_saved_once(ranks: list[dict[str, Any]], folder: Path) -> None:
    processes = process_states_in(torch.load(folder / "counts.ckpt", weights_only=True), exact=True)
    assert not any("weights" in one["communication"] for one in processes)


@pytest.mark.parametrize(("name", "memory"), [("power", "PowerSGDState.error_dict"), ("memory", "Remembers.errors")])
def test_memory_of_rebuilt_buckets_is_refused(ranks: list[dict[str, Any]], name: str, memory: str) -> None:
    for rank in ranks:
        assert f"{memory} may belong to DDP's buckets" in rank[name]["error"]
        assert "find_unused_parameters=True" in rank[name]["error"]
        assert "Trainer(exact_resume=False)" in rank[name]["error"]
        assert any(memory in one for one in rank[name]["warnings"])
