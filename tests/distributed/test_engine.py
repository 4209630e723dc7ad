"""The engine over Lightning's strategies: accepted arguments, and the attributes of a single device."""

import re

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins import MixedPrecision, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_only

from tests.parity import QUIET, Learner, assert_agree, data, ours, run_both
from trainer import Trainer
from trainer.distributed.engine import LightningEngine
from trainer.errors import ArgumentError, ConfigurationError, PrecisionError
from trainer.loop.gradients import Gradients


def named(value):
    """Return ``value`` for a test id, equal in every process: without addresses."""
    return re.sub(" at 0x[0-9a-f]+", "", str(value))


@pytest.mark.parametrize(
    "options",
    [
        {"plugins": [MixedPrecision("bf16-mixed", "cpu")]},
        {"strategy": SingleDeviceStrategy(torch.device("cpu"), precision_plugin=MixedPrecision("bf16-mixed", "cpu"))},
        {"precision": MixedPrecision("bf16-mixed", "cpu")},
    ],
    ids=["plugins", "strategy", "precision"],
)
def test_lightnings_precision_is_refused_in_each_argument(options):
    with pytest.raises(PrecisionError, match=r"trainer\.precision"):
        ours(**options)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_callback_can_convert_a_batch_and_create_weights(precision):
    def scenario(make):
        plugin, batch = make(precision=precision).precision_plugin, [torch.zeros(1), torch.zeros(1, dtype=torch.int32)]
        with plugin.module_init_context():
            weights = torch.nn.Linear(1, 1).weight
        return [tensor.dtype for tensor in (*plugin.convert_input(batch), weights)]

    assert_agree(scenario)


SLURM = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_NAME": "some", "SLURM_NODEID": "0",
         "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}  # fmt: skip
ELASTIC = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "GROUP_RANK": "0",
           "TORCHELASTIC_RUN_ID": "1"}  # fmt: skip


CHOICES = [
    {"accelerator": "gpu", "devices": 1, "num_nodes": 2},
    {"accelerator": "cuda", "devices": [1], "strategy": "ddp"},
    {"accelerator": "cpu", "devices": 2, "strategy": "ddp_fork", "sync_batchnorm": True},
    {"accelerator": "cpu", "devices": 2, "strategy": lambda: DDPStrategy(find_unused_parameters=True)},
    {"accelerator": "cpu", "strategy": "ddp", "plugins": lambda: [TorchCheckpointIO(), LightningEnvironment()]},
    {"accelerator": "gpu", "devices": 3},
    {"accelerator": "tpu"},
    {"strategy": "ddp_nonsense"},
]
TWO = [({"devices": 2, "accelerator": "gpu"}, SLURM), ({"devices": 2, "strategy": DDPStrategy}, ELASTIC)]


def _lightnings(launcher):
    """Return the Lightning classes of a launcher. Ours inherits from one of them."""
    return [kind for kind in type(launcher).__mro__ if kind.__module__.startswith("lightning.")]


@pytest.mark.filterwarnings("ignore:GPU available but not used")
@pytest.mark.parametrize(("options", "environment"), [*((options, {}) for options in CHOICES), *TWO], ids=named)
def test_devices_and_processes_are_lightnings(options, environment, monkeypatch):
    """Compares devices and launchers, or the error, on a machine with two GPUs."""
    for place in ("lightning.fabric.accelerators.cuda", "lightning.pytorch.accelerators.cuda"):
        monkeypatch.setattr(f"{place}.num_cuda_devices", lambda: 2)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_zero_only, "rank", rank_zero_only.rank)  # which a Trainer sets: put back afterwards

    def scenario(make):
        given = {"accelerator": "auto", "devices": "auto", **options}
        try:
            trainer = make(**{name: value() if callable(value) else value for name, value in given.items()})
        except Exception as error:
            return type(error), re.sub("0x[0-9a-f]+", "", str(error))
        strategy = trainer.strategy
        return (
            type(trainer.accelerator), type(strategy), strategy.root_device,
            isinstance(strategy.checkpoint_io, TorchCheckpointIO),
            type(getattr(strategy, "cluster_environment", None)), type(getattr(strategy, "_layer_sync", None)),
            _lightnings(strategy.launcher)[:1], trainer.device_ids, trainer.num_nodes,
            trainer.distributed_sampler_kwargs,
            (trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.node_rank, rank_zero_only.rank),
        )  # fmt: skip

    theirs, mine = run_both(scenario)
    if mine[0] is ArgumentError:  # with the sentence of the command line, and caught as Lightning's
        assert issubclass(ArgumentError, theirs[0])
        (argument,) = [name for name in options if mine[1].startswith(f"{name} is ")]
        assert str(options[argument]) in mine[1]
    else:
        assert theirs == mine


@pytest.mark.parametrize("restores", [True, False])
def test_strategy_that_restores_optimizers_itself_is_supported(tmp_path, restores):
    class Own(SingleDeviceStrategy):
        lightning_restore_optimizer = restores
        asked = 0

        def load_optimizer_state_dict(self, checkpoint):
            self.asked += 1

    first, strategy = ours(max_steps=1), Own("cpu")
    first.fit(Learner(), data(4))
    first.save_checkpoint(tmp_path / "first.ckpt")
    ours(max_steps=2, strategy=strategy).fit(Learner(), data(4), ckpt_path=tmp_path / "first.ckpt")
    assert strategy.asked == restores


class Recorded(Gradients):
    """Records operations on gradients."""

    def __init__(self, scaler, done):
        super().__init__(scaler)
        self._done = done

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name in ("clear", "backward", "multiply_", "unscale_", "norm", "clip_", "step", "update", "resolve_outcome"):
            self._done.append(name)
        return found


def test_custom_engine_does_all_gradient_operations():
    done = []

    class Watched(LightningEngine):
        def build_gradients(self, scaler):
            return Recorded(scaler, done)

    class WatchedTrainer(Trainer):
        def _build_engine(self, precision, plugins, **options):
            return Watched(self, precision, plugins, **options)

    trainer = WatchedTrainer(**QUIET, max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=1.0)
    trainer.fit(Learner(), data(6))  # three batches: a window of two, and one of one
    step = ["unscale_", "clip_", "step", "update"]
    begins = ["clear", "clear"]  # before the forward pass, and after it, for gradients that the step itself has left
    assert done == ["backward", *begins, *step, *begins, *step]  # the batch path reads `backward` once


def test_batch_that_another_process_lacks_cannot_wait_for_it():
    trainer, error = Trainer(**QUIET), ConfigurationError("there is nobody")
    with trainer.engine.collectives.forbid_collectives(error):
        for name in ("all_gather", "barrier", "broadcast", "reduce_boolean_decision"):
            with pytest.raises(ConfigurationError, match="there is nobody"):
                getattr(trainer.strategy, name)(torch.ones(1))
    assert torch.equal(trainer.strategy.all_gather(torch.ones(1)), torch.ones(1))
    assert not trainer.engine.forward_runs_collectives
    trainer.engine.idle_forward()
    assert trainer.engine.collectives.num_collectives() == 0
