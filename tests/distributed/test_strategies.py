"""The selected strategy of a Trainer, and the errors for unsupported ones."""

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelPruning
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, StrategyRegistry
from torch import nn

from tests.parity import ours
from tests.support import Regression, needs_fsdp2
from trainer import FSDP2Strategy
from trainer.callbacks import GradientAccumulation, GradientCheck
from trainer.distributed.fsdp import ParallelStrategy, ShardedEngine, refuse_unsupported_optimizer
from trainer.distributed.sharding.sharded_gradients import ShardedGradients
from trainer.errors import UnsupportedError

pytestmark = needs_fsdp2


def test_fsdp_by_name_and_by_object():
    for given in ("fsdp", FSDP2Strategy()):
        trainer = ours(strategy=given, devices=2)
        assert isinstance(trainer.engine, ShardedEngine)
        assert isinstance(trainer.engine.gradients, ShardedGradients)
        assert type(trainer.strategy) is FSDP2Strategy
        assert given in ("fsdp", trainer.strategy)
    assert ours(strategy="fsdp_cpu_offload", devices=2).strategy.settings.cpu_offload


def test_model_parallel_is_accepted_with_its_settings():
    strategy = ours(strategy=ModelParallelStrategy(1, 2, process_group_backend="gloo"), devices=2).strategy
    assert type(strategy) is ParallelStrategy
    assert (strategy._sizes, strategy.process_group_backend, strategy.settings.blocks) == ((1, 2), "gloo", ())


def test_first_fsdp_is_refused_with_the_settings_of_the_second():
    with pytest.raises(
        UnsupportedError, match=r"FSDPStrategy\(...\), which is FSDP1.*`blocks` for the classes of auto_wrap_p"
    ):
        ours(strategy=FSDPStrategy(auto_wrap_policy={nn.Linear}), devices=2)


@pytest.mark.parametrize("callback", [GradientCheck(), ModelPruning("l1_unstructured")])
def test_callbacks_that_need_whole_gradients_or_weights_are_refused(callback):
    with pytest.raises(UnsupportedError, match=f"{type(callback).__name__} with strategy='fsdp'"):
        ours(strategy="fsdp", devices=2, callbacks=[callback])


@pytest.fixture
def registered():
    """Register a strategy, and return its name."""
    name = "ddp_with_a_static_graph"
    StrategyRegistry.register(name, DDPStrategy, static_graph=True)
    yield name
    StrategyRegistry.remove(name)


@pytest.mark.parametrize(
    "arguments",
    [
        {"accumulate_grad_batches": 2},
        {"callbacks": [GradientAccumulation(schedule={0: 1, 3: 2})]},
        {"callbacks": GradientAccumulationScheduler({0: 1, 3: 2})},
        {"accumulate_grad_batches": 2, "devices": 1},
    ],
)
def test_static_graph_with_accumulation_is_refused(arguments, registered):
    """pytorch #143580: the first backward pass would fail with an internal assertion."""
    message = r"accumulate_grad_batches=2 with DDPStrategy\(static_graph=True\), expected.*=1.*Use strategy='ddp'"
    for strategy in (DDPStrategy(static_graph=True), registered):
        with pytest.raises(UnsupportedError, match=message):
            ours(**{"devices": 2, "strategy": strategy, **arguments})
    ours(**{"devices": 2, "strategy": "ddp", **arguments})


def test_static_graph_refuses_accumulation_that_is_set_later():
    trainer = ours(strategy=DDPStrategy(static_graph=True), devices=2)
    with pytest.raises(UnsupportedError, match="accumulate_grad_batches=4"):
        trainer.accumulate_grad_batches = 4
    assert trainer.accumulate_grad_batches == 1
    trainer.fit_loop._skip_backward = True  # like StochasticWeightAveraging for its update of batch norms
    trainer.accumulate_grad_batches = 4
    trainer.fit_loop._skip_backward = False
    with pytest.raises(UnsupportedError, match="accumulate_grad_batches=2"):
        GradientAccumulation(2).on_train_epoch_start(trainer, Regression())


def test_fused_sgd_is_refused():
    parameters = [nn.Parameter(torch.ones(2))]
    refuse_unsupported_optimizer(torch.optim.SGD(parameters, lr=0.1, foreach=True))
    refuse_unsupported_optimizer(torch.optim.AdamW(parameters, fused=True))
    with pytest.raises(UnsupportedError, match="foreach=True"):
        refuse_unsupported_optimizer(torch.optim.SGD(parameters, lr=0.1, fused=True))


@pytest.mark.whole
def test_run_leaves_no_states_of_optimizers_on_the_gpu(cuda):
    """As with Lightning's strategies. Sharded tensors are not simulated there: these are plain ones."""
    strategy = FSDP2Strategy(accelerator=CPUAccelerator(), cluster_environment=LightningEnvironment())
    weight = nn.Parameter(torch.ones(2, device="cuda"))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    strategy.optimizers = [optimizer]
    assert optimizer.state[weight]["exp_avg"].device.type == "cuda"
    strategy.teardown()
    assert {value.device.type for value in optimizer.state[weight].values()} == {"cpu"}
    assert optimizer.state[weight]["exp_avg"].tolist() == pytest.approx([0.1, 0.1])
