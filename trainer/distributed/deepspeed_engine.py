"""DeepSpeed as a strategy, and its engine. The package is imported after the processes have started.

Lightning's strategy is a base class for ``isinstance`` only: its methods refuse CPUs and wrap the module before they
load a checkpoint.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies import DeepSpeedStrategy as LightningDeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from trainer.callbacks.gradient_accumulation import accumulation_schedule
from trainer.callbacks.scale_monitor import ScaleMonitor
from trainer.checkpoint import zero_files as parts
from trainer.checkpoint.checkpoint_io import files_of
from trainer.checkpoint.optimizer_states import SavedDtypes
from trainer.checkpoint.sharded_files import read_manifest
from trainer.common import packages
from trainer.common.lightning_private import settings_of
from trainer.distributed.checkpoint_backend import CheckpointBackend
from trainer.distributed.engine import LightningEngine
from trainer.distributed.fsdp import UNCALLED, ShardingStrategy
from trainer.distributed.initialisation import initialise
from trainer.distributed.sharding.settings import check_timeout
from trainer.distributed.zero import ZeroGradients, ZeroModule, ZeroScaler
from trainer.errors import CheckpointError, ConfigurationError, PrecisionError, UnsupportedError, expect
from trainer.loop.closures import needs_closure
from trainer.loop.gradients import Gradients
from trainer.loop.overrides import overrides
from trainer.loop.run_state import state_of
from trainer.precision.base import Precision
from trainer.precision.dtypes import cast
from trainer.precision.mixed import MixedPrecision
from trainer.precision.scaler import LossScaler

_SCALING = {"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1, "loss_scale": 0}
"""DeepSpeed's settings for loss scaling, with Lightning's defaults."""

_BLOCKS = {"16-mixed": "fp16", "bf16-mixed": "bf16"}
"""The names of precisions in a DeepSpeed config."""


class DeepSpeedStrategy(ShardingStrategy, LightningDeepSpeedStrategy):
    """Shard optimizer states, gradients and parameters over the processes with DeepSpeed's ZeRO.

    ``Trainer(strategy="deepspeed")`` is short for ``Trainer(strategy=DeepSpeedStrategy())``; there are also
    ``"deepspeed_stage_1"``, ``_2``, ``_2_offload``, ``_3`` and ``_3_offload``. On the command line:
    ``trainer=deepspeed trainer.strategy.stage=3``. Lightning's ``DeepSpeedStrategy(...)`` is accepted, with its
    settings.

    DeepSpeed runs the backward pass and the step, and scales the loss. ``precision="16-mixed"`` and ``"bf16-mixed"``
    have DeepSpeed's meaning: weights in 16 bits, and copies in float32 for the optimizer.

    The Trainer sets accumulation, clipping and batch sizes; the module sets the optimizer. The config may set them only
    to ``"auto"``.

    Args:
        stage: the state that is sharded: 1 for optimizer states, 2 also for gradients, 3 also for parameters. Default:
            None, for the value in ``config``, or 2.
        offload_optimizer: keep the optimizer states in CPU memory, and step there. Default: None, for the value in
            ``config``, or False.
        offload_parameters: keep parameters in CPU memory; requires stage 3. Default: None, for the value in ``config``,
            or False.
        config: a DeepSpeed config, as a mapping or the path of a JSON file. Default: None.
        initial_scale_power: the initial loss scale is 2 to this power. Default: None, for 16. Like the next four, used
            with ``"16-mixed"`` only.
        loss_scale_window: steps without overflow before the scale doubles. Default: None, for 1000.
        hysteresis: overflows before the scale is halved. Default: None, for 2.
        min_loss_scale: the smallest scale. Default: None, for 1.
        loss_scale: a constant scale. Default: None, which like 0 means a dynamic scale.
        process_group_backend: ``"nccl"``, ``"gloo"``, ... Default: None, for the one of the device.
        timeout: the time that a process waits for the others in a collective; a timedelta, or seconds. Default: that of
            torch.

    Attributes:
        config: the DeepSpeed config, without the values that the Trainer adds.
        zero: the module while DeepSpeed owns it. None otherwise.

    Raises:
        ConfigurationError: if settings contradict each other or are not supported.
        UnsupportedError: if DeepSpeed is not installed.
    """

    strategy_name = "deepspeed"

    # as under DDP: the full module is created and sharded afterwards; rank 0 writes a file
    setup_distributed = DDPStrategy.setup_distributed
    model_sharded_context = DDPStrategy.model_sharded_context
    tensor_init_context = DDPStrategy.tensor_init_context
    save_checkpoint = DDPStrategy.save_checkpoint
    load_checkpoint = DDPStrategy.load_checkpoint

    def __init__(
        self,
        stage: int | None = None,
        offload_optimizer: bool | None = None,
        offload_parameters: bool | None = None,
        config: Mapping[str, Any] | str | Path | None = None,
        *,
        initial_scale_power: int | None = None,
        loss_scale_window: int | None = None,
        hysteresis: int | None = None,
        min_loss_scale: float | None = None,
        loss_scale: float | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = default_pg_timeout,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        if problem := packages.missing("deepspeed"):
            raise UnsupportedError(f"strategy='deepspeed' needs {problem}. Without it, use strategy='fsdp'.")
        DDPStrategy.__init__(
            self,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=check_timeout(timeout),
        )
        self.config: dict[str, Any] = _read(config)
        self._set_default(("zero_optimization", "stage"), stage, 2, "stage")
        self._offload("offload_optimizer", offload_optimizer)
        self._offload("offload_param", offload_parameters)
        self.scaling: dict[str, float] = {}
        given = initial_scale_power, loss_scale_window, hysteresis, min_loss_scale, loss_scale
        for name, value in zip(_SCALING, given, strict=True):
            self.scaling[name] = chosen = self._set_default(("fp16", name), value, _SCALING[name], name)
            expect(isinstance(chosen, (int, float)) and chosen >= 0, "a number of at least 0", **{name: chosen})
        self._check()
        self.zero: ZeroModule | None = None

    @classmethod
    def of(cls, strategy: LightningDeepSpeedStrategy) -> DeepSpeedStrategy:
        """Convert Lightning's strategy to this class, with its settings."""
        config = copy.deepcopy(strategy.config) or {}
        if not config.get("zero_optimization"):
            config["zero_optimization"] = {"stage": 0}
        scaling = {} if "fp16" in config else {name: getattr(strategy, name) for name in _SCALING}
        return cls(
            config=config,
            accelerator=strategy.accelerator,
            parallel_devices=strategy.parallel_devices,
            cluster_environment=strategy.cluster_environment,
            **settings_of(strategy),
            **scaling,
        )

    def _set_default(self, place: tuple[str, str], given: Any, default: Any, argument: str) -> Any:
        """Set a value in the config if it is missing there, and return the value of the config."""
        block = self.config.setdefault(place[0], {})
        chosen = block.setdefault(place[1], default if given is None else given)
        if given is not None and chosen != given:
            raise ConfigurationError(
                f"Got DeepSpeedStrategy({argument}={given!r}) and {place[1]!r}: {chosen!r} in its config, expected one"
                " of them."
            )
        return chosen

    def _offload(self, name: str, wanted: bool | None) -> None:
        block = self.config["zero_optimization"]
        device = (block.get(name) or {}).get("device", "none")
        argument = "offload_parameters" if name == "offload_param" else name
        if device not in ("none", "cpu"):
            raise UnsupportedError(f"Got {name!r} with device {device!r} for DeepSpeed, expected 'cpu' or 'none'.")
        if wanted is not None and wanted != (device == "cpu") and name in block:
            raise ConfigurationError(
                f"Got DeepSpeedStrategy({argument}={wanted}) and {name!r} with device {device!r} in its config,"
                " expected one of them."
            )
        if wanted:
            block.setdefault(name, {"device": "cpu"})

    def _check(self) -> None:
        zero = self.config["zero_optimization"]
        if zero["stage"] not in (1, 2, 3):
            raise ConfigurationError(
                f"Got stage {zero['stage']!r} of DeepSpeed's ZeRO, expected 1, 2 or 3. Without ZeRO, strategy='ddp'"
                " does the same."
            )
        if zero["stage"] != 3 and zero.get("offload_param", {}).get("device", "none") != "none":
            raise ConfigurationError(
                f"Got parameters to offload at stage {zero['stage']} of DeepSpeed's ZeRO, expected stage 3, which"
                " shards them."
            )
        for name, instead in _REFUSED.items():
            if self.config.get(name):
                raise ConfigurationError(f"Got {name!r} in a DeepSpeed config. {instead}")

    @property
    def stage(self) -> int:
        """The stage of ZeRO."""
        stage: int = self.config["zero_optimization"]["stage"]
        return stage

    @property
    def sharding(self) -> str:
        """Description of the sharding, for messages."""
        return f"ZeRO {self.stage} over {self.world_size} processes, by DeepSpeed"

    def complete(self, precision: str, batches: int) -> dict[str, Any]:
        """Return the config for DeepSpeed, with the precision and the number of batches in an accumulation window."""
        config: dict[str, Any] = copy.deepcopy(self.config)
        scaling = config.pop("fp16")
        config.pop("bf16", None)
        if (block := _BLOCKS.get(precision)) is not None:
            config[block] = {**(scaling if block == "fp16" else self.config.get("bf16", {})), "enabled": True}
        config["gradient_accumulation_steps"] = batches
        config["gradient_clipping"] = 0.0  # set at each step
        config.setdefault("train_micro_batch_size_per_gpu", 1)  # for DeepSpeed's own statistics
        config.setdefault("zero_allow_untested_optimizer", True)
        config.setdefault("zero_force_ds_cpu_optimizer", False)  # torch's optimizers also run on the CPU
        config.setdefault("steps_per_print", sys.maxsize)
        return config

    def setup_environment(self) -> None:
        """Join the process group, and make DeepSpeed use it."""
        DDPStrategy.setup_environment(self)
        device = self.root_device.type
        if "deepspeed" not in sys.modules:
            os.environ.setdefault("DS_ACCELERATOR", device)
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        deepspeed.utils.logging.logger.setLevel("ERROR")
        if (used := get_accelerator().device_name()) != device:
            raise ConfigurationError(
                f"Got accelerator={device!r}, but DeepSpeed uses {used!r}. Set the environment variable"
                f" DS_ACCELERATOR={device}."
            )
        if self.precision_plugin.precision == "16-mixed" and not get_accelerator().is_fp16_supported():
            raise PrecisionError(
                f"Got precision='16-mixed' with strategy='deepspeed' on a {device!r} device, for which DeepSpeed does"
                " not support float16. Use precision='bf16-mixed' or '32-true'."
            )
        if device == "cpu":  # skip minutes of compilation that only speeds up collectives on CPUs
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self._set_node_environment_variables()
        deepspeed.init_distributed(self._get_process_group_backend(), auto_mpi_discovery=False, verbose=False)

    def setup(self, trainer: pl.Trainer) -> None:
        """Pass the module and, in a fit, its optimizer to DeepSpeed."""
        run, fitting, module = state_of(trainer), self.begin(trainer), self.lightning_module
        if fitting:
            self.setup_optimizers(trainer)
            _refuse_module(module, self.optimizers)
        optimizer = self.optimizers[0] if fitting else None
        config = self.complete(run.precision.name, max(accumulation_schedule(run).values()))
        self.zero = ZeroModule(module, optimizer, config, self.root_device)
        self.model = self.zero.engine
        self.setup_precision_plugin()

    def teardown(self) -> None:
        """Restore the module. After a failure DeepSpeed keeps it until the next run."""
        if self.zero is not None and not self._failed:
            zero, self.zero, self.model = self.zero, None, self.lightning_module
            zero.restore_module()
            self.barrier()  # no process leaves while another one still gathers
            self.revert_sync()
        super().teardown()


_REFUSED = {
    "optimizer": "Create the optimizer in configure_optimizers, and remove it from the config.",
    "scheduler": "Create the scheduler in configure_optimizers, and remove it from the config.",
    "torch_autocast": "Leave it out: with precision='16-mixed' and 'bf16-mixed' DeepSpeed keeps weights in 16 bits.",
    "amp": "Set Trainer(precision='16-mixed') instead.",
    "gradient_accumulation_steps": "Set Trainer(accumulate_grad_batches=...), and remove it from the config.",
    "gradient_clipping": "Set Trainer(gradient_clip_val=...), and remove it from the config.",
    "train_batch_size": "Remove it from the config: the dataloader has the batch size.",
    "train_micro_batch_size_per_gpu": "Remove it from the config: the dataloader has the batch size.",
}
"""Settings that would duplicate those of the Trainer, and the alternatives."""


def _read(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """Return a copy of a config, without the values that are ``"auto"`` or None."""
    if isinstance(config, (str, Path)):
        path = Path(config).expanduser()
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"The DeepSpeed config {path} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise ConfigurationError(f"The DeepSpeed config {path} is not valid JSON: {error}.") from error
    if not isinstance(config, (Mapping, type(None))):
        raise ConfigurationError(
            f"Got {config!r} as a DeepSpeed config, expected a mapping, or the path of a JSON file."
        )
    plain: dict[str, Any] = _without_auto(config or {})
    _check_blocks(plain, ("zero_optimization", *_BLOCKS.values()))
    _check_blocks(plain.get("zero_optimization", {}), ("offload_optimizer", "offload_param"))
    return plain


def _check_blocks(config: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        if not isinstance(block := config.get(name, {}), dict):
            raise ConfigurationError(f"Got {name!r}: {block!r} in a DeepSpeed config, expected a mapping.")


def _without_auto(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _without_auto(item) for name, item in value.items() if item not in ("auto", None)}
    return [_without_auto(item) for item in value] if isinstance(value, (list, tuple)) else value


def _refuse_module(module: LightningModule, optimizers: list[Optimizer]) -> None:
    """Refuse modules that replace a part of the step that DeepSpeed runs.

    Raises:
        UnsupportedError: if the module replaces such a part. The message contains an alternative.
    """
    problem = ""
    if not module.automatic_optimization:
        problem = "manual optimization"
    elif len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        problem = f"{len(optimizers)} optimizers" if len(optimizers) != 1 else "no optimizer"
    elif needs_closure(optimizers[0]):
        problem = f"{type(optimizers[0]).__name__}, which evaluates the loss itself"
    for name in ("backward", "optimizer_step", "configure_gradient_clipping"):
        if not problem and overrides(module, name):
            problem = f"a {name} of {type(module).__name__}"
    if problem:
        raise UnsupportedError(
            f"Got {problem} with strategy='deepspeed', which runs the backward pass, clipping and the step itself,"
            " for one torch optimizer. Use strategy='ddp' or 'fsdp'."
        )


class ZeroPrecision(Precision):
    """A precision as DeepSpeed implements it.

    Args:
        given: the precision of the Trainer.
        strategy: the settings of DeepSpeed.

    Raises:
        PrecisionError: if DeepSpeed does not support the precision.
        ConfigurationError: if the DeepSpeed config enables another one.
    """

    def __init__(self, given: Precision, strategy: DeepSpeedStrategy) -> None:
        self._given = given
        self._strategy = strategy
        self.name = given.name

    def for_device(self, device: torch.device) -> Precision:
        """Check the Trainer's precision on ``device``, and return this one."""
        given = self._given.for_device(device)
        if given.name not in ("32-true", *_BLOCKS) or (given.name != "32-true" and type(given) is not MixedPrecision):
            raise PrecisionError(
                f"Got precision={given.name!r} with strategy='deepspeed', expected '32-true', '16-mixed' or"
                " 'bf16-mixed', in which DeepSpeed has float32 weights for the optimizer."
            )
        if isinstance(given, MixedPrecision):
            usual = vars(MixedPrecision(given.dtype))
            if changed := [name for name, value in vars(given).items() if value != usual[name] and name != "kernels"]:
                raise PrecisionError(
                    f"Got MixedPrecision({', '.join(f'{name}={getattr(given, name)!r}' for name in changed)}) with"
                    " strategy='deepspeed', which has its own loss scaling and no autocast. Use"
                    f" precision={given.name!r}, and DeepSpeedStrategy(initial_scale_power=...,"
                    " loss_scale_window=...)."
                )
        for name, block in _BLOCKS.items():
            if self._strategy.config.get(block, {}).get("enabled") and name != given.name:
                raise ConfigurationError(
                    f"Got precision={given.name!r}, but the DeepSpeed config enables {block!r}, which is {name!r}. Set"
                    f" Trainer(precision={name!r}), or remove {block!r} from the config."
                )
        given.check(device)
        self.name, self.dtype, self.scales_loss = given.name, given.dtype, given.scales_loss
        return self

    def build_scaler(self, device: torch.device) -> LossScaler:
        """Build a scaler with the settings of DeepSpeed."""
        scaling = self._strategy.scaling
        fixed = scaling["loss_scale"]
        return ZeroScaler(
            device.type,
            self.scales_loss,
            float(fixed or 2.0 ** scaling["initial_scale_power"]),
            int(scaling["loss_scale_window"]),
            float(scaling["min_loss_scale"]),
        )

    def convert_batch(self, batch: Any) -> Any:
        """Cast floating-point tensors to the dtype of the weights."""
        return cast(batch, self.dtype) if self.is_half else batch


class ZeroCheckpoints(CheckpointBackend):
    """The states of DeepSpeed, which writes and reads the tensors of a folder itself.

    Args:
        engine: the engine.
    """

    _engine: DeepSpeedEngine

    def __init__(self, engine: DeepSpeedEngine) -> None:
        super().__init__(engine)
        self._folder: Path | None = None  # a checkpoint that DeepSpeed will read

    def module_state(self) -> dict[str, Any]:
        """Return the full state dict of the module on rank 0; {} if DeepSpeed writes it."""
        if self._engine.strategy.zero is None:  # between runs
            return super().module_state()
        return {} if self._writes_parts else self._engine.zero().module_state(self._engine.global_rank == 0)

    def load_module_state(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load ``checkpoint["state_dict"]``, or let DeepSpeed read its files, including those of the optimizer."""
        folder, self._folder = self._folder, None
        if folder is None:
            self._engine.zero().load_module_state(checkpoint["state_dict"], strict)
        else:
            parts.read(self._engine.zero().engine, folder, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full state dict of the optimizer on rank 0; only its settings if DeepSpeed writes the states."""
        if self._writes_parts:
            return {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
        if self._engine.strategy.zero is None:
            raise CheckpointError(
                "DeepSpeed released the optimizer states at the end of the run. Write this checkpoint during the run"
                " with ModelCheckpoint(save_last=True), or save only the weights: trainer.save_checkpoint(path,"
                " weights_only=True)."
            )
        return self._engine.zero().optimizer_state(self._engine.global_rank == 0)

    @property
    def _writes_parts(self) -> bool:
        return self.saves_shards and self._engine.strategy.zero is not None and bool(self._engine.optimizers)

    @property
    def _topology(self) -> dict[str, Any]:
        engine = self._engine
        return {"stage": engine.strategy.stage, "processes": engine.world_size, "precision": engine.precision.name}

    def save_shards(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Write a folder with the files of DeepSpeed and of this package."""
        if not self._writes_parts:
            super().save_shards(checkpoint, path)
            return
        write, group = partial(parts.write, self._engine.zero().engine), self._engine.collectives.group("saves")
        self._files.save_shards(checkpoint, path, group, write, {parts.FACT: self._topology})

    def reads_parts(self, folder: str | Path) -> bool:
        """Return whether DeepSpeed reads the folder: in a fit, with equal number of processes, stage and precision."""
        is_same = read_manifest(folder).facts.get(parts.FACT) == self._topology
        self._folder = Path(folder) if is_same and self._engine.run.fits else None
        return self._folder is not None

    def load_optimizer_states(self, checkpoint: Mapping[str, Any], saved: SavedDtypes) -> None:
        """Load ``checkpoint["optimizer_states"]`` with their saved dtypes."""
        for state in checkpoint["optimizer_states"]:
            self._engine.zero().load_optimizer_state(state, saved)


class DeepSpeedEngine(LightningEngine):
    """Lightning's launcher and collectives, with the gradients and steps of DeepSpeed."""

    strategy: DeepSpeedStrategy
    exposes_gradients = False
    supports_uneven_inputs = False
    keeps_optimizers = True
    kind = "deepspeed"
    uncalled = {**UNCALLED, "backward": "training_step", "optimizer_step": "on_before_zero_grad"}
    accumulates = True

    def __init__(self, trainer: pl.Trainer, precision: Precision, plugins: Any = None, **options: Any) -> None:
        super().__init__(trainer, ZeroPrecision(precision, options["strategy"]), plugins, **options)
        self.supports_uneven_evaluation = self.strategy.stage != 3

    def build_checkpoints(self) -> CheckpointBackend:
        """Build the operations on DeepSpeed's states."""
        return ZeroCheckpoints(self)

    def build_gradients(self, scaler: LossScaler) -> Gradients:
        """Build the operations on DeepSpeed's gradients."""
        assert isinstance(scaler, ZeroScaler)
        return ZeroGradients(scaler, self.zero, self.strategy.stage, lambda: self.run.window.reset())

    def zero(self) -> ZeroModule:
        """Return the wrapped module."""
        assert self.strategy.zero is not None
        return self.strategy.zero

    def refuse(self, callbacks: Iterable[Any]) -> None:
        """Refuse callbacks and checkpoint files that DeepSpeed does not support."""
        callbacks = list(callbacks)
        super().refuse(callbacks)
        for callback in callbacks:
            averages = isinstance(callback, (WeightAveraging, StochasticWeightAveraging))
            if averages and (self.strategy.stage == 3 or self.precision.is_half):
                raise UnsupportedError(
                    f"Got {type(callback).__name__} with strategy='deepspeed'. It averages whole weights in float32."
                    " Use stage 1 or 2 with precision='32-true', or FSDP."
                )
        files = files_of(self.strategy)
        if files is not None and files.sharded and files.asynchronous:
            raise UnsupportedError(
                "Got CheckpointFiles(sharded=True, asynchronous=True) with strategy='deepspeed', which writes its files"
                " synchronously. Remove sharded=True or asynchronous=True."
            )
        if any(isinstance(callback, ScaleMonitor) for callback in callbacks):
            rank_zero_info(
                "ScaleMonitor: strategy='deepspeed' does not expose gradients, so underflow is not measured."
            )

    def setup_environment(self) -> None:
        """Run the usual setup, then restore a module that an earlier run has left with DeepSpeed."""
        super().setup_environment()
        if (zero := self.strategy.zero) is not None:
            self.strategy.zero = None
            zero.restore_module()

    def convert_module(self) -> None:
        """Convert the module. A module on the meta device is initialized in CPU memory, and DeepSpeed copies it."""
        super().convert_module()
        initialise(self.model, torch.device("cpu"))

    def setup(self, *, fitting: bool) -> None:
        """Set up the engine; in a fit, connect the scaler to that of DeepSpeed."""
        super().setup(fitting=fitting)
        if fitting:
            scaler = self.gradients.scaler
            assert isinstance(scaler, ZeroScaler)
            scaler.follow(lambda: self.zero().loss_scaler)

    def teardown(self) -> None:
        """Disconnect the scaler, and tear down the engine."""
        scaler = self.gradients.scaler
        assert isinstance(scaler, ZeroScaler)
        if self.strategy.zero is not None:
            scaler.follow(None)
        super().teardown()

    def follow_trained_parameters(self) -> None:
        """Refuse a change of the trained parameters during a fit.

        Raises:
            UnsupportedError: if they have changed.
        """
        if self._trained != self._trained_parameters():
            raise UnsupportedError(
                "The set of trained parameters has changed since the fit began, which strategy='deepspeed' does not"
                " support. Freeze or unfreeze parameters between two fits."
            )

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[object]:
        """Set whether this batch is the last one of the window."""
        self.zero().engine.set_gradient_accumulation_boundary(enabled)
        return nullcontext()

    def replay_step(self, name: str) -> Callable[..., Any]:
        """Return a step that is called through DeepSpeed's wrapper, which gathers the weights."""
        return partial(self._through_wrapper, name)
