"""FSDP2 as a strategy that Lightning's connector, launchers and callbacks know, and the engine over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from trainer.compat.engine import LightningEngine
from trainer.engine.gradients import Gradients
from trainer.engine.sharding import state
from trainer.engine.sharding.gradients import ShardedGradients
from trainer.engine.sharding.wrap import Blocks, ShardedModule, Sharding
from trainer.precision.base import Precision
from trainer.precision.scaler import LossScaler


class FSDP2Strategy(DDPStrategy):
    """Parameters, gradients and optimizer states sharded over the processes by torch's ``fully_shard`` (FSDP2).

    ``Trainer(strategy="fsdp")`` is ``Trainer(strategy=FSDP2Strategy())``.

    Args:
        blocks: what is gathered and freed at a time. None for the members of each ``ModuleList`` and ``Sequential``;
            classes of modules; or a function of (module, mesh) that calls ``fully_shard`` itself.
        reshard_after_forward: whether parameters are freed between a block's forward and its backward, as in
            ``fully_shard``; a number of processes to shard over in between. None for True, except of the root.
        mixed_precision: a ``MixedPrecisionPolicy`` for what is gathered and reduced, in the place of, or below,
            ``Trainer(precision=...)``. None for the dtypes that parameters have.
        cpu_offload: keep parameters, gradients and optimizer states in the CPU's memory.
        process_group_backend: ``"nccl"``, ``"gloo"``, ...; None for that of the device.
        timeout: how long a process waits for the others in a collective.
    """

    strategy_name = "fsdp"

    def __init__(
        self,
        blocks: Blocks = None,
        reshard_after_forward: bool | int | None = None,
        mixed_precision: MixedPrecisionPolicy | None = None,
        cpu_offload: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **lightning: Any,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout, **lightning)
        self.settings = Sharding(blocks, reshard_after_forward, mixed_precision or MixedPrecisionPolicy(), cpu_offload)
        self.sharded: ShardedModule | None = None
        self._failed = False

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are loaded into the sharded module."""
        return True

    def make_mesh(self) -> DeviceMesh:
        """The processes, as dimensions to shard over."""
        return init_device_mesh(self.root_device.type, (self.world_size,), mesh_dim_names=("shards",))

    def setup(self, trainer: Any) -> None:
        """Shard the module, for fitting and for evaluation; for fitting, make the optimizers."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        assert self.model is not None
        self._failed = False
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.sharded = ShardedModule(self.model, self.make_mesh(), self.root_device, self.settings)
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep gradients whole, and on this process, until the window's last batch."""
        root: Any = self.model
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module's state dict, on rank 0."""
        assert self.lightning_module is not None
        return state.module_state(self.lightning_module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a whole state dict."""
        assert self.lightning_module is not None
        state.load_module_state(self.lightning_module, checkpoint["state_dict"], strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """One optimizer's whole state dict, on rank 0."""
        return state.optimizer_state(optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load whole state dicts."""
        for optimizer, one in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            state.load_optimizer_state(optimizer, one)

    def on_exception(self, exception: BaseException) -> None:
        """The other processes may not be there to put the module back."""
        self._failed = True

    def teardown(self) -> None:
        """Put the module back: plain tensors, on the CPU. After a failure it stays sharded, until another run."""
        sharded, self.sharded = self.sharded, None
        if sharded is not None and not self._failed:
            sharded.put_back()
        super().teardown()


class ShardedEngine(LightningEngine):
    """Lightning's launcher and collectives; sharded parameters and gradients."""

    strategy: FSDP2Strategy

    def build_gradients(self, scaler: LossScaler) -> Gradients:
        """Of which each process holds a part."""
        return ShardedGradients(scaler, self._sharded, self.device)

    def _sharded(self) -> ShardedModule:
        assert self.strategy.sharded is not None
        return self.strategy.sharded

    @property
    def goes_through_wrapper(self) -> bool:
        """Always: by the module's own forward, where FSDP's hooks are."""
        return True

    def _through_wrapper(self, name: str, *args: Any) -> Any:
        sharded = self._sharded()
        sharded.before_forward()
        output = super()._through_wrapper(name, *args)
        if not torch.is_grad_enabled():
            sharded.idle.remember(name)
            sharded.reshard_root()
        return output

    @property
    def forward_exchanges(self) -> bool:
        """Whether every forward takes part in exchanges."""
        return True

    def idle_forward(self) -> None:
        """The collectives of one forward of an evaluation."""
        sharded = self._sharded()
        with torch.no_grad():
            sharded.idle.forward(_STEPS[self._trainer.state.stage])
        sharded.reshard_root()


def build_engine(trainer: Any, precision: Precision, plugins: Any, **options: Any) -> LightningEngine:
    """The engine for ``options["strategy"]``; see :class:`LightningEngine`."""
    if options.get("strategy") in _NAMES:
        options["strategy"] = _NAMES[options["strategy"]]()
    sharded = isinstance(options.get("strategy"), FSDP2Strategy)
    return (ShardedEngine if sharded else LightningEngine)(trainer, precision, plugins, **options)


_STEPS = {
    RunningStage.SANITY_CHECKING: "validation_step",
    RunningStage.VALIDATING: "validation_step",
    RunningStage.TESTING: "test_step",
    RunningStage.PREDICTING: "predict_step",
}
_NAMES: dict[Any, Callable[[], FSDP2Strategy]] = {
    "fsdp": FSDP2Strategy,
    "fsdp_cpu_offload": partial(FSDP2Strategy, cpu_offload=True),
}
