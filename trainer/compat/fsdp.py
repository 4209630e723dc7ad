"""FSDP2 as a strategy that Lightning's connector, launchers and callbacks know, and the engine over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.model_parallel import _setup_device_mesh
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from trainer.compat.checkpoint_io import files_of
from trainer.compat.engine import LightningEngine
from trainer.engine.gradients import Gradients
from trainer.engine.protocol import Weight
from trainer.engine.sharding import state_dicts as state
from trainer.engine.sharding.settings import IS_SUPPORTED, check_sharding
from trainer.engine.sharding.sharded_gradients import ShardedGradients
from trainer.engine.sharding.wrap import Blocks, ShardedModule, Sharding
from trainer.errors import ConfigurationError, UnsupportedError
from trainer.precision.fp32_modules import find_modules
from trainer.precision.scaler import LossScaler
from trainer.state.metric_objects import exchange_over


class FSDP2Strategy(DDPStrategy):
    """Parameters, gradients and optimizer states sharded over the processes by torch's ``fully_shard`` (FSDP2).

    ``Trainer(strategy="fsdp")`` is ``Trainer(strategy=FSDP2Strategy())``. On the command line:
    ``trainer=fsdp trainer.strategy.replicas=2 trainer.strategy.blocks=[Block]``. Between runs the
    module is whole, on the CPU, and of its own class.

    Args:
        blocks: what is gathered and freed at a time. None for the outermost members of each ``ModuleList`` and
            ``Sequential``; classes of modules, or their names; or a function of (module, mesh) that calls
            ``fully_shard`` on parts of the module. What is left belongs to the module itself, and is gathered for the
            whole step.
        reshard_after_forward: whether parameters are freed between a block's forward and its backward, as in
            ``fully_shard``: True takes less memory, False one exchange less. A number of processes: they are spread
            over as many meanwhile. None for True, except of the module itself.
        mixed_precision: a ``MixedPrecisionPolicy``, or its arguments as a mapping (``{"param_dtype": "bfloat16",
            "reduce_dtype": "float32"}``): the dtypes that parameters are gathered in and gradients are reduced in. Best
            together with ``Trainer(precision="bf16-mixed")``. None for the dtype that parameters have, and float32
            for the gradients of parameters in 16 bits.
        cpu_offload: keep parameters, gradients and optimizer states in the CPU's memory; the optimizer steps there.
        replicas: how many groups of processes hold all shards, each between themselves (hybrid sharding, HSDP): within
            a group there is gathered and reduced as usual, between the groups gradients are averaged.
        sync_each_batch: whether each batch of an accumulation window reduces its gradients to shards, or the last one
            for all, which exchanges less and takes memory for whole gradients.
        process_group_backend: ``"nccl"``, ``"gloo"``, ...; None for that of the device.
        timeout: how long a process waits for the others in a collective; a timedelta, or seconds.

    Attributes:
        sharding: what a run says of it: over how many processes, how many blocks; None before the first.

    Raises:
        ConfigurationError: an argument that is not as above.
        UnsupportedError: a torch older than 2.13.
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
                f"Got torch {torch.__version__} with FSDP2, expected 2.13 or newer: older ones cannot keep a process in"
                " step that has no batch. Update torch, or use strategy='ddp'."
            )
        checked = check_sharding(
            blocks=blocks,
            reshard_after_forward=reshard_after_forward,
            mixed_precision=mixed_precision,
            cpu_offload=cpu_offload,
            replicas=replicas,
            sync_each_batch=sync_each_batch,
            timeout=timeout,
        )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout,
        )
        self.settings = checked
        self.replicas = replicas
        self.sharded: ShardedModule | None = None
        self.sharding: str | None = None
        self._mesh: DeviceMesh | None = None
        self._failed = False

    @property
    def device_mesh(self) -> DeviceMesh:
        """The processes: of the dimension ``"shards"``; or of two, ``"replicas"`` before it."""
        if self._mesh is None:
            raise RuntimeError("The device mesh is there once the processes have started.")
        return self._mesh

    @property
    def data_mesh(self) -> DeviceMesh:
        """Those dimensions of it over which batches differ, and parameters are sharded."""
        return self.device_mesh

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are loaded into the sharded module."""
        return True

    def setup_environment(self) -> None:
        """Join the process group, and arrange the processes."""
        super().setup_environment()
        self._mesh = self.make_mesh()
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._mesh  # `self.device_mesh` in `configure_model`

    def make_mesh(self) -> DeviceMesh:
        """The processes, as dimensions to shard over.

        Raises:
            ConfigurationError: the number of processes is no multiple of ``replicas``.
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

    def setup(self, trainer: Any) -> None:
        """Shard the module, for fitting and for evaluation; for fitting, make the optimizers."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._failed = False
        self._syncs = fitting and self._layer_sync is not None
        if self._syncs:
            assert self._layer_sync is not None
            self.model = self._layer_sync.apply(self.model)
        in_float32 = find_modules(self.model, getattr(trainer.engine.precision, "fp32_modules", ()))
        settings = self._settings_for(self.model)
        self.sharded = ShardedModule(self.model, self.data_mesh, self.root_device, settings, in_float32)
        self.sharding = self._describe(self.sharded)
        if fitting:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                _refuse_fused_sgd(optimizer)
        self.setup_precision_plugin()

    def _describe(self, sharded: ShardedModule) -> str:
        shards = self.data_mesh.size(-1)
        copies = f", {self.replicas} copies" if self.replicas > 1 else ""
        when = "with each batch" if self.settings.sync_each_batch else "once an update"
        return f"over {shards} processes{copies}, {sharded.blocks} blocks; gradients are reduced {when}"

    def _settings_for(self, module: nn.Module) -> Sharding:
        """Gradients of parameters in 16 bits are reduced in float32, unless the policy says otherwise."""
        policy = self.settings.policy
        kinds = {parameter.dtype for parameter in module.parameters()}
        if policy.reduce_dtype is None and policy.param_dtype is None and kinds & {torch.float16, torch.bfloat16}:
            return replace(self.settings, policy=replace(policy, reduce_dtype=torch.float32))
        return self.settings

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep gradients whole, and on this process, until the window's last batch; unless each is to be reduced."""
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
        """The whole module's state dict, on rank 0."""
        assert self.lightning_module is not None
        whole: dict[str, Any] = state.gathered(self.lightning_module.state_dict(), self.is_global_zero)
        return whole

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state dict, whole or sharded."""
        assert self.lightning_module is not None
        state.load_module_state(self.lightning_module, checkpoint["state_dict"], strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """One optimizer's whole state dict, on rank 0."""
        bare = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        whole: dict[str, Any] = state.gathered(bare.state_dict(), self.is_global_zero)
        return whole

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load state dicts, whole or sharded."""
        for optimizer, one in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            state.load_optimizer_state(optimizer, one)

    def on_exception(self, exception: BaseException) -> None:
        """The other processes may not be there to put the module back."""
        self._failed = True

    def teardown(self) -> None:
        """Put the module back: plain tensors, on the CPU, where the optimizers' states go, too.

        After a failure it stays sharded, until another run.
        """
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        sharded, self.sharded = self.sharded, None
        if sharded is not None and not self._failed:
            sharded.put_back()
            sharded.root.cpu()  # buffers
            if self._syncs:
                assert self._layer_sync is not None
                self._layer_sync.revert(sharded.root)
        _optimizers_to_device(self.optimizers, torch.device("cpu"))  # each process its parts
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


class ParallelStrategy(FSDP2Strategy):
    """In the place of Lightning's ``ModelParallelStrategy``: the module shards itself in ``configure_model``.

    It may use tensor parallelism, within each group of ``tensor_parallel_size`` processes, which share a batch. What it
    leaves whole is sharded over the others.

    Args:
        data_parallel_size, tensor_parallel_size: of the mesh's two dimensions; ``"auto"`` for the numbers of machines,
            and of processes on each.
        options: as for ``FSDP2Strategy``.
    """

    def __init__(self, data_parallel_size: int | str, tensor_parallel_size: int | str, **options: Any) -> None:
        super().__init__(blocks=(), **options)
        self._sizes = data_parallel_size, tensor_parallel_size
        self._put_metrics_back: Callable[[], None] | None = None

    def make_mesh(self) -> DeviceMesh:
        """(data_parallel, tensor_parallel)."""
        data, tensor = self._sizes
        return _setup_device_mesh(
            self.num_nodes if data == "auto" else int(data),
            self.num_processes if tensor == "auto" else int(tensor),
            self.world_size,
            self.root_device,
        )

    @property
    def data_mesh(self) -> DeviceMesh:
        """Those over which batches differ."""
        return self.device_mesh["data_parallel"]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which share of the data this process gets: the same as the others of its group."""
        return {"num_replicas": self.data_mesh.size(), "rank": self.data_mesh.get_local_rank()}

    def setup(self, trainer: Any) -> None:
        """As usual; metric objects count the batches of a group of processes once."""
        super().setup(trainer)
        assert self.lightning_module is not None
        self._put_metrics_back = exchange_over(self.data_mesh.get_group(), self.lightning_module)

    def teardown(self) -> None:
        """As usual."""
        if self._put_metrics_back is not None:
            self._put_metrics_back()
        super().teardown()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As usual; over the processes whose batches differ, unless ``group`` says otherwise."""
        return super().reduce(tensor, self.data_mesh.get_group() if group is None else group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Over all processes."""
        votes = super().reduce(torch.tensor(int(decision), device=self.root_device), reduce_op="sum")
        return bool(votes == self.world_size) if all else bool(votes)


def _refuse_fused_sgd(optimizer: Optimizer) -> None:
    if isinstance(optimizer, torch.optim.SGD) and any(group.get("fused") for group in optimizer.param_groups):
        raise UnsupportedError(
            "Got SGD(fused=True) with parameters that are sharded, for which torch has no fused SGD. Use"
            " SGD(foreach=True); AdamW(fused=True) works."
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
"""Methods of a strategy that are not called if it shards the module: hooks of its modules take part in each of them."""


class ShardedEngine(LightningEngine):
    """Lightning's launcher and collectives; sharded parameters and gradients."""

    strategy: FSDP2Strategy
    kind = "fsdp"
    uncalled = UNCALLED

    def build_gradients(self, scaler: LossScaler) -> Gradients:
        """Of which each process holds a part."""
        return ShardedGradients(scaler, self._sharded, self.device)

    def _sharded(self) -> ShardedModule:
        assert self.strategy.sharded is not None
        return self.strategy.sharded

    def load(self, path: str | Path, weights_only: bool) -> dict[str, Any]:
        """Read a checkpoint; a file is mapped, so that no process has all of it in memory."""
        if (files := files_of(self.strategy)) is not None:
            files.maps_files = True
        return super().load(path, weights_only)

    def module_state(self) -> dict[str, Any]:
        """The module's state dict, of sharded tensors."""
        assert self.strategy.lightning_module is not None
        found: dict[str, Any] = self.strategy.lightning_module.state_dict()
        return found

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """One optimizer's state dict, of sharded tensors."""
        return optimizer.state_dict()

    def gathered(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """``checkpoint`` with whole tensors, on rank 0."""
        whole: dict[str, Any] = state.gathered(checkpoint, self.global_rank == 0)
        return whole

    def template(self, place: tuple[str, ...], shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Sharded as the parameter that it belongs to."""
        assert self.strategy.lightning_module is not None
        return state.template(self.strategy.lightning_module, place, shape, dtype)

    @property
    def data_parallel_size(self) -> int:
        """How many processes have batches of their own."""
        return self.strategy.data_mesh.size()

    def begin_sum(self, *values: Weight) -> Callable[[], list[Weight]]:
        """Add up over the processes that have batches of their own."""
        sums, copies = super().begin_sum(*values), self.world_size // self.data_parallel_size
        return sums if copies == 1 else lambda: [value / copies for value in sums()]

    @property
    def goes_through_wrapper(self) -> bool:
        """Always: by the module's own forward, where FSDP's hooks are."""
        return True

    def step_function(self, name: str) -> Callable[..., Any]:
        """As for others; a ``training_step`` with backward passes in it is no forward."""
        module = self.strategy.lightning_module
        if name == "training_step" and module is not None and not module.automatic_optimization:
            renew = self._sharded().prepare_manual()
            for optimizer in self.optimizers:
                self._sharded().handles.append(optimizer.register_step_post_hook(renew))
        return super().step_function(name)

    def _through_wrapper(self, name: str, *args: Any) -> Any:
        sharded, module = self._sharded(), self.strategy.lightning_module
        assert module is not None
        sharded.before_forward()
        if name == "training_step" and not module.automatic_optimization:
            with sharded.manual_step():
                return module.training_step(*args)
        output = super()._through_wrapper(name, *args)
        if not torch.is_grad_enabled():
            sharded.idle.remember(name)
            sharded.end_forward()
        return output

    @property
    def forward_exchanges(self) -> bool:
        """Whether every forward takes part in exchanges."""
        return True

    def idle_forward(self) -> None:
        """The collectives of one forward of an evaluation."""
        sharded, loop = self._sharded(), self._trainer.eval_loops[self._trainer.state.stage]
        with torch.no_grad():
            sharded.idle.forward(f"{loop.stage}_step")
        sharded.end_forward()

    def replay_step(self, name: str) -> Callable[..., Any]:
        """By the module's own forward, where its weights are gathered."""
        return partial(self._replay, name)

    def _replay(self, name: str, *args: Any) -> Any:
        try:
            return self._through_wrapper(name, *args)
        finally:
            self._sharded().idle.forget()
