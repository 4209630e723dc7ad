"""DeepSpeed as a strategy, and the engine over it. The package is imported when processes have started."""

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

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies import DeepSpeedStrategy as LightningDeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from trainer import packages
from trainer.callbacks.scale_monitor import ScaleMonitor
from trainer.checkpoint import zero_files as parts
from trainer.checkpoint.sharded_files import read_manifest
from trainer.compat.callbacks import accumulation_schedule
from trainer.compat.checkpoint_io import files_of
from trainer.compat.engine import LightningEngine
from trainer.compat.fsdp import UNCALLED
from trainer.compat.overrides import overrides
from trainer.engine.gradients import Gradients
from trainer.engine.initialisation import initialise
from trainer.engine.optimizer_calls import needs_closure
from trainer.engine.optimizer_states import SavedDtypes
from trainer.engine.zero import ZeroGradients, ZeroModule, ZeroScaler
from trainer.errors import CheckpointError, ConfigurationError, PrecisionError, UnsupportedError
from trainer.precision.base import Precision
from trainer.precision.dtypes import cast
from trainer.precision.mixed import MixedPrecision
from trainer.precision.scaler import LossScaler

_SCALING = {"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1, "loss_scale": 0}
"""DeepSpeed's words for how it scales losses, and Lightning's defaults."""

_BLOCKS = {"16-mixed": "fp16", "bf16-mixed": "bf16"}
"""What a DeepSpeed config calls a precision."""


class DeepSpeedStrategy(LightningDeepSpeedStrategy):
    """Optimizer states, gradients and parameters spread over the processes by DeepSpeed's ZeRO.

    ``Trainer(strategy="deepspeed")`` is ``Trainer(strategy=DeepSpeedStrategy())``; there are also
    ``"deepspeed_stage_1"``, ``_2``, ``_2_offload``, ``_3`` and ``_3_offload``. On the command line:
    ``trainer=deepspeed trainer.strategy.stage=3``. Lightning's ``DeepSpeedStrategy(...)`` is taken with its settings.

    The backward pass, the step and the loss scale are DeepSpeed's own. ``precision="16-mixed"`` and ``"bf16-mixed"``
    are what DeepSpeed means by them: weights in 16 bits, and float32 ones for the optimizer.

    Accumulation, clipping and batch sizes are the Trainer's, the optimizer is the module's. What a config says of them
    must be the same, or ``"auto"``.

    Args:
        stage: what is spread: 1 for the optimizer's states, 2 for gradients, too, 3 for parameters, too. None for what
            ``config`` says, or 2.
        offload_optimizer: keep the optimizer's states in the CPU's memory, and step there. None for False, or what
            ``config`` says.
        offload_parameters: keep parameters in the CPU's memory; stage 3. None as above.
        config: a DeepSpeed config, as a mapping or the path of a JSON file.
        initial_scale_power: the first loss scale is 2 to this power; None for 16. This and what follows are for
            ``"16-mixed"``.
        loss_scale_window: steps without overflow before the scale doubles; None for 1000.
        hysteresis: overflows before the scale is halved; None for 2.
        min_loss_scale: the least scale; None for 1.
        loss_scale: a scale that never changes; None and 0 for one that does.
        process_group_backend: ``"nccl"``, ``"gloo"``, ...; None for that of the device.
        timeout: how long a process waits for the others in a collective; a timedelta, or seconds.

    Attributes:
        config: DeepSpeed's, without what the Trainer brings.
        zero: the module, while DeepSpeed has it.

    Raises:
        ConfigurationError: settings that contradict each other, or that there are none of.
        UnsupportedError: DeepSpeed is not installed.
    """

    strategy_name = "deepspeed"

    # as under DDP: the module is made whole, and spread afterwards; a file is written by the first process
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
            timeout=timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout,
        )
        self.config: dict[str, Any] = _read(config)
        self._settle(("zero_optimization", "stage"), stage, 2, "stage")
        self._offload("offload_optimizer", offload_optimizer)
        self._offload("offload_param", offload_parameters)
        self.scaling: dict[str, float] = {}
        given = initial_scale_power, loss_scale_window, hysteresis, min_loss_scale, loss_scale
        for name, value in zip(_SCALING, given, strict=True):
            self.scaling[name] = self._settle(("fp16", name), value, _SCALING[name], name)
        self._check()
        self.zero: ZeroModule | None = None
        self._failed = False

    @classmethod
    def of(cls, theirs: LightningDeepSpeedStrategy) -> DeepSpeedStrategy:
        """Ours, with the settings of Lightning's."""
        config = copy.deepcopy(theirs.config) or {}
        if not config.get("zero_optimization"):
            config["zero_optimization"] = {"stage": 0}
        scaling = {} if "fp16" in config else {name: getattr(theirs, name) for name in _SCALING}
        return cls(
            config=config,
            process_group_backend=theirs._process_group_backend,
            timeout=theirs._timeout,
            accelerator=theirs._accelerator,
            parallel_devices=theirs.parallel_devices,
            cluster_environment=theirs.cluster_environment,
            checkpoint_io=theirs._checkpoint_io,
            **scaling,
        )

    def _settle(self, place: tuple[str, str], given: Any, default: Any, argument: str) -> Any:
        """Put a setting into the config, unless it is there. Returns it."""
        block = self.config.setdefault(place[0], {})
        found = block.setdefault(place[1], default if given is None else given)
        if given is not None and found != given:
            raise ConfigurationError(
                f"Got DeepSpeedStrategy({argument}={given!r}) and {place[1]!r}: {found!r} in its config, expected one"
                " of them."
            )
        return found

    def _offload(self, name: str, wanted: bool | None) -> None:
        block = self.config["zero_optimization"]
        device = (block.get(name) or {}).get("device", "none")
        argument = "offload_parameters" if name == "offload_param" else name
        if device not in ("none", "cpu"):
            raise UnsupportedError(f"Got {name!r} to {device!r} for DeepSpeed, expected 'cpu' or 'none'.")
        if wanted is not None and wanted != (device == "cpu") and name in block:
            raise ConfigurationError(
                f"Got DeepSpeedStrategy({argument}={wanted}) and {name!r} to {device!r} in its config, expected one of"
                " them."
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
                " spreads them."
            )
        for name, instead in _REFUSED.items():
            if self.config.get(name):
                raise ConfigurationError(f"Got {name!r} in a DeepSpeed config. {instead}")

    @property
    def stage(self) -> int:
        """Of ZeRO."""
        stage: int = self.config["zero_optimization"]["stage"]
        return stage

    @property
    def sharding(self) -> str:
        """What a run says of it."""
        return f"ZeRO {self.stage} over {self.world_size} processes, by DeepSpeed"

    @property
    def offloads(self) -> bool:
        """Whether the optimizer steps on the CPU."""
        return (self.config["zero_optimization"].get("offload_optimizer") or {}).get("device") == "cpu"

    def complete(self, precision: str, batches: int) -> dict[str, Any]:
        """The config for DeepSpeed: with the precision, and the batches of an accumulation window."""
        config: dict[str, Any] = copy.deepcopy(self.config)
        scaling = config.pop("fp16")
        config.pop("bf16", None)
        if (block := _BLOCKS.get(precision)) is not None:
            config[block] = {**(scaling if block == "fp16" else self.config.get("bf16", {})), "enabled": True}
        config["gradient_accumulation_steps"] = batches
        config["gradient_clipping"] = 0.0  # each step says it
        config.setdefault("train_micro_batch_size_per_gpu", 1)  # for its own figures
        config.pop("train_batch_size", None)
        config.setdefault("zero_allow_untested_optimizer", True)
        config.setdefault("zero_force_ds_cpu_optimizer", False)  # torch's steps on a CPU, too
        config.setdefault("steps_per_print", sys.maxsize)
        return config

    def setup_environment(self) -> None:
        """Join the process group, and have DeepSpeed use it."""
        DDPStrategy.setup_environment(self)
        device = self.root_device.type
        if "deepspeed" not in sys.modules:
            os.environ.setdefault("DS_ACCELERATOR", device)
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        deepspeed.utils.logging.logger.setLevel("ERROR")
        if (found := get_accelerator().device_name()) != device:
            raise ConfigurationError(
                f"Got accelerator={device!r} where DeepSpeed has chosen {found!r}. Set the environment variable"
                f" DS_ACCELERATOR={device}."
            )
        if self.precision_plugin.precision == "16-mixed" and not get_accelerator().is_fp16_supported():
            raise PrecisionError(
                f"Got precision='16-mixed' with strategy='deepspeed' on a {device!r} device that DeepSpeed does not"
                " compute float16 on. Use precision='bf16-mixed' or '32-true'."
            )
        if device == "cpu":  # it would compile for minutes what only speeds up collectives of CPUs
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self._set_node_environment_variables()
        deepspeed.init_distributed(self._get_process_group_backend(), auto_mpi_discovery=False, verbose=False)

    def setup(self, trainer: Any) -> None:
        """Hand the module, and for fitting its optimizer, to DeepSpeed."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        module, precision = self.lightning_module, trainer.engine.precision.name
        self._failed = False
        if fitting:
            self.setup_optimizers(trainer)
            _refuse_module(module, self.optimizers)
        self._syncs = fitting and self._layer_sync is not None
        if self._syncs:
            assert self._layer_sync is not None
            self._layer_sync.apply(module)
        optimizer = self.optimizers[0] if fitting else None
        config = self.complete(precision, _window_of(trainer)[-1])
        self.zero = ZeroModule(module, optimizer, config, self.root_device)
        self.model = self.zero.engine
        self.setup_precision_plugin()

    def on_exception(self, exception: BaseException) -> None:
        """The other processes may not be there to put the module back."""
        self._failed = True

    def teardown(self) -> None:
        """Put the module back. After a failure it stays with DeepSpeed, until another run."""
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        if self.zero is not None and not self._failed:
            zero, self.zero, self.model = self.zero, None, self.lightning_module
            zero.put_back()
            self.barrier()  # nobody leaves while another one still gathers
            if self._syncs:
                assert self._layer_sync is not None
                self._layer_sync.revert(zero.module)
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


_REFUSED = {
    "optimizer": "Make the optimizer in configure_optimizers, and leave it out of the config.",
    "scheduler": "Make the schedule in configure_optimizers, and leave it out of the config.",
    "torch_autocast": "Leave it out: with precision='16-mixed' and 'bf16-mixed' DeepSpeed keeps weights in 16 bits.",
    "amp": "Set Trainer(precision='16-mixed') instead.",
}
"""What would have a second source, and what to do instead."""


def _read(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """A config of one's own, without what is ``"auto"``."""
    if isinstance(config, (str, Path)):
        path = Path(config).expanduser()
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"The DeepSpeed config {path} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise ConfigurationError(f"The DeepSpeed config {path} is no JSON: {error}.") from error
    if not isinstance(config, (Mapping, type(None))):
        raise ConfigurationError(
            f"Got {config!r} as a DeepSpeed config, expected a mapping, or the path of a JSON file."
        )
    plain: dict[str, Any] = _without_auto(config or {})
    return plain


def _without_auto(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _without_auto(one) for name, one in value.items() if one != "auto"}
    return [_without_auto(one) for one in value] if isinstance(value, (list, tuple)) else value


def _window_of(trainer: Any) -> list[int]:
    """The batches of accumulation windows, over the epochs: the different numbers, the largest last."""
    return sorted(set(accumulation_schedule(trainer).values()))


def _refuse_module(module: LightningModule, optimizers: list[Optimizer]) -> None:
    """Refuse what DeepSpeed does by itself in a module.

    Raises:
        UnsupportedError: with what to do instead.
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
            f"Got {problem} with strategy='deepspeed', which does the backward pass, clipping and the step by itself,"
            " for one optimizer of torch's. Use strategy='ddp' or 'fsdp'."
        )


class ZeroPrecision(Precision):
    """What DeepSpeed makes of a precision.

    Args:
        given: the Trainer's.
        strategy: DeepSpeed's settings.

    Raises:
        PrecisionError: one that DeepSpeed has not.
    """

    def __init__(self, given: Precision, strategy: DeepSpeedStrategy) -> None:
        self._given = given
        self._strategy = strategy
        self.name = given.name

    def for_device(self, device: torch.device) -> Precision:
        """This one, if the Trainer's can be."""
        given = self._given.for_device(device)
        if given.name not in ("32-true", *_BLOCKS) or (given.name != "32-true" and type(given) is not MixedPrecision):
            raise PrecisionError(
                f"Got precision={given.name!r} with strategy='deepspeed', expected '32-true', '16-mixed' or"
                " 'bf16-mixed', in which DeepSpeed has float32 weights for the optimizer."
            )
        if isinstance(given, MixedPrecision):
            usual = vars(MixedPrecision(given.dtype))
            if changed := [name for name, value in vars(given).items() if value != usual[name]]:
                raise PrecisionError(
                    f"Got MixedPrecision({', '.join(f'{name}={getattr(given, name)!r}' for name in changed)}) with"
                    " strategy='deepspeed', which scales by itself and knows no autocast. Use precision="
                    f"{given.name!r}, and DeepSpeedStrategy(initial_scale_power=..., loss_scale_window=...)."
                )
        for name, block in _BLOCKS.items():
            if self._strategy.config.get(block, {}).get("enabled") and name != given.name:
                raise ConfigurationError(
                    f"Got precision={given.name!r} and {block!r} in the DeepSpeed config, which is {name!r}. Set"
                    f" Trainer(precision={name!r}), or leave it out of the config."
                )
        given.check(device)
        self.name, self.dtype, self.scales_loss = given.name, given.dtype, given.scales_loss
        return self

    def build_scaler(self, device: torch.device) -> LossScaler:
        """DeepSpeed's."""
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
        """Floating-point tensors in the dtype of the weights."""
        return cast(batch, self.dtype) if self.is_half else batch


class DeepSpeedEngine(LightningEngine):
    """Lightning's launcher and collectives; gradients and steps of DeepSpeed's."""

    strategy: DeepSpeedStrategy
    shows_gradients = False
    trains_unevenly = False
    keeps_optimizers = True
    kind = "deepspeed"
    uncalled = {**UNCALLED, "backward": "training_step", "optimizer_step": "on_before_zero_grad"}
    accumulates = True

    def __init__(self, trainer: Any, precision: Precision, plugins: Any = None, **options: Any) -> None:
        super().__init__(trainer, ZeroPrecision(precision, options["strategy"]), plugins, **options)
        self.evaluates_unevenly = self.strategy.stage != 3
        self._folder: Path | None = None  # a checkpoint that DeepSpeed is going to read

    def build_gradients(self, scaler: LossScaler) -> Gradients:
        """DeepSpeed's."""
        assert isinstance(scaler, ZeroScaler)
        trainer = self._trainer
        return ZeroGradients(
            scaler, self._zero, self.strategy.stage, lambda: self.world_size, lambda: trainer.loop.window.reset()
        )

    def _zero(self) -> ZeroModule:
        assert self.strategy.zero is not None
        return self.strategy.zero

    def refuse(self, callbacks: Iterable[Any]) -> None:
        """Refuse callbacks that look into a backward pass, and a config that contradicts the Trainer."""
        callbacks = list(callbacks)
        super().refuse(callbacks)
        for callback in callbacks:
            averages = isinstance(callback, (WeightAveraging, StochasticWeightAveraging))
            if averages and (self.strategy.stage == 3 or self.precision.is_half):
                raise UnsupportedError(
                    f"Got {type(callback).__name__} with strategy='deepspeed'. It averages whole weights in float32."
                    " Use stage 1 or 2 with precision='32-true', or FSDP."
                )
        self._refuse_config()
        files = files_of(self.strategy)
        if files is not None and files.sharded and files.asynchronous:
            raise UnsupportedError(
                "Got CheckpointFiles(sharded=True, asynchronous=True) with strategy='deepspeed', which writes its files"
                " at once. Leave one of them out."
            )
        if any(isinstance(callback, ScaleMonitor) for callback in callbacks):
            rank_zero_info("ScaleMonitor: no shares of underflow with strategy='deepspeed', which keeps the gradients.")

    def _refuse_config(self) -> None:
        """Refuse a DeepSpeed config that says something else than the Trainer."""
        trainer, config = self._trainer, self.strategy.config
        windows = _window_of(trainer)
        clip = trainer.gradient_clip_val or 0.0
        for key, name, ours in (
            ("gradient_accumulation_steps", "accumulate_grad_batches", windows[0] if len(windows) == 1 else windows),
            ("gradient_clipping", "gradient_clip_val", clip),
        ):
            if key in config and config[key] != ours:
                raise ConfigurationError(
                    f"Got Trainer({name}={ours!r}) and {key!r}: {config[key]!r} in the DeepSpeed config, expected one"
                    f" number. Set Trainer({name}={config[key]!r}), or leave it out of the config."
                )

    def setup_environment(self) -> None:
        """As usual; a module that an earlier run has left with DeepSpeed is put back."""
        super().setup_environment()
        if (zero := self.strategy.zero) is not None:
            self.strategy.zero = None
            zero.put_back()

    def convert_module(self) -> None:
        """As usual; a module from the meta device is filled in the CPU's memory, of which DeepSpeed takes it."""
        super().convert_module()
        initialise(self.model, torch.device("cpu"))

    def setup(self, *, fitting: bool) -> None:
        """As usual."""
        super().setup(fitting=fitting)
        if fitting:
            scaler = self.gradients.scaler
            assert isinstance(scaler, ZeroScaler)
            scaler.follow(lambda: self._zero().loss_scaler)

    def teardown(self) -> None:
        """As usual."""
        scaler = self.gradients.scaler
        assert isinstance(scaler, ZeroScaler)
        if self.strategy.zero is not None:
            scaler.follow(None)
        super().teardown()

    def follow_trained_parameters(self) -> None:
        """Refuse others than as the fit began.

        Raises:
            UnsupportedError: with what to do instead.
        """
        if self._trained != self._trained_now():
            raise UnsupportedError(
                "Other parameters are trained than when the fit began, with strategy='deepspeed', which keeps those."
                " Freeze or thaw them between two fits."
            )

    @property
    def forward_exchanges(self) -> bool:
        """Where parameters are spread, each does. But all processes have as many (``evaluates_unevenly``)."""
        return False

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[object]:
        """Tell DeepSpeed whether this batch is the window's last."""
        self._zero().engine.set_gradient_accumulation_boundary(enabled)
        return nullcontext()

    def step_function(self, name: str) -> Callable[..., Any]:
        """As usual; the batch sizes are known now, and are those of the config, if it has any."""
        if name == "training_step":
            self._refuse_batch_sizes()
        return super().step_function(name)

    def _refuse_batch_sizes(self) -> None:
        trainer, config = self._trainer, self.strategy.config
        loaders: Any = trainer.loop.batches.loaders
        sizes = [] if loaders is None else [getattr(one, "batch_size", None) for one in loaders.combined.flattened]
        if len(sizes) != 1 or (size := sizes[0]) is None:
            return
        total = size * self.world_size * _window_of(trainer)[-1]
        for key, ours, what in (
            ("train_micro_batch_size_per_gpu", size, "the dataloader's batch size"),
            ("train_batch_size", total, "batch size times processes times accumulate_grad_batches"),
        ):
            if key in config and config[key] != ours:
                raise ConfigurationError(
                    f"Got {ours} as {what} and {key!r}: {config[key]!r} in the DeepSpeed config, expected one number."
                    " Change one of them, or leave it out of the config."
                )

    def replay_step(self, name: str) -> Callable[..., Any]:
        """Through the wrapper: weights are gathered there."""
        return partial(self._through_wrapper, name)

    def module_state(self) -> dict[str, Any]:
        """The module's state dict, whole, on rank 0; {} where DeepSpeed writes it."""
        if self.strategy.zero is None:  # between runs
            return super().module_state()
        return {} if self._writes_parts else self._zero().module_state(self.global_rank == 0)

    def load_module_state(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load ``checkpoint["state_dict"]``, or have DeepSpeed read its files, those of the optimizer, too."""
        folder, self._folder = self._folder, None
        if folder is None:
            self._zero().load_module_state(checkpoint["state_dict"], strict)
        else:
            parts.read(self._zero().engine, folder, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state dict, whole, on rank 0; its settings alone where DeepSpeed writes the rest."""
        if self._writes_parts:
            return {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
        if self.strategy.zero is None:
            raise CheckpointError(
                "The states of the optimizer went with DeepSpeed when the run ended. Write such a checkpoint in a run,"
                " by a ModelCheckpoint(save_last=True); or afterwards the weights alone:"
                " trainer.save_checkpoint(path, weights_only=True)."
            )
        return self._zero().optimizer_state(self.global_rank == 0)

    @property
    def _writes_parts(self) -> bool:
        return self.saves_shards and self.strategy.zero is not None and bool(self.optimizers)

    @property
    def _topology(self) -> dict[str, Any]:
        return {"stage": self.strategy.stage, "processes": self.world_size, "precision": self.precision.name}

    def save_shards(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Write a folder: DeepSpeed its files, we ours."""
        if not self._writes_parts:
            super().save_shards(checkpoint, path)
            return
        write = partial(parts.write, self._zero().engine)
        self._files.save_shards(checkpoint, path, self._group_of_saves(), write, {parts.FACT: self._topology})

    def reads_parts(self, folder: Path) -> bool:
        """Whether DeepSpeed can read it: as many processes have written it, at the same stage and precision."""
        is_same = read_manifest(folder).facts.get(parts.FACT) == self._topology
        self._folder = folder if is_same and self._trainer.state.fn is TrainerFn.FITTING else None
        return self._folder is not None

    def load_optimizer_states(self, checkpoint: Mapping[str, Any], saved: SavedDtypes) -> None:
        """Load ``checkpoint["optimizer_states"]`` with their saved dtypes."""
        for state in checkpoint["optimizer_states"]:
            self._zero().load_optimizer_state(state, saved)
