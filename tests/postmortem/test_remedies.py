from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from tests.postmortem.layers import Huge, sequential
from tests.postmortem.test_replay import recorded_fit
from tests.support import Regression, make_batches
from trainer.postmortem import remedies
from trainer.postmortem.examine import Finding, examine
from trainer.postmortem.replay import Variant
from trainer.precision import MixedPrecision


def looked_at(folder, module, look, batches=None, **arguments):
    """The result of ``look(trainer, batches)`` after the only step of a fit."""
    found = []
    recorded_fit(folder, module, lambda trainer, one: found.append(look(trainer, [one])), batches, **arguments)
    return found[0]


def cure_of(trainer, batches):
    return remedies.find_cure(trainer, batches, examine(trainer, batches, 1024.0))


def test_a_module_that_overflows_is_cured_with_those_that_take_its_output(tmp_path):
    variant, finding = looked_at(tmp_path, Regression(sequential(Huge(), 4)), cure_of)
    assert finding.largest_scale >= remedies.LOW_SCALE or variant.dtype is not None
    assert not finding.error
    assert math.isfinite(finding.loss)


@pytest.mark.parametrize(
    ("finding", "variant", "cured"),
    [
        ({"loss": 1.0, "largest_scale": 128.0}, Variant(), True),
        ({"loss": 1.0, "largest_scale": 64.0}, Variant(), False),
        ({"loss": math.nan, "largest_scale": 128.0}, Variant(), False),
        ({"loss": 1.0, "largest_scale": 128.0, "error": "broken"}, Variant(), False),
        ({"loss": 1.0, "largest_scale": 0.0}, Variant(torch.bfloat16), True),
        ({"loss": 1.0, "fails": True}, Variant(torch.bfloat16), False),
    ],
)
def test_what_counts_as_a_cure(finding, variant, cured):
    assert remedies.is_cured(Finding(0, 0, 1, 0, 1.0, **finding), variant) is cured


@pytest.mark.parametrize(("gain", "lost"), [(1.0, 0.0), (1e-12, 1.0)])
def test_the_share_of_the_gradient_that_is_lost(tmp_path, gain, lost):
    shares = looked_at(
        tmp_path, Regression(), lambda trainer, batches: remedies.underflow(trainer, batches, 1.0),
        make_batches(1, gains={0: gain}),
    )  # fmt: skip
    assert shares[""] == pytest.approx(lost, abs=0.1)
    assert set(shares) > {"", "net.0.weight"}


@pytest.mark.parametrize(("rate", "diverges"), [(0.01, False), (1e4, True)])
def test_trial_steps_before_the_end_of_a_window(tmp_path, rate, diverges):
    def look(trainer, batches):
        trainer.optimizers[0].param_groups[0]["lr"] = rate
        batches[0].window.is_last = False
        return remedies.diverges(trainer, batches)

    assert looked_at(tmp_path, Regression(), look) is diverges


def test_other_weights_for_a_while(tmp_path):
    def look(trainer, batches):
        module, batches = trainer.lightning_module, [one._replace(buffers=None) for one in batches]
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        own = remedies.losses(trainer, batches)
        with remedies.weights_of(trainer, {name: torch.zeros_like(p) for name, p in before.items()}):
            others = remedies.losses(trainer, batches)
        assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
        assert remedies.losses(trainer, batches) == own
        return own, others, float(batches[0].batch[1].square().mean() * batches[0].batch[2])

    own, others, expected = looked_at(tmp_path, Regression(), look)
    assert own != others
    assert others == [pytest.approx(expected)]


def test_the_settings_of_the_run_stay_in_the_remedy():
    loop = SimpleNamespace(precision=MixedPrecision("float16", init_scale=1024.0))
    trainer = SimpleNamespace(loop=loop)
    assert remedies.precision(trainer, fp32_modules=("net.1",)) == (
        "precision=MixedPrecision('float16', init_scale=1024.0, fp32_modules=['net.1'])"
    )
    assert remedies.other_precision("bf16-mixed") == "precision='bf16-mixed'"
    assert remedies.optimizer_setting("lr=0.01") == "lr=0.01"


def test_the_settings_on_the_command_line(monkeypatch):
    monkeypatch.setattr(remedies, "is_command_line", lambda: True)
    assert remedies.precision(None, fp32_modules=("layers.*.net",)) == "'precision.fp32_modules=[layers.*.net]'"
    assert remedies.precision(None, init_scale=64.0) == "precision.init_scale=64.0"
    assert remedies.other_precision("bf16-mixed") == "precision=bf16-mixed"
    assert remedies.optimizer_setting("lr=0.01") == "optimizer.lr=0.01"
