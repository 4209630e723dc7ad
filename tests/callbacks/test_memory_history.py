from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer.callbacks import MemoryHistory


class Greedy(Regression):
    """Has no room for the second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch is told to record, and when it writes."""
    told: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: told.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda name: told.append(Path(name).name))
    return told


BEGINS, ENDS = {"max_entries": 7, "stacks": "python"}, {"enabled": None}


def fit(folder: Path, module: Regression, **options: Any) -> None:
    trainer = make_trainer(folder, callbacks=[MemoryHistory(max_entries=7)], **options)
    trainer.fit(module, loader_of(make_batches(3)))


def test_it_records_as_long_as_a_run_lasts(cuda: Any, tmp_path: Path, calls: list[Any]) -> None:
    fit(tmp_path, Regression(), accelerator="gpu")
    assert calls == [BEGINS, ENDS]


def test_the_snapshot_is_written_before_it_ends(cuda: Any, tmp_path: Path, calls: list[Any]) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, Greedy(), accelerator="gpu", logger=True)
    assert calls == [BEGINS, "memory_snapshot.pickle", ENDS]


def test_it_says_where_there_is_nothing_to_record(
    tmp_path: Path, calls: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, Regression())
    assert calls == []
    assert "MemoryHistory records nothing on cpu" in caplog.text


def test_a_history_without_entries_is_refused() -> None:
    with pytest.raises(ValueError, match="max_entries=0: expected 1 or more"):
        MemoryHistory(max_entries=0)
