"""The gradient norms of layers: values, names, frequency, and refused settings."""

import pytest
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from tests.support import Regression, fit_and_watch, make_batches, norm_of, plugin_of, scaler_of, train_by_hand
from trainer.callbacks import GradientClipping, LayerNorms
from trainer.record.curve import read_rows


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_norms_equal_those_of_a_hand_written_loop(tmp_path, precision):
    """Bitwise equal, for accumulated gradients before clipping, also in skipped steps."""
    batches = make_batches(16, gains={8: 1e30} if precision == "16-mixed" else None)
    norms, theirs = LayerNorms(every_n_steps=2), Regression().net
    trainer, _ = fit_and_watch(
        tmp_path,
        Regression(),
        batches,
        precision=plugin_of(precision),
        callbacks=[GradientClipping(max_norm=0.1), norms],
        accumulate_grad_batches=2,
        logger=CSVLogger(tmp_path, name="", version=""),
    )
    seen = []

    def look(_):
        layers = {name: [p.grad for p in layer.parameters()] for name, layer in theirs.named_children()}
        seen.append({f"net.{k}": nn.utils.get_total_norm(grads).item() for k, grads in layers.items() if grads})

    train_by_hand(
        theirs, batches, precision=precision, scaler=scaler_of(precision), window=2, clip=norm_of(0.1), before_step=look
    )
    curves = read_rows(tmp_path / "metrics.csv")
    found = {name.removeprefix("grad_norm/"): curve for name, curve in curves.items() if name.startswith("grad_norm/")}
    assert list(found) == ["net.0", "net.1", "net.4"]
    for layer, curve in found.items():
        assert curve.steps == [1, 3, 5, 7]
        assert [str(value) for value in curve.values] == [str(look[layer]) for look in seen[1::2]]
    assert norms.norms == seen[-1]
    assert trainer.skipped_steps == (precision == "16-mixed")
