"""The engine on top of ``lightning.pytorch.strategies``, built by Lightning's own accelerator connector.

These strategies are used instead of Fabric's because stock callbacks read attributes of ``trainer.strategy`` that
Fabric's lack, because users create these ``DDPStrategy(...)`` objects, and because manual optimization under DDP works
with them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.trainer.connectors.signal_connector import _get_sigkill_signal
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from trainer.arguments import refuse_other_package
from trainer.checkpoint.checkpoint_io import adopt
from trainer.common import cluster
from trainer.common.aliases import alias
from trainer.common.collectives import Collectives
from trainer.common.lightning_private import MultiProcessingLauncher, ScriptLauncher
from trainer.common.module_tree import is_dense, parameters_of
from trainer.common.session import Session
from trainer.common.traits import unsupported_with
from trainer.distributed.checkpoint_backend import CheckpointBackend
from trainer.distributed.child_processes import children, leave_group_at_exit
from trainer.distributed.initialisation import initialise
from trainer.distributed.launchers import WatchedLauncher, signals_passed_on
from trainer.distributed.precision_plugin import PrecisionAdapter
from trainer.distributed.sharding.wrap import restore_module
from trainer.distributed.stalls import record_collectives
from trainer.errors import ConfigurationError, PrecisionError, UnsupportedError, join_first
from trainer.loop.batch_path import ModuleCalls
from trainer.loop.gradients import Gradients, zero_loss
from trainer.loop.optimizers import set_up_optimizers
from trainer.loop.overrides import overridden, overrides
from trainer.loop.run_state import RunState, state_of
from trainer.loop.schedule_free import prepare, schedule_free
from trainer.precision.base import Precision
from trainer.precision.scaler import LossScaler
from trainer.state.snapshot import Lost

T = TypeVar("T")
_CALLED_WITH = {"backward": ("pre_backward", "post_backward"), "training_step": ("post_training_step",)}
"""By method of a strategy: the methods that run together with it. If one of them is overridden, all are called."""
_NULL_CONTEXT: AbstractContextManager[None] = nullcontext()
_WITHOUT_STATE = (type(None), torch.distributed.ProcessGroup, nn.Module)
"""The types of values that communication hooks get instead of a state."""


class LightningEngine:
    """Devices, processes and gradients: one of Lightning's strategies, restricted to the parts that the package uses.

    Loops, checkpoints and post-mortems use this class instead of the strategy, except for the hooks that Lightning
    calls on a strategy (``trainer.loop.hooks``). A subclass with sharded gradients overrides :meth:`build_gradients`.

    A run calls, in this order: ``launch`` (in the parent; the rest happens in every process), ``connect``,
    ``setup_environment``, ``convert_module``, ``setup``, then the other methods, and ``teardown``.

    Args:
        trainer: the Trainer; strategies and launchers read its state.
        precision: our precision plugin.
        plugins: Lightning plugins (cluster environment, checkpoint IO, layer sync), but no precision plugin. Default:
            None.
        options: ``accelerator``, ``strategy``, ``devices``, ``num_nodes``, ``sync_batchnorm``, ``benchmark``,
            ``deterministic``, ``use_distributed_sampler``, as in Lightning's Trainer.

    Attributes:
        collectives: the processes, and the operations that all of them call together.
        precision: the plugin for this device.
        gradients: all operations on gradients; the same object during the engine's lifetime.
        module_calls: handles calls that a module makes itself, such as ``manual_backward``. Set for each fit.
        optimizers: the bare optimizers of the last fit; empty before the ``setup`` of the first. A live list.
        schedules: the learning-rate schedules; a live list.
        kinds: the classes of the optimizers and schedules that ``configure_optimizers`` returned.
        device: this process's device.
        module: the LightningModule.
        model: the strategy-wrapped form of the module; the module itself on one device.
        restores_after_setup: whether weights are loaded into the module after the strategy has wrapped it, instead of
            before.
        may_change_world_size: whether a restart may have another number of processes: ``num_nodes="auto"``.
        kind: the kind of strategy, as in ``unsupported_with`` of a callback.
        keeps_optimizers: whether the optimizers cannot be exchanged during a run.
        exposes_gradients: whether gradients can be read between a backward pass and the step.
        supports_uneven_inputs: whether training supports uneven inputs: processes with different numbers of batches.
        supports_uneven_evaluation: whether evaluation supports uneven inputs. If not, all processes get the same number
            of batches.
        uncalled: methods of the strategy that this engine never calls, so that overriding them is refused, each with
            the method of the module to override instead.
        accumulates: whether the strategy may accumulate gradients itself.

    Raises:
        PrecisionError: if a precision plugin of Lightning's is given, directly or inside a strategy.
        UnsupportedError: if the strategy is not supported.
    """

    exposes_gradients = supports_uneven_inputs = supports_uneven_evaluation = True
    keeps_optimizers = False
    kind = "ddp"
    uncalled: Mapping[str, str] = {}
    accumulates = False

    module_calls: ModuleCalls = alias("adapter.calls", writable=True)
    optimizers: list[Optimizer] = alias("strategy._optimizers")  # faster than Lightning's property; read at every step
    schedules: list[LRSchedulerConfig] = alias("strategy.lr_scheduler_configs")
    device: torch.device = alias("strategy.root_device")
    model: nn.Module = alias("strategy.model")
    module: LightningModule = alias("strategy.lightning_module")
    world_size: int = alias("collectives.world_size")
    global_rank: int = alias("collectives.global_rank")
    data_parallel_size: int = alias("collectives.data_parallel_size")
    restores_after_setup: bool = alias("strategy.restore_checkpoint_after_setup")

    def __init__(self, trainer: pl.Trainer, precision: Precision, plugins: Any = None, **options: Any) -> None:
        if plugins is not None and not isinstance(plugins, (list, tuple)):
            plugins = [plugins]
        refuse_other_package("plugins", *plugins or ())
        for argument in ("strategy", "accelerator"):
            refuse_other_package(argument, options.get(argument))
        for plugin in plugins or ():
            _refuse_lightning_precision(plugin, "plugins", precision)
        strategy = options.get("strategy")
        if isinstance(strategy, Strategy):
            source = f"{type(strategy).__name__}(precision_plugin)"
            _refuse_lightning_precision(strategy._precision_plugin, source, precision)
        cluster.check_ray(plugins or ())
        self._trainer = trainer
        self.may_change_world_size = options.get("num_nodes") == "auto"
        if self.may_change_world_size:
            options["num_nodes"] = cluster.nodes_started(plugins or ())
        self.connector = _AcceleratorConnector(plugins=plugins, precision=None, **options)
        self.strategy: Strategy = self.connector.strategy
        cluster.check_local_rank(self.connector.cluster_environment, self.strategy)
        if not isinstance(self.strategy, (SingleDeviceStrategy, DDPStrategy)):
            raise UnsupportedError(
                f"Got strategy={strategy!r}, which becomes {type(self.strategy).__name__}; expected a single device,"
                " DDP or FSDP: strategy='ddp', or strategy='fsdp' to shard the model."
            )
        self._ddp = self.strategy if isinstance(self.strategy, DDPStrategy) else None  # read at every step
        self.collectives = self.build_collectives()
        self.checkpoints = self.build_checkpoints()
        self.precision = precision.for_device(self.device)
        self.precision.check(self.device)
        self.gradients = self.build_gradients(self.precision.build_scaler(self.device))
        self.adapter = PrecisionAdapter(self.precision, self.gradients.scaler)
        adopt(self.strategy)
        if type(launcher := self.strategy.launcher) is ScriptLauncher:
            self.strategy._launcher = WatchedLauncher(
                launcher.cluster_environment, launcher.num_processes, launcher.num_nodes
            )
        self.kinds: dict[str, list[str]] = {}
        self._lost_by_ddp: list[Lost] = []
        self._parameters: list[torch.nn.Parameter] = []  # of the module when DDP registered them
        self._trained: list[bool] = []  # `requires_grad` of each of them
        self._take_strategy()

    def build_collectives(self) -> Collectives:
        """Build the operations of all processes."""
        return Collectives(self.strategy)

    def build_checkpoints(self) -> CheckpointBackend:
        """Build the operations on states and checkpoints."""
        return CheckpointBackend(self)

    def build_gradients(self, scaler: LossScaler) -> Gradients:
        """Build the operations on gradients for the strategy."""
        return _StrategyGradients(scaler, self.strategy)

    def _take_strategy(self) -> None:
        """Refuse overrides that are never called, and make the strategy use the adapter."""
        self._refuse_overrides()
        self.strategy.precision_plugin = self.adapter

    @property
    def run(self) -> RunState:
        """The state of the Trainer's run."""
        return state_of(self._trainer)

    @property
    def wrapped_optimizers(self) -> list[Any]:
        """The optimizers that modules see (``self.optimizers()``)."""
        return list(self.strategy._lightning_optimizers)

    def counts_steps_of(self, optimizer: Optimizer) -> bool:
        """Return whether a step of ``optimizer`` in manual optimization counts in ``global_step``.

        It does not if the module has replaced the function that counts it in Lightning, ``_on_after_step`` of the
        wrapped optimizer: a common way to count one step per batch of a GAN.
        """
        wrapped = self.strategy._lightning_optimizers
        return all(w._on_after_step is do_nothing_closure for w in wrapped if w.optimizer is optimizer)

    @property
    def launch(self) -> Callable[..., Any]:
        """The function that calls ``function(*args)`` here, or in every process of the strategy's launcher."""
        launcher = self.strategy.launcher
        if isinstance(launcher, MultiProcessingLauncher):
            return partial(self._spawn, launcher)
        if launcher is None and self.run.fits:
            cluster.check_single_process(self.connector.cluster_environment)
        cluster.check_counts(self.connector.cluster_environment, self.strategy)
        return operator.call if launcher is None else partial(launcher.launch, trainer=self._trainer)

    @property
    def runs_here(self) -> bool:
        """Whether this process takes part in the run, instead of only starting the processes that do."""
        return not isinstance(self.strategy.launcher, MultiProcessingLauncher)

    def _spawn(self, launcher: MultiProcessingLauncher, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(*args)`` in processes started for it, and pass signals on to them."""
        with signals_passed_on(launcher), cluster.reserved_port(self.connector.cluster_environment):
            return launcher.launch(function, *args, trainer=self._trainer)

    def refuse(self, callbacks: Iterable[Any]) -> None:
        """Refuse callbacks that cannot be used with this kind of strategy."""
        for callback in callbacks:
            if (reason := unsupported_with(callback).get(self.kind)) is not None:
                raise UnsupportedError(f"Got {type(callback).__name__} with strategy={self.kind!r}. It {reason}")

    def check_accumulation(self, batches: int) -> None:
        """Refuse windows of too many batches for the precision, and of several batches if DDP's graph is static.

        DDP records the graph in the first backward pass that averages gradients. It fails with an internal assertion if
        a backward pass without averaging comes first (pytorch #143580). A schedule that begins with windows of one
        batch is also refused, because a resumed run may begin with a larger window.
        """
        if batches > (limit := self.precision.max_accumulation):
            raise PrecisionError(
                f"Got accumulate_grad_batches={batches} with precision={self.precision.name!r}, expected at most"
                f" {limit:.0f}: gradients are added up in {self.precision.dtype}, and those of further batches would be"
                " rounded away. Use larger batches, or precision='bf16-mixed' or '16-mixed', which add in float32."
            )
        if batches > 1 and getattr(self.strategy, "_ddp_kwargs", {}).get("static_graph"):
            given = f"{type(self.strategy).__name__}(static_graph=True)"
            raise UnsupportedError(
                f"Got accumulate_grad_batches={batches} with {given}, expected accumulate_grad_batches=1: DDP's static"
                " graph requires that the first backward pass averages gradients, and accumulation averages them in"
                " the last one of a window. Use strategy='ddp', or 'ddp_find_unused_parameters_true' if a step leaves"
                " parameters unused."
            )

    def connect(self, module: nn.Module) -> None:
        """Connect ``module`` to the strategy.

        Raises:
            PrecisionError: if a method of the strategy's precision plugin is overridden.
            UnsupportedError: if a method of the strategy is overridden that this engine cannot call.
        """
        source = f"{type(self.strategy).__name__}.precision_plugin"
        _refuse_lightning_precision(self.strategy.precision_plugin, source, self.precision)
        self._take_strategy()  # again, because another Trainer may have been created with the same strategy since
        self.strategy.connect(module)  # type: ignore[arg-type]

    def _refuse_overrides(self) -> None:
        owner = type(self.strategy).__name__
        for name in self.uncalled:
            if overrides(self.strategy, name):
                raise UnsupportedError(
                    f"Got {owner} with its own `{name}`, which is never called, because this strategy does not use it."
                    f" Override `LightningModule.{self.uncalled[name]}` instead, or use strategy='ddp'."
                )
        if self.strategy.handles_gradient_accumulation and not self.accumulates:
            raise UnsupportedError(
                f"Got {owner}.handles_gradient_accumulation=True, expected False: the Trainer accumulates gradients by"
                " itself. Remove the override."
            )

    def override_of(self, name: str) -> Callable[..., Any] | None:
        """Return the strategy's method ``name``, as Lightning's loops call it, or None if it is not overridden.

        An override of a method that runs together with ``name`` counts, too: ``pre_backward`` and ``post_backward`` for
        ``backward``, ``post_training_step`` for ``training_step``. So does DDP's ``optimizer_step`` if it averages the
        weights (post-local SGD).
        """
        strategy = self.strategy
        inner = _CALLED_WITH.get(name, ())
        averages = name == "optimizer_step" and self._averages_weights
        if not averages and not any(overrides(strategy, method_name) for method_name in (name, *inner)):
            return None
        method: Callable[..., Any] = getattr(strategy, name)
        return method

    @property
    def _averages_weights(self) -> bool:
        """Whether DDP averages the weights over the processes in ``optimizer_step`` (post-local SGD)."""
        state = None if self._ddp is None else self._ddp._ddp_comm_state
        if state is None:
            return False
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

        return isinstance(state, PostLocalSGDState)

    def forward_context(self, name: str) -> Callable[[], AbstractContextManager[object]]:
        """Return autocast, or a no-op context if the strategy's own step enters autocast itself."""
        return self.precision.autocast if self.override_of(name) is None else nullcontext

    def setup_environment(self) -> None:
        """Select the device and join the process group."""
        if self.world_size > 1 and self.device.type == "cuda":
            record_collectives()
        try:
            cluster.join_process_group(self.strategy)
            self.strategy.setup_environment()
        except torch.distributed.DistNetworkError as error:
            raise cluster.explained(error) from error
        if self.world_size > 1:
            leave_group_at_exit()

    def convert_module(self) -> None:
        """Convert the module to the dtype of the precision, before weights are loaded, so that they get this dtype."""
        restore_module(self.model)  # in case an earlier run failed
        self.strategy.model = self.precision.convert_module(self.model)
        if not self.restores_after_setup:
            initialise(self.model, self.device)

    def setup(self, *, fitting: bool) -> None:
        """Move and wrap the module; in a fit, create the optimizers."""
        session = self.run.session
        if not overrides(self.strategy, "setup_optimizers"):
            set_up = partial(set_up_optimizers, self.strategy, self)
            session.replace(self.strategy, "setup_optimizers", set_up)
        try:
            self.strategy.setup(self._trainer)
        except ConfigurationError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            unusual = [] if self.world_size == 1 else _unusual_tensors(self.model)
            if not unusual:
                raise
            raise UnsupportedError(
                f"Rank 0's values of {join_first(unusual, 8)} cannot be sent to the other processes. Expected dense"
                " tensors of common dtypes: register these instead, and convert them in the forward pass. Initialize"
                " lazy modules with one batch before the fit."
            ) from error
        if fitting:
            self._follow_averages(session)
            for wrapped in schedule_free(self.wrapped_optimizers):
                prepare(wrapped, session)
            _refuse_outside_parameters(self.model, self.optimizers)
        self._trained = self._trained_parameters()

    def _follow_averages(self, session: Session) -> None:
        """If DDP averages weights instead of gradients, synchronize skipped steps, so that averages ignore them."""
        averager = self._ddp._model_averager if self._ddp is not None and self._averages_weights else None
        if isinstance(self.gradients, _StrategyGradients):
            self.gradients.reduce_skips(averager is not None)
        if averager is not None:
            average = partial(_average_unless_skipped, self.gradients, averager.average_parameters)
            session.replace(averager, "average_parameters", average)

    def follow_trained_parameters(self) -> None:
        """Wrap the module in DDP again if the trained parameters have changed.

        DDP registers the trained parameters when it is created, and would not average the gradients of others.
        """
        if isinstance(self.model, DistributedDataParallel) and self._trained != (trained := self._trained_parameters()):
            assert self._ddp is not None
            self._ddp.model = self._ddp.lightning_module
            self._ddp.configure_ddp()
            self._trained = trained

    def _trained_parameters(self) -> list[bool]:
        self._parameters = list(self.model.parameters())
        return [parameter.requires_grad for parameter in self._parameters]

    def step_function(self, name: str) -> Callable[..., Any]:
        """Return the module's step, called through the wrapper if there is one.

        A step without ``batch_idx`` is not passed one.
        """
        method = getattr(self.module, name)
        step: Callable[..., Any] = method
        if (override := self.override_of(name)) is not None:
            after = self.strategy.post_training_step if name == "training_step" else None
            step = override if after is None else partial(_call_after_step, override, after)
        elif self.goes_through_wrapper:
            step = partial(self._through_wrapper, name)
        if not is_param_in_hook_signature(method, "batch_idx", min_args=2):
            return lambda batch, batch_idx, *more: step(batch, *more)
        return step

    @property
    def goes_through_wrapper(self) -> bool:
        """Whether the module's steps are called through the forward of the strategy's wrapper."""
        return self.model is not self.module

    def _through_wrapper(self, name: str, *args: Any) -> Any:
        """Call the module's step through the forward of the wrapper, which only exists during the run."""
        return self.strategy._forward_redirection(self.model, self.module, name, *args)

    @property
    def forward_runs_collectives(self) -> bool:
        """Whether each forward in evaluation uses collectives, so that all processes must run equally many forwards.

        False: only the first forward of DDP broadcasts buffers, and with DeepSpeed all processes run equally many.
        """
        return False

    def idle_forward(self) -> None:
        """Run the collectives of DDP's next forward, without a batch.

        A process calls it instead of a forward if it has no batch left to evaluate. All processes call it when a pass
        begins, because the first forward may communicate (DDP broadcasts rank 0's buffers), and a process may have no
        batch.
        """
        _run_idle_forward(self.strategy.model)

    def replay_step(self, name: str) -> Callable[..., Any]:
        """Return the module's step for a replay, without DDP. If weights are sharded, the step gathers them."""
        step: Callable[..., Any] = getattr(self.module, name)
        return step

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[object]:
        """Return a context with or without DDP's gradient averaging; a no-op on a single device."""
        if self._ddp is None:
            return _NULL_CONTEXT
        if not enabled:
            return self._ddp.block_backward_sync()
        if self._trained != [parameter.requires_grad for parameter in self._parameters]:  # changed inside an epoch
            self.follow_trained_parameters()
        return _NULL_CONTEXT

    @property
    def next_forward_syncs_buffers(self) -> bool:
        """Whether DDP's next forward may broadcast buffers: not after a forward without gradient averaging.

        True without DDP.
        """
        return not isinstance(self.model, DistributedDataParallel) or self.model.require_forward_param_sync

    def skip_next_buffer_sync(self) -> None:
        """Skip DDP's buffer broadcast in the next forward, because the run was resumed between two broadcasts."""
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_forward_param_sync = False

    @property
    def lost_by_ddp(self) -> list[Lost]:
        """The values that DDP keeps in each process and no checkpoint has, in the current or the last run."""
        if isinstance(model := self.strategy.model, DistributedDataParallel):
            self._lost_by_ddp = _lost_by_ddp(model)
        return self._lost_by_ddp

    def kill(self) -> None:
        """Kill the processes that a launcher of scripts has started. A no-op with other launchers."""
        launcher = self.strategy.launcher
        if isinstance(launcher, ScriptLauncher):
            number = _get_sigkill_signal()
            children.expected.add(-number)
            launcher.kill(number)

    def teardown(self) -> None:
        """Unwrap the module and move it back to the CPU."""
        self.collectives.end_run()
        self.strategy.teardown()


class _StrategyGradients(Gradients):
    """Full gradients: on a single device, and under DDP, which averages them at the end of a backward pass.

    Args:
        scaler: the loss scaler.
        strategy: Lightning's strategy.
    """

    def __init__(self, scaler: LossScaler, strategy: Strategy) -> None:
        super().__init__(scaler)
        self._strategy = strategy
        self._all_reduce_flag: Callable[[Tensor], None] | None = None

    def reduce_skips(self, differ: bool) -> None:
        """Set whether gradients differ between the processes, so that skipped steps must be synchronized."""
        self._all_reduce_flag = _all_reduce_max if differ else None
        self.scaler.all_reduce_flag = self._all_reduce_flag

    def use_scaler(self, scaler: LossScaler) -> LossScaler:
        """Replace the scaler. Return the previous one."""
        scaler.all_reduce_flag = self._all_reduce_flag
        return super().use_scaler(scaler)

    def forward_without_loss(self, has_run: bool) -> None:
        """Run the collectives of DDP's forward if ``training_step`` has not called it."""
        if not has_run:
            _run_idle_forward(self._strategy.model)

    def backward_without_loss(self, syncs_gradients: bool) -> None:
        """Run a backward pass of zeros if DDP averages gradients.

        A forward prepares DDP for the backward pass of its output. Here, DDP is prepared for the zeros, because
        it is prepared for another output, or not at all (without a forward, or after one that does not average
        gradients). With ``find_unused_parameters``, the forward may also have found all parameters unused.
        """
        model = self._strategy.model
        if not syncs_gradients or not isinstance(model, DistributedDataParallel):
            return
        loss = self.scale(zero_loss(model.parameters()))
        prepare_for_backward(model, loss)
        loss.backward()  # type: ignore[no-untyped-call]


_SENDABLE = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
}  # fmt: skip
"""Dtypes that every process group can send."""


def _unusual_tensors(module: torch.nn.Module) -> list[str]:
    """Return the names of the tensors that a process group may be unable to send, with their dtype and layout."""
    return [
        f"{name} ({str(tensor.dtype)[6:]}, {str(tensor.layout)[6:]})"
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if not is_dense(tensor) or tensor.dtype not in _SENDABLE or (0 in tensor.stride() and tensor.numel() > 1)
    ]


def _refuse_outside_parameters(module: torch.nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Raise an error if an optimizer trains parameters that are not the module's: their gradients are not averaged."""
    if not isinstance(module, (DistributedDataParallel, FSDPModule)):
        return
    inside = {id(parameter) for parameter in module.parameters()}
    trained = (parameter for optimizer in optimizers for parameter in parameters_of(optimizer))
    if outside := [tuple(parameter.shape) for parameter in trained if id(parameter) not in inside]:
        raise UnsupportedError(
            f"Got an optimizer of parameters that are not the module's, with the shapes {join_first(outside, 4)}: their"
            " gradients would not be averaged over the processes. Make them part of the module: assign modules as"
            " attributes or in nn.ModuleList, and tensors as nn.Parameter."
        )


def _run_idle_forward(model: Any) -> None:
    """Run the collectives of a DDP forward (buckets, the buffers of rank 0), without the module's forward.

    Outside a fit, the module is not wrapped, and this is a no-op.
    """
    if isinstance(model, DistributedDataParallel):
        model._pre_forward(None)  # type: ignore[no-untyped-call]  # without an input, DDP fails if it moves inputs
        model._post_forward(None)  # type: ignore[no-untyped-call]


def _lost_by_ddp(model: DistributedDataParallel) -> list[Lost]:
    """Return the states of hooks and, with ``max_norm``, the weights: each process normalizes the rows that it uses."""
    states = chain.from_iterable((state, getattr(hook, "__self__", None)) for hook, state in model._comm_hooks)
    embeddings = (module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    normalizes = any(module.max_norm is not None for module in embeddings)
    return [
        *(Lost(type(state).__name__, "hook") for state in states if not isinstance(state, _WITHOUT_STATE)),
        *([Lost("the weights of each process", "weights")] if normalizes else []),
    ]


def _all_reduce_max(flag: Tensor) -> None:
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)


def _average_unless_skipped(gradients: Gradients, average: Callable[[Any], None], parameters: Any) -> None:
    if not gradients.scaler.skipped_last_step():
        average(parameters)


def _call_after_step(step: Callable[..., Any], after: Callable[[], None], *args: Any) -> Any:
    output = step(*args)
    after()
    return output


def _refuse_lightning_precision(plugin: Any, source: str, precision: Precision) -> None:
    is_default = type(plugin) is LightningPrecision and precision.name == plugin.precision  # a no-op, like our adapter
    if (is_default or isinstance(plugin, PrecisionAdapter)) and (names := overridden(plugin, LightningPrecision)):
        raise PrecisionError(
            f"Got {source} with its own `{names[0]}`, which is not called: the loops do the work of Lightning's"
            " precision plugins. Pass Trainer(precision=...) a subclass of trainer.precision.Precision, or override"
            " a method of the strategy or the LightningModule, such as `backward` or `optimizer_step`."
        )
    if isinstance(plugin, LightningPrecision) and not is_default and not isinstance(plugin, PrecisionAdapter):
        raise PrecisionError(
            f"Got {type(plugin).__name__} through {source}, expected no precision plugin there: Lightning's have their"
            " own autocast and scaler. Use Trainer(precision='16-mixed') or a plugin from trainer.precision, such as"
            " Trainer(precision=MixedPrecision('float16', init_scale=1024.0))."
        )
