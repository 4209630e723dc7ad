"""Compiled modules train to the weights of eager ones, also if a part runs in float32."""

import pytest
from torch import nn
from torch._functorch import config

from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer.callbacks import Compile
from trainer.precision import MixedPrecision

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # of Dynamo when it inspects its inputs
    pytest.mark.usefixtures("fresh_compiler"),
]


def test_gradients_of_a_part_in_float32_do_not_overflow(tmp_path):
    """In float16 the products of this backward pass would overflow: 1e3 from the loss, times 100 from the weights."""
    for callbacks in ([], [Compile(backend="aot_eager")]):
        net = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)))
        for parameter in net[1].parameters():
            nn.init.constant_(parameter, 100.0)
        nn.init.constant_(net[0].weight, 0.0)
        net[0].requires_grad_(False)
        precision = MixedPrecision("float16", init_scale=1.0, cpu_kernels="native", fp32_modules=["net.1"])
        trainer = make_trainer(tmp_path, precision=precision, callbacks=callbacks)
        module = Regression(net)
        module.training_step = lambda batch, batch_idx, net=net: net(batch[0]).float().sum() * 1e3
        trainer.fit(module, loader_of(make_batches(2)))
        assert trainer.skipped_steps == 0


@pytest.mark.parametrize("users", [None, [{"device_type": "cpu"}]])
def test_cache_setting_is_restored_after_a_run(tmp_path, users):
    seen = []
    module = Regression(change=lambda loss, _: seen.append(config.backward_pass_autocast) or loss)
    with config.patch(backward_pass_autocast=users or config.backward_pass_autocast):
        before = config.backward_pass_autocast
        make_trainer(tmp_path, precision="bf16-mixed").fit(module, loader_of(make_batches(1)))
        assert config.backward_pass_autocast == before
    assert seen == [users or "off"]
