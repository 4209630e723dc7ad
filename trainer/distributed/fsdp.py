"""FSDP2: a strategy that Lightning's connector, launchers and callbacks accept, and the engine that works with it.

The strategy derives from ``DDPStrategy``, because Lightning's ``ModelParallelStrategy`` refuses 16-mixed, and its steps
bypass the hooks of the root module. Each batch of a window reduces its gradients, because a single reduction would keep
unsharded gradients on every device (``sync_each_batch=False`` requests it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from trainer.checkpoint.checkpoint_io import files_of
from trainer.common.collectives import Collectives
from trainer.common.lightning_private import optimizers_to_device, set_device_mesh, setup_device_mesh
from trainer.common.module_tree import parameters_of
from trainer.distributed.checkpoint_backend import CheckpointBackend
from trainer.distributed.engine import LightningEngine
from trainer.distributed.sharding import state_dicts as state
from trainer.distributed.sharding.settings import IS_SUPPORTED, check_sharding, check_timeout
from trainer.distributed.sharding.sharded_gradients import ShardedGradients
from trainer.distributed.sharding.wrap import Blocks, ReplacedParameter, ShardedModule, Sharding
from trainer.errors import ConfigurationError, UnsupportedError
from trainer.loop.accumulation import Weight
from trainer.loop.gradients import Gradients
from trainer.loop.run_state import state_of
from trainer.metrics.metric_objects import reduce_over_group
from trainer.precision.fp32_modules import find_modules
from trainer.precision.scaler import LossScaler


class ShardingStrategy(DDPStrategy):
    """A strategy that changes the module when a run begins, and restores it when the run ends.

    After a failure the module stays changed until the next run, because the other processes may not be there to restore
    it.
    """

    lightning_module: LightningModule
    _failed = False

    def begin(self, trainer: pl.Trainer) -> bool:
        """Set up the accelerator; in a fit, also ``sync_batchnorm``. Return whether the run is a fit."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        fitting, self._failed = state_of(trainer).fits, False
        self._synced = self._layer_sync if fitting else None
        if self._synced is not None:
            assert self.model is not None
            self.model = self._synced.apply(self.model)
        return fitting

    def revert_sync(self) -> None:
        """Undo ``sync_batchnorm``."""
        if self._synced is not None:
            self._synced.revert(self.lightning_module)

    def on_exception(self, exception: BaseException) -> None:
        """Record the failure."""
        self._failed = True

    def teardown(self) -> None:
        """Tear down everything but the module."""
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


class FSDP2Strategy(ShardingStrategy):
    """Shards parameters, gradients and optimizer states over the processes with torch's ``fully_shard`` (FSDP2).

    ``Trainer(strategy="fsdp")`` is short for ``Trainer(strategy=FSDP2Strategy())``. On the command line:
    ``trainer=fsdp trainer.strategy.replicas=2 trainer.strategy.blocks=[Block]``. Between runs the module is on the CPU,
    not sharded, and has its original class.

    Args:
        blocks: the parts that are gathered and freed one by one: classes of modules, or their names; or a function of
            (module, mesh) that calls ``fully_shard`` on parts of the module. The rest belongs to the root module, and
            is gathered for the whole step. Default: None, for the outermost members of each ``ModuleList`` and
            ``Sequential``.
        reshard_after_forward: whether parameters are freed between a block's forward and its backward, as in
            ``fully_shard``: True uses less memory, False one collective fewer. An integer: meanwhile, they are sharded
            over this number of processes. Default: None, for True except for the root module.
        mixed_precision: a ``MixedPrecisionPolicy``, or its arguments as a mapping (``{"param_dtype": "bfloat16",
            "reduce_dtype": "float32"}``): the dtypes that parameters are gathered in and gradients are reduced in. Best
            combined with ``Trainer(precision="bf16-mixed")``. Default: None, for the dtype of the parameters, and
            float32 for gradients of 16-bit parameters.
        cpu_offload: keep parameters, gradients and optimizer states in CPU memory; the optimizer steps there. Default:
            False.
        replicas: the number of groups of processes that each hold all shards (hybrid sharding, HSDP): parameters are
            gathered and gradients reduced within a group, and gradients are averaged between groups. Default: 1.
        sync_each_batch: whether each batch of an accumulation window reduces its gradients to shards. If False, the
            last one reduces for all, with fewer collectives, but memory for full gradients. Default: True.
        process_group_backend: ``"nccl"``, ``"gloo"``, ... Default: None, for the one of the device.
        timeout: the time that a process waits for the others in a collective; a timedelta, or seconds. Default: that of
            torch.

    Attributes:
        sharding: a description for messages, with the numbers of processes and blocks. None before the first run.

    Raises:
        ConfigurationError: if an argument has another type or value.
        UnsupportedError: if torch is older than 2.13.
    """

    strategy_name = "fsdp"

    def __init__(
        self,
        blocks: type[nn.Module] | str | Blocks = None,
        reshard_after_forward: bool | int | None = None,
        mixed_precision: MixedPrecisionPolicy | Mapping[str, Any] | None = None,
        cpu_offload: bool = False,
        replicas: int = 1,
        sync_each_batch: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = default_pg_timeout,
        *,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        if not IS_SUPPORTED:
            raise UnsupportedError(
                f"Got torch {torch.__version__} with FSDP2, expected 2.13 or newer: with older versions, a process"
                " that has no batch cannot take part in the collectives of the others. Update torch, or use"
                " strategy='ddp'."
            )
        settings = check_sharding(
            blocks, reshard_after_forward, mixed_precision, cpu_offload, replicas, sync_each_batch
        )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=check_timeout(timeout),
        )
        self.settings = settings
        self.replicas = replicas
        self.sharded: ShardedModule | None = None
        self.sharding: str | None = None
        self._mesh: DeviceMesh | None = None

    @property
    def device_mesh(self) -> DeviceMesh:
        """The processes, with the dimension ``"shards"``, or with ``"replicas"`` and ``"shards"``."""
        if self._mesh is None:
            raise RuntimeError("The device mesh exists only after the processes have started.")
        return self._mesh

    @property
    def data_mesh(self) -> DeviceMesh:
        """The part of the mesh whose processes get different batches: the whole mesh."""
        return self.device_mesh

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: weights are loaded into the sharded module."""
        return True

    def setup_environment(self) -> None:
        """Join the process group, and create the device mesh."""
        super().setup_environment()
        self._mesh = self.make_mesh()
        set_device_mesh(self.lightning_module, self._mesh)  # for `configure_model`

    def make_mesh(self) -> DeviceMesh:
        """Create the device mesh, with the dimensions to shard over.

        Raises:
            ConfigurationError: if the number of processes is not a multiple of ``replicas``.
        """
        device, world_size = self.root_device.type, self.world_size
        if self.replicas == 1:
            return init_device_mesh(device, (world_size,), mesh_dim_names=("shards",))
        if world_size % self.replicas:
            raise ConfigurationError(
                f"Got FSDP2Strategy(replicas={self.replicas}) on {world_size} processes, expected a number that divides"
                f" them: {', '.join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)}."
            )
        shape = (self.replicas, world_size // self.replicas)
        return init_device_mesh(device, shape, mesh_dim_names=("replicas", "shards"))

    def setup(self, trainer: pl.Trainer) -> None:
        """Shard the module, for training and for evaluation; in a fit, create the optimizers."""
        fitting = self.begin(trainer)
        assert self.model is not None
        in_float32 = find_modules(self.model, getattr(state_of(trainer).engine.precision, "fp32_modules", ()))
        settings = self._settings_for(self.model)
        self.sharded = ShardedModule(self.model, self.data_mesh, self.root_device, settings, in_float32)
        self.sharding = self._describe(self.sharded)
        if fitting:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                refuse_unsupported_optimizer(optimizer)
        self.setup_precision_plugin()

    def _describe(self, sharded: ShardedModule) -> str:
        shards = self.data_mesh.size(-1)
        copies = f", {self.replicas} copies" if self.replicas > 1 else ""
        frequency = "with each batch" if self.settings.sync_each_batch else "once an update"
        return f"over {shards} processes{copies}, {sharded.blocks} blocks; gradients are reduced {frequency}"

    def _settings_for(self, module: nn.Module) -> Sharding:
        """Return the settings; gradients of 16-bit parameters are reduced in float32 unless the policy sets a dtype."""
        policy = self.settings.policy
        kinds = {parameter.dtype for parameter in module.parameters()}
        if policy.reduce_dtype is None and policy.param_dtype is None and kinds & {torch.float16, torch.bfloat16}:
            return replace(self.settings, policy=replace(policy, reduce_dtype=torch.float32))
        return self.settings

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep full gradients on this process until the window's last batch, unless each batch reduces them."""
        root: Any = self.model
        if self.settings.sync_each_batch:
            yield
            return
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full state dict of the module, on rank 0."""
        whole: dict[str, Any] = state.gathered(self.lightning_module.state_dict(), self.is_global_zero)
        return whole

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state dict with full or sharded tensors."""
        state.load_module_state(self.lightning_module, checkpoint["state_dict"], strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full state dict of one optimizer, on rank 0."""
        bare = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        whole: dict[str, Any] = state.gathered(bare.state_dict(), self.is_global_zero)
        return whole

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load state dicts with full or sharded tensors."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            state.load_optimizer_state(optimizer, saved)

    def teardown(self) -> None:
        """Restore the module with plain tensors on the CPU, and move the optimizer states there."""
        sharded, self.sharded = self.sharded, None
        if sharded is not None and not self._failed:
            sharded.restore_module()
            sharded.root.cpu()  # moves the buffers
            self.revert_sync()
        optimizers_to_device(self.optimizers, torch.device("cpu"))  # the shards of each process
        super().teardown()


class ParallelStrategy(FSDP2Strategy):
    """Replaces Lightning's ``ModelParallelStrategy``: the module shards itself in ``configure_model``.

    The mesh has two dimensions, ``data_parallel`` and ``tensor_parallel``. The module may use tensor parallelism within
    each group of ``tensor_parallel_size`` processes, which get the same batch. Parameters that the module does not
    shard itself are sharded over ``data_parallel``.

    Args:
        data_parallel_size, tensor_parallel_size: the sizes of the two dimensions of the mesh; ``"auto"`` for the number
            of nodes, and of processes per node.
        options: the arguments of ``FSDP2Strategy``.
    """

    def __init__(self, data_parallel_size: int | str, tensor_parallel_size: int | str, **options: Any) -> None:
        super().__init__(blocks=(), **options)
        self._sizes = data_parallel_size, tensor_parallel_size
        self._put_metrics_back: Callable[[], None] | None = None

    def make_mesh(self) -> DeviceMesh:
        """Create the mesh (data_parallel, tensor_parallel)."""
        data, tensor = self._sizes
        return setup_device_mesh(
            self.num_nodes if data == "auto" else int(data),
            self.num_processes if tensor == "auto" else int(tensor),
            self.world_size,
            self.root_device,
        )

    @property
    def data_mesh(self) -> DeviceMesh:
        """The dimension of the mesh along which processes get different batches."""
        return self.device_mesh["data_parallel"]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The share of the data for this process: the same as for the others of its group."""
        return {"num_replicas": self.data_mesh.size(), "rank": self.data_mesh.get_local_rank()}

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up the strategy, and make metric objects count the batches of a group of processes once."""
        super().setup(trainer)
        self._put_metrics_back = reduce_over_group(self.data_mesh.get_group(), self.lightning_module)

    def teardown(self) -> None:
        """Restore the metric objects, and tear down the strategy."""
        if self._put_metrics_back is not None:
            self._put_metrics_back()
        super().teardown()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the processes with different batches, unless ``group`` is given."""
        return super().reduce(tensor, self.data_mesh.get_group() if group is None else group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Reduce the decision over all processes."""
        votes = super().reduce(torch.tensor(int(decision), device=self.root_device), reduce_op="sum")
        return bool(votes == self.world_size) if all else bool(votes)


def refuse_unsupported_optimizer(optimizer: Optimizer) -> None:
    """Raise an error if an optimizer does not work with sharded parameters."""
    name, is_fused = type(optimizer).__name__, any(group.get("fused") for group in optimizer.param_groups)
    if isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad)) and is_fused:
        raise UnsupportedError(
            f"Got {name}(fused=True) with parameters that are sharded, for which torch has no fused {name}. Use"
            f" {name}(foreach=True); AdamW(fused=True) works."
        )
    if isinstance(optimizer, torch.optim.Adafactor):
        raise UnsupportedError(
            "Got Adafactor with parameters that are sharded: torch's Adafactor would use the norms of shards as those"
            " of the parameters. Use AdamW, or strategy='ddp'."
        )
    if any(isinstance(parameter, ReplacedParameter) for parameter in parameters_of(optimizer)):
        raise UnsupportedError(
            f"Got {name} with parameters that FSDP has replaced by shards. Create the optimizer and its parameter"
            " groups in `configure_optimizers`, which runs afterwards."
        )


UNCALLED = {
    "training_step": "training_step",
    "post_training_step": "on_after_backward",
    "validation_step": "validation_step",
    "test_step": "test_step",
    "predict_step": "predict_step",
    "backward": "backward",
    "pre_backward": "on_before_backward",
    "post_backward": "on_after_backward",
}
"""Methods of a strategy that the engine never calls, because it calls the module, which has FSDP's hooks. A strategy
that overrides one of them is refused. The value is the method of the module to override instead."""


_CHECKED_STEPS = 3
"""Number of optimizer steps in which in-place changes of weights by ``training_step`` are detected."""


class ShardedCollectives(Collectives):
    """Processes of which some may have the same batch (tensor parallelism).

    Args:
        strategy: the strategy.
    """

    def __init__(self, strategy: FSDP2Strategy) -> None:
        super().__init__(strategy)
        self._sharding = strategy

    @property
    def data_parallel_size(self) -> int:
        """The number of processes with different batches."""
        return self._sharding.data_mesh.size()

    def begin_sum(self, *values: Weight) -> Callable[[], list[Weight]]:
        """Sum over the processes with different batches."""
        sums, copies = super().begin_sum(*values), self.world_size // self.data_parallel_size
        return sums if copies == 1 else lambda: [value / copies for value in sums()]


class ShardedCheckpoints(CheckpointBackend):
    """The states of sharded parameters."""

    _engine: ShardedEngine

    def load(self, path: str | Path, weights_only: bool) -> dict[str, Any]:
        """Read a checkpoint; a file is memory-mapped, so that no process holds all of it in memory."""
        if (files := files_of(self._engine.strategy)) is not None:
            files.maps_files = True
        return super().load(path, weights_only)

    def module_state(self) -> dict[str, Any]:
        """Return the module's state dict, with sharded tensors."""
        return self._engine.module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict of one optimizer, with sharded tensors."""
        return optimizer.state_dict()

    def gathered(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return ``checkpoint`` with full tensors, on rank 0."""
        whole: dict[str, Any] = state.gathered(checkpoint, self._engine.global_rank == 0)
        return whole

    def template(self, place: tuple[str, ...], shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Return a tensor that is sharded like the parameter it belongs to."""
        return state.template(self._engine.module, place, shape, dtype)


class ShardedEngine(LightningEngine):
    """Lightning's launcher and collectives, with sharded parameters and gradients."""

    strategy: FSDP2Strategy
    kind = "fsdp"
    uncalled = UNCALLED

    def build_gradients(self, scaler: LossScaler) -> Gradients:
        """Build the operations on sharded gradients."""
        return ShardedGradients(scaler, self._sharded, self.device)

    def build_checkpoints(self) -> CheckpointBackend:
        """Build the operations on sharded states."""
        return ShardedCheckpoints(self)

    def build_collectives(self) -> Collectives:
        """Build the operations of all processes, of which some may share a batch."""
        return ShardedCollectives(self.strategy)

    def _sharded(self) -> ShardedModule:
        assert self.strategy.sharded is not None
        return self.strategy.sharded

    @property
    def goes_through_wrapper(self) -> bool:
        """True: steps are called through the module's own forward, which has FSDP's hooks."""
        return True

    def step_function(self, name: str) -> Callable[..., Any]:
        """Return the step function. For manual optimization, also prepare the hooks for its backward passes."""
        module = self.module
        if name == "training_step" and not module.automatic_optimization:
            renew = self._sharded().prepare_manual()
            self.run.session.watch_steps(lambda: self.optimizers, after=renew)
        return super().step_function(name)

    def _through_wrapper(self, name: str, *args: Any) -> Any:
        sharded, module = self._sharded(), self.module
        sharded.before_forward()
        is_early = name == "training_step" and self._trainer.global_step < _CHECKED_STEPS
        if name == "training_step" and not module.automatic_optimization:
            with sharded.manual_step():
                output = module.training_step(*args)
                if is_early:
                    sharded.refuse_changes()
                return output
        output = super()._through_wrapper(name, *args)
        if is_early:
            sharded.refuse_changes()
        if not torch.is_grad_enabled():
            sharded.idle.remember(name)
            sharded.end_forward()
        return output

    @property
    def forward_runs_collectives(self) -> bool:
        """True: every forward runs collectives."""
        return True

    def idle_forward(self) -> None:
        """Run the collectives of one forward of an evaluation."""
        sharded, loop = self._sharded(), self.run.eval_loop
        assert loop is not None
        with torch.no_grad():
            sharded.idle.forward(f"{loop.stage}_step")
        sharded.end_forward()

    def replay_step(self, name: str) -> Callable[..., Any]:
        """Return the step through the module's own forward, which gathers its weights."""
        return partial(self._replay, name)

    def _replay(self, name: str, *args: Any) -> Any:
        try:
            return self._through_wrapper(name, *args)
        finally:
            self._sharded().idle.forget()
