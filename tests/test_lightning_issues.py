"""Programs of public Lightning issues that no other test runs; and the page that lists all of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from tests.support import Regression, loader_of, make_batches, make_trainer

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "lightning-issues.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith(("| [#", "| [pytorch #"))]


class Validates(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean(), batch_size=4)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_validation_inside_a_window_leaves_its_gradients(tmp_path: Path, precision: str) -> None:  # 20346
    weights = []
    for interval in (None, 2):
        module = Validates()
        arguments = {"val_check_interval": interval, "limit_val_batches": 0 if interval is None else 1.0}
        trainer = make_trainer(tmp_path, accumulate_grad_batches=3, precision=precision, **arguments)
        trainer.fit(module, loader_of(make_batches(7)), loader_of(make_batches(2, seed=2)))
        weights.append([parameter.detach().clone() for parameter in module.parameters()])
    assert all(map(torch.equal, *weights))


def test_fit_after_an_early_stop_trains(tmp_path: Path) -> None:  # 18727
    module, data = Validates(), loader_of(make_batches(3))
    stops = EarlyStopping("val_loss", stopping_threshold=1e9)
    trainer = make_trainer(tmp_path, max_epochs=5, callbacks=[stops])
    trainer.fit(module, data, data)
    assert (trainer.current_epoch, trainer.should_stop) == (1, True)
    stops.stopping_threshold = None
    trainer.fit(module, data, data)
    assert trainer.current_epoch == 5


def test_page_has_at_least_thirty_issues_each_once() -> None:
    numbers = re.findall(r"\[#(\d+)\]", PAGE)
    assert len(set(numbers)) == len(numbers) >= 30
    assert all(f"pytorch-lightning/issues/{number})" in PAGE for number in numbers)


@pytest.mark.parametrize("row", ROWS)
def test_each_row_names_a_test_that_exists(row: str) -> None:
    (where,) = re.findall(r"`(tests/[\w/]+\.py::\w+)`", row)
    file, name = where.split("::")
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.M), where
