"""The gradient norms of layers: values, names, frequency, and refused settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from tests.support import (
    Regression,
    fit_and_watch,
    make_batches,
    make_net,
    native_fp16,
    train_by_hand,
)
from trainer.callbacks import GradientClipping, LayerNorms
from trainer.record.curve import Curve, read_rows

SCALED = {"init_scale": 2.0**9, "growth_interval": 5}


def logged(folder: Path) -> dict[str, Curve]:
    return {
        name.removeprefix("grad_norm/"): curve
        for name, curve in read_rows(folder / "metrics.csv").items()
        if name.startswith("grad_norm/")
    }


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_norms_equal_those_of_a_hand_written_loop(tmp_path, precision):
    """Bitwise equal, for accumulated gradients before clipping, also in skipped steps."""
    scaled = precision == "16-mixed"
    batches = make_batches(16, gains={8: 1e30} if scaled else None)
    ours, theirs = make_net(), make_net()
    norms, logger = LayerNorms(every_n_steps=2), CSVLogger(tmp_path, name="", version="")
    trainer, _ = fit_and_watch(
        tmp_path,
        Regression(ours),
        batches,
        precision=native_fp16(**SCALED) if scaled else precision,
        callbacks=[GradientClipping(max_norm=0.1), norms],
        accumulate_grad_batches=2,
        logger=logger,
    )
    seen: list[dict[str, float]] = []

    def look(_: Any) -> None:
        layers = {name: [p.grad for p in layer.parameters()] for name, layer in theirs.named_children()}
        seen.append({f"net.{k}": nn.utils.get_total_norm(grads).item() for k, grads in layers.items() if grads})

    train_by_hand(
        theirs,
        batches,
        precision=precision,
        scaler=torch.amp.GradScaler("cpu", **SCALED) if scaled else None,
        window=2,
        clip=lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1),
        before_step=look,
    )
    found = logged(tmp_path)
    assert list(found) == ["net.0", "net.1", "net.4"]
    for layer, curve in found.items():
        assert curve.steps == [1, 3, 5, 7]
        assert [str(value) for value in curve.values] == [str(look[layer]) for look in seen[1::2]]
    assert norms.norms == seen[-1]
    assert trainer.skipped_steps == scaled
