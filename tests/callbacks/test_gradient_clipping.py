"""GradientClipping as a callback. Its arithmetic is tested in tests/loop/test_fit.py."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn

from tests.parity import Learner, assert_agree, data, weights
from tests.support import (
    OPTIMIZERS,
    Regression,
    assert_same,
    fit_and_watch,
    make_batches,
    make_net,
    norm_of,
    plugin_of,
    scaler_of,
    train_by_hand,
)
from trainer.callbacks import GradientClipping


def norm_of_gradients(module):
    return nn.utils.get_total_norm([p.grad for p in module.net.parameters()]).item()


@pytest.mark.parametrize(
    ("precision", "optimizer", "first"), [("32-true", "sgd", True), ("16-mixed", "adam-fused", False)]
)
def test_hooks_before_clipping_receive_unscaled_unclipped_gradients(tmp_path, precision, optimizer, first):
    """At any position among the callbacks, and with any scale."""

    seen, clipped, look = [], [], Callback()
    look.on_before_optimizer_step = lambda *_: seen.append(("callback", norm_of_gradients(module)))
    look.on_after_optimizer_step = lambda *_: clipped.append(norm_of_gradients(module))
    callbacks, make, batches = [GradientClipping(max_norm=0.3), look], OPTIMIZERS[optimizer], make_batches(4)
    module = Regression(make_net(), make)
    module.on_before_optimizer_step = lambda _: seen.append(("module", norm_of_gradients(module)))
    options = {"precision": plugin_of(precision), "callbacks": callbacks if first else callbacks[::-1]}
    _, trace = fit_and_watch(tmp_path, module, batches, **options)
    scaler = scaler_of(precision)
    expected = train_by_hand(make_net(), batches, precision=precision, optimizer=make, scaler=scaler, clip=norm_of(0.3))
    assert_same(trace, expected)
    assert seen == [(who, norm) for norm in expected.norms for who in ("callback", "module")]
    assert clipped == pytest.approx([0.3] * 4, rel=1e-4)


def test_norm_of_a_skipped_step_enters_neither_the_logs_nor_the_mean(tmp_path):
    logged, module = [], Regression(optimizer=OPTIMIZERS["sgd-fused"])
    look = LambdaCallback(on_train_batch_end=lambda trainer, *_: logged.append({**trainer.callback_metrics}))
    batches, callbacks = make_batches(6, gains={0: 1e30, 3: float("nan")}), [GradientClipping(max_norm=0.3), look]
    trainer, trace = fit_and_watch(tmp_path, module, batches, precision=plugin_of("16-mixed"), callbacks=callbacks)
    finite = [norm for norm, skipped in zip(trace.norms, trace.skipped, strict=True) if not skipped]
    assert trace.skipped == [True, False, False, True, False, False]
    norms = [metrics.get("grad_norm_step") for metrics in logged]
    assert norms == [None, finite[0], finite[1], finite[1], finite[2], finite[3]]
    assert trainer.callback_metrics["grad_norm_epoch"].item() == pytest.approx(sum(finite) / 4)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_norm_of_several_optimizers_has_the_order_of_the_clipping(tmp_path, norm_type):
    module, expected = Regression(), []
    module.configure_optimizers = lambda: [torch.optim.SGD([p], lr=0.1) for p in module.net.parameters()]

    def look(*_):
        expected.append(nn.utils.get_total_norm([p.grad for p in module.net.parameters()], norm_type).item())

    callbacks = [GradientClipping(max_norm=0.3, norm_type=norm_type), LambdaCallback(on_before_optimizer_step=look)]
    trainer, _ = fit_and_watch(tmp_path, module, make_batches(1), callbacks=callbacks)
    assert trainer.step_outcome.grad_norm.item() == pytest.approx(expected[0])


@pytest.mark.parametrize("clipping", [{"max_norm": 0.3}, {"clip_value": 0.1}])
def test_norm_is_not_logged_if_disabled(tmp_path, clipping):
    callbacks = [GradientClipping(**clipping, log_norm=False)]
    trainer, trace = fit_and_watch(tmp_path, Regression(), make_batches(2), callbacks=callbacks)
    assert not [name for name in trainer.callback_metrics if "grad_norm" in name]
    assert (trace.norms == []) is ("clip_value" in clipping)  # clipping by norm measures it in any case


def test_argument_clips_if_the_callbacks_are_replaced():
    def scenario(make):
        torch.manual_seed(0)
        module, trainer = Learner(), make(max_epochs=1, gradient_clip_val=0.01)
        trainer.callbacks = []
        trainer.fit(module, data(8))
        return [parameter.tolist() for parameter in weights(module)], trainer.gradient_clip_val

    assert_agree(scenario)


def test_module_that_clips_itself_gets_keyword_arguments():
    given = []

    class Own(Learner):
        def configure_gradient_clipping(self, optimizer, **how):
            given.append(how)
            self.clip_gradients(optimizer, **how)

    def scenario(make):
        module = Own()
        make(max_steps=1, gradient_clip_val=0.01, gradient_clip_algorithm="VALUE").fit(module, data(4))
        return given.pop(), [weight.tolist() for weight in weights(module)]

    assert_agree(scenario)
