import math
from types import SimpleNamespace

import pytest
import torch

from tests.diagnosis.test_replay import recorded_fit
from tests.support import Regression
from trainer.diagnosis import remedies
from trainer.diagnosis.examine import Finding
from trainer.diagnosis.replay import Variant
from trainer.precision import MixedPrecision


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


def test_other_weights_for_a_while(tmp_path):
    found = []

    def look(trainer, recorded):
        module, batches = trainer.lightning_module, [recorded._replace(buffers=None)]
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        own = remedies.losses(trainer.run_state, batches)
        with remedies.weights_of(trainer.run_state, {name: torch.zeros_like(p) for name, p in before.items()}):
            others = remedies.losses(trainer.run_state, batches)
        assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
        assert remedies.losses(trainer.run_state, batches) == own != others
        _, y, gain = recorded.batch
        found.append((others, [pytest.approx(float(y.square().mean() * gain))]))

    recorded_fit(tmp_path, Regression(), look)
    ((others, expected),) = found
    assert others == expected


RUN = SimpleNamespace(optimizers=[SimpleNamespace(param_groups=[{"lr": 0.1}])])


def test_the_settings_of_the_run_stay_in_the_remedy():
    assert str(remedies.precision(MixedPrecision("float16", init_scale=1024.0), fp32_modules=("net.1",))) == (
        "precision=MixedPrecision('float16', init_scale=1024.0, fp32_modules=['net.1'])"
    )
    assert str(remedies.other_precision("bf16-mixed")) == "precision='bf16-mixed'"
    assert str(remedies.optimizer_setting(RUN, "lr", 0.01)) == "lr=0.01"


def test_the_settings_on_the_command_line(monkeypatch):
    monkeypatch.setattr(remedies, "is_command_line", lambda: True)
    assert (
        str(remedies.precision(MixedPrecision("float16"), fp32_modules=("layers.*.net",)))
        == "'precision.fp32_modules=[layers.*.net]'"
    )
    assert str(remedies.precision(MixedPrecision("float16"), init_scale=64.0)) == "precision.init_scale=64.0"
    assert str(remedies.other_precision("bf16-mixed")) == "precision=bf16-mixed"
    assert str(remedies.optimizer_setting(RUN, "lr", 0.01)) == "optimizer.lr=0.01"
